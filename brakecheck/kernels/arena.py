"""A graph-safe arena: one block of memory, handed out from the bottom up.

A step that makes the same requests in the same order gets the same addresses, which is what a captured graph needs,
and nothing here calls the driver. Blocks may be given back in any order; memory returns when all above it has been
given back, as it does at the end of a layer. One arena serves one stream: it does not wait for kernels that still read
a block that was given back, because on one stream the next writer comes after them.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

from ..model import BrakecheckError, UsageError

ALIGNMENT = 256  # bytes: what cudaMalloc promises, and what vector loads and TMA want


class Slots:
    """Equal blocks, taken and given back in any order: no memory is ever lost between them.

    allocate() gives the offset of a free block, the one given back last first (IndexError: none is left);
    free(offset) gives it back. Both are a list's own methods, the fastest that Python has."""

    __slots__ = ("allocate", "free", "size")

    def __init__(self, size: int, starts: Sequence[int]) -> None:
        free = list(reversed(starts))
        self.size, self.allocate, self.free = size, free.pop, free.append


class Arena:
    """size: bytes, a multiple of 256. make: bytes -> what holds them (default: a uint8 tensor on the current GPU).

    allocate and free deal in byte offsets into `memory`; tensor gives a tensor there."""

    __slots__ = ("memory", "size", "top", "peak", "_starts", "_free")

    def __init__(self, size: int, make: Optional[Any] = None) -> None:
        if size <= 0 or size % ALIGNMENT:
            raise UsageError(f"an arena of {size} bytes", "Arena", f"give a positive multiple of {ALIGNMENT}")
        if make is None:
            import torch

            def make(n: int) -> Any:
                return torch.empty(n, dtype=torch.uint8, device="cuda")

        self.memory, self.size, self.top, self.peak = make(size), size, 0, 0
        self._starts: List[int] = []   # offsets of the blocks below top, rising
        self._free: set = set()        # those given back while a block above them was in use

    def allocate(self, size: int) -> int:
        """Offset of a block of `size` bytes, aligned to 256. Raises BrakecheckError when the arena is full."""
        start = self.top
        top = start + ((size + 255) & -256 if size > 0 else 256)
        if top > self.size:
            raise BrakecheckError(f"{size} bytes do not fit: {self.size - start} of {self.size} are free", "Arena",
                                  "make the arena larger, or give blocks back earlier")
        self._starts.append(start)
        self.top = top
        return start

    def free(self, start: int) -> None:
        """Gives a block back. The caller passes each offset that allocate returned exactly once."""
        starts = self._starts
        if not starts:
            raise UsageError(f"no block at offset {start}", "Arena.free", "free each block once")
        if starts[-1] != start:
            if start not in starts or start in self._free:
                raise UsageError(f"no block at offset {start}", "Arena.free", "free each block once")
            self._free.add(start)
            return
        if self.top > self.peak:
            self.peak = self.top
        self.top = starts.pop()
        if self._free:
            while starts and starts[-1] in self._free:
                self.top = starts.pop()
                self._free.discard(self.top)

    def reset(self) -> None:
        """Gives everything back."""
        self.peak = max(self.peak, self.top)
        self._starts.clear()
        self._free.clear()
        self.top = 0

    def slots(self, size: int, count: int) -> Slots:
        """`count` blocks of `size` bytes, handed out one by one: for the weights of experts, which are all as large."""
        return Slots(size, [self.allocate(size) for _ in range(count)])

    def tensor(self, shape: Sequence[int], dtype: Any) -> Any:
        """A tensor t of a new block, with any content. Its offset is t.storage_offset() * t.element_size()."""
        import math

        size = math.prod(shape) * dtype.itemsize
        start = self.allocate(size)
        return self.memory[start:start + size].view(dtype).view(*shape)
