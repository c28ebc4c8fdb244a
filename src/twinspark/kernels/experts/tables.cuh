// Where the matrices of experts are, and the arithmetic between their products; after common.cuh.

struct __align__(16) Matrix {
  const u32* trellis;
  const u16 *suh, *svh;
  int bits, codebook;
};
// Per shard: [experts + 1][gate, up, down], the shared expert last.
struct Tables {
  const Matrix *t0, *t1, *t2, *t3;
  __device__ __forceinline__ const Matrix* of(int shard) const {
    return shard < 2 ? (shard == 0 ? t0 : t1) : (shard == 2 ? t2 : t3);
  }
};

// Inputs are cut into chunks; a rest of at most 128 goes with the chunk before it.
__device__ __forceinline__ int num_units(int inputs) {
  const int rest = inputs % CHUNK;
  return inputs / CHUNK + (rest > 128 || inputs < CHUNK ? 1 : 0);
}
__device__ __forceinline__ float round_bf16(float v) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
  return __uint_as_float((u32)h << 16);
}
__device__ __forceinline__ float at_most(float v, float most) {  // not a number stays what it is
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(most));
  return v;
}
__device__ __forceinline__ float at_least(float v, float least) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(least));
  return v;
}
// weight * silu(gate) * up of sums that are rounded to bf16 first, not rounded itself.
__device__ __forceinline__ float activation(float gate, float up, float weight, float limit) {
  const float g = at_most(round_bf16(gate), limit);
  const float u = at_least(at_most(round_bf16(up), limit), -limit);
  return weight * (g / (1.f + expf(-fmaxf(g, -80.f))) * u);
}
// A lane's four values, rounded to bf16 and rotated for down: `suh` are its scales.
__device__ __forceinline__ uint2 activate(
    const float gate[4], const float up[4], float weight, float limit, uint2 suh) {
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = activation(gate[i], up[i], weight, limit);
  const Four f = {to_bf162(v[0], v[1]), to_bf162(v[2], v[3]), 0, 0};
  return rotate_four(f, TYPE_BF16, suh);
}
__device__ __forceinline__ void add_four(float v[4], float4 a) {
  v[0] += a.x; v[1] += a.y; v[2] += a.z; v[3] += a.w;
}
__device__ __forceinline__ uint2 bf16_four(const float v[4]) {
  return make_uint2(to_bf162(v[0], v[1]), to_bf162(v[2], v[3]));
}

// ---- 8 rows of 128 values a warp: lane 4 r + c has values 32 c to 32 c + 31 of row r

// As `hadamard` of common.cuh, addition by addition.
__device__ __forceinline__ void hadamard_wide(float v[32]) {
#pragma unroll
  for (int bit = 1; bit < 32; bit <<= 1)
#pragma unroll
    for (int i = 0; i < 32; i++)
      if (!(i & bit)) {
        const float low = v[i], high = v[i | bit];
        v[i] = low + high;
        v[i | bit] = low - high;
      }
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int bit = 1; bit < 4; bit <<= 1) {
    const float sign = lane & bit ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 32; i++) v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(0xffffffffu, v[i], bit));
  }
#pragma unroll
  for (int i = 0; i < 32; i++) v[i] *= INV_SQRT128;
}
__device__ __forceinline__ void scale_wide(float v[32], const u16* scales) {  // fp16, the lane's first
#pragma unroll
  for (int i = 0; i < 32; i += 8) {
    const uint4 s = *(const uint4*)(scales + i);
    const u32 pairs[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int j = 0; j < 8; j++) v[i + j] *= half_to_float(j & 1 ? pairs[j / 2] >> 16 : pairs[j / 2] & 0xffff);
  }
}
// Sums of a row to finished outputs; `svh` is that of the lane's first.
__device__ __forceinline__ void finish_wide(float v[32], const float* sums, const u16* svh) {
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    const float4 s = *(const float4*)(sums + i);
    v[i] = s.x; v[i + 1] = s.y; v[i + 2] = s.z; v[i + 3] = s.w;
  }
  hadamard_wide(v);
  scale_wide(v, svh);
}
// Scales, rotates and rounds to fp16; to four runs of 8 values, 64 apart.
__device__ __forceinline__ void rotate_wide(float v[32], const u16* suh, u16* to) {
  scale_wide(v, suh);
  hadamard_wide(v);
#pragma unroll
  for (int i = 0; i < 32; i += 8) {
    uint4 o;
    o.x = to_half2(clamp_half(v[i]), clamp_half(v[i + 1]));
    o.y = to_half2(clamp_half(v[i + 2]), clamp_half(v[i + 3]));
    o.z = to_half2(clamp_half(v[i + 4]), clamp_half(v[i + 5]));
    o.w = to_half2(clamp_half(v[i + 6]), clamp_half(v[i + 7]));
    *(uint4*)(to + i * 8) = o;
  }
}
