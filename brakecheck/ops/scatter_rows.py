"""Rows added into a table by index (embedding backward, scatter-add), bfloat16: plain atomics, sums of equal
indices first, 16 bytes a reduction, by the copy engine, and sorted (claim A9)."""

from __future__ import annotations

from typing import Any, Dict, List

from ..kernels.moe_plans import PIECE_THREADS, SCATTER_PART, SCATTER_THREADS, SORTED_RUN, scatter_columns, scatter_plan
from ..model import Entry
from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, blocks, i32
from .make import Make

SMS = 132

op = Operator(
    "scatter_rows", "table[index] += row, bfloat16; uniform, skewed and nearly constant indices",
    cases=[
        Case.of(n=7, rows=5, width=64, indices="uniform"),
        Case.of(n=301, rows=97, width=72, indices="zipf"),
        Case.of(n=515, rows=97, width=136, indices="one"),
        Case.of(n=16384, rows=50257, width=1024, indices="uniform"),
        Case.of(n=16384, rows=50257, width=1024, indices="zipf"),
        Case.of(n=16384, rows=50257, width=1024, indices="one"),
        Case.of(n=500000, rows=100000, width=128, indices="uniform"),
        Case.of(n=500000, rows=100000, width=128, indices="one"),
    ],
    claims=("A9",),
)


def draw_index(make: Make, n: int, rows: int, kind: str) -> Any:
    """n indices of rows. uniform, zipf, or one: 95 % are the same, the rest anywhere."""
    if kind == "zipf":
        return make.zipf(n, rows=rows, dtype="int32")
    index = make.integers(n, low=0, high=rows)
    return index.where(make.uniform(n) >= 0.95, index.new_full((), rows // 2)) if kind == "one" else index


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    n, rows = case["n"], case["rows"]
    index = draw_index(make, n, rows, case["indices"])
    key, order = index.sort(stable=True)
    return {"grad": make.normal(n, case["width"], dtype="bfloat16"), "index": index, "key": key, "order": order.int()}


@op.reference
def _(case: Case, grad: Any, index: Any, key: Any, order: Any) -> Dict[str, Any]:
    table = grad.new_zeros(case["rows"], case["width"]).double()
    return {"out": table.index_add_(0, index.long(), grad.double())}


@op.cost
def _(case: Case) -> Cost:
    moved, table = case["n"] * case["width"], case["rows"] * case["width"]
    return Cost(flops=moved, bytes=2 * (moved + table) + 4 * case["n"])


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(2.0**-7, "a row of one addition to memory; the comparison grants hot rows more")


@op.comparison
def _(case: Case, inputs: Dict[str, Any], reference: Dict[str, Any], out: Dict[str, Any]) -> Dict[str, Any]:
    """Row by row: each addition to memory may round to bfloat16, so a row of c additions errs by sqrt(c) roundings (of
    random sign). torch adds every row on its own and uses that up; the error over all rows tells them apart."""
    import torch

    wanted, got = reference["out"], out["out"].double()
    adds = torch.bincount(inputs["index"].long(), minlength=case["rows"]).double()
    allowed = (2.0**-7 * adds.clamp_min(1).sqrt()).clamp_max(0.7) * wanted.norm(dim=1)
    wrong = ~((got - wanted).norm(dim=1) <= allowed)
    return {"ok": not bool(wrong.any()), "error": float((got - wanted).norm() / wanted.norm()),
            "wrong_rows": int(wrong.sum())}


@op.implementation("torch")
def _(case: Case, grad: Any, index: Any, key: Any, order: Any) -> Dict[str, Any]:
    return {"out": grad.new_zeros(case["rows"], case["width"]).index_add_(0, index, grad)}


@op.implementation("ours")
def _(case: Case, grad: Any, index: Any, key: Any, order: Any) -> Dict[str, Any]:
    from . import embedding_gradient

    return {"out": embedding_gradient(grad, index, case["rows"])}


@op.implementation("ours-deterministic")
def _(case: Case, grad: Any, index: Any, key: Any, order: Any) -> Dict[str, Any]:
    from . import embedding_gradient

    return {"out": embedding_gradient(grad, index, case["rows"], deterministic=True)}


def _outputs(case: Case, grad: Any, **_: Any) -> Dict[str, Any]:
    return {"out": grad.new_empty(case["rows"], case["width"])}


def _adding(form: str, run: int = 0) -> Any:
    def launches(case: Case, grad: Any, index: Any, key: Any, order: Any, out: Any) -> List[Launch]:
        plan = scatter_plan(form, case["n"], case["width"], case["rows"], "bfloat16", SMS, run)
        arguments = [grad, index, out, i32(case["n"]), i32(case["width"]), i32(case["rows"]), i32(plan.last)]
        return [Launch((*plan.grid, 1), (plan.threads, 1, 1), arguments, dynamic_shared=plan.shared)]

    return launches


def _sorted_outputs(case: Case, grad: Any, **_: Any) -> Dict[str, Any]:
    pieces = grad.new_empty(2 * blocks(case["n"], SORTED_RUN), case["width"]).float()
    return {"out": grad.new_empty(case["rows"], case["width"]), "pieces": pieces}


def _sorted(case: Case, grad: Any, index: Any, key: Any, order: Any, out: Any, pieces: Any) -> List[Launch]:
    n, width, columns = case["n"], case["width"], scatter_columns(case["width"])
    runs = blocks(n, SORTED_RUN)
    grid = (blocks(runs, SCATTER_THREADS // columns), blocks(width // 8, columns), 1)
    first = [grad, key, order, out, pieces, i32(n), i32(width), i32(columns)]
    second = [key, pieces, out, i32(n), i32(width)]
    return [Launch(grid, (SCATTER_THREADS, 1, 1), first, entry="scatter_sorted"),
            Launch((runs, blocks(width, 256), 1), (PIECE_THREADS, 1, 1), second, entry="scatter_pieces")]


for _name, _form, _run in (("plain", "plain", 1), ("vector", "vector", 1), ("aggregated", "aggregated", 32),
                           ("runs-of-32", "runs", 32), ("runs-of-64", "runs", 64), ("bulk", "bulk", 0),
                           ("bulk-aggregated", "bulk-aggregated", 0)):
    _plan = scatter_plan(_form, 1, SCATTER_PART // 2, 1, "bfloat16", SMS, _run)
    op.cuda(CudaKernel(_name, _plan.source, _plan.entry, _plan.threads, _outputs, _adding(_form, _run),
                       dynamic_shared=_plan.shared, min_arch=90 if _form.startswith("bulk") else 80, zeroed=("out",),
                       deterministic=False, defines=_plan.defines))
op.cuda(CudaKernel("sorted", "scatter_sorted.cu", "scatter_sorted", SCATTER_THREADS, _sorted_outputs, _sorted,
                   zeroed=("out",), also=(Entry("scatter_pieces", PIECE_THREADS),)))
