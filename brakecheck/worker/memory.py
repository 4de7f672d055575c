"""Memory of a case: the allocator's peaks, the process on the device, the host, and what stays behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from .device import Device


def host_bytes(field: str = "VmRSS") -> Optional[int]:
    """A memory line of /proc/self/status in bytes; None elsewhere than Linux."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def reset_host_peak() -> bool:
    """Makes VmHWM start from now (Linux 4.0); False where that is not allowed."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return True
    except OSError:
        return False


class Watch:
    """Begins before the inputs are made; `report` says what the case needed beyond what was there."""

    def __init__(self, device: Device) -> None:
        self.device = device
        gc.collect()
        if device.cuda:
            cuda = device.torch.cuda
            cuda.synchronize(device.index)
            cuda.empty_cache()
            cuda.reset_peak_memory_stats(device.index)
            self.allocated, self.reserved = cuda.memory_allocated(device.index), cuda.memory_reserved(device.index)
        self.host_reset = reset_host_peak()
        self.host = host_bytes()

    def report(self) -> Dict[str, Any]:
        """Bytes. allocated, reserved: peak of torch's allocator above what was held before. process: of this process on
        the device, all in all. host_peak: growth of the resident set."""
        found: Dict[str, Any] = {}
        if self.device.cuda:
            cuda = self.device.torch.cuda
            cuda.synchronize(self.device.index)
            found["allocated"] = cuda.max_memory_allocated(self.device.index) - self.allocated
            found["reserved"] = cuda.max_memory_reserved(self.device.index) - self.reserved
            if self.device.gpu and self.device.gpu.process_memory() is not None:
                found["process"] = self.device.gpu.process_memory()
        peak = host_bytes("VmHWM")
        if self.host_reset and peak is not None and self.host is not None:
            found["host_peak"] = max(0, peak - self.host)
        return found


def held(device: Device) -> Optional[int]:
    """Bytes that are held now: the allocator's on a GPU, the resident set on a CPU."""
    gc.collect()
    if device.cuda:
        device.sync()
        return int(device.torch.cuda.memory_allocated(device.index))
    return host_bytes()


def retention(device: Device, call: Callable[[], Any], repeats: int = 8) -> Optional[Dict[str, int]]:
    """What stays held after calls whose outputs were dropped (F9).

    {"fixed": held after the first call beyond before it, "growth": more per further call, "calls"}. A workspace of a
    library is fixed; a leak grows. Growth is the median step: one lazily made workspace later on is not a leak."""
    before = held(device)
    levels: List[int] = []
    for _ in range(repeats + 1):
        call()
        level = held(device)
        if level is None or before is None:
            return None
        levels.append(level)
    assert before is not None
    steps = sorted(b - a for a, b in zip(levels, levels[1:]))
    return {"fixed": levels[0] - before, "growth": steps[len(steps) // 2], "calls": repeats}
