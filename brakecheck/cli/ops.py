"""brakecheck ops [OPERATOR]: the catalogue."""

from __future__ import annotations

import json
import sys
from typing import Any, Dict, Optional

import typer

from ..model import UsageError


def ops(
    operator: Optional[str] = typer.Argument(None, help="Show one operator with its cases and kernels."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON and nothing else."),
) -> int:
    """List operators, their cases, implementations and CUDA kernels."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..ops import catalogue
    from ..ops.base import CLAIMS

    found = catalogue()
    if operator and operator not in found:
        raise UsageError(f"no operator is called {operator!r}", todo=f"choose from: {', '.join(found)}")
    chosen = [found[operator]] if operator else list(found.values())
    if as_json:
        json.dump([_as_data(op) for op in chosen], sys.stdout, indent=1)
        print()
        return 0
    console = Console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("operator", "what it is", "claims", "cases", "implementations"):
        table.add_column(column, overflow="fold")
    for op in chosen:
        names = [*op.implementations, *(kernel.name for kernel in op.kernels)]
        table.add_row(op.name, escape(op.title), " ".join(op.claims), str(len(op.cases)), ", ".join(names))
    console.print(table)
    if any(op.claims for op in chosen):
        console.print("\nClaims that others have made, and that these operators are there to check:")
        for name, said in CLAIMS.items():
            if any(name in op.claims for op in chosen):
                console.print(f"  {name:<4} {said}", highlight=False, markup=False)
    if operator:
        _details(console, chosen[0])
    return 0


def _details(console: Any, op: Any) -> None:
    from rich.table import Table

    cases = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("case", "operations", "bytes", "tolerance", "why"):
        cases.add_column(column, justify="right" if column in ("operations", "bytes", "tolerance") else "left")
    for case in op.cases:
        cost = op.compute_cost(case) if op.compute_cost else None
        tolerance = op.choose_tolerance(case) if op.choose_tolerance else None
        cases.add_row(
            case.name,
            f"{cost.flops:,.0f}" if cost else "",
            f"{cost.bytes:,.0f}" if cost else "",
            f"{tolerance.relative:g}" if tolerance else "",
            tolerance.why if tolerance else "",
        )
    console.print()
    console.print(cases)
    if op.kernels:
        kernels = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("kernel", "source", "entry", "threads", "from"):
            kernels.add_column(column)
        for kernel in op.kernels:
            kernels.add_row(kernel.name, kernel.source, kernel.entry, str(kernel.threads), f"sm_{kernel.min_arch}")
        console.print()
        console.print(kernels)


def _as_data(op: Any) -> Dict[str, Any]:
    return {
        "operator": op.name,
        "title": op.title,
        "claims": list(op.claims),
        "cases": [{"name": case.name, "params": dict(case.params)} for case in op.cases],
        "implementations": list(op.implementations),
        "kernels": [
            {
                "name": k.name,
                "source": k.source,
                "entry": k.entry,
                "threads": k.threads,
                "dynamic_shared": k.dynamic_shared,
                "min_arch": k.min_arch,
            }
            for k in op.kernels
        ],
    }
