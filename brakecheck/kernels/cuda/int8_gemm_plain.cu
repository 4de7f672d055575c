// C = A B^T in int8 with plain loads: global memory to registers while the last tile is multiplied, then to shared.
#include "tensorcore.cuh"

// The part of one tile that a thread carries: 4 chunks of 16 bytes.
struct Carried {
  uint4 chunk[4];

  __device__ __forceinline__ void load(const char* rows, int row_count, long long row_bytes, long long at) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int which = threadIdx.x + i * GEMM_THREADS;
      chunk[i] = load_chunk(rows, which / 8, row_count, row_bytes, at + which % 8 * 16);
    }
  }
  __device__ __forceinline__ void store(unsigned tile) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int which = threadIdx.x + i * GEMM_THREADS;
      store_shared(tile + chunk_at(which / 8, which % 8), chunk[i]);
    }
  }
};

// a: m x k, b: n x k, c: m x n. Dynamic shared memory: 2 stages of 2 tiles, 65536 bytes.
extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
    int8_gemm_plain(const signed char* __restrict__ a, const signed char* __restrict__ b, int* __restrict__ c, int m,
                    int n, int k) {
  extern __shared__ __align__(1024) unsigned char stages[];
  const unsigned shared = shared_address(stages);
  const int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
  const char* a_rows = reinterpret_cast<const char*>(a) + static_cast<long long>(row) * k;
  const char* b_rows = reinterpret_cast<const char*>(b) + static_cast<long long>(column) * k;

  Accumulators<int> sum;
  sum.clear();
  Carried from_a, from_b;
  from_a.load(a_rows, m - row, k, 0);
  from_b.load(b_rows, n - column, k, 0);
  from_a.store(shared);
  from_b.store(shared + TILE_BYTES);
  __syncthreads();
  const int steps = (k + ROW_BYTES - 1) / ROW_BYTES;
  for (int step = 0; step < steps; step++) {
    const unsigned now = shared + step % 2 * 2 * TILE_BYTES, next = shared + (step + 1) % 2 * 2 * TILE_BYTES;
    const bool more = step + 1 < steps;
    if (more) {
      from_a.load(a_rows, m - row, k, static_cast<long long>(step + 1) * ROW_BYTES);
      from_b.load(b_rows, n - column, k, static_cast<long long>(step + 1) * ROW_BYTES);
    }
    sum.multiply(now, now + TILE_BYTES);
    if (more) {
      from_a.store(next);
      from_b.store(next + TILE_BYTES);
    }
    __syncthreads();
  }
  sum.each_pair([&](int i, int j, int left, int right) {
    if (row + i >= m || column + j >= n) return;
    int* to = c + static_cast<long long>(row + i) * n + column + j;
    if (n % 2 == 0) {
      *reinterpret_cast<int2*>(to) = make_int2(left, right);
    } else {
      to[0] = left;
      if (column + j + 1 < n) to[1] = right;
    }
  });
}
