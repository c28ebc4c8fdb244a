// From rows of logits to tokens: the largest, or the keyed choice after top-k, top-p and min-p.
//
// A cluster of eight blocks takes a row and keeps it in shared memory. Everything that is added up is a whole
// number (counts, masses of 2^-35), so no order of threads or blocks changes a bit; what is kept is what
// kernels/choice.py keeps, up to the last bit of exp and log. Built without contraction of a * b + c.
typedef unsigned int u32;
typedef unsigned long long u64;

#define CLUSTER 8
#define THREADS 512
#define MOST 16384                 // logits of a block; 32 a thread, a bit each
#define BINS 4096
#define WEIGHT_SCALE 34359738368.  // 2^35
#define WEIGHT_SPAN 24.3           // octaves of e below which a mass is less than one
#define BINS_PER_UNIT 128.
#define FIRST_INFINITE 0xff800000u // order of +inf; what is not a number comes above it
#define MARGIN 0.01f               // far above the error of the noise in fp32
#define ALL 0xffffffffu

__device__ __forceinline__ void wait_for_producer() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_consumer_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ u32 remote(const void* p, int rank) {
  u32 at, there;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(p));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
__device__ __forceinline__ u64 remote_u64(const void* p, int rank) {
  u64 v;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(remote(p, rank)) : "memory");
  return v;
}
__device__ __forceinline__ u32 remote_u32(const void* p, int rank) {
  u32 v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(remote(p, rank)) : "memory");
  return v;
}
__device__ __forceinline__ void store_remote(void* p, int rank, u64 v) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(remote(p, rank)), "l"(v) : "memory");
}

struct Joint {          // of all searches and reductions
  u64 slots[32];        // what this block tells the others, a slot an exchange
  u64 warps[THREADS / 32];
  u64 found[3];         // bin, mass before it, mass of it
};
struct Shared {
  u32 keys[MOST];             // logits as `ordered` has them
  u32 low[BINS], high[BINS];  // masses in two parts of 18 bits
  Joint joint;
};
struct Row {
  Joint& s;
  int slot;  // exchanges so far
  u32 rank;
};

// A whole number that orders as the logit does; 0 for what is never chosen.
__device__ __forceinline__ u32 ordered(float v) {
  const u32 bits = __float_as_uint(v + 0.f);  // -0 becomes 0
  if (v != v) return ALL;
  if (bits == 0xff800000u) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
struct Sum { __device__ u64 operator()(u64 a, u64 b) const { return a + b; } };
struct Most { __device__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; } };

// The threads' values of this block put together, in thread 0 of it.
template <class Join>
__device__ __forceinline__ u64 join_block(Row& r, u64 v, Join join) {
#pragma unroll
  for (int by = 16; by > 0; by >>= 1) v = join(v, __shfl_xor_sync(ALL, v, by));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) r.s.warps[threadIdx.x >> 5] = v;
  __syncthreads();
  v = r.s.warps[0];
#pragma unroll
  for (int i = 1; i < THREADS / 32; i++) v = join(v, r.s.warps[i]);
  return v;
}
// All threads' values of all blocks put together, for everyone.
template <class Join>
__device__ __forceinline__ u64 join_all(Row& r, u64 v, Join join) {
  v = join_block(r, v, join);
  u64* slot = r.s.slots + (r.slot++ & 31);
  if (threadIdx.x == 0) *slot = v;
  cluster_sync();
  u64 all = remote_u64(slot, 0);
#pragma unroll
  for (int i = 1; i < CLUSTER; i++) all = join(all, remote_u64(slot, i));
  return all;
}

// ---- a threshold by mass

struct Found { int bin; double before, mass; };

__device__ __forceinline__ void clear_bins(Shared& s) {
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < BINS; i += THREADS) s.low[i] = s.high[i] = 0;
  __syncthreads();
}
__device__ __forceinline__ void add_mass(Shared& s, int bin, u64 mass) {
  atomicAdd(&s.low[bin], (u32)mass & 0x3ffffu);
  const u32 high = (u32)(mass >> 18);
  if (high) atomicAdd(&s.high[bin], high);
}
// The first bin at which `wanted` is reached, counting `before` from earlier searches. With `share`, wanted is
// that part of all masses, and is set.
__device__ __noinline__ Found find_bin(Shared& s, Row& r, double before, double& wanted, double share) {
  cluster_sync();
  const int bin = r.rank * THREADS + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64 mass = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER; i++)
    mass += remote_u32(&s.low[bin], i) + ((u64)remote_u32(&s.high[bin], i) << 18);
  u64 sum = mass;
#pragma unroll
  for (int by = 1; by < 32; by <<= 1) {
    const u64 other = __shfl_up_sync(ALL, sum, by);
    if (lane >= by) sum += other;
  }
  __syncthreads();
  if (lane == 31) r.s.warps[warp] = sum;
  __syncthreads();
  u64 block = 0;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) {
    if (i < warp) sum += r.s.warps[i];
    block += r.s.warps[i];
  }
  u64* slot = r.s.slots + (r.slot++ & 31);
  if (threadIdx.x == 0) *slot = block;
  cluster_sync();
  u64 all = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER; i++) {
    const u64 other = remote_u64(slot, i);
    if (i < r.rank) sum += other;
    all += other;
  }
  if (share >= 0.) wanted = fmax(share * (double)all, 0.5);  // the first is always kept
  const double upto = before + (double)sum, ahead = before + (double)(sum - mass);
  if (ahead < wanted && upto >= wanted)
    for (int i = 0; i < CLUSTER; i++) {
      store_remote(&r.s.found[0], i, bin);
      store_remote(&r.s.found[1], i, sum - mass);
      store_remote(&r.s.found[2], i, mass);
    }
  cluster_sync();
  return {(int)r.s.found[0], before + (double)r.s.found[1], (double)r.s.found[2]};
}

struct Cut { u32 key; int id; };  // kept: a larger key, or this key and up to this id

struct Slice { int first, count; };  // of a block: its first id, and how many
#define EACH(slice, inside) \
  _Pragma("unroll 1") for (int at = threadIdx.x, i = 0; at < (slice).count; at += THREADS, i++) if ((inside) >> i & 1)

// Mass of an id by its key: one each, or 2^35 exp(depth under the peak).
struct Mass {
  double temperature, peak;  // temperature 0: one each
  __device__ __forceinline__ double depth(u32 key) const { return peak - (double)logit_of(key) / temperature; }
  __device__ __forceinline__ u64 at_depth(double d) const {
    return d > WEIGHT_SPAN ? 0 : (u64)floor(exp(-d) * WEIGHT_SCALE);
  }
  __device__ __forceinline__ u64 operator()(u32 key) const { return temperature == 0. ? 1 : at_depth(depth(key)); }
};
// The shortest start of (key descending, id ascending) among `inside` whose mass, after `before`, reaches
// `wanted`.
__device__ __noinline__ Cut find_cut(
    Shared& s, Row& r, Slice slice, u32 inside, double before, double wanted, const Mass& mass) {
  Cut cut = {0, 0x7fffffff};
  Found f;
#pragma unroll 1
  for (int pass = 0; pass < 3; pass++) {  // digits of 12, 12 and 8 bits
    const int shift = pass == 0 ? 20 : pass == 1 ? 8 : 0, digits = pass == 2 ? 255 : 4095;
    clear_bins(s);
    EACH(slice, inside) {
      const u32 key = s.keys[at];
      if (pass == 0 || key >> (pass == 1 ? 20 : 8) == cut.key)
        add_mass(s, digits - (int)(key >> shift & digits), mass(key));
    }
    f = find_bin(s, r, before, wanted, -1.);
    before = f.before;
    cut.key = cut.key << (pass == 2 ? 8 : 12) | (digits - f.bin);
  }
  if (before + f.mass == wanted || f.mass == (double)mass(cut.key)) return cut;  // all that are equal, or one
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {  // of the ids: 12 and 5 bits
    clear_bins(s);
    EACH(slice, inside) {
      const int id = slice.first + at;
      if (s.keys[at] == cut.key && (pass == 0 || id >> 5 == cut.id))
        add_mass(s, pass == 0 ? id >> 5 : id & 31, mass(cut.key));
    }
    f = find_bin(s, r, before, wanted, -1.);
    before = f.before;
    cut.id = pass == 0 ? f.bin : cut.id << 5 | f.bin;
  }
  return cut;
}
__device__ __forceinline__ u32 keep(const Shared& s, Slice slice, u32 inside, Cut cut) {
  u32 kept = inside;
  EACH(slice, inside) {
    const u32 key = s.keys[at];
    if (key < cut.key || (key == cut.key && slice.first + at > cut.id)) kept &= ~(1u << i);
  }
  return kept;
}

// ---- the keyed choice

__device__ __forceinline__ u32 noise_word(u32 id, u32 position, u32 choice, u32 key0, u32 key1) {
  u32 c0 = id, c1 = position, c2 = choice, c3 = 0;
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ key0;
    c2 = high0 ^ c3 ^ key1;
    c1 = low1;
    c3 = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c0;
}
__device__ __forceinline__ double gumbel(u32 word) {
  const double w = ((double)word + 0.5) * (1. / 4294967296.);
  return -log(-log1p(-w));
}
// The same to about 1e-5, without float64.
__device__ __forceinline__ float rough_gumbel(u32 word) {
  const float unit = 1.f / 4294967296.f;
  const float e = word < 0x80000000u ? -log1pf(-((float)word + 0.5f) * unit) : -logf(((float)~word + 0.5f) * unit);
  return -logf(e);
}
__device__ __forceinline__ u64 ordered64(double v) {
  const long long bits = __double_as_longlong(v + 0.);
  return bits < 0 ? ~(u64)bits : (u64)bits | 0x8000000000000000ull;
}

struct Rule {  // of a row
  double temperature, top_p, log_min_p;
  int top_k;
  u32 seed0, seed1, position, choice;
};

__device__ __forceinline__ u32 top_p_of(Shared& s, Row& r, Slice slice, u32 inside, const Mass& mass, double top_p) {
  clear_bins(s);
  EACH(slice, inside) {
    const double depth = mass.depth(s.keys[at]);
    if (depth <= WEIGHT_SPAN) add_mass(s, (int)fmin(depth * BINS_PER_UNIT, BINS - 1.), mass.at_depth(depth));
  }
  double wanted = 0.;
  const Found f = find_bin(s, r, 0., wanted, top_p);
  u32 same = 0, kept = inside;
  EACH(slice, inside) {
    const double depth = mass.depth(s.keys[at]);
    const int bin = (int)fmin(depth * BINS_PER_UNIT, BINS - 1.);
    if (bin == f.bin && depth <= WEIGHT_SPAN) same |= 1u << i;
    if (bin > f.bin || depth > WEIGHT_SPAN) kept &= ~(1u << i);
  }
  return keep(s, slice, kept, find_cut(s, r, slice, same, f.before, wanted, mass));
}
__device__ __forceinline__ int choose_keyed(Shared& s, Row& r, Slice slice, int vocab, u32 peak_key, const Rule& rule) {
  const Mass mass = {rule.temperature, (double)logit_of(peak_key) / rule.temperature}, one = {0., 0.};
  u32 inside = 0;
  EACH(slice, ALL) inside |= (s.keys[at] != 0 ? 1u : 0u) << i;
  if (rule.top_k > 0 && rule.top_k < vocab) {
    const u64 num = join_all(r, (u64)__popc(inside), Sum());
    if (num > (u64)rule.top_k) inside = keep(s, slice, inside, find_cut(s, r, slice, inside, 0., rule.top_k, one));
  }
  if (rule.top_p < 1.) inside = top_p_of(s, r, slice, inside, mass, rule.top_p);
  if (rule.log_min_p > -1e300) {
    u32 kept = inside;
    EACH(slice, inside) {
      const double under = (double)logit_of(s.keys[at]) / rule.temperature - mass.peak;
      if (under < rule.log_min_p) kept &= ~(1u << i);
    }
    inside = kept;
  }
  // noise in fp32 first: only what may win is worked out in float64
  const float inverse = (float)(1. / rule.temperature), top = logit_of(peak_key);
  u32 most = 0;
  EACH(slice, inside) {
    const u32 word = noise_word(slice.first + at, rule.position, rule.choice, rule.seed0, rule.seed1);
    most = max(most, ordered((logit_of(s.keys[at]) - top) * inverse + rough_gumbel(word)));
  }
  const float bound = logit_of((u32)join_all(r, most, Most())) - MARGIN;
  u64 best = 0, best_id = 0;
  EACH(slice, inside) {
    const u32 id = slice.first + at, key = s.keys[at];
    const u32 word = noise_word(id, rule.position, rule.choice, rule.seed0, rule.seed1);
    if ((logit_of(key) - top) * inverse + rough_gumbel(word) >= bound) {
      const u64 value = ordered64((double)logit_of(key) / rule.temperature + gumbel(word));
      if (value > best) { best = value; best_id = ~id; }  // a thread's ids ascend, so the first stays
    }
  }
  const u64 value = join_all(r, best, Most());
  return (int)~(u32)join_all(r, best == value ? best_id : 0, Most());
}

// The largest key of a block's ids with the lowest id of those: key above, id turned round below.
__device__ __forceinline__ u64 with_id(u32 key, u32 id) { return key ? (u64)key << 32 | (u32)~id : 0; }

// grid (8, R), 512 threads, clusters of 8 blocks; V up to 131,072. `banned` bytes [V] or null. tokens [R]: -1
// where the row holds something that is not a number, or its largest logit is not finite. Rows with a
// temperature of 0 or less are greedy. Dynamic shared memory: Shared.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 2) head_choose(
    const float* logits, const unsigned char* banned, const double* temperatures,
    const int* top_ks, const double* top_ps, const double* log_min_ps,
    const u32* seeds, const int* positions, const int* choices,
    int* tokens, int vocab, int pitch) {
  extern __shared__ __align__(16) unsigned char shared[];
  Shared& s = *(Shared*)shared;
  Row r = {s.joint, 0, cluster_rank()};
  const int row = blockIdx.y, size = (vocab + CLUSTER - 1) / CLUSTER, first = r.rank * size;
  const Slice slice = {first, max(min(size, vocab - first), 0)};
  let_consumer_start();
  wait_for_producer();
  u64 best = 0;
#pragma unroll 8
  for (int at = threadIdx.x; at < slice.count; at += THREADS) {
    const u32 key = banned && banned[first + at] ? 0 : ordered(logits[(u64)row * pitch + first + at]);
    s.keys[at] = key;
    const u64 mine = with_id(key, first + at);
    best = mine > best ? mine : best;
  }
  best = join_all(r, best, Most());
  const u32 peak_key = (u32)(best >> 32);
  int token = ~(u32)best;
  if (peak_key == 0 || peak_key >= FIRST_INFINITE) {
    token = -1;
  } else if (temperatures[row] > 0.) {
    const Rule rule = {temperatures[row], top_ps[row], log_min_ps[row], top_ks[row], seeds[2 * row], seeds[2 * row + 1],
                       (u32)positions[row], (u32)choices[row]};
    token = choose_keyed(s, r, slice, vocab, peak_key, rule);
  }
  if (r.rank == 0 && threadIdx.x == 0) tokens[row] = token;
  cluster_sync();  // nobody leaves while others read its memory
}

// The largest logit of every row, equal ones by the lower id; as head_choose without temperatures.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) head_argmax(
    const float* logits, const unsigned char* banned, int* tokens,
    int vocab, int pitch) {
  __shared__ Joint joint;
  Row r = {joint, 0, cluster_rank()};
  const int row = blockIdx.y, size = (vocab + 4 * CLUSTER - 1) / (4 * CLUSTER) * 4, first = r.rank * size;
  const int count = max(min(size, vocab - first), 0);
  const float* from = logits + (u64)row * pitch + first;
  let_consumer_start();
  wait_for_producer();
  u64 best = 0;
  const bool is_aligned = pitch % 4 == 0 && count % 4 == 0 && ((u64)logits & 15) == 0;
  if (is_aligned && !banned) {
#pragma unroll 8
    for (int at = threadIdx.x; at < count / 4; at += THREADS) {
      const float4 v = ((const float4*)from)[at];
      u32 key = ordered(v.x), id = first + 4 * at;
      const u32 second = ordered(v.y), third = ordered(v.z), fourth = ordered(v.w);
      if (second > key) { key = second; id = first + 4 * at + 1; }
      if (third > key) { key = third; id = first + 4 * at + 2; }
      if (fourth > key) { key = fourth; id = first + 4 * at + 3; }
      const u64 mine = with_id(key, id);
      best = mine > best ? mine : best;
    }
  } else {
#pragma unroll 8
    for (int at = threadIdx.x; at < count; at += THREADS) {
      const u64 mine = with_id(banned && banned[first + at] ? 0 : ordered(from[at]), first + at);
      best = mine > best ? mine : best;
    }
  }
  best = join_all(r, best, Most());
  const u32 peak_key = (u32)(best >> 32);
  if (r.rank == 0 && threadIdx.x == 0) tokens[row] = peak_key == 0 || peak_key >= FIRST_INFINITE ? -1 : (int)~(u32)best;
  cluster_sync();
}

// Log of the sum of exp(logit) of every row, in float64 and in whole numbers of 2^-35 and 2^-70 of the largest
// term; a largest logit that is not finite as it is. grid (8, R), 512 threads.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) head_log_sum(
    const float* logits, double* log_sums, int vocab, int pitch) {
  __shared__ Joint joint;
  Row r = {joint, 0, cluster_rank()};
  const int row = blockIdx.y, size = (vocab + CLUSTER - 1) / CLUSTER, first = r.rank * size;
  const int count = max(min(size, vocab - first), 0);
  const float* from = logits + (u64)row * pitch + first;
  let_consumer_start();
  wait_for_producer();
  u32 most = 0;
#pragma unroll 8
  for (int at = threadIdx.x; at < count; at += THREADS) most = max(most, ordered(from[at]));
  most = (u32)join_all(r, most, Most());
  const double infinite = (double)__int_as_float(0x7f800000), peak = most ? (double)logit_of(most) : -infinite;
  u64 high = 0, low = 0;
  if (most != 0 && most < FIRST_INFINITE)
#pragma unroll 1
    for (int at = threadIdx.x; at < count; at += THREADS) {
      const double term = exp((double)from[at] - peak) * WEIGHT_SCALE, whole = floor(term);
      high += (u64)whole;
      low += (u64)floor((term - whole) * WEIGHT_SCALE);
    }
  high = join_all(r, high, Sum());
  low = join_all(r, low, Sum());
  if (r.rank == 0 && threadIdx.x == 0)
    log_sums[row] = high ? peak + log(((double)high + (double)low / WEIGHT_SCALE) / WEIGHT_SCALE) : peak;
  cluster_sync();
}

// Windows of slots: row first is the token that is certain, each later row a draft for the place after the one
// before. A draft is kept while it is what the row before it chose. kept [S], next [S]: the choice of the last
// row that counts. grid (S), 32 threads; windows of up to 32 rows, or none (kept 0, next -1).
extern "C" __global__ void __launch_bounds__(32) head_accept(
    const int* chosen, const int* tokens, const int* firsts,
    const int* counts, int* kept, int* next) {
  let_consumer_start();
  wait_for_producer();
  const int slot = blockIdx.x, lane = threadIdx.x, first = firsts[slot], count = counts[slot];
  const bool agrees = lane + 1 < count && chosen[first + lane] == tokens[first + lane + 1];
  const int num = __ffs(~__ballot_sync(ALL, agrees)) - 1;
  if (lane == 0) {
    kept[slot] = count > 0 ? num : 0;
    next[slot] = count > 0 ? chosen[first + num] : -1;
  }
}
