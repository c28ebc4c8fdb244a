// What the products with plain weights share. A weight is the exact sum of bf16 planes (one for bf16, two
// for fp16, three for fp32) and rows are bf16, so all products are exact; sums are fp32.
//
// Canonical order: inputs in chunks of 512, a chunk in steps of 16 inputs ascending, the first plane on one
// accumulator and the others on a second, added at the chunk's end; chunk sums are added ascending. In
// groups of 32 inputs a step's 16 are those of four lanes' 8 neighbours: input 8q + 4h + e of a group is
// in step h. Grid, kernel and number of rows change no bit.
//
// Macros: TYPE of the weights (below). No system headers. Built without contraction.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define TYPE_BF16 0
#define TYPE_FP16 1
#define TYPE_FP32 2
#define GROUP 32  // inputs
#define CHUNK_GROUPS 16
#define PLANES (TYPE + 1)
#define LOADS (TYPE == TYPE_FP32 ? 4 : 2)  // of 16 bytes: a lane's 16 weights of a tile of 16 outputs by a group

__device__ __forceinline__ void wait_for_producer() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_consumer_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ float half_to_float(u32 v) {
  float f;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(v));
  return f;
}
__device__ __forceinline__ void mma(float c[4], const u32 a[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct Stored { uint4 v[LOADS]; };             // a lane's share of a tile and group as it lies in memory
struct Planes { u32 a[2][PLANES][4]; };        // the same as matrix operands, by step and plane

// Weights lie as [outputs / 16][groups][LOADS][32 lanes][16 bytes].
__device__ __forceinline__ Stored load_stored(const uint4* tile, int group) {
  Stored s;
#pragma unroll
  for (int i = 0; i < LOADS; i++) {  // volatile: plain loads of the first would sink behind the wait
    const uint4* p = tile + ((u64)group * LOADS + i) * 32 + (threadIdx.x & 31);
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(s.v[i].x), "=r"(s.v[i].y), "=r"(s.v[i].z), "=r"(s.v[i].w) : "l"(p));
  }
  return s;
}
// The same where other warps of the block read them, too.
__device__ __forceinline__ Stored load_near(const uint4* tile, int group) {
  Stored s;
#pragma unroll
  for (int i = 0; i < LOADS; i++) s.v[i] = __ldg(tile + ((u64)group * LOADS + i) * 32 + (threadIdx.x & 31));
  return s;
}
__device__ __forceinline__ void split(float a, float b, u32 planes[PLANES]) {
  planes[0] = pack(a, b);
#pragma unroll
  for (int p = 1; p < PLANES; p++) {
    a -= low(planes[p - 1]);
    b -= high(planes[p - 1]);
    planes[p] = pack(a, b);
  }
}
// Output half `part` of step `h`: its two pairs of inputs, as one 8-byte run of 16-bit or 16 of 32-bit.
__device__ __forceinline__ void to_planes(Planes& to, const Stored& s) {
#pragma unroll
  for (int part = 0; part < 2; part++)
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        u32 planes[PLANES];
#if TYPE == TYPE_FP32
        const uint4 v = s.v[2 * part + h];
        split(__uint_as_float(pair ? v.z : v.x), __uint_as_float(pair ? v.w : v.y), planes);
#else
        const uint4 v = s.v[part];
        const u32 w = h ? (pair ? v.w : v.z) : (pair ? v.y : v.x);
#if TYPE == TYPE_BF16
        planes[0] = w;
#else
        split(half_to_float(w & 0xffff), half_to_float(w >> 16), planes);
#endif
#endif
#pragma unroll
        for (int p = 0; p < PLANES; p++) to.a[h][p][part + 2 * pair] = planes[p];
      }
}
// Accumulators of a tile of 16 outputs by 8 rows.
struct Sums { float top[4]; float rest[PLANES > 1 ? 4 : 1]; };
__device__ __forceinline__ void clear(Sums& s) {
#pragma unroll
  for (int i = 0; i < 4; i++) s.top[i] = 0.f;
#pragma unroll
  for (int i = 0; i < (PLANES > 1 ? 4 : 1); i++) s.rest[i] = 0.f;
}
// A group of inputs; x is a lane's 8 inputs of its row.
__device__ __forceinline__ void multiply(Sums& s, const Planes& w, const uint4& x) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const u32 b0 = h ? x.z : x.x, b1 = h ? x.w : x.y;
#pragma unroll
    for (int p = PLANES - 1; p > 0; p--) mma(s.rest, w.a[h][p], b0, b1);
    mma(s.top, w.a[h][0], b0, b1);
  }
}
__device__ __forceinline__ float chunk_sum(const Sums& s, int i) {
  return PLANES > 1 ? s.top[i] + s.rest[PLANES > 1 ? i : 0] : s.top[i];
}
__device__ __forceinline__ void put(void* y, u64 at, float v, int wide) {
  if (wide) ((float*)y)[at] = v;
  else ((u16*)y)[at] = (u16)pack(v, 0.f);
}
