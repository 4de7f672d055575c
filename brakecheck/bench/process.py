"""A worker process seen from the controller: start, ask with a time limit, kill. It may crash, hang, or never start."""

from __future__ import annotations

import base64
import collections
import contextlib
import io
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..model import UnavailableError
from ..stack.environment import Environment

PACKAGE = Path(__file__).resolve().parent.parent
SHIPPED = ("__init__.py", "model", "ops", "kernels", "worker")
# Reads a line with variables (those of our process do not get into a container or to another machine) and one with a
# zip of the package from stdin, unpacks it, and becomes the worker.
BOOTSTRAP = ("import sys,os,json,base64,io,zipfile,tempfile,runpy;d=tempfile.mkdtemp();"
             "os.environ.update(json.loads(sys.stdin.readline()));"
             "zipfile.ZipFile(io.BytesIO(base64.b64decode(sys.stdin.readline()))).extractall(d);"
             "runpy.run_path(d+'/brakecheck/worker/main.py',run_name='__main__')")


class WorkerLost(Exception):
    """The worker died or did not answer in time. state: crash or timeout."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state, self.message = state, message


def bundle(ops: Sequence[str] = ()) -> str:
    """The part of this package that a worker needs, and the user's files of operators, as one line of base64."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in SHIPPED:
            root = PACKAGE / name
            for file in [root] if root.is_file() else sorted(root.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    archive.write(file, Path("brakecheck") / file.relative_to(PACKAGE))
        for own, shipped in zip(ops, _shipped_names(ops)):
            archive.write(own, shipped)
    return base64.b64encode(buffer.getvalue()).decode()


def _shipped_names(ops: Sequence[str]) -> list[str]:
    return [f"user_ops/{i}/{Path(file).name}" for i, file in enumerate(ops)]


def command_of(environment: Environment) -> list[str]:
    if not environment.ship:
        return [*environment.command, str(PACKAGE / "worker" / "main.py")]
    quoted = shlex.quote(BOOTSTRAP) if Path(environment.command[0]).name == "ssh" else BOOTSTRAP
    return [*environment.command, "-u", "-c", quoted]  # ssh hands its words to a shell on the other side


class WorkerProcess:
    """Starts at once and imports torch in the background; the first `ask` waits for it."""

    def __init__(self, environment: Environment, hello: dict[str, Any], start_limit: float = 300.0) -> None:
        threads = hello.get("threads")
        limited = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)} if threads else {}
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")}
        try:
            self.process = subprocess.Popen(
                command_of(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", start_new_session=True,
                env={**inherited, **limited, **environment.variables})
        except OSError as problem:
            raise UnavailableError(f"cannot start {environment.command[0]}: {problem.strerror}", environment.spec,
                                   "check the command") from problem
        self.last_words: collections.deque[str] = collections.deque(maxlen=30)
        self.answers: queue.Queue[str | None] = queue.Queue()
        self.number = 0
        self.greeting: dict[str, Any] | None = None
        self.start_limit = start_limit
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self._read_answers, self._read_errors)]
        for thread in self.threads:
            thread.start()
        with contextlib.suppress(WorkerLost):  # died at once: the first question says so, with its last words
            if environment.ship:
                ops = hello.get("ops", ())
                self._write(json.dumps({**limited, **environment.variables}))
                self._write(bundle(ops))
                hello = {**hello, "ops": _shipped_names(ops)}
            self._send({"do": "hello", **hello})

    def _read_answers(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.last_words.append(line.rstrip())

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError) as problem:
            raise self._death() from problem

    def _send(self, request: dict[str, Any]) -> None:
        self.number += 1
        self._write(json.dumps({"id": self.number, **request}))

    def _receive(self, limit: float) -> dict[str, Any]:
        """The answer to the last request. Lines that are no answer (a launcher's banner) are skipped."""
        while True:
            try:
                line = self.answers.get(timeout=limit)
            except queue.Empty:
                self.kill()
                raise WorkerLost("timeout", f"no answer within {limit:.0f} s: killed") from None
            if line is None:
                raise self._death()
            try:
                answer = json.loads(line)
            except ValueError:
                self.last_words.append(line.rstrip())
                continue
            if isinstance(answer, dict) and answer.get("id") == self.number:
                return answer

    def _death(self) -> WorkerLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)  # closed its pipes: it is about to end, and its own status says why
        self.kill()
        code = self.process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        self.threads[1].join(timeout=1)
        words = [w for w in self.last_words if w.strip()]
        told = ": " + " | ".join(words[-4:])[-1500:] if words else ""
        return WorkerLost("crash", f"the worker died ({how}){told}")

    def greet(self) -> dict[str, Any]:
        """Waits until torch and the operators are imported. The answer of hello, which may have ok: false."""
        if self.greeting is None:
            self.greeting = self._receive(self.start_limit)
        return self.greeting

    def ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """The answer to a request within `limit` seconds. Raises WorkerLost; the process is gone then."""
        hello = self.greet()
        if not hello["ok"]:
            return hello
        self._send(request)
        return self._receive(limit)

    def kill(self) -> None:
        """Ends the worker and whatever it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Lets the worker end by itself for a moment, then kills its group."""
        with contextlib.suppress(WorkerLost):
            self._write('{"do": "exit"}')
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        self.kill()
        self.process.wait()
