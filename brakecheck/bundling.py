"""Bundles: what an air-gapped machine needs to measure arms, in one folder that needs nothing but torch there.

    manifest.json          arms, options, margin; the static comparison of toolchains
    run.py                 measures: python FOLDER/run.py
    brakecheck/            model, stack, ops, kernels, worker, bench of this version
    cubins/0, .../         kernels by toolchain, the base's first
    overlays/              packages that are put in front of an environment there
    user_ops/              files of operators of the user's own
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import __version__
from .api import expanded, kind_of
from .bench.bundle import HERE, SCHEMA
from .bench.controller import Options, choose
from .measuring import arm_names, implementations_of
from .model import UsageError
from .model.codec import encode
from .ops.load import load
from .stack.environment import OVERLAY, fetch_overlay
from .verdict.policy import Policy

SHIPPED = ("__init__.py", "model", "stack", "ops", "kernels", "worker", "bench")
RUN = '''"""Measures this bundle: python run.py --help"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from brakecheck.bench.bundle import main

sys.exit(main(Path(__file__).resolve().parent))
'''
# Python prefers the folder that it is started in to what is installed, so `python -m brakecheck` finds the copy there.
MAIN = '''"""Says what this copy of brakecheck is for."""
import sys

print("brakecheck: this folder is a bundle, and its copy of brakecheck only measures the bundle\\n"
      "  to do: here `python run.py --device cuda:0`; for everything else call brakecheck from another folder",
      file=sys.stderr)
sys.exit(64)
'''


@dataclass(frozen=True)
class Bundle:
    folder: Path
    arms: tuple[str, ...]
    timed: int
    files: int


def write_bundle(specs: Sequence[str], folder: Path, options: Options, policy: Policy, *, arch: str = "sm_90a",
                 implementation: str | None = None, static: dict[str, Any] | None = None) -> Bundle:
    """Writes the bundle of two stacks or more into `folder`, which may not exist yet.

    Environments are named by their path on the machine that measures, and not looked for here; `env:this` is the Python
    that runs the bundle; overlays (env:this+nvidia-cublas==13.5.1.27) travel in it. Toolchains are compiled here for
    `arch`. UsageError for stacks that need a network there."""
    if folder.exists():
        raise UsageError("the bundle's folder is there already", str(folder), "remove it, or choose another with -o")
    specs = expanded(specs)
    if len(specs) < 2:
        raise UsageError("a bundle compares two stacks or more", " ".join(specs), "name base and candidate")
    kinds = {"environment" if OVERLAY.split(s)[0] == HERE else kind_of(s) for s in specs}
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        told: dict[str, Any] = {}
        if kinds == {"toolchain"}:
            arms = _toolchains(specs, arch, fresh, policy, static or {}, told)
            operators: tuple[str, ...] = ()
        elif kinds == {"environment"}:
            arms = _environments(specs, implementation, fresh)
            operators = options.operators
            if not options.ops:  # of files of one's own only their own environment knows what is in them
                choose([{name: {"cases": [c.name for c in op.cases], "implementations": list(op.implementations)}
                         for name, op in load([]).items()}], options, [arm["implementation"] for arm in arms])
        else:
            raise UsageError("a bundle holds two toolchains or two environments", " ".join(specs),
                             "see `brakecheck bundle --help`")
        ops = []
        for number, file in enumerate(options.ops):
            ops.append(f"user_ops/{number}/{Path(file).name}")
            (fresh / ops[-1]).parent.mkdir(parents=True)
            shutil.copyfile(file, fresh / ops[-1])
        manifest = {
            "schema": SCHEMA, "brakecheck": __version__, "arms": arms, "margin": policy.measured.margin, **told,
            "options": {"operators": operators, "cases": options.cases, "seed": options.seed, "ops": ops,
                        "plan": options.plan}}
        (fresh / "manifest.json").write_text(json.dumps(manifest, indent=1))
        (fresh / "run.py").write_text(RUN)
        _package(fresh / "brakecheck")
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    timed = len(told["static"]["timed"]) if told else len(operators)
    return Bundle(folder, tuple(specs), timed, sum(1 for f in folder.rglob("*") if f.is_file()))


def _toolchains(specs: Sequence[str], arch: str, fresh: Path, policy: Policy, static: dict[str, Any],
                told: dict[str, Any]) -> list[dict[str, Any]]:
    from .toolchain_arms import IMPLEMENTATION, build

    built = build(specs, arch, fresh / "cubins", policy, static)
    told["static"] = built.static
    return [{"name": name, "spec": stack.spec, "implementation": IMPLEMENTATION, "toolchain": encode(stack),
             "cubins": f"cubins/{i}/manifest.json"} for i, (name, stack) in enumerate(zip(built.names, built.stacks))]


def _environments(specs: Sequence[str], implementation: str | None, fresh: Path) -> list[dict[str, Any]]:
    chosen = implementations_of(implementation)
    arms = []
    for i, (name, spec) in enumerate(zip(arm_names(specs), specs)):
        base, *overlays = OVERLAY.split(spec)
        if base.startswith("pip:") or ".toml:" in base:
            raise UsageError("a bundle cannot build an environment where it measures", spec,
                             "name one that is there: env:/path/to/python, launch:COMMAND, or env:this")
        if base.startswith("launch:") and overlays:
            raise UsageError("an overlay cannot be put into a launched environment", spec, "install it in there")
        for package in overlays:
            if not (fresh / "overlays" / package).exists():
                fetch_overlay(package, fresh / "overlays" / package)
        arms.append({"name": name, "spec": base, "overlays": overlays,
                     "implementation": chosen.get("base" if i == 0 else "candidate", "torch")})
    return arms


def _package(target: Path) -> None:
    root = Path(__file__).resolve().parent
    target.mkdir()
    for name in SHIPPED:
        if (root / name).is_file():
            shutil.copyfile(root / name, target / name)
        else:
            shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "__main__.py").write_text(MAIN)
