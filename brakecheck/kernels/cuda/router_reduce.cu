// Sum of router probabilities an expert (the load that a balancing loss needs). A warp holds 32 tokens x 32 experts and
// reduce-scatters them by halving: 31 shuffles leave lane e with the sum of expert e. Blocks gather in shared memory.
// INLINE_PTX=1 writes shuffle and shared atomic as PTX, 0 leaves both to the compiler.
#include "warp.cuh"

#ifndef INLINE_PTX
#define INLINE_PTX 0
#endif

constexpr int THREADS = 256;

__device__ __forceinline__ float exchange(float v, int distance) {
#if INLINE_PTX
  float got;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(got) : "f"(v), "r"(distance));
  return got;
#else
  return __shfl_xor_sync(FULL_WARP, v, distance);
#endif
}

__device__ __forceinline__ void add_shared(float* bin, float v) {
#if INLINE_PTX
  asm volatile("red.shared.add.f32 [%0], %1;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(bin))), "f"(v)
               : "memory");
#else
  atomicAdd(bin, v);
#endif
}

// Lane l ends with the warp's sum of column l in v[0]: each step sends the half that the lane will not own.
// A template, because only a compile-time index keeps v in registers.
template <int HALF>
__device__ __forceinline__ void reduce_scatter(float (&v)[32]) {
  const bool upper = lane_id() & HALF;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    const float keep = upper ? v[i + HALF] : v[i];
    const float give = upper ? v[i] : v[i + HALF];
    v[i] = keep + exchange(give, HALF);
  }
  if constexpr (HALF > 1) reduce_scatter<HALF / 2>(v);
}

// probability: tokens x experts. load: experts, zero on entry. Dynamic shared memory: 4 experts bytes. blockIdx.y: which
// of the groups of 32 experts a block takes, every gridDim.y-th.
extern "C" __global__ void __launch_bounds__(THREADS)
    router_reduce(const float* __restrict__ probability, float* load, int tokens, int experts) {
  extern __shared__ float bins[];
  for (int e = threadIdx.x; e < experts; e += THREADS) bins[e] = 0.0f;
  __syncthreads();

  const int lane = lane_id();
  const int groups = (tokens + 31) / 32;
  for (int group = blockIdx.x * (THREADS / 32) + warp_id(); group < groups; group += gridDim.x * (THREADS / 32)) {
    const int token = group * 32 + lane;
    const float* row = probability + static_cast<long long>(token) * experts;
    for (int first = 32 * blockIdx.y; first < experts; first += 32 * gridDim.y) {
      float v[32];
      if (experts % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const bool inside = token < tokens && first + 4 * i < experts;
          const float4 four = inside ? *reinterpret_cast<const float4*>(row + first + 4 * i) : make_float4(0, 0, 0, 0);
          v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 32; i++) v[i] = token < tokens && first + i < experts ? row[first + i] : 0.0f;
      }
      reduce_scatter<16>(v);
      if (first + lane < experts) add_shared(bins + first + lane, v[0]);
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += THREADS)
    if (e / 32 % gridDim.y == blockIdx.y) atomicAdd(load + e, bins[e]);
}
