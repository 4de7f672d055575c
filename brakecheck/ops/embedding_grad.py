"""Gradient of an embedding table: a scatter-add of rows."""

from __future__ import annotations

from typing import Any, Dict, List

from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, i32
from .make import Make

THREADS = 256

op = Operator(
    "embedding_grad", "table[token] += grad, float32, skewed tokens",
    cases=[
        Case.of(tokens=7, rows=5, width=64),
        Case.of(tokens=301, rows=97, width=77),
        Case.of(tokens=16384, rows=50257, width=1024),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {
        "grad": make.normal(case["tokens"], case["width"]),
        "token": make.zipf(case["tokens"], rows=case["rows"], dtype="int32"),
    }


@op.reference
def _(case: Case, grad: Any, token: Any) -> Dict[str, Any]:
    table = grad.double().new_zeros(case["rows"], case["width"])
    return {"out": table.index_add_(0, token.long(), grad.double())}


@op.cost
def _(case: Case) -> Cost:
    moved, table = case["tokens"] * case["width"], case["rows"] * case["width"]
    return Cost(flops=moved, bytes=4 * (moved + table + case["tokens"]))


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(4 * case["tokens"] ** 0.5 * 2.0**-24 + 1e-6, "float32 sums in any order: 4 sqrt(n) roundings")


@op.implementation("torch")
def _(case: Case, grad: Any, token: Any) -> Dict[str, Any]:
    return {"out": grad.new_zeros(case["rows"], case["width"]).index_add_(0, token, grad)}


@op.implementation("embedding")
def _(case: Case, grad: Any, token: Any) -> Dict[str, Any]:
    """What the backward pass of torch.nn.functional.embedding runs."""
    import torch

    return {"out": torch.ops.aten.embedding_dense_backward(grad, token, case["rows"], -1, False)}


def _outputs(case: Case, grad: Any, token: Any) -> Dict[str, Any]:
    return {"out": grad.new_empty(case["rows"], case["width"])}


def _launches(case: Case, grad: Any, token: Any, out: Any) -> List[Launch]:
    return [Launch((case["tokens"], 1, 1), (THREADS, 1, 1), [grad, token, out, i32(case["width"])])]


op.cuda(CudaKernel("atomic", "embedding_grad.cu", "embedding_grad", THREADS, _outputs, _launches, zeroed=("out",),
                   deterministic=False))
