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
SCATTER_THREADS, PIECE_THREADS, SORTED_RUN = 128, 512, 64  # as in scatter_rows.cu and scatter_sorted.cu


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


def part_of(width: int) -> int:
    """Elements of a row that moe_permute_bulk copies at a time: equal parts of at most 8 KiB, in steps of 16 bytes."""
    return blocks(blocks(width, blocks(width, MOST_PART)), 8) * 8


def unpermute_entry(k: int) -> str:
    return f"moe_unpermute<{k if k in UNROLLED else 0}>"


def scatter_columns(width: int) -> int:
    """Threads a group, 8 columns each: the power of two that covers the width, from 8 to a block."""
    return min(SCATTER_THREADS, max(8, 1 << (blocks(width, 8) - 1).bit_length()))


def scatter_run(n: int) -> int:
    """Rows a group adds up before it writes: long runs save reductions of hot rows, short ones fill the GPU."""
    return 32 if n < 1 << 15 else 64


def permute_plain(x: Any, place: Any) -> Any:
    out = x.new_empty(place.numel(), x.shape[1])
    return out.index_copy_(0, place.reshape(-1).long(), x.repeat_interleave(place.shape[1], 0))


def unpermute_plain(y: Any, place: Any, weight: Any) -> Any:
    """Sums in float32, or in float64 for float64."""
    rows = y[place.reshape(-1).long()].reshape(*place.shape, y.shape[1])
    wide = rows if y.element_size() == 8 else rows.float()
    return (wide * weight[:, :, None].to(wide.dtype)).sum(1).to(y.dtype)
