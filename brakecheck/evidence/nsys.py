"""Nsight Systems SQLite exports.

The export's schema changes between releases, so tables and columns are found by looking, never assumed: what is absent
becomes null and a named Problem. Times are the export's own (ns since the session began).
Schema: the "SQLite Schema Reference" chapter of the Nsight Systems User Guide.
"""

from __future__ import annotations

import json
import re
import sqlite3
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import polars as pl

from ..model import BrakecheckError
from .nvtx import Ranges
from .table import Problem, Recording, kernel_frame, operator_frame

# globalTid = hardware id | VM id | process (24 bits) | thread (24 bits); globalPid is the same with thread 0.
THREAD_BITS = 24
PUSH_POP, START_END = 59, 60  # ENUM_NSYS_EVENT_TYPE
# A longer activity is a broken time stamp (F33): 30 days.
LONGEST_NS = 30 * 24 * 3600 * 10**9

KERNEL = {"start": "start", "end": "end", "device": "deviceId", "stream": "streamId", "correlation": "correlationId",
          "process": "globalPid", "demangled": "demangledName", "short": "shortName", "mangled": "mangledName",
          "registers": "registersPerThread", "grid_x": "gridX", "grid_y": "gridY", "grid_z": "gridZ",
          "block_x": "blockX", "block_y": "blockY", "block_z": "blockZ", "shared_static": "staticSharedMemory",
          "shared_dynamic": "dynamicSharedMemory", "graph_node": "graphNodeId"}
MEMORY = {"start": "start", "end": "end", "device": "deviceId", "stream": "streamId", "correlation": "correlationId",
          "process": "globalPid", "bytes": "bytes", "graph_node": "graphNodeId"}
GRAPH = {"start": "start", "end": "end", "device": "deviceId", "stream": "streamId", "correlation": "correlationId",
         "process": "globalPid", "graph": "graphId"}
RUNTIME = {"start": "start", "end": "end", "correlation": "correlationId", "thread": "globalTid"}
NVTX = {"start": "start", "end": "end", "thread": "globalTid", "type": "eventType", "text_id": "textId"}
# Without these a table says nothing; without the others it says less.
NEEDED = {"start", "end"}


@dataclass
class Export:
    """An open export: its tables with their columns, its strings, and the problems met so far."""

    connection: sqlite3.Connection
    path: str
    row_limit: int
    tables: Dict[str, List[str]] = field(default_factory=dict)
    strings: Dict[int, str] = field(default_factory=dict)
    problems: List[Problem] = field(default_factory=list)

    def rows(self, sql: str) -> Iterator[Tuple[Any, ...]]:
        """Rows of a query; a database that claims more rows than its bytes can hold is damaged."""
        for count, row in enumerate(self.connection.execute(sql)):
            if count > self.row_limit:
                raise sqlite3.DatabaseError("a table yields more rows than the file has bytes")
            yield row

    def find(self, *names: str) -> Optional[str]:
        """The first table with one of these names, in any case, else whose name ends like one (renamed tables)."""
        lower = {t.lower(): t for t in self.tables}
        for name in names:
            if name.lower() in lower:
                return lower[name.lower()]
        for name in names:
            tail = "_" + name.lower().split("_")[-1]
            for low, table in lower.items():
                if low.endswith(tail) and NEEDED.issubset(c.lower() for c in self.tables[table]):
                    self.problems.append(Problem("table-renamed", f"no table {name}; read {table} in its place", table))
                    return table
        return None

    def column(self, table: str, name: str) -> Optional[str]:
        return next((c for c in self.tables[table] if c.lower() == name.lower()), None)

    def frame(self, table: str, wanted: Dict[str, str], extra: str = "") -> Optional[pl.DataFrame]:
        """Integer columns `wanted` (ours -> theirs) of a table in row order, absent and non-integer ones null."""
        picks, absent, present = [], [], []
        for theirs in wanted.values():
            found = self.column(table, theirs)
            if found is None:
                absent.append(theirs)
                picks.append("NULL")
            else:
                name = quoted(found)
                picks.append(f"CASE WHEN typeof({name})='integer' THEN {name} END")
                present.append(found)
        for name in absent:
            self.problems.append(Problem("missing-column", f"{table} has no column {name}: its values are unknown",
                                         f"{table}.{name}"))
        if any(wanted[n] in absent for n in NEEDED):
            return None
        self.count_odd(table, present)
        data = list(self.rows(f"SELECT {', '.join(picks)}{extra} FROM {quoted(table)}"))
        columns = list(zip(*data)) if data else [()] * (len(wanted) + extra.count(","))
        names = [*wanted, *(f"extra{i}" for i in range(extra.count(",")))]
        return pl.DataFrame({n: pl.Series(n, c, dtype=pl.String if n.startswith("extra") else pl.Int64, strict=False)
                             for n, c in zip(names, columns)})

    def count_odd(self, table: str, columns: Sequence[str]) -> None:
        sums = ", ".join(f"sum(typeof({quoted(c)}) NOT IN ('integer', 'null'))" for c in columns)
        for column, odd in zip(columns, next(self.rows(f"SELECT {sums} FROM {quoted(table)}"))):
            if odd:
                self.problems.append(Problem("wrong-type", f"{odd} values of {table}.{column} are not integers: "
                                             "unknown", f"{table}.{column}", odd))


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def read(path: Path) -> Recording:
    """The recording in an Nsight Systems SQLite export.

    Raises BrakecheckError when the file is not a readable SQLite database or has no device activity table at all.
    """
    uri = f"file:{urllib.parse.quote(str(Path(path).absolute()))}?mode=ro&immutable=1"
    try:
        size = Path(path).stat().st_size
        connection = sqlite3.connect(uri, uri=True)
    except (OSError, sqlite3.Error) as error:
        raise BrakecheckError(f"cannot open the export: {error}", str(path),
                              "check the path and its permissions") from None
    try:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        # A view or trigger of a hostile file must not run functions; the file's own cells are checked when read.
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA cell_size_check=ON")
        return _read(Export(connection, str(path), row_limit=max(size, 4096)))
    except (sqlite3.Error, OverflowError, UnicodeError) as error:
        raise BrakecheckError(
            f"the SQLite database is damaged or cut off: {error}", str(path),
            "export it again: nsys export --type sqlite --force-overwrite true REPORT.nsys-rep",
        ) from None
    finally:
        connection.close()


def _read(export: Export) -> Recording:
    for (name,) in export.rows("SELECT name FROM sqlite_master WHERE type='table'"):
        export.tables[name] = [row[1] for row in export.rows(f"PRAGMA table_info({quoted(name)})")]
    if not any(t.startswith(("CUPTI_", "NVTX_", "META_DATA_", "TARGET_INFO", "StringIds")) for t in export.tables):
        raise BrakecheckError("this SQLite database is no Nsight Systems export",
                              f"{export.path}: tables {', '.join(sorted(export.tables)[:8]) or 'none'}",
                              "make one with: nsys export --type sqlite REPORT.nsys-rep")
    if "StringIds" in export.tables:
        export.strings = {i: v for i, v in export.rows('SELECT id, value FROM "StringIds"') if isinstance(v, str)}
    else:
        export.problems.append(Problem("missing-table", "no table StringIds: kernel names are unknown", "StringIds"))
    parts = [p for p in (_kernels(export), _memory(export, "MEMCPY"), _memory(export, "MEMSET"), _graphs(export))
             if p is not None]
    if not parts:
        raise BrakecheckError(
            "the export has no device activity: neither kernels nor copies nor sets",
            f"{export.path}: tables {', '.join(sorted(export.tables)[:8])} ...",
            "record with --trace=cuda (and without --cuda-flush-interval cutting it off), then export again",
        )
    table = pl.concat(parts, how="diagonal").sort("start", nulls_last=True, maintain_order=True)
    table = _bounded(export, table)
    table, operators = _host_side(export, table)
    table = table.with_columns(raw_name=pl.coalesce(["raw_name", "name"] if "raw_name" in table.columns else ["name"]))
    columns = {name: table[name] for name in table.columns
               if name not in ("process", "end", "graph_node", "launch_thread", "row")}
    return Recording("nsys", export.path, kernel_frame(columns), operators=operators,
                     metadata=_metadata(export, table), problems=export.problems)


def _kernels(export: Export) -> Optional[pl.DataFrame]:
    table = export.find("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL")
    frame = export.frame(table, KERNEL) if table else None
    if frame is None:
        where = table or "CUPTI_ACTIVITY_KIND_KERNEL"
        export.problems.append(Problem("missing-table", f"no usable kernel table ({where}): kernels are unknown, "
                                       "which does not mean that none ran", where))
        return None
    strings = export.strings
    demangled, short, mangled = ([strings.get(i) if i is not None else None for i in frame[c]]
                                 for c in ("demangled", "short", "mangled"))
    names = [d or s or m for d, s, m in zip(demangled, short, mangled)]
    nameless = sum(n is None for n in names)
    if nameless:
        export.problems.append(Problem("missing-string", f"{nameless} kernels have a name id that StringIds lacks",
                                       f"{table}.demangledName", nameless))
    kinds = ["collective" if n and n.startswith("nccl") else "kernel" for n in names]
    return frame.drop("demangled", "short", "mangled").with_columns(
        pl.Series("name", names, dtype=pl.String),
        pl.Series("raw_name", [m or n for m, n in zip(mangled, names)], dtype=pl.String),
        pl.Series("kind", kinds, dtype=pl.String))


def _memory(export: Export, kind: str) -> Optional[pl.DataFrame]:
    table = f"CUPTI_ACTIVITY_KIND_{kind}"
    if table not in export.tables:
        return None  # the exporter leaves out tables of activities that did not happen
    wanted = dict(MEMORY, **({"copy": "copyKind"} if kind == "MEMCPY" else {}))
    frame = export.frame(table, wanted)
    if frame is None:
        return None
    if kind == "MEMSET":
        return frame.with_columns(pl.lit("memset").alias("kind"), pl.lit("[CUDA memset]").alias("name"))
    labels = {}
    if "ENUM_CUDA_MEMCPY_OPER" in export.tables and export.column("ENUM_CUDA_MEMCPY_OPER", "label"):
        labels = dict(export.rows('SELECT id, label FROM "ENUM_CUDA_MEMCPY_OPER"'))
    names = [f"[CUDA memcpy {labels.get(c, f'kind {c}')}]" if c is not None else "[CUDA memcpy]" for c in frame["copy"]]
    return frame.drop("copy").with_columns(pl.lit("memcpy").alias("kind"), pl.Series("name", names, dtype=pl.String))


def _graphs(export: Export) -> Optional[pl.DataFrame]:
    """Launches of whole CUDA graphs: --cuda-graph-trace=graph records the graph and not the kernels inside it."""
    table = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
    frame = export.frame(table, GRAPH) if table in export.tables else None
    if frame is None or not frame.height:
        return None
    export.problems.append(Problem(
        "graph-level-trace", f"{frame.height} launches of CUDA graphs are recorded as a whole: the kernels inside are "
        "unknown. Record with --cuda-graph-trace=node to see them", table, frame.height))
    names = [f"[CUDA graph {g}]" if g is not None else "[CUDA graph]" for g in frame["graph"]]
    return frame.drop("graph").with_columns(pl.lit("graph").alias("kind"), pl.Series("name", names, dtype=pl.String))


def _bounded(export: Export, table: pl.DataFrame) -> pl.DataFrame:
    """Durations; one that is negative or absurdly long is unknown, counted, and never summed (F33)."""
    duration = pl.col("end") - pl.col("start")
    broken = (duration < 0) | (duration > LONGEST_NS) | ((pl.col("end") < 0) ^ (pl.col("start") < 0))
    table = table.with_columns(pl.when(~broken).then(duration).alias("duration"))
    lost = table.filter(pl.col("duration").is_null()).height
    if lost:
        export.problems.append(Problem("broken-duration", f"{lost} activities have no end, or one before the start or "
                                       "over 30 days after it: their durations are unknown", "start, end", lost))
    return table


def _host_side(export: Export, table: pl.DataFrame) -> Tuple[pl.DataFrame, Optional[pl.DataFrame]]:
    """Adds launches (by process and correlation id), NVTX path, operator path and position."""
    runtime = _runtime(export)
    if runtime is None:
        return table, None
    table = table.join(runtime, on=["process", "correlation"], how="left", maintain_order="left")
    unlaunched = table.filter(pl.col("launch").is_null() & (pl.col("kind") != "graph")).height
    if unlaunched:
        export.problems.append(Problem("no-launch", f"{unlaunched} of {table.height} device activities have no launch "
                                       "row: their operator and launch latency are unknown",
                                       "CUPTI_ACTIVITY_KIND_RUNTIME.correlationId", unlaunched))
    ranges = _nvtx(export)
    thread = (pl.col("launch_thread") & ((1 << THREAD_BITS) - 1)).alias("thread")
    if ranges is None:
        return table.with_columns(thread), None
    places = ranges.locate(table["launch_thread"].to_list(), table["launch"].to_list())
    table = table.with_columns(thread, *(pl.Series(n, v, dtype=t) for n, (v, t) in places.items()))
    operators = ranges.operators(THREAD_BITS)
    return table, operator_frame(operators) if operators else None


def _runtime(export: Export) -> Optional[pl.DataFrame]:
    name = export.find("CUPTI_ACTIVITY_KIND_RUNTIME")
    frame = export.frame(name, RUNTIME) if name else None
    if frame is None:
        export.problems.append(Problem("missing-table", "no usable table of runtime calls: launches and operators are "
                                       "unknown", "CUPTI_ACTIVITY_KIND_RUNTIME"))
        return None
    return frame.drop_nulls(["correlation", "thread", "start"]).select(
        (pl.col("thread") - (pl.col("thread") & ((1 << THREAD_BITS) - 1))).alias("process"), "correlation",
        pl.col("start").alias("launch"), (pl.col("end") - pl.col("start")).alias("launch_duration"),
        pl.col("thread").alias("launch_thread"),
    ).unique(["process", "correlation"], keep="first", maintain_order=True)


def _nvtx(export: Export) -> Optional[Ranges]:
    table = next((t for t in export.tables if t.upper() == "NVTX_EVENTS"), None) or next(
        (t for t, columns in export.tables.items()
         if "NVTX" in t.upper() and {*NEEDED, "globaltid"}.issubset(c.lower() for c in columns)), None)
    if table is None:
        export.problems.append(Problem("missing-table", "no table of NVTX ranges (NVTX_EVENTS): operators are unknown. "
                                       "Record with --trace=cuda,nvtx", "NVTX_EVENTS"))
        return None
    if table != "NVTX_EVENTS":
        export.problems.append(Problem("table-renamed", f"no table NVTX_EVENTS; read {table} in its place", table))
    text = export.column(table, "text")
    wanted = dict(NVTX)
    if text and not export.column(table, "textId"):
        del wanted["text_id"]
        export.problems.append(Problem("missing-column", f"{table} has no column textId: names come from {text}",
                                       f"{table}.textId"))
    frame = export.frame(table, wanted, extra=f", CAST({quoted(text)} AS TEXT)" if text else "")
    if frame is None:
        return None
    strings = export.strings
    ids: Sequence[Optional[int]] = frame["text_id"].to_list() if "text_id" in frame.columns else [None] * frame.height
    texts: Sequence[Optional[str]] = frame["extra0"].to_list() if text else [None] * frame.height
    names = [t if t else strings.get(i) if i is not None else None for t, i in zip(texts, ids)]
    frame = frame.with_columns(pl.Series("name", names, dtype=pl.String))
    if frame["type"].null_count() < frame.height:  # a table without types holds ranges only
        frame = frame.filter(pl.col("type") == PUSH_POP)
    frame = frame.drop_nulls(["start", "end", "thread", "name"]).filter(pl.col("end") >= pl.col("start"))
    return Ranges(frame["thread"].to_list(), frame["start"].to_list(), frame["end"].to_list(), frame["name"].to_list())


def _metadata(export: Export, table: pl.DataFrame) -> Dict[str, Any]:
    info = {str(k): str(v) for k, v in _pairs(export, "META_DATA_EXPORT", "name", "value")}
    known: Dict[str, Any] = {"window_ns": _window(info)}
    versions = {"nsys": info.get("EXPORT_PRODUCT_VERSION"), "nsys_schema": info.get("EXPORT_SCHEMA_VERSION")}
    for name, value in _pairs(export, "TARGET_INFO_SYSTEM_ENV", "name", "value"):
        if re.search(r"driver.*version", str(name), re.I) and re.search(r"cuda|nvidia|gpu", str(name), re.I):
            versions.setdefault("driver", str(value))
    known["versions"] = {k: v for k, v in versions.items() if v is not None} or None
    known["gpus"] = _devices(export) or None
    processes: List[Dict[str, Any]] = []
    if table["process"].null_count() < table.height:
        for key, group in table.drop_nulls("process").group_by("process", maintain_order=True):
            devices = sorted(group["device"].drop_nulls().unique().to_list())
            processes.append({"pid": (int(key[0]) >> THREAD_BITS) & ((1 << THREAD_BITS) - 1), "devices": devices,
                              "activities": group.height})
    known["processes"] = sorted(processes, key=lambda p: json.dumps(p)) or None
    launches = table.filter(pl.col("kind") == "graph").height
    nodes = table["graph_node"].drop_nulls().len() if "graph_node" in table.columns else 0
    if launches or nodes:
        known["cuda_graphs"] = {"launches_recorded_whole": launches, "activities_inside_graphs": nodes}
    return {k: v for k, v in known.items() if v is not None}


def _window(info: Dict[str, str]) -> Optional[List[int]]:
    """The cut-out that this export was reduced to, where whoever cut it said so."""
    match = re.fullmatch(r"(\d{1,19})-(\d{1,19})", info.get("DERIVED_WINDOW_NS", ""))
    return [int(match[1]), int(match[2])] if match else None


def _pairs(export: Export, table: str, key: str, value: str) -> List[Tuple[Any, Any]]:
    if table not in export.tables or not export.column(table, key) or not export.column(table, value):
        return []
    return list(export.rows(f"SELECT {quoted(key)}, {quoted(value)} FROM {quoted(table)}"))


def _devices(export: Export) -> List[Dict[str, Any]]:
    """GPUs as recorded: name, id, capability, sms, memory (bytes), clock (Hz), uuid."""
    table = "TARGET_INFO_GPU"
    if table not in export.tables:
        export.problems.append(Problem("missing-table", "no table TARGET_INFO_GPU: the GPU is unknown", table))
        return []
    wanted = {"name": "name", "id": "id", "sms": "smCount", "memory": "totalMemory", "clock": "clockRate",
              "uuid": "uuid", "major": "computeMajor", "minor": "computeMinor"}
    have = {ours: found for ours, theirs in wanted.items() if (found := export.column(table, theirs))}
    out = []
    for row in export.rows(f"SELECT {', '.join(quoted(c) for c in have.values())} FROM {quoted(table)}" if have
                           else "SELECT 1 WHERE 0"):
        device = {k: v for k, v in zip(have, row) if isinstance(v, (int, str)) and v != ""}
        if "major" in device and "minor" in device:
            device["capability"] = f"{device.pop('major')}.{device.pop('minor')}"
        out.append(device)
    return out
