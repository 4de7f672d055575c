// The body of a WHILE node (conditional_nodes): ends the loop after `turns` turns and is ready for the next one. Linked
// with the device runtime, which sets conditions; declared here, so that no header of the toolkit is needed.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);

extern "C" __global__ void turn(float* x, int* left, unsigned long long handle, int turns) {
  *x += 1.0f;
  if (--*left > 0) return;
  *left = turns;
  cudaGraphSetConditional(handle, 0);
}
