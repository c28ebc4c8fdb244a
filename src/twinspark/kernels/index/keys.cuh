// Keys of a warp as operands of the int8 matrix instruction, and what their products with queries add up
// to; after common.cuh. KEYS: of a warp, 32 or 64; HEADS, PACKED and GATHERED as in scores.cu;
// ANY_PAGES 0 where pages have a power of two of rows, and runs of KEYS keys lie in one.

#define TURNS ((HEADS + 7) / 8)  // of eight heads
#define RUN (2 * TURNS)

// Of a run's even head, then its odd one.
struct Facts {
  int4 starts;     // Head's start, twice
  float2 weights;  // for numbers over 2^TERM_BITS
  uint2 below;
};
struct Query {  // of one row, in shared memory; place_of() says where numbers lie
  signed char numbers[TURNS][8][WIDTH];  // [turn][run * 2 + odd head]
  Facts facts[TURNS][4];
};
// What queries.cu leaves of two heads.
__device__ __forceinline__ Facts facts_of(uint4 even, uint4 odd) {
  return {make_int4(even.y, odd.y, even.y, odd.y), make_float2(__uint_as_float(even.x), __uint_as_float(odd.x)),
          make_uint2(even.z, odd.z)};
}
// Of 16 numbers of a head: so that lanes which read together read from different banks.
__device__ __forceinline__ int place_of(int column, int piece) { return (piece ^ (column & 1)) * 16; }
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
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_all_but_newest() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
__device__ __forceinline__ void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
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
// d = c + a * b. The first operand's numbers have no sign in the latter.
__device__ __forceinline__ void multiply(int d[4], const u32 a[4], u32 b0, u32 b1, const int c[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ void multiply_unsigned(int d[4], const u32 a[4], u32 b0, u32 b1, const int c[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// ---- keys

// Where a key lies, or null when it is not here.
__device__ __forceinline__ const unsigned char* page_of(const Keys& keys, int slot_first, int entry, int* row) {
  const int logical = !ANY_PAGES || keys.page_shift >= 0 ? entry >> keys.page_shift : entry / keys.page_rows;
  const int page = keys.table[slot_first + logical];
  *row = entry - logical * keys.page_rows;
  return page < 0 ? nullptr : keys.data + (u64)page * keys.page_bytes;
}
struct Source {  // the positions of a pass
  int slot_first;         // the slot's place in the page table
  int limit, seen;        // positions, and entries that the row sees
  const int* candidates;  // the row's blocks
  int block_shift;
  int most;  // no row has more positions; known before `limit`, which may still be on its way
};
__device__ __forceinline__ int entry_at(const Source& s, int position) {  // -1 for none
#if GATHERED
  const int block = position < s.most ? s.candidates[position >> s.block_shift] : -1;
  const int entry = (block << s.block_shift) + (position & ((1 << s.block_shift) - 1));
  return block < 0 || position >= s.limit || entry >= s.seen ? -1 : entry;
#else
  return position < s.limit ? position : -1;
#endif
}

// A warp's keys on their way to the matrix instruction.
struct Stage {
#if PACKED
  u32 values[KEYS][16];
#endif
  u32 scales[KEYS];   // scale bytes, then a Fold's shifts
  float units[KEYS];  // what one whole number stands for; not a number for a key that is not here
  u32 below[KEYS];
};

#if PACKED
__device__ __forceinline__ bool lies_in_one_page(const Keys& keys) {
  return !GATHERED && (!ANY_PAGES || keys.page_rows % KEYS == 0);
}
// The page of keys that lie in one, to be asked for long before they are fetched; below 0 if it is not here.
__device__ __forceinline__ int page_ahead(const Keys& keys, const Source& source, int first) {
  if (!lies_in_one_page(keys) || first >= source.limit) return -1;
  const int logical = !ANY_PAGES || keys.page_shift >= 0 ? first >> keys.page_shift : first / keys.page_rows;
  return keys.table[source.slot_first + logical];
}
__device__ __forceinline__ void fetch_run(Stage* stage, const Keys& keys, int page, int first) {
  const int lane = threadIdx.x & 31;
  const u32 values = smem_address(stage->values) + (lane >> 2) * 64 + (((lane & 3) ^ ((lane >> 3) & 3)) << 4);
  const int row = !ANY_PAGES || keys.page_shift >= 0 ? first & (keys.page_rows - 1) : first % keys.page_rows;
  if (page >= 0) {
    const unsigned char* of = keys.data + (u64)page * keys.page_bytes;
    const unsigned char* from = of + row * 64 + lane * 16;
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) copy16(values + i * 512, from + i * 512, true);
    if (lane < KEYS / 4) copy16(smem_address(stage->scales) + lane * 16, of + keys.page_rows * 64 + row * 4 + lane * 16, true);
  } else {
    for (int key = lane; key < KEYS; key += 32) stage->scales[key] = NO_KEY;
  }
}
// `page`: what page_ahead said.
__device__ __forceinline__ void fetch(Stage* stage, const Keys& keys, const Source& source, int page, int first) {
  const int lane = threadIdx.x & 31;
  if (first >= (GATHERED ? source.most : source.limit)) return;
  if (lies_in_one_page(keys)) return fetch_run(stage, keys, page, first);
  const u32 values = smem_address(stage->values), scales = smem_address(stage->scales);
#pragma unroll 4
  for (int i = 0; i < KEYS / 8; i++) {
    const int key = 8 * i + (lane >> 2), piece = lane & 3, entry = entry_at(source, first + key);
    int row = 0;
    const unsigned char* of = entry < 0 ? nullptr : page_of(keys, source.slot_first, entry, &row);
    const bool is_here = of != nullptr;
    copy16(values + key * 64 + ((piece ^ ((key >> 1) & 3)) << 4), is_here ? of + row * 64 + piece * 16 : keys.data, is_here);
    if (piece == 0) {
      if (is_here) copy4(scales + 4 * key, of + keys.page_rows * 64 + row * 4);
      else stage->scales[key] = NO_KEY;
    }
  }
}
#endif
// Scale bytes to shifts, units and what lies below. True if all keys fold.
__device__ __forceinline__ bool fold_scales(Stage* stage) {
  const int lane = threadIdx.x & 31;
  bool folds = true;
#pragma unroll
  for (int i = 0; i < KEYS / 32; i++) {
    const int key = lane + 32 * i;
    const u32 bytes = stage->scales[key];
    const Fold f = fold(bytes == NO_KEY ? 0 : bytes);
    stage->scales[key] = f.shifts;
    stage->units[key] = bytes == NO_KEY ? __int_as_float(0x7fffffff) : unit_of(f.base);
    stage->below[key] = f.below;
    folds = folds && f.below == 0;
  }
  return __all_sync(0xffffffffu, folds);
}
typedef u32 Fragments[KEYS / 16][4][4];  // [16 keys][group][register]

#if PACKED
// Keys that fold: the four lanes of a key have a group each, in the order of memory, and a step of the
// instruction takes eight of its numbers; numbers plus UNSIGNED, which the queries' starts make up for.
__device__ __forceinline__ void decode_folded(Fragments a, const Stage* stage) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
  for (int m = 0; m < KEYS / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int key = 16 * m + 8 * half + g;
      const u32 by = ((const unsigned char*)&stage->scales[key])[q];
      const u32 low = shifted(0x03020100u, by), high = shifted(0x0C080604u, by);
      const uint4 four = *(const uint4*)&stage->values[key][(q ^ ((g >> 1) & 3)) << 2];
      const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 x = words[j], turned = x ^ 0x88888888u;
        a[m][j][half] = 0x80808080u + permute(low, high, x) - permute(low, high, turned);
        a[m][j][2 + half] = 0x80808080u + permute(low, high, x >> 16) - permute(low, high, turned >> 16);
      }
    }
}
// Any keys: a step takes a group.
__device__ __forceinline__ void decode(Fragments a, const Stage* stage) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
  for (int m = 0; m < KEYS / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int key = 16 * m + 8 * half + g;
      const u32 shifts = stage->scales[key];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 x = stage->values[key][((j ^ ((g >> 1) & 3)) << 2) + q], by = (shifts >> (8 * j)) & 255;
        const u32 low = shifted(0x03020100u, by), high = shifted(0x0C080604u, by), turned = x ^ 0x88888888u;
        a[m][j][half] = difference(permute(low, high, x), permute(low, high, turned));
        a[m][j][2 + half] = difference(permute(low, high, x >> 16), permute(low, high, turned >> 16));
      }
    }
}
#else
// Eight bf16 values over a unit, as bytes; `unit` is one over it.
__device__ __forceinline__ void numbers_of(uint4 x, float unit, u32* low, u32* high) {
  const u32 words[4] = {x.x, x.y, x.z, x.w};
  u32 out[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 half = (i & 1) ? words[i >> 1] & 0xffff0000u : words[i >> 1] << 16;
    out[i >> 2] |= (u32)((int)(__uint_as_float(half) * unit) & 255) << (8 * (i & 3));
  }
  *low = out[0];
  *high = out[1];
}
__device__ __forceinline__ u32 most_bits(u32 x) { return max(x & 0x7fffu, (x >> 16) & 0x7fffu); }

// Reads and converts at once: the scale of a group is found from its largest value.
__device__ __forceinline__ void read_plain(Fragments a, Stage* stage, const Keys& keys, const Source& source, int first) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
  for (int m = 0; m < KEYS / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int key = 16 * m + 8 * half + g, entry = entry_at(source, first + key);
      int row = 0;
      const unsigned char* page = entry < 0 ? nullptr : page_of(keys, source.slot_first, entry, &row);
      uint4 x[4];
      u32 bytes = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        x[j] = page ? *(const uint4*)(page + row * (2 * WIDTH) + j * 64 + q * 16) : make_uint4(0, 0, 0, 0);
        u32 most = max(max(most_bits(x[j].x), most_bits(x[j].y)), max(most_bits(x[j].z), most_bits(x[j].w)));
        most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
        // the largest is 8 or 12 units, whichever scale it was rounded under
        bytes |= (u32)max((int)(most >> 7) - 2, 0) << (8 * j);
      }
      if (q == 0) stage->scales[key] = page ? bytes : NO_KEY;
      const Fold f = fold(bytes);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int by = (f.shifts >> (8 * j)) & 255, unit = 255 - ((bytes >> (8 * j)) & 255);  // 2^(128 - byte)
        const float scale = by == DEAD ? 0.f : __int_as_float((unit + by) << 23);
        numbers_of(x[j], scale, &a[m][j][half], &a[m][j][2 + half]);
      }
    }
}
#endif

// ---- scores

typedef float Sums[KEYS / 16][2];  // of a lane's run: keys g and g + 8 of 16

// Two heads' terms of one key onto its sum, ascending.
__device__ __forceinline__ float add_terms(float sum, float even, float odd) { return (sum + even) + odd; }

// Weight times relu of a number plus MAGIC, rounded once: the former is exact.
__device__ __forceinline__ float term(int number, float weight) {
  float relu;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(relu) : "f"(__int_as_float(number)), "f"(1.f / (1 << TERM_BITS)), "f"(-3.f));
  return relu * weight;
}
__device__ __forceinline__ void add_numbers(float sum[2], const int c[4], float2 w) {
  sum[0] = add_terms(sum[0], term(c[0], w.x), term(c[1], w.y));
  sum[1] = add_terms(sum[1], term(c[2], w.x), term(c[3], w.y));
}
// Eight heads of a row, for keys of decode_folded; all groups of both fold. CHAINS: of instructions that wait
// for each other, of the same numbers.
template <int CHAINS>
__device__ __forceinline__ void add_turn(Sums sums, const Fragments a, const Query& query, int turn) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const signed char* numbers = query.numbers[turn][g];
  const uint4 first = *(const uint4*)(numbers + place_of(g, 2 * q)), second = *(const uint4*)(numbers + place_of(g, 2 * q + 1));
  const u32 b[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  const int4 starts = query.facts[turn][q].starts;
  const float2 w = query.facts[turn][q].weights;
  const int from[2][4] = {{starts.x, starts.y, starts.z, starts.w}, {0, 0, 0, 0}};
  int c[CHAINS][KEYS / 16][4];
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int m = 0; m < KEYS / 16; m++) {
      int* sum = c[j % CHAINS][m];
      multiply_unsigned(sum, a[m][j], b[2 * j], b[2 * j + 1], j < CHAINS ? from[j] : sum);
    }
#pragma unroll
  for (int m = 0; m < KEYS / 16; m++) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (CHAINS == 2) c[0][m][i] += c[CHAINS - 1][m][i];
    add_numbers(sums[m], c[0][m], w);
  }
}
// The same of any groups: b is by groups.
__device__ __forceinline__ void add_folded(Sums sums, const Fragments a, const u32 b[8], float2 w) {
#pragma unroll
  for (int m = 0; m < KEYS / 16; m++) {
    int c[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll
    for (int j = 0; j < 4; j++) multiply(c, a[m][j], b[2 * j], b[2 * j + 1], c);
    add_numbers(sums[m], c, w);
  }
}
// Four sums of groups, each plus MAGIC; added ascending.
__device__ __forceinline__ float term_of_groups(const int number[4], u32 key_below, u32 query_below, float weight) {
  float dot = 0.f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int below = (int)(signed char)(key_below >> (8 * j)) + (int)(signed char)(query_below >> (8 * j));
    const float part = __int_as_float(number[j]) - __int_as_float(MAGIC_BITS);
    dot = dot + part * __int_as_float((127 + below) << 23);
  }
  return fmaxf(dot, 0.f) * weight;
}
__device__ __forceinline__ void add_spread(
    Sums sums, const Fragments a, const u32 b[8], float2 w, const u32* key_below, uint2 query_below) {
  const int g = (threadIdx.x & 31) >> 2, start[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
  const float unit = 1.f / (1 << TERM_BITS), even_weight = w.x * unit, odd_weight = w.y * unit;
#pragma unroll
  for (int m = 0; m < KEYS / 16; m++) {
    int c[4][4];
#pragma unroll
    for (int j = 0; j < 4; j++) multiply(c[j], a[m][j], b[2 * j], b[2 * j + 1], start);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 below = key_below[16 * m + 8 * half + g];
      const int even[4] = {c[0][2 * half], c[1][2 * half], c[2][2 * half], c[3][2 * half]};
      const int odd[4] = {c[0][2 * half + 1], c[1][2 * half + 1], c[2][2 * half + 1], c[3][2 * half + 1]};
      sums[m][half] = add_terms(
          sums[m][half], term_of_groups(even, below, query_below.x, even_weight),
          term_of_groups(odd, below, query_below.y, odd_weight));
    }
  }
}
// All heads of a row, for keys of any groups. `spread`: turns with heads whose groups do not fold.
__device__ __forceinline__ void add_any(Sums sums, const Fragments a, const Query& query, u32 spread, const u32* key_below) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll 1
  for (int turn = 0; turn < TURNS; turn++) {
    u32 b[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint2 pair = *(const uint2*)(query.numbers[turn][g] + place_of(g, 2 * j + (q >> 1)) + (q & 1) * 8);
      b[2 * j] = pair.x;
      b[2 * j + 1] = pair.y;
    }
    const Facts& facts = query.facts[turn][q];
    if (spread >> turn & 1) add_spread(sums, a, b, facts.weights, key_below, facts.below);
    else add_folded(sums, a, b, facts.weights);
  }
}
