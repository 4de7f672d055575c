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

using rows::Sum, rows::Sum2, rows::u64, rows::Vec;
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

__device__ __forceinline__ uint4 often(const T* from, int column, float missing) {
  return from ? load_often(from + column) : filled(missing);
}

}  // namespace

// What the blocks of a cluster send each other of a row, `stride` floats apart: the sum of squares, or (CENTER) of squared
// deviations from the block's own mean, and that mean. The common mean first, so nothing cancels (Chan, Golub, LeVeque).
template <int CENTER, int CLUSTER>
__device__ __forceinline__ void merge(const float* box, int stride, int n, int chunk, float& mean, float& m2) {
  auto count = [&](int k) { return float(max(0, min(chunk, n - k * chunk))); };
  m2 = 0.f;
  if constexpr (CENTER) {
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < CLUSTER; ++k) total = fmaf(count(k), rows::load_shared(box + k * stride + 1), total);
    mean = __fdividef(total, float(n));
  }
#pragma unroll
  for (int k = 0; k < CLUSTER; ++k) {
    m2 += rows::load_shared(box + k * stride);
    if constexpr (CENTER) {
      const float d = rows::load_shared(box + k * stride + 1) - mean;
      m2 = fmaf(count(k) * d, d, m2);
    }
  }
}

// y = (x - mean) rstd gamma + beta (CENTER) or x rstd gamma; with RESIDUAL x becomes x + residual first, stored to `sum`.
// mean and rstd, one float a row, are stored for the backward pass where the pointers are given; gamma and beta may be null.
// A team, or a cluster of blocks, takes ROWS rows, so that gamma and beta are read once for them; the grid covers all rows.
// LOAD kBulk (R is 1): the rows lie in shared memory (ROWS chunk elements) and not in registers. AHEAD: gamma and beta are
// asked for before the reduction.
template <int CENTER, int RESIDUAL, int TPR, int VPT, int R, int LOAD, int CLUSTER, int ROWS, int AHEAD, int BLOCKS>
__global__ void __launch_bounds__(TPR* R, BLOCKS)
    norm_rows(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ gamma,
              const T* __restrict__ beta, T* __restrict__ y, T* __restrict__ sum, float* __restrict__ mean_out,
              float* __restrict__ rstd_out, int rows, int n, float eps) {
  constexpr bool kShared = LOAD == rows::kBulk;
  constexpr int kWarps = TPR * R / 32, kKinds = CENTER ? 2 : 1;
  using Each = rows::Sums<ROWS>;
  static_assert((CLUSTER == 1 && !kShared || R == 1) && !(kShared && RESIDUAL), "");
  __shared__ alignas(16) Each slots[2 * kWarps];
  [[maybe_unused]] __shared__ alignas(16) float box[CLUSTER * kKinds * ROWS];
  [[maybe_unused]] __shared__ alignas(8) u64 arrived, full;
  extern __shared__ __align__(128) unsigned char raw[];
  T* buffer = reinterpret_cast<T*>(raw);
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, chunk = rows::chunk_of<T>(n, CLUSTER), begin = rank * chunk;
  const int mine = CLUSTER > 1 ? max(0, min(chunk, n - begin)) : n, lane = threadIdx.x % TPR;
  const int row0 = (blockIdx.x / CLUSTER * R + threadIdx.x / TPR) * ROWS;
#if ROWS_BULK
  if ((CLUSTER > 1 || kShared) && threadIdx.x == 0) {
    rows::barrier_init(&arrived, 1), rows::barrier_init(&full, 1);
    rows::barriers_ready();
  }
#endif
  rows::follow();
  if (R > 1 && row0 >= rows) return;
  auto start = [&](int m) { return size_t(ROWS == 1 ? row0 : min(row0 + m, rows - 1)) * n + begin; };
  auto valid = [&](int m) { return ROWS == 1 || row0 + m < rows; };
  uint4 held[ROWS][kShared ? 1 : VPT];
#if ROWS_BULK
  if constexpr (kShared) {
    if (threadIdx.x == 0) {
      rows::barrier_expect(&full, ROWS * mine * sizeof(T));
      if (mine > 0)
#pragma unroll
        for (int m = 0; m < ROWS; ++m) rows::bulk_load(buffer + m * chunk, x + start(m), mine * sizeof(T), &full);
    }
    __syncthreads();
  }
  if constexpr (CLUSTER > 1) rows::cluster_arrive_relaxed();
#endif
  if constexpr (!kShared) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
#pragma unroll
      for (int j = 0; j < VPT; ++j) {
        const int column = (j * TPR + lane) * kVec;
        if (column < mine) held[m][j] = rows::load(x + start(m) + column);
      }
  }
  if constexpr (RESIDUAL) {
    uint4 other[ROWS][VPT];
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
#pragma unroll
      for (int j = 0; j < VPT; ++j) {
        const int column = (j * TPR + lane) * kVec;
        if (column < mine) other[m][j] = rows::load(residual + start(m) + column);
      }
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
#pragma unroll
      for (int j = 0; j < VPT; ++j) {
        const int column = (j * TPR + lane) * kVec;
        if (column < mine) {
          float f[kVec], r[kVec];
          Vec<T>::unpack(held[m][j], f), Vec<T>::unpack(other[m][j], r);
#pragma unroll
          for (int i = 0; i < kVec; ++i) f[i] += r[i];
          held[m][j] = Vec<T>::pack(f);  // the norm sees what the next layer will see: the rounded sum
          if (valid(m)) rows::store(sum + start(m) + column, held[m][j]);
        }
      }
  }
  uint4 ahead_gamma[AHEAD ? VPT : 1], ahead_beta[AHEAD && CENTER ? VPT : 1];
  if constexpr (AHEAD) {
#pragma unroll
    for (int j = 0; j < VPT; ++j) {
      const int column = (j * TPR + lane) * kVec;
      if (column < mine) {
        ahead_gamma[j] = often(gamma, begin + column, 1.f);
        if constexpr (CENTER) ahead_beta[j] = often(beta, begin + column, 0.f);
      }
    }
  }
#if ROWS_BULK
  if constexpr (kShared) rows::barrier_wait(&full, 0);
#endif
  auto get = [&](int m, int j, float* f) {
    const uint4* row = reinterpret_cast<const uint4*>(buffer + m * chunk);
    if constexpr (kShared) Vec<T>::unpack(rows::load_shared(row + j * TPR + lane), f);
    else Vec<T>::unpack(rows::opaque(held[m][j]), f);
  };
  // The block's mean first, then deviations from it.
  Each total = Each::none(), m2 = Each::none();
#pragma unroll
  for (int m = 0; m < ROWS; ++m)
#pragma unroll
    for (int j = 0; j < VPT; ++j)
      if ((j * TPR + lane) * kVec < mine) {
        float f[kVec];
        get(m, j, f);
#pragma unroll
        for (int i = 0; i < kVec; ++i) total.v[m] += CENTER ? f[i] : f[i] * f[i];
      }
  total = rows::reduce_row<TPR, R>(total, slots, 0);
  float mean[ROWS], rstd[ROWS];
  if constexpr (CENTER) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      mean[m] = mine > 0 ? __fdividef(total.v[m], float(mine)) : 0.f;
#pragma unroll
      for (int j = 0; j < VPT; ++j)
        if ((j * TPR + lane) * kVec < mine) {
          float f[kVec];
          get(m, j, f);
#pragma unroll
          for (int i = 0; i < kVec; ++i) m2.v[m] = fmaf(f[i] - mean[m], f[i] - mean[m], m2.v[m]);
        }
    }
    m2 = rows::reduce_row<TPR, R>(m2, slots, 1);
  } else {
    m2 = total;
  }
#if ROWS_BULK
  if constexpr (CLUSTER > 1) {
    rows::cluster_wait();  // the others' barriers exist
    if (threadIdx.x == 0) rows::barrier_expect(&arrived, sizeof(box));
    if (threadIdx.x < CLUSTER)
#pragma unroll
      for (int m = 0; m < ROWS; ++m) {
        rows::send(box + (rank * ROWS + m) * kKinds, &arrived, threadIdx.x, m2.v[m]);
        if constexpr (CENTER) rows::send(box + (rank * ROWS + m) * kKinds + 1, &arrived, threadIdx.x, mean[m]);
      }
    rows::barrier_wait(&arrived, 0);
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
      merge<CENTER, CLUSTER>(box + m * kKinds, ROWS * kKinds, n, chunk, mean[m], m2.v[m]);
  }
#endif
  float own_mean = 0.f, own_rstd = 0.f;  // lane m writes those of row m
#pragma unroll
  for (int m = 0; m < ROWS; ++m) {
    rstd[m] = rsqrtf(m2.v[m] / n + eps);
    if (lane == m) own_mean = CENTER ? mean[m] : 0.f, own_rstd = rstd[m];
  }
  if (lane < ROWS && begin == 0 && valid(lane)) {
    if (CENTER && mean_out) mean_out[row0 + lane] = own_mean;
    if (rstd_out) rstd_out[row0 + lane] = own_rstd;
  }
#pragma unroll
  for (int j = 0; j < VPT; ++j) {
    const int column = (j * TPR + lane) * kVec;
    if (column < mine) {
      float w[kVec], c[kVec];
      Vec<T>::unpack(AHEAD ? ahead_gamma[AHEAD ? j : 0] : often(gamma, begin + column, 1.f), w);
      if constexpr (CENTER) Vec<T>::unpack(AHEAD ? ahead_beta[AHEAD ? j : 0] : often(beta, begin + column, 0.f), c);
#pragma unroll
      for (int m = 0; m < ROWS; ++m) {
        float f[kVec];
        get(m, j, f);
#pragma unroll
        for (int i = 0; i < kVec; ++i)
          f[i] = CENTER ? fmaf(normalise(f[i], mean[m], rstd[m]), w[i], c[i]) : f[i] * rstd[m] * w[i];
        if (valid(m)) rows::store(y + start(m) + column, Vec<T>::pack(f));
      }
    }
  }
}

#if ROWS_BULK || !defined(__CUDA_ARCH__)
// The same for rows so long that gamma and beta, read anew for each, are half of the traffic: persistent clusters keep their
// part in registers. Rows come to shared memory (STAGES chunk elements) by bulk copies, and what the blocks send each other
// of one row travels while they reduce the next. Grid: whole clusters, all resident.
template <int CENTER, int TPR, int VPT, int STAGES, int CLUSTER, int BLOCKS>
__global__ void __launch_bounds__(TPR, BLOCKS)
    norm_rows_pipe(const T* __restrict__ x, const T* __restrict__ residual, const T* __restrict__ gamma,
                   const T* __restrict__ beta, T* __restrict__ y, T* __restrict__ sum, float* __restrict__ mean_out,
                   float* __restrict__ rstd_out, int rows, int n, float eps) {
#if ROWS_BULK
  constexpr int kBoxes = 4, kKinds = CENTER ? 2 : 1;
  __shared__ alignas(16) Sum slots[2][TPR / 32];
  __shared__ alignas(16) float box[kBoxes][CLUSTER * kKinds];
  __shared__ alignas(8) u64 arrived[kBoxes], full[STAGES];
  extern __shared__ __align__(128) unsigned char raw[];
  const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, chunk = rows::chunk_of<T>(n, CLUSTER), begin = rank * chunk;
  const int mine = CLUSTER > 1 ? max(0, min(chunk, n - begin)) : n, lane = threadIdx.x;
  const int step = gridDim.x / CLUSTER, first = blockIdx.x / CLUSTER;
  const int count = first < rows ? (rows - first + step - 1) / step : 0;
  auto stage = [&](int i) { return reinterpret_cast<T*>(raw) + i % STAGES * chunk; };
  auto fetch = [&](int i) {
    rows::barrier_expect(&full[i % STAGES], mine * sizeof(T));
    if (mine > 0) rows::bulk_load(stage(i), x + size_t(first + i * step) * n + begin, mine * sizeof(T), &full[i % STAGES]);
  };
  if (lane == 0) {
    for (int s = 0; s < STAGES; ++s) rows::barrier_init(&full[s], 1);
    for (int s = 0; s < kBoxes; ++s) rows::barrier_init(&arrived[s], 1);
    rows::barriers_ready();
  }
  if constexpr (CLUSTER > 1) rows::cluster_arrive_relaxed();
  rows::follow();
  if (lane == 0)
    for (int i = 0; i < min(STAGES, count); ++i) fetch(i);
  uint4 scale[VPT], shift[CENTER ? VPT : 1];
#pragma unroll
  for (int j = 0; j < VPT; ++j) {
    const int column = (j * TPR + lane) * kVec;
    if (column < mine) {
      scale[j] = often(gamma, begin + column, 1.f);
      if constexpr (CENTER) shift[CENTER ? j : 0] = often(beta, begin + column, 0.f);
    }
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) rows::cluster_wait();
  float mean = 0.f, m2 = 0.f;
  // Step i reduces row i and stores row i - 1.
  for (int i = 0; i <= count; ++i) {
    float own_mean = 0.f, own_m2 = 0.f;
    if (i < count) {
      rows::barrier_wait(&full[i % STAGES], i / STAGES & 1);
      uint4 held[VPT];
      float total = 0.f;
#pragma unroll
      for (int j = 0; j < VPT; ++j)
        if ((j * TPR + lane) * kVec < mine) {
          float f[kVec];
          held[j] = rows::load_shared(reinterpret_cast<const uint4*>(stage(i)) + j * TPR + lane);
          Vec<T>::unpack(held[j], f);
#pragma unroll
          for (int k = 0; k < kVec; ++k) total += CENTER ? f[k] : f[k] * f[k];
        }
      total = rows::reduce_row<TPR, 1>(Sum{total}, slots[CENTER ? 0 : i & 1], 0).v[0];
      if constexpr (CENTER) {
        own_mean = mine > 0 ? __fdividef(total, float(mine)) : 0.f;
#pragma unroll
        for (int j = 0; j < VPT; ++j)
          if ((j * TPR + lane) * kVec < mine) {
            float f[kVec];
            Vec<T>::unpack(rows::opaque(held[j]), f);
#pragma unroll
            for (int k = 0; k < kVec; ++k) own_m2 = fmaf(f[k] - own_mean, f[k] - own_mean, own_m2);
          }
        own_m2 = rows::reduce_row<TPR, 1>(Sum{own_m2}, slots[1], 0).v[0];
      } else {
        own_m2 = total;
      }
      if constexpr (CLUSTER > 1) {
        // A block sends row i after it has everybody's row i - 2, and they sent that after they were done with row i - 4.
        float* here = box[i % kBoxes] + rank * kKinds;
        u64* there = &arrived[i % kBoxes];
        if (lane == 0) rows::barrier_expect(there, sizeof(box[0]));
        if (lane < CLUSTER) {
          rows::send(here, there, lane, own_m2);
          if constexpr (CENTER) rows::send(here + 1, there, lane, own_mean);
        }
      }
      // All threads have passed a barrier since row i - 2 was stored: its stage is free.
      if (lane == 0 && i >= 2 && i - 2 + STAGES < count) fetch(i - 2 + STAGES);
    }
    if (i > 0) {
      const int p = i - 1, row = first + p * step;
      if constexpr (CLUSTER > 1) {
        rows::barrier_wait(&arrived[p % kBoxes], p / kBoxes & 1);
        merge<CENTER, CLUSTER>(box[p % kBoxes], kKinds, n, chunk, mean, m2);
      }
      const float rstd = rsqrtf(m2 / n + eps);
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
          Vec<T>::unpack(rows::load_shared(reinterpret_cast<const uint4*>(stage(p)) + j * TPR + lane), f);
          Vec<T>::unpack(rows::opaque(scale[j]), w);
          if constexpr (CENTER) Vec<T>::unpack(rows::opaque(shift[CENTER ? j : 0]), c);
#pragma unroll
          for (int k = 0; k < kVec; ++k)
            f[k] = CENTER ? fmaf(normalise(f[k], mean, rstd), w[k], c[k]) : f[k] * rstd * w[k];
          rows::store(out + column, Vec<T>::pack(f));
        }
      }
    }
    if constexpr (CLUSTER == 1) mean = own_mean, m2 = own_m2;
  }
#endif
}
#endif

// With hat = (x - mean) rstd and g = dy gamma: dx = rstd (g - mean(g) [CENTER] - hat mean(g hat)).
// partial_gamma, partial_beta: [gridDim.x / (CLUSTER GROUP), pitch] float, summed by norm_rows_finish.
// Dynamic shared memory: the larger of (stages of kBulk, then gamma: chunk elements) and, with R GROUP > 1, the sums of every team: R chunk
// floats, 2 R chunk with CENTER.
template <int CENTER, int TPR, int VPT, int R, int LOAD, int STAGES, int CLUSTER, int GROUP, int BLOCKS>
__global__ void __launch_bounds__(TPR* R, BLOCKS)
    norm_rows_backward(const T* __restrict__ x, const T* __restrict__ dy, const T* __restrict__ gamma,
                       const float* __restrict__ mean_in, const float* __restrict__ rstd_in, T* __restrict__ dx,
                       float* __restrict__ partial_gamma, float* __restrict__ partial_beta, int rows, int n, int pitch) {
  using Part = rows::Sums<CENTER ? 2 : 1>;
  using Walk = rows::Walk<T, TPR, VPT, R, LOAD, STAGES, 2, CLUSTER, GROUP, Part>;
  extern __shared__ __align__(128) unsigned char raw[];
  const T* from[2] = {x, dy};
  const int chunk = rows::chunk_of<T>(n, CLUSTER);
  const int offset = CLUSTER > 1 ? int(blockIdx.x % CLUSTER) * chunk : 0;
  const int width = max(0, min(chunk, n - offset));
  // gamma stays in shared memory: what misses L1 costs L2 bandwidth, which is what limits these kernels.
  T* scale = reinterpret_cast<T*>(raw) + (LOAD == rows::kBulk ? size_t(R) * STAGES * 2 * chunk : 0);
  float dgamma[VPT][kVec], dbeta[CENTER ? VPT : 1][kVec];
#pragma unroll
  for (int j = 0; j < VPT; ++j) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      dgamma[j][i] = 0.f;
      if (CENTER) dbeta[CENTER ? j : 0][i] = 0.f;
    }
  }
  const float share = 1.f / float(n);
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
    for (int column = threadIdx.x * kVec; column < width; column += TPR * R * kVec)
      *reinterpret_cast<uint4*>(scale + column) = often(gamma, offset + column, 1.f);
    __syncthreads();
  };
  auto part = [&](int row, int begin, int mine, int lane, uint4(&held)[2][VPT]) {
    rstd = next_rstd, mean = next_mean;
    ask(row + step);
    Part sums = Part::none();
#pragma unroll
    for (int j = 0; j < VPT; ++j)
      if ((j * TPR + lane) * kVec < mine) {
        float a[kVec], d[kVec], w[kVec];
        Vec<T>::unpack(held[0][j], a), Vec<T>::unpack(held[1][j], d);
        Vec<T>::unpack(reinterpret_cast<const uint4*>(scale)[j * TPR + lane], w);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float hat = CENTER ? normalise(a[i], mean, rstd) : a[i] * rstd, g = d[i] * w[i];
          dgamma[j][i] = fmaf(d[i], hat, dgamma[j][i]);
          sums.v[0] = fmaf(g, hat, sums.v[0]);
          if constexpr (CENTER) sums.v[1] += g, dbeta[j][i] += d[i];
        }
      }
    return sums;
  };
  auto finish = [&](int row, int begin, int mine, int lane, uint4(&held)[2][VPT], Part sums) {
    const float along = sums.v[0] * share, shift = CENTER ? sums.v[CENTER] * share : 0.f;
    // rstd (g - shift - hat along) as one line in x, with the accuracy that normalise has: slope x + level + rstd g.
    const float slope = -rstd * rstd * along, level = CENTER ? rstd * fmaf(mean * rstd, along, -shift) : 0.f;
    T* out = dx + size_t(row) * n + begin;
#pragma unroll
    for (int j = 0; j < VPT; ++j) {
      const int column = (j * TPR + lane) * kVec;
      if (column < mine) {
        float a[kVec], d[kVec], w[kVec];
        Vec<T>::unpack(rows::opaque(held[0][j]), a), Vec<T>::unpack(rows::opaque(held[1][j]), d);
        Vec<T>::unpack(reinterpret_cast<const uint4*>(scale)[j * TPR + lane], w);
#pragma unroll
        for (int i = 0; i < kVec; ++i)
          a[i] = fmaf(d[i], w[i] * rstd, sizeof(T) == 2 ? fmaf(a[i], slope, level) : slope * (a[i] - mean) - rstd * shift);
        rows::store(out + column, Vec<T>::pack(a));
      }
    }
  };
  Walk::run(from, rows, n, raw, prepare, part, finish);

  // Both gradients at once: the sums of the block's teams, then those of the blocks of the cluster.
  constexpr int kKinds = CENTER ? 2 : 1;
  const int team = int(threadIdx.x) / TPR, lane = int(threadIdx.x) % TPR, pieces = width / 4;
  float* gather = reinterpret_cast<float*>(raw);
  const size_t to = size_t(blockIdx.x / (CLUSTER * GROUP)) * pitch + offset;
  __syncthreads();
#pragma unroll
  for (int which = 0; which < kKinds; ++which)
#pragma unroll
    for (int j = 0; j < VPT; ++j) {
      const int column = (j * TPR + lane) * kVec;
      if (column < width) {
        const float* s = which ? dbeta[CENTER ? j : 0] : dgamma[j];
        float* into = R * GROUP > 1 ? gather + (which * R + team) * chunk : (which ? partial_beta : partial_gamma) + to;
#pragma unroll
        for (int i = 0; i < kVec; i += 4)
          *reinterpret_cast<float4*>(into + column + i) = make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]);
      }
    }
  if constexpr (R * GROUP > 1) {
    int mine = 0;
#if ROWS_BULK
    int base = 0;
    if constexpr (GROUP > 1) {
      rows::cluster_arrive(), rows::cluster_wait();
      mine = rows::cluster_rank() / CLUSTER, base = rows::cluster_rank() % CLUSTER;
    } else
#endif
      __syncthreads();
    for (int piece = mine * TPR * R + threadIdx.x; piece < kKinds * pieces; piece += TPR * R * GROUP) {
      const int which = piece >= pieces, column = (which ? piece - pieces : piece) * 4;
      float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int g = 0; g < GROUP; ++g)
#pragma unroll
        for (int k = 0; k < R; ++k) {
          const float4* from_team = reinterpret_cast<const float4*>(gather + (which * R + k) * chunk + column);
          float4 v;
#if ROWS_BULK
          if constexpr (GROUP > 1) v = rows::load_remote(from_team, g * CLUSTER + base);
          else
#endif
            v = *from_team;
          s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
        }
      *reinterpret_cast<float4*>((which ? partial_beta : partial_gamma) + to + column) = s;
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
  const float mean = CENTER ? rows::reduce_row<512, 1>(Sum{total}, slots[0], 0).v[0] / n : 0.f;
  float m2 = 0.f;
  for (int c = threadIdx.x; c < n; c += 512) {
    const float d = Vec<T>::load(from + start + c) - mean;
    m2 = fmaf(d, d, m2);
  }
  const float rstd = rsqrtf(rows::reduce_row<512, 1>(Sum{m2}, slots[1], 0).v[0] / n + eps);
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
      sums.v[0] = fmaf(g, hat, sums.v[0]), sums.v[1] += g;
      dgamma[c] = it ? fmaf(d, hat, dgamma[c]) : d * hat;
      if (CENTER) dbeta[c] = it ? dbeta[c] + d : d;
    }
    sums = rows::reduce_row<512, 1>(sums, slots, it & 1);
    const float along = sums.v[0] / n, shift = CENTER ? sums.v[1] / n : 0.f;
    for (int c = threadIdx.x; c < n; c += 512) {
      const float hat = (Vec<T>::load(x + start + c) - mean) * rstd, d = Vec<T>::load(dy + start + c);
      Vec<T>::store(dx + start + c, rstd * ((gamma ? d * Vec<T>::load(gamma + c) : d) - shift - hat * along));
    }
  }
}

#ifndef __CUDACC_RTC__  // what the catalogue runs; at run time NVRTC instantiates what is asked for
template __global__ void norm_rows<CENTERED, 0, 32, 4, 4, 0, 1, 1, 0, 8>(const T*, const T*, const T*, const T*, T*, T*,
                                                                        float*, float*, int, int, float);
template __global__ void norm_rows<CENTERED, 0, 512, 8, 1, 0, 1, 1, 0, 2>(const T*, const T*, const T*, const T*, T*, T*,
                                                                         float*, float*, int, int, float);
#endif
