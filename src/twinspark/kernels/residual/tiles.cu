// The residual boundary for many rows, in the bits of streams.cu and mix.cu. A block keeps the mixing weights of 256
// columns in registers and streams rows past them; a second kernel adds the blocks' sums, makes the
// weights and norms the collapsed rows, the last written first, which are still in the cache.
//
// Macros, besides those of common.cuh: MIXING 1 when there is a site to mix for, STAGES of the ring.
#include "common.cuh"

#define WARPS 8
#define THREADS (32 * WARPS)
#define COLUMNS 256
#define FINISH_WARPS (TILE + 1)

__device__ __forceinline__ void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_near(u32 to, const void* from) {  // the block's other warps want it, too
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

struct Entering {
  const u16* x; const void* y; const float *pre, *post, *comb; int y_wide, shards, y_step, rows;
};
// A stage: runs of 16 bytes by thread, each for the thread that asks for it (4 of streams, then one or two
// a shard of the output), then weights of the old streams by warp, 24 floats a row: comb, post, pre.
__device__ __forceinline__ u32 coefs_at(const Entering& in) {
  return (STREAMS + (in.y ? in.shards * (in.y_wide ? 2 : 1) : 0)) * THREADS * 16;
}
__device__ __forceinline__ void ask(const Entering& in, u32 to, int row, int column) {
  const int tid = threadIdx.x, q = tid & 3;
  if (row < in.rows) {
    const u16* x = in.x + (u64)row * STREAMS * HIDDEN + column;
#pragma unroll
    for (int j = 0; j < STREAMS; j++) copy_async(to + (j * THREADS + tid) * 16, x + j * HIDDEN);
    const u32 coefs = to + coefs_at(in) + tid / 4 * 96;
    if (in.y) {
#pragma unroll 1
      for (int shard = 0; shard < in.shards; shard++) {
        const u64 at = (u64)shard * in.y_step + (u64)row * HIDDEN + column;
        if (in.y_wide) {
          const u32 run = to + ((STREAMS + 2 * shard) * THREADS + tid) * 16;
          copy_async(run, (const float*)in.y + at);
          copy_async(run + THREADS * 16, (const float*)in.y + at + 4);
        } else {
          copy_async(to + ((STREAMS + shard) * THREADS + tid) * 16, (const u16*)in.y + at);
        }
      }
      copy_async_near(coefs + q * 16, in.comb + (u64)row * 16 + 4 * q);
      if (q == 0) copy_async_near(coefs + 64, in.post + (u64)row * 4);
    }
    if (in.pre && q == 1) copy_async_near(coefs + 80, in.pre + (u64)row * 4);
  }
}
__device__ __forceinline__ void read_stage(
    Eight s[4], float y[8], Coefs& c, const Entering& in, const unsigned char* stage) {
  const int tid = threadIdx.x;
  const float* coefs = (const float*)(stage + coefs_at(in) + tid / 4 * 96);
#pragma unroll
  for (int j = 0; j < 4; j++) s[j] = load_eight((const u16*)(stage + (j * THREADS + tid) * 16));
  c.pre[0] = 1.f; c.pre[1] = c.pre[2] = c.pre[3] = 0.f;
  if (in.pre) load_four(c.pre, coefs + 20);
  if (!in.y) return;
  load_four(c.post, coefs + 16);
#pragma unroll
  for (int i = 0; i < 4; i++) load_four(c.comb + 4 * i, coefs + 4 * i);
#pragma unroll 1
  for (int shard = 0; shard < in.shards; shard++) {
    Eight e;
    if (in.y_wide) {
      const unsigned char* run = stage + ((STREAMS + 2 * shard) * THREADS + tid) * 16;
      const float4 a = *(const float4*)run, b = *(const float4*)(run + THREADS * 16);
      e = {pack(a.x, a.y), pack(a.z, a.w), pack(b.x, b.y), pack(b.z, b.w)};
    } else {
      e = load_eight((const u16*)(stage + ((STREAMS + shard) * THREADS + tid) * 16));
    }
    add_shard(y, e, shard == 0);
  }
}

// grid (anything). Blocks share (256 columns, tile of rows) evenly, tiles ascending within columns. work
// [tiles][PAIRS][SUMS][TILE]. The collapsed rows go to `collapsed_out` and, not yet normed, to `x_out`. Only
// weights are __restrict__: the compiler moves loads through such pointers to before the wait.
extern "C" __global__ void __launch_bounds__(THREADS, 1) boundary_tiles(
    const u16* x, const void* y, const float* pre_in, const float* post_in, const float* comb_in,
    const float* __restrict__ fn, const u8* marks, u16* streams_out, u16* x_out, u16* collapsed_out,
    u16* tap_out, float* work,
    int rows, int y_wide, int shards, int y_step, int tap_pitch, int stage_bytes) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float sums[2][WARPS][SUMS * TILE];
  const int tid = threadIdx.x, warp = tid >> 5, g = (tid & 31) >> 2, q = tid & 3;
  const int tiles = (rows + TILE - 1) / TILE;
  const Entering in = {x, y, pre_in, post_in, comb_in, y_wide, shards, y_step, rows};
  u32 shared_at;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(shared_at) : "l"(shared));
  int unit = (u64)PAIRS * tiles * blockIdx.x / gridDim.x, turn = 0;
  const int end = (u64)PAIRS * tiles * (blockIdx.x + 1) / gridDim.x;
  let_consumer_start();
#pragma unroll 1
  for (bool waited = false; unit < end; waited = true) {
    const int pair = unit / tiles, first = unit % tiles, last = min(tiles, first + end - unit);
    const int column = pair * COLUMNS + warp * 32 + q * 8;
    const bool active = column < HIDDEN;
    unit += last - first;
#if MIXING
    Planes planes;
    load_planes(planes, fn, min(pair * WARPS + warp, HIDDEN / 32 - 1));
#endif
    if (!waited) wait_for_producer();
    __syncwarp();  // all lanes are done with the stages
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) {
      if (active && first + i < last) ask(in, shared_at + i * stage_bytes, (first + i) * TILE + g, column);
      copies_end();
    }
    int stage = 0;
#pragma unroll 1
    for (int tile = first; tile < last; tile++, turn++) {
      const int row = tile * TILE + g;
      float(*tile_sums)[SUMS * TILE] = sums[turn & 1];
#if MIXING
      bool coarse[2] = {false, false};
      if (marks)
        for (int n = 0; n < 2; n++) coarse[n] = tile * TILE + 2 * q + n < rows && marks[tile * TILE + 2 * q + n];
#endif
      copies_wait<STAGES - 2>();
      __syncwarp();
      if (active) {
        Coefs c;
        Eight s[4];
        float v[8];
        read_stage(s, v, c, in, shared + stage * stage_bytes);
        const int before = stage ? stage - 1 : STAGES - 1;  // whose bytes the warp has used up
        if (tile + STAGES - 1 < last) ask(in, shared_at + before * stage_bytes, row + (STAGES - 1) * TILE, column);
        if (in.y) expand(s, v, c);
        const Eight e = collapse(s, c.pre);
        const bool here = row < rows;
#if MIXING
        group_sums(tile_sums[warp], planes, s, squares(e), coarse);
#else
        const float collapsed = group_sum(squares(e));
        if (q == 0) tile_sums[warp][COLLAPSED * TILE + g] = collapsed;
#endif
        if (here && streams_out)
#pragma unroll
          for (int j = 0; j < 4; j++) store_eight(streams_out + ((u64)row * 4 + j) * HIDDEN + column, s[j]);
        if (here && x_out) store_eight(x_out + (u64)row * HIDDEN + column, e);
        if (here && collapsed_out) store_eight(collapsed_out + (u64)row * HIDDEN + column, e);
        if (here && tap_out) store_eight(tap_out + (u64)row * tap_pitch + column, mean_of_streams(s));
      }
      copies_end();
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      if (!work) continue;
      __syncthreads();  // two sets of sums: the next tile's are not those being read
      const int i = tid + (MIXING ? 0 : COLLAPSED * TILE);
      if (i < SUMS * TILE) {
        float sum = ((tile_sums[0][i] + tile_sums[1][i]) + tile_sums[2][i]) + tile_sums[3][i];
        if (pair * COLUMNS + COLUMNS <= HIDDEN)
          sum += ((tile_sums[4][i] + tile_sums[5][i]) + tile_sums[6][i]) + tile_sums[7][i];
        work[((u64)tile * PAIRS + pair) * (SUMS * TILE) + i] = sum;
      }
    }
  }
}

// Weights and norm of 8 rows a block, one warp each, and one for the weights.
extern "C" __global__ void __launch_bounds__(32 * FINISH_WARPS) boundary_finish(
    const float* work, const float* __restrict__ scale, const float* __restrict__ base,
    const float* __restrict__ norm, u16* x, float* pre_out, float* post_out, float* comb_out, int rows, int iters, int eps, int norm_eps) {
  __shared__ float sums[SUMS * TILE];
#if MIXING
  __shared__ float values[VALUES * TILE], powers[16 * TILE];
#endif
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, tile = gridDim.x - 1 - blockIdx.x, first = tile * TILE;
  let_consumer_start();
  wait_for_producer();
  const int i = tid + (MIXING ? 0 : COLLAPSED * TILE), row = first + warp;
  u16* line = x + (u64)row * HIDDEN;
  constexpr int BATCH = HIDDEN % 2560 == 0 ? 10 : 1;
  const bool normed_here = warp < TILE && x && row < rows;
  Eight e[BATCH];
  auto load = [&](int v) {
#pragma unroll
    for (int b = 0; b < BATCH; b++)
      if (BATCH > 1 || v < HIDDEN / 8) e[b] = load_eight(line + 8 * (v + 32 * b));
  };
  if (normed_here) load(lane);  // under way while the sums are made
  if (i < SUMS * TILE) {
    float pairs[32] = {};
#pragma unroll
    for (int p = 0; p < PAIRS; p++) pairs[p] = __ldcg(work + ((u64)tile * PAIRS + p) * (SUMS * TILE) + i);
    sums[i] = finish_sum(pairs_sum(pairs), i, __int_as_float(norm_eps));
  }
  __syncthreads();
#if MIXING
  if (warp == TILE) {
    const Mixer mixer = {scale, base, pre_out, post_out, comb_out, iters, __int_as_float(eps), __int_as_float(norm_eps)};
    finish_mix<32>(sums, values, powers, mixer, first, rows, lane);
  }
#endif
  if (!normed_here) return;
  const float inverse = inverse_rms(sums[COLLAPSED * TILE + warp], HIDDEN, __int_as_float(norm_eps));
#pragma unroll 1
  for (int v = lane; v < HIDDEN / 8; v += 32 * BATCH) {
    if (v != lane) load(v);
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      float w[8];
      load_four(w, norm + 8 * (v + 32 * b));
      load_four(w + 4, norm + 8 * (v + 32 * b) + 4);
      store_eight(line + 8 * (v + 32 * b), normed(e[b], inverse, w));
    }
  }
}
