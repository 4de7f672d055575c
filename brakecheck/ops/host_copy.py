"""Copies from the host to the device: from pageable memory, from pinned memory, and read in place by a kernel."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator

from ..kernels import jit
from .base import Case, Cost, Operator, Tolerance, gpu_of
from .make import Make

op = Operator(
    "host_copy", "a copy from the host's memory to the device, 32-bit words",
    cases=[Case.of(words=1025), Case.of(words=1 << 18), Case.of(words=1 << 26)], timer="wall",
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    drawn = make.integers(case["words"], low=-(2**31), high=2**31)
    return {"source": drawn.cpu(), "device": make.device}


@op.reference
def _(case: Case, source: Any, device: Any) -> Dict[str, Any]:
    return {"out": source}


@op.cost
def _(case: Case) -> Cost:
    """What crosses the link. The device's memory is not what limits it."""
    return Cost(flops=0, bytes=4 * case["words"])


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(0.0, "values are moved")


@op.implementation("torch")
def _(case: Case, source: Any, device: Any) -> Dict[str, Any]:
    """From pageable memory."""
    return {"out": source.to(device, copy=True)}


@op.setup("pinned")
def _(case: Case, source: Any, device: Any) -> Iterator[Callable[[], Dict[str, Any]]]:
    gpu_of(device)
    pinned = source.pin_memory()
    yield lambda: {"out": pinned.to(device, non_blocking=True)}


@op.setup("zero-copy")
def _(case: Case, source: Any, device: Any) -> Iterator[Callable[[], Dict[str, Any]]]:
    """An elementwise kernel of torch reads the pinned memory where it lies."""
    index = gpu_of(device)
    pinned = source.pin_memory()
    seen = jit.tensor_at(pinned.data_ptr(), 4 * case["words"], index).view(source.dtype)
    yield lambda: {"out": seen.bitwise_or(0)}
