"""Gradients as operators: a forward pass and the backward pass of it, as one training step runs them."""

from __future__ import annotations

from typing import Any, Callable, Dict

from .base import Case, Operator
from .compiled import compiled

Forward = Callable[..., Any]


def gradients(forward: Forward, case: Case, grad: Any, **tensors: Any) -> Dict[str, Any]:
    """{"out": forward(case, **tensors), "d_x": gradient of x for each tensor x} with `grad` flowing into out."""
    import torch

    leaves = {name: tensor.detach().requires_grad_(True) for name, tensor in tensors.items()}
    with torch.enable_grad():
        out = forward(case, **leaves)
        found = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out.detach(), **{f"d_{name}": d for name, d in zip(leaves, found)}}


def implement(operator: Operator, name: str, forward: Forward) -> None:
    """Registers the gradients of `forward`(case, **tensors) -> out; the operator's inputs are its tensors and `grad`.
    "torch" brings "compile": the forward pass is compiled, and with it the backward pass that it leads to."""
    operator.implementation(name)(lambda case, grad, **tensors: gradients(forward, case, grad, **tensors))
    if name == "torch":
        fast = compiled(forward)
        operator.implementation("compile")(lambda case, grad, **tensors: gradients(fast, case, grad, **tensors))


def reference(operator: Operator, forward: Forward) -> None:
    """The reference: gradients of `forward`, written in plain PyTorch, by autograd in float64."""

    @operator.reference
    def _(case: Case, **inputs: Any) -> Dict[str, Any]:
        wide = {name: tensor.double() for name, tensor in inputs.items()}
        return gradients(forward, case, wide.pop("grad"), **wide)
