// A lock that a warp takes as a whole: lane 0 spins and sleeps, __syncwarp keeps the other lanes outside until it has
// the lock, and again inside until all have left. CAS=1 takes it by compare-and-swap instead of exchange.
#include "warp.cuh"

#ifndef CAS
#define CAS 0
#endif

constexpr int THREADS = 128;

__device__ __forceinline__ bool take(int* lock) {
#if CAS
  return atomicCAS(lock, 0, 1) == 0;
#else
  return atomicExch(lock, 1) == 0;
#endif
}

// values: warps x 32. turns: warps x rounds, each names the lock to take. locks: zero on entry and on return.
// total: locks x 32; under lock l, lane i adds its value to total[l][i] without an atomic: any failure of the lock to
// exclude, or of its fences to publish, loses a sum.
extern "C" __global__ void __launch_bounds__(THREADS)
    spin_lock_add(const int* __restrict__ values, const int* __restrict__ turns, int* locks, int* total, int warps,
                  int rounds) {
  const int warp = blockIdx.x * (THREADS / 32) + warp_id();
  if (warp >= warps) return;  // whole warps leave: the barriers below see all 32 lanes or none
  const int lane = lane_id();
  const int mine = values[warp * 32 + lane];
  for (int round = 0; round < rounds; round++) {
    const int which = turns[warp * rounds + round];
    if (lane == 0) {
      unsigned pause = 8;
      while (!take(locks + which)) {
        __nanosleep(pause);
        if (pause < 256) pause *= 2;
      }
      __threadfence();
    }
    __syncwarp();
    volatile int* sum = total + which * 32 + lane;  // volatile: read from L2, where the last holder's write is
    *sum = *sum + mine;
    __threadfence();
    __syncwarp();
    if (lane == 0) atomicExch(locks + which, 0);
  }
}
