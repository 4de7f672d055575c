"""The experts' matrix products of a mixture of experts in one launch."""

from __future__ import annotations

from typing import Any, Dict, List

from .base import ROUNDING, Case, Cost, CudaKernel, Launch, Operator, Tolerance, blocks, i32
from .experts import grouped, one_by_one
from .make import Make

THREADS, TILE = 256, 128
SHARED = 3 * 2 * TILE * 128

op = Operator(
    "grouped_gemm", "rows sorted by expert times their expert's weights, bfloat16",
    cases=[
        Case.of(tokens=5, experts=3, n=72, k=40),
        Case.of(tokens=300, experts=7, n=77, k=51),
        Case.of(tokens=45, experts=7, n=72, k=56),
        Case.of(tokens=128, experts=8, n=4096, k=4096),
        Case.of(tokens=16384, experts=8, n=4096, k=2048),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    """offsets: expert e owns rows [offsets[e], offsets[e + 1]); the split is random and some experts may own none."""
    import torch

    count = torch.bincount(make.integers(case["tokens"], low=0, high=case["experts"]), minlength=case["experts"])
    return {
        "x": make.normal(case["tokens"], case["k"], dtype="bfloat16"),
        "w": make.normal(case["experts"], case["n"], case["k"], dtype="bfloat16"),
        "offsets": torch.nn.functional.pad(count.cumsum(0), (1, 0)).int(),
    }


@op.reference
def _(case: Case, x: Any, w: Any, offsets: Any) -> Dict[str, Any]:
    return {"out": one_by_one(x.double(), w.double(), offsets)}


@op.cost
def _(case: Case) -> Cost:
    tokens, experts, n, k = case["tokens"], case["experts"], case["n"], case["k"]
    used = min(tokens, experts)  # experts without a row need not be read
    return Cost(flops=2 * tokens * n * k, bytes=2 * (tokens * k + used * n * k + tokens * n) + 4 * experts)


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(2.0**-8, "rounding the result to bfloat16, 2^-8 at worst; the float32 sums add far less",
                     expected=ROUNDING * 2.0**-7)


@op.implementation("torch")
def _(case: Case, x: Any, w: Any, offsets: Any) -> Dict[str, Any]:
    return {"out": grouped(x, w, offsets)}


@op.implementation("loop")
def _(case: Case, x: Any, w: Any, offsets: Any) -> Dict[str, Any]:
    """One product an expert. It reads the offsets back to the host, so it cannot be captured into a graph."""
    return {"out": one_by_one(x, w, offsets)}


def _outputs(case: Case, x: Any, w: Any, offsets: Any) -> Dict[str, Any]:
    return {"out": x.new_empty(case["tokens"], case["n"])}


def _launches(case: Case, x: Any, w: Any, offsets: Any, out: Any) -> List[Launch]:
    grid = (blocks(case["n"], TILE), case["tokens"] // TILE + case["experts"], 1)
    arguments = [x, w, offsets, out, i32(case["experts"]), i32(case["n"]), i32(case["k"])]
    return [Launch(grid, (THREADS, 1, 1), arguments, dynamic_shared=SHARED)]


op.cuda(CudaKernel("mma", "grouped_gemm.cu", "grouped_gemm", THREADS, _outputs, _launches, dynamic_shared=SHARED))
