// Softmax over the last dimension, forward and backward; one read and one write of every element (rows.cuh).
#include "rows.cuh"

#ifndef ELEMENT
#define ELEMENT bf16
#endif

namespace {
using rows::exp2_fast, rows::MaxSum, rows::Sum, rows::Vec;
using T = rows::ELEMENT;
constexpr int kVec = Vec<T>::size;
}  // namespace

// y[r, :] = softmax(x[r, :]). n is a multiple of 16 bytes; TPR * VPT vectors cover a row (of one block of the cluster).
template <int TPR, int VPT, int R, int LOAD, int STAGES, int CLUSTER, int BLOCKS>
__global__ void __launch_bounds__(TPR* R, BLOCKS) softmax_rows(const T* __restrict__ x, T* __restrict__ y, int rows, int n) {
  using Walk = rows::Walk<T, TPR, VPT, R, LOAD, STAGES, 1, CLUSTER, 1, MaxSum>;
  const T* from[1] = {x};
  // The row stays packed in registers; its exponentials are taken twice, which costs less than the registers to keep them.
  auto part = [&](int row, int begin, int mine, int lane, uint4(&held)[1][VPT]) {
    rows::Peak<T> peak;
#pragma unroll
    for (int j = 0; j < VPT; ++j)
      if ((j * TPR + lane) * kVec < mine) peak.add(held[0][j]);
    const float own = peak.value() * rows::kLog2e;
    const float shift = own == -ROWS_INFINITY ? 0.f : own;
    float s = 0.f;
#pragma unroll
    for (int j = 0; j < VPT; ++j)
      if ((j * TPR + lane) * kVec < mine) {
        float f[kVec];
        Vec<T>::unpack(rows::opaque(held[0][j]), f);
#pragma unroll
        for (int i = 0; i < kVec; ++i) s += exp2_fast(fmaf(f[i], rows::kLog2e, -shift));
      }
    return MaxSum{own, s};
  };
  auto finish = [&](int row, int begin, int mine, int lane, uint4(&held)[1][VPT], MaxSum all) {
    const float scale = 1.f / all.sum;
    T* out = y + size_t(row) * n + begin;
#pragma unroll
    for (int j = 0; j < VPT; ++j) {
      const int column = (j * TPR + lane) * kVec;
      if (column < mine) {
        float f[kVec];
        Vec<T>::unpack(rows::opaque(held[0][j]), f);
#pragma unroll
        for (int i = 0; i < kVec; ++i) f[i] = exp2_fast(fmaf(f[i], rows::kLog2e, -all.maximum)) * scale;
        rows::store(out + column, Vec<T>::pack(f));
      }
    }
  };
  extern __shared__ __align__(128) unsigned char raw[];
  Walk::run(from, rows, n, raw, [] {}, part, finish);
}

// dx = y (dy - sum(y dy)).
template <int TPR, int VPT, int R, int LOAD, int STAGES, int CLUSTER, int BLOCKS>
__global__ void __launch_bounds__(TPR* R, BLOCKS)
    softmax_rows_backward(const T* __restrict__ y, const T* __restrict__ dy, T* __restrict__ dx, int rows, int n) {
  using Walk = rows::Walk<T, TPR, VPT, R, LOAD, STAGES, 2, CLUSTER, 1, Sum>;
  const T* from[2] = {y, dy};
  auto part = [&](int row, int begin, int mine, int lane, uint4(&held)[2][VPT]) {
    float dot = 0.f;
#pragma unroll
    for (int j = 0; j < VPT; ++j)
      if ((j * TPR + lane) * kVec < mine) {
        float a[kVec], b[kVec];
        Vec<T>::unpack(held[0][j], a), Vec<T>::unpack(held[1][j], b);
#pragma unroll
        for (int i = 0; i < kVec; ++i) dot = fmaf(a[i], b[i], dot);
      }
    return Sum{dot};
  };
  auto finish = [&](int row, int begin, int mine, int lane, uint4(&held)[2][VPT], Sum dot) {
    T* out = dx + size_t(row) * n + begin;
#pragma unroll
    for (int j = 0; j < VPT; ++j) {
      const int column = (j * TPR + lane) * kVec;
      if (column < mine) {
        float a[kVec], b[kVec];
        Vec<T>::unpack(held[0][j], a), Vec<T>::unpack(held[1][j], b);
#pragma unroll
        for (int i = 0; i < kVec; ++i) a[i] *= b[i] - dot.v[0];
        rows::store(out + column, Vec<T>::pack(a));
      }
    }
  };
  extern __shared__ __align__(128) unsigned char raw[];
  Walk::run(from, rows, n, raw, [] {}, part, finish);
}

// Any width and alignment: a block a row, element by element, x read twice. Block of 512 threads, grid of `rows`.
__global__ void __launch_bounds__(512) softmax_any(const T* __restrict__ x, T* __restrict__ y, int rows, int n) {
  __shared__ MaxSum slots[16];
  rows::follow();
  const size_t start = size_t(blockIdx.x) * n;
  MaxSum own = MaxSum::none();
  for (int c = threadIdx.x; c < n; c += 512) {
    const float v = Vec<T>::load(x + start + c), top = fmaxf(own.maximum, v * rows::kLog2e);
    const float shift = top == -ROWS_INFINITY ? 0.f : top;
    own = {top, own.sum * exp2_fast(own.maximum - shift) + exp2_fast(fmaf(v, rows::kLog2e, -shift))};
  }
  const MaxSum all = rows::reduce_row<512, 1>(own, slots, 0);
  const float scale = 1.f / all.sum;
  for (int c = threadIdx.x; c < n; c += 512)
    Vec<T>::store(y + start + c, exp2_fast(fmaf(Vec<T>::load(x + start + c), rows::kLog2e, -all.maximum)) * scale);
}

__global__ void __launch_bounds__(512)
    softmax_any_backward(const T* __restrict__ y, const T* __restrict__ dy, T* __restrict__ dx, int rows, int n) {
  __shared__ Sum slots[16];
  rows::follow();
  const size_t start = size_t(blockIdx.x) * n;
  float dot = 0.f;
  for (int c = threadIdx.x; c < n; c += 512) dot = fmaf(Vec<T>::load(y + start + c), Vec<T>::load(dy + start + c), dot);
  dot = rows::reduce_row<512, 1>(Sum{dot}, slots, 0).v[0];
  for (int c = threadIdx.x; c < n; c += 512)
    Vec<T>::store(dx + start + c, Vec<T>::load(y + start + c) * (Vec<T>::load(dy + start + c) - dot));
}

#ifndef __CUDACC_RTC__  // what the catalogue runs; at run time NVRTC instantiates what is asked for
template __global__ void softmax_rows<32, 4, 4, 0, 1, 1, 8>(const T*, T*, int, int);
template __global__ void softmax_rows<256, 8, 1, 0, 1, 1, 4>(const T*, T*, int, int);
#if ROWS_BULK || !defined(__CUDA_ARCH__)
template __global__ void softmax_rows<512, 8, 1, 0, 1, 8, 2>(const T*, T*, int, int);
#endif
#endif
