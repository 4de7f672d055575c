"""Recordings as one timeline that ui.perfetto.dev and chrome://tracing load: each side a group of tracks."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Mapping, Optional, Union, cast

import msgspec
import polars as pl

from brakecheck.model import UsageError

from .table import Recording

_AT_ONCE = 20_000  # events encoded at a time
_DETAILS = ("raw_name", "path", "module", "nvtx", "position", "step", "correlation", "grid_x", "grid_y", "grid_z",
            "block_x", "block_y", "block_z", "registers", "shared", "bytes", "shapes", "dtypes", "strides",
            "collective", "elements_in", "group_size")


def export(path: Union[str, Path], sides: Mapping[str, Recording]) -> int:
    """Writes one or more recordings, by their name, to `path` (gzip when it ends in .gz); returns the events written.

    Every side begins at its first step (without steps, at its first launch or kernel), so that sides lie under each
    other. Kernels are tracks of streams, operators tracks of host threads; arrows lead from launches to kernels.
    UsageError when there is nothing with a time to show.
    """
    target = Path(path)
    origins = {name: origin_of(side) for name, side in sides.items()}
    if not sides or all(o is None for o in origins.values()):
        raise UsageError("nothing to export: no recording has times", str(path), "export traces, not counter reports")
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        with unfinished.open("wb") as plain:
            if target.suffix == ".gz":
                with gzip.GzipFile(fileobj=plain, mode="wb", compresslevel=3) as packed:
                    count = _write(cast(BinaryIO, packed), sides, origins)
            else:
                count = _write(plain, sides, origins)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def origin_of(recording: Recording) -> Optional[int]:
    """The time (ns) that stands for the recording's beginning."""
    steps = recording.metadata.get("steps")
    if steps:
        return min(s["start"] for s in steps)
    times = [recording.kernels["launch"].min(), recording.kernels["start"].min()]
    known = [cast(int, t) for t in times if t is not None]
    return min(known) if known else None


def _write(file: BinaryIO, sides: Mapping[str, Recording], origins: Dict[str, Optional[int]]) -> int:
    encoder = msgspec.json.Encoder()
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    count = 0
    waiting: List[bytes] = []
    for event in _events(sides, origins):
        waiting.append(encoder.encode(event))
        if len(waiting) == _AT_ONCE:
            file.write((b",\n" if count else b"") + b",\n".join(waiting))
            count += len(waiting)
            waiting.clear()
    if waiting:
        file.write((b",\n" if count else b"") + b",\n".join(waiting))
    file.write(b"\n]}\n")
    return count + len(waiting)


def _events(sides: Mapping[str, Recording], origins: Dict[str, Optional[int]]) -> Iterator[Dict[str, Any]]:
    tracks = _Tracks()
    arrow = 0
    for side, recording in sides.items():
        origin = origins[side]
        if origin is None:
            continue
        for step in recording.metadata.get("steps") or ():
            place = tracks.of((side, _rank(step.get("rank")), "steps"), "steps")
            yield from tracks.new()
            yield _slice(f"step {step['step']}", place, step["start"], step["end"] - step["start"], origin, {})
        if recording.operators is not None:
            for row in _rows(recording.operators):
                place = tracks.of((side, _rank(row["rank"]), "host"), f"thread {row['thread']}")
                yield from tracks.new()
                yield _slice(row["name"], place, row["start"], row["duration"], origin, _details(row))
        for row in _rows(recording.kernels):
            device = "device" if row["device"] is None else f"device {row['device']}"
            place = tracks.of((side, _rank(row["rank"]), device), f"stream {row['stream']}")
            yield from tracks.new()
            yield _slice(row["name"], place, row["start"], row["duration"], origin, _details(row))
            if row["launch"] is not None:
                arrow += 1
                host = tracks.of((side, _rank(row["rank"]), "host"), f"thread {row['thread']}")
                yield from tracks.new()
                launch = _slice(row["launch_name"] or "launch", host, row["launch"], row["launch_duration"], origin, {})
                yield launch
                common = {"cat": "launch", "name": "launch", "id": arrow}
                yield {"ph": "s", **common, **host, "ts": launch["ts"]}
                yield {"ph": "f", "bp": "e", **common, **place, "ts": (row["start"] - origin) / 1000}


class _Tracks:
    """Numbers of processes and threads, and the events that name them."""

    def __init__(self) -> None:
        self.processes: Dict[Any, int] = {}
        self.threads: Dict[Any, int] = {}
        self.names: List[Dict[str, Any]] = []

    def of(self, process: Any, thread: str) -> Dict[str, int]:
        if process not in self.processes:
            self.processes[process] = pid = len(self.processes) + 1
            name = " ".join(p for p in process if p)
            self.names += [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
                           {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}]
        pid = self.processes[process]
        if (pid, thread) not in self.threads:
            self.threads[pid, thread] = tid = len(self.threads) + 1
            self.names.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}})
        return {"pid": pid, "tid": self.threads[pid, thread]}

    def new(self) -> List[Dict[str, Any]]:
        names, self.names = self.names, []
        return names


def _rows(frame: pl.DataFrame) -> Iterator[Dict[str, Any]]:
    return frame.filter(pl.col("start").is_not_null()).iter_rows(named=True, buffer_size=_AT_ONCE)


def _rank(rank: Optional[int]) -> str:
    return "" if rank is None else f"rank {rank}"


def _slice(name: Optional[str], place: Dict[str, int], start: int, duration: Optional[int], origin: int,
           details: Dict[str, Any]) -> Dict[str, Any]:
    """An event in microseconds. An unknown duration is drawn as none and said."""
    if duration is None:
        details = {**details, "duration": "unknown"}
    return {"ph": "X", "name": name or "?", **place, "ts": (start - origin) / 1000, "dur": (duration or 0) / 1000,
            **({"args": details} if details else {})}


def _details(row: Dict[str, Any]) -> Dict[str, Any]:
    return {k: row[k] for k in _DETAILS if row.get(k) is not None and not (k == "raw_name" and row[k] == row["name"])}
