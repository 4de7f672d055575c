"""Decoding the blocks of a trace: in this process when the trace is small, else in several."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from mmap import mmap
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from brakecheck.model import BrakecheckError

from .decode import Block
from .repair import Task, decode_block
from .source import BLOCK

_SLOT = 2 * BLOCK   # a longer block is decoded here
_MOST = 16          # workers; reading feeds no more


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_all(blocks: Iterator[Task], put: Callable[[int, Block], None], workers: int) -> None:
    """Calls put(n, block) for the n-th task of `blocks`, in any order, one call at a time. One worker is this process,
    more are processes beside it."""
    collecting = gc.isenabled()
    gc.disable()  # decoded events hold no cycles, and there are millions
    try:
        if workers > 1:
            _Pool(blocks, put, min(workers, _MOST)).run()
        else:
            for number, task in enumerate(blocks):
                put(number, decode_block(task))
    finally:
        if collecting:
            gc.enable()


class _Pool:
    """Each worker has two slots of the shared file: one is decoded while the other is filled."""

    def __init__(self, blocks: Iterator[Task], put: Callable[[int, Block], None], workers: int) -> None:
        self.blocks, self.number, self.put, self.workers = blocks, 0, put, workers
        self.taking, self.putting = threading.Lock(), threading.Lock()
        self.error: Optional[BaseException] = None

    def run(self) -> None:
        with _shared_file(2 * self.workers * _SLOT) as file:
            memory = mmap(file.fileno(), 2 * self.workers * _SLOT)
            threads = [threading.Thread(target=self._feed, args=(memory, file.fileno(), 2 * i * _SLOT), daemon=True)
                       for i in range(self.workers)]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except BaseException as error:  # Ctrl-C: the threads take no further block
                self.error = error
                raise
            memory.close()
        if self.error is not None:
            raise self.error

    def _take(self) -> Optional[Tuple[int, Task]]:
        with self.taking:
            task = None if self.error is not None else next(self.blocks, None)
            if task is None:
                return None
            self.number += 1
            return self.number - 1, task

    def _feed(self, memory: mmap, descriptor: int, base: int) -> None:
        process = _start(descriptor)
        waiting: List[int] = []
        slot = 0
        try:
            assert process.stdin is not None and process.stdout is not None
            while True:
                taken = self._take()
                if taken is not None:
                    number, task = taken
                    if len(task.array) > _SLOT:
                        self._keep(number, decode_block(task))
                        continue
                    at = base + slot * _SLOT
                    memory[at:at + len(task.array)] = task.array
                    process.stdin.write(pickle.dumps((at, len(task.array), *task[1:])))
                    process.stdin.flush()
                    waiting.append(number)
                    slot = 1 - slot
                if not waiting:
                    return
                if taken is None or len(waiting) == 2:
                    self._keep(waiting.pop(0), pickle.load(process.stdout))
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self.error = self.error or BrakecheckError(
                "a process that decodes the trace ended early", f"exit status {process.wait()}",
                "check that there is enough memory, and read the trace again")
        except BaseException as error:
            self.error = self.error or error
        finally:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            process.wait()

    def _keep(self, number: int, block: Block) -> None:
        with self.putting:
            self.put(number, block)


def environment() -> Dict[str, str]:
    """Of a child process: it finds this very package."""
    root = str(Path(__file__).resolve().parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "brakecheck.evidence.kineto.worker", str(descriptor)],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                            pass_fds=(descriptor,), env=environment())


def _shared_file(size: int) -> Any:
    """A file that lives in memory where the system has such (Linux), else in the temporary folder."""
    if hasattr(os, "memfd_create"):
        file: Any = os.fdopen(os.memfd_create("brakecheck"), "r+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    file.truncate(size)
    return file
