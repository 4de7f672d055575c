// The body of a WHILE node (micro.py): ends the loop after `turns` turns and is ready for the next one. Compiled by nvcc,
// which links the device runtime that sets conditions.
extern "C" __global__ void turn(cudaGraphConditionalHandle handle, int* left, int turns) {
  if (--*left > 0) return;
  *left = turns;
  cudaGraphSetConditional(handle, 0);
}
