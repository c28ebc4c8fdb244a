// Index queries as whole numbers, head weights, and the rows that are scored together.
//
// Macros: HEADS, even, up to 32.
#include "common.cuh"
#include "queries.cuh"

// Rows of one slot that follow each other, ROW_TILE at a time: tiles[i] = (first row, rows).
__device__ void build_tiles(const int* slots, int rows, int2* tiles, int* num_tiles) {
  const int lane = threadIdx.x & 31;
  int count = 0, carried = 0;  // tiles so far; place in its run of the row after the last 32
  for (int first = 0; first < rows; first += 32) {
    const int row = first + lane;
    const bool is_row = row < rows;
    const int slot = is_row ? slots[row] : -2;
    const bool starts = is_row && (row == 0 || slots[row - 1] != slot);
    const u32 before = __ballot_sync(0xffffffffu, starts) & (0xffffffffu >> (31 - lane));
    const int place = before ? lane - (31 - __clz(before)) : carried + lane;
    const bool opens = is_row && place % ROW_TILE == 0;
    const u32 opened = __ballot_sync(0xffffffffu, opens);
    const int tile = count + __popc(opened & (0xffffffffu >> (31 - lane))) - 1;
    if (opens) tiles[tile].x = row;
    const bool ends = is_row && (place % ROW_TILE == ROW_TILE - 1 || row + 1 == rows || slots[row + 1] != slot);
    if (ends) tiles[tile].y = place % ROW_TILE + 1;
    count += __popc(opened);
    carried = __shfl_sync(0xffffffffu, place, 31) + 1;
  }
  if (lane == 0) *num_tiles = count;
}

// One warp a (row, head): grid ((HEADS + 7) / 8, T), 256 threads.
extern "C" __global__ void __launch_bounds__(256) index_queries(
    const u16* q, const u16* w, const float* cosines,
    const float* sines, const int* slots, signed char* numbers,
    uint4* facts, int2* tiles, int* num_tiles, int rows, int pairs, int scale_bits) {
  let_consumer_start();
  wait_for_producer();
  const int head = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y;
  if (blockIdx.x == 0 && row == 0 && threadIdx.x < 32) build_tiles(slots, rows, tiles, num_tiles);
  if (head >= HEADS) return;
  const u64 here = (u64)row * HEADS + head, at = here * WIDTH;
  const Head h = turn_head(*(const uint2*)(q + at + 4 * lane), angles_of(cosines, sines, row, pairs));
  *(u32*)(numbers + at + 4 * lane) = h.numbers;
  if (lane == 0) {  // as Facts in keys.cuh, of one head
    const float weight = weight_of(w[here], __int_as_float(scale_bits), h.fold);
    facts[here] = make_uint4(__float_as_uint(weight), h.start, h.fold.below, 0);
  }
}
