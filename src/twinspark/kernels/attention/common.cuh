// What the attention kernels share: where cached rows lie and how they are decoded, matrix
// instructions, and the order of every sum.
//
// Canonical order of a (row, head): the list is cut into blocks of BLOCK entries. A score is the sum of four
// quarters of the head, added as two pairs; each is one tensor-core chain, 16 dimensions a step, ascending. A
// block has its own peak, its own weights (rounded to bf16; their sum is that of the rounded ones) and its
// own sum of weighted rows, one chain of 16 entries a step. Blocks are merged ascending by `merge`. So who
// computes a block, and how many rows share a call, change no bit. No system headers, so that the run-time
// compiler needs none; built without contraction of a * b + c.
//
// Macros: HEAD size of a head (128, 256 or 512), PAIRS rotated pairs at its end.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

#define BLOCK 64
#define PITCH (HEAD + 8)      // of rows in shared memory, in values
#define CHUNKS (HEAD / 16)    // a lane decodes 16 values
#define LANE_ROWS (32 / CHUNKS)
#define LOG2E 1.4426950408889634f
#define MINUS_INF __int_as_float(0xff800000)

enum { PLAIN = 0, WINDOW = 1, COMPRESSED = 2 };

// ---- order between kernels

__device__ __forceinline__ void wait_for_producer() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_consumer_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// ---- copies past registers, of 16 bytes; `bytes` 0 leaves zeros

__device__ __forceinline__ void copy_16(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- numbers

__device__ __forceinline__ u32 smem_address(const void* p) {
  u32 a;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
  return a;
}
__device__ __forceinline__ u32 to_bf162(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float exp_of(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x * LOG2E));
  return y;
}
__device__ __forceinline__ u32 mul_pair(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 rotate_pair(u32 w, float cos, float sin) {
  const float e = low_float(w), o = high_float(w);
  return to_bf162(e * cos - o * sin, e * sin + o * cos);
}
__device__ __forceinline__ uint4 rotate_eight(uint4 v, float4 cos, float4 sin) {
  return make_uint4(rotate_pair(v.x, cos.x, sin.x), rotate_pair(v.y, cos.y, sin.y),
                    rotate_pair(v.z, cos.z, sin.z), rotate_pair(v.w, cos.w, sin.w));
}

// ---- merging blocks

struct Merge { float peak, alpha, beta; };  // what is there times alpha, plus the block times beta
__device__ __forceinline__ Merge merge_peaks(float peak, float block_peak) {
  Merge m;
  m.peak = fmaxf(peak, block_peak);
  m.alpha = exp_of(peak - m.peak);
  m.beta = exp_of(block_peak - m.peak);
  return m;
}
__device__ __forceinline__ float merge(float there, float block, float alpha, float beta) {
  return fmaf(block, beta, there * alpha);
}
struct Finish { float factor, total; };  // the output is sum * factor / total
__device__ __forceinline__ Finish finish(float peak, float total, float sink) {
  const float top = fmaxf(peak, sink);
  Finish f;
  f.factor = exp_of(peak - top);
  f.total = fmaf(total, f.factor, exp_of(sink - top));
  return f;
}

// Four dimensions of a head whose blocks come one after the other.
struct Running { float peak, total, v[4]; };
__device__ __forceinline__ Running running() { return {MINUS_INF, 0.f, {0.f, 0.f, 0.f, 0.f}}; }
__device__ __forceinline__ void add_block(Running& r, float2 stat, float4 sum) {  // (peak, total) of the block
  if (stat.x == MINUS_INF) return;  // no entries, and no sums were written
  const Merge m = merge_peaks(r.peak, stat.x);
  r.peak = m.peak;
  r.total = merge(r.total, stat.y, m.alpha, m.beta);
  r.v[0] = merge(r.v[0], sum.x, m.alpha, m.beta); r.v[1] = merge(r.v[1], sum.y, m.alpha, m.beta);
  r.v[2] = merge(r.v[2], sum.z, m.alpha, m.beta); r.v[3] = merge(r.v[3], sum.w, m.alpha, m.beta);
}
struct Turn { float cos[2], sin[2]; };  // back, of four dimensions from `dim` on
__device__ __forceinline__ Turn turn_of(const float* cos, const float* sin, int dim) {
  const int pair = (dim - HEAD) / 2 + PAIRS;
  Turn t = {{1.f, 1.f}, {0.f, 0.f}};
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (pair >= 0) { t.cos[i] = __ldcg(cos + pair + i); t.sin[i] = -__ldcg(sin + pair + i); }
  return t;
}
// Divides, rounds, rotates back and stores four dimensions.
__device__ __forceinline__ void store_four(u16* out, const Running& r, float sink, const Turn& turn) {
  const Finish f = finish(r.peak, r.total, sink);
  u32 w[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    w[i] = to_bf162(__fdiv_rn(r.v[2 * i] * f.factor, f.total), __fdiv_rn(r.v[2 * i + 1] * f.factor, f.total));
    w[i] = rotate_pair(w[i], turn.cos[i], turn.sin[i]);
  }
  *(uint2*)out = make_uint2(w[0], w[1]);
}

// ---- rows

// Cached rows: row i lies in page i / page_rows; `value_step` and `scale_step` are bytes of a page.
struct Source { const u8 *values, *scales; int format, page_rows, value_step, scale_step; };
struct Place { const u8 *values, *scales; };

__device__ __forceinline__ Place place_of(const Source& s, int row) {
  const int page = row / s.page_rows, in_page = row - page * s.page_rows;
  const int bytes = s.format == PLAIN ? 2 * HEAD : (s.format == WINDOW ? HEAD : HEAD / 2);
  Place p;
  p.values = s.values + (u64)page * s.value_step + (u64)in_page * bytes;
  p.scales = s.scales + (u64)page * s.scale_step + (u64)in_page * (s.format == WINDOW ? HEAD / 32 : HEAD / 16);
  return p;
}
struct Raw { uint4 a, b; u32 scale; };  // 16 values as they lie: 32, 16 or 8 bytes

__device__ __forceinline__ Raw load_raw(const Place& p, int format, int chunk) {
  Raw r;
  r.a = r.b = make_uint4(0, 0, 0, 0);
  r.scale = 0;
  if (p.values == nullptr) return r;
  if (format == PLAIN) {
    r.a = __ldcg((const uint4*)p.values + 2 * chunk);
    r.b = __ldcg((const uint4*)p.values + 2 * chunk + 1);
  } else if (format == WINDOW) {
    r.a = __ldcg((const uint4*)p.values + chunk);
    r.scale = __ldcg(p.scales + chunk / 2);
  } else {
    const uint2 v = __ldcg((const uint2*)p.values + chunk);
    r.a.x = v.x; r.a.y = v.y;
    r.scale = __ldcg(p.scales + chunk);
  }
  return r;
}
// e4m3 bits moved to where bf16 has them are 2^-120 of their value; both products are exact.
#define TWO_120 0x7b807b80u
__device__ __forceinline__ u32 e4m3_pair(u32 x, u32 scale) {  // bytes 0 and 2
  const u32 v = ((x << 8) & 0x80008000u) | ((x << 4) & 0x07f007f0u);
  return mul_pair(mul_pair(v, TWO_120), scale);
}
// Eight e2m1 values: their bf16 bytes are looked up, four at a time, their signs are moved to byte ends.
__device__ __forceinline__ uint4 e2m1_eight(u32 v, u32 scale) {
  const u32 at = v & 0x77777777u, shifted = v << 4;
  u32 out[4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 pick = half ? at >> 16 : at, sign = __byte_perm(v, shifted, half ? 0x3726 : 0x1504) & 0x80808080u;
    const u32 high = __byte_perm(0x3f3f3f00u, 0x40404040u, pick) | sign, low = __byte_perm(0xc0800000u, 0xc0804000u, pick);
    out[2 * half] = mul_pair(__byte_perm(low, high, 0x5140), scale);
    out[2 * half + 1] = mul_pair(__byte_perm(low, high, 0x7362), scale);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}
__device__ __forceinline__ uint4 e4m3_eight(u32 a, u32 b, u32 scale) {
  return make_uint4(e4m3_pair(__byte_perm(a, 0, 0x4140), scale), e4m3_pair(__byte_perm(a, 0, 0x4342), scale),
                    e4m3_pair(__byte_perm(b, 0, 0x4140), scale), e4m3_pair(__byte_perm(b, 0, 0x4342), scale));
}
__device__ __forceinline__ u32 e8m0_scale(u32 byte) { return byte * 0x00800080u; }  // bf16 exponent bits, twice
__device__ __forceinline__ u32 e4m3_scale(u32 byte) { return mul_pair(((byte & 0x7f) << 4) * 0x00010001u, TWO_120); }
// Values 0 to 7 or, `second`, 8 to 15 of the 16, as bf16.
__device__ __forceinline__ uint4 decode_half(const Raw& r, int format, bool second) {
  if (format == PLAIN) return second ? r.b : r.a;
  if (format == WINDOW) return e4m3_eight(second ? r.a.z : r.a.x, second ? r.a.w : r.a.y, e8m0_scale(r.scale));
  return e2m1_eight(second ? r.a.y : r.a.x, e4m3_scale(r.scale));
}

// A query's list: `pool_num` pool rows, then window rows; -1 and what lies past the end are no entry.
struct List { const int *pool, *window; int pool_num, window_num; };

__device__ __forceinline__ int entry_of(const List& list, int e) {
  if (e < list.pool_num) return __ldcg(list.pool + e);
  e -= list.pool_num;
  return e < list.window_num ? __ldcg(list.window + e) : -1;
}
