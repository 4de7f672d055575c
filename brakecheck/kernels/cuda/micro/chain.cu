// Kernels that do next to nothing, for operators about getting to them: launch_chain, conditional_nodes. They are compiled
// at first use alone: a comparison of toolchains would learn nothing from them.

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
