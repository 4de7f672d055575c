"""Warps that add to shared sums under a spin lock, by exchange and by compare-and-swap (claim A5)."""

from __future__ import annotations

from typing import Any, Dict, List

from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, blocks, i32
from .make import Make

THREADS = 128

op = Operator(
    "spin_lock", "warps add 32 integers under one of several locks",
    cases=[
        Case.of(warps=1, rounds=3, locks=1),
        Case.of(warps=37, rounds=5, locks=3),
        Case.of(warps=528, rounds=16, locks=1),
        Case.of(warps=4224, rounds=16, locks=256),
    ],
    claims=("A5",),
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {
        "values": make.integers(case["warps"], 32, low=-1000, high=1000),
        "turns": make.integers(case["warps"], case["rounds"], low=0, high=case["locks"]),
    }


@op.reference
def _(case: Case, values: Any, turns: Any) -> Dict[str, Any]:
    total = values.new_zeros(case["locks"], 32)
    for turn in turns.T:  # the order does not matter: integers
        total.index_add_(0, turn.long(), values)
    return {"total": total}


@op.cost
def _(case: Case) -> Cost:
    turns = case["warps"] * case["rounds"]
    return Cost(flops=32 * turns, bytes=4 * (turns + 32 * case["warps"] + 32 * case["locks"]))


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(0.0, "integer sums")


@op.implementation("torch")
def _(case: Case, values: Any, turns: Any) -> Dict[str, Any]:
    each = values[:, None, :].expand(-1, case["rounds"], -1).reshape(-1, 32)
    return {"total": values.new_zeros(case["locks"], 32).index_add_(0, turns.reshape(-1).long(), each)}


def _outputs(case: Case, values: Any, turns: Any) -> Dict[str, Any]:
    return {"total": values.new_empty(case["locks"], 32), "locks": values.new_empty(case["locks"])}


def _launches(case: Case, values: Any, turns: Any, total: Any, locks: Any) -> List[Launch]:
    grid = (blocks(case["warps"], THREADS // 32), 1, 1)
    return [Launch(grid, (THREADS, 1, 1), [values, turns, locks, total, i32(case["warps"]), i32(case["rounds"])])]


for _name, _define in (("exchange", "CAS=0"), ("compare-and-swap", "CAS=1")):
    op.cuda(CudaKernel(_name, "spin_lock.cu", "spin_lock_add", THREADS, _outputs, _launches, defines=(_define,),
                       zeroed=("total", "locks")))
