// Products of up to 24 rows with up to four EXL3 matrices in one launch: the blocks that hold chunks of the same
// columns are one cluster and hand their sums to each other over shared memory.
//
// Arithmetic is that of rows.cu, matrix by matrix. Column blocks of the matrices follow each other in the grid:
// matrix p ends before block `end<p>` of 128 columns, those that are not there end where the last one does. Addresses
// come as arguments, so that weights are asked for without a read before. A warp takes 16 columns and one chunk.
//
// Macros, besides those of common.cuh: ROW_TILES 1..3 (tiles of 8 rows), ACROSS 1, 2, 4 or 8 warps side by side, DEPTH
// chunks of a block, SLICES blocks along the chunks, FUSED 1 when blocks rotate their rows themselves, RAW 1 when sums
// are left as they are, EARLY tiles (even, at most 8) decoded before the kernel ahead has ended, RESIDENT blocks an SM
// at least.
#include "common.cuh"
#include "../cuda/rehearse.cuh"

#ifndef START
#define START 0
#endif
#ifndef REHEARSE
#define REHEARSE 1
#endif
#define EACH(type, name) type name##0, type name##1, type name##2, type name##3
#define PICK(part, name) (part == 0 ? name##0 : part == 1 ? name##1 : part == 2 ? name##2 : name##3)
#define ROWS (8 * ROW_TILES)
#define XPITCH (CHUNK + 8)
#define WARPS (ACROSS * DEPTH)
#define HELD (SLICES * DEPTH)            // chunks of a cluster
#define PIECES (RAW ? 1 : 8 / ACROSS)    // blocks of a cluster side by side: a rotation takes 128 columns
#define WIDTH (RAW ? 16 * ACROSS : 128)  // columns of a cluster
#define CLUSTER (SLICES * PIECES)
#define OWN ((ROWS + CLUSTER - 1) / CLUSTER)  // rows that a block finishes: row r is finished by block r % CLUSTER
#define STEP_WORDS (ACROSS * TILE_WORDS)      // of a block's 16 inputs

// Blocks of a cluster write into each other's shared memory once all have started. ASYNC 1: a barrier of the block
// written to counts bytes; 0: barriers of the cluster.
#ifndef ASYNC
#define ASYNC 1
#endif
#if CLUSTER > 1
#define IN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_release() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 address_in(u32 at, u32 block) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  return there;
}
#else
#define IN_CLUSTER
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
#endif
#if CLUSTER == 1
__device__ __forceinline__ void store_to(u32 at, u32 arrived, u32 block, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}
#elif ASYNC
__device__ __forceinline__ void store_to(u32 at, u32 arrived, u32 block, float v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address_in(at, block)),
               "r"(__float_as_uint(v)), "r"(address_in(arrived, block)) : "memory");
}
__device__ __forceinline__ void wait_for_cluster(u32 arrived) {
  asm volatile(
      "{\n .reg .pred p;\n again:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n"
      " @p bra done;\n bra again;\n done:\n }" ::"r"(arrived) : "memory");
}
#else
__device__ __forceinline__ void store_to(u32 at, u32 arrived, u32 block, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_in(at, block)), "f"(v) : "memory");
}
#endif
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
__device__ __forceinline__ void prefetch_bulk(const void* p, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}
// The warps of one chunk meet.
__device__ __forceinline__ void meet(int depth) {
#if ACROSS == 1
  __syncwarp();
#else
  asm volatile("bar.sync %0, %1;" ::"r"(depth + 1), "r"(32 * ACROSS) : "memory");
#endif
}

// Two k tiles onto a warp's accumulators; `x_at` are addresses of a lane's row of each tile of rows.
__device__ __forceinline__ void multiply_two(
    float acc[ROW_TILES][4], const u32 w0[4], const u32 w1[4], const u32 x_at[ROW_TILES], int tile) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
    u32 b[4];
    load_b(x_at[r] + tile * 32, b);
    mma(acc[r], w0, b[0], b[1]);
    mma(acc[r], w1, b[2], b[3]);
  }
}
__device__ __forceinline__ void decode_two(u32 w0[4], u32 w1[4], const u32* tiles, const Places& at) {
  Words words0, words1;
  load_words(words0, tiles, at);
  load_words(words1, tiles + STEP_WORDS, at);
  decode(words0, at, w0);
  decode(words1, at, w1);
}
// Tiles FROM.. of a part of PART k tiles.
template <int FROM>
__device__ __forceinline__ void multiply_part(
    float acc[ROW_TILES][4], const u32* tiles, const u32 x_at[ROW_TILES], int part, const Places& at) {
#pragma unroll
  for (int t = FROM; t < PART; t += 2) {
    u32 w0[4], w1[4];
    decode_two(w0, w1, tiles + (part * PART + t) * STEP_WORDS, at);
    multiply_two(acc, w0, w1, x_at, part * PART + t);
  }
}

// Rotates 128 values of every ROW_STEP-th row into shared memory, and asks for some rows at once before the first; a
// rehearsal asks for none.
#define ROW_STEP (ACROSS > 4 ? ACROSS / 4 : 1)
#define BLOCKS (ACROSS > 4 ? 1 : 4 / ACROSS)  // of 128 values, of a warp
__device__ __forceinline__ void rotate_block(
    u16* xs, uint2 suh, const void* x, u64 from, int M, int row0, int x_pitch, int x_type, bool dry) {
  constexpr int BATCH = 8 / ROW_STEP;
#pragma unroll 1
  for (int first = row0; first < M; first += ROW_STEP * BATCH) {
    Four f[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int row = first + ROW_STEP * i;
      f[i] = {0, 0, 0, 0};
      if (row < M && !dry) f[i] = load_four(x, from + (u64)row * x_pitch, x_type);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int row = first + ROW_STEP * i;
      if (row < M) *(uint2*)(xs + row * XPITCH) = rotate_four(f[i], x_type, suh);
    }
  }
}

#if !FUSED
// x [M, K] of each matrix to rotated fp16 rows [parts][M][K]. grid (K / 128, M / 4 rounded up, parts).
extern "C" __global__ void __launch_bounds__(128) exl3_whole_rotate(
    EACH(const u16*, suh), const void* x, u16* out, int M, int K, int x_pitch, int x_type, int x_step) {
  let_consumer_start();
  const u32 part = blockIdx.z;
  rotate_rows_of((const char*)x + (u64)part * x_step, PICK(part, suh), out + (u64)part * M * K, M, K, x_pitch, x_type);
}
#endif

// FUSED: x is [M, K] as it came, `x_pitch` apart; else rotated, [M][K]; that of a matrix starts `x_step` bytes after
// that of the one before. y of a matrix is [M, columns], rows `y_pitch` apart (0: columns), of the type in its two bits
// of `types`; RAW: fp32 sums. next: `next_bytes` of weights, of which 16 is a divisor, or null. grid (CLUSTER * columns of all / WIDTH).
extern "C" __global__ void IN_CLUSTER __launch_bounds__(32 * WARPS, RESIDENT) exl3_whole(
    EACH(const u32*, trellis), EACH(const u16*, suh), EACH(const u16*, svh), EACH(void*, y), EACH(int, end),
    const u16* bias, const void* x, int M, int K, int x_pitch, int x_type, int x_step, int y_pitch, int types,
    const char* next, int next_bytes) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) u64 full[DEPTH * (PARTS + 1) + 1];
  u32* tiles = (u32*)shared;                                   // [DEPTH][KTILES][ACROSS][TILE_WORDS]
  float* sums = (float*)(tiles + DEPTH * KTILES * STEP_WORDS);  // [OWN][HELD][WIDTH]
  u16* xs = (u16*)(sums + (CLUSTER == 1 ? 0 : OWN * HELD * WIDTH));  // [DEPTH][M][XPITCH]
  if (CLUSTER == 1) sums = (float*)shared;  // over what has been used
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, depth = warp / ACROSS, across = warp % ACROSS;
  const u32 rank = blockIdx.x % CLUSTER, slice = rank / PIECES, piece = rank % PIECES;
  const u32 place = blockIdx.x / CLUSTER * WIDTH / 128;
  const u32 part = (place >= end0) + (place >= end1) + (place >= end2);
  const u32 first = part == 0 ? 0 : part == 1 ? end0 : part == 2 ? end1 : end2;
  const int columns = 128 * (PICK(part, end) - first), column = blockIdx.x / CLUSTER * WIDTH - 128 * first;
  const int chunk = slice * DEPTH + depth, width = min(CHUNK, K - chunk * CHUNK);  // 0 or less: there is no such chunk
  const int chunks = (K + CHUNK - 1) / CHUNK;
  const u32 full_at = smem_address(full) + 8 * depth * (PARTS + 1), sums_at = smem_address(sums);
  const u32 arrived = smem_address(full) + 8 * DEPTH * (PARTS + 1);
  const u32* own_tiles = tiles + depth * KTILES * STEP_WORDS;
  u16* own_xs = xs + depth * M * XPITCH;
  if (tid == 0) {
    for (int i = 0; i <= DEPTH * (PARTS + 1); i++) barrier_init(smem_address(full) + 8 * i, 1);
    barriers_ready();
    if (CLUSTER > 1 && ASYNC && rank < M) barrier_expect(arrived, (M - rank + CLUSTER - 1) / CLUSTER * chunks * WIDTH * 4);
  }
  __syncthreads();
  cluster_arrive();
  if (across == 0 && width > 0) {
    const u32 bytes = STEP_WORDS * 4;
    if (lane < PARTS) barrier_expect(full_at + 8 * lane, PART * bytes);
    __syncwarp();
    if (lane < width / 16) {
      const u64 tile = (u64)(chunk * KTILES + lane) * (columns / 16) + column / 16 + piece * ACROSS;
      bulk_copy(smem_address(own_tiles) + lane * bytes, PICK(part, trellis) + tile * TILE_WORDS, bytes,
                full_at + 8 * (lane / PART));
    }
    __syncwarp();
  }
  if (warp == WARPS - 1 && next) {  // a block's share of the weights of a later product, into the cache
    const int share = ((next_bytes + gridDim.x - 1) / gridDim.x + 127) / 128 * 128, from = share * blockIdx.x;
    for (int i = 2048 * lane; i < min(share, next_bytes - from); i += 2048 * 32)
      prefetch_bulk(next + from + i, min(2048, next_bytes - from - i));
    __syncwarp();
  }
#if START == 0
  let_consumer_start();
#endif
  const Places at = places(lane);
  const u32* mine = own_tiles + across * TILE_WORDS;
  uint2 scale = make_uint2(0, 0);
  if (!RAW && warp < OWN) scale = *(const uint2*)(PICK(part, svh) + column + 4 * lane);
#if FUSED
  const u16* in_scales = PICK(part, suh) + chunk * CHUNK + 4 * lane;
  uint2 in_scale = make_uint2(0, 0);
  if (BLOCKS == 1) {
    if (128 * (across & 3) < width) in_scale = *(const uint2*)(in_scales + 128 * (across & 3));
  } else if (64 * lane < width) {  // lines of 128 bytes
    prefetch(in_scales + 60 * lane);
  }
#endif
#if EARLY
  u32 early[EARLY][4];
  if (width > 0) {
    barrier_wait(full_at, 0);
#pragma unroll
    for (int t = 0; t < EARLY; t += 2) decode_two(early[t], early[t + 1], mine + t * STEP_WORDS, at);
#pragma unroll
    for (int t = 0; t < EARLY; t++) asm volatile("" : "+r"(early[t][0]), "+r"(early[t][1]), "+r"(early[t][2]), "+r"(early[t][3]));
  }
#endif
#if START == 1
  if (warp == 0) {
    if (width > 0)
      for (int p = 0; p < width / (16 * PART); p++) barrier_wait(full_at + 8 * p, 0);
    let_consumer_start();
  }
#endif
  const char* own_x = (const char*)x + (u64)part * x_step;
  u32 x_at[ROW_TILES];  // rows past M are read as the last one: they reach accumulators of their own only
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
    x_at[r] = smem_address(own_xs) + min(r * 8 + (lane & 7), M - 1) * XPITCH * 2 + (lane >> 3) * 16;
#pragma unroll 1
  for (int dry = REHEARSE && ROW_TILES == 1 ? rehearse(M) : 0; dry >= 0; dry--) {
    if (!dry) {
      __syncwarp();
      cluster_wait();  // the others have started
      wait_for_producer();
#if START == 2 || (START == 3 && !FUSED)
      let_consumer_start();
#endif
    }
    float acc[ROW_TILES][4] = {};
    if (width > 0) {
#if FUSED
#pragma unroll 1
      for (int b = 0; b < BLOCKS; b++) {
        const int k = 128 * ((across + ACROSS * b) & 3);
        if (k >= width) break;
        const uint2 s = BLOCKS == 1 ? in_scale : *(const uint2*)(in_scales + k);
        rotate_block(own_xs + k + 4 * lane, s, own_x, (u64)chunk * CHUNK + k + 4 * lane, M, across / 4, x_pitch, x_type, dry);
      }
      meet(depth);
#else
      if (across == 0 && !dry) {
        if (lane == 0) barrier_expect(full_at + 8 * PARTS, M * width * 2);
        __syncwarp();
        for (int row = lane; row < M; row += 32)
          bulk_copy(smem_address(own_xs) + row * XPITCH * 2, (const u16*)own_x + (u64)row * K + chunk * CHUNK, width * 2,
                    full_at + 8 * PARTS);
      }
      if (!dry) barrier_wait(full_at + 8 * PARTS, 0);
#endif
#if START == 3 && FUSED
      if (!dry) let_consumer_start();
#endif
      int from = 0;
#if EARLY
#pragma unroll
      for (int t = 0; t < EARLY; t += 2) multiply_two(acc, early[t], early[t + 1], x_at, t);
      if (EARLY < PART) multiply_part<EARLY>(acc, mine, x_at, 0, at);
      from = 1;
#endif
      const int parts = dry ? min(width / (16 * PART), from + 1) : width / (16 * PART);
#pragma unroll 1
      for (int p = from; p < parts; p++) {
        if (!dry) barrier_wait(full_at + 8 * p, 0);
        multiply_part<0>(acc, mine, x_at, p, at);
      }
    }
#if CLUSTER == 1
    __syncthreads();
#endif
    if (width > 0) {
      const u32 to = sums_at + 4 * (chunk * WIDTH + (RAW ? 0 : 16 * ACROSS * piece) + 16 * across + (lane >> 2));
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const u32 row = r * 8 + 2 * (lane & 3) + i, there = to + 4 * (row / CLUSTER) * (HELD * WIDTH);
          if (row >= M || dry) continue;
          store_to(there, arrived, row % CLUSTER, acc[r][i]);
          store_to(there + 32, arrived, row % CLUSTER, acc[r][i + 2]);
        }
    }
#if CLUSTER == 1
    __syncthreads();
#else
    if (!dry) {
#if ASYNC
      if (rank >= M) return;
      wait_for_cluster(arrived);
#else
      __syncwarp();
      cluster_release();
      if (rank >= M) return;
      cluster_wait();
#endif
    }
#endif
    for (int own = warp; rank + CLUSTER * own < M; own += WARPS) {
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
      const Output out = {nullptr, bias, PICK(part, y), RAW ? TYPE_FP32 : (types >> (2 * part)) & 3};
      const u64 row_start = (u64)(rank + CLUSTER * own) * (y_pitch ? y_pitch : columns);
#if RAW
      if (!dry) store_four(v, out, row_start + column + 4 * lane);
#else
      finish_scaled(v, scale, out, row_start, column + 4 * lane, !dry);
#endif
    }
  }
}
