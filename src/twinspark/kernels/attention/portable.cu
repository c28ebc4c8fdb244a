// Attention of many queries with mma.sync, for devices without wgmma, in the bits of rows.cu.
//
// Persistent blocks of eight warps, one a multiprocessor; an item is a (query, 32 heads). A list block is decoded
// once, into shared memory. To score, a warp has a quarter of all dimensions, whose queries stay in its registers
// for the whole item, and half of the entries; quarters meet in shared memory, and each warp weighs 8 heads. To
// sum, a warp has 64 dimensions. The next list block's packed rows are on their way into registers meanwhile, the
// next item's too.
//
// Macros, besides those of common.cuh (HEAD 512): none.
#include "common.cuh"
#define HEADS 32
#define N_TILES (HEADS / 8)
#include "mma.cuh"
#include "packed.cuh"
#include "finish.cuh"

#define WARPS 8
#define WARP_ROWS (BLOCK / WARPS)
#define LINE (2 * HEAD)  // bytes of a row in shared memory; the 16 bytes of number i lie at i ^ (i >> 3 & 1) ^ (row & 7)
#define STEPS (HEAD / 4 / 16)     // of 16 dimensions in a quarter
#define M_TILES (HEAD / WARPS / 16)
#define P_PITCH (BLOCK + 8)
#define TURNED (PAIRS / 4)        // groups of 8 dimensions that are rotated

struct Shared {
  u8 rows[BLOCK * LINE];
  float4 parts[WARPS][3][2][32];  // of the scores a warp weighs: other quarters', by 16 entries, by lane
  u16 weights[HEADS * P_PITCH];
  float4 merge[WARPS][HEADS / 2];  // alpha and beta of two heads, each warp's own
  float4 totals[HEADS];            // of 16 entries each
  float peaks[2][HEADS];           // of 32 entries each
  u64 exist[2];                    // entries that there are, by turns
};
static_assert(sizeof(Shared) == 97552, "plan.py asks for this much");

// The four warps of 32 entries; the two of 8 heads.
__device__ __forceinline__ void group_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 5) : "memory"); }
__device__ __forceinline__ void pair_sync(int quarter) { asm volatile("bar.sync %0, 64;" ::"r"(quarter + 1) : "memory"); }

struct Lists { const int *window, *pool; int window_num, pool_num, blocks, pool_blocks, items, groups; };
struct Task { int item, row, block; };  // row: of the item's query
__device__ __forceinline__ Task after(const Task& t, const Lists& lists) {
  if (t.block + 1 < lists.blocks) return {t.item, t.row, t.block + 1};
  const int item = t.item + (int)gridDim.x;
  return {item, lists.groups == 1 ? item : item / lists.groups, 0};
}
// The row number that a lane finds in its place of a list, lanes 0 to 7 a warp's rows.
__device__ __forceinline__ int number_at(int thread, const Lists& lists, const Task& t) {
  int e = t.block * BLOCK + (thread >> 5) * WARP_ROWS + (thread & 7);
  if (t.item >= lists.items) return -1;
  if (t.block < lists.pool_blocks) return __ldcg(lists.pool + (u64)t.row * lists.pool_num + e);
  e -= lists.pool_num;
  return e < lists.window_num ? __ldcg(lists.window + (u64)t.row * lists.window_num + e) : -1;
}

__device__ __forceinline__ void say_exist(int thread, Shared& shared, u32 turn, int number) {
  const u32 mine = __ballot_sync(0xffffffffu, number >= 0);  // the same of each eight lanes
  if ((thread & 31) == 0) ((u8*)&shared.exist[turn & 1])[thread >> 5] = (u8)mine;
}

// ---- rows of a list block: a warp's eight

// As they lie: 16 values a lane of each row; scales of row lane / 4, a fourth of it a lane.
struct Held { u32 values[WARP_ROWS][4], scales[2]; };
template <int FORMAT>
__device__ __forceinline__ void ask_packed(int thread, Held& held, const Source& source, u32 magic, int number) {
  const int lane = thread & 31;
  const Found found = find_group<FORMAT>(source, magic, number);
  const u8* values = source.values + lane * (FORMAT == COMPRESSED ? 8 : 16);
  const u8* scales = source.scales + (u64)__shfl_sync(0xffffffffu, found.scale_at, lane >> 2) * 16;
  if (FORMAT == COMPRESSED) {
    const uint2 two = __ldcg((const uint2*)scales + (lane & 3));
    held.scales[0] = two.x; held.scales[1] = two.y;
  } else {
    held.scales[0] = __ldcg((const u32*)scales + (lane & 3));
  }
#pragma unroll
  for (int r = 0; r < WARP_ROWS; r++) load_values<FORMAT>(held.values[r], values + (u64)__shfl_sync(0xffffffffu, found.value_at, r) * 16);
}
// The scale byte of a lane's values of row r.
template <int FORMAT>
__device__ __forceinline__ u32 scale_of(int thread, const Held& held, int r) {
  const int lane = thread & 31, from = 4 * r + (lane >> 3);
  const u32 first = __shfl_sync(0xffffffffu, held.scales[0], from);
  if (FORMAT == WINDOW) return __byte_perm(first, 0, 0x4440 | ((lane >> 1) & 3));
  return __byte_perm(first, __shfl_sync(0xffffffffu, held.scales[1], from), lane & 7) & 0xff;
}
// Rows that are bf16 already are copied when they are put.
__device__ __forceinline__ void ask_rows(int thread, Held& held, const Source& source, u32 magic, int number) {
  if (source.format == COMPRESSED) ask_packed<COMPRESSED>(thread, held, source, magic, number);
  else if (source.format == WINDOW) ask_packed<WINDOW>(thread, held, source, magic, number);
}
template <int FORMAT>
__device__ __forceinline__ void put_packed(int thread, u32 rows_at, Held& held, u32 exist) {
  const int lane = thread & 31;
  const u32 to = rows_at + (thread >> 5) * (WARP_ROWS * LINE) + lane * 32 + ((lane >> 2) & 1) * 16;
  if (exist != (1u << WARP_ROWS) - 1) {
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++)
      if (!((exist >> r) & 1)) held.values[r][0] = held.values[r][1] = held.values[r][2] = held.values[r][3] = 0;
    // scales, too: one that is infinite would make no number of them
    if (!((exist >> (lane >> 2)) & 1)) held.scales[0] = held.scales[1] = 0;
  }
#pragma unroll
  for (int r = 0; r < WARP_ROWS; r++) put_values<FORMAT>((to + r * LINE) ^ (r * 16), held.values[r], scale_of<FORMAT>(thread, held, r), false);
}
__device__ __forceinline__ void put_plain(int thread, u32 rows_at, const u8* values, int number) {
  const int lane = thread & 31;
  const u32 to = rows_at + (thread >> 5) * (WARP_ROWS * LINE) + (lane ^ ((lane >> 3) & 1)) * 16;
#pragma unroll
  for (int r = 0; r < WARP_ROWS; r++) {
    const int row = __shfl_sync(0xffffffffu, number, r), bytes = row >= 0 ? 16 : 0;
    const u8* from = values + (u64)max(row, 0) * LINE + lane * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) copy_16((to + r * LINE + half * 512) ^ (r * 16), from + half * 512, bytes);
  }
  wait_for_copies();
}
__device__ __forceinline__ void put_rows(int thread, u32 rows_at, Held& held, const Source& source, int number, u32 exist) {
  if (source.format == COMPRESSED) put_packed<COMPRESSED>(thread, rows_at, held, exist);
  else if (source.format == WINDOW) put_packed<WINDOW>(thread, rows_at, held, exist);
  else put_plain(thread, rows_at, source.values, number);
}

// ---- queries: the B operands of a warp's quarter

typedef u32 Queries[STEPS][N_TILES][2];
// An item's queries on their way to where rows lie between items, zeros where there is no head; 16 bytes of number i
// lie at i ^ (head & 7).
__device__ __forceinline__ void ask_queries(int thread, u32 to, const u16* q, int first, int N) {
  const int dim = 8 * (thread & 63);
#pragma unroll
  for (int i = 0; i < HEADS / 4; i++) {
    const int head = 4 * i + (thread >> 6), bytes = first + head < N ? 16 : 0;
    copy_16(to + head * LINE + (dim * 2 ^ (head & 7) * 16), q + (bytes ? (u64)(first + head) * HEAD + dim : 0), bytes);
  }
}
__device__ __forceinline__ void take_queries(int thread, Queries to, u32 from) {
  const int lane = thread & 31, quarter = (thread >> 5) & 3;
  wait_for_copies();
  __syncthreads();
  const u32 at = (from + ((lane & 7) + (lane >> 4) * 8) * LINE + quarter * (HEAD / 2) + ((lane >> 3) & 1) * 16) ^ ((lane & 7) * 16);
#pragma unroll
  for (int k = 0; k < STEPS; k++)
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      u32 r[4];
      load_tiles((at ^ (k * 32)) + n * 8 * LINE, r);
      to[k][n][0] = r[0]; to[k][n][1] = r[1]; to[k][n + 1][0] = r[2]; to[k][n + 1][1] = r[3];
    }
  __syncthreads();
}
// Angles of a query, a pair a lane, and on their way to who needs which, through what is a warp's own.
struct Angle { float cos, sin; };
__device__ __forceinline__ Angle ask_angle(int thread, const float* cos, const float* sin, int row) {
  const u64 at = (u64)row * PAIRS + (thread & (PAIRS - 1));
  return {__ldcg(cos + at), __ldcg(sin + at)};
}
__device__ __forceinline__ const Angle* show_angles(int thread, Shared& shared, const Angle& mine) {
  Angle* to = (Angle*)shared.merge[thread >> 5];
  __syncwarp();
  to[thread & 31] = mine;
  __syncwarp();
  return to;
}
// Rotated dimensions are the last ones of the last quarter.
__device__ __forceinline__ void turn_queries(int thread, Queries queries, Shared& shared, const Angle& mine) {
  if (((thread >> 5) & 3) != 3) return;
  const Angle* angles = show_angles(thread, shared, mine) + (thread & 3);
#pragma unroll
  for (int j = 0; j < TURNED; j++) {
    const int i = 2 * STEPS - TURNED + j;
    const Angle a = angles[4 * j];
#pragma unroll
    for (int n = 0; n < N_TILES; n++) queries[i / 2][n][i % 2] = rotate_pair(queries[i / 2][n][i % 2], a.cos, a.sin);
  }
}

// ---- scores and weights

// Scores of 32 entries by the 8 heads a warp weighs, from four warps: s[i][4] as a product leaves 16 entries.
__device__ __forceinline__ void score(int thread, float s[2][4], Shared& shared, u32 rows_at, const Queries queries) {
  const int warp = thread >> 5, lane = thread & 31, quarter = warp & 3, group = warp >> 2;
  const u32 a_at = (rows_at + (group * 32 + (lane & 15)) * LINE + quarter * (HEAD / 2) + (lane >> 4) * 16) ^ ((lane & 7) * 16);
  float c[2][N_TILES][4] = {};
#pragma unroll
  for (int k = 0; k < STEPS; k++)
#pragma unroll
    for (int m = 0; m < 2; m++) {
      u32 a[4];
      load_tiles((a_at ^ (k * 32 + (k >> 2) * 16)) + m * 16 * LINE, a);
#pragma unroll
      for (int n = 0; n < N_TILES; n++) mma(c[m][n], a, queries[k][n][0], queries[k][n][1]);
    }
  float4 own[2];
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const float4 v = make_float4(c[m][n][0], c[m][n][1], c[m][n][2], c[m][n][3]);
      if (n == quarter) own[m] = v;
      else shared.parts[group * 4 + n][quarter - (quarter > n)][m][lane] = v;
    }
  group_sync(group);
#pragma unroll
  for (int m = 0; m < 2; m++) {
    float4 v[4];
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = k == quarter ? own[m] : shared.parts[warp][k - (k > quarter)][m][lane];
    s[m][0] = (v[0].x + v[1].x) + (v[2].x + v[3].x);
    s[m][1] = (v[0].y + v[1].y) + (v[2].y + v[3].y);
    s[m][2] = (v[0].z + v[1].z) + (v[2].z + v[3].z);
    s[m][3] = (v[0].w + v[1].w) + (v[2].w + v[3].w);
  }
}
// Their weights, and what merging needs, into shared memory. A thread has entries lane / 4 and 8 on of each 16, of
// heads 2 (lane % 4) and the next.
__device__ __forceinline__ void weigh(int thread, Shared& shared, float s[2][4], u64 exist, float scale) {
  const int warp = thread >> 5, lane = thread & 31, quarter = warp & 3, group = warp >> 2;
  const int head = 8 * quarter + 2 * (lane & 3);
  const u32 mine = (u32)(exist >> (32 * group)) >> (lane >> 2);
  float peak[2] = {MINUS_INF, MINUS_INF};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float& x = s[i >> 2][i & 3];
    x = (mine >> (8 * (i >> 1))) & 1 ? x * scale : MINUS_INF;
    peak[i & 1] = fmaxf(peak[i & 1], x);
  }
#pragma unroll
  for (int bit = 4; bit < 32; bit <<= 1)
#pragma unroll
    for (int h = 0; h < 2; h++) peak[h] = fmaxf(peak[h], __shfl_xor_sync(0xffffffffu, peak[h], bit));
  if (lane < 4) *(float2*)&shared.peaks[group][head] = make_float2(peak[0], peak[1]);
  pair_sync(quarter);
  const float2 other = *(const float2*)&shared.peaks[group ^ 1][head];
  peak[0] = fmaxf(peak[0], other.x);
  peak[1] = fmaxf(peak[1], other.y);
  u32 w[4];
  float sum[2][2];
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = to_bf162(exp_of(s[i >> 1][2 * (i & 1)] - peak[0]), exp_of(s[i >> 1][2 * (i & 1) + 1] - peak[1]));
  store_turned(smem_address(shared.weights) + ((8 * quarter + (lane & 7)) * P_PITCH + group * 32 + (lane >> 3) * 8) * 2, w[0], w[1], w[2], w[3]);
#pragma unroll
  for (int m = 0; m < 2; m++) {
    sum[m][0] = low_float(w[2 * m]) + low_float(w[2 * m + 1]);
    sum[m][1] = high_float(w[2 * m]) + high_float(w[2 * m + 1]);
#pragma unroll
    for (int bit = 4; bit < 32; bit <<= 1)
#pragma unroll
      for (int h = 0; h < 2; h++) sum[m][h] += __shfl_xor_sync(0xffffffffu, sum[m][h], bit);
  }
  if (lane < 4)
#pragma unroll
    for (int h = 0; h < 2; h++) ((float2*)&shared.totals[head + h])[group] = make_float2(sum[0][h], sum[1][h]);
}

// ---- sums

// What a lane knows of the head of its number, in every warp alike.
struct Kept { float peak, total; };
__device__ __forceinline__ void merge_stats(int thread, Shared& shared, Kept& kept) {
  const int lane = thread & 31;
  const float4 part = shared.totals[lane];
  const Merge m = merge_peaks(kept.peak, fmaxf(shared.peaks[0][lane], shared.peaks[1][lane]));
  kept.peak = m.peak;
  kept.total = merge(kept.total, ((part.x + part.y) + part.z) + part.w, m.alpha, m.beta);
  ((float2*)shared.merge[thread >> 5])[lane] = make_float2(m.alpha, m.beta);
  __syncwarp();
}
typedef float Sums[M_TILES][N_TILES][4];
__device__ __forceinline__ void sum_rows(int thread, Sums there, Shared& shared, u32 rows_at) {
  const int warp = thread >> 5, lane = thread & 31;
  const u32 a_at = (rows_at + ((lane & 7) + (lane >> 4) * 8) * LINE + warp * 128 + ((lane >> 3) & 1) * 16) ^ (((lane & 7) ^ (warp & 1)) * 16);
#pragma unroll
  for (int pair = 0; pair < M_TILES; pair += 2) {
    float c[2][N_TILES][4] = {};
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k += 2) {
      u32 b[2][N_TILES][2];
      load_two_steps(smem_address(shared.weights) + k * 32, P_PITCH * 2, b);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int m = 0; m < 2; m++) {
          u32 a[4];
          load_turned((a_at ^ ((pair + m) * 32)) + (k + i) * 16 * LINE, a);
#pragma unroll
          for (int n = 0; n < N_TILES; n++) mma(c[m][n], a, b[i][n][0], b[i][n][1]);
        }
    }
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const float4 f = shared.merge[warp][4 * n + (lane & 3)];
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& sum = there[pair + m][n][i];
          sum = merge(sum, c[m][n][i], i & 1 ? f.z : f.x, i & 1 ? f.w : f.y);
        }
    }
  }
}
// What a finished item's sums of 8 heads still go through; `out` is of the item's first head, of `heads` there are.
struct Ending { Finish finish; float inverse; const Angle* angles; u16* out; int heads; };
__device__ __forceinline__ void store_heads(int thread, const Sums there, int n, const Ending& end) {
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, head = 8 * n + 2 * (lane & 3);
  float factor[2], total[2], inverse[2], sums[16], quotients[16];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    factor[h] = __shfl_sync(0xffffffffu, end.finish.factor, head + h);
    total[h] = __shfl_sync(0xffffffffu, end.finish.total, head + h);
    inverse[h] = __shfl_sync(0xffffffffu, end.inverse, head + h);
  }
#pragma unroll
  for (int i = 0; i < 16; i++) sums[i] = there[i >> 2][n][i & 3];
  divide(quotients, sums, factor, total, inverse);
#pragma unroll
  for (int m = 0; m < M_TILES; m++) {
    u32 w[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int j = 2 * m + i - (2 * M_TILES - TURNED);
      w[i] = pair_up(quotients[4 * m + 2 * i], quotients[4 * m + 2 * i + 1]);
      if (warp == WARPS - 1 && j >= 0) {
        const Angle a = end.angles[4 * j + (g >> 1)];
        w[i] = rotate_pair(w[i], a.cos, -a.sin);
      }
    }
    const bool upper = g & 2;  // four neighbouring dimensions a lane: whole sectors
    const u32 other = __shfl_xor_sync(0xffffffffu, upper ? w[0] : w[1], 8);
    const int to = head + (g & 1), dim = warp * 64 + m * 16 + (upper ? 8 : 0) + (g & 4);
    if (to < end.heads) *(uint2*)(end.out + to * HEAD + dim) = upper ? make_uint2(other, w[1]) : make_uint2(w[0], other);
  }
}

#define SOURCE_ARGS(name) \
  const u8 *name##_values, const u8 *name##_scales, int name##_format, int name##_page_rows, int name##_value_step, int name##_scale_step
#define SOURCE_OF(pick, name) pick ? pool_##name : window_##name

// As `attend` of rows.cu with WHOLE, for pool_num a multiple of BLOCK. grid: T * N / 32 up at most; items are dealt
// in turn.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) attend_portable(
    const u16* q, const float* cos, const float* sin, SOURCE_ARGS(window), SOURCE_ARGS(pool), const int* window_list,
    const int* pool_list, int window_num, int pool_num, const float* sink, u16* out, int N, int scale_bits, int T) {
  extern __shared__ __align__(1024) u8 raw_shared[];
  Shared& shared = *(Shared*)raw_shared;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const float scale = __int_as_float(scale_bits);
  const u32 rows_at = smem_address(shared.rows);
  const int groups = (N + HEADS - 1) / HEADS, pool_blocks = pool_num / BLOCK;
  const Lists lists = {window_list, pool_list, window_num, pool_num, pool_blocks + (window_num + BLOCK - 1) / BLOCK, pool_blocks, T * groups, groups};
  const u32 window_magic = 0xffffffffu / (u32)window_page_rows, pool_magic = 0xffffffffu / (u32)pool_page_rows;
#define SOURCE(task) \
  {SOURCE_OF((task).block < pool_blocks, values), SOURCE_OF((task).block < pool_blocks, scales), SOURCE_OF((task).block < pool_blocks, format), \
   SOURCE_OF((task).block < pool_blocks, page_rows), SOURCE_OF((task).block < pool_blocks, value_step), SOURCE_OF((task).block < pool_blocks, scale_step)}
  int thread = threadIdx.x;
  let_consumer_start();
  wait_for_producer();
  Task now = {(int)blockIdx.x, (int)blockIdx.x / groups, 0}, next = after(now, lists);
  Held held;
  Queries queries;
  Sums there = {};
  Kept kept = {MINUS_INF, 0.f};
  int number = number_at(thread, lists, now), ahead = number_at(thread, lists, next);
  {
    const int row = now.row;
    const Source source = SOURCE(now);
    ask_queries(thread, rows_at, q + (u64)row * N * HEAD, (now.item - row * groups) * HEADS, N);
    ask_rows(thread, held, source, now.block < pool_blocks ? pool_magic : window_magic, number);
    const Angle turning = ask_angle(thread, cos, sin, row);
    take_queries(thread, queries, rows_at);
    turn_queries(thread, queries, shared, turning);
  }
  say_exist(thread, shared, 0, number);
  __syncthreads();
#pragma unroll 1
  for (u32 turn = 0; now.item < lists.items; turn++) {
    asm volatile("" : "+r"(thread));  // addresses are made anew in each turn, as registers are short
    const u64 exist = *(volatile u64*)&shared.exist[turn & 1];
    {
      const Source source = SOURCE(now), next_source = SOURCE(next);
      if (exist) put_rows(thread, rows_at, held, source, number, (u32)(exist >> (8 * warp)) & 0xff);
      number = ahead;
      ask_rows(thread, held, next_source, next.block < pool_blocks ? pool_magic : window_magic, number);
      say_exist(thread, shared, turn + 1, number);
      ahead = number_at(thread, lists, after(next, lists));
    }
    if (exist) {
      group_sync(warp >> 2);
      float s[2][4];
      score(thread, s, shared, rows_at, queries);
      weigh(thread, shared, s, exist, scale);
      __syncthreads();
      merge_stats(thread, shared, kept);
      sum_rows(thread, there, shared, rows_at);
    }
    __syncthreads();
    if (now.block == lists.blocks - 1) {
      const int row = now.row, first = (now.item - row * groups) * HEADS;
      const int then = min(next.item, lists.items - 1), then_row = min(next.row, T - 1);
      Ending end;
      ask_queries(thread, rows_at, q + (u64)then_row * N * HEAD, (then - then_row * groups) * HEADS, N);
      const Angle turning = ask_angle(thread, cos, sin, then_row);
      end.angles = show_angles(thread, shared, ask_angle(thread, cos, sin, row));
      end.finish = finish(kept.peak, kept.total, first + lane < N ? __ldcg(sink + first + lane) : 0.f);
      end.inverse = __frcp_rn(end.finish.total);
      end.out = out + ((u64)row * N + first) * HEAD;
      end.heads = N - first;
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        store_heads(thread, there, n, end);
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) there[m][n][i] = 0.f;
      }
      take_queries(thread, queries, rows_at);
      turn_queries(thread, queries, shared, turning);
      kept = {MINUS_INF, 0.f};
    }
    now = next;
    next = after(next, lists);
  }
}
