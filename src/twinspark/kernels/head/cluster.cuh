// What blocks of a cluster tell one another, and logits as whole numbers. Everything that is put together is a
// whole number, so no order of threads or blocks changes a bit. Included by choose.cu.
typedef unsigned int u32;
typedef unsigned long long u64;

#define CLUSTER 8
#define THREADS 512
#define ALL 0xffffffffu

__device__ __forceinline__ void wait_for_producer() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_consumer_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ u32 remote(const void* p, int rank) {
  u32 at, there;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(p));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
__device__ __forceinline__ u64 remote_u64(const void* p, int rank) {
  u64 v;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(remote(p, rank)) : "memory");
  return v;
}
__device__ __forceinline__ u32 remote_u32(const void* p, int rank) {
  u32 v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(remote(p, rank)) : "memory");
  return v;
}
__device__ __forceinline__ void store_remote(void* p, int rank, u64 v) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(remote(p, rank)), "l"(v) : "memory");
}

struct Joint {  // of reductions
  u64 slots[32];            // what this block tells the others, a slot an exchange
  u64 warps[THREADS / 32];
};
struct Row {
  Joint& s;
  int slot;  // exchanges so far
  u32 rank;
};

// A whole number that orders as the logit does; 0 for what is never chosen.
__device__ __forceinline__ u32 ordered(float v) {
  const u32 bits = __float_as_uint(v + 0.f);  // -0 becomes 0
  const u32 turned = bits ^ ((u32)((int)bits >> 31) | 0x80000000u), key = bits == 0xff800000u ? 0 : turned;
  return v != v ? ALL : key;
}
__device__ __forceinline__ float logit_of(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
struct Sum { __device__ u64 operator()(u64 a, u64 b) const { return a + b; } };
struct Most { __device__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; } };

// The threads' values of this block put together, for all of them.
template <class Join>
__device__ __forceinline__ u64 join_block(Row& r, u64 v, Join join) {
#pragma unroll
  for (int by = 16; by > 0; by >>= 1) v = join(v, __shfl_xor_sync(ALL, v, by));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) r.s.warps[threadIdx.x >> 5] = v;
  __syncthreads();
  v = r.s.warps[0];
#pragma unroll
  for (int i = 1; i < THREADS / 32; i++) v = join(v, r.s.warps[i]);
  return v;
}
// All threads' values of all blocks put together, for everyone.
template <class Join>
__device__ __forceinline__ u64 join_all(Row& r, u64 v, Join join) {
  v = join_block(r, v, join);
  u64* slot = r.s.slots + (r.slot++ & 31);
  if (threadIdx.x == 0) *slot = v;
  cluster_sync();
  v = remote_u64(slot, threadIdx.x % CLUSTER);  // a lane a block: one request a warp
#pragma unroll
  for (int by = CLUSTER / 2; by > 0; by >>= 1) v = join(v, __shfl_xor_sync(ALL, v, by));
  return v;
}
