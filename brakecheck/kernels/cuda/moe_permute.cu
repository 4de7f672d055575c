// Copies each token's row to the places of its experts: the row is read once and written k times, 16 bytes a lane.
#include "warp.cuh"

constexpr int THREADS = 256;

// x: tokens x width. place: tokens x k, the output row of each copy (a permutation of 0 .. tokens k). out: tokens k x
// width. One warp a token.
extern "C" __global__ void __launch_bounds__(THREADS)
    moe_permute(const bf16* __restrict__ x, const int* __restrict__ place, bf16* __restrict__ out, int tokens,
                int width, int k) {
  const int token = blockIdx.x * (THREADS / 32) + warp_id();
  if (token >= tokens) return;
  const bf16* from = x + static_cast<long long>(token) * width;
  if (width % 8 == 0) {
    for (int at = lane_id(); at < width / 8; at += 32) {
      const uint4 v = reinterpret_cast<const uint4*>(from)[at];
      for (int i = 0; i < k; i++)
        reinterpret_cast<uint4*>(out + static_cast<long long>(place[token * k + i]) * width)[at] = v;
    }
  } else {
    for (int at = lane_id(); at < width; at += 32) {
      const bf16 v = from[at];
      for (int i = 0; i < k; i++) out[static_cast<long long>(place[token * k + i]) * width + at] = v;
    }
  }
}
