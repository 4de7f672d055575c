// What many kernels share: lanes, warp and block reductions, bf16 as 16 bits, 16-byte vectors.
// No header of the toolkit: each costs 0.3 to 1 s a compilation, and its own changes would hide the compiler's.
#pragma once

typedef unsigned short bf16;

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr float LOWEST = -3.402823466e+38f;  // stands in for minus infinity where inf - inf would make a NaN

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, step));
  return v;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(FULL_WARP, v, step);
  return v;
}

// Sum over a block of THREADS, in every thread. The first barrier lets a kernel call it twice.
template <int THREADS>
__device__ __forceinline__ float block_sum(float v) {
  __shared__ float part[THREADS / 32];
  v = warp_sum(v);
  __syncthreads();
  if (lane_id() == 0) part[warp_id()] = v;
  __syncthreads();
  return warp_sum(lane_id() < THREADS / 32 ? part[lane_id()] : 0.0f);
}

template <int THREADS>
__device__ __forceinline__ float block_max(float v) {
  __shared__ float part[THREADS / 32];
  v = warp_max(v);
  __syncthreads();
  if (lane_id() == 0) part[warp_id()] = v;
  __syncthreads();
  return warp_max(lane_id() < THREADS / 32 ? part[lane_id()] : LOWEST);
}

__device__ __forceinline__ float to_float(bf16 h) { return __uint_as_float(unsigned(h) << 16); }

__device__ __forceinline__ bf16 to_bf16(float x) {
  bf16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

// Two values in one register, `low` at the lower address.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ void unpack(const uint4& raw, float (&v)[8]) {
  const unsigned pair[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    v[2 * i] = __uint_as_float(pair[i] << 16);
    v[2 * i + 1] = __uint_as_float(pair[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ uint4 pack(const float (&v)[8]) {
  return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}
