// Mixing weights of many rows, in the bits of mix.cu. A block keeps the weights of 256 columns in registers
// and streams rows past them; a second kernel adds the blocks' sums and makes the weights.
//
// Macros, besides those of common.cuh: STAGES of the ring.
#include "common.cuh"

#define WARPS 8
#define THREADS (32 * WARPS)
#define COLUMNS 256
#define ROWS 16              // of a turn
#define TILES (ROWS / TILE)  // of a turn
#define RUNS (THREADS * 16)   // bytes that the threads take at once
#define STAGE (TILES * STREAMS * RUNS)
#define FINISH_THREADS 128

// A stage: runs of 16 bytes by thread, each for the thread that asks for it: of each tile its 4 streams. `first`: the
// thread's row of the first tile.
__device__ __forceinline__ void ask(u32 to, const u16* x, int first, int rows) {
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    if (first + n * TILE >= rows) continue;
    const u16* from = x + (u64)(first + n * TILE) * STREAMS * HIDDEN;
#pragma unroll
    for (int j = 0; j < STREAMS; j++) copy_async(to + (n * STREAMS + j) * RUNS, from + j * HIDDEN);
  }
}

// Marks of a lane's two rows of each tile from `first` on.
struct Marked { u8 row[TILES][2]; };
__device__ __forceinline__ void read_marks(Marked& to, const u8* marks, int first, int rows) {
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = first + n * TILE + i;
      to.row[n][i] = row < rows ? marks[row] : 0;
    }
}

// grid (PAIRS, ways): the blocks of a pair of halves take its turns. work [tiles][PAIRS][SUMS][TILE]. Only weights are
// __restrict__: the compiler moves loads through such pointers to before the wait.
extern "C" __global__ void __launch_bounds__(THREADS, 1) mix_tiles(
    const u16* x, const float* __restrict__ fn, const u8* marks, float* work, int rows) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(16) float sums[2][TILES][WARPS][SUMS * TILE];
  const int tid = threadIdx.x, warp = tid >> 5, g = (tid & 31) >> 2, q = tid & 3;
  const int pair = blockIdx.x, column = pair * COLUMNS + warp * 32 + q * 8, step = gridDim.y;
  const bool active = HIDDEN % COLUMNS == 0 || column < HIDDEN;
  const int tiles = (rows + TILE - 1) / TILE;
  const u32 stages_at = shared_address(shared) + 16 * tid;
  let_consumer_start();
  Planes planes;
  load_planes(planes, fn, min(pair * WARPS + warp, HIDDEN / 32 - 1));
  wait_for_producer();
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) {
    if (active) ask(stages_at + i * STAGE, x + column, (blockIdx.y + i * step) * ROWS + g, rows);
    copies_end();
  }
  // Adds the warps' sums of a turn, two a thread.
  auto add_warps = [&](int turn, int set) {
    const int n = 2 * tid / (SUMS * TILE), k = 2 * tid % (SUMS * TILE), tile = turn * TILES + n;
    if (turn < 0 || n >= TILES || tile >= tiles) return;
    auto part = [&](int w) { return *(const float2*)(sums[set][n][w] + k); };
    auto four = [&](int w) {
      const float2 a = part(w), b = part(w + 1), c = part(w + 2), d = part(w + 3);
      return make_float2(((a.x + b.x) + c.x) + d.x, ((a.y + b.y) + c.y) + d.y);
    };
    float2 sum = four(0);
    if (pair * COLUMNS + COLUMNS <= HIDDEN) {
      const float2 other = four(4);
      sum.x += other.x;
      sum.y += other.y;
    }
    *(float2*)(work + ((u64)tile * PAIRS + pair) * (SUMS * TILE) + k) = sum;
  };
  Marked ahead = {};
  if (marks) read_marks(ahead, marks, blockIdx.y * ROWS + 2 * q, rows);
  int stage = 0, set = 0, last_turn = -1;
#pragma unroll 1
  for (int turn = blockIdx.y; turn * ROWS < rows; turn += step, set ^= 1) {
    const Marked coarse = ahead;  // read a turn ahead, as nothing else here waits for memory
    if (marks) read_marks(ahead, marks, (turn + step) * ROWS + 2 * q, rows);
    copies_wait<STAGES - 1>();
    if (active) {
      Products products[TILES];
      float squared[TILES][STREAMS];
#pragma unroll
      for (int j = 0; j < STREAMS; j++) {
        if (j == STREAMS / 2) add_warps(last_turn, set ^ 1);  // while matrix instructions are under way
        Eight s[TILES];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
          s[n] = load_eight((const u16*)(shared + stage * STAGE + (n * STREAMS + j) * RUNS + 16 * tid));
          squared[n][j] = squares(s[n]);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
          HalfPlanes f;
          get_half(f, planes, j, h);
          u32 b0[TILES], b1[TILES];
#pragma unroll
          for (int n = 0; n < TILES; n++) { b0[n] = s[n].w[2 * h]; b1[n] = s[n].w[2 * h + 1]; }
          multiply<TILES>(products, f, b0, b1);
        }
      }
#pragma unroll
      for (int n = 0; n < TILES; n++)
        put_sums(sums[set][n][warp], products[n],
                 (squared[n][0] + squared[n][1]) + (squared[n][2] + squared[n][3]), coarse.row[n]);
    } else {
      add_warps(last_turn, set ^ 1);
    }
    // into the place of what has been used up
    if (active) ask(stages_at + stage * STAGE, x + column, (turn + STAGES * step) * ROWS + g, rows);
    copies_end();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    __syncthreads();  // two sets of sums: the next turn's are not those being read
    last_turn = turn;
  }
  add_warps(last_turn, set ^ 1);
}

// grid (tiles): mixing weights of 8 rows.
extern "C" __global__ void __launch_bounds__(FINISH_THREADS) mix_finish(
    const float* work, const float* __restrict__ scale_in, const float* __restrict__ base,
    float* pre, float* post, float* comb, int rows, int iters, int eps, int norm_eps_bits) {
  __shared__ float sums[SUMS * TILE], values[VALUES * TILE], powers[16 * TILE];
  __shared__ float shift[VALUES], scale[3];
  const int tid = threadIdx.x;
  const float norm_eps = __int_as_float(norm_eps_bits);
  let_consumer_start();
  if (tid < VALUES) shift[tid] = base[tid];
  if (tid < 3) scale[tid] = scale_in[tid];
  wait_for_producer();
  const float* all = work + (u64)blockIdx.x * PAIRS * (SUMS * TILE);
  if (2 * tid < SUMS * TILE) {  // two sums a thread
    float2 pairs[PAIRS];
    float a[32] = {}, b[32] = {};
#pragma unroll
    for (int p = 0; p < PAIRS; p++) pairs[p] = __ldcg((const float2*)(all + p * (SUMS * TILE)) + tid);
#pragma unroll
    for (int p = 0; p < PAIRS; p++) { a[p] = pairs[p].x; b[p] = pairs[p].y; }
    sums[2 * tid] = finish_sum(pairs_sum(a), 2 * tid, norm_eps);
    sums[2 * tid + 1] = finish_sum(pairs_sum(b), 2 * tid + 1, norm_eps);
  }
  __syncthreads();
  const Mixer mixer = {scale, shift, pre, post, comb, iters, __int_as_float(eps), norm_eps};
  finish_mix<FINISH_THREADS>(sums, values, powers, mixer, blockIdx.x * TILE, rows, tid);
}
