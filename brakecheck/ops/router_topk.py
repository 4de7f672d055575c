"""Top-k router by warp ballot, with the guard for an empty ballot and without (claim B8)."""

from __future__ import annotations

from typing import Any, Dict, List

from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, blocks, i32
from .make import Make
from .topk import judge_choice

THREADS = 128

op = Operator(
    "router_topk", "the k best allowed experts of each token, and the softmax over them",
    cases=[
        Case.of(tokens=5, experts=8, k=2, allowed=1.0),
        Case.of(tokens=131, experts=60, k=6, allowed=1.0),
        Case.of(tokens=131, experts=60, k=6, allowed=0.05),  # most tokens have fewer than six experts left
        Case.of(tokens=8192, experts=64, k=8, allowed=1.0),
        Case.of(tokens=8192, experts=256, k=8, allowed=1.0),
        Case.of(tokens=8192, experts=256, k=8, allowed=0.02),
    ],
    claims=("B8",),
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    shape = (case["tokens"], case["experts"])
    return {"logits": make.normal(*shape), "allowed": (make.uniform(*shape) < case["allowed"]).byte()}


@op.reference
def _(case: Case, logits: Any, allowed: Any) -> Dict[str, Any]:
    """Where fewer than k experts are allowed, the rest of the row is (index = experts, weight = 0)."""
    masked = logits.double().masked_fill(allowed == 0, -float("inf"))
    best, index = masked.topk(case["k"], dim=1)
    none = best == -float("inf")
    weight = best.softmax(1).masked_fill(none, 0.0)  # a row of nothing but -inf would be NaN
    return {"index": index.int().masked_fill(none, case["experts"]), "weight": weight}


@op.cost
def _(case: Case) -> Cost:
    scores, chosen = case["tokens"] * case["experts"], case["tokens"] * case["k"]
    return Cost(flops=scores * case["k"] + 3 * chosen, bytes=5 * scores + 8 * chosen)


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(1e-5, "a softmax over k float32 values")


@op.comparison
def _(case: Case, inputs: Dict[str, Any], reference: Dict[str, Any], out: Dict[str, Any]) -> Dict[str, Any]:
    """Equal scores may be chosen in any order; where there is no expert left the index must say so (= experts)."""
    import torch

    allowed = torch.where(inputs["allowed"] == 0, -float("inf"), inputs["logits"].double())
    scores = torch.nn.functional.pad(allowed, (0, 1), value=-float("inf"))  # column `experts`: no expert
    return judge_choice(scores, reference, out, none=case["experts"], weight_error=1e-5)


@op.implementation("torch")
def _(case: Case, logits: Any, allowed: Any) -> Dict[str, Any]:
    best, index = logits.masked_fill(allowed == 0, -float("inf")).topk(case["k"], dim=1)
    none = best == -float("inf")
    return {"index": index.int().masked_fill(none, case["experts"]), "weight": best.softmax(1).masked_fill(none, 0.0)}


def _outputs(case: Case, logits: Any, allowed: Any) -> Dict[str, Any]:
    shape = (case["tokens"], case["k"])
    return {"index": allowed.new_empty(shape).int(), "weight": logits.new_empty(shape)}


def _launches(case: Case, logits: Any, allowed: Any, index: Any, weight: Any) -> List[Launch]:
    arguments = [logits, allowed, index, weight, i32(case["tokens"]), i32(case["experts"]), i32(case["k"])]
    return [Launch((blocks(case["tokens"], THREADS // 32), 1, 1), (THREADS, 1, 1), arguments)]


op.cuda(CudaKernel("guarded", "router_topk.cu", "router_topk", THREADS, _outputs, _launches, defines=("GUARD=1",)))
op.cuda(CudaKernel("unguarded", "router_topk.cu", "router_topk", THREADS, _outputs, _launches, defines=("GUARD=0",),
                   wrong_on=lambda case: case["allowed"] < 1))
