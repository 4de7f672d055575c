"""torch.compile of an implementation: what every operator that has a "torch" implementation also has as "compile"."""

from __future__ import annotations

from typing import Any, Callable, Dict


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`(case, **tensors) compiled by torch.compile for each case, at the first call of that case.

    The case is a constant of what is compiled, and shapes are static. One case is measured at a time, so the compiler
    forgets the one before: it counts variants of a function and stops compiling at the ninth."""
    kept: Dict[str, Callable[..., Any]] = {}

    def call(case: Any, **tensors: Any) -> Any:
        if case.name not in kept:
            import torch

            kept.clear()
            torch.compiler.reset()
            kept[case.name] = torch.compile(lambda **given: function(case, **given), dynamic=False)
        return kept[case.name](**tensors)

    return call
