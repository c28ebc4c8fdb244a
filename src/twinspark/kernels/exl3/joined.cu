// Products of up to 64 rows with up to four EXL3 matrices that take the same rows, in one go.
//
// Column blocks of the matrices follow each other in the grid: matrix p ends before block `end<p>` of 128
// columns, those that are not there end where the last one does. Arithmetic is that of rows.cu, matrix by
// matrix. Addresses come as arguments, so that weights are asked for without a read before.
//
// Macros, besides those of common.cuh and rows.cuh: RESIDENT blocks an SM at least.
#include "common.cuh"
#include "../cuda/rehearse.cuh"
#include "rows.cuh"

#define EACH(type, name) type name##0, type name##1, type name##2, type name##3
#define PICK(part, name) (part == 0 ? name##0 : part == 1 ? name##1 : part == 2 ? name##2 : name##3)

// x [M, K] to rotated fp16 rows [parts][M][K]. grid (K / 128, M / 4 rounded up, parts).
extern "C" __global__ void __launch_bounds__(128) exl3_joined_rotate(
    EACH(const u16*, suh), const void* x, u16* out, int M, int K, int x_pitch, int x_type) {
  let_consumer_start();
  const u32 part = blockIdx.z;
  rotate_rows_of(x, PICK(part, suh), out + (u64)part * M * K, M, K, x_pitch, x_type);
}

// FUSED: x is [M, K] as it came; else [parts][M][K], rotated. work: [chunks][M][columns] of each part, one after
// another. grid (columns of all / (16 * WARPS), chunks).
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) exl3_joined_unit(
    EACH(const u32*, trellis), EACH(const u16*, suh), EACH(int, end), const void* x, float* work,
    int M, int K, int x_pitch, int x_type) {
  constexpr u32 BLOCKS = 8 / WARPS;  // of a block of 128 columns
  const u32 place = blockIdx.x / BLOCKS;
  const u32 part = (place >= end0) + (place >= end1) + (place >= end2);
  const u32 first = part == 0 ? 0 : part == 1 ? end0 : part == 2 ? end1 : end2;
  const int columns = 128 * (PICK(part, end) - first);
#if !FUSED
  x = (const u16*)x + (u64)part * M * K;
#endif
  work += (u64)gridDim.y * M * 128 * first;
  multiply_unit(
      PICK(part, trellis), PICK(part, suh), x, work, M, K, columns, x_pitch, x_type, blockIdx.x - first * BLOCKS);
}

// Sums and finishes what exl3_joined_unit left; y of a part is [M, columns] of the type in its two bits of
// `types`. grid (blocks of all, M / 4 rounded up).
extern "C" __global__ void __launch_bounds__(128) exl3_joined_finish(
    EACH(const u16*, svh), EACH(void*, y), EACH(int, end), const float* work, int M, int chunks, int types) {
  let_consumer_start();
  const u32 place = blockIdx.x, part = (place >= end0) + (place >= end1) + (place >= end2);
  const u32 first = part == 0 ? 0 : part == 1 ? end0 : part == 2 ? end1 : end2;
  const int columns = 128 * (PICK(part, end) - first), column = 128 * (place - first) + 4 * (threadIdx.x & 31);
  const int row = blockIdx.y * 4 + (threadIdx.x >> 5);
  const uint2 scale = *(const uint2*)(PICK(part, svh) + column);  // from far: before the wait
  const Output out = {nullptr, nullptr, PICK(part, y), (types >> (2 * part)) & 3};
  work += (u64)chunks * M * 128 * first;
#pragma unroll 1
  for (int dry = rehearse(M); dry >= 0; dry--) {
    if (!dry) wait_for_producer();
    if (row >= M) continue;
    float v[4];
    sum_chunks(work + (u64)row * columns + column, (u64)M * columns, dry ? 0 : chunks, v);
    finish_scaled(v, scale, out, (u64)row * columns, column, !dry);
  }
}
