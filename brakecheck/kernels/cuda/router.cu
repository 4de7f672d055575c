// MoE router in one launch: the k best experts of each token, their weights, the tokens an expert, and where each copy
// of a token goes when copies are sorted by expert (within an expert by token: the order does not depend on timing).
//
// A token is held by LANES lanes, EACH scores a lane, rounded to bfloat16 and two to a register: rounding keeps order, so
// that a floor found with rounded scores loses no winner. Each lane has two or four groups of scores; the k-th largest of the
// group maxima is a floor below which no winner can lie, and few scores reach it (about 11 of 256 for k = 8, when scores
// are independent). Those are read again, exactly, and ranked by counting. If more than SLOTS reach it (equal scores), k
// rounds of arg-max follow. Keys hold the score's bits above and the complement of the expert's number below: ties go to
// the lower.
//
// Blocks tell each other how many tokens chose each expert through words that hold counts and whether they are complete:
// no barrier over the grid, and no fence.
#include "router.cuh"

#ifndef ROUTER_THREADS
#define ROUTER_THREADS 512  // at least as many as experts
#endif
constexpr int THREADS = ROUTER_THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int SLOTS = 32;      // candidates of a token that are ranked by counting
#ifndef ROUTER_GROUP
#define ROUTER_GROUP 16
#endif
constexpr int GROUP = ROUTER_GROUP;      // blocks whose counts are added up by atomics
constexpr int MOST_GROUPS = 144 / GROUP, MOST_COLUMNS = 256;  // of two experts

#ifndef ROUTER_REGS
#define ROUTER_REGS(LANES) ((LANES) == 4 ? 2 : 1)
#endif
#ifndef STAMP
#define STAMP(i)
#endif

// ---- two bfloat16 in a register

__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
  unsigned d;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ unsigned larger_or_nan(unsigned a, unsigned b) {
  unsigned d;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ unsigned smaller(unsigned a, unsigned b) {
  unsigned d;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// 0xffff in each half where a >= b.
__device__ __forceinline__ unsigned reaches(unsigned a, unsigned b) {
  unsigned d;
#if __CUDA_ARCH__ >= 900
  asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  d = __uint_as_float(a << 16) >= __uint_as_float(b << 16) ? 0xffffu : 0;
  if (__uint_as_float(a & 0xffff0000u) >= __uint_as_float(b & 0xffff0000u)) d |= 0xffff0000u;
#endif
  return d;
}
__device__ __forceinline__ unsigned permute_bytes(unsigned a, unsigned b, unsigned how) {
  unsigned d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(how));
  return d;
}

// The k-th largest of the values that LANES lanes hold in both halves of REGS registers, in both halves of the result, in
// every lane. k <= N = LANES REGS. The low halves are sorted falling, the high halves rising (position lane REGS +
// register), so that the larger of the two at each position are the N largest of all; those are sorted again.
template <int LANES, int REGS>
__device__ __forceinline__ unsigned kth_largest(unsigned (&v)[REGS], int lane, int k) {
  constexpr unsigned FALLING = 0x7610, RISING = 0x3254;  // bytes of (larger, smaller): which half takes which
#pragma unroll
  for (int size = 2; size <= LANES * REGS; size *= 2)
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2)
#pragma unroll
      for (int r = 0; r < REGS; r++) {
        const int position = lane * REGS + r;
        const bool falling = (position & size) == 0;
        if (stride >= REGS) {
          const unsigned other = __shfl_xor_sync(FULL_WARP, v[r], stride / REGS);
          v[r] = permute_bytes(larger(v[r], other), smaller(v[r], other),
                               falling == ((position & stride) == 0) ? FALLING : RISING);
        } else if ((r & stride) == 0) {
          const unsigned high = larger(v[r], v[r | stride]), low = smaller(v[r], v[r | stride]);
          v[r] = permute_bytes(high, low, falling ? FALLING : RISING);
          v[r | stride] = permute_bytes(high, low, falling ? RISING : FALLING);
        }
      }
#pragma unroll
  for (int r = 0; r < REGS; r++) v[r] = larger(v[r], permute_bytes(v[r], v[r], 0x1032));
#pragma unroll
  for (int stride = LANES * REGS / 2; stride > 0; stride /= 2)
#pragma unroll
    for (int r = 0; r < REGS; r++)
      if (stride >= REGS) {
        const unsigned other = __shfl_xor_sync(FULL_WARP, v[r], stride / REGS);
        v[r] = (lane & stride / REGS) == 0 ? larger(v[r], other) : smaller(v[r], other);
      } else if ((r & stride) == 0) {
        const unsigned high = larger(v[r], v[r | stride]);
        v[r | stride] = smaller(v[r], v[r | stride]);
        v[r] = high;
      }
  unsigned kth = v[0];
#pragma unroll
  for (int r = 1; r < REGS; r++)
    if ((k - 1) % REGS == r) kth = v[r];
  return __shfl_sync(FULL_WARP, kth, (k - 1) / REGS, LANES);
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

// ---- what blocks tell each other. A word is read and written whole, so it needs no order with others.

__device__ __forceinline__ u64 look(const u64* word) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return v;
}
__device__ __forceinline__ void tell(u64* word, u64 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(v) : "memory");
}
__device__ __forceinline__ void tell_more(u64* word, u64 v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(v) : "memory");
}

// state: a header (low half: launches so far; high half: words of sums that the last launch used), a pad word, two sets of
// sums, rows. A launch uses one set and clears what the last launch used of the other. A sum: two counts of 24 bits, above
// them the number of blocks in it. A row's word: two counts of 16 bits, above them the number of the launch, from 1.
struct Exchange {
  u64* state;
  u64 header;

  __device__ __forceinline__ unsigned launch() const { return static_cast<unsigned>(header); }
  __device__ __forceinline__ u64* sums_of(unsigned launch) const {
    return state + 2 + (launch & 1) * (MOST_GROUPS * MOST_COLUMNS);
  }
  __device__ __forceinline__ u64* rows() const { return state + 2 + 2 * MOST_GROUPS * MOST_COLUMNS; }

  __device__ __forceinline__ void publish(int columns, int column, unsigned first, unsigned second) const {
    tell_more(sums_of(launch()) + blockIdx.x / GROUP * columns + column,
              1ull << 48 | static_cast<u64>(second) << 24 | first);
    tell(rows() + blockIdx.x * columns + column, static_cast<u64>(launch() + 1) << 32 | second << 16 | first);
  }

  __device__ __forceinline__ void clear_old() const {
    const unsigned words = header >> 32;
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < words; i += gridDim.x * THREADS)
      tell(sums_of(launch() + 1) + i, 0);
  }

  // Waits for the words it needs and adds them up, into shared memory. total: over all blocks; before: over earlier ones,
  // which is whole groups and rows of the own group.
  __device__ __forceinline__ void add_up(int columns, unsigned* total, unsigned* before) const {
    const int strips = THREADS / columns, column = threadIdx.x % columns, strip = threadIdx.x / columns;
    if (strip >= strips) return;
    const int group = blockIdx.x / GROUP, groups = (gridDim.x + GROUP - 1) / GROUP, n = groups + blockIdx.x % GROUP;
    unsigned all[2] = {0, 0}, earlier[2] = {0, 0};
    constexpr int TOGETHER = 6;  // loads in flight
#pragma unroll 1
    for (int base = strip; base < n; base += TOGETHER * strips) {
      u64 word[TOGETHER];
      bool ready;
      do {
        ready = true;
#pragma unroll
        for (int u = 0; u < TOGETHER; u++) {
          const int i = base + u * strips;
          const u64* from = i < groups ? sums_of(launch()) + i * columns
                                       : rows() + (group * GROUP + i - groups) * columns;
          if (i < n) word[u] = look(from + column);
        }
#pragma unroll
        for (int u = 0; u < TOGETHER; u++) {
          const int i = base + u * strips;
          if (i < groups) {
            ready &= word[u] >> 48 == min(GROUP, gridDim.x - i * GROUP);
          } else if (i < n) {
            ready &= word[u] >> 32 == launch() + 1;
          }
        }
      } while (!ready);
#pragma unroll
      for (int u = 0; u < TOGETHER; u++) {
        const int i = base + u * strips;
        if (i >= n) continue;
        const unsigned shift = i < groups ? 24 : 16, mask = (1u << shift) - 1;
        const unsigned first = word[u] & mask, second = word[u] >> shift & mask;
        if (i < groups) all[0] += first, all[1] += second;
        if (i < group || i >= groups) earlier[0] += first, earlier[1] += second;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      atomicAdd(total + column * 2 + i, all[i]);
      atomicAdd(before + column * 2 + i, earlier[i]);
    }
  }

  // For one thread of block 0, after add_up: every block has read the header by then, since all have published.
  __device__ __forceinline__ void close(int columns) const {
    tell(state, static_cast<u64>((gridDim.x + GROUP - 1) / GROUP * columns) << 32 | (launch() + 1));
  }
};

// logits: tokens x experts. bias: experts; with BIASED, experts are chosen by score + bias, weighted by score alone.
// index, weight, place: tokens x k, by falling score. counts: experts. offsets: experts + 1. state: 2 + 2 x 9 x 256 +
// 144 x 256 words of 64 bits, all zero before the first launch and the kernel's own from then on. Launches that may run at
// the same time need states of their own. each: tokens a block, at most 4095. At most 512 experts, k at most LANES and at
// most `experts`, at most 144 blocks, all resident. Dynamic shared memory: the arrays at the start of the kernel,
// 4 sums (words + 2) + 8 each + 6 each k bytes.
// A row with a NaN gets experts 0 .. k-1 and NaN weights; a row of -inf gets experts 0 .. k-1 and weights 0.
template <typename T, int BIASED, int LANES, int EACH>
__global__ void __launch_bounds__(THREADS, 1)
    router(const T* __restrict__ logits, const float* __restrict__ bias, int* __restrict__ index,
           float* __restrict__ weight, int* __restrict__ place, int* __restrict__ counts, int* __restrict__ offsets,
           u64* state, int tokens, int experts, int k, int each, int sigmoid, int renormalise, float scale) {
  constexpr int VECTOR = 16 / sizeof(T), LOADS = EACH / VECTOR, PAIRS = EACH / 2, TOGETHER = 32 / LANES;  // tokens a warp
  constexpr int REGS = ROUTER_REGS(LANES), MASKS = (PAIRS + 15) / 16;
  typedef Keys<sizeof(T) == 2 && !BIASED> K;
  typedef typename K::type Key;
  __shared__ Key slots[WARPS * TOGETHER][SLOTS + 1];
  __shared__ unsigned warp_totals[32];
  extern __shared__ __align__(16) unsigned dynamic[];
  const int words = (each + 31) / 32, sums = (experts + 3) / 4 * 4;  // float2 below: 8 bytes
  unsigned* const bits = dynamic;                // sums x words: which of the block's tokens chose the expert
  unsigned* const total = bits + sums * words;   // sums over blocks, then
  unsigned* const before = total + sums;         // the first place of this block's tokens at each expert
  float2* const softmax_of = reinterpret_cast<float2*>(before + sums);  // each: highest logit, 1 / sum
  float* const logit = reinterpret_cast<float*>(softmax_of + each);     // each x k: the winners'; NaN: bad row
  unsigned short* const chosen = reinterpret_cast<unsigned short*>(logit + each * k);  // each x k

  STAMP(0);
  const int first = blockIdx.x * each, mine = min(each, tokens - first);
  const int lane = lane_id() % LANES, group = threadIdx.x / LANES;
  const bool whole = experts == LANES * EACH, aligned = experts % VECTOR == 0;
  auto row_of = [&](int local) { return logits + static_cast<long long>(first + local) * experts; };
  auto expert_at = [&](int i) { return (i & ~(VECTOR - 1)) * LANES + lane * VECTOR + (i & (VECTOR - 1)); };

  uint4 raw[LOADS];  // what lies outside the row is -inf
  auto load = [&](int local) {
    const T* from = row_of(local);
    if (whole) {
#pragma unroll
      for (int c = 0; c < LOADS; c++) raw[c] = reinterpret_cast<const uint4*>(from)[c * LANES + lane];
      return;
    }
    constexpr unsigned LEAST = sizeof(T) == 4 ? 0xff800000u : 0xff80ff80u;
#pragma unroll
    for (int c = 0; c < LOADS; c++) {
      const int at = expert_at(c * VECTOR);
      raw[c] = make_uint4(LEAST, LEAST, LEAST, LEAST);
      if (aligned) {
        if (at < experts) raw[c] = *reinterpret_cast<const uint4*>(from + at);
      } else {
        unsigned part[4] = {LEAST, LEAST, LEAST, LEAST};
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
          if (at + i < experts) {
            if constexpr (sizeof(T) == 4) part[i] = __float_as_uint(from[at + i]);
            else part[i / 2] = permute_bytes(part[i / 2], from[at + i], i % 2 ? 0x5410 : 0x3254);
          }
        raw[c] = make_uint4(part[0], part[1], part[2], part[3]);
      }
    }
  };
  const int busy = warp_id() * TOGETHER;  // the warp's first token of a round
  if (busy < mine) load(min(group, mine - 1));
  unsigned valid[MASKS];  // positions of scores, as in `reach` below, that lie in the row
#pragma unroll
  for (int m = 0; m < MASKS; m++) valid[m] = whole ? ~0u : 0;
  if (!whole) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (expert_at(i) < experts) valid[i / 32] |= 1u << (i / 2 % 16 + i % 2 * 16);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < sums / 4 * (words + 2); i += THREADS)
    reinterpret_cast<uint4*>(dynamic)[i] = make_uint4(0, 0, 0, 0);
  __shared__ u64 header;  // in shared memory before the barrier: a block publishes only after it was read
  if (threadIdx.x == 0 && gridDim.x > 1) header = look(state);
  __syncthreads();
  const Exchange exchange = {state, header};
  STAMP(1);

#pragma unroll 1
  for (int base = 0; base + busy < mine; base += WARPS * TOGETHER) {
    const int local = base + group;
    const bool used = local < mine;
    const T* row = row_of(used ? local : 0);

    unsigned pair[PAIRS];
    Scoring score = {sigmoid != 0, 0.0f, 1.0f};
    if (BIASED || (!sigmoid && !renormalise)) {
      float v[EACH];
#pragma unroll
      for (int c = 0; c < LOADS; c++) {
        const unsigned part[4] = {raw[c].x, raw[c].y, raw[c].z, raw[c].w};
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
          v[c * VECTOR + i] = __uint_as_float(sizeof(T) == 4 ? part[i * 4 / VECTOR]
                                              : i % 2 ? part[i / 2] & 0xffff0000u : part[i / 2] << 16);
      }
      if (!sigmoid) {
        float highest = v[0], sum = 0.0f;
#pragma unroll
        for (int i = 1; i < EACH; i++) highest = fmaxf(highest, v[i]);
        score.highest = fmaxf(group_max<LANES>(highest), LOWEST);
#pragma unroll
        for (int i = 0; i < EACH; i++) sum += __expf(v[i] - score.highest);
        sum = group_sum<LANES>(sum);
        score.inverse_sum = sum > 0.0f ? 1.0f / sum : 0.0f;
      }
      if constexpr (BIASED) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          const int expert = expert_at(i);
          v[i] = expert < experts ? __fadd_rn(score(v[i]), bias[expert]) : -INFINITE;
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i++) pair[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
      }
    }
    if constexpr (!BIASED) {
#pragma unroll
      for (int c = 0; c < LOADS; c++) {
        if constexpr (sizeof(T) == 4) {
          pair[2 * c] = pack_bf16(__uint_as_float(raw[c].x), __uint_as_float(raw[c].y));
          pair[2 * c + 1] = pack_bf16(__uint_as_float(raw[c].z), __uint_as_float(raw[c].w));
        } else {
          pair[4 * c] = raw[c].x, pair[4 * c + 1] = raw[c].y, pair[4 * c + 2] = raw[c].z, pair[4 * c + 3] = raw[c].w;
        }
      }
    }
    if (base + WARPS * TOGETHER + busy < mine) load(min(local + WARPS * TOGETHER, mine - 1));

    unsigned top[REGS];
    bool bad = false;
#pragma unroll
    for (int r = 0; r < REGS; r++) {
      top[r] = pair[r * (PAIRS / REGS)];
#pragma unroll
      for (int i = 1; i < PAIRS / REGS; i++) top[r] = larger_or_nan(top[r], pair[r * (PAIRS / REGS) + i]);
      bad |= (top[r] & 0x7fffu) > 0x7f80u || (top[r] & 0x7fff0000u) > 0x7f800000u;
    }
    constexpr unsigned ONE_GROUP = LANES == 32 ? FULL_WARP : (1u << LANES % 32) - 1;
    bad = (__ballot_sync(FULL_WARP, bad) >> (lane_id() - lane) & ONE_GROUP) != 0;
    const unsigned least = kth_largest<LANES, REGS>(top, lane, k);  // no winner is below this

    unsigned reach[MASKS];  // bit i: low half of pair i, bit 16 + i: high half
    int count = 0;
#pragma unroll
    for (int m = 0; m < MASKS; m++) {
      reach[m] = 0;
#pragma unroll
      for (int i = 0; i < (PAIRS < 16 ? PAIRS : 16); i++)
        reach[m] |= reaches(pair[m * 16 + i], least) & 0x00010001u << i;
      reach[m] &= valid[m];
      count += __popc(reach[m]);
    }
    int at = count;  // inclusive sums over the token's lanes
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
      const int below = __shfl_up_sync(FULL_WARP, at, step, LANES);
      if (lane >= step) at += below;
    }
    const int candidates = __shfl_sync(FULL_WARP, at, LANES - 1, LANES);
    at -= count;
    auto key_at = [&](int expert) {
      float s = value_at(row, expert);
      if constexpr (BIASED) s = __fadd_rn(score(s), bias[expert]);
      return K::make(s, expert);
    };
    auto win = [&](int rank, Key key) {
      const int expert = K::expert(key), to = local * k + rank;
      chosen[to] = expert;
      logit[to] = BIASED ? value_at(row, expert) : K::score(key);
      atomicOr(bits + expert * words + local / 32, 1u << local % 32);
    };
    const bool few = candidates <= SLOTS && !bad && used;
    if (few) {
#pragma unroll
      for (int m = 0; m < MASKS; m++)
        while (reach[m]) {
          const int bit = __ffs(reach[m]) - 1;
          reach[m] &= reach[m] - 1;
          const int expert = expert_at(m * 32 + (bit & 15) * 2 + (bit >> 4));
          slots[group][at++] = key_at(expert);
        }
    }
    __syncwarp();
    if (few) {
#pragma unroll 1
      for (int own = lane; own < candidates; own += 2 * LANES) {
        const bool two = own + LANES < candidates;
        const Key key = slots[group][own], second = two ? slots[group][own + LANES] : 0;
        int rank = 0, second_rank = two ? 0 : k;
#pragma unroll 4
        for (int i = 0; i < candidates; i++) {
          const Key other = slots[group][i];
          rank += other > key;
          second_rank += other > second;
        }
        if (rank < k) win(rank, key);
        if (second_rank < k) win(second_rank, second);
      }
    } else if (used && bad) {
#pragma unroll 1
      for (int i = lane; i < k; i += LANES) {
        chosen[local * k + i] = i;
        logit[local * k + i] = NOT_A_NUMBER;
        atomicOr(bits + i * words + local / 32, 1u << local % 32);
      }
    }
    if (__any_sync(FULL_WARP, !few && !bad && used)) {
      Key last = ~static_cast<Key>(0);
#pragma unroll 1
      for (int i = 0; i < k; i++) {
        Key best = 0;
#pragma unroll 4
        for (int j = 0; j < EACH; j++)
          if (expert_at(j) < experts) {
            const Key key = key_at(expert_at(j));
            if (key < last && key > best) best = key;
          }
#pragma unroll
        for (int step = LANES / 2; step > 0; step >>= 1) {
          const Key other = __shfl_xor_sync(FULL_WARP, best, step);
          if (other > best) best = other;
        }
        last = best;
        if (!few && !bad && used && lane == 0) win(i, best);
      }
    }
    if (used && lane == 0) softmax_of[local] = make_float2(score.highest, score.inverse_sum);
    __syncwarp();
  }
  STAMP(2);
  __syncthreads();
  STAMP(3);

  const int e = threadIdx.x, columns = sums / 2;
  unsigned here = 0, earlier = 0;  // here: tokens that chose expert e, of this block, then of all
  if (e < experts)
    for (int w = 0; w < words; w++) here += __popc(bits[e * words + w]);
  if (gridDim.x > 1) {
    const unsigned next = __shfl_down_sync(FULL_WARP, here, 1);
    if (e < sums && e % 2 == 0) exchange.publish(columns, e / 2, here, next);
    exchange.clear_old();
  }
  STAMP(4);

  // Weights, 8 or 16 lanes a token, while the other blocks arrive.
  const int shift = k <= 8 ? 3 : 4, slot = threadIdx.x & ((1 << shift) - 1), per_round = THREADS >> shift;
#pragma unroll 1
  for (int base = 0; base < mine; base += per_round) {
    const int local = base + (threadIdx.x >> shift);
    const bool used = local < mine && slot < k;
    float share = 0.0f;
    if (used) {
      const float2 known = softmax_of[local];
      Scoring score = {sigmoid != 0, known.x, known.y};
      if (!sigmoid && !BIASED && renormalise) score.highest = fmaxf(logit[local * k], LOWEST);
      share = score(logit[local * k + slot]);
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
  STAMP(5);

  if (gridDim.x > 1) {
    exchange.add_up(columns, total, before);
    STAMP(6);
    __syncthreads();
    if (e == 0 && blockIdx.x == 0) exchange.close(columns);
    if (e < experts) here = total[e], earlier = before[e];
  }
  STAMP(7);

  // Exclusive sums over experts: where each expert's rows begin.
  unsigned upto = here;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned below = __shfl_up_sync(FULL_WARP, upto, step);
    if (lane_id() >= step) upto += below;
  }
  if (lane_id() == 31) warp_totals[warp_id()] = upto;
  __syncthreads();
  upto += __reduce_add_sync(FULL_WARP, lane_id() < warp_id() ? warp_totals[lane_id()] : 0);
  if (e < experts) {
    before[e] = upto - here + earlier;
    if (blockIdx.x == 0) {
      counts[e] = here;
      offsets[e + 1] = upto;
      if (e == 0) offsets[0] = 0;
    }
  }
  __syncthreads();
  STAMP(8);

#pragma unroll 1
  for (int base = 0; base < mine; base += per_round) {
    const int local = base + (threadIdx.x >> shift);
    if (local >= mine || slot >= k) continue;
    const int expert = chosen[local * k + slot];
    const unsigned* who = bits + expert * words;
    unsigned rank = __popc(who[local / 32] & ((1u << local % 32) - 1));
#pragma unroll 1
    for (int w = 0; w < local / 32; w++) rank += __popc(who[w]);
    place[static_cast<long long>(first + local) * k + slot] = before[expert] + rank;
  }
  STAMP(9);
}

#ifndef __CUDACC_RTC__  // NVRTC instantiates what it is asked for; nvcc needs to be told
#define INSTANTIATE(T, BIASED, LANES, EACH)                                                                        \
  template __global__ void router<T, BIASED, LANES, EACH>(const T*, const float*, int*, float*, int*, int*, int*,  \
                                                          u64*, int, int, int, int, int, int, float);
INSTANTIATE(float, 0, 8, 8)
INSTANTIATE(float, 0, 8, 32)
INSTANTIATE(float, 1, 8, 32)
INSTANTIATE(bf16, 0, 8, 32)
INSTANTIATE(bf16, 0, 4, 64)
INSTANTIATE(bf16, 1, 16, 32)
#endif
