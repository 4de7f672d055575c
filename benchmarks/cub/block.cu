// CUB's block-wide primitives, instantiated for float and bfloat16: library code that real kernels are full of.
// Compiled from the headers of each release's own nvidia-cuda-cccl wheel, so the library is part of what is compared.
#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>
#include <cuda_bf16.h>

constexpr int kThreads = 256;
constexpr int kItems = 8;

struct Add {
  template <typename T>
  __device__ T operator()(T a, T b) const { return a + b; }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) block_reduce(const T* in, T* out) {
  using Reduce = cub::BlockReduce<T, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  T items[kItems];
  for (int i = 0; i < kItems; ++i) items[i] = in[(blockIdx.x * kThreads + threadIdx.x) * kItems + i];
  T total = Reduce(storage).Reduce(items, Add{});
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) block_scan(const T* in, T* out) {
  using Scan = cub::BlockScan<T, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  T items[kItems];
  const int first = (blockIdx.x * kThreads + threadIdx.x) * kItems;
  for (int i = 0; i < kItems; ++i) items[i] = in[first + i];
  Scan(storage).InclusiveScan(items, items, Add{});
  for (int i = 0; i < kItems; ++i) out[first + i] = items[i];
}

template <typename T>
__global__ void __launch_bounds__(kThreads) block_radix_sort(const T* in, T* out) {
  using Sort = cub::BlockRadixSort<T, kThreads, kItems>;
  __shared__ typename Sort::TempStorage storage;
  T items[kItems];
  const int first = (blockIdx.x * kThreads + threadIdx.x) * kItems;
  for (int i = 0; i < kItems; ++i) items[i] = in[first + i];
  Sort(storage).Sort(items);
  for (int i = 0; i < kItems; ++i) out[first + i] = items[i];
}

#define INSTANTIATE(T)                                       \
  template __global__ void block_reduce<T>(const T*, T*);    \
  template __global__ void block_scan<T>(const T*, T*);      \
  template __global__ void block_radix_sort<T>(const T*, T*);
INSTANTIATE(float)
INSTANTIATE(__nv_bfloat16)
