// Rows of 8 bf16 or fp32 values at a time, and the norm of a row; its bits depend on the row and its width only.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#define NORM_THREADS 128

__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ void load8(float v[8], const void* p, u64 at, int wide) {
  if (wide) {
    const float4 a = *(const float4*)((const float*)p + at), b = *(const float4*)((const float*)p + at + 4);
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
  } else {
    const uint4 a = *(const uint4*)((const u16*)p + at);
    v[0] = low(a.x); v[1] = high(a.x); v[2] = low(a.y); v[3] = high(a.y);
    v[4] = low(a.z); v[5] = high(a.z); v[6] = low(a.w); v[7] = high(a.w);
  }
}
__device__ __forceinline__ void store8(void* p, u64 at, const float v[8], int wide) {
  if (wide) {
    *(float4*)((float*)p + at) = make_float4(v[0], v[1], v[2], v[3]);
    *(float4*)((float*)p + at + 4) = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    *(uint4*)((u16*)p + at) = make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
  }
}

// y = x / sqrt(mean(x^2) + eps) * weight of one row, by the first NORM_THREADS threads of a block that all come here.
// Sums of squares: a thread's runs of 8 ascending, a butterfly over the warp, warps ascending. `part` is shared. y is
// left alone unless `stores`.
__device__ __forceinline__ void norm_row(
    const void* x, u64 from, const float* weight, void* y, u64 to, int width, int wide, float eps, float* part, bool stores = true) {
  const int tid = threadIdx.x;
  float sum = 0.f, v[8];
  if (tid < NORM_THREADS) {
    for (int k = 8 * tid; k < width; k += 8 * NORM_THREADS) {
      load8(v, x, from + k, wide);
#pragma unroll
      for (int i = 0; i < 8; i++) sum = fmaf(v[i], v[i], sum);
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (tid % 32 == 0) part[tid / 32] = sum;
  }
  __syncthreads();
  if (tid >= NORM_THREADS) return;
  const float total = ((part[0] + part[1]) + part[2]) + part[3];
  const float inverse = __frsqrt_rn(total / (float)width + eps);
  for (int k = 8 * tid; k < width; k += 8 * NORM_THREADS) {
    float w[8];
    load8(v, x, from + k, wide);
    load8(w, weight, k, 1);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = v[i] * inverse * w[i];
    if (stores) store8(y, to + k, v, wide);
  }
}
