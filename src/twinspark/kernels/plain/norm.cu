// Row-wise kernels without a product: norm, mean over streams, embedding rows.
#include "norm.cuh"

#define THREADS NORM_THREADS

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
