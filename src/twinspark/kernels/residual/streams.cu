// The residual boundary of few rows without mixing weights: a block a row, a thread 8 columns. New streams,
// collapse and norm in the bits of rows.cu, with little code, as it runs once a launch from a cold cache.
//
// Macros: those of common.cuh.
#include "common.cuh"
#include "../cuda/rehearse.cuh"

#define THREADS ((HIDDEN / 8 + 31) / 32 * 32)

// One shard's 8 outputs from `column` of a row on, rounded to bf16 as they travel.
__device__ __forceinline__ Eight load_shard(const void* y, int wide, u64 at) {
  return wide ? load_narrowed((const float*)y + at) : load_eight((const u16*)y + at);
}

// y null: no sublayer has run; pre_in null: stream 0. y_step: values between shards of y. grid (rows). No pointer
// but weights is __restrict__.
extern "C" __global__ void __launch_bounds__(THREADS, 1) boundary_streams(
    const u16* x, const void* y, const float* pre_in, const float* post_in, const float* comb_in,
    const float* __restrict__ norm, u16* streams_out, u16* x_out, u16* collapsed_out, u16* tap_out,
    int y_wide, int shards, int y_step, int tap_pitch, int norm_eps) {
  __shared__ __align__(16) float groups[HIDDEN / 32];
  const int tid = threadIdx.x, lane = tid & 31, row = blockIdx.x;
  const bool there = 8 * tid < HIDDEN;
  const int column = there ? 8 * tid : HIDDEN - 8;
  float4 w[2] = {};
  let_consumer_start();
  if (x_out) {
    w[0] = load_early(norm + column);
    w[1] = load_early(norm + column + 4);
  }
#pragma unroll 1
  for (int dry = rehearse(gridDim.x); dry >= 0; dry--) {
    if (!dry) wait_for_producer();
    const bool stores = there && !dry;
    Coefs c = {{1.f, 0.f, 0.f, 0.f}};
    Eight s[4] = {}, first = {}, second = {};
    if (!dry) {
      const u64 at = (u64)row * HIDDEN + column;
#pragma unroll
      for (int j = 0; j < 4; j++) s[j] = load_eight(x + ((u64)row * 4 + j) * HIDDEN + column);
      if (y) {
        first = load_shard(y, y_wide, at);
        if (shards > 1) second = load_shard(y, y_wide, at + y_step);
        load_four(c.post, post_in + (u64)row * 4);
#pragma unroll
        for (int i = 0; i < 4; i++) load_four(c.comb + 4 * i, comb_in + (u64)row * 16 + 4 * i);
      }
      if (pre_in) load_four(c.pre, pre_in + (u64)row * 4);
    }
    if (y) {
      float sum[8];
      add_shard(sum, first, true);
      if (shards > 1) add_shard(sum, second, false);
#pragma unroll 1
      for (int shard = 2; shard < shards && !dry; shard++)
        add_shard(sum, load_shard(y, y_wide, (u64)shard * y_step + (u64)row * HIDDEN + column), false);
      expand(s, sum, c);
    }
    if (streams_out && stores)
#pragma unroll
      for (int j = 0; j < 4; j++) store_eight(streams_out + ((u64)row * 4 + j) * HIDDEN + column, s[j]);
    if (tap_out && stores) store_eight(tap_out + (u64)row * tap_pitch + column, mean_of_streams(s));
    if (!x_out && !collapsed_out) continue;
    const Eight kept = collapse(s, c.pre);
    if (collapsed_out && stores) store_eight(collapsed_out + (u64)row * HIDDEN + column, kept);
    if (!x_out) continue;
    const float group = group_sum(squares(kept));
    if (there && (lane & 3) == 0) groups[column / 32] = group;
    __syncthreads();
    const float inverse = inverse_rms(sum_of_groups(groups), HIDDEN, __int_as_float(norm_eps));
    const float weights[8] = {w[0].x, w[0].y, w[0].z, w[0].w, w[1].x, w[1].y, w[1].z, w[1].w};
    if (stores) store_eight(x_out + (u64)row * HIDDEN + column, normed(kept, inverse, weights));
    __syncthreads();
  }
}
