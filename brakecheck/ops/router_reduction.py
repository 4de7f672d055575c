"""Sum of router probabilities an expert, with inline PTX and as the compiler writes it (claim B12)."""

from __future__ import annotations

from typing import Any, Dict, List

from ..kernels.moe_plans import REDUCE_THREADS, reduce_grid
from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, i32
from .make import Make

op = Operator(
    "router_reduce", "sum over tokens of each expert's probability, float32",
    cases=[
        Case.of(tokens=33, experts=8),
        Case.of(tokens=517, experts=61),
        Case.of(tokens=65536, experts=64),
        Case.of(tokens=65536, experts=256),
    ],
    claims=("B12",),
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {"probability": make.normal(case["tokens"], case["experts"]).softmax(1)}


@op.reference
def _(case: Case, probability: Any) -> Dict[str, Any]:
    return {"load": probability.double().sum(0)}


@op.cost
def _(case: Case) -> Cost:
    elements = case["tokens"] * case["experts"]
    return Cost(flops=elements, bytes=4 * elements + 4 * case["experts"])


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(4 * case["tokens"] ** 0.5 * 2.0**-24 + 1e-6, "float32 sums in any order: 4 sqrt(n) roundings")


@op.implementation("torch")
def _(case: Case, probability: Any) -> Dict[str, Any]:
    return {"load": probability.sum(0)}


@op.implementation("ours")
def _(case: Case, probability: Any) -> Dict[str, Any]:
    from . import router_reduce

    return {"load": router_reduce(probability)}


def _outputs(case: Case, probability: Any) -> Dict[str, Any]:
    return {"load": probability.new_empty(case["experts"])}


def _launches(case: Case, probability: Any, load: Any) -> List[Launch]:
    arguments = [probability, load, i32(case["tokens"]), i32(case["experts"])]
    grid = (*reduce_grid(case["tokens"], case["experts"]), 1)
    return [Launch(grid, (REDUCE_THREADS, 1, 1), arguments, dynamic_shared=4 * case["experts"])]


for _name, _define in (("compiler", "INLINE_PTX=0"), ("inline-ptx", "INLINE_PTX=1")):
    op.cuda(CudaKernel(_name, "router_reduce.cu", "router_reduce", REDUCE_THREADS, _outputs, _launches,
                       dynamic_shared=1024, defines=(_define,), zeroed=("load",), deterministic=False))
