"""Where a kernel stalls and diverges, by source line: from Nsight Compute's source counters, or from a cubin alone.

Three inputs end in the same rows:
  - a report (.ncu-rep) with the section SourceCounters: counters by address, lines from the cubin it holds;
  - its source page as CSV (`ncu --import R --page source --csv`): a line "Kernel Name", a heading, one row an
    instruction;
  - a cubin, or the cubins in a fat binary, object, library or executable: no counts, but the instructions of each line
    that may diverge or wait. It needs nvdisasm, and cuobjdump for all but a cubin.
Lines exist where the code was built with -lineinfo; Triton does that by itself.
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from ..model import BrakecheckError
from .cubin import Cubin, cubins_in, read_cubin
from .files import read_text
from .names import demangle
from .ncu import _actions as actions_of
from .ncu import _loader as report_loader
from .ncu import _name as name_of
from .opcodes import class_of
from .sass import Instruction, disassemble
from .units import number

WARP = 32
_DIVERGENT = "smsp__branch_targets_threads_divergent"
STALL = "smsp__pcsamp_warps_issue_stalled_"
# Counter by address -> field of Row. Nsight Compute's names since 2021; those of the CSV are its headings.
COUNTERS = {"inst_executed": "executed", "thread_inst_executed": "threads", "smsp__pcsamp_sample_count": "samples",
            "branch_inst_executed": "branches", _DIVERGENT: "divergent"}
HEADINGS = {"Instructions Executed": "executed", "# Instructions Executed": "executed",
            "Thread Instructions Executed": "threads", "Warp Stall Sampling (All Samples)": "samples",
            "# Samples": "samples", "Divergent Branches": "divergent"}
# Opcodes that branch on a predicate of each thread. A branch on a uniform predicate (BRA.U, @UP) takes a whole warp.
BRANCH = re.compile(r"^(BRA|BRX|JMP|JMX|EXIT|RET|CALL)\b")
WAITS = {"load.global": "global loads", "load.local": "local loads", "store.local": "local stores",
         "atomic": "atomics", "barrier": "barriers"}


@dataclass
class Row:
    """One instruction. Counts are None where they were not recorded."""

    sass: str
    file: Optional[str] = None
    line: Optional[int] = None
    executed: Optional[float] = None
    threads: Optional[float] = None
    samples: Optional[float] = None
    branches: Optional[float] = None
    divergent: Optional[float] = None
    stalls: Dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Spot:
    """A source line, or an instruction where there are no lines.

    instructions: the machine code, most samples first. samples, share: stall samples and their share of the kernel's.
    stalls: share of the line's samples by reason. executed: warp instructions. active: mean threads of a warp that ran
    (32 is full). divergent_share: of the branches, those whose threads went different ways. static, from a cubin:
    counts of what may diverge or wait (branches, reconvergence, loops, global loads, local loads, ...).
    """

    file: Optional[str]
    line: Optional[int]
    instructions: Tuple[str, ...]
    samples: Optional[float] = None
    share: Optional[float] = None
    stalls: Dict[str, float] = field(default_factory=dict)
    executed: Optional[float] = None
    active: Optional[float] = None
    branches: Optional[float] = None
    divergent: Optional[float] = None
    divergent_share: Optional[float] = None
    static: Dict[str, int] = field(default_factory=dict)

    @property
    def place(self) -> str:
        if self.file is None:
            return self.instructions[0] if self.instructions else "?"
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Kernel:
    """A kernel's spots, the hottest first. kind: counters or static. notes: what is missing and how to get it. arch: of
    machine code, what it was compiled for."""

    name: str
    kind: str
    spots: Tuple[Spot, ...]
    samples: Optional[float] = None
    active: Optional[float] = None
    divergent_share: Optional[float] = None
    notes: Tuple[str, ...] = ()
    arch: Optional[str] = None


def from_report(path: Path, load: Optional[Callable[[str], Any]] = None) -> List[Kernel]:
    """Kernels of a report. Launches of one kernel are apart, in the order of the report.

    UnavailableError without the package ncu-report, BrakecheckError for a report without kernels.
    """
    try:
        context = (load or report_loader())(str(path))
        found = [summarise(str(name_of(action, "NameBase_DEMANGLED") or name_of(action, "NameBase_MANGLED") or "?"),
                           _rows(action), _never_diverges(action)) for action in actions_of(context)]
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, MemoryError, SystemError) as e:
        raise BrakecheckError(f"the report cannot be read: {e}", str(path), "check that it is whole, and that "
                              "ncu-report is as new as the ncu that wrote it") from None
    if not found:
        raise BrakecheckError("the report holds no profiled kernels", str(path), "record again")
    return found


def _rows(action: Any) -> List[Row]:
    """One row an address, in order of addresses."""
    names = set(action.metric_names())
    rows: Dict[int, Row] = {}
    wanted = [(n, COUNTERS[n]) for n in COUNTERS if n in names]
    wanted += [(n, n[len(STALL):]) for n in sorted(names) if n.startswith(STALL) and not n.endswith("_not_issued")]
    for name, target in wanted:
        for address, value in _by_address(action.metric_by_name(name)):
            row = rows.get(address)
            if row is None:
                row = rows[address] = Row(" ".join((action.sass_by_pc(address) or "").split()))
                info = action.source_info(address)
                if info is not None and info.file_name():
                    row.file, row.line = info.file_name(), int(info.line())
            if name in COUNTERS:
                setattr(row, target, value)
            elif value:
                row.stalls[target] = value
    return [rows[address] for address in sorted(rows)]


def _never_diverges(action: Any) -> bool:
    """Whether divergence was recorded, and there was none: of a kernel without branches no address has a count."""
    metric = action.metric_by_name(_DIVERGENT)
    return metric is not None and metric.value() == 0


def _by_address(metric: Any) -> Iterable[Tuple[int, float]]:
    ids = metric.correlation_ids() if metric is not None and metric.has_correlation_ids() else None
    if ids is None:
        return
    for i in range(min(metric.num_instances(), ids.num_instances())):
        value = metric.value(i)
        if isinstance(value, (int, float)):
            yield int(ids.value(i)), float(value)


def from_csv(path: Path) -> List[Kernel]:
    """Kernels of a source page. BrakecheckError, with the row, when it is none."""
    found: List[Kernel] = []
    name, heading, rows = "?", [], []  # type: str, List[str], List[Row]
    for cells in _lines(path):
        first = cells[0].strip() if cells else ""
        if first == "Kernel Name" and len(cells) > 1 and "Source" not in cells:
            found += [summarise(name, rows)] if rows else []
            name, heading, rows = cells[1], [], []
        elif "Source" in cells and set(cells) & set(HEADINGS):
            heading = [c.strip() for c in cells]
        elif heading and len(cells) == len(heading):
            rows.append(_csv_row(dict(zip(heading, cells))))
    found += [summarise(name, rows)] if rows else []
    if not found:
        raise BrakecheckError("no source page of Nsight Compute in this file", str(path),
                              "make it with: ncu --import REPORT --page source --csv")
    return found


def _lines(path: Path) -> Iterable[List[str]]:
    """Rows of a CSV file, whatever ends its lines. BrakecheckError, with the row, where it is damaged beyond that."""
    reader = csv.reader(io.StringIO(read_text(path).replace("\0", ""), newline=None))
    try:
        yield from reader
    except csv.Error as error:
        raise BrakecheckError(f"the CSV is damaged: {error}", f"{path}, line {reader.line_num}",
                              "export the page again") from None


def _csv_row(cells: Dict[str, str]) -> Row:
    row = Row(" ".join(cells["Source"].split()))
    place = cells.get("Source File") or cells.get("File") or ""
    line = cells.get("Source Line") or cells.get("Line") or ""
    if place and line.isdigit():
        row.file, row.line = place, int(line)
    for name, text in cells.items():
        value = number(text) if text else None
        if value is not None and name in HEADINGS:
            setattr(row, HEADINGS[name], value)
        elif value and name.startswith("stall_") and not name.endswith("(not_issued)"):
            row.stalls[name.removeprefix("stall_")] = value
    return row


def from_cubins(cubins: Iterable[Cubin], nvdisasm: Path) -> List[Kernel]:
    """Kernels of cubins: for each line what may diverge or wait, in the order of the lines."""
    found = []
    for cubin in cubins:
        codes = disassemble([(cubin, k) for k in cubin.kernels], cubin.arch, nvdisasm)
        found += [_static(demangle(kernel.name), cubin.arch, code) for kernel, code in zip(cubin.kernels, codes)]
    return found


def _static(name: str, arch: str, code: List[Instruction]) -> Kernel:
    addresses = {i.label: i.address for i in code if i.label}
    groups: Dict[Tuple[Optional[str], Optional[int]], List[Instruction]] = defaultdict(list)
    for instruction in code:
        file, _, line = instruction.line.rpartition(":")
        groups[(file, int(line)) if file and line.isdigit() else (None, None)].append(instruction)
    spots = []
    for (place, line_number), instructions in groups.items():
        counts: Dict[str, int] = defaultdict(int)
        marked = []
        for instruction in instructions:
            kinds = _kinds(instruction, addresses)
            marked += [instruction.text] if kinds else []
            for kind in kinds:
                counts[kind] += 1
        if counts:
            spots.append(Spot(place, line_number, tuple(dict.fromkeys(marked)), static=dict(counts)))
    spots.sort(key=lambda s: (-s.static.get("divergent branches", 0), -sum(s.static.values()), s.place))
    lines = any(i.line for i in code)
    notes = ["static: what may diverge or wait; how often it does only a report with source counters says"]
    return Kernel(name, "static", tuple(spots), notes=tuple(notes if lines else [*notes, _NO_LINES]), arch=arch)


def _kinds(instruction: Instruction, addresses: Dict[str, int]) -> List[str]:
    found = []
    opcode, predicate = instruction.opcode, instruction.predicate
    # PT is always true; a uniform predicate (UP) is equal in all threads of a warp.
    by_thread = bool(re.search(r"(?<!U)P[0-6]", predicate)) or bool(re.match(r"!?P[0-6],", instruction.operands))
    if BRANCH.match(opcode) and ".U" not in opcode and by_thread:
        found.append("early exits" if opcode.startswith(("EXIT", "RET")) else "divergent branches")
    target = instruction.operands.split()[-1] if opcode.startswith("BRA") and instruction.operands else ""
    if addresses.get(target, instruction.address) < instruction.address:  # a kernel's end is a branch to itself
        found.append("loops")
    if opcode.startswith(("BSSY", "WARPSYNC")):
        found.append("reconvergence points")
    kind = class_of(opcode)
    found += [word for start, word in WAITS.items() if kind.startswith(start)][:1]
    return found


_NO_LINES = "no source lines: build with -lineinfo (Triton: unset TRITON_DISABLE_LINE_INFO)"


def summarise(name: str, rows: List[Row], never_diverges: bool = False) -> Kernel:
    """The rows of a kernel by source line, or by instruction where there are none. never_diverges: that is known."""
    lines = any(r.file is not None for r in rows)
    groups: Dict[Any, List[Row]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[(row.file, row.line) if lines else index].append(row)
    total = _sum(rows, "samples")
    spots = [_spot(group, total) for group in groups.values()]
    spots.sort(key=lambda s: (-(s.samples or 0), -(s.divergent or 0), -(s.executed or 0)))
    whole = _spot(rows, total)
    notes = []
    if not rows:
        notes.append("no counters by instruction: record with --section SourceCounters")
    elif total is None:
        notes.append("no stall samples: record with --section SourceCounters and --section WarpStateStats")
    if rows and not lines:
        notes.append(_NO_LINES)
    if rows and whole.divergent is None and not never_diverges:
        notes.append("branch divergence was not recorded")
    return Kernel(name, "counters", tuple(spots), total, whole.active, 0.0 if never_diverges else whole.divergent_share,
                  tuple(notes))


def _spot(rows: List[Row], total: Optional[float]) -> Spot:
    samples, executed, threads = (_sum(rows, f) for f in ("samples", "executed", "threads"))
    divergent, branches = _sum(rows, "divergent"), _sum(rows, "branches")
    if branches is None and divergent is not None:  # the CSV counts executions of branch instructions only
        branches = _sum([r for r in rows if BRANCH.match(_opcode(r.sass))], "executed")
    stalls: Dict[str, float] = defaultdict(float)
    for row in rows:
        for reason, count in row.stalls.items():
            stalls[reason] += count
    whole = sum(stalls.values())
    ordered = sorted(rows, key=lambda r: -(r.samples or 0))
    return Spot(
        rows[0].file if rows else None, rows[0].line if rows else None,
        tuple(dict.fromkeys(r.sass for r in ordered if r.sass)), samples,
        samples / total if samples is not None and total else None,
        {r: c / whole for r, c in sorted(stalls.items(), key=lambda i: -i[1])} if whole else {}, executed,
        threads / executed if threads is not None and executed else None, branches, divergent,
        divergent / branches if divergent is not None and branches else None)


def _opcode(sass: str) -> str:
    words = sass.split()
    return (words[1] if len(words) > 1 and words[0].startswith("@") else words[0]) if words else ""


def _sum(rows: Iterable[Row], name: str) -> Optional[float]:
    known = [v for r in rows if (v := getattr(r, name)) is not None]
    return sum(known) if known else None


def open_hotspots(path: Path, tool: Callable[[str], Path]) -> List[Kernel]:
    """Kernels of a report, a source page, a cubin or what holds some, or a folder of `brakecheck profile --with ncu`.
    tool("nvdisasm"), tool("cuobjdump"): called where machine code is read. BrakecheckError for anything else."""
    from .files import read_head
    from .profile_run import read_manifest
    from .recognise import ACCEPTED, recognise

    if path.is_dir() and (manifest := read_manifest(path)):
        reports = [path / e["path"] for e in manifest["evidence"] if e["kind"] == "ncu"]
        if not reports:
            raise BrakecheckError("this profile has no counters by source line", str(path),
                                  "record it with brakecheck profile --with ncu")
        path = reports[0]
    if not path.is_dir() and re.match(rb'(\xef\xbb\xbf)?"?Kernel Name"?,', read_head(path, 64)):
        return from_csv(path)
    kind = recognise(path)
    if kind == "cubin":
        return from_cubins([read_cubin(path)], tool("nvdisasm"))
    if kind == "fatbin":
        return from_cubins(cubins_in(path, tool("cuobjdump")), tool("nvdisasm"))
    if kind == "ncu":
        return from_report(path)
    raise BrakecheckError(f"hot spots are not in a {ACCEPTED[kind]}", str(path), "give a report (.ncu-rep), its source "
                          "page (ncu --page source --csv), a cubin, a program or library, or a folder of "
                          "brakecheck profile --with ncu")


def only(kernels: List[Kernel], pattern: str, rows: int) -> List[Kernel]:
    """Kernels whose name has the pattern, with their first `rows` spots (0: all)."""
    expression = re.compile(pattern)
    return [replace(k, spots=k.spots[: rows or None]) for k in kernels if expression.search(k.name)]
