// Scores of entries: sum over heads of weight * relu(query . key), in fp32.
//
// A warp takes 64 keys as the first operand of int8 matrix instructions and eight heads of a row as the
// second. Products are whole numbers, so neither the instruction nor the number of rows changes a bit. Heads
// fall into four runs of 2 * ceil(N / 8); a lane adds those of its run ascending, then (0 + 1) + (2 + 3).
//
// Macros: HEADS, even, up to 32; PACKED 1 for keys of rule B, 0 for bf16 values on its grid; GATHERED
// 1 when every row has its own candidate blocks.
#include "common.cuh"

#define KEYS TILE
#define ANY_PAGES 1
#include "keys.cuh"

#define WARPS 4
#define BLOCKS 3  // on a multiprocessor; with four the compiler has too few registers to overlap products
#define HELD (GATHERED ? 1 : ROW_TILE)
#define RING 2  // stages of a warp: keys come while those before them are scored

// Of the sums of a lane's runs, those of its two keys over all runs: (0 + 1) + (2 + 3). A pair of lanes
// divides its keys, then two pairs do.
__device__ __forceinline__ float2 join_runs(const Sums sums) {
  const int q = threadIdx.x & 3;
  float half[2][2];  // keys 16 m + 8 i + g where m is odd as q is: [m > 1][i]
#pragma unroll
  for (int high = 0; high < 2; high++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float even = sums[2 * high][i], odd = sums[2 * high + 1][i];
      half[high][i] = (q & 1 ? odd : even) + __shfl_xor_sync(0xffffffffu, q & 1 ? even : odd, 1);
    }
  float own[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    own[i] = (q & 2 ? half[1][i] : half[0][i]) + __shfl_xor_sync(0xffffffffu, q & 2 ? half[0][i] : half[1][i], 2);
  return make_float2(own[0], own[1]);
}

struct Outputs {
  float *scores, *tile_max, *block_max;
  int pitch, block_shift;  // block_shift below 0: no blocks wanted
};
__device__ __forceinline__ float larger(float a, int lanes) { return fmaxf(a, __shfl_xor_sync(0xffffffffu, a, lanes)); }

// The largest of a warp's values; -0 may come as 0.
__device__ __forceinline__ float largest_of_warp(float v) {
  const int bits = __float_as_int(v), most = __reduce_max_sync(0xffffffffu, bits ^ (bits >> 31 & 0x7fffffff));
  return __int_as_float(most ^ (most >> 31 & 0x7fffffff));
}
// A row's scores, two keys a lane, and the largest of the tile and of each block.
__device__ __forceinline__ void store(const Sums sums, const Stage* stage, const Outputs& out, int row, int visible, int tile) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const float2 own = join_runs(sums);
  float most = -infinity();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = 16 * q + 8 * half + g, at = tile * TILE + key;
    const float unit = stage->units[key];
    const float value = at < visible && unit == unit ? (half ? own.y : own.x) * unit : -infinity();
    out.scores[(u64)row * out.pitch + at] = value;
    if (out.block_shift >= 0) {
      float block = value;
      if (out.block_shift > 0) block = larger(block, 4);
      if (out.block_shift > 1) block = larger(block, 8);
      if (out.block_shift > 2) block = larger(block, 16);
      if ((g & ((1 << out.block_shift) - 1)) == 0) out.block_max[((u64)row * out.pitch + at) >> out.block_shift] = block;
    }
    most = fmaxf(most, value);
  }
  most = largest_of_warp(most);
  if (lane == 0) out.tile_max[(u64)row * (out.pitch / TILE) + tile] = most;
}

// One row's queries into shared memory; turns with heads whose groups do not fold are noted.
__device__ __forceinline__ void load_query(Query* to, u32* spread, const signed char* numbers, const uint4* facts, int row) {
  for (int i = threadIdx.x; i < TURNS * 64; i += 32 * WARPS) {
    const int piece = i & 7, column = (i >> 3) & 7, turn = i >> 6;
    const int head = (column >> 1) * RUN + 2 * turn + (column & 1);
    uint4 v = make_uint4(0, 0, 0, 0);
    if (head < HEADS) v = *(const uint4*)(numbers + ((u64)row * HEADS + head) * WIDTH + piece * 16);
    *(uint4*)(to->numbers[turn][column] + place_of(column, piece)) = v;
  }
  for (int i = threadIdx.x; i < TURNS * 4; i += 32 * WARPS) {
    const int run = i & 3, turn = i >> 2, head = run * RUN + 2 * turn;  // heads are even, so both are there or none
    uint4 even = make_uint4(0, MAGIC_BITS, 0, 0), odd = even;
    if (head < HEADS) {
      even = facts[row * HEADS + head];
      odd = facts[row * HEADS + head + 1];
    }
    to->facts[turn][run] = facts_of(even, odd);
    if (even.z | odd.z) atomicOr(spread, 1u << turn);
  }
}

// The rows of a tile of rows, and what its warps score.
struct Own { int first, rows; const int* visibles; const u32* spread; const Query* queries; };

// Rows that keys of any groups need, all where the keys do not fold. Not inlined: it is rare, and its
// registers would be taken from what is not.
#if PACKED
__device__ __noinline__
#else
__device__ __forceinline__
#endif
void score_any(Stage* stage, const Keys& keys, const Source& source, const Outputs& out, const Own& own, int tile, bool folds) {
  Fragments a;
#if PACKED
  decode(a, stage);
#else
  read_plain(a, stage, keys, source, tile * TILE);
  __syncwarp();
  folds = fold_scales(stage);
  __syncwarp();
#endif
#pragma unroll 1
  for (int i = 0; i < own.rows; i++) {
    const u32 spread = folds ? own.spread[i] : 0xffffffffu;
    if (PACKED && spread == 0) continue;
    Sums sums = {};
    add_any(sums, a, own.queries[i], spread, stage->below);
    store(sums, stage, out, own.first + i, own.visibles[i], tile);
  }
}
#if PACKED
// Rows whose queries fold, if the keys do.
__device__ __forceinline__ void score_folded(Stage* stage, const Outputs& out, const Own& own, int tile) {
  Fragments a;
  decode_folded(a, stage);
#pragma unroll 1
  for (int i = 0; i < own.rows; i++) {
    if (own.spread[i]) continue;
    Sums sums = {};
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) add_turn<1>(sums, a, own.queries[i], turn);
    store(sums, stage, out, own.first + i, own.visibles[i], tile);
  }
}
#endif

// WARPS warps, any number of blocks: they are shared out evenly over the row tiles (rows when GATHERED), and
// the keys that one of a tile's rows sees over the warps of its blocks. scores [T][pitch], tile_max
// [T][pitch / 64], block_max [T][pitch >> block_shift]. Shared memory: Query[HELD], Stage[WARPS][RING].
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) index_scores(
    const signed char* numbers, const uint4* facts,
    const int2* tiles, const int* num_tiles, const int* visible,
    const int* slots, const unsigned char* key_data, const int* table,
    const int* candidates, float* scores, float* tile_max,
    float* block_max, int rows, int slot_pages, int page_rows, int page_bytes, int pitch, int most,
    int num_candidates, int block_shift, int wants_blocks) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ u32 spread[HELD];
  __shared__ int visibles[HELD];
  Query* queries = (Query*)shared;
  const int warp = threadIdx.x >> 5;
  Stage* const stages = (Stage*)(shared + HELD * sizeof(Query)) + warp * RING;
  const Keys keys = {key_data, table, page_rows, (page_rows & (page_rows - 1)) ? -1 : 31 - __clz(page_rows), page_bytes};
  const Outputs out = {scores, tile_max, block_max, pitch, wants_blocks ? block_shift : -1};
  wait_for_producer();
  const int groups = GATHERED ? rows : *num_tiles;
  const int parts = max((int)gridDim.x / max(groups, 1), 1), step = parts * WARPS;
#pragma unroll 1
  for (int group = blockIdx.x / parts; group < groups; group += gridDim.x / parts) {
    const int2 rows_of = GATHERED ? make_int2(group, 1) : tiles[group];  // first, number
    const Own own = {rows_of.x, rows_of.y, visibles, spread, queries};
    const int slot = slots[own.first];
    __syncthreads();
    if (threadIdx.x < own.rows) {
      spread[threadIdx.x] = 0;
      visibles[threadIdx.x] = positions(visible[own.first + threadIdx.x], slot, most, num_candidates, block_shift);
    }
    __syncthreads();
    int longest = 0;
    for (int i = 0; i < own.rows; i++) longest = max(longest, visibles[i]);
    const Source source = {slot * slot_pages, longest, min(visible[own.first], most),
                           candidates + (u64)group * max(num_candidates, 0), block_shift,
                         max(num_candidates, 0) << block_shift};
    const int last = (longest + TILE - 1) / TILE;
    int tile = (blockIdx.x % parts) * WARPS + warp;
#if PACKED
    fetch(stages, keys, source, page_ahead(keys, source, tile * TILE), tile * TILE);
    commit_copies();
    int page = page_ahead(keys, source, (tile + step) * TILE);
#endif
    u32 spreads = 0;
    for (int i = 0; i < own.rows; i++) load_query(queries + i, spread + i, numbers, facts, own.first + i);
    __syncthreads();
    for (int i = 0; i < own.rows; i++) spreads |= spread[i];
#pragma unroll 1
    for (int turn = 0; tile < last; tile += step, turn ^= 1) {
#if PACKED
      Stage* const stage = stages + turn;
      fetch(stages + (turn ^ 1), keys, source, page, (tile + step) * TILE);
      commit_copies();
      page = page_ahead(keys, source, (tile + 2 * step) * TILE);
      wait_for_all_but_newest();
      __syncwarp();
      const bool folds = fold_scales(stage);
      __syncwarp();
      if (folds) score_folded(stage, out, own, tile);
      if (!folds || spreads) score_any(stage, keys, source, out, own, tile, folds);
#else
      score_any(stages, keys, source, out, own, tile, false);
#endif
      __syncwarp();
    }
#if PACKED
    wait_for_all_copies();  // what was asked for beyond the end, before the next group asks for its own
    __syncwarp();
#endif
  }
  let_consumer_start();
}
