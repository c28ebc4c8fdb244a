// What both kernels of the residual boundary share: every sum of a row, in one order.
//
// A lane owns 8 columns of all four streams of a row; four lanes make a group of 32 columns, four
// groups a half of 128, two halves a pair. Order of a row's sums: over a lane's columns, over its
// group (for mixing values inside the matrix instruction), groups of a half ascending, the halves of
// a pair, pairs as a butterfly of 32. Mixing weights are fp32 and enter as three bf16 planes that add up to
// them exactly; streams are bf16, so all products are exact and sums fp32.
//
// Macros: HIDDEN columns D, a multiple of 128, at most 8192. No system headers. Built without contraction.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

#define STREAMS 4
#define VALUES 24     // mixing values: 4 pre, 4 post, 16 comb
#define SQUARES 24    // place of the sum of squares of all streams among a row's sums
#define SUMS 25
#define TILE 8        // rows
#define HALVES (HIDDEN / 128)
#define PAIRS ((HALVES + 1) / 2)

__device__ __forceinline__ void wait_for_producer() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_consumer_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
// A weight, which no kernel writes: asked for before the wait, where plain loads would sink behind it.
__device__ __forceinline__ float4 load_early(const float* p) {
  float4 v;
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ u32 shared_address(const void* p) {
  u32 at;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(p));
  return at;
}
__device__ __forceinline__ void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ float reciprocal(float v) {  // 1 ulp
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

struct Eight { u32 w[4]; };  // 8 bf16
__device__ __forceinline__ Eight load_eight(const u16* p) {
  const uint4 v = *(const uint4*)p;
  return {v.x, v.y, v.z, v.w};
}
__device__ __forceinline__ void store_eight(u16* p, const Eight& e) {
  *(uint4*)p = make_uint4(e.w[0], e.w[1], e.w[2], e.w[3]);
}
// One shard's 8 outputs, rounded to bf16 as they travel between ranks, onto those before it.
__device__ __forceinline__ void add_shard(float y[8], const Eight& e, bool first) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    y[2 * i] = first ? low(e.w[i]) : y[2 * i] + low(e.w[i]);
    y[2 * i + 1] = first ? high(e.w[i]) : y[2 * i + 1] + high(e.w[i]);
  }
}
__device__ __forceinline__ Eight load_narrowed(const float* p) {
  const float4 a = ((const float4*)p)[0], b = ((const float4*)p)[1];
  return {pack(a.x, a.y), pack(a.z, a.w), pack(b.x, b.y), pack(b.z, b.w)};
}

struct Coefs { float pre[4], post[4], comb[16]; };  // comb[4 * i + j]: old stream i in new stream j
__device__ __forceinline__ void load_four(float to[4], const float* from) {
  const float4 v = *(const float4*)from;
  to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
}
// New streams from old ones and the (summed, not yet rounded) output of a sublayer.
__device__ __forceinline__ void expand(Eight s[4], const float y[8], const Coefs& c) {
#pragma unroll
  for (int p = 0; p < 4; p++) {
    float a[4], b[4];
#pragma unroll
    for (int i = 0; i < 4; i++) { a[i] = low(s[i].w[p]); b[i] = high(s[i].w[p]); }
    const u32 out = pack(y[2 * p], y[2 * p + 1]);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float u = c.comb[j] * a[0], v = c.comb[j] * b[0];
#pragma unroll
      for (int i = 1; i < 4; i++) {
        u = fmaf(c.comb[4 * i + j], a[i], u);
        v = fmaf(c.comb[4 * i + j], b[i], v);
      }
      s[j].w[p] = pack(fmaf(c.post[j], low(out), u), fmaf(c.post[j], high(out), v));
    }
  }
}
__device__ __forceinline__ Eight collapse(const Eight s[4], const float pre[4]) {
  Eight e;
#pragma unroll
  for (int p = 0; p < 4; p++) {
    float u = pre[0] * low(s[0].w[p]), v = pre[0] * high(s[0].w[p]);
#pragma unroll
    for (int i = 1; i < 4; i++) {
      u = fmaf(pre[i], low(s[i].w[p]), u);
      v = fmaf(pre[i], high(s[i].w[p]), v);
    }
    e.w[p] = pack(u, v);
  }
  return e;
}
__device__ __forceinline__ Eight mean_of_streams(const Eight s[4]) {
  Eight e;
#pragma unroll
  for (int p = 0; p < 4; p++)
    e.w[p] = pack((((low(s[0].w[p]) + low(s[1].w[p])) + low(s[2].w[p])) + low(s[3].w[p])) * 0.25f,
                  (((high(s[0].w[p]) + high(s[1].w[p])) + high(s[2].w[p])) + high(s[3].w[p])) * 0.25f);
  return e;
}
__device__ __forceinline__ float squares(const Eight& e) {
  float s = 0.f;
#pragma unroll
  for (int p = 0; p < 4; p++) s = fmaf(high(e.w[p]), high(e.w[p]), fmaf(low(e.w[p]), low(e.w[p]), s));
  return s;
}
__device__ __forceinline__ float group_sum(float s) {  // over the four lanes of a group
  s += __shfl_xor_sync(0xffffffffu, s, 1);
  return s + __shfl_xor_sync(0xffffffffu, s, 2);
}
// A row's sum from those of its groups, 16-byte aligned in shared memory, by every warp for itself.
__device__ __forceinline__ float sum_of_groups(const float* groups) {
  const int lane = threadIdx.x & 31;
  float pair = 0.f;
  if (lane < PAIRS) {
    const float* p = groups + 8 * lane;
    pair = ((p[0] + p[1]) + p[2]) + p[3];
    if (2 * lane + 1 < HALVES) pair += ((p[4] + p[5]) + p[6]) + p[7];
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) pair += __shfl_xor_sync(0xffffffffu, pair, step);
  return pair;
}
// The same where a thread has all pairs: pairs[i] is 0 past the last.
__device__ __forceinline__ float pairs_sum(float pairs[32]) {
#pragma unroll
  for (int level = 0; level < 5; level++)
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (i < 16 >> level) pairs[i] += pairs[i + (16 >> level)];
  return pairs[0];
}
__device__ __forceinline__ float inverse_rms(float squares, int count, float eps) {
  return __frsqrt_rn(squares / (float)count + eps);
}
__device__ __forceinline__ Eight normed(const Eight& e, float inverse, const float w[8]) {
  Eight out;
#pragma unroll
  for (int p = 0; p < 4; p++)
    out.w[p] = pack(low(e.w[p]) * inverse * w[2 * p], high(e.w[p]) * inverse * w[2 * p + 1]);
  return out;
}

// ---- mixing values

// Weights of a warp's group of columns: parts are outputs 0-7, 8-15, 16-23, a pair two columns. As they come, or
// in planes, once for many rows.
struct Lanes { float4 v[STREAMS][3][2]; };
struct Planes { u32 hi[STREAMS][2][3][2], mid[STREAMS][2][3][2], lo[STREAMS][2][3][2]; };
struct HalfPlanes { u32 hi[3][2], mid[3][2], lo[3][2]; };  // of a stream's half of 8 columns
__device__ __forceinline__ void split(float a, float b, u32& hi, u32& mid, u32& lo) {
  hi = pack(a, b);
  a -= low(hi); b -= high(hi);
  mid = pack(a, b);
  lo = pack(a - low(mid), b - high(mid));
  asm volatile("" : "+r"(hi), "+r"(mid), "+r"(lo));  // before the wait, too
}
__device__ __forceinline__ void split_half(HalfPlanes& f, const float4 v[3][2], int h) {
#pragma unroll
  for (int part = 0; part < 3; part++) {
    const float4 w = v[part][h];
    split(w.x, w.y, f.hi[part][0], f.mid[part][0], f.lo[part][0]);
    split(w.z, w.w, f.hi[part][1], f.mid[part][1], f.lo[part][1]);
  }
}
// fn as `prepare_site` lays it out: [group][stream][part][half of 8 columns][lane][4].
__device__ __forceinline__ void load_lanes(Lanes& f, const float* fn, int group) {
  const float* at = fn + (u64)group * (STREAMS * 3 * 2 * 128) + 4 * (threadIdx.x & 31);
#pragma unroll
  for (int j = 0; j < STREAMS; j++)
#pragma unroll
    for (int part = 0; part < 3; part++)
#pragma unroll
      for (int h = 0; h < 2; h++) f.v[j][part][h] = load_early(at + ((j * 3 + part) * 2 + h) * 128);
}
__device__ __forceinline__ void load_planes(Planes& f, const float* fn, int group) {
  Lanes lanes;
  load_lanes(lanes, fn, group);
#pragma unroll
  for (int j = 0; j < STREAMS; j++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      HalfPlanes one;
      split_half(one, lanes.v[j], h);
#pragma unroll
      for (int part = 0; part < 3; part++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          f.hi[j][h][part][i] = one.hi[part][i];
          f.mid[j][h][part][i] = one.mid[part][i];
          f.lo[j][h][part][i] = one.lo[part][i];
        }
    }
}
__device__ __forceinline__ void get_half(HalfPlanes& to, const Lanes& f, int j, int h) { split_half(to, f.v[j], h); }
__device__ __forceinline__ void get_half(HalfPlanes& to, const Planes& f, int j, int h) {
#pragma unroll
  for (int part = 0; part < 3; part++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      to.hi[part][i] = f.hi[j][h][part][i];
      to.mid[part][i] = f.mid[j][h][part][i];
      to.lo[part][i] = f.lo[j][h][part][i];
    }
}
__device__ __forceinline__ void mma(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Mixing values of 8 rows under way, by the planes of weights: the first alone, and the others.
struct Products { float top[4] = {}, rest[4] = {}, last[4] = {}; };
// Two registers of a stream of each of TILES times 8 rows. The tiles' instructions alternate, as those of one wait for
// each other.
template <int TILES> __device__ __forceinline__ void multiply(
    Products (&to)[TILES], const HalfPlanes& f, const u32 (&b0)[TILES], const u32 (&b1)[TILES]) {
#pragma unroll
  for (int n = 0; n < TILES; n++) mma(to[n].rest, f.lo[0][0], f.lo[1][0], f.lo[0][1], f.lo[1][1], b0[n], b1[n]);
#pragma unroll
  for (int n = 0; n < TILES; n++) mma(to[n].last, 0, f.lo[2][0], 0, f.lo[2][1], b0[n], b1[n]);
#pragma unroll
  for (int n = 0; n < TILES; n++) mma(to[n].top, f.hi[0][0], f.hi[1][0], f.hi[0][1], f.hi[1][1], b0[n], b1[n]);
#pragma unroll
  for (int n = 0; n < TILES; n++) mma(to[n].rest, f.mid[0][0], f.mid[1][0], f.mid[0][1], f.mid[1][1], b0[n], b1[n]);
#pragma unroll
  for (int n = 0; n < TILES; n++) mma(to[n].last, f.hi[2][0], f.mid[2][0], f.hi[2][1], f.mid[2][1], b0[n], b1[n]);
}
// A warp's share of the sums of 8 rows into to[SUMS][TILE], over its 32 columns: mixing values and, of a lane's
// columns of all streams, squares. `coarse` is this lane's mark for rows 2q and 2q + 1: only the first plane counts,
// which is fn rounded to bf16.
__device__ __forceinline__ void put_sums(float* to, const Products& p, float squares, const u8 coarse[2]) {
  const int g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
  float v[3][2];
#pragma unroll
  for (int n = 0; n < 2; n++) {
    v[0][n] = coarse[n] ? p.top[n] : p.top[n] + p.rest[n];
    v[1][n] = coarse[n] ? p.top[2 + n] : p.top[2 + n] + p.rest[2 + n];
    v[2][n] = coarse[n] ? p.last[n] : p.last[n] + p.last[2 + n];
  }
#pragma unroll
  for (int part = 0; part < 3; part++)
    *(float2*)(to + (8 * part + g) * TILE + 2 * q) = make_float2(v[part][0], v[part][1]);
  const float all = group_sum(squares);
  if (q == 0) to[SQUARES * TILE + g] = all;
}

// ---- from mixing values to weights

struct Mixer { const float *scale, *base; float *pre, *post, *comb; int iters; float eps, norm_eps; };

// Alternating normalization of 4 x 4 weights, columns last. Factors of rows and columns instead of the
// weights themselves: comb[i][j] = u[i] k[i][j] v[j].
__device__ __forceinline__ void sinkhorn(const float* e, float* comb, int iters, float eps) {
  float k[16], u[4] = {1.f, 1.f, 1.f, 1.f}, v[4] = {1.f, 1.f, 1.f, 1.f};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float* r = e + 4 * i * TILE;
    const float inverse = reciprocal((r[0] + r[TILE]) + (r[2 * TILE] + r[3 * TILE]));
#pragma unroll
    for (int j = 0; j < 4; j++) k[4 * i + j] = fmaf(r[j * TILE], inverse, eps);
  }
#pragma unroll 1
  for (int step = 0; step < iters; step++) {
    if (step)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float a = fmaf(k[4 * i + 1], v[1], k[4 * i] * v[0]);
        const float b = fmaf(k[4 * i + 3], v[3], k[4 * i + 2] * v[2]);
        u[i] *= reciprocal(fmaf(a + b, u[i], eps));
      }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float a = fmaf(k[4 + j], u[1], k[j] * u[0]);
      const float b = fmaf(k[12 + j], u[3], k[8 + j] * u[2]);
      v[j] *= reciprocal(fmaf(a + b, v[j], eps));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    *(float4*)(comb + 4 * i) = make_float4(u[i] * k[4 * i] * v[0], u[i] * k[4 * i + 1] * v[1],
                                           u[i] * k[4 * i + 2] * v[2], u[i] * k[4 * i + 3] * v[3]);
}
template <int THREADS> __device__ __forceinline__ void sync_threads() {
  if (THREADS == 32) __syncwarp();
  else __syncthreads();
}
// What finish_mix takes: the sums, but for the inverse root mean square in place of the sum of squares.
__device__ __forceinline__ float finish_sum(float sum, int i, float norm_eps) {
  return i / TILE == SQUARES ? inverse_rms(sum, STREAMS * HIDDEN, norm_eps) : sum;
}
// Sums [SUMS][TILE] of up to 8 rows to their weights; `thread` is one of THREADS, a warp or the block.
template <int THREADS> __device__ __forceinline__ void finish_mix(
    const float* sums, float* values, float* powers, const Mixer& mixer, int first, int rows, int thread) {
#pragma unroll
  for (int i = thread; i < VALUES * TILE; i += THREADS) {
    const int value = i / TILE, n = i % TILE, part = value < 4 ? 0 : (value < 8 ? 1 : 2);
    values[i] = sums[i] * sums[SQUARES * TILE + n] * mixer.scale[part] + mixer.base[value];
  }
  sync_threads<THREADS>();
#pragma unroll
  for (int i = thread; i < VALUES * TILE; i += THREADS) {
    const int value = i / TILE, n = i % TILE;
    const float* r = values + (value & ~3) * TILE + n;  // of comb: its row's values
    const float most = fmaxf(fmaxf(r[0], r[TILE]), fmaxf(r[2 * TILE], r[3 * TILE]));
    const float power = expf(value < 8 ? -values[i] : values[i] - most);
    if (value >= 8) {
      powers[i - 8 * TILE] = power;
    } else if (first + n < rows) {
      const float gate = 1.f / (1.f + power);
      if (value < 4) mixer.pre[(u64)(first + n) * 4 + value] = gate + mixer.eps;
      else mixer.post[(u64)(first + n) * 4 + value - 4] = 2.f * gate;
    }
  }
  sync_threads<THREADS>();
  if (thread < TILE && first + thread < rows)
    sinkhorn(powers + thread, mixer.comb + (u64)(first + thread) * 16, mixer.iters, mixer.eps);
}
