"""Child processes that end when we say so: assemblers, and NVRTC workers that are used again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Set

_WORKER = Path(__file__).with_name("nvrtc_worker.py")


class Stopped(Exception):
    """The run was interrupted; no new child may start."""


@dataclass(frozen=True)
class Ended:
    """How a child ended. code: exit status (negative: killed by that signal); None: it ran into the time limit."""

    code: Optional[int]
    output: str


class Children:
    """Every running child, each leading a process group of its own: nvcc's children die with it, and a Ctrl-C in the
    terminal reaches us alone, so that no half-killed compiler is mistaken for one that fails."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Set[subprocess.Popen[str]] = set()
        self._stopped = False

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        with self._lock:
            if self._stopped:
                raise Stopped
            child = subprocess.Popen(command, start_new_session=True, text=True, errors="replace", **options)
            self._running.add(child)
            return child

    def run(self, command: Sequence[str], cwd: Path, time_limit: float, env: Optional[Dict[str, str]] = None) -> Ended:
        """Runs it to its end; standard output and error together."""
        child = self.start(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT)
        try:
            output, _ = child.communicate(timeout=time_limit)
            return Ended(child.returncode, output)
        except subprocess.TimeoutExpired:
            self.kill(child)
            return Ended(None, child.communicate()[0])
        finally:
            self.forget(child)

    def kill(self, child: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            if child.returncode is not None:
                return  # it was waited for: its number may be another process's by now
            os.killpg(child.pid, signal.SIGKILL)

    def forget(self, child: subprocess.Popen[str]) -> None:
        with self._lock:
            self._running.discard(child)
            if self._stopped:
                raise Stopped  # it did not end by itself

    def stop(self) -> None:
        """Kills all of them now, and lets none start."""
        with self._lock:
            self._stopped = True
            for child in self._running:
                if child.poll() is None:
                    self.kill(child)


class Worker:
    """One NVRTC in its process."""

    def __init__(self, library: Path, children: Children) -> None:
        self.library, self._children = library, children
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the worker)
        # NVRTC writes its working directory into line tables; "/" keeps the cubins alike on all machines.
        self._child = children.start([sys.executable, "-I", "-S", str(_WORKER), str(library)], cwd="/",
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)
        self.dead = False
        self._banner = self._receive(60.0)

    def compile(self, request: Dict[str, Any], time_limit: float) -> Dict[str, Any]:
        """The worker's answer; {"crash": words} when it died or ran into the limit, and then it is dead."""
        if "crash" in self._banner or "error" in self._banner:
            self.dead = True
            return {"crash": self._banner.get("crash") or self._banner["error"]}
        try:
            assert self._child.stdin
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
        except OSError:
            pass  # it is dead; what it said is read below
        return self._receive(time_limit)

    def _receive(self, time_limit: float) -> Dict[str, Any]:
        late = threading.Event()

        def expire() -> None:
            late.set()
            self._children.kill(self._child)

        timer = threading.Timer(time_limit, expire)
        timer.start()
        try:
            assert self._child.stdout
            line = self._child.stdout.readline()
        finally:
            timer.cancel()
        if line.endswith("\n"):
            return dict(json.loads(line))
        self.dead = True
        code = self._child.wait()
        self._children.forget(self._child)
        if late.is_set():
            return {"crash": f"NVRTC took longer than {time_limit:g} s and was ended"}
        self._errors.seek(0)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return {"crash": f"NVRTC ended with {how}: {self._errors.read()[-2000:].strip()}".rstrip(": ")}

    def close(self) -> None:
        self._children.kill(self._child)
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout, self._errors):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(Stopped):
            self._children.forget(self._child)


class Pool:
    """Idle workers, at most `limit` alive for all toolchains together (each holds some hundred megabytes)."""

    def __init__(self, limit: int, children: Children) -> None:
        self._limit, self._children = limit, children
        self._lock = threading.Lock()
        self._idle: List[Worker] = []
        self._alive = 0

    def compile(self, library: Path, request: Dict[str, Any], time_limit: float) -> Dict[str, Any]:
        worker = self._take(library)
        try:
            return worker.compile(request, time_limit)
        finally:
            self._give(worker)

    def _take(self, library: Path) -> Worker:
        with self._lock:
            for worker in self._idle:
                if worker.library == library:
                    self._idle.remove(worker)
                    return worker
            old = self._idle.pop(0) if self._idle and self._alive >= self._limit else None
            self._alive += 0 if old else 1
        if old:
            old.close()
        try:
            return Worker(library, self._children)
        except BaseException:
            with self._lock:
                self._alive -= 1
            raise

    def _give(self, worker: Worker) -> None:
        with self._lock:
            if not worker.dead:
                self._idle.append(worker)
                return
            self._alive -= 1
        worker.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()
