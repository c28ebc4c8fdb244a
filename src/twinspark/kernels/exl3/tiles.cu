// Products of many rows with one EXL3 matrix, in the bits of rows.cu: a block decodes 128 columns once
// for ROWS rows and keeps two accumulators, of the chunk and of the chunks before it.
//
// Macros, besides those of common.cuh: ROWS of a block (a multiple of 8; 128 with WGMMA), STAGES of the
// ring of 128-input parts, WGMMA 1 for the asynchronous instructions of sm_90a (the same bits: the
// hardware adds 16 products and an accumulator alike), RESIDENT blocks an SM at least.
#include "common.cuh"

#define WARPS 8
#define ROW_TILES (ROWS / 8)
#define PART_INPUTS (16 * PART)
#define X_BYTES (ROWS * PART_INPUTS * 2)
#define W_BYTES (PART * WARPS * TILE_WORDS * 4)
#define STAGE_BYTES (X_BYTES + W_BYTES)
#define SUM_PITCH 132

__device__ __forceinline__ void workers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
}

// x [M, K] to rotated fp16 in blocks' order: [M / ROWS up][K / 8][ROWS][8], so that a part of a block's
// rows is one run of bytes and 8 rows by 8 inputs are 128 of them. grid (K / 128, M / 4 up).
extern "C" __global__ void __launch_bounds__(128) exl3_rotate_tiled(
    const void* __restrict__ x, const u16* __restrict__ suh, u16* __restrict__ out,
    int M, int K, int x_pitch, int x_type) {
  let_consumer_start();
  const int row = blockIdx.y * 4 + (threadIdx.x >> 5), k = 128 * blockIdx.x + 4 * (threadIdx.x & 31);
  const uint2 s = *(const uint2*)(suh + k);
  wait_for_producer();
  if (row >= M) return;
  const Four f = load_four(x, (u64)row * x_pitch + k, x_type);
  const u64 line = ((u64)(row / ROWS) * (K / 8) + k / 8) * ROWS + row % ROWS;
  *(uint2*)(out + line * 8 + k % 8) = rotate_four(f, x_type, s);
}

#if WGMMA
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Rows in shared memory as the B operand: 8 x 8 blocks of 128 bytes, `ROWS` lines apart along inputs.
__device__ __forceinline__ u64 rows_descriptor(u32 address) {
  return (u64)((address >> 4) & 0x3fff) | (u64)ROWS << 16 | (u64)(128 >> 4) << 32;
}
#define ACC8(i) \
  "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]), \
  "+f"(c[i + 1][0]), "+f"(c[i + 1][1]), "+f"(c[i + 1][2]), "+f"(c[i + 1][3])
__device__ __forceinline__ void wgmma(float c[ROW_TILES][4], const u32 a[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
      "{%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
      : ACC8(0), ACC8(2), ACC8(4), ACC8(6), ACC8(8), ACC8(10), ACC8(12), ACC8(14)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Two k tiles a turn: their decoding overlaps itself and the products of the turn before.
__device__ __forceinline__ void multiply_rows(
    float acc[ROW_TILES][4], const u32* tiles, u32 x_at, const Places& at) {
  u32 w[2][2][4];
  Words words[2];
  load_words(words[0], tiles, at);
  load_words(words[1], tiles + WARPS * TILE_WORDS, at);
  // said to be one for all lanes, so that descriptors are made in uniform registers
  const u64 rows = rows_descriptor(__shfl_sync(0xffffffffu, x_at, 0));
#pragma unroll
  for (int t = 0; t < PART; t += 2) {
    u32(*turn)[4] = w[t / 2 % 2];
    if (t >= 4) wgmma_wait<1>();  // the weights of two turns ago have been read
    decode(words[0], at, turn[0]);
    decode(words[1], at, turn[1]);
    if (t + 2 < PART) {
      load_words(words[0], tiles + (t + 2) * WARPS * TILE_WORDS, at);
      load_words(words[1], tiles + (t + 3) * WARPS * TILE_WORDS, at);
    }
    wgmma_fence();
    wgmma(acc, turn[0], rows + t * 2 * ROWS);
    wgmma(acc, turn[1], rows + (t + 1) * 2 * ROWS);
    wgmma_commit();
  }
  wgmma_wait<0>();
}
#else
__device__ __forceinline__ void multiply_rows(
    float acc[ROW_TILES][4], const u32* tiles, u32 x_at, const Places& at) {
  const int lane = threadIdx.x & 31;
  const u32 line = x_at + ((lane >> 3) * ROWS + (lane & 7)) * 16;
#pragma unroll
  for (int t = 0; t < PART; t += 2) {
    Words words0, words1;
    load_words(words0, tiles + t * WARPS * TILE_WORDS, at);
    load_words(words1, tiles + (t + 1) * WARPS * TILE_WORDS, at);
    u32 w0[4], w1[4];
    decode(words0, at, w0);
    decode(words1, at, w1);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      u32 b[4];
      load_b(line + (t * 2 * ROWS + r * 8) * 16, b);
      mma(acc[r], w0, b[0], b[1]);
      mma(acc[r], w1, b[2], b[3]);
    }
  }
}
#endif

// xr as exl3_rotate_tiled leaves it. grid (M / ROWS up, N / 128); one more warp than WARPS only asks
// for bytes. Rows of the last block past M hold anything and are not stored; those of y are y_pitch apart.
extern "C" __global__ void __launch_bounds__(32 * WARPS + 32, RESIDENT) exl3_tiles(
    const u32* __restrict__ trellis, const u16* __restrict__ svh, const u16* __restrict__ bias,
    const u16* __restrict__ xr, void* __restrict__ y, int M, int K, int N, int y_pitch, int y_type) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, parts = K / PART_INPUTS;
  const u32 full_at = smem_address(full), empty_at = smem_address(empty), shared_at = smem_address(shared);
  if (tid == 0) {
    for (int i = 0; i < STAGES; i++) { barrier_init(full_at + 8 * i, 1); barrier_init(empty_at + 8 * i, WARPS); }
    barriers_ready();
  }
  __syncthreads();
  let_consumer_start();
  if (warp == WARPS) {
    wait_for_producer();
    const u16* rows = xr + (u64)blockIdx.x * K * ROWS;
    const u64 pitch = (u64)(N / 16) * TILE_WORDS;
    const u32* weights = trellis + lane * pitch + (u64)blockIdx.y * WARPS * TILE_WORDS;
    for (int part = 0; part < parts; part++) {
      const int stage = part % STAGES, turn = part / STAGES;
      const u32 to = shared_at + stage * STAGE_BYTES, full_here = full_at + 8 * stage;
      if (turn > 0) barrier_wait(empty_at + 8 * stage, (turn - 1) & 1);
      if (lane == 0) {
        barrier_expect(full_here, STAGE_BYTES);
        bulk_copy(to, rows + (u64)part * ROWS * PART_INPUTS, X_BYTES, full_here);
      }
      __syncwarp();
      if (lane < PART)
        bulk_copy(to + X_BYTES + lane * (W_BYTES / PART), weights + part * PART * pitch, W_BYTES / PART, full_here);
    }
    return;
  }
  const Places at = places(lane);
  float total[ROW_TILES][4] = {};
  for (int part = 0; part < parts;) {
    float acc[ROW_TILES][4] = {};
    const int last = min(part + CHUNK / PART_INPUTS, parts);
    const bool first_chunk = part == 0;
#pragma unroll 1
    for (; part < last; part++) {
      const int stage = part % STAGES;
      barrier_wait(full_at + 8 * stage, (part / STAGES) & 1);
      const u32* tiles = (const u32*)(shared + stage * STAGE_BYTES + X_BYTES) + warp * TILE_WORDS;
      multiply_rows(acc, tiles, shared_at + stage * STAGE_BYTES, at);
      __syncwarp();
      if (lane == 0) barrier_arrive(empty_at + 8 * stage);
    }
    add_chunk<ROW_TILES>(total, acc, first_chunk);
  }
  workers_sync();  // the ring is free: sums go there, [ROWS][SUM_PITCH]
  float* sums = (float*)shared;
  leave_sums<ROW_TILES, SUM_PITCH>(sums, total, warp, lane);
  workers_sync();
  const Output out = {svh, bias, y, y_type};
  for (int r = warp; r < ROWS; r += WARPS) {
    const int row = blockIdx.x * ROWS + r;
    if (row >= M) break;
    const float4 s = *(const float4*)(sums + r * SUM_PITCH + 4 * lane);
    float v[4] = {s.x, s.y, s.z, s.w};
    finish_row(v, out, (u64)row * y_pitch, blockIdx.y * 128 + 4 * lane);
  }
}
