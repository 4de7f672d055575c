"""brakecheck doctor for a Python environment, or for files saved from one."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Optional

from ..model import encode
from ..stack import compat
from ..stack import environment_doctor as environments
from ..stack.driver import Driver, local_driver
from ..stack.environment import Environment, open_environment
from .doctor import MARKS


def examine(spec: Any, maps: Optional[Path], freeze: Optional[Path], driver: Optional[str], device_arch: Optional[str],
            as_json: bool) -> int:
    """Examines and prints. spec: a StackSpec, or None for the Python on PATH or saved files.

    Exit status: 0 nothing in the way, 1 warnings, 2 something will not work."""
    if driver:
        compat.cuda_of_driver(driver)  # a mistake is said before the work
    local = local_driver() if not (maps or freeze) and not (spec and spec.kind == "launch") else None
    if maps or freeze:
        facts = environments.saved(maps, freeze)
    else:
        facts = environments.ask_environment(_environment(spec))
    used = Driver(driver, compat.cuda_of_driver(driver)[0]) if driver else local
    found = environments.examine(facts, used, device_arch)
    here = environments.permissions() if facts.readable else []
    findings = sorted([*found.findings, *here], key=lambda f: list(MARKS).index(f.severity))
    if as_json:
        data = {"subject": found.subject, "components": encode(found.components), "archs": list(found.archs) or None,
                "devices": [[name, arch] for name, arch in found.devices] or None,
                "environment": dict(found.variables), "findings": [encode(f) for f in findings]}
        json.dump({k: v for k, v in data.items() if v is not None}, sys.stdout, indent=1)
        print()
    else:
        _show(found, findings, used)
    worst = min((f.severity for f in findings), key=list(MARKS).index, default="info")
    return {"error": 2, "warning": 1, "info": 0}[worst]


def _environment(spec: Any) -> Environment:
    if spec is None:
        python = shutil.which("python") or shutil.which("python3") or sys.executable
        return Environment(python, python, (python,))
    return open_environment(spec.text)


def _show(found: environments.Examination, findings: list[compat.Finding], driver: Optional[Driver]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{escape(found.subject)}[/] "
                  + (f"with driver {driver.version}" if driver else "without a driver: what needs one is not judged"))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("component", "version", "file"):
        table.add_column(column, overflow="fold")
    for component in found.components:
        table.add_row(component.name, component.version, escape(component.path or ""))
    if found.components:
        console.print(table)
    for name, arch in found.devices:
        console.print(f"device {escape(name)} {arch or ''}")
    if found.archs:
        console.print(f"PyTorch has code for {' '.join(found.archs)}")
    for finding in findings:
        colour, word = MARKS[finding.severity]
        word = "note" if finding.severity == "info" else word
        console.print(f"\n[{colour} bold]{word}[/]  {escape(finding.text)}", highlight=False)
        if finding.advice:
            console.print(f"  [dim]to do:[/] {escape(finding.advice)}")
    if all(f.severity == "info" for f in findings):
        console.print("\n[green bold]nothing in the way[/]")
