"""Python environments under test: `env:/path/python`, `launch:CMD`, `pip:PACKAGES`, overlays `SPEC+package==version`.

Each becomes a command that ends in a Python, and the variables to start it with. The worker started by it says what it
really uses (worker/fingerprint.py); nothing here is believed until that has been asked.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..model import UnavailableError, UsageError
from . import cache

OVERLAY = re.compile(r"\+(?=[A-Za-z][\w.-]*==)")


@dataclass(frozen=True)
class Environment:
    """command: what to run, ending in a Python. variables: added to the environment of the worker.

    ship: the worker's files have to be sent through stdin, because this command may not see our file system.
    proofs: (package, version, folder) of each overlay, for `check_overlays`."""

    spec: str
    name: str
    command: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    ship: bool = False
    proofs: tuple[tuple[str, str, str], ...] = ()


def is_environment(spec: str) -> bool:
    """Whether a spec is one of this file's kinds (and not a toolchain such as cuda==12.9)."""
    return spec.startswith(("env:", "pip:", "launch:"))


def open_environment(spec: str) -> Environment:
    """The environment of a spec; builds what is not in the cache. Raises UsageError for a spec that cannot be read and
    UnavailableError for one that cannot be had."""
    base, *overlays = OVERLAY.split(spec)
    if base.startswith("env:"):
        found = _existing(spec, base[4:])
    elif base.startswith("pip:"):
        found = _built(spec, base[4:])
    elif base.startswith("launch:"):
        try:
            command = tuple(shlex.split(base[7:]))
        except ValueError as problem:
            raise UsageError(f"the command cannot be read: {problem}", spec, "close its quotes") from problem
        if not command:
            raise UsageError("launch: needs a command that ends in a Python", spec,
                             "write launch:docker run -i IMAGE python")
        if overlays:
            raise UsageError("an overlay cannot be put into a launched environment", spec, "install it in there")
        found = Environment(spec, " ".join(command[:3]), command, ship=True)
    else:
        raise UsageError(f"{spec!r} is not a Python environment", "stack spec",
                         "write env:/path/to/python, pip:torch==2.12.0 or launch:COMMAND, then +package==version")
    for overlay in overlays:
        found = _overlaid(found, overlay)
    return found


def stack_specs(file: str, name: str = "") -> list[str]:
    """What each stack of a TOML file (or the one called `name`) is asked for by: FILE:NAME; of a toolchain, which has
    no variables to go with it, its own spec. Builds nothing."""
    entries = _entries(file)
    out = []
    for each in [name] if name in entries else entries:
        spec = entries[each].get("spec") if isinstance(entries[each], dict) else None
        toolchain = isinstance(spec, str) and spec.startswith("cuda==")
        if toolchain and list(entries[each]) != ["spec"]:
            raise UsageError("a toolchain has a spec and nothing else", f"{file} [stacks.{each}]", "remove the rest")
        out.append(str(spec) if toolchain else f"{file}:{each}")
    return [f"{file}:{name}"] if name and name not in entries else out


def read_stack(file: str, name: str) -> Environment:
    """One environment of a TOML file: [stacks.NAME] with `spec`, and optionally `[stacks.NAME.variables]`."""
    entries = _entries(file)
    if name not in entries:
        raise UsageError(f"{file} names no stack {name!r}", f"{file}:{name}", f"it names: {', '.join(entries)}")
    entry = entries[name]
    if not isinstance(entry, dict) or not isinstance(entry.get("spec"), str):
        raise UsageError(f"stack {name!r} has no spec", f"{file} [stacks.{name}]", 'add spec = "env:..."')
    where = f"{file} [stacks.{name}]"
    unknown = [k for k in entry if k not in ("spec", "variables")]
    if unknown:  # a misspelt table of variables would leave a stack that is not the one meant
        raise UsageError(f"a stack has no field {unknown[0]!r}", where, "its fields: spec, variables")
    if not isinstance(entry.get("variables", {}), dict):
        raise UsageError("variables is a table", where, f'write [stacks.{name}.variables] and NAME = "value" below it')
    found = open_environment(entry["spec"])
    variables = {str(k): str(v) for k, v in entry.get("variables", {}).items()}
    early = next((k for k in variables if k.startswith(("LD_", "PYTHON"))), None)
    if early and found.ship:
        raise UsageError(f"{early} is read before a launched Python can be told of it", where,
                         "put it into the command")
    return replace(found, name=name, variables={**found.variables, **variables})


def _entries(file: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):  # here, because a bundle reads no files of stacks and has no tomli
        import tomllib
    else:
        import tomli as tomllib
    try:
        data = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(f"cannot read {file}: {problem.strerror}", "stack file", "check the path") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise UsageError(f"{file} is not valid TOML: {problem}", file, "correct it there") from problem
    stacks = data.get("stacks")
    if not isinstance(stacks, dict) or not stacks:
        raise UsageError("no stacks are named in this file", file, 'add [stacks.NAME] with spec = "env:..."')
    return stacks


def _existing(spec: str, path: str) -> Environment:
    python = Path(path).expanduser()
    if python.is_dir():
        python = python / "bin" / "python"
    if not python.is_file() or not os.access(python, os.X_OK):
        raise UsageError(f"there is no Python at {python}", spec, "give the path of its python, or of its environment")
    shown = python.absolute()  # not resolved: a virtual environment is known by the link it is started through
    name = shown.parent.parent.name if shown.parent.name == "bin" else shown.name
    if name in ("venv", ".venv", "env", ".env"):  # as every project calls it
        name = "/".join(shown.parent.parent.parts[-2:])
    return Environment(spec, name, (str(shown),))


# ---- Built with uv ---------------------------------------------------------------------------------------------------
def _built(spec: str, packages: str) -> Environment:
    """pip:torch==2.12.0,triton==3.6.0[,python==3.12]: a virtual environment, built once for each set of packages."""
    wanted = sorted(p.strip() for p in packages.split(",") if p.strip())
    if not wanted:
        raise UsageError("pip: needs packages", spec, "write pip:torch==2.12.0,triton==3.6.0")
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    python = next((p.split("==")[1] for p in wanted if p.startswith("python==")), own)
    wanted = [p for p in wanted if not p.startswith("python==")]
    digest = hashlib.sha256("\n".join([python, *wanted]).encode()).hexdigest()[:16]
    folder = cache.root() / "environments" / digest

    def build(into: Path) -> None:
        _uv("venv", "--quiet", "--relocatable", "--python", python, str(into))
        _uv("pip", "install", "--quiet", "--python", str(into / "bin" / "python"), *wanted)

    cache.build(folder, build)
    return Environment(spec, " ".join(wanted), (str(folder / "bin" / "python"),))


def _uv(*arguments: str) -> None:
    program = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise UnavailableError("uv is not installed", "PATH", "pip install uv")
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise UnavailableError(f"uv {arguments[0]} failed: {done.stderr.strip()[-1500:]}", " ".join(arguments),
                               "check the versions and that the package index can be reached")


# ---- Overlays --------------------------------------------------------------------------------------------------------
def _overlaid(base: Environment, package: str) -> Environment:
    """One package of shared libraries (nvidia-cublas==13.5.1.27) put in front of what the environment has.

    Libraries go in front through LD_PRELOAD, those that others of the package need first; a package without libraries
    (triton is one that has both) goes in front through PYTHONPATH."""
    name, version = package.split("==")
    digest = hashlib.sha256(package.encode()).hexdigest()[:16]
    folder = cache.root() / "overlays" / f"{name}-{version}-{digest}"
    cache.build(folder, lambda into: fetch_overlay(package, into, base.command[-1]))
    return put_in_front(base, name, version, folder)


def fetch_overlay(package: str, into: Path, python: str = sys.executable) -> None:
    """Installs one package without what it depends on into a folder of its own. UnavailableError when it cannot be."""
    _uv("pip", "install", "--quiet", "--no-deps", "--python", python, "--target", str(into), package)


def put_in_front(base: Environment, name: str, version: str, folder: Path) -> Environment:
    """The environment with the libraries (or modules) of `folder` in front of its own."""
    libraries = sorted((p for p in folder.rglob("*.so*") if p.is_file() and _is_library(p)), key=_dependencies_first)
    variables = dict(base.variables)
    native = name.lower().startswith("nvidia") or not any(folder.glob("*/__init__.py"))
    if native and libraries:
        old = variables.get("LD_PRELOAD", os.environ.get("LD_PRELOAD", ""))
        variables["LD_PRELOAD"] = " ".join([*map(str, libraries), *old.split()])
        folders = list(dict.fromkeys(str(p.parent) for p in libraries))
        paths = variables.get("LD_LIBRARY_PATH", os.environ.get("LD_LIBRARY_PATH", ""))
        variables["LD_LIBRARY_PATH"] = ":".join([*folders, *filter(None, paths.split(":"))])
    else:
        paths = variables.get("PYTHONPATH", "")  # not that of this process, which no worker gets
        variables["PYTHONPATH"] = ":".join([str(folder), *filter(None, paths.split(":"))])
    return replace(base, name=f"{base.name}+{name}=={version}", variables=variables,
                   proofs=(*base.proofs, (name, version, str(folder.resolve()))))


def _is_library(path: Path) -> bool:
    """A shared library to preload: not a Python extension module, not a part that its own library loads on demand
    (cuDNN's engines), which LD_LIBRARY_PATH serves."""
    return not re.search(r"\.(cpython|abi3)[^/]*\.so$", path.name) and not re.match(r"libcudnn_.*", path.name) \
        and not path.name.startswith(("libnvblas", "libcheckpoint"))


def _dependencies_first(path: Path) -> tuple[int, str]:
    order = ("libnvjitlink", "libcublaslt", "libcudart", "libcublas", "libcusparse")
    lower = path.name.lower()
    return next((i for i, start in enumerate(order) if lower.startswith(start)), len(order)), lower


def check_overlays(environment: Environment, fingerprint: dict[str, Any]) -> None:
    """Raises UnavailableError unless every overlay is what the worker uses, by the path of its libraries."""
    paths = [c.get("path", "") for c in fingerprint.get("components", [])]
    for name, version, folder in environment.proofs:
        used = [p for p in paths if p and Path(p).is_relative_to(folder)]
        module = fingerprint.get("modules", {}).get(name.replace("-", "_"))
        if not used and not (module and Path(module).is_relative_to(folder)):
            raise UnavailableError(
                f"{name}=={version} was put in front but is not what this stack uses", environment.spec,
                "its library has another name or major version than the one it should replace: see `loaded` in the "
                "fingerprint")
