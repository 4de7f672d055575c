// C = A B^T in bf16 with mma.sync and cp.async: the form that runs on every GPU since sm_80.
#include "tensorcore.cuh"

// a: m x k, b: n x k, c: m x n. Dynamic shared memory: 3 stages of 2 tiles, 98304 bytes.
extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
    bf16_gemm_mma(const bf16* __restrict__ a, const bf16* __restrict__ b, bf16* __restrict__ c, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char stages[];
  const int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
  Accumulators<float> sum;
  sum.clear();
  multiply_rows(sum, shared_address(stages), reinterpret_cast<const char*>(a + static_cast<long long>(row) * k),
                m - row, reinterpret_cast<const char*>(b + static_cast<long long>(column) * k), n - column, 2LL * k);
  sum.each_pair([&](int i, int j, float left, float right) {
    if (row + i < m)
      write_bf16_pair(c, static_cast<long long>(row + i) * n + column + j, n - column - j, left, right, n % 2 == 0);
  });
}
