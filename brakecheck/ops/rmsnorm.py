"""RMSNorm over rows."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

from . import in_triton
from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, blocks, f32, i32
from .make import Make

THREADS = 256
EPSILON = 1e-6

op = Operator(
    "rmsnorm", "RMSNorm of each row, bfloat16",
    cases=[
        Case.of(rows=3, columns=64),
        Case.of(rows=5, columns=1001),
        Case.of(rows=3, columns=8200),
        Case.of(rows=16384, columns=1024),
        Case.of(rows=4096, columns=8192),
        Case.of(rows=2048, columns=32768),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {
        "x": make.normal(case["rows"], case["columns"], dtype="bfloat16"),
        "weight": make.normal(case["columns"], dtype="bfloat16", mean=1.0, std=0.1),
    }


@op.reference
def _(case: Case, x: Any, weight: Any) -> Dict[str, Any]:
    return {"out": x.double() / (x.double().square().mean(1, keepdim=True) + EPSILON).sqrt() * weight.double()}


@op.cost
def _(case: Case) -> Cost:
    elements = case["rows"] * case["columns"]
    return Cost(flops=4 * elements, bytes=4 * elements + 2 * case["columns"])


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(2.0**-8, "rounding to bfloat16: half a unit in the last place is 2^-9 at worst, doubled")


@op.implementation("torch")
def _(case: Case, x: Any, weight: Any) -> Dict[str, Any]:
    import torch

    return {"out": torch.nn.functional.rms_norm(x, (case["columns"],), weight, EPSILON)}


@op.implementation("triton")
def _(case: Case, x: Any, weight: Any) -> Dict[str, Any]:
    return in_triton.kernels(x, row=case["columns"]).rms_norm(x, weight, EPSILON).run()


def _outputs(case: Case, x: Any, weight: Any) -> Dict[str, Any]:
    return {"out": x.new_empty(x.shape)}


def _launches(case: Case, x: Any, weight: Any, out: Any) -> List[Launch]:
    return [Launch((case["rows"], 1, 1), (THREADS, 1, 1), [x, weight, out, i32(case["columns"]), f32(EPSILON)])]


op.cuda(CudaKernel("cuda", "rmsnorm.cu", "rmsnorm", THREADS, _outputs, _launches))


# ---- rows_norm.cu: what brakecheck.ops.rms_norm runs ----

def _rows_outputs(case: Case, x: Any, weight: Any) -> Dict[str, Any]:
    import torch

    rows = x.shape[0]
    return {"out": x.new_empty(x.shape), "rstd": x.new_empty(rows, dtype=torch.float32)}


def _rows_launches(threads: int, teams: int) -> Callable[..., List[Launch]]:
    def launches(case: Case, x: Any, weight: Any, out: Any, rstd: Any) -> List[Launch]:
        # The residual, its sum, bias and mean are not used by this instantiation: any pointer stands for them.
        sizes = [i32(case["rows"]), i32(case["columns"]), f32(EPSILON)]
        arguments = [x, x, weight, weight, out, out, rstd, rstd, *sizes]
        return [Launch((blocks(case["rows"], teams), 1, 1), (threads, 1, 1), arguments)]

    return launches


op.cuda(CudaKernel("rows-warp", "rows_norm.cu", "norm_rows<0, 0, 32, 4, 4, 0, 1, 1, 0, 8>", 128, _rows_outputs,
                   _rows_launches(128, 4), defines=("ELEMENT=bf16", "CENTERED=0"),
                   supports=lambda case: case["columns"] % 8 == 0 and case["columns"] <= 1024))
op.cuda(CudaKernel("rows", "rows_norm.cu", "norm_rows<0, 0, 512, 8, 1, 0, 1, 1, 0, 2>", 512, _rows_outputs,
                   _rows_launches(512, 1), defines=("ELEMENT=bf16", "CENTERED=0"),
                   supports=lambda case: case["columns"] % 8 == 0 and case["columns"] <= 32768))


@op.implementation("ours")
def _(case: Case, x: Any, weight: Any) -> Dict[str, Any]:
    from . import rms_norm

    return {"out": rms_norm(x, weight, EPSILON)}
