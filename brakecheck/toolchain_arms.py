"""Toolchains as arms that are measured: the catalogue's CUDA kernels, compiled by each, launched through the driver.

Kernels whose machine code is the same under both are not timed: their state is known.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import __version__
from .bench.controller import ArmSpec, Options
from .measuring import compare_arms
from .model import BrakecheckError, Stack, UnavailableError, Unit, UsageError, decode, encode
from .model.arch import capability_of
from .ops import catalogue
from .ops.base import KERNELS
from .result import Result
from .stack import cache
from .stack.driver import local_driver
from .stack.environment import open_environment
from .toolchains import collect_sources, compare_toolchains
from .verdict.policy import Policy

IMPLEMENTATION = "cuda"


@dataclass(frozen=True)
class Built:
    """What toolchains made of the catalogue. names: of the arms; manifests: one for each, of the kernels that have to
    be timed; static: for Run.static; result: the static comparison."""

    result: Result
    names: tuple[str, ...]
    manifests: tuple[Path, ...]
    stacks: tuple[Stack, ...]
    static: dict[str, Any]


def compare_on_device(specs: Sequence[str], options: Options, policy: Policy, static: dict[str, Any],
                      how: dict[str, Any]) -> Result:
    """Compiles, then times what differs on options.device with this Python's torch. static: arguments of
    compare_toolchains; how: of compare_arms."""
    if static.get("sources"):
        raise UsageError("files of your own are compared without timing: how to launch their kernels is not known",
                         "--source", "leave out --device, or add an operator (docs/adding-a-kernel.md)")
    arch = arch_of_device(options.device)
    folder = cache.scratch("cubins")
    try:
        built = build(specs, arch, folder, policy, static)
        if not built.static["timed"]:
            return built.result
        environment = open_environment(f"env:{sys.executable}")
        arms = [ArmSpec(name, environment, IMPLEMENTATION, cubins=str(manifest), toolchain=stack)
                for name, manifest, stack in zip(built.names, built.manifests, built.stacks)]
        comparison, run = compare_arms(arms, replace(options, operators=()), policy, static=built.static, **how)
        environment_told = {"brakecheck": __version__, **comparison.environment}
        return Result(replace(comparison, environment=environment_told), built.result.units, run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def arch_of_device(device: str) -> str:
    """sm_90a for an H200: the variant with all of its instructions, which is built for nothing else."""
    if not device.startswith("cuda"):
        raise UsageError("kernels of a CUDA toolchain cannot run on the CPU", f"--device {device}",
                         "give --device cuda:0, or leave it out to compare the code alone")
    index = int(device.split(",")[0].partition(":")[2] or 0)
    driver = local_driver()
    devices = driver.devices if driver else ()
    found = devices[index].arch if index < len(devices) else None
    if found is None:
        raise UnavailableError("this machine's GPU cannot be asked what it is", f"--device {device}",
                               "run it where nvidia-smi works, or make a bundle: brakecheck bundle --arch sm_90a")
    return f"{found}a" if (capability_of(found) or 0) >= 90 else found


def build(specs: Sequence[str], arch: str, folder: Path, policy: Policy, static: dict[str, Any]) -> Built:
    """Compiles the catalogue for one architecture with each toolchain and writes a folder an arm, `folder`/0 for the
    base: manifest.json (worker/cubins.py) and the cubins of the kernels that are not the same everywhere."""
    result = compare_toolchains(*specs, archs=[arch], policy=policy, **static)
    arms = [a.name for a in result.comparison.arms] if len(specs) > 2 else ["base", "candidate"]
    sources = collect_sources(None, operators=static.get("operators") or (), defines=static.get("defines") or ())
    defines = tuple(static.get("defines") or ())
    made = {(s.path, s.std, s.defines): dict(zip(arms, units)) for s, *units in zip(sources, *result.units)}
    timed: dict[str, list[list[str]]] = {}
    rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    folders = {arm: folder / str(i) for i, arm in enumerate(arms)}
    for operator in catalogue().values():
        for kernel in operator.kernels:
            units = made.get((str(kernel.path), kernel.std, (*kernel.defines, *defines)), {})
            if not units or any(u.status != "ok" for u in units.values()):
                continue
            entries = {arm: _entries(unit, [e.expression for e in kernel.entries]) for arm, unit in units.items()}
            code = [[_code(units[arm], name) for name in entries[arm].values()] for arm in units]
            if all(c == code[0] for c in code) and None not in code[0]:
                continue
            names = {n for e in entries.values() for n in e.values()}
            timed[f"{operator.name} {kernel.name}"] = _static_of(result, str(kernel.path), names, set(kernel.defines))
            for arm, unit in units.items():
                rows[arm].append({"operator": operator.name, "kernel": kernel.name, "entries": entries[arm],
                                  "cubin": _copied(unit, folders[arm])})
    manifests = []
    for arm, found in rows.items():
        folders[arm].mkdir(parents=True, exist_ok=True)
        manifests.append(folders[arm] / "manifest.json")
        manifests[-1].write_text(json.dumps({"arch": arch, "kernels": found}, indent=1))
    told = _portable({"comparison": result.to_json(), "timed": timed})
    stacks = tuple(decode(Stack, _portable(encode(a.stack))) for a in result.comparison.arms)
    return Built(result, tuple(arms), tuple(manifests), stacks, told)


def _portable(data: Any) -> Any:
    """Without the folders of this machine: a run is read on others, and may be published."""
    text = json.dumps(data)
    for folder in (KERNELS.parent, cache.root()):
        text = text.replace(json.dumps(f"{folder}/")[1:-1], "")
    return json.loads(text)


def _static_of(result: Result, source: str, names: set[str], defines: set[str]) -> list[list[str]]:
    """[source, case] of the static deltas of a kernel; the case of one of several variants of a source ends with the
    defines that tell it apart."""
    found: dict[str, int] = {}
    for d in result.comparison.deltas:
        variant = set(re.findall(r" -D(\S+)", d.case))
        if d.source == source and d.kernel in names and variant <= defines:
            found[d.case] = len(variant)
    return [[source, case] for case, size in found.items() if size == max(found.values())]


def _entries(unit: Unit, expressions: Sequence[str]) -> dict[str, str]:
    absent = [e for e in expressions if e not in unit.entries]
    if absent:
        raise BrakecheckError(f"the compiler did not name {', '.join(absent)}", unit.source, "report this")
    return {e: unit.entries[e] for e in expressions}


def _code(unit: Unit, name: str) -> str | None:
    return next((k.code_sha256 for k in unit.kernels if k.name == name), None)


def _copied(unit: Unit, folder: Path) -> str:
    """The cubin's name in the arm's folder: of its content, so that one file serves several kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{Path(unit.source).stem}-{(unit.cubin_sha256 or '')[:12]}.cubin"
    if not (folder / name).exists():
        shutil.copyfile(str(unit.cubin), folder / name)
    return name
