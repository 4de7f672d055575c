"""brakecheck compare BASE CANDIDATE ...: verdict, deltas, causes, mitigations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, List, Optional

import typer

from .console import INTERRUPTED, progress_bar

COMPILED = "Comparing toolchains (cuda==...)"
MEASURED = "Measuring (environments; toolchains with --device)"


def compare(
    stacks: Annotated[List[str], typer.Argument(
        metavar="BASE CANDIDATE",
        help="cuda==12.9, cuda==12.6+ptxas==12.8; env:PYTHON, pip:torch==2.12.0, launch:COMMAND, each with "
             "+nvidia-cublas==13.5.1.27; FILE.toml or FILE.toml:NAME; a recorded run; a CSV or JSON table of blocks.")],
    operators: Annotated[str, typer.Option(help="Only these operators of the catalogue, comma-separated.")] = "",
    policy: Annotated[Optional[Path], typer.Option(
        help="Policy file (default: ./brakecheck.toml when there is one).")] = None,
    report: Annotated[Optional[List[Path]], typer.Option(
        "--report", "-o",
        help="Write a report here (repeatable): .html, .md for a pull request, .xml for JUnit, .json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON and nothing else.")] = False,
    device: Annotated[Optional[str], typer.Option(
        help="cpu (default), cuda:0, or cuda:0,cuda:1 to share the cases out.", rich_help_panel=MEASURED)] = None,
    measure: Annotated[bool, typer.Option(
        "--measure", help="Time toolchains too, on cuda:0.", rich_help_panel=MEASURED)] = False,
    cases: Annotated[str, typer.Option(help="Glob patterns over 'CASE' or 'OPERATOR CASE', with | between.",
                                       rich_help_panel=MEASURED)] = "*",
    implementation: Annotated[Optional[str], typer.Option(
        help="base=torch,candidate=triton, or one name for both.", rich_help_panel=MEASURED)] = None,
    ops: Annotated[Optional[List[str]], typer.Option(
        help="Python file with operators of your own (repeatable).", rich_help_panel=MEASURED)] = None,
    budget: Annotated[str, typer.Option(help="90s, 10m, 1h.", rich_help_panel=MEASURED)] = "10m",
    duty: Annotated[str, typer.Option(help="burst or sustained.", rich_help_panel=MEASURED)] = "burst",
    limit: Annotated[str, typer.Option(
        help="Longest visit to one case, compilation included, before it counts as hung.",
        rich_help_panel=MEASURED)] = "2m",
    seed: Annotated[int, typer.Option(help="Of inputs and of all orders.", rich_help_panel=MEASURED)] = 0,
    workload: Annotated[Optional[Path], typer.Option(
        help="File of brakecheck workload: its cases are measured and weighed; or shares of time by operator.",
        rich_help_panel=MEASURED)] = None,
    resume: Annotated[Optional[str], typer.Option(
        metavar="RUN", help="Go on with this interrupted run.", rich_help_panel=MEASURED)] = None,
    store: Annotated[Optional[str], typer.Option(
        help="Folder or fsspec URL of the run store.", rich_help_panel=MEASURED)] = None,
    source: Annotated[Optional[List[Path]], typer.Option(
        "--source", "-s", help="Your own .cu or .ptx file (repeatable); the catalogue otherwise.",
        rich_help_panel=COMPILED)] = None,
    include: Annotated[Optional[List[Path]], typer.Option(
        "--include", "-I", help="Include directory for --source (repeatable).", rich_help_panel=COMPILED)] = None,
    define: Annotated[Optional[List[str]], typer.Option(
        "--define", "-D", metavar="NAME[=VALUE]", help="Macro (repeatable).", rich_help_panel=COMPILED)] = None,
    std: Annotated[Optional[str], typer.Option(
        help="C++ standard for --source, for instance c++20.", rich_help_panel=COMPILED)] = None,
    launch: Annotated[Optional[List[str]], typer.Option(
        metavar="KERNEL=THREADS[,SHARED]", rich_help_panel=COMPILED,
        help="How a kernel of --source is launched: threads a block, bytes of dynamic shared memory (repeatable; or a "
             "line `// brakecheck: launch KERNEL=THREADS` in the source). Gives occupancy and launches that cannot "
             "work.")] = None,
    arch: Annotated[str, typer.Option(
        help="Architectures, comma-separated.", rich_help_panel=COMPILED)] = "sm_80,sm_89,sm_90a",
    front: Annotated[str, typer.Option(
        help="Front end: nvrtc, or nvcc (CUDA 13.0 on).", rich_help_panel=COMPILED)] = "nvrtc",
    nvcc: Annotated[Optional[Path], typer.Option(
        help="An installed nvcc to use as the front end of every stack.", rich_help_panel=COMPILED)] = None,
    offline: Annotated[bool, typer.Option(
        help="Use the cache only, never the network.", rich_help_panel=COMPILED)] = False,
    jobs: Annotated[Optional[int], typer.Option(
        min=1, help="Processes at once (default: all cores).", rich_help_panel=COMPILED)] = None,
) -> int:
    """Compare stacks, runs or tables; the first is the base. Exit status, of several candidates the
    worst: 0 GO, 1 HOLD, 2 BRAKE, 3 WITHHELD."""
    from rich.console import Console

    from .. import api
    from ..report.write import check

    for path in report or ():
        check(path)  # before the work, not after
    chosen = device or ("cuda:0" if measure else None)
    options = watch = None
    stacks = api.expanded(stacks)
    measured = any(spec.startswith(("env:", "pip:", "launch:")) or ".toml:" in spec for spec in stacks)
    if chosen or measured or cases != "*" or ops:
        from .run import options_of, show_progress  # statistics take a second to load, so only where they are used

        options = options_of(chosen or "cpu", operators, cases, ops, budget, seed, duty, limit)
        watch = show_progress(Console(stderr=True))
    with progress_bar() as progress:
        result = api.compare(
            *stacks, sources=source, archs=split(arch), operators=split(operators), include_dirs=include or (),
            defines=define or (), std=std, launches=launch or (),
            front="nvcc" if nvcc else front, nvcc=nvcc, policy=policy, offline=offline,
            jobs=jobs, progress=progress, device=chosen, options=options, implementation=implementation,
            workload=workload, store=store, resume=resume, watch=watch, command=sys.argv,
        )
    written = [result.write(path) for path in report or ()]
    if as_json:
        json.dump(result.to_json(), sys.stdout, indent=1)
        print()
    else:
        from ..report.terminal import render

        render(result.comparison, report=f"see {report[0]}" if report else "write one with --report FILE.html")
        if result.run and result.run.options.get("journal"):
            print(f"run: {result.run.id}" + ("" if result.run.complete else " (incomplete: --resume goes on)"))
    for path in written:
        print(f"report: {path.resolve()}", file=sys.stderr if as_json else sys.stdout)
    if result.run and result.run.options.get("interrupted"):
        return INTERRUPTED  # what was measured is judged above, but it is not what was asked for
    return result.verdict.exit_code


def split(text: str) -> List[str]:
    """Comma-separated words, blanks dropped."""
    return [word.strip() for word in text.split(",") if word.strip()]
