// out[key] += value for many equal keys, as gradients of shared parameters are summed. AGGREGATE=1: the lanes of a
// warp that hold the same key find each other by __match_any_sync, add up by shuffles, and one of them adds to memory.
#include "warp.cuh"

#ifndef AGGREGATE
#define AGGREGATE 1
#endif

constexpr int THREADS = 256;

// Sum of `v` over the lanes in `peers` (lanes of equal key), right in the lowest of them. In each round, peers of odd
// rank hand their sum to the peer before them and drop out, so that 32 equal keys take 5 rounds.
__device__ __forceinline__ float sum_of_peers(float v, unsigned peers) {
  const unsigned above = lane_id() == 31 ? 0u : FULL_WARP << (lane_id() + 1);
  unsigned rank = __popc(peers & ~above) - 1;
  unsigned later = peers & above;
  while (__any_sync(FULL_WARP, later != 0)) {
    const int next = later ? __ffs(later) - 1 : lane_id();
    const float theirs = __shfl_sync(FULL_WARP, v, next);
    if (later) v += theirs;
    later &= ~__ballot_sync(FULL_WARP, rank & 1);
    rank >>= 1;
  }
  return v;
}

// keys: n values in [0, rows). out: rows, zero on entry.
extern "C" __global__ void __launch_bounds__(THREADS)
    accumulate(const int* __restrict__ keys, const float* __restrict__ values, float* out, int n) {
  const int stride = gridDim.x * THREADS;
  const int padded = (n + 31) / 32 * 32;  // all lanes of a warp stay in the loop together
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < padded; i += stride) {
    const bool used = i < n;
    const int key = used ? keys[i] : -1;
    const float value = used ? values[i] : 0.0f;
#if AGGREGATE
    const unsigned peers = __match_any_sync(FULL_WARP, key);
    const float sum = sum_of_peers(value, peers);
    if (used && lane_id() == __ffs(peers) - 1) atomicAdd(out + key, sum);
#else
    if (used) atomicAdd(out + key, value);
#endif
  }
}
