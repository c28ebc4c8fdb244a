// Weights of an EXL3 matrix as fp16, in the order that slab.cu multiplies them.
//
// Macros: those of common.cuh.
#include "common.cuh"

#define WARPS 8
#define COLUMNS 128

// Weights of columns from `first` on to [columns / 128][K / 8][128][8] fp16; of all matrices of a `table`, see rows.cu,
// if there is one. grid (columns / 128, K / 128, matrices).
extern "C" __global__ void __launch_bounds__(32 * WARPS) exl3_unpack(
    const u32* __restrict__ trellis, u32* __restrict__ slab, int K, int N, int first,
    const u64* __restrict__ table) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tile0 = blockIdx.y * PART;
  const Places at = places(lane);
  if (table) {
    trellis = (const u32*)table[3 * blockIdx.z];
    slab += (u64)blockIdx.z * gridDim.x * (K / 8) * COLUMNS * 4;
  }
  const u64 pitch = (u64)(N / 16) * TILE_WORDS;
  const u32* from = trellis + tile0 * pitch + (u64)(first / 16 + blockIdx.x * WARPS + warp) * TILE_WORDS;
  Words words[PART];
#pragma unroll
  for (int t = 0; t < PART; t++) load_words(words[t], from + t * pitch, at);
  let_consumer_start();
  wait_for_producer();  // the slab may still be read
  u32* to = slab + ((u64)blockIdx.x * (K / 8) + tile0 * 2) * COLUMNS * 4 + warp * 64 + lane;
#pragma unroll
  for (int t = 0; t < PART; t++, to += 2 * COLUMNS * 4) {
    u32 w[4];
    decode(words[t], at, w);
    to[0] = w[0]; to[32] = w[1]; to[COLUMNS * 4] = w[2]; to[COLUMNS * 4 + 32] = w[3];
  }
}
