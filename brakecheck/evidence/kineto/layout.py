"""What Kineto and its relatives write: categories, argument names, phases. Old names are those of 2020-2021 traces."""

from __future__ import annotations

from typing import Dict, Tuple

BLOCK = 1 << 21     # bytes of events decoded at a time; small enough for the objects to stay in the cache
MISSING = -(2**63)  # of an integer the trace does not give; becomes null in the tables

# Category of an event -> what the reader makes of it.
OPERATOR, ANNOTATION, MODULE = 0, 1, 2
KERNEL, MEMCPY, MEMSET = 0, 1, 2
DEVICE_KINDS = ("kernel", "memcpy", "memset")

HOST: Dict[str, int] = {
    "cpu_op": OPERATOR, "Operator": OPERATOR, "operator": OPERATOR, "function": OPERATOR,
    "user_annotation": ANNOTATION, "User_annotation": ANNOTATION,
    "python_function": MODULE, "PythonFunction": MODULE, "Python": MODULE, "Module": MODULE,
}
DEVICE: Dict[str, int] = {
    "kernel": KERNEL, "Kernel": KERNEL, "concurrent_kernel": KERNEL, "gpu_op": KERNEL, "async_gpu": KERNEL,
    "gpu_memcpy": MEMCPY, "Memcpy": MEMCPY, "gpu_memset": MEMSET, "Memset": MEMSET,
}
RUNTIME = {"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "Runtime", "runtime", "cuda_sync_runtime",
           "xpu_runtime", "mtia_runtime", "privateuse1_runtime", "privateuse1_driver"}
DEVICE_ANNOTATION = {"gpu_user_annotation"}

MODULE_PREFIX = "nn.Module: "
STEP_PREFIX = "ProfilerStep#"

# Phases of the Trace Event Format besides X (whole), B (begin) and E (end).
OTHER_PHASES = "sftiIMCPNDObenRVvcSFTp()"

# Field of an event's arguments -> its names in traces, the present one first. In Kineto's order, for a decoder finds a
# field fastest where it follows the last one.
ARGUMENTS: Dict[str, Tuple[str, ...]] = {
    "external": ("External id", "external id", "External Id"),
    "dtypes": ("Input type", "Input Type"),
    "strides": ("Input Strides", "Input strides"),
    "shapes": ("Input Dims", "Input dims"),
    "device": ("device", "Device"),
    "stream": ("stream", "Stream"),
    "correlation": ("correlation", "Correlation", "correlation id"),
    "registers": ("registers per thread",),
    "shared": ("shared memory",),
    "grid": ("grid", "Grid"),
    "block": ("block", "Block"),
    "bytes": ("bytes", "Bytes"),
}
INTEGERS = ("external", "correlation", "device", "stream", "registers", "shared", "bytes")
# Of collectives, and read only in blocks that have some.
COMMUNICATION: Dict[str, Tuple[str, ...]] = {
    "collective": ("Collective name",),
    "elements_in": ("In msg nelems", "In msg size"),
    "elements_out": ("Out msg nelems", "Out msg size"),
    "group_size": ("Group size",),
    "message_dtype": ("dtype",),
    "splits_in": ("In split size",),
    "splits_out": ("Out split size",),
    "group": ("Process Group Name",),
}

# Sizes of the element types that collectives name (c10::ScalarType and NCCL spellings), bytes.
DTYPE_BYTES: Dict[str, int] = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Int": 4, "Long": 8, "Half": 2, "Float": 4, "Double": 8,
    "BFloat16": 2, "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
    "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1, "UInt16": 2, "UInt32": 4, "UInt64": 8,
}


def is_packed(magic: bytes) -> bool:
    """Whether a file that begins so is compressed: gzip or Zstandard."""
    return magic[:2] == b"\x1f\x8b" or magic == b"\x28\xb5\x2f\xfd"
