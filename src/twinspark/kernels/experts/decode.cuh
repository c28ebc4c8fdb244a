// Products of an expert's rows by a block, for decode.cu and few.cu; after tables.cuh. WARPS 4 or 8 of a block,
// CODEBOOK_MASK codebooks in use.

#define MOST_PLACES 16

__device__ __forceinline__ int id_of(const int* ids, const unsigned char* kept, int at) {
  return kept && !__ldcg(kept + at) ? -1 : __ldcg(ids + at);
}
template <int CODEBOOK, int BITS>
__device__ __forceinline__ void multiply_part(
    float acc[4], const u32* tiles, u32 x_at, const PlacesOf<BITS>& at) {
#pragma unroll
  for (int t = 0; t < PART; t += 2) {
    u32 b[4], w0[4], w1[4];
    load_b(x_at + t * 32, b);
    WordsOf<BITS> words0, words1;
    load_words(words0, tiles + t * WARPS * 8 * BITS, at);
    load_words(words1, tiles + (t + 1) * WARPS * 8 * BITS, at);
    decode_tile<CODEBOOK>(words0, at, w0);
    decode_tile<CODEBOOK>(words1, at, w1);
    mma(acc, w0, b[0], b[1]);
    mma(acc, w1, b[2], b[3]);
  }
}
// Up to 8 rows through a unit; a chunk's sums go to `sums` [pair][matrix][chunk][outputs].
struct Sums { float* at; u64 pair_pitch; int outputs, chunk; };
template <int CODEBOOK, int BITS>
__device__ __forceinline__ void multiply_rows(
    const u32* tiles, u32 x_at, u32 full_at, u32 parity, int width, const Sums& sums, const u16* pairs, int count) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = 2 * (lane & 3);
  const PlacesOf<BITS> at = places_of<BITS>(lane);
  float acc[4] = {};
#pragma unroll 1
  for (int part = 0; part < width / 128; part++) {
    barrier_wait(full_at + 8 * part, parity);
    multiply_part<CODEBOOK, BITS>(acc, tiles + (part * PART * WARPS + warp) * 8 * BITS, x_at + part * 256, at);
    if (part % 4 != 3 && part != width / 128 - 1) continue;
    float* to = sums.at + (u64)(sums.chunk + part / 4) * sums.outputs + warp * 16 + (lane >> 2);
    if (row < count) {
      float* p = to + pairs[row] * sums.pair_pitch;
      p[0] = acc[0]; p[8] = acc[2];
    }
    if (row + 1 < count) {
      float* p = to + pairs[row + 1] * sums.pair_pitch;
      p[0] = acc[1]; p[8] = acc[3];
    }
    acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
  }
}
#define CASE(c, b) \
  case 16 * c + b: multiply_rows<c, b>(tiles, x_at, full_at, parity, width, sums, pairs, count); break;
#define CASES(c) CASE(c, 1) CASE(c, 2) CASE(c, 3) CASE(c, 4) CASE(c, 5) CASE(c, 6) CASE(c, 7) CASE(c, 8)
__device__ __forceinline__ void multiply_any(
    int kind, const u32* tiles, u32 x_at, u32 full_at, u32 parity, int width, const Sums& sums, const u16* pairs,
    int count) {
  switch (kind) {
#if CODEBOOK_MASK & 1
    CASES(0)
#endif
#if CODEBOOK_MASK & 2
    CASES(1)
#endif
#if CODEBOOK_MASK & 4
    CASES(2)
#endif
  }
}
