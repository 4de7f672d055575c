// residual + silu(gate) * up: the elementwise chain of a gated MLP, bf16, 16 bytes a load, arithmetic in float.
#include "warp.cuh"

constexpr int THREADS = 256;

__device__ __forceinline__ float chain(float gate, float up, float residual) {
  return residual + gate / (1.0f + __expf(-gate)) * up;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_chain(const bf16* __restrict__ gate, const bf16* __restrict__ up, const bf16* __restrict__ residual,
                      bf16* __restrict__ out, long long n) {
  const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  const long long stride = static_cast<long long>(gridDim.x) * THREADS;
  for (long long at = thread; at < n / 8; at += stride) {
    float g[8], u[8], r[8];
    unpack(reinterpret_cast<const uint4*>(gate)[at], g);
    unpack(reinterpret_cast<const uint4*>(up)[at], u);
    unpack(reinterpret_cast<const uint4*>(residual)[at], r);
#pragma unroll
    for (int i = 0; i < 8; i++) r[i] = chain(g[i], u[i], r[i]);
    reinterpret_cast<uint4*>(out)[at] = pack(r);
  }
  const long long rest = n / 8 * 8 + thread;
  if (rest < n) out[rest] = to_bf16(chain(to_float(gate[rest]), to_float(up[rest]), to_float(residual[rest])));
}
