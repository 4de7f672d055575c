"""Copies: of one block of memory, of rows with gaps, of a transposed matrix, from one type to another."""

from __future__ import annotations

from typing import Any, Dict

from .base import Case, Cost, Operator, Tolerance
from .make import Make

SIZE = {"float32": 4, "bfloat16": 2}

op = Operator(
    "copy", "a contiguous copy",
    cases=[
        Case.of(rows=8, columns=64, source="contiguous", dtype="float32", to="float32"),
        Case.of(rows=77, columns=333, source="padded", dtype="bfloat16", to="bfloat16"),
        Case.of(rows=101, columns=77, source="transposed", dtype="float32", to="float32"),
        Case.of(rows=33, columns=129, source="contiguous", dtype="float32", to="bfloat16"),
        Case.of(rows=8192, columns=16384, source="contiguous", dtype="bfloat16", to="bfloat16"),
        Case.of(rows=8192, columns=16320, source="padded", dtype="bfloat16", to="bfloat16"),
        Case.of(rows=8192, columns=8192, source="transposed", dtype="bfloat16", to="bfloat16"),
        Case.of(rows=8192, columns=8192, source="contiguous", dtype="float32", to="bfloat16"),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    rows, columns = case["rows"], case["columns"]
    if case["source"] == "transposed":
        return {"x": make.normal(columns, rows, dtype=case["dtype"]).mT}
    pad = 64 if case["source"] == "padded" else 0
    return {"x": make.normal(rows, columns + pad, dtype=case["dtype"])[:, :columns]}


@op.reference
def _(case: Case, x: Any) -> Dict[str, Any]:
    import torch

    return {"out": x.to(getattr(torch, case["to"])).double()}


@op.cost
def _(case: Case) -> Cost:
    elements = case["rows"] * case["columns"]
    return Cost(flops=0, bytes=elements * (SIZE[case["dtype"]] + SIZE[case["to"]]))


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(0.0, "values are moved; a conversion rounds to nearest even, which is defined to the bit")


@op.implementation("torch")
def _(case: Case, x: Any) -> Dict[str, Any]:
    import torch

    return {"out": x.to(getattr(torch, case["to"]), memory_format=torch.contiguous_format, copy=True)}


@op.implementation("copy_")
def _(case: Case, x: Any) -> Dict[str, Any]:
    import torch

    return {"out": torch.empty(x.shape, dtype=getattr(torch, case["to"]), device=x.device).copy_(x)}
