"""Static evidence: what one toolchain made of one source for one architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Optional, Tuple

from .arch import arch_number


@dataclass(frozen=True)
class Entry:
    """A kernel that is launched: its extern "C" name or template instantiation, and the launch configuration that
    occupancy and launch limits are computed for (threads a block, dynamic shared memory in bytes)."""

    expression: str
    threads: Optional[int] = None
    dynamic_shared: int = 0


@dataclass(frozen=True)
class Source:
    """One file to compile. kind: "cu" or "ptx". operator: the catalogue's name, or the file's stem for a user's own.
    min_arch: lowest compute capability it is meant for (90 for sm_90). defines: NAME or NAME=VALUE.
    archs: the only architectures it is meant for (wgmma is on sm_90a alone); empty for all from min_arch on.
    launches: launch configurations of a user's kernels; `expression` is a kernel's name as people write it (scale,
    scale<float, 4>, ns::*), and nothing is instantiated for it."""

    path: str
    operator: str
    kind: str = "cu"
    std: str = "c++17"
    defines: Tuple[str, ...] = ()
    include_dirs: Tuple[str, ...] = ()
    entries: Tuple[Entry, ...] = ()
    min_arch: int = 0
    archs: Tuple[str, ...] = ()
    launches: Tuple[Entry, ...] = ()

    @property
    def meant(self) -> str:
        return ", ".join(self.archs) + " only" if self.archs else f"sm_{self.min_arch} and newer"

    def is_for(self, arch: str) -> bool:
        """Whether it is meant for this architecture."""
        return arch_number(arch) >= self.min_arch and (not self.archs or arch in self.archs)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, read from its cubin (and ptxas's report, for spills). Bytes unless named otherwise.

    registers: per thread. stack, spill_stores, spill_loads: bytes per thread. shared: static, per block.
    constant: bytes of all constant banks of the kernel. code: bytes of its text section.
    max_threads: the most threads a block may have (.maxntid/.reqntid), where the kernel declares it.
    """

    registers: int
    stack: Optional[int] = None
    shared: Optional[int] = None
    spill_stores: Optional[int] = None
    spill_loads: Optional[int] = None
    barriers: Optional[int] = None
    constant: Optional[int] = None
    code: Optional[int] = None
    max_threads: Optional[int] = None


@dataclass(frozen=True)
class Note:
    """A message of ptxas, nvcc or NVRTC. `code` is C7508 and the like; unknown messages are kept verbatim in `text`.

    cause and advice are filled where the code is a known one. kernel is the mangled name the message is about.
    """

    severity: str
    text: str
    code: Optional[str] = None
    kernel: Optional[str] = None
    cause: Optional[str] = None
    advice: Optional[str] = None


@dataclass(frozen=True)
class Limit:
    """A launch that cannot work: `resource` asked for is more than `available` on `arch`."""

    arch: str
    resource: str
    asked: int
    available: int
    text: str


@dataclass(frozen=True)
class Occupancy:
    """Theoretical occupancy of a launch: resident warps / most warps, and what limits it."""

    threads: int
    dynamic_shared: int
    warps: int
    max_warps: int
    limiter: str

    @property
    def ratio(self) -> float:
        return self.warps / self.max_warps


@dataclass(frozen=True)
class KernelCode:
    """One kernel of one cubin.

    name: mangled. demangled: for people. mix: instruction counts by class (evidence/sass.py lists the classes).
    local_ops: local-memory loads and stores in the SASS (spills and indexed arrays).
    code_sha256: of the machine code after normalising what moves without meaning (addresses, relocations, ABI header);
                 equal hashes mean that the toolchain changes nothing for this kernel.
    text_sha256: of the disassembled text without scheduling control; equal text with unequal code means that only
                 scheduling differs.
    limits: launches that cannot work, for the launch configuration and for every known architecture.
    """

    name: str
    demangled: str
    arch: str
    resources: Resources
    code_sha256: str
    text_sha256: str
    instructions: int
    mix: Dict[str, int] = field(default_factory=dict)
    local_ops: int = 0
    occupancy: Optional[Occupancy] = None
    limits: Tuple[Limit, ...] = ()
    notes: Tuple[Note, ...] = ()


@dataclass(frozen=True)
class Unit:
    """One source compiled by one stack for one architecture.

    status: "ok"; "failed": the compiler rejected the source (`message` is its own words); "missing": this toolchain
            cannot build for this architecture (`message` says why).
    front: "nvrtc", "nvcc" or "ptx" (the source was PTX).
    ptx_sha256: of the PTX without comments, debug file tables and tool banner; cubin_sha256: of the whole file.
    ptx, cubin: paths in the cache. entries: expression of the source's entry -> mangled kernel name.
    """

    source: str
    arch: str
    stack: str
    status: str
    front: str = "nvrtc"
    message: Optional[str] = None
    ptx: Optional[str] = None
    cubin: Optional[str] = None
    ptx_sha256: Optional[str] = None
    cubin_sha256: Optional[str] = None
    frontend_seconds: Optional[float] = None
    ptxas_seconds: Optional[float] = None
    log: str = ""
    entries: Dict[str, str] = field(default_factory=dict)
    kernels: Tuple[KernelCode, ...] = ()
    notes: Tuple[Note, ...] = ()
