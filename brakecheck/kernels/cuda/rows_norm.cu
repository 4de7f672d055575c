// LayerNorm and RMSNorm over the last dimension, forward (with or without residual add) and backward (rows.cuh).
// Backward reads x and dy once: dx is stored, and each persistent team keeps its share of dgamma and dbeta in registers
// until the end. Those of a block's teams, and of the blocks of a cluster (GROUP), are added through shared memory and
// written as one row of partial sums; norm_rows_finish adds those up. All in a fixed order: the result is deterministic.
#include "rows.cuh"

#ifndef ELEMENT
#define ELEMENT bf16
#endif
#ifndef CENTERED  // 1: the catalogue's instantiations are LayerNorm's, 0: RMSNorm's
#define CENTERED 1
#endif

namespace {

using rows::Moments, rows::Sum, rows::Sum2, rows::Vec;
using T = rows::ELEMENT;
constexpr int kVec = Vec<T>::size;

__device__ __forceinline__ uint4 filled(float value) {
  float f[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) f[i] = value;
  return Vec<T>::pack(f);
}

// Same for every row: it should stay in L1.
__device__ __forceinline__ uint4 load_often(const void* p) {
  uint4 v;
  asm("ld.global.nc.L1::evict_last.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// One rounding less where the element is far coarser than float; exact differences where it is float.
__device__ __forceinline__ float normalise(float x, float mean, float rstd) {
  return sizeof(T) == 2 ? fmaf(x, rstd, -mean * rstd) : (x - mean) * rstd;
}

// gamma or beta, the same for every row: through L1, or (KEEP) from shared memory, where a persistent block puts its part
// once. With large shared memory L1 is small, and what misses it costs L2 bandwidth, which is what limits these kernels.
template <bool KEEP>
struct Shared {
  const T* from;
  T* kept;
  float missing;
  __device__ __forceinline__ void prepare(int begin, int mine) const {
    if constexpr (KEEP)
      for (int column = threadIdx.x * kVec; column < mine; column += blockDim.x * kVec)
        *reinterpret_cast<uint4*>(kept + column) =
            from ? load_often(from + begin + column) : filled(missing);
  }
  __device__ __forceinline__ void get(int begin, int column, float* f) const {
    if constexpr (KEEP) Vec<T>::unpack(*reinterpret_cast<const uint4*>(kept + column), f);
    else Vec<T>::unpack(from ? load_often(from + begin + column) : filled(missing), f);
  }
};

}  // namespace

// y = (x - mean) rstd gamma + beta (CENTER) or x rstd gamma; with RESIDUAL x becomes x + residual first, stored to `sum`.
// mean and rstd, one float a row, are stored for the backward pass where the pointers are given; gamma and beta may be null.
// Dynamic shared memory: the stages of kBulk, then gamma and beta (chunk elements each) unless LOAD is kDirect.
template <int CENTER, int RESIDUAL, int TPR, int VPT, int R, int LOAD, int STAGES, int CLUSTER, int BLOCKS>
__global__ void __launch_bounds__(TPR* R, BLOCKS)
    norm_rows(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ gamma,
              const T* __restrict__ beta, T* __restrict__ y, T* __restrict__ sum, float* __restrict__ mean_out,
              float* __restrict__ rstd_out, int rows, int n, float eps) {
  constexpr int kStreams = RESIDUAL ? 2 : 1;
  using Partial = typename rows::Select<CENTER, Moments, Sum>::type;
  using Walk = rows::Walk<T, TPR, VPT, R, LOAD, STAGES, kStreams, CLUSTER, 1, Partial, true>;
  extern __shared__ __align__(128) unsigned char raw[];
  const int chunk = rows::chunk_of<T>(n, CLUSTER);
  T* kept = reinterpret_cast<T*>(raw) + (LOAD == rows::kBulk ? size_t(R) * STAGES * kStreams * chunk : 0);
  const Shared<LOAD != rows::kDirect> scale{gamma, kept, 1.f}, shift{beta, kept + chunk, 0.f};
  const T* from[kStreams];
  from[0] = x;
  if constexpr (RESIDUAL) from[1] = residual;
  auto prepare = [&] {
    if constexpr (LOAD != rows::kDirect) {
      const int begin = CLUSTER > 1 ? int(blockIdx.x % CLUSTER) * chunk : 0;
      scale.prepare(begin, min(chunk, n - begin));
      if constexpr (CENTER) shift.prepare(begin, min(chunk, n - begin));
      __syncthreads();
    }
  };
  auto part = [&](int row, int begin, int mine, int lane, uint4(&held)[kStreams][VPT]) {
    float total = 0.f;
#pragma unroll
    for (int j = 0; j < VPT; ++j) {
      const int column = (j * TPR + lane) * kVec;
      if (column < mine) {
        float f[kVec];
        Vec<T>::unpack(held[0][j], f);
        if constexpr (RESIDUAL) {
          float r[kVec];
          Vec<T>::unpack(held[1][j], r);
#pragma unroll
          for (int i = 0; i < kVec; ++i) f[i] += r[i];
          held[0][j] = Vec<T>::pack(f);
          rows::store_once(sum + size_t(row) * n + begin + column, held[0][j]);
          Vec<T>::unpack(held[0][j], f);  // the norm sees what the next layer will see: the rounded sum
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) total += CENTER ? f[i] : f[i] * f[i];
      }
    }
    if constexpr (!CENTER) {
      return Sum{total};
    } else {
      // The block's mean first, then deviations from it; blocks of a cluster are merged after that. One buffer is enough:
      // the reduction of m2 stands between this row's reads and the next row's writes.
      __shared__ Sum sums[TPR * R / 32];
      const float mean = mine > 0 ? __fdividef(rows::reduce_row<Sum, TPR, R>(Sum{total}, sums, 0).sum, float(mine)) : 0.f;
      float m2 = 0.f;
#pragma unroll
      for (int j = 0; j < VPT; ++j)
        if ((j * TPR + lane) * kVec < mine) {
          float f[kVec];
          Vec<T>::unpack(rows::opaque(held[0][j]), f);
#pragma unroll
          for (int i = 0; i < kVec; ++i) m2 = fmaf(f[i] - mean, f[i] - mean, m2);
        }
      return Moments{float(mine), mean, m2};
    }
  };
  auto finish = [&](int row, int begin, int mine, int lane, uint4(&held)[kStreams][VPT], Partial all) {
    float mean = 0.f, rstd;
    if constexpr (CENTER) mean = all.mean, rstd = rsqrtf(all.m2 / n + eps);
    else rstd = rsqrtf(all.sum / n + eps);
    if (lane == 0 && begin == 0) {
      if (CENTER && mean_out) mean_out[row] = mean;
      if (rstd_out) rstd_out[row] = rstd;
    }
    T* out = y + size_t(row) * n + begin;
#pragma unroll
    for (int j = 0; j < VPT; ++j) {
      const int column = (j * TPR + lane) * kVec;
      if (column < mine) {
        float f[kVec], w[kVec], c[kVec];
        Vec<T>::unpack(rows::opaque(held[0][j]), f);
        scale.get(begin, column, w);
        if constexpr (CENTER) shift.get(begin, column, c);
#pragma unroll
        for (int i = 0; i < kVec; ++i) f[i] = CENTER ? fmaf(normalise(f[i], mean, rstd), w[i], c[i]) : f[i] * rstd * w[i];
        rows::store_once(out + column, Vec<T>::pack(f));
      }
    }
  };
  Walk::run(from, rows, n, raw, prepare, part, finish);
}

// With hat = (x - mean) rstd and g = dy gamma: dx = rstd (g - mean(g) [CENTER] - hat mean(g hat)).
// partial_gamma, partial_beta: [gridDim.x / (CLUSTER GROUP), pitch] float, summed by norm_rows_finish.
// Dynamic shared memory: the larger of (stages of kBulk, then gamma: chunk elements) and R chunk floats.
template <int CENTER, int TPR, int VPT, int R, int LOAD, int STAGES, int CLUSTER, int GROUP, int BLOCKS>
__global__ void __launch_bounds__(TPR* R, BLOCKS)
    norm_rows_backward(const T* __restrict__ x, const T* __restrict__ dy, const T* __restrict__ gamma,
                       const float* __restrict__ mean_in, const float* __restrict__ rstd_in, T* __restrict__ dx,
                       float* __restrict__ partial_gamma, float* __restrict__ partial_beta, int rows, int n, int pitch) {
  using Walk = rows::Walk<T, TPR, VPT, R, LOAD, STAGES, 2, CLUSTER, GROUP, Sum2, true>;
  extern __shared__ __align__(128) unsigned char raw[];
  const T* from[2] = {x, dy};
  const int chunk = rows::chunk_of<T>(n, CLUSTER);
  const int offset = CLUSTER > 1 ? int(blockIdx.x % CLUSTER) * chunk : 0;
  const int width = max(0, min(chunk, n - offset));
  const Shared<true> scale{gamma, reinterpret_cast<T*>(raw) + (LOAD == rows::kBulk ? size_t(R) * STAGES * 2 * chunk : 0), 1.f};
  float dgamma[VPT][kVec], dbeta[CENTER ? VPT : 1][kVec];
#pragma unroll
  for (int j = 0; j < VPT; ++j) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      dgamma[j][i] = 0.f;
      if (CENTER) dbeta[CENTER ? j : 0][i] = 0.f;
    }
  }
  // A row's mean and rstd are asked for one row ahead: their latency would stand at the head of every row.
  const int step = int(gridDim.x) / CLUSTER * R, first = int(blockIdx.x) / CLUSTER * R + int(threadIdx.x) / TPR;
  float mean = 0.f, rstd = 0.f, next_mean = 0.f, next_rstd = 0.f;
  auto ask = [&](int row) {
    if (row >= rows) return;
    next_rstd = __ldg(rstd_in + row);
    if (CENTER) next_mean = __ldg(mean_in + row);
  };
  auto prepare = [&] {
    ask(first);
    scale.prepare(offset, width);
    __syncthreads();
  };
  auto part = [&](int row, int begin, int mine, int lane, uint4(&held)[2][VPT]) {
    rstd = next_rstd, mean = next_mean;
    ask(row + step);
    Sum2 sums = Sum2::none();
#pragma unroll
    for (int j = 0; j < VPT; ++j)
      if ((j * TPR + lane) * kVec < mine) {
        float a[kVec], d[kVec], w[kVec];
        Vec<T>::unpack(held[0][j], a), Vec<T>::unpack(held[1][j], d);
        scale.get(begin, (j * TPR + lane) * kVec, w);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float dh = d[i] * (CENTER ? normalise(a[i], mean, rstd) : a[i] * rstd);
          dgamma[j][i] += dh;
          sums.a = fmaf(dh, w[i], sums.a);
          if (CENTER) sums.b = fmaf(d[i], w[i], sums.b), dbeta[CENTER ? j : 0][i] += d[i];
        }
      }
    return sums;
  };
  auto finish = [&](int row, int begin, int mine, int lane, uint4(&held)[2][VPT], Sum2 sums) {
    const float along = sums.a / n, shift = CENTER ? sums.b / n : 0.f;
    T* out = dx + size_t(row) * n + begin;
#pragma unroll
    for (int j = 0; j < VPT; ++j) {
      const int column = (j * TPR + lane) * kVec;
      if (column < mine) {
        float a[kVec], d[kVec], w[kVec];
        Vec<T>::unpack(rows::opaque(held[0][j]), a), Vec<T>::unpack(rows::opaque(held[1][j]), d);
        scale.get(begin, column, w);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float hat = CENTER ? normalise(a[i], mean, rstd) : a[i] * rstd;
          a[i] = rstd * fmaf(d[i], w[i], CENTER ? fmaf(-hat, along, -shift) : -hat * along);
        }
        rows::store_once(out + column, Vec<T>::pack(a));
      }
    }
  };
  Walk::run(from, rows, n, raw, prepare, part, finish);

  const int team = int(threadIdx.x) / TPR, lane = int(threadIdx.x) % TPR;
  float* gather = reinterpret_cast<float*>(raw);
#pragma unroll
  for (int which = 0; which < (CENTER ? 2 : 1); ++which) {
    float* to = (which ? partial_beta : partial_gamma) + size_t(blockIdx.x / (CLUSTER * GROUP)) * pitch + offset;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < VPT; ++j) {
      const int column = (j * TPR + lane) * kVec;
      if (column < width) {
        const float* s = which ? dbeta[CENTER ? j : 0] : dgamma[j];
#pragma unroll
        for (int i = 0; i < kVec; i += 4)
          *reinterpret_cast<float4*>((R * GROUP > 1 ? gather + team * chunk : to) + column + i) =
              make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]);
      }
    }
    if constexpr (R * GROUP == 1) continue;
    int mine = 0;
#if ROWS_BULK
    int base = 0;
    if constexpr (GROUP > 1) {
      rows::cluster_arrive(), rows::cluster_wait();
      mine = rows::cluster_rank() / CLUSTER, base = rows::cluster_rank() % CLUSTER;
    } else
#endif
      __syncthreads();
    for (int column = mine * TPR * R + threadIdx.x; column < width; column += TPR * R * GROUP) {
      float s = 0.f;
#pragma unroll
      for (int g = 0; g < GROUP; ++g)
#pragma unroll
        for (int k = 0; k < R; ++k) {
#if ROWS_BULK
          if constexpr (GROUP > 1) s += rows::load_remote(gather + k * chunk + column, g * CLUSTER + base);
          else
#endif
            s += gather[k * chunk + column];
        }
      to[column] = s;
    }
#if ROWS_BULK
    if constexpr (GROUP > 1) rows::cluster_arrive(), rows::cluster_wait();  // the others have read this block's sums
#endif
  }
}

// dgamma[c] = sum over slots of partial_gamma[slot, c] (and dbeta, where given); pitch: floats between
// slots, a multiple of 4. A block adds COLUMNS float4 columns of SLOTS slots at once. Grid (ceil(n / (4 COLUMNS)), 1 or 2).
template <int COLUMNS, int SLOTS>
__global__ void __launch_bounds__(COLUMNS* SLOTS)
    norm_rows_finish(const float* __restrict__ partial_gamma, const float* __restrict__ partial_beta, T* __restrict__ dgamma,
                     T* __restrict__ dbeta, int slots, int n, int pitch) {
  rows::follow();
  const float* from = blockIdx.y == 0 ? partial_gamma : partial_beta;
  T* to = blockIdx.y == 0 ? dgamma : dbeta;
  __shared__ float4 part[SLOTS][COLUMNS];
  const int across = threadIdx.x % COLUMNS, down = threadIdx.x / COLUMNS;
  const int column = (blockIdx.x * COLUMNS + across) * 4;
  float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
  if (column < pitch)
#pragma unroll 8
    for (int k = down; k < slots; k += SLOTS) {
      const float4 v = *reinterpret_cast<const float4*>(from + size_t(k) * pitch + column);
      s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
    }
  part[down][across] = s;
  __syncthreads();
  const int id = threadIdx.x, mine = blockIdx.x * COLUMNS * 4 + id;
  if (id < COLUMNS * 4 && mine < n) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < SLOTS; ++k) sum += reinterpret_cast<const float*>(part[k])[id];
    Vec<T>::store(to + mine, sum);
  }
}

// Any width and alignment: a block of 512 threads a row, element by element. Grid of `rows`.
template <int CENTER, int RESIDUAL>
__global__ void __launch_bounds__(512)
    norm_any(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ gamma,
             const T* __restrict__ beta, T* __restrict__ y, T* sum, float* __restrict__ mean_out,
             float* __restrict__ rstd_out, int rows, int n, float eps) {
  __shared__ Sum slots[2][16];
  rows::follow();
  const size_t start = size_t(blockIdx.x) * n;
  const T* from = RESIDUAL ? sum : x;  // a thread reads back only what it wrote itself
  float total = 0.f;
  for (int c = threadIdx.x; c < n; c += 512) {
    if (RESIDUAL) Vec<T>::store(sum + start + c, Vec<T>::load(x + start + c) + Vec<T>::load(residual + start + c));
    if (CENTER) total += Vec<T>::load(from + start + c);
  }
  const float mean = CENTER ? rows::reduce_row<Sum, 512, 1>(Sum{total}, slots[0], 0).sum / n : 0.f;
  float m2 = 0.f;
  for (int c = threadIdx.x; c < n; c += 512) {
    const float d = Vec<T>::load(from + start + c) - mean;
    m2 = fmaf(d, d, m2);
  }
  const float rstd = rsqrtf(rows::reduce_row<Sum, 512, 1>(Sum{m2}, slots[1], 0).sum / n + eps);
  if (threadIdx.x == 0) {
    if (CENTER && mean_out) mean_out[blockIdx.x] = mean;
    if (rstd_out) rstd_out[blockIdx.x] = rstd;
  }
  for (int c = threadIdx.x; c < n; c += 512) {
    const float hat = (Vec<T>::load(from + start + c) - mean) * rstd;
    Vec<T>::store(y + start + c, fmaf(hat, gamma ? Vec<T>::load(gamma + c) : 1.f, CENTER && beta ? Vec<T>::load(beta + c) : 0.f));
  }
}

// A block walks over rows and adds to its own row of partial sums; a thread owns its columns there.
template <int CENTER>
__global__ void __launch_bounds__(512)
    norm_any_backward(const T* __restrict__ x, const T* __restrict__ dy, const T* __restrict__ gamma,
                      const float* __restrict__ mean_in, const float* __restrict__ rstd_in, T* __restrict__ dx,
                      float* __restrict__ partial_gamma, float* __restrict__ partial_beta, int rows, int n, int pitch) {
  __shared__ Sum2 slots[2 * 16];
  rows::follow();
  float* dgamma = partial_gamma + size_t(blockIdx.x) * pitch;
  float* dbeta = CENTER ? partial_beta + size_t(blockIdx.x) * pitch : nullptr;
  int it = 0;
  for (int row = blockIdx.x; row < rows; row += gridDim.x, ++it) {
    const size_t start = size_t(row) * n;
    const float mean = CENTER ? mean_in[row] : 0.f, rstd = rstd_in[row];
    Sum2 sums = Sum2::none();
    for (int c = threadIdx.x; c < n; c += 512) {
      const float d = Vec<T>::load(dy + start + c), hat = (Vec<T>::load(x + start + c) - mean) * rstd;
      const float g = gamma ? d * Vec<T>::load(gamma + c) : d;
      sums.a = fmaf(g, hat, sums.a), sums.b += g;
      dgamma[c] = it ? fmaf(d, hat, dgamma[c]) : d * hat;
      if (CENTER) dbeta[c] = it ? dbeta[c] + d : d;
    }
    sums = rows::reduce_row<Sum2, 512, 1>(sums, slots, it & 1);
    const float along = sums.a / n, shift = CENTER ? sums.b / n : 0.f;
    for (int c = threadIdx.x; c < n; c += 512) {
      const float hat = (Vec<T>::load(x + start + c) - mean) * rstd, d = Vec<T>::load(dy + start + c);
      Vec<T>::store(dx + start + c, rstd * ((gamma ? d * Vec<T>::load(gamma + c) : d) - shift - hat * along));
    }
  }
}

#ifndef __CUDACC_RTC__  // what the catalogue runs; at run time NVRTC instantiates what is asked for
template __global__ void norm_rows<CENTERED, 0, 32, 4, 4, 1, 1, 1, 6>(const T*, const T*, const T*, const T*, T*, T*, float*,
                                                                     float*, int, int, float);
template __global__ void norm_rows<CENTERED, 0, 512, 8, 1, 0, 1, 1, 2>(const T*, const T*, const T*, const T*, T*, T*, float*,
                                                                      float*, int, int, float);
#endif
