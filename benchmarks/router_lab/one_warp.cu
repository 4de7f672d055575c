// The router for a single token, which is a matter of latency: one warp, no barrier, little code. Results are those of
// router.cu. The k-th largest of the lanes' maxima is a floor below which no winner can lie; the few scores that reach it
// (about 9 of 256) are ranked by counting.
#include "router.cuh"

__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
__device__ __forceinline__ unsigned low_bits(unsigned n) {  // n of them, up to 32
  unsigned d;
  asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(d) : "r"(n));
  return d;
}

template <typename T, int EACH>
__global__ void __launch_bounds__(32)
    router_one(const T* __restrict__ logits, const float* __restrict__ bias, int* __restrict__ index,
               float* __restrict__ weight, int* __restrict__ place, int* __restrict__ counts, int* __restrict__ offsets,
               int experts, int k, int sigmoid, int renormalise, float scale, int) {
  constexpr int VECTOR = 16 / sizeof(T), BITS = EACH == 1 ? 1 : EACH == 2 ? 2 : EACH == 4 ? 3 : EACH == 8 ? 4 : 5;
  __shared__ __align__(16) float tops[32], slots[32], shares[16];
  __shared__ float slot_logits[32];
  __shared__ int slot_experts[32];
  const int lane = lane_id(), first = lane * EACH;
  const bool whole = experts % EACH == 0, in_row = first < experts;
  float v[EACH], s[EACH];
#pragma unroll
  for (int j = 0; j < EACH; j++) v[j] = -INFINITE;
  if (EACH >= VECTOR && whole) {
    if (in_row) {
#pragma unroll
      for (int c = 0; c < EACH / VECTOR; c++) {
        const uint4 raw = reinterpret_cast<const uint4*>(logits + first)[c];
        const unsigned part[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
          v[c * VECTOR + i] = __uint_as_float(sizeof(T) == 4 ? part[i * 4 / VECTOR]
                                              : i % 2 ? part[i / 2] & 0xffff0000u : part[i / 2] << 16);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if (first + j < experts) v[j] = value_at(logits, first + j);
  }
  slots[lane] = -INFINITE;
  if (lane < 16) shares[lane] = 0.0f;

  float top = v[0];
#pragma unroll
  for (int j = 1; j < EACH; j++) top = larger_or_nan(top, v[j]);
#pragma unroll
  for (int j = 0; j < EACH; j++) s[j] = v[j];
  bool bad = __any_sync(FULL_WARP, top != top);
  Scoring score = {sigmoid != 0, 0.0f, 1.0f};
  if (!sigmoid) score.highest = fmaxf(score_of_bits(__reduce_max_sync(FULL_WARP, monotone(top))), LOWEST);
  if (bias || (!sigmoid && !renormalise)) {
    if (!sigmoid) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < EACH; j++) sum += exponential(v[j] - score.highest);
      sum = warp_sum(sum);
      score.inverse_sum = sum > 0.0f ? inverse(sum) : 0.0f;
    }
    if (bias) {
      top = -INFINITE;
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        if (first + j < experts) s[j] = __fadd_rn(score(v[j]), bias[first + j]);
        top = fmaxf(top, s[j]);
      }
    }
  }

  tops[lane] = top;
  __syncwarp();
  int rank = 0;
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(tops + i);
    rank += (four.x > top) + (four.y > top) + (four.z > top) + (four.w > top);
  }
  const float floor = score_of_bits(__reduce_min_sync(FULL_WARP, rank < k ? monotone(top) : ~0u));
  unsigned mine = 0;
#pragma unroll
  for (int j = 0; j < EACH; j++) mine |= s[j] >= floor ? 1u << j : 0;
  if (!whole || !in_row) mine &= low_bits(max(0, experts - first));

  const unsigned below_me = (1u << lane) - 1;
  int at, candidates;
#pragma unroll 1
  while (true) {
    const int count = __popc(mine);
    at = candidates = 0;
#pragma unroll
    for (int i = 0; i < BITS; i++) {
      const unsigned who = __ballot_sync(FULL_WARP, count >> i & 1);
      at += __popc(who & below_me) << i, candidates += __popc(who) << i;
    }
    if (candidates <= 32 && !bad) break;
    if (bad) {  // experts 0 .. k-1
#pragma unroll
      for (int j = 0; j < EACH; j++) s[j] = 0.0f, v[j] = NOT_A_NUMBER;
      mine = low_bits(min(max(0, k - first), EACH));
      bad = false;
      continue;
    }
    // Equal scores: in each round the largest key that is left. The last of k is the floor.
    u64 last = ~0ull;
#pragma unroll 1
    for (int i = 0; i < k; i++) {
      u64 best = 0;
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        const u64 key = first + j < experts ? Keys<false>::make(s[j], first + j) : 0;
        if (key < last && key > best) best = key;
      }
#pragma unroll 1
      for (int step = 16; step > 0; step >>= 1) {
        const u64 other = __shfl_xor_sync(FULL_WARP, best, step);
        if (other > best) best = other;
      }
      last = best;
    }
    mine = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) mine |= first + j < experts && Keys<false>::make(s[j], first + j) >= last ? 1u << j : 0;
  }

  int to = at;  // slots are in the order of experts
#pragma unroll
  for (int j = 0; j < EACH; j++)
    if (mine >> j & 1) {
      slots[to] = s[j], slot_logits[to] = v[j], slot_experts[to] = first + j;
      to++;
    }
  __syncwarp();
  const float own = slots[lane];
  const float share = score(slot_logits[lane]);
  const int expert = slot_experts[lane];
  rank = 0;
#pragma unroll 1
  for (int i = 0; i < candidates; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(slots + i);
    rank += (four.x > own || (four.x == own && i < lane)) + (four.y > own || (four.y == own && i + 1 < lane)) +
            (four.z > own || (four.z == own && i + 2 < lane)) + (four.w > own || (four.w == own && i + 3 < lane));
  }
  const bool won = lane < candidates && rank < k;
  const unsigned winners = __ballot_sync(FULL_WARP, won);
  if (won) {
    shares[rank] = share;
    index[rank] = expert;
    place[rank] = __popc(winners & below_me);
  }
  __syncwarp();
  if (won) {
    float factor = scale;
    if (renormalise) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(shares + i);
        sum += four.x + four.y + (four.z + four.w);
      }
      factor = sum == 0.0f ? 0.0f : __fdividef(scale, sum);
    }
    weight[rank] = share * factor;
  }

  int count[EACH], offset[EACH], before = __popc(winners & low_bits(at));
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const unsigned candidate = mine >> j & 1;
    count[j] = candidate & winners >> (at & 31), offset[j] = before;
    at += candidate, before += count[j];
  }
  if (EACH >= 4 && whole) {
    if (in_row) {
#pragma unroll
      for (int c = 0; c < EACH / 4; c++) {
        reinterpret_cast<int4*>(counts + first)[c] = make_int4(count[4 * c], count[4 * c + 1], count[4 * c + 2], count[4 * c + 3]);
        reinterpret_cast<int4*>(offsets + first)[c] = make_int4(offset[4 * c], offset[4 * c + 1], offset[4 * c + 2], offset[4 * c + 3]);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if (first + j < experts) counts[first + j] = count[j], offsets[first + j] = offset[j];
  }
  if (lane == 0) offsets[experts] = k;
}
