"""Gradient of an embedding table: a scatter-add of rows."""

from __future__ import annotations

from typing import Any, Dict, List

from ..kernels.moe_plans import SCATTER_PART, scatter_plan
from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, i32
from .make import Make
from .scatter_rows import SMS, draw_index

THREADS, RUN = 256, 32

op = Operator(
    "embedding_grad", "table[token] += grad, float32, skewed tokens",
    cases=[
        Case.of(tokens=7, rows=5, width=64),
        Case.of(tokens=301, rows=97, width=77),
        Case.of(tokens=16384, rows=50257, width=1024),
        Case.of(tokens=515, rows=7, width=136, indices="one"),
        Case.of(tokens=16384, rows=50257, width=1024, indices="uniform"),
        Case.of(tokens=16384, rows=50257, width=1024, indices="one"),
    ],
    claims=("A9",),
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    tokens, indices = case["tokens"], case.get("indices", "zipf")
    return {"grad": make.normal(tokens, case["width"]), "token": draw_index(make, tokens, case["rows"], indices)}


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


@op.implementation("ours")
def _(case: Case, grad: Any, token: Any) -> Dict[str, Any]:
    from . import embedding_gradient

    return {"out": embedding_gradient(grad, token, case["rows"])}


@op.implementation("ours-deterministic")
def _(case: Case, grad: Any, token: Any) -> Dict[str, Any]:
    from . import embedding_gradient

    return {"out": embedding_gradient(grad, token, case["rows"], deterministic=True)}


def _outputs(case: Case, grad: Any, token: Any) -> Dict[str, Any]:
    return {"out": grad.new_empty(case["rows"], case["width"])}


def _launches(case: Case, grad: Any, token: Any, out: Any) -> List[Launch]:
    return [Launch((case["tokens"], 1, 1), (THREADS, 1, 1), [grad, token, out, i32(case["width"])])]


def _adding(form: str) -> Any:
    def launches(case: Case, grad: Any, token: Any, out: Any) -> List[Launch]:
        plan = scatter_plan(form, case["tokens"], case["width"], case["rows"], "float32", SMS, RUN)
        arguments = [grad, token, out, i32(case["tokens"]), i32(case["width"]), i32(case["rows"]), i32(plan.last)]
        return [Launch((*plan.grid, 1), (plan.threads, 1, 1), arguments, dynamic_shared=plan.shared)]

    return launches


def _whole_vectors(case: Case) -> bool:
    return case["width"] % 4 == 0


op.cuda(CudaKernel("atomic", "embedding_grad.cu", "embedding_grad", THREADS, _outputs, _launches, zeroed=("out",),
                   deterministic=False))
for _form in ("aggregated", "vector", "runs", "bulk", "bulk-aggregated"):
    _plan = scatter_plan(_form, 1, SCATTER_PART // 4, 1, "float32", SMS, RUN)
    op.cuda(CudaKernel(_form, _plan.source, _plan.entry, _plan.threads, _outputs, _adding(_form),
                       dynamic_shared=_plan.shared, min_arch=90 if _form.startswith("bulk") else 80, zeroed=("out",),
                       deterministic=False, defines=_plan.defines, supports=_whole_vectors))
