"""Theoretical occupancy and launches that cannot work, from resources alone: no GPU is asked.

The rules are those of NVIDIA's occupancy calculator (cuda_occupancy.h of the toolkit):
  registers: a warp takes registers/thread x 32, rounded up to 256; each of the 4 schedulers has a quarter of the
             registers and holds whole warps; a launch is refused when the block's warps, rounded up to 4, do not fit.
  shared:    static + dynamic + what the driver reserves, rounded up to the allocation unit.
  barriers:  from sm_90 on the barriers of an SM are shared by its resident blocks.
"""

from __future__ import annotations

from typing import Iterable, List, Optional, Tuple

from ..model import Limit, Occupancy
from ..model.arch import ARCHS, Arch, arch_of, capability_of


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _warp_registers(arch: Arch, registers: int) -> int:
    return _up(registers * 32, arch.registers_unit)


def _block_shared(arch: Arch, static: int, dynamic: int) -> int:
    return _up(static + dynamic + arch.shared_reserved, arch.shared_unit)


def most_threads(arch_name: str, registers: int) -> Optional[int]:
    """The largest block, in threads, that the registers of one SM hold; None for an unknown architecture."""
    arch = arch_of(arch_name)
    if arch is None:
        return None
    if registers == 0:
        return arch.threads_block
    warps = arch.registers // _warp_registers(arch, registers)
    return min(warps // arch.warp_unit * arch.warp_unit * 32, arch.threads_block)


def occupancy(arch_name: str, registers: int, threads: int, static_shared: int = 0, dynamic_shared: int = 0,
              barriers: int = 0) -> Optional[Occupancy]:
    """Resident warps of one SM for blocks of `threads`, and what limits them.

    limiter: "warps", "blocks", "registers", "shared memory" or "barriers"; of several equal ones the first in this
    order; "cannot launch" with 0 warps where not one block fits. None for an architecture that is not in the table.
    """
    arch = arch_of(arch_name)
    if arch is None or threads <= 0:
        return None
    warps = _up(threads, 32) // 32
    per_warp = _warp_registers(arch, registers)
    shared = _block_shared(arch, static_shared, dynamic_shared)
    fitting_warps = arch.registers // arch.warp_unit // per_warp * arch.warp_unit if per_warp else arch.warps
    by = {
        "warps": arch.warps // warps,
        "blocks": arch.blocks,
        "registers": fitting_warps // warps,
        "shared memory": arch.shared // shared if shared else arch.blocks,
        "barriers": arch.barriers // barriers if arch.barriers and barriers else arch.blocks,
    }
    refused = (threads > arch.threads_block or per_warp * _up(warps, arch.warp_unit) > arch.registers
               or registers > arch.registers_thread or static_shared + dynamic_shared > arch.shared_block)
    blocks = 0 if refused else min(by.values())
    limiter = "cannot launch" if blocks == 0 else min(by, key=lambda k: by[k])
    return Occupancy(threads, dynamic_shared, blocks * warps, arch.warps, limiter)


def launch_limits(arch_name: str, registers: int, threads: Optional[int], static_shared: int = 0,
                  dynamic_shared: int = 0, max_threads: Optional[int] = None,
                  also: Optional[Iterable[str]] = None, min_arch: int = 0) -> Tuple[Limit, ...]:
    """Why launches of this kernel fail. arch_name: what it was compiled for. threads: per block, None if unknown.

    Registers and the kernel's own bound are checked for arch_name, whose code has them. Shared memory hardly depends
    on the target, so it is checked for arch_name and for every architecture of `also` (default: the whole table) from
    min_arch on: the kernel that still fits the GPU at hand may not fit the smaller one of the fleet.
    """
    out: List[Limit] = []
    own = arch_of(arch_name)
    if own is not None:
        out += _thread_limits(own, arch_name, registers, threads, max_threads)
    names = list(also) if also is not None else list(ARCHS)
    if own is not None and own.name not in names:
        names.insert(0, own.name)
    for name in names:
        arch = arch_of(name)
        if arch is None or ((capability_of(name) or 0) < min_arch and arch is not own):
            continue
        total = static_shared + dynamic_shared
        if static_shared > arch.shared_static:
            out.append(Limit(arch.name, "static shared memory", static_shared, arch.shared_static,
                             f"static shared memory of {static_shared:,} bytes is over the {arch.shared_static:,} that "
                             f"a block may declare; ask for it as dynamic shared memory"))
        elif total > arch.shared_block:
            out.append(Limit(arch.name, "shared memory", total, arch.shared_block,
                             f"will not launch on {arch.name}: {total:,} bytes of shared memory a block, "
                             f"{arch.shared_block:,} available"))
    return tuple(out)


def _thread_limits(arch: Arch, name: str, registers: int, threads: Optional[int],
                   max_threads: Optional[int]) -> List[Limit]:
    out = []
    if registers > arch.registers_thread:
        out.append(Limit(name, "registers per thread", registers, arch.registers_thread,
                         f"{registers} registers per thread, {arch.registers_thread} available"))
    if threads is None:
        return out
    if threads > arch.threads_block:
        out.append(Limit(name, "threads", threads, arch.threads_block,
                         f"{threads:,} threads a block, {arch.threads_block:,} possible"))
    elif max_threads is not None and threads > max_threads:
        out.append(Limit(name, "threads", threads, max_threads,
                         f"{threads:,} threads a block, but the kernel was compiled for at most {max_threads:,}"))
    asked = _warp_registers(arch, registers) * _up(_up(threads, 32) // 32, arch.warp_unit)
    if asked > arch.registers:
        out.append(Limit(name, "registers", asked, arch.registers,
                         f"will not launch on {name}: {threads:,} threads x {registers} registers take {asked:,} of "
                         f"the {arch.registers:,} registers of an SM; {most_threads(name, registers):,} threads fit"))
    return out
