"""Columns of one trace -> kernel and operator table: kernels joined to launches, launches to operator calls."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import polars as pl

from brakecheck.evidence.table import kernel_frame, operator_frame

from .collect import Collector, Table, known
from .layout import (
    ANNOTATION,
    COMMUNICATION,
    DEVICE_KINDS,
    DTYPE_BYTES,
    KERNEL,
    MISSING,
    MODULE,
    MODULE_PREFIX,
    OPERATOR,
    STEP_PREFIX,
)
from .nest import Paths, depths_of, inherit, levels_of, order_of, parents_of

LAUNCH = 3  # kind of a row beside OPERATOR, ANNOTATION, MODULE
WAIT = 4
COLLECTIVE_KERNEL = re.compile(r"nccl|rccl|one_shot_all_reduce|two_shot_all_reduce", re.IGNORECASE)
# Calls that wait for the device, or take as long as if they did. cudaMallocAsync and cudaFreeAsync do not.
_WAIT = re.compile(r"Synchronize|(?:cuda|hip)(?:Malloc|Free)(?!\w*Async)|HostAlloc|HostMalloc|cuMem(?:Alloc|Free)(?!A)")


@dataclass
class Steps:
    """Windows of ProfilerStep marks: number, start and end (ns), sorted by start."""

    number: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def at(self, time: np.ndarray) -> np.ndarray:
        """Step of each time, -1 outside of all."""
        if not len(self.number):
            return np.full(len(time), -1, dtype=np.int64)
        row = np.searchsorted(self.start, time, side="right") - 1
        inside = (row >= 0) & (time < self.end[np.maximum(row, 0)])
        return np.where(inside, self.number[np.maximum(row, 0)], -1)


@dataclass
class Calls:
    """The host side, sorted: every row with its innermost operator row, its paths and its step."""

    kind: np.ndarray
    name: np.ndarray
    thread: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    signature: np.ndarray
    operator: np.ndarray    # row of the innermost operator, -1
    depth: np.ndarray       # operators around it
    path: np.ndarray
    nvtx: np.ndarray
    module: np.ndarray
    step: np.ndarray
    message: np.ndarray     # code of the innermost message
    texts: Dict[str, List[str]]


def build(found: Collector, rank: Optional[int]) -> Tuple[pl.DataFrame, pl.DataFrame, Dict[str, Any]]:
    """Kernel table, operator table, and facts: steps, coverage, counts."""
    names: List[str] = found.values("name")
    device, host, runtime = found.table("device"), found.table("host"), found.table("runtime")
    spans = found.table("spans")
    launch_of = _launches(device, runtime)
    steps = _steps(host, host["kind"] == ANNOTATION, names)
    device_steps = _steps(spans, np.ones(len(spans["start"]), dtype=bool), names)
    facts = _coverage(device, runtime, launch_of, names)
    calls, row_of_host, row_of_runtime, late = _calls(host, runtime, launch_of, names, steps)
    facts["late_children"] = late
    facts["steps"] = [{"step": int(n), "start": int(a), "end": int(b)}
                      for n, a, b in zip(steps.number, steps.start, steps.end)]
    at = np.where(launch_of >= 0, row_of_runtime[np.maximum(launch_of, 0)] if len(row_of_runtime) else -1, -1)
    at = np.where(at >= 0, at, _by_external(device, host, row_of_host))
    facts["rows_without_operator"] = int((at < 0).sum())
    with ThreadPoolExecutor(1) as beside:
        operators = beside.submit(_operator_table, calls, found, names, rank)
        kernels = _kernel_table(device, runtime, launch_of, at, calls, device_steps, spans, found, names, rank)
        return kernels, operators.result(), facts


def _launches(device: Table, runtime: Table) -> np.ndarray:
    """Row of the runtime call with the kernel's correlation, -1. Many kernels may share one (CUDA graphs)."""
    correlation = runtime["correlation"]
    rows = np.flatnonzero(known(correlation) & (correlation > 0))
    rows = rows[np.lexsort((runtime["start"][rows], correlation[rows]))] if len(rows) else rows
    wanted = device["correlation"]
    if not len(rows):
        return np.full(len(wanted), -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(correlation[rows], wanted), len(rows) - 1)
    return np.where((correlation[rows][place] == wanted), rows[place], -1)


def _steps(table: Table, wanted: np.ndarray, names: List[str]) -> Steps:
    numbers = np.array([_step_number(n) for n in names], dtype=np.int64) if names else np.zeros(0, np.int64)
    rows = np.flatnonzero(wanted & known(table["duration"]))
    rows = rows[numbers[table["name"][rows]] >= 0] if len(rows) else rows
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    start = table["start"][rows]
    return Steps(numbers[table["name"][rows]] if len(rows) else np.zeros(0, np.int64), start,
                 start + table["duration"][rows])


def _step_number(name: str) -> int:
    rest = name[len(STEP_PREFIX):]
    return int(rest) if name.startswith(STEP_PREFIX) and rest.isdigit() and len(rest) < 10 else -1


def _coverage(device: Table, runtime: Table, launch_of: np.ndarray, names: List[str]) -> Dict[str, Any]:
    """How much of what was launched has a device row, and the other way round."""
    launches = np.array([bool(re.search("Launch(?!Host)", n)) and "Graph" not in n for n in names], dtype=bool)
    rows = np.flatnonzero(launches[runtime["name"]]) if len(runtime["name"]) else np.zeros(0, np.int64)
    have = np.zeros(len(runtime["start"]), dtype=bool)
    have[launch_of[launch_of >= 0]] = True
    kernels = device["kind"] == KERNEL
    return {"kernels": int(kernels.sum()), "device_rows": len(kernels),
            "without_launch": int((kernels & (launch_of < 0)).sum()),
            "launches": len(rows), "launches_without_kernel": int((~have[rows]).sum())}


def _calls(host: Table, runtime: Table, launch_of: np.ndarray, names: List[str],
           steps: Steps) -> Tuple[Calls, np.ndarray, np.ndarray, int]:
    """Nests host events, launches and waits. Also: the sorted row of each host row and of each runtime row (-1)."""
    waits = np.array([bool(_WAIT.search(n)) for n in names], dtype=bool)
    used = np.zeros(len(runtime["start"]), dtype=bool)
    used[launch_of[launch_of >= 0]] = True
    is_wait = waits[runtime["name"]] if len(used) else used
    extra = np.flatnonzero(used | is_wait)
    kind = np.concatenate([host["kind"], np.where(is_wait[extra], WAIT, LAUNCH).astype(np.int8)])
    start = np.concatenate([host["start"], runtime["start"][extra]])
    duration = np.concatenate([host["duration"], runtime["duration"][extra]])
    thread = np.concatenate([host["thread"], runtime["thread"][extra]])
    end = start + np.where(known(duration), duration, 0)
    order = order_of(thread, start, end)
    row = np.empty(len(order), dtype=np.int64)
    row[order] = np.arange(len(order))
    row_of_runtime = np.full(len(used), -1, dtype=np.int64)
    row_of_runtime[extra] = row[len(host["start"]):]
    kind, start, duration, thread = kind[order], start[order], duration[order], thread[order]
    parent, late = parents_of(thread, start, end[order])
    del end
    levels = levels_of(depths_of(parent))
    nothing = np.full(len(extra), -1, dtype=np.int32)
    name = np.concatenate([host["name"], runtime["name"][extra]])[order]
    is_step = np.array([_step_number(n) >= 0 for n in names], dtype=bool)
    operator = inherit(levels, parent, np.where(kind == OPERATOR, np.arange(len(kind)), -1))
    texts: Dict[str, List[str]] = {}
    paths = {}
    shown = [n[len(MODULE_PREFIX):] if n.startswith(MODULE_PREFIX) else n for n in names]
    for column, member in (("path", kind == OPERATOR), ("module", kind == MODULE),
                           ("nvtx", (kind == ANNOTATION) & ~is_step[name] if len(name) else kind == ANNOTATION)):
        numbering = Paths(max(len(names), 1))
        paths[column] = numbering.assign(levels, parent, name, member)
        texts[column] = numbering.texts(shown)
    depth = _counted(levels, parent, kind == OPERATOR)
    own_message = np.where(host["message"] == 0, -1, host["message"])
    message = inherit(levels, parent, np.concatenate([own_message, nothing])[order])
    signature = np.concatenate([host["signature"], nothing])[order]
    calls = Calls(kind, name, thread, start, duration, signature, operator, depth, paths["path"], paths["nvtx"],
                  paths["module"], steps.at(start), message, texts)
    return calls, row[:len(host["start"])], row_of_runtime, late


def _counted(levels: List[np.ndarray], parent: np.ndarray, member: np.ndarray) -> np.ndarray:
    """How many members are above each row."""
    count = np.zeros(len(parent), dtype=np.int32)
    for rows in levels[1:]:
        above = parent[rows]
        count[rows] = count[above] + member[above]
    return count


def _by_external(device: Table, host: Table, row_of_host: np.ndarray) -> np.ndarray:
    """For each device row the sorted row of the operator with its external id, if that began before it; else -1."""
    external = host["external"]
    rows = np.flatnonzero(known(external) & (external > 0) & (host["kind"] == OPERATOR))
    wanted = device["external"]
    if not len(rows):
        return np.full(len(wanted), -1, dtype=np.int64)
    rows = rows[np.argsort(external[rows], kind="stable")]
    found = rows[np.minimum(np.searchsorted(external[rows], wanted), len(rows) - 1)]
    fits = (external[found] == wanted) & (host["start"][found] <= device["start"])
    return np.where(fits, row_of_host[found], -1)


def _kernel_table(device: Table, runtime: Table, launch_of: np.ndarray, at: np.ndarray, calls: Calls,
                  device_steps: Steps, spans: Table, found: Collector, names: List[str],
                  rank: Optional[int]) -> pl.DataFrame:
    order = np.argsort(device["start"], kind="stable")
    device = {c: v[order] for c, v in device.items()}
    launch_of, at = launch_of[order], at[order]
    launched, row = launch_of >= 0, np.maximum(launch_of, 0)
    operator = np.where(at >= 0, _pick(calls.operator, at), -1)
    launch_start = np.where(launched, _pick(runtime["start"], row), MISSING)
    step = np.where(at >= 0, _pick(calls.step, at), -1)
    step = np.where(step >= 0, step, device_steps.at(device["start"]))
    path, module = (np.where(at >= 0, _pick(v, at), -1) for v in (calls.path, calls.module))
    place = found.values("thread")
    device_place = np.array([_int(p) for p, _ in place] or [MISSING], dtype=np.int64)
    stream_place = np.array([_int(t) for _, t in place] or [MISSING], dtype=np.int64)
    geometry = np.where(_geometry_known(found)[device["geometry"]], device["geometry"],
                        np.where(launched, _pick(runtime["geometry"], row), device["geometry"]))
    columns = _message_columns(device, at, calls, found, names)
    columns["name"] = columns["raw_name"] = _text(names, device["name"])
    columns["path"], columns["module"] = _text(calls.texts["path"], path), _text(calls.texts["module"], module)
    columns["nvtx"] = _nvtx(device, at, calls, spans, names)
    columns["operator"] = _text(names, np.where(operator >= 0, _pick(calls.name, operator), -1))
    columns["launch_name"] = _text(names, np.where(launched, _pick(runtime["name"], row), -1))
    signature = np.where(operator >= 0, _pick(calls.signature, operator), -1)
    shapes, dtypes, _ = _signatures(found)
    columns["shapes"], columns["dtypes"] = _text(shapes, signature), _text(dtypes, signature)
    own_row = np.cumsum(_is_listed(calls)) - 1
    integers = {
        "position": _positions(operator, launch_start, device["start"]),
        "call": np.where(operator >= 0, _pick(own_row, operator), MISSING),
        "step": np.where(step >= 0, step, MISSING), "start": device["start"], "duration": device["duration"],
        "device": np.where(known(device["device"]), device["device"], device_place[device["thread"]]),
        "stream": np.where(known(device["stream"]), device["stream"], stream_place[device["thread"]]),
        "thread": np.where(launched, stream_place[_pick(runtime["thread"], row)], MISSING),
        "launch": launch_start, "launch_duration": np.where(launched, _pick(runtime["duration"], row), MISSING),
        "correlation": device["correlation"], "registers": device["registers"], "shared": device["shared"],
    }
    sizes = _geometries(found)
    for i, column in enumerate(("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")):
        integers[column] = sizes[geometry, i]
    columns.update({c: _numbers(v) for c, v in integers.items()})
    columns["rank"] = pl.repeat(rank, len(device["start"]), dtype=pl.Int64, eager=True)
    return kernel_frame(columns)


def _operator_table(calls: Calls, found: Collector, names: List[str], rank: Optional[int]) -> pl.DataFrame:
    rows = np.flatnonzero(_is_listed(calls))
    tids = np.array([_int(t) for _, t in found.values("thread")] or [MISSING], dtype=np.int64)
    shapes, dtypes, strides = _signatures(found)
    signature = calls.signature[rows]
    return operator_frame({
        "name": _text(names, calls.name[rows]), "path": _text(calls.texts["path"], calls.path[rows]),
        "depth": pl.Series(calls.depth[rows].astype(np.int64)),
        "step": _numbers(np.where(calls.step[rows] >= 0, calls.step[rows], MISSING)),
        "rank": pl.repeat(rank, len(rows), dtype=pl.Int64, eager=True),
        "thread": _numbers(tids[calls.thread[rows]]), "start": pl.Series(calls.start[rows]),
        "duration": _numbers(calls.duration[rows]), "shapes": _text(shapes, signature),
        "dtypes": _text(dtypes, signature), "strides": _text(strides, signature),
        "kind": _text(["operator", "wait"], (calls.kind[rows] == WAIT).astype(np.int8)),
        "nvtx": _text(calls.texts["nvtx"], calls.nvtx[rows]),
        "module": _text(calls.texts["module"], calls.module[rows]),
    })


def _is_listed(calls: Calls) -> np.ndarray:
    return (calls.kind == OPERATOR) | (calls.kind == WAIT)


def _nvtx(device: Table, at: np.ndarray, calls: Calls, spans: Table, names: List[str]) -> pl.Series:
    """Annotations around the launch; for a row without a launch, the device's own annotations around it."""
    of_launch = _text(calls.texts["nvtx"], np.where(at >= 0, _pick(calls.nvtx, at), -1))
    lost = np.flatnonzero(at < 0)
    wanted = np.array([_step_number(n) < 0 for n in names], dtype=bool)
    use = np.flatnonzero(wanted[spans["name"]]) if len(spans["name"]) else np.zeros(0, np.int64)
    if not len(lost) or not len(use):
        return of_launch
    thread = np.concatenate([spans["thread"][use], device["thread"][lost]])
    start = np.concatenate([spans["start"][use], device["start"][lost]])
    length = np.where(known(spans["duration"][use]), spans["duration"][use], 0)
    end = start + np.concatenate([length, np.zeros(len(lost), np.int64)])
    order = order_of(thread, start, end)
    parent, _ = parents_of(thread[order], start[order], end[order])
    name = np.concatenate([spans["name"][use], device["name"][lost]])[order]
    numbering = Paths(len(names))
    path = np.empty(len(order), dtype=np.int64)
    path[order] = numbering.assign(levels_of(depths_of(parent)), parent, name, order < len(use))
    whole = np.full(len(at), -1, dtype=np.int64)
    whole[lost] = path[len(use):]
    of_device = _text(numbering.texts(names), whole)
    return pl.select(pl.coalesce(of_launch, of_device)).to_series()


def _message_columns(device: Table, at: np.ndarray, calls: Calls, found: Collector, names: List[str]) -> Dict[str, Any]:
    """Kind, bytes, and what is known of collectives: from the device row, else from the call it was launched in."""
    communicates = np.array([bool(COLLECTIVE_KERNEL.search(n)) for n in names] or [False], dtype=bool)
    message = device["message"].astype(np.int64)
    is_kernel = device["kind"] == KERNEL
    is_collective = is_kernel & ((message > 0) | (communicates[device["name"]] if len(message) else is_kernel))
    above = np.where(at >= 0, _pick(calls.message, at), -1)
    message = np.where(is_collective & (message <= 0), above, message)
    message = np.where(is_collective & (message > 0), message, 0)
    kind = np.where(is_collective, len(DEVICE_KINDS), device["kind"])
    columns: Dict[str, Any] = {"kind": _text([*DEVICE_KINDS, "collective"], kind)}
    values = [dict(zip(COMMUNICATION, map(_parsed, v))) if v else {} for v in found.values("message")] or [{}]
    sizes = []
    for value in values:
        elements, size = _int(value.get("elements_in")), DTYPE_BYTES.get(str(value.get("message_dtype")))
        sizes.append(elements * size if size and 0 <= elements < 2**60 else MISSING)
    for field in ("elements_in", "elements_out", "group_size"):
        columns[field] = _numbers(np.array([_int(v.get(field)) for v in values], dtype=np.int64)[message])
    for field in ("collective", "message_dtype", "group"):
        columns[field] = _text([v.get(field) if v.get(field) is None else str(v[field]) for v in values], message)
    for field in ("splits_in", "splits_out"):
        columns[field] = _text([_compact(v.get(field)) for v in values], message)
    columns["bytes"] = _numbers(np.where(message > 0, np.array(sizes, dtype=np.int64)[message], device["bytes"]))
    return columns


def _positions(operator: np.ndarray, launch: np.ndarray, start: np.ndarray) -> np.ndarray:
    """n-th device row of its operator call, in order of launch."""
    position = np.full(len(operator), MISSING, dtype=np.int64)
    rows = np.flatnonzero(operator >= 0)
    rows = rows[np.lexsort((start[rows], launch[rows], operator[rows]))]
    if len(rows):
        first = np.flatnonzero(np.diff(operator[rows], prepend=operator[rows[0]] - 1))
        position[rows] = np.arange(len(rows)) - np.repeat(first, np.diff(first, append=len(rows)))
    return position


def _signatures(found: Collector) -> Tuple[List[Optional[str]], List[Optional[str]], List[Optional[str]]]:
    """Shapes, dtypes and strides as compact JSON, by signature code."""
    parts = [(*text.split(b"\0"), b"", b"", b"")[:3] for text in found.values("signature")]
    shapes, dtypes, strides = ([_compact(_parsed(p[i])) for p in parts] for i in range(3))
    return shapes, dtypes, strides


def _geometries(found: Collector) -> np.ndarray:
    """Grid and block by geometry code: n x 6."""
    out = np.full((max(len(found.values("geometry")), 1), 6), MISSING, dtype=np.int64)
    for i, text in enumerate(found.values("geometry")):
        for j, part in enumerate(text.split(b"\0")[:2]):
            sizes = _parsed(part)
            if isinstance(sizes, list) and len(sizes) == 3:
                out[i, 3 * j:3 * j + 3] = [_int(s) for s in sizes]
    return out


def _geometry_known(found: Collector) -> np.ndarray:
    return np.array([bool(t) for t in found.values("geometry")] or [False], dtype=bool)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _compact(value: Any) -> Optional[str]:
    """JSON without spaces. A list that the trace gives as text ("[1, 2]") is that list."""
    if isinstance(value, str):
        value = _parsed(value.encode()) if value else None
    return None if value is None else json.dumps(value, separators=(",", ":"))


def _int(value: Any) -> int:
    if isinstance(value, str) and value.lstrip("-").isdigit() and len(value) < 19:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else MISSING


def _pick(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """values[rows], where rows of -1 give anything; nothing at all when there are no values."""
    if not len(values):
        return np.full(len(rows), -1, dtype=np.int64)
    return values[np.maximum(rows, 0)]


def _numbers(values: np.ndarray) -> pl.Series:
    series = pl.Series(values)
    return series.set(series == MISSING, None) if (values == MISSING).any() else series


def _text(texts: List[Any], codes: np.ndarray) -> pl.Series:
    """A text column: views of few texts. Code -1 is null."""
    return pl.Series([*texts, None], dtype=pl.String).gather(np.where(codes < 0, len(texts), codes).astype(np.uint32))
