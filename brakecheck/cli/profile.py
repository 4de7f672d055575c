"""brakecheck profile -- PROGRAM: runs a program under a profiler and keeps the evidence for diff."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import List, Optional

import typer

from .. import __version__


def profile(
    command: List[str] = typer.Argument(..., metavar="-- PROGRAM...", help="What to run: -- python my.py --batch 8."),
    tool: str = typer.Option("kineto", "--with", help="kineto (torch.profiler), nsys or ncu."),
    output: Optional[Path] = typer.Option(None, "--output", "-o", help="Folder to make (default: profile-DATE)."),
    skip: int = typer.Option(0, help="Steps of the program to leave out first."),
    steps: int = typer.Option(0, help="Steps to record; 0 records all."),
    step: str = typer.Option("optimizer", help="What ends a step: optimizer (its step) or forward (outermost module)."),
    ranges: List[str] = typer.Option([], "--range", help="ncu: only kernels inside this NVTX range (repeatable)."),
    launches: int = typer.Option(0, help="ncu: at most so many kernels; 0 for all."),
    replay: str = typer.Option("kernel", "--replay-mode", help="ncu: kernel, or application (the program runs again)."),
) -> int:
    """Run a program under a profiler, with operators as marks. Collectives are never replayed.

    `brakecheck diff` compares two such folders, also of two machines or GPUs. The exit status is the program's.
    """
    from ..evidence.profile_run import Plan
    from ..evidence.profile_run import profile as run

    target = output or Path(f"profile-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    plan = Plan(tuple(command), tool, skip, steps, step, tuple(ranges), launches, replay)
    manifest = run(plan, target, {"brakecheck": __version__})
    status = int(manifest["exit_status"])
    print(f"{target}: {', '.join(e['kind'] for e in manifest['evidence'])} of {manifest.get('processes', 1)} process"
          f"{'es' if manifest.get('processes', 1) > 1 else ''}"
          + (f", {manifest['steps']} steps" if "steps" in manifest else ""))
    for problem in manifest.get("problems", ()):
        print(f"  problem: {problem}")
    if status:
        print(f"  the program ended with status {status}; what was recorded is kept")
    return 128 - status if status < 0 else status
