// Instructions of compute capability 9.0a that prompt.cu uses, after common.cuh: barriers in shared memory,
// asynchronous matrix products of swizzled lines, stores.

// ---- barriers and registers

__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
  asm volatile(
      "{\n .reg .pred p;\n again:\n mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      " @p bra done;\n bra again;\n done:\n }" ::"r"(at), "r"(parity) : "memory");
}
__device__ __forceinline__ void show_to_matrix_unit() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int N> __device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// ---- matrix products

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// Of 128-byte lines, swizzled; groups of 8 lines are 1,024 bytes apart. `low` counts in 16 bytes, so what lies
// further on is added to it.
__device__ __forceinline__ u32 lines_at(u32 address) { return address >> 4 | 1u << 16; }
__device__ __forceinline__ u64 descriptor(u32 low) { return (u64)low | (u64)64 << 32 | (u64)1 << 62; }
// 64 x 16 by 16 x 32; TURNED: lines of the left operand run along its 64 rows.
template <int TURNED> __device__ __forceinline__ void wgmma(float c[16], u64 a, u64 b, int add) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "%16, %17, p, 1, 1, %19, 0;\n }"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
        "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
      : "l"(a), "l"(b), "r"(add), "n"(TURNED));
}

// ---- shared memory

// Where 16 bytes of line `line` lie, `byte` in [0, 128) a multiple of 16.
__device__ __forceinline__ u32 swizzled(int line, int byte) { return line * 128 + (byte ^ ((line & 7) << 4)); }
