// Numbers of a round between pinned memory of the host and a device, without its copy engines.
typedef unsigned int u32;

__device__ __forceinline__ void wait_for_producer() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_consumer_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// count vectors of 16 bytes, one a thread. No kernel writes what lies at the host, so it is read before
// the wait; it is read anew each time, whatever a cache holds.
extern "C" __global__ void bring(const uint4* host, uint4* device, int count) {
  let_consumer_start();
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  u32 x = 0, y = 0, z = 0, w = 0;
  if (at < count)
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "l"(host + at) : "memory");
  wait_for_producer();
  if (at < count) device[at] = make_uint4(x, y, z, w);
}

// count words to both places. One block; the host may read once an event behind this has come.
extern "C" __global__ void land(const u32* found, u32* device, u32* host, int count) {
  let_consumer_start();
  wait_for_producer();
  for (int at = threadIdx.x; at < count; at += blockDim.x) {
    const u32 word = found[at];
    device[at] = word;
    host[at] = word;
  }
}
