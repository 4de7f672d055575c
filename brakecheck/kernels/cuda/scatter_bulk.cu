// out[index] += row through the copy engine: rows come into shared memory by bulk copies and leave as bulk reductions
// (cp.reduce.async.bulk, one a row and part), so that no value need pass through a register. sm_90 and newer.
// AGGREGATE=1: rows of a batch with equal index are summed in float first, and the index met most often lately stays in
// registers from batch to batch: a hot row costs a warp one reduction in all.
#ifndef ELEMENT
#define ELEMENT bf16
#endif
#include "scatter.cuh"
#include "tma.cuh"

#ifndef AGGREGATE
#define AGGREGATE 1
#endif
#ifndef BATCH
#define BATCH 32
#endif

constexpr int THREADS = 32;
constexpr int STAGES = 3;

__device__ __forceinline__ void load_bulk(unsigned shared, const T* from, int bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// rows: n x width, index: n, out: table rows x width, added to. width and part are multiples of 16 bytes, part is 512
// bytes at most. blockIdx.y is the part of a row; a block, one warp, walks over batches of BATCH rows. Dynamic shared
// memory: STAGES BATCH part elements. An index outside [0, table) is skipped. n is under 2^30, the caller sees to it.
extern "C" __global__ void __launch_bounds__(THREADS)
    scatter_bulk(const T* __restrict__ rows, const int* __restrict__ index, T* out, int n, int width, int table,
                 int part) {
  extern __shared__ __align__(128) unsigned char buffer[];
  __shared__ unsigned long long full[STAGES];
  const int lane = lane_id(), column = blockIdx.y * part, here = min(part, width - column);
  const int stride = part * sizeof(T), bytes = here * sizeof(T), batches = (n + BATCH - 1) / BATCH;
  const unsigned shared = shared_address(buffer);
  if (lane == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(shared_address(full + s), 1);
    barrier_init_done();
  }
  __syncwarp();

  auto load = [&](int batch, int stage) {
    if (batch >= batches) return;
    const int first = batch * BATCH, count = min(BATCH, n - first);
    const unsigned barrier = shared_address(full + stage), to = shared + stage * BATCH * stride;
    const T* from = rows + static_cast<long long>(first) * width;
    if (lane == 0) barrier_expect(barrier, count * bytes);
    __syncwarp();
    if (gridDim.y == 1) {  // rows of one part lie one after the other
      if (lane == 0) load_bulk(to, from, count * bytes, barrier);
    } else if (lane < count) {
      load_bulk(to + lane * stride, from + static_cast<long long>(lane) * width + column, bytes, barrier);
    }
  };
  auto key_of = [&](int batch) {  // -1 where there is no row to add
    const int at = batch * BATCH + lane;
    const int key = batch < batches && lane < BATCH && at < n ? index[at] : -1;
    return key < table ? key : -1;
  };
  for (int s = 0; s < STAGES - 1; s++) load(blockIdx.x + s * gridDim.x, s);

#if AGGREGATE
  constexpr int KEEP = 4;  // rows of one index in a batch from which on their sum stays in registers
  constexpr int EACH = 16 / sizeof(T);
  const bool inside = lane * EACH < here;
  int held = -1;
  float kept[EACH] = {};
  auto flush = [&]() {
    if (held >= 0 && inside)
      add_to_memory<4>(out + static_cast<long long>(held) * width + column + lane * EACH, kept);
  };
#endif
  int stage = 0, parity = 0, key = key_of(blockIdx.x);
  for (int batch = blockIdx.x; batch < batches; batch += gridDim.x) {
    const int next_key = key_of(batch + gridDim.x);
    bool leads = key >= 0;  // whether this lane's row is to be added to memory
    barrier_wait(shared_address(full + stage), parity);
#if AGGREGATE
    unsigned char* const at = buffer + stage * BATCH * stride + lane * 16;
    const unsigned peers = __match_any_sync(FULL_WARP, key);
    leads = leads && lane == __ffs(peers) - 1;
    unsigned several = __ballot_sync(FULL_WARP, leads && (key == held || (peers & (peers - 1)) != 0));
    for (; several != 0; several &= several - 1) {
      const int leader = __ffs(several) - 1, hot = __shfl_sync(FULL_WARP, key, leader);
      unsigned who = __shfl_sync(FULL_WARP, peers, leader);
      const bool keep = hot == held || __popc(who) >= KEEP;
      if (keep && hot != held) {
        flush();
        held = hot;
#pragma unroll
        for (int i = 0; i < EACH; i++) kept[i] = 0.0f;
      }
      if (inside) {
        float sum[EACH] = {};
        while (who != 0) {
          constexpr int TOGETHER = 4;
          uint4 raw[TOGETHER];
          bool used[TOGETHER];
#pragma unroll
          for (int u = 0; u < TOGETHER; u++, who &= who - 1) {
            used[u] = who != 0;
            if (used[u]) raw[u] = *reinterpret_cast<const uint4*>(at + (__ffs(who) - 1) * stride);
          }
#pragma unroll
          for (int u = 0; u < TOGETHER; u++) {
            if (!used[u]) continue;
            const unsigned word[4] = {raw[u].x, raw[u].y, raw[u].z, raw[u].w};
            float v[EACH];
            unpack<4>(word, v);
#pragma unroll
            for (int i = 0; i < EACH; i++) sum[i] += v[i];
          }
        }
        if (keep) {
#pragma unroll
          for (int i = 0; i < EACH; i++) kept[i] += sum[i];
        } else {
          unsigned word[4];
          pack<4>(sum, word);
          *reinterpret_cast<uint4*>(at + leader * stride) = make_uint4(word[0], word[1], word[2], word[3]);
        }
      }
      leads = leads && !(keep && lane == leader);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // sums that were written, for the copy engine
    __syncwarp();
#endif
    if (leads)
      Element::add_bulk(out + static_cast<long long>(key) * width + column,
                        shared + (stage * BATCH + lane) * stride, bytes);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    // The stage that is loaded next was added from in the round before: all but this round's reductions must have read.
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    __syncwarp();
    load(batch + (STAGES - 1) * gridDim.x, stage == 0 ? STAGES - 1 : stage - 1);
    key = next_key;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
#if AGGREGATE
  flush();
#endif
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
