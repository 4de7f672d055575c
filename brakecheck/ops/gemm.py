"""Matrix products of the library by data type: square, skinny, long K, transposed, strided, a batch of one.

c = a b. b: "n" (K x N, rows of N) or "t" (N x K in memory, seen transposed). a: "t" likewise, as the gradient of a
weight takes it; absent: rows of K. pad: elements between the rows of a and b in memory beyond their length. batch:
matrices, multiplied by bmm; absent: mm.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List

from . import in_triton
from .base import ROUNDING, Case, Cost, Missing, Operator, Tolerance
from .compiled import compiled
from .make import Make

BYTES = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1}
OUT_BYTES = {"fp8": 2, "int8": 4}
STORED = {"tf32": "float32", "fp8": "float8_e4m3fn"}
REDUCED = {"float16": "allow_fp16_reduced_precision_reduction", "bfloat16": "allow_bf16_reduced_precision_reduction"}


def _cases(dtype: str) -> List[Case]:
    """m=17 k=16 n=16 with b transposed was wrong in int8 (pytorch issue 107671); m=64 n=4096 k=14336 loses precision
    where a library splits K and keeps the parts in 16 bits (pytorch pull request 153095)."""
    square = 4096 if dtype == "float32" else 8192
    found = [
        Case.of(m=17, n=16, k=16, b="t"),
        Case.of(m=1, n=4096, k=4096, b="t"),
        Case.of(m=16, n=4096, k=4096, b="t"),
        Case.of(m=17, n=4096, k=4096, b="t"),
        Case.of(m=128, n=4096, k=4096, b="t"),
        Case.of(m=64, n=4096, k=14336, b="t"),
        Case.of(m=4096, n=4096, k=4096, b="t"),
    ]
    if dtype == "fp8":  # takes a row by row and b column by column only
        return [Case.of(m=35, n=48, k=64, b="t"), *found, Case.of(m=square, n=square, k=square, b="t")]
    strided = Case.of(m=35, n=24, k=56, b="n", pad=8)
    found = [strided, *found, Case.of(m=square, n=square, k=square, b="n"),
             Case.of(m=40, n=24, k=56, a="t", b="n", pad=8), Case.of(m=4096, n=4096, k=8192, a="t", b="n")]
    if dtype == "int8":  # cuBLASLt 13.0 refuses some small products with both transposed, such as 64 x 48 x 64
        return found
    return [*found, Case.of(m=64, n=48, k=72, a="t", b="t"), Case.of(m=512, n=4096, k=1024, b="n", batch=1)]


def _draw(make: Make, dtype: str, batch: int, rows: int, columns: int, pad: int) -> Any:
    shape = (*([batch] if batch else []), rows, columns + pad)
    if dtype == "int8":
        drawn = make.integers(*shape, low=-128, high=128, dtype="int8")
    else:
        drawn = make.normal(*shape, dtype=STORED.get(dtype, dtype))
    return drawn[..., :columns]


@contextlib.contextmanager
def _setting(**flags: bool) -> Iterator[None]:
    """Flags of torch.backends.cuda.matmul, for the calls inside."""
    import torch

    matmul = torch.backends.cuda.matmul
    before = {name: getattr(matmul, name) for name in flags}
    try:
        for name, value in flags.items():
            setattr(matmul, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def _refuse(dtype: str, a: Any) -> None:
    """Raises Missing where torch has no such product: its int8 product takes more than 16 rows on CUDA (2.11)."""
    if dtype == "int8" and a.is_cuda and a.shape[0] <= 16:
        raise Missing(f"torch._int_mm takes more than 16 rows on CUDA, not {a.shape[0]}")


def _product(dtype: str, case: Case, a: Any, b: Any, **scales: Any) -> Any:
    import torch

    if dtype == "int8":
        return torch._int_mm(a, b)
    if dtype == "fp8":
        return torch._scaled_mm(a, b, scales["scale_a"], scales["scale_b"], out_dtype=torch.bfloat16)
    return torch.bmm(a, b) if case.get("batch") else torch.mm(a, b)


def _tolerance(dtype: str, k: int) -> Tolerance:
    if dtype == "int8":
        return Tolerance(0.0, "integer sums")
    if dtype == "float32":
        return Tolerance((4 + k**0.5) * 2.0**-24, "float32 sums in any order: sqrt(k) roundings")
    if dtype == "tf32":
        return Tolerance(1e-3, "factors keep 10 bits: 2^-10 each where they are cut off, and signs are random")
    epsilon = 2.0**-10 if dtype == "float16" else 2.0**-7
    return Tolerance(epsilon / 2, "half an epsilon, the worst of rounding the result once to 16 bits; honest sums in "
                                  "float32 reach two fifths of it", expected=ROUNDING * epsilon)


def _operator(dtype: str, title: str) -> Operator:
    operator = Operator(f"gemm_{dtype}", title, cases=_cases(dtype))
    flags = {"allow_tf32": dtype == "tf32"} if dtype in ("float32", "tf32") else {}

    @operator.inputs
    def _(case: Case, make: Make) -> Dict[str, Any]:
        m, n, k, batch, pad = case["m"], case["n"], case["k"], case.get("batch", 0), case.get("pad", 0)
        a = _draw(make, dtype, batch, k, m, pad).mT if case.get("a") == "t" else _draw(make, dtype, batch, m, k, pad)
        b = _draw(make, dtype, batch, n, k, pad).mT if case["b"] == "t" else _draw(make, dtype, batch, k, n, pad)
        if dtype != "fp8":
            return {"a": a, "b": b}
        one = make.uniform(1, low=1.0, high=1.0).reshape(())
        return {"a": a, "b": b, "scale_a": one, "scale_b": one.clone()}

    @operator.reference
    def _(case: Case, a: Any, b: Any, **scales: Any) -> Dict[str, Any]:
        c = a.double() @ b.double()
        return {"c": c.int() if dtype == "int8" else c}  # float64 holds these integers exactly

    @operator.cost
    def _(case: Case) -> Cost:
        m, n, k, count = case["m"], case["n"], case["k"], case.get("batch") or 1
        size, scales = BYTES[dtype], 8 if dtype == "fp8" else 0
        moved = size * (m * k + n * k) + OUT_BYTES.get(dtype, size) * m * n
        return Cost(flops=2.0 * count * m * n * k, bytes=count * moved + scales)

    @operator.tolerance
    def _(case: Case) -> Tolerance:
        return _tolerance(dtype, case["k"])

    inner = compiled(lambda case, **tensors: _product(dtype, case, **tensors))

    @operator.implementation("torch")
    def _(case: Case, **tensors: Any) -> Dict[str, Any]:
        _refuse(dtype, tensors["a"])
        with _setting(**flags):
            return {"c": _product(dtype, case, **tensors)}

    @operator.implementation("compile")
    def _(case: Case, **tensors: Any) -> Dict[str, Any]:
        _refuse(dtype, tensors["a"])
        with _setting(**flags):  # outside of what is compiled: the compiler reads these flags as they are then
            return {"c": inner(case, **tensors)}

    if dtype != "fp8":

        @operator.layout("transposed")
        def _(case: Case, a: Any, b: Any) -> Dict[str, Any]:
            def turned(x: Any, transposed: bool) -> Any:
                return x.contiguous() if transposed else x.mT.contiguous().mT

            return {"a": turned(a, case.get("a") == "t"), "b": turned(b, case["b"] == "t")}

    for name, value in (("full-precision-reduction", False), ("reduced-precision-reduction", True)):
        if dtype in REDUCED:
            operator.implementation(name)(_with_reduction(dtype, value))
    if dtype in REDUCED:
        operator.implementation("triton")(_in_triton)
    return operator


def _with_reduction(dtype: str, reduced: bool) -> Any:
    """The product with partial sums of a split K kept in 16 bits, if the library likes to, or in float32."""

    def implementation(case: Case, **tensors: Any) -> Dict[str, Any]:
        with _setting(**{REDUCED[dtype]: reduced}):
            return {"c": _product(dtype, case, **tensors)}

    return implementation


def _in_triton(case: Case, a: Any, b: Any) -> Dict[str, Any]:
    return in_triton.kernels(a, dots=True).matmul(a, b).run()


ops = [
    _operator("float32", "c = a b, float32 without TF32"),
    _operator("tf32", "c = a b, float32 with TF32 allowed"),
    _operator("float16", "c = a b, float16"),
    _operator("bfloat16", "c = a b, bfloat16"),
    _operator("fp8", "c = a b, float8 e4m3 with one scale each, bfloat16 out"),
    _operator("int8", "c = a b, int8 in, int32 out"),
]
