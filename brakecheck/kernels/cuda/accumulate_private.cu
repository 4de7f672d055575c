// out[key] += value for few rows (at most 200): every lane has its own copy of all sums in shared memory, at its own
// bank, so that equal keys never meet: no atomic until the block's sums leave.
#include "warp.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// keys: n values in [0, rows). out: rows, zero on entry. Dynamic shared memory: rows x THREADS floats.
extern "C" __global__ void __launch_bounds__(THREADS)
    accumulate_private(const int* __restrict__ keys, const float* __restrict__ values, float* out, int n, int rows) {
  extern __shared__ float bins[];  // warp, row, lane
  float* const mine = bins + warp_id() * rows * 32 + lane_id();
  for (int r = 0; r < rows; r++) mine[r * 32] = 0.0f;
  const int stride = gridDim.x * THREADS, thread = blockIdx.x * THREADS + threadIdx.x;
#pragma unroll 4
  for (int i = thread; i < n / 4; i += stride) {
    const int4 key = reinterpret_cast<const int4*>(keys)[i];
    const float4 value = reinterpret_cast<const float4*>(values)[i];
    mine[key.x * 32] += value.x;
    mine[key.y * 32] += value.y;
    mine[key.z * 32] += value.z;
    mine[key.w * 32] += value.w;
  }
  for (int i = n / 4 * 4 + thread; i < n; i += stride) mine[keys[i] * 32] += values[i];
  __syncthreads();
  for (int r = warp_id(); r < rows; r += WARPS) {
    float sum = 0.0f;
    for (int w = 0; w < WARPS; w++) sum += bins[(w * rows + r) * 32 + lane_id()];
    sum = warp_sum(sum);
    if (lane_id() == 0 && sum != 0.0f) atomicAdd(out + r, sum);
  }
}
