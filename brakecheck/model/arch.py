"""What each GPU architecture has: registers, warps, shared memory, and the units they are handed out in.

Sources: CUDA C++ programming guide, "Compute Capabilities" (warps, blocks, threads, shared memory per SM and per
block, registers); cuda_occupancy.h of CUDA 13.5 (allocation units of registers, warps and shared memory, blocks per
SM, barriers per SM); cuda/__device/arch_traits.h of CCCL 3.3 (the same limits, and the 1 KiB that the driver reserves
of each block's shared memory from sm_80 on). tests/test_limits.py compares with values made by that header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional, Tuple

from .errors import UsageError

KIB = 1024


@dataclass(frozen=True)
class Arch:
    """Limits of one architecture. Sizes in bytes; per SM unless named otherwise.

    warps, blocks: most that are resident. shared_block: the most one block may opt in to, static and dynamic
    together. shared_static: the most without opting in (and the most that may be static). shared_reserved: taken by
    the driver from every block. barriers: hardware barriers that resident blocks share; absent where they never limit
    (before sm_90).
    registers_unit: a warp's registers are rounded up to a multiple of it. warp_unit: schedulers of the SM; each has
    its own quarter of the registers. shared_unit: a block's shared memory is rounded up to a multiple of it.
    """

    name: str
    warps: int
    blocks: int
    shared: int
    shared_block: int
    shared_reserved: int
    shared_unit: int
    barriers: Optional[int] = None
    threads_block: int = 1024
    registers: int = 65536
    registers_thread: int = 255
    registers_unit: int = 256
    warp_unit: int = 4
    shared_static: int = 48 * KIB

    @property
    def threads(self) -> int:
        return self.warps * 32


def _arch(name: str, warps: int, blocks: int, shared_kib: int, barriers: Optional[int] = None) -> Arch:
    return Arch(name, warps, blocks, shared_kib * KIB, (shared_kib - 1) * KIB, KIB, 128, barriers)


_TABLE = (
    Arch("sm_75", 32, 16, 64 * KIB, 64 * KIB, 0, 256),
    _arch("sm_80", 64, 32, 164),
    _arch("sm_86", 48, 16, 100),
    _arch("sm_87", 48, 16, 164),
    _arch("sm_89", 48, 24, 100),
    _arch("sm_90", 64, 32, 228, 64),
    _arch("sm_100", 64, 32, 228, 64),
    _arch("sm_103", 64, 32, 228, 32),
    _arch("sm_110", 48, 24, 228, 24),
    _arch("sm_120", 48, 24, 100, 24),
    _arch("sm_121", 48, 24, 100, 24),
)
ARCHS = {a.name: a for a in _TABLE}

_NAME = re.compile(r"(?:sm|compute|lto)_?(\d{2,3})([af]?)$", re.IGNORECASE)


def arch_of(name: str) -> Optional[Arch]:
    """The architecture of sm_90a, compute_100f, sm_89; the suffixes a and f are feature sets, not other hardware.
    None for one that is not in the table."""
    found = _NAME.match(name.strip())
    return ARCHS.get(f"sm_{found.group(1)}") if found else None


def capability_of(name: str) -> Optional[int]:
    """90 for sm_90a; None where the name is not an architecture's."""
    found = _NAME.match(name.strip())
    return int(found.group(1)) if found else None


def split_arch(name: str) -> Tuple[int, str]:
    """(90, "a") of what a user wrote: sm_90a or compute_90a. UsageError for anything else."""
    found = re.fullmatch(r"(?:sm|compute)_(\d{2,3})([af]?)", name)
    if not found:
        raise UsageError(f"{name!r} is not an architecture", None, "write sm_80, sm_90a, sm_100f or the like")
    return int(found.group(1)), found.group(2)


def arch_number(name: str) -> int:
    """90 of sm_90a or compute_90a; UsageError for anything else."""
    return split_arch(name)[0]


def plain_arch(name: str) -> str:
    """sm_90 of sm_90a: limits of a launch are those of the device."""
    return name.rstrip("af")


def arch_key(name: str) -> Tuple[int, str]:
    """Sort key: sm_89 before sm_100a; names of other makers first."""
    return capability_of(name) or 0, name
