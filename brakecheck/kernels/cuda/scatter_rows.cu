// out[index] += row for bf16 rows, summed in float as far as one group of threads sees. A group takes RUN rows, walks
// over them ordered by index, and adds once to memory for each index it met: a hot row costs one reduction in RUN.
#include "warp.cuh"

#ifndef RUN
#define RUN 32
#endif

constexpr int THREADS = 128;
constexpr int TOGETHER = 8;  // rows whose loads are in flight together

__device__ __forceinline__ void add_to_memory(bf16* to, const float (&v)[8]) {
  const uint4 packed = pack(v);
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(packed.x),
               "r"(packed.y), "r"(packed.z), "r"(packed.w)
               : "memory");
#else
  const unsigned part[4] = {packed.x, packed.y, packed.z, packed.w};
  for (int i = 0; i < 4; i++) {
    unsigned* word = reinterpret_cast<unsigned*>(to) + i;
    unsigned seen = *word, before;
    do {
      before = seen;
      const float low = __uint_as_float(before << 16) + __uint_as_float(part[i] << 16);
      const float high = __uint_as_float(before & 0xffff0000u) + __uint_as_float(part[i] & 0xffff0000u);
      seen = atomicCAS(word, before, pack_bf16(low, high));
    } while (seen != before);
  }
#endif
}

// rows: n x width, index: n, out: table rows x width, added to. width is a multiple of 8. A group is `columns` threads
// (a power of two, 8 to THREADS) over 8 columns each; blockIdx.y covers the rest of the width. An index outside
// [0, table) is skipped.
extern "C" __global__ void __launch_bounds__(THREADS)
    scatter_rows(const bf16* __restrict__ rows, const int* __restrict__ index, bf16* out, int n, int width, int table,
                 int columns) {
  constexpr int MOST = THREADS / 8;  // groups a block
  __shared__ int key[MOST * RUN];
  __shared__ unsigned char order[MOST * RUN];
  const int groups = THREADS / columns;
  const long long first = static_cast<long long>(blockIdx.x) * groups * RUN;
  for (int i = threadIdx.x; i < groups * RUN; i += THREADS) key[i] = first + i < n ? index[first + i] : 0x7fffffff;
  __syncthreads();
  for (int i = threadIdx.x; i < groups * RUN; i += THREADS) {
    const int base = i / RUN * RUN, mine = key[i];
    int rank = 0;
#pragma unroll 8
    for (int j = 0; j < RUN; j++) {
      const int other = key[base + j];
      rank += other < mine || (other == mine && base + j < i);
    }
    order[base + rank] = i - base;
  }
  __syncthreads();

  const int base = threadIdx.x / columns * RUN;
  const int vector = blockIdx.y * columns + threadIdx.x % columns;
  if (vector >= width / 8) return;
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  int current = -1;
  auto flush = [&]() {
    if (current >= 0 && current < table) add_to_memory(out + static_cast<long long>(current) * width + vector * 8, sum);
  };
  for (int j = 0; j < RUN; j += TOGETHER) {
    uint4 raw[TOGETHER];
    int who[TOGETHER];
#pragma unroll
    for (int u = 0; u < TOGETHER; u++) {
      const int at = base + order[base + j + u];
      who[u] = key[at];
      if (who[u] != 0x7fffffff)
        raw[u] = __ldcs(reinterpret_cast<const uint4*>(rows + (first + at) * width) + vector);
    }
#pragma unroll
    for (int u = 0; u < TOGETHER; u++) {
      if (who[u] == 0x7fffffff) continue;
      float v[8];
      unpack(raw[u], v);
      if (who[u] != current) {
        flush();
        current = who[u];
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = v[i];
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] += v[i];
      }
    }
  }
  flush();
}
