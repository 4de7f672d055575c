"""Decoding the blocks of a trace: in this process when the trace is small, else in several."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import tempfile
from mmap import mmap
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

from brakecheck.model import BrakecheckError

from .decode import Block
from .repair import Task, decode_block
from .source import BLOCK

_SLOT = 2 * BLOCK   # a longer block is decoded here
_SLOTS = 3          # of a worker: one is decoded, the others wait, so that it need not
_MOST = 16          # workers; reading feeds no more
_PIPE = 1 << 20     # bytes a worker may be ahead with its answers, where the system lets it


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def decoding(blocks: Iterator[Task], workers: int) -> Iterator[Iterator[Block]]:
    """The blocks decoded, in file order. One worker is this process; more are processes beside it, which begin at
    once: what the caller does before it takes the first block happens meanwhile."""
    collecting = gc.isenabled()
    gc.disable()  # decoded events hold no cycles, and there are millions
    try:
        if workers > 1:
            pool = _Pool(blocks, min(workers, _MOST))
            try:
                yield pool.decoded()
            finally:
                pool.close()
        else:
            yield map(decode_block, blocks)
    finally:
        if collecting:
            gc.enable()


class _Pool:
    """A thread for each worker fills its slots of a shared file in turn and takes its answers."""

    def __init__(self, blocks: Iterator[Task], workers: int) -> None:
        self.blocks, self.number, self.taking, self.stopped = blocks, 0, Lock(), False
        self.answers: SimpleQueue[Union[Tuple[int, Block], BaseException, None]] = SimpleQueue()
        self.file = _shared_file(workers * _SLOTS * _SLOT)
        self.memory = mmap(self.file.fileno(), workers * _SLOTS * _SLOT)
        processes = [_start(self.file.fileno()) for _ in range(workers)]
        self.threads = [Thread(target=self._feed, args=(process, i * _SLOTS * _SLOT), daemon=True)
                        for i, process in enumerate(processes)]
        for thread in self.threads:
            thread.start()

    def decoded(self) -> Iterator[Block]:
        running, following = len(self.threads), 0
        early: Dict[int, Block] = {}
        while running:
            answer = self.answers.get()
            if isinstance(answer, BaseException):
                raise answer
            if answer is None:
                running -= 1
                continue
            early[answer[0]] = answer[1]
            while following in early:
                yield early.pop(following)
                following += 1

    def close(self) -> None:
        """After an error or Ctrl-C too: the threads take no further block, then the processes end."""
        self.stopped = True
        for thread in self.threads:
            thread.join()
        self.memory.close()
        self.file.close()

    def _take(self, at: int) -> Optional[Tuple[int, Task]]:
        """The next block, numbered; its events are in the slot at `at`, or in a copy where they are too many."""
        with self.taking:
            task = None if self.stopped else next(self.blocks, None)
            if task is None:
                return None
            self.number += 1
            if len(task.array) > _SLOT:
                return self.number - 1, task._replace(array=bytes(task.array))
            self.memory[at:at + len(task.array)] = task.array
            return self.number - 1, task

    def _feed(self, process: subprocess.Popen[bytes], base: int) -> None:
        waiting: List[int] = []
        slot = 0
        try:
            assert process.stdin is not None and process.stdout is not None
            while True:
                at = base + slot * _SLOT
                taken = self._take(at)
                if taken is not None:
                    number, task = taken
                    if len(task.array) > _SLOT:
                        self.answers.put((number, decode_block(task)))
                        continue
                    process.stdin.write(pickle.dumps((at, len(task.array), *task[1:])))
                    process.stdin.flush()
                    waiting.append(number)
                    slot = (slot + 1) % _SLOTS
                if not waiting:
                    break
                if taken is None or len(waiting) == _SLOTS:
                    self.answers.put((waiting.pop(0), pickle.load(process.stdout)))
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self.answers.put(BrakecheckError(
                "a process that decodes the trace ended early", f"exit status {process.wait()}",
                "check that there is enough memory, and read the trace again"))
        except BaseException as error:
            self.answers.put(error)
        finally:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            process.wait()
            self.answers.put(None)


def command(module: str, *arguments: str) -> List[str]:
    """Runs main() of a module of this package in a Python like this one: it finds what this one finds, and nothing
    that happens to lie in the working directory."""
    path = [str(Path(__file__).resolve().parents[3]), *sys.path]
    program = f"import sys; sys.path[:] = {path!r}; from {__package__}.{module} import main; main()"
    return [sys.executable, "-S", "-c", program, *arguments]


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
