// Gradient of an embedding table: rows of `grad` are added to the table rows they came from. Frequent tokens meet on
// the same addresses, which is what the atomics are for.
#include "warp.cuh"

constexpr int THREADS = 256;

// grad: tokens x width, token: tokens (row of the table), out: table rows x width, zero on entry. One block a token.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_grad(const float* __restrict__ grad, const int* __restrict__ token, float* out, int width) {
  const float* from = grad + static_cast<long long>(blockIdx.x) * width;
  float* to = out + static_cast<long long>(token[blockIdx.x]) * width;
  for (int at = threadIdx.x; at < width; at += THREADS) atomicAdd(to + at, from[at]);
}
