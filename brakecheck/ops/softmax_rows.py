"""Softmax over rows, fused and unfused, with and without __restrict__ (claims A2 and A4)."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

from ..model import Entry
from . import in_triton
from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, blocks, i32
from .make import Make

THREADS = 256

op = Operator(
    "softmax", "softmax of each row, float32",
    cases=[
        Case.of(rows=3, columns=64),
        Case.of(rows=17, columns=1001),
        Case.of(rows=5, columns=8196),
        Case.of(rows=16384, columns=1024),
        Case.of(rows=4096, columns=8192),
        Case.of(rows=512, columns=131072),
    ],
    claims=("A2", "A4"),
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {"x": make.normal(case["rows"], case["columns"], std=3.0)}


@op.reference
def _(case: Case, x: Any) -> Dict[str, Any]:
    exponential = (x.double() - x.double().amax(1, keepdim=True)).exp()
    return {"out": exponential / exponential.sum(1, keepdim=True)}


@op.cost
def _(case: Case) -> Cost:
    elements = case["rows"] * case["columns"]
    return Cost(flops=5 * elements, bytes=8 * elements)  # maximum, subtract, exponential, add, scale


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(1e-5, "the fast exponential is right to 2 + |x| units in the last place, and |x| stays under 40")


@op.implementation("torch")
def _(case: Case, x: Any) -> Dict[str, Any]:
    return {"out": x.softmax(1)}


@op.implementation("triton")
def _(case: Case, x: Any) -> Dict[str, Any]:
    return in_triton.kernels(x).softmax(x).run()


def _outputs(case: Case, x: Any) -> Dict[str, Any]:
    return {"out": x.new_empty(x.shape)}


def _launches(case: Case, x: Any, out: Any) -> List[Launch]:
    return [Launch((case["rows"], 1, 1), (THREADS, 1, 1), [x, out, i32(case["columns"])])]


def _unfused_outputs(case: Case, x: Any) -> Dict[str, Any]:
    rows = case["rows"]
    return {"out": x.new_empty(x.shape), "maximum": x.new_empty(rows), "total": x.new_empty(rows)}


def _unfused_launches(case: Case, x: Any, out: Any, maximum: Any, total: Any) -> List[Launch]:
    grid, block, columns = (case["rows"], 1, 1), (THREADS, 1, 1), i32(case["columns"])
    return [
        Launch(grid, block, [x, maximum, columns], entry="softmax_row_max"),
        Launch(grid, block, [x, maximum, total, columns], entry="softmax_row_sum"),
        Launch(grid, block, [x, maximum, total, out, columns], entry="softmax_normalise"),
    ]


op.cuda(CudaKernel("fused", "softmax_fused.cu", "softmax_fused", THREADS, _outputs, _launches))
op.cuda(CudaKernel("fused-no-restrict", "softmax_fused.cu", "softmax_fused", THREADS, _outputs, _launches,
                   defines=("RESTRICT=",)))
op.cuda(CudaKernel("unfused", "softmax_unfused.cu", "softmax_row_max", THREADS, _unfused_outputs, _unfused_launches,
                   also=(Entry("softmax_row_sum", THREADS), Entry("softmax_normalise", THREADS))))


# ---- rows_softmax.cu: what brakecheck.ops.softmax runs ----

def _fits(most: int) -> Callable[[Case], bool]:
    """Rows of whole 16-byte vectors, at most `most` of them."""
    return lambda case: case["columns"] % 4 == 0 and case["columns"] <= 4 * most


def _rows_launches(threads: int, teams: int, cluster: int) -> Callable[..., List[Launch]]:
    def launches(case: Case, x: Any, out: Any) -> List[Launch]:
        grid = (blocks(case["rows"], teams) * cluster, 1, 1)
        return [Launch(grid, (threads, 1, 1), [x, out, i32(case["rows"]), i32(case["columns"])],
                       cluster=(cluster, 1, 1) if cluster > 1 else None)]

    return launches


_FLOAT = ("ELEMENT=fp32",)
op.cuda(CudaKernel("rows-warp", "rows_softmax.cu", "softmax_rows<32, 4, 4, 0, 1, 1, 8>", 128, _outputs,
                   _rows_launches(128, 4, 1), defines=_FLOAT, supports=_fits(128)))
op.cuda(CudaKernel("rows", "rows_softmax.cu", "softmax_rows<256, 8, 1, 0, 1, 1, 4>", 256, _outputs,
                   _rows_launches(256, 1, 1), defines=_FLOAT, supports=_fits(2048)))
op.cuda(CudaKernel("rows-cluster", "rows_softmax.cu", "softmax_rows<512, 8, 1, 0, 1, 8, 2>", 512, _outputs,
                   _rows_launches(512, 1, 8), min_arch=90, defines=_FLOAT, supports=_fits(32768)))


@op.implementation("ours")
def _(case: Case, x: Any) -> Dict[str, Any]:
    from . import softmax

    return {"out": softmax(x)}
