// The best positions of every row by the total order (value descending, then position ascending), where a
// row has at most 32,768 of them: one block a row keeps their values in registers.
//
// The k-th largest of the threads' largest values bounds what is chosen from below, to 16 bits; the k-th
// largest of all is found among what reaches that, 8 bits at a time, by counts in shared memory; ranks come
// from ballots, so they ascend with positions. Counting is in whole numbers: nothing depends on the order of
// threads.
#include "common.cuh"

#define ALL 0xffffffffu
#define MOST_CHOSEN 512
#define BINS 256
#define PASSES 6  // two of the bound, four of the value

struct Bin { u32 digit, left, inside, total; };  // left: what is still wanted of the `inside` numbers in it
template <int GROUPS>
struct Shared {
  u32 bins[PASSES][BINS];
  u32 groups[GROUPS];  // of 128 values: those above the last chosen one, and in the upper half those equal to it
  u32 all;
  Bin bin;
  int places[MOST_CHOSEN];
};

// A whole number that orders as the value does; 0 is never chosen.
__device__ __forceinline__ u32 ordered(float v) {
  const u32 bits = __float_as_uint(v + 0.f);  // -0 becomes 0
  if (bits == 0xff800000u) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ u32 scan_warp(u32 value) {  // sum up to this lane
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int by = 1; by < 32; by <<= 1) {
    const u32 other = __shfl_up_sync(ALL, value, by);
    if (lane >= by) value += other;
  }
  return value;
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

// What is written of a row.
struct Row {
  const int *pages, *candidates;  // the latter null where positions are entries
  int *entries, *physical;
  int page_rows, page_shift, block_shift;  // page_shift below 0: no power of two
};
__device__ __forceinline__ void write(const Row& row, int rank, int place) {
  if (row.candidates) {
    const int block = row.candidates[place >> row.block_shift];
    place = (block << row.block_shift) + (place & ((1 << row.block_shift) - 1));
  }
  row.entries[rank] = place;
  const int logical = row.page_shift >= 0 ? place >> row.page_shift : place / row.page_rows;
  row.physical[rank] = row.pages[logical] * row.page_rows + place - logical * row.page_rows;
}

// PER runs of four values a thread; a warp's run is 128 positions that follow each other.
template <int THREADS, int PER>
__device__ __forceinline__ void choose(
    const float* scores, const int* visible, const int* slots, const int* table, const int* candidates,
    int* entries, int* physical, int k, int block_shift, int pitch, int most, int num_candidates,
    int slot_pages, int page_rows) {
  constexpr int WARPS = THREADS / 32, GROUPS = WARPS * PER, EACH = (GROUPS + 31) / 32;
  __shared__ __align__(16) Shared<GROUPS> s;
  const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  let_consumer_start();
  if (threadIdx.x < PASSES * BINS / 4) ((uint4*)s.bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  wait_for_producer();
  const float4* from = (const float4*)(scores + (u64)row * pitch);
  float4 x[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int at = (i * WARPS + warp) * 32 + lane;
    x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (4 * at < pitch) x[i] = from[at];
  }
  const int slot = slots[row], num = positions(visible[row], slot, most, num_candidates, block_shift);
  u32 v[PER][4], largest = 0;
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int at = 4 * ((i * WARPS + warp) * 32 + lane);
    const float f[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      v[i][j] = at + j < num ? ordered(f[j]) : 0;
      largest = max(largest, v[i][j]);
    }
  }
  __syncthreads();  // the bins are empty

  u32 floor = 1;  // what is chosen is no less
  if (largest != 0) atomicAdd(&s.bins[0][largest >> 24], 1u);
  Bin bin = find_bin(s.bins[0], &s.bin, k);
  if (bin.total >= k) {
    const u32 high = bin.digit;
    if (largest != 0 && largest >> 24 == high) atomicAdd(&s.bins[1][largest >> 16 & 255], 1u);
    bin = find_bin(s.bins[1], &s.bin, bin.left);
    floor = max(high << 24 | bin.digit << 16, 1u);
  }
#pragma unroll
  for (int i = 0; i < PER; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (v[i][j] >= floor) atomicAdd(&s.bins[2][v[i][j] >> 24], 1u);
  bin = find_bin(s.bins[2], &s.bin, k);
  u32 least = floor - 1;  // all above are chosen, and of those equal to it as many as are still wanted
  if (bin.total > k) {
    u32 prefix = bin.digit;
    int shift = 24;
#pragma unroll 1
    for (int pass = 3; pass < PASSES && bin.left < bin.inside; pass++) {
#pragma unroll
      for (int i = 0; i < PER; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (v[i][j] >> shift == prefix)  // no number has a nought's upper bits
            atomicAdd(&s.bins[pass][v[i][j] >> (shift - 8) & 255], 1u);
      bin = find_bin(s.bins[pass], &s.bin, bin.left);
      prefix = prefix << 8 | bin.digit;
      shift -= 8;
    }
    least = prefix << shift;
    if (bin.left == bin.inside) least = max(least, 1u) - 1;  // all of them
  }
  const u32 tie = least ? least : ALL;

#pragma unroll
  for (int i = 0; i < PER; i++) {
    u32 count = 0;
#pragma unroll
    for (int j = 0; j < 4; j++)
      count += (v[i][j] > least ? 1u : 0u) + (v[i][j] == tie ? 0x10000u : 0u);
    count = __reduce_add_sync(ALL, count);
    if (lane == 0) s.groups[i * WARPS + warp] = count;
  }
  __syncthreads();
  if (warp == 0) {
    u32 n[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      n[i] = lane * EACH + i < GROUPS ? s.groups[lane * EACH + i] : 0;
      sum += n[i];
    }
    const u32 upto = scan_warp(sum);
    u32 before = upto - sum;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (lane * EACH + i < GROUPS) s.groups[lane * EACH + i] = before;
      before += n[i];
    }
    if (lane == 31) s.all = upto;
  }
  __syncthreads();
  const int ties = k - (int)(s.all & 0xffff), found = min(k, (int)(s.all & 0xffff) + (int)(s.all >> 16));
  const u32 ahead = (1u << lane) - 1;
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const u32 before = s.groups[i * WARPS + warp];
    int above = before & 0xffff, same = before >> 16;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      above += __popc(__ballot_sync(ALL, v[i][j] > least) & ahead);
      same += __popc(__ballot_sync(ALL, v[i][j] == tie) & ahead);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const bool is_above = v[i][j] > least, is_tie = v[i][j] == tie;
      const int at = 4 * ((i * WARPS + warp) * 32 + lane) + j;
      if (is_above || (is_tie && same < ties)) s.places[above + min(same, ties)] = at;
      above += is_above;
      same += is_tie;
    }
  }
  __syncthreads();
  const Row out = {table + (u64)max(slot, 0) * slot_pages,
                   num_candidates < 0 ? nullptr : candidates + (u64)row * num_candidates,
                   entries + (u64)row * k, physical + (u64)row * k, page_rows,
                   (page_rows & (page_rows - 1)) ? -1 : 31 - __clz(page_rows), block_shift};
#pragma unroll 1
  for (int i = threadIdx.x; i < k; i += THREADS) {
    if (i < found) write(out, i, s.places[i]);
    else out.entries[i] = out.physical[i] = -1;
  }
}

// grid (T): entries, physical [T][k], ascending, -1 at the end; physical is page * page_rows + row of it.
// scores [T][pitch], no more than the name says. k is 512 at most.
#define CHOOSE(name, threads, per)                                                                           \
  extern "C" __global__ void __launch_bounds__(threads) name(                                                \
      const float* scores, const int* visible, const int* slots, const int* table, const int* candidates,    \
      int* entries, int* physical, int k, int block_shift, int pitch, int most, int num_candidates,          \
      int slot_pages, int page_rows) {                                                                       \
    choose<threads, per>(scores, visible, slots, table, candidates, entries, physical, k, block_shift,       \
                         pitch, most, num_candidates, slot_pages, page_rows);                                \
  }
CHOOSE(index_choose_2048, 512, 1)
CHOOSE(index_choose_4096, 1024, 1)
CHOOSE(index_choose_8192, 1024, 2)
CHOOSE(index_choose_16384, 1024, 4)
CHOOSE(index_choose_32768, 1024, 8)
