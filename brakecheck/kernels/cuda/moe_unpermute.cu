// Weighted sum of a token's k rows, gathered from the places of its experts, and its gradients. A thread has its k loads
// of 16 bytes in flight together; sums are kept in float.
#include "warp.cuh"

constexpr int THREADS = 256;

// y: tokens k x width. place, weight: tokens x k. out: tokens x width. A thread makes 8 columns; width is a multiple
// of 8. K: k, or 0 for any k.
template <int K>
__global__ void __launch_bounds__(THREADS)
    moe_unpermute(const bf16* __restrict__ y, const int* __restrict__ place, const float* __restrict__ weight,
                  bf16* __restrict__ out, int tokens, int width, int k) {
  const unsigned vectors = width / 8, item = blockIdx.x * THREADS + threadIdx.x;  // the caller keeps items under 2^32
  const unsigned token = item / vectors, column = item % vectors;
  if (token >= tokens) return;
  const int* const from = place + static_cast<long long>(token) * (K ? K : k);
  const float* const scale = weight + static_cast<long long>(token) * (K ? K : k);
  constexpr int TOGETHER = K ? K : 4;
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (int first = 0; first < (K ? K : k); first += TOGETHER) {
    uint4 raw[TOGETHER];
    float w[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      const bool used = K || first + i < k;
      raw[i] = make_uint4(0, 0, 0, 0), w[i] = 0.0f;
      if (used) {
        w[i] = scale[first + i];
        raw[i] = __ldcs(reinterpret_cast<const uint4*>(y + static_cast<long long>(from[first + i]) * width) + column);
      }
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      float v[8];
      unpack(raw[i], v);
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] += w[i] * v[j];
    }
  }
  __stcs(reinterpret_cast<uint4*>(out) + item, pack(sum));
}

// Gradients of moe_unpermute. grad: tokens x width; y, place, weight as above. grad_y: tokens k x width, grad_weight:
// tokens x k. A block a token: the token's row of `grad` is read once for the k rows that it scales.
template <int K>
__global__ void __launch_bounds__(THREADS)
    moe_unpermute_backward(const bf16* __restrict__ grad, const bf16* __restrict__ y, const int* __restrict__ place,
                           const float* __restrict__ weight, bf16* __restrict__ grad_y, float* __restrict__ grad_weight,
                           int tokens, int width, int k) {
  __shared__ float part[THREADS / 32][K];
  const int token = blockIdx.x, vectors = width / 8;
  for (int first = 0; first < k; first += K) {
    float dot[K], scale[K];
    long long row[K];
#pragma unroll
    for (int i = 0; i < K; i++) {
      const bool used = first + i < k;
      dot[i] = 0.0f;
      scale[i] = used ? weight[static_cast<long long>(token) * k + first + i] : 0.0f;
      row[i] = used ? static_cast<long long>(place[static_cast<long long>(token) * k + first + i]) * width : -1;
    }
    for (int column = threadIdx.x; column < vectors; column += THREADS) {
      float g[8];
      unpack(reinterpret_cast<const uint4*>(grad + static_cast<long long>(token) * width)[column], g);
      uint4 raw[K];
#pragma unroll
      for (int i = 0; i < K; i++)
        raw[i] = row[i] >= 0 ? __ldcs(reinterpret_cast<const uint4*>(y + row[i]) + column) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < K; i++) {
        float v[8], scaled[8];
        unpack(raw[i], v);
#pragma unroll
        for (int j = 0; j < 8; j++) dot[i] += g[j] * v[j], scaled[j] = g[j] * scale[i];
        if (row[i] >= 0) __stcs(reinterpret_cast<uint4*>(grad_y + row[i]) + column, pack(scaled));
      }
    }
#pragma unroll
    for (int i = 0; i < K; i++) {
      dot[i] = warp_sum(dot[i]);
      if (lane_id() == 0) part[warp_id()][i] = dot[i];
    }
    __syncthreads();
    if (threadIdx.x < K && first + threadIdx.x < k) {
      float sum = 0.0f;
      for (int w = 0; w < THREADS / 32; w++) sum += part[w][threadIdx.x];
      grad_weight[static_cast<long long>(token) * k + first + threadIdx.x] = sum;
    }
    __syncthreads();
  }
}

template __global__ void moe_unpermute<0>(const bf16*, const int*, const float*, bf16*, int, int, int);
template __global__ void moe_unpermute<1>(const bf16*, const int*, const float*, bf16*, int, int, int);
template __global__ void moe_unpermute<2>(const bf16*, const int*, const float*, bf16*, int, int, int);
template __global__ void moe_unpermute<4>(const bf16*, const int*, const float*, bf16*, int, int, int);
template __global__ void moe_unpermute<6>(const bf16*, const int*, const float*, bf16*, int, int, int);
template __global__ void moe_unpermute<8>(const bf16*, const int*, const float*, bf16*, int, int, int);
