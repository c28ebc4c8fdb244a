// Scores as in scores.cu, with the same bits: many rows over packed keys, on compute capability 9.0.
//
// Four warps share 64 keys as the first operand of asynchronous int8 matrix instructions; the second are all
// heads of a row. Keys of the next tile are on their way while this one is scored. A lane has the same keys'
// and heads' products as there and adds its run of heads ascending, then the runs as (0 + 1) + (2 + 3).
//
// Macro: HEADS, even, up to 32.
#include "common.cuh"
#include "keys.cuh"

#define THREADS 128

struct Query {  // of one row, in shared memory
  signed char numbers[4][2][TURNS][8][16];  // [group][half of its values][turn][run * 2 + odd head][4 lanes * 4]
  float4 weights[TURNS][4];                 // weight and -MAGIC * weight of a run's even, then its odd head
  uint2 below[TURNS][4];
};

// ---- keys

// A tile's keys on their way to the matrix instruction.
struct Stage {
  u32 values[TILE][16];
  u32 scales[TILE];  // scale bytes, then a Fold's shifts
};
struct Folded {       // of the keys that are worked on
  float units[TILE];  // what one whole number stands for; not a number for a key that is not here
  u32 below[TILE];
};

// Asks for a tile: 16 bytes of values a turn, the scales at once where the tile lies in one page.
__device__ __forceinline__ void fetch(Stage* stage, const Keys& keys, int slot_first, int limit, int first) {
  const u32 values = smem_address(stage->values), scales = smem_address(stage->scales);
  const bool in_one = keys.page_rows % TILE == 0;
  int row = 0;
  const unsigned char* page = in_one ? page_of(keys, slot_first, first, &row) : nullptr;
#pragma unroll
  for (int i = 0; i < TILE * 4 / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, key = at >> 2, piece = at & 3;
    const unsigned char* own = page;
    int own_row = row + key;
    if (!in_one) own = first + key < limit ? page_of(keys, slot_first, first + key, &own_row) : nullptr;
    const bool is_here = own != nullptr;
    const unsigned char* from = is_here ? own + own_row * 64 + piece * 16 : keys.data;
    copy16(values + key * 64 + ((piece ^ ((key >> 1) & 3)) << 4), from, is_here);
    if (piece == 0) {
      if (!is_here) stage->scales[key] = NO_KEY;
      else if (!in_one) copy4(scales + 4 * key, own + keys.page_rows * 64 + own_row * 4);
    }
  }
  if (page && threadIdx.x < TILE / 4)
    copy16(scales + threadIdx.x * 16, page + keys.page_rows * 64 + row * 4 + threadIdx.x * 16, true);
}
// Scale bytes to shifts, units and what lies below, a key a thread. True if all keys fold.
__device__ __forceinline__ bool fold_scales(Stage* stage, Folded* folded) {
  bool folds = true;
  if (threadIdx.x < TILE) {
    const u32 bytes = stage->scales[threadIdx.x];
    const Fold f = fold(bytes == NO_KEY ? 0 : bytes);
    stage->scales[threadIdx.x] = f.shifts;
    folded->units[threadIdx.x] = bytes == NO_KEY ? __int_as_float(0x7fffffff) : unit_of(f.base);
    folded->below[threadIdx.x] = f.below;
    folds = f.below == 0;
  }
  return __syncthreads_and(folds);
}
typedef u32 Fragments[4][4];  // of a warp's 16 keys: [group][register]

__device__ __forceinline__ void decode(Fragments a, const Stage* stage) {
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = 16 * warp + 8 * half + g;
    const u32 shifts = stage->scales[key];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 x = stage->values[key][((j ^ ((g >> 1) & 3)) << 2) + q];
      numbers_of_packed(x, (shifts >> (8 * j)) & 255, &a[j][half], &a[j][2 + half]);
    }
  }
}

// ---- products of a warp's 16 keys with all heads of a row; a lane has two keys and its run's heads

typedef int Products[TURNS][4];  // [turn]: key g with the even and the odd head, key g + 8 with them

__device__ __forceinline__ void wgmma(Products c, const u32 a[4], u64 b, int adds) {
#define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds)
#define FOUR(i) "+r"(c[i][0]), "+r"(c[i][1]), "+r"(c[i][2]), "+r"(c[i][3])
#if TURNS == 1
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %9, 0;\n wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p;\n}" : FOUR(0) : OPERANDS);
#elif TURNS == 2
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %13, 0;\n wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 "
               "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p;\n}" : FOUR(0), FOUR(1) : OPERANDS);
#elif TURNS == 3
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %17, 0;\n wgmma.mma_async.sync.aligned.m64n24k32.s32.s8.s8 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, %16, p;\n}"
               : FOUR(0), FOUR(1), FOUR(2) : OPERANDS);
#else
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %21, 0;\n wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p;\n}"
               : FOUR(0), FOUR(1), FOUR(2), FOUR(3) : OPERANDS);
#endif
}
// Groups first..end-1 in one sum.
__device__ __forceinline__ void multiply(Products c, const Fragments a, const Query& query, int first, int end) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (first <= j && j < end) {
      const u64 b = (u64)((smem_address(query.numbers[j]) >> 4) & 0x3fff) | (u64)(TURNS * 8) << 16 | (u64)8 << 32;
      wgmma(c, a[j], b, j != first);
    }
  asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++)  // nothing reads them before
    asm volatile("" : FOUR(turn)::"memory");
}

// ---- scores

// A number plus MAGIC as a float, at least MAGIC: relu without a conversion.
__device__ __forceinline__ float relu(int number) {
  return __int_as_float(__viaddmax_s32(number, MAGIC_BITS, MAGIC_BITS));
}

// All four groups in one sum; a term is weight * number, rounded once.
__device__ __forceinline__ void score_folded(float sums[2], const Fragments a, const Query& query) {
  Products c;
  multiply(c, a, query, 0, 4);
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const float4 w = query.weights[turn][threadIdx.x & 3];
#pragma unroll
    for (int half = 0; half < 2; half++)
      sums[half] = (sums[half] + fmaf(relu(c[turn][2 * half]), w.x, w.y)) + fmaf(relu(c[turn][2 * half + 1]), w.z, w.w);
  }
}
// A sum a group, put together in fp32, ascending.
__device__ __forceinline__ void score_spread(
    float sums[2], const Fragments a, const Query& query, const u32 key_below[2]) {
  float dots[TURNS][4] = {};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    Products c;
    multiply(c, a, query, j, j + 1);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      const uint2 below = query.below[turn][threadIdx.x & 3];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 query_below = i & 1 ? below.y : below.x;
        const int octaves = (signed char)(key_below[i >> 1] >> (8 * j)) + (signed char)(query_below >> (8 * j));
        dots[turn][i] += (float)c[turn][i] * __int_as_float((127 + octaves) << 23);
      }
    }
  }
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const float4 w = query.weights[turn][threadIdx.x & 3];
#pragma unroll
    for (int half = 0; half < 2; half++)
      sums[half] = (sums[half] + fmaxf(dots[turn][2 * half], 0.f) * w.x) + fmaxf(dots[turn][2 * half + 1], 0.f) * w.z;
  }
}

// A row's scores of a warp's keys, and the largest of each block. Returns the largest of all 16.
__device__ __forceinline__ float store(
    float sums[2], const float units[2], const Outputs& out, int row, int visible, int tile) {
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
  const int at = tile * TILE + 16 * warp + g;
  const u64 base = (u64)row * out.pitch;
  float most = -infinity();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float value = sums[half];
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    value += __shfl_xor_sync(0xffffffffu, value, 2);  // (0 + 1) + (2 + 3), in all four lanes
    const bool is_seen = at + 8 * half < visible && units[half] == units[half];
    value = is_seen ? value * units[half] : -infinity();
    if (q == half) out.scores[base + at + 8 * half] = value;
    if (out.block_shift >= 0) {
      float block = value;
      if (out.block_shift > 0) block = larger(block, 4);
      if (out.block_shift > 1) block = larger(block, 8);
      if (out.block_shift > 2) block = larger(block, 16);
      if (q == half && (g & ((1 << out.block_shift) - 1)) == 0)
        out.block_max[(base + at + 8 * half) >> out.block_shift] = block;
    }
    most = fmaxf(most, value);
  }
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes <<= 1) most = larger(most, lanes);
  return most;
}

// One row's queries into shared memory; whether some head's groups do not fold.
__device__ __forceinline__ void load_query(
    Query* to, u32* spread, const signed char* numbers, const float2* weights, const u32* below, int row) {
  for (int i = threadIdx.x; i < TURNS * 64; i += THREADS) {  // 16 bytes a turn: two groups of one lane
    const int piece = i & 3, column = (i >> 2) & 7, groups = (i >> 5) & 1, turn = i >> 6;
    const int head = (column >> 1) * RUN + 2 * turn + (column & 1);
    uint4 v = make_uint4(0, 0, 0, 0);
    if (head < HEADS) v = *(const uint4*)(numbers + ((u64)row * HEADS + head) * WIDTH + groups * 64 + piece * 16);
    *(u32*)&to->numbers[2 * groups][0][turn][column][4 * piece] = v.x;
    *(u32*)&to->numbers[2 * groups][1][turn][column][4 * piece] = v.y;
    *(u32*)&to->numbers[2 * groups + 1][0][turn][column][4 * piece] = v.z;
    *(u32*)&to->numbers[2 * groups + 1][1][turn][column][4 * piece] = v.w;
  }
  for (int i = threadIdx.x; i < TURNS * 4; i += THREADS) {
    const int run = i & 3, turn = i >> 2, head = run * RUN + 2 * turn;  // heads are even, so both are there or none
    float4 w = make_float4(0.f, 0.f, 0.f, 0.f);
    uint2 d = make_uint2(0, 0);
    if (head < HEADS) {
      w = *(const float4*)(weights + row * HEADS + head);
      d = *(const uint2*)(below + row * HEADS + head);
    }
    to->weights[turn][run] = w;
    to->below[turn][run] = d;
    if (d.x | d.y) *spread = 1;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the matrix instruction reads them
}

// 128 threads, any number of blocks: they are shared out evenly over the row tiles and take turns at the tiles
// of keys that one of the rows sees. scores [T][pitch], tile_max [T][pitch / 64], block_max
// [T][pitch >> block_shift]. Shared memory: Stage[2], Folded, Query[ROW_TILE].
extern "C" __global__ void __launch_bounds__(THREADS, 5) index_scores_many(
    const signed char* numbers, const float2* weights, const u32* below, const int2* tiles, const int* num_tiles,
    const int* visible, const int* slots, const unsigned char* key_data, const int* table, float* scores,
    float* tile_max, float* block_max, int slot_pages, int page_rows, int page_bytes, int pitch, int most,
    int block_shift, int wants_blocks) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ u32 spread[ROW_TILE];
  __shared__ int visibles[ROW_TILE];
  __shared__ float largest[ROW_TILE][4];
  Stage* stages = (Stage*)shared;
  Folded* folded = (Folded*)(shared + 2 * sizeof(Stage));
  Query* queries = (Query*)(folded + 1);
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2;
  const int page_shift = (page_rows & (page_rows - 1)) ? -1 : 31 - __clz(page_rows);
  const Keys keys = {key_data, table, page_rows, page_shift, page_bytes};
  const Outputs out = {scores, tile_max, block_max, pitch, wants_blocks ? block_shift : -1};
  wait_for_producer();
  const int groups = *num_tiles;
  const int parts = max((int)gridDim.x / max(groups, 1), 1);
#pragma unroll 1
  for (int group = blockIdx.x / parts; group < groups; group += gridDim.x / parts) {
    const int2 own = tiles[group];  // first row, rows
    const int slot = slots[own.x], slot_first = slot * slot_pages;
    __syncthreads();
    if (threadIdx.x < own.y) {
      spread[threadIdx.x] = 0;
      visibles[threadIdx.x] = positions(visible[own.x + threadIdx.x], slot, most, -1, 0);
    }
    __syncthreads();
    int longest = 0;
    for (int i = 0; i < own.y; i++) longest = max(longest, visibles[i]);
    const int last = (longest + TILE - 1) / TILE;
    int tile = blockIdx.x % parts, turn = 0;
    if (tile < last) {
      fetch(stages, keys, slot_first, longest, tile * TILE);
      for (int i = 0; i < own.y; i++) load_query(queries + i, spread + i, numbers, weights, below, own.x + i);
    }
#pragma unroll 1
    for (; tile < last; tile += parts, turn ^= 1) {
      Stage* stage = stages + turn;
      Fragments a;
      copies_done();
      __syncthreads();
      const bool folds = fold_scales(stage, folded);
      decode(a, stage);
      if (tile + parts < last) fetch(stages + (turn ^ 1), keys, slot_first, longest, (tile + parts) * TILE);
      const int key = 16 * warp + g;
      const float units[2] = {folded->units[key], folded->units[key + 8]};
#pragma unroll 1
      for (int i = 0; i < own.y; i++) {
        float sums[2] = {0.f, 0.f};
        if (folds && !spread[i]) {
          score_folded(sums, a, queries[i]);
        } else {
          const u32 key_below[2] = {folded->below[key], folded->below[key + 8]};
          score_spread(sums, a, queries[i], key_below);
        }
        const float most_of = store(sums, units, out, own.x + i, visibles[i], tile);
        if ((threadIdx.x & 31) == 0) largest[i][warp] = most_of;
      }
      __syncthreads();
      if (threadIdx.x < own.y) {
        const float* four = largest[threadIdx.x];
        const u64 at = (u64)(own.x + threadIdx.x) * (pitch / TILE) + tile;
        tile_max[at] = fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3]));
      }
    }
  }
  let_consumer_start();
}
