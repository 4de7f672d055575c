"""brakecheck diff A B: compares recordings of any kind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Dict, Optional

import typer

from ..model import UsageError


def diff(
    base: Annotated[Path, typer.Argument(help="Trace, report, export, CSV, cubin or log of the base.")],
    candidate: Annotated[Path, typer.Argument(help="The same of the candidate; it may be of another kind.")],
    margin: Annotated[float, typer.Option(help="A change per call below this counts as none (0.03 is 3 %).")] = 0.03,
    rows: Annotated[int, typer.Option(help="Places to print; 0 prints all.")] = 20,
    timeline: Annotated[Optional[Path], typer.Option(
        help="Write both sides as one timeline for ui.perfetto.dev here (.json or .json.gz).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare recorded evidence: what changed per call, what in calls, and what cannot be said.

    Exit status: 1 HOLD (something is slower per call, clear of noise), 3 WITHHELD. Recordings alone never give GO.
    """
    from ..evidence.diff import diff as compare
    from ..evidence.diff_report import to_comparison
    from ..evidence.recognise import open_evidence
    from ..evidence.step_report import summarise

    if not 0 <= margin < 1:
        raise UsageError(f"the margin is a share of the time, not {margin}", "--margin", "give 0.03 for 3 %")
    if rows < 0:
        raise UsageError(f"the number of rows cannot be {rows}", "--rows", "give 0 for all rows")
    if timeline:
        _check_timeline(timeline)
    sides = {"base": open_evidence(base), "candidate": open_evidence(candidate)}
    result = compare(sides["base"], sides["candidate"], margin)
    steps = {name: found for name, side in sides.items() if (found := summarise(side))}
    comparison = to_comparison(result, steps)
    if timeline:
        from ..evidence.perfetto import export

        events = export(timeline, sides)
    if as_json:
        json.dump(comparison.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(result, rows, steps)
        if timeline:
            print(f"timeline of {events} events: {timeline}")
    raise typer.Exit(comparison.verdict.exit_code)


def _check_timeline(path: Path) -> None:
    """Before the work, not after it."""
    if path.suffix not in (".json", ".gz"):
        raise UsageError(f"a timeline is .json or .json.gz, not {path.suffix or 'without a suffix'}", str(path),
                         "name it timeline.json.gz")
    if not path.resolve().parent.is_dir():
        raise UsageError("the folder of the timeline does not exist", str(path.parent), "create it first")


def show(result, rows: int, steps: Dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    """Prints a DiffResult: verdict, warnings, steps, kernel families, then the rows, clearest first."""
    from rich.console import Console
    from rich.markup import escape

    from ..evidence.diff_report import judge, summary
    from ..evidence.step_report import lines

    console = Console()
    verdict, headline, _ = judge(result)
    console.print(f"[bold]{verdict.value}[/bold] {escape(headline)}")
    for warning in result.warnings:
        console.print(f"[yellow]warning[/yellow] {escape(warning)}")
    for fact in result.facts:
        console.print(f"changed {escape(fact.text)}")
    for side in (result.base, result.candidate):
        for finding in side.get("findings", []):
            console.print(f"[red]{finding['component']}[/red] {escape(finding['text'])} ({escape(finding['where'])})")
    for problem in result.problems[:10]:
        console.print(f"[dim]file: {escape(problem)}[/dim]")
    if len(result.problems) > 10:
        console.print(f"[dim]file: {len(result.problems) - 10} more; --json has all[/dim]")
    console.print(escape(summary(result)))
    if steps:
        console.print("\n[bold]where a step's time goes[/bold]")
    for name, found in steps.items():
        for line in lines(found):
            console.print(f"  {name}: {escape(line)}")
    _lines(console, result, rows)


def _lines(console, result, rows: int) -> None:  # type: ignore[no-untyped-def]
    from rich.markup import escape

    if result.groups:
        console.print("\n[bold]per kernel, wherever it ran[/bold]")
    for group in result.groups[: min(rows, 12) or None]:
        console.print(f"  {escape(group.text)}")
    console.print("\n[bold]per place in the program[/bold]")
    for row in result.rows[: rows or None]:
        share = f"  [dim]{row.share:.1%} of the difference[/dim]" if row.share is not None else ""
        console.print(f"  [bold]{row.state.value}[/bold]  {escape(row.text)}{share}")
        if row.place:
            console.print(f"    [dim]{escape(row.place)}[/dim]")
        for change in row.changes:
            console.print(f"    [dim]{escape(change.text)}[/dim]")
    if rows and len(result.rows) > rows:
        console.print(f"{len(result.rows) - rows} more: --rows 0")
