"""Launches cubins through the CUDA driver (libcuda) with ctypes, on torch's context and current stream.

Standard library and torch only: it runs inside the stack under test. A cubin of any toolchain can be launched beside
any torch, which is what makes the toolchain a component of its own. Nothing here allocates or synchronises on launch,
so launches can be captured into a graph (load the module and set up launches before the capture starts).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..model import BrakecheckError, UnavailableError
from ..ops.base import Case, CudaKernel, Launch, Scalar, TensorMap

# Constants of cuda.h (CUDA 12.0; the driver API keeps them).
_MAX_DYNAMIC_SHARED = 8          # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NON_PORTABLE_CLUSTER = 14       # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8            # blocks of a cluster that every GPU with clusters takes
_COOPERATIVE = 2                 # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_CLUSTER_DIMENSION = 4           # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_L2_PROMOTION_128 = 2            # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_FUNCTION_ATTRIBUTES = {"max_threads": 0, "shared": 1, "constant": 2, "local": 3, "registers": 4}
_TENSOR_TYPES = {"uint8": 0, "int8": 0, "int32": 3, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_CTYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}


class DriverError(BrakecheckError):
    """A call into the CUDA driver failed. code: its CUresult, name: that code's name (CUDA_ERROR_INVALID_VALUE)."""

    exit_code = 70

    def __init__(self, call: str, code: int, name: str, text: str, where: Optional[str] = None) -> None:
        super().__init__(f"{call} failed: {name} ({code}), {text}", where, _ADVICE.get(name))
        self.code, self.name = code, name


_ADVICE = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "compile the kernel for this GPU's architecture",
    "CUDA_ERROR_INVALID_IMAGE": "check that the file is a cubin; a cubin of a newer toolchain needs a newer driver",
    "CUDA_ERROR_INVALID_SOURCE": "check that the file is a cubin; a cubin of a newer toolchain needs a newer driver",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "this driver is older than the PTX; use a cubin or a newer driver",
    "CUDA_ERROR_NOT_FOUND": "check the kernel's mangled name against the cubin's symbols",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "registers x threads or shared memory do not fit: use a smaller block",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "the context is lost: start a new process; compute-sanitizer finds the access",
}


class _Config(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint),
    ]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padding to 8 bytes, a union of 64 bytes (here: three cluster dimensions,
    or in the first of them whether the launch is cooperative)."""

    _fields_ = [
        ("id", ctypes.c_int), ("padding", ctypes.c_char * 4),
        ("cluster", ctypes.c_uint * 3), ("rest", ctypes.c_char * 52),
    ]


@functools.cache
def _library() -> Any:
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnavailableError(
            f"the CUDA driver cannot be loaded: {error}", "libcuda.so.1",
            "run on a machine with an NVIDIA GPU and its driver (in a container: with --gpus all)",
        ) from None
    _check(lib, "cuInit", lib.cuInit(0))
    return lib


def _check(lib: Any, call: str, code: int, where: Optional[str] = None) -> None:
    if code != 0:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        lib.cuGetErrorName(code, ctypes.byref(name))
        lib.cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(call, code, (name.value or b"unknown error").decode(), (text.value or b"").decode(), where)


def _call(name: str, *arguments: Any, where: Optional[str] = None) -> None:
    lib = _library()
    _check(lib, name, getattr(lib, name)(*arguments), where)


def driver_version() -> Tuple[int, int]:
    """The newest CUDA that the driver supports, as (major, minor)."""
    version = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def use_torch_context() -> None:
    """Makes the primary context of torch's current device current on this thread (torch does so lazily)."""
    import torch

    torch.cuda.init()
    _call("cuCtxSetCurrent", _primary_context(torch.cuda.current_device()))


@functools.cache
def _primary_context(ordinal: int) -> ctypes.c_void_p:
    """Retained once a process and never released: torch holds it as long."""
    context, device = ctypes.c_void_p(), ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), ordinal)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


class Module:
    """A loaded cubin. Its functions live as long as it does."""

    def __init__(self, cubin: bytes, name: str = "cubin") -> None:
        use_torch_context()
        self.name = name
        self._handle = ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(self._handle), ctypes.c_char_p(cubin), where=name)

    def function(self, mangled: str) -> Function:
        handle = ctypes.c_void_p()
        _call("cuModuleGetFunction", ctypes.byref(handle), self._handle, mangled.encode(),
              where=f"{mangled} in {self.name}")
        return Function(handle, mangled, self)

    def unload(self) -> None:
        """Frees the code on the device. Its functions must not be launched any more."""
        if self._handle:
            _call("cuModuleUnload", self._handle, where=self.name)
            self._handle = ctypes.c_void_p()


class Function:
    """A kernel of a loaded module."""

    def __init__(self, handle: ctypes.c_void_p, name: str, module: Module) -> None:
        self.handle, self.name, self.module = handle, name, module

    def attributes(self) -> Dict[str, int]:
        """What the driver says: max_threads, registers, and shared, constant and local bytes."""
        found = {}
        for name, number in _FUNCTION_ATTRIBUTES.items():
            value = ctypes.c_int()
            _call("cuFuncGetAttribute", ctypes.byref(value), number, self.handle, where=self.name)
            found[name] = value.value
        return found

    def prepare(self, launch: Launch) -> Prepared:
        """Packs the arguments (encoding tensor maps) and opts into the shared memory: all that is not repeated."""
        if launch.dynamic_shared:
            _call("cuFuncSetAttribute", self.handle, _MAX_DYNAMIC_SHARED, launch.dynamic_shared,
                  where=f"{launch.dynamic_shared} bytes of dynamic shared memory for {self.name}")
        if launch.cluster and launch.cluster[0] * launch.cluster[1] * launch.cluster[2] > _PORTABLE_CLUSTER:
            _call("cuFuncSetAttribute", self.handle, _NON_PORTABLE_CLUSTER, 1, where=self.name)
        return Prepared(self, launch)


class Prepared:
    """A launch with its arguments packed. It keeps the tensors alive; their memory must not move."""

    def __init__(self, function: Function, launch: Launch) -> None:
        self.function, self.launch = function, launch
        self._values = pack(launch.arguments, function.name)
        self._pointers = (ctypes.c_void_p * len(self._values))(*[ctypes.addressof(v) for v in self._values])
        three = ctypes.c_uint * 3
        self._config = _Config(three(*launch.grid), three(*launch.block), launch.dynamic_shared)
        attributes = []
        if launch.cluster:
            attributes.append(_Attribute(_CLUSTER_DIMENSION, b"", three(*launch.cluster)))
        if launch.cooperative:
            attributes.append(_Attribute(_COOPERATIVE, b"", three(1, 0, 0)))
        if attributes:
            self._attributes = (_Attribute * len(attributes))(*attributes)
            self._config.attributes = ctypes.addressof(self._attributes)
            self._config.attribute_count = len(attributes)

    def enqueue(self, stream: Optional[int] = None) -> None:
        """Launches on `stream` (a CUstream as an integer), by default on torch's current stream."""
        if stream is None:
            import torch

            stream = torch.cuda.current_stream().cuda_stream
        self._config.stream = stream
        _call("cuLaunchKernelEx", ctypes.byref(self._config), self.function.handle, self._pointers, None,
              where=f"{self.function.name}, grid {self.launch.grid}, block {self.launch.block}, "
                    f"{self.launch.dynamic_shared} bytes of dynamic shared memory")


def pack(arguments: Sequence[Any], where: str = "kernel") -> List[Any]:
    """ctypes values of launch arguments: tensors as device pointers, Scalars by value, TensorMaps encoded."""
    values: List[Any] = []
    for position, argument in enumerate(arguments):
        if isinstance(argument, Scalar):
            values.append(_CTYPES[argument.ctype](argument.value))
        elif isinstance(argument, TensorMap):
            values.append(encode_tensor_map(argument))
        elif hasattr(argument, "data_ptr"):
            if not argument.is_contiguous():
                raise BrakecheckError("a kernel argument is not contiguous", f"argument {position} of {where}",
                                      "make it contiguous in the operator's inputs")
            values.append(ctypes.c_void_p(argument.data_ptr()))
        else:
            raise BrakecheckError(f"a kernel argument is a {type(argument).__name__}",
                                  f"argument {position} of {where}", "pass a tensor, a Scalar or a TensorMap")
    return values


def encode_tensor_map(map: TensorMap) -> Any:
    """The 128-byte descriptor of a TMA copy (cuTensorMapEncodeTiled); out-of-bounds elements read as zero."""
    shape = list(map.tensor.shape)
    rank, size = len(shape), map.tensor.element_size()
    kind = str(map.tensor.dtype).replace("torch.", "")
    where = f"tensor map of {kind} {tuple(shape)} in boxes of {tuple(map.box)}, swizzle {map.swizzle}"
    known = kind in _TENSOR_TYPES and map.swizzle in _SWIZZLES
    if not known or len(map.box) != rank or not map.tensor.is_contiguous():
        raise BrakecheckError("this tensor map cannot be encoded", where,
                              "use a contiguous tensor, a box of its rank, and a swizzle of 0, 32, 64 or 128")
    raw = (ctypes.c_char * (128 + 64))()  # the driver wants 64-byte alignment, ctypes promises 16 at most
    # From the raw buffer, so that the memory lives as long as the value does.
    value = (ctypes.c_char * 128).from_buffer(raw, -ctypes.addressof(raw) % 64)
    # The driver counts dimensions from the innermost; strides leave the innermost out.
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    strides = (ctypes.c_uint64 * max(rank - 1, 1))(*[s * size for s in reversed(map.tensor.stride()[:-1])])
    box = (ctypes.c_uint32 * rank)(*reversed(map.box))
    steps = (ctypes.c_uint32 * rank)(*[1] * rank)
    base = ctypes.c_void_p(map.tensor.data_ptr())
    _call("cuTensorMapEncodeTiled", value, _TENSOR_TYPES[kind], rank, base, sizes, strides, box, steps,
          0, _SWIZZLES[map.swizzle], _L2_PROMOTION_128, 0, where=where)
    return value


class KernelRun:
    """One CudaKernel on one case's inputs. `outputs`: what it writes, scratch included."""

    def __init__(self, kernel: CudaKernel, functions: Dict[str, Function], case: Case, inputs: Dict[str, Any]) -> None:
        """functions: by the kernel's entry (its expression in the catalogue, not its mangled name)."""
        self.kernel = kernel
        self.outputs = kernel.outputs(case, **inputs)
        launches = kernel.launches(case, **inputs, **self.outputs)
        self._prepared = [functions[launch.entry or kernel.entry].prepare(launch) for launch in launches]

    def poison(self) -> None:
        """Fills the outputs with NaN or the least integer, so that an element that is not written is seen."""
        import torch

        for tensor in self.outputs.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

    def enqueue(self) -> None:
        """Zeroes what the kernel adds to, then launches, on torch's current stream."""
        for name in self.kernel.zeroed:
            self.outputs[name].zero_()
        for prepared in self._prepared:
            prepared.enqueue()
