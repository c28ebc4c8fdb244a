// Logits of one step of a draft: base + head . embed[token], for all requests at once.
//
// A warp takes 16 ids; their weights are asked for before the tokens are known. One tensor-core accumulator an
// id and request, in one order, so a request's bits do not depend on the others.
//
// Macros: RANK, a multiple of 32.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define WARPS 8
#define PITCH (RANK + 8)  // of an embedding in shared memory, so that eight of them lie in other banks

__device__ __forceinline__ void wait_for_producer() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_consumer_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void multiply(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// grid (V / 128 rounded up), 256 threads. base [n] rows `base_pitch` apart, embed and head [V][RANK] bf16, out
// [n][V]. Dynamic shared memory: n rounded up to 8, times PITCH bf16. A token below 0 adds nothing.
extern "C" __global__ void __launch_bounds__(32 * WARPS) head_markov(
    const float* base, const int* tokens, const u16* __restrict__ embed, const u16* __restrict__ head, float* out,
    int rows, int vocab, int base_pitch) {
  extern __shared__ __align__(16) u16 memory[];
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int id = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * 16 + g;
  uint4 low[RANK / 32], high[RANK / 32];
#pragma unroll
  for (int i = 0; i < RANK / 32; i++) {
    low[i] = *(const uint4*)(head + (u64)min(id, vocab - 1) * RANK + 32 * i + 8 * q);
    high[i] = *(const uint4*)(head + (u64)min(id + 8, vocab - 1) * RANK + 32 * i + 8 * q);
  }
  let_consumer_start();
  wait_for_producer();
  const int tiles = (rows + 7) / 8;
  for (int i = threadIdx.x; i < tiles * 8 * (RANK / 8); i += 32 * WARPS) {
    const int row = i / (RANK / 8), part = i % (RANK / 8), token = row < rows ? tokens[row] : -1;
    *(uint4*)(memory + row * PITCH + 8 * part) =
        token < 0 ? make_uint4(0, 0, 0, 0) : *(const uint4*)(embed + (u64)token * RANK + 8 * part);
  }
  __syncthreads();
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    const u16* mine = memory + (tile * 8 + g) * PITCH + 8 * q;
#pragma unroll
    for (int i = 0; i < RANK / 32; i++) {
      const uint4 b = *(const uint4*)(mine + 32 * i);
      multiply(c, low[i].x, high[i].x, low[i].y, high[i].y, b.x, b.y);
      multiply(c, low[i].z, high[i].z, low[i].w, high[i].w, b.z, b.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = tile * 8 + 2 * q + (i & 1), at = id + 8 * (i >> 1);
      if (row < rows && at < vocab) out[(u64)row * vocab + at] = base[(u64)row * base_pitch + at] + c[i];
    }
  }
}
