// What the kernels of the index search share: numbers on rule B's grid, tiles, order of values.
//
// A row of 128 values has four groups of 32 with one power-of-two scale each. Twice an e2m1 value is a
// whole number up to 12, so a group's product is a whole number; where a row's scales are at most 2^3
// apart the shifts go into the numbers and the whole product is one sum. Both ways give the same bits:
// the first is the fp32 sum of the four groups, ascending, and is exact wherever the second is taken.
// No system headers, so that the run-time compiler needs none. Built without contraction of a * b + c.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define WIDTH 128          // values of a query head or key
#define TILE 64            // entries a warp scores at once
#define ROW_TILE 8         // rows whose queries a block holds
#define MOST_SHIFT 3       // 12 << 3 is the largest multiple of 12 * 2^s that fits a signed byte
#define DEAD 0x40          // shift that leaves nothing
#define MOST_SPAN 50       // groups this many octaves below their row's largest count as zero
#define NO_KEY 0xffffffffu // scale bytes of a key that is not here
#define MAGIC_BITS 0x4B400000  // 1.5 * 2^23 as a float; plus a whole number it is that float's bits
#define TERM_BITS 22           // numbers are below 2^22
#define UNSIGNED 128           // what is added to a key's number, so that it has no sign

__device__ __forceinline__ void wait_for_producer() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_consumer_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// How the groups of one row are brought together.
struct Fold {
  u32 shifts;  // four bytes: left shift of a group's numbers, DEAD for nothing
  u32 below;   // four signed bytes: octaves of a group's scale under the base; 0 when folded
  int base;    // biased exponent: a number n stands for n * 2^(base - 128)
};
// `bytes`: biased exponents of the four scales; a value is half a whole number times 2^(byte - 127).
__device__ __forceinline__ Fold fold(u32 bytes) {
  int most = 0, least = 255;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int b = (bytes >> (8 * j)) & 255;
    most = max(most, b);
    least = min(least, b);
  }
  if (least > 1 && most - least <= MOST_SHIFT) return {bytes - least * 0x01010101u, 0, least};  // most are so
  least = 255;
  u32 dead = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int b = (bytes >> (8 * j)) & 255;
    if (b <= 1 || b + MOST_SPAN <= most) dead |= 255u << (8 * j);
    else least = min(least, b);
  }
  Fold f = {0, 0, 127};
  if (dead != 0xffffffffu) {
    const bool folds = most - least <= MOST_SHIFT;
    f.base = folds ? least : most;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int b = (bytes >> (8 * j)) & 255;
      if (folds) f.shifts |= (u32)((b - least) & 255) << (8 * j);
      else f.below |= (u32)((b - most) & 255) << (8 * j);
    }
  }
  f.shifts = (f.shifts & ~dead) | (dead & 0x01010101u * DEAD);
  f.below &= ~dead;
  return f;
}
// Power of two of a base: what one whole number stands for.
__device__ __forceinline__ float unit_of(int base) { return __int_as_float(max(base - 1, 1) << 23); }

// Positions a row chooses from: its visible entries, or the entries of as many candidate blocks.
__device__ __forceinline__ int positions(int visible, int slot, int most, int candidates, int block_shift) {
  const int seen = slot < 0 ? 0 : min(max(visible, 0), most);
  if (candidates < 0) return seen;
  return min(candidates, (seen + (1 << block_shift) - 1) >> block_shift) << block_shift;
}
