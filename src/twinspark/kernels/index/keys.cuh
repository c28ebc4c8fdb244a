// What both bodies of the scores share: where keys lie, how they come into shared memory and become whole
// numbers, and where scores go. Include common.cuh first.
#define TURNS ((HEADS + 7) / 8)  // of eight heads
#define RUN (2 * TURNS)

struct Keys { const unsigned char* data; const int* table; int page_rows, page_shift, page_bytes; };

__device__ __forceinline__ u32 smem_address(const void* p) {
  u32 a;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
  return a;
}
__device__ __forceinline__ void copy16(u32 to, const void* from, bool is_here) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_here ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_done() {
  asm volatile("cp.async.commit_group;\n cp.async.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ u32 permute(u32 low, u32 high, u32 selector) {  // bit 3 of a nibble: its byte's sign
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selector));
  return d;
}
__device__ __forceinline__ u32 shifted(u32 v, u32 by) {  // by 32 and more: nothing is left
  u32 d;
  asm("shl.b32 %0, %1, %2;" : "=r"(d) : "r"(v), "r"(by));
  return d;
}
// Bytes of `low` minus bytes of `high`; in no place are both more than nothing.
__device__ __forceinline__ u32 difference(u32 low, u32 high) {
  return ((low | 0x80808080u) - high) ^ 0x80808080u;
}
// Eight e2m1 values as bytes, four a register: twice the value, shifted left `by`.
__device__ __forceinline__ void numbers_of_packed(u32 x, u32 by, u32* first, u32* second) {
  const u32 low = shifted(0x03020100u, by), high = shifted(0x0C080604u, by), turned = x ^ 0x88888888u;
  *first = difference(permute(low, high, x), permute(low, high, turned));
  *second = difference(permute(low, high, x >> 16), permute(low, high, turned >> 16));
}

// Where a key lies, or null when it is not here.
__device__ __forceinline__ const unsigned char* page_of(const Keys& keys, int slot_first, int entry, int* row) {
  const int logical = keys.page_shift >= 0 ? entry >> keys.page_shift : entry / keys.page_rows;
  const int page = keys.table[slot_first + logical];
  *row = entry - logical * keys.page_rows;
  return page < 0 ? nullptr : keys.data + (u64)page * keys.page_bytes;
}
struct Outputs {
  float *scores, *tile_max, *block_max;
  int pitch, block_shift;  // block_shift below 0: no blocks wanted
};
__device__ __forceinline__ float larger(float a, int lanes) { return fmaxf(a, __shfl_xor_sync(0xffffffffu, a, lanes)); }
