// Tensor-core tiles for sm_80 and newer: asynchronous copies, ldmatrix, mma.sync, and a 128 x 128 product over them.
//
// A tile in shared memory is rows of 128 bytes (64 bf16 or 128 int8 of K). The 16-byte chunks of a row are XORed with
// the row's low three bits, which is TMA's 128-byte swizzle: ldmatrix reads eight rows without a bank conflict, and one
// product serves tiles that were written by plain loads, by cp.async or by TMA.
#pragma once
#include "warp.cuh"

constexpr int TILE = 128;       // rows of A, rows of B and so columns of C
constexpr int ROW_BYTES = 128;  // bytes of K a tile
constexpr int TILE_BYTES = TILE * ROW_BYTES;
constexpr int GEMM_THREADS = 256;

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ unsigned chunk_at(int row, int chunk) {
  return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

// Copies 16 bytes; the last 16 - `bytes` are written as zero and not read.
__device__ __forceinline__ void copy_async(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void store_shared(unsigned shared, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// c += a b for 16 x 8 outputs and 32 bytes of K: bf16 into float, int8 into int. The register layout is the same.
__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Sixteen bytes of a row from byte `at` on, zero past the end of the row or below the last row.
// A row that is no multiple of 16 bytes long has unaligned chunks: they are read byte by byte.
__device__ __forceinline__ uint4 load_chunk(const char* rows, int row, int row_count, long long row_bytes,
                                            long long at) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (row >= row_count || at >= row_bytes) return v;
  const char* from = rows + row * row_bytes + at;
  if (row_bytes % 16 == 0) return *reinterpret_cast<const uint4*>(from);
  unsigned word[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 16; i++)
    if (at + i < row_bytes) word[i / 4] |= unsigned(static_cast<unsigned char>(from[i])) << (8 * (i % 4));
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// Starts the copy of `ROWS` rows into a swizzled tile; rows and bytes outside the matrix become zero.
template <int ROWS, int THREADS>
__device__ __forceinline__ void copy_tile(unsigned shared, const char* rows, int row_count, long long row_bytes,
                                          long long at) {
  for (int i = threadIdx.x; i < ROWS * 8; i += THREADS) {
    const int row = i / 8, chunk = i % 8;
    const long long byte = at + chunk * 16;
    const unsigned to = shared + chunk_at(row, chunk);
    if (row_bytes % 16 == 0) {
      const bool inside = row < row_count && byte < row_bytes;
      copy_async(to, inside ? rows + row * row_bytes + byte : rows, inside ? 16 : 0);
    } else {
      store_shared(to, load_chunk(rows, row, row_count, row_bytes, byte));
    }
  }
}

// Accumulators of one of eight warps: 64 x 32 of the 128 x 128 tile, as 4 x 4 pieces of 16 x 8.
template <typename T>
struct Accumulators {
  T value[4][4][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 64; i++) value[i / 16][i / 4 % 4][i % 4] = T(0);
  }
  __device__ static __forceinline__ int first_row() { return (warp_id() & 1) * 64; }
  __device__ static __forceinline__ int first_column() { return (warp_id() >> 1) * 32; }

  // Adds A B^T of two tiles in shared memory.
  __device__ __forceinline__ void multiply(unsigned a, unsigned b) {
    const int lane = lane_id();
#pragma unroll
    for (int k = 0; k < 4; k++) {
      unsigned fa[4][4], fb[2][4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        load_matrices(fa[i], a + chunk_at(first_row() + 16 * i + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
      for (int j = 0; j < 2; j++)
        load_matrices(
            fb[j], b + chunk_at(first_column() + 16 * j + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1)));
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) mma(value[i][j], fa[i], fb[j / 2][2 * (j % 2)], fb[j / 2][2 * (j % 2) + 1]);
    }
  }

  // write(row, column, left, right): two neighbours of a row, positions within the tile.
  template <typename Write>
  __device__ __forceinline__ void each_pair(Write write) const {
    const int lane = lane_id();
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int row = first_row() + 16 * i + lane / 4, column = first_column() + 8 * j + 2 * (lane % 4);
        write(row, column, value[i][j][0], value[i][j][1]);
        write(row + 8, column, value[i][j][2], value[i][j][3]);
      }
  }
};

// The whole product of one tile: A (rows x K) and B (columns x K), copies two steps ahead of the arithmetic.
// `shared` holds 3 stages of 2 TILE_BYTES, aligned to 1024.
template <typename T>
__device__ __forceinline__ void multiply_rows(Accumulators<T>& c, unsigned shared, const char* a, int a_rows,
                                              const char* b, int b_rows, long long row_bytes) {
  constexpr int STAGES = 3;
  const int steps = static_cast<int>((row_bytes + ROW_BYTES - 1) / ROW_BYTES);
  const auto start = [&](int step) {
    if (step < steps) {
      const unsigned to = shared + step % STAGES * 2 * TILE_BYTES;
      copy_tile<TILE, GEMM_THREADS>(to, a, a_rows, row_bytes, static_cast<long long>(step) * ROW_BYTES);
      copy_tile<TILE, GEMM_THREADS>(to + TILE_BYTES, b, b_rows, row_bytes, static_cast<long long>(step) * ROW_BYTES);
    }
    copy_commit();  // also when empty, so that the number of pending groups is known
  };
  start(0);
  start(1);
  for (int step = 0; step < steps; step++) {
    copy_wait<STAGES - 2>();
    __syncthreads();  // this step has arrived for all warps, and all are done with the stage that is filled next
    start(step + STAGES - 1);
    const unsigned from = shared + step % STAGES * 2 * TILE_BYTES;
    c.multiply(from, from + TILE_BYTES);
  }
}

__device__ __forceinline__ void write_bf16_pair(bf16* out, long long at, int columns_left, float left, float right,
                                                bool aligned) {
  if (columns_left >= 2 && aligned) {
    *reinterpret_cast<unsigned*>(out + at) = pack_bf16(left, right);
  } else {
    if (columns_left >= 1) out[at] = to_bf16(left);
    if (columns_left >= 2) out[at + 1] = to_bf16(right);
  }
}
