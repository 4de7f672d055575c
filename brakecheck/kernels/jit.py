"""Kernels of ours compiled at first use, by the NVRTC that torch ships, and launched through the CUDA driver.

No toolkit and no headers are needed: a source under kernels/cuda that is meant for this includes nothing but its
neighbours. Cubins are kept in BRAKECHECK_CACHE (default ~/.cache/brakecheck), named by a hash of all that went into
them. Standard library and torch alone. Nothing here allocates or synchronises on launch: launches can be captured.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, List, Sequence, Tuple

from ..model import BrakecheckError, UnavailableError, UsageError

CUDA_SOURCES = Path(__file__).resolve().parent / "cuda"
_MAX_DYNAMIC_SHARED = 8     # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, cuda.h
_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_CLUSTER_DIMENSION = 4      # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_STREAM = 6    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Config(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint),
    ]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute"""

    _fields_ = [
        ("id", ctypes.c_int), ("padding", ctypes.c_char * 4),
        ("cluster", ctypes.c_uint * 3), ("rest", ctypes.c_char * 52),
    ]


# ---- compiling ------------------------------------------------------------------------------------------------------

def cache_folder() -> Path:
    return Path(os.environ.get("BRAKECHECK_CACHE") or Path.home() / ".cache" / "brakecheck")


@functools.cache
def nvrtc() -> Any:
    """torch's own NVRTC (its wheel depends on it), or the one on the loader's path."""
    import torch

    major = (torch.version.cuda or "0").split(".")[0]
    found: List[str] = []
    for folder in [Path(p) / "nvidia" for p in sys.path] + [Path(torch.__file__).parent / "lib"]:
        for pattern in (f"cu{major}/lib", "cuda_nvrtc/lib", "."):
            for builtins in sorted((folder / pattern).glob(f"libnvrtc-builtins*.so*{major}.*")):
                ctypes.CDLL(str(builtins))  # NVRTC looks for it by name: loaded already, it is found wherever it lies
            found += [str(p) for p in sorted((folder / pattern).glob(f"libnvrtc*.so*{major}*"))
                      if re.fullmatch(rf"libnvrtc(-\w+)?\.so\.{major}[\d.]*", p.name) and "builtins" not in p.name]
    for name in [*found, f"libnvrtc.so.{major}"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UnavailableError("NVRTC was not found", f"torch {torch.__version__}",
                           "install torch with CUDA from its wheels")


def compile_cubin(source: str, expressions: Sequence[str], arch: str, defines: Sequence[str] = (),
                  library: Any = None, relocatable: bool = False) -> Tuple[bytes, List[str]]:
    """The cubin of a file in kernels/cuda with the given template instantiations, and their mangled names.

    arch: sm_90a. library: a loaded NVRTC. relocatable: to be linked. Raises BrakecheckError with the compiler's log."""
    lib = library or nvrtc()
    text = (CUDA_SOURCES / source).read_bytes()
    program = ctypes.c_void_p()

    def check(code: int, call: str) -> None:
        if code != 0:
            size = ctypes.c_size_t()
            log = ctypes.create_string_buffer(1)
            if program and lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0 and size.value:
                log = ctypes.create_string_buffer(size.value)
                lib.nvrtcGetProgramLog(program, log)
            raise BrakecheckError(f"{call} failed ({code}): {log.value.decode(errors='replace').strip()}", source,
                                  "report it with this message")

    check(lib.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None), "nvrtcCreateProgram")
    try:
        for expression in expressions:
            check(lib.nvrtcAddNameExpression(program, expression.encode()), "nvrtcAddNameExpression")
        flags = [f"-arch={arch}", "--std=c++17", f"-I{CUDA_SOURCES}", *(f"-D{d}" for d in defines)]
        flags += ["--relocatable-device-code=true"] if relocatable else []
        raw = (ctypes.c_char_p * len(flags))(*[f.encode() for f in flags])
        check(lib.nvrtcCompileProgram(program, len(flags), raw), "nvrtcCompileProgram")
        names = []
        for expression in expressions:
            lowered = ctypes.c_char_p()
            check(lib.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(lowered)), "nvrtcGetLoweredName")
            names.append((lowered.value or b"").decode())
        size = ctypes.c_size_t()
        check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        image = ctypes.create_string_buffer(size.value)
        check(lib.nvrtcGetCUBIN(program, image), "nvrtcGetCUBIN")
        return image.raw, names
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def cached_cubin(source: str, expression: str, arch: str, defines: Sequence[str] = ()) -> Tuple[bytes, str]:
    """compile_cubin of one expression through the cache on disk (an unwritable cache is only slower)."""
    lib = nvrtc()
    version = (ctypes.c_int(), ctypes.c_int())
    lib.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    key = (source, expression, arch, tuple(defines), version[0].value, version[1].value)
    digest = hashlib.sha256(repr(key).encode())
    for path in [CUDA_SOURCES / source, *sorted(CUDA_SOURCES.glob("*.cuh"))]:
        digest.update(path.read_bytes())
    kept = cache_folder() / f"{Path(source).stem}-{arch}-{digest.hexdigest()[:24]}"
    try:
        name, _, image = kept.read_bytes().partition(b"\n")
        return image, name.decode()
    except OSError:
        pass
    image, names = compile_cubin(source, [expression], arch, defines)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(names[0].encode() + b"\n" + image)
        Path(file.name).replace(kept)
    except OSError:
        pass
    return image, names[0]


# ---- arguments ------------------------------------------------------------------------------------------------------

def check_tensors(operator: str, x: Any, **others: Any) -> None:
    """Refuses what the dispatcher lets through and a kernel would read as floats, or at an address of another device:
    x that holds no floating point numbers, and other tensors (or None) that lie elsewhere than x."""
    if not x.is_floating_point():
        raise UsageError(f"{operator} was given {x.dtype}", operator, "give floating point numbers")
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise UsageError(f"{name} is on {other.device}, the first tensor on {x.device}", operator,
                             f"move {name} to {x.device}")


# ---- launching ------------------------------------------------------------------------------------------------------

@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnavailableError(f"the CUDA driver cannot be loaded: {error}", "libcuda.so.1",
                               "install the driver") from None


def call(name: str, *arguments: Any) -> None:
    """Calls the CUDA driver. Raises BrakecheckError for what it refuses, UnavailableError for a name that it lacks."""
    function = getattr(_driver(), name, None)
    if function is None:
        raise UnavailableError(f"this driver has no {name}", "libcuda.so.1", "update the driver")
    code = function(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise BrakecheckError(f"{name} failed: {(text.value or b'unknown error').decode()} ({code})")


def device_runtime() -> Path:
    """libcudadevrt.a, which kernels that launch kernels or set the conditions of a graph are linked with: of the CUDA
    runtime's wheel, on which torch depends, or of a toolkit."""
    folders = [Path(p) / "nvidia" for p in sys.path] + [Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")]
    for folder in folders:
        for found in sorted([*folder.glob("*/lib/libcudadevrt.a"), *folder.glob("lib*/libcudadevrt.a")]):
            return found
    raise UnavailableError("libcudadevrt.a was not found", "the CUDA runtime's wheel", "install nvidia-cuda-runtime")


def tensor_at(address: int, size: int, device: int) -> Any:
    """A tensor of `size` bytes (uint8) over memory that this device can reach and torch does not own: it must outlive
    the tensor."""
    import torch

    class Memory:
        __cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}

    return torch.as_tensor(Memory(), device=f"cuda:{device}")


_thread = threading.local()


def bind(device: int) -> None:
    """Makes the device's primary context (torch's) current on this thread, if it has none: torch's backward threads may
    not have called the runtime yet."""
    current, handle = ctypes.c_void_p(), ctypes.c_int()
    call("cuCtxGetCurrent", ctypes.byref(current))
    if not current:
        call("cuDeviceGet", ctypes.byref(handle), device)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(current), handle)  # kept: torch holds it as long
        call("cuCtxSetCurrent", current)
    _thread.bound = True


class Kernel:
    """A compiled kernel on one device, with its block size, dynamic shared memory (bytes) and cluster size fixed.

    dependent: its blocks may start before the kernel ahead of it in the stream has ended (from compute capability 9.0
    on); it must execute griddepcontrol.wait before its first access to memory.
    resident: blocks (whole clusters) that the device holds at once."""

    def __init__(self, source: str, expression: str, device: int, block: Tuple[int, int], shared: int, cluster: int,
                 defines: Sequence[str], dependent: bool = False) -> None:
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        self.name, self.device = expression, device
        image, mangled = cached_cubin(source, expression, f"sm_{major}{minor}{'a' if major >= 9 else ''}", defines)
        module, self.handle = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.init()
            bind(device)
            call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
            call("cuModuleGetFunction", ctypes.byref(self.handle), module, mangled.encode())
            if shared > 0:
                call("cuFuncSetAttribute", self.handle, _MAX_DYNAMIC_SHARED, shared)
            if cluster > 8:  # the portable limit
                call("cuFuncSetAttribute", self.handle, _NON_PORTABLE_CLUSTER, 1)
            three = ctypes.c_uint * 3
            self._config = _Config(three(cluster, 1, 1), three(*block, 1), shared)
            attributes = [_Attribute(_CLUSTER_DIMENSION, b"", three(cluster, 1, 1))] if cluster > 1 else []
            if dependent and major >= 9:
                attributes.append(_Attribute(_PROGRAMMATIC_STREAM, b"", three(1, 0, 0)))
            self._attribute: Any = (_Attribute * len(attributes))(*attributes)
            self._config.attributes = ctypes.addressof(self._attribute)
            self._config.attribute_count = int(cluster > 1)  # what counts for residence
            self.resident = self._count_resident(device, block[0] * block[1], shared, cluster)
            self._config.attribute_count = len(attributes)

    def _count_resident(self, device: int, threads: int, shared: int, cluster: int) -> int:
        import torch

        count = ctypes.c_int()
        if cluster > 1:
            call("cuOccupancyMaxActiveClusters", ctypes.byref(count), self.handle, ctypes.byref(self._config))
            return count.value * cluster
        call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(count), self.handle, threads,
              ctypes.c_size_t(shared))
        return count.value * torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(self, grid: Tuple[int, int], arguments: Sequence[Any], stream: int) -> None:
        """grid: blocks in x and y. arguments: tensors, None (a null pointer), int, float and ctypes values, in the
        kernel's order."""
        if not getattr(_thread, "bound", False):
            bind(self.device)
        values = [_value(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        config = _Config.from_buffer_copy(self._config)  # of this call alone: other threads launch the kernel too
        config.grid[0], config.grid[1], config.grid[2] = grid[0], grid[1], 1
        config.stream = stream
        call("cuLaunchKernelEx", ctypes.byref(config), self.handle, pointers, None)


def _value(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, int):
        return ctypes.c_int32(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    if isinstance(argument, ctypes._SimpleCData):
        return argument
    return ctypes.c_void_p(argument.data_ptr())


@functools.cache
def kernel(source: str, expression: str, device: int, block: Tuple[int, int], shared: int = 0, cluster: int = 1,
           defines: Tuple[str, ...] = (), dependent: bool = False) -> Kernel:
    """Compiled (or read from the cache) and loaded once a process and device. block: threads in x and y."""
    return Kernel(source, expression, device, block, shared, cluster, defines, dependent)
