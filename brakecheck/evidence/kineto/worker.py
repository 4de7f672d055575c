"""A worker process: reads tasks on stdin, decodes blocks out of a shared memory file, answers on stdout.

A process of its own by command line, not a fork (polars' threads do not survive one) and not multiprocessing's spawn
(which imports the caller's main module again).
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import signal
import sys

from .repair import Task, decode_block


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the reader, which closes stdin
    gc.disable()  # blocks hold no cycles
    descriptor = int(sys.argv[1])
    memory = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_READ))
    tasks, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            at, length, *what = pickle.load(tasks)
        except EOFError:
            return
        pickle.dump(decode_block(Task(memory[at:at + length], *what)), answers, protocol=5)
        answers.flush()
