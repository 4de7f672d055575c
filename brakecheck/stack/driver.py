"""The driver and GPUs of this machine, without CUDA and without failing where there are none."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

PROC = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Device:
    """arch: sm_90 of compute capability 9.0, None where the driver does not tell."""

    name: str
    arch: Optional[str] = None


@dataclass(frozen=True)
class Driver:
    """version: of the kernel driver (580.65.06). cuda: CUDA version that libcuda reports; with a forward-compatibility
    package it is newer than what the kernel driver came with. devices: what nvidia-smi lists."""

    version: str
    cuda: Optional[str] = None
    devices: Tuple[Device, ...] = ()


def local_driver(proc: Path = PROC) -> Optional[Driver]:
    """The NVIDIA driver of this machine, or None when there is none."""
    version, devices = _from_smi()
    version = _from_proc(proc) or version
    if version is None:
        return None
    return Driver(version, _cuda_of_libcuda(), devices)


def verify(ptx: Optional[str] = None, cubin: Optional[bytes] = None) -> Dict[str, Any]:
    """What PTX text and cubin bytes say of themselves: ptx_isa, ptx_target, elf_abi, elf_arch (the sm number).

    Absent where it cannot be read. ELF fields: EI_ABIVERSION is byte 8; e_flags (byte 48 on) holds the architecture in
    its lowest byte up to ABI 7 and in the next one from ABI 8 on (observed on cubins of every release, 12.0 to 13.5).
    """
    facts: Dict[str, Any] = {}
    if ptx is not None:
        for key, pattern in (("ptx_isa", r"^\s*\.version\s+(\d+\.\d+)"), ("ptx_target", r"^\s*\.target\s+(\w+)")):
            found = re.search(pattern, ptx, re.MULTILINE)
            if found:
                facts[key] = found[1]
    if cubin is not None and cubin[:4] == b"\x7fELF" and len(cubin) >= 52:
        facts["elf_abi"] = cubin[8]
        facts["elf_arch"] = cubin[49] if cubin[8] >= 8 else cubin[48]
    return facts


def _from_proc(proc: Path) -> Optional[str]:
    try:
        text = proc.read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module\D*?(?:for \S+\s+)?(\d{3,4}(?:\.\d+){1,3})", text)
    return found[1] if found else None


def _from_smi() -> Tuple[Optional[str], Tuple[Device, ...]]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None, ()
    query = [smi, "--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None, ()
    version, devices = None, []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        cells = [c.strip() for c in line.split(",", 2)]
        if len(cells) == 3 and re.fullmatch(r"\d+(\.\d+)+", cells[0]):
            version = cells[0]
            number = cells[1].replace(".", "")
            devices.append(Device(cells[2], f"sm_{number}" if number.isdigit() else None))
    return version, tuple(devices)


def _cuda_of_libcuda() -> Optional[str]:
    """cuDriverGetVersion needs no device and no cuInit: 13000 is CUDA 13.0."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}" if number.value else None
