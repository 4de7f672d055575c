#pragma once
#include <ucontext.h>
#include <sched.h>
#include <math.h>
#include <string.h>
#include <stdio.h>
#include <stdlib.h>
#include <vector>
#include <functional>
#define __CUDACC_RTC__
#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n)
struct uint4 { unsigned x, y, z, w; }; struct float2 { float x, y; }; struct float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline float2 make_float2(float a, float b) { return {a, b}; }
struct Dim { unsigned x; };
extern Dim threadIdx, blockIdx, gridDim, blockDim;
inline int min(int a, int b) { return a < b ? a : b; } inline unsigned min(int a, unsigned b) { return (unsigned)a < b ? a : b; } inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; } inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
template <class A, class B> A bits_as(B b) { A a; memcpy(&a, &b, sizeof a); return a; }
inline float __int_as_float(int i) { return bits_as<float>(i); } inline int __float_as_int(float f) { return bits_as<int>(f); }
inline float __uint_as_float(unsigned i) { return bits_as<float>(i); } inline unsigned __float_as_uint(float f) { return bits_as<unsigned>(f); }
inline float __expf(float x) { return expf(x); } inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; } inline float __fmul_rn(float a, float b) { return a * b; } inline float __fsub_rn(float a, float b) { return a - b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); } inline int __ffs(int x) { return __builtin_ffs(x); }
// scheduler
struct Fiber { ucontext_t c; bool done; std::vector<char> stack; };
extern std::vector<Fiber> fibers; extern ucontext_t main_context; extern int current;
void yield_fiber();
struct Barrier { int arrived = 0; unsigned generation = 0; };
void wait_on(Barrier& b, int count);
extern Barrier block_barrier, warp_barrier[32]; extern unsigned long long lanes_buf[32][32];
inline int W() { return threadIdx.x / 32; } inline int L() { return threadIdx.x % 32; }
inline int warp_size_now() { return min(32, (int)blockDim.x - W() * 32); }
inline void __syncthreads() { wait_on(block_barrier, blockDim.x); }
inline void __syncwarp() { wait_on(warp_barrier[W()], 32); }
template <class T> void gather(T v, T* all) {
  int w = W(); unsigned long long x = 0; memcpy(&x, &v, sizeof v); lanes_buf[w][L()] = x; wait_on(warp_barrier[w], 32);
  for (int i = 0; i < 32; i++) memcpy(&all[i], &lanes_buf[w][i], sizeof(T));
  wait_on(warp_barrier[w], 32);
}
template <class T> T __shfl_xor_sync(unsigned, T v, int m) { T a[32]; gather(v, a); return a[L() ^ m]; }
template <class T> T __shfl_sync(unsigned, T v, int src, int width = 32) { T a[32]; gather(v, a); return a[L() / width * width + (src & (width - 1))]; }
template <class T> T __shfl_up_sync(unsigned, T v, int d, int width = 32) { T a[32]; gather(v, a); return L() % width >= d ? a[L() - d] : v; }
template <class T> T __shfl_down_sync(unsigned, T v, int d, int width = 32) { T a[32]; gather(v, a); return L() % width + d < width ? a[L() + d] : v; }
inline unsigned __ballot_sync(unsigned, int p) { int a[32]; gather(p, a); unsigned r = 0; for (int i = 0; i < 32; i++) r |= (a[i] != 0) << i; return r; }
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
inline unsigned __reduce_max_sync(unsigned, unsigned v) { unsigned a[32]; gather(v, a); for (auto x : a) v = max(v, x); return v; }
inline unsigned __reduce_min_sync(unsigned, unsigned v) { unsigned a[32]; gather(v, a); for (auto x : a) v = min(v, x); return v; }
inline unsigned __reduce_add_sync(unsigned, unsigned v) { unsigned a[32], s = 0; gather(v, a); for (auto x : a) s += x; return s; }
template <class T> T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicOr(unsigned* p, unsigned v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
// packed
inline float lo_(unsigned a) { return __uint_as_float(a << 16); } inline float hi_(unsigned a) { return __uint_as_float(a & 0xffff0000u); }
inline unsigned pk_(float l, float h) { return __float_as_uint(l) >> 16 | (__float_as_uint(h) & 0xffff0000u); }
inline unsigned emu_max(unsigned a, unsigned b) { return pk_(fmaxf(lo_(a), lo_(b)), fmaxf(hi_(a), hi_(b))); }
inline unsigned emu_min(unsigned a, unsigned b) { return pk_(fminf(lo_(a), lo_(b)), fminf(hi_(a), hi_(b))); }
inline float maxnan(float a, float b) { return a != a ? __uint_as_float(0x7fff0000u) : b != b ? __uint_as_float(0x7fff0000u) : fmaxf(a, b); }
inline unsigned emu_maxnan(unsigned a, unsigned b) { return pk_(maxnan(lo_(a), lo_(b)), maxnan(hi_(a), hi_(b))); }
inline unsigned emu_ge(unsigned a, unsigned b) { return (lo_(a) >= lo_(b) ? 0xffffu : 0) | (hi_(a) >= hi_(b) ? 0xffff0000u : 0); }
inline unsigned emu_prmt(unsigned a, unsigned b, unsigned s) { unsigned long long v = (unsigned long long)b << 32 | a; unsigned r = 0; for (int i = 0; i < 4; i++) r |= (unsigned)(v >> (8 * (s >> 4 * i & 7)) & 255) << 8 * i; return r; }
inline unsigned emu_bf(float x) { unsigned u = __float_as_uint(x); if (x != x) return 0x7fff; return (u + 0x7fff + (u >> 16 & 1)) >> 16; }
inline unsigned long long emu_look(const unsigned long long* p) { yield_fiber(); return __atomic_load_n(p, __ATOMIC_RELAXED); }
