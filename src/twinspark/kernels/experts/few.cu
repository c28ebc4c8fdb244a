// Products of experts for up to FEW rows, in the bits of decode.cu: blocks stay, and ask for the weights of the unit
// after next before they multiply by the next one's, so that they decode while weights, tables and rows come.
//
// Macros: WARPS 4 or 8 of a block, FEW rows at most, 4 or 8, CODEBOOK_MASK codebooks in use.
#include "../exl3/common.cuh"
#include "tables.cuh"
#include "decode.cuh"

#define FEW_ITEMS (8 * FEW)       // experts of all shards
#define FEW_PAIRS (FEW * (MOST_PLACES - 1))
#define FEW_PITCH (CHUNK + 8)

struct FewItem { int expert, count; u16 pairs[FEW], rows[FEW]; };
struct FewShared {
  __align__(8) u64 full[2][PARTS];
  Matrix matrices[2 * FEW_ITEMS];  // [item of all shards][gate, up], or of down
  FewItem items[FEW_ITEMS];
  int ids[FEW_PAIRS], firsts[FEW_PAIRS], present;
};
// The experts that rows have, by id after the shared one. Run by all threads. Loops stay loops: code that runs once
// is waited for.
__device__ __forceinline__ void list_items(
    FewShared& s, const int* ids, const unsigned char* kept, int rows, int places, int experts) {
  const int at = threadIdx.x, all = rows * places;
  const int id = at < all ? id_of(ids, kept, at) : -1;
  if (at < all) s.ids[at] = id;
  if (at == 0) s.present = 1;
  if (at < rows) { s.items[0].pairs[at] = at * (places + 1) + places; s.items[0].rows[at] = at; }
  if (at == 0) { s.items[0].expert = experts; s.items[0].count = rows; }
  __syncthreads();
  bool first = id >= 0;
#pragma unroll 1
  for (int i = 0; i < min(at, all); i++) first = first && s.ids[i] != id;
  if (at < all) s.firsts[at] = first;
  __syncthreads();
  if (first) {
    int rank = 1, count = 0;
#pragma unroll 1
    for (int i = 0; i < all; i++) rank += s.firsts[i] && s.ids[i] < id;
    FewItem& item = s.items[rank];
#pragma unroll 1
    for (int i = at; i < all; i++)
      if (s.ids[i] == id && count < FEW) {
        item.pairs[count] = i + i / places;
        item.rows[count++] = i / places;
      }
    item.expert = id;
    item.count = count;
    atomicAdd(&s.present, 1);
  }
  __syncthreads();
}
// A chunk of a matrix by 16 * WARPS columns.
struct FewUnit { int column_block, chunk, width, number, which; };
struct FewSizes { int inputs, outputs, columns, chunks, sets; };
__device__ __forceinline__ FewUnit few_unit(int at, const FewSizes& z) {
  const int rest = at / z.columns, each = z.chunks * z.sets, number = rest / each, y = rest - number * each;
  const int chunk = z.sets == 2 ? y >> 1 : y;
  return {at - rest * z.columns, chunk, min(CHUNK, z.inputs - chunk * CHUNK), number, z.sets == 2 ? y & 1 : 0};
}
// As ask_for_weights; barriers of parts that a unit does not have pass at once.
__device__ __forceinline__ void ask_for_few(u32 to, u32 full_at, const Matrix& m, const FewUnit& unit, int outputs) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  const u32 tile_bytes = 32 * m.bits, bytes = WARPS * tile_bytes;
  const u64 pitch = (u64)(outputs / 16) * tile_bytes;
  const char* from = (const char*)m.trellis + (unit.chunk * KTILES + warp) * pitch + unit.column_block * bytes;
  if ((threadIdx.x & 31) != 0) return;
  if (warp == 0)
    for (int part = 0; part < PARTS; part++)
      barrier_expect(full_at + 8 * part, part < unit.width / 128 ? PART * bytes : 0);
  for (int k = warp; k < unit.width / 16; k += WARPS, from += WARPS * pitch)
    bulk_copy(to + k * bytes, from, bytes, full_at + 8 * (k / PART));
}
// What a lane has of a unit's rows, on its way: a warp takes 128 values of every (WARPS / 4)-th row.
#define FEW_STEP (WARPS / 4)
struct FewRows { uint2 values[FEW / FEW_STEP], scale; };
template <bool DOWN>
__device__ __forceinline__ FewRows load_few(
    const u16* x, const Matrix& m, const FewItem& item, const FewUnit& unit, int inputs) {
  const int warp = threadIdx.x >> 5, k = 128 * (warp & 3) + 4 * (threadIdx.x & 31), first = unit.chunk * CHUNK + k;
  FewRows r = {};
  if (k >= unit.width) return r;
  if (!DOWN) r.scale = *(const uint2*)(m.suh + first);
#pragma unroll
  for (int i = 0; i < FEW / FEW_STEP; i++) {
    const int row = (warp >> 2) + FEW_STEP * i;
    if (row < item.count) r.values[i] = __ldcg((const uint2*)(x + (u64)(DOWN ? item.pairs : item.rows)[row] * inputs + first));
  }
  return r;
}
template <bool DOWN>
__device__ __forceinline__ void put_few(u16* xs, const FewRows& r, const FewItem& item, const FewUnit& unit) {
  const int warp = threadIdx.x >> 5, k = 128 * (warp & 3) + 4 * (threadIdx.x & 31);
  if (k >= unit.width) return;
#pragma unroll
  for (int i = 0; i < FEW / FEW_STEP; i++) {
    const int row = (warp >> 2) + FEW_STEP * i;
    const Four f = {r.values[i].x, r.values[i].y, 0, 0};
    if (row < item.count) *(uint2*)(xs + row * FEW_PITCH + k) = DOWN ? r.values[i] : rotate_four(f, TYPE_BF16, r.scale);
  }
}
// Arguments as of products; `buffer`: bytes for a unit's weights. Dynamic shared memory: rows twice, weights twice.
template <bool DOWN>
__device__ __forceinline__ void products_few(
    const Tables& tables, const u16* x, const int* ids, const unsigned char* kept, float* work,
    int rows, int places, int experts, int shards, int inputs, int outputs, int buffer) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ FewShared s;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, stride = gridDim.x, all = rows * (places + 1);
  const FewSizes z = {inputs, outputs, outputs / (16 * WARPS), (inputs + CHUNK - 1) / CHUNK, DOWN ? 1 : 2};
  const int each = z.columns * z.chunks * z.sets;  // units of an expert
  u16* const xs = (u16*)shared;                       // [2][FEW][FEW_PITCH]
  unsigned char* const tiles = shared + 2 * FEW * FEW_PITCH * 2;
  const u32 full_at = smem_address(s.full), tiles_at = smem_address(tiles);
  // rows past FEW are not there: they get another row's values and are not stored
  const u32 x_at = smem_address(xs) + (lane & 7 & (FEW - 1)) * FEW_PITCH * 2 + (lane >> 3) * 16;
  int at = blockIdx.x;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * PARTS; i++) barrier_init(full_at + 8 * i, 1);
    barriers_ready();
  }
  __syncthreads();
  FewUnit unit = few_unit(at, z);
  const bool of_shared = !DOWN && at < each;  // known before the ids are there
  if (of_shared) ask_for_few(tiles_at, full_at, tables.of(0)[experts * 3 + unit.which], unit, outputs);
  if (!DOWN) wait_for_producer();
  list_items(s, ids, kept, rows, places, experts);
  const int present = s.present, total = present * shards * each;
#pragma unroll 1
  for (int i = threadIdx.x; i < present * shards * z.sets; i += 32 * WARPS) {
    const int number = i / z.sets, shard = number / present, item = number - shard * present;
    s.matrices[i] = tables.of(shard)[s.items[item].expert * 3 + (DOWN ? 2 : i - number * z.sets)];
  }
  __syncthreads();
  const auto matrix_of = [&](const FewUnit& u) -> const Matrix& { return s.matrices[u.number * z.sets + u.which]; };
  const auto item_of = [&](const FewUnit& u) -> const FewItem& { return s.items[u.number % present]; };
  const auto rows_of = [&](const FewUnit& u) { return x + (DOWN ? (u64)(u.number / present) * all * inputs : 0); };
  if (at < total && !of_shared) ask_for_few(tiles_at, full_at, matrix_of(unit), unit, outputs);
  FewUnit next = few_unit(at + stride, z);
  if (at + stride < total) ask_for_few(tiles_at + buffer, full_at + 8 * PARTS, matrix_of(next), next, outputs);
  if (DOWN) wait_for_producer();
  let_consumer_start();
  if (at >= total) return;
  put_few<DOWN>(xs, load_few<DOWN>(rows_of(unit), matrix_of(unit), item_of(unit), unit, inputs), item_of(unit), unit);
  __syncthreads();
  const u64 set_pitch = (u64)z.chunks * outputs;
#pragma unroll 1
  for (int turn = 0; at < total; turn++, at += stride) {
    const int here = turn & 1;
    const bool more = at + stride < total;
    FewRows ahead = {};
    if (more) ahead = load_few<DOWN>(rows_of(next), matrix_of(next), item_of(next), next, inputs);
    const Matrix& m = matrix_of(unit);
    const FewItem& item = item_of(unit);
    const Sums sums = {
        work + ((u64)(unit.number / present) * all * z.sets + unit.which) * set_pitch + unit.column_block * 16 * WARPS,
        z.sets * set_pitch, outputs, unit.chunk};
    multiply_any(m.codebook * 16 + m.bits, (const u32*)(tiles + here * buffer), x_at + here * FEW * FEW_PITCH * 2,
                 full_at + here * 8 * PARTS, turn >> 1 & 1, unit.width, sums, item.pairs, item.count);
    if (more) put_few<DOWN>(xs + (here ^ 1) * FEW * FEW_PITCH, ahead, item_of(next), next);
    __syncthreads();
    unit = next;
    next = few_unit(at + 2 * stride, z);
    if (at + 2 * stride < total)
      ask_for_few(tiles_at + here * buffer, full_at + here * 8 * PARTS, matrix_of(next), next, outputs);
  }
}
// grid: any number of blocks, all at once on the device.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) experts_hidden_few(
    const Matrix* t0, const Matrix* t1, const Matrix* t2, const Matrix* t3, const u16* x,
    const int* ids, const unsigned char* kept, float* work, int rows, int places, int experts, int shards,
    int inputs, int outputs, int buffer) {
  products_few<false>({t0, t1, t2, t3}, x, ids, kept, work, rows, places, experts, shards, inputs, outputs, buffer);
}
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) experts_down_few(
    const Matrix* t0, const Matrix* t1, const Matrix* t2, const Matrix* t3, const u16* x,
    const int* ids, const unsigned char* kept, float* work, int rows, int places, int experts, int shards,
    int inputs, int outputs, int buffer) {
  products_few<true>({t0, t1, t2, t3}, x, ids, kept, work, rows, places, experts, shards, inputs, outputs, buffer);
}
