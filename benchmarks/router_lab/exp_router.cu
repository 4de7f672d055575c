__device__ long long stamps[144 * 16];
#ifdef STAMPS
#define STAMP(i) do { if (threadIdx.x == 0) stamps[blockIdx.x * 16 + i] = clock64(); } while (0)
#endif
#ifdef REGS2
#define ROUTER_REGS(LANES) 2
#endif
#include "router.cu"
