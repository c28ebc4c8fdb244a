// Packed rows of one format on their way into shared memory, after common.cuh (HEAD 512): a warp a row, 16 values a
// lane, asked for long before they are decoded.

__device__ __forceinline__ void store_16(u32 to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// e4m3_eight of common.cuh, with the bytes spread to where their signs are in place.
__device__ __forceinline__ u32 e4m3_spread(u32 x, u32 scale) {
  return mul_pair(mul_pair((x & 0x80008000u) | ((x >> 4) & 0x07f007f0u), TWO_120), scale);
}
__device__ __forceinline__ uint4 e4m3_words(u32 a, u32 b, u32 scale) {
  return make_uint4(e4m3_spread(__byte_perm(a, 0, 0x1404), scale), e4m3_spread(__byte_perm(a, 0, 0x3424), scale),
                    e4m3_spread(__byte_perm(b, 0, 0x1404), scale), e4m3_spread(__byte_perm(b, 0, 0x3424), scale));
}
// Where rows lie, in 16 bytes, a row a lane, and which there are. `magic` is 2^32 - 1 over the rows of a page.
struct Found { u32 value_at, scale_at, valid; };
template <int FORMAT>
__device__ __forceinline__ Found find_group(const Source& source, u32 magic, int row) {
  constexpr int VALUES = (FORMAT == WINDOW ? HEAD : HEAD / 2) / 16, SCALES = (FORMAT == WINDOW ? HEAD / 32 : HEAD / 16) / 16;
  const u32 number = (u32)max(row, 0), rows = (u32)source.page_rows;
  u32 page = __umulhi(number, magic), in_page = number - page * rows;
  if (in_page >= rows) { page++; in_page -= rows; }  // the product may be one short
  Found f;
  f.value_at = page * ((u32)source.value_step / 16) + in_page * VALUES;
  f.scale_at = page * ((u32)source.scale_step / 16) + in_page * SCALES;
  f.valid = __ballot_sync(0xffffffffu, row >= 0) & 0xff;
  return f;
}
// 16 values as they lie.
template <int FORMAT> __device__ __forceinline__ void load_values(u32 v[4], const u8* from) {
  if (FORMAT == COMPRESSED) {
    const uint2 two = __ldcg((const uint2*)from);
    v[0] = two.x; v[1] = two.y;
  } else {
    const uint4 four = __ldcg((const uint4*)from);
    v[0] = four.x; v[1] = four.y; v[2] = four.z; v[3] = four.w;
  }
}
// `swap`: the second half goes first, so that stores meet no bank twice.
template <int FORMAT>
__device__ __forceinline__ void put_values(u32 to, const u32 v[4], u32 scale_byte, bool swap) {
  const u32 scale = FORMAT == COMPRESSED ? e4m3_scale(scale_byte) : e8m0_scale(scale_byte);
#pragma unroll
  for (int half = 0; half < 2; half++, to ^= 16) {
    const bool second = half ? !swap : swap;
    if (FORMAT == COMPRESSED) store_16(to, e2m1_eight(second ? v[1] : v[0], scale));
    else store_16(to, e4m3_words(second ? v[2] : v[0], second ? v[3] : v[1], scale));
  }
}
