// out[key] += rows of that key, for rows visited in sorted order: deterministic, every sum in float. A block takes RUN
// positions of the order. A key whose rows all lie inside is added to `out` at once; the pieces of keys that cross a
// border go to scratch, and scatter_pieces adds them up in order.
#include "warp.cuh"

#ifndef RUN
#define RUN 64
#endif

constexpr int THREADS = 128;
constexpr int PIECE_THREADS = 512;
constexpr int TOGETHER = 8;

__device__ __forceinline__ void add_row(bf16* to, const float (&v)[8]) {
  float old[8];
  unpack(*reinterpret_cast<const uint4*>(to), old);
#pragma unroll
  for (int i = 0; i < 8; i++) old[i] += v[i];
  *reinterpret_cast<uint4*>(to) = pack(old);
}

// rows: n x width. key: n, rising. order: n, the row at each position. out: table rows x width, added to. pieces:
// 2 x width a run of RUN positions: sums of its first and of its last key, where they cross the run's border. A group of
// `columns` threads takes a run; blockIdx.y covers the rest of the width.
extern "C" __global__ void __launch_bounds__(THREADS)
    scatter_sorted(const bf16* __restrict__ rows, const int* __restrict__ key, const int* __restrict__ order, bf16* out,
                   float* __restrict__ pieces, int n, int width, int columns) {
  const int run = blockIdx.x * (THREADS / columns) + threadIdx.x / columns;
  const int vector = blockIdx.y * columns + threadIdx.x % columns;
  const int first = run * RUN, last = min(first + RUN, n);  // n is under 2^31 - RUN, the caller sees to it
  if (first >= n || vector >= width / 8) return;
  const int left = first > 0 ? key[first - 1] : -1, right = last < n ? key[last] : -1;
  float sum[8];
  int current = key[first];
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = 0.0f;
  auto flush = [&]() {
    const bool crosses_left = current == left, crosses_right = current == right;
    if (crosses_left || crosses_right) {
      // A key that crosses both borders fills the run: it goes to the first piece.
      float* to = pieces + (2ll * run + !crosses_left) * width + vector * 8;
      reinterpret_cast<float4*>(to)[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      reinterpret_cast<float4*>(to)[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
      add_row(out + static_cast<long long>(current) * width + vector * 8, sum);
    }
  };
  for (int j = first; j < last; j += TOGETHER) {
    uint4 raw[TOGETHER];
    int who[TOGETHER];
#pragma unroll
    for (int u = 0; u < TOGETHER; u++) {
      const int at = min(j + u, last - 1);
      who[u] = key[at];
      raw[u] = __ldcs(reinterpret_cast<const uint4*>(rows + static_cast<long long>(order[at]) * width) + vector);
    }
#pragma unroll
    for (int u = 0; u < TOGETHER; u++) {
      if (j + u >= last) break;
      float v[8];
      unpack(raw[u], v);
      if (who[u] != current) {
        flush();
        current = who[u];
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] += v[i];
    }
  }
  flush();
}

// Adds the pieces of each key that crosses borders. blockIdx.x is a run: its block works if a key starts in it and goes
// on in the next. blockIdx.y: 256 columns.
extern "C" __global__ void __launch_bounds__(PIECE_THREADS)
    scatter_pieces(const int* __restrict__ key, const float* __restrict__ pieces, bf16* out, int n, int width) {
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
  __shared__ float part[WARPS][8][32];
  const int vector = blockIdx.y * 32 + lane_id();
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (vector < width / 8) {
#pragma unroll 8
    for (int r = run + warp_id(); r <= end; r += WARPS) {
      const float* from = pieces + (2ll * r + (r == run)) * width + vector * 8;
      const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
      sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
      sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) part[warp_id()][i][lane_id()] = sum[i];
  __syncthreads();
  if (warp_id() == 0 && vector < width / 8) {
    for (int w = 1; w < WARPS; w++)
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] += part[w][i][lane_id()];
    add_row(out + static_cast<long long>(mine) * width + vector * 8, sum);
  }
}
