// Products of many rows with a plain matrix, in the bits of rows.cu: 128 rows a block pass through shared
// memory, weights go from the cache straight to the warps that own their outputs.
//
// Macros, besides TYPE: STAGES of the ring, at least 3; OUT_WARPS 4 or 6 of a block along outputs.
#include "common.cuh"

#define ROWS 128
#define THREADS (64 * OUT_WARPS)
#define OUT_TILES (TYPE == TYPE_BF16 && OUT_WARPS == 4 ? 2 : 1)  // of a warp, by 64 rows; two warps along rows
#define ROW_TILES 8
#define STAGE_GROUPS 2
#define AHEAD 2  // groups of weights under way
#define STAGE_BYTES (ROWS * STAGE_GROUPS * GROUP * 2)

__device__ __forceinline__ u32 smem_address(const void* p) {
  u32 a;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
  return a;
}
__device__ __forceinline__ void copy_async(u32 to, const void* from, int bytes) {  // the rest of 16 is 0
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
// Eight runs of 16 bytes a row and stage; every other row's halves trade places, so that a warp's reads
// of two rows meet all banks.
__device__ __forceinline__ u32 place(int row, int run) { return (u32)(row * 8 + (run ^ ((row & 1) << 2))) * 16; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) plain_tiles(
    const uint4* weight, const u16* x, void* y,
    int rows, int inputs, int outputs, int pitch, int wide) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int tid = threadIdx.x, warp = tid >> 5, g = (tid & 31) >> 2, q = tid & 3;
  const int groups = (inputs + GROUP - 1) / GROUP, parts = (groups + STAGE_GROUPS - 1) / STAGE_GROUPS;
  const int row0 = blockIdx.x * ROWS, my_row = (warp & 1) * 64, tiles = (outputs + 15) / 16;
  const int tile0 = (blockIdx.y * OUT_WARPS + (warp >> 1)) * OUT_TILES;
  const uint4* mine[OUT_TILES];
#pragma unroll
  for (int o = 0; o < OUT_TILES; o++) mine[o] = weight + (u64)min(tile0 + o, tiles - 1) * groups * (LOADS * 32);
  const u32 shared_at = smem_address(shared);
  let_consumer_start();
  Stored next[AHEAD][OUT_TILES];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
#pragma unroll
    for (int o = 0; o < OUT_TILES; o++) next[i][o] = load_stored(mine[o], min(i, groups - 1));
  wait_for_producer();
  auto ask = [&](int part) {
    if (part < parts)
#pragma unroll
      for (int i = tid; i < ROWS * 8; i += THREADS) {
        const int run = i % 8, row = i / 8;
        const int k = part * STAGE_GROUPS * GROUP + 8 * run;
        const u16* from = x + (u64)min(row0 + row, rows - 1) * pitch + min(k, inputs - 8);
        copy_async(shared_at + part % STAGES * STAGE_BYTES + place(row, run), from, k < inputs ? 16 : 0);
      }
    copies_end();
  };
  for (int i = 0; i < STAGES - 1; i++) ask(i);
  float total[OUT_TILES][ROW_TILES][4];
  Sums sums[OUT_TILES][ROW_TILES];
#pragma unroll 1
  for (int part = 0; part < parts; part++) {
    copies_wait<STAGES - 2>();
    __syncthreads();  // the part is there for all, and the stage before it is free
    ask(part + STAGES - 1);
    if (part % (CHUNK_GROUPS / STAGE_GROUPS) == 0)
#pragma unroll
      for (int o = 0; o < OUT_TILES; o++)
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) clear(sums[o][r]);
    const unsigned char* stage = shared + part % STAGES * STAGE_BYTES;
#pragma unroll
    for (int i = 0; i < STAGE_GROUPS; i++) {
      const int group = part * STAGE_GROUPS + i;
      Planes planes[OUT_TILES];
#pragma unroll
      for (int o = 0; o < OUT_TILES; o++) {
        to_planes(planes[o], next[i % AHEAD][o]);
        next[i % AHEAD][o] = load_near(mine[o], min(group + AHEAD, groups - 1));
      }
      if (group < groups)
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
          const uint4 v = *(const uint4*)(stage + place(my_row + 8 * r + g, 4 * i + q));
#pragma unroll
          for (int o = 0; o < OUT_TILES; o++) multiply(sums[o][r], planes[o], v);
        }
    }
    if (part % (CHUNK_GROUPS / STAGE_GROUPS) == CHUNK_GROUPS / STAGE_GROUPS - 1 || part == parts - 1) {
      const bool first = part < CHUNK_GROUPS / STAGE_GROUPS;
#pragma unroll
      for (int o = 0; o < OUT_TILES; o++)
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            total[o][r][i] = first ? chunk_sum(sums[o][r], i) : total[o][r][i] + chunk_sum(sums[o][r], i);
    }
  }
#pragma unroll
  for (int o = 0; o < OUT_TILES; o++)
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = row0 + my_row + 8 * r + 2 * q + (i & 1), output = (tile0 + o) * 16 + g + (i & 2) * 4;
        if (row < rows && output < outputs) put(y, (u64)row * outputs + output, total[o][r][i], wide);
      }
}
