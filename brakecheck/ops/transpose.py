"""Matrix transpose through shared memory, with bank conflicts and without (claim B9)."""

from __future__ import annotations

from typing import Any, Dict, List

from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, blocks, i32
from .make import Make

SIDE, ROWS = 32, 8

op = Operator(
    "transpose", "transpose of a float32 matrix",
    cases=[
        Case.of(rows=32, columns=32),
        Case.of(rows=37, columns=101),
        Case.of(rows=4096, columns=4096),
        Case.of(rows=8192, columns=8192),
    ],
    claims=("B9",),
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {"x": make.normal(case["rows"], case["columns"])}


@op.reference
def _(case: Case, x: Any) -> Dict[str, Any]:
    return {"out": x.double().T}


@op.cost
def _(case: Case) -> Cost:
    elements = case["rows"] * case["columns"]
    return Cost(flops=0, bytes=8 * elements)


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(0.0, "values are moved, not computed")


@op.implementation("torch")
def _(case: Case, x: Any) -> Dict[str, Any]:
    return {"out": x.T.contiguous()}


def _outputs(case: Case, x: Any) -> Dict[str, Any]:
    return {"out": x.new_empty(case["columns"], case["rows"])}


def _launches(case: Case, x: Any, out: Any) -> List[Launch]:
    grid = (blocks(case["columns"], SIDE), blocks(case["rows"], SIDE), 1)
    return [Launch(grid, (SIDE, ROWS, 1), [x, out, i32(case["rows"]), i32(case["columns"])])]


for _name, _define in (("padded", "PAD=1"), ("conflicts", "PAD=0")):
    op.cuda(CudaKernel(_name, "transpose.cu", "transpose", SIDE * ROWS, _outputs, _launches, defines=(_define,)))
