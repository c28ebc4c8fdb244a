// The Engram gate, one block a row, and the dequantization of table rows.
//
// A row's sums: a thread's 8 columns ascending, a butterfly over the warp, warps ascending. Macros: HIDDEN
// columns, a multiple of 128, at most 8192. Built without contraction.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
#define STREAMS 4
#define WARPS ((HIDDEN / 8 + 31) / 32)
#define SUMS (3 * STREAMS)  // of a stream: product with the key, squares of both

__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
struct Eight { u32 w[4]; };
__device__ __forceinline__ Eight load_eight(const u16* p) {
  const uint4 v = *(const uint4*)p;
  return {v.x, v.y, v.z, v.w};
}

// x, out [rows][STREAMS][HIDDEN]; keys [STREAMS][HIDDEN] and value [HIDDEN] of a row lie at their pitch.
// qk [STREAMS][HIDDEN]; blocked [rows] or null. grid (rows).
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) engram_gate(
    const u16* x, const u16* key, const u16* value, const float* __restrict__ qk, const u8* blocked, u16* out,
    int key_pitch, int value_pitch, int eps) {
  __shared__ float part[SUMS][WARPS], gates[STREAMS];
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, column = 8 * tid;
  const u64 row = blockIdx.x;
  const bool active = column < HIDDEN;
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  Eight xs[STREAMS] = {}, ks[STREAMS] = {}, v = {};
  if (active) {
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
      xs[s] = load_eight(x + (row * STREAMS + s) * HIDDEN + column);
      ks[s] = load_eight(key + row * key_pitch + s * HIDDEN + column);
    }
    v = load_eight(value + row * value_pitch + column);
  }
#pragma unroll
  for (int s = 0; s < STREAMS; s++) {
    float sums[3] = {0.f, 0.f, 0.f}, w[8] = {};
    if (active) {
      const float4 a = *(const float4*)(qk + s * HIDDEN + column), b = *(const float4*)(qk + s * HIDDEN + column + 4);
      w[0] = a.x; w[1] = a.y; w[2] = a.z; w[3] = a.w; w[4] = b.x; w[5] = b.y; w[6] = b.z; w[7] = b.w;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float a = i & 1 ? high(xs[s].w[i / 2]) : low(xs[s].w[i / 2]);
      const float b = i & 1 ? high(ks[s].w[i / 2]) : low(ks[s].w[i / 2]);
      sums[0] = fmaf(a * w[i], b, sums[0]);
      sums[1] = fmaf(a, a, sums[1]);
      sums[2] = fmaf(b, b, sums[2]);
    }
#pragma unroll
    for (int i = 0; i < 3; i++) {
#pragma unroll
      for (int step = 16; step; step >>= 1) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], step);
      if (lane == 0) part[3 * s + i][warp] = sums[i];
    }
  }
  __syncthreads();
  if (warp == 0) {
    float sum = 0.f;
    if (lane < SUMS) {
      sum = part[lane][0];
#pragma unroll
      for (int i = 1; i < WARPS; i++) sum += part[lane][i];
    }
    const float xx = __shfl_down_sync(0xffffffffu, sum, 1), kk = __shfl_down_sync(0xffffffffu, sum, 2);
    if (lane < SUMS && lane % 3 == 0) {
      const float small = __int_as_float(eps);
      float dot = sum * __frsqrt_rn(xx / (float)HIDDEN + small) * __frsqrt_rn(kk / (float)HIDDEN + small);
      dot = dot * __frsqrt_rn((float)HIDDEN);
      const float root = copysignf(sqrtf(fmaxf(fabsf(dot), 1e-6f)), dot);
      gates[lane / 3] = blocked && blocked[row] ? 0.f : 1.f / (1.f + expf(-root));
    }
  }
  __syncthreads();
  if (!active) return;
#pragma unroll
  for (int s = 0; s < STREAMS; s++) {
    const float gate = gates[s];
    u32 o[4];
#pragma unroll
    for (int i = 0; i < 4; i++) o[i] = pack(gate * low(v.w[i]) + low(xs[s].w[i]), gate * high(v.w[i]) + high(xs[s].w[i]));
    *(uint4*)(out + (row * STREAMS + s) * HIDDEN + column) = make_uint4(o[0], o[1], o[2], o[3]);
  }
}

// e4m3 bytes times a power of two a block of 32, exact in bf16. Rows are `pitch` bytes apart, those of scales
// `scale_pitch`; a thread takes 8 values. grid (rows * width / 1024 up).
extern "C" __global__ void __launch_bounds__(128) engram_dequant(
    const u8* values, const u8* scales, u16* out, int rows, int width, int pitch, int scale_pitch) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const u64 at = ((u64)blockIdx.x * 128 + threadIdx.x) * 8, row = at / width;
  const int column = at % width;
  if (row >= rows) return;
  const uint2 bytes = *(const uint2*)(values + row * pitch + column);
  const u32 code = scales[row * scale_pitch + column / 32];
  const float scale = __uint_as_float(code == 0 ? 0x00400000u : (code == 255 ? 0x7fc00000u : code << 23));
  u32 o[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u16 two = (u16)((i < 2 ? bytes.x : bytes.y) >> (16 * (i & 1)));
    u32 halves;
    float a, b;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(a), "=f"(b) : "r"(halves));
    o[i] = pack(a * scale, b * scale);
  }
  *(uint4*)(out + at) = make_uint4(o[0], o[1], o[2], o[3]);
}
