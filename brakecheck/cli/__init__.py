"""The command line: one file per command, nothing but argument handling and calls."""

from __future__ import annotations

import sys
from typing import List, Optional


def main(arguments: Optional[List[str]] = None) -> None:
    """Entry point of `brakecheck`. Exit status: 0 GO, 1 HOLD, 2 BRAKE, 3 WITHHELD; 64 and up are errors, 130 Ctrl-C."""
    from .app import build
    from .console import run_guarded

    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    rest = [a for a in given if a != "--debug"]
    only = rest[0] if rest else None
    sys.exit(run_guarded(lambda: build(only)(rest or ["--help"], standalone_mode=False), debug))
