"""A graph-safe arena: one block of memory, handed out from the bottom up.

A step that makes the same requests in the same order gets the same addresses, which is what a captured graph needs,
and nothing here calls the driver. Blocks may be given back in any order; memory returns when all above it has been
given back, as it does at the end of a layer. One arena serves one stream: it does not wait for kernels that still read
a block that was given back, because on one stream the next writer comes after them.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

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

    allocate(size) gives the byte offset into `memory` of a block of `size` bytes, aligned to 256 (BrakecheckError: the
    arena is full). free(offset) gives it back (UsageError: no such block; the caller passes each offset that allocate
    returned exactly once). reset() gives everything back. tensor gives a tensor of a new block. top: bytes below which
    all blocks lie; peak: the highest top so far."""

    __slots__ = ("memory", "size", "allocate", "free", "reset", "_levels")

    def __init__(self, size: int, make: Optional[Any] = None) -> None:
        if size <= 0 or size % ALIGNMENT:
            raise UsageError(f"an arena of {size} bytes", "Arena", f"give a positive multiple of {ALIGNMENT}")
        if make is None:
            import torch

            def make(n: int) -> Any:
                return torch.empty(n, dtype=torch.uint8, device="cuda")

        self.memory, self.size = make(size), size
        self.allocate, self.free, self.reset, self._levels = _stack(size)

    @property
    def top(self) -> int:
        return self._levels()[0]

    @property
    def peak(self) -> int:
        return self._levels()[1]

    def slots(self, size: int, count: int) -> Slots:
        """`count` blocks of `size` bytes, handed out one by one: for the weights of experts, which are all as large."""
        return Slots(size, [self.allocate(size) for _ in range(count)])

    def tensor(self, shape: Sequence[int], dtype: Any) -> Any:
        """A tensor t of a new block, with any content. Its offset is t.storage_offset() * t.element_size()."""
        import math

        size = math.prod(shape) * dtype.itemsize
        start = self.allocate(size)
        return self.memory[start:start + size].view(dtype).view(*shape)


def _stack(size: int) -> Tuple[Callable[[int], int], Callable[[int], None], Callable[[], None],
                               Callable[[], Tuple[int, int]]]:
    """allocate, free, reset and (top, peak) of an arena. Functions over shared variables, since attributes of an object
    would take a quarter of their time; what is rare is left to functions of its own."""
    # Offsets of the blocks in use, rising, above one entry that equals no offset. A block that is given back while
    # others lie above it falls to the next of these: its entry becomes (offset,), and lows[offset] is where all begins.
    starts: List[Any] = [()]
    lows: Dict[int, int] = {}
    push, pop = starts.append, starts.pop
    top = peak = 0

    def allocate(size: int) -> int:
        nonlocal top
        start = top
        end = start + (size + 255 & -256)
        if start < end <= peak:
            push(start)
            top = end
            return start
        return rise(size)

    def rise(wanted: int) -> int:
        nonlocal top, peak
        start = top
        end = start + (wanted + 255 & -256 if wanted > 0 else 256)
        if end > size:
            raise BrakecheckError(f"{wanted} bytes do not fit: {size - start} of {size} are free", "Arena",
                                  "make the arena larger, or give blocks back earlier")
        push(start)
        top, peak = end, max(peak, end)
        return start

    def free(start: int) -> None:
        nonlocal top
        last = pop()
        if last == start:
            top = start
        else:
            push(last)
            join(start)

    def join(start: int) -> None:
        nonlocal top
        entry = (start,) if start in lows else start
        if starts[-1] == entry:
            pop()
            top = lows.pop(start)
            return
        try:
            at = starts.index(entry)
        except ValueError:
            raise UsageError(f"no block at offset {start}", "Arena.free", "free each block once") from None
        del starts[at]
        above = starts[at]
        if not isinstance(above, tuple):
            starts[at] = (above,)
        lows[starts[at][0]] = lows.pop(start, start)

    def reset() -> None:
        nonlocal top
        del starts[1:]
        lows.clear()
        top = 0

    return allocate, free, reset, lambda: (top, peak)
