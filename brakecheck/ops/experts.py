"""Products of rows that are sorted by expert with the weights of their expert, by the library."""

from __future__ import annotations

from typing import Any


def one_by_one(x: Any, w: Any, offsets: Any) -> Any:
    """x (tokens, k), w (experts, n, k), offsets (experts + 1): rows [offsets[e], offsets[e + 1]) times w[e]^T. Reads
    the offsets back to the host."""
    import torch

    ends = offsets.tolist()
    return torch.cat([x[ends[e]:ends[e + 1]] @ w[e].T for e in range(w.shape[0])])


def grouped(x: Any, w: Any, offsets: Any) -> Any:
    """The same in one call, where this torch has one (2.8) that takes these shapes: rows of whole 16 bytes."""
    import torch

    each = 16 // x.element_size()
    if not hasattr(torch, "_grouped_mm") or w.shape[1] % each or w.shape[2] % each:
        return one_by_one(x, w, offsets)
    # Of columns that lie together it wants a multiple of 16 bytes from every expert, and asserts that on the device.
    rows, weights = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, w))
    return torch._grouped_mm(rows, weights.transpose(1, 2), offs=offsets[1:])
