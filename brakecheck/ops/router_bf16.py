"""Top-k router whose softmax is rounded to bfloat16 before the choice: rounding makes ties of unequal scores."""

from __future__ import annotations

from typing import Any, Dict

from .base import Case, Cost, Operator, Tolerance
from .make import Make
from .topk import judge_choice

EPSILON = 2.0**-7  # of bfloat16: scores that round to the same value differ by at most this share

op = Operator(
    "router_bf16", "the k best of softmax(logits) rounded to bfloat16; equal weights may fall either way",
    cases=[
        Case.of(tokens=5, experts=8, k=2),
        Case.of(tokens=131, experts=384, k=8),
        Case.of(tokens=77, experts=60, k=6, pad=4),
        Case.of(tokens=8192, experts=384, k=8),
        Case.of(tokens=64, experts=256, k=8),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {"logits": make.normal(case["tokens"], case["experts"] + case.get("pad", 0))[:, :case["experts"]]}


@op.reference
def _(case: Case, logits: Any) -> Dict[str, Any]:
    weight, index = logits.double().softmax(1).topk(case["k"], dim=1)
    return {"index": index.int(), "weight": weight}


@op.cost
def _(case: Case) -> Cost:
    scores, chosen = case["tokens"] * case["experts"], case["tokens"] * case["k"]
    return Cost(flops=scores * (3 + case["k"]), bytes=4 * scores + 6 * chosen)


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(EPSILON, "weights are rounded to bfloat16, half an epsilon at worst, and a tie may swap two that "
                              "differ by one epsilon before they are rounded")


@op.comparison
def _(case: Case, inputs: Dict[str, Any], reference: Dict[str, Any], out: Dict[str, Any]) -> Dict[str, Any]:
    return judge_choice(inputs["logits"].double().softmax(1), reference, out, EPSILON, resolution=EPSILON)


@op.implementation("torch")
def _(case: Case, logits: Any) -> Dict[str, Any]:
    import torch

    weight, index = logits.softmax(1).to(torch.bfloat16).topk(case["k"], dim=1)
    return {"index": index.int(), "weight": weight}


@op.implementation("float32-scores")
def _(case: Case, logits: Any) -> Dict[str, Any]:
    import torch

    weight, index = logits.softmax(1).topk(case["k"], dim=1)
    return {"index": index.int(), "weight": weight.to(torch.bfloat16)}
