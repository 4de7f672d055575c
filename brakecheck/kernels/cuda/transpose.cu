// Transpose through a shared tile of 32 x (32 + PAD) floats. PAD=0: the column read hits one bank 32 times.
#ifndef PAD
#define PAD 1
#endif

constexpr int SIDE = 32;
constexpr int ROWS = 8;  // rows a block moves at a time: 256 threads

// x: rows x columns. out: columns x rows.
extern "C" __global__ void __launch_bounds__(SIDE* ROWS)
    transpose(const float* __restrict__ x, float* __restrict__ out, int rows, int columns) {
  __shared__ float tile[SIDE][SIDE + PAD];
  const int left = blockIdx.x * SIDE, top = blockIdx.y * SIDE;
#pragma unroll
  for (int i = 0; i < SIDE; i += ROWS) {
    const int row = top + threadIdx.y + i, column = left + threadIdx.x;
    if (row < rows && column < columns)
      tile[threadIdx.y + i][threadIdx.x] = x[static_cast<long long>(row) * columns + column];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < SIDE; i += ROWS) {
    const int row = left + threadIdx.y + i, column = top + threadIdx.x;
    if (row < columns && column < rows)
      out[static_cast<long long>(row) * rows + column] = tile[threadIdx.x][threadIdx.y + i];
  }
}
