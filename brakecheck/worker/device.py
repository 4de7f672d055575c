"""The device a worker measures on: what it is, its state at a moment, how to wait for it, and when it has settled."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

from . import nvml


class Unusable(Exception):
    """The device that was asked for cannot be used; the message says why. Never replaced by another device silently."""


class Device:
    """`name` as torch spells it: cpu, cuda:0. Creates no CUDA context until `use`."""

    def __init__(self, name: str) -> None:
        import torch

        self.torch, self.name = torch, name
        self.cuda = name.startswith("cuda")
        self.index = int(name.split(":")[1]) if ":" in name else 0
        self.gpu: Optional[nvml.Gpu] = None

    def use(self) -> None:
        """Starts the context. Raises Unusable where torch would only warn and go on with the CPU (F28)."""
        if not self.cuda:
            return
        if not self.torch.cuda.is_available():
            built = self.torch.version.cuda
            why = f"this torch is built for CUDA {built}" if built else "this torch is built without CUDA"
            driver = nvml.driver_versions().get("driver-cuda")
            raise Unusable(f"torch sees no CUDA device: {why}"
                           + (f", the driver supports CUDA {driver}" if driver else ", and no NVIDIA driver answers"))
        if self.index >= self.torch.cuda.device_count():
            raise Unusable(f"there is no {self.name}: torch sees {self.torch.cuda.device_count()} device(s)")
        self.torch.cuda.set_device(self.index)
        self.torch.zeros(1, device=self.name)
        uuid = getattr(self.torch.cuda.get_device_properties(self.index), "uuid", None)
        self.gpu = nvml.open_gpu(f"GPU-{uuid}" if uuid is not None else None, self.index)

    def sync(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize(self.index)

    def works(self) -> bool:
        """False after an error that stays, as a failed assertion in a kernel does: every later call would fail."""
        try:
            self.sync()
        except Exception:  # whatever it is, it is not this device's to recover from
            return False
        return True

    def state(self) -> Dict[str, Any]:
        return self.gpu.state() if self.gpu else {}

    def clock(self) -> Optional[int]:
        return self.gpu.clock() if self.gpu else None

    def energy(self) -> Optional[int]:
        """Millijoules since the driver was loaded."""
        return self.gpu.energy() if self.gpu else None

    def cache_bytes(self) -> int:
        """Last-level cache, read off the device."""
        if self.cuda:
            properties = self.torch.cuda.get_device_properties(self.index)
            return int(getattr(properties, "L2_cache_size", 0)) or 64 << 20
        return cpu_cache_bytes() or 32 << 20

    def free_bytes(self) -> int:
        if self.cuda:
            return int(self.torch.cuda.mem_get_info(self.index)[0])
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
        return 1 << 30

    def describe(self) -> Dict[str, Any]:
        """name, arch ("sm_90", "x86_64 ..."), and what else identifies it."""
        if not self.cuda:
            model = cpu_model()
            return {"kind": "cpu", "name": model or os.uname().machine, "arch": os.uname().machine,
                    "threads": self.torch.get_num_threads(), "cores": os.cpu_count(), "cache_bytes": cpu_cache_bytes()}
        properties = self.torch.cuda.get_device_properties(self.index)
        found = {"kind": "cuda", "name": properties.name, "arch": f"sm_{properties.major}{properties.minor}",
                 "multiprocessors": properties.multi_processor_count, "memory_bytes": properties.total_memory,
                 "cache_bytes": self.cache_bytes()}
        if self.gpu:
            found.update(self.gpu.describe())
        return found

    # ---- settling ----------------------------------------------------------------------------------------------------
    def settle(self, limit: Optional[float] = None) -> Dict[str, Any]:
        """Waits until what ran before no longer shows: on a GPU until no reason slows the clock and three readings
        20 ms apart agree within 1 %; on a CPU until three probes of the same arithmetic agree within 3 %.

        Returns {"seconds", "settled"}; after `limit` seconds (GPU 2, CPU 0.3) it goes on and says that it did not
        settle."""
        limit = limit if limit is not None else 2.0 if self.cuda else 0.3
        start = time.perf_counter()
        if self.cuda and self.gpu is None:
            time.sleep(0.3)  # the longest carry-over seen on an H200; without clocks there is nothing to watch
            return {"seconds": 0.3, "settled": False}
        readings: List[float] = []
        while time.perf_counter() - start < limit:
            if self.cuda:
                # A trickle of work keeps the card out of its idle clocks, which would look settled and are not.
                self.torch.zeros(1, device=self.name)
                self.sync()
                state = self.state()
                value, quiet = float(state.get("sm_mhz", 0)), not nvml.slowing(state.get("reasons", []))
                time.sleep(0.02)
                tolerance = 0.01
            else:
                value, quiet, tolerance = _probe(), True, 0.03
            readings.append(value)
            last = readings[-3:]
            if quiet and len(last) == 3 and max(last) - min(last) <= tolerance * max(last):
                return {"seconds": time.perf_counter() - start, "settled": True}
        return {"seconds": time.perf_counter() - start, "settled": False}


def _probe() -> float:
    """Seconds that a fixed piece of integer arithmetic takes (about 2 ms)."""
    begin = time.perf_counter()
    total = 0
    for i in range(30_000):
        total += i * i
    return time.perf_counter() - begin


def cpu_model() -> Optional[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return None


def cpu_cache_bytes() -> Optional[int]:
    """Size of the largest cache that cpu0 sees."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes) if sizes else None
