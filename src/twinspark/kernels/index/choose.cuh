// A choice among up to 32,768 values of a row by the total order: counts of digits, a list of what can be
// chosen, ranks. After common.cuh and order.cuh. Counting is in whole numbers, and ranks come from places: nothing
// depends on the order of threads. Code runs once a launch, so that fetching it is waited for: it is short.
// Macro: PINS 1 where one value may count as infinite.

#define BINS 256
#define BOUND_PASSES 2
#define PASSES 4
#define LIST 4096

struct Bin { u32 digit, left, inside, total; };  // left: what is still wanted of the `inside` numbers in it
struct Shared {
  u32 bins[BOUND_PASSES + PASSES][BINS];
  u32 above[1024], ties[1024];  // a bit a value
  u32 keys[LIST];  // at last the chosen positions
  u16 places[LIST];
  u32 warps[32], listed;
  Bin bin;
};
// By all threads, before anything else; a barrier must follow.
template <int THREADS>
__device__ __forceinline__ void clear(Shared& s) {
  for (int i = threadIdx.x; i < sizeof(s.bins) / 16; i += THREADS) ((uint4*)s.bins)[i] = make_uint4(0, 0, 0, 0);
  s.above[threadIdx.x] = s.ties[threadIdx.x] = 0;
  if (threadIdx.x < 32) s.warps[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.listed = 0;
}

// After all threads have counted: the bin, from the largest down, in which the want-th number lies. All
// threads take part; if there are fewer, only the total is right. Not inlined: code that runs once is waited for.
__device__ __noinline__ Bin find_bin(const u32* bins, Bin* found, u32 want) {
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    const uint4 high = *(const uint4*)(bins + 252 - 8 * lane), low = *(const uint4*)(bins + 248 - 8 * lane);
    const u32 n[8] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += n[i];
    const u32 upto = scan_warp(sum), before = upto - sum;
    if (lane == 31) found->total = upto;
    if (before < want && want <= upto) {
      u32 ahead = before, next = before, inside = 0, digit = 256 - 8 * lane;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const bool reached = next >= want;
        ahead = reached ? ahead : next;
        inside = reached ? inside : n[i];
        digit -= reached ? 0 : 1;
        next += n[i];
      }
      found->digit = digit;
      found->left = want - ahead;
      found->inside = inside;
    }
  }
  __syncthreads();
  return *found;
}
// Of every thread's largest number the want-th largest, to 16 bits: no more than the want-th of all. 1 if too
// few have one. `bins`: BOUND_PASSES times BINS noughts.
__device__ __forceinline__ u32 lower_bound(u32 largest, u32 (*bins)[BINS], Bin* found, u32 want) {
  if (largest != 0) atomicAdd(&bins[0][largest >> 24], 1u);
  const Bin bin = find_bin(bins[0], found, want);
  if (bin.total < want) return 1;
  const u32 high = bin.digit;
  if (largest != 0 && largest >> 24 == high) atomicAdd(&bins[1][largest >> 16 & 255], 1u);
  return max(high << 24 | find_bin(bins[1], found, bin.left).digit << 16, 1u);
}
// The number above which all are chosen; of those equal to it as many are as are still wanted, of 0 none.
// each(f) calls f(number, place) for all numbers of a thread; the want-th largest is no less than `floor`,
// which is not 0. `bins`: PASSES times BINS noughts.
template <class Each>
__device__ __forceinline__ u32 last_chosen(const Each& each, u32 floor, u32 (*bins)[BINS], Bin* found, u32 want) {
  u32 prefix = 0, mask = 0, left = want;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8, bins++) {
    each([&](u32 v, int) {
      if (v >= floor && ((v ^ prefix) & mask) == 0) atomicAdd(&bins[0][v >> shift & 255], 1u);
    });
    const Bin bin = find_bin(bins[0], found, left);
    if (mask == 0 && bin.total <= want) return floor - 1;
    prefix |= bin.digit << shift;
    mask |= 255u << shift;
    left = bin.left;
    if (left == bin.inside) return max(prefix, 1u) - 1;  // all of them
  }
  return prefix;
}

__device__ __forceinline__ float pinned(float v, bool is_newest) { return is_newest && v > -infinity() ? infinity() : v; }
// Values that are chosen from, by place: of some tiles, or all.
struct Values {
  const float* of;   // by position
  const u16* tiles;  // null for all
  int inside;        // log2 of values a tile
  int num, limit;    // num: values; limit: positions there are
  int newest;        // the position whose value counts as infinite, or -1
  __device__ __forceinline__ int position(int place) const {
    return tiles ? (tiles[place >> inside] << inside) + (place & ((1 << inside) - 1)) : place;
  }
  // As numbers, four a thread at a time, BATCH times four asked for at once. All threads of a warp call
  // take(numbers, place of the first).
  template <int THREADS, int BATCH, class Take>
  __device__ __forceinline__ void each_four(const Take& take) const {
#pragma unroll 1
    for (int at = 4 * threadIdx.x; (at & ~127) < num; at += 4 * BATCH * THREADS) {
      float4 x[BATCH];
      int first[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int place = at + 4 * i * THREADS;
        first[i] = place < num ? position(place) : limit;
        x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (place < num) x[i] = *(const float4*)(of + first[i]);  // not asking for the limit, which may still be on its way
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const float f[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
        u32 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = first[i] + j < limit ? ordered(pinned(f[j], PINS && first[i] + j == newest)) : 0;
        take(v, at + 4 * i * THREADS);
      }
    }
  }
};
// What reaches `floor`, in any order, as far as the list goes.
template <int THREADS, int BATCH>
__device__ __forceinline__ void list(Shared& s, const Values& values, u32 floor) {
  const u32 ahead = (1u << (threadIdx.x & 31)) - 1;
  values.each_four<THREADS, BATCH>([&](const u32 v[4], int place) {
    u32 reach[4], all = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      reach[j] = __ballot_sync(ALL, v[j] >= floor);
      all += __popc(reach[j]);
    }
    if (all == 0) return;
    u32 at = 0;
    if ((threadIdx.x & 31) == 0) at = atomicAdd(&s.listed, all);
    at = __shfl_sync(ALL, at, 0);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 own = at + __popc(reach[j] & ahead);
      if (v[j] >= floor && own < LIST) {
        s.keys[own] = v[j];
        s.places[own] = place + j;
      }
      at += __popc(reach[j]);
    }
  });
}
// Ranks of a thread's values, which it has a bit for each: all that are above the last chosen one, and of those
// equal to it the first. put(rank, bit); returns how many there are of all threads.
template <class Put>
__device__ __forceinline__ int put_in_order(u32* warps, u32 above_bits, u32 tie_bits, int want, const Put& put) {
  u32 all;
  const u32 before = sum_before(warps, __popc(above_bits) | __popc(tie_bits) << 16, &all);
  int above = before & 0xffff, same = before >> 16;
  const int ties = want - (int)(all & 0xffff);
#pragma unroll 1
  for (u32 bits = above_bits | tie_bits; bits; bits &= bits - 1) {
    const int bit = __ffs(bits) - 1;
    const bool is_tie = tie_bits >> bit & 1;
    if (!is_tie || same < ties) put(above + min(same, ties), bit);
    above += !is_tie;
    same += is_tie;
  }
  return min(want, (int)(all & 0xffff) + (int)(all >> 16));
}
// Leaves positions in s.keys, in order, and returns how many. At least k values reach `floor`, or it is 1.
template <int THREADS, int BATCH>
__device__ __forceinline__ int choose_among(Shared& s, const Values& values, u32 floor, int k) {
  list<THREADS, BATCH>(s, values, floor);
  __syncthreads();
  const int listed = s.listed;
  const auto each = [&](const auto& take) {
    if (listed <= LIST) {
#pragma unroll 1
      for (int i = threadIdx.x; i < listed; i += THREADS) take(s.keys[i], s.places[i]);
    } else {  // too many: they are read anew
      values.each_four<THREADS, 1>([&](const u32 v[4], int place) {
#pragma unroll
        for (int j = 0; j < 4; j++) take(v[j], place + j);
      });
    }
  };
  const u32 least = last_chosen(each, floor, s.bins + BOUND_PASSES, &s.bin, k);
  each([&](u32 v, int place) {
    if (v > least) atomicOr(&s.above[place >> 5], 1u << (place & 31));
    else if (v == least && v != 0) atomicOr(&s.ties[place >> 5], 1u << (place & 31));
  });
  __syncthreads();
  const int found = put_in_order(s.warps, s.above[threadIdx.x], s.ties[threadIdx.x], k, [&](int rank, int bit) {
    s.keys[rank] = values.position(32 * threadIdx.x + bit);
  });
  __syncthreads();
  return found;
}

// What is written of a row.
struct Row {
  const int *pages, *candidates;  // the latter null where positions are entries
  int *entries, *physical;
  int page_rows, page_shift, block_shift;  // page_shift below 0: no power of two
};
__device__ __forceinline__ Row row_of(
    const int* table, const int* candidates, int* entries, int* physical, int k, int block_shift,
    int num_candidates, int slot, int slot_pages, int page_rows) {
  const int row = blockIdx.x;
  return {table + (u64)max(slot, 0) * slot_pages,
          num_candidates < 0 ? nullptr : candidates + (u64)row * num_candidates,
          entries + (u64)row * k, physical + (u64)row * k, page_rows,
          (page_rows & (page_rows - 1)) ? -1 : 31 - __clz(page_rows), block_shift};
}
__device__ __forceinline__ void write(const Row& row, int rank, int place) {
  if (row.candidates) {
    const int block = row.candidates[place >> row.block_shift];
    place = (block << row.block_shift) + (place & ((1 << row.block_shift) - 1));
  }
  row.entries[rank] = place;
  const int logical = row.page_shift >= 0 ? place >> row.page_shift : place / row.page_rows;
  row.physical[rank] = row.pages[logical] * row.page_rows + place - logical * row.page_rows;
}
// The first `found` of k ranks, whose places ascend; -1 at the end.
__device__ __forceinline__ void write_all(const Row& row, const u32* places, int found, int k) {
#pragma unroll 1
  for (int i = threadIdx.x; i < k; i += blockDim.x) {
    if (i < found) write(row, i, places[i]);
    else row.entries[i] = row.physical[i] = -1;
  }
}
