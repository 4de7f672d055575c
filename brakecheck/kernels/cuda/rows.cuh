// Row-wise kernels at the speed of a copy: what softmax and the norms share.
//
// A team of threads owns a row: a warp, a block, or a cluster of blocks for rows too long for one. A row is read once into
// registers, stays there packed, is reduced, and is written once. How it gets there is chosen by width (LOAD):
//   kDirect  each team loads its own row. With a grid of one row a team, the many resident teams overlap each other.
//   kBulk    persistent teams whose next rows come into shared memory by bulk copies (sm_90).
// Persistent teams pay where something is kept from row to row: gamma and beta in shared memory, sums of gradients.
// Blocks of a cluster exchange partial results through distributed shared memory (sm_90).
#pragma once

namespace rows {

// No header of the toolkit is needed: what compiles these at run time (NVRTC) often comes without.
#define ROWS_INFINITY __int_as_float(0x7f800000)

using u32 = unsigned int;
using u64 = unsigned long long;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define ROWS_BULK 1
#else
#define ROWS_BULK 0
#endif

constexpr float kLog2e = 1.4426950408889634f;

// ---- elements: 16 bytes of T <-> floats ------------------------------------------------------------------------------
struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
using fp32 = float;

template <typename T>
struct Vec;
template <>
struct Vec<fp32> {
  static constexpr int size = 4;
  static __device__ __forceinline__ float load(const fp32* p) { return *p; }
  static __device__ __forceinline__ void store(fp32* p, float f) { *p = f; }
  static __device__ __forceinline__ void unpack(uint4 v, float* f) {
    f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y), f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
  }
  static __device__ __forceinline__ uint4 pack(const float* f) {
    return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
  }
  static constexpr u32 kLowest = 0xff800000u;
  static __device__ __forceinline__ u32 larger(u32 a, u32 b) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  }
  static __device__ __forceinline__ float largest(u32 a) { return __uint_as_float(a); }
};
template <>
struct Vec<bf16> {
  static constexpr int size = 8;
  static __device__ __forceinline__ float load(const bf16* p) { return __uint_as_float(u32(p->bits) << 16); }
  static __device__ __forceinline__ void store(bf16* p, float f) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(p->bits) : "f"(f));
  }
  static __device__ __forceinline__ void unpack(uint4 v, float* f) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) f[2 * i] = __uint_as_float(w[i] << 16), f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
  }
  static __device__ __forceinline__ uint4 pack(const float* f) {
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
  static constexpr u32 kLowest = 0xff80ff80u;
  static __device__ __forceinline__ u32 larger(u32 a, u32 b) {
    asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
  }
  static __device__ __forceinline__ float largest(u32 a) {
    return fmaxf(__uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u));
  }
};
template <>
struct Vec<fp16> {
  static constexpr int size = 8;
  static __device__ __forceinline__ float widen(unsigned short bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
  }
  static __device__ __forceinline__ float load(const fp16* p) { return widen(p->bits); }
  static __device__ __forceinline__ void store(fp16* p, float f) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(p->bits) : "f"(f));
  }
  static __device__ __forceinline__ void unpack(uint4 v, float* f) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) f[2 * i] = widen(w[i] & 0xffffu), f[2 * i + 1] = widen(w[i] >> 16);
  }
  static __device__ __forceinline__ uint4 pack(const float* f) {
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
  static constexpr u32 kLowest = 0xfc00fc00u;
  static __device__ __forceinline__ u32 larger(u32 a, u32 b) {
    asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
  }
  static __device__ __forceinline__ float largest(u32 a) { return fmaxf(widen(a & 0xffffu), widen(a >> 16)); }
};

// Running maximum of packed values (a NaN is passed over; it reaches the result through the exponentials).
template <typename T>
struct Peak {
  u32 top = Vec<T>::kLowest;
  __device__ __forceinline__ void add(uint4 v) {
    top = Vec<T>::larger(Vec<T>::larger(Vec<T>::larger(v.x, v.y), Vec<T>::larger(v.z, v.w)), top);
  }
  __device__ __forceinline__ float value() const { return Vec<T>::largest(top); }
};

__device__ __forceinline__ uint4 load(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// From shared memory each time it is called: the compiler keeps no copy in registers.
__device__ __forceinline__ uint4 load_shared(const uint4* p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(static_cast<u32>(__cvta_generic_to_shared(p))));
  return v;
}
__device__ __forceinline__ float load_shared(const float* p) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(static_cast<u32>(__cvta_generic_to_shared(p))));
  return v;
}
__device__ __forceinline__ void store(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Keeps packed values packed: without it the compiler unpacks gamma once, outside the loop, into twice the registers.
__device__ __forceinline__ uint4 opaque(uint4 v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
  return v;
}

// ---- mbarrier, bulk copy, cluster ---------------------------------------------------------------------------------
__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

#if ROWS_BULK
__device__ __forceinline__ void barrier_init(u64* b, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* b, u32 parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" :: "r"(shared_address(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// Arrive early and wait late: what lies between hides the barrier.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ float4 load_remote(const float4* mine, u32 rank) {
  u32 there;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(there) : "memory");
  return v;
}
// Writes `value` where `mine` lies in block `rank` of the cluster, and counts its 4 bytes on that block's `barrier`.
__device__ __forceinline__ void send(float* mine, u64* barrier, u32 rank, float value) {
  u32 there, theirs;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
               :: "r"(there), "r"(__float_as_uint(value)), "r"(theirs) : "memory");
}
#endif

// Kernels here are launched while the one ahead of them in the stream may still be running (jit.py, dependent): no access to
// memory before its end. After that the next kernel's blocks may come in, to wait in turn; so the start of a launch, about
// half a microsecond, hides behind the end of the one before.
__device__ __forceinline__ void follow() {
#if ROWS_BULK
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void group_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// ---- reductions over the threads of one row -------------------------------------------------------------------------
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <typename F>
__device__ __forceinline__ float over_warp(float v, F&& f) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) v = f(v, __shfl_xor_sync(0xffffffffu, v, mask));
  return v;
}
__device__ __forceinline__ float warp_sum(float v) {
  return over_warp(v, [](float a, float b) { return a + b; });
}
__device__ __forceinline__ float warp_max(float v) {
  return over_warp(v, [](float a, float b) { return fmaxf(a, b); });
}

// Partial results. `warp` combines those of the threads of a warp, `lanes` those of a block's warps, one a lane, `warps` those
// of COUNT warps in memory, `among` those of COUNT blocks. All find what is common first (maximum, mean), so that no chain of
// dependent corrections arises.
template <int KINDS>
struct Sums {
  float v[KINDS];
  static __device__ __forceinline__ Sums none() { return {}; }
  static __device__ __forceinline__ Sums warp(Sums p) {
#pragma unroll
    for (int k = 0; k < KINDS; ++k) p.v[k] = warp_sum(p.v[k]);
    return p;
  }
  static __device__ __forceinline__ Sums lanes(Sums p) { return warp(p); }
  template <int COUNT>
  static __device__ __forceinline__ Sums warps(const Sums* p) { return among<COUNT>(p); }
  template <int COUNT>
  static __device__ __forceinline__ Sums among(const Sums* p) {
    Sums s = p[0];
#pragma unroll
    for (int i = 1; i < COUNT; ++i)
#pragma unroll
      for (int k = 0; k < KINDS; ++k) s.v[k] += p[i].v[k];
    return s;
  }
};
using Sum = Sums<1>;
using Sum2 = Sums<2>;

// Maximum of x log2 e, and sum of 2^(x log2 e - maximum). All -inf has maximum -inf and sum 0.
struct MaxSum {
  float maximum, sum;
  static __device__ __forceinline__ MaxSum none() { return {-ROWS_INFINITY, 0.f}; }
  static __device__ __forceinline__ float rescale(float from, float to) { return from == to ? 1.f : exp2_fast(from - to); }
  static __device__ __forceinline__ MaxSum warp(MaxSum p) {
    const float m = warp_max(p.maximum);
    return {m, warp_sum(p.sum * rescale(p.maximum, m))};
  }
  static __device__ __forceinline__ MaxSum lanes(MaxSum p) { return warp(p); }
  template <int COUNT>
  static __device__ __forceinline__ MaxSum warps(const MaxSum* p) { return among<COUNT>(p); }
  template <int COUNT>
  static __device__ __forceinline__ MaxSum among(const MaxSum* p) {
    float m = p[0].maximum, s = 0.f;
#pragma unroll
    for (int i = 1; i < COUNT; ++i) m = fmaxf(m, p[i].maximum);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) s = fmaf(p[i].sum, rescale(p[i].maximum, m), s);
    return {m, s};
  }
};

// Threads of one row: TPR consecutive ones. `slots` (2 x warps of the block, alternating by `parity`) makes one barrier
// a reduction enough: a slot is written again only after the next reduction's barrier.
template <int TPR, int R, typename P>
__device__ __forceinline__ P reduce_row(P p, P* slots, int parity) {
  p = P::warp(p);
  if constexpr (TPR > 32) {
    constexpr int kWarps = TPR / 32;
    const int warp = threadIdx.x / 32, first = R == 1 ? 0 : warp / kWarps * kWarps;
    P* slot = slots + parity * kWarps * R;
    if (threadIdx.x % 32 == 0) slot[warp] = p;
    if constexpr (R == 1) __syncthreads(); else group_sync(1 + warp / kWarps, TPR);
    if constexpr (kWarps <= 8) p = P::template warps<kWarps>(slot + first);
    else p = P::lanes(threadIdx.x % 32 < kWarps ? slot[first + threadIdx.x % 32] : P::none());
  }
  return p;
}

// Two sums: half of the lanes go on with the first, half with the second, so both together cost little more than one.
template <int TPR, int R>
__device__ __forceinline__ Sum2 reduce_row(Sum2 p, Sum2* slots, int parity) {
  const int lane = threadIdx.x % 32;
  const bool second = lane & 16;
  float sum = (second ? p.v[1] : p.v[0]) + __shfl_xor_sync(0xffffffffu, second ? p.v[0] : p.v[1], 16);
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  if constexpr (TPR == 32) {
    const float other = __shfl_xor_sync(0xffffffffu, sum, 16);
    return {{second ? other : sum, second ? sum : other}};
  } else {
    constexpr int kWarps = TPR / 32;
    const int warp = threadIdx.x / 32, first = R == 1 ? 0 : warp / kWarps * kWarps;
    Sum2* slot = slots + parity * kWarps * R;
    if (lane % 16 == 0) slot[warp].v[second] = sum;
    if constexpr (R == 1) __syncthreads(); else group_sync(1 + warp / kWarps, TPR);
    slot += first;
    if constexpr (kWarps <= 4) return Sum2::among<kWarps>(slot);
    const float* all = reinterpret_cast<const float*>(slot);
    float part = 0.f;
#pragma unroll
    for (int i = 0; i < 2 * kWarps; i += 32)
      if (lane + i < 2 * kWarps) part += all[lane + i];
#pragma unroll
    for (int mask = 16; mask > 1; mask /= 2) part += __shfl_xor_sync(0xffffffffu, part, mask);
    return {{__shfl_sync(0xffffffffu, part, 0), __shfl_sync(0xffffffffu, part, 1)}};
  }
}

// ---- the walk over rows -----------------------------------------------------------------------------------------------
// T: element. TPR: threads a row (in one block). VPT: 16-byte vectors a thread holds of each stream. R: rows a block works
// on at once. LOAD: see above. STAGES: rows in flight or in use, a team (kBulk). STREAMS: inputs of the same shape (1: x;
// 2: x and dy). CLUSTER: blocks a row (then R is 1). GROUP: teams of blocks in a hardware cluster (for sums at the end).
// P: the partial result of a reduction. raw: dynamic shared memory; kBulk takes
// R * STAGES * STREAMS * chunk elements of it, chunk = columns a block holds.
enum Load { kDirect = 0, kBulk = 1 };

template <typename T>
__device__ __forceinline__ int chunk_of(int n, int cluster) {
  return cluster == 1 ? n : (n / Vec<T>::size + cluster - 1) / cluster * Vec<T>::size;
}

template <typename T, int TPR, int VPT, int R, int LOAD, int STAGES, int STREAMS, int CLUSTER, int GROUP, typename P>
struct Walk {
  static constexpr int kVec = Vec<T>::size;
  static constexpr int kWarps = TPR * R / 32;
  static_assert(CLUSTER == 1 || R == 1, "a cluster works on one row");
  static_assert(TPR % 32 == 0 && R <= 15, "whole warps, and a named barrier a row");

  // Reduces over all threads that hold one row; each gets the result. Reads of shared memory before it are then done in
  // the whole team, so a buffer may be refilled right after it.
  struct Reducer {
    P* slots;
    P* box;
    u64* arrived;
    int it, rank;
    __device__ __forceinline__ P operator()(P p) const {
      const int parity = it & 1;
      p = reduce_row<TPR, R>(p, slots, parity);
#if ROWS_BULK
      if constexpr (CLUSTER > 1) {
        if (it == 0) cluster_wait();  // the others' barriers exist
        // A block sends row i + 2 only after it has everybody's row i + 1, so two boxes are enough.
        P* here = box + parity * CLUSTER;
        if (threadIdx.x == 0) barrier_expect(arrived + parity, CLUSTER * sizeof(P));
        if (threadIdx.x < CLUSTER) {
          const u32 to = (GROUP > 1 ? cluster_rank() / CLUSTER * CLUSTER : 0) + threadIdx.x;
          const float* f = reinterpret_cast<const float*>(&p);
#pragma unroll
          for (int i = 0; i < int(sizeof(P) / 4); ++i)
            send(reinterpret_cast<float*>(here + rank) + i, arrived + parity, to, f[i]);
        }
        barrier_wait(arrived + parity, (it >> 1) & 1);
        p = P::template among<CLUSTER>(here);
      }
#endif
      return p;
    }
  };

  // part(row, begin, mine, lane, held) -> P computes a thread's share; finish(row, begin, mine, lane, held, P) uses the
  // whole and stores. begin, mine: first column and number of columns of this block. first_row() runs once, while the
  // first row is on its way.
  template <typename Part, typename Finish, typename Prepare>
  static __device__ __forceinline__ void run(const T* const (&from)[STREAMS], int rows, int n, unsigned char* raw,
                                             Prepare&& prepare, Part&& part, Finish&& finish) {
    __shared__ alignas(16) P slots[2 * kWarps];
    __shared__ alignas(16) P box[2 * CLUSTER];
    __shared__ alignas(8) u64 arrived[2];
    __shared__ alignas(8) u64 full[R * STAGES];
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    const int chunk = chunk_of<T>(n, CLUSTER);
    const int begin = rank * chunk;
    const int mine = CLUSTER > 1 ? max(0, min(chunk, n - begin)) : n;
    const int team = threadIdx.x / TPR, lane = threadIdx.x % TPR;
    const int step = gridDim.x / CLUSTER * R, first = blockIdx.x / CLUSTER * R + team;
    u64* ready = full + team * STAGES;
    T* buffers = reinterpret_cast<T*>(raw) + size_t(team) * STAGES * STREAMS * chunk;
    auto take = [&](int row, uint4(&held)[STREAMS][VPT]) {
#pragma unroll
      for (int k = 0; k < STREAMS; ++k)
#pragma unroll
        for (int j = 0; j < VPT; ++j) {
          const int column = (j * TPR + lane) * kVec;
          if (column < mine) {
            const T* p = from[k] + size_t(row) * n + begin + column;
            held[k][j] = load(p);
          }
        }
    };
    auto fetch = [&](int row, int s) {
#if ROWS_BULK
      const u32 bytes = u32(mine) * sizeof(T);
      barrier_expect(&ready[s], bytes * STREAMS);
      if (bytes > 0)
#pragma unroll
        for (int k = 0; k < STREAMS; ++k)
          bulk_load(buffers + (s * STREAMS + k) * chunk, from[k] + size_t(row) * n + begin, bytes, &ready[s]);
#endif
    };
    uint4 held[STREAMS][VPT];
#if ROWS_BULK
    if (CLUSTER > 1 && threadIdx.x == 0) barrier_init(&arrived[0], 1), barrier_init(&arrived[1], 1);
    if (LOAD == kBulk && lane == 0)
      for (int s = 0; s < STAGES; ++s) barrier_init(&ready[s], 1);
    if constexpr (CLUSTER > 1 || LOAD == kBulk) barriers_ready();
#endif
    follow();
    if constexpr (LOAD != kBulk) {
      if (first < rows) take(first, held);
    }
#if ROWS_BULK
    if constexpr (CLUSTER > 1) cluster_arrive_relaxed();
    if (LOAD == kBulk && lane == 0)
      for (int s = 0; s < STAGES; ++s)
        if (first + s * step < rows) fetch(first + s * step, s);
#endif
    prepare();
    if constexpr (LOAD == kBulk) __syncthreads();
    int it = 0, s = 0, phase = 0;
    for (int row = first; row < rows; row += step, ++it) {
#if ROWS_BULK
      if constexpr (LOAD == kBulk) {
        barrier_wait(&ready[s], phase);
#pragma unroll
        for (int k = 0; k < STREAMS; ++k)
#pragma unroll
          for (int j = 0; j < VPT; ++j) {
            const int column = (j * TPR + lane) * kVec;
            if (column < mine) held[k][j] = *reinterpret_cast<const uint4*>(buffers + (s * STREAMS + k) * chunk + column);
          }
      }
#endif
      if constexpr (LOAD == kDirect) {
        if (it > 0) take(row, held);
      }
      const Reducer reduce{slots, box, arrived, it, rank};
      const P all = reduce(part(row, begin, mine, lane, held));
#if ROWS_BULK
      if constexpr (LOAD == kBulk) {
        if constexpr (TPR == 32) __syncwarp();
        if (lane == 0 && row + STAGES * step < rows) fetch(row + STAGES * step, s);
        if (++s == STAGES) s = 0, phase ^= 1;
      }
#endif
      finish(row, begin, mine, lane, held, all);
    }
#if ROWS_BULK
    if (CLUSTER > 1 && it == 0) cluster_wait();
#endif
  }
};

}  // namespace rows
