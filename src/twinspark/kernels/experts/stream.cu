// Products of the experts of many rows on compute capability 9.0, in the bits of decode.cu and prompt.cu: blocks stay
// and take unit after unit, 128 * HALVES columns of a matrix for up to ROWS rows, and a ring of parts never empties.
//
// A part is 128 inputs: rows as prompt.cu leaves them, then weights of 128 columns for each half. Warps ask for
// parts ahead of those they multiply, across units; an item and its matrix are fetched two units ahead.
//
// Macros: HALVES 2 for one block an SM, 1 for two, ROWS of a unit at most, MIDDLE and SMALL row counts with code of their own, CODEBOOK_MASK codebooks in use.
#include "../exl3/common.cuh"
#include "tables.cuh"
#include "wgmma.cuh"

#define HALF_WARPS 8
#define WARPS (HALVES * HALF_WARPS)
#define PART_INPUTS (16 * PART)
#define GROUP_BYTES (8 * PART_INPUTS * 2)  // of 8 rows in a part
#define X_BYTES (ROWS / 8 * GROUP_BYTES)
#define MOST_STAGES 4
#define SLOTS 8  // units that the fetched, the asked for and the multiplied one are apart at most, and more

struct __align__(16) Item { int expert, first, count, unused; };
struct __align__(16) Slot { Item item; Matrix matrix; };
struct Ask {  // what a warp's first lane asks for of a unit
  const char *x, *weights;
  u64 w_pitch;  // bytes of a k tile of all columns
  u32 x_bytes, w_bytes, expected;
};
struct Call {  // `num` units of this block
  const Matrix* table;
  const Item* items;
  const u16 *x0, *x1;
  int num, inputs, outputs, hidden, first_row, window_rows, stages, stage_bytes;
  __device__ __forceinline__ int parts() const { return inputs / PART_INPUTS; }
  __device__ __forceinline__ int groups() const { return (outputs / 128 + HALVES - 1) / HALVES; }
  __device__ __forceinline__ int per_item() const { return hidden ? 2 * groups() : groups(); }
  __device__ __forceinline__ int which(int unit) const { return unit % per_item() / groups(); }
  __device__ __forceinline__ int column_block(int unit, int half) const { return unit % per_item() % groups() * HALVES + half; }
};
// Where a warp stands: in the parts it asks for and in those it multiplies.
struct Place {
  int ask, ask_part, ask_stage, ask_parity;  // unit by number, part, and where the part before it is still read
  int stage, parity, step;
};
struct Shared {
  u64 full[MOST_STAGES], empty[MOST_STAGES];
  Slot slots[WARPS][SLOTS];
  Ask asks[WARPS];
};

__device__ __forceinline__ void barrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The block's n-th unit.
__device__ __forceinline__ int unit_of(int n) { return blockIdx.x + n * gridDim.x; }
__device__ __forceinline__ void fetch_item(const Call& call, Slot* slots, int n) {
  if (n < call.num) copy_16(&slots[n % SLOTS].item, call.items + unit_of(n) / call.per_item());
}
__device__ __forceinline__ void fetch_matrix(const Call& call, Slot* slots, int n) {
  if (n >= call.num) return;
  Slot& slot = slots[n % SLOTS];
  const Matrix* m = call.table + slot.item.expert * 3 + (call.hidden ? call.which(unit_of(n)) : 2);
  copy_16(&slot.matrix, m);
  copy_16((char*)&slot.matrix + 16, (const char*)m + 16);
}
// Goes on to ask for unit n, whose item and matrix are here; fetches those of units after it. One lane.
__device__ __forceinline__ void start_asking(const Call& call, Slot* slots, Ask& ask, int n) {
  wait_for_copies();
  const int unit = unit_of(n), half = threadIdx.x / (32 * HALF_WARPS);
  const Item item = slots[n % SLOTS].item;
  const Matrix m = slots[n % SLOTS].matrix;
  const int row0 = item.first - call.first_row, block = call.column_block(unit, half);
  const int halves = min(HALVES, call.outputs / 128 - call.column_block(unit, 0));
  ask.x_bytes = (item.count + 7) / 8 * GROUP_BYTES;
  ask.w_bytes = half < halves ? HALF_WARPS * 32 * m.bits : 0;
  ask.expected = ask.x_bytes + halves * PART * HALF_WARPS * 32 * m.bits;
  ask.w_pitch = (u64)(call.outputs / 16) * 32 * m.bits;
  ask.x = (const char*)(call.which(unit) ? call.x1 : call.x0) + (u64)(row0 / 8) * GROUP_BYTES;
  ask.weights = (const char*)m.trellis + (u64)block * ask.w_bytes;
  fetch_matrix(call, slots, n + 1);
  fetch_item(call, slots, n + 2);
}
// Asks for a warp's share of the next part, which goes to `to`. All lanes call.
__device__ __forceinline__ void ask_for_part(const Call& call, Shared& s, Place& at, u32 to, u32 full) {
  const int warp = threadIdx.x / 32, half = warp / HALF_WARPS, turn = warp % HALF_WARPS;
  if (at.ask < call.num && (threadIdx.x & 31) == 0) {
    if (at.ask_part == 0) start_asking(call, s.slots[warp], s.asks[warp], at.ask);
    const Ask& ask = s.asks[warp];
    if (warp == 0) {
      barrier_expect(full, ask.expected);
      bulk_copy(to, ask.x + (u64)at.ask_part * (call.window_rows / 8) * GROUP_BYTES, ask.x_bytes, full);
    }
    if (ask.w_bytes)
      bulk_copy(to + X_BYTES + (half * PART + turn) * ask.w_bytes, ask.weights + (at.ask_part * PART + turn) * ask.w_pitch,
                ask.w_bytes, full);
  }
  if (++at.ask_part == call.parts()) { at.ask_part = 0; at.ask++; }
}
// Waits for the next part and, once the one `lag` before it has been left by all, asks for what follows there.
__device__ __forceinline__ u32 next_part(const Call& call, Shared& s, Place& at, u32 ring_at) {
  const u32 full = smem_address(s.full), empty = smem_address(s.empty);
  const int lag = call.stages > 3 ? 2 : 1;
  if (at.step >= lag) {
    if (at.ask < call.num) {
      barrier_wait(empty + 8 * at.ask_stage, at.ask_parity);
      ask_for_part(call, s, at, ring_at + at.ask_stage * call.stage_bytes, full + 8 * at.ask_stage);
    }
    if (++at.ask_stage == call.stages) { at.ask_stage = 0; at.ask_parity ^= 1; }
  }
  at.step++;
  barrier_wait(full + 8 * at.stage, at.parity);
  __syncwarp();
  return at.stage * call.stage_bytes;
}
__device__ __forceinline__ void leave_part(const Call& call, Shared& s, Place& at) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) barrier_arrive(smem_address(s.empty) + 8 * at.stage);
  if (++at.stage == call.stages) { at.stage = 0; at.parity ^= 1; }
}

// Rows in shared memory: 8 x 8 blocks of 128 bytes, neighbours along inputs, 8 rows GROUP_BYTES apart.
__device__ __forceinline__ u64 rows_descriptor(u32 address) {
  return (u64)((address >> 4) & 0x3fff) | (u64)(128 >> 4) << 16 | (u64)(GROUP_BYTES >> 4) << 32;
}
// Two k tiles a turn: their decoding overlaps itself and the products of the turn before.
template <int CODEBOOK, int BITS, int TILES>
__device__ __forceinline__ void multiply_part(
    float acc[TILES][4], const u32* tiles, u32 x_at, const PlacesOf<BITS>& at) {
  constexpr int PITCH = HALF_WARPS * 8 * BITS;
  u32 w[2][2][4];
  WordsOf<BITS> words[2];
  load_words(words[0], tiles, at);
  load_words(words[1], tiles + PITCH, at);
  // said to be one for all lanes, so that descriptors are made in uniform registers
  const u64 rows = rows_descriptor(__shfl_sync(0xffffffffu, x_at, 0));
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
    wgmma<TILES>(acc, turn[0], rows + t * 16);
    wgmma<TILES>(acc, turn[1], rows + (t + 1) * 16);
    wgmma_commit();
  }
  wgmma_wait<0>();
}
// All inputs of a unit through the half's 128 columns; `y` is that of the unit's first row and the half's first column.
template <int CODEBOOK, int BITS, int TILES>
__device__ __forceinline__ void multiply_unit(
    const Call& call, Shared& s, Place& place, unsigned char* ring, float* y, int count) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, half = warp / HALF_WARPS, turn = warp % HALF_WARPS;
  const PlacesOf<BITS> at = places_of<BITS>(lane);
  const u32 ring_at = smem_address(ring), parts = call.parts();
  float4* total = (float4*)(ring + call.stages * call.stage_bytes) + threadIdx.x;
  for (int part = 0; part < parts;) {
    float acc[TILES][4] = {};
    const int last = min(part + CHUNK / PART_INPUTS, parts);
    const bool first_chunk = part == 0;
#pragma unroll 1
    for (; part < last; part++) {
      const u32 from = next_part(call, s, place, ring_at);
      const u32* tiles = (const u32*)(ring + from + X_BYTES) + (half * PART * HALF_WARPS + turn) * 8 * BITS;
      multiply_part<CODEBOOK, BITS, TILES>(acc, tiles, ring_at + from, at);
      leave_part(call, s, place);
    }
#pragma unroll
    for (int r = 0; r < TILES; r++) {
      float4 t = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
      if (!first_chunk) {
        const float4 before = total[r * 32 * WARPS];
        t = make_float4(before.x + t.x, before.y + t.y, before.z + t.z, before.w + t.w);
      }
      total[r * 32 * WARPS] = t;
    }
  }
  y += (u64)(2 * (lane & 3)) * call.outputs + turn * 16 + (lane >> 2);
#pragma unroll
  for (int r = 0; r < TILES; r++, y += (u64)8 * call.outputs) {
    const float4 t = total[r * 32 * WARPS];
    const int row = r * 8 + 2 * (lane & 3);
    if (row < count) { y[0] = t.x; y[8] = t.z; }
    if (row + 1 < count) { y[call.outputs] = t.y; y[call.outputs + 8] = t.w; }
  }
}
#define CASE(c, b) \
  case 16 * c + b: \
    if (count > MIDDLE) multiply_unit<c, b, ROWS / 8>(call, s, place, ring, y, count); \
    else if (count > SMALL) multiply_unit<c, b, MIDDLE / 8>(call, s, place, ring, y, count); \
    else multiply_unit<c, b, SMALL / 8>(call, s, place, ring, y, count); \
    break;
#define CASES(c) CASE(c, 1) CASE(c, 2) CASE(c, 3) CASE(c, 4) CASE(c, 5) CASE(c, 6) CASE(c, 7) CASE(c, 8)
__device__ __forceinline__ void multiply_any(
    int kind, const Call& call, Shared& s, Place& place, unsigned char* ring, float* y, int count) {
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

// As experts_tiles of prompt.cu, with `stages` of `stage_bytes` in shared memory before the sums of chunks. Any grid.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2 / HALVES) experts_stream(
    const Matrix* table, const Item* items, const int* num_items, const u16* x0, const u16* x1, float* y,
    int inputs, int outputs, int hidden, int first_row, int window_rows, int stages, int stage_bytes) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Shared s;
  const int warp = threadIdx.x / 32, half = warp / HALF_WARPS;
  if (threadIdx.x == 0) {
    for (int i = 0; i < MOST_STAGES; i++) {
      barrier_init(smem_address(s.full + i), 1);
      barrier_init(smem_address(s.empty + i), WARPS);
    }
    barriers_ready();
  }
  __syncthreads();
  let_consumer_start();
  wait_for_producer();
  Call call = {table, items, x0, x1, 0, inputs, outputs, hidden, first_row, window_rows, stages, stage_bytes};
  call.num = ((int)gridDim.x - 1 - (int)blockIdx.x + *num_items * call.per_item()) / (int)gridDim.x;
  if ((threadIdx.x & 31) == 0) {
    fetch_item(call, s.slots[warp], 0);
    fetch_item(call, s.slots[warp], 1);
    wait_for_copies();
    fetch_matrix(call, s.slots[warp], 0);
  }
  __syncwarp();
  Place at = {};
  for (int i = 0; i < stages; i++)
    ask_for_part(call, s, at, smem_address(ring) + i * stage_bytes, smem_address(s.full) + 8 * i);
#pragma unroll 1
  for (int n = 0; n < call.num; n++) {
    __syncwarp();
    const Slot& slot = s.slots[warp][n % SLOTS];
    const Item item = slot.item;
    const int kind = slot.matrix.codebook * 16 + slot.matrix.bits, block = call.column_block(unit_of(n), half);
    if (block < outputs / 128) {
      const u64 row = (u64)call.which(unit_of(n)) * window_rows + item.first - first_row;
      multiply_any(kind, call, s, at, ring, y + row * outputs + block * 128, item.count);
    } else {
      for (int part = 0; part < call.parts(); part++) {  // a half without columns keeps step
        next_part(call, s, at, smem_address(ring));
        leave_part(call, s, at);
      }
    }
  }
}
