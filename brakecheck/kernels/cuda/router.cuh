// What the router's kernels share: how scores are made of logits, and how they compare.
#pragma once
#include "warp.cuh"

#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
typedef unsigned long long u64;

// Larger for the larger score. Adding zero makes -0 equal to 0.
__device__ __forceinline__ unsigned monotone(float score) {
  const int bits = __float_as_int(score + 0.0f);
  return static_cast<unsigned>(bits ^ ((bits >> 31) | 0x80000000));
}
__device__ __forceinline__ float score_of_bits(unsigned m) {
  return __uint_as_float(m ^ (m >> 31 ? 0x80000000u : 0xffffffffu));
}

// Keys are larger for the larger score, then for the lower expert; 0 is below all. A score that is a bfloat16 fits 32 bits.
template <bool NARROW>
struct Keys {
  typedef u64 type;
  static __device__ __forceinline__ u64 make(float score, int expert) {
    return static_cast<u64>(monotone(score)) << 32 | ~static_cast<unsigned>(expert);
  }
  static __device__ __forceinline__ int expert(u64 key) { return static_cast<int>(~static_cast<unsigned>(key)); }
  static __device__ __forceinline__ float score(u64 key) { return score_of_bits(static_cast<unsigned>(key >> 32)); }
};
template <>
struct Keys<true> {
  typedef unsigned type;
  static __device__ __forceinline__ unsigned make(float score, int expert) {
    return (monotone(score) & 0xffff0000u) | (0xffffu - expert);
  }
  static __device__ __forceinline__ int expert(unsigned key) { return 0xffff - (key & 0xffff); }
  static __device__ __forceinline__ float score(unsigned key) {
    return score_of_bits((key & 0xffff0000u) | (key >> 31 ? 0 : 0xffffu));
  }
};

__device__ __forceinline__ float value_at(const float* row, int i) { return row[i]; }
__device__ __forceinline__ float value_at(const bf16* row, int i) { return to_float(row[i]); }

// What the kernel needs to turn a logit into a score. Rounding is spelled out, so that it gives the same bits wherever
// it is inlined.
struct Scoring {
  bool sigmoid;
  float highest, inverse_sum;  // of the token's softmax

  __device__ __forceinline__ float operator()(float logit) const {
    if (sigmoid) return __fdividef(1.0f, __fadd_rn(1.0f, __expf(-logit)));
    return __fmul_rn(__expf(__fsub_rn(logit, highest)), inverse_sum);
  }
};
