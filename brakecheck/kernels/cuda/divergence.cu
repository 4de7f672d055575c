// A loop whose length differs from lane to lane: the warp pays for its longest lane, and lanes that are done sit masked
// out. SELECT=1 keeps all lanes in the loop and selects instead of branching: same work, no divergent branch.
#include "warp.cuh"

#ifndef SELECT
#define SELECT 0
#endif

constexpr int THREADS = 256;

// out[i] = x[i] after turns[i] steps of y <- y / 2 + 1 / (1 + y^2). The step contracts, so rounding does not grow.
extern "C" __global__ void __launch_bounds__(THREADS)
    divergence(const float* __restrict__ x, const int* __restrict__ turns, float* __restrict__ out, int n) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  const bool used = i < n;
  float y = used ? x[i] : 0.0f;
  const int mine = used ? turns[i] : 0;
#if SELECT
  int longest = mine;
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) longest = max(longest, __shfl_xor_sync(FULL_WARP, longest, step));
  for (int turn = 0; turn < longest; turn++) {
    const float next = 0.5f * y + 1.0f / (1.0f + y * y);
    y = turn < mine ? next : y;
  }
#else
  for (int turn = 0; turn < mine; turn++) y = 0.5f * y + 1.0f / (1.0f + y * y);
#endif
  if (used) out[i] = y;
}
