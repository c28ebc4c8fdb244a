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

// What no kernel writes, asked for before the wait: the compiler moves no volatile load past it.
__device__ __forceinline__ uint2 load_early(const u16* p) {
  uint2 v;
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ const u16* pointer_early(const u16* const* p) {
  const u16* v;
  asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(v) : "l"(p));
  return v;
}

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
