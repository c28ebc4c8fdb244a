// Products of up to 64 rows a block with a plain matrix. A warp multiplies 16 outputs; SPLIT warps share them,
// a chunk of inputs each in turn, and their sums are added in order.
//
// Macros, besides TYPE: ROW_TILES 1..8 (tiles of 8 rows), WARPS of a block, SPLIT a divisor of it, RESIDENT
// blocks an SM at least.
#include "common.cuh"

// Groups of weights asked for at once, two batches under way: all of a chunk where many warps share the inputs.
#define BATCH ((SPLIT >= 8 && ROW_TILES == 1 ? 8 : 4) / (TYPE == TYPE_FP32 ? 2 : 1))
#define BATCHES (CHUNK_GROUPS / BATCH)  // of a chunk
#define CELLS (128 * ROW_TILES)            // of a warp
#define THREADS (32 * WARPS)
#define OUT_TILES (WARPS / SPLIT)
#define DEPTH (ROW_TILES <= 2 ? 8 : (ROW_TILES <= 4 ? 4 : 2))

struct Rows { const u16* x; int rows, inputs, pitch; };
// A ring of DEPTH groups of x: 16 bytes by thread and row tile, each for the thread that asks for them.
__device__ __forceinline__ void ask(u32 ring, const Rows& in, int group, int last) {
  const int g = (threadIdx.x & 31) >> 2, k = group * GROUP + 8 * (threadIdx.x & 3);
  if (group < last)
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      const int row = 8 * r + g;
      const bool here = row < in.rows && k < in.inputs;
      copy_async(ring + ((group % DEPTH * ROW_TILES + r) * THREADS + threadIdx.x) * 16,
                 in.x + (here ? (u64)row * in.pitch + k : 0), here ? 16 : 0);
    }
  copies_end();
}
__device__ __forceinline__ void multiply_batch(Sums sums[ROW_TILES], const Stored stored[BATCH],
                                               const unsigned char* ring, u32 ring_at, const Rows& in, int group, int last) {
#pragma unroll
  for (int b = 0; b < BATCH; b++) {
    copies_wait<DEPTH - 2>();
    Planes planes;
    to_planes(planes, stored[b]);
    if (group + b < last)
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++)
        multiply(sums[r], planes, *(const uint4*)(ring + (((group + b) % DEPTH * ROW_TILES + r) * THREADS + threadIdx.x) * 16));
    ask(ring_at, in, group + b + DEPTH - 1, last);
  }
}

// x [rows][pitch], inputs a multiple of 8; y [rows][outputs] fp32 when `wide`, else bf16.
// grid (outputs / (16 * OUT_TILES) up, rows / (8 * ROW_TILES) up).
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) plain_rows(
    const uint4* weight, const u16* x, void* y,
    int rows, int inputs, int outputs, int pitch, int wide) {
  extern __shared__ __align__(128) unsigned char ring[];  // [DEPTH][ROW_TILES][THREADS][16]
#if SPLIT > 1
  __shared__ float part[WARPS][CELLS];
#endif
  const u32 ring_at = smem_address(ring);
  const int tid = threadIdx.x, warp = tid >> 5, g = (tid & 31) >> 2, q = tid & 3;
  const int groups = (inputs + GROUP - 1) / GROUP, chunks = (groups + CHUNK_GROUPS - 1) / CHUNK_GROUPS;
  const int tile = blockIdx.x * OUT_TILES + warp / SPLIT, tiles = (outputs + 15) / 16;
  const bool active = tile < tiles;
  const uint4* mine = weight + (u64)(active ? tile : 0) * groups * (LOADS * 32);
  const int chunk0 = warp % SPLIT;
  Stored stored[2][BATCH];
  auto load = [&](Stored to[BATCH], int batch) {  // of all batches that this warp multiplies
    const int chunk = chunk0 + SPLIT * (batch / BATCHES);
    if (active && chunk < chunks)
#pragma unroll
      for (int b = 0; b < BATCH; b++)
        to[b] = load_stored(mine, min(chunk * CHUNK_GROUPS + batch % BATCHES * BATCH + b, groups - 1));
  };
  let_consumer_start();
  load(stored[0], 0);
  load(stored[1], 1);
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
#pragma unroll
      for (int i = 0; i < DEPTH - 1; i++) ask(ring_at, in, chunk * CHUNK_GROUPS + i, last);
#pragma unroll 1
      for (int i = 0; i < BATCHES; i += 2)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          multiply_batch(sums, stored[h], ring, ring_at, in, chunk * CHUNK_GROUPS + (i + h) * BATCH, last);
          load(stored[h], first / SPLIT * BATCHES + i + h + 2);
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
