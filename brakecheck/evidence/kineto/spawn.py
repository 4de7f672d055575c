"""Starting the processes that decode. Imports nothing of weight, so that they import while the reader still does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, List, NamedTuple

from .layout import BLOCK, is_packed

SLOT = 2 * BLOCK    # a longer block is decoded in the reading process
SLOTS = 3           # of a worker: one is decoded, the others wait, so that it need not
_LARGE = 16 << 20   # bytes of a trace worth several processes; an eighth of it compressed
_MOST = 16          # workers; reading feeds no more
_PIPE = 1 << 20     # bytes a worker may be ahead with its answers, where the system lets it


class Started(NamedTuple):
    """file: memory shared with all processes, SLOTS slots for each."""

    file: Any
    processes: List[subprocess.Popen[bytes]]

    def close(self) -> None:
        """When nothing was given to them: they end with their stdin."""
        for process in self.processes:
            process.communicate()
        self.file.close()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def command(module: str, *arguments: str) -> List[str]:
    """Runs main() of a module of this package in a Python like this one: it finds what this one finds, and nothing
    that happens to lie in the working directory."""
    path = [str(Path(__file__).resolve().parents[3]), *sys.path]
    program = f"import sys; sys.path[:] = {path!r}; from {__package__}.{module} import main; main()"
    return [sys.executable, "-S", "-c", program, *arguments]


def is_large(path: Path) -> bool:
    """Whether a trace is worth several processes: some tenths of a second to decode."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size > (_LARGE >> 3 if is_packed(file.read(4)) else _LARGE)
    except OSError:  # the reader will say so
        return False


def start(workers: int) -> Started:
    file = _shared_file(min(workers, _MOST) * SLOTS * SLOT)
    return Started(file, [_start(file.fileno()) for _ in range(min(workers, _MOST))])


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command("worker", str(descriptor)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, pass_fds=(descriptor,))
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl
        assert process.stdout is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE)
    return process


def _shared_file(size: int) -> Any:
    """A file that lives in memory where the system has such (Linux), else in the temporary folder."""
    if hasattr(os, "memfd_create"):
        file: Any = os.fdopen(os.memfd_create("brakecheck"), "r+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    file.truncate(size)
    return file
