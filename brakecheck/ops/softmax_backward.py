"""Softmax over rows, forward and backward."""

from __future__ import annotations

from typing import Any, Dict

from . import autograd
from .base import Case, Cost, Operator, Tolerance
from .make import Make

op = Operator(
    "softmax_backward", "softmax of each row and its gradient, bfloat16",
    cases=[
        Case.of(rows=3, columns=64),
        Case.of(rows=17, columns=1001),
        Case.of(rows=9, columns=520, pad=24),
        Case.of(rows=16384, columns=1024),
        Case.of(rows=4096, columns=8192),
        Case.of(rows=512, columns=131072),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    rows, columns, pad = case["rows"], case["columns"], case.get("pad", 0)
    return {
        "x": make.normal(rows, columns + pad, std=3.0, dtype="bfloat16")[:, :columns],
        "grad": make.normal(rows, columns, dtype="bfloat16"),
    }


def _plain(case: Case, x: Any) -> Any:
    exponential = (x - x.amax(1, keepdim=True).detach()).exp()
    return exponential / exponential.sum(1, keepdim=True)


def _ours(case: Case, x: Any) -> Any:
    from . import softmax

    return softmax(x)


autograd.reference(op, _plain)
autograd.implement(op, "torch", lambda case, x: x.softmax(1))
autograd.implement(op, "ours", _ours)


@op.cost
def _(case: Case) -> Cost:
    elements = case["rows"] * case["columns"]
    return Cost(flops=9 * elements, bytes=8 * elements)  # forward 5; y g, sum, subtract, scale


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(2.0**-6, "the gradient is made of outputs rounded to bfloat16, 2^-8 at worst, and rounded again")
