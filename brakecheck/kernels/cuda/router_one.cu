// The router for a single token, which is a matter of latency: one warp, no barrier. Results are those of router.cu.
//
// The 32 lanes form 8 groups (16 if k > 8), so that at least k scores reach the least of the groups' maxima; those that do
// (about 20 of 256) are ranked by counting.
#include "router.cuh"

constexpr int SLOTS = 64;
typedef Keys<false> K;

// logits: experts. bias: experts, or null; experts are chosen by score + bias, weighted by score alone. index, weight,
// place: k, by falling score. counts: experts. offsets: experts + 1. At most 32 EACH experts, k at most 16 and at most
// `experts`. Grid and block: one warp.
template <typename T, int EACH>
__global__ void __launch_bounds__(32)
    router_one(const T* __restrict__ logits, const float* __restrict__ bias, int* __restrict__ index,
               float* __restrict__ weight, int* __restrict__ place, int* __restrict__ counts, int* __restrict__ offsets,
               int experts, int k, int sigmoid, int renormalise, float scale) {
  __shared__ u64 slots[SLOTS];
  __shared__ float slot_logits[SLOTS], logit[16];
  __shared__ int chosen[16];
  __shared__ unsigned bits[EACH];  // of expert 32 w + lane: whether it was chosen
  const int lane = lane_id();
  const unsigned below_me = (1u << lane) - 1;

  float v[EACH], s[EACH];
#pragma unroll
  for (int j = 0; j < EACH; j++) v[j] = j * 32 + lane < experts ? value_at(logits, j * 32 + lane) : -INFINITE;
  if (lane < EACH) bits[lane] = 0;
  bool bad = false;
  float highest = v[0];
#pragma unroll
  for (int j = 0; j < EACH; j++) bad |= v[j] != v[j], highest = fmaxf(highest, v[j]), s[j] = v[j];
  bad = __any_sync(FULL_WARP, bad);
  Scoring score = {sigmoid != 0, 0.0f, 1.0f};
  if (!sigmoid) score.highest = fmaxf(score_of_bits(__reduce_max_sync(FULL_WARP, monotone(highest))), LOWEST);
  if (!sigmoid && (bias || !renormalise)) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < EACH; j++) sum += __expf(v[j] - score.highest);
    sum = warp_sum(sum);
    score.inverse_sum = sum > 0.0f ? 1.0f / sum : 0.0f;
  }
  if (bias) {
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int expert = j * 32 + lane;
      s[j] = expert < experts ? __fadd_rn(score(v[j]), bias[expert]) : -INFINITE;
    }
  }

  unsigned bit[EACH], best = 0;
#pragma unroll
  for (int j = 0; j < EACH; j++) bit[j] = monotone(s[j]), best = max(best, bit[j]);
  best = max(best, __shfl_xor_sync(FULL_WARP, best, 1));
  if (k <= 8) best = max(best, __shfl_xor_sync(FULL_WARP, best, 2));
  const unsigned least = __reduce_min_sync(FULL_WARP, best);
  int candidates = 0;
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int expert = j * 32 + lane;
    const bool reaches = bit[j] >= least && expert < experts;
    const unsigned who = __ballot_sync(FULL_WARP, reaches);
    const int at = candidates + __popc(who & below_me);
    if (reaches && at < SLOTS) slots[at] = K::make(s[j], expert), slot_logits[at] = v[j];
    candidates += __popc(who);
  }
  __syncwarp();

  auto win = [&](int rank, int expert, float value) {
    chosen[rank] = expert, logit[rank] = value;
    atomicOr(bits + expert / 32, 1u << expert % 32);
  };
  if (bad) {
    if (lane < k) win(lane, lane, NOT_A_NUMBER);
  } else if (candidates <= SLOTS) {
    const u64 first = lane < candidates ? slots[lane] : ~0ull;
    int rank = lane < candidates ? 0 : k;
#pragma unroll 8
    for (int i = 0; i < candidates; i++) rank += slots[i] > first;
    if (rank < k) win(rank, K::expert(first), slot_logits[lane]);
    if (candidates > 32) {
      const u64 second = lane + 32 < candidates ? slots[lane + 32] : ~0ull;
      rank = lane + 32 < candidates ? 0 : k;
      for (int i = 0; i < candidates; i++) rank += slots[i] > second;
      if (rank < k) win(rank, K::expert(second), slot_logits[lane + 32]);
    }
  } else {  // equal scores: in each round the largest key that is left
    u64 last = ~0ull;
#pragma unroll 1
    for (int i = 0; i < k; i++) {
      u64 top = 0;
      float value = 0.0f;
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        const u64 key = j * 32 + lane < experts ? K::make(s[j], j * 32 + lane) : 0;
        if (key < last && key > top) top = key, value = v[j];
      }
      const u64 own = top;
#pragma unroll
      for (int step = 16; step > 0; step >>= 1) {
        const u64 other = __shfl_xor_sync(FULL_WARP, top, step);
        if (other > top) top = other;
      }
      last = top;
      if (own == top) win(i, K::expert(top), value);
    }
  }
  __syncwarp();

  float share = 0.0f;
  if (lane < k) share = score(logit[lane]);
  float factor = scale;
  if (renormalise) {
    float sum = share;
#pragma unroll
    for (int step = 8; step > 0; step >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    factor = sum == 0.0f ? 0.0f : __fdividef(scale, sum);
  }
  if (lane < k) {
    const int expert = chosen[lane];
    int before = 0;
#pragma unroll 8
    for (int i = 0; i < k; i++) before += chosen[i] < expert;
    index[lane] = expert, weight[lane] = share * factor, place[lane] = before;
  }
  int before = 0;
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const unsigned word = bits[j];
    if (j * 32 + lane < experts) {
      counts[j * 32 + lane] = word >> lane & 1;
      offsets[j * 32 + lane] = before + __popc(word & below_me);
    }
    before += __popc(word);
  }
  if (lane == 0) offsets[experts] = k;
}

#ifndef __CUDACC_RTC__
#define INSTANTIATE(T, EACH)                                                                                       \
  template __global__ void router_one<T, EACH>(const T*, const float*, int*, float*, int*, int*, int*, int, int, int, \
                                               int, float);
INSTANTIATE(float, 8)
INSTANTIATE(bf16, 16)
#endif
