// Values as whole numbers in the total order (value descending, then position ascending), and sums over
// threads, for kernels that choose; after common.cuh.

#define ALL 0xffffffffu

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
// Sum of the block's threads before this one; all take part. `all` gets the sum of all. `warps` has 32 numbers,
// noughts behind those of the block's warps.
__device__ __noinline__ u32 sum_before(u32* warps, u32 value, u32* all) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 sum = scan_warp(value);
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  const u32 upto = scan_warp(warps[lane]);
  *all = __shfl_sync(ALL, upto, 31);
  const u32 ahead = __shfl_sync(ALL, upto, max(warp - 1, 0));
  return (warp ? ahead : 0) + sum - value;
}
