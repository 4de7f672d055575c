// LayerNorm of bf16 rows: the row waits in shared memory, so that mean and variance are two passes (no cancellation)
// over one read.
#include "warp.cuh"

constexpr int THREADS = 256;

// x, out: rows x columns; weight, bias: columns. Dynamic shared memory: 2 columns bytes, rounded up to 16.
extern "C" __global__ void __launch_bounds__(THREADS)
    layernorm(const bf16* __restrict__ x, const bf16* __restrict__ weight, const bf16* __restrict__ bias,
              bf16* __restrict__ out, int columns, float epsilon) {
  extern __shared__ uint4 kept[];
  bf16* row = reinterpret_cast<bf16*>(kept);
  const bf16* from = x + static_cast<long long>(blockIdx.x) * columns;
  bf16* to = out + static_cast<long long>(blockIdx.x) * columns;
  const bool vectors = columns % 8 == 0;
  float sum = 0.0f;
  if (vectors) {
    for (int at = threadIdx.x; at < columns / 8; at += THREADS) {
      const uint4 raw = reinterpret_cast<const uint4*>(from)[at];
      kept[at] = raw;
      float v[8];
      unpack(raw, v);
#pragma unroll
      for (int i = 0; i < 8; i++) sum += v[i];
    }
  } else {
    for (int at = threadIdx.x; at < columns; at += THREADS) {
      row[at] = from[at];
      sum += to_float(row[at]);
    }
  }
  const float mean = block_sum<THREADS>(sum) / columns;

  // From here each thread reads what it wrote itself, so the barriers inside block_sum are all that is needed.
  float squares = 0.0f;
  if (vectors) {
    for (int at = threadIdx.x; at < columns / 8; at += THREADS) {
      float v[8];
      unpack(kept[at], v);
#pragma unroll
      for (int i = 0; i < 8; i++) squares += (v[i] - mean) * (v[i] - mean);
    }
  } else {
    for (int at = threadIdx.x; at < columns; at += THREADS)
      squares += (to_float(row[at]) - mean) * (to_float(row[at]) - mean);
  }
  const float scale = rsqrtf(block_sum<THREADS>(squares) / columns + epsilon);

  if (vectors) {
    for (int at = threadIdx.x; at < columns / 8; at += THREADS) {
      float v[8], w[8], b[8];
      unpack(kept[at], v);
      unpack(reinterpret_cast<const uint4*>(weight)[at], w);
      unpack(reinterpret_cast<const uint4*>(bias)[at], b);
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = (v[i] - mean) * scale * w[i] + b[i];
      reinterpret_cast<uint4*>(to)[at] = pack(v);
    }
  } else {
    for (int at = threadIdx.x; at < columns; at += THREADS)
      to[at] = to_bf16((to_float(row[at]) - mean) * scale * to_float(weight[at]) + to_float(bias[at]));
  }
}
