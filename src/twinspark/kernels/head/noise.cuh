// The noise of an id (design D20), exact and rough. Included by choose.cu behind cluster.cuh.

__device__ __forceinline__ u32 noise_word(u32 id, u32 position, u32 choice, u32 key0, u32 key1) {
  u32 c0 = id, c1 = position, c2 = choice, c3 = 0;
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ key0;
    c2 = high0 ^ c3 ^ key1;
    c1 = low1;
    c3 = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c0;
}
__device__ __forceinline__ double gumbel(u32 word) {
  const double w = ((double)word + 0.5) * (1. / 4294967296.);
  return -log(-log1p(-w));
}
// The same to about 1e-5, without float64.
__device__ __forceinline__ float rough_gumbel(u32 word) {
  const float unit = 1.f / 4294967296.f;
  const float e = word < 0x80000000u ? -log1pf(-((float)word + 0.5f) * unit) : -logf(((float)~word + 0.5f) * unit);
  return -logf(e);
}
__device__ __forceinline__ u64 ordered64(double v) {
  const long long bits = __double_as_longlong(v + 0.);
  return bits < 0 ? ~(u64)bits : (u64)bits | 0x8000000000000000ull;
}
