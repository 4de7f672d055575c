// The router for a single token, which is a matter of latency: a thread an expert, so that there is little code to
// fetch. Results are those of router.cu.
//
// Segments of neighbours, at least k of them, tell their highest score; at least k scores reach the least of those, and
// the few that do (about 21 of 256 for k = 8) are ranked by counting.
#include "router.cuh"

constexpr int MOST = 512;      // experts
constexpr int TOGETHER = 8;    // candidates that are compared at a time
constexpr unsigned BAD = ~0u;  // of a NaN: above the bits of every score

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
// `experts`. Grid: one block, of `experts` threads rounded up to warps. shift: segments are of 2^shift experts, at
// most 32, so that there are k to 32 of them.
template <typename T>
__global__ void __launch_bounds__(MOST)
    router_one(const T* __restrict__ logits, const float* __restrict__ bias, int* __restrict__ index,
               float* __restrict__ weight, int* __restrict__ place, int* __restrict__ counts, int* __restrict__ offsets,
               int experts, int k, int sigmoid, int renormalise, float scale, int shift) {
  __shared__ __align__(16) u64 slots[MOST + TOGETHER];
  __shared__ __align__(16) float shares[16];
  __shared__ float part[2][MOST / 32];
  __shared__ unsigned tops[32], words[MOST / 32], candidates;
  const int e = threadIdx.x, lane = lane_id();
  const bool in = e < experts;
  const unsigned below_me = (1u << lane) - 1;
  const float v = in ? value_at(logits, e) : -INFINITE;
  const float b = bias && in ? bias[e] : 0.0f;
  slots[e] = 0;  // below every key
  if (e < TOGETHER) slots[blockDim.x + e] = 0;
  if (e < 16) shares[e] = 0.0f;
  if (e == 0) candidates = 0;

  Scoring score = {sigmoid != 0, 0.0f, 1.0f};
  const bool whole = !sigmoid && (bias || !renormalise);  // the softmax's own denominator is needed
  if (whole) {
    score.highest = fmaxf(max_over_block(v, part[0]), LOWEST);
    const float sum = sum_over_block(exponential(v - score.highest), part[1]);
    score.inverse_sum = sum > 0.0f ? inverse(sum) : 0.0f;
  }
  const float by = bias ? __fadd_rn(score(v), b) : v;
  unsigned bits = !in ? 0 : by == by ? monotone(by) : BAD, top;
  if (shift == 5) {
    top = __reduce_max_sync(FULL_WARP, bits);
  } else {
    top = bits;
#pragma unroll 1
    for (int step = 1; step < 1 << shift; step *= 2) top = max(top, __shfl_xor_sync(FULL_WARP, top, step));
  }
  if ((e & ((1 << shift) - 1)) == 0 && in) tops[e >> shift] = top;
  __syncthreads();

  const unsigned told = tops[lane <= (experts - 1) >> shift ? lane : 0];
  unsigned floor = __reduce_min_sync(FULL_WARP, told);
  const unsigned highest = __reduce_max_sync(FULL_WARP, told);
  const bool bad = highest == BAD;
  if (bad) bits = floor = 0;  // all equal: experts 0 .. k-1
  const bool reaches = in && bits >= floor;
  const u64 key = static_cast<u64>(bits) << 32 | ~static_cast<unsigned>(e);
  if (reaches) slots[atomicAdd(&candidates, 1u)] = key;
  if (!sigmoid && !whole) score.highest = fmaxf(score_of_bits(highest), LOWEST);
  const float share = bad ? NOT_A_NUMBER : score(v);
  __syncthreads();

  int rank = k;
  if (reaches) {
    const int n = candidates;
    int above[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < n; i += TOGETHER)
#pragma unroll
      for (int j = 0; j < TOGETHER; j += 2) {
        const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(slots + i + j);
        above[j / 2] += (two.x > key) + (two.y > key);
      }
    rank = above[0] + above[1] + (above[2] + above[3]);
  }
  const bool won = rank < k;
  const unsigned winners = __ballot_sync(FULL_WARP, won);
  if (lane == 0) words[warp_id()] = winners;
  if (won) {
    shares[rank] = share;
    index[rank] = e;
  }
  __syncthreads();

  const int lower = lane < warp_id() ? __popc(words[lane]) : 0;  // winners in the warps below, one a lane
  const int before = __reduce_add_sync(FULL_WARP, lower) + __popc(winners & below_me);
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

#ifndef __CUDACC_RTC__
#define INSTANTIATE(T)                                                                                             \
  template __global__ void router_one<T>(const T*, const float*, int*, float*, int*, int*, int*, int, int, int, int, \
                                         float, int);
INSTANTIATE(float)
INSTANTIATE(bf16)
#endif
