"""Memory and back, by torch, the CUDA driver and our arena (claim B11): one request, and the requests of a MoE layer.

No cost is declared: nothing moves, and an allocator's time should not grow with the size.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Tuple

from ..kernels import jit
from ..kernels.arena import ALIGNMENT, Arena
from .base import Calls, Case, Operator, Tolerance, gpu_of
from .make import Make

KEEP_ALL = 2**64 - 1
_RELEASE_THRESHOLD, _RESERVED = 4, 5  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, _RESERVED_MEM_CURRENT

op = Operator(
    "allocation", "blocks of memory and back: `times` requests one by one, or rounds of a MoE layer's requests at once",
    cases=[
        Case.of(bytes=512, times=101),
        Case.of(bytes=64 << 10, times=101),
        Case.of(bytes=1 << 20, times=101),
        Case.of(bytes=64 << 20, times=51),
        Case.of(bytes=1 << 30, times=11),
        Case.of(rounds=5, experts=64),
    ],
    claims=("B11",), timer="wall",
)


def expert_sizes(rounds: int, experts: int = 64) -> Iterator[List[int]]:
    """Requests of a layer, round by round: 1 to `experts` experts with 1 to 512 tokens each, an index and a weight a
    token, and activations of width 7168 in and out, 2048 inside, bfloat16."""
    generator = random.Random(20261201)
    for _ in range(rounds):
        tokens = [generator.randint(1, 512) for _ in range(generator.randint(1, experts))]
        yield [8 * t for t in tokens] + [2 * t * width for t in tokens for width in (7168, 4096, 2048, 7168)]


def requests(case: Case) -> List[List[int]]:
    """Sizes in bytes of the blocks that are held at once, round by round."""
    return list(expert_sizes(case["rounds"], case["experts"])) if "rounds" in case.params else (
        [[case["bytes"]]] * case["times"])


def orders(rounds: List[List[int]]) -> List[List[int]]:
    """In which order the blocks of each round go back: a random one."""
    generator = random.Random(1)
    return [generator.sample(range(len(sizes)), len(sizes)) for sizes in rounds]


@dataclass(frozen=True)
class Allocator:
    """allocate: bytes -> block. free: of a block; torch's goes back when nobody refers to it any more. view: block,
    bytes -> its memory as uint8. held: bytes taken from the device now, in use or not. end: called after each round."""

    allocate: Callable[[int], Any]
    free: Callable[[Any], Any]
    view: Callable[[Any, int], Any]
    held: Callable[[], int]
    end: Callable[[], Any] = lambda: None


Opened = Callable[[Any, int], ContextManager[Allocator]]  # device, most bytes that are held at once


@contextlib.contextmanager
def torch_allocator(device: Any, most: int) -> Iterator[Allocator]:
    import torch

    held = torch.cuda.memory_reserved if device.type == "cuda" else (lambda _: 0)
    before = held(device)
    yield Allocator(lambda size: torch.empty(size, dtype=torch.uint8, device=device), lambda block: None,
                    lambda block, size: block, lambda: held(device) - before)


@contextlib.contextmanager
def arena_allocator(device: Any, most: int) -> Iterator[Allocator]:
    """With room for twice as much as is asked for at once: blocks that go back out of order leave holes."""
    import torch

    size = -(-(2 * most + ALIGNMENT) // ALIGNMENT) * ALIGNMENT
    arena = Arena(size, lambda n: torch.empty(n, dtype=torch.uint8, device=device))
    yield Allocator(arena.allocate, arena.free, lambda start, size: arena.memory[start:start + size],
                    lambda: arena.peak)


@contextlib.contextmanager
def driver_allocator(device: Any, most: int) -> Iterator[Allocator]:
    """cuMemAlloc, which is what cudaMalloc calls."""
    index, pointer = gpu_of(device), ctypes.c_uint64()
    jit.bind(index)

    def allocate(size: int) -> int:
        jit.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def free(address: int) -> None:
        jit.call("cuMemFree_v2", ctypes.c_uint64(address))

    yield Allocator(allocate, free, lambda address, size: jit.tensor_at(address, size, index), lambda: 0)


def pool_allocator(warm: bool) -> Opened:
    """The device's default pool, ordered by the stream. warm: it keeps what goes back; else all of it goes back to the
    device when the stream is waited for, at the end of each round."""

    @contextlib.contextmanager
    def opened(device: Any, most: int) -> Iterator[Allocator]:
        import torch

        index, pointer, pool = gpu_of(device), ctypes.c_uint64(), ctypes.c_void_p()
        jit.bind(index)
        jit.call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), index)
        stream = ctypes.c_void_p(torch.cuda.current_stream(index).cuda_stream)
        number = ctypes.c_uint64()
        jit.call("cuMemPoolGetAttribute", pool, _RELEASE_THRESHOLD, ctypes.byref(number))
        usual = number.value

        def keep(threshold: int) -> None:
            jit.call("cuMemPoolSetAttribute", pool, _RELEASE_THRESHOLD, ctypes.byref(ctypes.c_uint64(threshold)))

        def allocate(size: int) -> int:
            jit.call("cuMemAllocAsync", ctypes.byref(pointer), ctypes.c_size_t(size), stream)
            return pointer.value

        def free(address: int) -> None:
            jit.call("cuMemFreeAsync", ctypes.c_uint64(address), stream)

        def held() -> int:
            torch.cuda.synchronize(index)
            jit.call("cuMemPoolGetAttribute", pool, _RESERVED, ctypes.byref(number))
            return number.value

        keep(KEEP_ALL if warm else 0)
        try:
            yield Allocator(allocate, free, lambda address, size: jit.tensor_at(address, size, index), held,
                            (lambda: None) if warm else (lambda: torch.cuda.synchronize(index)))
        finally:
            torch.cuda.synchronize(index)
            keep(usual)
            jit.call("cuMemPoolTrimTo", pool, ctypes.c_size_t(0))

    return opened


ALLOCATORS: Dict[str, Opened] = {
    "torch": torch_allocator, "cuda-malloc": driver_allocator, "pool-cold": pool_allocator(False),
    "pool": pool_allocator(True), "arena": arena_allocator,
}


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    """values: what is written into each block, to see whether it is there and its own."""
    return {"values": make.integers(sum(map(len, requests(case))), low=0, high=256, dtype="uint8"),
            "device": make.device}


@op.reference
def _(case: Case, values: Any, device: Any) -> Dict[str, Any]:
    """Least and largest byte of each block, after all blocks of its round were written."""
    return {"held": values.int()[:, None].expand(-1, 2)}


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(0.0, "a block holds what was written into it")


def _timed(case: Case, a: Allocator) -> Callable[[], Dict[str, Any]]:
    allocate, free, end = a.allocate, a.free, a.end

    def singles() -> Dict[str, Any]:
        for _ in turns:
            free(allocate(size))
            end()
        return {}

    def together() -> Dict[str, Any]:
        for sizes, order in plan:
            blocks = [allocate(n) for n in sizes]
            for i in order:
                free(blocks[i])
                blocks[i] = None
            end()
        return {}

    rounds = requests(case)
    if "rounds" not in case.params:
        size, turns = case["bytes"], range(case["times"])
        return singles
    plan: List[Tuple[List[int], List[int]]] = list(zip(rounds, orders(rounds)))
    return together


def _checked(case: Case, a: Allocator, values: Any) -> Callable[[], Dict[str, Any]]:
    def checked() -> Dict[str, Any]:
        import torch

        rest, found = values.tolist(), []
        for sizes in requests(case):
            blocks = [a.allocate(n) for n in sizes]
            for block, n in zip(blocks, sizes):
                a.view(block, n).fill_(rest.pop(0))
            found += [torch.stack([x.min(), x.max()]) for x in map(a.view, blocks, sizes)]
            while blocks:
                a.free(blocks.pop())
            a.end()
        return {"held": torch.stack(found).int()}

    return checked


def _register(name: str, opened: Opened) -> None:
    @op.setup(name)
    def _(case: Case, values: Any, device: Any) -> Iterator[Calls]:
        with opened(device, max(map(sum, requests(case)))) as a:
            yield Calls(_timed(case, a), checked=_checked(case, a, values))


for _name, _opened in ALLOCATORS.items():
    _register(_name, _opened)
