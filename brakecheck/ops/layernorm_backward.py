"""LayerNorm, forward and backward."""

from __future__ import annotations

from typing import Any, Dict

from . import autograd
from .base import Case, Cost, Operator, Tolerance
from .make import Make

EPSILON = 1e-5

op = Operator(
    "layernorm_backward", "LayerNorm of each row and its gradients",
    cases=[
        Case.of(rows=3, columns=64, dtype="bfloat16"),
        Case.of(rows=37, columns=333, dtype="float32"),
        Case.of(rows=9, columns=520, dtype="bfloat16", pad=24),
        Case.of(rows=16384, columns=1024, dtype="bfloat16"),
        Case.of(rows=8192, columns=4096, dtype="bfloat16"),
        Case.of(rows=4096, columns=8192, dtype="bfloat16"),
        Case.of(rows=8192, columns=4096, dtype="float32"),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    rows, columns, pad, dtype = case["rows"], case["columns"], case.get("pad", 0), case["dtype"]
    return {
        "x": make.normal(rows, columns + pad, mean=0.5, dtype=dtype)[:, :columns],
        "weight": make.normal(columns, mean=1.0, std=0.2, dtype=dtype),
        "bias": make.normal(columns, std=0.2, dtype=dtype),
        "grad": make.normal(rows, columns, dtype=dtype),
    }


def _plain(case: Case, x: Any, weight: Any, bias: Any) -> Any:
    centred = x - x.mean(1, keepdim=True)
    return centred / ((centred**2).mean(1, keepdim=True) + EPSILON).sqrt() * weight + bias


def _torch(case: Case, x: Any, weight: Any, bias: Any) -> Any:
    import torch

    return torch.nn.functional.layer_norm(x, (case["columns"],), weight, bias, EPSILON)


def _ours(case: Case, x: Any, weight: Any, bias: Any) -> Any:
    from . import layer_norm

    return layer_norm(x, weight, bias, EPSILON)


autograd.reference(op, _plain)
autograd.implement(op, "torch", _torch)
autograd.implement(op, "ours", _ours)


@op.cost
def _(case: Case) -> Cost:
    elements, columns = case["rows"] * case["columns"], case["columns"]
    size = 4 if case["dtype"] == "float32" else 2
    return Cost(flops=19 * elements, bytes=size * (4 * elements + 4 * columns))  # 8 forward, 11 backward


@op.tolerance
def _(case: Case) -> Tolerance:
    if case["dtype"] == "float32":
        return Tolerance(1e-5, "float32 sums over rows and columns")
    return Tolerance(2.0**-7, "results are rounded to bfloat16, 2^-8 at worst, after sums in float32; the gradients of "
                              "weight and bias that torch adds up in bfloat16 on a CPU get worse with every row")
