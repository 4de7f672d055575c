"""What goes wrong in an environment, told from names, versions and variables: rules over facts; nothing is read."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from . import compat
from .compat import Finding

# Libraries of one product that call each other's internals: they must come from one place.
SETS = (("cuBLAS", re.compile(r"libcublas(Lt)?$")), ("cuDNN", re.compile(r"libcudnn(_\w+)?$")))
GPU_LIBRARY = re.compile(r"^lib(cu|nv|nccl|torch|c10)[\w+-]*$")
DRIVER_LIBRARY = re.compile(
    r"^(libcuda|libnvidia-ptxjitcompiler|libnvidia-nvvm\d*|libnvidia-ml)\.so\.(\d{3,4}\.\d+\S*)$")
VARIABLES = re.compile(
    r"^(NCCL_|CUBLAS|CUDNN_|TORCH_|TORCHINDUCTOR_|TRITON_|CUDA_|PYTORCH_\w*ALLOC_CONF$|PYTORCH_NO_|NVIDIA_TF32_OVERRIDE$|"
    r"LD_PRELOAD$|LD_LIBRARY_PATH$|LD_AUDIT$|OMP_NUM_THREADS$|MKL_NUM_THREADS$|ACC_\w*_ALLOC)")
# What a variable does to a measurement, where it is more than a preference. Source: the documentation of its product.
EFFECTS = {
    "LD_PRELOAD": "libraries are put in front of those that the packages bring",
    "LD_LIBRARY_PATH": "libraries found there win over those that the packages bring",
    "NVIDIA_TF32_OVERRIDE": "0 switches TF32 off in every library, whatever the program asks for: much slower FP32",
    "CUDA_LAUNCH_BLOCKING": "1 makes every launch wait for its kernel",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1 serialises streams, which overlapped communication pays for",
    "CUDA_MODULE_LOADING": "EAGER loads every kernel at start: more memory, slower start",
    "CUDA_CACHE_DISABLE": "1 compiles PTX anew in every process",
    "CUDA_FORCE_PTX_JIT": "1 ignores all cubins: the driver compiles every kernel",
    "CUBLAS_WORKSPACE_CONFIG": "limits cuBLAS's workspace, and so the algorithms it may choose",
    "CUBLASLT_WORKSPACE_SIZE": "limits cuBLASLt's workspace, and so the algorithms it may choose",
    "NCCL_DEBUG": "INFO and TRACE write much to the log",
    "NCCL_P2P_DISABLE": "1 takes NVLink and PCIe peer transfers away",
    "NCCL_SHM_DISABLE": "1 takes shared memory between processes away",
    "NCCL_IB_DISABLE": "1 takes InfiniBand and RoCE away: sockets only",
    "NCCL_ALGO": "forces the algorithm, whatever a newer NCCL would choose",
    "NCCL_PROTO": "forces the protocol, whatever a newer NCCL would choose",
    "TORCH_NCCL_BLOCKING_WAIT": "1 makes the host wait for every collective",
    "TORCH_CUDNN_V8_API_DISABLED": "1 goes back to an older way of choosing convolutions",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1 allows TF32 where the program did not ask for it",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1 calls cudaMalloc for every tensor",
    "TRITON_PTXAS_PATH": "Triton assembles with this ptxas and not its own",
    "TRITON_INTERPRET": "1 runs Triton kernels in Python on the CPU",
}
PRODUCT = re.compile(r"^nvidia-([a-z0-9-]+?)(?:-cu(\d\d))?$")


def mixed_sets(mapped: Iterable[str]) -> List[Finding]:
    """Libraries that belong together from two places, and one library from two (F29). mapped: files of one process."""
    places: Dict[str, Dict[str, Set[str]]] = {}
    twice: Dict[str, Set[str]] = {}
    for path in map(PurePosixPath, mapped):
        stem = path.name.split(".so")[0]
        for product, pattern in SETS:
            if pattern.match(stem):
                places.setdefault(product, {}).setdefault(str(path.parent), set()).add(path.name)
        if ".so" in path.name and GPU_LIBRARY.match(stem):
            twice.setdefault(stem, set()).add(str(path))
    found = []
    for product, folders in places.items():
        if len(folders) > 1:
            parts = "; ".join(f"{', '.join(sorted(names))} from {place}" for place, names in sorted(folders.items()))
            found.append(Finding(
                "error", "mixed-set", f"mixed set of {product}: {parts}. They call each other's internals, and may be "
                "slow or wrong without any error", "remove one of the places from LD_LIBRARY_PATH, LD_PRELOAD or the "
                "environment"))
    for stem, paths in sorted(twice.items()):
        if len(paths) > 1:
            found.append(Finding("warning", "loaded-twice", f"{stem} is loaded {len(paths)} times: "
                                 f"{', '.join(sorted(paths))}", "which one a call reaches depends on the order of "
                                 "loading: keep one"))
    return found


def driver_mix(mapped: Iterable[str], kernel_driver: Optional[str]) -> List[Finding]:
    """Parts of the user-space driver of different versions, and libcuda newer than the kernel driver."""
    versions: Dict[str, Dict[str, str]] = {}
    for path in map(PurePosixPath, mapped):
        part = DRIVER_LIBRARY.match(path.name)
        if part:
            versions.setdefault(part[1], {})[part[2]] = str(path)
    found = []
    every = {v for part in versions.values() for v in part if part is not versions.get("libnvidia-ml")}
    if len(every) > 1:
        parts = "; ".join(f"{path}" for part in versions.values() for path in part.values())
        found.append(Finding("error", "driver-mix", f"parts of the driver are of different versions: {parts}",
                             "put one driver, or one forward-compatibility package, in front"))
    for version, place in versions.get("libcuda", {}).items():
        if kernel_driver and version != kernel_driver:
            newer = _numbers(version) > _numbers(kernel_driver)
            code = "forward-compatibility" if newer else "libcuda-old"
            found.append(Finding(
                "info" if newer and "compat" in place else "warning", code,
                f"libcuda {version} ({place}) on kernel driver {kernel_driver}"
                + (": forward compatibility, which data-center GPUs have and others refuse (error 803 or 804)"
                   if newer else ": it is left over from another driver, calls may fail with error 803"),
                None if newer else "remove it, or reinstall the driver"))
    return found


def tuning(variables: Mapping[str, str]) -> List[Finding]:
    """Inherited variables that change what is measured; one finding each."""
    found = []
    for name, value in sorted(variables.items()):
        if VARIABLES.match(name) and value and (name in EFFECTS or not name.startswith("CUDA_")):
            effect = EFFECTS.get(name)
            harsh = name in ("LD_PRELOAD", "NVIDIA_TF32_OVERRIDE", "TRITON_INTERPRET") or (
                name in ("CUDA_LAUNCH_BLOCKING", "CUDA_FORCE_PTX_JIT", "PYTORCH_NO_CUDA_MEMORY_CACHING",
                         "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") and value != "0")
            found.append(Finding("warning" if harsh else "info", "variable",
                                 f"{name}={value}" + (f": {effect}" if effect else ""),
                                 "unset it, unless production has it too" if harsh else None))
    return found


def device_archs(archs: Sequence[str], devices: Sequence[Tuple[str, Optional[str]]]) -> List[Finding]:
    """Whether a build with these architectures (sm_90, compute_90 for PTX) has code for each device (F31)."""
    found = []
    for name, device in devices:
        if device is None or not archs:
            continue
        built = [a for a in archs if re.fullmatch(r"(sm|compute)_\d{2,3}[af]?", a)]
        if any(a.startswith("sm_") and not compat.check_device(a, device) for a in built):
            continue
        number, _ = compat.split_arch(device)
        jit = any(a.startswith("compute_") and compat.split_arch(a)[0] <= number for a in built)
        has = " ".join(archs)
        if jit:
            found.append(Finding("warning", "jit-needed", f"PyTorch has no machine code for {name} ({device}), only "
                                 f"PTX: the driver compiles every kernel at first use. It has {has}",
                                 "use a build for this device"))
        else:
            oldest = min((compat.split_arch(a)[0] for a in built), default=number)
            why = "it was dropped from this build" if number < oldest else "this build is older than the device"
            found.append(Finding("error", "device-dropped", f"PyTorch has no code for {name} ({device}): {why}, which "
                                 "has {}. torch.cuda.is_available() may be true all the same; the first kernel fails "
                                 'with "no kernel image is available"'.format(has), "use a build for this device"))
    return found


def packages(versions: Mapping[str, str]) -> List[Finding]:
    """Packages of two CUDA majors, a PyTorch of another major than its libraries, an nvJitLink older than what it
    links. versions: normalised name -> version, as pip freeze lists."""
    products: Dict[str, Dict[int, str]] = {}
    for name, version in versions.items():
        part = PRODUCT.match(name)
        if part and version[:1].isdigit():
            major = int(part[2]) if part[2] else (int(version.split(".")[0]) if part[1] in _OF_TOOLKIT else 13)
            products.setdefault(part[1], {})[major] = f"{name} {version}"
    found = [Finding("warning", "two-majors", f"{' and '.join(sorted(by.values()))} are both installed: which is "
                     "loaded depends on the order of loading", "uninstall one of them")
             for product, by in sorted(products.items()) if len(by) > 1]
    wanted = re.search(r"\+cu(\d\d)\d", versions.get("torch", ""))
    others = sorted(by[max(by)] for product, by in products.items()
                    if wanted and product in _OF_TOOLKIT and int(wanted[1]) not in by)
    if wanted and others:
        found.append(Finding("error", "other-major", f"PyTorch {versions['torch']} needs libraries of CUDA "
                             f"{wanted[1]}, installed are {', '.join(others)}",
                             "install PyTorch again with its dependencies"))
    found += _nvjitlink(products)
    return found


# Packages whose version is the CUDA release.
_OF_TOOLKIT = ("cuda-runtime", "cuda-nvrtc", "cuda-nvcc", "cuda-cupti", "nvjitlink", "nvtx", "nvvm")


def _nvjitlink(products: Mapping[str, Mapping[int, str]]) -> List[Finding]:
    found = []
    for major, link in products.get("nvjitlink", {}).items():
        for product in ("cuda-nvrtc", "cuda-nvcc", "cuda-runtime", "nvvm"):
            other = products.get(product, {}).get(major)
            if other and _numbers(link.split()[1])[:2] < _numbers(other.split()[1])[:2]:
                found.append(Finding(
                    "warning", "nvjitlink-old", f"{link} is older than {other}: code that was built against the newer "
                    "one asks for symbols that it does not have", f"install nvidia-nvjitlink {other.split()[1]}"))
                break
    return found


def cuda_of_packages(versions: Mapping[str, str]) -> Optional[str]:
    """The CUDA release that an environment runs on: of its runtime package, else of PyTorch's build tag."""
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        if re.match(r"\d+\.\d+", versions.get(name, "")):
            return ".".join(versions[name].split(".")[:2])
    tag = re.search(r"\+cu(\d\d)(\d)$", versions.get("torch", ""))
    return f"{tag[1]}.{tag[2]}" if tag else None


def driver_for(cuda: str, driver: str, libcuda: Optional[str]) -> List[Finding]:
    """Whether the driver runs libraries of a CUDA release: without it frameworks fall back to the CPU (F28)."""
    major = int(cuda.split(".")[0])
    least = compat.MINIMUM_DRIVER.get(major)
    if least is None or _numbers(driver) >= _numbers(least):
        return []
    if libcuda and int(libcuda.split(".")[0]) >= major:
        return []
    reports = libcuda or compat.cuda_of_driver(driver)[0]
    this = f"{driver} (CUDA {reports})" if reports else driver
    usable = f"CUDA {reports.split('.')[0]}" if reports else "an older CUDA"
    return [Finding("error", "driver-old", f"the libraries are of CUDA {cuda}, which needs driver {least} or newer; "
                    f"this is {this}: frameworks warn once and then run on the CPU",
                    f"use packages of {usable}, or a newer driver")]


def _numbers(version: str) -> Tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version))
