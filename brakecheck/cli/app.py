"""Puts the commands together."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Optional

import typer

from .. import __version__

# Command: the module that has the function of its name.
COMMANDS = {
    "compare": "compare", "run": "run", "runs": "run", "show": "run", "bundle": "bundle", "diff": "diff",
    "doctor": "doctor", "workload": "workload", "profile": "profile", "hotspots": "hotspots", "ops": "ops",
}


def build(only: Optional[str] = None) -> Any:
    """The click command of the whole program; with `only`, of that command alone, since loading all takes time."""
    app = typer.Typer(
        help="GO, HOLD or BRAKE for a new CUDA stack, operator by operator, on measured evidence.\n\n"
        "Exit status of a comparison: 0 GO, 1 HOLD, 2 BRAKE, 3 WITHHELD. Errors are 64 and up. "
        "`--debug` anywhere shows a stack trace.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )

    @app.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> Optional[int]:
        if version:
            print(f"brakecheck {__version__}")
            raise typer.Exit(0)
        return None

    for name in [only] if only in COMMANDS else COMMANDS:
        app.command()(getattr(import_module(f"..{COMMANDS[name]}", __name__), name))
    return typer.main.get_command(app)
