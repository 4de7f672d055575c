"""What changed between two results that are both right: error, choices among ties, order of layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model import Change

GREW = 1.3  # times the base's error: equal arithmetic repeats its error far better than that
FLOOR = 1e-9  # relative errors under this are rounding in float64 and no news


def numerics_changes(base: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[Change]:
    """Changes of worker/numerics.py's findings: "error" by output (F22), "choices" (tokens whose experts are not the
    reference's, ties or not: F23), "layouts"."""
    out = []
    for name, now in candidate.get("outputs", {}).items():
        before = base.get("outputs", {}).get(name, {})
        if "relative" in before and "relative" in now and now["relative"] > max(GREW * before["relative"], FLOOR):
            text = f"error of {name} against FP64 {before['relative']:.2g} -> {now['relative']:.2g}"
            if now.get("partials", 1) > 1:
                text += f", as if {now['partials']} partial sums were kept in the output's type"
            out.append(Change(f"error.{name}", before["relative"], now["relative"], text))
    a, b = (side.get("comparison", {}).get("changed_tokens") for side in (base, candidate))
    if a is not None and b is not None and a != b:
        tied = candidate["comparison"].get("tied_tokens", 0)
        out.append(Change("choices", a, b, f"tokens whose experts are not the reference's: {a} -> {b}, {tied} of them "
                                           "by ties, which may fall either way"))
    for name, now in candidate.get("layouts", {}).items():
        before = base.get("layouts", {}).get(name, {})
        if before.get("same_in_both_orders") and now.get("same_in_both_orders") is False:
            out.append(Change(f"layouts.{name}", True, False, f"results with layout {name} depend on what was called "
                                                              "before"))
    return out
