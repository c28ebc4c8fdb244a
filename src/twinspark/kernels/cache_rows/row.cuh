// Rows on their way into the caches: norm, rotation, rounding to a cache grid, storing.
//
// A warp takes a row; lane l holds values 128 j + 4 l and on, so a sum over a row can add halves, quarters
// and so on: the order of `kernels/sums.py`. Roundings are rules A, B and C of `kernels/rounding.py`, exact
// arithmetic. No system headers, so that the run-time compiler needs none; built without contraction of
// a * b + c.
//
// Macros: HEAD width of a row (128, 256 or 512), PAIRS rotated pairs at its end.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

#define ROW_PARTS (HEAD / 128)
#define ALL 0xffffffffu

enum { TYPE_BF16 = 0, TYPE_FP16 = 1, TYPE_FP32 = 2 };
enum { PLAIN = 0, WINDOW = 1, COMPRESSED = 2, INDEX_KEY = 3 };

__device__ __forceinline__ void wait_for_producer() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_consumer_start() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ u32 to_bf162(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float round_bf16(float x) { return low_float(to_bf162(x, 0.f)); }
__device__ __forceinline__ float half_to_float(u32 v) {
  float f;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(v));
  return f;
}
__device__ __forceinline__ u32 to_e4m3(float lo, float hi) {  // two bytes, saturating
  u16 d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ float from_e4m3(u32 byte) {
  u32 d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"((u16)byte));
  return half_to_float(d & 0xffff);
}
__device__ __forceinline__ float weight_at(const void* w, int type, int i) {
  if (type == TYPE_FP32) return ((const float*)w)[i];
  const u32 bits = ((const u16*)w)[i];
  return type == TYPE_BF16 ? low_float(bits) : half_to_float(bits);
}

typedef float Row[ROW_PARTS][4];

__device__ __forceinline__ void load_bf16(const u16* x, Row v) {
#pragma unroll
  for (int j = 0; j < ROW_PARTS; j++) {
    const uint2 w = __ldcg((const uint2*)(x + 128 * j) + (threadIdx.x & 31));
    v[j][0] = low_float(w.x); v[j][1] = high_float(w.x);
    v[j][2] = low_float(w.y); v[j][3] = high_float(w.y);
  }
}
__device__ __forceinline__ void store_bf16(u16* x, const Row v) {
#pragma unroll
  for (int j = 0; j < ROW_PARTS; j++)
    ((uint2*)(x + 128 * j))[threadIdx.x & 31] = make_uint2(to_bf162(v[j][0], v[j][1]), to_bf162(v[j][2], v[j][3]));
}
__device__ __forceinline__ void load_fp32(const float* x, Row v) {
#pragma unroll
  for (int j = 0; j < ROW_PARTS; j++) {
    const float4 w = __ldcg((const float4*)(x + 128 * j) + (threadIdx.x & 31));
    v[j][0] = w.x; v[j][1] = w.y; v[j][2] = w.z; v[j][3] = w.w;
  }
}
// Sum of a row's squares, halves first.
__device__ __forceinline__ float sum_squares(const Row v) {
  float s[ROW_PARTS][4];
#pragma unroll
  for (int j = 0; j < ROW_PARTS; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) s[j][k] = v[j][k] * v[j][k];
#pragma unroll
  for (int half = ROW_PARTS / 2; half > 0; half /= 2)
#pragma unroll
    for (int j = 0; j < half; j++)
#pragma unroll
      for (int k = 0; k < 4; k++) s[j][k] += s[j + half][k];
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2)
#pragma unroll
    for (int k = 0; k < 4; k++) s[0][k] += __shfl_xor_sync(ALL, s[0][k], bit);
  return (s[0][0] + s[0][2]) + (s[0][1] + s[0][3]);
}
// Norm weights of a lane's values.
__device__ __forceinline__ void load_weights(const void* weight, int type, Row w) {
#pragma unroll
  for (int j = 0; j < ROW_PARTS; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) w[j][k] = weight_at(weight, type, 128 * j + 4 * (threadIdx.x & 31) + k);
}
__device__ __forceinline__ void norm_row(Row v, const Row w, float eps) {
  const float inverse = rsqrtf(sum_squares(v) * (1.f / HEAD) + eps);
#pragma unroll
  for (int j = 0; j < ROW_PARTS; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) v[j][k] = round_bf16((v[j][k] * inverse) * w[j][k]);
}
// Angles of a lane's pairs: of dimensions that are not rotated, none.
struct Angles { float cos[ROW_PARTS][2], sin[ROW_PARTS][2]; };
__device__ __forceinline__ int pair_of(int j) { return (128 * j + 4 * (int)(threadIdx.x & 31) - HEAD) / 2 + PAIRS; }
__device__ __forceinline__ Angles load_angles(const float* cos, const float* sin) {
  Angles a;
#pragma unroll
  for (int j = 0; j < ROW_PARTS; j++)
    if (128 * (j + 1) > HEAD - 2 * PAIRS && pair_of(j) >= 0) {
#pragma unroll
      for (int k = 0; k < 2; k++) { a.cos[j][k] = __ldcg(cos + pair_of(j) + k); a.sin[j][k] = __ldcg(sin + pair_of(j) + k); }
    }
  return a;
}
__device__ __forceinline__ void rotate_row(Row v, const Angles& a) {
#pragma unroll
  for (int j = 0; j < ROW_PARTS; j++)
    if (128 * (j + 1) > HEAD - 2 * PAIRS && pair_of(j) >= 0) {
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        const float c = a.cos[j][k / 2], s = a.sin[j][k / 2], e = v[j][k], o = v[j][k + 1];
        v[j][k] = round_bf16(e * c - o * s);
        v[j][k + 1] = round_bf16(e * s + o * c);
      }
    }
}

// ---- roundings

__device__ __forceinline__ float power_of_two_at_least(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x007fffffu) & 0x7f800000u);
}
// Nearest e2m1 number, ties to the even code.
__device__ __forceinline__ float round_e2m1(float x) {
  x = fminf(fmaxf(x, -6.f), 6.f);
  const float below = __uint_as_float(__float_as_uint(x) & 0x7f800000u), step = fmaxf(below, 1.f) * 0.5f;
  return rintf(__fdiv_rn(x, step)) * step;
}
__device__ __forceinline__ u32 e2m1_code(float grid) {
  const float a = fabsf(grid);
  const u32 code = (a >= 0.5f) + (a >= 1.f) + (a >= 1.5f) + (a >= 2.f) + (a >= 3.f) + (a >= 4.f) + (a >= 6.f);
  return code | (__float_as_uint(grid) >> 31) << 3;
}
struct Tile { u32 values, scale; };  // four values: bytes, or nibbles; the scale byte of their tile

// Rounds a lane's four values with the other lanes of their tile, in place.
__device__ __forceinline__ Tile round_four(float v[4], int rule) {
  float peak = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
  peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 1));
  peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 2));
  const float wide = fmaxf(peak, __shfl_xor_sync(ALL, peak, 4));
  Tile t;
  float scale;
  if (rule == COMPRESSED) {
    t.scale = to_e4m3(__fdiv_rn(fmaxf(peak, 6.f * 0.001953125f), 6.f), 0.f) & 0xff;
    scale = from_e4m3(t.scale);
  } else {
    const bool is_key = rule == INDEX_KEY;
    const float least = is_key ? 6.f * 1.17549435e-38f : 1e-4f, reciprocal = is_key ? (float)(1.0 / 6.0) : (float)(1.0 / 448.0);
    scale = power_of_two_at_least(fmaxf(wide, least) * reciprocal);
    t.scale = __float_as_uint(scale) >> 23;
  }
  float q[4];
#pragma unroll
  for (int k = 0; k < 4; k++) q[k] = __fdiv_rn(v[k], scale);
  if (rule == WINDOW) {
    t.values = to_e4m3(q[0], q[1]) | to_e4m3(q[2], q[3]) << 16;
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = from_e4m3((t.values >> (8 * k)) & 0xff) * scale;
  } else {
    t.values = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      q[k] = round_e2m1(q[k]);
      t.values |= e2m1_code(q[k]) << (4 * k);
      v[k] = q[k] * scale;
    }
  }
  return t;
}

// ---- storing

// A table of rows: all in one page, or in pages that are steps of bytes apart.
struct Table { u8 *values, *scales; int format, page_rows, value_step, scale_step; };

// A row, rounded to `v` and `tiles`, to row `target` of a table.
__device__ __forceinline__ void store_row(const Row v, const Tile tiles[ROW_PARTS], const Table& table, int target) {
  const int lane = threadIdx.x & 31, format = table.format, page_rows = table.page_rows;
  const int page = target / page_rows, in_page = target - page * page_rows;
  u8* to = table.values + (u64)page * table.value_step;
  if (format == PLAIN) {
    store_bf16((u16*)to + (u64)in_page * HEAD, v);
    return;
  }
  const int value_bytes = format == WINDOW ? HEAD : HEAD / 2, tile = format == COMPRESSED ? 16 : 32;
  u8* scale_to = table.scales + (u64)page * table.scale_step + (u64)in_page * (HEAD / tile);
  to += (u64)in_page * value_bytes;
#pragma unroll
  for (int j = 0; j < ROW_PARTS; j++) {
    if (format == WINDOW) *(u32*)(to + 128 * j + 4 * lane) = tiles[j].values;
    else *(u16*)(to + 64 * j + 2 * lane) = (u16)tiles[j].values;
    if (4 * lane % tile == 0) scale_to[(128 * j + 4 * lane) / tile] = (u8)tiles[j].scale;
  }
}
