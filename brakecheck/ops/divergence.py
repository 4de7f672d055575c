"""A loop of different length in each lane, branching and selecting (claim A13)."""

from __future__ import annotations

from typing import Any, Dict, List

from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, blocks, i32
from .compiled import compiled
from .make import Make

THREADS, LONGEST = 256, 64

op = Operator(
    "divergence", "turns[i] steps of y <- y / 2 + 1 / (1 + y^2), float32",
    cases=[Case.of(n=31), Case.of(n=1001), Case.of(n=1 << 22)],
    claims=("A13",),
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {"x": make.normal(case["n"]), "turns": make.integers(case["n"], low=0, high=LONGEST)}


def _step(y: Any, turns: Any, turn: Any) -> Any:
    return (0.5 * y + 1 / (1 + y * y)).where(turns > turn, y)


def _steps(y: Any, turns: Any) -> Any:
    for turn in range(LONGEST):
        y = _step(y, turns, turn)
    return y


@op.reference
def _(case: Case, x: Any, turns: Any) -> Dict[str, Any]:
    return {"out": _steps(x.double(), turns)}


@op.cost
def _(case: Case) -> Cost:
    return Cost(flops=5 * (LONGEST - 1) / 2 * case["n"], bytes=12 * case["n"])  # the mean of the uniform turns


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(1e-5, "float32; the step contracts, so roundings do not grow")


@op.implementation("torch")
def _(case: Case, x: Any, turns: Any) -> Dict[str, Any]:
    return {"out": _steps(x, turns)}


_compiled_step = compiled(lambda case, **tensors: _step(**tensors))


@op.implementation("compile")
def _(case: Case, x: Any, turns: Any) -> Dict[str, Any]:
    """Step by step: the compiler would unroll the whole loop, which takes it minutes."""
    import torch

    y = x
    for turn in torch.arange(LONGEST, device=x.device):
        y = _compiled_step(case, y=y, turns=turns, turn=turn)
    return {"out": y}


def _outputs(case: Case, x: Any, turns: Any) -> Dict[str, Any]:
    return {"out": x.new_empty(case["n"])}


def _launches(case: Case, x: Any, turns: Any, out: Any) -> List[Launch]:
    return [Launch((blocks(case["n"], THREADS), 1, 1), (THREADS, 1, 1), [x, turns, out, i32(case["n"])])]


for _name, _define in (("branch", "SELECT=0"), ("select", "SELECT=1")):
    op.cuda(CudaKernel(_name, "divergence.cu", "divergence", THREADS, _outputs, _launches, defines=(_define,)))
