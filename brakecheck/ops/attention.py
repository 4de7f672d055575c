"""Attention forward: head dimension 64 at several tile shapes (claim A11), and the library's backends."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

from . import in_triton
from .base import Case, Cost, CudaKernel, Launch, Missing, Operator, Tolerance, blocks, f32, i32
from .make import Make
from .sdpa import BACKENDS, attend, attend_with_lse, dense

HEAD = 64  # of our kernels
SCALE = HEAD**-0.5

op = Operator(
    "attention", "softmax(q k^T / sqrt(dim)) v with the log-sum-exp, bfloat16",
    cases=[
        Case.of(heads=2, length=64, causal=False),
        Case.of(heads=3, length=197, causal=False),
        Case.of(heads=3, length=197, causal=True),
        Case.of(heads=64, length=2048, causal=False),
        Case.of(heads=64, length=2048, causal=True),
        Case.of(heads=5, length=77, causal=True, dim=128, packed=True),
        Case.of(heads=16, length=8192, causal=True, dim=128),
        Case.of(heads=64, length=2048, causal=False, dim=128, packed=True),
    ],
    claims=("A11",),
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    """packed: q, k and v lie in one tensor (length, 3, heads, dim), as one projection gives them."""
    heads, length, dim = case["heads"], case["length"], case.get("dim", HEAD)
    if case.get("packed"):
        together = make.normal(length, 3, heads, dim, dtype="bfloat16")
        return {name: together[:, i].transpose(0, 1) for i, name in enumerate("qkv")}
    return {name: make.normal(heads, length, dim, dtype="bfloat16") for name in ("q", "k", "v")}


@op.reference
def _(case: Case, q: Any, k: Any, v: Any) -> Dict[str, Any]:
    out, lse = dense(case, q.double(), k.double(), v.double())
    return {"out": out, "lse": lse}


@op.cost
def _(case: Case) -> Cost:
    heads, length, dim = case["heads"], case["length"], case.get("dim", HEAD)
    pairs = length * (length + 1) / 2 if case["causal"] else length * length
    return Cost(flops=4 * heads * pairs * dim, bytes=heads * length * (4 * 2 * dim + 4))


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(1e-2, "weights and result are rounded to bfloat16, 2^-9 each, and averaging makes results small")


@op.implementation("torch")
def _(case: Case, q: Any, k: Any, v: Any) -> Dict[str, Any]:
    return {"out": attend(case, q, k, v)}


def _backend(name: str) -> Callable[..., Dict[str, Any]]:
    return lambda case, q, k, v: {"out": attend(case, q, k, v, name)}


for _name in BACKENDS:
    op.implementation(_name)(_backend(_name))


@op.implementation("flash-with-lse")
def _(case: Case, q: Any, k: Any, v: Any) -> Dict[str, Any]:
    """Flash attention by its own name: it also gives the log-sum-exp, which the public function keeps to itself."""
    out, lse = attend_with_lse(case, q, k, v)
    return {"out": out, "lse": lse}


@op.implementation("triton")
def _(case: Case, q: Any, k: Any, v: Any) -> Dict[str, Any]:
    if q.shape[2] not in (16, 32, 64, 128):
        raise Missing(f"the Triton kernel has head dimensions of 16, 32, 64 and 128, not {q.shape[2]}")
    return in_triton.kernels(q, dots=True).attention(q, k, v, case["causal"]).run()


@op.layout("length-first")
def _(case: Case, q: Any, k: Any, v: Any) -> Dict[str, Any]:
    """(length, heads, dim) in memory, seen as (heads, length, dim)."""
    return {name: t.transpose(0, 1).contiguous().transpose(0, 1) for name, t in (("q", q), ("k", k), ("v", v))}


def _ours(case: Case) -> bool:
    return bool(case.get("dim", HEAD) == HEAD and not case.get("packed"))


def _outputs(case: Case, q: Any, k: Any, v: Any) -> Dict[str, Any]:
    return {"out": q.new_empty(q.shape), "lse": q.new_empty(q.shape[:2]).float()}


def _launches(rows: int, shared: int) -> Callable[..., List[Launch]]:
    def launches(case: Case, q: Any, k: Any, v: Any, out: Any, lse: Any) -> List[Launch]:
        arguments = [q, k, v, out, lse, i32(case["length"]), i32(int(case["causal"])), f32(SCALE)]
        grid = (blocks(case["length"], rows), case["heads"], 1)
        return [Launch(grid, (2 * rows, 1, 1), arguments, dynamic_shared=shared)]

    return launches


for _m, _n in ((64, 64), (128, 64), (128, 96), (128, 128)):
    _shared = (_m + 4 * _n) * 2 * HEAD
    op.cuda(CudaKernel(f"{_m}x{_n}", "attention.cu", f"attention<{_m}, {_n}>", 2 * _m, _outputs, _launches(_m, _shared),
                       dynamic_shared=_shared, supports=_ours))
