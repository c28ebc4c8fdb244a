// Mixing weights of few rows, which nobody waits for before the next boundary: made beside the sublayer that
// comes next. A block holds the mixing weights of 128 columns and sums for 8 rows; the last of them to arrive turns
// the sums into weights.
//
// Macros: those of common.cuh.
#include "common.cuh"

#define THREADS 128

// grid (HALVES, tiles of 8 rows). work [tiles][HALVES][SUMS][TILE]; counters [tiles] are 0 before and after. Only
// weights are __restrict__: the compiler moves loads through such pointers to before the wait.
extern "C" __global__ void __launch_bounds__(THREADS, 3) boundary_mix(
    const u16* x, const float* __restrict__ fn, const float* __restrict__ scale_in, const float* __restrict__ base,
    const u8* marks, float* pre, float* post, float* comb, float* work, u32* counters,
    int rows, int iters, int eps, int norm_eps_bits) {
  __shared__ __align__(16) float sums[4][SUMS * TILE];
  __shared__ float values[VALUES * TILE], powers[16 * TILE];
  __shared__ float shift[VALUES], scale[3];
  __shared__ u32 arrived;
  const int tid = threadIdx.x, warp = tid >> 5, g = (tid & 31) >> 2, q = tid & 3;
  const int half = blockIdx.x, tile = blockIdx.y, first = tile * TILE, row = first + g;
  const float norm_eps = __int_as_float(norm_eps_bits);
  let_consumer_start();
  Lanes lanes;
  load_lanes(lanes, fn, half * 4 + warp);
  if (tid < VALUES) shift[tid] = base[tid];
  if (tid < 3) scale[tid] = scale_in[tid];
  __syncthreads();  // the compiler moves no load past this
  wait_for_producer();
  Eight s[4] = {};
  u8 coarse[2] = {0, 0};
  if (row < rows)
#pragma unroll
    for (int j = 0; j < 4; j++) s[j] = load_eight(x + ((u64)row * 4 + j) * HIDDEN + half * 128 + warp * 32 + q * 8);
  if (marks)
    for (int n = 0; n < 2; n++) coarse[n] = first + 2 * q + n < rows && marks[first + 2 * q + n];
  Products products[1];
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      HalfPlanes f;
      get_half(f, lanes, j, h);
      multiply<1>(products, f, {s[j].w[2 * h]}, {s[j].w[2 * h + 1]});
    }
  put_sums(sums[warp], products[0], (squares(s[0]) + squares(s[1])) + (squares(s[2]) + squares(s[3])), coarse);
  __syncthreads();
  float* mine = work + (u64)(tile * HALVES + half) * (SUMS * TILE);
  for (int i = tid; i < SUMS * TILE; i += THREADS)
    mine[i] = ((sums[0][i] + sums[1][i]) + sums[2][i]) + sums[3][i];
  __syncthreads();
  if (tid == 0) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counters + tile) : "memory");
    if (before == HALVES - 1) counters[tile] = 0;  // for the next launch
    arrived = before;
  }
  __syncthreads();
  if (arrived != HALVES - 1) return;
  const float* all = work + (u64)tile * HALVES * (SUMS * TILE);
  if (2 * tid < SUMS * TILE) {  // two sums a thread, so that all loads are under way at once
    float2 halves[HALVES];
    float a[32] = {}, b[32] = {};
#pragma unroll
    for (int h = 0; h < HALVES; h++) halves[h] = __ldcg((const float2*)(all + h * (SUMS * TILE)) + tid);
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      const bool two = 2 * p + 1 < HALVES;
      a[p] = two ? halves[2 * p].x + halves[two ? 2 * p + 1 : 0].x : halves[2 * p].x;
      b[p] = two ? halves[2 * p].y + halves[two ? 2 * p + 1 : 0].y : halves[2 * p].y;
    }
    sums[0][2 * tid] = finish_sum(pairs_sum(a), 2 * tid, norm_eps);
    sums[0][2 * tid + 1] = finish_sum(pairs_sum(b), 2 * tid + 1, norm_eps);
  }
  __syncthreads();
  const Mixer mixer = {scale, shift, pre, post, comb, iters, __int_as_float(eps), norm_eps};
  finish_mix<THREADS>(sums[0], values, powers, mixer, first, rows, tid);
}
