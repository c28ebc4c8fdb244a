// Scores of few rows, in the bits of scores.cu: a block makes its row's queries itself, so that no launch
// goes ahead of it, and a warp takes 32 keys, so that more multiprocessors share them.
//
// Macros: HEADS and GATHERED as in scores.cu; keys are packed. Code runs once or a few times a launch, so that
// fetching it is waited for: loops over heads that make queries stay loops.
#include "common.cuh"

#define KEYS 32
#define PACKED 1
#define ANY_PAGES 0
#include "keys.cuh"
#include "queries.cuh"

#define WARPS 8  // one for each of a turn's heads
#define RING 2   // stages of a warp

// Of the sums of a lane's runs, that of its key over all runs: (0 + 1) + (2 + 3).
__device__ __forceinline__ float join_runs(const Sums sums) {
  const int q = threadIdx.x & 3;
  float half[2];  // keys 16 m + 8 i + g where i is odd as q is: [m]
#pragma unroll
  for (int m = 0; m < 2; m++)
    half[m] = (q & 1 ? sums[m][1] : sums[m][0]) + __shfl_xor_sync(0xffffffffu, q & 1 ? sums[m][0] : sums[m][1], 1);
  return (q & 2 ? half[1] : half[0]) + __shfl_xor_sync(0xffffffffu, q & 2 ? half[0] : half[1], 2);
}
// A key a lane.
__device__ __forceinline__ void store(const Sums sums, const Stage* stage, float* scores, int first, int visible) {
  const int lane = threadIdx.x & 31, q = lane & 3, key = 16 * (q >> 1) + 8 * (q & 1) + (lane >> 2);
  const float sum = join_runs(sums), unit = stage->units[key];
  scores[first + key] = first + key < visible && unit == unit ? sum * unit : -infinity();
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
    const int lane = threadIdx.x & 31;
    *(u32*)(query.numbers[turn][column] + place_of(column, lane >> 2) + 4 * (lane & 3)) = h.numbers;
    if (lane == 0) {
      const bool is_head = head_of(turn) < HEADS;
      Facts& facts = query.facts[turn][column >> 1];
      ((int*)&facts.starts)[column & 1] = ((int*)&facts.starts)[2 + (column & 1)] = h.start;
      ((float*)&facts.weights)[column & 1] = is_head ? weight_of(raw.weights[0], scale, h.fold) : 0.f;
      ((u32*)&facts.below)[column & 1] = is_head ? h.fold.below : 0;
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
  __shared__ __align__(16) Stage stages[WARPS][RING];
  __shared__ u32 spread;
  const int warp = threadIdx.x >> 5, row = blockIdx.y;
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
                         candidates + (u64)row * max(num_candidates, 0), block_shift,
                         max(num_candidates, 0) << block_shift};
  const int step = gridDim.x * WARPS * KEYS;
  int first = (blockIdx.x * WARPS + warp) * KEYS;
  fetch(stages[warp], keys, source, page_ahead(keys, source, first), first);
  commit_copies();
  int page = page_ahead(keys, source, first + step);
  turn_heads(query, &spread, raw, angles, __int_as_float(scale_bits));
  __syncthreads();
#pragma unroll 1
  for (int turn = 0; first < limit; first += step, turn ^= 1) {
    Stage* const stage = stages[warp] + turn;
    fetch(stages[warp] + (turn ^ 1), keys, source, page, first + step);
    commit_copies();
    page = page_ahead(keys, source, first + 2 * step);
    wait_for_all_but_newest();
    __syncwarp();
    const bool folds = fold_scales(stage);
    __syncwarp();
    Fragments a;
    Sums sums = {};
    if (folds && spread == 0) {
      decode_folded(a, stage);
#pragma unroll
      for (int of = 0; of < TURNS; of++) add_turn<2>(sums, a, query, of);
    } else {
      decode(a, stage);
      add_any(sums, a, query, folds ? spread : 0xffffffffu, stage->below);
    }
    store(sums, stage, scores + (u64)row * pitch, first, limit);
    __syncwarp();
  }
}
