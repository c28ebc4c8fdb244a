// The residual boundary of many rows without mixing weights, in the bits of streams.cu: new streams, collapse and
// norm in one pass. A block stays for many rows, a thread for 8 columns of them, and rows ahead are on their way
// into a ring, so that memory is busy while a row is worked on.
//
// Macros, besides those of common.cuh: STAGES rows of the ring.
#include "common.cuh"

#define THREADS ((HIDDEN / 8 + 31) / 32 * 32)
#define RUNS (THREADS * 16)  // bytes that the threads take at once
#define COEFS 24             // floats of a row: comb, post, pre

struct Entering {
  const u16* x; const void* y; const float *pre, *post, *comb; int y_wide, shards, y_step, rows;
};
// A stage: runs of 16 bytes by thread, each for the thread that asks for it: 4 of streams, then one or two a shard
// of the output. What the whole block needs of a row goes to `coefs`.
__device__ __forceinline__ void ask(const Entering& in, u32 to, u32 coefs, int row, bool there) {
  if (row >= in.rows) return;
  const int tid = threadIdx.x;
  if (there) {
    const u16* x = in.x + (u64)row * STREAMS * HIDDEN + 8 * tid;
#pragma unroll
    for (int j = 0; j < STREAMS; j++) copy_async(to + j * RUNS, x + j * HIDDEN);
    u32 run = to + STREAMS * RUNS;
    u64 at = (u64)row * HIDDEN + 8 * tid;
#pragma unroll 1
    for (int shard = 0; shard < in.shards; shard++, at += in.y_step) {
      if (in.y_wide) {
        copy_async(run, (const float*)in.y + at);
        copy_async(run + RUNS, (const float*)in.y + at + 4);
        run += 2 * RUNS;
      } else {
        copy_async(run, (const u16*)in.y + at);
        run += RUNS;
      }
    }
  }
  if (tid < 4 && in.y) copy_async(coefs + 16 * tid, in.comb + (u64)row * 16 + 4 * tid);
  if (tid == 4 && in.y) copy_async(coefs + 64, in.post + (u64)row * 4);
  if (tid == 5 && in.pre) copy_async(coefs + 80, in.pre + (u64)row * 4);
}
// The sum of the shards of a thread's 8 outputs, each rounded to bf16 as it travels.
__device__ __forceinline__ void read_output(float y[8], const Entering& in, const unsigned char* run) {
#pragma unroll 1
  for (int shard = 0; shard < in.shards; shard++) {
    Eight e;
    if (in.y_wide) {
      const float4 a = *(const float4*)run, b = *(const float4*)(run + RUNS);
      e = {pack(a.x, a.y), pack(a.z, a.w), pack(b.x, b.y), pack(b.z, b.w)};
      run += 2 * RUNS;
    } else {
      e = load_eight((const u16*)run);
      run += RUNS;
    }
    add_shard(y, e, shard == 0);
  }
}

// y null: no sublayer has run; pre_in null: stream 0. y_step: values between shards of y. grid (any): a block takes
// each gridDim.x-th row. No pointer but weights is __restrict__: the compiler moves loads through such ones before
// the wait.
extern "C" __global__ void __launch_bounds__(THREADS, 1) boundary_rows(
    const u16* x, const void* y, const float* pre_in, const float* post_in, const float* comb_in,
    const float* __restrict__ norm, u16* streams_out, u16* x_out, u16* collapsed_out, u16* tap_out,
    int rows, int y_wide, int shards, int y_step, int tap_pitch, int stage_bytes, int norm_eps) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(16) float groups[2][PAIRS * 8];
  __shared__ __align__(16) float coefs[STAGES + 1][COEFS];  // one more: threads may still read those of the row before
  const int tid = threadIdx.x, column = 8 * tid, step = gridDim.x;
  const bool there = column < HIDDEN;
  const Entering in = {x, y, pre_in, post_in, comb_in, y_wide, y ? shards : 0, y_step, rows};
  const u32 stages_at = shared_address(shared) + 16 * tid, coefs_at = shared_address(coefs);
  let_consumer_start();
  float w[8] = {};
  if (x_out && there) {
    const float4 a = load_early(norm + column), b = load_early(norm + column + 4);
    w[0] = a.x; w[1] = a.y; w[2] = a.z; w[3] = a.w;
    w[4] = b.x; w[5] = b.y; w[6] = b.z; w[7] = b.w;
  }
  wait_for_producer();
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) {
    ask(in, stages_at + i * stage_bytes, coefs_at + i * COEFS * 4, blockIdx.x + i * step, there);
    copies_end();
  }
  copies_wait<STAGES - 1>();
  __syncthreads();  // all have the first row's coefficients
  int stage = 0, slot = 0, turn = 0;
#pragma unroll 1
  for (int row = blockIdx.x; row < rows; row += step, turn ^= 1) {
    const unsigned char* runs = shared + stage * stage_bytes + 16 * tid;
    Eight s[4];
#pragma unroll
    for (int j = 0; j < 4; j++) s[j] = load_eight((const u16*)(runs + j * RUNS));
    Coefs c = {{1.f, 0.f, 0.f, 0.f}};
    if (pre_in) load_four(c.pre, coefs[slot] + 20);
    if (y) {
      float sum[8];
      read_output(sum, in, runs + STREAMS * RUNS);
      load_four(c.post, coefs[slot] + 16);
#pragma unroll
      for (int i = 0; i < 4; i++) load_four(c.comb + 4 * i, coefs[slot] + 4 * i);
      expand(s, sum, c);
    }
    // the thread has used up its runs; the coefficients' place is that of the row before, whose readers have met
    const u32 coefs_to = coefs_at + (slot ? slot - 1 : STAGES) * COEFS * 4;
    ask(in, stages_at + stage * stage_bytes, coefs_to, row + STAGES * step, there);
    copies_end();
    if (streams_out && there)
#pragma unroll
      for (int j = 0; j < 4; j++) store_eight(streams_out + ((u64)row * 4 + j) * HIDDEN + column, s[j]);
    if (tap_out && there) store_eight(tap_out + (u64)row * tap_pitch + column, mean_of_streams(s));
    const Eight kept = collapse(s, c.pre);
    if (collapsed_out && there) store_eight(collapsed_out + (u64)row * HIDDEN + column, kept);
    const float group = group_sum(squares(kept));
    if (there && (tid & 3) == 0) groups[turn][tid / 4] = group;
    copies_wait<STAGES - 1>();
    __syncthreads();  // all have this row's sums and the next one's coefficients
    if (x_out) {
      const float inverse = inverse_rms(sum_of_groups(groups[turn]), HIDDEN, __int_as_float(norm_eps));
      if (there) store_eight(x_out + (u64)row * HIDDEN + column, normed(kept, inverse, w));
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    slot = slot == STAGES ? 0 : slot + 1;
  }
}
