"""What is really in use in a Python environment, and what will not work in it, before anything runs there.

Two ways to the same facts: a Python that can be started (its own, env:, pip:, launch:), or files saved elsewhere
(/proc/PID/maps, pip freeze). The rules over the facts are in environment_rules.py, those over symbols in elf.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from ..model import BrakecheckError, Component, UnavailableError, UsageError
from . import compat
from . import environment_rules as rules
from .compat import Finding
from .driver import Driver
from .elf import Library, check_symbols, read_library
from .environment import Environment

PROBE = Path(__file__).with_name("environment_probe.py")
PARAMS = Path("/proc/driver/nvidia/params")
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
TIME_LIMIT = 120.0  # seconds for importing torch on a slow file system
SEVERITIES = ("error", "warning", "info")
FOLDERS = ("nvidia/*/lib", "torch/lib", "*/lib", "*/lib64", "*.libs")
LINES = 200_000  # of a saved file; what is longer is neither maps nor a list of packages
# Findings about an assembler that hold whatever is assembled.
OF_ASSEMBLER = {"driver-older-than-assembler", "arch-unknown"}
_SHOWN = re.compile(r"^(torch|triton|nvidia-|cuda-|nccl|cupy|jax|vllm|sglang|flash-attn|transformer-engine|xformers|"
                    r"flashinfer|deepspeed|numba|rmm|cuvs|libcuvs)")


@dataclass(frozen=True)
class Facts:
    """What an environment told. mapped: files in its process. readable: they are files of this machine. torch: version,
    cuda, archs, devices, available, error, device_error, each absent when unknown. unused: overlays that were put in
    front, and that the process did not take."""

    subject: str
    packages: Mapping[str, str] = field(default_factory=dict)
    mapped: Sequence[str] = ()
    folders: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    torch: Mapping[str, Any] = field(default_factory=dict)
    python: Optional[str] = None
    readable: bool = False
    unused: Sequence[str] = ()


@dataclass(frozen=True)
class Examination:
    """components: packages of note, libraries in use, assemblers, driver. findings: worst first."""

    subject: str
    components: Tuple[Component, ...]
    findings: Tuple[Finding, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    archs: Tuple[str, ...] = ()
    devices: Tuple[Tuple[str, Optional[str]], ...] = ()


def ask_environment(environment: Environment) -> Facts:
    """Facts of an environment, with its overlays as packages. UnavailableError as for `ask`."""
    facts = ask(environment.command, environment.spec, not environment.ship, environment.variables)
    packages, unused = dict(facts.packages), []
    for name, version, folder in environment.proofs:
        plain = re.sub(r"[-_.]+", "-", name).lower()
        if any(Path(path).is_relative_to(folder) for path in facts.mapped):
            packages[plain] = version  # its metadata is on no path of Python's
        elif packages.get(plain) != version:
            unused.append(f"{name}=={version}")
    return replace(facts, packages=packages, unused=unused)


def ask(command: Sequence[str], subject: str, readable: bool = True,
        variables: Optional[Mapping[str, str]] = None) -> Facts:
    """Facts of the Python at the end of `command`, which imports torch if it has it. readable: its files are ours.
    variables: added to its environment.

    UnavailableError when it does not start or takes longer than TIME_LIMIT; an import that fails is a fact.
    """
    with tempfile.TemporaryDirectory(prefix="brakecheck-") as folder:
        try:
            done = subprocess.run([*command, "-"], input=PROBE.read_text(), capture_output=True, text=True, cwd=folder,
                                  errors="replace", timeout=TIME_LIMIT, check=False,
                                  env={**os.environ, **(variables or {})})
        except OSError as error:
            raise UnavailableError(f"the Python does not start: {error.strerror}", " ".join(command),
                                   "give the path of a Python") from None
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"importing torch took longer than {TIME_LIMIT:.0f} s", " ".join(command),
                                   "start it by hand, and examine it with --maps /proc/PID/maps") from None
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise UnavailableError(f"the Python ended without an answer: {last}", " ".join(command),
                               "check that it is Python 3.9 or newer")
    facts = {**answers[0], **(answers[1] if len(answers) > 1 else {})}
    if len(answers) == 1:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        facts["torch"] = {"error": f"importing torch ended the process ({how})"}
    return Facts(subject, facts["packages"], facts.get("mapped", ()), facts["folders"], facts["variables"],
                 facts.get("torch", {}), facts["python"], readable)


def saved(maps: Optional[Path], freeze: Optional[Path]) -> Facts:
    """Facts of files saved elsewhere: /proc/PID/maps, and what pip freeze or pip list printed."""
    mapped: List[str] = []
    packages: Dict[str, str] = {}
    if maps:
        fields = [line.rstrip("\n").split(None, 5) for line in _lines(maps)]
        mapped = list(dict.fromkeys(f[5].replace(" (deleted)", "") for f in fields
                                    if len(f) == 6 and f[5].startswith("/")))
        if not mapped:
            raise BrakecheckError("no file is mapped in this", str(maps), "save it with: cp /proc/PID/maps FILE")
    if freeze:
        packages = parse_freeze(_lines(freeze))
        if not packages:
            raise BrakecheckError("no package is listed in this", str(freeze), "save it with: pip freeze > FILE")
    return Facts(" and ".join(str(p) for p in (maps, freeze) if p), packages, mapped)


def parse_freeze(lines: Iterable[str]) -> Dict[str, str]:
    """Normalised name -> version, of pip freeze (name==version, name @ url with a wheel's name) or pip list."""
    found = {}
    for line in lines:
        text = line.strip()
        pinned = re.match(r"([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*={2,3}\s*([^\s;#]+)", text) \
            or re.match(r"([A-Za-z0-9][\w.-]*) @ \S*/[^/\s]*?-(\d[^-/\s]*)-[^/\s]*\.whl", text) \
            or re.match(r"([A-Za-z0-9][\w.-]*)\s+(\d[\w.+!]*)(?:\s+\S+)?$", text)
        if pinned:
            found[re.sub(r"[-_.]+", "-", pinned[1]).lower()] = pinned[2].replace("%2B", "+")
    return found


def _lines(path: Path) -> List[str]:
    try:
        with path.open(errors="replace") as file:
            lines = [line for _, line in zip(range(LINES + 1), file)]
    except OSError as error:
        raise UsageError(f"cannot read the file: {error.strerror}", str(path), "check the path") from None
    if len(lines) > LINES:
        raise UsageError(f"the file has more than {LINES} lines", str(path), "give /proc/PID/maps or pip freeze")
    return lines


def examine(facts: Facts, driver: Optional[Driver] = None, device_arch: Optional[str] = None) -> Examination:
    """All findings about the facts. driver: of the machine that they come from; device_arch: of its GPU, where the
    environment did not tell."""
    devices = [(name, arch) for name, arch in facts.torch.get("devices", ())]
    if not devices and driver:
        devices = [(d.name, d.arch) for d in driver.devices]
    if device_arch:
        devices = [(f"the device {device_arch}", device_arch)]
    archs = facts.torch.get("archs") or []
    assemblers = find_ptxas(facts)
    libraries, unread = _libraries(facts)
    paths = [p for p in facts.variables.get("LD_LIBRARY_PATH", "").split(":") if p]
    found = [*unread, *rules.mixed_sets(facts.mapped),
             *rules.driver_mix(facts.mapped, driver.version if driver else None),
             *check_symbols(libraries, _known(facts, libraries), paths), *rules.packages(facts.packages),
             *rules.device_archs(archs, devices), *rules.tuning(facts.variables)]
    found += [Finding("error", "overlay-unused", f"{overlay} was put in front, and this environment does not use it",
                      "its library has another name or major version than the one it should replace")
              for overlay in facts.unused]
    found += _about_torch(facts, driver) + _about_driver(facts, driver, devices, assemblers)
    rank = {severity: i for i, severity in enumerate(SEVERITIES)}
    return Examination(facts.subject, tuple(_components(facts, driver, assemblers)),
                       tuple(sorted(dict.fromkeys(found), key=lambda f: rank[f.severity])),
                       {k: v for k, v in sorted(facts.variables.items()) if rules.VARIABLES.match(k)}, tuple(archs),
                       tuple(devices))


def _about_torch(facts: Facts, driver: Optional[Driver]) -> List[Finding]:
    torch = facts.torch
    if "error" in torch:
        return [Finding("error", "import-fails", f"importing torch fails: {torch['error']}",
                        "the findings about symbols and mixed sets may say why")]
    out = []
    if facts.python and not torch:
        out.append(Finding("warning", "no-torch", "this Python has no torch: compare and run cannot measure it",
                           "install torch there, or name another environment"))
    if "device_error" in torch:
        out.append(Finding("error", "device-error", f"torch cannot describe the device: {torch['device_error']}"))
    if torch.get("cuda") and driver and torch.get("available") is False:
        out.append(Finding("error", "cuda-unavailable", "there is a driver, and torch.cuda.is_available() is false: "
                           "frameworks run on the CPU without an error", "see the other findings; without any, check "
                           "CUDA_VISIBLE_DEVICES and the permissions of /dev/nvidia*"))
    return out


def _about_driver(facts: Facts, driver: Optional[Driver], devices: Sequence[Tuple[str, Optional[str]]],
                  assemblers: Sequence[Component]) -> List[Finding]:
    out: List[Finding] = []
    cuda = facts.torch.get("cuda") or rules.cuda_of_packages(facts.packages)
    arch = next((a for _, a in devices if a), None)
    if driver and cuda:
        out += rules.driver_for(cuda, driver.version, driver.cuda)
    if cuda and arch and not facts.torch.get("archs"):
        release = compat.RELEASES.get(".".join(cuda.split(".")[:2]))
        if release and compat.split_arch(arch)[0] < min(compat.split_arch(a)[0] for a in release.archs):
            out += [f for f in compat.check(release.name, None, arch, arch) if f.code == "device-dropped"]
    if driver:
        for assembler in assemblers:
            release_name = ".".join(assembler.version.split(".")[:2])
            if release_name in compat.RELEASES and _used_for(assembler, arch):
                judged = compat.check(release_name, driver.version, arch or "sm_80", arch, libcuda=driver.cuda)
                sure = "triton" in assembler.name.lower()  # the others assemble only when something calls them
                name = f"{assembler.name} {assembler.version}"
                out += [Finding(f.severity if sure else "warning", f.code, f"{name}: {f.text}", f.advice)
                        for f in judged if f.code in OF_ASSEMBLER]
    return out


def _used_for(assembler: Component, arch: Optional[str]) -> bool:
    """Triton takes its ptxas-blackwell for sm_100 and newer, and its other one below."""
    if arch is None or "triton" not in assembler.name:
        return "blackwell" not in assembler.name
    return ("blackwell" in assembler.name) == (compat.split_arch(arch)[0] >= 100)


def find_ptxas(facts: Facts) -> List[Component]:
    """Each producer's own ptxas, with its version: they differ, and each is a component of its own."""
    if not facts.readable:
        return []
    places: List[Tuple[str, Path]] = []
    variables = facts.variables
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        if variables.get(name):
            places.append((f"ptxas ({name})", Path(variables[name])))
    places += [("ptxas (toolkit)", Path(p) / "ptxas") for p in variables.get("PATH", "").split(os.pathsep) if p]
    for folder in map(Path, facts.folders):
        places += [("ptxas (triton)", folder / "triton/backends/nvidia/bin/ptxas"),
                   ("ptxas-blackwell (triton)", folder / "triton/backends/nvidia/bin/ptxas-blackwell")]
        places += [("ptxas (wheel)", p) for p in sorted(folder.glob("nvidia/*/bin/ptxas"))]
        places += [("ptxas (cute-dsl)", p) for p in sorted((folder / "nvidia_cutlass_dsl").rglob("ptxas"))]
    found: Dict[str, Component] = {}
    for name, path in places:
        if name not in found and path.is_file() and (version := _ptxas_version(path)):
            found[name] = Component(name, version, str(path))
    return list(found.values())


def _ptxas_version(path: Path) -> Optional[str]:
    try:
        text = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return found[1] if found else None


def _libraries(facts: Facts) -> Tuple[List[Library], List[Finding]]:
    """The GPU libraries in use and in the environment's folders, and what could not be read of them."""
    if not facts.readable:
        return [], []
    paths = [p for p in facts.mapped if ".so" in p and rules.GPU_LIBRARY.match(Path(p).name.split(".so")[0])]
    for folder in map(Path, facts.folders):
        for pattern in FOLDERS:
            paths += [str(p) for place in sorted(folder.glob(pattern)) for p in sorted(place.glob("lib*.so*"))
                      if rules.GPU_LIBRARY.match(p.name.split(".so")[0])]
    libraries, unread = [], []
    for path in dict.fromkeys(os.path.realpath(p) for p in paths):
        try:
            libraries.append(read_library(Path(path)))
        except BrakecheckError as error:
            unread.append(Finding("warning", "library-unreadable", f"{error.what}: {path}", error.todo))
    return libraries, unread


def _known(facts: Facts, libraries: Sequence[Library]) -> Dict[str, str]:
    """Name -> file: what is loaded wins over what lies in a folder."""
    known: Dict[str, str] = {}
    for path in [*facts.mapped, *(library.path for library in libraries)]:
        known.setdefault(Path(path).name, os.path.realpath(path))
    for library in libraries:
        if library.soname:
            known.setdefault(library.soname, os.path.realpath(library.path))
    return known


def _components(facts: Facts, driver: Optional[Driver], assemblers: Sequence[Component]) -> List[Component]:
    found = [Component("python", facts.python)] if facts.python else []
    if driver:
        found.append(Component("driver", driver.version))
        cuda = driver.cuda or compat.cuda_of_driver(driver.version)[0]
        if cuda:
            found.append(Component("ptxas (driver JIT)", cuda))
    if facts.torch.get("cuda"):
        found.append(Component("cuda-build", facts.torch["cuda"]))
    found += [Component(n, v) for n, v in sorted(facts.packages.items()) if _SHOWN.match(n)]
    found += assemblers
    for path in facts.mapped:
        name, _, digits = Path(path).name.partition(".so")
        if rules.GPU_LIBRARY.match(name) and not name.startswith(("libtorch", "libc10")):
            found.append(Component(name, digits.lstrip(".") or "unversioned", path))
    return found


def permissions(params: Path = PARAMS, paranoid: Path = PARANOID, root: Optional[bool] = None) -> List[Finding]:
    """Whether this user may read hardware counters (ncu, CUPTI) and sample the CPU (nsys). Nothing where the files that
    tell are absent. Sources: ERR_NVGPUCTRPERM page of NVIDIA; nsys requires perf_event_paranoid of at most 2."""
    is_root = os.geteuid() == 0 if root is None else root
    out = []
    restricted = re.search(r"RmProfilingAdminOnly:\s*(\d)", _text(params))
    if restricted and restricted[1] == "1":
        out.append(Finding("info" if is_root else "warning", "counters-restricted", "hardware counters are for "
                           "administrators only (RmProfilingAdminOnly: 1): " + ("this user is one" if is_root else
                           "ncu and counter profiling end with ERR_NVGPUCTRPERM"), None if is_root else
                           "load the driver with NVreg_RestrictProfilingToAdminUsers=0, or run as root"))
    elif restricted:
        out.append(Finding("info", "counters-open", "hardware counters may be read (RmProfilingAdminOnly: 0)"))
    level = _text(paranoid).strip()
    if re.fullmatch(r"-?\d+", level) and int(level) > 2 and not is_root:
        out.append(Finding("info", "sampling-restricted", f"perf_event_paranoid is {level}: nsys samples no CPU stacks",
                           "sysctl kernel.perf_event_paranoid=2"))
    return out


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
