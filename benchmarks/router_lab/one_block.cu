// The router for a single token, which is a matter of latency: a thread an expert. Results are those of router.cu.
//
// Segments of neighbours, at least k of them, tell their highest score; at least k scores reach the least of those, and
// the few that do are ranked by counting.
#include "router.cuh"

constexpr int MOST = 512;     // experts
constexpr int TOGETHER = 8;   // candidates that are compared at a time
constexpr unsigned BAD = ~0u; // of a NaN: above every score

__device__ __forceinline__ float max_over_block(float v, float* part) {
  v = warp_max(v);
  if (lane_id() == 0) part[warp_id()] = v;
  __syncthreads();
  return warp_max(lane_id() < blockDim.x / 32 ? part[lane_id()] : LOWEST);
}
__device__ __forceinline__ float sum_over_block(float v, float* part) {
  v = warp_sum(v);
  if (lane_id() == 0) part[warp_id()] = v;
  __syncthreads();
  return warp_sum(lane_id() < blockDim.x / 32 ? part[lane_id()] : 0.0f);
}

// logits: experts. bias: experts, or null; experts are chosen by score + bias, weighted by score alone. index, weight,
// place: k, by falling score. counts: experts. offsets: experts + 1. At most 512 experts, k at most 16 and at most
// `experts`. Grid: one block of `experts` threads, rounded up to warps. segment: threads, a power of two up to 32, so
// that there are at least k segments and at most 32.
template <typename T>
__global__ void __launch_bounds__(MOST)
    router_one(const T* __restrict__ logits, const float* __restrict__ bias, int* __restrict__ index,
               float* __restrict__ weight, int* __restrict__ place, int* __restrict__ counts, int* __restrict__ offsets,
               int experts, int k, int sigmoid, int renormalise, float scale, int segment) {
  __shared__ __align__(16) u64 slots[MOST + TOGETHER];
  __shared__ __align__(16) float shares[16];
  __shared__ float part[2][16];
  __shared__ unsigned tops[32];
  __shared__ unsigned words[16], candidates;
  const int e = threadIdx.x, lane = lane_id();
  const bool in = e < experts;
  const unsigned below_me = (1u << lane) - 1;
  const float v = in ? value_at(logits, e) : -INFINITE;
  const float b = bias && in ? bias[e] : 0.0f;
  slots[e] = 0;
  if (e < TOGETHER) slots[blockDim.x + e] = 0;
  if (e < 16) shares[e] = 0.0f, words[e] = 0;
  if (e == 0) candidates = 0;

  Scoring score = {sigmoid != 0, 0.0f, 1.0f};
  const bool all = !sigmoid && (bias || !renormalise);  // the softmax's own denominator is needed
  if (all) {
    score.highest = fmaxf(max_over_block(v, part[0]), LOWEST);
    const float sum = sum_over_block(exponential(v - score.highest), part[1]);
    score.inverse_sum = sum > 0.0f ? inverse(sum) : 0.0f;
  }
  const float by = bias ? __fadd_rn(score(v), b) : v;
  unsigned bits = in ? by == by ? monotone(by) : BAD : 0;
  const unsigned mask = segment == 32 ? FULL_WARP : ((1u << segment) - 1) << (lane & -segment);
  const unsigned top = __reduce_max_sync(mask, bits);
  if ((e & (segment - 1)) == 0 && in) tops[e / segment] = top;
  __syncthreads();

  const int segments = (experts + segment - 1) / segment;
  const unsigned told = lane < segments ? tops[lane] : tops[0];
  unsigned floor = __reduce_min_sync(FULL_WARP, told);
  const unsigned highest = __reduce_max_sync(FULL_WARP, told);
  const bool bad = highest == BAD;
  if (bad) bits = floor = 0;
  if (!sigmoid && !all) score.highest = fmaxf(score_of_bits(highest), LOWEST);
  const float share = bad ? NOT_A_NUMBER : score(v);
  const bool reaches = in && bits >= floor;
  const unsigned who = __ballot_sync(FULL_WARP, reaches);
  int at = 0;
  if (lane == 0 && who) at = atomicAdd(&candidates, static_cast<unsigned>(__popc(who)));
  at = __shfl_sync(FULL_WARP, at, 0) + __popc(who & below_me);
  const u64 key = static_cast<u64>(bits) << 32 | ~static_cast<unsigned>(e);
  if (reaches) slots[at] = key;
  __syncthreads();

  bool won = false;
  int rank = 0;
  if (reaches) {
    const int n = candidates;
#pragma unroll 1
    for (int i = 0; i < n; i += TOGETHER)
#pragma unroll
      for (int j = 0; j < TOGETHER; j += 2) {
        const ulonglong2 other = *reinterpret_cast<const ulonglong2*>(slots + i + j);
        rank += other.x > key;
        rank += other.y > key;
      }
    won = rank < k;
    if (won) {
      shares[rank] = share;
      index[rank] = e;
    }
  }
  const unsigned winners = __ballot_sync(FULL_WARP, won);
  if (lane == 0) words[warp_id()] = winners;
  __syncthreads();

  const int before = __reduce_add_sync(FULL_WARP, lane < warp_id() ? __popc(words[lane & 15]) : 0) + __popc(winners & below_me);
  if (in) {
    counts[e] = won;
    offsets[e] = before;
  }
  if (e == 0) offsets[experts] = k;
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
    place[rank] = before;
    weight[rank] = share * factor;
  }
}
