// C = A B^T in bf16 with warpgroup products (wgmma) on tiles that TMA brings: Hopper's form, sm_90a only.
// Two warpgroups of 128 threads own 64 rows of C each; thread 0 also asks for the tiles.
#include "tma.cuh"

constexpr int STAGES = 4;

// Describes a tile of 128-byte rows in 128-byte swizzle to wgmma: address and the 1024 bytes from one group of eight
// rows to the next, both in units of 16 bytes; 1 in the top bits says 128-byte swizzle. The leading offset (1) is not
// used.
__device__ __forceinline__ unsigned long long describe(unsigned shared) {
  return (shared & 0x3ffffull) >> 4 | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// c += a b^T for 64 x 128 outputs and 16 elements of K.
__device__ __forceinline__ void wgmma(float (&c)[64], unsigned long long a, unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, 1, 1, 1, 0, 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
        "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
        "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
        "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]),
        "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]),
        "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
        "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),
        "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
      : "l"(a), "l"(b));
}

// a: map of m x k in boxes of 128 x 64 elements, 128-byte swizzle; b: the same of n x k; c: m x n. k is a multiple
// of 8. Dynamic shared memory: 4 stages of 2 tiles, and 1024 to align them.
extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
    bf16_gemm_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, bf16* __restrict__ c,
                    int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char stages[];
  __shared__ __align__(8) unsigned long long arrived[STAGES], released[STAGES];
  const unsigned shared = (shared_address(stages) + 1023) / 1024 * 1024;
  const unsigned full = shared_address(arrived), empty = shared_address(released);
  const int row = blockIdx.y * TILE, column = blockIdx.x * TILE, group = threadIdx.x / 128;
  const int steps = (2 * k + ROW_BYTES - 1) / ROW_BYTES;
  const auto start = [&](int step) {
    const int stage = step % STAGES;
    const unsigned to = shared + stage * 2 * TILE_BYTES;
    barrier_expect(full + 8 * stage, 2 * TILE_BYTES);
    tma_load(to, &a, step * (ROW_BYTES / 2), row, full + 8 * stage);
    tma_load(to + TILE_BYTES, &b, step * (ROW_BYTES / 2), column, full + 8 * stage);
  };
  if (threadIdx.x == 0) {
    tma_prefetch(&a);
    tma_prefetch(&b);
    for (int stage = 0; stage < STAGES; stage++) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, 2);  // one arrival a warpgroup
    }
    barrier_init_done();
  }
  __syncthreads();
  // One step less than there are stages: the stage of the last step is refilled only after its product is over.
  if (threadIdx.x == 0)
    for (int step = 0; step < STAGES - 1 && step < steps; step++) start(step);

  float sum[64];
#pragma unroll
  for (int i = 0; i < 64; i++) sum[i] = 0.0f;
  for (int step = 0; step < steps; step++) {
    const unsigned tile_a = shared + step % STAGES * 2 * TILE_BYTES, tile_b = tile_a + TILE_BYTES;
    barrier_wait(full + 8 * (step % STAGES), step / STAGES & 1);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 4; i++)
      wgmma(sum, describe(tile_a + group * 64 * ROW_BYTES + 32 * i), describe(tile_b + 32 * i));
    wgmma_commit();
    wgmma_wait<1>();  // the product of the step before is over: its stage is free
    if (step > 0 && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * ((step - 1) % STAGES));
    const int next = step + STAGES - 1;
    if (threadIdx.x == 0 && next < steps) {
      if (step > 0) barrier_wait(empty + 8 * (next % STAGES), (step - 1) / STAGES & 1);
      start(next);
    }
    __syncwarp();  // wgmma wants its warps whole again
  }
  wgmma_wait<0>();

  const int lane = lane_id();
#pragma unroll
  for (int j = 0; j < 16; j++) {
    const int at_row = row + group * 64 + warp_id() % 4 * 16 + lane / 4, at_column = column + 8 * j + 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (at_row + 8 * half < m)
        write_bf16_pair(c, static_cast<long long>(at_row + 8 * half) * n + at_column, n - at_column,
                        sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1], n % 2 == 0);
  }
}
