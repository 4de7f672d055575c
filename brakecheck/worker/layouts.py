"""Other layouts of the same inputs, in both orders: what ran before must not change what comes after."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

from ..model import BrakecheckError
from . import numerics, timers
from .device import Device

SHARE = 4  # other layouts are tried only where the inputs take at most this part of the free memory


def strided(case: Any, **inputs: Any) -> Dict[str, Any]:
    """The inputs with the last two dimensions of each tensor swapped in memory: equal shapes and values, other strides.
    For operators that declare no layouts of their own."""
    return {name: value.transpose(-1, -2).contiguous().transpose(-1, -2)
            if hasattr(value, "stride") and value.dim() >= 2 and min(value.shape[-2:]) > 1 else value
            for name, value in inputs.items()}


def layouts_for(device: Device, op: Any, inputs: Dict[str, Any]) -> Dict[str, Callable[..., Dict[str, Any]]]:
    """The layouts to try: those that the operator declares, else `strided` where a tensor has two dimensions."""
    if timers.bytes_of(inputs) * SHARE > device.free_bytes():
        return {}
    two = any(hasattr(v, "stride") and v.dim() >= 2 and min(v.shape[-2:]) > 1 for v in inputs.values())
    return dict(op.layouts) or ({"strided": strided} if two else {})


def check_layouts(op: Any, case: Any, function: Callable[..., Any], draw: Callable[[], Dict[str, Any]], reference: Any,
                  known: Optional[str], layouts: Optional[Dict[str, Callable[..., Dict[str, Any]]]] = None,
                  digest: Callable[[Any], str] = numerics.digest) -> Dict[str, Dict[str, Any]]:
    """{layout: {"ok", "why"?, "refused"?, "same_in_both_orders"?}} for each of `layouts` (those of the operator).

    Calls A, B, B, A, where A is the case's own layout and B the other: B after A and B after B, A after B and A as it
    was before (`known`: digest of A's result if that is the same every time) must agree, and all be right. A library
    that keeps a plan or an algorithm for the shape alone, and not for the strides, fails here. A layout that the
    implementation refuses is no fault of the case: refused has its message."""
    found: Dict[str, Dict[str, Any]] = {}
    for name, relayout in (op.layouts if layouts is None else layouts).items():
        function(case, **draw())
        try:
            after_a = function(case, **relayout(case, **draw()))
            after_b = function(case, **relayout(case, **draw()))
        except (RuntimeError, ValueError, NotImplementedError, BrakecheckError) as problem:
            if "out of memory" in str(problem).lower():
                raise
            found[name] = {"ok": True, "refused": f"{type(problem).__name__}: {problem}"[:300]}
            continue
        own = function(case, **draw())
        entry: Dict[str, Any] = {"ok": True}
        for what, outputs in (("after the case's own layout", after_a), ("after itself", after_b),
                              ("and then the case's own", own)):
            judged = numerics.check(op, case, draw(), outputs, reference)
            if not judged["ok"]:
                entry = {"ok": False, "why": f"called {what}: {judged.get('why')}"}
                break
        if known is not None:
            entry["same_in_both_orders"] = (digest(after_a) == digest(after_b)
                                            and digest(own) == known)
        found[name] = entry
    return found
