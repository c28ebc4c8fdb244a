// Row-wise kernels without a product: norm, mean over streams, embedding rows. All rows of 8 bf16 or fp32
// values at a time; a row's bits depend on the row and its width only.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#define THREADS 128

__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ void begin() {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
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

// y = x / sqrt(mean(x^2) + eps) * weight. Sums of squares: a thread's runs of 8 ascending, a butterfly
// over the warp, warps ascending. grid (rows).
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_rows(
    const void* x, const float* weight, void* y, int width, int pitch, int wide, int eps) {
  __shared__ float part[THREADS / 32];
  const int tid = threadIdx.x;
  const u64 from = (u64)blockIdx.x * pitch, to = (u64)blockIdx.x * width;
  begin();
  float sum = 0.f, v[8];
  for (int k = 8 * tid; k < width; k += 8 * THREADS) {
    load8(v, x, from + k, wide);
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(v[i], v[i], sum);
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (tid % 32 == 0) part[tid / 32] = sum;
  __syncthreads();
  const float total = ((part[0] + part[1]) + part[2]) + part[3];
  const float inverse = __frsqrt_rn(total / (float)width + __int_as_float(eps));
  for (int k = 8 * tid; k < width; k += 8 * THREADS) {
    float w[8];
    load8(v, x, from + k, wide);
    load8(w, weight, k, 1);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = v[i] * inverse * w[i];
    store8(y, to + k, v, wide);
  }
}

// Mean of a row's streams, ascending, to rows `pitch` apart. grid (rows).
extern "C" __global__ void __launch_bounds__(THREADS) stream_mean(
    const void* x, void* y, int streams, int width, int pitch) {
  begin();
  for (int k = 8 * threadIdx.x; k < width; k += 8 * THREADS) {
    float sum[8], v[8];
    for (int s = 0; s < streams; s++) {
      load8(v, x, ((u64)blockIdx.x * streams + s) * width + k, 0);
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] = s ? sum[i] + v[i] : v[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = sum[i] / (float)streams;
    store8(y, (u64)blockIdx.x * pitch + k, sum, 0);
  }
}

// A table row in every stream of a row; zeros where there is no id. grid (rows).
extern "C" __global__ void __launch_bounds__(THREADS) embed_streams(
    const u16* table, const int* ids, u16* y, int streams, int width) {
  begin();
  const int id = ids[blockIdx.x];
  for (int k = 8 * threadIdx.x; k < width; k += 8 * THREADS) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (id >= 0) v = *(const uint4*)(table + (u64)id * width + k);
    for (int s = 0; s < streams; s++) *(uint4*)(y + ((u64)blockIdx.x * streams + s) * width + k) = v;
  }
}
