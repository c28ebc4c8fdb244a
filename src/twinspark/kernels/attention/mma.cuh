// Matrix products of one warp, after common.cuh: mma.sync and the loads of its operands from shared memory.
//
// Macros: N_TILES of 8 heads.

__device__ __forceinline__ void mma(float c[4], const u32 a[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void load_tiles(u32 address, u32 b[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_turned(u32 address, u32 b[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}
// B operands of two steps of 16 along rows of shared memory; `at` is their first value in bytes.
__device__ __forceinline__ void load_two_steps(u32 at, int pitch, u32 b[2][N_TILES][2]) {
  const int lane = threadIdx.x & 31;
  u32 r[4];
#if N_TILES == 1
  load_tiles(at + (lane & 7) * pitch + (lane >> 3) * 16, r);
  b[0][0][0] = r[0]; b[0][0][1] = r[1]; b[1][0][0] = r[2]; b[1][0][1] = r[3];
#else
#pragma unroll
  for (int s = 0; s < 2; s++)
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      load_tiles(at + (n * 8 + (lane & 7) + (lane >> 4) * 8) * pitch + s * 32 + ((lane >> 3) & 1) * 16, r);
      b[s][n][0] = r[0]; b[s][n][1] = r[1]; b[s][n + 1][0] = r[2]; b[s][n + 1][1] = r[3];
    }
#endif
}
