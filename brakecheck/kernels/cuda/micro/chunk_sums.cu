// sums[c] += the 32-bit words of chunk chosen[c], modulo 2^32, from wherever `from` lies (managed_memory). `count` chunks of
// `words` 16-byte words each.
extern "C" __global__ void chunk_sums(const uint4* from, const int* chosen, unsigned* sums, int count, int words) {
  for (int c = blockIdx.y; c < count; c += gridDim.y) {
    unsigned mine = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
      const uint4 v = from[static_cast<long long>(chosen[c]) * words + i];
      mine += v.x + v.y + v.z + v.w;
    }
    for (int step = 16; step > 0; step /= 2) mine += __shfl_xor_sync(0xFFFFFFFFu, mine, step);
    if (threadIdx.x % 32 == 0) atomicAdd(&sums[c], mine);
  }
}
