// RMSNorm of bf16 rows: rows up to 8192 stay in registers between the sum and the scaling, longer ones are read again.
#include "warp.cuh"

constexpr int THREADS = 256;
constexpr int KEPT = 4;

__device__ __forceinline__ float sum_of_squares(const uint4& raw) {
  float v[8], sum = 0.0f;
  unpack(raw, v);
#pragma unroll
  for (int i = 0; i < 8; i++) sum += v[i] * v[i];
  return sum;
}

__device__ __forceinline__ uint4 scaled(const uint4& raw, const uint4& weight, float scale) {
  float v[8], w[8];
  unpack(raw, v);
  unpack(weight, w);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] *= scale * w[i];
  return pack(v);
}

// x, out: rows x columns; weight: columns.
// Four blocks an SM are asked for because ptxas otherwise aims at five, and spills (seen with 12.0 and 13.0).
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    rmsnorm(const bf16* __restrict__ x, const bf16* __restrict__ weight, bf16* __restrict__ out, int columns,
            float epsilon) {
  const bf16* from = x + static_cast<long long>(blockIdx.x) * columns;
  bf16* to = out + static_cast<long long>(blockIdx.x) * columns;
  float squares = 0.0f;
  if (columns % 8 == 0) {
    const uint4* from8 = reinterpret_cast<const uint4*>(from);
    const uint4* weight8 = reinterpret_cast<const uint4*>(weight);
    uint4* to8 = reinterpret_cast<uint4*>(to);
    const int vectors = columns / 8;
    uint4 kept[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
      const int at = threadIdx.x + i * THREADS;
      kept[i] = at < vectors ? from8[at] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < KEPT; i++) squares += sum_of_squares(kept[i]);
    for (int at = threadIdx.x + KEPT * THREADS; at < vectors; at += THREADS) squares += sum_of_squares(from8[at]);
    const float scale = rsqrtf(block_sum<THREADS>(squares) / columns + epsilon);
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
      const int at = threadIdx.x + i * THREADS;
      if (at < vectors) to8[at] = scaled(kept[i], weight8[at], scale);
    }
    for (int at = threadIdx.x + KEPT * THREADS; at < vectors; at += THREADS)
      to8[at] = scaled(from8[at], weight8[at], scale);
  } else {
    for (int at = threadIdx.x; at < columns; at += THREADS) squares += to_float(from[at]) * to_float(from[at]);
    const float scale = rsqrtf(block_sum<THREADS>(squares) / columns + epsilon);
    for (int at = threadIdx.x; at < columns; at += THREADS)
      to[at] = to_bf16(to_float(from[at]) * scale * to_float(weight[at]));
  }
}
