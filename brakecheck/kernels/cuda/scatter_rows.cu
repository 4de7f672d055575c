// out[index] += row for rows of bf16, fp16 or fp32, summed in float as far as one group of threads sees. A group takes
// RUN rows, walks over them ordered by index, and adds once to memory for each index it met: a hot row costs one
// reduction in RUN. RUN=1 adds every row on its own. WORDS=4: 16 bytes a thread and reduction; 1: a plain atomic for
// each 32 bits.
#ifndef ELEMENT
#define ELEMENT bf16
#endif
#include "scatter.cuh"

#ifndef RUN
#define RUN 32
#endif
#ifndef WORDS
#define WORDS 4
#endif

constexpr int THREADS = 128;
constexpr int TOGETHER = RUN < 8 ? RUN : 8;  // rows whose loads are in flight together
constexpr int EACH = WORDS * Element::A_WORD;  // columns a thread

// rows: n x width, index: n, out: table rows x width, added to. width is a multiple of EACH. A group is `columns`
// threads (a power of two, 8 to THREADS) over EACH columns a thread; blockIdx.y covers the rest of the width. An index
// outside [0, table) is skipped.
extern "C" __global__ void __launch_bounds__(THREADS)
    scatter_rows(const T* __restrict__ rows, const int* __restrict__ index, T* out, int n, int width, int table,
                 int columns) {
  constexpr int MOST = THREADS / 8;  // groups a block
  __shared__ int key[MOST * RUN];
  __shared__ unsigned char order[MOST * RUN];
  const int groups = THREADS / columns;
  const long long first = static_cast<long long>(blockIdx.x) * groups * RUN;
  for (int i = threadIdx.x; i < groups * RUN; i += THREADS) key[i] = first + i < n ? index[first + i] : 0x7fffffff;
  __syncthreads();
  if constexpr (RUN > 1) {
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
  }

  const int base = threadIdx.x / columns * RUN;
  const int vector = blockIdx.y * columns + threadIdx.x % columns;
  if (vector >= width / EACH) return;
  float sum[EACH] = {};
  int current = -1;
  auto flush = [&]() {
    if (current >= 0 && current < table)
      add_to_memory<WORDS>(out + static_cast<long long>(current) * width + vector * EACH, sum);
  };
  for (int j = 0; j < RUN; j += TOGETHER) {
    unsigned raw[TOGETHER][WORDS];
    int who[TOGETHER];
#pragma unroll
    for (int u = 0; u < TOGETHER; u++) {
      const int at = base + (RUN > 1 ? order[base + j + u] : 0);
      who[u] = key[at];
      if (who[u] != 0x7fffffff) load_once(rows + (first + at) * width + vector * EACH, raw[u]);
    }
#pragma unroll
    for (int u = 0; u < TOGETHER; u++) {
      if (who[u] == 0x7fffffff) continue;
      float v[EACH];
      unpack<WORDS>(raw[u], v);
      if (who[u] != current) {
        flush();
        current = who[u];
#pragma unroll
        for (int i = 0; i < EACH; i++) sum[i] = v[i];
      } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) sum[i] += v[i];
      }
    }
  }
  flush();
}
