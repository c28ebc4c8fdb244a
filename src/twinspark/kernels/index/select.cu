// The best positions of every row by the total order (value descending, then position ascending).
//
// Two levels. The best k positions lie in the k tiles whose (largest value, number) come first in the same
// order: every tile before another one has a position that beats all of that one's. So a block chooses
// tiles by their largest value, then positions among those tiles, and reads little of the scores; the last
// chosen tile's value also bounds what can be chosen. Counting is in whole numbers, so nothing depends on
// the order of threads.
//
// Macros: STAGED 1 where values fit into shared memory (180 KB), 0 where they are read anew each time.
#include "common.cuh"
#include "order.cuh"

#define THREADS 1024
#define HOLD 32           // most values of a thread, which follow each other
#define MOST (THREADS * HOLD)
#define LIST 4096         // of those, what is kept to choose from exactly
#define MOST_CHOSEN 2048  // tiles that the first level chooses

struct Shared {
  u32 warps[32];
  u32 keys[LIST];
  int places[LIST];
  int chosen[MOST_CHOSEN];
#if STAGED
  u32 held[THREADS * (HOLD + 1)];  // one word further every 32, so that threads read other banks
#endif
};

__device__ __forceinline__ u32 largest(Shared& s, u32 value) {
  value = __reduce_max_sync(ALL, value);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) s.warps[threadIdx.x >> 5] = value;
  __syncthreads();
  return __reduce_max_sync(ALL, s.warps[threadIdx.x & 31]);
}
// The want-th largest of 1,024 * rounds numbers, rounds a thread; there are that many above 0. `floor`: it is
// no less.
__device__ __noinline__ u32 kth_largest(Shared& s, const u32 v[4], int rounds, int want, u32 floor) {
  const u32 most = largest(s, max(max(v[0], v[1]), max(v[2], v[3])));
  const int bits = 32 - __clz(most ^ floor);  // that are not known
  u32 kth = bits == 32 ? 0 : most >> bits << bits;
#pragma unroll 1
  for (int bit = bits - 1; bit >= 0; bit--) {
    const u32 tried = kth | 1u << bit;
    int count = __syncthreads_count(v[0] >= tried);
    if (rounds > 1) count += __syncthreads_count(v[1] >= tried);
    if (rounds > 2) count += __syncthreads_count(v[2] >= tried) + __syncthreads_count(v[3] >= tried);
    if (count >= want) kth = tried;
  }
  return kth;
}
// What is chosen from: values of a row by place.
struct Values {
  const float* of;    // null: all are equal, but those on pages that are not here
  const int* pages;
  int page_rows;
  const int* chosen;  // tiles that the places lie in, or null for all
  int inside;         // log2 of values a tile
  int limit, newest;  // values there are, and the one that counts as infinite
  __device__ __forceinline__ int place(int at) const {
    return chosen ? (chosen[at >> inside] << inside) + (at & ((1 << inside) - 1)) : at;
  }
  __device__ __forceinline__ u32 operator()(int at) const {
    const int place_at = place(at);
    if (place_at >= limit) return 0;
    if (!of) return pages[place_at / page_rows] >= 0;
    const float v = of[place_at];
    return ordered(place_at == newest && v > -infinity() ? infinity() : v);
  }
};


// The values that are chosen from, 0 being none.
struct Held {
  Shared& s;
  const Values& values;
  int count, each;  // each: of a thread
  __device__ __forceinline__ u32 operator()(int at) const {
#if STAGED
    return s.held[at + at / HOLD];
#else
    return at < count ? values(at) : 0;
#endif
  }
};
__device__ __forceinline__ void stage(Shared& s, const Values& values, int count) {
#if STAGED
#pragma unroll 8
  for (int at = threadIdx.x; at < max((count + THREADS - 1) / THREADS, 1) * THREADS; at += THREADS)
    s.held[at + at / HOLD] = at < count ? values(at) : 0;
#endif
  __syncthreads();
}
// How many values are above `least`, and in the upper half how many equal it. `before` gets the same of the
// threads before this one.
__device__ __noinline__ u32 count_best(Shared& s, const Held& held, u32 least, u32* before) {
  u32 mine = 0, all;
#pragma unroll 8
  for (int at = threadIdx.x * held.each, end = at + held.each; at < end; at++) {
    const u32 v = held(at);
    mine += (v > least ? 1u : 0u) + (v == least ? 0x10000u : 0u);
  }
  if (least == 0) mine &= 0xffff;
  *before = sum_before(s.warps, mine, &all);
  return all;
}
// The want-th largest value, found bit by bit; slow, for where very many are equal.
__device__ __noinline__ u32 kth_of_all(Shared& s, const Held& held, int want) {
  u32 kth = 0, before;
#pragma unroll 1
  for (int bit = 31; bit >= 0; bit--)
    if ((int)(count_best(s, held, (kth | 1u << bit) - 1, &before) & 0xffff) >= want) kth |= 1u << bit;
  return kth;
}
// The want-th largest of the threads' largest values (of their quarters' for many), or 0 if there are fewer.
__device__ __forceinline__ u32 lower_bound(Shared& s, const Held& held, int want) {
  const bool quarters = want > THREADS / 2;
  u32 most[4] = {0, 0, 0, 0};
#pragma unroll 2
  for (int at = threadIdx.x * held.each, end = at + held.each; at < end; at += 4)
#pragma unroll
    for (int j = 0; j < 4; j++) most[j] = max(most[j], at + j < end ? held(at + j) : 0);
  if (!quarters) {
    most[0] = max(max(most[0], most[1]), max(most[2], most[3]));
    most[1] = most[2] = most[3] = 0;
  }
  u32 num;
  sum_before(s.warps, (most[0] != 0) + (most[1] != 0) + (most[2] != 0) + (most[3] != 0), &num);
  return (int)num < want ? 0 : kth_largest(s, most, quarters ? 4 : 1, want, 1);
}
// Takes the `want` largest of what is on the list, `num` items in order. Returns the last one's value, or 0.
template <class Take>
__device__ __forceinline__ u32 take_from_list(Shared& s, int num, int want, u32 floor, const Take& take) {
  const int each = num <= THREADS ? 1 : 4, first = each * threadIdx.x;  // of a thread
  u32 v[4], least = 0, mine = 0, all;
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = i < each && first + i < num ? s.keys[first + i] : 0;
  if (num > want) least = kth_largest(s, v, each, want, floor);
#pragma unroll
  for (int i = 0; i < 4; i++) mine += (v[i] > least ? 1u : 0u) + (v[i] == least && least != 0 ? 0x10000u : 0u);
  const u32 before = sum_before(s.warps, mine, &all);
  const int ties = want - (int)(all & 0xffff);
  int above = before & 0xffff, same = before >> 16;
  if (mine)
#pragma unroll 1
    for (int at = first; at < min(first + each, num); at++) {
      const u32 key = s.keys[at];
      if (key > least) take(above++ + min(same, ties), s.places[at]);
      else if (key == least && least != 0 && same++ < ties) take(above + same - 1, s.places[at]);
    }
  return least;
}
// Chooses up to `want` of the held values. At least `want` of them reach `bound`, if it is not 0. Calls
// take(rank, place), ranks ascending with places. Returns how many; `least` gets the last one's value, or 0
// when all are taken.
template <class Take>
__device__ __forceinline__ int choose(Shared& s, const Held& held, int want, u32 bound, const Take& take, u32* least) {
  if (bound == 0 && held.count > LIST) bound = lower_bound(s, held, want);
  u32 under = max(bound, 1u) - 1, before;  // all that is chosen is above
  int num = count_best(s, held, under, &before) & 0xffff;
  const int all = num;
  if (all > LIST) num = count_best(s, held, ++under, &before) & 0xffff;  // perhaps many equal values
  const bool lists = num <= LIST && (num >= want || all <= LIST);
  int ties = 0;
  if (!lists) {
    if (num >= want) under = kth_of_all(s, held, want);
    ties = want - (int)(count_best(s, held, under, &before) & 0xffff);
  }
  int above = before & 0xffff, same = before >> 16;
#pragma unroll 4
  for (int at = threadIdx.x * held.each, end = at + held.each; at < end; at++) {
    const u32 v = held(at);
    if (v >= under && v != 0 && (v > under || same < ties)) {
      const int rank = above + min(same, ties);
      if (lists) s.keys[rank] = v;
      s.places[rank] = at;
    }
    above += v > under;
    same += v == under;
  }
  __syncthreads();
  if (lists) {
    *least = take_from_list(s, num, want, under + 1, take);
    return min(num, want);
  }
  *least = under;
  for (int rank = threadIdx.x; rank < want; rank += THREADS) take(rank, s.places[rank]);
  return want;
}

// grid (T, 1 or 2), 1024 threads: y 0 chooses k entries, y 1 top_blocks candidate blocks. entries, physical
// [T][k] and blocks [T][top_blocks], ascending, -1 at the end; physical is page * page_rows + row of it. Without
// scores, where no row sees more than k, all are taken. Dynamic shared memory: Shared.
extern "C" __global__ void __launch_bounds__(THREADS, 1) index_select(
    const float* scores, const float* tile_max, const float* block_max, const int* visible, const int* slots,
    const int* table, const int* candidates, int* entries, int* physical, int* blocks, int k, int top_blocks,
    int block_shift, int pitch, int most, int num_candidates, int slot_pages, int page_rows) {
  extern __shared__ __align__(16) unsigned char shared[];
  Shared& s = *(Shared*)shared;
  const int row = blockIdx.x;
  let_consumer_start();
  wait_for_producer();
  const bool of_blocks = blockIdx.y == 1;
  const int slot = slots[row], num = positions(visible[row], slot, most, num_candidates, block_shift);
  const int unit = of_blocks ? block_shift : 0;  // log2 of entries a value stands for
  const int inside = 6 - unit, want = of_blocks ? top_blocks : k;
  const int newest = of_blocks ? (num - 1) >> unit : -1, num_tiles = (num + TILE - 1) / TILE;
  const float* values_of = of_blocks ? block_max + (((u64)row * pitch) >> unit) : scores + (u64)row * pitch;
  const int* pages = table + (u64)max(slot, 0) * slot_pages;
  const int limit = (num + (1 << unit) - 1) >> unit;
  const Values leaves = {scores ? values_of : nullptr, pages, page_rows, nullptr, inside, limit, newest};
  int* const out = of_blocks ? blocks + (u64)row * top_blocks : entries + (u64)row * k;
  bool first = num_tiles > MOST >> inside;  // more than can be chosen from at once: tiles first
  Values values = leaves;
  if (first) {
    const float* tiles = tile_max + (u64)row * (pitch / TILE);
    values = {tiles, pages, page_rows, nullptr, 0, num_tiles, newest < 0 ? -1 : newest >> inside};
  }
  int count = values.limit, found;
  u32 bound = 0;
#pragma unroll 1
  while (true) {
    stage(s, values, count);
    const Held held = {s, values, count, max((count + THREADS - 1) / THREADS, 1)};
    found = choose(s, held, want, bound, [&](int rank, int at) {
      if (first) {
        s.chosen[rank] = at;
        return;
      }
      int place = values.place(at);
      if (!of_blocks) {
        if (num_candidates >= 0) {
          const int block = candidates[(u64)row * num_candidates + (place >> block_shift)];
          place = (block << block_shift) + (place & ((1 << block_shift) - 1));
        }
        const int logical = place / page_rows;
        physical[(u64)row * k + rank] = pages[logical] * page_rows + place - logical * page_rows;
      }
      out[rank] = place;
    }, &bound);
    if (!first) break;
    __syncthreads();
    first = false;
    values = leaves;
    values.chosen = s.chosen;
    count = found << inside;
  }
  for (int i = found + threadIdx.x; i < want; i += THREADS) {
    out[i] = -1;
    if (!of_blocks) physical[(u64)row * k + i] = -1;
  }
}
