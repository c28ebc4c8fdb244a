// The best positions of every row by the total order (value descending, then position ascending).
//
// Two levels. The best k positions lie in the k tiles whose (largest value, number) come first in the same
// order: every tile before another one has a position that beats all of that one's. So a block chooses
// tiles by their largest value, then positions among those tiles, and reads little of the scores; the last
// chosen tile's value also bounds what can be chosen. Counting is in whole numbers, so nothing depends on
// the order of threads.
#include "common.cuh"

#define THREADS 1024
#define MOST 32768        // values chosen from at once
#define LIST 4096         // of those, what is kept to choose from exactly
#define MOST_CHOSEN 2048  // tiles that the first level chooses
#define ALL 0xffffffffu

struct Shared {
  u32 counts[THREADS];  // of 32 values that follow each other
  u32 warps[32];
  u32 keys[LIST];
  int places[LIST];
  int chosen[MOST_CHOSEN];
};

// A whole number that orders as the value does; 0 is never chosen.
__device__ __forceinline__ u32 ordered(float v) {
  const u32 bits = __float_as_uint(v + 0.f);  // -0 becomes 0
  if (bits == 0xff800000u) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
// Sum of the threads before this one; all threads take part. `all` gets the sum of all.
__device__ __noinline__ u32 sum_before(Shared& s, u32 value, u32* all) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32 sum = value;
#pragma unroll
  for (int by = 1; by < 32; by <<= 1) {
    const u32 other = __shfl_up_sync(ALL, sum, by);
    if (lane >= by) sum += other;
  }
  __syncthreads();
  if (lane == 31) s.warps[warp] = sum;
  __syncthreads();
  u32 upto = s.warps[lane];
#pragma unroll
  for (int by = 1; by < 32; by <<= 1) {
    const u32 other = __shfl_up_sync(ALL, upto, by);
    if (lane >= by) upto += other;
  }
  *all = __shfl_sync(ALL, upto, 31);
  const u32 ahead = __shfl_sync(ALL, upto, max(warp - 1, 0));
  return (warp ? ahead : 0) + sum - value;
}
__device__ __forceinline__ u32 largest(Shared& s, u32 value) {
  value = __reduce_max_sync(ALL, value);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) s.warps[threadIdx.x >> 5] = value;
  __syncthreads();
  return __reduce_max_sync(ALL, s.warps[threadIdx.x & 31]);
}
// The want-th largest of 1,024 * rounds numbers, rounds a thread; there are that many above 0.
__device__ __noinline__ u32 kth_largest(Shared& s, const u32 v[4], int rounds, int want) {
  const u32 most = largest(s, max(max(v[0], v[1]), max(v[2], v[3])));
  u32 kth = 0;
#pragma unroll 1
  for (int bit = 31 - __clz(most); bit >= 0; bit--) {
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
  const float* of;
  const int* chosen;  // tiles that the places lie in, or null for all
  int inside;         // log2 of values a tile
  int limit, newest;  // values there are, and the one that counts as infinite
  __device__ __forceinline__ int place(int at) const {
    return chosen ? (chosen[at >> inside] << inside) + (at & ((1 << inside) - 1)) : at;
  }
  __device__ __forceinline__ u32 operator()(int at) const {
    const int place_at = place(at);
    if (place_at >= limit) return 0;
    const float v = of[place_at];
    return ordered(place_at == newest && v > -infinity() ? infinity() : v);
  }
};
struct Listed {
  const u32* keys;
  __device__ __forceinline__ u32 operator()(int at) const { return keys[at]; }
};

// A value that at least `want` of the values reach, or 0: the want-th largest of the threads' largest.
__device__ __forceinline__ u32 lower_bound(Shared& s, int count, int want, const Values& value) {
  const int parts = want > THREADS / 2 ? 4 : 1;
  u32 most[4] = {0, 0, 0, 0};
#pragma unroll 2
  for (int at = threadIdx.x; at < count; at += 4 * THREADS)
#pragma unroll
    for (int i = 0; i < 4; i++) most[i] = max(most[i], at + i * THREADS < count ? value(at + i * THREADS) : 0);
  if (parts == 1) {
    most[0] = max(max(most[0], most[1]), max(most[2], most[3]));
    most[1] = most[2] = most[3] = 0;
  }
  int num = 0;
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (i < parts) num += __syncthreads_count(most[i] != 0);
  return num < want ? 0 : kth_largest(s, most, parts, want);
}
// How many values are above `least`, and in the upper half how many equal it, if it is not 0; s.counts then has
// how many of both come before each 32 places.
template <int UNROLL, class Value>
__device__ __forceinline__ u32 count_best(Shared& s, int count, u32 least, const Value& value) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __syncthreads();
  s.counts[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll UNROLL
  for (int first = 0; first < count; first += THREADS) {
    const int at = first + threadIdx.x;
    const u32 v = at < count ? value(at) : 0;
    const u32 above = __ballot_sync(ALL, v > least), same = __ballot_sync(ALL, v == least && v != 0);
    if (lane == 0) s.counts[first / 32 + warp] = __popc(above) | __popc(same) << 16;
  }
  __syncthreads();
  u32 all;
  const u32 before = sum_before(s, s.counts[threadIdx.x], &all);
  s.counts[threadIdx.x] = before;
  __syncthreads();
  return all;
}
// Calls take(rank, place) for all above `least` and the first `ties` that equal it, in order.
template <int UNROLL, class Value, class Take>
__device__ __forceinline__ void take_best(Shared& s, int count, u32 least, int ties, const Value& value, const Take& take) {
  const u32 lower = ALL >> (31 - (threadIdx.x & 31)) >> 1;
#pragma unroll UNROLL
  for (int first = 0; first < count; first += THREADS) {
    const int at = first + threadIdx.x;
    const u32 v = at < count ? value(at) : 0;
    const bool above = v > least, same = v == least && v != 0;
    const int aboves = __popc(__ballot_sync(ALL, above) & lower), sames = __popc(__ballot_sync(ALL, same) & lower);
    if (above || same) {
      const u32 before = s.counts[at >> 5];
      const int equal = (int)(before >> 16) + sames;
      if (above || equal < ties) take((int)(before & 0xffff) + aboves + min(equal, ties), at, v);
    }
  }
  __syncthreads();
}
// As kth_largest, but any values, which are read anew for every bit.
__device__ __noinline__ u32 kth_of_all(Shared& s, int count, int want, const Values& value) {
  u32 kth = 0;
#pragma unroll 1
  for (int bit = 31; bit >= 0; bit--) {
    const u32 tried = kth | 1u << bit;
    if ((int)(count_best<1>(s, count, tried - 1, value) & 0xffff) >= want) kth = tried;
  }
  return kth;
}
// Takes the `want` largest of what is on the list, `num` items in order. Returns the last one's value, or 0.
template <class Take>
__device__ __forceinline__ u32 take_from_list(Shared& s, int num, int want, const Take& take) {
  u32 least = 0;
  const Listed value = {s.keys};
  if (num > want) {
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = i * THREADS + (int)threadIdx.x < num ? s.keys[i * THREADS + threadIdx.x] : 0;
    least = kth_largest(s, v, (num + THREADS - 1) / THREADS, want);
  }
  const int above = count_best<1>(s, num, least, value) & 0xffff;
  take_best<1>(s, num, least, want - above, value, [&](int rank, int at, u32) { take(rank, s.places[at]); });
  return least;
}
// Chooses up to `want` of count <= MOST values, 0 being none. At least `want` of them reach `bound`, if it is
// not 0. Calls take(rank, place), ranks ascending with places. Returns how many; `least` gets the last one's
// value, or 0 when all are taken.
template <class Take>
__device__ __forceinline__ int choose(
    Shared& s, int count, int want, u32 bound, const Values& value, const Take& take, u32* least) {
  if (bound == 0 && count > LIST) bound = lower_bound(s, count, want, value);
  u32 under = max(bound, 1u) - 1;  // all that is chosen is above
  u32 found = count_best<4>(s, count, under, value);
  const int all = found & 0xffff;
  if (all > LIST) {  // perhaps many equal values
    under = max(bound, 1u);
    found = count_best<4>(s, count, under, value);
  }
  const int num = found & 0xffff;
  if (num <= LIST && (num >= want || all <= LIST)) {
    take_best<4>(s, count, under, 0, value, [&](int rank, int at, u32 v) {
      s.keys[rank] = v;
      s.places[rank] = at;
    });
    *least = take_from_list(s, num, want, take);
    return min(num, want);
  }
  *least = num < want ? under : kth_of_all(s, count, want, value);
  const int above = count_best<1>(s, count, *least, value) & 0xffff;
  take_best<1>(s, count, *least, want - above, value, [&](int rank, int at, u32) { take(rank, at); });
  return min(all, want);
}

// grid (T, 1 or 2), 1024 threads: y 0 chooses k entries, y 1 top_blocks candidate blocks. entries, physical
// [T][k] and blocks [T][top_blocks], ascending, -1 at the end; physical is page * page_rows + row of it.
extern "C" __global__ void __launch_bounds__(THREADS, 1) index_select(
    const float* scores, const float* tile_max, const float* block_max,
    const int* visible, const int* slots, const int* table,
    const int* candidates, int* entries, int* physical,
    int* blocks, int k, int top_blocks, int block_shift, int pitch, int most, int num_candidates,
    int slot_pages, int page_rows) {
  __shared__ Shared s;
  const int row = blockIdx.x;
  let_consumer_start();
  wait_for_producer();
  const bool of_blocks = blockIdx.y == 1;
  const int slot = slots[row], num = positions(visible[row], slot, most, num_candidates, block_shift);
  const int unit = of_blocks ? block_shift : 0;  // log2 of entries a value stands for
  const int inside = 6 - unit, want = of_blocks ? top_blocks : k;
  const int newest = of_blocks ? (num - 1) >> unit : -1, num_tiles = (num + TILE - 1) / TILE;
  const float* values_of = of_blocks ? block_max + (((u64)row * pitch) >> unit) : scores + (u64)row * pitch;
  const Values leaves = {values_of, nullptr, inside, (num + (1 << unit) - 1) >> unit, newest};
  int* const out = of_blocks ? blocks + (u64)row * top_blocks : entries + (u64)row * k;
  bool first = num_tiles > MOST >> inside;  // more than can be chosen from at once: tiles first
  Values values = leaves;
  if (first) values = {tile_max + (u64)row * (pitch / TILE), nullptr, 0, num_tiles, newest < 0 ? -1 : newest >> inside};
  int count = values.limit, found;
  u32 bound = 0;
#pragma unroll 1
  while (true) {
    found = choose(s, count, want, bound, values, [&](int rank, int at) {
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
        physical[(u64)row * k + rank] = table[slot * slot_pages + logical] * page_rows + place - logical * page_rows;
      }
      out[rank] = place;
    }, &bound);
    if (!first) break;
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
