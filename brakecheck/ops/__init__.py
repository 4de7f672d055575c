"""The operator catalogue: every module in this folder that defines `op` (an Operator) or `ops` (several) is in it.

Operators of ours that are for use are here too (brakecheck.ops.softmax, route, ...). They need torch, and are loaded at
first use, because the catalogue must be readable without it.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import Any, Dict, List, Tuple

from ..model import Entry, Source
from .base import Case, Cost, CudaKernel, Launch, Operator, Scalar, TensorMap, Tolerance

__all__ = [
    "Case", "Cost", "CudaKernel", "Launch", "Operator", "Scalar", "TensorMap", "Tolerance", "catalogue",
    "catalogue_sources",
]
_USABLE = {  # module of kernels/: what it offers
    "rows": ("softmax", "layer_norm", "rms_norm"),
    "moe": ("Routing", "route", "router_reduce", "permute", "unpermute", "add_rows", "embedding_gradient"),
    "arena": ("Arena",),
}


def __getattr__(name: str) -> Any:
    for module, names in _USABLE.items():
        if name in names:
            return getattr(importlib.import_module(f"..kernels.{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def catalogue() -> Dict[str, Operator]:
    """All operators by name, in alphabetical order of their files."""
    found: Dict[str, Operator] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        if module.name in ("base", "make"):
            continue
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        several = getattr(loaded, "ops", None) or ([loaded.op] if hasattr(loaded, "op") else [])
        for operator in several:
            if operator.name in found:
                raise ValueError(f"two operators are called {operator.name!r}")
            found[operator.name] = operator
    return found


def catalogue_sources() -> List[Source]:
    """What to compile for the whole catalogue: one Source for each file and set of defines, with all of its entries."""
    merged: Dict[Tuple[str, Tuple[str, ...], str], Source] = {}
    for operator in catalogue().values():
        for kernel in operator.kernels:
            source = kernel.source_of(operator.name)
            key = (source.path, source.defines, source.std)
            if key in merged:
                entries: Dict[str, Entry] = {e.expression: e for e in (*merged[key].entries, *source.entries)}
                source = replace(merged[key], entries=tuple(entries.values()))
            merged[key] = source
    return list(merged.values())
