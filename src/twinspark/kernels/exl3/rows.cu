// Products of up to 64 rows with one EXL3 matrix: y = ((((x * suh) . H) @ W) . H) * svh + bias.
//
// MANY 1: matrices of one shape, widths and codebook, each with rows of its own, by blockIdx.z; `table`
// holds the addresses of trellis, suh and svh of each, and x, work and y are steps of bytes apart.
// Macros, besides those of common.cuh and rows.cuh: MANY (0 if not given), RESIDENT blocks an SM at least.
#include "common.cuh"
#include "../cuda/rehearse.cuh"
#include "rows.cuh"

#ifndef MANY
#define MANY 0
#endif
#if MANY
#define OF_MANY(...) , __VA_ARGS__
#else
#define OF_MANY(...)
#endif

// x [M, K] to rotated fp16 rows [M, K]; a warp takes 128 values. grid (K / 128, M / 4 rounded up).
extern "C" __global__ void __launch_bounds__(128) exl3_rotate(
    const void* x, const u16* __restrict__ suh, u16* __restrict__ out,
    int M, int K, int x_pitch, int x_type OF_MANY(const u64* __restrict__ table, int x_step)) {
  let_consumer_start();
#if MANY
  suh = (const u16*)table[3 * blockIdx.z + 1];
  x = (const char*)x + (u64)blockIdx.z * x_step;
  out += (u64)blockIdx.z * M * K;
#endif
  rotate_rows_of(x, suh, out, M, K, x_pitch, x_type);
}

// One block a (column block, chunk), see multiply_unit. grid (N / (16 * WARPS), chunks).
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) exl3_unit(
    const u32* __restrict__ trellis, const u16* __restrict__ suh, const void* x,
    float* __restrict__ work, int M, int K, int N, int x_pitch, int x_type
    OF_MANY(const u64* __restrict__ table, int x_step)) {
#if MANY
  trellis = (const u32*)table[3 * blockIdx.z];
  suh = (const u16*)table[3 * blockIdx.z + 1];
  x = (const char*)x + (u64)blockIdx.z * x_step;
  work += (u64)blockIdx.z * gridDim.y * M * N;
#endif
  multiply_unit(trellis, suh, x, work, M, K, N, x_pitch, x_type, blockIdx.x);
}

// Sums and finishes what exl3_unit left. Scales are read before the wait: they come from far, and plain pointers keep
// them there. grid (N / 128, M / 4 rounded up).
extern "C" __global__ void __launch_bounds__(128) exl3_finish(
    const float* work, const u16* svh, const u16* bias, void* y, int M, int N, int chunks, int y_type
    OF_MANY(const u64* table, int y_step, int y_pitch)) {
  let_consumer_start();
  const int row = blockIdx.y * 4 + (threadIdx.x >> 5), column = 128 * blockIdx.x + 4 * (threadIdx.x & 31);
#if MANY
  svh = (const u16*)table[3 * blockIdx.z + 2];
  work += (u64)blockIdx.z * chunks * M * N;
  y = (char*)y + (u64)blockIdx.z * y_step;
#else
  const int y_pitch = N;
#endif
  const uint2 scale = *(const uint2*)(svh + column);
#pragma unroll 1
  for (int dry = rehearse(M); dry >= 0; dry--) {
    if (!dry) wait_for_producer();
    if (row >= M) continue;
    float v[4];
    sum_chunks(work + (u64)row * N + column, (u64)M * N, dry ? 0 : chunks, v);
    finish_scaled(v, scale, {svh, bias, y, y_type}, (u64)row * y_pitch, column, !dry);
  }
}
