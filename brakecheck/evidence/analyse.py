"""Compiled units to static evidence: resources, instruction mix, identity of code, occupancy, launch limits, notes.

What depends on the cubin alone is kept beside it in two files named with the version of this analysis and of nvdisasm:
*.code-*.json (one KernelCode a kernel) and *.sass-*.json (the disassembly, for the side-by-side view). What depends on
the compiler's log and on the launch configuration is computed each time.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from ..model import (
    BrakecheckError,
    Entry,
    KernelCode,
    Note,
    Resources,
    Source,
    UnavailableError,
    Unit,
    UsageError,
    decode,
    encode,
)
from .buildlog import KernelReport, parse_log
from .cubin import Cubin, CubinKernel, read_cubin
from .limits import launch_limits, occupancy
from .names import demangle, is_called, short_name
from .sass import disassemble, identity, local_operations, mix_of, nvdisasm_version, text_of, unknown_opcodes

VERSION = 1  # of what is kept beside a cubin; raise it when a reader, a class or the identity changes
CHUNK = 400_000  # bytes of code in one nvdisasm run: some seconds, so that all cores get some

Progress = Callable[[str, int, int, str], None]


@dataclass
class _Work:
    """One cubin that nobody has analysed yet."""

    path: Path
    sha256: str
    arch: str
    cubin: Cubin

    @property
    def size(self) -> int:
        return sum(len(k.code) for k in self.cubin.kernels)


def analyse(units: Sequence[Unit], sources: Sequence[Source], nvdisasm: Path, *, jobs: Optional[int] = None,
            progress: Optional[Progress] = None) -> List[Unit]:
    """The units with their kernels and notes filled in, in order; units without a cubin get their notes only.

    A cubin that cannot be read or disassembled leaves its unit without kernels and with an error note that says why.
    Raises UnavailableError if nvdisasm does not run at all. progress(stage, done, total, what) is called as it goes.
    """
    tag = f"{VERSION}-{nvdisasm_version(nvdisasm)}"
    found: Dict[str, Tuple[KernelCode, ...]] = {}
    failed: Dict[str, Note] = {}
    work: Dict[str, _Work] = {}
    for unit in units:
        if unit.cubin is None or unit.status != "ok" or any(unit.cubin in seen for seen in (found, failed, work)):
            continue
        try:
            data = _bytes(Path(unit.cubin))
            sha256 = hashlib.sha256(data).hexdigest()
            kept = _load(Path(unit.cubin), sha256, tag)
            if kept is not None:
                found[unit.cubin] = kept
            else:
                work[unit.cubin] = _Work(Path(unit.cubin), sha256, unit.arch, read_cubin(data, unit.cubin))
        except BrakecheckError as error:
            failed[unit.cubin] = _failure(error)
    for path, outcome in _all(list(work.values()), nvdisasm, tag, jobs or os.cpu_count() or 1, progress):
        if isinstance(outcome, Note):
            failed[path] = outcome
        else:
            found[path] = outcome
    by_path: Dict[str, List[Source]] = {}
    for source in sources:
        by_path.setdefault(source.path, []).append(source)
    return [_finished(u, by_path.get(u.source, []), found.get(u.cubin or ""), failed.get(u.cubin or "")) for u in units]


def sass_text(unit: Unit, kernel_name: str) -> str:
    """Disassembly of one kernel (mangled name) of an analysed unit, one instruction a line, source line after //.

    Raises BrakecheckError where the unit was not analysed or has no such kernel.
    """
    path = Path(unit.cubin or "")
    files = sorted(path.parent.glob(f"{path.name}.sass-{VERSION}-*.json"), key=lambda f: f.stat().st_mtime)
    if not unit.cubin or not files:
        raise BrakecheckError("this unit has no disassembly", unit.cubin or unit.source, "analyse the unit first")
    try:
        return "\n".join(json.loads(files[-1].read_text())[kernel_name])
    except KeyError:
        raise BrakecheckError(f"no kernel {kernel_name} in this cubin", str(path), "use the mangled name") from None
    except (OSError, ValueError):
        raise BrakecheckError("the kept disassembly is damaged", str(files[-1]),
                              "delete it and analyse the unit again") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BrakecheckError(f"cannot read the cubin: {error.strerror or error}", str(path),
                              "compile it again") from None


def _failure(error: BrakecheckError) -> Note:
    return Note("error", f"{error.what} ({error.where})" if error.where else error.what, advice=error.todo)


def _all(work: List[_Work], nvdisasm: Path, tag: str, jobs: int,
         progress: Optional[Progress]) -> Iterable[Tuple[str, Any]]:
    """(path, kernels or error note) of each cubin as it gets ready; one nvdisasm run takes many cubins."""
    done = 0
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        running: Dict[Future[List[Any]], List[_Work]] = {
            pool.submit(_chunk, chunk, nvdisasm, tag): chunk for chunk in _chunks(work, jobs)}
        for future in as_completed(running):
            chunk = running[future]
            done += len(chunk)
            if progress:
                progress("disassemble", done, len(work), chunk[-1].path.name)
            for item, outcome in zip(chunk, future.result()):
                yield str(item.path), outcome


def _chunks(work: List[_Work], jobs: int) -> List[List[_Work]]:
    """Cubins of one architecture together, at most CHUNK bytes of code a run, larger ones first."""
    by_arch: Dict[str, List[_Work]] = {}
    for item in work:
        by_arch.setdefault(item.arch, []).append(item)
    out: List[List[_Work]] = []
    for items in by_arch.values():
        open_chunk: List[_Work] = []
        for item in items:
            if open_chunk and sum(w.size for w in open_chunk) + item.size > CHUNK:
                out.append(open_chunk)
                open_chunk = []
            open_chunk.append(item)
        out.append(open_chunk)
    return sorted(out, key=lambda chunk: -sum(w.size for w in chunk))


def _chunk(chunk: List[_Work], nvdisasm: Path, tag: str) -> List[Any]:
    """Kernels of each cubin, or the note that says why there are none. If the whole does not disassemble, each alone,
    so that one bad cubin does not take the others with it."""
    kernels = [(item.cubin, kernel) for item in chunk for kernel in item.cubin.kernels]
    try:
        code = iter(disassemble(kernels, chunk[0].arch, nvdisasm))
        return [_one(item, code, tag) for item in chunk]
    except BrakecheckError as error:
        if len(chunk) == 1 or isinstance(error, UnavailableError):
            return [_failure(error)] * len(chunk)
        return [outcome for item in chunk for outcome in _chunk([item], nvdisasm, tag)]


def _one(item: _Work, code: Any, tag: str) -> Tuple[KernelCode, ...]:
    kernels, texts = [], {}
    for kernel in item.cubin.kernels:
        instructions = next(code)
        bits, text = identity(item.cubin, kernel, instructions)
        mix = mix_of(instructions)
        unknown = unknown_opcodes(instructions)
        notes = (Note("info", f"instructions of no known class: {', '.join(unknown)}", kernel=kernel.name),)
        kernels.append(KernelCode(kernel.name, demangle(kernel.name), item.arch, _resources(kernel), bits, text,
                                  len(instructions), mix, local_operations(mix), notes=notes if unknown else ()))
        texts[kernel.name] = text_of(instructions)
    _save(item.path, "sass", tag, texts)
    _save(item.path, "code", tag, {"sha256": item.sha256, "kernels": encode(kernels)})
    return tuple(kernels)


def _resources(kernel: CubinKernel) -> Resources:
    return Resources(kernel.registers, kernel.stack if kernel.stack is not None else kernel.frame, kernel.shared,
                     barriers=kernel.barriers, constant=kernel.constant, code=len(kernel.code),
                     max_threads=kernel.max_threads)


def _file(cubin: Path, kind: str, tag: str) -> Path:
    return cubin.with_name(f"{cubin.name}.{kind}-{tag}.json")


def _save(cubin: Path, kind: str, tag: str, data: Any) -> None:
    """Written under another name and renamed, so that no reader sees half a file. A folder that cannot be written to
    costs the next run some time, and is no error."""
    path = _file(cubin, kind, tag)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(data, separators=(",", ":")))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)


def _load(cubin: Path, sha256: str, tag: str) -> Optional[Tuple[KernelCode, ...]]:
    """What was kept for exactly this cubin; None if nothing was, or if it cannot be read (it is made again)."""
    try:
        data = json.loads(_file(cubin, "code", tag).read_text())
        if data["sha256"] != sha256 or not _file(cubin, "sass", tag).exists():
            return None
        return tuple(decode(KernelCode, k) for k in data["kernels"])
    except (OSError, ValueError, KeyError, TypeError, BrakecheckError):
        return None


def _finished(unit: Unit, sources: List[Source], kernels: Optional[Tuple[KernelCode, ...]],
              failure: Optional[Note]) -> Unit:
    log = parse_log(unit.log)
    notes = [*log.notes, *([failure] if failure else [])]
    if kernels is None:
        return replace(unit, notes=tuple(notes))
    if len(kernels) == 1:  # what ptxas says without a name, or about a function, can only be about this one
        notes = [replace(n, kernel=kernels[0].name) if (n.code or "").startswith("C7") else n for n in notes]
    reports = {r.kernel: r for r in log.kernels if r.arch in (None, unit.arch)}
    launches = _launches(unit, sources, kernels)
    min_arch = min((s.min_arch for s in sources), default=0)
    return replace(unit, notes=tuple(notes), kernels=tuple(
        _with_launch(_with_log(k, reports.get(k.name), notes), launches.get(k.name, []), min_arch) for k in kernels))


def _launches(unit: Unit, sources: List[Source], kernels: Sequence[KernelCode]) -> Dict[str, List[Entry]]:
    """Mangled kernel name -> its launch configurations."""
    out: Dict[str, List[Entry]] = {}
    for source in sources:
        for entry in source.entries:
            name = unit.entries.get(entry.expression, entry.expression)
            if entry not in out.setdefault(name, []):
                out[name].append(entry)
        for entry in source.launches:
            for kernel in kernels:
                if is_called(entry.expression, kernel.name, kernel.demangled):
                    out.setdefault(kernel.name, []).append(entry)
    return out


def check_launches(units: Iterable[Unit], sources: Iterable[Source]) -> None:
    """UsageError for a launch configuration that no kernel of any of the units has the name for."""
    kernels = {(k.name, k.demangled) for unit in units for k in unit.kernels}
    for entry in dict.fromkeys(entry for source in sources for entry in source.launches):
        if kernels and not any(is_called(entry.expression, *kernel) for kernel in kernels):
            known = sorted({short_name(demangled) for _, demangled in kernels})
            raise UsageError(f"no kernel is called {entry.expression!r}", "launch configuration",
                             f"the kernels are {', '.join(known[:10])}{' ...' if len(known) > 10 else ''}")


def _with_log(kernel: KernelCode, report: Optional[KernelReport], notes: Sequence[Note]) -> KernelCode:
    about = tuple(n for n in notes if n.kernel == kernel.name)
    resources = kernel.resources
    if report is not None:
        resources = replace(resources, spill_stores=report.spill_stores, spill_loads=report.spill_loads)
    return replace(kernel, resources=resources, notes=kernel.notes + about)


def _with_launch(kernel: KernelCode, entries: Sequence[Entry], min_arch: int) -> KernelCode:
    """Occupancy of the first launch configuration, limits of all; without one, the limits of static resources alone."""
    r = kernel.resources
    limits: Dict[Any, None] = {}
    for entry in entries or [Entry(kernel.name)]:
        for limit in launch_limits(kernel.arch, r.registers, entry.threads, r.shared or 0, entry.dynamic_shared,
                                   r.max_threads, min_arch=min_arch):
            limits.setdefault(limit)
    first = entries[0] if entries else None
    resident = (occupancy(kernel.arch, r.registers, first.threads, r.shared or 0, first.dynamic_shared, r.barriers or 0)
                if first and first.threads else None)
    return replace(kernel, occupancy=resident, limits=tuple(limits))
