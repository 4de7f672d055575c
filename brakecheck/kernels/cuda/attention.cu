// Attention forward over tiles of BLOCK_M queries and BLOCK_N keys, head dimension 64, with mma.sync: the score tile
// never leaves registers, maximum and sum are kept online. The block shape is a template so that its cost in registers,
// spills and occupancy can be read per shape.
#include "tensorcore.cuh"

constexpr int HEAD = 64;  // one row of Q, K or V is 128 bytes: one row of a swizzled tile

// q, k, v, out: heads x length x 64; lse: heads x length (natural logarithm of the sum of exponentials). grid.y: heads
// of all batches. Dynamic shared memory: (BLOCK_M + 4 BLOCK_N) 128 bytes. scale: 1 / sqrt(64) for ordinary attention.
template <int BLOCK_M, int BLOCK_N>
__global__ void __launch_bounds__(BLOCK_M * 2)
    attention(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
              bf16* __restrict__ out, float* __restrict__ lse, int length, int causal, float scale) {
  constexpr int THREADS = BLOCK_M * 2;  // a warp owns 16 queries
  constexpr float LOG2E = 1.4426950408889634f;
  constexpr float LN2 = 0.6931471805599453f;
  extern __shared__ __align__(1024) unsigned char stages[];
  const unsigned shared_q = shared_address(stages), shared_kv = shared_q + BLOCK_M * ROW_BYTES;
  const int lane = lane_id(), first = blockIdx.x * BLOCK_M, warp_row = warp_id() * 16;
  const long long head = static_cast<long long>(blockIdx.y) * length * HEAD;
  const char* keys = reinterpret_cast<const char*>(k + head);
  const char* values = reinterpret_cast<const char*>(v + head);
  const int reach = causal ? min(length, first + BLOCK_M) : length;
  const int blocks = (reach + BLOCK_N - 1) / BLOCK_N;
  const auto start = [&](int block) {
    const unsigned to = shared_kv + block % 2 * 2 * BLOCK_N * ROW_BYTES;
    const long long skip = static_cast<long long>(block) * BLOCK_N * ROW_BYTES;
    copy_tile<BLOCK_N, THREADS>(to, keys + skip, length - block * BLOCK_N, ROW_BYTES, 0);
    copy_tile<BLOCK_N, THREADS>(to + BLOCK_N * ROW_BYTES, values + skip, length - block * BLOCK_N, ROW_BYTES, 0);
    copy_commit();
  };
  copy_tile<BLOCK_M, THREADS>(shared_q, reinterpret_cast<const char*>(q + head + static_cast<long long>(first) * HEAD),
                              length - first, ROW_BYTES, 0);
  start(0);
  copy_wait<0>();
  __syncthreads();
  unsigned query[4][4];
#pragma unroll
  for (int i = 0; i < 4; i++) load_matrices(query[i], shared_q + chunk_at(warp_row + (lane & 15), 2 * i + (lane >> 4)));

  float result[8][4] = {};
  float maximum[2] = {LOWEST, LOWEST}, sum[2] = {0.0f, 0.0f};  // of the rows lane / 4 and lane / 4 + 8
  const float scale2 = scale * LOG2E;
  for (int block = 0; block < blocks; block++) {
    copy_wait<0>();
    __syncthreads();  // this block has arrived, and all warps are done with the other stage
    if (block + 1 < blocks) start(block + 1);
    const unsigned shared_k = shared_kv + block % 2 * 2 * BLOCK_N * ROW_BYTES,
                   shared_v = shared_k + BLOCK_N * ROW_BYTES;

    float score[BLOCK_N / 8][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < BLOCK_N / 16; j++) {
        unsigned key[4];
        load_matrices(key, shared_k + chunk_at(16 * j + (lane & 7) + ((lane >> 4) << 3), 2 * i + ((lane >> 3) & 1)));
        mma(score[2 * j], query[i], key[0], key[1]);
        mma(score[2 * j + 1], query[i], key[2], key[3]);
      }

    float top[2] = {maximum[0], maximum[1]};
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int column = block * BLOCK_N + 8 * j + 2 * (lane % 4) + (i & 1);
        const int row = first + warp_row + lane / 4 + (i >> 1) * 8;
        if (column >= length || (causal && column > row)) score[j][i] = LOWEST;
        top[i >> 1] = fmaxf(top[i >> 1], score[j][i]);
      }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(FULL_WARP, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(FULL_WARP, top[half], 2));
      const float shrink = exp2f((maximum[half] - top[half]) * scale2);
      maximum[half] = top[half];
      sum[half] *= shrink;
#pragma unroll
      for (int j = 0; j < 8; j++) result[j][2 * half] *= shrink, result[j][2 * half + 1] *= shrink;
    }
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        score[j][i] = exp2f((score[j][i] - maximum[i >> 1]) * scale2);
        sum[i >> 1] += score[j][i];
      }

#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; i++) {
      // Two neighbouring score pieces are, register for register, the left operand of the next product.
      const unsigned weight[4] = {
          pack_bf16(score[2 * i][0], score[2 * i][1]), pack_bf16(score[2 * i][2], score[2 * i][3]),
          pack_bf16(score[2 * i + 1][0], score[2 * i + 1][1]), pack_bf16(score[2 * i + 1][2], score[2 * i + 1][3])};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        unsigned value[4];
        load_matrices_transposed(value, shared_v + chunk_at(16 * i + (lane & 15), 2 * j + (lane >> 4)));
        mma(result[2 * j], weight, value[0], value[1]);
        mma(result[2 * j + 1], weight, value[2], value[3]);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    sum[half] += __shfl_xor_sync(FULL_WARP, sum[half], 1);
    sum[half] += __shfl_xor_sync(FULL_WARP, sum[half], 2);
    const int row = first + warp_row + lane / 4 + half * 8;
    if (row >= length) continue;
    const float inverse = 1.0f / sum[half];
#pragma unroll
    for (int j = 0; j < 8; j++)
      *reinterpret_cast<unsigned*>(out + head + static_cast<long long>(row) * HEAD + 8 * j + 2 * (lane % 4)) =
          pack_bf16(result[j][2 * half] * inverse, result[j][2 * half + 1] * inverse);
    if (lane % 4 == 0)
      lse[static_cast<long long>(blockIdx.y) * length + row] = maximum[half] * scale + log2f(sum[half]) * LN2;
  }
}

#define SHAPE(M, N)                                                                                                \
  template __global__ void attention<M, N>(const bf16* __restrict__, const bf16* __restrict__,                     \
                                           const bf16* __restrict__, bf16* __restrict__, float* __restrict__, int, \
                                           int, float)
SHAPE(64, 64);
SHAPE(128, 64);
SHAPE(128, 96);
SHAPE(128, 128);
