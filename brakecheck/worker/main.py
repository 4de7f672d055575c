"""The worker: runs inside the stack under test and answers JSON lines.

    python /path/to/brakecheck/worker/main.py

One request a line on stdin, one answer a line on stdout. What libraries print to stdout goes to stderr, so that it
cannot corrupt an answer. Requests: hello, cases, ready, fingerprint, measure, exit.
    {"id": 1, "do": "hello", "device": "cpu", "ops": ["/path/my_ops.py"], "threads": 2, "mix": {"softmax": [{"M": 8}]}}
    {"id": 1, "ok": true, "result": {...}}
    {"id": 1, "ok": false, "state": "oom", "message": "...", "detail": "..."}
state is one of: error, oom, missing (operator, implementation, import, or what one of them needs), unusable (the
device), crash (an error that the device does not recover from: the worker ends after this answer).
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Dict, Optional


def _load_package() -> None:
    """Makes `brakecheck` importable by its file alone. Its folder's parent must not enter sys.path: it may be the
    site-packages of another environment, and the stack under test would then load libraries that are not its own."""
    root = Path(__file__).resolve().parent.parent
    here = str(root / "worker")
    sys.path[:] = [p for p in sys.path if p != here]
    spec = importlib.util.spec_from_file_location("brakecheck", root / "__init__.py",
                                                  submodule_search_locations=[str(root)])
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["brakecheck"] = package
    spec.loader.exec_module(package)


class Worker:
    def __init__(self) -> None:
        self.device: Optional[Any] = None
        self.in_use = False
        self.operators: Dict[str, Any] = {}

    def hello(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Imports torch and the operators; the device's context starts with the first request that needs it, because
        a context that starts beside another worker's measurement would disturb it."""
        import torch

        from brakecheck.ops.load import load, mixed
        from brakecheck.worker.device import Device
        from brakecheck.worker.measure import HARNESS

        if request.get("threads"):
            torch.set_num_threads(int(request["threads"]))
        shipped = Path(__file__).resolve().parents[2]  # relative paths came with the package
        self.operators = load(str(shipped / file) for file in request.get("ops", ()))
        if request.get("mix"):
            self.operators = mixed(self.operators, request["mix"])
        if request.get("cubins"):
            from brakecheck.worker.cubins import kernel_operators

            self.operators.update(kernel_operators(self.operators, Path(request["cubins"])))
        if request.get("device", "cpu") != "cpu":  # a GPU's workers start beside another's visit, and this takes 2 s:
            leaf = torch.zeros(1, requires_grad=True)  # the first gradient imports sympy
            torch.autograd.grad(leaf * 2, leaf, torch.ones(1))
        gc.collect()
        gc.freeze()  # what was imported stays: collections during a visit need not walk through it
        self.device, self.in_use = Device(request.get("device", "cpu")), False
        return {"pid": os.getpid(), "python": sys.version.split()[0], "torch": torch.__version__, "harness": HARNESS}

    def _ready(self) -> Any:
        assert self.device is not None, "hello comes first"
        if not self.in_use:
            self.device.use()
            self.in_use = True
        return self.device

    def ready(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Starts the device's context, so that the first case of a visit does not pay for it."""
        self._ready()
        return {}

    def cases(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """The operators here: {name: {"title", "implementations", "cases": {name: {"params", "flops"?, "bytes"?,
        "power_limited"?}}}}."""
        return {name: {"title": op.title, "implementations": sorted(op.implementations),
                       "cases": {c.name: _case(op, c) for c in op.cases}} for name, op in self.operators.items()}

    def fingerprint(self, request: Dict[str, Any]) -> Dict[str, Any]:
        from brakecheck.worker.fingerprint import fingerprint

        return fingerprint(self._ready(), request.get("packages", ()))

    def measure(self, request: Dict[str, Any]) -> Dict[str, Any]:
        from brakecheck.worker.measure import measure

        return measure(self._ready(), self.operators, request)


def _case(op: Any, case: Any) -> Dict[str, Any]:
    found: Dict[str, Any] = {"params": dict(case.params)}
    if op.compute_cost:
        cost = op.compute_cost(case)
        found.update(flops=cost.flops, bytes=cost.bytes, power_limited=op.power_limited(case))
    return found


def _state(problem: BaseException) -> str:
    names = {kind.__name__ for kind in type(problem).__mro__}
    if "Unusable" in names:
        return "unusable"
    text = str(problem).lower().replace("_", " ")  # the driver spells CUDA_ERROR_OUT_OF_MEMORY
    if "MemoryError" in names or "OutOfMemoryError" in names or "out of memory" in text:
        return "oom"
    return "missing" if names & {"Missing", "ImportError", "UnavailableError"} else "error"


def answer(worker: Worker, request: Dict[str, Any]) -> Dict[str, Any]:
    """The reply to one request; whatever goes wrong in it is part of the reply."""
    action = {"hello": worker.hello, "cases": worker.cases, "ready": worker.ready, "fingerprint": worker.fingerprint,
              "measure": worker.measure}.get(request.get("do", ""))
    if action is None:
        return {"id": request.get("id"), "ok": False, "state": "error", "message": f"cannot do {request.get('do')!r}"}
    try:
        return {"id": request.get("id"), "ok": True, "result": action(request)}
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt):
            raise
        kind = type(problem).__name__
        told = str(problem) if kind == "Missing" else f"{kind}: {problem}".strip()  # the state has said it
        lost = worker.in_use and worker.device is not None and not worker.device.works()
        return {"id": request.get("id"), "ok": False, "state": "crash" if lost else _state(problem),
                "message": getattr(problem, "what", told)[:2000], "detail": traceback.format_exc()[-4000:],
                **{k: getattr(problem, k) for k in ("where", "todo") if getattr(problem, k, None)}}


def serve() -> None:
    """Answers requests until `exit` or the end of stdin."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # from here on file descriptor 1 is stderr, for C libraries and children too
    sys.stdout = sys.stderr
    _load_package()
    worker = Worker()
    for line in sys.stdin:
        if not line.strip():
            continue
        request = json.loads(line)
        if request.get("do") == "exit":
            break
        reply = answer(worker, request)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if reply.get("state") == "crash":
            break
    os._exit(0)  # libraries' exit handlers may hang, and nothing is left to do


if __name__ == "__main__":
    serve()
