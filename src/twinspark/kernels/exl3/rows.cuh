// What products of up to 64 rows share: rows rotated, and one block's part of a product.
//
// Macros, besides those of common.cuh, which stands before this: ROW_TILES 1..8 (tiles of 8 rows), WARPS 4 or 8 of a
// block (16 output columns each), FUSED 1 when a unit rotates its rows itself.
#define ROWS (8 * ROW_TILES)
#define XPITCH (CHUNK + 8)

// PART k tiles of a warp's 16 columns onto its accumulators.
__device__ __forceinline__ void multiply_part(
    float acc[ROW_TILES][4], const u32* tiles, u32 x_at, const Places& at) {
#pragma unroll
  for (int t = 0; t < PART; t += 2) {
    u32 b[ROW_TILES][4];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) load_b(x_at + (r * 8 * XPITCH + t * 16) * 2, b[r]);
    Words words0, words1;
    load_words(words0, tiles + t * WARPS * TILE_WORDS, at);
    load_words(words1, tiles + (t + 1) * WARPS * TILE_WORDS, at);
    u32 w0[4], w1[4];
    decode(words0, at, w0);
    decode(words1, at, w1);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      mma(acc[r], w0, b[r][0], b[r][1]);
      mma(acc[r], w1, b[r][2], b[r][3]);
    }
  }
}

#if FUSED
// Rotates the rows of one chunk into shared memory: a warp takes block `warp % 4` of every
// (WARPS / 4)-th row, and asks for all of them first.
__device__ __forceinline__ void rotate_rows(
    u16* xs, uint2 suh, const void* x, int M, int first, int x_pitch, int x_type) {
  const int warp = threadIdx.x >> 5, k = 128 * (warp & 3) + 4 * (threadIdx.x & 31), row0 = warp >> 2;
  constexpr int STEP = WARPS / 4, NUM = ROWS / STEP;
  Four f[NUM];
  if (x_type == TYPE_FP32) {
#pragma unroll
    for (int i = 0; i < NUM; i++)
      if (row0 + STEP * i < M) f[i] = load_four(x, (u64)(row0 + STEP * i) * x_pitch + first + k, TYPE_FP32);
  } else {
#pragma unroll
    for (int i = 0; i < NUM; i++)
      if (row0 + STEP * i < M) f[i] = load_four(x, (u64)(row0 + STEP * i) * x_pitch + first + k, TYPE_BF16);
  }
#pragma unroll
  for (int i = 0; i < NUM; i++)
    if (row0 + STEP * i < M) *(uint2*)(xs + (row0 + STEP * i) * XPITCH + k) = rotate_four(f[i], x_type, suh);
}
#endif

// A warp's accumulators of one chunk to [M, N] floats; `column` is that of its lane's first output.
__device__ __forceinline__ void store_sums(const float acc[ROW_TILES][4], float* to, int M, int N, int column) {
  const int q = threadIdx.x & 3;
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
    const int row = r * 8 + 2 * q;
    float* p = to + (u64)row * N + column;
    if (row < M) { p[0] = acc[r][0]; p[8] = acc[r][2]; }
    if (row + 1 < M) { p[N] = acc[r][1]; p[N + 8] = acc[r][3]; }
  }
}

// One block multiplies one (column block `block`, chunk blockIdx.y); all its weights are asked for at once. FUSED: x is
// [M, K] as it came, `x_pitch` apart; else rotated before. work [chunks][M][N]. Rows of xs past M hold anything: a
// row of x reaches its own accumulator column only.
__device__ __forceinline__ void multiply_unit(
    const u32* trellis, const u16* suh, const void* x, float* work, int M, int K, int N, int x_pitch, int x_type,
    u32 block) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) u64 full[PARTS + 1];
  u16* xs = (u16*)shared;                                // [ROWS][XPITCH]
  u32* tiles = (u32*)(shared + ROWS * XPITCH * 2);       // [KTILES][WARPS][TILE_WORDS]
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int chunk = blockIdx.y, width = min(CHUNK, K - chunk * CHUNK);
  const u32 full_at = smem_address(full), xs_at = smem_address(xs);
  if (tid == 0) {
    for (int i = 0; i <= PARTS; i++) barrier_init(full_at + 8 * i, 1);
    barriers_ready();
  }
  __syncthreads();
  if (warp == 0) {
    const u32 bytes = WARPS * TILE_WORDS * 4;
    if (lane < PARTS) barrier_expect(full_at + 8 * lane, PART * bytes);
    __syncwarp();
    if (lane < width / 16) {
      const u64 tile = (u64)(chunk * KTILES + lane) * (N / 16) + (u64)block * WARPS;
      bulk_copy(smem_address(tiles) + lane * bytes, trellis + tile * TILE_WORDS, bytes, full_at + 8 * (lane / PART));
    }
  }
  let_consumer_start();
#if FUSED
  const uint2 s = *(const uint2*)(suh + min(chunk * CHUNK + 128 * (warp & 3), K - 128) + 4 * lane);
  wait_for_producer();
  if (128 * (warp & 3) < width) rotate_rows(xs, s, x, M, chunk * CHUNK, x_pitch, x_type);
  __syncthreads();
#else
  wait_for_producer();
  if (warp == 0) {
    if (lane == 0) barrier_expect(full_at + 8 * PARTS, M * width * 2);
    __syncwarp();
    for (int row = lane; row < M; row += 32)
      bulk_copy(xs_at + row * XPITCH * 2, (const u16*)x + (u64)row * K + chunk * CHUNK, width * 2, full_at + 8 * PARTS);
  }
  barrier_wait(full_at + 8 * PARTS, 0);
#endif
  const Places at = held(places(lane));
  float acc[ROW_TILES][4] = {};
  const u32 x_at = xs_at + (lane & 7) * XPITCH * 2 + (lane >> 3) * 16;
  const u32* mine = tiles + warp * TILE_WORDS;
#pragma unroll 1
  for (int part = 0; part < width / (16 * PART); part++) {
    barrier_wait(full_at + 8 * part, 0);
    multiply_part(acc, mine + part * PART * WARPS * TILE_WORDS, x_at + part * PART * 32, at);
  }
  store_sums(acc, work + (u64)chunk * M * N, M, N, (block * WARPS + warp) * 16 + (lane >> 2));
}
