// The residual boundary of many rows without mixing weights, in the bits of streams.cu: new streams, collapse and
// norm in one pass. A block stays for many rows, a thread for 8 columns of them, and rows ahead are on their way
// into a ring, so that memory is busy while a row is worked on.
//
// Macros, besides those of common.cuh: STAGES rows of the ring.
#include "common.cuh"

#define WORKERS ((HIDDEN / 8 + 31) / 32 * 32)
#define CLERKS (WORKERS < 1024 ? 1 : 0)       // a warp does what is done once a row, where there can be one more,
#define COUNTERS (WORKERS + 64 <= 1024 ? 1 : 0)  // and one counts rows, as that takes longer than a row at times
#define MEETING (WORKERS + 32 * CLERKS)          // threads that meet once a row
#define THREADS (MEETING + 32 * COUNTERS)
#define CLERK (MEETING / 32 - 1)
#define RUNS (WORKERS * 16)  // bytes that the workers take at once
#define COEFS 24             // floats of a row: comb, post, pre

struct Entering {
  const u16* x; const void* y; const float *pre, *post, *comb; int y_wide, shards, y_step, rows;
};
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(MEETING) : "memory"); }
// How many of the block's rows have been written by those who have met, from the clerk to the counter.
__device__ __forceinline__ void tell(u32 at, u32 written) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(at), "r"(written) : "memory");
}
__device__ __forceinline__ u32 look(u32 at) {
  u32 written;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(written) : "r"(at) : "memory");
  return written;
}
// The block's rows from the one numbered `counted` on, which are written, for blocks of another kernel.
__device__ __forceinline__ void count_rows(u32* done, u32 counted, u32 written) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#pragma unroll 1
  for (; counted < written; counted++) {
    u32* const to = done + (blockIdx.x + counted * gridDim.x) / COUNTED_ROWS;
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(to) : "memory");
  }
}
// The counter's work.
__device__ __forceinline__ void count_all(u32* done, u32 at, int rows) {
  const u32 all = (rows - 1 - blockIdx.x) / gridDim.x + 1;
#pragma unroll 1
  for (u32 counted = 0; counted < all;) {
    const u32 written = look(at);
    if (written == counted) {
      __nanosleep(100);
    } else {
      count_rows(done, counted, written);
      counted = written;
    }
  }
}
// A stage: runs of 16 bytes by thread, each for the thread that asks for it: 4 of streams, then one or two a shard
// of the output.
__device__ __forceinline__ void ask(const Entering& in, u32 to, int row) {
  if (row >= in.rows) return;
  const u16* x = in.x + (u64)row * STREAMS * HIDDEN + 8 * threadIdx.x;
#pragma unroll
  for (int j = 0; j < STREAMS; j++) copy_async(to + j * RUNS, x + j * HIDDEN);
  u32 run = to + STREAMS * RUNS;
  u64 at = (u64)row * HIDDEN + 8 * threadIdx.x;
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
// What the whole block needs of a row, by one warp.
__device__ __forceinline__ void ask_coefs(const Entering& in, u32 to, int row) {
  const int lane = threadIdx.x & 31;
  if (row >= in.rows) return;
  if (lane < 4 && in.y) copy_async(to + 16 * lane, in.comb + (u64)row * 16 + 4 * lane);
  if (lane == 4 && in.y) copy_async(to + 64, in.post + (u64)row * 4);
  if (lane == 5 && in.pre) copy_async(to + 80, in.pre + (u64)row * 4);
}
// The sum of the shards of a thread's 8 outputs, each rounded to bf16 as it travels.
__device__ __forceinline__ void read_output(float y[8], const Entering& in, const unsigned char* run) {
  auto read = [&] {
    if (!in.y_wide) {
      const Eight e = load_eight((const u16*)run);
      run += RUNS;
      return e;
    }
    const float4 a = *(const float4*)run, b = *(const float4*)(run + RUNS);
    run += 2 * RUNS;
    return Eight{pack(a.x, a.y), pack(a.z, a.w), pack(b.x, b.y), pack(b.z, b.w)};
  };
  add_shard(y, read(), true);
#pragma unroll 1
  for (int shard = 1; shard < in.shards; shard++) add_shard(y, read(), false);
}

// y null: no sublayer has run; pre_in null: stream 0. y_step: values between shards of y. grid (any): a block takes
// each gridDim.x-th row. done: where to count the rows of every 16 whose streams are there, or null. No pointer but
// weights is __restrict__: the compiler moves loads through such ones before the wait.
extern "C" __global__ void __launch_bounds__(THREADS, 1) boundary_rows(
    const u16* x, const void* y, const float* pre_in, const float* post_in, const float* comb_in,
    const float* __restrict__ norm, u16* streams_out, u16* x_out, u16* collapsed_out, u16* tap_out,
    int rows, int y_wide, int shards, int y_step, int tap_pitch, int stage_bytes, int norm_eps, u32* done) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(16) float groups[2][PAIRS * 8];
  __shared__ __align__(16) float coefs[STAGES + 1][COEFS];  // one more: threads may still read those of the row before
  __shared__ float inverses[2];
  __shared__ u32 written;
  __shared__ __align__(16) u16 before[8 * WORKERS];  // the row before, until its norm is known: registers are few
  const int tid = threadIdx.x, warp = tid / 32, column = 8 * tid, step = gridDim.x;
  const bool works = tid < WORKERS, there = column < HIDDEN;
  const Entering in = {x, y, pre_in, post_in, comb_in, y_wide, y ? shards : 0, y_step, rows};
  const u32 stages_at = shared_address(shared) + 16 * tid, coefs_at = shared_address(coefs);
  if (!done) let_consumer_start();
  float w[8] = {};
  if (x_out && there) {
    const float4 a = load_early(norm + column), b = load_early(norm + column + 4);
    w[0] = a.x; w[1] = a.y; w[2] = a.z; w[3] = a.w;
    w[4] = b.x; w[5] = b.y; w[6] = b.z; w[7] = b.w;
  }
  if (tid == 0) written = 0;
  wait_for_producer();
  if (done) let_consumer_start();  // it does not wait, and may write over what kernels ahead of this one have read
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) {
    if (there) ask(in, stages_at + i * stage_bytes, blockIdx.x + i * step);
    if (warp == CLERK) ask_coefs(in, coefs_at + i * COEFS * 4, blockIdx.x + i * step);
    copies_end();
  }
  copies_wait<STAGES - 1>();
  __syncthreads();  // all have the first row's coefficients
  if (COUNTERS && warp > CLERK) {
    if (done && tid == MEETING) count_all(done, shared_address(&written), rows);
    return;
  }
  int stage = 0, slot = 0, turn = 0;
#pragma unroll 1
  for (int row = blockIdx.x; row < rows; row += step, turn ^= 1) {
    Eight kept = {};
    if (works) {
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
      if (there) ask(in, stages_at + stage * stage_bytes, row + STAGES * step);  // its runs are used up
      if (streams_out && there)
#pragma unroll
        for (int j = 0; j < 4; j++) store_eight(streams_out + ((u64)row * 4 + j) * HIDDEN + column, s[j]);
      if (tap_out && there) store_eight(tap_out + (u64)row * tap_pitch + column, mean_of_streams(s));
      kept = collapse(s, c.pre);
      if (collapsed_out && there) store_eight(collapsed_out + (u64)row * HIDDEN + column, kept);
      const float group = group_sum(squares(kept));
      if (there && (tid & 3) == 0) groups[turn][tid / 4] = group;
    }
    // to the place of the row before, whose readers have met since
    if (warp == CLERK) ask_coefs(in, coefs_at + (slot ? slot - 1 : STAGES) * COEFS * 4, row + STAGES * step);
    copies_end();
    copies_wait<STAGES - 1>();
    meet();  // all have the next row's coefficients and the norm of the row before
    if (x_out && there) {
      const Eight last = load_eight(before + column);
      if (row >= step)
        store_eight(x_out + (u64)(row - step) * HIDDEN + column, normed(last, inverses[turn ^ 1], w));
      store_eight(before + column, kept);
    }
    if (warp == CLERK) {
      const float inverse = inverse_rms(sum_of_groups(groups[turn]), HIDDEN, __int_as_float(norm_eps));
      if (tid == MEETING - 1) {
        inverses[turn] = inverse;
        if (done && COUNTERS) tell(shared_address(&written), row / step + 1);
        if (done && !COUNTERS) count_rows(done, row / step, row / step + 1);
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    slot = slot == STAGES ? 0 : slot + 1;
  }
  meet();
  if (x_out && there) {
    const int last = blockIdx.x + (rows - 1 - blockIdx.x) / step * step;
    store_eight(x_out + (u64)last * HIDDEN + column, normed(load_eight(before + column), inverses[turn ^ 1], w));
  }
}
