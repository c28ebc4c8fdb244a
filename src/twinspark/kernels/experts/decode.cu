// The experts of an MoE layer for up to 64 rows, in the bits of the EXL3 product of each row alone.
//
// Four kernels: gate and up products with the rotation of their input (experts_hidden), activation and
// rotation for down (experts_act), down products (experts_down), outputs of a row summed by ascending
// expert (experts_combine). A block of the products takes the rows of one expert through one unit of
// inputs and 16 * WARPS columns; which expert that is it finds in the ids itself, so that no kernel
// lists them. Pair p = row * (A + 1) + place; place A is the shared expert.
//
// The first three can leave the shared expert out, or all others: it needs no router.
//
// Macros: WARPS 4 or 8 of a block, RESIDENT blocks an SM at least, CODEBOOK_MASK codebooks in use.
#include "../exl3/common.cuh"
#include "tables.cuh"

#define MOST_ROWS 64
#define TILE_ROWS 8
#define SEEN_WORDS 32             // experts up to 1,023
#define MOST_PARTS 5              // of a unit: a chunk, and a rest of one part
#define XPITCH (MOST_PARTS * 128 + 8)
#define MOST_PLACES 16
#define ASKED 6                   // ids a lane loads at once

struct Item { int expert, count; u16 pairs[MOST_ROWS], rows[MOST_ROWS]; };

__device__ __forceinline__ int id_of(const int* ids, const unsigned char* kept, int at) {
  return kept && !__ldcg(kept + at) ? -1 : __ldcg(ids + at);
}
// Run by one warp: the shared expert (item 0) or the item-th expert by id that a row has; -1: none. A
// single row's experts are in order already.
__device__ __forceinline__ void find_item(
    Item& out, u32* seen, const int* ids, const unsigned char* kept, int rows, int places, int experts, int item) {
  const int lane = threadIdx.x & 31, all = rows * places;
  if (rows == 1 && item > 0) {
    if (lane == 0) {
      out.expert = id_of(ids, kept, item - 1);
      out.count = 1; out.pairs[0] = item - 1; out.rows[0] = 0;
    }
    __syncwarp();
    return;
  }
  if (item == 0) {
    for (int r = lane; r < rows; r += 32) { out.pairs[r] = r * (places + 1) + places; out.rows[r] = r; }
    if (lane == 0) { out.expert = experts; out.count = rows; }
    __syncwarp();
    return;
  }
  seen[lane] = 0;
  if (lane == 0) { out.expert = -1; out.count = 0; }
  __syncwarp();
  for (int first = 0; first < all; first += 32 * ASKED) {
    int id[ASKED];  // asked for together
#pragma unroll
    for (int i = 0; i < ASKED; i++) {
      const int at = first + 32 * i + lane;
      id[i] = at < all ? id_of(ids, kept, at) : -1;
    }
#pragma unroll
    for (int i = 0; i < ASKED; i++)
      if (id[i] >= 0) atomicOr(seen + (id[i] >> 5), 1u << (id[i] & 31));
  }
  __syncwarp();
  u32 word = seen[lane];
  const int num = __popc(word);
  int upto = num;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane >= step) upto += other;
  }
  int skip = item - 1 - (upto - num);
  const u32 owner = __ballot_sync(0xffffffffu, skip >= 0 && skip < num);
  if (owner == 0) return;
  const int source = __ffs(owner) - 1;
  word = __shfl_sync(0xffffffffu, word, source);
  skip = __shfl_sync(0xffffffffu, skip, source);
  for (; skip > 0; skip--) word &= word - 1;
  if (lane == 0) out.expert = 32 * source + __ffs(word) - 1;
  __syncwarp();
}
// Run by one warp, when others may wait: the pairs of a routed expert, ascending.
__device__ __forceinline__ void find_pairs(
    Item& out, const int* ids, const unsigned char* kept, int rows, int places) {
  const int lane = threadIdx.x & 31, all = rows * places, expert = out.expert;
  int count = 0;
  for (int first = 0; first < all; first += 32 * ASKED) {
    bool mine[ASKED];
#pragma unroll
    for (int i = 0; i < ASKED; i++) {
      const int at = first + 32 * i + lane;
      mine[i] = at < all && id_of(ids, kept, at) == expert;
    }
#pragma unroll
    for (int i = 0; i < ASKED; i++) {
      const u32 those = __ballot_sync(0xffffffffu, mine[i]);
      const int at = first + 32 * i + lane;
      if (mine[i]) {
        const int row = at / places, to = count + __popc(those & ((1u << lane) - 1));
        out.pairs[to] = at + row;
        out.rows[to] = row;
      }
      count += __popc(those);
    }
  }
  if (lane == 0) out.count = count;
  __syncwarp();
}

// Units of the inputs: chunks, the last with a rest of one part.
__device__ __forceinline__ int unit_width(int unit, int units, int inputs) {
  return unit == units - 1 ? inputs - unit * CHUNK : CHUNK;
}
// Run by all warps: one lane each asks, so that addresses are uniform and copies cost few instructions.
__device__ __forceinline__ void ask_for_weights(
    u32 to, u32 full_at, const Matrix& m, int column_block, int unit, int width, int outputs) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  const u32 tile_bytes = 32 * m.bits, bytes = WARPS * tile_bytes, pitch = outputs / 16 * tile_bytes;
  const char* from = (const char*)m.trellis + (unit * KTILES + warp) * (u64)pitch + column_block * bytes;
  if (!is_elected()) return;
  if (warp == 0)
#pragma unroll 1
    for (int part = 0; part < width / 128; part++) barrier_expect(full_at + 8 * part, PART * bytes);
#pragma unroll 1
  for (int k = warp; k < width / 16; k += WARPS, from += (u64)WARPS * pitch)
    bulk_copy(to + k * bytes, from, bytes, full_at + 8 * (k / PART));
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
struct Sums { float* at; u64 pair_pitch; int outputs, chunk; };
template <int CODEBOOK, int BITS>
__device__ __forceinline__ void multiply_rows(
    const u32* tiles, u32 xs_at, u32 full_at, int width, const Sums& sums, const u16* pairs, int count) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = 2 * (lane & 3);
  const PlacesOf<BITS> at = held(places_of<BITS>(lane));
  const u32 x_at = xs_at + (lane & 7) * XPITCH * 2 + (lane >> 3) * 16;
  float acc[4] = {};
#pragma unroll 1
  for (int part = 0; part < width / 128; part++) {
    barrier_wait(full_at + 8 * part, 0);
    multiply_part<CODEBOOK, BITS>(acc, tiles + (part * PART * WARPS + warp) * 8 * BITS, x_at + part * 256, at);
    if (part % 4 != 3 && part != width / 128 - 1) continue;
    float* to = sums.at + (u64)(sums.chunk + part / 4) * sums.outputs + warp * 16 + (lane >> 2);
    if (row < count) {
      float* p = to + pairs[row] * sums.pair_pitch;
      p[0] = acc[0]; p[8] = acc[2];
    }
    if (row + 1 < count) {
      float* p = to + pairs[row + 1] * sums.pair_pitch;
      p[0] = acc[1]; p[8] = acc[3];
    }
    acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
  }
}
#define CASE(c, b) \
  case 16 * c + b: multiply_rows<c, b>(tiles, xs_at, full_at, width, sums, pairs, count); break;
#define CASES(c) CASE(c, 1) CASE(c, 2) CASE(c, 3) CASE(c, 4) CASE(c, 5) CASE(c, 6) CASE(c, 7) CASE(c, 8)
__device__ __forceinline__ void multiply_any(
    int kind, const u32* tiles, u32 xs_at, u32 full_at, int width, const Sums& sums, const u16* pairs, int count) {
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
// Up to 8 rows of x, rotated into shared memory; a warp takes 128 values at a time.
__device__ __forceinline__ void rotate_rows(
    u16* xs, const u16* suh, const u16* x, int inputs, int first, int width, const u16* rows, int count) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int k = 128 * (warp & 3) + 4 * lane; k < width; k += 512) {
    const uint2 scale = *(const uint2*)(suh + first + k);
    for (int row = warp >> 2; row < count; row += WARPS / 4) {
      const Four f = load_four(x, (u64)rows[row] * inputs + first + k, TYPE_BF16);
      *(uint2*)(xs + row * XPITCH + k) = rotate_four(f, TYPE_BF16, scale);
    }
  }
}
__device__ __forceinline__ void copy_rows(
    u16* xs, const u16* x, int inputs, int first, int width, const u16* pairs, int count) {
  const int each = width / 8;
  for (int i = threadIdx.x; i < count * each; i += 32 * WARPS) {
    const int row = i / each, k = (i - row * each) * 8;
    *(uint4*)(xs + row * XPITCH + k) = __ldcg((const uint4*)(x + (u64)pairs[row] * inputs + first + k));
  }
}
// `first_matrix` 0: gate and up of x [rows][inputs] bf16; 2: down of rotated fp16 [shard][pair][inputs].
template <bool DOWN>
__device__ __forceinline__ void products(
    const Tables& tables, const u16* x, const int* ids, const unsigned char* kept, float* work,
    int rows, int places, int experts, int first_item, int items, int inputs, int outputs) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) u64 full[MOST_PARTS];
  __shared__ u32 seen[SEEN_WORDS];
  __shared__ Item item;
  __shared__ Matrix matrix;
  u16* xs = (u16*)shared;                                   // [8][XPITCH]
  u32* tiles = (u32*)(shared + TILE_ROWS * XPITCH * 2);     // [k tile][WARPS][8 * bits]
  const int column_block = blockIdx.x, unit = DOWN ? blockIdx.y : blockIdx.y >> 1;
  const int which = DOWN ? 2 : blockIdx.y & 1, width = unit_width(unit, num_units(inputs), inputs);
  int number = blockIdx.z, shard = 0;
  for (; number >= items; number -= items) shard++;
  number += first_item;
  const u32 full_at = smem_address(full), xs_at = smem_address(xs);
  if (threadIdx.x == 0) {
    for (int i = 0; i < MOST_PARTS; i++) barrier_init(full_at + 8 * i, 1);
    barriers_ready();
  }
  if (!DOWN && number > 0) {  // where matrices are comes near while the router chooses
    const u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * (number - 1));
    const u32 at = 128 * (block * WARPS + (threadIdx.x >> 5));
    const char* line = (const char*)tables.of(shard) + at;
    if ((threadIdx.x & 31) == 0 && at < (experts + 1) * 3 * sizeof(Matrix))
      asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }
  // The ids are older than the kernel ahead of experts_down; only experts_hidden must wait for them.
  if (!DOWN && number > 0) wait_for_producer();
  if (threadIdx.x < 32) {
    find_item(item, seen, ids, kept, rows, places, experts, number);
    if (threadIdx.x == 0 && item.expert >= 0) matrix = tables.of(shard)[item.expert * 3 + which];
  }
  __syncthreads();
  if (item.expert < 0) {
    wait_for_producer();
    return;
  }
  ask_for_weights(smem_address(tiles), full_at, matrix, column_block, unit, width, outputs);
  if (threadIdx.x < 32 && number > 0 && rows > 1) find_pairs(item, ids, kept, rows, places);
  wait_for_producer();
  let_consumer_start();  // not before the ids are there: see above
  __syncthreads();
  const int num_chunks = (inputs + CHUNK - 1) / CHUNK, all = rows * (places + 1), sets = DOWN ? 1 : 2;
  const u64 set_pitch = (u64)num_chunks * outputs;
  const Sums sums = {
      work + ((u64)shard * all * sets + (DOWN ? 0 : which)) * set_pitch + column_block * 16 * WARPS,
      sets * set_pitch, outputs, unit};
  for (int first = 0; first < item.count; first += TILE_ROWS) {
    const u16* pairs = item.pairs + first;
    const int count = min(TILE_ROWS, item.count - first);
    if (first > 0) __syncthreads();
    if (DOWN) copy_rows(xs, x + (u64)shard * all * inputs, inputs, unit * CHUNK, width, pairs, count);
    else rotate_rows(xs, matrix.suh, x, inputs, unit * CHUNK, width, item.rows + first, count);
    __syncthreads();
    multiply_any(matrix.codebook * 16 + matrix.bits, tiles, xs_at, full_at, width, sums, pairs, count);
  }
}

// grid (column blocks, units * 2, items * shards); `items` from `first_item` on: 0 is the shared expert.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) experts_hidden(
    const Matrix* t0, const Matrix* t1, const Matrix* t2, const Matrix* t3, const u16* x,
    const int* ids, const unsigned char* kept, float* work, int rows, int places, int experts, int first_item,
    int items, int inputs, int outputs) {
  products<false>({t0, t1, t2, t3}, x, ids, kept, work, rows, places, experts, first_item, items, inputs, outputs);
}
// grid (column blocks, units, items * shards).
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) experts_down(
    const Matrix* t0, const Matrix* t1, const Matrix* t2, const Matrix* t3, const u16* x,
    const int* ids, const unsigned char* kept, float* work, int rows, int places, int experts, int first_item,
    int items, int inputs, int outputs) {
  products<true>({t0, t1, t2, t3}, x, ids, kept, work, rows, places, experts, first_item, items, inputs, outputs);
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
