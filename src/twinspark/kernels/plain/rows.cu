// Products of up to 64 rows a block with a plain matrix. A warp multiplies 16 outputs; SPLIT warps share them,
// a chunk of inputs each in turn, and their sums are added in order.
//
// Macros, besides TYPE: ROW_TILES 1..8 (tiles of 8 rows), WARPS of a block, SPLIT a divisor of it, RESIDENT
// blocks an SM at least.
#include "common.cuh"

#define BATCH (TYPE == TYPE_FP32 || ROW_TILES >= 4 ? 4 : 8)  // groups of weights asked for at once
#define CELLS (128 * ROW_TILES)            // of a warp
#define THREADS (32 * WARPS)
#define OUT_TILES (WARPS / SPLIT)

struct Rows { const u16* x; int rows, inputs, pitch; };
#define SUB (ROW_TILES >= 4 ? 1 : 4 / ROW_TILES)  // groups of x asked for ahead of their use
__device__ __forceinline__ void load_x(uint4 x[SUB][ROW_TILES], const Rows& in, int group) {
  const int g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
#pragma unroll
  for (int b = 0; b < SUB; b++)
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      const int k = (group + b) * GROUP + 8 * q;
      x[b][r] = make_uint4(0, 0, 0, 0);
      if (8 * r + g < in.rows && k < in.inputs) x[b][r] = *(const uint4*)(in.x + (u64)(8 * r + g) * in.pitch + k);
    }
}
__device__ __forceinline__ void multiply_batch(
    Sums sums[ROW_TILES], const Stored stored[BATCH], uint4 x[SUB][ROW_TILES], const Rows& in, int group, int last) {
#pragma unroll
  for (int b = 0; b < BATCH; b += SUB) {
    uint4 next[SUB][ROW_TILES];
    load_x(next, in, group + b + SUB);
#pragma unroll
    for (int i = 0; i < SUB && b + i < BATCH; i++)
      if (group + b + i < last) {
        Planes planes;
        to_planes(planes, stored[b + i]);
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) multiply(sums[r], planes, x[i][r]);
      }
#pragma unroll
    for (int i = 0; i < SUB; i++)
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) x[i][r] = next[i][r];
  }
}

// x [rows][pitch], inputs a multiple of 8; y [rows][outputs] fp32 when `wide`, else bf16.
// grid (outputs / (16 * OUT_TILES) up, rows / (8 * ROW_TILES) up).
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) plain_rows(
    const uint4* weight, const u16* x, void* y,
    int rows, int inputs, int outputs, int pitch, int wide) {
#if SPLIT > 1
  __shared__ float part[WARPS][CELLS];
#endif
  const int tid = threadIdx.x, warp = tid >> 5, g = (tid & 31) >> 2, q = tid & 3;
  const int groups = (inputs + GROUP - 1) / GROUP, chunks = (groups + CHUNK_GROUPS - 1) / CHUNK_GROUPS;
  const int tile = blockIdx.x * OUT_TILES + warp / SPLIT, tiles = (outputs + 15) / 16;
  const bool active = tile < tiles;
  const uint4* mine = weight + (u64)(active ? tile : 0) * groups * (LOADS * 32);
  const int chunk0 = warp % SPLIT;
  Stored stored[BATCH];
  let_consumer_start();
#pragma unroll
  for (int b = 0; b < BATCH; b++)
    stored[b] = load_stored(mine, min(chunk0 * CHUNK_GROUPS + b, groups - 1));
  wait_for_producer();
  const u64 row0 = (u64)blockIdx.y * (8 * ROW_TILES);
  rows = min(rows - (int)row0, 8 * ROW_TILES);
  y = (char*)y + row0 * outputs * (wide ? 4 : 2);
  const Rows in = {x + row0 * pitch, rows, inputs, pitch};
#if SPLIT > 1
  constexpr int MINE = (OUT_TILES * CELLS + THREADS - 1) / THREADS;
#else
  constexpr int MINE = 4 * ROW_TILES;
#endif
  float total[MINE];
#pragma unroll 1
  for (int first = 0; first < chunks; first += SPLIT) {
    const int chunk = first + chunk0;
    Sums sums[ROW_TILES];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) clear(sums[r]);
    if (active && chunk < chunks) {
      const int last = min((chunk + 1) * CHUNK_GROUPS, groups);
      uint4 ahead[SUB][ROW_TILES];
      load_x(ahead, in, chunk * CHUNK_GROUPS);
#pragma unroll 1
      for (int group = chunk * CHUNK_GROUPS; group < last; group += BATCH) {
        if (group != chunk0 * CHUNK_GROUPS)
#pragma unroll
          for (int b = 0; b < BATCH; b++) stored[b] = load_stored(mine, min(group + b, groups - 1));
        multiply_batch(sums, stored, ahead, in, group, last);
      }
    }
#if SPLIT > 1
    if (first) __syncthreads();
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {  // [row][16 outputs]
      float* p = part[warp] + (8 * r + 2 * q) * 16 + g;
      p[0] = chunk_sum(sums[r], 0); p[16] = chunk_sum(sums[r], 1);
      p[8] = chunk_sum(sums[r], 2); p[24] = chunk_sum(sums[r], 3);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int cell = tid + i * THREADS;
      if (cell < OUT_TILES * CELLS)
        for (int c = 0; c < SPLIT && first + c < chunks; c++) {
          const float v = part[cell / CELLS * SPLIT + c][cell % CELLS];
          total[i] = first + c == 0 ? v : total[i] + v;
        }
    }
#else
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) total[4 * r + i] = first ? total[4 * r + i] + chunk_sum(sums[r], i) : chunk_sum(sums[r], i);
#endif
  }
#if SPLIT > 1
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int cell = tid + i * THREADS, row = cell % CELLS / 16;
    const int output = (blockIdx.x * OUT_TILES + cell / CELLS) * 16 + cell % 16;
    if (cell < OUT_TILES * CELLS && row < rows && output < outputs) put(y, (u64)row * outputs + output, total[i], wide);
  }
#else
  if (!active) return;
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int row = i / 4 * 8 + 2 * q + (i & 1), output = tile * 16 + g + (i & 2) * 4;
    if (row < rows && output < outputs) put(y, (u64)row * outputs + output, total[i], wide);
  }
#endif
}
