// The best positions of every row by the total order, where it has more of them than choose.cu takes, and its
// best candidate blocks.
//
// The best k positions lie in the k tiles whose (largest value, number) come first in the same order: every
// tile before another one has a position that beats all of that one's. So the kernel chooses these tiles, then among
// their values; what is chosen is no less than the least of the tiles' largest. Blocks of positions are chosen
// likewise, by their largest values.
#include "common.cuh"
#include "order.cuh"

#define PINS 1
#include "choose.cuh"

#define THREADS 1024
#define PER 16  // tiles of a thread, which follow each other
#define MOST_CHOSEN 2048

// grid (T, 1 or 2), 1024 threads: y 0 chooses k entries, y 1 top_blocks candidate blocks. entries, physical
// [T][k] and blocks [T][top_blocks], ascending, -1 at the end; physical is page * page_rows + row of it. scores
// [T][pitch], tile_max [T][pitch / 64], block_max [T][pitch >> block_shift]; pitch is a multiple of 256, and 2^20
// at most; tiles of what is chosen have 32,768 values at most.
extern "C" __global__ void __launch_bounds__(THREADS) index_choose_many(
    const float* scores, const float* tile_max, const float* block_max, const int* visible, const int* slots,
    const int* table, const int* candidates, int* entries, int* physical, int* blocks, int k, int top_blocks,
    int block_shift, int pitch, int most, int num_candidates, int slot_pages, int page_rows) {
  __shared__ __align__(16) Shared s;
  __shared__ __align__(16) u32 bins[PASSES][BINS];
  __shared__ u16 tiles[MOST_CHOSEN];
  const int row = blockIdx.x;
  let_consumer_start();
  clear<THREADS>(s);
  if (threadIdx.x < sizeof(bins) / 16) ((uint4*)bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  wait_for_producer();
  const int first = PER * threadIdx.x, all_tiles = pitch / TILE;
  const float4* largest_of = (const float4*)(tile_max + (u64)row * all_tiles + first);
  float4 x[PER / 4];
#pragma unroll
  for (int i = 0; i < PER / 4; i++) {
    x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (first + 4 * i < all_tiles) x[i] = largest_of[i];
  }
  const bool of_blocks = blockIdx.y == 1;
  const int slot = slots[row], num = positions(visible[row], slot, most, num_candidates, block_shift);
  const int unit = of_blocks ? block_shift : 0;  // log2 of entries a value stands for
  const int inside = 6 - unit, want = of_blocks ? top_blocks : k, newest = of_blocks ? (num - 1) >> unit : -1;
  u32 v[PER], largest = 0;
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const float f[4] = {x[i / 4].x, x[i / 4].y, x[i / 4].z, x[i / 4].w};
    v[i] = first + i < (num + TILE - 1) / TILE ? ordered(pinned(f[i % 4], first + i == newest >> inside)) : 0;
    largest = max(largest, v[i]);
  }
  __syncthreads();  // all is clear

  const auto each = [&](const auto& take) {
#pragma unroll
    for (int i = 0; i < PER; i++) take(v[i], i);
  };
  const u32 floor = lower_bound(largest, s.bins, &s.bin, want), least = last_chosen(each, floor, bins, &s.bin, want);
  u32 above_bits = 0, tie_bits = 0;
#pragma unroll
  for (int i = 0; i < PER; i++) {
    above_bits |= (v[i] > least ? 1u : 0u) << i;
    tie_bits |= (v[i] == least && least != 0 ? 1u : 0u) << i;
  }
  const int num_tiles = put_in_order(s.warps, above_bits, tie_bits, want, [&](int rank, int bit) { tiles[rank] = first + bit; });
  __syncthreads();
  const float* of = of_blocks ? block_max + ((u64)row * pitch >> unit) : scores + (u64)row * pitch;
  const int limit = (num + (1 << unit) - 1) >> unit;
  const Values values = {of, tiles, inside, num_tiles << inside, limit, newest};
  const int found = choose_among<THREADS, 4>(s, values, num_tiles < want ? 1 : max(least, 1u), want);
  if (of_blocks) {
    for (int i = threadIdx.x; i < want; i += THREADS) blocks[(u64)row * want + i] = i < found ? s.keys[i] : -1;
  } else {
    write_all(row_of(table, candidates, entries, physical, k, block_shift, num_candidates, slot, slot_pages, page_rows),
              s.keys, found, k);
  }
}
