"""Decoding the blocks of a trace: in this process when the trace is small, else in several."""

from __future__ import annotations

import contextlib
import gc
import pickle
import subprocess
from mmap import mmap
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Dict, Iterator, List, Optional, Tuple, Union

from brakecheck.model import BrakecheckError

from .decode import Block
from .repair import Task, decode_block
from .spawn import SLOT as _SLOT
from .spawn import SLOTS as _SLOTS
from .spawn import Started


@contextlib.contextmanager
def decoding(blocks: Iterator[Task], started: Optional[Started]) -> Iterator[Iterator[Block]]:
    """The blocks decoded, in file order: by the processes that were started, or in this one. They begin at once: what
    the caller does before it takes the first block happens meanwhile."""
    collecting = gc.isenabled()
    gc.disable()  # decoded events hold no cycles, and there are millions
    try:
        if started is not None:
            pool = _Pool(blocks, started)
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

    def __init__(self, blocks: Iterator[Task], started: Started) -> None:
        self.blocks, self.number, self.taking, self.stopped = blocks, 0, Lock(), False
        self.answers: SimpleQueue[Union[Tuple[int, Block], BaseException, None]] = SimpleQueue()
        self.file = started.file
        self.memory = mmap(self.file.fileno(), len(started.processes) * _SLOTS * _SLOT)
        self.threads = [Thread(target=self._feed, args=(process, i * _SLOTS * _SLOT), daemon=True)
                        for i, process in enumerate(started.processes)]
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
