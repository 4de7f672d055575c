"""Matrix product of int8 with plain loads and with bulk tensor copies (claim B2)."""

from __future__ import annotations

from typing import Any, Dict, List

from .base import Case, Cost, CudaKernel, Launch, Operator, TensorMap, Tolerance, blocks, i32
from .make import Make

THREADS, TILE = 256, 128
STAGE = 2 * TILE * 128  # bytes: a tile of A and one of B, 128 bytes of K each

op = Operator(
    "int8_gemm", "c = a b^T, int8 in, int32 out",
    cases=[
        Case.of(m=128, n=128, k=128),
        Case.of(m=100, n=77, k=336),
        Case.of(m=131, n=66, k=77),
        Case.of(m=256, n=384, k=2048),
        Case.of(m=4096, n=4096, k=4096),
        Case.of(m=8192, n=8192, k=8192),
    ],
    claims=("B2",),
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {
        "a": make.integers(case["m"], case["k"], low=-128, high=128, dtype="int8"),
        "b": make.integers(case["n"], case["k"], low=-128, high=128, dtype="int8"),
    }


@op.reference
def _(case: Case, a: Any, b: Any) -> Dict[str, Any]:
    return {"c": (a.double() @ b.double().T).int()}  # float64 holds these integers exactly


@op.cost
def _(case: Case) -> Cost:
    m, n, k = case["m"], case["n"], case["k"]
    return Cost(flops=2 * m * n * k, bytes=m * k + n * k + 4 * m * n)


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(0.0, "integer sums")


@op.implementation("torch")
def _(case: Case, a: Any, b: Any) -> Dict[str, Any]:
    import torch

    if case["m"] > 16 and case["n"] % 8 == 0 and case["k"] % 8 == 0:  # what cuBLASLt takes
        return {"c": torch._int_mm(a, b.T)}
    return {"c": (a.double() @ b.double().T).int()}


def _outputs(case: Case, a: Any, b: Any) -> Dict[str, Any]:
    return {"c": a.new_empty(case["m"], case["n"]).int()}


def _grid(case: Case) -> Any:
    return blocks(case["n"], TILE), blocks(case["m"], TILE), 1


def _launches_plain(case: Case, a: Any, b: Any, c: Any) -> List[Launch]:
    arguments = [a, b, c, i32(case["m"]), i32(case["n"]), i32(case["k"])]
    return [Launch(_grid(case), (THREADS, 1, 1), arguments, dynamic_shared=2 * STAGE)]


def _launches_tma(case: Case, a: Any, b: Any, c: Any) -> List[Launch]:
    maps = [TensorMap(a, (TILE, 128), swizzle=128), TensorMap(b, (TILE, 128), swizzle=128)]
    arguments = [*maps, c, i32(case["m"]), i32(case["n"]), i32(case["k"])]
    return [Launch(_grid(case), (THREADS, 1, 1), arguments, dynamic_shared=3 * STAGE + 1024)]


op.cuda(CudaKernel("plain", "int8_gemm_plain.cu", "int8_gemm_plain", THREADS, _outputs, _launches_plain,
                   dynamic_shared=2 * STAGE))
op.cuda(CudaKernel("tma", "int8_gemm_tma.cu", "int8_gemm_tma", THREADS, _outputs, _launches_tma, min_arch=90,
                   dynamic_shared=3 * STAGE + 1024, supports=lambda case: case["k"] % 16 == 0))
