// The source of the cubins in this folder: small kernels that between them use what the cubin reader and the identity of
// code must know. No header, so that every release compiles it from its built-in types.
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef MOVED  // another module around the same kernels: their constants and variables lie elsewhere
__constant__ float before[6] = {9.f, 8.f, 7.f, 6.f, 5.f, 4.f};
__device__ int also_before[4] = {1, 2, 3, 4};
extern "C" __global__ void other(float* out, int* n) { out[0] = before[n[0] & 3]; n[1] = also_before[n[0] & 3]; }
#endif

__constant__ float coefficient = 2.5f;
__device__ float lookup[8] = {3.f, 1.f, 4.f, 1.f, 5.f, 9.f, 2.f, 6.f};

extern "C" __global__ void axpy(const float* __restrict__ x, float* y, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}

extern "C" __global__ void __launch_bounds__(256) tables(const int* index, float* out) {
  __shared__ float tile[256];
  tile[threadIdx.x] = coefficient * lookup[index[threadIdx.x] & 7];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

__device__ __noinline__ double slow_path(double x, int n) {
#pragma unroll 1
  for (int i = 0; i < n; ++i) x = x * x + 0.5;
  return x;
}

extern "C" __global__ void calls(double* x, int n) { x[threadIdx.x] = slow_path(x[threadIdx.x], n); }

extern "C" __global__ void local_array(const float* in, float* out, int pick) {
  float keep[16];
  for (int i = 0; i < 16; ++i) keep[(i * pick) & 15] = in[threadIdx.x + i * 32];
  out[threadIdx.x] = keep[pick & 15];
}

template <int N, typename T> __global__ void scale_by(T* x) { x[threadIdx.x] *= N; }
template __global__ void scale_by<3, float>(float*);

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster(u32* out) {
  extern __shared__ u32 words[];
  __shared__ u64 barrier;
  words[threadIdx.x] = threadIdx.x;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"((u32)__cvta_generic_to_shared(&barrier)));
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
  out[threadIdx.x] = words[threadIdx.x ^ 1];
}
#endif
