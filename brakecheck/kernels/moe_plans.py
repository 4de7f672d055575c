"""How the MoE kernels are launched for a shape, and what they compute in plain torch. Used by the catalogue (ops/) and
by the torch operators (moe.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Tuple

ROUTER_THREADS, MOST_EXPERTS, MOST_K = 512, 512, 16  # as in router.cu, and so are the next three lines
STATIC_SHARED = 20 << 10  # bytes at most, of router.cu
GROUP, MOST_BLOCKS = 16, 144
STATE_WORDS = 2 + (2 * MOST_BLOCKS // GROUP + MOST_BLOCKS) * MOST_EXPERTS // 2  # of 64 bits
BULK_STAGES, MOST_PART, BULK_BLOCKS_AN_SM = 3, 4096, 4  # as in moe_permute_bulk.cu; elements; best of 1 to 6 on an H200
UNPERMUTE_THREADS, UNROLLED = 256, (1, 2, 4, 6, 8)      # as in moe_unpermute.cu; k with an instantiation of its own
REDUCE_THREADS, MOST_REDUCED = 256, 8192                # as in router_reduce.cu; experts whose sums a block can hold
SCATTER_THREADS, PIECE_THREADS, SORTED_RUN = 128, 512, 64  # as in scatter_rows.cu and scatter_sorted.cu
SCATTER_STAGES, SCATTER_BATCH, SCATTER_PART = 3, 32, 512   # as in scatter_bulk.cu; part: bytes of a row at most
SCATTER_FORMS = ("plain", "aggregated", "vector", "runs", "bulk", "bulk-aggregated", "sorted")
FEW_ROWS = 1024
ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # dtype: ELEMENT of the scatter kernels


def blocks(items: int, each: int) -> int:
    """How many groups of `each` cover `items`: ceil(items / each)."""
    return -(-items // each)


@dataclass(frozen=True)
class RouterPlan:
    """How a shape is launched: the template instantiation, the blocks, tokens a block, and bytes of dynamic shared
    memory."""

    entry: str
    grid: int
    each: int
    shared: int


CTYPES = {"float32": "float", "bfloat16": "unsigned short"}


def router_plan(tokens: int, experts: int, k: int, dtype: str, bias: bool, sms: int) -> RouterPlan:
    """Up to 64 tokens stay in one block, which has no other to wait for. Otherwise as many blocks as there are SMs, of
    at least 16 tokens. dtype: float32 or bfloat16."""
    lanes = 8 if k <= 8 and experts <= 256 else 16
    held = next(h for h in (8, 16, 32) if lanes * h >= experts)
    a_warp = 32 // lanes
    each = tokens if tokens <= 64 else max(16, blocks(blocks(tokens, min(sms, MOST_BLOCKS)), a_warp) * a_warp)
    grid, sums = max(1, blocks(tokens, max(each, 1))), blocks(experts, 4) * 4
    shared = 4 * sums * (blocks(each, 32) + 2) + 8 * each + 6 * each * k
    return RouterPlan(f"router<{CTYPES[dtype]}, {int(bias)}, {lanes}, {held}>", grid, each, shared)


def router_one_plan(experts: int, k: int, dtype: str) -> Tuple[str, int, int]:
    """Instantiation, threads, and the logarithm of the segments' length: the longest that leaves at least k of them."""
    shift = next(s for s in (5, 4, 3, 2, 1, 0) if blocks(experts, 1 << s) >= k)
    return f"router_one<{CTYPES[dtype]}>", blocks(experts, 32) * 32, shift


def route(logits: Any, k: int, scoring: str, bias: Any, renormalise: bool, scale: float,
          index: Any = None) -> Dict[str, Any]:
    """What the kernel computes, in the precision of `logits`, with torch's operators: stable, so ties go to the lower
    expert. Without a bias experts are chosen by their logits, with one by score + bias. index: weigh and place these
    instead. Can be captured into a graph: nothing is read back to the host."""
    import torch

    bad, empty = logits.isnan().any(1, keepdim=True), (logits == -float("inf")).all(1, keepdim=True)
    known = logits.masked_fill(bad | empty, 0.0)  # all equal: experts 0 .. k-1
    score = (known.sigmoid() if scoring == "sigmoid" else known.softmax(1)).masked_fill(empty, 0.0)
    if index is None:
        by = known if bias is None else (score + bias.to(score.dtype)).masked_fill(bad, 0.0)
        index = by.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weight = score.gather(1, index)
    if renormalise:
        total = weight.sum(1, keepdim=True)
        weight = weight / total.masked_fill(total == 0, 1.0)  # chosen by their bias alone: all 0
    weight = (weight * scale).masked_fill(empty, 0.0).masked_fill(bad, float("nan"))
    flat = index.reshape(-1)
    counts = flat.new_zeros(logits.shape[1]).scatter_add_(0, flat, torch.ones_like(flat))
    rows = torch.arange(flat.numel(), device=flat.device)
    place = torch.empty_like(flat).scatter_(0, flat.sort(stable=True).indices, rows)
    return {
        "index": index.int(), "weight": weight, "place": place.reshape(index.shape).int(), "counts": counts.int(),
        "offsets": torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
    }


def reduce_grid(tokens: int, experts: int) -> Tuple[int, int]:
    """Blocks of router_reduce. A warp takes 32 tokens, a block 256, and more than 1024 blocks are a loop; where that
    leaves SMs without one, groups of 32 experts go to blocks of their own: up to 256 blocks, best of 1 to 8 groups on an
    H200."""
    across = min(blocks(tokens, REDUCE_THREADS), 1024)
    return across, min(blocks(experts, 32), max(1, 256 // across))


def part_of(width: int) -> int:
    """Elements of a row that moe_permute_bulk copies at a time: equal parts of at most 8 KiB, in steps of 16 bytes."""
    return blocks(blocks(width, blocks(width, MOST_PART)), 8) * 8


def unpermute_entry(k: int) -> str:
    return f"moe_unpermute<{k if k in UNROLLED else 0}>"


@dataclass(frozen=True)
class ScatterPlan:
    """A launch of scatter_rows.cu or scatter_bulk.cu (the entry has the source's name): last is the kernel's last
    argument, shared its dynamic shared memory in bytes."""

    source: str
    defines: Tuple[str, ...]
    threads: int
    grid: Tuple[int, int]
    last: int
    shared: int = 0

    @property
    def entry(self) -> str:
        return self.source.split(".")[0]


def scatter_columns(width: int, each: int = 8) -> int:
    """Threads a group, `each` columns a thread: the power of two that covers the width, from 8 to a block."""
    return min(SCATTER_THREADS, max(8, 1 << (blocks(width, each) - 1).bit_length()))


def scatter_run(n: int, width: int, size: int, rows: int) -> int:
    """Rows a group adds up before it writes: long runs save reductions of hot rows, and of all rows where they are few,
    short ones fill the GPU. size: bytes of an element."""
    if rows <= FEW_ROWS and n * width >= 1 << 26 and width * size >= 16 * SCATTER_THREADS:
        return 64 * size  # best of 32 to 256 for 8 to 1024 rows of 1024 and 4096 columns, bf16 and fp32, on an H200
    return 32 if n < 1 << 15 else 64


def scatter_defines(dtype: str, *more: str) -> Tuple[str, ...]:
    """bf16 is what the sources are compiled for without an ELEMENT."""
    return (*(() if dtype == "bfloat16" else (f"ELEMENT={ELEMENTS[dtype]}",)), *more)


def scatter_plan(form: str, n: int, width: int, rows: int, dtype: str, sms: int, run: int = 0) -> ScatterPlan:
    """How n x width are added to a table of `rows`, in one of SCATTER_FORMS but "sorted". plain: an atomic for each 32
    bits of each row; vector: a reduction for each 16 bytes; aggregated, runs: the same for sums of the equal indices
    among `run` rows; bulk: a reduction by the copy engine for each part of a row; bulk-aggregated: for sums of the
    equal indices among 32 rows and, of the index met most, of all rows of a warp."""
    size = 4 if dtype == "float32" else 2
    if form.startswith("bulk"):
        part = min(width, SCATTER_PART // size)
        shared, parts = SCATTER_STAGES * SCATTER_BATCH * part * size, blocks(width, part)
        resident = sms * min(32, (227 << 10) // (shared + (1 << 10) + 8 * SCATTER_STAGES))  # of compute capability 9.0
        grid = min(blocks(n, SCATTER_BATCH), max(1, resident // parts))
        defines = scatter_defines(dtype, f"AGGREGATE={int(form == 'bulk-aggregated')}")
        return ScatterPlan("scatter_bulk.cu", defines, 32, (grid, parts), part, shared)
    run = (run or scatter_run(n, width, size, rows)) if form in ("aggregated", "runs") else 1
    words = 4 if form in ("vector", "runs") else 1
    each = words * 4 // size
    columns = scatter_columns(width, each)
    defines = scatter_defines(dtype, f"RUN={run}", *(() if words == 4 else ("WORDS=1",)))
    grid = blocks(n, run * (SCATTER_THREADS // columns))
    return ScatterPlan("scatter_rows.cu", defines, SCATTER_THREADS, (grid, blocks(width // each, columns)), columns)


def permute_plain(x: Any, place: Any) -> Any:
    out = x.new_empty(place.numel(), x.shape[1])
    return out.index_copy_(0, place.reshape(-1).long(), x.repeat_interleave(place.shape[1], 0))


def unpermute_plain(y: Any, place: Any, weight: Any) -> Any:
    """Sums in float32, or in float64 for float64."""
    rows = y[place.reshape(-1).long()].reshape(*place.shape, y.shape[1])
    wide = rows if y.element_size() == 8 else rows.float()
    return (wide * weight[:, :, None].to(wide.dtype)).sum(1).to(y.dtype)
