"""Clocks, temperature, power, throttle reasons, energy and memory of one GPU, through libnvidia-ml and ctypes alone.

Every reading is optional: what this driver or card does not tell is absent (None). Source of the numbers of the enums:
nvml.h of the NVIDIA driver.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Dict, List, Optional

SM_CLOCK, MEMORY_CLOCK = 1, 2
REASONS = {  # nvmlClocksEventReason*
    0x1: "idle", 0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "thermal (software)", 0x40: "thermal (hardware)", 0x80: "power brake", 0x100: "display clocks",
}
SLOWING = 0x4 | 0x8 | 0x20 | 0x40 | 0x80  # reasons that make a measurement depend on what ran before


LEVELS = {0: "board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # as `nvidia-smi topo -m` calls them
NVLINK = 2       # nvmlGpuP2PCapsIndex_t
MOST_LINKS = 18  # NVML_NVLINK_MAX_LINKS


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):  # nvmlProcessInfo_v2_t, used by ..._v3
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint),
                ("compute_instance", ctypes.c_uint)]


class Gpu:
    """One device of NVML. Use `open_gpu`; a machine without NVML has none."""

    def __init__(self, library: Any, handle: Any) -> None:
        self.library, self.handle = library, handle

    def _number(self, function: str, kind: Any, *arguments: Any) -> Optional[int]:
        """The last (output) argument of nvml `function`(handle, *arguments, &out), or None when it is refused."""
        call = getattr(self.library, function, None)
        if call is None:
            return None
        out = kind()
        return int(out.value) if call(self.handle, *arguments, ctypes.byref(out)) == 0 else None

    def _text(self, function: str, handle: Any = None) -> Optional[str]:
        buffer = ctypes.create_string_buffer(96)
        call = getattr(self.library, function, None)
        if call is None or call(handle or self.handle, buffer, ctypes.c_uint(96)) != 0:
            return None
        return buffer.value.decode(errors="replace")

    def clock(self, which: int = SM_CLOCK) -> Optional[int]:
        """MHz."""
        return self._number("nvmlDeviceGetClockInfo", ctypes.c_uint, ctypes.c_int(which))

    def reasons(self) -> Optional[int]:
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            bits = self._number(name, ctypes.c_ulonglong)
            if bits is not None:
                return bits
        return None

    def energy(self) -> Optional[int]:
        """Millijoules since the driver was loaded; counters step about every 20 to 100 ms."""
        return self._number("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)

    def state(self) -> Dict[str, Any]:
        """One sample of everything that can move a timing. MHz, degrees Celsius, watts."""
        power = self._number("nvmlDeviceGetPowerUsage", ctypes.c_uint)
        bits = self.reasons()
        found = {
            "sm_mhz": self.clock(), "memory_mhz": self.clock(MEMORY_CLOCK),
            "celsius": self._number("nvmlDeviceGetTemperature", ctypes.c_uint, ctypes.c_int(0)),
            "watts": None if power is None else power / 1000,
            "reasons": None if bits is None else [name for bit, name in REASONS.items() if bits & bit],
        }
        return {k: v for k, v in found.items() if v is not None}

    def process_memory(self) -> Optional[int]:
        """Bytes this process holds on the device: context, libraries, workspaces, graphs. None inside containers that
        hide their process ids from the driver."""
        call = getattr(self.library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if call is None:
            return None
        count = ctypes.c_uint(256)
        table = (_Process * 256)()
        if call(self.handle, ctypes.byref(count), table) != 0:
            return None
        own = [p.used for p in table[: count.value] if p.pid == os.getpid() and p.used < 1 << 60]
        return int(own[0]) if own else None

    def links(self) -> Dict[str, str]:
        """How the other devices of this host are reached, by UUID: "NVLink", else by which level of PCIe (LEVELS)."""
        count = ctypes.c_uint()
        if not hasattr(self.library, "nvmlDeviceGetCount_v2") or self.library.nvmlDeviceGetCount_v2(
                ctypes.byref(count)) != 0:
            return {}
        found, own = {}, self._text("nvmlDeviceGetUUID")
        for index in range(count.value):
            other = ctypes.c_void_p()
            if self.library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(other)) != 0:
                continue
            uuid = self._text("nvmlDeviceGetUUID", other)
            if uuid is None or uuid == own:
                continue
            refused = self._number("nvmlDeviceGetP2PStatus", ctypes.c_uint, other, ctypes.c_int(NVLINK))
            level = self._number("nvmlDeviceGetTopologyCommonAncestor", ctypes.c_uint, other)
            link = "NVLink" if refused == 0 else None if level is None else LEVELS.get(level)
            if link:
                found[uuid] = link
        return found

    def describe(self) -> Dict[str, Any]:
        limit = self._number("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint)
        memory = _Memory()
        known = self.library.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(memory)) == 0
        found = {
            "name": self._text("nvmlDeviceGetName"), "uuid": self._text("nvmlDeviceGetUUID"),
            "max_sm_mhz": self._number("nvmlDeviceGetMaxClockInfo", ctypes.c_uint, ctypes.c_int(SM_CLOCK)),
            "power_limit_watts": None if limit is None else limit / 1000,
            "memory_bytes": int(memory.total) if known else None, "links": self.links() or None,
            "nvlinks": sum(self._number("nvmlDeviceGetNvLinkState", ctypes.c_uint, ctypes.c_uint(link)) == 1
                           for link in range(MOST_LINKS)) or None,
        }
        return {k: v for k, v in found.items() if v is not None}


def library() -> Optional[Any]:
    """libnvidia-ml, initialised; None where there is no NVIDIA driver."""
    try:
        loaded = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return loaded if loaded.nvmlInit_v2() == 0 else None


def open_gpu(uuid: Optional[str], index: int = 0) -> Optional[Gpu]:
    """The device by UUID ("GPU-..."; CUDA and NVML number devices differently), by index where no UUID is known."""
    loaded = library()
    if loaded is None:
        return None
    handle = ctypes.c_void_p()
    if uuid and loaded.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == 0:
        return Gpu(loaded, handle)
    if not uuid and loaded.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
        return Gpu(loaded, handle)
    return None


def driver_versions() -> Dict[str, str]:
    """{"driver": "580.159.04", "driver-cuda": "13.0"}: the newest CUDA the driver supports, which is not the CUDA that
    the stack was built with."""
    loaded = library()
    found: Dict[str, str] = {}
    if loaded is None:
        return found
    buffer = ctypes.create_string_buffer(96)
    if loaded.nvmlSystemGetDriverVersion(buffer, ctypes.c_uint(96)) == 0:
        found["driver"] = buffer.value.decode(errors="replace")
    number = ctypes.c_int()
    if loaded.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)) == 0:
        found["driver-cuda"] = cuda_version(number.value)
    return found


def cuda_version(number: int) -> str:
    """12040 -> 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"


def slowing(names: List[str]) -> bool:
    return any(REASONS[bit] in names for bit in REASONS if bit & SLOWING)
