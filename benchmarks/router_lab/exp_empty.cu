extern "C" __global__ void empty(float* x) { if (x == nullptr) *x = 1; }
extern "C" __global__ void touch(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x]; }
