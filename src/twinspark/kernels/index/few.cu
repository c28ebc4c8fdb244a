// Scores of few rows, in the bits of scores.cu: a block makes its row's queries itself, so that no launch
// goes ahead of it, and a warp takes 32 keys, so that more multiprocessors share them.
//
// Macros: HEADS and GATHERED as in scores.cu; keys are packed. Code runs once or twice a launch, so that
// fetching it is waited for: loops over heads stay loops.
#include "common.cuh"

#define KEYS 32
#define PACKED 1
#define ANY_PAGES 0
#include "keys.cuh"
#include "queries.cuh"

#define WARPS 8  // one for each of a turn's heads

// As add_folded: the same whole numbers, in two runs that do not wait for each other.
__device__ __forceinline__ void add_folded_fast(Sums sums, const Fragments a, const u32 b[8], float4 w) {
  int c[KEYS / 16][4], d[KEYS / 16][4] = {};
#pragma unroll
  for (int m = 0; m < KEYS / 16; m++) c[m][0] = c[m][1] = c[m][2] = c[m][3] = MAGIC_BITS;
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int m = 0; m < KEYS / 16; m++) {
      multiply(c[m], a[m][j], b[2 * j], b[2 * j + 1]);
      multiply(d[m], a[m][j + 2], b[2 * j + 4], b[2 * j + 5]);
    }
#pragma unroll
  for (int m = 0; m < KEYS / 16; m++) {
    sums[m][0] = add_terms(sums[m][0], term(c[m][0] + d[m][0], w.x, w.y), term(c[m][1] + d[m][1], w.z, w.w));
    sums[m][1] = add_terms(sums[m][1], term(c[m][2] + d[m][2], w.x, w.y), term(c[m][3] + d[m][3], w.z, w.w));
  }
}
// Operands of eight heads.
__device__ __forceinline__ void load_turn(u32 b[8], const Query& query, int turn) {
  const int lane = threadIdx.x & 31;
  const uint4 first = *(const uint4*)&query.numbers[turn][0][lane >> 2][(lane & 3) * 16];
  const uint4 second = *(const uint4*)&query.numbers[turn][1][lane >> 2][(lane & 3) * 16];
  b[0] = first.x; b[1] = first.y; b[2] = first.z; b[3] = first.w;
  b[4] = second.x; b[5] = second.y; b[6] = second.z; b[7] = second.w;
}
__device__ __forceinline__ void score(Sums sums, const Fragments a, const Query& query, u32 spread, const u32* key_below) {
  const int q = threadIdx.x & 3;
  u32 b[8];
  if (spread == 0) {
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      load_turn(b, query, turn);
      add_folded_fast(sums, a, b, query.weights[turn][q]);
    }
  } else {
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++) {
      load_turn(b, query, turn);
      const float4 w = query.weights[turn][q];
      if (spread >> turn & 1) add_spread(sums, a, b, w, key_below, query.below[turn][q]);
      else add_folded(sums, a, b, w);
    }
  }
#pragma unroll
  for (int m = 0; m < KEYS / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {  // (0 + 1) + (2 + 3), in all four lanes
      sums[m][half] += __shfl_xor_sync(0xffffffffu, sums[m][half], 1);
      sums[m][half] += __shfl_xor_sync(0xffffffffu, sums[m][half], 2);
    }
}
// A key a lane.
__device__ __forceinline__ void store(const Sums sums, const Stage* stage, float* scores, int first, int visible) {
  const int lane = threadIdx.x & 31, q = lane & 3, key = 16 * (q >> 1) + 8 * (q & 1) + (lane >> 2);
  const float low = q & 1 ? sums[0][1] : sums[0][0], high = q & 1 ? sums[1][1] : sums[1][0], unit = stage->units[key];
  scores[first + key] = first + key < visible && unit == unit ? (q & 2 ? high : low) * unit : -infinity();
}

// The heads of a row as they come from memory; a warp takes one of each turn.
struct Raw { uint2 values[TURNS]; u32 weights[TURNS]; };
__device__ __forceinline__ int head_of(int turn) {  // of this warp
  const int column = threadIdx.x >> 5;
  return (column >> 1) * RUN + 2 * turn + (column & 1);
}
__device__ __forceinline__ Raw load_heads(const u16* q, const u16* w, int row) {
  Raw raw;
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const int head = head_of(turn);
    raw.values[turn] = make_uint2(0, 0);
    raw.weights[turn] = 0;
    if (head < HEADS) {
      const u64 here = (u64)row * HEADS + head;
      raw.values[turn] = *(const uint2*)(q + here * WIDTH + 4 * (threadIdx.x & 31));
      raw.weights[turn] = w[here];
    }
  }
  return raw;
}
__device__ __forceinline__ void turn_heads(Query& query, u32* spread, Raw raw, const Angles& angles, float scale) {
  const int column = threadIdx.x >> 5;
#pragma unroll 1
  for (int turn = 0; turn < TURNS; turn++) {
    const Head h = turn_head(raw.values[0], angles);
    *(u32*)&query.numbers[turn][place_of_pair()][column][place_of_numbers()] = h.numbers;
    if ((threadIdx.x & 31) == 0) {
      const bool is_head = head_of(turn) < HEADS;
      const float2 weight = weight_of(raw.weights[0], scale, h.fold);
      ((float2*)&query.weights[turn][column >> 1])[column & 1] = is_head ? weight : make_float2(0.f, 0.f);
      ((u32*)&query.below[turn][column >> 1])[column & 1] = is_head ? h.fold.below : 0;
      if (is_head && h.fold.below) atomicOr(spread, 1u << turn);
    }
#pragma unroll
    for (int i = 0; i + 1 < TURNS; i++) {  // registers have no index
      raw.values[i] = raw.values[i + 1];
      raw.weights[i] = raw.weights[i + 1];
    }
  }
}

// grid (parts, T), 256 threads: the keys that a row sees are shared out over the warps of its blocks. scores
// [T][pitch]; what lies behind a row's last 32 positions is left as it was.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) index_scores_few(
    const u16* q, const u16* w, const float* cosines, const float* sines, const int* visible, const int* slots,
    const unsigned char* key_data, const int* table, const int* candidates, float* scores, int pairs, int scale_bits,
    int slot_pages, int page_rows, int page_bytes, int pitch, int most, int num_candidates, int block_shift) {
  __shared__ __align__(16) Query query;
  __shared__ __align__(16) Stage stages[WARPS];
  __shared__ u32 spread;
  const int warp = threadIdx.x >> 5, row = blockIdx.y;
  Stage* stage = stages + warp;
  const Keys keys = {key_data, table, page_rows, 31 - __clz(page_rows), page_bytes};
  if (threadIdx.x == 0) spread = 0;
  __syncthreads();
  wait_for_producer();
  let_consumer_start();
  const int slot = slots[row], seen = visible[row];
  const Raw raw = load_heads(q, w, row);
  const Angles angles = angles_of(cosines, sines, row, pairs);
  const int limit = positions(seen, slot, most, num_candidates, block_shift);
  const Source source = {slot * slot_pages, limit, min(seen, most),
                         candidates + (u64)row * max(num_candidates, 0), block_shift};
  const int step = gridDim.x * WARPS * KEYS;
  int first = (blockIdx.x * WARPS + warp) * KEYS;
#pragma unroll 1
  for (bool has_query = false;; has_query = true, first += step) {
    if (first < limit) fetch(stage, keys, source, first);
    if (!has_query) {
      turn_heads(query, &spread, raw, angles, __int_as_float(scale_bits));
      __syncthreads();
    }
    if (first >= limit) break;
    Fragments a;
    copies_done();
    __syncwarp();
    const bool folds = fold_scales(stage);
    __syncwarp();
    decode(a, stage);
    Sums sums = {};
    score(sums, a, query, folds ? spread : 0xffffffffu, stage->below);
    store(sums, stage, scores + (u64)row * pitch, first, limit);
    __syncwarp();
  }
}
