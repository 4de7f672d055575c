// out[key] += rows of that key, for rows visited in sorted order: deterministic, every sum in float. A block takes RUN
// positions of the order. A key whose rows all lie inside is added to `out` at once; the pieces of keys that cross a
// border go to scratch, and scatter_pieces adds them up in order.
#ifndef ELEMENT
#define ELEMENT bf16
#endif
#include "scatter.cuh"

#ifndef RUN
#define RUN 64
#endif

constexpr int THREADS = 128;
constexpr int PIECE_THREADS = 512;
constexpr int TOGETHER = 8;
constexpr int EACH = 4 * Element::A_WORD;  // columns a thread

__device__ __forceinline__ void add_row(T* to, const float (&v)[EACH]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(to);
  unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
  float old[EACH];
  unpack<4>(word, old);
#pragma unroll
  for (int i = 0; i < EACH; i++) old[i] += v[i];
  pack<4>(old, word);
  *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
}

// rows: n x width. key: n, rising. order: n, the row at each position. out: table rows x width, added to. pieces:
// 2 x width a run of RUN positions: sums of its first and of its last key, where they cross the run's border. A group of
// `columns` threads takes a run; blockIdx.y covers the rest of the width.
extern "C" __global__ void __launch_bounds__(THREADS)
    scatter_sorted(const T* __restrict__ rows, const int* __restrict__ key, const int* __restrict__ order, T* out,
                   float* __restrict__ pieces, int n, int width, int columns) {
  const int run = blockIdx.x * (THREADS / columns) + threadIdx.x / columns;
  const int vector = blockIdx.y * columns + threadIdx.x % columns;
  const int first = run * RUN, last = min(first + RUN, n);  // n is under 2^31 - RUN, the caller sees to it
  if (first >= n || vector >= width / EACH) return;
  const int left = first > 0 ? key[first - 1] : -1, right = last < n ? key[last] : -1;
  float sum[EACH];
  int current = key[first];
#pragma unroll
  for (int i = 0; i < EACH; i++) sum[i] = 0.0f;
  auto flush = [&]() {
    const bool crosses_left = current == left, crosses_right = current == right;
    if (crosses_left || crosses_right) {
      // A key that crosses both borders fills the run: it goes to the first piece.
      float* to = pieces + (2ll * run + !crosses_left) * width + vector * EACH;
#pragma unroll
      for (int i = 0; i < EACH; i += 4)
        *reinterpret_cast<float4*>(to + i) = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
    } else {
      add_row(out + static_cast<long long>(current) * width + vector * EACH, sum);
    }
  };
  for (int j = first; j < last; j += TOGETHER) {
    unsigned raw[TOGETHER][4];
    int who[TOGETHER];
#pragma unroll
    for (int u = 0; u < TOGETHER; u++) {
      const int at = min(j + u, last - 1);
      who[u] = key[at];
      load_once(rows + static_cast<long long>(order[at]) * width + vector * EACH, raw[u]);
    }
#pragma unroll
    for (int u = 0; u < TOGETHER; u++) {
      if (j + u >= last) break;
      float v[EACH];
      unpack<4>(raw[u], v);
      if (who[u] != current) {
        flush();
        current = who[u];
#pragma unroll
        for (int i = 0; i < EACH; i++) sum[i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < EACH; i++) sum[i] += v[i];
    }
  }
  flush();
}

// Adds the pieces of each key that crosses borders. blockIdx.x is a run: its block works if a key starts in it and goes
// on in the next. blockIdx.y: 32 EACH columns.
extern "C" __global__ void __launch_bounds__(PIECE_THREADS)
    scatter_pieces(const int* __restrict__ key, const float* __restrict__ pieces, T* out, int n, int width) {
  const int run = blockIdx.x, next = (run + 1) * RUN;
  if (next >= n || key[next] != key[next - 1]) return;
  const int mine = key[next];
  const int first = run * RUN;
  if (key[first] == mine && first > 0 && key[first - 1] == mine) return;  // it started earlier
  // The runs that it reaches: a binary search for its last position.
  int low = next, high = n;  // key[low] == mine, key[high] != mine
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (key[middle] == mine) low = middle; else high = middle;
  }
  const int end = low / RUN;
  // Warps take the runs in turn; their sums are added in a fixed order.
  constexpr int WARPS = PIECE_THREADS / 32;
  __shared__ float part[WARPS][EACH][32];
  const int vector = blockIdx.y * 32 + lane_id();
  float sum[EACH] = {};
  if (vector < width / EACH) {
#pragma unroll 8
    for (int r = run + warp_id(); r <= end; r += WARPS) {
      const float* from = pieces + (2ll * r + (r == run)) * width + vector * EACH;
#pragma unroll
      for (int i = 0; i < EACH; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        sum[i] += four.x, sum[i + 1] += four.y, sum[i + 2] += four.z, sum[i + 3] += four.w;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) part[warp_id()][i][lane_id()] = sum[i];
  __syncthreads();
  if (warp_id() == 0 && vector < width / EACH) {
    for (int w = 1; w < WARPS; w++)
#pragma unroll
      for (int i = 0; i < EACH; i++) sum[i] += part[w][i][lane_id()];
    add_row(out + static_cast<long long>(mine) * width + vector * EACH, sum);
  }
}
