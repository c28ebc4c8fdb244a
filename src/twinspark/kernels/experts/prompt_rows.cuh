// What is done to rows before, between and after the products of prompt.cu, whose macros and layouts these are.
//
// A warp works on 128 values of 8 rows, one such piece after another, and asks for the next piece as soon as
// it has taken one out of shared memory: whole lines come from memory while the warp computes. What is read
// here is laid so that no two of the lanes that are served together meet in a bank.

#define ROTATED_LINE (PART_INPUTS * 2 + 64)  // bytes in shared memory of a row of x or its scales,
#define SUMS_LINE (PART_INPUTS * 4 + 16)     // of its sums
#define SCALES (PART_INPUTS * 2)             // and of scales of all rows
#define ROW_WARPS 4
#define ROTATE_BLOCKS (WGMMA ? 6 : 5)        // an SM at least, by registers and shared memory
#define ACT_BLOCKS (WGMMA ? 5 : 2)
#define ADD_BLOCKS (WGMMA ? 5 : 2)

// All that a warp asked for, but the last LEFT pieces, is there for all of its lanes.
template <int LEFT> __device__ __forceinline__ void wait_for_piece() {
  wait_for_copies<LEFT>();
  __syncwarp();
}
// Said to be one for all lanes, so that it is kept in a uniform register.
__device__ __forceinline__ int one_for_all(int value) { return __shfl_sync(0xffffffffu, value, 0); }
__device__ __forceinline__ int warp_of_block() { return one_for_all(threadIdx.x >> 5); }
__device__ __forceinline__ const u16* from_lane(const u16* p, int lane) {
  return (const u16*)__shfl_sync(0xffffffffu, (u64)p, lane);
}
// A lane has runs of 8 values, 32 apart, of a row: lane 4 r + c those of row r from 8 c on.
__device__ __forceinline__ void load_runs(float v[32], const float* from) {  // the lane's first
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float4 f = *(const float4*)(from + 32 * (i / 2) + 4 * (i % 2));
    v[4 * i] = f.x; v[4 * i + 1] = f.y; v[4 * i + 2] = f.z; v[4 * i + 3] = f.w;
  }
}
__device__ __forceinline__ void scale_runs(float v[32], const u16* scales) {  // fp16, the lane's first
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 s = *(const uint4*)(scales + 32 * i);
    scale_four(v + 8 * i, make_uint2(s.x, s.y));
    scale_four(v + 8 * i + 4, make_uint2(s.z, s.w));
  }
}
// Rotates and rounds to fp16; runs of 8 go 256 apart.
__device__ __forceinline__ void rotate_runs(float v[32], u16* to) {
  hadamard_wide<8>(v);
  store_runs(v, to, 256);
}
// Where a lane's 32 values of a part of a group of 8 rows go.
__device__ __forceinline__ u64 tiled(int group, int part, int groups) {
  const int lane = threadIdx.x & 31;
  return ((u64)part * groups + group) * (GROUP_BYTES / 2) + (lane & 3) * 64 + (lane >> 2) * 8;
}
// 128 sums of 8 rows to lines in shared memory; `from` is the lane's four of the first row.
__device__ __forceinline__ void ask_for_sums(u32 to, const float* from, int pitch) {
#pragma unroll
  for (int r = 0; r < 8; r++, from += pitch) copy_async(to + r * SUMS_LINE, from);
}

// Eight fp16 numbers to fp32 in shared memory.
__device__ __forceinline__ void widen_eight(float* to, uint4 halves) {
  const u32 from[4] = {halves.x, halves.y, halves.z, halves.w};
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = half_to_float(from[i / 2] >> 16 * (i & 1) & 0xffff);
  *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
  *(float4*)(to + 4) = make_float4(v[4], v[5], v[6], v[7]);
}

// Rows of a window for gate and up: a warp takes a part of `each` groups of 8 rows, neighbours share a part, so that
// rows of x stay in the cache. grid (warps of `groups` / ROW_WARPS up, parts).
extern "C" __global__ void __launch_bounds__(32 * ROW_WARPS, ROTATE_BLOCKS) experts_rotate(
    const Matrix* table, const u16* x, const int* pair_of_row, const int* expert_of_group, const int* num_groups,
    u16* gate_x, u16* up_x, int places, int inputs, int first_group, int groups, int each) {
  __shared__ __align__(16) unsigned char rooms[ROW_WARPS][8 * ROTATED_LINE + 2 * 3 * SCALES];
  const int lane = threadIdx.x & 31, warp = warp_of_block(), part = blockIdx.y;
  const int first = (blockIdx.x * ROW_WARPS + warp) * each;
  unsigned char* room = rooms[warp];
  let_consumer_start();
  wait_for_producer();
  const int num = one_for_all(min(min(each, groups - first), *num_groups - first_group - first));
  if (num <= 0) return;
  // a lane knows a row of all groups, four at most, -1 for padding, and one of their matrices' scales
  int row = -1;
  if (lane < 8 * num) row = pair_of_row[(first_group + first) * 8 + lane];
  const u16* suh = x;
  if ((lane & 15) < num) suh = table[expert_of_group[first_group + first + (lane & 15)] * 3 + (lane >> 4)].suh;
  if (row >= 0) row /= places + 1;
  const u32 to = smem_address(room) + (lane >> 4) * ROTATED_LINE + (lane & 15) * 16;
  const u32 scales_to = smem_address(room) + 8 * ROTATED_LINE + lane * 16;
  float* wide_scales = (float*)(room + 8 * ROTATED_LINE + 2 * SCALES);  // each is used 8 times
  const int k = part * PART_INPUTS + 8 * (lane & 15);
  auto ask = [&](int u) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int its_row = __shfl_sync(0xffffffffu, row, 8 * u + 2 * j + (lane >> 4));
      copy_async(to + 2 * j * ROTATED_LINE, x + (u64)max(its_row, 0) * inputs + k, its_row >= 0);
    }
    copy_async(scales_to, from_lane(suh, (lane & 16) + u) + k);
    end_copies();
  };
  ask(0);
#pragma unroll 1
  for (int u = 0; u < num; u++) {
    wait_for_piece<0>();
    uint4 packed[4];
#pragma unroll
    for (int i = 0; i < 4; i++) packed[i] = *(const uint4*)(room + (lane >> 2) * ROTATED_LINE + (lane & 3) * 16 + i * 64);
    widen_eight(wide_scales + 8 * lane, *(const uint4*)(wide_scales - 2 * SCALES / 4 + 4 * lane));
    __syncwarp();
    if (u + 1 < num) ask(u + 1);
    const u64 at = tiled(first + u, part, groups);
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      const float* scales = wide_scales + which * PART_INPUTS + 8 * (lane & 3);
      float v[32], s[32];
      load_runs(s, scales);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        widen({packed[i].x, packed[i].y, 0, 0}, TYPE_BF16, v + 8 * i);
        widen({packed[i].z, packed[i].w, 0, 0}, TYPE_BF16, v + 8 * i + 4);
      }
#pragma unroll
      for (int i = 0; i < 32; i++) v[i] *= s[i];
      rotate_runs(v, (which ? up_x : gate_x) + at);
    }
  }
}

// Two values rounded to bf16 by one instruction of a wide unit: one value takes a slow unit's.
__device__ __forceinline__ void round_two(float& a, float& b) {
  const u32 two = to_bf162(a, b);
  a = __uint_as_float(two << 16);
  b = __uint_as_float(two & 0xffff0000u);
}
// Turns `gate` into what `activation` gives, rounded to bf16. Quotients are made as the compiler makes them, but without
// a branch each: values it would not make so, and some more, are found for four at a time and made anew.
__device__ __forceinline__ void activate_wide(float gate[32], float up[32], float weight, float limit) {
#pragma unroll
  for (int first = 0; first < 32; first += 4) {
    float *g = gate + first, *u = up + first, silu[4];
    bool odd_size = false;
#pragma unroll
    for (int i = 0; i < 4; i += 2) { round_two(g[i], g[i + 1]); round_two(u[i], u[i + 1]); }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      g[i] = at_most(g[i], limit);
      u[i] = at_least(at_most(u[i], limit), -limit);
      const float by = 1.f + expf(-fmaxf(g[i], -80.f));  // to 2^116
      odd_size |= (__float_as_uint(g[i]) & 0x7fffffffu) - 0x12800000u > 0x50000000u;  // not from 2^-90 to 2^70
      float r;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(by));
      r = __fmaf_rn(r, __fmaf_rn(-by, r, 1.f), r);
      silu[i] = g[i] * r;
      silu[i] = __fmaf_rn(r, __fmaf_rn(-by, silu[i], g[i]), silu[i]);
    }
    if (odd_size) {
#pragma unroll
      for (int i = 0; i < 4; i++) silu[i] = g[i] / (1.f + expf(-fmaxf(g[i], -80.f)));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) g[i] = weight * (silu[i] * u[i]);
#pragma unroll
    for (int i = 0; i < 4; i += 2) round_two(g[i], g[i + 1]);
  }
}

// Sums of gate and up [2][window rows][width] to the tiled input of down: a warp takes a part of `each` groups,
// neighbours the next part. The last groups come first: their sums were written last and are cached. grid (warps of
// `groups` * parts / ROW_WARPS up).
extern "C" __global__ void __launch_bounds__(32 * ROW_WARPS, ACT_BLOCKS) experts_act_tiled(
    const Matrix* table, const float* sums, const int* pair_of_row, const int* expert_of_group, const int* num_groups,
    const float* weights, u16* out, int places, int width, int limit, int first_group, int groups, int each) {
  __shared__ __align__(16) unsigned char rooms[ROW_WARPS][16 * SUMS_LINE + 2 * 3 * SCALES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, parts = width / PART_INPUTS;
  const int piece = blockIdx.x * ROW_WARPS + warp, part = piece % parts;
  const int first = ((groups + each - 1) / each - 1 - piece / parts) * each;
  unsigned char* room = rooms[warp];
  let_consumer_start();
  wait_for_producer();
  const int num = min(min(each, groups - first), *num_groups - first_group - first);
  if (first < 0 || num <= 0) return;
  // a lane knows the weight of a row of all groups, four at most, and one of their matrices' scales
  int pair = 0;
  if (lane < 8 * num) pair = max(pair_of_row[(first_group + first) * 8 + lane], 0);
  const u16* scale = nullptr;
  if ((lane & 7) < num && lane < 24) {
    const Matrix* m = table + expert_of_group[first_group + first + (lane & 7)] * 3 + (lane >> 3);
    scale = (lane < 16 ? m->svh : m->suh) + part * PART_INPUTS;
  }
  const int place = pair % (places + 1);
  const float of_row = place == places ? 1.f : weights[pair / (places + 1) * places + place];
  const u32 to = smem_address(room) + lane * 16, scales_to = to + 16 * SUMS_LINE;
  const float* from = sums + (u64)first * 8 * width + part * PART_INPUTS + 4 * lane;
  // of gate with all scales, and of up: what is not there is asked for as nothing, so that they come in turn
  auto ask_gate = [&](int u) {
    if (u < num) {
      ask_for_sums(to, from, width);
      const u32 at = scales_to + (u & 1) * 3 * SCALES;
      copy_async(at, from_lane(scale, (lane >> 4) * 8 + u) + 8 * (lane & 15));
      const u16* down = from_lane(scale, 16 + u);
      if (lane < 16) copy_async(at + 2 * SCALES, down + 8 * lane);
    }
    end_copies();
  };
  auto ask_up = [&](int u) {
    if (u < num) ask_for_sums(to + 8 * SUMS_LINE, from + (u64)groups * 8 * width, width);
    from += 8 * width;
    end_copies();
  };
  const float* mine = (const float*)(room + (lane >> 2) * SUMS_LINE) + 8 * (lane & 3);
  ask_gate(0);
  ask_up(0);
#pragma unroll 1
  for (int u = 0; u < num; u++) {
    const u16* scales = (const u16*)(room + 16 * SUMS_LINE + (u & 1) * 3 * SCALES) + 8 * (lane & 3);
    float gate[32], up[32];
    wait_for_piece<1>();
    load_runs(gate, mine);
    __syncwarp();
    ask_gate(u + 1);
    hadamard_wide<8>(gate);
    scale_runs(gate, scales);
    wait_for_piece<1>();
    load_runs(up, mine + 8 * SUMS_LINE / 4);
    hadamard_wide<8>(up);
    scale_runs(up, scales + SCALES / 2);
    activate_wide(gate, up, __shfl_sync(0xffffffffu, of_row, 8 * u + (lane >> 2)), __int_as_float(limit));
    __syncwarp();
    ask_up(u + 1);  // registers are free again
    scale_runs(gate, scales + SCALES);
    rotate_runs(gate, out + tiled(first + u, part, groups));
  }
}

// Finishes the outputs of a run of `window_rows` rows, one or more windows, and adds them onto those of the runs before
// it; the last one rounds to bf16. Experts ascend over runs and places. A warp takes `each` times 128 columns of 8 rows.
// grid (outputs / (512 * each) up, rows / 8 up).
extern "C" __global__ void __launch_bounds__(32 * ROW_WARPS, ADD_BLOCKS) experts_add(
    const Matrix* table, const float* sums, const int* row_of_pair, const int* expert_of_group,
    float* total, u16* out, int rows, int places, int outputs, int first_row, int window_rows, int last, int each) {
  __shared__ __align__(16) unsigned char rooms[ROW_WARPS][8 * SUMS_LINE + 2 * 8 * ROTATED_LINE];
  // outputs of the rows' places in this run, ascending: where they are, or -1, and where their scales are
  __shared__ __align__(16) int froms[MOST_PLACES][8];
  __shared__ const u16* scales[MOST_PLACES][8];
  __shared__ int counts[8];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.y * 8 + (lane >> 2);
  unsigned char* room = rooms[warp];
  let_consumer_start();
  wait_for_producer();
  {
    const int r = threadIdx.x / MOST_PLACES, place = threadIdx.x % MOST_PLACES, its_row = blockIdx.y * 8 + r;
    int from = -1;
    if (its_row < rows && place <= places) from = row_of_pair[its_row * (places + 1) + place] - first_row;
    const bool is_here = from >= 0 && from < window_rows;
    const u32 here = __ballot_sync(0xffffffffu, is_here) >> (lane & 16) & 0xffff, before = (1u << place) - 1;
    const int count = __popc(here), at = is_here ? __popc(here & before) : count + __popc(~here & before);
    froms[at][r] = is_here ? from : -1;
    if (is_here) scales[at][r] = table[expert_of_group[(from + first_row) / 8] * 3 + 2].svh;
    if (place == 0) counts[r] = count;
  }
  __syncthreads();
  int column = (blockIdx.x * each * ROW_WARPS + warp) * 128;  // of the piece at work
  const int end = min((int)(blockIdx.x + 1) * each * ROW_WARPS * 128, outputs), mine = counts[lane >> 2];
  const int num = __reduce_max_sync(0xffffffffu, mine);
  const u32 to = smem_address(room) + lane * 16;
  const u32 scales_to = smem_address(room) + 8 * SUMS_LINE + (lane >> 4) * ROTATED_LINE + (lane & 15) * 16;
  auto ask = [&](int n, int from_column, int odd) {
    const char* here = (const char*)(sums + from_column + 4 * lane);
    u32 pitch = 4 * outputs;
    asm volatile("" : "+l"(here), "+r"(pitch), "+r"(from_column));  // held: found once, not once a row
    const u16* const* its_scales = scales[n] + (lane >> 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int4 four = *(const int4*)(froms[n] + 4 * half);
      const int from[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int r = 0; r < 4; r++)
        if (from[r] >= 0) copy_async(to + (4 * half + r) * SUMS_LINE, here + (u64)(u32)from[r] * pitch);
#pragma unroll
      for (int r = 0; r < 4; r += 2)
        if ((lane < 16 ? from[r] : from[r + 1]) >= 0)
          copy_async(scales_to + (8 * odd + 4 * half + r) * ROTATED_LINE,
              its_scales[4 * half + r] + from_column + 8 * (lane & 15));
    }
    end_copies();
  };
  if (num > 0 && column < end) ask(0, column, 0);
  int odd = 0;
#pragma unroll 1
  for (; column < end; column += 128 * ROW_WARPS) {
    const u64 at = (u64)row * outputs + column + 8 * (lane & 3);
    float sum[32] = {};
    if (first_row > 0 && row < rows) load_runs(sum, total + at);
#pragma unroll 1
    for (int n = 0; n < num; n++, odd ^= 1) {
      wait_for_piece<0>();
      float v[32];
      load_runs(v, (const float*)(room + (lane >> 2) * SUMS_LINE) + 8 * (lane & 3));
      __syncwarp();
      const bool is_last = n + 1 == num;
      const int next_column = column + (is_last ? 128 * ROW_WARPS : 0);
      if (next_column < end) ask(is_last ? 0 : n + 1, next_column, odd ^ 1);
      hadamard_wide<8>(v);
      if (n < mine) {
        scale_runs(v, (const u16*)(room + 8 * SUMS_LINE + (8 * odd + (lane >> 2)) * ROTATED_LINE) + 8 * (lane & 3));
#pragma unroll
        for (int i = 0; i < 32; i++) sum[i] += v[i];
      }
    }
    if (row >= rows) continue;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* s = sum + 8 * i;
      if (last) {
        const uint2 low = bf16_four(s), high = bf16_four(s + 4);
        *(uint4*)(out + at + 32 * i) = make_uint4(low.x, low.y, high.x, high.y);
      } else {
        *(float4*)(total + at + 32 * i) = make_float4(s[0], s[1], s[2], s[3]);
        *(float4*)(total + at + 32 * i + 4) = make_float4(s[4], s[5], s[6], s[7]);
      }
    }
  }
}
