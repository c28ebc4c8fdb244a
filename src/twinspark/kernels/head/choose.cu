// From rows of logits to tokens: the largest, or the keyed choice after top-k, top-p and min-p.
//
// A cluster of eight blocks takes a row and keeps it in shared memory. Everything that is added up is a whole
// number (counts, masses of 2^-35), so no order of threads or blocks changes a bit; what is kept is what
// kernels/choice.py keeps, up to the last bit of exp and log. Built without contraction of a * b + c.
// What is kept of a row is always a start of the order (logit descending, id ascending): masses are counted by
// depth, and the few ids of the bin in which the wanted mass is reached are ranked. Barriers of the cluster cost
// more than the blocks' own work, so a search has two, and all blocks find its result by themselves.
#include "cluster.cuh"
#include "mass.cuh"
#include "noise.cuh"

#define MOST 16384                 // logits of a block; 32 a thread, a bit each
#define BINS 2048
#define COARSE 32                  // a lane each
#define BINS_PER_OCTAVE 57.f       // ids with a mass lie in the first 36 octaves
#define LISTED (THREADS / 2)       // ids of a bin that are ranked, by two threads each
#define FIRST_INFINITE 0xff800000u // order of +inf; what is not a number comes above it
#define MARGIN 0.01f               // far above the error of the noise in fp32
#define MOST_NOISE 23.5f           // above what noise can be

struct Found {  // bin in which a mass is reached, BINS for none
  int bin;
  u64 before, mass, all, wanted;
};
struct Ranked { u64 order, mass; };  // see with_id
struct Shared {
  float logits[MOST];
  u32 low[BINS], high[BINS];  // masses in two parts of 18 bits
  u64 coarse[COARSE];         // of BINS / COARSE bins each
  Ranked own[LISTED], listed[LISTED], warps[THREADS / 32], ends[CLUSTER];
  Pair powers[POWERS];
  Depths depths;
  Found found;
  u64 cut;
  u32 num;  // of `own`; there may be more than it holds
  Joint joint;
};
static_assert(sizeof(Shared) == 92256, "cuda.py asks for it");
struct Slice { int first, count; };  // of a block: its first id, and how many
struct Cut { u32 key; int id; };     // kept: a larger key, or this key and up to this id
struct Rule {                        // of a row
  double temperature, top_p, log_min_p;
  int top_k;
  u32 seed0, seed1, position, choice;
};

// All places of a thread, and those of the bits that are set: `i` is the bit, `at` the place in shared memory.
#define EACH(slice) \
  _Pragma("unroll 4") for (int at = threadIdx.x, i = 0; at < (slice).count; at += THREADS, i++)
#define EACH_OF(bits) \
  _Pragma("unroll 1") for (u32 left = (bits), i, at; \
                           left && (i = __ffs(left) - 1, at = threadIdx.x + i * THREADS, true); left &= left - 1)

// The largest key of a block's ids with the lowest id of those: key above, id turned round below.
__device__ __forceinline__ u64 with_id(u32 key, u32 id) { return key ? (u64)key << 32 | (u32)~id : 0; }

// ---- a threshold by mass

__device__ __forceinline__ void clear_bins(Shared& s) {
#pragma unroll 1
  for (int i = threadIdx.x; i < BINS; i += THREADS) s.low[i] = s.high[i] = 0;
  if (threadIdx.x == 0) s.num = 0;
  __syncthreads();
}
__device__ __forceinline__ void add_mass(Shared& s, int bin, u64 mass) {
  if (mass == 0) return;
  atomicAdd(&s.low[bin], (u32)mass & 0x3ffffu);
  const u32 high = (u32)(mass >> 18);
  if (high) atomicAdd(&s.high[bin], high);
}
__device__ __forceinline__ u64 sum_before(u64& sum) {  // of lower lanes; `sum` gets this lane's added
  const u64 mine = sum;
#pragma unroll
  for (int by = 1; by < 32; by <<= 1) {
    const u64 other = __shfl_up_sync(ALL, sum, by);
    if ((threadIdx.x & 31) >= by) sum += other;
  }
  return sum - mine;
}
// By one warp: lane l looks at coarse bin l, then at two bins of the one in which `wanted` is reached.
__device__ __forceinline__ void search_bins(Shared& s, u64 before, u64 wanted, double share) {
  const int lane = threadIdx.x & 31;
  u64 sum = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER; i++) sum += remote_u64(&s.coarse[lane], i);
  const u64 ahead = sum_before(sum);
  const u64 all = __shfl_sync(ALL, sum, 31);
  if (share >= 0.) wanted = (u64)ceil(fmax(share * (double)all, 0.5));  // the first is always kept
  const int coarse = __ffs(__ballot_sync(ALL, before + sum >= wanted)) - 1;
  if (lane == 0) s.found = {BINS, before, 0, all, wanted};
  __syncwarp();
  if (coarse < 0) return;
  const u64 start = __shfl_sync(ALL, ahead, coarse);
  const int bin = coarse * (BINS / COARSE) + 2 * lane;
  u64 even = 0, odd = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER; i++) {
    const u64 low = remote_u64(&s.low[bin], i), high = remote_u64(&s.high[bin], i);
    even += (low & ALL) + ((high & ALL) << 18);
    odd += (low >> 32) + (high >> 32 << 18);
  }
  u64 upto = even + odd;
  const u64 first = start + sum_before(upto);
  const int found = __ffs(__ballot_sync(ALL, before + start + upto >= wanted)) - 1;
  if (lane != found) return;
  if (before + first + even >= wanted)
    s.found = {bin, before + first, even, all, wanted};
  else
    s.found = {bin + 1, before + first + even, odd, all, wanted};
}
// The first bin at which `wanted` is reached, counting `before` from earlier searches. With `share`, wanted is
// that part of all masses. Others may read this block's bins until the next barrier of the cluster.
__device__ __noinline__ Found find_bin(Shared& s, u64 before, u64 wanted, double share) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COARSE / (THREADS / 32); i++) {
    const int coarse = warp * (COARSE / (THREADS / 32)) + i, bin = coarse * (BINS / COARSE) + 2 * lane;
    // a block's parts add up to less than 2^32
    const u32 low = __reduce_add_sync(ALL, s.low[bin] + s.low[bin + 1]);
    const u32 high = __reduce_add_sync(ALL, s.high[bin] + s.high[bin + 1]);
    if (lane == 0) s.coarse[coarse] = low + ((u64)high << 18);
  }
  cluster_sync();
  if (warp == 0) search_bins(s, before, wanted, share);
  __syncthreads();
  return s.found;
}

// A mass as it is: one each where ids are counted.
__device__ __forceinline__ u64 mass_of(const Shared& s, const Depths& d, bool is_count, u32 key) {
  if (is_count) return 1;
  const float x = logit_of(key);
  bool is_sure = false;
  const u64 mass = d.is_plain ? quick_mass(s.powers, d, x, is_sure) : 0;
  return is_sure ? mass : exact_mass(x, d.temperature, d.peak);
}
// Ascends as logits descend, whatever the temperature.
__device__ __forceinline__ int bin_of(const Depths& d, float x) {
  return (int)fminf((d.top - x) * d.octaves.high * BINS_PER_OCTAVE, BINS - 1.f);
}

// The shortest start of (key descending, id ascending) among `same` whose mass, after `before`, reaches `wanted`.
__device__ __noinline__ Cut find_cut(
    Shared& s, Slice slice, u32 same, u64 before, u64 wanted, bool is_count) {
  const Depths d = s.depths;
  Cut cut = {0, 0x7fffffff};
  Found f;
#pragma unroll 1
  for (int pass = 0; pass < 3; pass++) {  // digits of 11, 11 and 10 bits
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, digits = pass == 2 ? 1023 : 2047;
    cluster_sync();
    clear_bins(s);
    EACH_OF(same) {
      const u32 key = ordered(s.logits[at]);
      if (pass == 0 || key >> (pass == 1 ? 21 : 10) == cut.key)
        add_mass(s, digits - (int)(key >> shift & digits), mass_of(s, d, is_count, key));
    }
    f = find_bin(s, before, wanted, -1.);
    before = f.before;
    cut.key = cut.key << (pass == 2 ? 10 : 11) | (digits - f.bin);
  }
  const u64 mass = mass_of(s, d, is_count, cut.key);
  if (before + f.mass == wanted || f.mass == mass) return cut;  // all that are equal, or one
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {  // of the ids: 11 and 6 bits
    cluster_sync();
    clear_bins(s);
    EACH_OF(same) {
      const int id = slice.first + at;
      if (ordered(s.logits[at]) == cut.key && (pass == 0 || id >> 6 == cut.id))
        add_mass(s, pass == 0 ? id >> 6 : id & 63, mass);
    }
    f = find_bin(s, before, wanted, -1.);
    before = f.before;
    cut.id = pass == 0 ? f.bin : cut.id << 6 | f.bin;
  }
  return cut;
}
// The same for few ids: every block gets all of them and adds up what is ahead of each.
__device__ __noinline__ Cut cut_of_few(
    Shared& s, Slice slice, u32 same, u64 before, u64 wanted, bool is_count) {
  EACH_OF(same) {
    const u32 place = atomicAdd(&s.num, 1);
    if (place < LISTED) s.own[place] = {with_id(ordered(s.logits[at]), slice.first + at), 0};
  }
  __syncthreads();
  cluster_sync();
  const u32 mine = remote_u32(&s.num, threadIdx.x % CLUSTER);
  u32 total = 0, block = 0, start = 0;  // of the id that this thread fetches
#pragma unroll
  for (int i = 0; i < CLUSTER; i++) {
    if (threadIdx.x >= total) { block = i; start = total; }
    total += __shfl_sync(ALL, mine, i);
  }
  if (total > LISTED) return find_cut(s, slice, same, before, wanted, is_count);
  if (threadIdx.x < total) {
    const u64 order = remote_u64(&s.own[threadIdx.x - start].order, block);
    s.listed[threadIdx.x] = {order, mass_of(s, s.depths, is_count, (u32)(order >> 32))};
  }
  __syncthreads();
  const u32 place = threadIdx.x / 2;
  const Ranked it = place < total ? s.listed[place] : Ranked{0, 0};
  u64 ahead = 0;
  if (place < total)
#pragma unroll 4
    for (u32 i = threadIdx.x & 1; i < total; i += 2) ahead += s.listed[i].order > it.order ? s.listed[i].mass : 0;
  ahead += __shfl_xor_sync(ALL, ahead, 1);
  ahead += before;
  if (ahead < wanted && ahead + it.mass >= wanted) s.cut = it.order;
  __syncthreads();
  return {(u32)(s.cut >> 32), (int)~(u32)s.cut};
}

// ---- what stays of `inside`

// Masses of all ids by depth. Those that fp32 cannot tell come last, so that the loop has no float64 in it.
__device__ __forceinline__ void add_masses(Shared& s, Slice slice, u32 inside, const Depths& d) {
  u32 unsure = d.is_plain ? 0 : inside;
  if (d.is_plain)
#pragma unroll 1
    for (int at = threadIdx.x, i = 0; at < slice.count; at += 2 * THREADS, i += 2) {
      // two at a time, as one waits for itself; what lies behind the slice is not inside
      const float xs[2] = {s.logits[at], s.logits[at + THREADS]};
      bool is_sure[2];
      u64 masses[2];
#pragma unroll
      for (int j = 0; j < 2; j++) masses[j] = quick_mass(s.powers, d, xs[j], is_sure[j]);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        if (is_sure[j] && (inside >> (i + j) & 1)) add_mass(s, bin_of(d, xs[j]), masses[j]);
        unsure |= (is_sure[j] ? 0u : 1u) << (i + j);
      }
    }
  unsure &= inside;
  EACH_OF(unsure) add_mass(s, bin_of(d, s.logits[at]), exact_mass(s.logits[at], d.temperature, d.peak));
}
// The shortest start whose share of all masses is top_p, or with is_count the first `top_k`.
__device__ __noinline__ u32 keep_start(
    Shared& s, Slice slice, u32 inside, bool is_count, u64 top_k, double top_p) {
  const Depths d = s.depths;
  if (is_count) {
    EACH(slice) if (inside >> i & 1) atomicAdd(&s.low[bin_of(d, s.logits[at])], 1);
  } else {
    add_masses(s, slice, inside, d);
  }
  const Found f = find_bin(s, 0, top_k, is_count ? -1. : top_p);
  if ((is_count && f.all <= top_k) || f.bin == BINS) return inside;
  u32 same = 0, kept = 0;
  EACH(slice) {
    const int bin = bin_of(d, s.logits[at]);
    kept |= (bin < f.bin ? 1u : 0u) << i;
    same |= (bin == f.bin ? 1u : 0u) << i;
  }
  kept &= inside;
  same &= inside;
  const Cut cut = cut_of_few(s, slice, same, f.before, f.wanted, is_count);
  EACH_OF(same) {
    const u32 key = ordered(s.logits[at]);
    if (key > cut.key || (key == cut.key && slice.first + (int)at <= cut.id)) kept |= 1u << i;
  }
  return kept;
}
// Whether an id of a plain row is within `limit` of the largest or further off, where float64 surely says so, too.
struct Sides { bool is_in, is_out; };
__device__ __forceinline__ Sides sides_of(const Depths& d, float x, float limit) {
  const float depth = (d.top - x) * d.inverse, slack = fabsf((float)d.peak) * 0x1p-50f;
  return {depth * (1.f + 0x1p-20f) + slack < limit, depth * (1.f - 0x1p-20f) - slack > limit};
}
// Those with at least the share min_p of the largest probability.
__device__ __forceinline__ u32 keep_likely(
    const Shared& s, Slice slice, u32 inside, const Depths& d, double log_min_p) {
  const float limit = (float)-log_min_p;
  u32 kept = 0, unsure = d.is_plain ? 0 : inside;
  if (d.is_plain)
    EACH(slice) {
      const Sides sides = sides_of(d, s.logits[at], limit);
      kept |= (sides.is_in ? 1u : 0u) << i;
      unsure |= (sides.is_in || sides.is_out ? 0u : 1u) << i;
    }
  EACH_OF(unsure & inside)
    if (!((double)s.logits[at] / d.temperature - d.peak < log_min_p)) kept |= 1u << i;
  return kept & inside;
}

// ---- the keyed choice

__device__ __forceinline__ Ranked larger(Ranked a, Ranked b) {
  return b.order > a.order || (b.order == a.order && b.mass > a.mass) ? b : a;
}
template <int LANES>
__device__ __forceinline__ Ranked largest(Ranked v) {
#pragma unroll
  for (int by = LANES / 2; by > 0; by >>= 1)
    v = larger(v, {__shfl_xor_sync(ALL, v.order, by), __shfl_xor_sync(ALL, v.mass, by)});
  return v;
}
// The block's largest logit / temperature + noise, with its id turned round.
//
// Only what may win is worked out in float64: what is within a margin of the block's best in fp32. It is more than
// MARGIN where temperatures are so small that float64, too, loses noise beside a logit. Most ids need no logarithm
// to be ruled out: noise is at most -log(w) of its uniform number w, and the first of all ids, which
// is always kept, sets the mark at once.
__device__ __noinline__ Ranked best_of_block(
    Shared& s, Row& r, Slice slice, u32 inside, u32 first_id, const Rule& rule) {
  const Depths d = s.depths;
  const auto word_of = [&](u32 id) { return noise_word(id, rule.position, rule.choice, rule.seed0, rule.seed1); };
  const auto rough = [&](float x, u32 word) { return (x - d.top) * d.inverse + rough_gumbel(word); };
  const float slack = fabsf(d.top) * d.inverse * 0x1p-50f;
  const float margin = d.inverse < MOST_INVERSE ? MARGIN + slack : __int_as_float(0x7f800000);
  float mark = rough_gumbel(word_of(first_id)) - margin;
  u32 maybe = 0, most = 0;
  EACH_OF(inside) {
    const float x = s.logits[at], over = (x - d.top) * d.inverse - mark;
    if (over + MOST_NOISE < 0.f) continue;
    const u32 word = word_of(slice.first + at);
    if ((float)word > 4299262263.f * __expf(over)) continue;  // 1.001 * 2^32
    const float value = rough(x, word);
    maybe |= 1u << i;
    most = max(most, ordered(value));
    mark = fmaxf(mark, value - margin);
  }
  const float bound = logit_of((u32)join_block(r, most, Most())) - margin;
  Ranked best = {0, 0};
  if (logit_of(most) >= bound)
    EACH_OF(maybe) {
      const u32 id = slice.first + at, word = word_of(id);
      const float x = s.logits[at];
      if (rough(x, word) >= bound)
        best = larger(best, {ordered64((double)x / rule.temperature + gumbel(word)), (u32)~id});
    }
  best = largest<32>(best);
  if ((threadIdx.x & 31) == 0) s.warps[threadIdx.x >> 5] = best;
  __syncthreads();
  return largest<THREADS / 32>(s.warps[threadIdx.x % (THREADS / 32)]);
}
// Tells block 0, which knows the choice behind the next barrier of the cluster.
__device__ __forceinline__ void choose_keyed(
    Shared& s, Row& r, Slice slice, u32 inside, int vocab, u32 peak_key, u32 first_id, const Rule& rule) {
  if (threadIdx.x < 32) s.depths = depths_of(logit_of(peak_key), rule.temperature);  // float64: by one warp
  __syncthreads();
  const bool has_top_k = rule.top_k > 0 && rule.top_k < vocab;
  if (has_top_k) inside = keep_start(s, slice, inside, true, rule.top_k, 0.);
  if (rule.top_p < 1.) {
    if (has_top_k) {
      cluster_sync();  // others may be reading bins
      clear_bins(s);
    }
    inside = keep_start(s, slice, inside, false, 0, rule.top_p);
  }
  if (rule.log_min_p > -1e300) inside = keep_likely(s, slice, inside, s.depths, rule.log_min_p);
  const Ranked best = best_of_block(s, r, slice, inside, first_id, rule);
  if (threadIdx.x == 0) {
    store_remote(&s.ends[r.rank].order, 0, best.order);
    store_remote(&s.ends[r.rank].mass, 0, best.mass);
  }
}

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
  clear_bins(s);
  fill_powers(s.powers);
  wait_for_producer();
  u32 most = 0, most_at = 0, inside = 0;
#pragma unroll 16
  for (int at = threadIdx.x, i = 0; at < slice.count; at += THREADS, i++) {
    const float x = logits[(u64)row * pitch + first + at];
    const u32 key = banned && banned[first + at] ? 0 : ordered(x);
    s.logits[at] = x;
    inside |= (key != 0 ? 1u : 0u) << i;
    if (key > most) { most = key; most_at = at; }  // a thread's ids ascend, so the first stays
  }
  const u64 best = join_all(r, with_id(most, first + most_at), Most());
  const u32 peak_key = (u32)(best >> 32);
  const bool is_choice = peak_key != 0 && peak_key < FIRST_INFINITE, is_keyed = is_choice && temperatures[row] > 0.;
  if (is_keyed) {
    const Rule rule = {temperatures[row], top_ps[row], log_min_ps[row], top_ks[row], seeds[2 * row], seeds[2 * row + 1],
                       (u32)positions[row], (u32)choices[row]};
    choose_keyed(s, r, slice, inside, vocab, peak_key, ~(u32)best, rule);
  }
  cluster_sync();  // nobody leaves while others read its memory
  if (r.rank != 0 || threadIdx.x >= 32) return;
  u32 turned = (u32)best;
  if (is_keyed) turned = (u32)largest<CLUSTER>(s.ends[threadIdx.x % CLUSTER]).mass;
  if (threadIdx.x == 0) tokens[row] = is_choice ? (int)~turned : -1;
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
