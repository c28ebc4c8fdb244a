// Rotations of many rows; after common.cuh.
//
// A warp has 8 rows of 128 values: lane 4 r + c has values 16 i + 4 c + j of row r as v[4 i + j], so that
// the four lanes of a row read and write whole sectors together.

// As `hadamard` of common.cuh, addition by addition.
template <int FIRST, int END>
__device__ __forceinline__ void hadamard_own(float v[32]) {
#pragma unroll
  for (int bit = FIRST; bit < END; bit <<= 1)
#pragma unroll
    for (int i = 0; i < 32; i++)
      if (!(i & bit)) {
        const float low = v[i], high = v[i | bit];
        v[i] = low + high;
        v[i | bit] = low - high;
      }
}
// RUN values of a lane are neighbours: with 8, lane 4 r + c has values 32 i + 8 c + j as v[8 i + j].
template <int RUN = 4>
__device__ __forceinline__ void hadamard_wide(float v[32]) {
  hadamard_own<1, RUN>(v);
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int bit = 1; bit < 4; bit <<= 1) {
    const float sign = lane & bit ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 32; i++) v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(0xffffffffu, v[i], bit));
  }
  hadamard_own<RUN, 32>(v);
#pragma unroll
  for (int i = 0; i < 32; i++) v[i] *= INV_SQRT128;
}
// Runs of 8 values as fp16, `step` apart.
__device__ __forceinline__ void store_runs(const float v[32], u16* to, u64 step) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float* run = v + 8 * i;
    *(uint4*)(to + i * step) = make_uint4(
        to_finite_half2(run[0], run[1]), to_finite_half2(run[2], run[3]),
        to_finite_half2(run[4], run[5]), to_finite_half2(run[6], run[7]));
  }
}
__device__ __forceinline__ void scale_wide(float v[32], const u16* scales) {  // fp16, the lane's first
#pragma unroll
  for (int i = 0; i < 8; i++) scale_four(v + 4 * i, *(const uint2*)(scales + 16 * i));
}
__device__ __forceinline__ void load_wide(float v[32], const float* from) {  // the lane's first
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float4 f = *(const float4*)(from + 16 * i);
    v[4 * i] = f.x; v[4 * i + 1] = f.y; v[4 * i + 2] = f.z; v[4 * i + 3] = f.w;
  }
}
// Sums of a row to finished outputs; `sums` and `svh` are those of the lane's first.
__device__ __forceinline__ void finish_wide(float v[32], const float* sums, const u16* svh) {
  load_wide(v, sums);
  hadamard_wide(v);
  scale_wide(v, svh);
}
