"""Attention, forward and backward, by the library's backends."""

from __future__ import annotations

from typing import Any, Callable, Dict

from . import autograd
from .base import Case, Cost, Operator, Tolerance
from .make import Make
from .sdpa import BACKENDS, attend, dense

op = Operator(
    "attention_backward", "softmax(q k^T / sqrt(dim)) v and its gradients, bfloat16",
    cases=[
        Case.of(heads=2, length=64, dim=64, causal=False),
        Case.of(heads=3, length=101, dim=64, causal=True),
        Case.of(heads=3, length=77, dim=128, causal=False),
        Case.of(heads=64, length=2048, dim=64, causal=True),
        Case.of(heads=64, length=2048, dim=128, causal=False),
        Case.of(heads=16, length=8192, dim=128, causal=True),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    shape = (case["heads"], case["length"], case["dim"])
    return {name: make.normal(*shape, dtype="bfloat16") for name in ("q", "k", "v", "grad")}


def _by(backend: str) -> Callable[..., Any]:
    return lambda case, q, k, v: attend(case, q, k, v, backend)


@op.reference
def _(case: Case, **inputs: Any) -> Dict[str, Any]:
    """Head by head: autograd keeps several matrices of length x length in float64 alive."""
    import torch

    heads = []
    for head in range(case["heads"]):
        one = {name: tensor[head:head + 1].double() for name, tensor in inputs.items()}
        heads.append(autograd.gradients(lambda case, q, k, v: dense(case, q, k, v)[0], case, one.pop("grad"), **one))
    return {name: torch.cat([found[name] for found in heads]) for name in heads[0]}


autograd.implement(op, "torch", attend)
for _name in BACKENDS:
    autograd.implement(op, _name, _by(_name))


@op.cost
def _(case: Case) -> Cost:
    heads, length, dim = case["heads"], case["length"], case["dim"]
    pairs = length * (length + 1) / 2 if case["causal"] else length * length
    # Products of length x length x dim: 2 forward; 5 backward (scores again, and the gradients of v, weights, q, k).
    return Cost(flops=14 * heads * pairs * dim, bytes=2 * 8 * heads * length * dim)


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(2e-2, "weights, their gradients and results are rounded to bfloat16, and averaging makes results "
                           "small beside what they are sums of")
