"""What is really in use: which file provides the symbol that torch calls, with version and hash; not what is installed.

/proc/self/maps tells what is loaded; with a library put in front (LD_PRELOAD) it shows both, so the dynamic linker is
asked which of them answers: first the global scope, then that of torch's own libraries, which is the order in which it
binds torch's calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Set

from . import nvml
from .device import Device

# Component -> a symbol that torch calls in it.
SYMBOLS = {
    "cublas": "cublasCreate_v2", "cublaslt": "cublasLtCreate", "cudnn": "cudnnGetVersion",
    "cuda-runtime": "cudaRuntimeGetVersion", "nvrtc": "nvrtcVersion", "nvjitlink": "nvJitLinkVersion",
    "nccl": "ncclGetVersion", "cusparselt": "cusparseLtInit", "cusparse": "cusparseCreate",
    "cusolver": "cusolverDnCreate", "cufft": "cufftPlan1d", "curand": "curandCreateGenerator",
    "cupti": "cuptiGetVersion", "openmp": "omp_get_max_threads",
}
ANCHORS = re.compile(r"/lib(torch_cuda|torch_cpu|torch_python|torch)\.so")
KEEP = re.compile(r"/lib(cu|nv|nccl|cupti|torch|c10|mkl|gomp|omp|iomp|openblas|caffe)[^/]*\.so")
VARIABLES = re.compile(
    r"^(CUDA|CUBLAS|CUDNN|NCCL|NVIDIA|TORCH|PYTORCH|TRITON|OMP|MKL|KMP|ATEN|LD_PRELOAD$|LD_LIBRARY_PATH$)")
HASH_MOST = 2 << 30
INTERPRETED = "TRITON_INTERPRET=1: Triton's kernels run in Python, and their times say nothing of those on a GPU"


class _Info(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p),
                ("address", ctypes.c_void_p)]


def mapped() -> List[str]:
    """Files mapped executable into this process."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        parts = line.split(None, 5)
        if len(parts) == 6 and "x" in parts[1] and parts[5].startswith("/"):
            found.add(parts[5].replace(" (deleted)", ""))
    return sorted(found)


def provider(symbol: str, anchors: Iterable[str] = ()) -> Optional[str]:
    """Path of the file whose `symbol` torch's calls bind to; None when nothing loaded provides it."""
    function = None
    for anchor in [None, *anchors]:
        try:
            handle = ctypes.CDLL(anchor, mode=os.RTLD_NOLOAD | os.RTLD_LAZY) if anchor else ctypes.CDLL(None)
            function = getattr(handle, symbol)
            break
        except (OSError, AttributeError):
            continue
    if function is None:
        return None
    look = ctypes.CDLL(None).dladdr
    look.argtypes, look.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    info = _Info()
    if not look(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info)) or not info.file:
        return None
    return os.path.realpath(os.fsdecode(info.file))


def sha256(path: str) -> Optional[str]:
    """Hash of a file; None when it cannot be read or is larger than HASH_MOST (it is identified by its version)."""
    try:
        if Path(path).stat().st_size > HASH_MOST:
            return None
        found = hashlib.sha256()
        with Path(path).open("rb") as file:
            for block in iter(lambda: file.read(1 << 22), b""):
                found.update(block)
        return found.hexdigest()
    except OSError:
        return None


def owners() -> Dict[str, str]:
    """Real path of a shared library -> "package version", for the packages that ship libraries of CUDA."""
    found = {}
    for package in metadata.distributions():
        name = (package.metadata["Name"] or "").lower()
        if not name.startswith(("nvidia", "cuda", "torch", "triton", "intel-openmp", "mkl")):
            continue
        for file in package.files or ():
            if ".so" in file.name:
                found[os.path.realpath(str(package.locate_file(file)))] = f"{name} {package.version}"
    return found


def file_version(path: str, packages: Dict[str, str]) -> Optional[str]:
    """Version of a library: of the package it came with, else the digits after .so. in its real name, else of the
    `name-version.dist-info` beside it (an overlay that is on no path). What torch brings of others (libgomp,
    libcusparseLt) does not have torch's version."""
    owner, _, version = packages.get(path, "").partition(" ")
    if owner and (owner != "torch" or re.match(r"lib(torch|c10|caffe2)", Path(path).name)):
        return version
    for parent in list(Path(path).parents)[:5]:
        if parent.name == "nvidia":
            for info in parent.parent.glob("nvidia_*.dist-info"):
                record = info / "RECORD"
                if record.is_file() and str(Path(path).relative_to(parent.parent)) in record.read_text():
                    return info.name[: -len(".dist-info")].rsplit("-", 1)[1]
    digits = re.search(r"\.so\.([\d.]+)$", path)
    return digits.group(1) if digits and "." in digits.group(1) else None


def _component(name: str, version: Optional[str], path: Optional[str] = None) -> Dict[str, str]:
    found = {"name": name, "version": version, "path": path, "sha256": sha256(path) if path else None}
    if found["version"] is None and found["sha256"]:
        found["version"] = "sha256:" + str(found["sha256"])[:12]  # no version anywhere: the file itself identifies it
    return {k: v for k, v in found.items() if v is not None}


def libraries() -> List[Dict[str, str]]:
    """A component for each symbol that something loaded provides, and one for each part of cuDNN and torch."""
    files, packages = mapped(), owners()
    anchors = [f for f in files if ANCHORS.search(f)]
    found, used = [], set()  # type: List[Dict[str, str]], Set[str]
    for name, symbol in SYMBOLS.items():
        path = provider(symbol, anchors)
        if path and path != os.path.realpath(sys.executable):
            used.add(path)
            found.append(_component(name, file_version(path, packages), path))
    for file in files:
        part = re.search(r"/lib(cudnn_\w+|torch_cuda|torch_cpu|mkl_\w+|openblas\w*)[^/]*\.so", file)
        real = os.path.realpath(file)
        if part and real not in used:
            found.append(_component(part.group(1).replace("_", "-"), file_version(real, packages), real))
    return found


def mixed_sets(paths: Iterable[str], used: Iterable[str] = ()) -> List[str]:
    """Libraries that belong together and do not come from one place (F29): the same library twice, cuBLAS and cuBLASLt
    or parts of cuDNN from different folders. `paths`: files mapped into the process. used: those that torch's calls
    go to; where all of a set do, and come from one place, a second copy that lies idle (what an overlay is in front
    of) is no mixture."""
    busy = {(str(Path(path).parent), Path(path).name.split(".so")[0]) for path in used}
    groups: Dict[str, Dict[str, Set[str]]] = {}
    for path in paths:
        name = Path(path).name.split(".so")[0]
        group = "cuBLAS" if name in ("libcublas", "libcublasLt") else "cuDNN" if name.startswith("libcudnn") else None
        if group:
            groups.setdefault(group, {}).setdefault(str(Path(path).parent), set()).add(name)
    out = []
    for group, folders in sorted(groups.items()):
        whole = set().union(*folders.values())
        if len(folders) > 1 and not any({(folder, name) for name in whole} <= busy for folder in folders):
            parts = "; ".join(f"{', '.join(sorted(names))} from {folder}" for folder, names in sorted(folders.items()))
            out.append(f"mixed set of {group}: {parts}")
    return out


def _compilers() -> List[Dict[str, str]]:
    """nvcc, and one component for each ptxas: they differ by producer, and each producer uses its own."""
    found = []
    places: Dict[str, Callable[[], Iterable[Path]]] = {
        "nvcc": lambda: (folder / "nvcc" for folder in _toolkits()),
        "ptxas (triton)": lambda: [_package("triton") / "backends" / "nvidia" / "bin" / "ptxas"],
        "ptxas (cute-dsl)": lambda: _package("nvidia_cutlass_dsl").rglob("ptxas"),
        "ptxas (toolkit)": lambda: (folder / "ptxas" for folder in _toolkits()),
        "ptxas (TRITON_PTXAS_PATH)": lambda: [Path(os.environ["TRITON_PTXAS_PATH"])],
    }
    for name, look in places.items():
        try:
            path = next((p for p in look() if p.is_file()), None)
            if path is None:
                continue
            text = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=20).stdout
        except (KeyError, ImportError, OSError, subprocess.SubprocessError):
            continue
        version = re.search(r"V(\d+\.\d+\.\d+)", text)
        found.append(_component(name, version.group(1) if version else None, str(path)))
    driver = next((Path(f).parent for f in mapped() if "/libcuda.so." in f), None)
    compiler = driver / "libnvidia-ptxjitcompiler.so.1" if driver else None  # of PTX that no cubin fits
    if compiler and compiler.is_file():
        real = os.path.realpath(compiler)
        found.append(_component("ptxas (driver)", file_version(real, {}), real))
    return found


def _toolkits() -> Iterable[Path]:
    """Folders where torch's builder of extensions looks for nvcc, in its order."""
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return [*homes, *map(Path, os.environ.get("PATH", "").split(os.pathsep)), Path("/usr/local/cuda/bin")]


def _package(name: str) -> Path:
    """Folder of an importable package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(name)
    return Path(list(spec.submodule_search_locations)[0])


def modules(names: Iterable[str]) -> Dict[str, str]:
    """Files that Python packages would be imported from."""
    found = {}
    for name in names:
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            origin = importlib.util.find_spec(name).origin  # type: ignore[union-attr]
            if origin:
                found[name] = os.path.realpath(origin)
    return found


def fingerprint(device: Device, packages: Iterable[str] = ()) -> Dict[str, Any]:
    """{"components": [...], "environment": {...}, "device": {...}, "warnings": [...], "modules": {...}}.

    packages: Python packages whose origin is asked for too.

    The driver's CUDA version ("driver-cuda") and the CUDA that torch was built with ("cuda-build") are two components:
    either moves without the other (F8)."""
    torch = device.torch
    if device.cuda:  # libraries are loaded on first use: use the ones that the catalogue will
        a = torch.ones(16, 16, device=device.name)
        (a @ a).sum().item()
    components = [_component("python", platform.python_version()), _component("pytorch", torch.__version__)]
    if torch.version.cuda:
        components.append(_component("cuda-build", torch.version.cuda))
    components += [_component(name, version) for name, version in nvml.driver_versions().items()]
    for package in ("triton", "nvidia-cutlass-dsl"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            components.append(_component(package, metadata.version(package)))
    loaded = libraries()
    components += loaded + _compilers()
    return {
        "components": components, "device": device.describe(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if VARIABLES.match(k)},
        "modules": modules(["torch", "triton", *packages]), "loaded": [f for f in mapped() if KEEP.search(f)],
        "warnings": [*mixed_sets(mapped(), [c["path"] for c in loaded if c["name"] in SYMBOLS and "path" in c]),
                     *([INTERPRETED] if os.environ.get("TRITON_INTERPRET") == "1" else [])],
    }
