// The experts of an MoE layer for up to 64 rows, in the bits of the EXL3 product of each row alone.
//
// Five kernels: experts that rows have, each with its pairs, where there are two rows or more (experts_list); gate and up
// products with the rotation of their input (experts_hidden), activation and rotation for down (experts_act), down
// products (experts_down), outputs of a row summed by ascending expert (experts_combine). A block of the products takes
// the rows of one expert through one unit of inputs and 16 * WARPS columns. Pair p = row * (A + 1) + place; place A is the
// shared expert.
//
// Those of products can leave the shared expert out, or all others: it needs no router.
//
// Macros: WARPS 4 or 8 of a block, RESIDENT blocks an SM at least, CODEBOOK_MASK codebooks in use.
#include "../exl3/common.cuh"
#include "tables.cuh"

#define MOST_ROWS 64
#define TILE_ROWS 8
#define MOST_PARTS (CHUNK / 128 + 1)  // of a unit: a chunk, and a rest of one part
#define XPITCH (MOST_PARTS * 128 + 8)
#define MOST_PLACES 16
#define MOST_EXPERTS 1024
#define ROW_SHIFT 10              // of an entry of the list: a pair below, its row above
static_assert(MOST_ROWS * MOST_PLACES <= 1 << ROW_SHIFT && MOST_ROWS << ROW_SHIFT <= 1 << 16, "an entry has 16 bits");

// A routed expert that rows have, and its pairs, ascending: pair | row << ROW_SHIFT.
struct __align__(16) Record { int expert, count, spare[2]; u16 entries[MOST_ROWS]; };

__device__ __forceinline__ int id_of(const int* ids, const unsigned char* kept, int at) {
  return kept && !__ldcg(kept + at) ? -1 : __ldcg(ids + at);
}
// The list of two rows and more: record i is that of the i-th expert by id that a row has; from the last one on to
// `items`, expert is -1. A row has an expert once, so there are at most 64 pairs. grid 1, a thread at least for each id,
// whole warps.
extern "C" __global__ void __launch_bounds__(MOST_ROWS * (MOST_PLACES - 1)) experts_list(
    const int* ids, const unsigned char* kept, Record* list, int rows, int places, int items) {
  __shared__ u32 seen[MOST_EXPERTS / 32];
  __shared__ __align__(16) unsigned char counts[MOST_ROWS * (MOST_PLACES - 1) / 32][MOST_EXPERTS];  // by warp
  let_consumer_start();
  const int at = threadIdx.x, lane = at & 31, warp = at >> 5, row = at / places;
  const u32 below = (1u << lane) - 1;
  for (int i = lane; i < MOST_EXPERTS / 16; i += 32) ((uint4*)counts[warp])[i] = make_uint4(0, 0, 0, 0);
  if (at < 32) seen[at] = 0;
  wait_for_producer();
  __syncthreads();
  const int id = at < rows * places ? id_of(ids, kept, at) : -1;
  const u32 alike = __match_any_sync(0xffffffffu, id);
  if (id >= 0 && (alike & below) == 0) {
    counts[warp][id] = __popc(alike);
    atomicOr(seen + (id >> 5), 1u << (id & 31));
  }
  __syncthreads();
  const u32 word = seen[lane];
  int upto = __popc(word);  // different experts, in words up to the lane's
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane >= step) upto += other;
  }
  const int source = max(id, 0) >> 5, num = __shfl_sync(0xffffffffu, upto, 31);
  const u32 smaller = __shfl_sync(0xffffffffu, word, source) & ((1u << (id & 31)) - 1);
  const int item = __shfl_sync(0xffffffffu, upto - __popc(word), source) + __popc(smaller);
  if (at >= num && at < items) list[at].expert = -1;
  if (id < 0) return;
  int place = __popc(alike & below), count = 0;
  for (int w = 0; w < blockDim.x >> 5; w++) {
    const int its = counts[w][id];
    if (w < warp) place += its;
    count += its;
  }
  if (place < MOST_ROWS) list[item].entries[place] = (at + row) | row << ROW_SHIFT;
  if (place == 0) *(int2*)&list[item] = make_int2(id, min(count, MOST_ROWS));
}

__device__ __forceinline__ u32 pair_of(u32 entry) { return entry & ((1 << ROW_SHIFT) - 1); }

// A block's weights: parts of eight k tiles, each with a barrier, asked for by one lane of one warp.
struct Weights {
  const char* from;  // of the first k tile
  u32 to, full_at, bytes, pitch, parts, warp;
};
__device__ __forceinline__ Weights weights_of(
    u32 to, u32 full_at, const Matrix& m, u32 unit, u32 width, u32 outputs, u32 warp) {
  const u32 tile_bytes = 32 * m.bits, bytes = WARPS * tile_bytes, pitch = outputs / 16 * tile_bytes;
  const char* from = (const char*)m.trellis + (u64)pitch * (unit * KTILES) + blockIdx.x * bytes;
  return {from, to, full_at, bytes, pitch, width / 128, warp};
}
__device__ __forceinline__ void ask_for_part(const Weights& w, u32 part) {
  if (!is_elected()) return;
  const char* from = w.from + (u64)w.pitch * (PART * part);
  const u32 barrier = w.full_at + 8 * part;
  u32 to = w.to + part * PART * w.bytes;
  barrier_expect(barrier, PART * w.bytes);
#pragma unroll
  for (int k = 0; k < PART; k++, to += w.bytes, from += w.pitch) bulk_copy(to, from, w.bytes, barrier);
}
// Four warps of the block ask.
__device__ __forceinline__ void ask_for_all(const Weights& w) {
  if (w.warp % (WARPS / 4)) return;
#pragma unroll 1
  for (u32 part = w.warp / (WARPS / 4); part < w.parts; part += 4) ask_for_part(w, part);
}
template <int CODEBOOK, int BITS>
__device__ __forceinline__ void multiply_part(
    float acc[4], const u32* tiles, u32 x_at, const PlacesOf<BITS>& at) {
#pragma unroll
  for (int t = 0; t < PART; t += 2) {
    u32 b[4], w0[4], w1[4];
    load_b(x_at + t * 32, b);
    WordsOf<BITS> words0, words1;
    load_words(words0, tiles + t * WARPS * 8 * BITS, at);
    load_words(words1, tiles + (t + 1) * WARPS * 8 * BITS, at);
    decode_tile<CODEBOOK>(words0, at, w0);
    decode_tile<CODEBOOK>(words1, at, w1);
    mma(acc, w0, b[0], b[1]);
    mma(acc, w1, b[2], b[3]);
  }
}
// Up to 8 rows through a unit; a chunk's sums go to `sums` [pair][matrix][chunk][outputs].
struct Sums { float* at; u32 pair_pitch; int outputs; };
template <int CODEBOOK, int BITS>
__device__ __forceinline__ void multiply_rows(
    const u32* tiles, u32 xs_at, const Weights& w, const Sums& sums, const u16* entries, int count) {
  const int lane = threadIdx.x & 31, row = 2 * (lane & 3);
  const PlacesOf<BITS> at = held(places_of<BITS>(lane));
  const u32 x_at = xs_at + (lane & 7) * XPITCH * 2 + (lane >> 3) * 16;
  float acc[4] = {};
#pragma unroll 1
  for (u32 part = 0; part < w.parts; part++) {
    barrier_wait(w.full_at + 8 * part, 0);
    multiply_part<CODEBOOK, BITS>(acc, tiles + (part * PART * WARPS + w.warp) * 8 * BITS, x_at + part * 256, at);
    if (part % 4 != 3 && part != w.parts - 1) continue;
    float* to = sums.at + part / 4 * sums.outputs + w.warp * 16 + (lane >> 2);
    const u32 two = *(const u32*)(entries + row);
    if (row < count) {
      float* p = to + (u64)pair_of(two) * sums.pair_pitch;
      p[0] = acc[0]; p[8] = acc[2];
    }
    if (row + 1 < count) {
      float* p = to + (u64)pair_of(two >> 16) * sums.pair_pitch;
      p[0] = acc[1]; p[8] = acc[3];
    }
    acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
  }
}
#define CASE(c, b) \
  case 16 * c + b: multiply_rows<c, b>(tiles, xs_at, w, sums, entries, count); break;
#define CASES(c) CASE(c, 1) CASE(c, 2) CASE(c, 3) CASE(c, 4) CASE(c, 5) CASE(c, 6) CASE(c, 7) CASE(c, 8)
__device__ __forceinline__ void multiply_any(
    int kind, const u32* tiles, u32 xs_at, const Weights& w, const Sums& sums, const u16* entries, int count) {
  switch (kind) {
#if CODEBOOK_MASK & 1
    CASES(0)
#endif
#if CODEBOOK_MASK & 2
    CASES(1)
#endif
#if CODEBOOK_MASK & 4
    CASES(2)
#endif
  }
}
// Eight inputs of a lane times their scales, rotated over the 128 of sixteen lanes, to fp16: what rotate_four gives, by
// the same additions and fewer exchanges between lanes.
__device__ __forceinline__ uint4 rotate_eight(const uint4& x, const uint4& suh) {
  const u32 in[4] = {x.x, x.y, x.z, x.w}, scale[4] = {suh.x, suh.y, suh.z, suh.w};
  const int lane = threadIdx.x & 31;
  float v[8];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    v[2 * i] = __uint_as_float(in[i] << 16) * half_to_float(scale[i] & 0xffff);
    v[2 * i + 1] = __uint_as_float(in[i] & 0xffff0000u) * half_to_float(scale[i] >> 16);
  }
#pragma unroll
  for (int step = 1; step < 8; step <<= 1)
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (!(i & step)) {
        const float a = v[i], b = v[i + step];
        v[i] = a + b; v[i + step] = a - b;
      }
#pragma unroll
  for (int bit = 1; bit < 16; bit <<= 1) {
    const float sign = lane & bit ? -1.f : 1.f;  // exact, so that the addition is rounded alone
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(0xffffffffu, v[i], bit));
  }
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; i++) out[i] = to_finite_half2(v[2 * i] * INV_SQRT128, v[2 * i + 1] * INV_SQRT128);
  return make_uint4(out[0], out[1], out[2], out[3]);
}
// Up to 8 rows of x, rotated into shared memory; two warps take a row, first those that ask for no weights.
__device__ __forceinline__ void rotate_rows(
    u16* xs, const u16* suh, const u16* x, u32 inputs, int width, const u16* entries, int count, int warp) {
  if (WARPS == 8) warp = warp >> 1 | (~warp & 1) << 2;
#pragma unroll 1
  for (int row = warp >> 1; row < count; row += WARPS / 2) {
    const u16* from = x + (u64)inputs * (entries[row] >> ROW_SHIFT);
#pragma unroll 1
    for (int first = 256 * (warp & 1); first < width; first += CHUNK) {
      const int k = first + 8 * (threadIdx.x & 31), near = min(k, width - 8);  // lanes behind the end only take part
      const uint4 out = rotate_eight(*(const uint4*)(from + near), *(const uint4*)(suh + near));
      if (k < width) *(uint4*)(xs + row * XPITCH + k) = out;
    }
  }
}
// Up to 8 rows of x as they are, asked for by one lane.
__device__ __forceinline__ void ask_for_rows(
    u32 xs_at, u32 rows_at, const u16* x, u32 inputs, u32 width, const u16* entries, int count) {
  barrier_expect(rows_at, count * width * 2);
#pragma unroll 1
  for (int row = 0; row < count; row++)
    bulk_copy(xs_at + row * XPITCH * 2, x + (u64)inputs * pair_of(entries[row]), width * 2, rows_at);
}
// Run by one warp: where matrices are comes near while the router chooses.
__device__ __forceinline__ void bring_near(const Matrix* table, u32 bytes, int warp) {
  const u32 at = 128 * ((blockIdx.x + gridDim.x * blockIdx.y) * WARPS + warp);
  if ((threadIdx.x & 31) == 0 && at < bytes)
    asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)table + at));
}
struct Found { int expert, count; };
// Item 0 is the shared expert; others come from the list, of a single row from its ids.
__device__ __forceinline__ Found find_item(
    u16* entries, const int* ids, const unsigned char* kept, const Record* list, int rows, int places, int experts,
    int number) {
  const int i = threadIdx.x;
  if (number > 0 && rows > 1) {
    const Record* record = list + (number - 1);
    const u16 entry = i < MOST_ROWS ? __ldcg(record->entries + i) : 0;
    const int2 found = __ldcg((const int2*)record);
    if (i < MOST_ROWS) entries[i] = entry;
    return {found.x, found.y};
  }
  if (i < MOST_ROWS) entries[i] = (i * (places + 1) + (number > 0 ? number - 1 : places)) | i << ROW_SHIFT;
  if (number > 0) return {id_of(ids, kept, number - 1), 1};
  return {experts, rows};
}
// DOWN: down of rotated fp16 x [shard][pair][inputs]; if not, gate and up of bf16 x [rows][inputs].
template <bool DOWN>
__device__ __forceinline__ void products(
    const Tables& tables, const u16* x, const int* ids, const unsigned char* kept, const Record* list, float* work,
    int rows, int places, int experts, int first_item, int items, int inputs, int outputs) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) u64 barriers[MOST_PARTS + 1];     // of the weights' parts, of rows
  __shared__ __align__(4) u16 entries[MOST_ROWS];
  u16* xs = (u16*)shared;                                   // [8][XPITCH]
  u32* tiles = (u32*)(shared + TILE_ROWS * XPITCH * 2);     // [k tile][WARPS][8 * bits]
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  const int unit = DOWN ? blockIdx.y : blockIdx.y >> 1;
  const int which = DOWN ? 2 : blockIdx.y & 1, units = DOWN ? gridDim.y : gridDim.y >> 1;
  const int width = unit == units - 1 ? inputs - unit * CHUNK : CHUNK;  // the last unit has the rest
  const u32 full_at = smem_address(barriers), xs_at = smem_address(xs), rows_at = full_at + 8 * MOST_PARTS;
  if (warp == 0) {
    if (is_elected()) {
      for (int i = 0; i <= MOST_PARTS; i++) barrier_init(full_at + 8 * i, 1);
      barriers_ready();
    }
  }
  int number = blockIdx.z, shard = 0;
  const Matrix* table = tables.t0;
  if (number >= items) {
    do number -= items, shard++; while (number >= items);
    table = tables.of(shard);
  }
  number += first_item;
  if (!DOWN && number == 1) bring_near(table, (experts + 1) * 3 * sizeof(Matrix), warp);
  // The list and the ids are older than the kernel ahead of experts_down; only experts_hidden must wait for them.
  if (!DOWN && number > 0) wait_for_producer();
  const Found item = find_item(entries, ids, kept, list, rows, places, experts, number);
  if (item.expert < 0) {
    wait_for_producer();
    return;
  }
  const Matrix matrix = table[item.expert * 3 + which];
  __syncthreads();
  const Weights weights = weights_of(smem_address(tiles), full_at, matrix, unit, width, outputs, warp);
  ask_for_all(weights);
  wait_for_producer();
  let_consumer_start();  // not before the ids are there: see above
  const u32 num_chunks = (u32)(inputs + CHUNK - 1) / CHUNK, sets = DOWN ? 1 : 2, set_pitch = num_chunks * outputs;
  const u32 others = shard * rows * (places + 1);  // pairs of other shards
  work += (u64)set_pitch * (others * sets + (DOWN ? 0 : which));
  const Sums sums = {work + (u32)(unit * outputs + blockIdx.x * 16 * WARPS), sets * set_pitch, outputs};
  x += unit * CHUNK;
  if (DOWN) x += (u64)others * (u32)inputs;
  for (int first = 0; first < item.count; first += TILE_ROWS) {
    const int count = min(TILE_ROWS, item.count - first);
    if (first > 0) __syncthreads();
    if (DOWN) {
      if (warp == 0)
        if (is_elected()) ask_for_rows(xs_at, rows_at, x, inputs, width, entries + first, count);
      barrier_wait(rows_at, first / TILE_ROWS & 1);
    } else {
      rotate_rows(xs, matrix.suh + unit * CHUNK, x, inputs, width, entries + first, count, warp);
      __syncthreads();
    }
    multiply_any(
        matrix.codebook * 16 + matrix.bits, tiles, xs_at, weights, sums, entries + first, count);
  }
}

// grid (column blocks, units * 2, items * shards); `items` from `first_item` on: 0 is the shared expert.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) experts_hidden(
    const Matrix* t0, const Matrix* t1, const Matrix* t2, const Matrix* t3, const u16* x, const int* ids,
    const unsigned char* kept, const Record* list, float* work, int rows, int places, int experts, int first_item,
    int items, int inputs, int outputs) {
  products<false>(
      {t0, t1, t2, t3}, x, ids, kept, list, work, rows, places, experts, first_item, items, inputs, outputs);
}
// grid (column blocks, units, items * shards).
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) experts_down(
    const Matrix* t0, const Matrix* t1, const Matrix* t2, const Matrix* t3, const u16* x, const int* ids,
    const unsigned char* kept, const Record* list, float* work, int rows, int places, int experts, int first_item,
    int items, int inputs, int outputs) {
  products<true>(
      {t0, t1, t2, t3}, x, ids, kept, list, work, rows, places, experts, first_item, items, inputs, outputs);
}

// Sums of gate and up to the rotated input of down, fp16 [shard][pair][width], of places `first_place` to before
// `end_place` of a row. Two warps take 128 values of a pair, one those of gate and one those of up. grid (width / 128,
// pairs of these places / 2 rounded up, shards).
extern "C" __global__ void __launch_bounds__(128) experts_act(
    const Matrix* t0, const Matrix* t1, const Matrix* t2, const Matrix* t3, const float* work,
    const int* ids, const unsigned char* kept, const float* weights, u16* out,
    int rows, int places, int experts, int first_place, int end_place, int inputs, int width, int limit) {
  __shared__ float4 ups[2][32];
  let_consumer_start();
  const int lane = threadIdx.x & 31, which = threadIdx.x >> 6, mine = threadIdx.x >> 5 & 1;
  const int each = end_place - first_place, number = blockIdx.y * 2 + mine, shard = blockIdx.z;
  const int column = blockIdx.x * 128 + 4 * lane, all = rows * (places + 1);
  const int row = number / each, place = first_place + number - row * each, at = row * places + place;
  const int pair = row * (places + 1) + place;
  // ids and weights are older than the kernel ahead
  const int expert = row >= rows ? -1 : place == places ? experts : id_of(ids, kept, at);
  const int num_chunks = (inputs + CHUNK - 1) / CHUNK;
  const u64 pair_at = (u64)shard * all + pair, from = (pair_at * 2 + which) * num_chunks * width + column;
  const Tables tables = {t0, t1, t2, t3};
  uint2 svh = {}, suh = {};
  float weight = 1.f, v[4];
  if (expert >= 0) {
    const Matrix* m = tables.of(shard) + expert * 3;
    const u16 *its_svh = pointer_early(&m[which].svh), *down_suh = pointer_early(&m[2].suh);
    if (place < places) weight = __ldcg(weights + at);
    svh = load_early(its_svh + column);
    suh = load_early(down_suh + column);
  }
  wait_for_producer();
  if (expert >= 0) {
    sum_chunks<10>(work + from, width, num_chunks, v);
    hadamard(v);
    scale_four(v, svh);
    if (which) ups[mine][lane] = make_float4(v[0], v[1], v[2], v[3]);
  }
  __syncthreads();
  if (which || expert < 0) return;
  const float4 u = ups[mine][lane];
  const float up[4] = {u.x, u.y, u.z, u.w};
  *(uint2*)(out + pair_at * width + column) = activate(v, up, weight, __int_as_float(limit), suh);
}

// Finished outputs of a row's experts, added by ascending expert, the shared one last: bf16
// [shard][row][outputs]. A warp finishes a place. grid (outputs / 128, rows, shards), 32 * (places + 1)
// threads.
extern "C" __global__ void __launch_bounds__(32 * MOST_PLACES) experts_combine(
    const Matrix* t0, const Matrix* t1, const Matrix* t2, const Matrix* t3, const float* work,
    const int* ids, const unsigned char* kept, u16* out,
    int rows, int places, int experts, int inputs, int outputs) {
  __shared__ float4 finished[MOST_PLACES][32];
  let_consumer_start();
  const int lane = threadIdx.x & 31, place = threadIdx.x >> 5, row = blockIdx.y, shard = blockIdx.z;
  const int column = blockIdx.x * 128 + 4 * lane, num_chunks = (inputs + CHUNK - 1) / CHUNK;
  const Tables tables = {t0, t1, t2, t3};
  // ids are older than the kernel ahead
  const int expert = place == places ? experts : id_of(ids, kept, row * places + place);
  uint2 svh = {};
  if (expert >= 0)
    svh = load_early(pointer_early(&tables.of(shard)[expert * 3 + 2].svh) + column);
  wait_for_producer();
  float v[4] = {0.f, 0.f, 0.f, 0.f};
  if (expert >= 0) {
    const u64 pair = ((u64)shard * rows + row) * (places + 1) + place;
    sum_chunks<4>(work + pair * num_chunks * outputs + column, outputs, num_chunks, v);
    hadamard(v);
    scale_four(v, svh);
  }
  finished[place][lane] = make_float4(v[0], v[1], v[2], v[3]);
  __syncthreads();
  if (place > 0) return;
  v[0] = v[1] = v[2] = v[3] = 0.f;
  for (int i = 0; i <= places; i++) add_four(v, finished[i][lane]);
  *(uint2*)(out + ((u64)shard * rows + row) * outputs + column) = bf16_four(v);
}
