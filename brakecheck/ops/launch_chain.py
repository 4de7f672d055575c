"""A chain of small kernels, each adding to what the one before it wrote: what launching costs (claim A3)."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator

from ..kernels import jit
from .base import Case, Cost, Missing, Operator, Tolerance, gpu_of
from .make import Make

THREADS = 128  # of each block of our kernels, which add to one value a block

op = Operator(
    "launch_chain", "x + 1 + 1 + ..., a kernel each, float32",
    cases=[Case.of(kernels=7, n=33), Case.of(kernels=100, n=132), Case.of(kernels=1000, n=132)],
    claims=("A3",), timer="wall",
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {"x": make.integers(case["n"], low=-1000, high=1000, dtype="float32")}


@op.reference
def _(case: Case, x: Any) -> Dict[str, Any]:
    return {"out": x.double() + case["kernels"]}


@op.cost
def _(case: Case) -> Cost:
    return Cost(flops=case["kernels"] * case["n"], bytes=8 * case["n"])


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(0.0, "whole numbers")


def _torch_chain(case: Case, out: Any) -> None:
    for _ in range(case["kernels"]):
        out.add_(1.0)


def driver_chain(dependent: bool) -> Callable[[Case, Any], None]:
    """Our kernel, launched through the driver. dependent: each but the first by programmatic dependent launch."""

    def chain(case: Case, out: Any) -> None:
        import torch

        device = gpu_of(out.device)
        if dependent and torch.cuda.get_device_capability(device) < (9, 0):
            raise Missing("programmatic dependent launch starts with compute capability 9.0")
        kernel = jit.kernel("micro/chain.cu", "small", device, (THREADS, 1))
        stream, grid, arguments = torch.cuda.current_stream(device).cuda_stream, (case["n"], 1), [out]
        kernel(grid, arguments, stream)
        if dependent:
            kernel = jit.kernel("micro/chain.cu", "small_dependent", device, (THREADS, 1), dependent=True)
        for _ in range(case["kernels"] - 1):
            kernel(grid, arguments, stream)

    return chain


def _eager(chain: Callable[[Case, Any], None]) -> Callable[..., Dict[str, Any]]:
    def call(case: Case, x: Any) -> Dict[str, Any]:
        out = x.clone()
        chain(case, out)
        return {"out": out}

    return call


def _graph(chain: Callable[[Case, Any], None]) -> Callable[..., Iterator[Callable[[], Dict[str, Any]]]]:
    def captured(case: Case, x: Any) -> Iterator[Callable[[], Dict[str, Any]]]:
        import torch

        stream = torch.cuda.Stream(gpu_of(x.device))
        out, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            chain(case, out)  # what is compiled and loaded at first use cannot be while a graph is captured
        with torch.cuda.graph(graph, stream=stream):
            out.copy_(x)
            chain(case, out)
        out.fill_(float("nan"))

        def call() -> Dict[str, Any]:
            graph.replay()
            return {"out": out}

        yield call

    return captured


op.implementation("torch")(_eager(_torch_chain))
op.implementation("driver")(_eager(driver_chain(False)))
op.setup("torch-graph")(_graph(_torch_chain))
op.setup("graph")(_graph(driver_chain(False)))
op.setup("graph-dependent")(_graph(driver_chain(True)))
