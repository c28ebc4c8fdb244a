// Scores of entries: sum over heads of weight * relu(query . key), in fp32.
//
// Four warps take 64 keys as the first operand of int8 matrix instructions and the heads of a row as the second.
// Products are whole numbers, so neither the instruction nor the number of rows changes a bit. Heads fall into
// four runs of 2 * ceil(N / 8); a lane adds those of its run ascending, then (0 + 1) + (2 + 3).
//
// Macros: HEADS, even, up to 32; PACKED 1 for keys of rule B, 0 for bf16 values on its grid; GATHERED 1 when
// every row has its own candidate blocks; WGMMA 1 for the asynchronous instructions of sm_90a.
#include "common.cuh"

#define TURNS ((HEADS + 7) / 8)  // of eight heads
#define RUN (2 * TURNS)
#define THREADS 128
#define HELD (GATHERED ? 1 : ROW_TILE)

struct Query {  // of one row, in shared memory
  signed char numbers[4][2][TURNS][8][16];  // [group][half of its values][turn][run * 2 + odd head][4 lanes * 4]
  float4 weights[TURNS][4];                 // weight and -MAGIC * weight of a run's even, then its odd head
  uint2 below[TURNS][4];
};
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
// ---- keys

// Where a key lies, or null when it is not here.
__device__ __forceinline__ const unsigned char* page_of(const Keys& keys, int slot_first, int entry, int* row) {
  const int logical = keys.page_shift >= 0 ? entry >> keys.page_shift : entry / keys.page_rows;
  const int page = keys.table[slot_first + logical];
  *row = entry - logical * keys.page_rows;
  return page < 0 ? nullptr : keys.data + (u64)page * keys.page_bytes;
}
struct Source {  // the positions of a pass
  int slot_first;         // the slot's place in the page table
  int limit, seen;        // positions, and entries that the row sees
  const int* candidates;  // the row's blocks
  int block_shift;
};
__device__ __forceinline__ int entry_at(const Source& s, int position) {  // -1 for none
  if (position >= s.limit) return -1;
#if GATHERED
  const int block = s.candidates[position >> s.block_shift];
  const int entry = (block << s.block_shift) + (position & ((1 << s.block_shift) - 1));
  return block < 0 || entry >= s.seen ? -1 : entry;
#else
  return position;
#endif
}

// A tile's keys on their way to the matrix instruction.
struct Stage {
#if PACKED
  u32 values[TILE][16];
#endif
  u32 scales[TILE];  // scale bytes, then a Fold's shifts
};
struct Folded {       // of the keys that are worked on
  float units[TILE];  // what one whole number stands for; not a number for a key that is not here
  u32 below[TILE];
};

#if PACKED
// Asks for a tile: 16 bytes of values a turn, the scales at once where the tile lies in one page.
__device__ __forceinline__ void fetch(Stage* stage, const Keys& keys, const Source& source, int first) {
  const u32 values = smem_address(stage->values), scales = smem_address(stage->scales);
  const bool in_one = !GATHERED && keys.page_rows % TILE == 0;
  int row = 0;
  const unsigned char* page = in_one ? page_of(keys, source.slot_first, first, &row) : nullptr;
#pragma unroll
  for (int i = 0; i < TILE * 4 / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, key = at >> 2, piece = at & 3;
    const unsigned char* own = page;
    int own_row = row + key;
    if (!in_one) {
      const int entry = entry_at(source, first + key);
      own = entry < 0 ? nullptr : page_of(keys, source.slot_first, entry, &own_row);
    }
    const bool is_here = own != nullptr;
    const unsigned char* from = is_here ? own + own_row * 64 + piece * 16 : keys.data;
    copy16(values + key * 64 + ((piece ^ ((key >> 1) & 3)) << 4), from, is_here);
    if (piece == 0) {
      if (!is_here) stage->scales[key] = NO_KEY;
      else if (!in_one) copy4(scales + 4 * key, own + keys.page_rows * 64 + own_row * 4);
    }
  }
  if (page && threadIdx.x < TILE / 4)
    copy16(scales + threadIdx.x * 16, page + keys.page_rows * 64 + row * 4 + threadIdx.x * 16, true);
}
#endif
// Scale bytes to shifts, units and what lies below, a key a thread. True if all keys fold.
__device__ __forceinline__ bool fold_scales(Stage* stage, Folded* folded) {
  bool folds = true;
  if (threadIdx.x < TILE) {
    const u32 bytes = stage->scales[threadIdx.x];
    const Fold f = fold(bytes == NO_KEY ? 0 : bytes);
    stage->scales[threadIdx.x] = f.shifts;
    folded->units[threadIdx.x] = bytes == NO_KEY ? __int_as_float(0x7fffffff) : unit_of(f.base);
    folded->below[threadIdx.x] = f.below;
    folds = f.below == 0;
  }
  return __syncthreads_and(folds);
}
typedef u32 Fragments[4][4];  // of a warp's 16 keys: [group][register]

#if PACKED
__device__ __forceinline__ void decode(Fragments a, const Stage* stage) {
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = 16 * warp + 8 * half + g;
    const u32 shifts = stage->scales[key];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 x = stage->values[key][((j ^ ((g >> 1) & 3)) << 2) + q], by = (shifts >> (8 * j)) & 255;
      const u32 low = shifted(0x03020100u, by), high = shifted(0x0C080604u, by), turned = x ^ 0x88888888u;
      a[j][half] = difference(permute(low, high, x), permute(low, high, turned));
      a[j][2 + half] = difference(permute(low, high, x >> 16), permute(low, high, turned >> 16));
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
__device__ __forceinline__ void read_plain(
    Fragments a, Stage* stage, const Keys& keys, const Source& source, int first) {
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = 16 * warp + 8 * half + g, entry = entry_at(source, first + key);
    int row = 0;
    const unsigned char* page = entry < 0 ? nullptr : page_of(keys, source.slot_first, entry, &row);
    uint4 x[4];
    u32 bytes = 0;
#pragma unroll
    for (int j = 0; j < 4; j++)
      x[j] = page ? *(const uint4*)(page + row * (2 * WIDTH) + j * 64 + q * 16) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < 4; j++) {
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
      numbers_of(x[j], scale, &a[j][half], &a[j][2 + half]);
    }
  }
}
#endif

// ---- products of a warp's 16 keys with all heads of a row; a lane has two keys and its run's heads

typedef int Products[TURNS][4];  // [turn]: key g with the even and the odd head, key g + 8 with them

#if WGMMA
__device__ __forceinline__ void wgmma(Products c, const u32 a[4], u64 b, int adds) {
#define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds)
#define FOUR(i) "+r"(c[i][0]), "+r"(c[i][1]), "+r"(c[i][2]), "+r"(c[i][3])
#if TURNS == 1
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %9, 0;\n wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p;\n}" : FOUR(0) : OPERANDS);
#elif TURNS == 2
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %13, 0;\n wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 "
               "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p;\n}" : FOUR(0), FOUR(1) : OPERANDS);
#elif TURNS == 3
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %17, 0;\n wgmma.mma_async.sync.aligned.m64n24k32.s32.s8.s8 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, %16, p;\n}"
               : FOUR(0), FOUR(1), FOUR(2) : OPERANDS);
#else
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %21, 0;\n wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p;\n}"
               : FOUR(0), FOUR(1), FOUR(2), FOUR(3) : OPERANDS);
#endif
}
// Groups first..end-1 in one sum.
__device__ __forceinline__ void multiply(Products c, const Fragments a, const Query& query, int first, int end) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (first <= j && j < end) {
      const u64 b = (u64)((smem_address(query.numbers[j]) >> 4) & 0x3fff) | (u64)(TURNS * 8) << 16 | (u64)8 << 32;
      wgmma(c, a[j], b, j != first);
    }
  asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++)  // nothing reads them before
    asm volatile("" : FOUR(turn)::"memory");
}
#else
__device__ __forceinline__ void multiply(Products c, const Fragments a, const Query& query, int first, int end) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) c[turn][0] = c[turn][1] = c[turn][2] = c[turn][3] = 0;
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (first <= j && j < end)
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {  // independent sums in turn
        const u32 b0 = *(const u32*)(query.numbers[j][0][turn][0] + 4 * lane);
        const u32 b1 = *(const u32*)(query.numbers[j][1][turn][0] + 4 * lane);
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[turn][0]), "+r"(c[turn][1]), "+r"(c[turn][2]), "+r"(c[turn][3])
            : "r"(a[j][0]), "r"(a[j][1]), "r"(a[j][2]), "r"(a[j][3]), "r"(b0), "r"(b1));
      }
}
#endif

// ---- scores

// A number plus MAGIC as a float, at least MAGIC: relu without a conversion.
__device__ __forceinline__ float relu(int number) {
  return __int_as_float(__viaddmax_s32(number, MAGIC_BITS, MAGIC_BITS));
}

// All four groups in one sum; a term is weight * number, rounded once.
__device__ __forceinline__ void score_folded(float sums[2], const Fragments a, const Query& query) {
  Products c;
  multiply(c, a, query, 0, 4);
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const float4 w = query.weights[turn][threadIdx.x & 3];
#pragma unroll
    for (int half = 0; half < 2; half++)
      sums[half] = (sums[half] + fmaf(relu(c[turn][2 * half]), w.x, w.y)) + fmaf(relu(c[turn][2 * half + 1]), w.z, w.w);
  }
}
// A sum a group, put together in fp32, ascending.
__device__ __forceinline__ void score_spread(
    float sums[2], const Fragments a, const Query& query, const u32 key_below[2]) {
  float dots[TURNS][4] = {};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    Products c;
    multiply(c, a, query, j, j + 1);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      const uint2 below = query.below[turn][threadIdx.x & 3];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 query_below = i & 1 ? below.y : below.x;
        const int octaves = (signed char)(key_below[i >> 1] >> (8 * j)) + (signed char)(query_below >> (8 * j));
        dots[turn][i] += (float)c[turn][i] * __int_as_float((127 + octaves) << 23);
      }
    }
  }
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const float4 w = query.weights[turn][threadIdx.x & 3];
#pragma unroll
    for (int half = 0; half < 2; half++)
      sums[half] = (sums[half] + fmaxf(dots[turn][2 * half], 0.f) * w.x) + fmaxf(dots[turn][2 * half + 1], 0.f) * w.z;
  }
}

struct Outputs {
  float *scores, *tile_max, *block_max;
  int pitch, block_shift;  // block_shift below 0: no blocks wanted
};
__device__ __forceinline__ float larger(float a, int lanes) { return fmaxf(a, __shfl_xor_sync(0xffffffffu, a, lanes)); }

// A row's scores of a warp's keys, and the largest of each block. Returns the largest of all 16.
__device__ __forceinline__ float store(
    float sums[2], const float units[2], const Outputs& out, int row, int visible, int tile) {
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
  const int at = tile * TILE + 16 * warp + g;
  const u64 base = (u64)row * out.pitch;
  float most = -infinity();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float value = sums[half];
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    value += __shfl_xor_sync(0xffffffffu, value, 2);  // (0 + 1) + (2 + 3), in all four lanes
    const bool is_seen = at + 8 * half < visible && units[half] == units[half];
    value = is_seen ? value * units[half] : -infinity();
    if (q == half) out.scores[base + at + 8 * half] = value;
    if (out.block_shift >= 0) {
      float block = value;
      if (out.block_shift > 0) block = larger(block, 4);
      if (out.block_shift > 1) block = larger(block, 8);
      if (out.block_shift > 2) block = larger(block, 16);
      if (q == half && (g & ((1 << out.block_shift) - 1)) == 0)
        out.block_max[(base + at + 8 * half) >> out.block_shift] = block;
    }
    most = fmaxf(most, value);
  }
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes <<= 1) most = larger(most, lanes);
  return most;
}

// One row's queries into shared memory; whether some head's groups do not fold.
__device__ __forceinline__ void load_query(
    Query* to, u32* spread, const signed char* numbers, const float2* weights, const u32* below, int row) {
  for (int i = threadIdx.x; i < TURNS * 64; i += THREADS) {  // 16 bytes a turn: two groups of one lane
    const int piece = i & 3, column = (i >> 2) & 7, groups = (i >> 5) & 1, turn = i >> 6;
    const int head = (column >> 1) * RUN + 2 * turn + (column & 1);
    uint4 v = make_uint4(0, 0, 0, 0);
    if (head < HEADS) v = *(const uint4*)(numbers + ((u64)row * HEADS + head) * WIDTH + groups * 64 + piece * 16);
    *(u32*)&to->numbers[2 * groups][0][turn][column][4 * piece] = v.x;
    *(u32*)&to->numbers[2 * groups][1][turn][column][4 * piece] = v.y;
    *(u32*)&to->numbers[2 * groups + 1][0][turn][column][4 * piece] = v.z;
    *(u32*)&to->numbers[2 * groups + 1][1][turn][column][4 * piece] = v.w;
  }
  for (int i = threadIdx.x; i < TURNS * 4; i += THREADS) {
    const int run = i & 3, turn = i >> 2, head = run * RUN + 2 * turn;  // heads are even, so both are there or none
    float4 w = make_float4(0.f, 0.f, 0.f, 0.f);
    uint2 d = make_uint2(0, 0);
    if (head < HEADS) {
      w = *(const float4*)(weights + row * HEADS + head);
      d = *(const uint2*)(below + row * HEADS + head);
    }
    to->weights[turn][run] = w;
    to->below[turn][run] = d;
    if (d.x | d.y) *spread = 1;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the matrix instruction reads them
}

// 128 threads, any number of blocks: they are shared out evenly over the row tiles (rows when GATHERED), and
// take turns at the tiles of keys that one of the rows sees. scores [T][pitch], tile_max [T][pitch / 64],
// block_max [T][pitch >> block_shift]. Shared memory: Stage[2], Folded, Query[held].
extern "C" __global__ void __launch_bounds__(THREADS, 5) index_scores(
    const signed char* numbers, const float2* weights, const u32* below, const int2* tiles, const int* num_tiles,
    const int* visible, const int* slots, const unsigned char* key_data, const int* table, const int* candidates,
    float* scores, float* tile_max, float* block_max, int rows, int slot_pages, int page_rows, int page_bytes,
    int pitch, int most, int num_candidates, int block_shift, int wants_blocks) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ u32 spread[HELD];
  __shared__ int visibles[HELD];
  __shared__ float largest[HELD][4];
  Stage* stages = (Stage*)shared;
  Folded* folded = (Folded*)(shared + 2 * sizeof(Stage));
  Query* queries = (Query*)(folded + 1);
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2;
  const int page_shift = (page_rows & (page_rows - 1)) ? -1 : 31 - __clz(page_rows);
  const Keys keys = {key_data, table, page_rows, page_shift, page_bytes};
  const Outputs out = {scores, tile_max, block_max, pitch, wants_blocks ? block_shift : -1};
  wait_for_producer();
  const int groups = GATHERED ? rows : *num_tiles;
  const int parts = max((int)gridDim.x / max(groups, 1), 1);
#pragma unroll 1
  for (int group = blockIdx.x / parts; group < groups; group += gridDim.x / parts) {
    const int2 own = GATHERED ? make_int2(group, 1) : tiles[group];  // first row, rows
    const int slot = slots[own.x];
    __syncthreads();
    if (threadIdx.x < own.y) {
      spread[threadIdx.x] = 0;
      visibles[threadIdx.x] = positions(visible[own.x + threadIdx.x], slot, most, num_candidates, block_shift);
    }
    __syncthreads();
    int longest = 0;
    for (int i = 0; i < own.y; i++) longest = max(longest, visibles[i]);
    const Source source = {slot * slot_pages, longest, min(visible[own.x], most),
                           candidates + (u64)group * max(num_candidates, 0), block_shift};
    const int last = (longest + TILE - 1) / TILE;
    int tile = blockIdx.x % parts, turn = 0;
#if PACKED
    if (tile < last) fetch(stages, keys, source, tile * TILE);
#endif
    if (tile < last)
      for (int i = 0; i < own.y; i++) load_query(queries + i, spread + i, numbers, weights, below, own.x + i);
#pragma unroll 1
    for (; tile < last; tile += parts, turn ^= 1) {
      Stage* stage = stages + turn;
      Fragments a;
#if PACKED
      copies_done();
      __syncthreads();
      const bool folds = fold_scales(stage, folded);
      decode(a, stage);
      if (tile + parts < last) fetch(stages + (turn ^ 1), keys, source, (tile + parts) * TILE);
#else
      read_plain(a, stage, keys, source, tile * TILE);
      __syncthreads();
      const bool folds = fold_scales(stage, folded);
#endif
      const int key = 16 * warp + g;
      const float units[2] = {folded->units[key], folded->units[key + 8]};
#pragma unroll 1
      for (int i = 0; i < own.y; i++) {
        float sums[2] = {0.f, 0.f};
        if (folds && !spread[i]) {
          score_folded(sums, a, queries[i]);
        } else {
          const u32 key_below[2] = {folded->below[key], folded->below[key + 8]};
          score_spread(sums, a, queries[i], key_below);
        }
        const float most_of = store(sums, units, out, own.x + i, visibles[i], tile);
        if ((threadIdx.x & 31) == 0) largest[i][warp] = most_of;
      }
      __syncthreads();
      if (threadIdx.x < own.y) {
        const float* four = largest[threadIdx.x];
        const u64 at = (u64)(own.x + threadIdx.x) * (pitch / TILE) + tile;
        tile_max[at] = fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3]));
      }
    }
  }
  let_consumer_start();
}
