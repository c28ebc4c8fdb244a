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
#define HELD (GATHERED ? 1 : ROW_TILE)

__device__ __forceinline__ void score(Sums sums, const Fragments a, const Query& query, u32 spread, const u32* key_below) {
  const int lane = threadIdx.x & 31, q = lane & 3;
#pragma unroll 1
  for (int turn = 0; turn < TURNS; turn++) {
    const uint4 first = *(const uint4*)&query.numbers[turn][0][lane >> 2][q * 16];
    const uint4 second = *(const uint4*)&query.numbers[turn][1][lane >> 2][q * 16];
    const u32 b[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    const float4 w = query.weights[turn][q];
    if (spread >> turn & 1) add_spread(sums, a, b, w, key_below, query.below[turn][q]);
    else add_folded(sums, a, b, w);
  }
#pragma unroll
  for (int m = 0; m < TILE / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {  // (0 + 1) + (2 + 3), in all four lanes
      sums[m][half] += __shfl_xor_sync(0xffffffffu, sums[m][half], 1);
      sums[m][half] += __shfl_xor_sync(0xffffffffu, sums[m][half], 2);
    }
}

struct Outputs {
  float *scores, *tile_max, *block_max;
  int pitch, block_shift;  // block_shift below 0: no blocks wanted
};
__device__ __forceinline__ float larger(float a, int lanes) { return fmaxf(a, __shfl_xor_sync(0xffffffffu, a, lanes)); }

// A row's scores, two keys a lane, and the largest of the tile and of each block.
__device__ __forceinline__ void store(const Sums sums, const Stage* stage, const Outputs& out, int row, int visible, int tile) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  float most = -infinity();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float low = q & 1 ? sums[1][half] : sums[0][half], high = q & 1 ? sums[3][half] : sums[2][half];
    const int key = 16 * q + 8 * half + g, at = tile * TILE + key;
    const float unit = stage->units[key];
    const float value = at < visible && unit == unit ? (q & 2 ? high : low) * unit : -infinity();
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
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes <<= 1) most = larger(most, lanes);
  if (lane == 0) out.tile_max[(u64)row * (out.pitch / TILE) + tile] = most;
}

// One row's queries into shared memory; turns with heads whose groups do not fold are noted.
__device__ __forceinline__ void load_query(
    Query* to, u32* spread, const signed char* numbers, const float2* weights, const u32* below, int row) {
  for (int i = threadIdx.x; i < TURNS * 64; i += 32 * WARPS) {  // 16 bytes a turn
    const int piece = i & 3, column = (i >> 2) & 7, groups = (i >> 5) & 1, turn = i >> 6;
    const int head = (column >> 1) * RUN + 2 * turn + (column & 1);
    uint4 v = make_uint4(0, 0, 0, 0);
    if (head < HEADS) v = *(const uint4*)(numbers + ((u64)row * HEADS + head) * WIDTH + groups * 64 + piece * 16);
    *(uint4*)&to->numbers[turn][groups][column][piece * 16] = v;
  }
  for (int i = threadIdx.x; i < TURNS * 4; i += 32 * WARPS) {
    const int run = i & 3, turn = i >> 2, head = run * RUN + 2 * turn;  // heads are even, so both are there or none
    float4 w = make_float4(0.f, 0.f, 0.f, 0.f);
    uint2 d = make_uint2(0, 0);
    if (head < HEADS) {
      w = *(const float4*)(weights + row * HEADS + head);
      d = *(const uint2*)(below + row * HEADS + head);
    }
    to->weights[turn][run] = w;
    to->below[turn][run] = d;
    if (d.x | d.y) atomicOr(spread, 1u << turn);
  }
}

// 128 threads, any number of blocks: they are shared out evenly over the row tiles (rows when GATHERED), and
// the keys that one of a tile's rows sees over the warps of its blocks. scores [T][pitch], tile_max
// [T][pitch / 64], block_max [T][pitch >> block_shift]. Shared memory: Query[HELD], Stage[WARPS].
extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) index_scores(
    const signed char* numbers, const float2* weights, const u32* below,
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
  Stage* stage = (Stage*)(shared + HELD * sizeof(Query)) + warp;
  const Keys keys = {key_data, table, page_rows, (page_rows & (page_rows - 1)) ? -1 : 31 - __clz(page_rows), page_bytes};
  const Outputs out = {scores, tile_max, block_max, pitch, wants_blocks ? block_shift : -1};
  wait_for_producer();
  const int groups = GATHERED ? rows : *num_tiles;
  const int parts = max((int)gridDim.x / max(groups, 1), 1), step = parts * WARPS;
#pragma unroll 1
  for (int group = blockIdx.x / parts; group < groups; group += gridDim.x / parts) {
    const int2 own = GATHERED ? make_int2(group, 1) : tiles[group];  // first row, rows
    const int slot = slots[own.x];
    __syncthreads();
    if (threadIdx.x < own.y) {
      spread[threadIdx.x] = 0;
      visibles[threadIdx.x] = positions(visible[own.x + threadIdx.x], slot, most, num_candidates, block_shift);
    }
    __syncthreads();
    int longest = 0;
    for (int i = 0; i < own.y; i++) {
      longest = max(longest, visibles[i]);
      load_query(queries + i, spread + i, numbers, weights, below, own.x + i);
    }
    __syncthreads();
    const Source source = {slot * slot_pages, longest, min(visible[own.x], most),
                           candidates + (u64)group * max(num_candidates, 0), block_shift};
    const int last = (longest + TILE - 1) / TILE;
    int tile = (blockIdx.x % parts) * WARPS + warp;
#if PACKED
    if (tile < last) fetch(stage, keys, source, tile * TILE);
#endif
#pragma unroll 1
    for (; tile < last; tile += step) {
      Fragments a;
#if PACKED
      copies_done();
      __syncwarp();
      const bool folds = fold_scales(stage);
      __syncwarp();
      decode(a, stage);
#else
      read_plain(a, stage, keys, source, tile * TILE);
      __syncwarp();
      const bool folds = fold_scales(stage);
      __syncwarp();
#endif
#pragma unroll 1
      for (int i = 0; i < own.y; i++) {
        Sums sums = {};
        score(sums, a, queries[i], folds ? spread[i] : 0xffffffffu, stage->below);
        store(sums, stage, out, own.x + i, visibles[i], tile);
      }
      __syncwarp();
#if PACKED
      if (tile + step < last) fetch(stage, keys, source, (tile + step) * TILE);
#endif
    }
  }
  let_consumer_start();
}
