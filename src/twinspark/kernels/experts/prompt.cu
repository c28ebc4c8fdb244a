// The experts of an MoE layer for many rows, in the bits of decode.cu: rows are brought together by
// expert, and a block decodes 128 columns of a matrix once for up to ROWS of them.
//
// Rows of an expert start at a multiple of 8; a window is a run of these rows that is worked on at once.
// Rotated inputs lie in tiles: [input / 128][row / 8][input % 128 / 8][row % 8][input % 8] fp16, so that
// a part of 128 inputs of an item's rows is one run of bytes and the operand of the matrix
// instructions. Pair p = row * (A + 1) + place; place A is the shared expert.
//
// Macros: ROWS of a block, SMALL and MIDDLE row counts worth code of their own, RING_BYTES for parts (two
// of ROWS rows at 8 bits at least), WGMMA, RESIDENT blocks an SM at least, ASKING warps beside those that
// multiply (four where registers pass from them to the others, with WGMMA; else one), TOTALS_SHARED 1 to
// keep sums of chunks in shared memory behind the ring, CODEBOOK_MASK codebooks in use.
#include "../exl3/common.cuh"
#include "../exl3/wide.cuh"
#include "tables.cuh"
#if WGMMA
#include "wgmma.cuh"
#endif

#define WARPS 8
#define PART_INPUTS (16 * PART)
#define GROUP_BYTES (8 * PART_INPUTS * 2)  // of 8 rows in a part
#define MOST_STAGES 8
#define MOST_EXPERTS 1024  // the shared one counted
#define MOST_PLACES 16     // of a row, the shared expert's counted

struct __align__(16) Item { int expert, first, count, unused; };
#include "prompt_rows.cuh"

#include "group.cuh"

// ---- products

__device__ __forceinline__ void barrier_end(u32 at) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(at) : "memory");
}
#if WGMMA
// Rows in shared memory: 8 x 8 blocks of 128 bytes, neighbours along inputs, 8 rows GROUP_BYTES apart.
__device__ __forceinline__ u64 rows_descriptor(u32 address) {
  return (u64)((address >> 4) & 0x3fff) | (u64)(128 >> 4) << 16 | (u64)(GROUP_BYTES >> 4) << 32;
}
#endif
// Two k tiles are a turn: their decoding overlaps itself and, with WGMMA, the products of the turn before.
template <int BITS>
__device__ __forceinline__ void load_turn(
    WordsOf<BITS> words[2], const u32* tiles, const PlacesOf<BITS>& at) {
  load_words(words[0], tiles, at);
  load_words(words[1], tiles + WARPS * 8 * BITS, at);
}
template <int CODEBOOK, int BITS>
__device__ __forceinline__ void decode_turn(
    const WordsOf<BITS> words[2], const PlacesOf<BITS>& at, u32 w[2][4]) {
  decode_tile<CODEBOOK>(words[0], at, w[0]);
  decode_tile<CODEBOOK>(words[1], at, w[1]);
}
#if WGMMA
// No products are under way from one part to the next.
template <int CODEBOOK, int BITS, int TILES>
__device__ __forceinline__ void multiply_part(
    float acc[TILES][4], const u32* tiles, u32 x_at, const PlacesOf<BITS>& at) {
  u32 w[2][2][4];
  WordsOf<BITS> words[2];
  load_turn(words, tiles, at);
  // said to be one for all lanes, so that descriptors are made in uniform registers
  const u64 rows = rows_descriptor(__shfl_sync(0xffffffffu, x_at, 0));
#pragma unroll
  for (int t = 0; t < PART; t += 2) {
    u32(*turn)[4] = w[t / 2 % 2];
    if (t >= 4) wgmma_wait<1>();  // the weights of two turns ago have been read
    decode_turn<CODEBOOK>(words, at, turn);
    if (t + 2 < PART) load_turn(words, tiles + (t + 2) * WARPS * 8 * BITS, at);
    wgmma_fence();
    wgmma<TILES>(acc, turn[0], rows + t * 16);
    wgmma<TILES>(acc, turn[1], rows + (t + 1) * 16);
    wgmma_commit();
  }
  wgmma_wait<0>();
}
#else
template <int CODEBOOK, int BITS, int TILES>
__device__ __forceinline__ void multiply_part(
    float acc[TILES][4], const u32* tiles, u32 x_at, const PlacesOf<BITS>& at) {
  const u32 line = x_at + (threadIdx.x & 31) * 16;
#pragma unroll
  for (int t = 0; t < PART; t += 2) {
    WordsOf<BITS> words[2];
    u32 w[2][4];
    load_turn(words, tiles + t * WARPS * 8 * BITS, at);
    decode_turn<CODEBOOK>(words, at, w);
#pragma unroll
    for (int r = 0; r < TILES; r++) {
      u32 b[4];
      load_b(line + r * GROUP_BYTES + t * 256, b);
      mma(acc[r], w[0], b[0], b[1]);
      mma(acc[r], w[1], b[2], b[3]);
    }
  }
}
#endif

// A ring of parts in shared memory: rows, then weights. A warp that multiplies nothing asks for them, a part
// as soon as all others have left the one in its place.
struct Ring {  // in shared memory: registers are for the products
  u64 full[MOST_STAGES], empty[MOST_STAGES];
  const char *x, *weights;
  u64 x_pitch, w_pitch;                 // bytes: of a part; of a k tile
  u32 stage_bytes, x_bytes, w_bytes;    // w_bytes: of a k tile
  int stages, parts, outputs, count;
  float* y;                             // of the item's first row and the block's first column
};
__device__ __forceinline__ void ask_for_item(const Ring& ring, unsigned char* shared) {
  const int lane = threadIdx.x & 31, stages = ring.stages, parts = ring.parts;
  const u32 shared_at = smem_address(shared), full0 = smem_address(ring.full), empty0 = smem_address(ring.empty);
  const u32 x_bytes = ring.x_bytes, w_bytes = ring.w_bytes, stage_bytes = ring.stage_bytes;
  const char *x = ring.x, *weights = ring.weights + lane * ring.w_pitch;
  int stage = 0, parity = 1;
#pragma unroll 1
  for (int part = 0; part < parts; part++) {
    const u32 to = shared_at + stage * stage_bytes, full = full0 + 8 * stage;
    if (part >= stages) barrier_wait(empty0 + 8 * stage, parity);
    if (lane == 0) {
      barrier_expect(full, stage_bytes);
      bulk_copy(to, x, x_bytes, full);
    }
    __syncwarp();
    if (lane < PART) bulk_copy(to + x_bytes + lane * w_bytes, weights, w_bytes, full);
    x += ring.x_pitch;
    weights += PART * ring.w_pitch;
    if (++stage == stages) { stage = 0; parity ^= 1; }
  }
}
// Places that an exchange has gone through where registers are few: else the compiler finds those of all
// widths before the choice of one, which takes other values out of registers, or finds them in every part.
template <int BITS>
__device__ __forceinline__ PlacesOf<BITS> found_once(PlacesOf<BITS> at) {
  if (!WGMMA) return at;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int g = 0; g < Width<BITS>::GROUPS; g++) {
    at.hi[g] = __shfl_sync(0xffffffffu, at.hi[g], lane);
    at.lo[g] = __shfl_sync(0xffffffffu, at.lo[g], lane);
    at.shift[g] = __shfl_sync(0xffffffffu, at.shift[g], lane);
  }
  return at;
}
// All inputs through 128 columns.
template <int CODEBOOK, int BITS, int TILES>
__device__ __forceinline__ void multiply_item(const Ring& ring, unsigned char* shared) {
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const PlacesOf<BITS> at = found_once(places_of<BITS>(lane));
  const u32 shared_at = smem_address(shared), full = smem_address(ring.full), empty = smem_address(ring.empty);
  const int stages = ring.stages, parts = ring.parts, stage_bytes = ring.stage_bytes, x_bytes = ring.x_bytes;
#if TOTALS_SHARED
  float4* total = (float4*)(shared + RING_BYTES) + tid;
#else
  float total[TILES][4] = {};
#endif
  int stage = 0, parity = 0;
  for (int part = 0; part < parts;) {
    float acc[TILES][4] = {};
    const int last = min(part + CHUNK / PART_INPUTS, parts);
    const bool first_chunk = part == 0;
#pragma unroll 1
    for (; part < last; part++) {
      barrier_wait(full + 8 * stage, parity);
      const u32 from = stage * stage_bytes;
      const u32* tiles = (const u32*)(shared + from + x_bytes) + warp * 8 * BITS;
      multiply_part<CODEBOOK, BITS, TILES>(acc, tiles, shared_at + from, at);
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * stage);
      if (++stage == stages) { stage = 0; parity ^= 1; }
    }
#pragma unroll
    for (int r = 0; r < TILES; r++) {
#if TOTALS_SHARED
      float4 t = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
      if (!first_chunk) {
        const float4 before = total[r * 32 * WARPS];
        t = make_float4(before.x + t.x, before.y + t.y, before.z + t.z, before.w + t.w);
      }
      total[r * 32 * WARPS] = t;
#else
#pragma unroll
      for (int i = 0; i < 4; i++) total[r][i] = first_chunk ? acc[r][i] : total[r][i] + acc[r][i];
#endif
    }
  }
  const int outputs = ring.outputs, count = ring.count;
  float* y = ring.y + (u64)(2 * (lane & 3)) * outputs + warp * 16 + (lane >> 2);
#pragma unroll
  for (int r = 0; r < TILES; r++, y += (u64)8 * outputs) {
#if TOTALS_SHARED
    const float4 t4 = total[r * 32 * WARPS];
    const float t[4] = {t4.x, t4.y, t4.z, t4.w};
#else
    const float(&t)[4] = total[r];
#endif
    const int row = r * 8 + 2 * (lane & 3);
    if (row < count) { y[0] = t[0]; y[8] = t[2]; }
    if (row + 1 < count) { y[outputs] = t[1]; y[outputs + 8] = t[3]; }
  }
}
#define CASE(c, b) \
  case 16 * c + b: \
    if (count > MIDDLE) multiply_item<c, b, ROWS / 8>(ring, shared); \
    else if (count > SMALL) multiply_item<c, b, MIDDLE / 8>(ring, shared); \
    else multiply_item<c, b, SMALL / 8>(ring, shared); \
    break;
#define CASES(c) CASE(c, 1) CASE(c, 2) CASE(c, 3) CASE(c, 4) CASE(c, 5) CASE(c, 6) CASE(c, 7) CASE(c, 8)
__device__ __forceinline__ void multiply_any(int kind, int count, const Ring& ring, unsigned char* shared) {
  switch (kind) {
#if CODEBOOK_MASK & 1
    CASES(0)
#endif
#if CODEBOOK_MASK & 2
    CASES(1)
#endif
#if CODEBOOK_MASK & 4
    CASES(2)
#endif
  }
}
// Products are made for some rows that are not there: bytes behind the item's last stage that are read for them, and
// must be shared memory of the block, as sums of chunks behind the ring are.
__device__ __forceinline__ u32 bytes_behind(int count, u32 stage_bytes) {
  if (TOTALS_SHARED) return 0;
  const u32 rows = count > MIDDLE ? ROWS : count > SMALL ? MIDDLE : SMALL;
  return max(rows / 8 * GROUP_BYTES, stage_bytes) - stage_bytes;
}
__device__ __forceinline__ void start_barriers(Ring& ring, bool again) {
  for (int i = 0; i < MOST_STAGES; i++) {
    const u32 full_at = smem_address(ring.full + i), empty_at = smem_address(ring.empty + i);
    if (again) { barrier_end(full_at); barrier_end(empty_at); }
    barrier_init(full_at, 1);
    barrier_init(empty_at, WARPS);
  }
  barriers_ready();
}
// Products of a window, sums before their rotation: y [1 or 2][window rows][outputs] fp32, gate and up
// where `hidden`, else down. A block takes every gridDim.y-th item.
struct Products {
  const Matrix* table;
  const Item* items;
  const int* num_items;
  const u16 *x0, *x1;
  float* y;
  int inputs, outputs, hidden, first_row, window_rows;
};
// What the warps that multiply and those that ASK do.
template <bool ASK>
__device__ __forceinline__ void run_items(const Products& p, Ring& ring, unsigned char* shared) {
  const int column_blocks = p.outputs / 128, which = (int)blockIdx.x >= column_blocks;
  const int column_block = blockIdx.x - which * column_blocks;
  wait_for_producer();
  const int num = *p.num_items;
  for (int index = blockIdx.y; index < num; index += gridDim.y) {
    const Item item = p.items[index];
    const Matrix m = p.table[item.expert * 3 + (p.hidden ? which : 2)];
    const bool again = index != (int)blockIdx.y;
    if (again) __syncthreads();
    if (!ASK && threadIdx.x == 0) {
      const int row0 = item.first - p.first_row;
      start_barriers(ring, again);
      ring.parts = p.inputs / PART_INPUTS; ring.outputs = p.outputs; ring.count = item.count;
      ring.x_bytes = (item.count + 7) / 8 * GROUP_BYTES; ring.w_bytes = WARPS * 32 * m.bits;
      ring.stage_bytes = ring.x_bytes + PART * ring.w_bytes;
      const u32 room = RING_BYTES - bytes_behind(item.count, ring.stage_bytes);
      ring.stages = min(MOST_STAGES, room / ring.stage_bytes);
      ring.x = (const char*)(which ? p.x1 : p.x0) + (u64)(row0 / 8) * GROUP_BYTES;
      ring.x_pitch = (u64)(p.window_rows / 8) * GROUP_BYTES;
      ring.w_pitch = (u64)(p.outputs / 16) * 32 * m.bits;
      ring.weights = (const char*)m.trellis + (u64)column_block * ring.w_bytes;
      ring.y = p.y + ((u64)which * p.window_rows + row0) * p.outputs + column_block * 128;
    }
    __syncthreads();
    if (!ASK) multiply_any(m.codebook * 16 + m.bits, item.count, ring, shared);
    else if (threadIdx.x < 32 * (WARPS + 1)) ask_for_item(ring, shared);
  }
}
// grid (matrices * outputs / 128, any).
extern "C" __global__ void __launch_bounds__(32 * (WARPS + ASKING), RESIDENT) experts_tiles(
    const Matrix* table, const Item* items, const int* num_items, const u16* x0, const u16* x1, float* y,
    int inputs, int outputs, int hidden, int first_row, int window_rows) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Ring ring;
  const Products p = {table, items, num_items, x0, x1, y, inputs, outputs, hidden, first_row, window_rows};
  let_consumer_start();
  if (threadIdx.x >= 32 * WARPS) {
#if WGMMA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#endif
    run_items<true>(p, ring, shared);
  } else {
#if WGMMA
    asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");  // 2 * 104 + 32 is 3 times the 80 of the start
#endif
    run_items<false>(p, ring, shared);
  }
}
