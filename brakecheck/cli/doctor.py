"""brakecheck doctor: what a toolchain's output needs to run, what an environment really uses, before anything runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import typer

from ..model import UsageError, encode

MARKS = {"error": ("red", "will not work"), "warning": ("yellow", "may not work"), "info": ("green", "fine")}


def doctor(
    stack: Optional[str] = typer.Argument(
        None, help="cuda==12.9, cuda==12.6+ptxas==12.8; env:/path/to/python, pip:torch==2.12.0, each with "
                   "+nvidia-cublas==13.5.1.27; launch:COMMAND (default: python on PATH)."
    ),
    driver: Optional[str] = typer.Option(None, help="Driver version to check against (default: this machine's)."),
    arch: str = typer.Option("sm_80,sm_89,sm_90a", help="Architectures the code is built for, comma-separated."),
    device_arch: Optional[str] = typer.Option(None, help="Architecture of the device (default: this machine's GPU)."),
    maps: Optional[Path] = typer.Option(None, help="Saved /proc/PID/maps of a process elsewhere, instead of a stack."),
    freeze: Optional[Path] = typer.Option(None, help="Saved output of pip freeze elsewhere, instead of a stack."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON and nothing else."),
) -> int:
    """What will not work, before anything runs: cubins and PTX of a toolchain against a driver, or the libraries,
    symbols, architectures, variables and permissions of an environment.

    Exit status: 0 nothing in the way, 1 warnings, 2 something will not work.
    """
    from ..stack.spec import parse

    if device_arch:
        from ..stack.compat import split_arch

        split_arch(device_arch)  # a mistake is said before the work
    if (maps or freeze) and stack:
        raise UsageError("a stack and saved files are two things", f"{stack} beside --maps or --freeze", "give one")
    parsed = parse(stack) if stack else None
    if parsed is None or parsed.kind != "cuda":
        from .doctor_environment import examine

        return examine(parsed, maps, freeze, driver, device_arch, as_json)
    assert stack is not None
    return _toolchain(stack, parsed, driver, arch, device_arch, as_json)


def _toolchain(
    stack: str, parsed: Any, driver: Optional[str], arch: str, device_arch: Optional[str], as_json: bool
) -> int:
    from ..stack.driver import local_driver
    from .compare import split

    release, parts = parsed.base, dict(parsed.overlays)
    front = parts.get("nvrtc") or parts.get("nvcc") or release
    local = local_driver()
    version = driver or (local.version if local else None)
    libcuda = local.cuda if local and not driver else None
    device = (
        device_arch or next((d.arch for d in local.devices if d.arch), None) if local and not driver else device_arch
    )
    rows = [_examine(front, parts.get("ptxas"), a, version, libcuda, device) for a in split(arch)]
    worst = min(
        (finding["severity"] for row in rows for finding in row["findings"]), key=list(MARKS).index, default="info"
    )
    if as_json:
        data = {"stack": stack, "driver": version, "device_arch": device, "archs": rows}
        json.dump({key: value for key, value in data.items() if value is not None}, sys.stdout, indent=1)
        print()
    else:
        _show(stack, version, device, rows, bool(local) and not driver)
    return {"error": 2, "warning": 1, "info": 0}[worst]


def _examine(
    front: str, ptxas: Optional[str], arch: str, driver: Optional[str], libcuda: Optional[str], device: Optional[str]
) -> Dict[str, Any]:
    from ..stack import compat

    need = compat.needs(front, arch, ptxas)
    findings = compat.check(front, driver, arch, device, ptxas, libcuda)
    return {"needs": encode(need), "findings": [encode(f) for f in findings]}


def _show(stack: str, driver: Optional[str], device: Optional[str], rows: List[Dict[str, Any]], local: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    where = "this machine's driver" if local else "driver"
    console.print(
        f"[bold]{stack}[/] against "
        + (f"{where} {driver}" if driver else "no driver: none here, and no --driver given")
        + (f", device {device}" if device else "")
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("built for", "cubin ELF ABI", "cubin needs driver", "PTX ISA", "PTX needs driver"):
        table.add_column(column)
    for row in rows:
        need = row["needs"]
        table.add_row(
            need["arch"],
            *(str(need.get(key, "unknown")) for key in ("elf_abi", "cubin_driver", "ptx_isa", "ptx_driver")),
        )
    console.print(table)
    for finding in _once(rows):
        colour, word = MARKS[finding["severity"]]
        console.print(f"\n[{colour} bold]{word}[/]  {finding['text']}")
        if finding.get("advice"):
            console.print(f"  [dim]to do:[/] {finding['advice']}")
    if driver and not any(row["findings"] for row in rows):
        console.print("\n[green bold]nothing in the way[/]")


def _once(rows: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Findings of all architectures, worst first, each text once."""
    found = {f["text"]: f for row in rows for f in row["findings"]}
    return sorted(found.values(), key=lambda f: list(MARKS).index(f["severity"]))
