// Products of up to 24 rows with an EXL3 matrix in one launch, or sums of products with up to four that take the same
// rows: the blocks that hold chunks of the same columns are one cluster and hand their sums to each other over shared
// memory.
//
// Arithmetic is that of rows.cu, matrix by matrix. Column blocks of the matrices follow each other in the grid:
// matrix p ends before block `end<p>` of 128 columns, those that are not there end where the last one does. Addresses
// come as arguments, so that weights are asked for without a read before. A warp takes 16 columns and one chunk.
//
// Macros, besides those of common.cuh: ROW_TILES 1..3 (tiles of 8 rows), ACROSS warps side by side (8; or less, where
// rows come rotated and RAW), DEPTH chunks of a block, SLICES blocks along the chunks, FUSED 1 when blocks rotate their
// rows themselves, RAW 1 when sums are left as they are, REHEARSED 1 when blocks run their code once before they wait
// and let the next kernel's start only then.
#include "common.cuh"
#include "../cuda/rehearse.cuh"

#define EACH(type, name) type name##0, type name##1, type name##2, type name##3
#define PICK(part, name) (part == 0 ? name##0 : part == 1 ? name##1 : part == 2 ? name##2 : name##3)
#define ROWS (8 * ROW_TILES)
#define XPITCH (CHUNK + 8)
#define WARPS (ACROSS * DEPTH)
#define HELD (SLICES * DEPTH)  // chunks of a cluster
#define WIDTH (16 * ACROSS)    // its columns
#define OWN ((ROWS + SLICES - 1) / SLICES)  // rows that a block finishes: row r is finished by block r % SLICES
#define STEP_WORDS (ACROSS * TILE_WORDS)    // of a block's 16 inputs

#if (ACROSS != 8 && (FUSED || !RAW)) || (REHEARSED && !FUSED)
#error "rows and results are rotated 128 columns at a time; what is rehearsed rotates its rows"
#endif

// Blocks of a cluster write into each other's shared memory once all have started; a barrier of the block written to
// counts the bytes.
#if SLICES > 1
#define IN_CLUSTER __cluster_dims__(SLICES, 1, 1)
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 address_in(u32 at, u32 block) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  return there;
}
__device__ __forceinline__ void store_to(u32 at, u32 arrived, u32 block, float v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address_in(at, block)),
      "r"(__float_as_uint(v)), "r"(address_in(arrived, block)) : "memory");
}
__device__ __forceinline__ void wait_for_cluster(u32 arrived) {
  asm volatile(
      "{\n .reg .pred p;\n again:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n"
      " @p bra done;\n bra again;\n done:\n }" ::"r"(arrived) : "memory");
}
#else
#define IN_CLUSTER
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void store_to(u32 at, u32 arrived, u32 block, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}
#endif
// The warps of one chunk meet.
__device__ __forceinline__ void meet(int depth) {
  asm volatile("bar.sync %0, %1;" ::"r"(depth + 1), "r"(32 * ACROSS) : "memory");
}

// Part `part` of PART k tiles onto a warp's accumulators; `x_at` are addresses of a lane's row of each tile of rows.
__device__ __forceinline__ void multiply_part(
    float acc[ROW_TILES][4], const u32* tiles, const u32 x_at[ROW_TILES], int part, const Places& at) {
#pragma unroll
  for (int t = 0; t < PART; t += 2) {
    const u32* from = tiles + (part * PART + t) * STEP_WORDS;
    Words words0, words1;
    load_words(words0, from, at);
    load_words(words1, from + STEP_WORDS, at);
    u32 w0[4], w1[4];
    decode(words0, at, w0);
    decode(words1, at, w1);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      u32 b[4];
      load_b(x_at[r] + (part * PART + t) * 32, b);
      mma(acc[r], w0, b[0], b[1]);
      mma(acc[r], w1, b[2], b[3]);
    }
  }
}

#if FUSED
// Rotates 128 values of every other row into shared memory, and asks for four rows at once before the first; a
// rehearsal asks for none.
__device__ __forceinline__ void rotate_rows(
    u16* xs, uint2 suh, const void* x, u64 from, int M, int row0, int x_pitch, int x_type, bool dry) {
  constexpr int STEP = ACROSS / 4, BATCH = 4;
#pragma unroll 1
  for (int first = row0; first < M; first += STEP * BATCH) {
    Four f[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int row = first + STEP * i;
      f[i] = {0, 0, 0, 0};
      if (row < M && !dry) f[i] = load_four(x, from + (u64)row * x_pitch, x_type);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int row = first + STEP * i;
      if (row < M) *(uint2*)(xs + row * XPITCH) = rotate_four(f[i], x_type, suh);
    }
  }
}
#else
// x [M, K] to rotated fp16 rows [parts][M][K]. grid (K / 128, M / 4 rounded up, parts).
extern "C" __global__ void __launch_bounds__(128) exl3_whole_rotate(
    EACH(const u16*, suh), const void* x, u16* out, int M, int K, int x_pitch, int x_type) {
  let_consumer_start();
  const u32 part = blockIdx.z;
  rotate_rows_of(x, PICK(part, suh), out + (u64)part * M * K, M, K, x_pitch, x_type);
}
#endif

// FUSED: x is [M, K] as it came, `x_pitch` apart; else rotated, [parts][M][K]. y is [M, columns] of `y_type`; RAW: of
// each matrix, one after another, in fp32. svh and bias (or null) are those of the only matrix. grid (SLICES * columns
// of all / WIDTH).
extern "C" __global__ void IN_CLUSTER __launch_bounds__(32 * WARPS, 1) exl3_whole(
    EACH(const u32*, trellis), EACH(const u16*, suh), EACH(int, end), const u16* svh, const u16* bias, const void* x,
    void* y, int M, int K, int x_pitch, int x_type, int y_type) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) u64 full[DEPTH * (PARTS + 1) + 1];
  u32* tiles = (u32*)shared;                                        // [DEPTH][KTILES][ACROSS][TILE_WORDS]
  float* sums = (float*)(tiles + DEPTH * KTILES * STEP_WORDS);      // [OWN][HELD][WIDTH]
  u16* xs = (u16*)(sums + (SLICES == 1 ? 0 : OWN * HELD * WIDTH));  // [DEPTH][M][XPITCH]
  if (SLICES == 1) sums = (float*)shared;  // over what has been used
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, depth = warp / ACROSS, across = warp % ACROSS;
  const u32 slice = blockIdx.x % SLICES, place = blockIdx.x / SLICES * WIDTH / 128;
  const u32 part = (place >= end0) + (place >= end1) + (place >= end2);
  const u32 first = part == 0 ? 0 : part == 1 ? end0 : part == 2 ? end1 : end2;
  const int columns = 128 * (PICK(part, end) - first), column = blockIdx.x / SLICES * WIDTH - 128 * first;
  const int chunk = slice * DEPTH + depth, width = min(CHUNK, K - chunk * CHUNK);  // 0 or less: there is no such chunk
  const int chunks = (K + CHUNK - 1) / CHUNK;
  const u32 full_at = smem_address(full) + 8 * depth * (PARTS + 1), sums_at = smem_address(sums);
  const u32 arrived = smem_address(full) + 8 * DEPTH * (PARTS + 1);
  const u32* own_tiles = tiles + depth * KTILES * STEP_WORDS;
  u16* own_xs = xs + depth * M * XPITCH;
  if (tid == 0) {
    for (int i = 0; i <= DEPTH * (PARTS + 1); i++) barrier_init(smem_address(full) + 8 * i, 1);
    barriers_ready();
    if (SLICES > 1 && slice < M) barrier_expect(arrived, (M - slice + SLICES - 1) / SLICES * chunks * WIDTH * 4);
  }
  __syncthreads();
  cluster_arrive();
  if (across == 0 && width > 0) {
    const u32 bytes = STEP_WORDS * 4;
    if (lane < PARTS) barrier_expect(full_at + 8 * lane, PART * bytes);
    __syncwarp();
    if (lane < width / 16) {
      const u64 tile = (u64)(chunk * KTILES + lane) * (columns / 16) + column / 16;
      bulk_copy(smem_address(own_tiles) + lane * bytes, PICK(part, trellis) + tile * TILE_WORDS, bytes,
                full_at + 8 * (lane / PART));
    }
    __syncwarp();
  }
  if (!REHEARSED) let_consumer_start();
  const Places at = held(places(lane));
  const u32* mine = own_tiles + across * TILE_WORDS;
  uint2 scale = make_uint2(0, 0);
  if (!RAW && warp < OWN) scale = *(const uint2*)(svh + column + 4 * lane);
#if FUSED
  const int k = 128 * (across & 3) + 4 * lane;
  uint2 in_scale = make_uint2(0, 0);
  if (k < width) in_scale = *(const uint2*)(PICK(part, suh) + chunk * CHUNK + k);
#endif
  u32 x_at[ROW_TILES];  // rows past M are read as the last one: they reach accumulators of their own only
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
    x_at[r] = smem_address(own_xs) + min(r * 8 + (lane & 7), M - 1) * XPITCH * 2 + (lane >> 3) * 16;
#pragma unroll 1
  for (int dry = REHEARSED ? rehearse(M) : 0; dry >= 0; dry--) {
    if (!dry) {
      __syncwarp();
      cluster_wait();  // the others have started
      wait_for_producer();
      if (REHEARSED) let_consumer_start();
    }
    float acc[ROW_TILES][4] = {};
    if (width > 0) {
#if FUSED
      if (k < width) rotate_rows(own_xs + k, in_scale, x, (u64)chunk * CHUNK + k, M, across / 4, x_pitch, x_type, dry);
      meet(depth);
#else
      if (across == 0) {
        if (lane == 0) barrier_expect(full_at + 8 * PARTS, M * width * 2);
        __syncwarp();
        const u16* own_x = (const u16*)x + (u64)part * M * K + chunk * CHUNK;
        for (int row = lane; row < M; row += 32)
          bulk_copy(smem_address(own_xs) + row * XPITCH * 2, own_x + (u64)row * K, width * 2, full_at + 8 * PARTS);
      }
      barrier_wait(full_at + 8 * PARTS, 0);
#endif
#pragma unroll 1
      for (int p = 0; p < (dry ? 1 : width / (16 * PART)); p++) {
        if (!dry) barrier_wait(full_at + 8 * p, 0);
        multiply_part(acc, mine, x_at, p, at);
      }
    }
#if SLICES == 1
    __syncthreads();
#endif
    if (width > 0) {
      const u32 to = sums_at + 4 * (chunk * WIDTH + 16 * across + (lane >> 2));
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const u32 row = r * 8 + 2 * (lane & 3) + i, there = to + 4 * (row / SLICES) * (HELD * WIDTH);
          if (row >= M || dry) continue;
          store_to(there, arrived, row % SLICES, acc[r][i]);
          store_to(there + 32, arrived, row % SLICES, acc[r][i + 2]);
        }
    }
#if SLICES == 1
    __syncthreads();
#else
    if (!dry) {
      if (slice >= M) return;
      wait_for_cluster(arrived);
    }
#endif
    for (int own = warp; slice + SLICES * own < M; own += WARPS) {
      if (4 * lane >= WIDTH) break;
      const float* from = sums + own * HELD * WIDTH + 4 * lane;
      float v[4];
#pragma unroll
      for (int c = 0; c < HELD; c++) {
        if (c >= chunks) break;
        const float4 t = *(const float4*)(from + c * WIDTH);
        v[0] = c ? v[0] + t.x : t.x; v[1] = c ? v[1] + t.y : t.y;
        v[2] = c ? v[2] + t.z : t.z; v[3] = c ? v[3] + t.w : t.w;
      }
      const u64 row_start = (u64)(slice + SLICES * own) * columns;
#if RAW
      float* to = (float*)y + (u64)M * 128 * first + row_start + column + 4 * lane;
      if (!dry) *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
#else
      finish_scaled(v, scale, {nullptr, bias, y, y_type}, row_start, column + 4 * lane, !dry);
#endif
    }
  }
}
