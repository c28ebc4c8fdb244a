// Products of very many rows with one EXL3 matrix, in the bits of rows.cu: weights were decoded into a slab of fp16 by
// unpack.cu, and are multiplied by plain matrix instructions, with an accumulator of the chunk and one of the chunks
// before it. Those of compute capability 9.0 take both operands from shared memory; elsewhere warps load them, one step
// ahead: 8 x 8 blocks of 128 bytes are what ldmatrix reads without conflicts, too.
//
// Macros: WGMMA 1 for compute capability 9.0, ROWS of a block (128, 160 or 192; without WGMMA 64 or 128), STAGES of the
// ring of 64-input parts. Parts of 32 in twice the stages keep as many bytes under way, but made products without WGMMA
// a quarter slower (5120x1792, 4,096 rows, H200): each part costs every warp a wait.
#include "common.cuh"
#include "wide.cuh"

#define WARPS 8
#define ROW_TILES (ROWS / 8)
#define PART_INPUTS 64
#define COLUMNS 128
#define X_BYTES (ROWS * PART_INPUTS * 2)
#define W_BYTES (COLUMNS * PART_INPUTS * 2)
#define STAGE_BYTES (X_BYTES + W_BYTES)
#define SUM_PITCH 132

// x [M, K] to rotated fp16 in blocks' order: [M / ROWS up][K / 8][ROWS][8], so that a part of a block's rows is one
// run of bytes and 8 rows by 8 inputs are 128 of them. A warp takes 128 inputs of 8 rows, a lane runs of 8 of a row.
// grid (K / 128, M / 32 up, matrices). With a `table`, see rows.cu, matrices have rows x_step bytes apart, and their
// results lie one after another.
extern "C" __global__ void __launch_bounds__(128) exl3_rotate_wide(
    const void* x, const u16* __restrict__ suh, u16* out, int M, int K, int x_pitch, int x_type,
    const u64* __restrict__ table, int x_step) {
  let_consumer_start();
  if (table) {
    suh = (const u16*)table[3 * blockIdx.z + 1];
    x = (const char*)x + (u64)blockIdx.z * x_step;
    out += (u64)blockIdx.z * ((M + ROWS - 1) / ROWS * ROWS) * K;
  }
  const int lane = threadIdx.x & 31, row = blockIdx.y * 32 + (threadIdx.x >> 5) * 8 + (lane >> 2);
  const int k = 128 * blockIdx.x + 8 * (lane & 3);
  const u64 at = (u64)row * x_pitch + k;
  wait_for_producer();
  Four f[8];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    f[2 * i] = f[2 * i + 1] = {0, 0, 0, 0};
    if (row >= M) continue;
    if (x_type == TYPE_FP32) {
      f[2 * i] = load_four(x, at + 32 * i, TYPE_FP32);
      f[2 * i + 1] = load_four(x, at + 32 * i + 4, TYPE_FP32);
    } else {  // a run is one load
      const uint4 v = *(const uint4*)((const u16*)x + at + 32 * i);
      f[2 * i].a = v.x; f[2 * i].b = v.y; f[2 * i + 1].a = v.z; f[2 * i + 1].b = v.w;
    }
  }
  uint4 s[4];
#pragma unroll
  for (int i = 0; i < 4; i++) s[i] = *(const uint4*)(suh + k + 32 * i);
  float v[32];
#pragma unroll
  for (int i = 0; i < 8; i++) widen(f[i], x_type, v + 4 * i);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    scale_four(v + 8 * i, make_uint2(s[i].x, s[i].y));
    scale_four(v + 8 * i + 4, make_uint2(s[i].z, s[i].w));
  }
  hadamard_wide<8>(v);
  if (row >= M) return;
  u16* to = out + (((u64)(row / ROWS) * (K / 8) + k / 8) * ROWS + row % ROWS) * 8;
  store_runs(v, to, 4 * ROWS * 8);
}

#if WGMMA
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// LINES rows or columns in shared memory: 8 x 8 blocks of 128 bytes, LINES lines apart along inputs.
template <int LINES> __device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address >> 4) & 0x3fff) | (u64)LINES << 16 | (u64)(128 >> 4) << 32;
}
#define ACC8(i) \
  "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]), \
  "+f"(c[i + 1][0]), "+f"(c[i + 1][1]), "+f"(c[i + 1][2]), "+f"(c[i + 1][3])
__device__ __forceinline__ void wgmma(float c[ROW_TILES][4], u64 a, u64 b) {
#if ROWS == 128
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
      " %64, %65, 1, 1, 1, 0, 0;"
      : ACC8(0), ACC8(2), ACC8(4), ACC8(6), ACC8(8), ACC8(10), ACC8(12), ACC8(14)
      : "l"(a), "l"(b));
#elif ROWS == 160
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n160k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79},"
      " %80, %81, 1, 1, 1, 0, 0;"
      : ACC8(0), ACC8(2), ACC8(4), ACC8(6), ACC8(8), ACC8(10), ACC8(12), ACC8(14),
        ACC8(16), ACC8(18)
      : "l"(a), "l"(b));
#elif ROWS == 192
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95},"
      " %96, %97, 1, 1, 1, 0, 0;"
      : ACC8(0), ACC8(2), ACC8(4), ACC8(6), ACC8(8), ACC8(10), ACC8(12), ACC8(14),
        ACC8(16), ACC8(18), ACC8(20), ACC8(22)
      : "l"(a), "l"(b));
#endif
}
#else
#define GROUP 8  // column blocks that are multiplied side by side
#define WARP_ROWS 32  // and 64 columns of a warp, or 32: the fewest bytes of shared memory that registers allow
#define ROW_WARPS (ROWS / WARP_ROWS)
#define COLUMN_TILES (ROWS / 32)
#define WARP_TILES (WARP_ROWS / 8)
#define STEPS (PART_INPUTS / 16)
struct Operands { u32 columns[COLUMN_TILES][4], rows[WARP_TILES / 2][4]; };

// The operands of 16 inputs; `columns` and `rows` are a lane's lines in the part.
__device__ __forceinline__ void load_step(Operands& f, u32 columns, u32 rows, int step) {
#pragma unroll
  for (int c = 0; c < COLUMN_TILES; c++) load_b(columns + (step * 2 * COLUMNS + c * 16) * 16, f.columns[c]);
#pragma unroll
  for (int r = 0; r < WARP_TILES / 2; r++) load_b(rows + (step * 2 * ROWS + r * 16) * 16, f.rows[r]);
}
__device__ __forceinline__ void multiply_step(float acc[COLUMN_TILES][WARP_TILES][4], const Operands& f) {
#pragma unroll
  for (int c = 0; c < COLUMN_TILES; c++)
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
      mma(acc[c][r], f.columns[c], f.rows[r / 2][r % 2 * 2], f.rows[r / 2][r % 2 * 2 + 1]);
}
#endif
__device__ __forceinline__ void workers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
}
// A warp has left a stage.
__device__ __forceinline__ void leave_stage(u32 empty, int lane) {
  if (lane == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(empty) : "memory");
}

// A part's bytes, for a stage; `full` counts them.
__device__ __forceinline__ void ask(u32 stage, u32 full, const char* rows, const char* weights, int part) {
  barrier_expect(full, STAGE_BYTES);
  bulk_copy(stage, rows + (u64)part * X_BYTES, X_BYTES, full);
  bulk_copy(stage + X_BYTES, weights + (u64)part * W_BYTES, W_BYTES, full);
}

// Eight rows of sums a warp, rotated, scaled and stored.
__device__ __forceinline__ void finish_rows(const float* sums, const Output& out, int M, int pitch, int row0, int column0) {
  const int lane = threadIdx.x & 31, column = column0 + 4 * (lane & 3);
  for (int r0 = (threadIdx.x >> 5) * 8; r0 < ROWS; r0 += 8 * WARPS) {
    const int row = row0 + r0 + (lane >> 2);
    float v[32];
    finish_wide(v, sums + (r0 + (lane >> 2)) * SUM_PITCH + 4 * (lane & 3), out.svh + column);
    if (row >= M) continue;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float* f = v + 4 * i;
      const int here = column + 16 * i;
      if (out.bias) {
        const uint2 b = *(const uint2*)(out.bias + here);
        f[0] += half_to_float(b.x & 0xffff); f[1] += half_to_float(b.x >> 16);
        f[2] += half_to_float(b.y & 0xffff); f[3] += half_to_float(b.y >> 16);
      }
      store_four(f, out, (u64)row * pitch + here);
    }
  }
}

// xr as exl3_rotate_wide leaves it, `slab` as exl3_unpack does from column `first` on; rows of y are `pitch` apart.
// grid (M / ROWS up, columns / 128, matrices); with a `table` those of several matrices, results y_step bytes apart.
// With WGMMA a third warpgroup, whose registers the others get, has a warp that only asks for bytes; else warp 0 asks
// for them amid its work: registers of 9 warps would be those of 12.
extern "C" __global__ void __launch_bounds__(32 * WARPS + (WGMMA ? 128 : 0), 1) exl3_slab(
    const u16* __restrict__ slab, const u16* __restrict__ svh, const u16* __restrict__ bias,
    const u16* __restrict__ xr, void* __restrict__ y, int M, int K, int pitch, int first, int y_type,
    const u64* __restrict__ table, int y_step) {
  extern __shared__ __align__(128) unsigned char shared[];
  static_assert(STAGES >= 2, "a part is asked for while the one before is read");
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, parts = K / PART_INPUTS;
  const u32 full_at = smem_address(full), empty_at = smem_address(empty), shared_at = smem_address(shared);
  if (tid == 0) {
    for (int i = 0; i < STAGES; i++) { barrier_init(full_at + 8 * i, 1); barrier_init(empty_at + 8 * i, WARPS); }
    barriers_ready();
  }
  __syncthreads();
  let_consumer_start();
  if (table) {
    svh = (const u16*)table[3 * blockIdx.z + 2];
    slab += (u64)blockIdx.z * gridDim.y * K * COLUMNS;
    xr += (u64)blockIdx.z * gridDim.x * K * ROWS;
    y = (char*)y + (u64)blockIdx.z * y_step;
  }
#if !WGMMA  // neighbours share rows, and those after them the columns: both are read from a small L2
  const int order = blockIdx.x + gridDim.x * blockIdx.y, group = order / (GROUP * gridDim.x) * GROUP;
  const int within = order - group * gridDim.x, width = min(GROUP, gridDim.y - group);
  const int row_block = within / width, column_block = group + within % width;
#else
  const u32 row_block = blockIdx.x, column_block = blockIdx.y;
#endif
#if WGMMA
  if (warp >= WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    wait_for_producer();
    const char* rows = (const char*)(xr + (u64)row_block * K * ROWS);
    const char* weights = (const char*)(slab + (u64)column_block * K * COLUMNS);
    int stage = 0, parity = 1;
    for (int part = 0; part < parts && warp == WARPS; part++) {
      const u32 to = shared_at + stage * STAGE_BYTES, full_here = full_at + 8 * stage;
      if (part >= STAGES) barrier_wait(empty_at + 8 * stage, parity);
      if (lane == 0) ask(to, full_here, rows, weights, part);
      __syncwarp();
      if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float total[ROW_TILES][4];
    int stage = 0, parity = 0;
    for (int part = 0; part < parts;) {
      float acc[ROW_TILES][4] = {};
      const int last = min(part + CHUNK / PART_INPUTS, parts);
      const bool first_chunk = part == 0;
      int before = -1;  // the stage that is still read
#pragma unroll 1
      for (; part < last; part++) {
        barrier_wait(full_at + 8 * stage, parity);
        const u32 x_at = __shfl_sync(0xffffffffu, shared_at + stage * STAGE_BYTES, 0);  // uniform, and known to be
        const u64 rows = descriptor<ROWS>(x_at);
        const u64 columns = descriptor<COLUMNS>(x_at + X_BYTES + __shfl_sync(0xffffffffu, warp >> 2, 0) * 64 * 16);
        wgmma_fence();
#pragma unroll
        for (int t = 0; t < PART_INPUTS / 16; t++)
          wgmma(acc, columns + t * 2 * COLUMNS, rows + t * 2 * ROWS);
        wgmma_commit();
        wgmma_wait<1>();
        __syncwarp();
        if (before >= 0) leave_stage(empty_at + 8 * before, lane);
        before = stage;
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
      }
      wgmma_wait<0>();
      __syncwarp();
      leave_stage(empty_at + 8 * before, lane);
      add_chunk<ROW_TILES>(total, acc, first_chunk);
    }
    workers_sync();  // the ring is free: sums go there, [ROWS][SUM_PITCH]
    float* sums = (float*)shared;
    leave_sums<ROW_TILES, SUM_PITCH>(sums, total, warp, lane);
#else
  {
    const char* rows = (const char*)(xr + (u64)row_block * K * ROWS);
    const char* weights = (const char*)(slab + (u64)column_block * K * COLUMNS);
    if (warp == 0) {
      wait_for_producer();
      for (int part = 0; part < min(STAGES, parts) && lane == 0; part++)
        ask(shared_at + part * STAGE_BYTES, full_at + 8 * part, rows, weights, part);
      __syncwarp();
    }
    const int row0 = warp % ROW_WARPS * WARP_ROWS, column0 = warp / ROW_WARPS * 16 * COLUMN_TILES;
    const u32 row_line = ((lane >> 3 & 1) * ROWS + row0 + (lane >> 4) * 8 + (lane & 7)) * 16;
    const u32 column_line = X_BYTES + ((lane >> 4) * COLUMNS + column0 + (lane >> 3 & 1) * 8 + (lane & 7)) * 16;
    float total[COLUMN_TILES][WARP_TILES][4];
    Operands f[2];
    int stage = 0, parity = 0, stage_before = 0, parity_before = 0;
    barrier_wait(full_at, 0);
    load_step(f[0], shared_at + column_line, shared_at + row_line, 0);
    for (int part = 0; part < parts;) {
      float acc[COLUMN_TILES][WARP_TILES][4] = {};
      const int last = min(part + CHUNK / PART_INPUTS, parts);
      const bool first_chunk = part == 0;
#pragma unroll 1
      for (; part < last; part++) {
        const u32 here = shared_at + stage * STAGE_BYTES, empty_here = empty_at + 8 * stage;
#pragma unroll
        for (int t = 0; t + 1 < STEPS; t++) {
          load_step(f[(t + 1) % 2], here + column_line, here + row_line, t + 1);
          multiply_step(acc, f[t % 2]);
          if (t == STEPS / 2 - 1 && warp == 0 && part > 0 && part - 1 + STAGES < parts) {
            barrier_wait(empty_at + 8 * stage_before, parity_before);  // by now others have left it, too
            if (lane == 0)
              ask(shared_at + stage_before * STAGE_BYTES, full_at + 8 * stage_before, rows, weights, part - 1 + STAGES);
            __syncwarp();
          }
        }
        stage_before = stage; parity_before = parity;
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
        if (part + 1 < parts) {
          const u32 next = shared_at + stage * STAGE_BYTES;
          barrier_wait(full_at + 8 * stage, parity);
          load_step(f[0], next + column_line, next + row_line, 0);
        }
        multiply_step(acc, f[(STEPS - 1) % 2]);
        __syncwarp();
        leave_stage(empty_here, lane);
      }
#pragma unroll
      for (int c = 0; c < COLUMN_TILES; c++) add_chunk<WARP_TILES>(total[c], acc[c], first_chunk);
    }
    workers_sync();  // the ring is free: sums go there, [ROWS][SUM_PITCH]
    float* sums = (float*)shared;
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; c++)
      leave_sums<WARP_TILES, SUM_PITCH>(sums + row0 * SUM_PITCH + column0 + c * 16, total[c], 0, lane);
#endif
    workers_sync();
    finish_rows(sums, {svh, bias, y, y_type}, M, pitch, row_block * ROWS, first + column_block * COLUMNS);
  }
}
