"""CSV of `nsys stats`: traces (one activity a row) and summaries (one kernel, copy, call or range a row).

A summary has no single calls. Each of its rows is a row of the kernel table without a duration, and its instances,
total, average, median, least, largest and standard deviation are counters in ns: nothing is made up.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ..model import BrakecheckError
from .files import read_text
from .table import Problem, Recording, counter_frame, kernel_frame
from .units import TIME, number

# Column heading without its unit, lower case -> statistic. Releases before 2022 print Time(%), Average, Minimum ...
STATISTICS = {"total time": "total", "instances": "instances", "num calls": "instances", "count": "instances",
              "operations": "instances", "avg": "average", "average": "average", "med": "median", "min": "least",
              "minimum": "least", "max": "largest", "maximum": "largest", "stddev": "standard_deviation"}
NAMES = ("name", "operation", "range", "kernel name")
MEMORY = {"b": 1, "bytes": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
TRACE = {"corrid": "correlation", "grdx": "grid_x", "grdy": "grid_y", "grdz": "grid_z", "blkx": "block_x",
         "blky": "block_y", "blkz": "block_z", "reg/trd": "registers", "strm": "stream"}
SIZES = {"stcsmem": "shared_static", "dymsmem": "shared_dynamic", "bytes": "bytes"}
Column = Tuple[str, Optional[str]]  # heading, unit


def heading(cell: str) -> Column:
    """"Total Time (ns)" -> ("total time", "ns"); "Time(%)" -> ("time", "%")."""
    match = re.fullmatch(r"(.*?)\s*(?:\(([^()]*)\)|:([a-z]+))?", cell.strip().lower(), re.S)
    return (match[1], match[2] or match[3]) if match else (cell.strip().lower(), None)


def table_kind(columns: List[Column]) -> Optional[str]:
    """trace, kernels, memory, ranges or calls: which report a header line belongs to; None when it is no header."""
    names = {c[0] for c in columns}
    if {"start", "duration", "name"} <= names and ("corrid" in names or "strm" in names):
        return "trace"
    if "total time" not in names or not names & {"instances", "num calls", "count", "operations"}:
        return None
    if "range" in names:
        return "ranges"
    if "operation" in names:
        return "memory"
    if "num calls" in names:
        return "calls"
    return "kernels" if "name" in names or "kernel name" in names else None


@dataclass
class Tables:
    """What the reports of one file hold so far."""

    kernels: List[Dict[str, Any]] = field(default_factory=list)
    counters: List[Tuple[int, str, float, str]] = field(default_factory=list)
    entries: Dict[str, List[Dict[str, Any]]] = field(default_factory=dict)  # ranges, calls
    kinds: List[str] = field(default_factory=list)
    devices: Dict[str, None] = field(default_factory=dict)
    skipped: int = 0
    first_skipped: str = ""

    def add(self, kind: str, row: Dict[Column, str]) -> None:
        if kind == "trace":
            self.kernels.append(_activity(row))
            device = next((v.strip() for (name, _), v in row.items() if name == "device"), "")
            if device and not device.isdigit():
                self.devices[re.sub(r"\s*\(\d+\)$", "", device)] = None
            return
        statistics = _statistics(row)
        if kind in ("ranges", "calls"):
            entry = {"name": _text(row), **{k: v for k, (v, _) in statistics.items()}}
            self.entries.setdefault(kind, []).append(entry)
            return
        self.counters.extend((len(self.kernels), name, *value) for name, value in statistics.items())
        name = _text(row)
        kind = "kernel" if kind == "kernels" else "memset" if name and "memset" in name.lower() else "memcpy"
        self.kernels.append({"kind": "collective" if name and name.startswith("nccl") else kind, "name": name,
                             "raw_name": name})

    def skip(self, where: str) -> None:
        self.skipped += 1
        self.first_skipped = self.first_skipped or where


def read(path: Path) -> Recording:
    """The recording in one CSV of nsys stats, which may hold several reports one after the other.

    Raises BrakecheckError when it has none of the known tables.
    """
    return parse(read_text(path), str(path))


def parse(text: str, path: str = "<csv>") -> Recording:
    """As read, of text."""
    tables, problems = Tables(), []
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(io.StringIO(text.replace("\0", ""), newline=None))
    try:
        _collect(reader, tables)
    except csv.Error as error:
        problems.append(Problem("csv", f"the rest of the file is no CSV: {error}", f"line {reader.line_num}"))
    finally:
        csv.field_size_limit(limit)
    if not tables.kinds:
        raise BrakecheckError("no table of nsys stats found (a header with Total Time and Instances, or Start and "
                              "Duration)", path, "write it with: nsys stats --format csv --report cuda_gpu_trace FILE")
    if tables.skipped:
        problems.append(Problem("foreign-line", "lines with another number of columns were skipped",
                                tables.first_skipped, tables.skipped))
    names = sorted({c for row in tables.kernels for c in row})
    table = kernel_frame({n: [row.get(n) for row in tables.kernels] for n in names})
    metadata: Dict[str, Any] = {"reports": tables.kinds, **tables.entries}
    if tables.devices:
        metadata["gpus"] = [{"name": d} for d in tables.devices]
    counters = {n: [c[i] for c in tables.counters] for i, n in enumerate(("kernel", "counter", "value", "unit"))}
    return Recording("nsys-csv", path, table, counters=counter_frame(counters) if tables.counters else None,
                     metadata=metadata, problems=problems)


def _collect(reader: Any, tables: Tables) -> None:
    columns: List[Column] = []
    kind: Optional[str] = None
    for cells in reader:
        if not any(c.strip() for c in cells):
            kind = None  # an empty line ends a report
            continue
        heads = [heading(c) for c in cells]
        found = table_kind(heads)
        if found:
            kind, columns = found, heads
            tables.kinds.append(found)
        elif kind is not None and len(cells) == len(columns):
            tables.add(kind, dict(zip(columns, cells)))
        elif kind is not None:
            tables.skip(f"line {reader.line_num}")


def _activity(row: Dict[Column, str]) -> Dict[str, Any]:
    out: Dict[str, Any] = {}
    for (name, unit), text in row.items():
        value = number(text)
        if value is None:
            continue
        if name in ("start", "duration"):
            out[name] = _whole(value * TIME.get(unit or "ns", 1.0))
        elif name in TRACE:
            out[TRACE[name]] = _whole(value)
        elif name in SIZES:
            out[SIZES[name]] = _whole(value * MEMORY.get(unit or "b", 1))
    label = _text(row) or ""
    device = next((text for (name, _), text in row.items() if name == "device"), "")
    index = re.search(r"\((\d{1,4})\)\s*$", device) or re.fullmatch(r"(\d{1,4})", device.strip())
    lower = label.lower()
    kind = "memset" if "memset" in lower else "memcpy" if lower.startswith("[cuda memcpy") else "kernel"
    kind = "collective" if label.startswith("nccl") else kind
    return {**out, "kind": kind, "name": label or None, "raw_name": label or None,
            "device": int(index[1]) if index else None}


def _statistics(row: Dict[Column, str]) -> Dict[str, Tuple[float, str]]:
    out = {}
    for (name, unit), text in row.items():
        value = number(text)
        if name in STATISTICS and value is not None:
            statistic = STATISTICS[name]
            factor = 1.0 if statistic == "instances" else TIME.get(unit or "ns", 1.0)
            out[statistic] = (value * factor, "" if statistic == "instances" else "ns")
    return out


def _text(row: Dict[Column, str]) -> Optional[str]:
    return next((text.strip() or None for (name, _), text in row.items() if name in NAMES), None)


def _whole(value: float) -> Optional[int]:
    return round(value) if abs(value) < 2**62 else None
