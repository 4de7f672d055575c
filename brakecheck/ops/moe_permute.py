"""Rows of tokens copied to the places of their experts."""

from __future__ import annotations

from typing import Any, Dict, List

from ..kernels.moe_plans import BULK_BLOCKS_AN_SM, BULK_STAGES, MOST_PART, part_of, permute_plain
from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, blocks, i32
from .make import Make

THREADS, SMS = 256, 132

op = Operator(
    "moe_permute", "each token's row to its k places in expert order, bfloat16",
    cases=[
        Case.of(tokens=5, width=64, experts=4, k=1),
        Case.of(tokens=33, width=77, experts=8, k=3),
        Case.of(tokens=8192, width=4096, experts=8, k=2),
        Case.of(tokens=4096, width=7168, experts=256, k=8),
        Case.of(tokens=8192, width=7168, experts=256, k=8),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    """place[t, i]: the row of the output that token t's i-th copy goes to, when copies are sorted by expert."""
    expert = make.integers(case["tokens"] * case["k"], low=0, high=case["experts"])
    place = expert.sort(stable=True).indices.argsort().int().reshape(case["tokens"], case["k"])
    return {"x": make.normal(case["tokens"], case["width"], dtype="bfloat16"), "place": place}


@op.reference
def _(case: Case, x: Any, place: Any) -> Dict[str, Any]:
    out = x.double().new_empty(case["tokens"] * case["k"], case["width"])
    for i in range(case["k"]):
        out[place[:, i].long()] = x.double()
    return {"out": out}


@op.cost
def _(case: Case) -> Cost:
    tokens, width, k = case["tokens"], case["width"], case["k"]
    return Cost(flops=0, bytes=2 * tokens * width * (1 + k) + 4 * tokens * k)


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(0.0, "values are moved, not computed")


@op.implementation("torch")
def _(case: Case, x: Any, place: Any) -> Dict[str, Any]:
    return {"out": permute_plain(x, place)}


@op.implementation("ours")
def _(case: Case, x: Any, place: Any) -> Dict[str, Any]:
    from . import permute

    return {"out": permute(x, place)}


def _outputs(case: Case, x: Any, place: Any) -> Dict[str, Any]:
    return {"out": x.new_empty(case["tokens"] * case["k"], case["width"])}


def _launches(case: Case, x: Any, place: Any, out: Any) -> List[Launch]:
    arguments = [x, place, out, i32(case["tokens"]), i32(case["width"]), i32(case["k"])]
    return [Launch((blocks(case["tokens"], THREADS // 32), 1, 1), (THREADS, 1, 1), arguments)]


def _bulk_launches(case: Case, x: Any, place: Any, out: Any) -> List[Launch]:
    tokens, width, k = case["tokens"], case["width"], case["k"]
    part = part_of(width)
    grid = min(tokens * blocks(width, part), BULK_BLOCKS_AN_SM * SMS)
    arguments = [x, place, out, i32(tokens), i32(width), i32(k), i32(part)]
    return [Launch((grid, 1, 1), (32, 1, 1), arguments, dynamic_shared=2 * BULK_STAGES * part)]


op.cuda(CudaKernel("bulk", "moe_permute_bulk.cu", "moe_permute_bulk", 32, _outputs, _bulk_launches,
                   dynamic_shared=2 * BULK_STAGES * MOST_PART, min_arch=90,
                   supports=lambda case: case["width"] % 8 == 0))
op.cuda(CudaKernel("cuda", "moe_permute.cu", "moe_permute", THREADS, _outputs, _launches))
