"""Weighted sum of each token's k rows, gathered from expert order (the inverse of moe_permute)."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

from ..kernels.moe_plans import UNPERMUTE_THREADS, unpermute_entry, unpermute_plain
from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, blocks, i32
from .make import Make

op = Operator(
    "moe_unpermute", "out[t] = sum over i of weight[t, i] y[place[t, i]], bfloat16",
    cases=[
        Case.of(tokens=5, width=64, k=1),
        Case.of(tokens=33, width=72, k=3),
        Case.of(tokens=61, width=136, k=8),
        Case.of(tokens=8192, width=4096, k=2),
        Case.of(tokens=4096, width=7168, k=8),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    copies = case["tokens"] * case["k"]
    return {
        "y": make.normal(copies, case["width"], dtype="bfloat16"),
        "place": make.uniform(copies).argsort().int().reshape(case["tokens"], case["k"]),
        "weight": make.uniform(case["tokens"], case["k"]),
    }


@op.reference
def _(case: Case, y: Any, place: Any, weight: Any) -> Dict[str, Any]:
    out = y.new_zeros(case["tokens"], case["width"]).double()
    for i in range(case["k"]):
        out += weight[:, i, None].double() * y[place[:, i].long()].double()
    return {"out": out}


@op.cost
def _(case: Case) -> Cost:
    tokens, width, k = case["tokens"], case["width"], case["k"]
    return Cost(flops=2 * tokens * width * k, bytes=2 * tokens * width * (1 + k) + 8 * tokens * k)


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(2.0**-8, "one rounding to bfloat16 (2^-9 at most), sums in float32")


@op.implementation("torch")
def _(case: Case, y: Any, place: Any, weight: Any) -> Dict[str, Any]:
    return {"out": unpermute_plain(y, place, weight)}


@op.implementation("ours")
def _(case: Case, y: Any, place: Any, weight: Any) -> Dict[str, Any]:
    from . import unpermute

    return {"out": unpermute(y, place, weight)}


def _outputs(case: Case, y: Any, place: Any, weight: Any) -> Dict[str, Any]:
    return {"out": y.new_empty(case["tokens"], case["width"])}


def _launches(case: Case, y: Any, place: Any, weight: Any, out: Any) -> List[Launch]:
    tokens, width, k = case["tokens"], case["width"], case["k"]
    arguments = [y, place, weight, out, i32(tokens), i32(width), i32(k)]
    grid = (blocks(tokens * width // 8, UNPERMUTE_THREADS), 1, 1)
    return [Launch(grid, (UNPERMUTE_THREADS, 1, 1), arguments, entry=unpermute_entry(k))]


def _runs(entry: str) -> Callable[[Case], bool]:
    return lambda case: unpermute_entry(case["k"]) == entry


for _entry in dict.fromkeys(unpermute_entry(c["k"]) for c in op.cases):
    _name = "any-k" if _entry == unpermute_entry(0) else f"k={_entry[14:-1]}"
    op.cuda(CudaKernel(_name, "moe_unpermute.cu", _entry, UNPERMUTE_THREADS, _outputs, _launches,
                       supports=_runs(_entry)))
