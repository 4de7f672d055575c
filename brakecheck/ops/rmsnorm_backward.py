"""RMSNorm, forward and backward."""

from __future__ import annotations

from typing import Any, Dict

from . import autograd
from .base import Case, Cost, Operator, Tolerance
from .make import Make

EPSILON = 1e-6

op = Operator(
    "rmsnorm_backward", "RMSNorm of each row and its gradients, bfloat16",
    cases=[
        Case.of(rows=3, columns=64),
        Case.of(rows=37, columns=333),
        Case.of(rows=9, columns=520, pad=24),
        Case.of(rows=16384, columns=1024),
        Case.of(rows=8192, columns=4096),
        Case.of(rows=4096, columns=8192),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    rows, columns, pad = case["rows"], case["columns"], case.get("pad", 0)
    return {
        "x": make.normal(rows, columns + pad, dtype="bfloat16")[:, :columns],
        "weight": make.normal(columns, mean=1.0, std=0.2, dtype="bfloat16"),
        "grad": make.normal(rows, columns, dtype="bfloat16"),
    }


def _plain(case: Case, x: Any, weight: Any) -> Any:
    return x / ((x**2).mean(1, keepdim=True) + EPSILON).sqrt() * weight


def _torch(case: Case, x: Any, weight: Any) -> Any:
    import torch

    return torch.nn.functional.rms_norm(x, (case["columns"],), weight, EPSILON)


def _ours(case: Case, x: Any, weight: Any) -> Any:
    from . import rms_norm

    return rms_norm(x, weight, EPSILON)


autograd.reference(op, _plain)
autograd.implement(op, "torch", _torch)
autograd.implement(op, "ours", _ours)


@op.cost
def _(case: Case) -> Cost:
    elements, columns = case["rows"] * case["columns"], case["columns"]
    return Cost(flops=13 * elements, bytes=2 * (4 * elements + 2 * columns))  # 4 forward, 9 backward


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(2.0**-6, "results are rounded to bfloat16, 2^-8 at worst; unfused forms also round the normalised "
                              "row and the product with the weight")
