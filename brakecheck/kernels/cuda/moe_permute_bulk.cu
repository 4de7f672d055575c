// Copies each token's row to the places of its experts with the copy engine: a row (or a part of it) is read once into
// shared memory and leaves through k bulk stores, so no value passes through a register. sm_90 and newer.
#include "tma.cuh"

constexpr int THREADS = 32;
constexpr int STAGES = 3;

// x: tokens x width. place: tokens x k, the output row of each copy (a permutation of 0 .. tokens k). out: tokens k x
// width. Rows are handled in parts of `part` elements; width and part are multiples of 8. Dynamic shared memory:
// 2 STAGES part bytes. One warp a block, which walks over the parts of all tokens.
extern "C" __global__ void __launch_bounds__(THREADS)
    moe_permute_bulk(const bf16* __restrict__ x, const int* __restrict__ place, bf16* __restrict__ out, int tokens,
                     int width, int k, int part) {
  extern __shared__ __align__(128) unsigned char buffer[];
  __shared__ unsigned long long full[STAGES];
  const int lane = lane_id();
  const int parts = (width + part - 1) / part, items = tokens * parts;  // at most 2^31 - 1, the caller sees to it
  const unsigned shared = shared_address(buffer);
  if (lane == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(shared_address(full + s), 1);
    barrier_init_done();
  }
  __syncwarp();

  auto load = [&](int item, int stage) {
    if (item >= items) return;
    const int column = item % parts * part, bytes = 2 * min(part, width - column);
    const bf16* from = x + static_cast<long long>(item / parts) * width + column;
    const unsigned barrier = shared_address(full + stage);
    barrier_expect(barrier, bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared + stage * part * 2),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
  };
  auto place_of = [&](int item) {
    return item < items && lane < k ? place[static_cast<long long>(item / parts) * k + lane] : 0;
  };
  if (lane == 0)
    for (int s = 0; s < STAGES - 1; s++) load(blockIdx.x + s * gridDim.x, s);

  int stage = 0, parity = 0, to = place_of(blockIdx.x);
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int next_to = place_of(item + gridDim.x);
    const int column = item % parts * part, bytes = 2 * min(part, width - column);
    barrier_wait(shared_address(full + stage), parity);
    for (int i = lane; i < k; i += 32) {
      const int row = i < 32 ? to : place[static_cast<long long>(item / parts) * k + i];
      bf16* at = out + static_cast<long long>(row) * width + column;
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(at),
                   "r"(shared + stage * part * 2), "r"(bytes)
                   : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    // The stage that is loaded next was stored from in the round before: all but this round's stores must have read.
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    __syncwarp();
    const int free = stage == 0 ? STAGES - 1 : stage - 1;
    if (lane == 0) load(item + (STAGES - 1) * gridDim.x, free);
    to = next_to;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
