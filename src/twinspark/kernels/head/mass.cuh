// The mass of an id in top-p: 2^35 exp(-depth) rounded down, where depth = peak - logit / temperature in float64.
// Included by choose.cu behind cluster.cuh.
//
// Nearly all ids get it from pairs of fp32 (float64 runs at 1/64 of their speed on GB10). `quick_mass` says when
// it cannot know: where a whole number lies within GUARD of its value; `exact_mass` decides there, so the
// whole numbers are the same. With u = 2^-24, relative to 2^-y where y = depth / log 2 <= 36:
//   y, the pair p + e                  7 u^2 y <= 2^-40.0, times log 2           2^-40.5
//   z = r + e rounded, in z^2          2 * 2^-8 * 2^-32 / 4                      2^-41.0
//   z^2, and c2 + ..., rounded         2^-42.0 + 2^-42.4
//   c1 e, and the sum `rest`, rounded  2^-42.0 + 2^-41.0
//   sums of the low part, z^5, tables  2^-41.0 + 2^-46
//   the float64 side: division, difference, exp, with |peak| <= 1024             2^-41.9
// which is 6.7 * 2^-41 together: 429 units of 2^-47. tests/kernels/test_head_mass.py holds the same arithmetic.
#define WEIGHT_SCALE 34359738368.  // 2^35
#define WEIGHT_SPAN 24.3           // octaves of e below which a mass is less than one
#define POWERS 128                 // 2^(-i / 128) as pairs
#define MOST_INVERSE 1e30f         // of a temperature in fp32; beyond it all is float64
#define GUARD 512                  // of 2^-47

struct Pair { float high, low; };

struct Depths {  // of a row
  float top;        // largest logit
  float inverse;    // of the temperature, MOST_INVERSE at most
  Pair octaves;     // log2(e) / temperature
  bool is_plain;    // numbers that the bound above holds for
  double temperature, peak;
};
__device__ __forceinline__ Pair pair_of(double v) {
  const float high = (float)v;
  return {high, (float)(v - (double)high)};
}
__device__ __forceinline__ Depths depths_of(float top, double temperature) {
  const double peak = (double)top / temperature;
  const bool is_plain = temperature >= 1. / 64. && temperature <= 64. && fabs(peak) <= 1024.;
  return {top, fminf((float)(1. / temperature), MOST_INVERSE), pair_of(1.4426950408889634 / temperature), is_plain, temperature, peak};
}
__device__ __noinline__ u64 exact_mass(float x, double temperature, double peak) {
  const double depth = peak - (double)x / temperature;
  return depth <= WEIGHT_SPAN ? (u64)floor(exp(-depth) * WEIGHT_SCALE) : 0;
}
__device__ __forceinline__ void fill_powers(Pair* powers) {
  if (threadIdx.x < POWERS) powers[threadIdx.x] = pair_of(exp2((double)threadIdx.x * (-1. / POWERS)));
}
// The mass where `is_sure`. Of plain rows; far below the peak it is 0 and sure.
__device__ __forceinline__ u64 quick_mass(const Pair* powers, const Depths& d, float x, bool& is_sure) {
  const float round = 12582912.f;  // 1.5 * 2^23
  const float under = d.top - x, back = under - d.top, under_low = (d.top - (under - back)) + (-x - back);
  const float p = fminf(under * d.octaves.high, 36.f);
  float e = __fmaf_rn(under, d.octaves.high, -p);
  e = __fmaf_rn(under, d.octaves.low, e);
  e = __fmaf_rn(under_low, d.octaves.high, e);
  const float shifted = __fmaf_rn(p, (float)POWERS, round);
  const u32 steps = __float_as_uint(shifted) - __float_as_uint(round);
  const float r = __fmaf_rn(shifted - round, -1.f / POWERS, p), z = r + e;
  // 2^-z - 1 = first + rest; -log 2 as a pair, then log(2)^2 / 2, -log(2)^3 / 6, log(2)^4 / 24
  const float first = r * -0.693147182f;
  float low = __fmaf_rn(r, -0.693147182f, -first);
  low = __fmaf_rn(r, 1.90465421e-9f, low);
  low = __fmaf_rn(e, -0.693147182f, low);
  const float series = __fmaf_rn(z, __fmaf_rn(z, 0.00961812911f, -0.0555041087f), 0.240226507f);
  const float rest = __fmaf_rn(z * z, series, low);
  // times 2^(-i / 128): a sum of 24 bits, and what is left
  const Pair power = powers[steps % POWERS];
  const float change = power.high * first, change_low = __fmaf_rn(power.high, first, -change);
  const float sum = power.high + change;
  low = ((change - (sum - power.high)) + change_low) + power.low;
  low = __fmaf_rn(power.high, rest, __fmaf_rn(power.low, first, low));
  const long long whole =
      ((long long)__float2int_rn(sum * 16777216.f) << 23) + __float2int_rn(low * 140737488355328.f);
  const u32 octave = 12 + steps / POWERS;
  const u64 least = (u64)(whole - GUARD) >> octave;
  is_sure = (u32)least == (u32)((u64)(whole + GUARD) >> octave);  // they differ by one at most
  return least;
}
