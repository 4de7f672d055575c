"""The elementwise chain of a gated MLP."""

from __future__ import annotations

from typing import Any, Dict, List

from . import in_triton
from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, blocks, i64
from .make import Make

THREADS = 256

op = Operator(
    "elementwise_chain", "residual + silu(gate) up, bfloat16",
    cases=[Case.of(n=8), Case.of(n=10007), Case.of(n=1 << 26)],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {name: make.normal(case["n"], dtype="bfloat16") for name in ("gate", "up", "residual")}


@op.reference
def _(case: Case, gate: Any, up: Any, residual: Any) -> Dict[str, Any]:
    gate, up, residual = gate.double(), up.double(), residual.double()
    return {"out": residual + gate / (1 + (-gate).exp()) * up}


@op.cost
def _(case: Case) -> Cost:
    return Cost(flops=6 * case["n"], bytes=8 * case["n"])


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(2.0**-7, "torch rounds to bfloat16 after each of three steps, 2^-9 at worst each")


@op.implementation("torch")
def _(case: Case, gate: Any, up: Any, residual: Any) -> Dict[str, Any]:
    import torch

    return {"out": residual + torch.nn.functional.silu(gate) * up}


@op.implementation("triton")
def _(case: Case, gate: Any, up: Any, residual: Any) -> Dict[str, Any]:
    return in_triton.kernels(gate).elementwise_chain(gate, up, residual).run()


def _outputs(case: Case, gate: Any, up: Any, residual: Any) -> Dict[str, Any]:
    return {"out": gate.new_empty(case["n"])}


def _launches(case: Case, gate: Any, up: Any, residual: Any, out: Any) -> List[Launch]:
    grid = (min(max(blocks(case["n"] // 8, THREADS), 1), 1 << 16), 1, 1)  # a block moves 2048; more are a loop
    return [Launch(grid, (THREADS, 1, 1), [gate, up, residual, out, i64(case["n"])])]


op.cuda(CudaKernel("cuda", "elementwise.cu", "elementwise_chain", THREADS, _outputs, _launches))
