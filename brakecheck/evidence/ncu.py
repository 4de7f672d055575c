"""Nsight Compute: reports (.ncu-rep, through NVIDIA's `ncu-report` package) and CSV (details and raw pages).

Each profiled kernel is a row of the kernel table; everything measured about it is counters in long form, in base units.
Nsight Compute serialises kernels, fixes clocks and flushes caches unless told otherwise: its durations compare with
those of another Nsight Compute run, not with a timeline's.
"""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from ..model import BrakecheckError, UnavailableError
from .files import read_text
from .nvtx import around, calls_around
from .table import Problem, Recording, counter_frame, kernel_frame
from .units import number, to_base

COMMAND_LINE = "Command line profiler metrics"
# Columns that identify a profiled kernel; on the raw page every other column is a metric.
RANGES = ("thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",
          "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg")
IDENTITY = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream",
            "Block Size", "Grid Size", "Device", "CC", "Range Name", *RANGES)
# A range in such a column: "domain:name:" and six more fields, behind an id where it has one. Names hold colons too.
RANGE = re.compile(r'"(?:\d+:)?[^:"]*:(.*?)(?::[^:]*){6}"(?=\s|$)')
RULE_COLUMNS = ("Rule Name", "Rule Description", "Estimated Speedup")
# Kernel table column -> where it may be found, best first. Details pages print labels, raw pages and reports names.
DERIVED = {
    "duration": ("gpu__time_duration.sum", "gpu__time_duration.avg", "gpu__time_duration.max", "Duration"),
    "registers": ("launch__registers_per_thread", "Registers Per Thread"),
    "shared_static": ("launch__shared_mem_per_block_static", "Static Shared Memory Per Block"),
    "shared_dynamic": ("launch__shared_mem_per_block_dynamic", "Dynamic Shared Memory Per Block"),
    **{f"{what}_{axis}": (f"launch__{what}_dim_{axis}",) for what in ("grid", "block") for axis in "yz"},
    "grid_x": ("launch__grid_dim_x", "launch__grid_size", "Grid Size"),  # of the totals y and z stay unknown
    "block_x": ("launch__block_dim_x", "launch__block_size", "Block Size"),
}
Counter = Tuple[str, Optional[float], str, Optional[str]]  # name, value, unit, text


class Kernels:
    """Collects kernels and their counters."""

    def __init__(self, kind: str, path: str) -> None:
        self.kind, self.path = kind, path
        self.kernels: List[Dict[str, Any]] = []
        self.counters: List[List[Counter]] = []
        self.problems: Dict[Tuple[str, str], Problem] = {}
        self.metadata: Dict[str, Any] = {}
        self.inputs: Dict[Tuple[str, Optional[str]], None] = {}  # path and shapes of the operator calls around kernels
        self.call: Tuple[Tuple[str, ...], int] = ((), 0)  # the ranges of the latest kernel, and its number within them

    def problem(self, code: str, text: str, where: str) -> None:
        """Counts a problem; the first place is kept."""
        old = self.problems.get((code, text))
        self.problems[code, text] = Problem(code, text, old.where if old else where, old.count + 1 if old else 1)

    def gpu(self, name: Optional[str], capability: Optional[str]) -> None:
        """Notes a GPU as far as it is known."""
        known = {k: v for k, v in (("name", name), ("capability", capability)) if v}
        gpus = self.metadata.setdefault("gpus", []) if known else []
        if known and known not in gpus:
            gpus.append(known)

    def add(self, ranges: Sequence[str], **columns: Any) -> int:
        """ranges: texts of the NVTX ranges around it, outermost first (start/stop ranges before push/pop ones, for
        they are of no thread). Kernels in a row under the very same ones are of
        one operator call, for an operator's range says which call it is."""
        columns.update(around(ranges))
        self.inputs.update(dict.fromkeys(calls_around(ranges)))
        if columns["operator"]:
            self.call = (tuple(ranges), self.call[1] + 1 if self.call[0] == tuple(ranges) else 0)
            columns["position"] = self.call[1]
        self.kernels.append(columns)
        self.counters.append([])
        return len(self.kernels) - 1

    def recording(self) -> Recording:
        for row, counters in zip(self.kernels, self.counters):
            found = {name.rpartition(" / ")[2] if " / " in name else name: value for name, value, _, _ in counters
                     if value is not None}
            for column, names in DERIVED.items():
                value = next((found[n] for n in names if n in found), None)
                if row.get(column) is None and value is not None and 0 <= value < 2**62:
                    row[column] = round(value)
        columns = sorted({name for row in self.kernels for name in row})
        table = kernel_frame({"kind": ["kernel"] * len(self.kernels),
                              **{c: [row.get(c) for row in self.kernels] for c in columns}})
        flat = [(i, *counter) for i, counters in enumerate(self.counters) for counter in counters]
        names = ("kernel", "counter", "value", "unit", "text")
        long = counter_frame({n: [row[i] for row in flat] for i, n in enumerate(names)})
        if self.inputs:
            self.metadata["inputs"] = list(self.inputs)
        return Recording(self.kind, self.path, table, counters=long, metadata=self.metadata,
                         problems=list(self.problems.values()))


# CSV ----------------------------------------------------------------------------------------------------------------

def read_csv(path: Path) -> Recording:
    """The recording in a CSV that `ncu --csv` printed: details page (one metric a row) or raw page (one kernel a row).

    Raises BrakecheckError when there is no header line or no kernel.
    """
    return parse_csv(read_text(path), str(path))


def parse_csv(text: str, path: str = "<csv>") -> Recording:
    """As read_csv, of text. Banners (==PROF==) and the profiled program's own output around the table are skipped."""
    out = Kernels("ncu-csv", path)
    seen: Dict[Tuple[str, ...], int] = {}
    header: List[str] = []
    units: Optional[List[str]] = None
    for line, cells in _rows(text, out):
        if _is_header(cells):
            header, units = cells, None
            continue
        if not header:
            continue
        if len(cells) != len(header) and not (len(cells) < len(header) and "Rule Name" in header and len(cells) >= 12):
            out.problem("foreign-line", "lines inside the table that have another number of columns were skipped",
                        f"line {line}")
            continue
        row = dict(zip(header, cells))
        if not row.get("ID", "").strip().isdigit():
            if units is None and "Metric Name" not in header and not row.get("ID", "").strip():
                units = cells
            else:
                out.problem("foreign-line", "lines inside the table without a kernel ID were skipped", f"line {line}")
            continue
        key = (row.get("Process ID", ""), row["ID"], row.get("Kernel Name", ""))
        if key not in seen:
            seen[key] = _start(out, row)
        if "Metric Name" in header:
            _details(out, seen[key], row)
        else:
            _raw(out, seen[key], row, dict(zip(header, units or [])))
    if not header:
        raise BrakecheckError('no header line ("ID", ..., "Kernel Name", ...)', path,
                              "write it with: ncu --csv --page details (or raw) --import REPORT.ncu-rep")
    if not out.kernels:
        raise BrakecheckError("the table has no kernels", path,
                              "check that the profiled range launched kernels and was not cut off")
    return out.recording()


def _rows(text: str, out: Kernels) -> Iterator[Tuple[int, List[str]]]:
    lines = (line for line in io.StringIO(text, newline=None) if not re.match(r"==(?:[A-Z]+|\d+)==", line))
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        reader = csv.reader(line.replace("\0", "") for line in lines)
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                out.problem("csv", f"lines that are no CSV were skipped: {error}", f"line {reader.line_num}")
                continue
            if cells:
                yield reader.line_num, cells
    finally:
        csv.field_size_limit(limit)


def _is_header(cells: List[str]) -> bool:
    return cells[0].strip().lstrip("\ufeff") == "ID" and "Kernel Name" in cells


def _start(out: Kernels, row: Dict[str, str]) -> int:
    grid, block = (_triple(row.get(c, "")) for c in ("Grid Size", "Block Size"))
    capability = row.get("CC", "")
    device = row.get("device__attribute_display_name") or row.get("Device")
    out.gpu(device if _integer(device) is None else None,
            capability if re.fullmatch(r"\d{1,2}\.\d{1,2}", capability) else None)
    name = row.get("Kernel Name") or None
    ranges = [text for column in reversed(RANGES) for text in RANGE.findall(row.get(column, ""))]
    return out.add(ranges, name=name, raw_name=name, device=_integer(row.get("Device")),
                   stream=_integer(row.get("Stream")),
                   **dict(zip(("grid_x", "grid_y", "grid_z"), grid)),
                   **dict(zip(("block_x", "block_y", "block_z"), block)))


def _details(out: Kernels, kernel: int, row: Dict[str, str]) -> None:
    name, section = row.get("Metric Name", ""), row.get("Section Name", "")
    if name:
        full = name if not section or section == COMMAND_LINE or "__" in name else f"{section} / {name}"
        out.counters[kernel].append(_counter(full, row.get("Metric Value", ""), row.get("Metric Unit", "")))
    elif row.get("Rule Name"):
        gain = number(row.get("Estimated Speedup") or "")
        out.counters[kernel].append((f"rule: {row['Rule Name']}", gain, "%", row.get("Rule Description") or None))


def _raw(out: Kernels, kernel: int, row: Dict[str, str], units: Dict[str, str]) -> None:
    for name, value in row.items():
        if name in IDENTITY or not value:
            continue
        out.counters[kernel].append(_counter(name, value, units.get(name, "")))


def _counter(name: str, text: str, unit: str) -> Counter:
    value, base = to_base(number(text), unit)
    return name, value, base, None if value is not None else text or None


def _triple(text: str) -> List[Optional[int]]:
    """(224, 1, 1) as three numbers; a bare total (older releases, or 1,024) as x with y and z unknown."""
    parts = [_integer(p) for p in text.strip(" ()").split(",")]
    if text.strip().startswith("("):
        return (parts + [None] * 3)[:3]
    value = number(text)
    return [round(value) if value is not None and value < 2**62 else None, None, None]


def _integer(text: Optional[str]) -> Optional[int]:
    text = (text or "").strip()
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


# Reports ------------------------------------------------------------------------------------------------------------

def read_report(path: Path, load: Optional[Callable[[str], Any]] = None) -> Recording:
    """The recording in a .ncu-rep. `load` opens it (default: ncu_report.load_report).

    Raises UnavailableError without the ncu-report package, BrakecheckError for a report that holds nothing.
    """
    try:
        context = (load or _loader())(str(path))
        recording = from_context(context, str(path))
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, MemoryError,
            SystemError) as error:  # what the C++ behind the package turns into
        raise BrakecheckError(f"the report cannot be read: {error}", str(path),
                              "check that it is whole, and that ncu-report is as new as the ncu that wrote it: "
                              "pip install -U ncu-report") from None
    return recording


def _loader() -> Callable[[str], Any]:
    try:
        import ncu_report
    except ImportError as error:
        raise UnavailableError(
            f"Nsight Compute reports need the package ncu-report ({error})", None,
            "pip install ncu-report, or export the report: ncu --csv --page raw --import FILE") from None
    return ncu_report.load_report  # type: ignore[no-any-return]


def from_context(context: Any, path: str) -> Recording:
    """The recording in an open report: an object with the interface of ncu_report.IContext."""
    out = Kernels("ncu", path)
    for action in _actions(context):
        mangled = _name(action, "NameBase_MANGLED")
        kernel = out.add(_ranges(action), name=_name(action, "NameBase_DEMANGLED") or mangled, raw_name=mangled)
        for name in action.metric_names():
            metric = action.metric_by_name(name)
            if metric is None or not metric.has_value():
                continue
            counter = _metric(name, metric)
            if counter is not None:
                out.counters[kernel].append(counter)
        _launch(out, kernel)
    if not out.kernels:
        raise BrakecheckError("the report holds no profiled kernels, or is damaged", path,
                              "record again, and check that the kernel filter matched and ncu ended normally")
    return out.recording()


def _actions(context: Any) -> Iterable[Any]:
    for i in range(context.num_ranges()):
        group = context.range_by_idx(i)
        for j in range(group.num_actions() if group is not None else 0):
            action = group.action_by_idx(j)
            if action is not None:
                yield action


def _name(action: Any, base: str) -> Optional[str]:
    return action.name(getattr(action, base)) or None


def _metric(name: str, metric: Any) -> Optional[Counter]:
    value, unit = metric.value(), metric.unit() or ""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        return (name, None, unit, value)
    if not math.isfinite(value):
        return (name, None, unit, str(value))
    scaled, base = to_base(float(value), unit)
    return (name, scaled, base, None)


def _launch(out: Kernels, kernel: int) -> None:
    """Device, stream and capability, which a report keeps as metrics."""
    values = {name: value for name, value, _, _ in out.counters[kernel] if value is not None}
    for column, metric in (("device", "launch__device_id"), ("stream", "launch__stream_id")):
        if metric in values and 0 <= values[metric] < 2**62:
            out.kernels[kernel][column] = round(values[metric])
    parts = [values.get(f"device__attribute_compute_capability_{p}") for p in ("major", "minor")]
    names = [text for name, _, _, text in out.counters[kernel] if name == "device__attribute_display_name"]
    out.gpu(names[0] if names else None, f"{parts[0]:.0f}.{parts[1]:.0f}" if None not in parts else None)


def _ranges(action: Any) -> List[str]:
    state = action.nvtx_state()
    domains = [state.domain_by_id(d) for d in state.domains()] if state is not None else []
    found = [d for d in domains if d is not None]
    return [*(name for d in found for name in d.start_end_ranges()),
            *(name for d in found for name in d.push_pop_ranges())]
