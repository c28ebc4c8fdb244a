// Attention of queries over their own lists with mma.sync: one block a (list block, query, HEADS heads),
// or with WHOLE one block a (query, HEADS heads) that walks the list.
//
// Macros, besides those of common.cuh: HEADS 8, 16 or 32 of a block, WHOLE.
#include "common.cuh"

#define WARPS 8
#define WARP_ROWS (BLOCK / WARPS)
#define STEPS (HEAD / 64)            // of 16 dimensions in a quarter
#define M_TILES (HEAD / 16 / WARPS)  // of 16 dimensions a warp sums
#define N_TILES (HEADS / 8)
#define PART_PITCH 68                // of scores in shared memory, in floats
#define P_PITCH (BLOCK + 8)
#define ROWS_BYTES (BLOCK * PITCH * 2)
#define Q_BYTES (HEADS * PITCH * 2)
#define PART_BYTES (2 * HEADS * PART_PITCH * 4)
#include "mma.cuh"

// HEADS queries of a row on their way into shared memory; zeros where there is no head.
__device__ __forceinline__ void ask_queries(u32 to, const u16* q, int first, int N) {
  for (int i = threadIdx.x; i < HEADS * HEAD / 8; i += 32 * WARPS) {
    const int head = i / (HEAD / 8), dim = 8 * (i % (HEAD / 8)), bytes = first + head < N ? 16 : 0;
    const u16* from = q + (bytes ? (u64)(first + head) * HEAD + dim : 0);
    copy_16(to + (head * PITCH + dim) * 2, from, bytes);
  }
}
// The angles of a thread's vectors of eight rotated dimensions.
#define VECTORS (PAIRS / 4)
struct Angles { float4 cos, sin; };
__device__ __forceinline__ Angles ask_angles(const float* cos, const float* sin) {
  const int pair = threadIdx.x % VECTORS * 4;
  return {__ldcg((const float4*)(cos + pair)), __ldcg((const float4*)(sin + pair))};
}
// Rotates queries that have come, and rounds.
__device__ __forceinline__ void turn_queries(u16* queries, const Angles& a) {
  for (int i = threadIdx.x; i < HEADS * VECTORS; i += 32 * WARPS) {
    uint4* at = (uint4*)(queries + i / VECTORS * PITCH + HEAD - 2 * PAIRS + i % VECTORS * 8);
    *at = rotate_eight(*at, a.cos, a.sin);
  }
  __syncthreads();
}
// The rows of a list block on their way into shared memory as bf16, zeros where there is none. A lane asks
// for all its bytes before it decodes the first. `exist`: which of the warp's rows there are.
#define ROW_TURNS (WARP_ROWS / LANE_ROWS)
struct AskedRows { Raw raw[ROW_TURNS]; u32 exist; };
__device__ __forceinline__ int format_of(const List& list, const Source& window, const Source& pool, int block, int turn) {
  const int row = turn * LANE_ROWS + (threadIdx.x & 31) / CHUNKS;
  return block * BLOCK + (int)(threadIdx.x >> 5) * WARP_ROWS + row < list.pool_num ? pool.format : window.format;
}
__device__ __forceinline__ AskedRows ask_rows(
    const List& list, const Source& window, const Source& pool, int block, int row) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Place mine = {nullptr, nullptr};
  if (row >= 0) mine = place_of(block * BLOCK + warp * WARP_ROWS + (lane & 7) < list.pool_num ? pool : window, row);
  AskedRows a;
  a.exist = __ballot_sync(0xffffffffu, row >= 0) & 0xff;
#pragma unroll
  for (int t = 0; t < ROW_TURNS; t++) {
    const int r = t * LANE_ROWS + lane / CHUNKS;
    Place p;
    p.values = (const u8*)__shfl_sync(0xffffffffu, (u64)mine.values, r);
    p.scales = (const u8*)__shfl_sync(0xffffffffu, (u64)mine.scales, r);
    a.raw[t] = load_raw(p, format_of(list, window, pool, block, t), lane % CHUNKS);
  }
  return a;
}
__device__ __forceinline__ void put_rows(
    u16* to, const AskedRows& a, const List& list, const Source& window, const Source& pool, int block) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool swap = (lane >> 2) & 1;  // which half goes first, so that stores meet no bank twice
#pragma unroll
  for (int t = 0; t < ROW_TURNS; t++) {
    const int format = format_of(list, window, pool, block, t);
    u16* at = to + (warp * WARP_ROWS + t * LANE_ROWS + lane / CHUNKS) * PITCH + lane % CHUNKS * 16;
    *(uint4*)(at + (swap ? 8 : 0)) = decode_half(a.raw[t], format, swap);
    *(uint4*)(at + (swap ? 0 : 8)) = decode_half(a.raw[t], format, !swap);
  }
}
// The row number that a lane finds in its place of the list, for `ask_rows`.
__device__ __forceinline__ int row_at(const List& list, int block) {
  return entry_of(list, block * BLOCK + (int)(threadIdx.x >> 5) * WARP_ROWS + (int)(threadIdx.x & 7));
}
// Halves of the scores: [2][HEADS][PART_PITCH]. A warp takes one half, two quarters, of 16 entries. Without
// WHOLE they take the place of the queries.
__device__ __forceinline__ void score_halves(float* part, u32 rows_at, u32 q_at) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, half = warp & 1, group = warp >> 1;
  const u32 a_at = rows_at + (group * 16 + (lane & 15)) * PITCH * 2 + half * HEAD + (lane >> 4) * 16;
  float c[2][N_TILES][4] = {};
#pragma unroll
  for (int s = 0; s < STEPS; s += 2) {
#pragma unroll
    for (int quarter = 0; quarter < 2; quarter++) {
      const int at = quarter * (HEAD / 2) + s * 32;
      u32 a[2][4], b[2][N_TILES][2];
      load_two_steps(q_at + half * HEAD + at, PITCH * 2, b);
      load_tiles(a_at + at, a[0]);
      load_tiles(a_at + at + 32, a[1]);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++) mma(c[quarter][n], a[i], b[i][n][0], b[i][n][1]);
    }
  }
  if (!WHOLE) __syncthreads();
  float* to = part + (half * HEADS + 2 * (lane & 3)) * PART_PITCH + group * 16 + (lane >> 2);
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    float* p = to + n * 8 * PART_PITCH;
    p[0] = c[0][n][0] + c[1][n][0]; p[PART_PITCH] = c[0][n][1] + c[1][n][1];
    p[8] = c[0][n][2] + c[1][n][2]; p[PART_PITCH + 8] = c[0][n][3] + c[1][n][3];
  }
}
struct Weights { float peak, total; };
// Weights of a block from its scores, in their place as bf16 [HEADS][P_PITCH]. Eight threads a head; all of
// them return the head's peak and sum.
__device__ __forceinline__ Weights weigh(float* part, const u8* exist, float scale) {
  const int head = (int)threadIdx.x >> 3, g = threadIdx.x & 7;
  const bool active = head < HEADS;
  Weights w = {MINUS_INF, 0.f};
  u16 rounded[8];
  if (active) {
    float s[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float* p = part + head * PART_PITCH + 8 * i + g;
      s[i] = (p[0] + p[HEADS * PART_PITCH]) * scale;
      if (!((exist[i] >> g) & 1)) s[i] = MINUS_INF;
      w.peak = fmaxf(w.peak, s[i]);
    }
#pragma unroll
    for (int bit = 1; bit < 8; bit <<= 1) w.peak = fmaxf(w.peak, __shfl_xor_sync(0xffffffffu, w.peak, bit));
    float sum[4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 p = to_bf162(exp_of(s[i] - w.peak), 0.f);
      rounded[i] = (u16)p;
      sum[i / 2] = i % 2 ? sum[i / 2] + low_float(p) : low_float(p);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int bit = 1; bit < 8; bit <<= 1) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], bit);
    }
    w.total = ((sum[0] + sum[1]) + sum[2]) + sum[3];
  }
  __syncthreads();
  if (active) {
    u16* to = (u16*)part + head * P_PITCH + g;
#pragma unroll
    for (int i = 0; i < 8; i++) to[8 * i] = rounded[i];
  }
  return w;
}
// Weighted rows: dimensions HEAD / 8 * warp and on, by heads.
__device__ __forceinline__ void sum_rows(float acc[M_TILES][N_TILES][4], u32 rows_at, u32 p_at) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 a_at = rows_at + ((lane & 7) + (lane >> 4) * 8) * PITCH * 2 + warp * (HEAD / 4) + ((lane >> 3) & 1) * 16;
#pragma unroll
  for (int k = 0; k < BLOCK / 16; k += 2) {
    u32 b[2][N_TILES][2];
    load_two_steps(p_at + k * 32, P_PITCH * 2, b);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        u32 a[4];
        load_turned(a_at + (k + i) * 16 * PITCH * 2 + m * 32, a);
#pragma unroll
        for (int n = 0; n < N_TILES; n++) mma(acc[m][n], a, b[i][n][0], b[i][n][1]);
      }
  }
}

#define SOURCE_ARGS(name) \
  const u8 *__restrict__ name##_values, const u8 *__restrict__ name##_scales, int name##_format, \
      int name##_page_rows, int name##_value_step, int name##_scale_step
#define SOURCE_OF(name) \
  { name##_values, name##_scales, name##_format, name##_page_rows, name##_value_step, name##_scale_step }

// q [T][N][HEAD]. Without WHOLE, sums [T][blocks][N][HEAD] fp32 and stats [T][blocks][N] (peak, total),
// grid (blocks, T, N / HEADS up); a block without entries leaves a peak of minus infinity and no sums.
// With WHOLE, out [T][N][HEAD] bf16, grid (1, T, N / HEADS up).
extern "C" __global__ void __launch_bounds__(32 * WARPS, WHOLE && HEADS == 32 ? 1 : 2) attend(
    const u16* __restrict__ q, const float* __restrict__ cos, const float* __restrict__ sin,
    SOURCE_ARGS(window), SOURCE_ARGS(pool), const int* __restrict__ window_list,
    const int* __restrict__ pool_list, int window_num, int pool_num, const float* __restrict__ sink,
    float* __restrict__ sums, float2* __restrict__ stats, u16* __restrict__ out, int N, int scale_bits) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ u8 exist[WARPS];
  u16* rows = (u16*)shared;
  u16* queries = (u16*)(shared + ROWS_BYTES);
  float* part = (float*)(shared + ROWS_BYTES + (WHOLE ? Q_BYTES : 0));
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row = blockIdx.y, first = blockIdx.z * HEADS, blocks = (window_num + pool_num + BLOCK - 1) / BLOCK;
  const float scale = __int_as_float(scale_bits);
  const Source window = SOURCE_OF(window), pool = SOURCE_OF(pool);
  const List list = {pool_list + (u64)row * pool_num, window_list + (u64)row * window_num, pool_num, window_num};
  const u32 rows_at = smem_address(rows), q_at = smem_address(queries), part_at = smem_address(part);
  let_consumer_start();
  wait_for_producer();
#if WHOLE
  __shared__ float alphas[HEADS], betas[HEADS];
  float total = 0.f, peak = MINUS_INF;
  float there[M_TILES][N_TILES][4] = {};
  ask_queries(q_at, q + (u64)row * N * HEAD, first, N);
  wait_for_copies();
  __syncthreads();
  turn_queries(queries, ask_angles(cos + row * PAIRS, sin + row * PAIRS));
#pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    const AskedRows asked = ask_rows(list, window, pool, block, row_at(list, block));
    put_rows(rows, asked, list, window, pool, block);
    if (lane == 0) exist[warp] = (u8)asked.exist;
    if (!__syncthreads_or(asked.exist)) continue;
    score_halves(part, rows_at, q_at);
    __syncthreads();
    const Weights w = weigh(part, exist, scale);
    if ((int)threadIdx.x < 8 * HEADS) {
      const Merge m = merge_peaks(peak, w.peak);
      peak = m.peak;
      total = merge(total, w.total, m.alpha, m.beta);
      if ((threadIdx.x & 7) == 0) { alphas[threadIdx.x >> 3] = m.alpha; betas[threadIdx.x >> 3] = m.beta; }
    }
    __syncthreads();
    float acc[M_TILES][N_TILES][4] = {};
    sum_rows(acc, rows_at, part_at);
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int head = n * 8 + 2 * (lane & 3) + (i & 1);
        const float alpha = alphas[head], beta = betas[head];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) there[m][n][i] = merge(there[m][n][i], acc[m][n][i], alpha, beta);
      }
    __syncthreads();
  }
  if ((int)threadIdx.x < 8 * HEADS && (threadIdx.x & 7) == 0) {
    const int head = threadIdx.x >> 3;
    const Finish f = finish(peak, total, first + head < N ? sink[first + head] : 0.f);
    alphas[head] = f.factor; betas[head] = f.total;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int head = n * 8 + 2 * (lane & 3) + (i & 1);
      const float factor = alphas[head], all = betas[head];
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        const int dim = warp * (HEAD / 8) + m * 16 + (lane >> 2) + (i & 2) * 4;
        rows[head * PITCH + dim] = (u16)to_bf162(__fdiv_rn(there[m][n][i] * factor, all), 0.f);
      }
    }
  __syncthreads();
  for (int i = threadIdx.x; i < HEADS * HEAD / 8; i += 32 * WARPS) {
    const int head = i / (HEAD / 8), dim = 8 * (i % (HEAD / 8)), pair = (dim - HEAD) / 2 + PAIRS;
    if (first + head >= N) continue;
    uint4 v = *(const uint4*)(rows + head * PITCH + dim);
    if (pair >= 0) {
      const float4 c = *(const float4*)(cos + row * PAIRS + pair), s = *(const float4*)(sin + row * PAIRS + pair);
      v = rotate_eight(v, c, make_float4(-s.x, -s.y, -s.z, -s.w));
    }
    *(uint4*)(out + ((u64)row * N + first + head) * HEAD + dim) = v;
  }
#else
  const int number = row_at(list, blockIdx.x);
  ask_queries(q_at, q + (u64)row * N * HEAD, first, N);
  const Angles angles = ask_angles(cos + row * PAIRS, sin + row * PAIRS);
  const AskedRows asked = ask_rows(list, window, pool, blockIdx.x, number);
  put_rows(rows, asked, list, window, pool, blockIdx.x);
  if (lane == 0) exist[warp] = (u8)asked.exist;
  wait_for_copies();
  const u64 line = ((u64)row * blocks + blockIdx.x) * N + first;
  if (!__syncthreads_or(asked.exist)) {
    if ((int)threadIdx.x < HEADS && first + (int)threadIdx.x < N) stats[line + threadIdx.x] = make_float2(MINUS_INF, 0.f);
    return;
  }
  turn_queries(queries, angles);
  score_halves(part, rows_at, q_at);
  __syncthreads();
  const Weights w = weigh(part, exist, scale);
  if ((int)threadIdx.x < 8 * HEADS && (threadIdx.x & 7) == 0 && first + (int)(threadIdx.x >> 3) < N)
    stats[line + (threadIdx.x >> 3)] = make_float2(w.peak, w.total);
  __syncthreads();
  float acc[M_TILES][N_TILES][4] = {};
  sum_rows(acc, rows_at, part_at);
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int head = n * 8 + 2 * (lane & 3) + (i & 1);
      if (first + head >= N) continue;
      float* to = sums + (line + head) * HEAD + warp * (HEAD / 8) + (lane >> 2) + (i & 2) * 4;
#pragma unroll
      for (int m = 0; m < M_TILES; m++) to[m * 16] = acc[m][n][i];
    }
#endif
}

#if !WHOLE
// Merges what `attend` left. Four dimensions a thread; grid (T, N * HEAD / 512 up).
extern "C" __global__ void __launch_bounds__(128) attend_finish(
    const float* __restrict__ sums, const float2* __restrict__ stats, const float* __restrict__ cos,
    const float* __restrict__ sin, const float* __restrict__ sink, u16* __restrict__ out, int N, int blocks) {
  constexpr int AHEAD = 10;
  const int row = blockIdx.x, at = (blockIdx.y * 128 + threadIdx.x) * 4, head = at / HEAD, dim = at % HEAD;
  let_consumer_start();
  wait_for_producer();
  if (head >= N) return;
  const float2* stat = stats + (u64)row * blocks * N + head;
  const float* sum = sums + ((u64)row * blocks * N + head) * HEAD + dim;
  const Turn turn = turn_of(cos + row * PAIRS, sin + row * PAIRS, dim);
  const float my_sink = __ldcg(sink + head);
  Running r = running();
#pragma unroll 1
  for (int b = 0; b < blocks; b += AHEAD) {
    float2 s[AHEAD];
    float4 o[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      s[i] = make_float2(MINUS_INF, 0.f);
      if (b + i < blocks) {
        s[i] = __ldcg(stat + (u64)(b + i) * N);
        o[i] = __ldcg((const float4*)(sum + (u64)(b + i) * N * HEAD));
      }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) add_block(r, s[i], o[i]);
  }
  store_four(out + ((u64)row * N + head) * HEAD + dim, r, my_sink, turn);
}
#endif
