"""MoE router in one launch: scores, top-k, weights, tokens an expert, and places of the copies sorted by expert."""

from __future__ import annotations

from typing import Any, Dict, List

from ..kernels.moe_plans import ROUTER_THREADS, STATE_WORDS, RouterPlan, route, router_one_plan, router_plan
from .base import Case, Cost, CudaKernel, Launch, Operator, Tolerance, f32, i32
from .make import Make

RESULTS = ("index", "weight", "place", "counts", "offsets")
SMS = 132  # blocks at most, in the catalogue: it must plan without a GPU

op = Operator(
    "router", "top-k router with weights, expert counts and places in one launch; ties go to the lower expert",
    cases=[
        Case.of(tokens=1, experts=256, k=8, scoring="softmax", bias=False, renormalise=True, dtype="float32"),
        Case.of(tokens=131, experts=60, k=6, scoring="softmax", bias=False, renormalise=False, dtype="float32"),
        Case.of(tokens=777, experts=255, k=16, scoring="sigmoid", bias=True, renormalise=True, dtype="float32"),
        Case.of(tokens=517, experts=509, k=10, scoring="softmax", bias=True, renormalise=True, dtype="bfloat16"),
        Case.of(tokens=8192, experts=256, k=8, scoring="softmax", bias=False, renormalise=True, dtype="float32"),
        Case.of(tokens=16384, experts=256, k=8, scoring="softmax", bias=False, renormalise=True, dtype="bfloat16"),
        Case.of(tokens=65536, experts=256, k=8, scoring="sigmoid", bias=True, renormalise=True, dtype="float32"),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    inputs = {"logits": make.normal(case["tokens"], case["experts"], dtype=case["dtype"])}
    # Small beside the scores' spread (a softmax over many experts is near zero), as a balancing bias is.
    inputs["bias"] = make.normal(case["experts"], std=0.1 if case["scoring"] == "sigmoid" else 0.001)
    return inputs


@op.reference
def _(case: Case, logits: Any, bias: Any) -> Dict[str, Any]:
    return route(logits.double(), case["k"], case["scoring"], bias if case["bias"] else None, case["renormalise"], 1.0)


@op.cost
def _(case: Case) -> Cost:
    scores, chosen = case["tokens"] * case["experts"], case["tokens"] * case["k"]
    size = 4 if case["dtype"] == "float32" else 2
    moved = size * scores + 12 * chosen + 8 * case["experts"] + 4
    return Cost(flops=scores + 3 * chosen, bytes=moved + (4 * case["experts"] if case["bias"] else 0))


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(1e-5, "float32 weights; exponentials in hardware precision")


@op.comparison
def _(case: Case, inputs: Dict[str, Any], reference: Dict[str, Any], out: Dict[str, Any]) -> Dict[str, Any]:
    """Without a bias the choice must be the reference's. With one, float32 scores closer than 1e-6 may swap. All else
    must follow from the experts that were returned."""
    import torch

    index, wanted, experts = out["index"].long(), reference["index"].long(), case["experts"]
    if not bool(((index >= 0) & (index < experts)).all()):
        return {"ok": False, "error": float("inf"), "wrong_choices": int(index.numel())}
    wrong, x = index != wanted, inputs["logits"].double()
    if case["bias"]:
        by = (x.sigmoid() if case["scoring"] == "sigmoid" else x.softmax(1)) + inputs["bias"].double()
        wrong &= (by.gather(1, index) - by.gather(1, wanted)).abs() > 1e-6
    exact = route(x, case["k"], case["scoring"], None, case["renormalise"], 1.0, index)
    follows = all(torch.equal(out[name], exact[name]) for name in ("place", "counts", "offsets"))
    error = float((out["weight"].double() - exact["weight"]).norm() / exact["weight"].norm())
    return {"ok": follows and not bool(wrong.any()) and error <= 1e-5, "error": error,
            "wrong_choices": int(wrong.sum())}


@op.implementation("torch")
def _(case: Case, logits: Any, bias: Any) -> Dict[str, Any]:
    return route(logits.float(), case["k"], case["scoring"], bias if case["bias"] else None, case["renormalise"], 1.0)


@op.implementation("ours")
def _(case: Case, logits: Any, bias: Any) -> Dict[str, Any]:
    from . import route as ours

    found = ours(logits, case["k"], case["scoring"], bias if case["bias"] else None, case["renormalise"])
    return dict(zip(RESULTS, found))


def _plan(case: Case) -> RouterPlan:
    return router_plan(case["tokens"], case["experts"], case["k"], case["dtype"], case["bias"], SMS)


def _results(case: Case, logits: Any, bias: Any) -> Dict[str, Any]:
    tokens, experts, k = case["tokens"], case["experts"], case["k"]
    whole = bias.new_empty(0).int()
    return {"index": whole.new_empty(tokens, k), "weight": bias.new_empty(tokens, k),
            "place": whole.new_empty(tokens, k), "counts": whole.new_empty(experts),
            "offsets": whole.new_empty(experts + 1)}


def _outputs(case: Case, logits: Any, bias: Any) -> Dict[str, Any]:
    return {**_results(case, logits, bias), "state": bias.new_empty(STATE_WORDS).long()}


def _launches(case: Case, logits: Any, bias: Any, **out: Any) -> List[Launch]:
    p = _plan(case)
    numbers = [i32(n) for n in (case["tokens"], case["experts"], case["k"], p.each, case["scoring"] == "sigmoid",
                                case["renormalise"])]
    arguments = [logits, bias, *[out[n] for n in (*RESULTS, "state")], *numbers, f32(1.0)]
    return [Launch((p.grid, 1, 1), (ROUTER_THREADS, 1, 1), arguments, p.shared, entry=p.entry, cooperative=p.grid > 1)]


def _launches_one(case: Case, logits: Any, bias: Any, **out: Any) -> List[Launch]:
    _, threads, shift = router_one_plan(case["experts"], case["k"], case["dtype"])
    numbers = [i32(n) for n in (case["experts"], case["k"], case["scoring"] == "sigmoid", case["renormalise"])]
    null = bias if case["bias"] else bias.new_empty(0)  # a null pointer
    arguments = [logits, null, *[out[n] for n in RESULTS], *numbers, f32(1.0), i32(shift)]
    return [Launch((1, 1, 1), (threads, 1, 1), arguments)]


# One instantiation in the catalogue stands for all: each takes seconds to compile for every architecture and release.
# The torch operator compiles the others when it meets their shapes.
_ENTRY, _ONE = "router<float, 0, 8, 32>", ("router_one<float>", 256)
_SHARED = next(_plan(c).shared for c in op.cases if _plan(c).entry == _ENTRY and c["tokens"] > 1)
op.cuda(CudaKernel("one-launch", "router.cu", _ENTRY, ROUTER_THREADS, _outputs, _launches, dynamic_shared=_SHARED,
                   zeroed=("state",), supports=lambda case: _plan(case).entry == _ENTRY))
op.cuda(CudaKernel("one-token", "router_one.cu", *_ONE, _results, _launches_one,
                   supports=lambda c: (c["tokens"] == 1
                                       and router_one_plan(c["experts"], c["k"], c["dtype"])[:2] == _ONE)))
