// Kernels of the micro-experiments (micro.py).

// Does next to nothing: what is timed is getting here.
extern "C" __global__ void small(float* x) {
  if (threadIdx.x == 0) x[blockIdx.x] += 1.0f;
}

// The same, able to start while the kernel before it ends (programmatic dependent launch, from compute capability 9.0).
extern "C" __global__ void small_dependent(float* x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (threadIdx.x == 0) x[blockIdx.x] += 1.0f;
}

// Adds up `count` chunks of `words` 16-byte words each, chosen by index, from wherever `from` lies.
extern "C" __global__ void read_chunks(const uint4* from, const int* chosen, unsigned* sum, int count, int words) {
  unsigned mine = 0;
  for (int c = blockIdx.y; c < count; c += gridDim.y)
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
      const uint4 v = from[static_cast<long long>(chosen[c]) * words + i];
      mine += v.x ^ v.y ^ v.z ^ v.w;
    }
  if (mine == 0x12345678u) atomicAdd(sum, mine);
}
