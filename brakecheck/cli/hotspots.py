"""brakecheck hotspots REPORT|CUBIN|PROGRAM: where kernels stall and diverge, by source line."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Optional

import typer

from ..model import UsageError, encode


def hotspots(
    path: Path = typer.Argument(..., help="Report (.ncu-rep), its source page as CSV, cubin, program or library with "
                                         "device code, or folder of profile."),
    kernel: str = typer.Option("", help="Only kernels whose name matches this regular expression."),
    rows: int = typer.Option(10, help="Lines a kernel to print; 0 prints all."),
    nvdisasm: Optional[Path] = typer.Option(None, help="Disassembler (default: on PATH, else a wheel's)."),
    offline: bool = typer.Option(False, help="Never download a disassembler."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON and nothing else."),
) -> int:
    """Stalls and divergence by source line: file:line, instruction, reasons, share of divergent branches."""
    from ..evidence.hotspots import only, open_hotspots

    try:
        re.compile(kernel)
    except re.error as error:
        raise UsageError(f"{kernel!r} is no regular expression: {error}", "--kernel", "escape its characters") from None
    if rows < 0:
        raise UsageError(f"the number of rows cannot be {rows}", "--rows", "give 0 for all rows")

    def tool(name: str) -> Path:
        beside = nvdisasm.with_name(name) if nvdisasm and name != "nvdisasm" else nvdisasm
        if beside and (name == "nvdisasm" or beside.exists()):
            return beside
        if found := shutil.which(name):
            return Path(found)
        from ..stack.toolchain import disassembler

        return disassembler(offline=offline).nvdisasm.with_name(name)

    everything = open_hotspots(path, tool)
    found = only(everything, kernel, rows)
    if not found:
        names = ", ".join(sorted({k.name.split("(")[0][:60] for k in everything})[:8])
        raise UsageError(f"no kernel matches {kernel!r}", "--kernel", f"there are: {names}")
    if as_json:
        json.dump([encode(k) for k in found], sys.stdout, indent=1)
        print()
    else:
        for one in found:
            _show(one)
    return 0


def _show(kernel: Any) -> None:
    from rich.console import Console
    from rich.markup import escape

    from ..evidence.names import short_name

    console = Console()
    facts = [kernel.arch or "", f"{kernel.samples:.0f} stall samples" if kernel.samples is not None else "",
             f"{kernel.active:.1f} of 32 threads active" if kernel.active is not None else "",
             f"{kernel.divergent_share:.1%} of branches diverge" if kernel.divergent_share is not None else ""]
    name = escape(short_name(kernel.name))
    console.print(f"[bold]{name}[/]  {', '.join(f for f in facts if f)}", highlight=False)
    for note in kernel.notes:
        console.print(f"  [yellow]note[/] {escape(note)}")
    for spot in kernel.spots:
        share = f"{spot.share:6.1%}" if spot.share is not None else ""
        stalls = ", ".join(f"{reason} {part:.0%}" for reason, part in list(spot.stalls.items())[:3])
        more = [f"{spot.active:.1f} of 32 active" if spot.active is not None and spot.active < 31.5 else "",
                f"{spot.divergent_share:.0%} of branches diverge" if spot.divergent_share else "",
                ", ".join(f"{count} {what}" for what, count in spot.static.items())]
        words = "; ".join(w for w in (stalls, *more) if w)
        console.print(f"  {share} [bold]{escape(spot.place)}[/]  {escape(words)}", highlight=False)
        if spot.file is not None and spot.instructions:
            console.print(f"         [dim]{escape(spot.instructions[0])}[/]", highlight=False)
