// An index query head as whole numbers, by one warp: lane l has values 4 l to 4 l + 3. After common.cuh.

__device__ __forceinline__ float bf16_of(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float round_bf16(float v) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
  return bf16_of(h);
}
// Twice the nearest e2m1 number of a value over a scale, ties to even; `inverse` is one over the scale, and
// scales are powers of two, so products are what quotients would be.
__device__ __forceinline__ int doubled(float x, float inverse) {
  const float y = fminf(fmaxf(__fmul_rn(x, inverse), -6.f), 6.f);
  const int below = (__float_as_int(y) >> 23) & 255;
  const int octave = max(below, 127) - 127;                  // the spacing is half of 2^octave
  const float per_step = __int_as_float((128 - octave) << 23);
  return (int)rintf(__fmul_rn(y, per_step)) << octave;
}
__device__ __forceinline__ float one_over(u32 byte) {  // of the power of two with this biased exponent
  return __uint_as_float(byte < 254 ? (254 - byte) << 23 : byte == 254 ? 0x00400000u : 0u);
}

// Cosines and sines of a lane's two pairs; the first values of a head are not turned.
struct Angles { float cosines[2], sines[2]; bool turns; };
__device__ __forceinline__ Angles angles_of(const float* cosines, const float* sines, int row, int pairs) {
  const int lane = threadIdx.x & 31, first = (4 * lane - (WIDTH - 2 * pairs)) / 2;
  Angles a = {{1.f, 1.f}, {0.f, 0.f}, 4 * lane >= WIDTH - 2 * pairs};
  if (a.turns)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a.cosines[i] = cosines[(u64)row * pairs + first + i];
      a.sines[i] = sines[(u64)row * pairs + first + i];
    }
  return a;
}
// A lane's four numbers, their head's fold, and MAGIC less what keys without a sign add to a product.
struct Head { u32 numbers; Fold fold; int start; };
__device__ __forceinline__ Head turn_head(uint2 raw, const Angles& a) {
  const int lane = threadIdx.x & 31;
  float v[4] = {bf16_of(raw.x & 0xffff), bf16_of(raw.x >> 16), bf16_of(raw.y & 0xffff), bf16_of(raw.y >> 16)};
  if (a.turns)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float c = a.cosines[i], s = a.sines[i], even = v[2 * i], odd = v[2 * i + 1];
      v[2 * i] = round_bf16(__fsub_rn(__fmul_rn(even, c), __fmul_rn(odd, s)));
      v[2 * i + 1] = round_bf16(__fadd_rn(__fmul_rn(even, s), __fmul_rn(odd, c)));
    }
  float most = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
#pragma unroll
  for (int bit = 1; bit < 8; bit <<= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, bit));
  const float least = __int_as_float(0x01c00000);  // 6 * 2^-126
  const u32 scale_as = __float_as_uint(__fmul_rn(fmaxf(most, least), 0.16666667163372039794921875f));
  const u32 scale = (scale_as + 0x7fffffu) >> 23 & 255;  // biased exponent
  u32 bytes = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) bytes |= __shfl_sync(0xffffffffu, scale, 8 * j) << (8 * j);
  Head h = {0, fold(bytes), 0};
  const int shift = (h.fold.shifts >> (8 * (lane >> 3))) & 255;
  const float inverse = one_over(scale);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int n = shift == DEAD ? 0 : doubled(v[i], inverse) * (1 << shift);
    h.numbers |= (u32)(n & 255) << (8 * i);
  }
  const int sum = __dp4a((int)h.numbers, 0x01010101, 0);
  h.start = MAGIC_BITS - UNSIGNED * __reduce_add_sync(0xffffffffu, sum);
  return h;
}
// A head's weight, for numbers over 2^TERM_BITS.
__device__ __forceinline__ float weight_of(u32 bf16, float scale, const Fold& f) {
  return round_bf16(__fmul_rn(bf16_of(bf16), scale)) * unit_of(f.base) * (float)(1 << TERM_BITS);
}
