// The choice of experts from logits: a row's `places` largest sums of score and bias, equal ones by lower id. ids
// [rows][places] ascend; weights are scores over their ascending sum, times `scale`. `marked` rows (null: none) take
// `marked_bias`. Logits [parts][rows][experts] are added by ascending part. After common.cuh.

__device__ __forceinline__ u32 ordered(float v) {  // larger values, larger numbers
  const u32 b = __float_as_uint(v);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}
__device__ __forceinline__ float load_early(const float* p) {  // the compiler leaves it before the wait
  float v;
  asm volatile("ld.volatile.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ float score_of(float logit, int temperature) {
  logit /= __int_as_float(temperature);
  return sqrtf(fmaxf(logit, 0.f) + log1pf(expf(-fabsf(logit))));
}
// The `places` largest keys of a warp, expert 32 * i + lane in key[i]; says which of a lane's are chosen, by i.
__device__ __forceinline__ u32 choose(const u32 key[PER_LANE], int places) {
  const int lane = threadIdx.x & 31;
  u32 mine = 0;
  for (int place = 0; place < places; place++) {
    u32 best = 0;
    int at = 32;  // none left
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (!(mine >> i & 1) && (key[i] > best || at == 32)) { best = key[i]; at = i; }
    const u32 most = __reduce_max_sync(0xffffffffu, at < 32 ? best : 0);
    const u32 expert = __reduce_min_sync(0xffffffffu, at < 32 && best == most ? 32 * at + lane : ~0u);
    if ((expert & 31) == lane) mine |= 1u << (expert >> 5);
  }
  return mine;
}
// Chosen experts of a row, brought together in shared memory by the warp that chose them.
struct Chosen { int id[MOST_PLACES]; float score[MOST_PLACES]; };
template <class Score>
__device__ __forceinline__ void store_chosen(
    Chosen& chosen, u32 mine, const Score& score, int* ids, float* weights, int places, int scale) {
  const int lane = threadIdx.x & 31;
  int before = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const u32 those = __ballot_sync(0xffffffffu, mine >> i & 1);
    if (mine >> i & 1) {
      const int place = before + __popc(those & ((1u << lane) - 1));
      chosen.id[place] = 32 * i + lane;
      chosen.score[place] = score(i);
    }
    before += __popc(those);
  }
  __syncwarp();
  float sum = chosen.score[0];
  for (int place = 1; place < places; place++) sum += chosen.score[place];
  if (lane < places) {
    ids[lane] = chosen.id[lane];
    weights[lane] = chosen.score[lane] / (sum + 1e-20f) * __int_as_float(scale);
  }
}

// A block for one row. grid (rows), any whole warps.
extern "C" __global__ void __launch_bounds__(32 * PER_LANE < 128 ? 128 : 32 * PER_LANE) router_select(
    const float* logits, const float* __restrict__ bias, const float* __restrict__ marked_bias,
    const unsigned char* marked, int* ids, float* weights,
    int rows, int experts, int parts, int places, int scale, int temperature) {
  __shared__ float scores[32 * PER_LANE];
  __shared__ u32 keys[32 * PER_LANE];
  __shared__ Chosen chosen;
  let_consumer_start();
  const int lane = threadIdx.x & 31, row = blockIdx.x, nearest = min((int)threadIdx.x, experts - 1);
  const float early = load_early(bias + nearest), early_marked = marked ? load_early(marked_bias + nearest) : 0.f;
  wait_for_producer();
  const bool is_marked = marked && marked[row];
  const float* own = is_marked ? marked_bias : bias;
  for (int expert = threadIdx.x; expert < 32 * PER_LANE; expert += blockDim.x) {
    u32 key = 0;  // smaller than that of any number
    if (expert < experts) {
      const float added = expert == threadIdx.x ? (is_marked ? early_marked : early) : own[expert];
      const float* p = logits + (u64)row * experts + expert;
      float logit = 0.f;
      for (int part = 0; part < parts; part += 10) {
        float v[10];
#pragma unroll
        for (int i = 0; i < 10; i++)
          if (part + i < parts) v[i] = p[(u64)(part + i) * rows * experts];
#pragma unroll
        for (int i = 0; i < 10; i++)
          if (part + i < parts) logit = part + i == 0 ? v[i] : logit + v[i];
      }
      scores[expert] = score_of(logit, temperature);
      key = ordered(scores[expert] + added);
    }
    keys[expert] = key;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  u32 key[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) key[i] = keys[32 * i + lane];
  const auto score = [&](int i) { return scores[32 * i + lane]; };
  store_chosen(chosen, choose(key, places), score, ids + row * places, weights + row * places, places, scale);
}

#if PER_LANE <= 16  // so that a row's scores and keys are registers
#define ROWS_A_BLOCK 4
// A warp for one row: no warp waits while another chooses. grid (rows / ROWS_A_BLOCK up).
extern "C" __global__ void __launch_bounds__(32 * ROWS_A_BLOCK) router_select_rows(
    const float* logits, const float* __restrict__ bias, const float* __restrict__ marked_bias,
    const unsigned char* marked, int* ids, float* weights,
    int rows, int experts, int parts, int places, int scale, int temperature) {
  __shared__ Chosen chosen[ROWS_A_BLOCK];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.x * ROWS_A_BLOCK + warp;
  let_consumer_start();
  wait_for_producer();
  if (row >= rows) return;
  const float* own = marked && marked[row] ? marked_bias : bias;
  const float* p = logits + (u64)row * experts + lane;
  float score[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) score[i] = 32 * i + lane < experts ? p[32 * i] : 0.f;
  for (int part = 1; part < parts; part++) {
    float v[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) v[i] = 32 * i + lane < experts ? p[(u64)part * rows * experts + 32 * i] : 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) score[i] += v[i];
  }
  u32 key[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const bool is_here = 32 * i + lane < experts;
    score[i] = score_of(score[i], temperature);
    key[i] = is_here ? ordered(score[i] + own[32 * i + lane]) : 0;  // smaller than that of any number
  }
  store_chosen(chosen[warp], choose(key, places), [&](int i) { return score[i]; }, ids + row * places,
               weights + row * places, places, scale);
}
#endif
