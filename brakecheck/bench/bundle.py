"""Measures a bundle where it lies: the standard library, torch, and a driver are all it needs.

    python BUNDLE/run.py [--device cuda:0] [--budget 10m] [--python PATH] [--out FILE.json]

The result is one JSON file that `brakecheck compare` and `brakecheck show` read. Interrupted, it keeps what it
measured; run again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from ..model import BrakecheckError, Run, Stack, UsageError
from ..model.codec import decode, encode
from ..stack.environment import open_environment, put_in_front
from .controller import ArmSpec, Controller, Options
from .journal import Journal
from .stopping import enough_for

SCHEMA = "brakecheck/bundle/1"
HERE = "env:this"  # the Python that runs the bundle


def is_bundle(folder: str) -> bool:
    """Whether this is the folder of a bundle."""
    return bool(read_manifest(Path(folder), must=False))


def read_manifest(folder: Path, must: bool = True) -> Dict[str, Any]:
    try:
        data = json.loads((folder / "manifest.json").read_text())
        if data.get("schema") == SCHEMA and isinstance(data.get("arms"), list):
            return dict(data)
    except (OSError, ValueError, AttributeError):
        pass
    if must:
        raise UsageError("this is no bundle", str(folder), "make one: brakecheck bundle SPEC SPEC -o FOLDER")
    return {}


def measure_bundle(folder: Path, device: str, budget: float, python: Optional[str] = None,
                   progress: Any = lambda _: None, command: Sequence[str] = (),
                   keep: Callable[[Run], Any] = lambda _: None) -> Run:
    """The run of a bundle's arms, resumed from its journal when there is one. python: of the arms that name none.
    keep: writes the run; the journal stays until it has."""
    folder = folder.resolve()  # its name is in the journal: whoever goes on may call it otherwise
    manifest = read_manifest(folder)
    if not device.startswith("cuda") and any(arm.get("cubins") for arm in manifest["arms"]):
        raise UsageError("this bundle holds CUDA kernels, which cannot run on the CPU", f"--device {device}",
                         "give --device cuda:0")
    here = f"env:{python or sys.executable}"
    arms: List[ArmSpec] = []
    for told in manifest["arms"]:
        environment = open_environment(here if told["spec"] == HERE or told.get("cubins") else told["spec"])
        for package in told.get("overlays", ()):
            name, version = package.split("==")
            environment = put_in_front(environment, name, version, folder / "overlays" / package)
            environment = replace(environment, spec=f"{environment.spec}+{package}")
        cubins = str((folder / told["cubins"]).resolve()) if told.get("cubins") else None
        toolchain = decode(Stack, told["toolchain"]) if told.get("toolchain") else None
        arms.append(ArmSpec(told["name"], environment, told["implementation"], cubins=cubins, toolchain=toolchain))
    chosen = manifest["options"]
    options = Options(device=device, operators=tuple(chosen["operators"]), cases=chosen["cases"], seed=chosen["seed"],
                      ops=tuple(str(folder / f) for f in chosen["ops"]), budget=budget, plan=chosen["plan"])
    journal = folder / f"journal-{device.replace(':', '')}.jsonl"
    controller = Controller(arms, options, enough_for(manifest["margin"]), Journal(journal), progress)
    try:
        run = controller.run(command)
    finally:
        if not controller.journal.of("visit"):  # what measured nothing must not bind those who try again
            journal.unlink(missing_ok=True)
    run = replace(run, static=manifest.get("static"))
    keep(run)
    if run.complete:
        journal.unlink(missing_ok=True)  # only now: what `keep` could not write is still there to be written again
    return run


def write_run(run: Run, file: Path) -> Path:
    """One JSON file, written under another name and renamed."""
    fresh = file.with_name(f".{file.name}.new")
    fresh.write_text(json.dumps(encode(run)))
    fresh.replace(file)
    return file


def seconds_of(text: str, option: str = "--budget") -> float:
    """"90", "90s", "10m", "1h" in seconds."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:].lower())
    try:
        value = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise UsageError(f"{text!r} is not a time", option, "write 90s, 10m or 1h")
    return value


def main(folder: Path, arguments: Optional[Sequence[str]] = None) -> int:
    """`python BUNDLE/run.py`. Exit status: 0 measured, 1 incomplete, 64 and up errors."""
    parser = argparse.ArgumentParser(prog="run.py", description="Measure this bundle; needs a Python with torch.")
    parser.add_argument("--device", default="cuda:0", help="cuda:0 (default), cpu")
    parser.add_argument("--budget", default="10m", help="90s, 10m, 1h")
    parser.add_argument("--python", help="Python with torch that the arms run in (default: this one)")
    parser.add_argument("--out", type=Path, help="result (default: run-ID.json in this folder)")
    given = parser.parse_args(arguments)

    def show(event: Dict[str, Any]) -> None:
        print(f"pair {event['pair'] + 1}  {event['arm']:<10} {event['operator']} {event['case']}  {event['active']} "
              f"cases open, {max(0, int(event['left']))} s left" + ("" if event["ok"] else "  FAILED"), file=sys.stderr)

    def file_of(run: Run) -> Path:
        return given.out or folder / f"run-{run.id}.json"

    try:
        if given.out and not given.out.parent.is_dir():
            raise UsageError("there is no such folder", str(given.out.parent), "make it first")
        if given.out and given.out.is_dir():
            raise UsageError("this is a folder", str(given.out), "give --out the name of a file")
        run = measure_bundle(folder, given.device, seconds_of(given.budget), given.python, show, sys.argv,
                             lambda run: write_run(run, file_of(run)))
        file = file_of(run)
    except OSError as problem:
        print(f"brakecheck: {problem.strerror}: {problem.filename}\n  to do: make room or choose another --out; what "
              "was measured is kept, run this again", file=sys.stderr)
        return 74
    except BrakecheckError as problem:
        print(f"brakecheck: {problem}", file=sys.stderr)
        return problem.exit_code
    except KeyboardInterrupt:
        print("brakecheck: interrupted before anything was measured", file=sys.stderr)
        return 130
    except Exception as problem:
        print(f"brakecheck: internal error: {type(problem).__name__}: {problem}\n  to do: make the bundle again; if "
              "that does not help, report this", file=sys.stderr)
        return 70
    print(f"{file}\nbring it back and compare: brakecheck compare {file.name}"
          + ("" if run.complete else "\nincomplete: run this again to go on"))
    return 0 if run.complete else 1
