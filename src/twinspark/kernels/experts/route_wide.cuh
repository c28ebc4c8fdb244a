// Router products of many rows by the asynchronous matrix instructions of sm_90a, for bf16 weights; the order of
// sums is that of route.cu, after whose functions and wgmma.cuh this comes.
//
// WIDE warpgroups multiply 64 experts each by the block's rows; weights go from memory into their registers. One more
// brings the rows: a thread copies 16 bytes to a place that only it reads, and stores what has come as 8 x 8 tiles,
// four for 32 inputs of 8 rows. That puts an input where mma.sync has it, so that its places are the same.
#define REGISTERS 152                           // of a thread that multiplies; 128 at the start
#define REGISTERS_LEFT (128 - 24 * WIDE)        // of one that does not
#define PART_INPUTS 64
#define GROUP_BYTES (8 * PART_INPUTS * 2)   // of 8 rows in a part
#define PART_BYTES (ROW_TILES * GROUP_BYTES)
#define CHUNK_PARTS (CHUNK / PART_INPUTS)
#define TURNS 4                             // parts that matrix instructions read
#define ROWS_ASKED 8                        // parts of rows asked for
#define WEIGHTS_ASKED 4                     // parts of weights in registers
#if ROW_TILES != 8 || PIECES != 1 || CHUNK_PARTS != 2 * TURNS || WIDE > 3
#error "two groups of 8 rows a warp that brings them; weights are bf16; barriers turn over once a chunk"
#endif

__device__ __forceinline__ void wgmma_bf16(float c[8][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
      "{%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
      : ACC8(0), ACC8(2), ACC8(4), ACC8(6)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ uint4 load_constant(const u16* p) {  // where it stands, not earlier or later
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Places in shared memory: parts that matrix instructions read, then rows as they come. `full` and `empty` are
// barriers, 8 bytes each.
struct Room { u32 parts, raw, full, empty; };

// Parts [first, end) of 64 inputs, by the last 128 threads. Rows that are not there are the last one again.
__device__ __forceinline__ void bring_rows(
    const Room& room, const u16* x, int row0, int rows, int x_pitch, int first, int end) {
  const int tid = threadIdx.x - 128 * WIDE, lane = tid & 31, group = 2 * (tid >> 5), num = end - first;
  const u16* from[2];
#pragma unroll
  for (int j = 0; j < 2; j++)
    from[j] = x + (u64)min(row0 + 8 * (group + j) + (lane >> 2), rows - 1) * x_pitch + first * PART_INPUTS + 8 * (lane & 3);
  const u32 own = room.raw + 16 * tid, to = room.parts + group * GROUP_BYTES + 16 * lane;
  const auto ask = [&](int part) {
    const u32 at = own + part % ROWS_ASKED * PART_BYTES;
    if (part < num)
#pragma unroll
      for (int i = 0; i < 4; i++) copy_async(at + 2048 * i, from[i / 2] + part * PART_INPUTS + 32 * (i % 2), true);
    end_copies();
  };
  wait_for_producer();
  for (int part = 0; part < ROWS_ASKED - 1; part++) ask(part);
#pragma unroll 1
  for (int part = 0; part < num; part++) {
    ask(part + ROWS_ASKED - 1);  // where the part before has been read
    wait_for_copies<ROWS_ASKED - 1>();
    const u32 at = own + part % ROWS_ASKED * PART_BYTES, turn = part % TURNS;
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w) : "r"(at + 2048 * i) : "memory");
    if (part >= TURNS) barrier_wait(room.empty + 8 * turn, (part / TURNS - 1) & 1);
#pragma unroll
    for (int i = 0; i < 4; i++)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                   ::"r"(to + turn * PART_BYTES + i / 2 * GROUP_BYTES + i % 2 * 512),
                   "r"(v[i].x), "r"(v[i].y), "r"(v[i].z), "r"(v[i].w) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane == 0) barrier_arrive(room.full + 8 * turn);
  }
}

// 16 experts a warp, a lane's two rows of weights.
struct Weights {
  const u16 *low, *high;
  uint4 v[WEIGHTS_ASKED][4];
  __device__ __forceinline__ void ask(int place, int part) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      v[place][i] = load_constant((i % 2 ? high : low) + part * PART_INPUTS + i / 2 * 32);
  }
};
__device__ __forceinline__ void multiply_part(float acc[8][4], const uint4 w[4], u32 rows) {
  // 8 x 8 blocks of 128 bytes, neighbours along inputs, 8 rows GROUP_BYTES apart
  const u64 b = (u64)((rows >> 4) & 0x3fff) | (u64)(128 >> 4) << 16 | (u64)(GROUP_BYTES >> 4) << 32;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 2; step++) {
    const uint4 low = w[2 * step], high = w[2 * step + 1];
    wgmma_bf16(acc, low.x, high.x, low.y, high.y, b + 32 * step);
    wgmma_bf16(acc, low.z, high.z, low.w, high.w, b + 32 * step + 16);
  }
  wgmma_commit();
}
__device__ __forceinline__ void leave(const Room& room, int turn) {  // a warp is through with a part
  if ((threadIdx.x & 31) == 0) barrier_arrive(room.empty + 8 * turn);
}
// A whole chunk: a part's weights are asked for when the part four before it is done. `last`: the last part there is.
__device__ __forceinline__ void multiply_chunk(float acc[8][4], Weights& w, const Room& room, int part, int last) {
#pragma unroll
  for (int s = 0; s < CHUNK_PARTS; s++) {
    barrier_wait(room.full + 8 * (s % TURNS), s / TURNS);
    multiply_part(acc, w.v[s % WEIGHTS_ASKED], room.parts + s % TURNS * PART_BYTES);
    if (s == 0) continue;
    wgmma_wait<1>();
    leave(room, (s - 1) % TURNS);
    w.ask((s - 1) % WEIGHTS_ASKED, min(part + s - 1 + WEIGHTS_ASKED, last));
  }
  wgmma_wait<0>();
  leave(room, (CHUNK_PARTS - 1) % TURNS);
  w.ask((CHUNK_PARTS - 1) % WEIGHTS_ASKED, min(part + CHUNK_PARTS - 1 + WEIGHTS_ASKED, last));
}
// What is left after the last whole chunk.
__device__ __forceinline__ void multiply_rest(float acc[8][4], Weights& w, const Room& room, int part, int end) {
#pragma unroll 1
  for (int s = 0; part + s < end; s++) {
    w.ask(0, part + s);
    barrier_wait(room.full + 8 * (s % TURNS), s / TURNS);
    multiply_part(acc, w.v[0], room.parts + s % TURNS * PART_BYTES);
    wgmma_wait<0>();
    leave(room, s % TURNS);
  }
}

// As router_logits: grid (64 * WIDE experts, parts, 64 rows), as many parts as chunks, or 1 that holds their sum; inputs a
// multiple of 64. Shared memory: (TURNS + ROWS_ASKED) * PART_BYTES.
extern "C" __global__ void __launch_bounds__(128 * (WIDE + 1), 1) router_logits_wide(
    const u16* __restrict__ weights, const u16* x, float* logits, int rows, int experts, int inputs, int x_pitch) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ u64 barriers[2 * TURNS];
  const int group = threadIdx.x >> 7, expert0 = blockIdx.x * 64 * WIDE, row0 = blockIdx.z * 8 * ROW_TILES;
  const int all = inputs / PART_INPUTS, first = gridDim.y > 1 ? blockIdx.y * CHUNK_PARTS : 0;
  const int end = gridDim.y > 1 ? min(first + CHUNK_PARTS, all) : all;
  const u32 at = smem_address(shared), full = smem_address(barriers);
  const Room room = {at, at + TURNS * PART_BYTES, full, full + 8 * TURNS};
  let_consumer_start();
  if (threadIdx.x == 0) {
    const int busy = min((experts - expert0 + 63) / 64, WIDE);
    for (int i = 0; i < TURNS; i++) {
      barrier_init(room.full + 8 * i, 4);
      barrier_init(room.empty + 8 * i, 4 * busy);
    }
    barriers_ready();
  }
  __syncthreads();
  if (group == WIDE) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_LEFT));
    bring_rows(room, x, row0, rows, x_pitch, first, end);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  if (expert0 + 64 * group >= experts) return;
  const int lane = threadIdx.x & 31, expert = expert0 + (threadIdx.x >> 5) * 16 + (lane >> 2);
  Weights w;  // of experts that are not there: the last one's, left out when stored
  w.low = weights + (u64)min(expert, experts - 1) * inputs + 8 * (lane & 3);
  w.high = weights + (u64)min(expert + 8, experts - 1) * inputs + 8 * (lane & 3);
#pragma unroll
  for (int i = 0; i < WEIGHTS_ASKED; i++) w.ask(i, min(first + i, end - 1));
  float total[8][4];
  wait_for_producer();  // whoever reads the logits' memory
#pragma unroll 1
  for (int part = first; part < end; part += CHUNK_PARTS) {
    float acc[8][4] = {};
    if (part + CHUNK_PARTS <= end) multiply_chunk(acc, w, room, part, end - 1);
    else multiply_rest(acc, w, room, part, end);
#pragma unroll
    for (int r = 0; r < 8; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) total[r][i] = part == first ? acc[r][i] : total[r][i] + acc[r][i];
  }
  store_logits(total, logits + (u64)blockIdx.y * rows * experts, row0, expert, rows, experts);
}
