// Elements of rows that are added up by index: 32-bit words of two bf16, two fp16 or one fp32, unpacked to floats, and
// added to memory a word or 16 bytes at a time. A source chooses by ELEMENT before it includes this.
#pragma once
#include "warp.cuh"

namespace elements {

struct bf16 {
  using type = unsigned short;
  static constexpr int A_WORD = 2;
  static __device__ __forceinline__ void unpack(unsigned word, float* v) {
    v[0] = __uint_as_float(word << 16), v[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ unsigned pack(const float* v) { return pack_bf16(v[0], v[1]); }
  static __device__ __forceinline__ void add(unsigned* to, unsigned word) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.noftz.bf16x2 [%0], %1;" ::"l"(to), "r"(word) : "memory");
#else
    unsigned seen = *to, before;
    do {
      before = seen;
      const float low = __uint_as_float(before << 16) + __uint_as_float(word << 16);
      const float high = __uint_as_float(before & 0xffff0000u) + __uint_as_float(word & 0xffff0000u);
      seen = atomicCAS(to, before, pack_bf16(low, high));
    } while (seen != before);
#endif
  }
#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ void add(unsigned* to, const unsigned (&word)[4]) {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]),
                 "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
  }
  static __device__ __forceinline__ void add_bulk(type* to, unsigned shared, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared), "r"(bytes)
                 : "memory");
  }
#endif
};

struct fp16 {
  using type = unsigned short;
  static constexpr int A_WORD = 2;
  static __device__ __forceinline__ void unpack(unsigned word, float* v) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(v[0]), "=f"(v[1])
        : "r"(word));
  }
  static __device__ __forceinline__ unsigned pack(const float* v) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(v[1]), "f"(v[0]));
    return word;
  }
  static __device__ __forceinline__ void add(unsigned* to, unsigned word) {
    asm volatile("red.relaxed.gpu.global.add.noftz.f16x2 [%0], %1;" ::"l"(to), "r"(word) : "memory");
  }
#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ void add(unsigned* to, const unsigned (&word)[4]) {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]),
                 "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
  }
  static __device__ __forceinline__ void add_bulk(type* to, unsigned shared, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared), "r"(bytes)
                 : "memory");
  }
#endif
};

struct fp32 {
  using type = float;
  static constexpr int A_WORD = 1;
  static __device__ __forceinline__ void unpack(unsigned word, float* v) { v[0] = __uint_as_float(word); }
  static __device__ __forceinline__ unsigned pack(const float* v) { return __float_as_uint(v[0]); }
  static __device__ __forceinline__ void add(unsigned* to, unsigned word) {
    atomicAdd(reinterpret_cast<float*>(to), __uint_as_float(word));
  }
#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ void add(unsigned* to, const unsigned (&word)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
  }
  static __device__ __forceinline__ void add_bulk(type* to, unsigned shared, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(shared),
                 "r"(bytes)
                 : "memory");
  }
#endif
};

}  // namespace elements

using Element = elements::ELEMENT;
using T = Element::type;

template <int N>
__device__ __forceinline__ void unpack(const unsigned (&word)[N], float (&v)[N * Element::A_WORD]) {
#pragma unroll
  for (int i = 0; i < N; i++) Element::unpack(word[i], v + i * Element::A_WORD);
}

template <int N>
__device__ __forceinline__ void pack(const float (&v)[N * Element::A_WORD], unsigned (&word)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) word[i] = Element::pack(v + i * Element::A_WORD);
}

// 1 or 4 words of a row that is read once.
__device__ __forceinline__ void load_once(const T* from, unsigned (&word)[1]) {
  word[0] = __ldcs(reinterpret_cast<const unsigned*>(from));
}
__device__ __forceinline__ void load_once(const T* from, unsigned (&word)[4]) {
  const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(from));
  word[0] = raw.x, word[1] = raw.y, word[2] = raw.z, word[3] = raw.w;
}

__device__ __forceinline__ void add_words(unsigned* to, const unsigned (&word)[1]) { Element::add(to, word[0]); }
// One reduction of 16 bytes where the GPU has it, and CUDA (12.1 on).
__device__ __forceinline__ void add_words(unsigned* to, const unsigned (&word)[4]) {
#if __CUDA_ARCH__ >= 900 && (__CUDACC_VER_MAJOR__ > 12 || __CUDACC_VER_MINOR__ >= 1)
  Element::add(to, word);
#else
#pragma unroll
  for (int i = 0; i < 4; i++) Element::add(to + i, word[i]);
#endif
}

template <int N>
__device__ __forceinline__ void add_to_memory(T* to, const float (&v)[N * Element::A_WORD]) {
  unsigned word[N];
  pack<N>(v, word);
  add_words(reinterpret_cast<unsigned*>(to), word);
}
