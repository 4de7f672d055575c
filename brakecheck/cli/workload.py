"""brakecheck workload TRACE: the operator mix of a trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

import typer

from ..model import UsageError


def workload(
    trace: Path = typer.Argument(..., help="A trace of the PyTorch profiler, or a folder of one file a rank."),
    output: Optional[Path] = typer.Option(None, "--output", "-o", help="Write the mix here, for compare --workload."),
    rows: int = typer.Option(20, help="Entries to print; 0 prints all."),
    as_json: bool = typer.Option(False, "--json", help="Print the mix as JSON and nothing else."),
) -> int:
    """Extract what a workload runs: operators, shapes, calls a step, share of the time; and what the catalogue covers.
    """
    from ..evidence.recognise import open_evidence
    from ..evidence.workload import extract

    if rows < 0:
        raise UsageError(f"the number of rows cannot be {rows}", "--rows", "give 0 for all rows")
    if output and not output.resolve().parent.is_dir():
        raise UsageError("the folder of the output does not exist", str(output.parent), "create it first")
    mix = extract(open_evidence(trace))
    text = json.dumps(mix, indent=1)
    if output:
        unfinished = output.with_name(output.name + ".unfinished")
        unfinished.write_text(text + "\n")
        unfinished.replace(output)
    if as_json:
        sys.stdout.write(text + "\n")
    else:
        _show(mix, rows, output)
    return 0


def _size(shape: Sequence[Any]) -> str:
    """16x559, or [16x559 16x559] for a list of tensors."""
    if isinstance(shape[0], (list, tuple)):
        return f"[{' '.join(_size(s) for s in shape if s)}]"
    return "x".join(map(str, shape))


def _show(mix: Dict[str, Any], rows: int, output: Optional[Path]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..evidence.wording import duration, short

    console = Console()
    steps = mix["source"]["steps"]
    console.print(f"[bold]{len(mix['entries'])}[/] kinds of operator calls, {duration(mix['time_ns'])} of "
                  f"{mix['clock']} time a step (mean of {steps} step{'s' if steps > 1 else ''}"
                  + (f", {mix['source']['ranks']} ranks" if mix["source"]["ranks"] > 1 else "") + ")")
    if "busy_share" in mix:
        console.print(f"a step takes {duration(mix['step_ns'])}, the device works in {mix['busy_share']:.1%} of it")
    if not mix["source"]["shapes_recorded"]:
        console.print("[yellow]warning[/] the trace has no shapes: record it with record_shapes=True")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column, justify in (("share", "right"), ("calls", "right"), ("operator", "left"), ("shapes", "left"),
                            ("stands for it", "left")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for entry in mix["entries"][: rows or None]:
        case = entry.get("case")
        stands = f"{case['operator']} {case['name']}" + (" (like it)" if case["fit"] == "like" else "") if case \
            else f"nothing: {entry['why']}"
        shapes = " ".join(_size(s) for s in entry.get("shapes", []) if s)
        table.add_row(f"{entry['share']:.1%}", f"{entry['calls']:.4g}" if "calls" in entry else "",
                      escape(entry.get("operator", "?")), escape(short(shapes, 44)), escape(stands))
    console.print(table)
    if rows and len(mix["entries"]) > rows:
        console.print(f"{len(mix['entries']) - rows} more: --rows 0")
    console.print(f"covered: {mix['covered_share']:.1%} of the time, {mix['same_share']:.1%} by the very operation")
    for item in mix["uncovered"][:6]:
        console.print(f"  not covered {item['share']:6.1%}  {escape(item.get('operator', '?'))}: {escape(item['why'])}")
    if output:
        console.print(f"written to {escape(str(output))}")
