// Attention of many queries with the asynchronous matrix instructions of sm_90a, in the bits of rows.cu.
//
// Persistent blocks; an item is a (query, 32 heads). Warpgroups have roles: two sum weighted rows (256
// dimensions each), one scores and weighs, one decodes rows into a ring of two list blocks. A list block is
// eight panels of 64 entries by 64 dimensions, 128-byte lines in the hardware's swizzle: as they lie they are
// the left operand of scores (entries by dimensions) and, turned, of sums (dimensions by entries).
//
// Macros, besides those of common.cuh (HEAD 512): none.
#include "common.cuh"

#define HEADS 32
#define STAGES 2
#define PANEL_BYTES (BLOCK * 128)
#define ROWS_BYTES (8 * PANEL_BYTES)
#define Q_BYTES (HEADS * HEAD * 2)
#define P_BYTES (HEADS * 128)
#define STATS 4  // merge factors of this many list blocks are kept
#define Q_VECTORS (HEADS * HEAD / 8 / 128)  // of 16 bytes a thread of the scoring warpgroup brings

struct Stat { float alpha[HEADS], beta[HEADS], factor[HEADS], total[HEADS]; };

__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
  asm volatile(
      "{\n .reg .pred p;\n again:\n mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      " @p bra done;\n bra again;\n done:\n }" ::"r"(at), "r"(parity) : "memory");
}
__device__ __forceinline__ void show_to_matrix_unit() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void scorers_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
template <int N> __device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// 128-byte lines, swizzled; groups of 8 lines are 1,024 bytes apart.
__device__ __forceinline__ u64 lines_descriptor(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
// 64 x 16 by 16 x 32; TURNED: lines of the left operand run along its 64 rows.
template <int TURNED> __device__ __forceinline__ void wgmma(float c[16], u64 a, u64 b, int add) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "%16, %17, p, 1, 1, %19, 0;\n }"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
        "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
      : "l"(a), "l"(b), "r"(add), "n"(TURNED));
}

struct Shared {
  u8 rows[STAGES][ROWS_BYTES];
  u8 queries[2][Q_BYTES];
  u8 weights[STAGES][P_BYTES];
  Stat stats[STATS];
  float peaks[4][HEADS], totals[4][HEADS];
  u64 exist[STAGES];
  u64 full[STAGES], empty[STAGES], weighed[STAGES];
};

// Where 16 bytes of line `line` lie, `byte` in [0, 128) a multiple of 16.
__device__ __forceinline__ u32 swizzled(int line, int byte) { return line * 128 + (byte ^ ((line & 7) << 4)); }

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

// A run of list blocks whose rows have one packed format. A warp has 16 lines of each block and decodes GROUP
// of them, WORDS words a lane, while the next ones are on their way; `ahead` is the row number of the
// lane's line of the first group, asked for by the run before.
template <int FORMAT, int GROUP, int WORDS>
__device__ __forceinline__ void decode_run(Shared& shared, const Source& source, const Run& run, u32& turn, int& ahead) {
  constexpr int PARTS = 16 / GROUP, VALUE_BYTES = 128 * WORDS, SCALE_BYTES = FORMAT == WINDOW ? HEAD / 32 : HEAD / 16;
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, steps = run.blocks * PARTS;
  const u8* values = source.values + lane * 4 * WORDS;
  const u8* scales = source.scales + (FORMAT == WINDOW ? lane / 2 : lane);
  const bool swap = (lane >> 2) & 1;  // which half goes first, so that stores meet no bank twice
  u32 raw[GROUP][WORDS], scale[GROUP], value_at = 0, scale_at = 0, valid = 0, exist = 0;
  if (steps == 0) return;
#define FIND_GROUP() /* where the next rows lie, in 16 bytes */                                              \
  {                                                                                                          \
    const int page = max(ahead, 0) / source.page_rows, in_page = max(ahead, 0) - page * source.page_rows;    \
    value_at = (u32)page * (source.value_step / 16) + (u32)in_page * (VALUE_BYTES / 16);                     \
    scale_at = (u32)page * (source.scale_step / 16) + (u32)in_page * (SCALE_BYTES / 16);                     \
    valid = __ballot_sync(0xffffffffu, ahead >= 0) & ((1u << GROUP) - 1);                                    \
  }
#define LOAD_ROW(r)                                                                                          \
  {                                                                                                          \
    const u64 from = (u64)__shfl_sync(0xffffffffu, value_at, r) * 16;                                        \
    const u64 scale_from = (u64)__shfl_sync(0xffffffffu, scale_at, r) * 16;                                  \
    _Pragma("unroll") for (int w = 0; w < WORDS; w++) raw[r][w] = 0;                                         \
    scale[r] = 0;                                                                                            \
    if ((valid >> r) & 1) {                                                                                  \
      if (WORDS == 2) { const uint2 v = __ldcg((const uint2*)(values + from)); raw[r][0] = v.x; raw[r][1] = v.y; } \
      else {                                                                                                 \
        const uint4 v = __ldcg((const uint4*)(values + from));                                               \
        raw[r][0] = v.x; raw[r][1] = v.y; raw[r][WORDS - 2] = v.z; raw[r][WORDS - 1] = v.w;                  \
      }                                                                                                      \
      scale[r] = __ldcg(scales + scale_from);                                                                \
    }                                                                                                        \
  }
// the next run may decode another number of lines at a time, up to 16
#define POSITION(step) ((step) / PARTS * BLOCK + warp * 16 + ((step) < steps ? (step) % PARTS * GROUP + lane % GROUP : lane & 15))
  FIND_GROUP();
  ahead = row_ahead(run, POSITION(1));
#pragma unroll
  for (int r = 0; r < GROUP; r++) LOAD_ROW(r);
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    const int stage = turn % STAGES, part = step % PARTS;
    const bool more = step + 1 < steps;
    exist |= valid << (part * GROUP);
    if (more) {
      FIND_GROUP();
      ahead = row_ahead(run, POSITION(step + 2));
    }
    if (part == 0) wait_empty(shared, turn);
    u8* panel = shared.rows[stage] + (lane >> 2) * PANEL_BYTES;
#pragma unroll
    for (int r = 0; r < GROUP; r++) {
      const int line = warp * 16 + part * GROUP + r, byte = (lane & 3) * 32;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const bool second = half ? !swap : swap;
        uint4 v;
        if (FORMAT == COMPRESSED) v = e2m1_eight(second ? raw[r][1] : raw[r][0], e4m3_scale(scale[r]));
        else v = e4m3_eight(second ? raw[r][WORDS - 2] : raw[r][0], second ? raw[r][WORDS - 1] : raw[r][1], e8m0_scale(scale[r]));
        *(uint4*)(panel + swizzled(line, byte + (second ? 16 : 0))) = v;
      }
      if (more) LOAD_ROW(r);
    }
    if (part == PARTS - 1) {
      if (lane == 0) ((u16*)&shared.exist[stage])[warp] = (u16)exist;
      exist = 0;
      say_full(shared, stage, 1);
      turn++;
    }
  }
#undef FIND_GROUP
#undef LOAD_ROW
#undef POSITION
}

// The same for rows that are bf16 already: copied without passing through registers. Two warps take every
// other list block, so that one block can be on its way while another is waited for.
__device__ __forceinline__ void copy_run(Shared& shared, const Source& source, const Run& run, u32& turn, int& ahead) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
#pragma unroll 1
  for (int block = 0; block < run.blocks; block++, turn++) {
    if ((turn & 1) != (u32)(warp >> 1)) continue;
    const int stage = turn % STAGES, first = (warp & 1) * 32, row = row_ahead(run, block * BLOCK + first + lane);
    const u32 exist = __ballot_sync(0xffffffffu, row >= 0);
    wait_empty(shared, turn);
    const u32 to = smem_address(shared.rows[stage]) + (lane >> 3) * PANEL_BYTES;
#pragma unroll 8
    for (int r = 0; r < 32; r++) {
      const int from_row = __shfl_sync(0xffffffffu, row, r), bytes = from_row >= 0 ? 16 : 0;
      const u8* from = source.values + (u64)max(from_row, 0) * (2 * HEAD) + lane * 16;
#pragma unroll
      for (int half = 0; half < 2; half++)
        copy_16(to + half * 4 * PANEL_BYTES + swizzled(first + r, (lane & 7) * 16), from + half * 512, bytes);
    }
    wait_for_copies();
    if (lane == 0) ((u32*)&shared.exist[stage])[warp & 1] = exist;
    say_full(shared, stage, 2);
  }
  if (run.blocks) ahead = row_ahead(run, run.blocks * BLOCK + warp * 16 + (lane & 15));
}

__device__ __forceinline__ void bring_run(Shared& shared, const Source& source, const Run& run, u32& turn, int& ahead) {
  if (source.format == COMPRESSED) decode_run<COMPRESSED, 8, 2>(shared, source, run, turn, ahead);
  else if (source.format == WINDOW) decode_run<WINDOW, 4, 4>(shared, source, run, turn, ahead);
  else copy_run(shared, source, run, turn, ahead);
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
__device__ __forceinline__ void score(float s[16], u32 rows_at, u32 q_at) {
  float c[4][16];
  wgmma_fence();
#pragma unroll
  for (int quarter = 0; quarter < 4; quarter++)
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int panel = 2 * quarter + k / 4;
      wgmma<0>(c[quarter], lines_descriptor(rows_at + panel * PANEL_BYTES + k % 4 * 32),
               lines_descriptor(q_at + panel * (HEADS * 128) + k % 4 * 32), k > 0);
    }
  wgmma_commit();
  wgmma_wait();
#pragma unroll
  for (int i = 0; i < 16; i++) s[i] = (c[0][i] + c[1][i]) + (c[2][i] + c[3][i]);
}
// Weights of a list block into shared memory, heads by entries. A thread has entries 16 warp + lane / 4 and
// 8 on, of heads 8 n + 2 (lane % 4) and the next: s[4 n + 2 later + head & 1].
__device__ __forceinline__ void weigh(Shared& shared, u8* to, float s[16], u64 exist, float scale) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, entry = 16 * warp + (lane >> 2);
  const bool here = (exist >> entry) & 1, later = (exist >> (entry + 8)) & 1;
  float peak[8];
#pragma unroll
  for (int i = 0; i < 16; i++) s[i] = (i & 2 ? later : here) ? s[i] * scale : MINUS_INF;
#pragma unroll
  for (int h = 0; h < 8; h++) {
    const int i = 4 * (h >> 1) + (h & 1);
    peak[h] = fmaxf(s[i], s[i + 2]);
#pragma unroll
    for (int bit = 4; bit < 32; bit <<= 1) peak[h] = fmaxf(peak[h], __shfl_xor_sync(0xffffffffu, peak[h], bit));
  }
  if (lane < 4) {
#pragma unroll
    for (int h = 0; h < 8; h++) shared.peaks[warp][8 * (h >> 1) + 2 * lane + (h & 1)] = peak[h];
  }
  scorers_sync();
  float total[8];
#pragma unroll
  for (int h = 0; h < 8; h++) {
    const int i = 4 * (h >> 1) + (h & 1), head = 8 * (h >> 1) + 2 * (lane & 3) + (h & 1);
    const float top = fmaxf(fmaxf(shared.peaks[0][head], shared.peaks[1][head]),
                            fmaxf(shared.peaks[2][head], shared.peaks[3][head]));
    const u32 pair = to_bf162(exp_of(s[i] - top), exp_of(s[i + 2] - top));
    *(u16*)(to + swizzled(head, entry / 8 * 16) + entry % 8 * 2) = (u16)pair;
    *(u16*)(to + swizzled(head, (entry / 8 + 1) * 16) + entry % 8 * 2) = (u16)(pair >> 16);
    total[h] = low_float(pair) + high_float(pair);
#pragma unroll
    for (int bit = 4; bit < 32; bit <<= 1) total[h] += __shfl_xor_sync(0xffffffffu, total[h], bit);
  }
  if (lane < 4) {
#pragma unroll
    for (int h = 0; h < 8; h++) shared.totals[warp][8 * (h >> 1) + 2 * lane + (h & 1)] = total[h];
  }
  show_to_matrix_unit();
  scorers_sync();
}

// ---- sums

// Two neighbouring dimensions of a head into each lane, rounded: a lane has dimension g = lane / 4 of heads
// 2 c and 2 c + 1; it leaves with those of g & ~1 and the next, of head 2 c + (g & 1).
__device__ __forceinline__ u32 pair_up(float even_head, float odd_head) {
  const bool odd = threadIdx.x & 4;
  const float mine = odd ? odd_head : even_head, other = __shfl_xor_sync(0xffffffffu, odd ? even_head : odd_head, 4);
  return odd ? to_bf162(other, mine) : to_bf162(mine, other);
}
// A finished row's sums of 256 dimensions to `out`, whose first head is the item's.
__device__ __forceinline__ void store_row(
    const float there[4][16], const Stat& stat, int half, u16* out, const float* cos, const float* sin, int heads) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const int head = 8 * n + 2 * (lane & 3);
    const float factor[2] = {stat.factor[head], stat.factor[head + 1]}, total[2] = {stat.total[head], stat.total[head + 1]};
#pragma unroll
    for (int m = 0; m < 4; m++) {
      u32 w[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float* v = there[m] + 4 * n + 2 * i;
        w[i] = pair_up(__fdiv_rn(v[0] * factor[0], total[0]), __fdiv_rn(v[1] * factor[1], total[1]));
        const int dim = half * 256 + m * 64 + warp * 16 + i * 8 + (g & 6), pair = (dim - HEAD) / 2 + PAIRS;
        if (pair >= 0) w[i] = rotate_pair(w[i], cos[pair], -sin[pair]);
      }
      const bool upper = g & 2;  // four neighbouring dimensions a lane: whole sectors
      const u32 other = __shfl_xor_sync(0xffffffffu, upper ? w[0] : w[1], 8);
      const int to = head + (g & 1), dim = half * 256 + m * 64 + warp * 16 + (upper ? 8 : 0) + (g & 4);
      if (to < heads) *(uint2*)(out + to * HEAD + dim) = upper ? make_uint2(other, w[1]) : make_uint2(w[0], other);
    }
  }
}

#define SOURCE_ARGS(name) \
  const u8 *__restrict__ name##_values, const u8 *__restrict__ name##_scales, int name##_format, \
      int name##_page_rows, int name##_value_step, int name##_scale_step
#define SOURCE_OF(name) \
  { name##_values, name##_scales, name##_format, name##_page_rows, name##_value_step, name##_scale_step }

// As `attend` of rows.cu with WHOLE, for pool_num a multiple of BLOCK. grid: any; items are dealt in turn.
extern "C" __global__ void __launch_bounds__(512, 1) attend_prompt(
    const u16* __restrict__ q, const float* __restrict__ cos, const float* __restrict__ sin,
    SOURCE_ARGS(window), SOURCE_ARGS(pool), const int* __restrict__ window_list,
    const int* __restrict__ pool_list, int window_num, int pool_num, const float* __restrict__ sink,
    u16* __restrict__ out, int N, int scale_bits, int T) {
  extern __shared__ __align__(1024) u8 raw_shared[];
  Shared& shared = *(Shared*)raw_shared;
  const int role = threadIdx.x >> 7, lane = threadIdx.x & 31;
  const int groups = (N + HEADS - 1) / HEADS, items = T * groups;
  const int pool_blocks = pool_num / BLOCK, window_blocks = (window_num + BLOCK - 1) / BLOCK, blocks = pool_blocks + window_blocks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(smem_address(&shared.full[i]), 4);
      barrier_init(smem_address(&shared.empty[i]), 8);
      barrier_init(smem_address(&shared.weighed[i]), 128);
    }
    barriers_ready();
  }
  __syncthreads();
  let_consumer_start();
  wait_for_producer();
  u32 turn = 0;
  if (role == 3) {
    fewer_registers<72>();
    const Source window = SOURCE_OF(window), pool = SOURCE_OF(pool);
    const int first_num = pool_blocks ? pool_num : window_num;
    const int* lists = pool_blocks ? pool_list : window_list;  // where a query's list begins
    int item = blockIdx.x, row = item / groups, ahead = -1;
    const Run before = {nullptr, lists + (u64)row * first_num, 0, item < items ? first_num : 0, 0};
    ahead = row_ahead(before, ((threadIdx.x >> 5) & 3) * 16 + (lane & 15));
    for (; item < items; item += gridDim.x) {
      row = item / groups;
      const int then = item + gridDim.x;
      const int* from_window = window_list + (u64)row * window_num;
      const Run first = {pool_list + (u64)row * pool_num, from_window, pool_num, window_num, pool_blocks};
      const Run second = {from_window, lists + (u64)(then / groups) * first_num, window_num, then < items ? first_num : 0, window_blocks};
      bring_run(shared, pool, first, turn, ahead);
      bring_run(shared, window, second, turn, ahead);
    }
  } else if (role == 2) {
    fewer_registers<104>();
    const float scale = __int_as_float(scale_bits);
    const int head = threadIdx.x & 127;  // of the threads that merge
    int buffer = 0;
    Queries next = {q, cos, sin, 0, N};
    for (int item = blockIdx.x; item < items; item += gridDim.x, buffer ^= 1) {
      const int then = item + gridDim.x;
      if (item == (int)blockIdx.x) {
        next = queries_of(q, cos, sin, item, groups, N);
        ask_queries(shared.queries[0], next);
      }
      const int first = next.first;
      const float my_sink = head < HEADS && first + head < N ? sink[first + head] : 0.f;
      float peak = MINUS_INF, total = 0.f;
      turn_queries(shared.queries[buffer], next);
      if (then < items) {
        next = queries_of(q, cos, sin, then, groups, N);
        ask_queries(shared.queries[buffer ^ 1], next);
      }
      for (int block = 0; block < blocks; block++, turn++) {
        const int stage = turn % STAGES;
        barrier_wait(smem_address(&shared.full[stage]), (turn / STAGES) & 1);
        const u64 exist = *(volatile u64*)&shared.exist[stage];
        if (exist) {
          float s[16];
          score(s, smem_address(shared.rows[stage]), smem_address(shared.queries[buffer]));
          weigh(shared, shared.weights[stage], s, exist, scale);
        }
        if (head < HEADS) {
          Stat& stat = shared.stats[turn % STATS];
          if (exist) {
            const float top = fmaxf(fmaxf(shared.peaks[0][head], shared.peaks[1][head]),
                                    fmaxf(shared.peaks[2][head], shared.peaks[3][head]));
            const float sum = ((shared.totals[0][head] + shared.totals[1][head]) + shared.totals[2][head]) + shared.totals[3][head];
            const Merge m = merge_peaks(peak, top);
            peak = m.peak;
            total = merge(total, sum, m.alpha, m.beta);
            stat.alpha[head] = m.alpha;
            stat.beta[head] = m.beta;
          }
          const Finish f = finish(peak, total, my_sink);
          stat.factor[head] = f.factor;
          stat.total[head] = f.total;
        }
        barrier_arrive(smem_address(&shared.weighed[stage]));
      }
    }
  } else {
    more_registers<168>();
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      float there[4][16] = {};
      for (int block = 0; block < blocks; block++, turn++) {
        const int stage = turn % STAGES;
        barrier_wait(smem_address(&shared.weighed[stage]), (turn / STAGES) & 1);
        const bool any = *(volatile u64*)&shared.exist[stage] != 0;
        float c[4][16];
        if (any) {
          const u32 a_at = smem_address(shared.rows[stage]) + role * 4 * PANEL_BYTES, b_at = smem_address(shared.weights[stage]);
          wgmma_fence();
#pragma unroll
          for (int m = 0; m < 4; m++)
#pragma unroll
            for (int k = 0; k < BLOCK / 16; k++)
              wgmma<1>(c[m], lines_descriptor(a_at + m * PANEL_BYTES + k * 2048), lines_descriptor(b_at + k * 32), k > 0);
          wgmma_commit();
          wgmma_wait();
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&shared.empty[stage]));
        if (any) {
          const Stat& stat = shared.stats[turn % STATS];
#pragma unroll
          for (int n = 0; n < 4; n++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
              const float alpha = stat.alpha[8 * n + 2 * (lane & 3) + odd], beta = stat.beta[8 * n + 2 * (lane & 3) + odd];
#pragma unroll
              for (int m = 0; m < 4; m++)
#pragma unroll
                for (int i = odd; i < 4; i += 2) there[m][4 * n + i] = merge(there[m][4 * n + i], c[m][4 * n + i], alpha, beta);
            }
        }
      }
      const int row = item / groups, first = item % groups * HEADS;
      store_row(there, shared.stats[(turn - 1) % STATS], role, out + ((u64)row * N + first) * HEAD,
                cos + (u64)row * PAIRS, sin + (u64)row * PAIRS, N - first);
    }
  }
}
