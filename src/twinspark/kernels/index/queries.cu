// Index queries as whole numbers, head weights, and the rows that are scored together.
//
// Macros: HEADS, even, up to 32.
#include "common.cuh"

__device__ __forceinline__ float bf16_of(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float round_bf16(float v) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
  return bf16_of(h);
}
// Twice the nearest e2m1 number of x / scale, ties to even.
__device__ __forceinline__ int doubled(float x, float scale) {
  const float y = fminf(fmaxf(__fdiv_rn(x, scale), -6.f), 6.f);
  const int below = (__float_as_int(y) >> 23) & 255;
  const int octave = max(below, 127) - 127;                        // the spacing is half of 2^octave
  const float step = __int_as_float((126 + octave) << 23);
  return (int)rintf(__fdiv_rn(y, step)) << octave;
}

// Rows of one slot that follow each other, ROW_TILE at a time: tiles[i] = (first row, rows).
__device__ void build_tiles(const int* slots, int rows, int2* tiles, int* num_tiles) {
  const int lane = threadIdx.x & 31;
  int count = 0, carried = 0;  // tiles so far; place in its run of the row after the last 32
  for (int first = 0; first < rows; first += 32) {
    const int row = first + lane;
    const bool is_row = row < rows;
    const int slot = is_row ? slots[row] : -2;
    const bool starts = is_row && (row == 0 || slots[row - 1] != slot);
    const u32 before = __ballot_sync(0xffffffffu, starts) & (0xffffffffu >> (31 - lane));
    const int place = before ? lane - (31 - __clz(before)) : carried + lane;
    const bool opens = is_row && place % ROW_TILE == 0;
    const u32 opened = __ballot_sync(0xffffffffu, opens);
    const int tile = count + __popc(opened & (0xffffffffu >> (31 - lane))) - 1;
    if (opens) tiles[tile].x = row;
    const bool ends = is_row && (place % ROW_TILE == ROW_TILE - 1 || row + 1 == rows || slots[row + 1] != slot);
    if (ends) tiles[tile].y = place % ROW_TILE + 1;
    count += __popc(opened);
    carried = __shfl_sync(0xffffffffu, place, 31) + 1;
  }
  if (lane == 0) *num_tiles = count;
}

// One warp a (row, head): grid ((HEADS + 7) / 8, T), 256 threads. Numbers of a head lie as the matrix
// instruction takes them: [2 pairs of groups][4 lanes][2 groups][8].
extern "C" __global__ void __launch_bounds__(256) index_queries(
    const u16* q, const u16* w, const float* cosines,
    const float* sines, const int* slots, signed char* numbers,
    float2* weights, u32* below, int2* tiles,
    int* num_tiles, int rows, int pairs, int scale_bits) {
  let_consumer_start();
  wait_for_producer();
  const int head = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y;
  if (blockIdx.x == 0 && row == 0 && threadIdx.x < 32) build_tiles(slots, rows, tiles, num_tiles);
  if (head >= HEADS) return;
  const u64 at = ((u64)row * HEADS + head) * WIDTH;
  const uint2 raw = *(const uint2*)(q + at + 4 * lane);
  float v[4] = {bf16_of(raw.x & 0xffff), bf16_of(raw.x >> 16), bf16_of(raw.y & 0xffff), bf16_of(raw.y >> 16)};
  const int first_pair = (4 * lane - (WIDTH - 2 * pairs)) / 2;
  if (4 * lane >= WIDTH - 2 * pairs) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float c = cosines[(u64)row * pairs + first_pair + i], s = sines[(u64)row * pairs + first_pair + i];
      const float even = v[2 * i], odd = v[2 * i + 1];
      v[2 * i] = round_bf16(__fsub_rn(__fmul_rn(even, c), __fmul_rn(odd, s)));
      v[2 * i + 1] = round_bf16(__fadd_rn(__fmul_rn(even, s), __fmul_rn(odd, c)));
    }
  }
  float most = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
#pragma unroll
  for (int bit = 1; bit < 8; bit <<= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, bit));
  const float least = __int_as_float(0x01c00000);  // 6 * 2^-126
  const u32 scale_as = __float_as_uint(__fmul_rn(fmaxf(most, least), 0.16666667163372039794921875f));
  const u32 scale_bits_of = (scale_as + 0x7fffffu) & 0x7f800000u;
  const float scale = __uint_as_float(scale_bits_of);
  u32 bytes = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) bytes |= __shfl_sync(0xffffffffu, scale_bits_of >> 23, 8 * j) << (8 * j);
  const Fold f = fold(bytes);
  const int group = lane >> 3, shift = (f.shifts >> (8 * group)) & 255;
  u32 packed = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int n = shift == DEAD ? 0 : doubled(v[i], scale) * (1 << shift);
    packed |= (u32)(n & 255) << (8 * i);
  }
  const int place = (group >> 1) * 64 + ((lane & 7) >> 1) * 16 + (group & 1) * 8 + (lane & 1) * 4;
  *(u32*)(numbers + at + place) = packed;
  if (lane == 0) {
    const int here = row * HEADS + head;
    const float weight = round_bf16(__fmul_rn(bf16_of(w[here]), __int_as_float(scale_bits)));
    const float scaled = weight * unit_of(f.base);
    weights[here] = make_float2(scaled, -(__int_as_float(MAGIC_BITS) * scaled));
    below[here] = f.below;
  }
}
