"""brakecheck run, runs, show: measure one stack, list the store, print a run."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ..bench import store as stores
from ..bench.bundle import is_bundle, measure_bundle
from ..bench.controller import Options
from ..bench.recorded import read_recorded
from ..measuring import measure, seconds_of
from ..model import Run
from ..model.codec import encode

Device = Annotated[str, typer.Option(help="cpu, cuda:0, ...")]
Operators = Annotated[Optional[str], typer.Option(help="names separated by commas; all when left out")]
Cases = Annotated[str, typer.Option(help="glob patterns over 'CASE' or 'OPERATOR CASE', with | between")]
Ops = Annotated[Optional[list[str]], typer.Option(help="Python file with operators of your own; may be repeated")]
Store = Annotated[Optional[str], typer.Option(help="folder or fsspec URL of the run store")]
Limit = Annotated[str, typer.Option(help="longest visit to one case, compilation included, before it counts as hung")]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output")]


def options_of(device: str, operators: Optional[str], cases: str, ops: Optional[list[str]], budget: str, seed: int,
               duty: str = "burst", limit: str = "2m") -> Options:
    """Options of the measuring commands from their command line."""
    names = tuple(n.strip() for n in (operators or "").split(",") if n.strip())
    return Options(device=device, operators=names, cases=cases, ops=tuple(ops or ()), seed=seed,
                   budget=seconds_of(budget), limit=seconds_of(limit, "--limit"), plan={"duty": duty})


def show_progress(console: Console) -> Any:
    """A callback that keeps one status line: what is measured, how many cases are left, time left in the budget."""
    def update(event: dict[str, Any]) -> None:
        left = max(0, int(event["left"]))
        console.print(f"pair {event['pair'] + 1}  {event['arm']:<10} {event['operator']} {event['case']}  "
                      f"{event['active']} cases open, {left // 60}:{left % 60:02d} of the budget left"
                      + ("" if event["ok"] else "  FAILED"), end="\r" if console.is_terminal else "\n", highlight=False,
                      markup=False, overflow="ellipsis", no_wrap=True)
    return update


def run(stack: Annotated[str, typer.Argument(help="env:/path/python, pip:torch==..., launch:CMD, FILE.toml:NAME; or "
                                                  "the folder of a bundle")],
        device: Device = "cpu", operators: Operators = None, cases: Cases = "*", ops: Ops = None,
        implementation: Annotated[str, typer.Option()] = "torch", visits: Annotated[int, typer.Option(min=1)] = 5,
        budget: Annotated[str, typer.Option(help="90s, 10m, 1h")] = "10m", seed: int = 0,
        duty: Annotated[str, typer.Option(help="burst or sustained")] = "burst", limit: Limit = "2m",
        store: Store = None,
        resume: Annotated[Optional[str], typer.Option(help="run to go on with")] = None, json_: Json = False) -> None:
    """Measure one stack, or the arms of a bundle, and keep the run."""
    console = Console(stderr=True)
    if is_bundle(stack):
        found = measure_bundle(Path(stack), device, seconds_of(budget), None, show_progress(console), sys.argv,
                               lambda run: stores.write(run, store or stores.default_store()))
        print_run(found) if not json_ else print(json.dumps(encode(found), indent=1))
        return
    options = options_of(device, operators, cases, ops, budget, seed, duty, limit)
    found = measure(stack, options, implementation=implementation, visits=visits, store=store, resume=resume,
                    progress=show_progress(console), command=sys.argv)
    if json_:
        print(json.dumps(encode(found), indent=1))
    else:
        print_run(found)
    if found.options.get("interrupted"):
        raise KeyboardInterrupt


def runs(store: Store = None, json_: Json = False) -> None:
    """List the runs of a store, oldest first."""
    found = stores.listing(store or stores.default_store())
    if json_:
        print(json.dumps(found, indent=1))
        return
    table = Table(Column("run", no_wrap=True), Column("arms", overflow="fold"), "device", "complete", box=None)
    for r in found:
        arms = " | ".join(f"{a['stack']['name']} ({a['implementation']})" for a in r["arms"])
        state = "damaged" if r.get("damaged") else "yes" if r.get("complete") else "no"
        table.add_row(r["id"], escape(arms), escape(r["device"].get("name", "")), state)
    Console().print(table if found else f"no runs in {store or stores.default_store()}")
    for path, specs in stores.unfinished(store or stores.default_store()):
        print(f"no run yet: {' | '.join(specs)}\n  killed, or still measuring; to go on, repeat its command with "
              f"--resume {shlex.quote(path)}")


def show(name: Annotated[str, typer.Argument(help="run id, its beginning, its folder, or a file")], store: Store = None,
         json_: Json = False) -> None:
    """Print a run: one line for each arm and case."""
    found = read_recorded(name, store)
    if json_:
        print(json.dumps(encode(found), indent=1))
    else:
        print_run(found)


def print_run(found: Run) -> None:
    console = Console()
    device = f"{found.device.get('name', '')} {found.device.get('arch', '')}"
    console.print(escape(f"run {found.id}  {found.created}  {device}")
                  + ("" if found.complete else "  [bold]incomplete[/bold]"))
    if found.command:
        console.print(f"  {shlex.join(found.command)}", highlight=False, markup=False)
    for warning in found.warnings:
        console.print(f"  warning: {warning}", highlight=False, markup=False)
    table = Table("arm", "operator", "case", "us", "spread", "visits", "memory MiB", "result", "note", box=None)
    for m in found.measurements:
        medians = sorted(b.median for b in m.blocks)
        us = m.median_us
        spread = f"{(medians[-1] / medians[0] - 1):.1%}" if len(medians) > 1 else ""
        memory = max(m.memory.values()) / 2**20 if m.memory else None
        result = "" if m.numerics is None else "right" if m.numerics.get("ok") else f"WRONG: {m.numerics.get('why')}"
        shown = (m.arm, m.operator, m.case, "" if us is None else f"{us:.2f}", spread, str(len(medians)),
                 "" if memory is None else f"{memory:.1f}", result if m.status == "ok" else m.status,
                 (m.message or m.note or "")[:100])
        table.add_row(*map(escape, shown))
    console.print(table)
