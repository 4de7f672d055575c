"""Matrix product of bfloat16 with mma.sync and with Hopper's wgmma."""

from __future__ import annotations

from typing import Any, Dict, List

from . import in_triton
from .base import Case, Cost, CudaKernel, Launch, Operator, TensorMap, Tolerance, blocks, i32
from .make import Make

THREADS, TILE = 256, 128
STAGE = 2 * TILE * 128  # bytes: a tile of A and one of B, 64 elements of K each

op = Operator(
    "bf16_gemm", "c = a b^T, bfloat16 with float32 sums",
    cases=[
        Case.of(m=128, n=128, k=64),
        Case.of(m=100, n=77, k=328),
        Case.of(m=131, n=66, k=77),
        Case.of(m=256, n=384, k=1024),
        Case.of(m=4096, n=4096, k=4096),
        Case.of(m=8192, n=8192, k=8192),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {
        "a": make.normal(case["m"], case["k"], dtype="bfloat16"),
        "b": make.normal(case["n"], case["k"], dtype="bfloat16"),
    }


@op.reference
def _(case: Case, a: Any, b: Any) -> Dict[str, Any]:
    return {"c": a.double() @ b.double().T}


@op.cost
def _(case: Case) -> Cost:
    m, n, k = case["m"], case["n"], case["k"]
    return Cost(flops=2 * m * n * k, bytes=2 * (m * k + n * k + m * n))


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(2.0**-8, "rounding the result to bfloat16: 2^-9 at worst; the float32 sums add far less")


@op.implementation("torch")
def _(case: Case, a: Any, b: Any) -> Dict[str, Any]:
    return {"c": a @ b.T}


@op.implementation("triton")
def _(case: Case, a: Any, b: Any) -> Dict[str, Any]:
    return in_triton.kernels(a, dots=True).matmul(a, b.T).run()


def _outputs(case: Case, a: Any, b: Any) -> Dict[str, Any]:
    return {"c": a.new_empty(case["m"], case["n"])}


def _grid(case: Case) -> Any:
    return blocks(case["n"], TILE), blocks(case["m"], TILE), 1


def _launches_mma(case: Case, a: Any, b: Any, c: Any) -> List[Launch]:
    arguments = [a, b, c, i32(case["m"]), i32(case["n"]), i32(case["k"])]
    return [Launch(_grid(case), (THREADS, 1, 1), arguments, dynamic_shared=3 * STAGE)]


def _launches_wgmma(case: Case, a: Any, b: Any, c: Any) -> List[Launch]:
    maps = [TensorMap(a, (TILE, 64), swizzle=128), TensorMap(b, (TILE, 64), swizzle=128)]
    arguments = [*maps, c, i32(case["m"]), i32(case["n"]), i32(case["k"])]
    return [Launch(_grid(case), (THREADS, 1, 1), arguments, dynamic_shared=4 * STAGE + 1024)]


op.cuda(CudaKernel("mma", "bf16_gemm_mma.cu", "bf16_gemm_mma", THREADS, _outputs, _launches_mma,
                   dynamic_shared=3 * STAGE))
op.cuda(CudaKernel("wgmma", "bf16_gemm_wgmma.cu", "bf16_gemm_wgmma", THREADS, _outputs, _launches_wgmma, min_arch=90,
                   archs=("sm_90a",), dynamic_shared=4 * STAGE + 1024, supports=lambda case: case["k"] % 8 == 0))
