// Softmax as three kernels, as an unfused graph runs it: the row crosses memory three times instead of once.
#include "warp.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_row_max(const float* __restrict__ x, float* __restrict__ maximum, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  float top = LOWEST;
  for (int at = threadIdx.x; at < columns; at += THREADS) top = fmaxf(top, row[at]);
  top = block_max<THREADS>(top);
  if (threadIdx.x == 0) maximum[blockIdx.x] = top;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_row_sum(const float* __restrict__ x, const float* __restrict__ maximum, float* __restrict__ total,
                    int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  const float top = maximum[blockIdx.x];
  float sum = 0.0f;
  for (int at = threadIdx.x; at < columns; at += THREADS) sum += __expf(row[at] - top);
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) total[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_normalise(const float* __restrict__ x, const float* __restrict__ maximum, const float* __restrict__ total,
                      float* __restrict__ out, int columns) {
  const long long first = static_cast<long long>(blockIdx.x) * columns;
  const float top = maximum[blockIdx.x], scale = 1.0f / total[blockIdx.x];
  for (int at = threadIdx.x; at < columns; at += THREADS) out[first + at] = __expf(x[first + at] - top) * scale;
}
