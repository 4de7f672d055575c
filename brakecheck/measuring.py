"""Measuring stacks from Python: `measure` one, `compare_measured` two or more. What the command line calls.

    comparison, run = compare_measured("env:/a/bin/python", "env:/b/bin/python", options=Options(budget=600))
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .bench import store as stores
from .bench.bundle import seconds_of
from .bench.controller import ArmSpec, Controller, DeviceUnusable, Options, check
from .bench.journal import Journal
from .bench.stopping import Enough, enough_for
from .model import Arm, Comparison, Reason, Run, Stack, UsageError, Verdict, distinct
from .stack.environment import open_environment, read_stack
from .verdict import workload
from .verdict.merge import compare_run
from .verdict.policy import Policy

__all__ = ["NOT_KEPT", "arm", "arm_names", "compare_arms", "compare_measured", "implementations_of", "measure",
           "seconds_of", "weights_of"]
NOT_KEPT = "-"  # as a store: no run is written, and no journal but the one that `resume` names
LEAST_SHARE = 0.001  # of a workload's time, for a case of it to be measured
Progress = Callable[[dict[str, Any]], None]


def arm(name: str, spec: str, implementation: str = "torch", inject: float = 0.0) -> ArmSpec:
    """An arm of a stack spec: env:, pip:, launch:, an overlay of these, or FILE.toml:NAME."""
    file, _, name_there = spec.rpartition(":")
    found = read_stack(file, name_there) if file.endswith(".toml") else open_environment(spec)
    return ArmSpec(name, found, implementation, inject)


def arm_names(specs: Sequence[str]) -> list[str]:
    """base and candidate; with more arms each is called after its stack, because the report says where it changed."""
    if len(specs) == 2:
        return ["base", "candidate"]
    return distinct([spec.rpartition(".toml:")[2] for spec in specs])


def implementations_of(text: str | None) -> dict[str, str]:
    """"base=torch,candidate=triton" or "triton" (both arms) -> by arm."""
    if not text:
        return {}
    if "=" not in text:
        return {"base": text, "candidate": text}
    out = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in ("base", "candidate") or not value.strip():
            raise UsageError(f"cannot read {part!r}", "--implementation", "write base=torch,candidate=triton")
        out[name.strip()] = value.strip()
    return out


def weights_of(file: str) -> dict[str, float]:
    """Share of a workload's time by operator: a file of `brakecheck workload`, a JSON object of numbers, or one under
    "weights"."""
    example = 'write {"weights": {"attention": 0.4, "gemm": 0.6}}'
    try:
        data = json.loads(Path(file).read_text())
    except (OSError, ValueError) as problem:
        raise UsageError(f"cannot read the workload: {problem}", file, example) from problem
    if isinstance(data, dict) and data.get("schema") == workload.SCHEMA:
        return workload.weights(workload.load(Path(file)))
    weights = data.get("weights", data) if isinstance(data, dict) else None
    numbers = isinstance(weights, dict) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v < math.inf for v in weights.values())
    if not weights or not numbers or not any(weights.values()):
        raise UsageError("a workload is a share of time for each operator", file, example)
    return {str(k): float(v) for k, v in weights.items()}


def mix_of(file: str | Path | None) -> dict[str, list[dict[str, Any]]]:
    """Params of the cases of a file of `brakecheck workload`, by operator; empty for weights alone. What takes less
    than LEAST_SHARE of the time is left to the other cases of its operator."""
    if file is None or not workload.is_mix(Path(file)):
        return {}
    found = workload.cases(workload.load(Path(file)), LEAST_SHARE)
    if not found:
        raise UsageError("no operator of the catalogue stands for anything in this workload", str(file),
                         "see its list uncovered; measure the catalogue without --workload")
    return {operator: [dict(case.params) for case in cases] for operator, cases in found.items()}


def _journal(store: str, resume: str | None) -> Path:
    """Where the journal of a new run goes, or the one of the run to resume is."""
    local = store if "://" not in store else stores.default_store()
    if resume is None:
        folder = Path(local) / ".journals"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{secrets.token_hex(6)}.jsonl"
    path = Path(resume)
    if not path.is_file():
        run = stores.read(stores.find(resume, store))
        path = Path(str(run.options.get("journal", "")))
        if run.complete or not path.is_file():
            why = "it is complete" if run.complete else "its journal is gone"
            raise UsageError(f"run {run.id} has nothing to resume: {why}", "--resume", "start a new run")
    elif not path.stat().st_size:
        raise UsageError("this file is empty: there is nothing to resume", str(path), "start a new run")
    return path


def _run(arms: Sequence[ArmSpec], options: Options, enough: Enough,
         store: str | None, resume: str | None, progress: Progress, command: Sequence[str],
         static: dict[str, Any] | None = None) -> Run:
    """One controller for each device asked for (cuda:0,cuda:1): every case belongs to one of them, so that its pairs
    stay on one GPU."""
    devices = [d.strip() for d in options.device.split(",")]
    if len(set(devices)) < len(devices):
        raise UsageError("a device is there twice: its two shares would time each other", f"--device {options.device}",
                         "name each device once")
    (first, step), count = options.shard, len(devices)
    shared = [replace(options, device=d, shard=(first + i * step, count * step)) for i, d in enumerate(devices)]
    for each in shared:
        check(each)  # before there is a journal
    if store == NOT_KEPT:
        if resume and count > 1:
            raise UsageError("one journal cannot hold several devices", "--resume", "give a store instead of -")
        unkept = [Controller(arms, o, enough, Journal(Path(resume) if resume else None), progress) for o in shared]
        return replace(_merged(_run_all(unkept, command)), static=static)
    store = store or stores.default_store()
    path = _journal(store, resume)
    paths = [path, *(path.with_suffix(f".{i}.jsonl") for i in range(1, count))]
    controllers = [Controller(arms, o, enough, Journal(p), progress) for o, p in zip(shared, paths)]
    try:
        run = _merged(_run_all(controllers, command))
        run = replace(run, options={**run.options, "device": options.device, "journal": str(path)}, static=static)
        stores.write(run, store)
        if run.complete:
            for p in paths:
                p.unlink(missing_ok=True)
    finally:
        for p, controller in zip(paths, controllers):
            if not controller.journal.of("visit"):  # a journal that holds nothing is not worth keeping
                p.unlink(missing_ok=True)
    return run


def _run_all(controllers: Sequence[Controller], command: Sequence[str]) -> list[Run]:
    """All controllers at once; Ctrl-C stops each of them, and what they measured is kept."""
    if len(controllers) == 1:
        return [controllers[0].run(command)]
    with ThreadPoolExecutor(len(controllers)) as pool:
        waiting = [pool.submit(c.run, command) for c in controllers]
        try:
            wait(waiting, return_when=FIRST_EXCEPTION)
        finally:  # interrupted, or one of them failed: the others need not go on
            for c, w in zip(controllers, waiting):
                c.stopped = not w.done()
        return [w.result() for w in waiting]


def _merged(runs: Sequence[Run]) -> Run:
    timing = {k: sum(r.timing[k] for r in runs) for k in runs[0].timing}
    timing.update({k: max(r.timing[k] for r in runs) for k in ("wall", "controller_mib")})
    return replace(runs[0], measurements=tuple(m for r in runs for m in r.measurements), timing=timing,
                   complete=all(r.complete for r in runs),
                   warnings=tuple(dict.fromkeys(w for r in runs for w in r.warnings)))


def measure(spec: str, options: Options | None = None, *, implementation: str = "torch", visits: int = 5,
            store: str | None = None, resume: str | None = None, progress: Progress = lambda _: None,
            command: Sequence[str] = ()) -> Run:
    """Measures one stack in `visits` fresh processes a case and keeps the run."""
    options = replace(options or Options(), max_pairs=visits)
    return _run([arm("base", spec, implementation)], options, lambda cases: [len(a) >= visits for a, _ in cases], store,
                resume, progress, command)


def compare_measured(*specs: str, options: Options | None = None, policy: Policy | None = None,
                     implementations: dict[str, str] | None = None, inject: Sequence[float] = (),
                     precision: float | None = None, store: str | None = None, resume: str | None = None,
                     progress: Progress = lambda _: None, command: Sequence[str] = ()) -> tuple[Comparison, Run | None]:
    """Measures stacks side by side, the first the base of all others, and judges them. Returns the comparison and the
    run that was kept; no run when a stack cannot use the device, which withholds the verdict.

    inject: for each candidate the share of extra work in its timed windows (to test the power of this very verdict)."""
    chosen = implementations or {}
    extra = [0.0, *inject, *[0.0] * len(specs)]
    arms = [arm(name, spec, chosen.get("base" if i == 0 else "candidate", "torch"), extra[i])
            for i, (name, spec) in enumerate(zip(arm_names(specs), specs))]
    return compare_arms(arms, options or Options(), policy or Policy(), precision=precision, store=store, resume=resume,
                        progress=progress, command=command)


def compare_arms(arms: Sequence[ArmSpec], options: Options, policy: Policy, *, precision: float | None = None,
                 static: dict[str, Any] | None = None, store: str | None = None, resume: str | None = None,
                 progress: Progress = lambda _: None, command: Sequence[str] = ()) -> tuple[Comparison, Run | None]:
    """As `compare_measured`, with arms that are open. static: of their toolchains, kept with the run."""
    try:
        enough = enough_for(policy.measured.margin, precision or 0.0)
        run = _run(arms, options, enough, store, resume, progress, command, static)
    except DeviceUnusable as problem:
        return _withheld(arms, problem, options), None
    return compare_run(run, policy), run


def _withheld(arms: Sequence[ArmSpec], problem: DeviceUnusable, options: Options) -> Comparison:
    told = tuple(Arm(a.name, a.toolchain or Stack(a.environment.spec, a.environment.name), a.implementation)
                 for a in arms)
    return Comparison(Verdict.WITHHELD, f"WITHHELD: {problem.what}", (Reason("fell-back", str(problem)),), told,
                      {"compared": 0}, (), environment={"options": asdict(options)})
