// MoE router in one launch: the k best experts of each token, their weights, the tokens an expert, and where each copy
// of a token goes when copies are sorted by expert (within an expert by token: the order does not depend on timing).
//
// A token is held by LANES lanes, EACH scores a lane. The scores fall into 32 groups; the k-th largest of the 32 group
// maxima is a floor below which no winner can lie, and only few scores reach it (about k + 1 of 256 when scores are
// independent). Those are ranked by counting. If more than SLOTS reach it (equal scores), k rounds of arg-max follow.
// Scores compare as 64-bit keys, score bits above and the complement of the expert's number below: ties go to the lower.
#include "warp.cuh"

constexpr int THREADS = 512;  // at least as many as experts
constexpr int WARPS = THREADS / 32;
constexpr int SLOTS = 32;      // candidates of a token that are ranked by counting
constexpr int GROUP = 16;  // blocks whose counts are added up on the way to the barrier
#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
typedef unsigned long long u64;

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Larger for the larger score. Adding zero makes -0 equal to 0.
__device__ __forceinline__ unsigned monotone(float score) {
  const int bits = __float_as_int(score + 0.0f);
  return static_cast<unsigned>(bits ^ ((bits >> 31) | 0x80000000));
}

// Larger for the larger score, then for the lower expert.
__device__ __forceinline__ u64 key_of(float score, int expert) {
  return static_cast<u64>(monotone(score)) << 32 | ~static_cast<unsigned>(expert);
}

__device__ __forceinline__ int expert_of(u64 key) { return static_cast<int>(~static_cast<unsigned>(key)); }

__device__ __forceinline__ float value_at(const float* row, int i) { return row[i]; }
__device__ __forceinline__ float value_at(const bf16* row, int i) { return to_float(row[i]); }

__device__ __forceinline__ void load_vector(const float* from, float (&v)[4]) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}
__device__ __forceinline__ void load_vector(const bf16* from, float (&v)[8]) {
  unpack(*reinterpret_cast<const uint4*>(from), v);
}

// What the kernel needs to turn a logit into a score. Rounding is spelled out, so that it gives the same bits wherever
// it is inlined.
struct Scoring {
  bool sigmoid;
  float highest, inverse_sum;  // of the token's softmax

  __device__ __forceinline__ float operator()(float logit) const {
    if (sigmoid) return __fdividef(1.0f, __fadd_rn(1.0f, __expf(-logit)));
    return __fmul_rn(__expf(__fsub_rn(logit, highest)), inverse_sum);
  }
};

// One step of a bitonic network over 32 values, 32 / LANES a lane (position lane * HELD + register): compares values
// `stride` apart and sorts falling where the position lacks the bit `size`, rising elsewhere.
template <int LANES>
__device__ __forceinline__ void compare_exchange(float (&v)[32 / LANES], int lane, int size, int stride) {
  constexpr int HELD = 32 / LANES;
#pragma unroll
  for (int r = 0; r < HELD; r++) {
    const int position = lane * HELD + r;
    const bool falling = (position & size) == 0;
    if (stride >= HELD) {
      const float other = __shfl_xor_sync(FULL_WARP, v[r], stride / HELD);
      v[r] = ((position & stride) == 0) == falling ? fmaxf(v[r], other) : fminf(v[r], other);
    } else if ((r & stride) == 0) {
      const float high = fmaxf(v[r], v[r | stride]), low = fminf(v[r], v[r | stride]);
      v[r] = falling ? high : low;
      v[r | stride] = falling ? low : high;
    }
  }
}

// The eighth largest of 32 values, in every lane: eights are sorted, one falling and the next rising, so that the
// larger of each pair are the eight largest of sixteen; those are sorted and paired again.
template <int LANES>
__device__ __forceinline__ float eighth_largest(float (&v)[32 / LANES], int lane) {
  constexpr int HELD = 32 / LANES;
#pragma unroll
  for (int size = 2; size <= 8; size *= 2)
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) compare_exchange<LANES>(v, lane, size, stride);
#pragma unroll
  for (int r = 0; r < HELD; r++) v[r] = fmaxf(v[r], __shfl_xor_sync(FULL_WARP, v[r], 8 / HELD));
#pragma unroll
  for (int stride = 4; stride > 0; stride /= 2) compare_exchange<LANES>(v, lane, 16, stride);
  float least = fmaxf(v[0], __shfl_xor_sync(FULL_WARP, v[0], 16 / HELD));
#pragma unroll
  for (int r = 1; r < HELD; r++) least = fminf(least, fmaxf(v[r], __shfl_xor_sync(FULL_WARP, v[r], 16 / HELD)));
#pragma unroll
  for (int step = 8 / HELD / 2; step > 0; step >>= 1) least = fminf(least, __shfl_xor_sync(FULL_WARP, least, step));
  return least;
}

// The k-th largest of 32 values, in every lane of the token.
template <int LANES>
__device__ __forceinline__ float kth_largest(float (&v)[32 / LANES], int lane, int k) {
  constexpr int HELD = 32 / LANES;
#pragma unroll
  for (int size = 2; size <= 32; size *= 2)
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) compare_exchange<LANES>(v, lane, size, stride);
  float kth = v[0];
#pragma unroll
  for (int r = 1; r < HELD; r++)
    if ((k - 1) % HELD == r) kth = v[r];
  return __shfl_sync(FULL_WARP, kth, (k - 1) / HELD, LANES);
}

template <int LANES>
__device__ __forceinline__ float group_sum(float v) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step >>= 1) v += __shfl_xor_sync(FULL_WARP, v, step);
  return v;
}
template <int LANES>
__device__ __forceinline__ float group_max(float v) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, step));
  return v;
}

// The k best of a token that a whole warp holds: in each round the warp finds the highest score left, and the lowest
// expert that has it, by its reduction instructions. Few tokens are a matter of latency, and this chain is the shorter.
template <int VECTOR, int EACH>
__device__ __forceinline__ void choose_by_rounds(const float (&v)[EACH], int k, unsigned short* chosen, bool used) {
  unsigned key[EACH];
#pragma unroll
  for (int j = 0; j < EACH; j++) key[j] = monotone(v[j]);
  for (int i = 0; i < k; i++) {
    unsigned best[EACH];
    int at[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) best[j] = key[j], at[j] = (j / VECTOR * 32 + lane_id()) * VECTOR + j % VECTOR;
#pragma unroll
    for (int left = EACH / 2; left > 0; left /= 2)
#pragma unroll
      for (int j = 0; j < left; j++) {  // neighbours, so that the left one has the lower experts
        const bool right = best[2 * j + 1] > best[2 * j];
        at[j] = right ? at[2 * j + 1] : at[2 * j];
        best[j] = right ? best[2 * j + 1] : best[2 * j];
      }
    const unsigned top = __reduce_max_sync(FULL_WARP, best[0]);
    const unsigned winner = __reduce_min_sync(FULL_WARP, best[0] == top ? at[0] : ~0u);
    if (lane_id() == 0 && used) chosen[i] = winner;
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if (winner == (j / VECTOR * 32 + lane_id()) * VECTOR + j % VECTOR) key[j] = 0;  // below -inf
  }
}

// A barrier over the grid, whose blocks must all be resident, in two halves for one thread of each block. One word, zero
// before its first use: a pass adds 2^31 in all, so the top bit flips when the last block arrives and the word is ready
// for the next launch, of any grid.
__device__ __forceinline__ unsigned grid_arrive(unsigned* word) {
  const unsigned mine = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
  unsigned old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(mine) : "memory");
  return old;
}
__device__ __forceinline__ void grid_wait(const unsigned* word, unsigned old) {
  unsigned now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
  } while (((old ^ now) & 0x80000000u) == 0);
}

// Adds up what blocks published: `sums` has the counts of GROUP blocks each, `rows` those of single blocks, two experts
// of 16 bits a word. total: over all blocks; before: over earlier ones, which is whole groups and rows of the own group.
__device__ __forceinline__ void add_blocks(const unsigned* sums, const unsigned* rows, int columns, unsigned* total,
                                           unsigned* before) {
  const int strips = THREADS / columns, column = threadIdx.x % columns, strip = threadIdx.x / columns;
  if (strip >= strips) return;
  const int group = blockIdx.x / GROUP, groups = (gridDim.x + GROUP - 1) / GROUP, earlier_rows = blockIdx.x % GROUP;
  unsigned all[2] = {0, 0}, earlier[2] = {0, 0};
  constexpr int TOGETHER = 8;  // loads in flight
  for (int base = strip; base < groups + earlier_rows; base += TOGETHER * strips) {
    unsigned word[TOGETHER];
#pragma unroll
    for (int u = 0; u < TOGETHER; u++) {
      const int i = base + u * strips;
      const unsigned* from = i < groups ? sums + i * columns : rows + (group * GROUP + i - groups) * columns;
      word[u] = i < groups + earlier_rows ? __ldcg(from + column) : 0;
    }
#pragma unroll
    for (int u = 0; u < TOGETHER; u++) {
      const int i = base + u * strips;
      if (i < groups) all[0] += word[u] & 0xffffu, all[1] += word[u] >> 16;
      if (i < group || i >= groups) earlier[0] += word[u] & 0xffffu, earlier[1] += word[u] >> 16;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    atomicAdd(total + column * 2 + i, all[i]);
    atomicAdd(before + column * 2 + i, earlier[i]);
  }
}

// logits: tokens x experts. bias: experts; with BIASED, experts are chosen by score + bias, weighted by score alone.
// index, weight, place: tokens x k, by falling score. counts: experts. offsets: experts + 1. history: scratch of
// 2 experts bytes a block (experts rounded up to 4). state: 2 + 9 x 256 words, all zero before the first launch; every
// launch leaves them so, but for the barrier's top bit. Launches that may run at the same time need states of their own.
// each: tokens a block, at most 4095. At most 512 experts, k at most 16 and at most `experts`, at most 144 blocks, all
// resident. Dynamic shared memory: the arrays at the
// start of the kernel, 4 sums (words + 2) + 8 each + 6 each k bytes.
// A row with a NaN gets experts 0 .. k-1 and NaN weights; a row of -inf gets experts 0 .. k-1 and weights 0.
template <typename T, int BIASED, int LANES, int EACH>
__global__ void __launch_bounds__(THREADS)
    router(const T* __restrict__ logits, const float* __restrict__ bias, int* __restrict__ index,
           float* __restrict__ weight, int* __restrict__ place, int* __restrict__ counts, int* __restrict__ offsets,
           int* history, int* state, int tokens, int experts, int k, int each, int sigmoid, int renormalise,
           float scale) {
  constexpr int VECTOR = 16 / sizeof(T), HELD = 32 / LANES, TOGETHER = 32 / LANES;  // tokens a warp
  __shared__ u64 slots[WARPS * TOGETHER][SLOTS + 1];
  __shared__ unsigned warp_totals[WARPS];
  extern __shared__ __align__(16) unsigned dynamic[];
  const int words = (each + 31) / 32, sums = (experts + 3) / 4 * 4;  // float2 below: 8 bytes
  unsigned* const bits = dynamic;                  // sums x words: which of the block's tokens chose the expert
  unsigned* const total = bits + sums * words;  // sums over blocks, then
  unsigned* const before = total + sums;            // the first place of this block's tokens at each expert
  float2* const softmax_of = reinterpret_cast<float2*>(before + sums);  // each: highest logit (NaN: bad row), 1 / sum
  float* const logit = reinterpret_cast<float*>(softmax_of + each);     // each x k: the winners'
  unsigned short* const chosen = reinterpret_cast<unsigned short*>(logit + each * k);  // each x k

  const int first = blockIdx.x * each, mine = min(each, tokens - first);
  const int lane = lane_id() % LANES, group = threadIdx.x / LANES;
  auto row_of = [&](int local) { return logits + static_cast<long long>(first + local) * experts; };
  float v[EACH];
  auto load = [&](int local) {  // what lies outside the row is -inf, and of a higher expert than any in it
    const T* from = row_of(local);
    if (experts == LANES * EACH) {
#pragma unroll
      for (int c = 0; c < EACH / VECTOR; c++) {
        float part[VECTOR];
        load_vector(from + (c * LANES + lane) * VECTOR, part);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) v[c * VECTOR + i] = part[i];
      }
      return;
    }
    const bool aligned = experts % VECTOR == 0;
#pragma unroll
    for (int c = 0; c < EACH / VECTOR; c++) {
      const int at = (c * LANES + lane) * VECTOR;
      float part[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; i++) part[i] = -INFINITE;
      if (aligned) {
        if (at < experts) load_vector(from + at, part);
      } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
          if (at + i < experts) part[i] = value_at(from, at + i);
      }
#pragma unroll
      for (int i = 0; i < VECTOR; i++) v[c * VECTOR + i] = part[i];
    }
  };
  const int busy = warp_id() * TOGETHER;  // the warp's first token of a round
  if (busy < mine) load(min(group, mine - 1));
  for (int i = threadIdx.x; i < sums * (words + 2); i += THREADS) dynamic[i] = 0;
  __syncthreads();

  for (int base = 0; base + busy < mine; base += WARPS * TOGETHER) {
    const int local = base + group, ahead = local + WARPS * TOGETHER;
    const bool used = local < mine;
    const T* row = row_of(used ? local : 0);
    if (ahead < mine) {
      const char* next = reinterpret_cast<const char*>(row_of(ahead));
      for (int at = lane * 128; at < experts * static_cast<int>(sizeof(T)); at += LANES * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(next + at));
    }

    // Maxima of the groups, NaN if a score is.
    float top[HELD];
    auto group_maxima = [&]() {
#pragma unroll
      for (int g = 0; g < HELD; g++) {
        top[g] = v[g * (EACH / HELD)];
#pragma unroll
        for (int i = 1; i < EACH / HELD; i++) top[g] = max_or_nan(top[g], v[g * (EACH / HELD) + i]);
      }
    };
    group_maxima();
    bool bad = false;
#pragma unroll
    for (int g = 0; g < HELD; g++) bad |= top[g] != top[g];
    constexpr unsigned ONE_GROUP = LANES == 32 ? FULL_WARP : (1u << LANES % 32) - 1;
    bad = (__ballot_sync(FULL_WARP, bad) >> (lane_id() - lane) & ONE_GROUP) != 0;

    Scoring score = {sigmoid != 0, 0.0f, 1.0f};
    if (!sigmoid && (BIASED || !renormalise)) {
      float highest = top[0];
#pragma unroll
      for (int g = 1; g < HELD; g++) highest = fmaxf(highest, top[g]);
      score.highest = fmaxf(group_max<LANES>(highest), LOWEST);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < EACH; i++) sum += __expf(v[i] - score.highest);
      sum = group_sum<LANES>(sum);
      score.inverse_sum = sum > 0.0f ? 1.0f / sum : 0.0f;
    }
    if constexpr (BIASED) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int expert = (i / VECTOR * LANES + lane) * VECTOR + i % VECTOR;
        v[i] = expert < experts ? __fadd_rn(score(v[i]), bias[expert]) : -INFINITE;
      }
      group_maxima();
    }

    if constexpr (LANES == 32) {
      choose_by_rounds<VECTOR>(v, k, chosen + (used ? local : 0) * k, used);
    } else {
      // No winner is below this.
      const float least = k <= 8 ? eighth_largest<LANES>(top, lane) : kth_largest<LANES>(top, lane, k);

      unsigned reach[(EACH + 31) / 32];
      int count = 0;
#pragma unroll
      for (int w = 0; w < (EACH + 31) / 32; w++) {
        reach[w] = 0;
#pragma unroll
        for (int i = 0; i < (EACH < 32 ? EACH : 32); i++)
          if (v[w * 32 + i] >= least) reach[w] |= 1u << i;
        count += __popc(reach[w]);
      }
      int at = count;  // inclusive sums over the token's lanes
#pragma unroll
      for (int step = 1; step < LANES; step *= 2) {
        const int below = __shfl_up_sync(FULL_WARP, at, step, LANES);
        if (lane >= step) at += below;
      }
      const int candidates = __shfl_sync(FULL_WARP, at, LANES - 1, LANES);
      at -= count;
      const bool few = candidates <= SLOTS && !bad && used;
      if (few) {
#pragma unroll
        for (int w = 0; w < (EACH + 31) / 32; w++) {
          while (reach[w]) {
            const int i = w * 32 + __ffs(reach[w]) - 1;
            reach[w] &= reach[w] - 1;
            const int expert = (i / VECTOR * LANES + lane) * VECTOR + i % VECTOR;
            float s = -INFINITE;  // registers cannot be indexed at run time: the logit comes from L1 again
            if (expert < experts) {
              s = value_at(row, expert);
              if constexpr (BIASED) s = __fadd_rn(score(s), bias[expert]);
            }
            slots[group][at++] = key_of(s, expert);
          }
        }
      }
      __syncwarp();
      if (few) {
        constexpr int OWN = LANES < 32 ? 2 : 1;  // candidates that a lane ranks at a time
        for (int own = lane; own < candidates; own += OWN * LANES) {
          const u64 key = slots[group][own], second = own + LANES < candidates ? slots[group][own + LANES] : 0;
          int rank = 0, second_rank = 0;
#pragma unroll 4
          for (int i = 0; i < candidates; i++) {
            const u64 other = slots[group][i];
            rank += other > key;
            if (OWN == 2) second_rank += other > second;
          }
          if (rank < k) chosen[local * k + rank] = expert_of(key);
          if (OWN == 2 && second_rank < k && own + LANES < candidates)
            chosen[local * k + second_rank] = expert_of(second);
        }
      }
      if (__any_sync(FULL_WARP, !few && !bad && used)) {
        u64 last = ~0ull;
        for (int i = 0; i < k; i++) {
          u64 best = 0;
#pragma unroll
          for (int j = 0; j < EACH; j++) {
            const u64 key = key_of(v[j], (j / VECTOR * LANES + lane) * VECTOR + j % VECTOR);
            if (key < last && key > best) best = key;
          }
#pragma unroll
          for (int step = LANES / 2; step > 0; step >>= 1) {
            const u64 other = __shfl_xor_sync(FULL_WARP, best, step);
            if (other > best) best = other;
          }
          last = best;
          if (!few && used && lane == 0) chosen[local * k + i] = expert_of(best);
        }
      }
    }
    __syncwarp();
    if (base + WARPS * TOGETHER + busy < mine) load(min(ahead, mine - 1));

    if (used) {
      for (int i = lane; i < k; i += LANES) {
        const int expert = bad ? i : chosen[local * k + i];
        if (bad) chosen[local * k + i] = expert;
        logit[local * k + i] = bad ? 0.0f : value_at(row, expert);
        atomicOr(bits + expert * words + local / 32, 1u << local % 32);
      }
      if (lane == 0) softmax_of[local] = make_float2(bad ? NOT_A_NUMBER : score.highest, score.inverse_sum);
    }
    __syncwarp();
  }
  __syncthreads();

  const int e = threadIdx.x, columns = sums / 2;
  unsigned* const barrier = reinterpret_cast<unsigned*>(state);
  unsigned* const group_sums = barrier + 2;
  unsigned* const rows = reinterpret_cast<unsigned*>(history);
  unsigned old = 0, readers = 0, here = 0, earlier = 0;  // here: tokens that chose expert e, of this block, then of all
  if (tokens > 1) {
    if (e < experts)
      for (int w = 0; w < words; w++) here += __popc(bits[e * words + w]);
    if (gridDim.x > 1) {
      const unsigned pair = here | __shfl_down_sync(FULL_WARP, here, 1) << 16;
      if (e < sums && e % 2 == 0) {
        rows[blockIdx.x * columns + e / 2] = pair;
        atomicAdd(group_sums + blockIdx.x / GROUP * columns + e / 2, pair);
      }
      __syncthreads();
      if (e == 0) old = grid_arrive(barrier);
    }
  }

  // Weights, 8 or 16 lanes a token, while the other blocks arrive.
  const int shift = k <= 8 ? 3 : 4, slot = threadIdx.x & ((1 << shift) - 1), per_round = THREADS >> shift;
  for (int base = 0; base < mine; base += per_round) {
    const int local = base + (threadIdx.x >> shift);
    const bool used = local < mine && slot < k;
    float share = 0.0f;
    if (used) {
      const float2 known = softmax_of[local];
      Scoring score = {sigmoid != 0, known.x, known.y};
      if (!sigmoid && !BIASED && renormalise && known.x == known.x) score.highest = fmaxf(logit[local * k], LOWEST);
      share = known.x == known.x ? score(logit[local * k + slot]) : NOT_A_NUMBER;
    }
    float factor = scale;
    if (renormalise) {
      float sum = share;
#pragma unroll
      for (int step = 8; step > 0; step >>= 1) {
        const float other = __shfl_xor_sync(FULL_WARP, sum, step);
        if (step < 1 << shift) sum += other;
      }
      factor = sum == 0.0f ? 0.0f : __fdividef(scale, sum);
    }
    if (used) {
      const long long to = static_cast<long long>(first + local) * k + slot;
      index[to] = chosen[local * k + slot];
      weight[to] = share * factor;
    }
  }

  if (tokens == 1) {  // nothing to add up
    unsigned below = 0, equal = 0, at = 0;
    for (int i = 0; i < k; i++) {
      below += chosen[i] < e;
      if (chosen[i] == e) equal = 1, at = i;
    }
    if (e < experts) {
      counts[e] = equal;
      offsets[e] = below;
      if (equal) place[at] = below;
      if (e == 0) offsets[experts] = k;
    }
    return;
  }
  if (gridDim.x > 1) {
    if (e == 0) grid_wait(barrier, old);
    __syncthreads();
    add_blocks(group_sums, rows, columns, total, before);
    __syncthreads();
    if (e == 0) {
      __threadfence();
      readers = atomicAdd(reinterpret_cast<unsigned*>(state) + 1, 1);
    }
    if (e < experts) here = total[e], earlier = before[e];
  }

  // Exclusive sums over experts: where each expert's rows begin.
  unsigned upto = here;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned below = __shfl_up_sync(FULL_WARP, upto, step);
    if (lane_id() >= step) upto += below;
  }
  if (lane_id() == 31) warp_totals[warp_id()] = upto;
  __syncthreads();
  for (int w = 0; w < warp_id(); w++) upto += warp_totals[w];
  if (e < experts) {
    before[e] = upto - here + earlier;
    if (blockIdx.x == 0) {
      counts[e] = here;
      offsets[e + 1] = upto;
      if (e == 0) offsets[0] = 0;
    }
  }
  __syncthreads();

  for (int base = 0; base < mine; base += per_round) {
    const int local = base + (threadIdx.x >> shift);
    if (local >= mine || slot >= k) continue;
    const int expert = chosen[local * k + slot];
    const unsigned* who = bits + expert * words;
    unsigned rank = __popc(who[local / 32] & ((1u << local % 32) - 1));
    for (int w = 0; w < local / 32; w++) rank += __popc(who[w]);
    place[static_cast<long long>(first + local) * k + slot] = before[expert] + rank;
  }

  // The last block to have read the sums leaves the state as it was found.
  if (gridDim.x > 1 && __syncthreads_or(e == 0 && readers == gridDim.x - 1)) {
    for (int i = e; i < (gridDim.x + GROUP - 1) / GROUP * columns; i += THREADS) state[2 + i] = 0;
    if (e == 0) state[1] = 0;
  }
}


#ifndef __CUDACC_RTC__  // NVRTC instantiates what it is asked for; nvcc needs to be told
#define INSTANTIATE(T, BIASED, LANES, EACH)                                                                         \
  template __global__ void router<T, BIASED, LANES, EACH>(const T*, const float*, int*, float*, int*, int*, int*,   \
                                                          int*, int*, int, int, int, int, int, int, float);
INSTANTIATE(float, 0, 32, 8)
INSTANTIATE(float, 0, 8, 8)
INSTANTIATE(float, 0, 8, 32)
INSTANTIATE(float, 1, 8, 32)
INSTANTIATE(bf16, 0, 8, 32)
INSTANTIATE(bf16, 1, 16, 32)
#endif
