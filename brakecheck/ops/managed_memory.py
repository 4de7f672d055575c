"""Sparse access to a table that lies on the host, as experts that do not fit the GPU do (claim B6): managed memory with
and without advice and prefetch, beside pinned memory that is read in place or copied, and plain torch.

read: "first" times calls that find every chunk on the host, because the host writes the chosen ones again before each
of them; "again" times calls that find what the call before left.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Callable, Dict, Iterator, List

from ..kernels import jit
from .base import Calls, Case, Cost, Missing, Operator, Tolerance, gpu_of
from .make import Make

SPARE = 4  # the table may take this part of the device's free memory: beyond it managed memory thrashes for minutes
HOST = -1  # CU_DEVICE_CPU
READ_MOSTLY, PREFERRED_LOCATION, ACCESSED_BY = 1, 3, 5  # CU_MEM_ADVISE_SET_...

op = Operator(
    "managed_memory", "32-bit sums of the chosen chunks of a table on the host, each of `bytes` bytes",
    cases=[
        Case.of(chunks=7, chosen=3, bytes=4096, read="first"),
        Case.of(chunks=9, chosen=5, bytes=4096, read="again"),
        Case.of(chunks=64, chosen=16, bytes=4 << 20, read="first"),
        Case.of(chunks=64, chosen=16, bytes=4 << 20, read="again"),
    ],
    claims=("B6",), timer="alone",
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    """table: on the host. chosen: indices of chunks, on the device, each once."""
    table = make.integers(case["chunks"] * case["bytes"] // 4, low=-(2**31), high=2**31).cpu()
    return {"table": table, "chosen": make.uniform(case["chunks"]).argsort()[:case["chosen"]].int()}


@op.reference
def _(case: Case, table: Any, chosen: Any) -> Dict[str, Any]:
    import torch

    return {"sums": table.view(case["chunks"], -1)[chosen.cpu().long()].sum(1, dtype=torch.int32)}


@op.cost
def _(case: Case) -> Cost:
    words = case["chosen"] * case["bytes"] // 4
    return Cost(flops=words, bytes=4 * words + 4 * case["chosen"])


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(0.0, "integer sums modulo 2^32")


@op.implementation("torch")
def _(case: Case, table: Any, chosen: Any) -> Dict[str, Any]:
    """The host gathers, and copies what it gathered."""
    import torch

    picked = table.view(case["chunks"], -1)[chosen.cpu().long()]
    return {"sums": picked.to(chosen.device).sum(1, dtype=torch.int32)}


def _sums(case: Case, address: int, chosen: Any) -> Dict[str, Any]:
    """The chunks read where they lie."""
    import torch

    device = gpu_of(chosen.device)
    kernel = jit.kernel("micro/chunk_sums.cu", "chunk_sums", device, (256, 1))
    sums = torch.zeros(len(chosen), dtype=torch.int32, device=chosen.device)
    kernel((64, 16), [ctypes.c_uint64(address), chosen, sums, len(chosen), case["bytes"] // 16],
           torch.cuda.current_stream(device).cuda_stream)
    return {"sums": sums}


@op.setup("pinned")
def _(case: Case, table: Any, chosen: Any) -> Iterator[Callable[[], Dict[str, Any]]]:
    gpu_of(chosen.device)
    pinned = table.pin_memory()
    yield lambda: _sums(case, pinned.data_ptr(), chosen)


@op.setup("pinned-copy")
def _(case: Case, table: Any, chosen: Any) -> Iterator[Callable[[], Dict[str, Any]]]:
    """Each chosen chunk is copied from pinned memory."""
    import torch

    gpu_of(chosen.device)
    pinned, picked = table.pin_memory().view(case["chunks"], -1), chosen.tolist()
    staged = torch.empty(len(picked), pinned.shape[1], dtype=table.dtype, device=chosen.device)
    every = torch.arange(len(picked), dtype=torch.int32, device=chosen.device)

    def call() -> Dict[str, Any]:
        for to, c in zip(staged, picked):
            to.copy_(pinned[c], non_blocking=True)
        return _sums(case, staged.data_ptr(), every)

    yield call


@contextlib.contextmanager
def managed(table: Any, device: int) -> Iterator[int]:
    """The address of managed memory that the host has written the table to. Raises Missing where the device has little
    memory free."""
    import torch

    size = table.numel() * table.element_size()
    free, _ = torch.cuda.mem_get_info(device)
    if size * SPARE > free:
        raise Missing(f"managed memory is tried with a {SPARE}th of the free memory at most: {size} of {free} bytes")
    jit.bind(device)
    address = ctypes.c_uint64()
    jit.call("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(size), 1)  # CU_MEM_ATTACH_GLOBAL
    try:
        ctypes.memmove(address.value, table.data_ptr(), size)
        yield address.value
    finally:
        torch.cuda.synchronize(device)
        jit.call("cuMemFree_v2", address)


def _managed(advice: Callable[[int], List[Any]], prefetch: bool = False) -> Callable[..., Iterator[Calls]]:
    """advice: device -> (advice, where) of the whole table."""

    def opened(case: Case, table: Any, chosen: Any) -> Iterator[Calls]:
        import torch

        device, chunk, picked = gpu_of(chosen.device), case["bytes"], chosen.tolist()
        with managed(table, device) as address:
            for what, where in advice(device):
                jit.call("cuMemAdvise", ctypes.c_uint64(address), ctypes.c_size_t(4 * table.numel()), what, where)

            def call() -> Dict[str, Any]:
                stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
                for c in picked if prefetch else ():
                    jit.call("cuMemPrefetchAsync", ctypes.c_uint64(address + c * chunk), ctypes.c_size_t(chunk), device,
                             stream)
                return _sums(case, address, chosen)

            def rewrite() -> None:
                for c in picked if case["read"] == "first" else ():
                    ctypes.memmove(address + c * chunk, table.data_ptr() + c * chunk, chunk)

            yield Calls(call, before=rewrite)

    return opened


op.setup("managed")(_managed(lambda device: []))
op.setup("read-mostly")(_managed(lambda device: [(READ_MOSTLY, device)]))
op.setup("mapped")(_managed(lambda device: [(PREFERRED_LOCATION, HOST), (ACCESSED_BY, device)]))
op.setup("prefetch")(_managed(lambda device: [], prefetch=True))
