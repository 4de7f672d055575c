// Softmax of a row in one kernel: eight warp tiles of 32 lanes keep the row in registers, find maximum and sum in one
// online pass, join by shuffles and then in shared memory, and write. RESTRICT is defined empty for the pair that shows
// what __restrict__ is worth to the compiler.
#include "warp.cuh"

#ifndef RESTRICT
#define RESTRICT __restrict__
#endif

constexpr int THREADS = 256;
constexpr int KEPT = 8;  // float4 a thread that stay in registers: rows up to 8192 are read once

struct Online {
  float maximum = LOWEST, sum = 0.0f;

  __device__ __forceinline__ void join(float other_maximum, float other_sum) {
    const float both = fmaxf(maximum, other_maximum);
    sum = sum * __expf(maximum - both) + other_sum * __expf(other_maximum - both);
    maximum = both;
  }
  __device__ __forceinline__ void add(const float4& v) {
    const float top = fmaxf(fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)), LOWEST);
    join(top, __expf(v.x - top) + __expf(v.y - top) + __expf(v.z - top) + __expf(v.w - top));
  }
  __device__ __forceinline__ void join_tile() {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1)
      join(__shfl_xor_sync(FULL_WARP, maximum, step), __shfl_xor_sync(FULL_WARP, sum, step));
  }
  __device__ __forceinline__ void join_block() {
    __shared__ float tile_maximum[THREADS / 32], tile_sum[THREADS / 32];
    join_tile();
    if (lane_id() == 0) {
      tile_maximum[warp_id()] = maximum;
      tile_sum[warp_id()] = sum;
    }
    __syncthreads();
    const bool used = lane_id() < THREADS / 32;
    maximum = used ? tile_maximum[lane_id()] : LOWEST;
    sum = used ? tile_sum[lane_id()] : 0.0f;
    join_tile();
  }
  __device__ __forceinline__ float4 probability(const float4& v, float scale) const {
    return make_float4(__expf(v.x - maximum) * scale, __expf(v.y - maximum) * scale, __expf(v.z - maximum) * scale,
                       __expf(v.w - maximum) * scale);
  }
};

// x, out: rows x columns. One block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_fused(const float* RESTRICT x, float* RESTRICT out, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  float* to = out + static_cast<long long>(blockIdx.x) * columns;
  Online state;
  if (columns % 4 == 0) {
    const float4* row4 = reinterpret_cast<const float4*>(row);
    float4* to4 = reinterpret_cast<float4*>(to);
    const int quads = columns / 4;
    float4 kept[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
      const int at = threadIdx.x + i * THREADS;
      kept[i] = at < quads ? row4[at] : make_float4(LOWEST, LOWEST, LOWEST, LOWEST);
    }
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (threadIdx.x + i * THREADS < quads) state.add(kept[i]);
    for (int at = threadIdx.x + KEPT * THREADS; at < quads; at += THREADS) state.add(row4[at]);
    state.join_block();
    const float scale = 1.0f / state.sum;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
      const int at = threadIdx.x + i * THREADS;
      if (at < quads) to4[at] = state.probability(kept[i], scale);
    }
    for (int at = threadIdx.x + KEPT * THREADS; at < quads; at += THREADS) to4[at] = state.probability(row4[at], scale);
  } else {
    for (int at = threadIdx.x; at < columns; at += THREADS)
      state.join(fmaxf(row[at], LOWEST), row[at] < LOWEST ? 0.0f : 1.0f);
    state.join_block();
    const float scale = 1.0f / state.sum;
    for (int at = threadIdx.x; at < columns; at += THREADS) to[at] = __expf(row[at] - state.maximum) * scale;
  }
}
