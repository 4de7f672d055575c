"""What every command shares: progress on standard error, and errors as one clear message."""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import contextmanager
from typing import Callable, Iterator, Optional

import typer

from ..model import BrakecheckError

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
USAGE = 64


@contextmanager
def progress_bar(enabled: bool = True) -> Iterator[Callable[[str, int, int, str], None]]:
    """A callback (stage, done, total, what) that draws one bar a stage with the time left, or one line a stage where
    standard error is no terminal. Nothing goes to standard output, so --json stays clean."""
    if not enabled:
        yield lambda stage, done, total, what: None
        return
    if not sys.stderr.isatty():
        seen = set()

        def plain(stage: str, done: int, total: int, what: str) -> None:
            if stage not in seen:
                seen.add(stage)
                print(f"{stage} ({total}) ..." if total > 1 else f"{stage} {what} ...", file=sys.stderr, flush=True)

        yield plain
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[what]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {}

        def draw(stage: str, done: int, total: int, what: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, what=what)
            bar.update(tasks[stage], completed=done, total=total, what=what[:48])

        yield draw


def run_guarded(command: Callable[[], Optional[int]], debug: bool) -> int:
    """Exit status of `command`, with every error as one message on standard error. A stack trace only with --debug."""
    started = time.monotonic()
    try:
        status = command() or 0
        if status == INTERRUPTED:  # how typer reports Ctrl-C
            raise KeyboardInterrupt
        return status
    except typer.Exit as stop:
        return stop.exit_code
    except BrakecheckError as error:
        if debug:
            traceback.print_exc()
        _say(error.what, error.where, error.todo)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _say(
            f"interrupted after {time.monotonic() - started:.0f} s",
            None,
            "what was finished is kept: run the same command again, for a measurement with --resume RUN",
        )
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            traceback.print_exc()
        _say(error.strerror or str(error), str(error.filename) if error.filename else None, _os_advice(error))
        return 74  # EX_IOERR
    except Exception as error:
        if hasattr(error, "format_message"):  # click's usage errors, whichever click typer brings along
            _say(error.format_message(), None, "see `brakecheck --help`, or `brakecheck COMMAND --help`")
            return USAGE
        # Else a fault of ours: say so, and keep the trace for those who ask.
        if debug:
            traceback.print_exc()
        _say(
            f"internal error: {type(error).__name__}: {error}",
            None,
            "please report this, with the output of the same command after `brakecheck --debug`",
        )
        return 70  # EX_SOFTWARE


def _os_advice(error: OSError) -> str:
    import errno

    return {
        errno.ENOSPC: "free some disk space, or point BRAKECHECK_CACHE or --store to a disk that has it",
        errno.EACCES: "choose a place that you may read and write",
        errno.EROFS: "choose a place that is not read-only (BRAKECHECK_CACHE for the cache)",
        errno.ENOENT: "check the path",
    }.get(error.errno or 0, "check the file and the disk, then try again")


def _say(what: str, where: Optional[str], todo: Optional[str]) -> None:
    print(f"brakecheck: {what}", file=sys.stderr)
    if where:
        print(f"  where: {where}", file=sys.stderr)
    if todo:
        print(f"  to do: {todo}", file=sys.stderr)
