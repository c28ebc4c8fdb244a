// The best positions of every row by the total order (value descending, then position ascending), where a
// row has at most 32,768 of them.
//
// The k-th largest of the threads' largest values bounds what is chosen from below, to 16 bits; what reaches
// it is few, as a rule.
#include "common.cuh"
#include "order.cuh"

#define PINS 0
#include "choose.cuh"

template <int THREADS, int BATCH>
__device__ __forceinline__ void choose(
    const float* scores, const int* visible, const int* slots, const int* table, const int* candidates,
    int* entries, int* physical, int k, int block_shift, int pitch, int most, int num_candidates,
    int slot_pages, int page_rows) {
  __shared__ __align__(16) Shared s;
  const int row = blockIdx.x;
  let_consumer_start();
  clear<THREADS>(s);
  wait_for_producer();
  const int slot = slots[row], num = positions(visible[row], slot, most, num_candidates, block_shift);
  const Values values = {scores + (u64)row * pitch, nullptr, 0, pitch, num, -1};
  u32 largest = 0;
  values.each_four<THREADS, BATCH>([&](const u32 v[4], int) {
    largest = max(largest, max(max(v[0], v[1]), max(v[2], v[3])));
  });
  __syncthreads();  // all is clear
  const u32 floor = lower_bound(largest, s.bins, &s.bin, k);
  const int found = choose_among<THREADS, BATCH>(s, values, floor, k);
  write_all(row_of(table, candidates, entries, physical, k, block_shift, num_candidates, slot, slot_pages, page_rows),
            s.keys, found, k);
}

// grid (T): entries, physical [T][k], ascending, -1 at the end; physical is page * page_rows + row of it.
// scores [T][pitch], no more than the name says. k is 512 at most.
#define CHOOSE(name, threads, batch)                                                                         \
  extern "C" __global__ void __launch_bounds__(threads) name(                                                \
      const float* scores, const int* visible, const int* slots, const int* table, const int* candidates,    \
      int* entries, int* physical, int k, int block_shift, int pitch, int most, int num_candidates,          \
      int slot_pages, int page_rows) {                                                                       \
    choose<threads, batch>(scores, visible, slots, table, candidates, entries, physical, k, block_shift,     \
                           pitch, most, num_candidates, slot_pages, page_rows);                                \
  }
CHOOSE(index_choose_2048, 512, 1)
CHOOSE(index_choose_4096, 1024, 1)
CHOOSE(index_choose_8192, 1024, 2)
CHOOSE(index_choose_16384, 1024, 4)
CHOOSE(index_choose_32768, 1024, 4)
