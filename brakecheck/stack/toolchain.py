"""CUDA toolchains from wheels: `cuda==12.9`, with single components from other releases."""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import platform
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..model import BrakecheckError, Component, Stack, UsageError
from ..model.arch import arch_key, arch_number
from . import cache, spec, wheels
from .wheels import Progress

MANIFEST = "toolchain.json"
_WORKER = Path(__file__).with_name("nvrtc_worker.py")
# Which extras of the metapackage bring a component when it is taken alone. From 13.0 nvcc is a program that finds cicc
# and headers beside itself, so it comes with its own.
_EXTRAS: Dict[str, Tuple[str, ...]] = {
    "nvrtc": ("nvrtc",), "ptxas": ("nvcc",), "headers": ("cudart",), "cccl": ("cccl",), "crt": ("crt",),
    "nvvm": ("nvvm",), "nvcc": ("nvcc", "nvvm", "crt", "cudart", "cccl"), "nvdisasm": ("nvdisasm", "cuobjdump"),
}


@dataclass(frozen=True)
class Disassembler:
    """nvdisasm and cuobjdump of the newest release; they read the cubins of older ones."""

    nvdisasm: Path
    cuobjdump: Path
    component: Component
    notes: Tuple[str, ...] = ()


@dataclass(frozen=True)
class CudaStack:
    """A toolchain on disk. nvcc is None where the wheels have no nvcc (12.x). nvrtc_archs: compute capabilities that
    NVRTC compiles for (90 for sm_90); ptxas_archs: the names that ptxas assembles for (sm_90a). include_dirs: in the
    order in which they are searched; overlay_includes: those of them that are not nvcc's own. notes: what the user
    should know, such as a resolution that is out of date."""

    stack: Stack
    nvrtc: Path
    ptxas: Path
    include_dirs: Tuple[Path, ...]
    nvrtc_archs: Tuple[int, ...]
    ptxas_archs: Tuple[str, ...]
    nvcc: Optional[Path] = None
    overlay_includes: Tuple[Path, ...] = ()
    notes: Tuple[str, ...] = ()

    @property
    def disassembler(self) -> Disassembler:
        component = next(c for c in self.stack.components if c.name == "nvdisasm")
        return Disassembler(_path(component), _path(component).with_name("cuobjdump"), component)

    def sha256(self, *names: str) -> List[str]:
        """Hashes of these components, for keys of what was made with them."""
        return [f"{c.name} {c.version} {c.sha256}" for c in self.stack.components if c.name in names]


@dataclass(frozen=True)
class _Installed:
    """One directory of unpacked wheels and what its manifest says; component paths are absolute here."""

    release: str
    components: Dict[str, Component]
    nvrtc_archs: Tuple[int, ...]
    ptxas_archs: Tuple[str, ...]
    note: Optional[str]


def open_stack(text: str, *, offline: bool = False, progress: Optional[Progress] = None) -> CudaStack:
    """The toolchain that the spec names, downloaded into the cache if it is not there.

    UsageError: not a CUDA spec, or no such release. UnavailableError: no network, no space.
    """
    parsed = spec.parse(text)
    if parsed.kind != "cuda":
        raise UsageError("this is not a CUDA toolchain", f"stack spec {text!r}", "write cuda==12.9 or the like")
    base = _obtain(parsed.base, _base_extras(parsed.base), offline, progress)
    parts, name, notes = dict(base.components), f"cuda {wheels.short(base.release)}", [base.note]
    nvrtc_archs, ptxas_archs = base.nvrtc_archs, base.ptxas_archs
    first: List[str] = []
    for component, release in parsed.overlays:
        other = _obtain(release, _overlay_extras(component, release), offline, progress)
        if component not in other.components:
            raise UsageError(f"CUDA {wheels.short(other.release)} has no {component} among its wheels",
                             f"stack spec {text!r}", f"it has {', '.join(sorted(other.components))}")
        taken = ("nvcc", "nvvm") if component == "nvcc" else (component,)
        parts.update({key: other.components[key] for key in taken})
        first.append(component)
        name += f" + {component} {wheels.short(other.release)}"
        notes.append(other.note)
        nvrtc_archs = other.nvrtc_archs if component == "nvrtc" else nvrtc_archs
        ptxas_archs = other.ptxas_archs if component == "ptxas" else ptxas_archs
    lacking = [key for key in ("nvrtc", "ptxas", "headers") if key not in parts]
    if lacking:
        raise BrakecheckError(f"the wheels of CUDA {wheels.short(base.release)} lack {', '.join(lacking)}",
                              f"stack spec {text!r}", "choose another release")
    overlaid = [_path(parts[key]) for key in first if key in ("headers", "crt", "cccl")]
    includes = dict.fromkeys([*overlaid, *(_path(parts[key]) for key in ("headers", "crt", "cccl") if key in parts)])
    nvcc = _path(parts["nvcc"]) if "nvcc" in parts else None
    if nvcc and "nvvm" in first:
        nvcc = _nvcc_with(nvcc, _path(parts["nvvm"]))
    if "nvdisasm" not in parts:
        tools = disassembler(offline=offline, progress=progress)
        parts["nvdisasm"] = tools.component
        notes += tools.notes
    ordered = tuple(parts[key] for key in spec.COMPONENTS if key in parts)
    return CudaStack(
        Stack(text, name, ordered), _path(parts["nvrtc"]), _path(parts["ptxas"]), tuple(includes), nvrtc_archs,
        ptxas_archs, nvcc, tuple(overlaid), tuple(dict.fromkeys(note for note in notes if note)))


def open_stacks(texts: Sequence[str], *, offline: bool = False, progress: Optional[Progress] = None) -> List[CudaStack]:
    """Several at once: downloads overlap. `progress` is called from several threads."""
    for text in texts:
        spec.parse(text)  # a slip in the last one should not cost the download of the first
    with concurrent.futures.ThreadPoolExecutor(max(1, min(4, len(texts)))) as executor:
        return list(executor.map(lambda text: open_stack(text, offline=offline, progress=progress), texts))


def disassembler(*, offline: bool = False, progress: Optional[Progress] = None) -> Disassembler:
    """The newest release's disassembler, in a directory of its own."""
    found = _obtain(None, _EXTRAS["nvdisasm"], offline, progress)
    component = found.components["nvdisasm"]
    return Disassembler(_path(component), _path(component).with_name("cuobjdump"), component,
                        (found.note,) if found.note else ())


def known_archs(stack: CudaStack) -> List[str]:
    """What this toolchain can compile CUDA C++ for, lowest first: sm_80 ... sm_90, sm_90a ..."""
    archs = [a for a in stack.ptxas_archs if arch_number(a) in stack.nvrtc_archs]
    return sorted(archs, key=arch_key)


def _nvcc_with(nvcc: Path, nvvm: Path) -> Path:
    """nvcc in a directory of links where it finds another release's cicc and libdevice: it looks beside itself."""
    own = nvcc.parent.parent

    def fill(target: Path) -> None:
        for path in own.iterdir():
            (target / path.name).symlink_to(nvvm if path.name == "nvvm" else path)

    key = hashlib.sha256(f"{nvcc} {nvvm}".encode()).hexdigest()[:12]
    return cache.build(cache.root() / "toolchains" / f"nvcc-{key}", fill) / "bin" / "nvcc"


def _path(component: Component) -> Path:
    return Path(str(component.path))


def _base_extras(release: str) -> Tuple[str, ...]:
    common = ("nvrtc", "nvcc", "cudart", "cccl")
    return (*common, "crt", "nvvm") if int(release.split(".")[0]) >= 13 else common


def _overlay_extras(component: str, release: str) -> Tuple[str, ...]:
    if component in ("crt", "nvvm", "nvcc") and int(release.split(".")[0]) < 13:
        return ("nvcc",)  # one wheel held all of them before 13.0
    return _EXTRAS[component]


def _obtain(release: Optional[str], extras: Sequence[str], offline: bool, progress: Optional[Progress]) -> _Installed:
    label = f"CUDA {release or 'disassembler'}"
    resolution = wheels.resolve(release, extras, offline=offline)
    if release and resolution.release != release and not resolution.release.startswith(f"{release}."):
        raise BrakecheckError(f"asked for CUDA {release}, and got {resolution.release}", label,
                              "check the constraints in uv's configuration")
    pins = json.dumps([resolution.pins, platform.machine()], sort_keys=True)
    folder = f"cuda-{resolution.release}-{hashlib.sha256(pins.encode()).hexdigest()[:12]}"

    def tell(done: int, what: str) -> None:
        if progress:
            progress("toolchain", done, 1, what)

    def fill(target: Path) -> None:
        tell(0, f"downloading {label}")
        wheels.install(resolution.pins, target, offline=offline)
        (target / MANIFEST).write_text(json.dumps(_describe(target, resolution), indent=1))

    target = cache.build(cache.root() / "toolchains" / folder, fill,
                         lambda: tell(0, f"waiting for another brakecheck to download {label}"))
    tell(1, f"CUDA {wheels.short(resolution.release)}")
    data = cache.read_json(target / MANIFEST)
    if data is None:
        raise BrakecheckError("the manifest of a toolchain cannot be read", str(target / MANIFEST),
                              "remove that directory; it is downloaded again")
    components = {c["name"]: Component(c["name"], c["version"], str(target / c["path"]), c["sha256"])
                  for c in data["components"]}
    return _Installed(resolution.release, components, tuple(data["nvrtc_archs"]), tuple(data["ptxas_archs"]),
                      resolution.note)


def _describe(root: Path, resolution: wheels.Resolution) -> Dict[str, Any]:
    """The manifest: every component with version, path and hash, and the architectures its compilers know. Hashed once
    here, because the libraries are large."""
    components = [c for c in (_component(root, name, resolution.pins) for name in spec.COMPONENTS) if c]
    paths = {c["name"]: root / c["path"] for c in components}
    return {
        "release": resolution.release, "pins": resolution.pins, "components": components,
        "nvrtc_archs": _nvrtc_archs(paths["nvrtc"]) if "nvrtc" in paths else [],
        "ptxas_archs": _ptxas_archs(paths["ptxas"]) if "ptxas" in paths else [],
    }


# component -> (distribution, file that it is, or None; directory that it is, part of the distribution's files).
# Of 12.x every distribution has a directory of its own; from 13.0 all share nvidia/cu13.
_FILES: Dict[str, Tuple[str, str]] = {
    "nvrtc": ("nvidia-cuda-nvrtc", r"/lib/libnvrtc\.so\.\d+$"),
    "ptxas": ("nvidia-cuda-nvcc", r"/bin/ptxas$"),
    "nvcc": ("nvidia-cuda-nvcc", r"/bin/nvcc$"),
    "nvdisasm": ("nvidia-cuda-nvdisasm", r"/bin/nvdisasm$"),
}
_TREES: Dict[str, Tuple[Tuple[str, ...], str]] = {
    "headers": (("nvidia-cuda-runtime",), r"(.*/include)/(?!cccl/)"),
    "cccl": (("nvidia-cuda-cccl",), r"(.*/include(?:/cccl)?)/(?=cub/|cuda/|thrust/|nv/)"),
    "crt": (("nvidia-cuda-crt", "nvidia-cuda-nvcc"), r"(.*/include)/(?=crt/)"),
    "nvvm": (("nvidia-nvvm", "nvidia-cuda-nvcc"), r"(.*/nvvm)/"),
}


def _component(root: Path, name: str, pins: Dict[str, str]) -> Optional[Dict[str, Any]]:
    versions = {re.sub(r"-cu\d+$", "", pin): version for pin, version in pins.items()}
    if name in _FILES:
        distribution, pattern = _FILES[name]
        for path in _files(root, distribution):
            if re.search(pattern, f"/{path}"):
                return {"name": name, "version": versions[distribution], "path": path, "sha256": _hash(root / path)}
        return None
    distributions, pattern = _TREES[name]
    for distribution in distributions:
        found = [(m.group(1), path) for path in _files(root, distribution) if (m := re.match(pattern, path))]
        if not found:
            continue
        # The shortest: include/ rather than include/cccl's own include/, and the same answer on every machine.
        top = max(sorted({t for t, _ in found}, key=len), key=[t for t, _ in found].count)
        tree = hashlib.sha256()
        for path in sorted(path for t, path in found if t == top):
            tree.update(f"{path[len(top):]} {_hash(root / path)}\n".encode())
        return {"name": name, "version": versions[distribution], "path": top, "sha256": tree.hexdigest()}
    return None


@functools.lru_cache(maxsize=64)
def _files(root: Path, distribution: str) -> Tuple[str, ...]:
    """The files of a distribution (with or without a -cu12 suffix), from the list that its wheel brings."""
    for record in root.glob(f"{distribution.replace('-', '_')}*.dist-info/RECORD"):
        if re.fullmatch(rf"{distribution.replace('-', '_')}(_cu\d+)?-[^-]+\.dist-info", record.parent.name):
            names = (line.rsplit(",", 2)[0].strip('"') for line in record.read_text().splitlines())
            return tuple(name for name in names if not name.startswith("..") and (root / name).is_file())
    return ()


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _nvrtc_archs(library: Path) -> List[int]:
    done = _run([sys.executable, str(_WORKER), str(library)])
    answer = json.loads(done.stdout.splitlines()[0]) if done.stdout.strip() else {"error": done.stderr.strip()}
    if "archs" not in answer:
        raise BrakecheckError(f"this NVRTC does not load: {answer.get('error')}", str(library),
                              "NVRTC needs glibc on Linux; check the machine type of the wheels")
    return list(answer["archs"])


def _ptxas_archs(program: Path) -> List[str]:
    found = sorted(set(re.findall(r"'(sm_\d+[af]?)'", _run([str(program), "--help"]).stdout)))
    if not found:
        raise BrakecheckError("this ptxas does not list its architectures", str(program), "check that it runs here")
    return found


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BrakecheckError(f"a program of the toolchain does not run: {error}", command[0],
                              "the toolchains need Linux on the machine type of their wheels") from error


def with_installed_nvcc(stack: CudaStack, path: Path) -> CudaStack:
    """The same stack with the nvcc of an installed toolkit as its front end (ptxas stays the stack's)."""
    if not path.is_file():
        raise UsageError("there is no nvcc", str(path), "give the path of the program: /usr/local/cuda/bin/nvcc")
    found = re.search(r"V(\d+\.\d+\.\d+)", _run([str(path), "--version"]).stdout)
    if not found:
        raise UsageError("this program does not answer --version as nvcc does", str(path), "give the path of nvcc")
    component = Component("nvcc", found.group(1), str(path), _hash(path.resolve()))
    rest = tuple(c for c in stack.stack.components if c.name != "nvcc")
    return replace(stack, nvcc=path, stack=replace(stack.stack, components=(*rest, component)))
