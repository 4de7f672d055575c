// The experts' products of a mixture: rows are sorted by expert, and each expert multiplies its own rows. A block finds
// its expert by walking the offsets, so that one launch serves any split of the rows.
#include "tensorcore.cuh"

// x: rows x k, w: experts x n x k, out: rows x n. offsets: experts + 1, expert e owns rows [offsets[e], offsets[e +
// 1]). grid.y: at least the sum of the experts' tiles; rows / 128 + experts is enough. Dynamic shared memory: 98304
// bytes.
extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
    grouped_gemm(const bf16* __restrict__ x, const bf16* __restrict__ w, const int* __restrict__ offsets,
                 bf16* __restrict__ out, int experts, int n, int k) {
  extern __shared__ __align__(1024) unsigned char stages[];
  int tile = blockIdx.y, expert = 0, first = 0, last = 0;
  for (; expert < experts; expert++) {
    first = offsets[expert];
    last = offsets[expert + 1];
    const int tiles = (last - first + TILE - 1) / TILE;
    if (tile < tiles) break;
    tile -= tiles;
  }
  if (expert == experts) return;  // the whole block
  const int row = first + tile * TILE, column = blockIdx.x * TILE;
  const bf16* own = w + static_cast<long long>(expert) * n * k;
  Accumulators<float> sum;
  sum.clear();
  multiply_rows(sum, shared_address(stages), reinterpret_cast<const char*>(x + static_cast<long long>(row) * k),
                last - row, reinterpret_cast<const char*>(own + static_cast<long long>(column) * k), n - column,
                2LL * k);
  sum.each_pair([&](int i, int j, float left, float right) {
    if (row + i < last)
      write_bf16_pair(out, static_cast<long long>(row + i) * n + column + j, n - column - j, left, right, n % 2 == 0);
  });
}
