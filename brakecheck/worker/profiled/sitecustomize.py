"""Starts PyTorch's profiler, or NVTX marks, around a program that knows nothing of it. Standard library and torch.

Python imports a module of this name at start when its folder is on PYTHONPATH. The program's own sitecustomize is run
first. Nothing happens until the program imports torch; then recording begins, and ends with the program.

Told by variables: BRAKECHECK_PROFILE (folder to write to), BRAKECHECK_PROFILE_MODE (kineto, nvtx),
BRAKECHECK_PROFILE_SKIP and BRAKECHECK_PROFILE_STEPS (steps to leave out, steps to record; 0 records all),
BRAKECHECK_PROFILE_STEP (optimizer, forward: what ends a step).
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path
from typing import Any, Dict, Optional

HERE = Path(__file__).resolve().parent


class Recorder:
    """One process's recording. The profiler is open from the first recorded step to the last."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.folder = Path(os.environ["BRAKECHECK_PROFILE"])
        self.nvtx = os.environ.get("BRAKECHECK_PROFILE_MODE") == "nvtx"
        self.skip = int(os.environ.get("BRAKECHECK_PROFILE_SKIP", "0"))
        self.steps = int(os.environ.get("BRAKECHECK_PROFILE_STEPS", "0"))
        self.forward = os.environ.get("BRAKECHECK_PROFILE_STEP") == "forward"
        self.step, self.depth, self.process = 0, 0, os.getpid()
        self.profiler: Any = None
        self.open, self.marked, self.called = False, False, False
        self.facts: Dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__,
                                      "cuda": torch.version.cuda, "executable": sys.executable}

    def begin(self) -> None:
        if self.nvtx:
            self._mark(True)
            if self.skip and self.torch.cuda.is_initialized():
                self.torch.cuda.cudart().cudaProfilerStart()
        else:
            from torch.profiler import ProfilerAction, ProfilerActivity, profile, supported_activities

            wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(supported_activities())
            # With a schedule, even this one, the profiler marks steps.
            self.profiler = profile(activities=wanted, record_shapes=True, schedule=lambda step: ProfilerAction.RECORD)
            self.profiler.start()
        self.open = True

    def _mark(self, on: bool) -> None:
        """NVTX ranges of operators with their shapes. Not emit_nvtx, which makes a CUDA context before the program has
        chosen its device; only where the inner call is unknown."""
        autograd = self.torch.autograd
        try:
            if on:
                from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

                config = ProfilerConfig(ProfilerState.NVTX, True, False, False, False, False, _ExperimentalConfig())
                autograd._enable_profiler(config, set())
                self.marked = True
            elif self.marked:
                autograd._disable_profiler()
        except (ImportError, TypeError, AttributeError):
            if on:
                self.profiler = autograd.profiler.emit_nvtx(record_shapes=True)
                self.profiler.__enter__()
            elif self.profiler is not None:
                self.profiler.__exit__(None, None, None)
        except RuntimeError as error:  # a build without CUDA has no NVTX
            self.facts["error"] = str(error).splitlines()[0]

    def advance(self) -> None:
        """The program ended a step."""
        if os.getpid() != self.process:  # a forked child
            return
        self.step += 1
        if self.open and self.steps and self.step >= self.skip + self.steps:
            self.end()
        elif not self.open and self.step == self.skip:
            self.begin()
        elif self.open and self.profiler is not None and not self.nvtx:
            self.profiler.step()

    def end(self) -> None:
        if not self.open or os.getpid() != self.process:
            return
        self.open = False
        self._describe_devices()
        if self.nvtx:
            if self.torch.cuda.is_initialized() and (self.skip or self.steps):
                self.torch.cuda.synchronize()
                self.torch.cuda.cudart().cudaProfilerStop()
            self._mark(False)
        else:
            self.profiler.stop()
            if not self.forward and self.step > self.skip and not 0 < self.steps <= self.step - self.skip:
                self.facts["rest_step"] = self.profiler.step_num  # begun by the last optimizer step, never ended
            rank = self.rank()
            name = f"rank{rank}" if rank is not None else f"process{self.process}"
            if rank is not None or not spawned():
                (self.folder / "kineto").mkdir(exist_ok=True)
                self.profiler.export_chrome_trace(str(self.folder / "kineto" / f"trace-{name}.json.gz"))
        self.facts["steps"] = self.step
        path = self.folder / f"facts-{self.process}.json"
        path.write_text(json.dumps({k: v for k, v in self.facts.items() if v is not None}))

    def rank(self) -> Optional[int]:
        distributed = self.torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
        text = os.environ.get("RANK", "")
        return int(text) if text.isdigit() else None

    def _describe_devices(self) -> None:
        cuda = self.torch.cuda
        if cuda.is_available() and cuda.is_initialized():
            self.facts["devices"] = [{"name": cuda.get_device_name(i),
                                      "capability": ".".join(map(str, cuda.get_device_capability(i)))}
                                     for i in range(cuda.device_count())]

    def watch(self) -> None:
        """Ends of steps: after each optimizer step, or where the next outermost call of a module begins, so that the
        backward pass belongs to the step of its forward pass."""
        if not self.forward:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            register_optimizer_step_post_hook(lambda *_: self.advance())
            return
        from torch.nn.modules import module

        def leave(*_: Any) -> None:
            self.depth -= 1

        def enter(*_: Any) -> None:
            if self.depth == 0 and self.called:
                self.advance()
            self.called = True
            self.depth += 1

        module.register_module_forward_pre_hook(enter)
        module.register_module_forward_hook(leave, always_call=True)


def spawned() -> bool:
    """Whether this is a helper process of multiprocessing (it counts only when it turns out to be a rank)."""
    return any("multiprocessing" in word for word in getattr(sys, "orig_argv", sys.argv))


def start(torch: Any) -> None:
    launcher = any(word in ("torch.distributed.run", "torch.distributed.launch") or word.endswith("/torchrun")
                   for word in getattr(sys, "orig_argv", sys.argv))
    if launcher and "RANK" not in os.environ:
        return
    recorder = Recorder(torch)
    try:
        recorder.watch()
        if recorder.skip == 0:
            recorder.begin()
        atexit.register(recorder.end)
    except Exception as error:  # the program must run whatever becomes of its recording
        facts = {**recorder.facts, "error": f"{type(error).__name__}: {error}"}
        (recorder.folder / f"facts-{recorder.process}.json").write_text(json.dumps(facts))


class AfterTorch(importlib.abc.MetaPathFinder):
    """Calls `start` once torch has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def execute(module: Any) -> None:
            run(module)
            start(module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _own() -> None:
    """Runs the sitecustomize that this one hides."""
    places = [p for p in sys.path if Path(p or ".").resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("BRAKECHECK_PROFILE"):
    import importlib.util

    _own()
    sys.meta_path.insert(0, AfterTorch())
