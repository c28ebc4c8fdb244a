// Row-wise kernels without a product: norm, mean over streams, embedding rows.
#include "norm.cuh"

#define THREADS NORM_THREADS
#define HELD 2048

__device__ __forceinline__ void begin() {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// y = x / sqrt(mean(x^2) + eps) * weight, see norm_row. grid (rows).
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_rows(
    const void* x, const float* weight, void* y, int width, int pitch, int wide, int eps) {
  __shared__ float part[THREADS / 32];
  begin();
  norm_row(
      x, (u64)blockIdx.x * pitch, weight, y, (u64)blockIdx.x * width, width, wide, __int_as_float(eps), part);
}

// The same of many bf16 rows of up to HELD values: a warp reads its row once and keeps it; a lane does what four threads of
// norm_row do. grid (rows / 4 up).
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_held(
    const u16* x, const float* weight, u16* y, int rows, int width, int pitch, int eps) {
  const int lane = threadIdx.x & 31, row = blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5);
  begin();
  if (row >= rows) return;
  uint4 held[HELD / (8 * THREADS)][4];
  float part[4] = {}, v[8], w[8];
#pragma unroll
  for (int run = 0; run < HELD / (8 * THREADS); run++)
#pragma unroll
    for (int of = 0; of < 4; of++) {
      const int k = 8 * (run * THREADS + 32 * of + lane);
      held[run][of] = k < width ? *(const uint4*)(x + (u64)row * pitch + k) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
  for (int of = 0; of < 4; of++) {
#pragma unroll
    for (int run = 0; run < HELD / (8 * THREADS); run++) {  // zeros change no sum
      load8(v, &held[run][of], 0, 0);
#pragma unroll
      for (int i = 0; i < 8; i++) part[of] = fmaf(v[i], v[i], part[of]);
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) part[of] += __shfl_xor_sync(0xffffffffu, part[of], step);
  }
  const float total = ((part[0] + part[1]) + part[2]) + part[3];
  const float inverse = __frsqrt_rn(total / (float)width + __int_as_float(eps));
#pragma unroll
  for (int run = 0; run < HELD / (8 * THREADS); run++)
#pragma unroll
    for (int of = 0; of < 4; of++) {
      const int k = 8 * (run * THREADS + 32 * of + lane);
      if (k >= width) continue;
      load8(v, &held[run][of], 0, 0);
      load8(w, weight, k, 1);
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = v[i] * inverse * w[i];
      store8(y, (u64)row * width + k, v, 0);
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
