// Rows on their way into the caches: pooling, and what row.cuh has.
//
// Macros: those of row.cuh.
#include "row.cuh"

#define WARPS 4

// Weights are nobody's output, so kernels read them before the kernel ahead has ended; all that a row needs is
// asked for at once.

// One row a warp: norm (unless null), rotation, rounding by `rule`, then to `out` [T][HEAD] (unless null)
// and to the row `targets[t]` of the table, if that is not negative. grid T / WARPS up.
extern "C" __global__ void __launch_bounds__(32 * WARPS) publish_rows(
    const u16* __restrict__ x, const void* __restrict__ norm, const float* __restrict__ cos,
    const float* __restrict__ sin, const int* __restrict__ targets, u8* __restrict__ values,
    u8* __restrict__ scales, int format, int page_rows, int value_step, int scale_step,
    u16* __restrict__ out, int T, int rule, int norm_type, int eps_bits) {
  const int row = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  let_consumer_start();
  Row v, w;
  if (norm) load_weights(norm, norm_type, w);
  wait_for_producer();
  if (row >= T) return;
  load_bf16(x + (u64)row * HEAD, v);
  const Angles angles = load_angles(cos + (u64)row * PAIRS, sin + (u64)row * PAIRS);
  const int target = targets ? __ldcg(targets + row) : -1;
  if (target < 0 && !out) return;
  if (norm) norm_row(v, w, __int_as_float(eps_bits));
  rotate_row(v, angles);
  Tile tiles[ROW_PARTS];
#pragma unroll
  for (int j = 0; j < ROW_PARTS; j++) tiles[j] = round_four(v[j], rule);
  if (out) store_bf16(out + (u64)row * HEAD, v);
  if (target < 0) return;
  store_row(v, tiles, {values, scales, format, page_rows, value_step, scale_step}, target);
}

// One row a warp, parts of the work by `what`. 1: latent [T][HEAD] of the rows that complete an entry
// (target not negative), zeros for the others: the row itself (no gates), or pooled with its pair's first
// half, which is the call's row before it or ring row `previous`; rounded, normed. 2: rows of kv and gate
// to the ring [rows][2 HEAD], unless a later row of the call goes to the same place. grid T / WARPS up.
extern "C" __global__ void __launch_bounds__(32 * WARPS) pool_rows(
    const float* __restrict__ kv, const float* __restrict__ gate, float* ring,
    const int* __restrict__ ring_to, const int* __restrict__ previous, const int* __restrict__ targets,
    const void* __restrict__ norm, u16* __restrict__ latent, int T, int ring_rows, int what,
    int norm_type, int eps_bits) {
  const int row = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  let_consumer_start();
  Row v, g, w, first, first_gate;
  load_weights(norm, norm_type, w);
  wait_for_producer();
  if (row >= T) return;
  const u64 at = (u64)row * HEAD;
  load_fp32(kv + at, v);
  if (gate) load_fp32(gate + at, g);
  const bool completes = __ldcg(targets + row) >= 0;
  if (gate && (what & 1) && completes) {
    const int from = __ldcg(previous + row);
    const bool in_call = row > 0 && __ldcg(ring_to + row - 1) == from;
    load_fp32(in_call ? kv + at - HEAD : ring + (u64)from * 2 * HEAD, first);
    load_fp32(in_call ? gate + at - HEAD : ring + (u64)from * 2 * HEAD + HEAD, first_gate);
  }
  if (what & 2) {
    const int to = ring_to[row];
    if (to >= 0 && (row + ring_rows >= T || ring_to[row + ring_rows] != to)) {
      float4* line = (float4*)(ring + (u64)to * 2 * HEAD) + lane;
#pragma unroll
      for (int j = 0; j < ROW_PARTS; j++) {
        line[32 * j] = make_float4(v[j][0], v[j][1], v[j][2], v[j][3]);
        line[32 * j + HEAD / 4] = make_float4(g[j][0], g[j][1], g[j][2], g[j][3]);
      }
    }
  }
  if (!(what & 1)) return;
  if (!completes) {
#pragma unroll
    for (int j = 0; j < ROW_PARTS; j++) ((uint2*)(latent + at + 128 * j))[lane] = make_uint2(0, 0);
    return;
  }
  if (gate) {
#pragma unroll
    for (int j = 0; j < ROW_PARTS; j++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float peak = fmaxf(first_gate[j][k], g[j][k]);
        const float a = expf(first_gate[j][k] - peak), b = expf(g[j][k] - peak), total = a + b;
        v[j][k] = __fdiv_rn(a, total) * first[j][k] + __fdiv_rn(b, total) * v[j][k];
      }
  }
#pragma unroll
  for (int j = 0; j < ROW_PARTS; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) v[j][k] = round_bf16(v[j][k]);
  norm_row(v, w, __int_as_float(eps_bits));
  store_bf16(latent + at, v);
}
