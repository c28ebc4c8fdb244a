// Router of an MoE layer: logits on tensor cores, then the choice of experts.
//
// Weights enter the products exactly, as one to three bf16 pieces that sum to them; rows are bf16. Sums
// follow one order at every row count: 16 inputs an instruction inside a chunk of 512, pieces in turn,
// chunks ascending. Which input goes to which place inside 32 does not matter as long as both operands
// agree, so a lane reads 16 bytes.
//
// Macros: PIECES 1 (bf16 weights), 2 (fp16) or 3 (fp32), ROW_TILES of 8 rows a warp, WARPS of a block
// (16 experts each), PER_LANE experts a lane of router_select, STAGES of router_logits_many, or 0 for
// router_logits instead; WIDE warpgroups that multiply of router_logits_wide, or 0 for one of the others.
#include "../exl3/common.cuh"

#define MOST_PLACES 16
#define STEPS (CHUNK / 32)
#define AHEAD (PIECES == 3 ? STEPS / 2 : STEPS)  // steps whose weights are asked for at once

#if PIECES == 3
struct Eight { uint4 a, b; };
#else
struct Eight { uint4 a; };
#endif

__device__ __forceinline__ Eight load_eight(const void* weights, u64 at, bool there) {
  Eight v;
  v.a = make_uint4(0, 0, 0, 0);
#if PIECES == 3
  v.b = v.a;
  if (there) { v.a = ((const uint4*)weights)[at / 4]; v.b = ((const uint4*)weights)[at / 4 + 1]; }
#else
  if (there) v.a = ((const uint4*)weights)[at / 8];
#endif
  return v;
}
__device__ __forceinline__ float widened(u32 pair, int high) {
  return __uint_as_float(high ? pair & 0xffff0000u : pair << 16);
}
// The pair `i` of eight weights as bf16 pieces, largest first.
__device__ __forceinline__ void pieces_of(const Eight& v, int i, u32 out[PIECES]) {
#if PIECES == 1
  out[0] = i == 0 ? v.a.x : i == 1 ? v.a.y : i == 2 ? v.a.z : v.a.w;
#else
  float lo, hi;
#if PIECES == 2
  const u32 w = i == 0 ? v.a.x : i == 1 ? v.a.y : i == 2 ? v.a.z : v.a.w;
  lo = half_to_float(w & 0xffff); hi = half_to_float(w >> 16);
#else
  const uint4 w = i < 2 ? v.a : v.b;
  lo = __uint_as_float(i % 2 ? w.z : w.x); hi = __uint_as_float(i % 2 ? w.w : w.y);
#endif
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    out[p] = to_bf162(lo, hi);
    lo -= widened(out[p], 0); hi -= widened(out[p], 1);
  }
#endif
}
__device__ __forceinline__ void mma_bf16(float c[4], const u32 a[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// 32 inputs of 16 experts by ROW_TILES tiles of rows.
__device__ __forceinline__ void multiply_step(
    float acc[ROW_TILES][4], const Eight& low, const Eight& high, const uint4 x[ROW_TILES]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 a[4][PIECES];
    pieces_of(low, 2 * half, a[0]); pieces_of(high, 2 * half, a[1]);
    pieces_of(low, 2 * half + 1, a[2]); pieces_of(high, 2 * half + 1, a[3]);
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const u32 piece[4] = {a[0][p], a[1][p], a[2][p], a[3][p]};
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++)
        mma_bf16(acc[r], piece, half ? x[r].z : x[r].x, half ? x[r].w : x[r].y);
    }
  }
}

__device__ __forceinline__ void store_logits(
    const float sums[ROW_TILES][4], float* logits, int row0, int expert, int rows, int experts) {
  const int q = threadIdx.x & 3;
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = row0 + r * 8 + 2 * q + (i & 1), e = expert + 8 * (i >> 1);
      if (row < rows && e < experts) logits[(u64)row * experts + e] = sums[r][i];
    }
}

#if WIDE
#include "wgmma.cuh"
#include "route_wide.cuh"
#elif STAGES == 0
#define X_LINE (2 * CHUNK + 64)  // bytes of a row in shared memory; 16-byte reads of two rows meet all banks

// x [rows][inputs] bf16, `x_pitch` apart; logits [parts][rows][experts]. A chunk's rows are asked for at once.
// grid (16 * WARPS experts, parts, 8 * ROW_TILES rows): as many parts as chunks, or 1 that holds the sum
// over chunks.
extern "C" __global__ void __launch_bounds__(32 * WARPS) router_logits(
    const void* __restrict__ weights, const u16* x, float* logits, int rows, int experts, int inputs, int x_pitch) {
  __shared__ __align__(16) unsigned char xs[8 * ROW_TILES * X_LINE];
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int expert = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * 16 + g, row0 = blockIdx.z * 8 * ROW_TILES;
  const int num_chunks = (inputs + CHUNK - 1) / CHUNK, split = gridDim.y > 1;
  const int first = split ? blockIdx.y : 0, end = split ? first + 1 : num_chunks;
  float total[ROW_TILES][4];
  let_consumer_start();
#pragma unroll 1
  for (int chunk = first; chunk < end; chunk++) {
    const int steps = min(CHUNK, inputs - chunk * CHUNK) / 32;
    float acc[ROW_TILES][4] = {};
#pragma unroll 1
    for (int step0 = 0; step0 < steps; step0 += AHEAD) {
      Eight low[AHEAD], high[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const u64 k = chunk * CHUNK + (step0 + i) * 32 + 8 * q;
        low[i] = load_eight(weights, (u64)expert * inputs + k, step0 + i < steps && expert < experts);
        high[i] = load_eight(weights, (u64)(expert + 8) * inputs + k, step0 + i < steps && expert + 8 < experts);
      }
      if (step0 == 0) {
        if (chunk == first) wait_for_producer();
        else __syncthreads();  // the chunk before has been read
        for (int at = threadIdx.x; at < 8 * ROW_TILES * 4 * STEPS; at += 32 * WARPS) {
          const int r = at / (4 * STEPS), piece = at % (4 * STEPS);
          const bool is_here = row0 + r < rows && piece < 4 * steps;
          copy_async(smem_address(xs) + r * X_LINE + piece * 16,
                     x + (is_here ? (u64)(row0 + r) * x_pitch + chunk * CHUNK + piece * 8 : 0), is_here);
        }
        end_copies();
        wait_for_copies<0>();
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        uint4 b[ROW_TILES];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) b[r] = *(const uint4*)(xs + (r * 8 + g) * X_LINE + (step0 + i) * 64 + q * 16);
        if (step0 + i < steps) multiply_step(acc, low[i], high[i], b);
      }
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) total[r][i] = chunk == first ? acc[r][i] : total[r][i] + acc[r][i];
  }
  store_logits(total, logits + (u64)blockIdx.y * rows * experts, row0, expert, rows, experts);
}
#else

// The same for many rows: weights and rows of 64 inputs at a time in shared memory. grid (16 * WARPS
// experts, 1, 8 * ROW_TILES rows).
#define TILE_INPUTS 64
#define X_LINE (2 * TILE_INPUTS + 64)  // bytes of a row; these pitches spread 16-byte reads over all banks
#define W_LINE (PIECES == 3 ? 4 * TILE_INPUTS + 16 : X_LINE)
#define W_VALUE (PIECES == 3 ? 4 : 2)
#define STAGE_BYTES (16 * WARPS * W_LINE + 8 * ROW_TILES * X_LINE)

__device__ __forceinline__ void copy_lines(
    u32 to, const char* from, int lines, int there, int bytes, int line, u64 pitch) {
  const int each = bytes / 16;
  for (int i = threadIdx.x; i < lines * each; i += 32 * WARPS) {
    const int l = i / each, at = (i - l * each) * 16;
    copy_async(to + l * line + at, from + (l < there ? l * pitch : 0) + at, l < there);
  }
}
extern "C" __global__ void __launch_bounds__(32 * WARPS) router_logits_many(
    const void* __restrict__ weights, const u16* x, float* logits, int rows, int experts, int inputs, int x_pitch) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  const int expert0 = blockIdx.x * 16 * WARPS, row0 = blockIdx.z * 8 * ROW_TILES, tiles = inputs / TILE_INPUTS;
  const char* w_from = (const char*)weights + (u64)expert0 * inputs * W_VALUE;
  const char* x_from = (const char*)(x + (u64)row0 * x_pitch);
  float acc[ROW_TILES][4] = {}, total[ROW_TILES][4];
  let_consumer_start();
  wait_for_producer();
  for (int tile = 0; tile < tiles + STAGES - 1; tile++) {
    if (tile < tiles) {
      const u32 to = smem_address(shared) + tile % STAGES * STAGE_BYTES;
      copy_lines(to, w_from + tile * TILE_INPUTS * W_VALUE, 16 * WARPS, experts - expert0, TILE_INPUTS * W_VALUE,
                 W_LINE, (u64)inputs * W_VALUE);
      copy_lines(to + 16 * WARPS * W_LINE, x_from + tile * TILE_INPUTS * 2, 8 * ROW_TILES, rows - row0,
                 TILE_INPUTS * 2, X_LINE, (u64)x_pitch * 2);
    }
    end_copies();
    const int now = tile - STAGES + 1;
    if (now < 0) continue;
    wait_for_copies<STAGES - 1>();
    __syncthreads();
    const unsigned char* at = shared + now % STAGES * STAGE_BYTES;
    const unsigned char* w_at = at + (16 * warp + g) * W_LINE + q * 8 * W_VALUE;
    const unsigned char* x_at = at + 16 * WARPS * W_LINE + g * X_LINE + q * 16;
#pragma unroll
    for (int step = 0; step < TILE_INPUTS / 32; step++) {
      uint4 b[ROW_TILES];
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) b[r] = *(const uint4*)(x_at + r * 8 * X_LINE + step * 64);
      const Eight* low = (const Eight*)(w_at + step * 32 * W_VALUE);
      multiply_step(acc, *low, *(const Eight*)((const unsigned char*)low + 8 * W_LINE), b);
    }
    if ((now + 1) % (CHUNK / TILE_INPUTS) == 0 || now == tiles - 1) {
      const bool first = now < CHUNK / TILE_INPUTS;
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          total[r][i] = first ? acc[r][i] : total[r][i] + acc[r][i];
          acc[r][i] = 0.f;
        }
    }
    __syncthreads();
  }
  store_logits(total, logits, row0, expert0 + 16 * warp + g, rows, experts);
}
#endif

#include "route_choose.cuh"
