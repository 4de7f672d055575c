"""Sums of a matrix over its rows, its columns, and all of it."""

from __future__ import annotations

from typing import Any, Dict

from .base import Case, Cost, Operator, Tolerance
from .make import Make

SIZE = {"float32": 4, "bfloat16": 2}

op = Operator(
    "reduction", "sum over the columns of each row, over the rows of each column, or over everything",
    cases=[
        Case.of(rows=3, columns=64, over="columns", dtype="float32"),
        Case.of(rows=77, columns=333, over="rows", dtype="bfloat16"),
        Case.of(rows=77, columns=333, over="columns", dtype="bfloat16", pad=19),
        Case.of(rows=33, columns=1001, over="all", dtype="float32"),
        Case.of(rows=16384, columns=8192, over="columns", dtype="bfloat16"),
        Case.of(rows=16384, columns=8192, over="rows", dtype="bfloat16"),
        Case.of(rows=16384, columns=8192, over="all", dtype="float32"),
        Case.of(rows=8, columns=1 << 24, over="columns", dtype="float32"),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    """Mean 1: sums of values around zero are small beside their rounding."""
    drawn = make.normal(case["rows"], case["columns"] + case.get("pad", 0), mean=1.0, dtype=case["dtype"])
    return {"x": drawn[:, :case["columns"]]}


def _sum(case: Case, x: Any) -> Dict[str, Any]:
    if case["over"] == "all":
        return {"out": x.sum()}
    return {"out": x.sum(dim=1 if case["over"] == "columns" else 0)}


@op.reference
def _(case: Case, x: Any) -> Dict[str, Any]:
    return _sum(case, x.double())


@op.cost
def _(case: Case) -> Cost:
    elements = case["rows"] * case["columns"]
    results = {"columns": case["rows"], "rows": case["columns"], "all": 1}[case["over"]]
    return Cost(flops=elements, bytes=SIZE[case["dtype"]] * (elements + results))


@op.tolerance
def _(case: Case) -> Tolerance:
    if case["dtype"] == "bfloat16":
        return Tolerance(2.0**-8, "rounding the sum to bfloat16, 2^-8 at worst; it is added up in float32")
    return Tolerance(1e-5, "float32 sums in pieces that are added up as a tree, about 2^-24 sqrt(n) for the longest")


op.implementation("torch")(_sum)


@op.layout("transposed")
def _(case: Case, x: Any) -> Dict[str, Any]:
    return {"x": x.mT.contiguous().mT}
