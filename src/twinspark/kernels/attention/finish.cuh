// From sums of weighted rows to outputs, after common.cuh, and what turns tiles on the way to shared memory. A lane
// has a dimension of two neighbouring heads, as matrix products leave them.

// Four 8 x 8 tiles, turned; lanes 8 i and on say where the lines of tile i lie.
__device__ __forceinline__ void store_turned(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Two neighbouring dimensions of a head into each lane, rounded: a lane has dimension g = lane / 4 of heads
// 2 c and 2 c + 1; it leaves with those of g & ~1 and the next, of head 2 c + (g & 1).
__device__ __forceinline__ u32 pair_up(float even_head, float odd_head) {
  const bool odd = threadIdx.x & 4;
  const float mine = odd ? odd_head : even_head, other = __shfl_xor_sync(0xffffffffu, odd ? even_head : odd_head, 4);
  return odd ? to_bf162(other, mine) : to_bf162(mine, other);
}
// Quotients of 16 sums times `factor`, of even and odd heads, as __fdiv_rn gives them: `inverse` is the rounded
// reciprocal, and two corrections are exact where nothing underflows. Divisors are 1 to about the list's length.
__device__ __forceinline__ void divide(float q[16], const float v[16], const float factor[2], const float total[2], const float inverse[2]) {
  bool odd_size = false;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float x = v[i] * factor[i & 1], t = total[i & 1], y = inverse[i & 1];
    odd_size |= (__float_as_uint(x) & 0x7fffffffu) - 0x12800000u > 0x50000000u;  // not from 2^-90 to 2^70
    q[i] = x * y;
    q[i] = fmaf(fmaf(-q[i], t, x), y, q[i]);
    q[i] = fmaf(fmaf(-q[i], t, x), y, q[i]);
  }
  if (odd_size) {
#pragma unroll
    for (int i = 0; i < 16; i++) q[i] = __fdiv_rn(v[i] * factor[i & 1], total[i & 1]);
  }
}
