// Where the rows of decode windows read and write, and how they are rotated: one block a row.
//
// Macros: WINDOW positions a window shows, WINDOW_ROWS rows of its ring, RING_ROWS rows of a
// compressor ring, PAGE_TOKENS, PAIRS rotated pairs of a head.
typedef unsigned long long u64;

__device__ __forceinline__ void wait_for_producer() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_consumer_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// The angle is fp32(position) * fp32(frequency); its cosine and sine go through fp64, so they are the
// nearest fp32 numbers nearly always and the same ones in every kernel that calls this.
__device__ __forceinline__ void angle(int position, float frequency, float* cos_out, float* sin_out) {
  double s, c;
  sincos((double)__fmul_rn((float)position, frequency), &s, &c);
  *cos_out = (float)c;
  *sin_out = (float)s;
}

// positions [T] to cosines and sines [T, PAIRS]. grid T.
extern "C" __global__ void rope_angles(
    const int* __restrict__ positions, const float* __restrict__ frequency, float* __restrict__ cos_TP,
    float* __restrict__ sin_TP) {
  let_consumer_start();
  wait_for_producer();
  const int p = positions[blockIdx.x];
  for (int i = threadIdx.x; i < PAIRS; i += blockDim.x)
    angle(p, frequency[i], cos_TP + (u64)blockIdx.x * PAIRS + i, sin_TP + (u64)blockIdx.x * PAIRS + i);
}

// Everything of a decode row; a row of slot -1 is padding, and gets -1 everywhere (visible: 0).
// tables: [4][T][PAIRS] cosines then sines of the plain frequencies, then of the compressed ones;
// entry_tables: [2][T][PAIRS] of the first position of a ratio-2 entry. rows: [7][T] int, see places.py.
extern "C" __global__ void decode_places(
    const int* __restrict__ positions, const int* __restrict__ slots, const int* __restrict__ starts,
    const int* __restrict__ page_table, int slot_pages, const float* __restrict__ plain,
    const float* __restrict__ compressed, int* __restrict__ window_TW, int* __restrict__ late_TW,
    int* __restrict__ rows, float* __restrict__ tables, float* __restrict__ entry_tables, int T) {
  let_consumer_start();
  wait_for_producer();
  const int row = blockIdx.x, slot = slots[row];
  const bool live = slot >= 0;
  const int p = live ? positions[row] : 0, start = live ? starts[slot] : 0;
  for (int i = threadIdx.x; i < WINDOW; i += blockDim.x) {
    const int at = p - WINDOW + 1 + i, ring = slot * WINDOW_ROWS + (at + WINDOW_ROWS) % WINDOW_ROWS;
    window_TW[(u64)row * WINDOW + i] = live && at >= 0 ? ring : -1;
    late_TW[(u64)row * WINDOW + i] = live && at >= start ? ring : -1;
  }
  const u64 step = (u64)T * PAIRS, to = (u64)row * PAIRS;
  for (int i = threadIdx.x; i < PAIRS; i += blockDim.x) {
    angle(p, plain[i], tables + to + i, tables + step + to + i);
    angle(p, compressed[i], tables + 2 * step + to + i, tables + 3 * step + to + i);
    angle(p & ~1, compressed[i], entry_tables + to + i, entry_tables + step + to + i);
  }
  if (threadIdx.x == 0) {
    const int page = live ? page_table[slot * slot_pages + p / PAGE_TOKENS] : -1, in = p % PAGE_TOKENS;
    const bool pair = live && (p & 1);
    rows[row] = live ? slot * WINDOW_ROWS + p % WINDOW_ROWS : -1;
    rows[T + row] = live ? p + 1 : 0;
    rows[2 * T + row] = live ? page * PAGE_TOKENS + in : -1;
    rows[3 * T + row] = live ? (p + 1) / 2 : 0;
    rows[4 * T + row] = pair ? page * (PAGE_TOKENS / 2) + in / 2 : -1;
    rows[5 * T + row] = live ? slot * RING_ROWS + p % RING_ROWS : -1;
    rows[6 * T + row] = pair ? slot * RING_ROWS + (p - 1) % RING_ROWS : -1;
  }
}
