"""Runs a program under a profiler and keeps the evidence in a folder with a manifest, which `diff` accepts.

    DIR/manifest.json         brakecheck/profile/1: command, tools and versions, devices, date, what was recorded
    DIR/kineto/*.json.gz      one trace a process (rank)
    DIR/nsys.sqlite           and nsys.nsys-rep
    DIR/ncu.ncu-rep

Collectives are never replayed: Nsight Compute runs a kernel several times, and a collective that runs again waits for
ranks that do not. Their kernels are excluded by name, whatever the replay mode.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..model import BrakecheckError, UnavailableError, UsageError
from ..stack.driver import local_driver
from ..stack.environment_rules import VARIABLES

SCHEMA = "brakecheck/profile/1"
MANIFEST = "manifest.json"
TOOLS = ("kineto", "nsys", "ncu")  # in the order in which diff prefers what they record
HOOK = Path(__file__).resolve().parent.parent / "worker" / "profiled"
# No inline flags: Nsight Compute takes the grammar of C++'s std::regex.
COLLECTIVES = ("[Nn][Cc][Cc][Ll]|[Rr][Cc][Cc][Ll]|[Nn][Vv][Ss][Hh][Mm][Ee][Mm]|[Mm]ultimem|"
               "[Aa]ll_?[Rr]educe|[Aa]ll_?[Gg]ather|[Rr]educe_?[Ss]catter|[Aa]ll_?[Tt]o_?[Aa]ll|[Cc]ross_?[Dd]evice|"
               "one_shot|two_shot|symm_mem")
# Whole sections, because names of single metrics change with GPU and version: SM and DRAM throughput; L2 hit rate and
# bank conflicts; pipes, the tensor pipe among them; stall reasons; source counters for hotspots; launch and occupancy.
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables", "ComputeWorkloadAnalysis",
            "WarpStateStats", "SourceCounters", "LaunchStats", "Occupancy")
METRICS = ("lts__t_sector_hit_rate.pct", "l1tex__data_bank_conflicts_pipe_lsu.sum",
           "dram__throughput.avg.pct_of_peak_sustained_elapsed")
REPLAY = ("kernel", "application")
GRACE = 120.0  # seconds that an interrupted program has to write what it recorded


@dataclass(frozen=True)
class Plan:
    """tool: kineto, nsys or ncu. skip, steps: of the program's steps, left out and recorded (0: all). step: what ends
    one, optimizer or forward. ranges: NVTX ranges that Nsight Compute is restricted to; launches: the most kernels it
    profiles (0: all)."""

    command: Tuple[str, ...]
    tool: str = "kineto"
    skip: int = 0
    steps: int = 0
    step: str = "optimizer"
    ranges: Tuple[str, ...] = ()
    launches: int = 0
    replay: str = "kernel"
    problems: List[str] = field(default_factory=list)


def check(plan: Plan) -> None:
    """UsageError or UnavailableError for a plan that cannot work, before anything runs."""
    if not plan.command:
        raise UsageError("no program to run", None, "write brakecheck profile -- python my.py")
    if shutil.which(plan.command[0]) is None:
        raise UsageError(f"there is no program {plan.command[0]!r}", None, "check its name and PATH")
    if plan.tool not in TOOLS:
        raise UsageError(f"{plan.tool!r} is no profiler", "--with", f"choose from {', '.join(TOOLS)}")
    if plan.tool != "kineto" and shutil.which(plan.tool) is None:
        raise UnavailableError(f"{plan.tool} is not on PATH", "--with", "install NVIDIA Nsight, or use --with kineto")
    if plan.replay not in REPLAY:
        raise UsageError(f"{plan.replay!r} is no replay mode", "--replay-mode", f"choose from {', '.join(REPLAY)}")
    if plan.step not in ("optimizer", "forward"):
        raise UsageError(f"{plan.step!r} ends no step", "--step", "choose optimizer or forward")
    if min(plan.skip, plan.steps, plan.launches) < 0:
        raise UsageError("numbers of steps and launches cannot be negative", "--skip, --steps, --launches", None)
    if plan.tool != "ncu" and (plan.ranges or plan.launches):
        raise UsageError("--range and --launches restrict Nsight Compute", f"--with {plan.tool}", "use --with ncu")


def command_line(plan: Plan, folder: Path) -> List[str]:
    """What is run: the program itself, or the profiler around it."""
    if plan.tool == "kineto":
        return list(plan.command)
    if plan.tool == "nsys":
        limits = ["--capture-range", "cudaProfilerApi", "--capture-range-end", "stop"] if plan.skip else []
        return ["nsys", "profile", "--output", str(folder / "nsys"), "--force-overwrite", "true", "--trace",
                "cuda,nvtx", "--sample", "none", "--cpuctxsw", "none", *limits, *plan.command]
    words = ["ncu", "--export", str(folder / "ncu"), "--force-overwrite", "--target-processes", "all", "--nvtx",
             "--import-source", "yes", "--replay-mode", plan.replay, "--kernel-name",
             f"regex:^(?!.*(?:{COLLECTIVES})).*$"]
    for section in SECTIONS:
        words += ["--section", section]
    words += ["--metrics", ",".join(METRICS)]
    for name in plan.ranges:  # a push/pop range is written with a slash behind its name
        words += ["--nvtx-include", name if name.endswith("/") or "@" in name else f"{name}/"]
    if plan.skip:
        words += ["--profile-from-start", "off"]
    if plan.launches:
        words += ["--launch-count", str(plan.launches)]
    return [*words, *plan.command]


def environment(plan: Plan, folder: Path) -> Dict[str, str]:
    """Variables of the program: the hook in front of PYTHONPATH, and what it is told."""
    path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "BRAKECHECK_PROFILE": str(folder),
            "BRAKECHECK_PROFILE_MODE": "kineto" if plan.tool == "kineto" else "nvtx",
            "BRAKECHECK_PROFILE_SKIP": str(plan.skip), "BRAKECHECK_PROFILE_STEPS": str(plan.steps),
            "BRAKECHECK_PROFILE_STEP": plan.step}


def profile(plan: Plan, target: Path, versions: Optional[Dict[str, str]] = None) -> Dict[str, Any]:
    """Runs the program and returns the manifest; the folder appears under its name when it is complete. versions: to be
    noted beside those found.

    A program that fails or is interrupted keeps what was recorded; its exit status is in the manifest.
    BrakecheckError when nothing was recorded, UsageError when `target` exists.
    """
    check(plan)
    if target.exists():
        raise UsageError("the folder of the profile exists already", str(target), "name another, or remove it")
    folder = target.resolve().with_name(f".{target.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise BrakecheckError(f"cannot make the folder of the profile: {error.strerror}", str(target.parent),
                              "choose a place that can be written") from None
    try:
        started = datetime.datetime.now(datetime.timezone.utc)
        status = _run(command_line(plan, folder), environment(plan, folder))
        evidence = _collect(plan, folder)
        facts = _facts(folder)
        if not evidence:
            raise BrakecheckError(_nothing(plan, status, facts), " ".join(plan.command), "run the program on its own, "
                                  "check that it imports torch and ends by itself, and that its Python is not started "
                                  "with -I or -E")
        manifest = _manifest(plan, started, status, evidence, facts)
        manifest["versions"].update(versions or {})
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return manifest


def _run(command: Sequence[str], variables: Dict[str, str]) -> int:
    """Exit status of the program. Ctrl-C reaches it too, and it gets some time to write what it has."""
    child = subprocess.Popen(command, env=variables)
    try:
        return child.wait()
    except KeyboardInterrupt:
        try:
            return child.wait(GRACE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            child.send_signal(signal.SIGTERM)
            return child.wait()


def _collect(plan: Plan, folder: Path) -> List[Dict[str, str]]:
    """What was recorded: kind and path within the folder."""
    if plan.tool == "kineto":
        return [{"kind": "kineto", "path": "kineto"}] if list((folder / "kineto").glob("*.json.gz")) else []
    if plan.tool == "ncu":
        return [{"kind": "ncu", "path": "ncu.ncu-rep"}] if (folder / "ncu.ncu-rep").is_file() else []
    report = folder / "nsys.nsys-rep"
    if not report.is_file():
        return []
    export = ["nsys", "export", "--type", "sqlite", "--force-overwrite", "true", "--output",
              str(folder / "nsys.sqlite"), str(report)]
    done = subprocess.run(export, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / "nsys.sqlite").is_file():
        plan.problems.append(f"nsys export failed: {(done.stderr or done.stdout).strip()[-300:]}")
        return []
    return [{"kind": "nsys", "path": "nsys.sqlite"}]


def _facts(folder: Path) -> List[Dict[str, Any]]:
    """What each process of the program told about itself."""
    found = []
    for path in sorted(folder.glob("facts-*.json")):
        try:
            found.append(json.loads(path.read_text()))
        except ValueError:
            continue
        finally:
            path.unlink()
    return found


def _nothing(plan: Plan, status: int, facts: Sequence[Dict[str, Any]]) -> str:
    why = next((f["error"] for f in facts if "error" in f), None) or next(iter(plan.problems), None)
    if why is None and facts and plan.skip:
        why = f"the program made {max(f.get('steps', 0) for f in facts)} steps, {plan.skip} were to be left out"
    return f"{plan.tool} recorded nothing; the program ended with status {status}" + (f": {why}" if why else "")


def _manifest(plan: Plan, started: datetime.datetime, status: int, evidence: List[Dict[str, str]],
              facts: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    driver = local_driver()
    one: Dict[str, Any] = next(iter(facts), {})
    versions = {"python": one.get("python"), "torch": one.get("torch"),
                "cuda": one.get("cuda"), "driver": driver.version if driver else None,
                "driver-cuda": driver.cuda if driver else None, plan.tool: _version(plan.tool)}
    options = {"skip": plan.skip, "steps": plan.steps or None, "step": plan.step, "ranges": list(plan.ranges) or None,
               "launches": plan.launches or None, "replay_mode": plan.replay if plan.tool == "ncu" else None}
    manifest = {
        "schema": SCHEMA, "command": list(plan.command), "tool": plan.tool, "date": started.isoformat("T", "seconds"),
        "host": platform.node(), "exit_status": status, "evidence": evidence, "options": _known(options),
        "versions": _known(versions), "devices": one.get("devices"), "processes": len(facts) or None,
        "steps": max((f.get("steps", 0) for f in facts), default=0) or None, "rest_step": one.get("rest_step"),
        "environment": {k: v for k, v in sorted(os.environ.items()) if VARIABLES.match(k)},
        "problems": [*plan.problems, *(f["error"] for f in facts if "error" in f)] or None}
    return _known(manifest)


def _version(tool: str) -> Optional[str]:
    if tool == "kineto":
        return None  # part of torch
    try:
        done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return next((word for word in done.stdout.split() if word[:1].isdigit() and "." in word), None)


def _known(values: Dict[str, Any]) -> Dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}


def read_manifest(folder: Path) -> Optional[Dict[str, Any]]:
    """The manifest of a profile's folder, None when it is no such folder. BrakecheckError when it is damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BrakecheckError(f"the manifest cannot be read: {error}", str(path), "record the profile again") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return None
    rows = data.get("evidence")
    if not isinstance(rows, list) or not rows or not all(
            isinstance(r, dict) and r.get("kind") in TOOLS and isinstance(r.get("path"), str)
            and ".." not in Path(r["path"]).parts and not Path(r["path"]).is_absolute() for r in rows):
        raise BrakecheckError("the manifest names no evidence", f"{path}, field evidence", "record the profile again")
    return data
