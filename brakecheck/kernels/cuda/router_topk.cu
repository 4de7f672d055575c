// Top-k router: a warp a token, experts spread over its lanes. Each round finds the best score left, asks by ballot
// which lanes hold it, and takes the first. When no expert is left the ballot is empty and __ffs(0) - 1 is -1: the
// shuffle then reads lane 31 (the lane number is taken modulo 32), and a token goes to an expert that it must not use.
// GUARD=0 keeps that mistake, GUARD=1 writes `experts` (no expert) and weight 0 instead.
#include "warp.cuh"

#ifndef GUARD
#define GUARD 1
#endif

constexpr int THREADS = 128;
constexpr int EACH = 8;  // experts a lane, so at most 256; and k is at most 32, one choice a lane

// logits: tokens x experts. allowed: tokens x experts, 0 where the expert must not be used (no capacity left).
// index, weight: tokens x k, by falling score; weight is the softmax over the chosen.
extern "C" __global__ void __launch_bounds__(THREADS)
    router_topk(const float* __restrict__ logits, const unsigned char* __restrict__ allowed, int* __restrict__ index,
                float* __restrict__ weight, int tokens, int experts, int k) {
  const int token = blockIdx.x * (THREADS / 32) + warp_id();
  if (token >= tokens) return;
  const int lane = lane_id();
  const long long row = static_cast<long long>(token) * experts;

  float score[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int expert = i * 32 + lane;
    score[i] = expert < experts && allowed[row + expert] ? logits[row + expert] : LOWEST;
  }

  int my_index = experts;
  float my_score = LOWEST;
  for (int round = 0; round < k; round++) {
    float best = LOWEST;
    int best_i = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (score[i] > best) best = score[i], best_i = i;
    const float top = warp_max(best);
    const unsigned holders = __ballot_sync(FULL_WARP, best == top && best > LOWEST);
#if GUARD
    if (holders == 0) break;  // the same in all lanes
#endif
    const int first = __ffs(holders) - 1;
    const int expert = __shfl_sync(FULL_WARP, best_i * 32 + lane, first);
    if (lane == first) {
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (i == best_i) score[i] = LOWEST;
    }
    if (lane == round) my_index = expert, my_score = top;
  }

  const float highest = warp_max(my_score);
  const float exponential = my_score > LOWEST ? __expf(my_score - highest) : 0.0f;
  const float sum = warp_sum(exponential);
  if (lane < k) {
    index[token * k + lane] = my_index;
    weight[token * k + lane] = sum > 0.0f ? exponential / sum : 0.0f;
  }
}
