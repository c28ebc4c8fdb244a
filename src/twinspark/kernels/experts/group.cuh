// Who works with whom: pairs of rows and experts brought together by expert; included by prompt.cu.
#define BATCH 8     // ids a thread asks for at once
#define TOGETHER 8  // blocks of a cluster

// Sum of `value` over the threads before this one; `total` over all of the block of 1,024.
__device__ __forceinline__ int sum_before(int value, int* warp_sums, int& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int upto = value;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane >= step) upto += other;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = upto;
  __syncthreads();
  const int each = warp_sums[lane];
  int before = lane < warp ? each : 0, all = each;
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    before += __shfl_xor_sync(0xffffffffu, before, step);
    all += __shfl_xor_sync(0xffffffffu, all, step);
  }
  total = all;
  return before + upto - value;
}
__device__ __forceinline__ int id_of(const int* ids, const unsigned char* kept, int at, int end) {
  return at >= end || (kept && !kept[at]) ? -1 : ids[at];
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ int in_block(const int* p, int block) {  // what another block of the cluster has there
  u32 there;
  int v;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem_address(p)), "r"(block));
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(v) : "r"(there) : "memory");
  return v;
}

// Where pairs and what is found out about them go.
struct Groups {
  int *row_of_pair, *pair_of_row, *expert_of_group, *num_groups;
  Item* items;
  int* num_items;
  int rows, places, experts, windows, window_rows, most_items;
};
// Groups, padding and items of expert `threadIdx.x`, whose `count` rows begin at `start`; blocks share the work.
template <int BLOCKS>
__device__ __forceinline__ void lay_out(const Groups& g, int start, int count, int* warp_sums, int block) {
  const int tid = threadIdx.x, padded = (count + 7) / 8 * 8;
  if ((tid >> 5) % BLOCKS == block) {
    for (int i = start + count; i < start + padded; i++) g.pair_of_row[i] = -1;
    if (tid < g.experts)
      for (int i = start; i < start + padded; i += 8) g.expert_of_group[i / 8] = tid;
  }
  for (int w = block; w < g.windows; w += BLOCKS) {
    const int low = max(start, w * g.window_rows), high = min(start + count, (w + 1) * g.window_rows);
    const int num = max(high - low, 0), tiles = (num + ROWS - 1) / ROWS;
    const int each = tiles ? ((num + tiles - 1) / tiles + 7) / 8 * 8 : 0;
    int all;
    const int at = sum_before(tiles, warp_sums, all);
    if (tid == 0) g.num_items[w] = all;
    for (int i = 0; i < tiles; i++)
      g.items[(u64)w * g.most_items + at + i] = {tid, low + i * each, min(each, num - i * each), 0};
  }
}
template <int BLOCKS>
__device__ __forceinline__ void group_pairs(const int* ids, const unsigned char* kept, const Groups& g) {
  __shared__ int counts[MOST_EXPERTS], starts[MOST_EXPERTS], warp_sums[32];
  const int tid = threadIdx.x, block = BLOCKS > 1 ? blockIdx.x : 0, all = g.rows * g.places, places = g.places;
  const int step = 1024 * BLOCKS, own = 1024 * block + tid;
  let_consumer_start();
  counts[tid] = 0;
  wait_for_producer();
  __syncthreads();
  for (int first = own; first < all; first += BATCH * step) {
    int id[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; j++) id[j] = id_of(ids, kept, first + step * j, all);
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int i = first + step * j;
      if (i < all) g.row_of_pair[i + i / places] = id[j] < 0 ? -1 : atomicAdd(counts + id[j], 1);
    }
  }
  int count = 0, before = 0;  // of an expert: pairs, and those of the blocks before this one
  if (BLOCKS > 1) {
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const int there = in_block(counts + tid, b);
      count += there;
      before += b < block ? there : 0;
    }
    cluster_arrive();  // waited for at the end: others may still read this block's counts
  } else {
    __syncthreads();
    count = counts[tid];
  }
  if (tid == g.experts) count = g.rows;
  int total;
  const int start = sum_before((count + 7) / 8 * 8, warp_sums, total);
  starts[tid] = start + before;
  if (own == 0) *g.num_groups = total / 8;
  lay_out<BLOCKS>(g, start, count, warp_sums, block);
  __syncthreads();
  const int shared_start = starts[g.experts];
  for (int i = own; i < g.rows; i += step) {
    g.row_of_pair[i * (places + 1) + places] = shared_start + i;
    g.pair_of_row[shared_start + i] = i * (places + 1) + places;
    if (i % 8 == 0) g.expert_of_group[(shared_start + i) / 8] = g.experts;
  }
  for (int first = own; first < all; first += BATCH * step) {
    int id[BATCH], rank[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int i = first + step * j;
      id[j] = id_of(ids, kept, i, all);
      rank[j] = id[j] < 0 ? 0 : g.row_of_pair[i + i / places];
    }
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int pair = first + step * j + (first + step * j) / places;
      if (id[j] < 0) continue;
      g.row_of_pair[pair] = starts[id[j]] + rank[j];
      g.pair_of_row[starts[id[j]] + rank[j]] = pair;
    }
  }
  if (BLOCKS > 1) cluster_wait();
}
// Places pairs by expert: row_of_pair (-1: dropped), pair_of_row (-1: padding), expert_of_group of 8 rows, num_groups,
// and per window its items and their number. The order inside an expert is free: it changes no bit. One block of 1,024.
extern "C" __global__ void __launch_bounds__(1024) experts_group(
    const int* ids, const unsigned char* kept, int* row_of_pair, int* pair_of_row, int* expert_of_group,
    int* num_groups, Item* items, int* num_items,
    int rows, int places, int experts, int windows, int window_rows, int most_items) {
  group_pairs<1>(ids, kept, {row_of_pair, pair_of_row, expert_of_group, num_groups, items, num_items,
                             rows, places, experts, windows, window_rows, most_items});
}
// The same by a cluster of TOGETHER blocks, for many rows: what one multiprocessor stores is what takes the time.
extern "C" __global__ void __launch_bounds__(1024) __cluster_dims__(TOGETHER, 1, 1) experts_group_together(
    const int* ids, const unsigned char* kept, int* row_of_pair, int* pair_of_row, int* expert_of_group,
    int* num_groups, Item* items, int* num_items,
    int rows, int places, int experts, int windows, int window_rows, int most_items) {
  group_pairs<TOGETHER>(ids, kept, {row_of_pair, pair_of_row, expert_of_group, num_groups, items, num_items,
                                    rows, places, experts, windows, window_rows, most_items});
}
