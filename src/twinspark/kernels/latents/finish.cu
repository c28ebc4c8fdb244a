// What attention takes of its input, from the chunk sums of a joined product (exl3/joined.cu): query latents and
// window rows, finished, normed and stored by the block that added their sums up, and fp32 results as they are.
//
// A row's values are rounded to bf16 before its norm and go through shared memory in the order of the kernels
// whose code is used here (plain/norm.cu, cache_rows/rows.cu): the bits are theirs. No pointer is __restrict__:
// what earlier kernels write must not be read before the wait.
//
// Macros: those of cache_rows/row.cuh.
#include "../exl3/common.cuh"
#include "../cuda/rehearse.cuh"
namespace plain {
#include "../plain/norm.cuh"
}
namespace cached {
#include "../cache_rows/row.cuh"
}

// More than are launched: with few registers a thread, blocks of the next product still find room beside these.
#define MOST_THREADS 640
#define SUMS_AHEAD 10  // chunk sums of 5,120 inputs

// Blocks x: 0 query latents [M, rank], 1 window rows [M, HEAD] to `kv` (unless null) and to row targets[m] of the
// table (unless negative or null), 2 and 3 fp32 results. work: [chunks][M][columns] of each, one after another.
// grid (parts, M); dynamic shared memory for the wider of the first two rows in bf16 and q_norm; at least NORM_THREADS
// threads. Weights come from far: all are read before the wait.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) latents_finish(
    const float* work, int M, int chunks, int eps_bits,
    const u16* q_svh, const float* q_norm, u16* q, int rank,
    const u16* kv_svh, const void* kv_norm, int kv_norm_type, u16* kv, const float* cos, const float* sin,
    const int* targets, cached::u8* values, cached::u8* scales, int format, int page_rows, int value_step, int scale_step,
    const u16* svh2, float* y2, int columns2, const u16* svh3, float* y3, int columns3) {
  extern __shared__ __align__(16) u16 held[];
  __shared__ float sums[NORM_THREADS / 32];
  let_consumer_start();
  const int part = blockIdx.x, row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int columns = part == 0 ? rank : part == 1 ? HEAD : part == 2 ? columns2 : columns3;
  const u16* svh = part == 0 ? q_svh : part == 1 ? kv_svh : part == 2 ? svh2 : svh3;
  const float eps = __int_as_float(eps_bits);
  const bool is_row = part == 1 && warp == 0;  // the warp that norms, rotates and stores a window row
  cached::Row v, w;
  if (is_row) cached::load_weights(kv_norm, kv_norm_type, w);
  float* norm = (float*)(held + max(rank, HEAD));
  if (part == 0)
    for (int k = 4 * threadIdx.x; k < rank; k += 4 * blockDim.x) *(float4*)(norm + k) = *(const float4*)(q_norm + k);
  uint2 first_scale = make_uint2(0, 0);
  if (4 * threadIdx.x < columns) first_scale = *(const uint2*)(svh + 4 * threadIdx.x);
  const u64 before = part == 0 ? 0 : rank + (part > 1 ? HEAD : 0) + (part > 2 ? columns2 : 0);
  const float* from = work + (u64)chunks * M * before + (u64)row * columns;
#pragma unroll 1
  for (int dry = rehearse(M); dry >= 0; dry--) {
    if (!dry) wait_for_producer();
    cached::Angles angles = {};
    int target = -1;
    if (is_row && !dry) {
      angles = cached::load_angles(cos + (u64)row * PAIRS, sin + (u64)row * PAIRS);
      if (targets) target = __ldcg(targets + row);
    }
    for (int column = 4 * threadIdx.x; column < columns; column += 4 * blockDim.x) {
      const uint2 scale = column < 4 * blockDim.x ? first_scale : *(const uint2*)(svh + column);
      float f[4];
      sum_chunks<SUMS_AHEAD>(from + column, (u64)M * columns, dry ? 0 : chunks, f);
      hadamard(f);
      scale_four(f, scale);
      if (part < 2) *(uint2*)(held + column) = make_uint2(to_bf162(f[0], f[1]), to_bf162(f[2], f[3]));
      else if (!dry) *(float4*)((part == 2 ? y2 : y3) + (u64)row * columns + column) = make_float4(f[0], f[1], f[2], f[3]);
    }
    if (part > 1) continue;
    __syncthreads();
    if (part == 0) plain::norm_row(held, 0, norm, q, (u64)row * rank, rank, 0, eps, sums, !dry);
    else if (is_row && (dry || target >= 0 || kv)) {
#pragma unroll
      for (int j = 0; j < ROW_PARTS; j++) {
        const uint2 pairs = *(const uint2*)(held + 128 * j + 4 * lane);
        v[j][0] = cached::low_float(pairs.x); v[j][1] = cached::high_float(pairs.x);
        v[j][2] = cached::low_float(pairs.y); v[j][3] = cached::high_float(pairs.y);
      }
      cached::norm_row(v, w, eps);
      cached::rotate_row(v, angles);
      cached::Tile tiles[ROW_PARTS];
#pragma unroll
      for (int j = 0; j < ROW_PARTS; j++) tiles[j] = cached::round_four(v[j], cached::WINDOW);
      if (kv && !dry) cached::store_bf16(kv + (u64)row * HEAD, v);
      if (target >= 0) cached::store_row(v, tiles, {values, scales, format, page_rows, value_step, scale_step}, target);
    }
    __syncthreads();
  }
}
