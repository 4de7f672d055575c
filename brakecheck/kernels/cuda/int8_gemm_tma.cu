// C = A B^T in int8 with bulk tensor copies: one thread asks for the tiles of three steps ahead, the copy engine
// computes addresses, clips at the edges, swizzles, and counts bytes on a barrier. Same arithmetic as int8_gemm_plain.
#include "tma.cuh"

constexpr int STAGES = 3;

// a: map of m x k in boxes of 128 x 128 bytes, 128-byte swizzle; b: the same of n x k; c: m x n. k is a multiple of 16
// (a row's stride in a tensor map is). Dynamic shared memory: 3 stages of 2 tiles, and 1024 to align them.
extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
    int8_gemm_tma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, int* __restrict__ c, int m,
                  int n, int k) {
  extern __shared__ __align__(1024) unsigned char stages[];
  __shared__ __align__(8) unsigned long long arrived[STAGES];
  const unsigned shared = (shared_address(stages) + 1023) / 1024 * 1024;
  const unsigned barrier = shared_address(arrived);
  const int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
  const int steps = (k + ROW_BYTES - 1) / ROW_BYTES;
  const auto start = [&](int step) {
    const int stage = step % STAGES;
    const unsigned to = shared + stage * 2 * TILE_BYTES;
    barrier_expect(barrier + 8 * stage, 2 * TILE_BYTES);
    tma_load(to, &a, step * ROW_BYTES, row, barrier + 8 * stage);
    tma_load(to + TILE_BYTES, &b, step * ROW_BYTES, column, barrier + 8 * stage);
  };
  if (threadIdx.x == 0) {
    tma_prefetch(&a);
    tma_prefetch(&b);
    for (int stage = 0; stage < STAGES; stage++) barrier_init(barrier + 8 * stage, 1);
    barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (int step = 0; step < STAGES && step < steps; step++) start(step);

  Accumulators<int> sum;
  sum.clear();
  for (int step = 0; step < steps; step++) {
    const unsigned now = shared + step % STAGES * 2 * TILE_BYTES;
    barrier_wait(barrier + 8 * (step % STAGES), step / STAGES & 1);
    sum.multiply(now, now + TILE_BYTES);
    __syncthreads();  // all warps are done with the stage before it is filled again
    if (threadIdx.x == 0 && step + STAGES < steps) start(step + STAGES);
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
