// The experts of an MoE layer for many rows, in the bits of decode.cu: rows are brought together by
// expert, and a block decodes 128 columns of a matrix once for up to ROWS of them.
//
// Rows of an expert start at a multiple of 8; a window is a run of these rows that is worked on at once.
// Rotated inputs lie in tiles: [row / 8][input / 8][row % 8][input % 8] fp16, so that 8 rows by 128
// inputs are one run of bytes and the operand of the matrix instructions. Pair p = row * (A + 1) +
// place; place A is the shared expert.
//
// Macros: ROWS of a block, SMALL and MIDDLE row counts worth code of their own, RING_BYTES for parts of
// 128 inputs (two of ROWS rows at 8 bits at least), WGMMA, RESIDENT blocks an SM at least, TOTALS_SHARED
// 1 to keep sums of chunks in shared memory behind the ring, CODEBOOK_MASK codebooks in use.
#include "../exl3/common.cuh"
#include "tables.cuh"
#if WGMMA
#include "wgmma.cuh"
#endif

#define WARPS 8
#define PART_INPUTS (16 * PART)
#define GROUP_BYTES (8 * PART_INPUTS * 2)  // of 8 rows in a part
#define MOST_STAGES 4
#define SUM_PITCH 132
#define MOST_EXPERTS 1024  // the shared one counted

struct __align__(16) Item { int expert, first, count, unused; };

// ---- who works with whom

// Sum of `value` over the threads before this one; `total` over all of the block of 1,024.
__device__ __forceinline__ int sum_before(int value, int* warp_sums, int& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int upto = value;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane >= step) upto += other;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = upto;
  __syncthreads();
  const int each = warp_sums[lane];
  int before = lane < warp ? each : 0, all = each;
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    before += __shfl_xor_sync(0xffffffffu, before, step);
    all += __shfl_xor_sync(0xffffffffu, all, step);
  }
  total = all;
  return before + upto - value;
}
// Places pairs by expert: row_of_pair (-1: dropped), pair_of_row (-1: padding), expert_of_group of 8
// rows, num_groups, and per window its items and their number. One block of 1,024.
extern "C" __global__ void __launch_bounds__(1024) experts_group(
    const int* ids, const unsigned char* kept, int* row_of_pair, int* pair_of_row, int* expert_of_group,
    int* num_groups, Item* items, int* num_items,
    int rows, int places, int experts, int windows, int window_rows, int most_items) {
  __shared__ int counts[MOST_EXPERTS], cursors[MOST_EXPERTS], warp_sums[32];
  const int tid = threadIdx.x, all = rows * places;
  let_consumer_start();
  counts[tid] = tid == experts ? rows : 0;
  wait_for_producer();
  __syncthreads();
#pragma unroll 8
  for (int i = tid; i < all; i += 1024) {
    const int id = kept && !kept[i] ? -1 : ids[i];
    if (id >= 0) atomicAdd(counts + id, 1);
  }
  __syncthreads();
  const int count = counts[tid], padded = (count + 7) / 8 * 8;
  int total, unused;
  const int start = sum_before(padded, warp_sums, total);
  cursors[tid] = start;
  if (tid == 0) *num_groups = total / 8;
  for (int i = start + count; i < start + padded; i++) pair_of_row[i] = -1;
  if (tid < experts)
    for (int i = start; i < start + padded; i += 8) expert_of_group[i / 8] = tid;
  for (int w = 0; w < windows; w++) {
    const int low = max(start, w * window_rows), high = min(start + count, (w + 1) * window_rows);
    const int num = max(high - low, 0), tiles = (num + ROWS - 1) / ROWS;
    const int each = tiles ? ((num + tiles - 1) / tiles + 7) / 8 * 8 : 0;
    int at = sum_before(tiles, warp_sums, unused);
    if (tid == 0) num_items[w] = unused;
    for (int i = 0; i < tiles; i++)
      items[(u64)w * most_items + at + i] = {tid, low + i * each, min(each, num - i * each), 0};
  }
  __syncthreads();
  const int shared_start = cursors[experts];
  __syncthreads();
  for (int i = tid; i < rows; i += 1024) {
    row_of_pair[i * (places + 1) + places] = shared_start + i;
    pair_of_row[shared_start + i] = i * (places + 1) + places;
    if (i % 8 == 0) expert_of_group[(shared_start + i) / 8] = experts;
  }
#pragma unroll 4
  for (int i = tid; i < all; i += 1024) {
    const int id = kept && !kept[i] ? -1 : ids[i], pair = i / places * (places + 1) + i % places;
    const int row = id >= 0 ? atomicAdd(cursors + id, 1) : -1;
    row_of_pair[pair] = row;
    if (row >= 0) pair_of_row[row] = pair;
  }
}

__device__ __forceinline__ u64 tiled(int row, int k, int inputs) {
  return (((u64)(row >> 3) * (inputs / 8) + (k >> 3)) * 8 + (row & 7)) * 8 + (k & 7);
}
// Rows of a window for gate and up; a warp takes 4 blocks of 128 of a row. grid (row groups of a window,
// inputs / 512 up).
extern "C" __global__ void __launch_bounds__(256) experts_rotate(
    const Matrix* table, const u16* __restrict__ x, const int* pair_of_row, const int* expert_of_group,
    const int* num_groups, u16* gate_x, u16* up_x, int places, int inputs, int first_group) {
  const int lane = threadIdx.x & 31, r = threadIdx.x >> 5, group = first_group + blockIdx.x;
  let_consumer_start();
  wait_for_producer();
  if (group >= *num_groups) return;
  const int pair = pair_of_row[group * 8 + r];
  if (pair < 0) return;
  const Matrix* m = table + expert_of_group[group] * 3;
  const u16 *gate = m[0].suh, *up = m[1].suh, *source = x + (u64)(pair / (places + 1)) * inputs;
  const int row = blockIdx.x * 8 + r, end = min(inputs, (int)(blockIdx.y + 1) * 512);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int k = blockIdx.y * 512 + 128 * i + 4 * lane;
    if (k >= end) break;
    const Four f = load_four(source, k, TYPE_BF16);
    const u64 to = tiled(row, k, inputs);
    *(uint2*)(gate_x + to) = rotate_four(f, TYPE_BF16, *(const uint2*)(gate + k));
    *(uint2*)(up_x + to) = rotate_four(f, TYPE_BF16, *(const uint2*)(up + k));
  }
}
// Gate and up of a window to the tiled input of down. grid (row groups of a window, width / 128).
extern "C" __global__ void __launch_bounds__(256) experts_act_tiled(
    const Matrix* table, const u16* gate, const u16* up, const int* pair_of_row, const int* expert_of_group,
    const int* num_groups, const float* weights, u16* out, int places, int width, int limit, int first_group) {
  const int lane = threadIdx.x & 31, r = threadIdx.x >> 5, group = first_group + blockIdx.x;
  let_consumer_start();
  wait_for_producer();
  if (group >= *num_groups) return;
  const int pair = pair_of_row[group * 8 + r];
  if (pair < 0) return;
  const int place = pair % (places + 1), column = blockIdx.y * 128 + 4 * lane, row = blockIdx.x * 8 + r;
  const float weight = place == places ? 1.f : weights[pair / (places + 1) * places + place];
  float g[4], u[4];
  widen(load_four(gate, (u64)row * width + column, TYPE_BF16), TYPE_BF16, g);
  widen(load_four(up, (u64)row * width + column, TYPE_BF16), TYPE_BF16, u);
  const uint2 suh = *(const uint2*)(table[expert_of_group[group] * 3 + 2].suh + column);
  *(uint2*)(out + tiled(row, column, width)) = activate(g, u, weight, __int_as_float(limit), suh);
}

// ---- products

__device__ __forceinline__ void barrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
}
#if WGMMA
// Rows in shared memory: 8 x 8 blocks of 128 bytes, neighbours along inputs, 8 rows GROUP_BYTES apart.
__device__ __forceinline__ u64 rows_descriptor(u32 address) {
  return (u64)((address >> 4) & 0x3fff) | (u64)(128 >> 4) << 16 | (u64)(GROUP_BYTES >> 4) << 32;
}
// Two k tiles a turn: their decoding overlaps itself and the products of the turn before.
template <int CODEBOOK, int BITS, int TILES>
__device__ __forceinline__ void multiply_part(
    float acc[TILES][4], const u32* tiles, u32 x_at, const PlacesOf<BITS>& at) {
  constexpr int PITCH = WARPS * 8 * BITS;
  u32 w[2][2][4];
  WordsOf<BITS> words[2];
  load_words(words[0], tiles, at);
  load_words(words[1], tiles + PITCH, at);
#pragma unroll
  for (int t = 0; t < PART; t += 2) {
    u32(*turn)[4] = w[t / 2 % 2];
    if (t >= 4) wgmma_wait<1>();  // the weights of two turns ago have been read
    decode_tile<CODEBOOK>(words[0], at, turn[0]);
    decode_tile<CODEBOOK>(words[1], at, turn[1]);
    if (t + 2 < PART) {
      load_words(words[0], tiles + (t + 2) * PITCH, at);
      load_words(words[1], tiles + (t + 3) * PITCH, at);
    }
    wgmma_fence();
    wgmma<TILES>(acc, turn[0], rows_descriptor(x_at + t * 256));
    wgmma<TILES>(acc, turn[1], rows_descriptor(x_at + (t + 1) * 256));
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
    WordsOf<BITS> words0, words1;
    load_words(words0, tiles + t * WARPS * 8 * BITS, at);
    load_words(words1, tiles + (t + 1) * WARPS * 8 * BITS, at);
    u32 w0[4], w1[4];
    decode_tile<CODEBOOK>(words0, at, w0);
    decode_tile<CODEBOOK>(words1, at, w1);
#pragma unroll
    for (int r = 0; r < TILES; r++) {
      u32 b[4];
      load_b(line + r * GROUP_BYTES + t * 256, b);
      mma(acc[r], w0, b[0], b[1]);
      mma(acc[r], w1, b[2], b[3]);
    }
  }
}
#endif

// A ring of parts in shared memory: rows, then weights. The first warp asks for a part as soon as all
// have left the one that lay there before.
struct Ring {
  unsigned char* shared;
  u32 full, empty, stage_bytes, x_bytes, w_bytes;  // w_bytes: of a k tile
  int stages, parts, groups;
  const char *x, *weights;
  u64 x_pitch, w_pitch;  // bytes: of 8 rows; of a k tile
};
__device__ __forceinline__ void ask_for_part(const Ring& ring, int part, int stage) {
  const int lane = threadIdx.x & 31;
  const u32 to = smem_address(ring.shared) + stage * ring.stage_bytes, full = ring.full + 8 * stage;
  if (lane == 0) barrier_expect(full, ring.x_bytes + PART * ring.w_bytes);
  __syncwarp();
  if (lane < PART)
    bulk_copy(to + ring.x_bytes + lane * ring.w_bytes, ring.weights + (part * PART + lane) * ring.w_pitch,
              ring.w_bytes, full);
  else if (lane - PART < ring.groups)
    bulk_copy(to + (lane - PART) * GROUP_BYTES, ring.x + (lane - PART) * ring.x_pitch + (u64)part * GROUP_BYTES,
              GROUP_BYTES, full);
}
// All inputs through 128 columns; leaves sums as [rows][SUM_PITCH] where the ring was.
template <int CODEBOOK, int BITS, int TILES>
__device__ __forceinline__ void multiply_item(const Ring& ring) {
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const PlacesOf<BITS> at = places_of<BITS>(lane);
  const u32 shared_at = smem_address(ring.shared);
  const int lag = ring.stages > 2 ? 2 : 1;  // parts that slower warps may be behind
#if TOTALS_SHARED
  float4* total = (float4*)(ring.shared + RING_BYTES) + tid;
#else
  float total[TILES][4] = {};
#endif
  if (warp == 0)
    for (int part = 0; part < min(ring.stages, ring.parts); part++) ask_for_part(ring, part, part);
  int stage = 0, parity = 0, free_stage = 0, free_parity = 0;
  for (int part = 0; part < ring.parts;) {
    float acc[TILES][4] = {};
    const int last = min(part + CHUNK / PART_INPUTS, ring.parts);
    const bool first_chunk = part == 0;
#pragma unroll 1
    for (; part < last; part++) {
      if (warp == 0 && part >= lag) {
        if (part - lag + ring.stages < ring.parts) {
          barrier_wait(ring.empty + 8 * free_stage, free_parity);
          ask_for_part(ring, part - lag + ring.stages, free_stage);
        }
        if (++free_stage == ring.stages) { free_stage = 0; free_parity ^= 1; }
      }
      barrier_wait(ring.full + 8 * stage, parity);
      const u32 from = stage * ring.stage_bytes;
      const u32* tiles = (const u32*)(ring.shared + from + ring.x_bytes) + warp * 8 * BITS;
      multiply_part<CODEBOOK, BITS, TILES>(acc, tiles, shared_at + from, at);
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.empty + 8 * stage);
      if (++stage == ring.stages) { stage = 0; parity ^= 1; }
    }
#if TOTALS_SHARED
#pragma unroll
    for (int r = 0; r < TILES; r++) {
      float4 t = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
      if (!first_chunk) {
        const float4 before = total[r * 32 * WARPS];
        t = make_float4(before.x + t.x, before.y + t.y, before.z + t.z, before.w + t.w);
      }
      total[r * 32 * WARPS] = t;
    }
#else
#pragma unroll
    for (int r = 0; r < TILES; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) total[r][i] = first_chunk ? acc[r][i] : total[r][i] + acc[r][i];
#endif
  }
  __syncthreads();  // the ring is free
#pragma unroll
  for (int r = 0; r < TILES; r++) {
    float* s = (float*)ring.shared + (r * 8 + 2 * (lane & 3)) * SUM_PITCH + warp * 16 + (lane >> 2);
#if TOTALS_SHARED
    const float4 t = total[r * 32 * WARPS];
    s[0] = t.x; s[SUM_PITCH] = t.y; s[8] = t.z; s[SUM_PITCH + 8] = t.w;
#else
    s[0] = total[r][0]; s[SUM_PITCH] = total[r][1]; s[8] = total[r][2]; s[SUM_PITCH + 8] = total[r][3];
#endif
  }
  __syncthreads();
}
#define CASE(c, b) \
  case 16 * c + b: \
    if (count > MIDDLE) multiply_item<c, b, ROWS / 8>(ring); \
    else if (count > SMALL) multiply_item<c, b, MIDDLE / 8>(ring); \
    else multiply_item<c, b, SMALL / 8>(ring); \
    break;
#define CASES(c) CASE(c, 1) CASE(c, 2) CASE(c, 3) CASE(c, 4) CASE(c, 5) CASE(c, 6) CASE(c, 7) CASE(c, 8)
__device__ __forceinline__ void multiply_any(int kind, int count, const Ring& ring) {
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
// Products of a window. hidden: gate and up, y [2][window rows][outputs] bf16; else down, y [window rows]
// [outputs] fp32. grid (matrices * outputs / 128, items).
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) experts_tiles(
    const Matrix* table, const Item* items, const int* num_items, const u16* x0, const u16* x1, void* y,
    int inputs, int outputs, int hidden, int first_row, int window_rows) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) u64 full[MOST_STAGES], empty[MOST_STAGES];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int column_blocks = outputs / 128, which = blockIdx.x / column_blocks;
  const int column_block = blockIdx.x - which * column_blocks;
  if (tid == 0) {
    for (int i = 0; i < MOST_STAGES; i++) {
      barrier_init(smem_address(full + i), 1);
      barrier_init(smem_address(empty + i), WARPS);
    }
    barriers_ready();
  }
  let_consumer_start();
  wait_for_producer();
  __syncthreads();
  if ((int)blockIdx.y >= *num_items) return;
  const Item item = items[blockIdx.y];
  const Matrix m = table[item.expert * 3 + (hidden ? which : 2)];
  const int row0 = item.first - first_row, groups = (item.count + 7) / 8;
  Ring ring;
  ring.shared = shared; ring.full = smem_address(full); ring.empty = smem_address(empty);
  ring.groups = groups; ring.parts = inputs / PART_INPUTS;
  ring.x_bytes = groups * GROUP_BYTES; ring.w_bytes = WARPS * 32 * m.bits;
  ring.stage_bytes = ring.x_bytes + PART * ring.w_bytes;
  ring.stages = min(MOST_STAGES, RING_BYTES / ring.stage_bytes);
  ring.x = (const char*)(which ? x1 : x0) + (u64)row0 * inputs * 2; ring.x_pitch = (u64)8 * inputs * 2;
  ring.w_pitch = (u64)(outputs / 16) * 32 * m.bits;
  ring.weights = (const char*)m.trellis + (u64)column_block * ring.w_bytes;
  multiply_any(m.codebook * 16 + m.bits, item.count, ring);
  const int column = column_block * 128 + 4 * lane;
  for (int r = warp; r < item.count; r += WARPS) {
    const float4 s = *(const float4*)((const float*)shared + r * SUM_PITCH + 4 * lane);
    float v[4] = {s.x, s.y, s.z, s.w};
    finish_values(v, m.svh + column);
    const u64 at = ((u64)which * window_rows + row0 + r) * outputs + column;
    if (hidden) *(uint2*)((u16*)y + at) = bf16_four(v);
    else *(float4*)((float*)y + at) = make_float4(v[0], v[1], v[2], v[3]);
  }
}

// Adds a window's outputs onto those of the windows before it; the last one rounds to bf16. Experts
// ascend over windows and places. grid (outputs / 512 up, rows).
extern "C" __global__ void __launch_bounds__(128) experts_add(
    const float* y, const int* row_of_pair, float* total, u16* out,
    int places, int outputs, int first_row, int window_rows, int first, int last) {
  let_consumer_start();
  wait_for_producer();
  const int row = blockIdx.y, column = blockIdx.x * 512 + 4 * threadIdx.x;
  if (column >= outputs) return;
  const u64 at = (u64)row * outputs + column;
  float v[4] = {0.f, 0.f, 0.f, 0.f};
  if (!first) add_four(v, *(const float4*)(total + at));
#pragma unroll 4
  for (int place = 0; place <= places; place++) {
    const int from = row_of_pair[row * (places + 1) + place] - first_row;
    if (from >= 0 && from < window_rows) add_four(v, *(const float4*)(y + (u64)from * outputs + column));
  }
  if (last) *(uint2*)(out + at) = bf16_four(v);
  else *(float4*)(total + at) = make_float4(v[0], v[1], v[2], v[3]);
}
