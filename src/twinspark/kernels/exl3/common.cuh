// What all EXL3 products on a GPU share: decoding, rotation, order between copies and kernels.
//
// Canonical order of a product: inputs in chunks of 512, one tensor-core accumulator a chunk (16 inputs
// a step, ascending), chunk sums added ascending in fp32. Every kernel follows it, so kernel, grid and
// number of rows change no bit. No system headers, so that the run-time compiler needs none. Built
// without contraction of a * b + c, which could differ between variants.
//
// Widths (1..8) and codebooks (0 mul1, 1 mcg, 2 3inst) are template arguments. Sources of one kind of
// matrix define the macros BITS and CODEBOOK and use the short names after the templates.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define CHUNK 512
#define KTILES (CHUNK / 16)
#define PART 8  // k tiles behind one barrier
#define PARTS (KTILES / PART)
#define INV_SQRT128 0.08838834764831845f

enum { TYPE_BF16 = 0, TYPE_FP16 = 1, TYPE_FP32 = 2 };

__device__ __forceinline__ u32 smem_address(const void* p) {
  u32 a;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
  return a;
}
__device__ __forceinline__ float half_to_float(u32 v) {
  float f;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(v));
  return f;
}
__device__ __forceinline__ u32 to_half2(float lo, float hi) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ u32 to_bf162(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
// Cut at the largest fp16 numbers; not a number stays what it is.
__device__ __forceinline__ u32 to_finite_half2(float lo, float hi) {
  u32 d;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

// ---- order between blocks, kernels and copies

__device__ __forceinline__ void wait_for_producer() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_consumer_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
  asm volatile(
      "{\n .reg .pred p;\n again:\n mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      " @p bra done;\n bra again;\n done:\n }" ::"r"(at), "r"(parity) : "memory");
}
// One lane of a converged warp: the compiler then knows that one copies, and needs no loop over lanes.
__device__ __forceinline__ bool is_elected() {
  u32 one;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(one));
  return one;
}
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// Copies of 16 bytes that a thread asks for and waits for itself.
__device__ __forceinline__ void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool is_here) {  // zeros where it is not
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_here ? 16 : 0) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
// ---- weights

template <int CODEBOOK_>
__device__ __forceinline__ u32 weight_pair(u32 s0, u32 s1) {  // two states to two fp16 weights
  u32 d;
  if (CODEBOOK_ == 0) {
    const u32 sum0 = __dp4a(s0 * 0x83DCD12Du, 0x01010101u, 0x6400u);  // fp16 bits of 1024 + byte sum
    const u32 sum1 = __dp4a(s1 * 0x83DCD12Du, 0x01010101u, 0x6400u);
    const u32 packed = __byte_perm(sum0, sum1, 0x5410);
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(packed), "r"(0x1EEE1EEEu), "r"(0xC931C931u));
    return d;
  }
  u32 x0 = CODEBOOK_ == 1 ? s0 * 0xCBAC1FEDu : s0 * 89226354u + 64248484u;
  u32 x1 = CODEBOOK_ == 1 ? s1 * 0xCBAC1FEDu : s1 * 89226354u + 64248484u;
  x0 = (x0 & 0x8FFF8FFFu) ^ 0x3B603B60u;
  x1 = (x1 & 0x8FFF8FFFu) ^ 0x3B603B60u;
  const u32 low = __byte_perm(x0, x1, 0x5410), high = __byte_perm(x0, x1, 0x7632);
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(low), "r"(high));
  return d;
}

// A lane owns 8 consecutive values. Up to 4 bits their windows lie in two neighbouring words; wider
// ones in two pairs, at 7 bits in four.
template <int BITS_> struct Width {
  static constexpr int TILE = 8 * BITS_;  // words
  static constexpr int GROUPS = BITS_ <= 4 ? 1 : (BITS_ == 7 ? 4 : 2);
  static constexpr int VALUES = 8 / GROUPS;
};
template <int BITS_> struct WordsOf { u32 hi[Width<BITS_>::GROUPS], lo[Width<BITS_>::GROUPS]; };
template <int BITS_> struct PlacesOf {
  int hi[Width<BITS_>::GROUPS], lo[Width<BITS_>::GROUPS];
  u32 shift[Width<BITS_>::GROUPS];
};

template <int BITS_>
__device__ __forceinline__ PlacesOf<BITS_> places_of(int lane) {
  PlacesOf<BITS_> p;
#pragma unroll
  for (int g = 0; g < Width<BITS_>::GROUPS; g++) {
    const int end = (8 * lane + Width<BITS_>::VALUES * (g + 1)) * BITS_;
    p.lo[g] = (end - 1) >> 5;
    p.hi[g] = (p.lo[g] == 0 ? Width<BITS_>::TILE : p.lo[g]) - 1;  // the ring wraps
    p.shift[g] = BITS_ % 4 == 0 ? 0 : (32 - (end & 31)) & 31;
  }
  return p;
}
// The same, held in registers: without an exchange the compiler makes them anew for every part.
template <int BITS_>
__device__ __forceinline__ PlacesOf<BITS_> held(PlacesOf<BITS_> p) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int g = 0; g < Width<BITS_>::GROUPS; g++) {
    p.hi[g] = __shfl_sync(0xffffffffu, p.hi[g], lane);
    p.lo[g] = __shfl_sync(0xffffffffu, p.lo[g], lane);
    if (BITS_ % 4) p.shift[g] = __shfl_sync(0xffffffffu, p.shift[g], lane);
  }
  return p;
}
template <int BITS_>
__device__ __forceinline__ void load_words(WordsOf<BITS_>& w, const u32* tile, const PlacesOf<BITS_>& p) {
#pragma unroll
  for (int g = 0; g < Width<BITS_>::GROUPS; g++) {
    w.hi[g] = tile[p.hi[g]];
    w.lo[g] = tile[p.lo[g]];
  }
}
// 16 bits of a word, from a constant place 0..16 on.
__device__ __forceinline__ u32 window(u32 word, int at) {
  if (at == 0) return word & 0xffff;
  if (at == 16) return word >> 16;
  if (at == 8) return __byte_perm(word, 0, 0x4421);
  return __byte_perm(word << (16 - at), 0, 0x4432);
}
// A lane's states. The first of a group ends at the top of `up`, and so those that `lo` does not hold are
// there; a window at a whole byte takes one instruction, others take two.
template <int BITS_>
__device__ __forceinline__ void states_of(const WordsOf<BITS_>& words, const PlacesOf<BITS_>& p, u32 s[8]) {
  constexpr int VALUES = Width<BITS_>::VALUES, TOP = (VALUES - 1) * BITS_, UP = TOP > 16 ? TOP - 16 : 0;
#pragma unroll
  for (int g = 0; g < Width<BITS_>::GROUPS; g++) {
    const u32 lo = __funnelshift_r(words.lo[g], words.hi[g], p.shift[g]);
    const u32 up = __funnelshift_r(words.lo[g], words.hi[g], p.shift[g] + UP);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      const int at = (VALUES - 1 - i) * BITS_;
      const bool is_up = at > 16 || (UP > 0 && at >= UP && at % 8 != 0 && (at - UP) % 8 == 0);
      u32& state = s[g * VALUES + i];
      if (is_up) state = window(up, at - UP);
      else if (BITS_ == 2) state = window(lo >> at % 8, at / 8 * 8);  // two windows share a shift
      else state = window(lo, at);
    }
  }
}
// The A operand of one m16n8k16: 16 outputs by 16 inputs (the format's stream order is that of lanes).
template <int CODEBOOK_, int BITS_>
__device__ __forceinline__ void decode_tile(const WordsOf<BITS_>& words, const PlacesOf<BITS_>& p, u32 w[4]) {
  constexpr int TO[4] = {0, 2, 1, 3};
  u32 s[8];
  states_of(words, p, s);
#pragma unroll
  for (int i = 0; i < 4; i++) w[TO[i]] = weight_pair<CODEBOOK_>(s[2 * i], s[2 * i + 1]);
}
#ifdef BITS
#define TILE_WORDS (8 * BITS)
using Words = WordsOf<BITS>;
using Places = PlacesOf<BITS>;
__device__ __forceinline__ Places places(int lane) { return places_of<BITS>(lane); }
__device__ __forceinline__ void decode(const Words& words, const Places& p, u32 w[4]) {
  decode_tile<CODEBOOK>(words, p, w);
}
#endif
__device__ __forceinline__ void mma(float c[4], const u32 a[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void load_b(u32 address, u32 b[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address));
}
// ---- rows in and out

// Hadamard over 128 values of a warp, 4 consecutive ones a lane; one fixed order of additions.
__device__ __forceinline__ void hadamard(float v[4]) {
  const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  v[0] = a + c; v[1] = b + d; v[2] = a - c; v[3] = b - d;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int bit = 1; bit < 32; bit <<= 1) {
    const float sign = lane & bit ? -1.f : 1.f;  // exact, so that the addition is rounded alone
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(0xffffffffu, v[i], bit));
  }
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] *= INV_SQRT128;
}
struct Four { u32 a, b, c, d; };  // four values as loaded: two words for 16 bits each, four for 32
__device__ __forceinline__ Four load_four(const void* x, u64 at, int type) {
  Four f = {0, 0, 0, 0};
  if (type == TYPE_FP32) {
    const uint4 v = *(const uint4*)((const u32*)x + at);
    f.a = v.x; f.b = v.y; f.c = v.z; f.d = v.w;
  } else {
    const uint2 v = *(const uint2*)((const u16*)x + at);
    f.a = v.x; f.b = v.y;
  }
  return f;
}
__device__ __forceinline__ void widen(const Four& f, int type, float v[4]) {
  if (type == TYPE_FP32) {
    v[0] = __uint_as_float(f.a); v[1] = __uint_as_float(f.b);
    v[2] = __uint_as_float(f.c); v[3] = __uint_as_float(f.d);
  } else if (type == TYPE_BF16) {
    v[0] = __uint_as_float(f.a << 16); v[1] = __uint_as_float(f.a & 0xffff0000u);
    v[2] = __uint_as_float(f.b << 16); v[3] = __uint_as_float(f.b & 0xffff0000u);
  } else {
    v[0] = half_to_float(f.a & 0xffff); v[1] = half_to_float(f.a >> 16);
    v[2] = half_to_float(f.b & 0xffff); v[3] = half_to_float(f.b >> 16);
  }
}
// Four inputs of a lane times suh, rotated over the warp's 128, rounded to fp16.
__device__ __forceinline__ uint2 rotate_four(const Four& f, int type, uint2 suh) {
  float v[4];
  widen(f, type, v);
  v[0] *= half_to_float(suh.x & 0xffff); v[1] *= half_to_float(suh.x >> 16);
  v[2] *= half_to_float(suh.y & 0xffff); v[3] *= half_to_float(suh.y >> 16);
  hadamard(v);
  uint2 o;
  o.x = to_finite_half2(v[0], v[1]);
  o.y = to_finite_half2(v[2], v[3]);
  return o;
}
// x [M, K] to rotated fp16 rows [M, K]; a warp takes 128 values of row 4 blockIdx.y + warp, from 128 blockIdx.x on.
__device__ __forceinline__ void rotate_rows_of(
    const void* x, const u16* suh, u16* out, int M, int K, int x_pitch, int x_type) {
  const int row = blockIdx.y * 4 + (threadIdx.x >> 5), k = 128 * blockIdx.x + 4 * (threadIdx.x & 31);
  const uint2 s = *(const uint2*)(suh + k);
  wait_for_producer();
  if (row >= M) return;
  const Four f = load_four(x, (u64)row * x_pitch + k, x_type);
  *(uint2*)(out + (u64)row * K + k) = rotate_four(f, x_type, s);
}
// Four values times their scales.
__device__ __forceinline__ void scale_four(float v[4], uint2 s) {
  v[0] *= half_to_float(s.x & 0xffff); v[1] *= half_to_float(s.x >> 16);
  v[2] *= half_to_float(s.y & 0xffff); v[3] *= half_to_float(s.y >> 16);
}
// Rotates a row's 128 outputs and scales them; `svh` is that of the lane's first.
__device__ __forceinline__ void finish_values(float v[4], const u16* svh) {
  hadamard(v);
  scale_four(v, *(const uint2*)svh);
}
__device__ __forceinline__ void add_bias(float v[4], const u16* bias) {
  const uint2 b = *(const uint2*)bias;
  v[0] += half_to_float(b.x & 0xffff); v[1] += half_to_float(b.x >> 16);
  v[2] += half_to_float(b.y & 0xffff); v[3] += half_to_float(b.y >> 16);
}
struct Output { const u16 *svh, *bias; void* y; int type; };
__device__ __forceinline__ void store_four(const float v[4], const Output& out, u64 at) {
  if (out.type == TYPE_FP32) *(float4*)((float*)out.y + at) = make_float4(v[0], v[1], v[2], v[3]);
  else if (out.type == TYPE_BF16) *(uint2*)((u16*)out.y + at) = make_uint2(to_bf162(v[0], v[1]), to_bf162(v[2], v[3]));
  else *(uint2*)((u16*)out.y + at) = make_uint2(to_half2(v[0], v[1]), to_half2(v[2], v[3]));
}
// Rotates a row's 128 outputs, scales, adds the bias and, unless told otherwise, stores; `column` is the lane's first,
// `scale` that of it and the next three.
__device__ __forceinline__ void finish_scaled(
    float v[4], uint2 scale, const Output& out, u64 row_start, int column, bool stores = true) {
  hadamard(v);
  scale_four(v, scale);
  if (out.bias) add_bias(v, out.bias + column);
  if (stores) store_four(v, out, row_start + column);
}
__device__ __forceinline__ void finish_row(float v[4], const Output& out, u64 row_start, int column) {
  finish_scaled(v, *(const uint2*)(out.svh + column), out, row_start, column);
}
// Chunk sums of a row's four columns, added ascending; AHEAD loads are under way at a time. Of none nothing is read.
template <int AHEAD = 16>
__device__ __forceinline__ void sum_chunks(const float* p, u64 step, int chunks, float v[4]) {
  v[0] = v[1] = v[2] = v[3] = 0.f;
  for (int c = 0; c == 0 || c < chunks; c += AHEAD) {
    float4 t[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++, p += step)
      if (c + i < chunks) t[i] = __ldcg((const float4*)p);
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (c + i < chunks) {
        const bool set = c + i == 0;  // the first sum is taken as it is
        v[0] = set ? t[i].x : v[0] + t[i].x; v[1] = set ? t[i].y : v[1] + t[i].y;
        v[2] = set ? t[i].z : v[2] + t[i].z; v[3] = set ? t[i].w : v[3] + t[i].w;
      }
  }
}
// Adds the sums of a chunk, of tiles of 8 rows, to those of the chunks before it.
template <int TILES>
__device__ __forceinline__ void add_chunk(float total[TILES][4], const float acc[TILES][4], bool is_first) {
#pragma unroll
  for (int r = 0; r < TILES; r++)
#pragma unroll
    for (int i = 0; i < 4; i++) total[r][i] = is_first ? acc[r][i] : total[r][i] + acc[r][i];
}
// A warp's sums of its 16 columns, to `sums` [8 TILES][PITCH].
template <int TILES, int PITCH>
__device__ __forceinline__ void leave_sums(float* sums, const float total[TILES][4], int warp, int lane) {
#pragma unroll
  for (int r = 0; r < TILES; r++) {
    float* s = sums + (r * 8 + 2 * (lane & 3)) * PITCH + warp * 16 + (lane >> 2);
    s[0] = total[r][0]; s[PITCH] = total[r][1]; s[8] = total[r][2]; s[PITCH + 8] = total[r][3];
  }
}
