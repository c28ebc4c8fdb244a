// Attention of many queries with the asynchronous matrix instructions of sm_90a, in the bits of rows.cu.
//
// Persistent blocks; an item is a (query, 32 heads). Warpgroups have roles: two sum weighted rows (256
// dimensions each), one scores and weighs, DECODERS decode rows into a ring of two list blocks. A list block
// is eight panels of 64 entries by 64 dimensions, 128-byte lines in the hardware's swizzle: as they lie they
// are the left operand of scores (entries by dimensions) and, turned, of sums (dimensions by entries).
//
// Macros, besides those of common.cuh (HEAD 512): none.
#include "common.cuh"
#include "packed.cuh"
#include "finish.cuh"
#include "hopper.cuh"

#define HEADS 32
#define STAGES 2
#define PANEL_BYTES (BLOCK * 128)
#define ROWS_BYTES (8 * PANEL_BYTES)
#define Q_BYTES (HEADS * HEAD * 2)
#define P_BYTES (HEADS * 128)
#define STATS 4  // merge factors of this many list blocks are kept
#define Q_VECTORS (HEADS * HEAD / 8 / 128)  // of 16 bytes a thread of the scoring warpgroup brings
#define DECODERS 2
#define DECODE_WARPS (4 * DECODERS)
#define LINES (BLOCK / DECODE_WARPS)  // of a list block that a warp decodes
#define THREADS (128 * (3 + DECODERS))

struct Factors { float alpha, beta; };
struct __align__(16) Stat { Factors merge[HEADS]; float factor[HEADS], total[HEADS], inverse[HEADS]; };

__device__ __forceinline__ void scorers_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

struct Shared {
  u8 rows[STAGES][ROWS_BYTES];
  u8 queries[2][Q_BYTES];
  u8 weights[STAGES][P_BYTES];
  Stat stats[STATS];
  float4 peaks[STAGES][HEADS], totals[STAGES][HEADS];  // of the four scoring warps
  u64 exist[STAGES];
  u64 full[STAGES], empty[STAGES], weighed[STAGES], merged[STAGES];
};
static_assert(sizeof(Shared) <= 209536, "plan.py asks for this much");

// ---- decoding rows

// Row numbers of a list that runs on into the next run's: position `at` of `blocks` list blocks.
struct Run { const int *list, *next_list; int num, next_num, blocks; };
__device__ __forceinline__ int row_ahead(const Run& run, int at) {
  if (at < run.blocks * BLOCK) return at < run.num ? __ldcg(run.list + at) : -1;
  at -= run.blocks * BLOCK;
  return at < run.next_num ? __ldcg(run.next_list + at) : -1;
}
__device__ __forceinline__ void say_full(Shared& shared, int stage, int arrivals) {
  show_to_matrix_unit();
  __syncwarp();
  if ((int)(threadIdx.x & 31) < arrivals) barrier_arrive(smem_address(&shared.full[stage]));
}
__device__ __forceinline__ void wait_empty(Shared& shared, u32 turn) {
  barrier_wait(smem_address(&shared.empty[turn % STAGES]), ((turn / STAGES) & 1) ^ 1);
}

// A decoding thread; opaque, so that the compiler keeps the numbers instead of reading special registers again.
struct Decoder { int warp, lane; };
__device__ __forceinline__ Decoder decoder() {
  Decoder d = {(int)(threadIdx.x >> 5) - 12, (int)(threadIdx.x & 31)};
  asm volatile("" : "+r"(d.warp), "+r"(d.lane));
  return d;
}
// 16 values of a row as they lie; of row 0 where there is none, as loads that may not happen are waited for.
struct Held { u32 v[4], scale; };
template <int FORMAT>
__device__ __forceinline__ void ask_row(Held& h, const u8* values, const u8* scales, const Found& found, int r) {
  const u8* from = values + (u64)__shfl_sync(0xffffffffu, found.value_at, r) * 16;
  const u8* scale_from = scales + (u64)__shfl_sync(0xffffffffu, found.scale_at, r) * 16;
  load_values<FORMAT>(h.v, from);
  h.scale = __ldcg(scale_from);
}

// A run of list blocks whose rows have one packed format. A warp decodes GROUP of its lines while the next ones
// are on their way; `ahead` is the row number of the lane's line of the first group, asked for by the run before.
template <int FORMAT, int GROUP>
__device__ __forceinline__ void decode_run(
    Shared& shared, const Decoder& me, const Source& source, const Run& run, u32& turn, int& ahead) {
  constexpr int PARTS = LINES / GROUP;
  const int warp = me.warp, lane = me.lane, steps = run.blocks * PARTS;
  const bool swap = lane & 4;
  const u8* values = source.values + lane * (FORMAT == COMPRESSED ? 8 : 16);
  const u8* scales = source.scales + (FORMAT == WINDOW ? lane / 2 : lane);
  const u32 to = smem_address(shared.rows[0]) + (lane >> 2) * PANEL_BYTES + warp * (LINES * 128) + (lane & 3) * 32 + (swap ? 16 : 0);
  const u32 magic = 0xffffffffu / (u32)source.page_rows;
  u32 exist = 0;
  if (steps == 0) return;
  asm volatile("" : "+l"(values), "+l"(scales));  // sums that are kept, not made anew for each row
// the next run may decode another number of lines at a time, up to 8
#define POSITION(step) ((step) / PARTS * BLOCK + warp * LINES + ((step) < steps ? (step) % PARTS * GROUP + lane % GROUP : lane % 8))
  Found found = find_group<FORMAT>(source, magic, ahead);
  ahead = row_ahead(run, POSITION(1));
  Held held[GROUP];
#pragma unroll
  for (int r = 0; r < GROUP; r++) ask_row<FORMAT>(held[r], values, scales, found, r);
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    const int stage = turn % STAGES, part = step % PARTS;
    const u32 valid = found.valid & ((1u << GROUP) - 1);
    exist |= valid << (part * GROUP);
    found = find_group<FORMAT>(source, magic, ahead);
    if (step + 1 == steps) found.value_at = found.scale_at = 0;  // `ahead` is the next run's
    else ahead = row_ahead(run, POSITION(step + 2));
    if (part == 0) wait_empty(shared, turn);
    if (valid != (1u << GROUP) - 1) {
#pragma unroll
      for (int r = 0; r < GROUP; r++)
        if (!((valid >> r) & 1)) held[r] = {};
    }
    const u32 at = (to + stage * ROWS_BYTES + part * GROUP / 8 * 1024) ^ (part * GROUP % 8 * 144);
#pragma unroll
    for (int r = 0; r < GROUP; r++) {
      put_values<FORMAT>(at ^ (r * 144), held[r].v, held[r].scale, swap);
      ask_row<FORMAT>(held[r], values, scales, found, r);
    }
    if (part == PARTS - 1) {
      if (lane == 0) {
        ((u8*)&shared.exist[stage])[warp] = (u8)exist;
      }
      exist = 0;
      say_full(shared, stage, 1);
      turn++;
    }
  }
#undef POSITION
}

// The same for rows that are bf16 already: copied without passing through registers. Half the warps take every
// other list block, so that one block can be on its way while another is waited for.
__device__ __forceinline__ void copy_run(
    Shared& shared, const Decoder& me, const Source& source, const Run& run, u32& turn, int& ahead) {
  constexpr int HALF = DECODE_WARPS / 2, ROWS = BLOCK / HALF;
  const int warp = me.warp, lane = me.lane;
#pragma unroll 1
  for (int block = 0; block < run.blocks; block++, turn++) {
    if ((turn & 1) != (u32)(warp / HALF)) continue;
    const int stage = turn % STAGES, first = warp % HALF * ROWS, row = row_ahead(run, block * BLOCK + first + lane % ROWS);
    const u32 exist = __ballot_sync(0xffffffffu, row >= 0);
    wait_empty(shared, turn);
    const u32 to = smem_address(shared.rows[stage]) + (lane >> 3) * PANEL_BYTES;
#pragma unroll 8
    for (int r = 0; r < ROWS; r++) {
      const int from_row = __shfl_sync(0xffffffffu, row, r), bytes = from_row >= 0 ? 16 : 0;
      const u8* from = source.values + (u64)max(from_row, 0) * (2 * HEAD) + lane * 16;
#pragma unroll
      for (int half = 0; half < 2; half++)
        copy_16(to + half * 4 * PANEL_BYTES + swizzled(first + r, (lane & 7) * 16), from + half * 512, bytes);
    }
    wait_for_copies();
    if (lane == 0) {
      ((u16*)&shared.exist[stage])[warp % HALF] = (u16)exist;
    }
    say_full(shared, stage, 2);
  }
  if (run.blocks) ahead = row_ahead(run, run.blocks * BLOCK + warp * LINES + lane % 8);
}

__device__ __forceinline__ void bring_run(
    Shared& shared, const Decoder& me, const Source& source, const Run& run, u32& turn, int& ahead) {
  if (source.format == COMPRESSED) decode_run<COMPRESSED, 8>(shared, me, source, run, turn, ahead);
  else if (source.format == WINDOW) decode_run<WINDOW, 4>(shared, me, source, run, turn, ahead);
  else copy_run(shared, me, source, run, turn, ahead);
}

// ---- scoring and weighing

// Queries of an item on their way into swizzled panels; where there is no head, zeros.
struct Queries { const u16* q; const float *cos, *sin; int first, N; };
__device__ __forceinline__ void ask_queries(u8* to, const Queries& from) {
  const int t = threadIdx.x & 127, dim = 8 * (t & 63);
#pragma unroll
  for (int i = 0; i < Q_VECTORS; i++) {
    const int head = 2 * i + (t >> 6), bytes = from.first + head < from.N ? 16 : 0;
    const u16* at = from.q + (bytes ? (u64)(from.first + head) * HEAD + dim : 0);
    copy_16(smem_address(to) + (dim >> 6) * (HEADS * 128) + swizzled(head, (dim & 63) * 2), at, bytes);
  }
}
__device__ __forceinline__ Queries queries_of(const u16* q, const float* cos, const float* sin, int item, int groups, int N) {
  const int row = item / groups;
  return {q + (u64)row * N * HEAD, cos + (u64)row * PAIRS, sin + (u64)row * PAIRS, item % groups * HEADS, N};
}
// Waits for them and rotates what is to be rotated: the last panel or a part of it, a fourth of a head a thread.
__device__ __forceinline__ void turn_queries(u8* to, const Queries& from) {
  wait_for_copies();
  scorers_sync();
  const int t = threadIdx.x & 127, head = t >> 2;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int vector = 2 * (t & 3) + i, pair = 4 * vector - 32 + PAIRS;
    uint4* at = (uint4*)(to + 7 * (HEADS * 128) + swizzled(head, vector * 16));
    if (pair >= 0) *at = rotate_eight(*at, __ldcg((const float4*)(from.cos + pair)), __ldcg((const float4*)(from.sin + pair)));
  }
  show_to_matrix_unit();
  scorers_sync();
}
__device__ __forceinline__ void score(float s[16], u32 rows, u32 queries) {
  float c[4][16];
  wgmma_fence();
#pragma unroll
  for (int quarter = 0; quarter < 4; quarter++)
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int panel = 2 * quarter + k / 4;
      wgmma<0>(c[quarter], descriptor(rows + panel * (PANEL_BYTES / 16) + k % 4 * 2),
               descriptor(queries + panel * (HEADS * 128 / 16) + k % 4 * 2), k > 0);
    }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < 16; i++) s[i] = (c[0][i] + c[1][i]) + (c[2][i] + c[3][i]);
}
// Eight values, each over the eight lanes that differ in bits 2, 3 and 4, in the order of a butterfly. Halves
// of the values change lanes, so a lane leaves with one: that of the bits' number, the lowest bit first.
template <bool LARGEST> __device__ __forceinline__ float over_lanes(const float v[8]) {
  float left[8];
#pragma unroll
  for (int h = 0; h < 8; h++) left[h] = v[h];
#pragma unroll
  for (int bit = 4, half = 4; half > 0; bit <<= 1, half >>= 1) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int h = 0; h < half; h++) {
      const float other = __shfl_xor_sync(0xffffffffu, upper ? left[h] : left[h + half], bit), mine = upper ? left[h + half] : left[h];
      left[h] = LARGEST ? fmaxf(mine, other) : mine + other;
    }
  }
  return left[0];
}
__device__ __forceinline__ float largest(float4 v) { return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)); }
// Weights of a list block into shared memory, heads by entries. A thread has entries 16 warp + lane / 4 and
// 8 on, of heads 8 n + 2 (lane % 4) and the next: s[4 n + 2 later + head & 1].
__device__ __forceinline__ void weigh(
    float4 peaks[HEADS], float4 totals[HEADS], u32 to, float s[16], u64 exist, float scale) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, entry = 16 * warp + (lane >> 2);
  const bool here = (exist >> entry) & 1, later = (exist >> (entry + 8)) & 1;
  const int head = (lane & 4) * 4 + (lane & 8) + 2 * (lane & 3) + (lane >> 4);  // of what `over_lanes` leaves
  float v[8];
#pragma unroll
  for (int i = 0; i < 16; i++) s[i] = (i & 2 ? later : here) ? s[i] * scale : MINUS_INF;
#pragma unroll
  for (int h = 0; h < 8; h++) v[h] = fmaxf(s[4 * (h >> 1) + (h & 1)], s[4 * (h >> 1) + (h & 1) + 2]);
  ((float*)&peaks[head])[warp] = over_lanes<true>(v);
  scorers_sync();
  u32 w[8];
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const float4* peak = peaks + 8 * n + 2 * (lane & 3);
    const float even = largest(peak[0]), odd = largest(peak[1]);
    w[2 * n] = to_bf162(exp_of(s[4 * n] - even), exp_of(s[4 * n + 1] - odd));
    w[2 * n + 1] = to_bf162(exp_of(s[4 * n + 2] - even), exp_of(s[4 * n + 3] - odd));
    v[2 * n] = low_float(w[2 * n]) + low_float(w[2 * n + 1]);
    v[2 * n + 1] = high_float(w[2 * n]) + high_float(w[2 * n + 1]);
  }
  const u32 at = to + swizzled((lane >> 4) * 8 + (lane & 7), (2 * warp + ((lane >> 3) & 1)) * 16);
  store_turned(at, w[0], w[1], w[2], w[3]);
  store_turned(at + 16 * 128, w[4], w[5], w[6], w[7]);
  ((float*)&totals[head])[warp] = over_lanes<false>(v);
  show_to_matrix_unit();
}

// ---- sums

// A finished row's sums of 256 dimensions to `out`, whose first head is the item's.
__device__ __forceinline__ void store_row(
    const float there[4][16], const Stat& stat, int half, u16* out, const float* cos, const float* sin, int heads) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const int head = 8 * n + 2 * (lane & 3);
    const float factor[2] = {stat.factor[head], stat.factor[head + 1]}, total[2] = {stat.total[head], stat.total[head + 1]};
    const float inverse[2] = {stat.inverse[head], stat.inverse[head + 1]};
    float sums[16], q[16];
#pragma unroll
    for (int i = 0; i < 16; i++) sums[i] = there[i >> 2][4 * n + (i & 3)];
    divide(q, sums, factor, total, inverse);
#pragma unroll
    for (int m = 0; m < 4; m++) {
      u32 w[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        w[i] = pair_up(q[4 * m + 2 * i], q[4 * m + 2 * i + 1]);
        const int dim = half * 256 + m * 64 + warp * 16 + i * 8 + (g & 6), pair = (dim - HEAD) / 2 + PAIRS;
        if (m == 3 && pair >= 0) w[i] = rotate_pair(w[i], cos[pair], -sin[pair]);  // PAIRS is 32 at most
      }
      const bool upper = g & 2;  // four neighbouring dimensions a lane: whole sectors
      const u32 other = __shfl_xor_sync(0xffffffffu, upper ? w[0] : w[1], 8);
      const int to = head + (g & 1), dim = half * 256 + m * 64 + warp * 16 + (upper ? 8 : 0) + (g & 4);
      if (to < heads) *(uint2*)(out + to * HEAD + dim) = upper ? make_uint2(other, w[1]) : make_uint2(w[0], other);
    }
  }
}
__device__ __forceinline__ void add_panel(float there[16], const float c[16], const Stat& stat) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const float4 f = *(const float4*)&stat.merge[8 * n + 2 * (lane & 3)];  // alpha and beta of two heads
#pragma unroll
    for (int i = 0; i < 4; i++) there[4 * n + i] = merge(there[4 * n + i], c[4 * n + i], i & 1 ? f.z : f.x, i & 1 ? f.w : f.y);
  }
}
// A panel's weighted rows on their way.
__device__ __forceinline__ void ask_panel(float c[16], u32 rows, u32 weights) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK / 16; k++) wgmma<1>(c, descriptor(rows + k * 128), descriptor(weights + k * 2), k > 0);
  wgmma_commit();
}

#define SOURCE_ARGS(name) \
  const u8 *__restrict__ name##_values, const u8 *__restrict__ name##_scales, int name##_format, \
      int name##_page_rows, int name##_value_step, int name##_scale_step

// As `attend` of rows.cu with WHOLE, for pool_num a multiple of BLOCK. grid: any; items are dealt in turn.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_prompt(
    const u16* __restrict__ q, const float* __restrict__ cos, const float* __restrict__ sin,
    SOURCE_ARGS(window), SOURCE_ARGS(pool), const int* __restrict__ window_list,
    const int* __restrict__ pool_list, int window_num, int pool_num, const float* __restrict__ sink,
    u16* __restrict__ out, int N, int scale_bits, int T) {
  extern __shared__ __align__(1024) u8 raw_shared[];
  Shared& shared = *(Shared*)raw_shared;
  const int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;
  const int groups = (N + HEADS - 1) / HEADS, items = T * groups;
  const int pool_blocks = pool_num / BLOCK, window_blocks = (window_num + BLOCK - 1) / BLOCK, blocks = pool_blocks + window_blocks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(smem_address(&shared.full[i]), DECODE_WARPS);
      barrier_init(smem_address(&shared.empty[i]), 8);
      barrier_init(smem_address(&shared.weighed[i]), 128);
      barrier_init(smem_address(&shared.merged[i]), HEADS);
    }
    barriers_ready();
  }
  __syncthreads();
  let_consumer_start();
  wait_for_producer();
  u32 turn = 0;
  if (role >= 3) {
    fewer_registers<80>();
    const Decoder me = decoder();
    const int first_num = pool_blocks ? pool_num : window_num;
    const int* lists = pool_blocks ? pool_list : window_list;  // where a query's list begins
    int item = blockIdx.x, row = item / groups, ahead = -1;
    const Run before = {nullptr, lists + (u64)row * first_num, 0, item < items ? first_num : 0, 0};
    ahead = row_ahead(before, me.warp * LINES + lane % 8);
    for (; item < items; item += gridDim.x) {
      row = item / groups;
      const int then = item + gridDim.x;
      const int* from_window = window_list + (u64)row * window_num;
#pragma unroll 1
      for (int kind = 0; kind < 2; kind++) {
        const Source source = {
            kind ? window_values : pool_values, kind ? window_scales : pool_scales, kind ? window_format : pool_format,
            kind ? window_page_rows : pool_page_rows, kind ? window_value_step : pool_value_step,
            kind ? window_scale_step : pool_scale_step};
        const Run run = {
            kind ? from_window : pool_list + (u64)row * pool_num, kind ? lists + (u64)(then / groups) * first_num : from_window,
            kind ? window_num : pool_num, kind ? (then < items ? first_num : 0) : window_num, kind ? window_blocks : pool_blocks};
        bring_run(shared, me, source, run, turn, ahead);
      }
    }
  } else if (role == 2) {
    const float scale = __int_as_float(scale_bits);
    const bool merges = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0) == 8;  // a warp, a head a lane
    int buffer = 0;
    Queries next = {q, cos, sin, 0, N};
    for (int item = blockIdx.x; item < items; item += gridDim.x, buffer ^= 1) {
      const int then = item + gridDim.x;
      if (item == (int)blockIdx.x) {
        next = queries_of(q, cos, sin, item, groups, N);
        ask_queries(shared.queries[0], next);
      }
      const int first = next.first;
      const float my_sink = merges && first + lane < N ? sink[first + lane] : 0.f;
      float peak = MINUS_INF, total = 0.f;
      turn_queries(shared.queries[buffer], next);
      if (then < items) {
        next = queries_of(q, cos, sin, then, groups, N);
        ask_queries(shared.queries[buffer ^ 1], next);
      }
      const u32 rows = lines_at(smem_address(shared.rows[0])), queries = lines_at(smem_address(shared.queries[buffer]));
      for (int block = 0; block < blocks; block++, turn++) {
        const int stage = turn % STAGES;
        barrier_wait(smem_address(&shared.full[stage]), (turn / STAGES) & 1);
        const u64 exist = *(volatile u64*)&shared.exist[stage];
        if (exist) {
          float s[16];
          score(s, rows + stage * (ROWS_BYTES / 16), queries);
          weigh(shared.peaks[stage], shared.totals[stage], smem_address(shared.weights[stage]), s, exist, scale);
        }
        barrier_arrive(smem_address(&shared.weighed[stage]));
        if (merges) {
          Stat& stat = shared.stats[turn % STATS];
          if (exist) {
            barrier_wait(smem_address(&shared.weighed[stage]), (turn / STAGES) & 1);
            const float4 part = shared.totals[stage][lane];
            const Merge m = merge_peaks(peak, largest(shared.peaks[stage][lane]));
            peak = m.peak;
            total = merge(total, ((part.x + part.y) + part.z) + part.w, m.alpha, m.beta);
            stat.merge[lane] = {m.alpha, m.beta};
          }
          if (block == blocks - 1) {
            const Finish f = finish(peak, total, my_sink);
            stat.factor[lane] = f.factor;
            stat.total[lane] = f.total;
            stat.inverse[lane] = __frcp_rn(f.total);
          }
          barrier_arrive(smem_address(&shared.merged[stage]));
        }
      }
    }
  } else {
    more_registers<112>();
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      float there[4][16] = {};
      for (int block = 0; block < blocks; block++, turn++) {
        const int stage = turn % STAGES;
        barrier_wait(smem_address(&shared.weighed[stage]), (turn / STAGES) & 1);
        const bool any = *(volatile u64*)&shared.exist[stage] != 0;
        const u32 rows = lines_at(smem_address(shared.rows[stage]) + role * 4 * PANEL_BYTES);
        const u32 weights = lines_at(smem_address(shared.weights[stage]));
        const Stat& stat = shared.stats[turn % STATS];
        float c[2][16];
        if (any) {
#pragma unroll
          for (int m = 0; m < 2; m++) ask_panel(c[m], rows + m * (PANEL_BYTES / 16), weights);
          barrier_wait(smem_address(&shared.merged[stage]), (turn / STAGES) & 1);
#pragma unroll
          for (int m = 0; m < 3; m++) {
            wgmma_wait<1>();
            add_panel(there[m], c[m & 1], stat);
            if (m < 2) ask_panel(c[m], rows + (m + 2) * (PANEL_BYTES / 16), weights);
          }
          wgmma_wait<0>();
        } else {
          barrier_wait(smem_address(&shared.merged[stage]), (turn / STAGES) & 1);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&shared.empty[stage]));
        if (any) add_panel(there[3], c[1], stat);
      }
      const int row = item / groups, first = item % groups * HEADS;
      store_row(there, shared.stats[(turn - 1) % STATS], role, out + ((u64)row * N + first) * HEAD,
                cos + (u64)row * PAIRS, sin + (u64)row * PAIRS, N - first);
    }
  }
}
