// The residual boundary for few rows, one launch. Blocks of the first kind hold mixing weights of 128
// columns and sum for 8 rows; the last of them to arrive turns the sums into weights. Blocks of the
// second kind own a whole row: new streams, collapse, norm.
//
// Macros: those of common.cuh.
#include "common.cuh"

#define THREADS 128
#define VECTORS ((HIDDEN / 8 + THREADS - 1) / THREADS)

struct Entering {
  const u16* x; const void* y; const float *pre, *post, *comb; int y_wide, shards, rows;
};
__device__ __forceinline__ void load_coefs(Coefs& c, const Entering& in, int row) {
  c.pre[0] = 1.f; c.pre[1] = c.pre[2] = c.pre[3] = 0.f;
  if (in.pre) load_four(c.pre, in.pre + (u64)row * 4);
  if (in.y) {
    load_four(c.post, in.post + (u64)row * 4);
#pragma unroll
    for (int i = 0; i < 4; i++) load_four(c.comb + 4 * i, in.comb + (u64)row * 16 + 4 * i);
  }
}
// NUM runs of 8 columns, THREADS runs apart; all are asked for before the first is used.
template <int NUM> __device__ __forceinline__ void load_runs(
    Eight s[NUM][4], float y[NUM][8], const Entering& in, int row, int column0) {
  int columns[NUM];
#pragma unroll
  for (int b = 0; b < NUM; b++) columns[b] = min(column0 + 8 * THREADS * b, HIDDEN - 8);
#pragma unroll
  for (int b = 0; b < NUM; b++)
#pragma unroll
    for (int j = 0; j < 4; j++) s[b][j] = load_eight(in.x + ((u64)row * 4 + j) * HIDDEN + columns[b]);
  if (!in.y) return;
#pragma unroll 1
  for (int shard = 0; shard < in.shards; shard++) {
    const u64 at = ((u64)shard * in.rows + row) * HIDDEN;
    Eight e[NUM];
    if (in.y_wide)
#pragma unroll
      for (int b = 0; b < NUM; b++) e[b] = load_narrowed((const float*)in.y + at + columns[b]);
    else
#pragma unroll
      for (int b = 0; b < NUM; b++) e[b] = load_eight((const u16*)in.y + at + columns[b]);
#pragma unroll
    for (int b = 0; b < NUM; b++) add_shard(y[b], e[b], shard == 0);
  }
}

__device__ __forceinline__ void mix_block(
    const Entering& in, const float* fn, const u8* marks, const Mixer& mixer, float* work, u32* counters) {
  __shared__ float sums[4][SUMS * TILE], values[VALUES * TILE], powers[16 * TILE];
  __shared__ float shift[VALUES], scale[3];
  __shared__ u32 arrived;
  const int tid = threadIdx.x, warp = tid >> 5, g = (tid & 31) >> 2, q = tid & 3;
  const int half = blockIdx.x % HALVES, tile = blockIdx.x / HALVES, first = tile * TILE, row = first + g;
  Planes planes;
  load_planes(planes, fn, half * 4 + warp);
  if (tid < VALUES) shift[tid] = mixer.base[tid];
  if (tid < 3) scale[tid] = mixer.scale[tid];
  __syncthreads();  // the compiler moves no load past this
  wait_for_producer();
  Eight s[1][4] = {};
  bool coarse[2] = {false, false};
  if (row < in.rows) {
    Coefs c;
    float y[1][8];
    load_coefs(c, in, row);
    load_runs<1>(s, y, in, row, half * 128 + warp * 32 + q * 8);
    if (in.y) expand(s[0], y[0], c);
  }
  if (marks)
    for (int n = 0; n < 2; n++) coarse[n] = first + 2 * q + n < in.rows && marks[first + 2 * q + n];
  group_sums(sums[warp], planes, s[0], 0.f, coarse);
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
    sums[0][2 * tid] = finish_sum(pairs_sum(a), 2 * tid, mixer.norm_eps);
    sums[0][2 * tid + 1] = finish_sum(pairs_sum(b), 2 * tid + 1, mixer.norm_eps);
  }
  __syncthreads();
  const Mixer near = {scale, shift, mixer.pre, mixer.post, mixer.comb, mixer.iters, mixer.eps, mixer.norm_eps};
  finish_mix<THREADS>(sums[0], values, powers, near, first, in.rows, tid);
}

struct Leaving { u16 *streams, *x, *collapsed, *tap; const float* norm; int tap_pitch; float norm_eps; };
#define BATCH (VECTORS < 5 ? VECTORS : 5)
__device__ __forceinline__ void row_block(const Entering& in, const Leaving& out, int row) {
  __shared__ float groups[HIDDEN / 32];
  const int tid = threadIdx.x, lane = tid & 31;
  float4 norm[BATCH][2] = {};
  if (out.x)
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const int column = min(8 * (tid + b * THREADS), HIDDEN - 8);
      norm[b][0] = load_early(out.norm + column);
      norm[b][1] = load_early(out.norm + column + 4);
    }
  wait_for_producer();
  Coefs c;
  Eight kept[VECTORS];
  load_coefs(c, in, row);
#pragma unroll
  for (int i = 0; i < VECTORS; i += BATCH) {
    Eight s[BATCH][4];
    float y[BATCH][8];
    load_runs<BATCH>(s, y, in, row, 8 * (tid + i * THREADS));
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const int column = 8 * (tid + (i + b) * THREADS);
      float sum = 0.f;
      if (i + b < VECTORS && column < HIDDEN) {
        if (in.y) expand(s[b], y[b], c);
        if (out.streams)
#pragma unroll
          for (int j = 0; j < 4; j++) store_eight(out.streams + ((u64)row * 4 + j) * HIDDEN + column, s[b][j]);
        if (out.tap) store_eight(out.tap + (u64)row * out.tap_pitch + column, mean_of_streams(s[b]));
        kept[i + b] = collapse(s[b], c.pre);
        if (out.collapsed) store_eight(out.collapsed + (u64)row * HIDDEN + column, kept[i + b]);
        sum = squares(kept[i + b]);
      }
      sum = group_sum(sum);
      if (column < HIDDEN && (lane & 3) == 0) groups[column / 32] = sum;
    }
  }
  if (!out.x) return;
  __syncthreads();
  float pair = 0.f;
  if (lane < PAIRS) {
    const float* p = groups + 8 * lane;
    pair = ((p[0] + p[1]) + p[2]) + p[3];
    if (2 * lane + 1 < HALVES) pair += ((p[4] + p[5]) + p[6]) + p[7];
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) pair += __shfl_xor_sync(0xffffffffu, pair, step);
  const float inverse = inverse_rms(pair, HIDDEN, out.norm_eps);
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int column = 8 * (tid + i * THREADS);
    if (column >= HIDDEN) break;
    float w[8] = {norm[i % BATCH][0].x, norm[i % BATCH][0].y, norm[i % BATCH][0].z, norm[i % BATCH][0].w,
                  norm[i % BATCH][1].x, norm[i % BATCH][1].y, norm[i % BATCH][1].z, norm[i % BATCH][1].w};
    if (i >= BATCH) {
      load_four(w, out.norm + column);
      load_four(w + 4, out.norm + column + 4);
    }
    store_eight(out.x + (u64)row * HIDDEN + column, normed(kept[i], inverse, w));
  }
}

// grid: `mixing` blocks of the first kind (a multiple of HALVES, or 0), then one a row. y null: no
// sublayer has run; pre_in null: stream 0. work [tiles][HALVES][SUMS][TILE]; counters [tiles] are 0
// before and after. Only weights are __restrict__: the compiler moves loads through such pointers to
// before the wait.
extern "C" __global__ void __launch_bounds__(THREADS, 2) boundary_rows(
    const u16* x, const void* y, const float* pre_in, const float* post_in, const float* comb_in,
    const float* __restrict__ fn, const float* __restrict__ scale, const float* __restrict__ base, const u8* marks,
    const float* __restrict__ norm, u16* streams_out, u16* x_out, u16* collapsed_out, u16* tap_out,
    float* pre_out, float* post_out, float* comb_out, float* work, u32* counters,
    int rows, int y_wide, int shards, int tap_pitch, int iters, int eps, int norm_eps, int mixing) {
  let_consumer_start();
  const Entering in = {x, y, pre_in, post_in, comb_in, y_wide, shards, rows};
  if (blockIdx.x < mixing) {
    const Mixer mixer = {scale, base, pre_out, post_out, comb_out, iters, __int_as_float(eps), __int_as_float(norm_eps)};
    mix_block(in, fn, marks, mixer, work, counters);
  } else {
    const Leaving out = {streams_out, x_out, collapsed_out, tap_out, norm, tap_pitch, __int_as_float(norm_eps)};
    row_block(in, out, blockIdx.x - mixing);
  }
}
