"""Sums by key with atomics, plain and aggregated within a warp (claim A9)."""

from __future__ import annotations

from typing import Any, Dict, List

from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, blocks, i32
from .make import Make

THREADS, SMS = 256, 132

op = Operator(
    "accumulate", "out[key] += value, float32, skewed keys",
    cases=[
        Case.of(n=33, rows=1),
        Case.of(n=10007, rows=61),
        Case.of(n=1 << 22, rows=64),
        Case.of(n=1 << 22, rows=50257),
    ],
    claims=("A9",),
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {"keys": make.zipf(case["n"], rows=case["rows"], dtype="int32"), "values": make.uniform(case["n"])}


@op.reference
def _(case: Case, keys: Any, values: Any) -> Dict[str, Any]:
    return {"out": values.double().new_zeros(case["rows"]).index_add_(0, keys.long(), values.double())}


@op.cost
def _(case: Case) -> Cost:
    return Cost(flops=case["n"], bytes=8 * case["n"] + 4 * case["rows"])


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(4 * case["n"] ** 0.5 * 2.0**-24 + 1e-6, "float32 sums in any order: 4 sqrt(n) roundings")


@op.implementation("torch")
def _(case: Case, keys: Any, values: Any) -> Dict[str, Any]:
    return {"out": values.new_zeros(case["rows"]).index_add_(0, keys, values)}


def _outputs(case: Case, keys: Any, values: Any) -> Dict[str, Any]:
    return {"out": values.new_empty(case["rows"])}


def _launches(case: Case, keys: Any, values: Any, out: Any) -> List[Launch]:
    grid = (min(blocks(case["n"], THREADS), 4096), 1, 1)  # more elements than that are a loop
    return [Launch(grid, (THREADS, 1, 1), [keys, values, out, i32(case["n"])])]


MOST_PRIVATE = 96  # rows whose private sums fit in the 99 KiB that every GPU from sm_80 on grants a block


def _private_launches(case: Case, keys: Any, values: Any, out: Any) -> List[Launch]:
    grid = (min(blocks(case["n"], 4 * THREADS), SMS), 1, 1)
    arguments = [keys, values, out, i32(case["n"]), i32(case["rows"])]
    return [Launch(grid, (THREADS, 1, 1), arguments, dynamic_shared=4 * THREADS * case["rows"])]


op.cuda(CudaKernel("private", "accumulate_private.cu", "accumulate_private", THREADS, _outputs, _private_launches,
                   dynamic_shared=4 * THREADS * 64, zeroed=("out",), deterministic=False,
                   supports=lambda case: case["rows"] <= MOST_PRIVATE))
for _name, _define in (("aggregated", "AGGREGATE=1"), ("plain", "AGGREGATE=0")):
    op.cuda(CudaKernel(_name, "accumulate.cu", "accumulate", THREADS, _outputs, _launches, defines=(_define,),
                       zeroed=("out",), deterministic=False))
