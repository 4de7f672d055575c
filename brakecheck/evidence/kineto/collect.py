"""Blocks -> whole columns of one trace, with one dictionary for each kind of text."""

from __future__ import annotations

from itertools import groupby
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from .decode import LARGEST_MICROSECONDS, Arguments, Block, Codes, Event, columns
from .layout import MISSING

Table = Dict[str, np.ndarray]
LONGEST_MICROSECONDS = 86_400e6  # a day; profilers write int64's largest for "never ended"
TABLES = ("host", "runtime", "device", "spans")
_DICTIONARIES = {"name": "names", "signature": "signatures", "geometry": "geometries", "thread": "threads",
                 "message": "messages"}


class Collector:
    """Takes blocks in file order. `table` then gives each table in that order."""

    def __init__(self) -> None:
        self.codes: Dict[str, Codes] = {column: Codes() for column in _DICTIONARIES}
        self.parts: Dict[str, List[Table]] = {table: [] for table in TABLES}
        self.marks: List[Tuple[Any, ...]] = []
        self.counts: Dict[str, int] = {}
        self.problems: Dict[str, List[Any]] = {}
        self.end: Optional[int] = None  # byte offset where the events end

    def put(self, block: Block) -> None:
        """After the block in which the events end comes metadata, whose bytes look like blocks too: nothing is kept."""
        if self.end is None:
            self.end = block.end
            self._keep(block)

    def _keep(self, block: Block) -> None:
        maps = {}
        for column, attribute in _DICTIONARIES.items():
            codes = self.codes[column]
            maps[column] = np.array([codes[v] for v in getattr(block, attribute)], dtype=np.int32)
        for name in TABLES:
            table = getattr(block, name)
            if table and len(table["start"]):
                self.parts[name].append({c: maps[c][v] if c in maps else np.asarray(v) for c, v in table.items()})
        self.marks += block.marks
        for category, count in block.counts.items():
            self.counts[category] = self.counts.get(category, 0) + count
        for code, (count, offset) in block.problems.items():
            self._problem(code, count, offset)

    def _problem(self, code: str, count: int, offset: Optional[int]) -> None:
        known = self.problems.setdefault(code, [0, offset])
        known[0] += count
        if offset is not None and (known[1] is None or offset < known[1]):
            known[1] = offset

    def pair_marks(self) -> None:
        """Makes whole events of begin and end events, which pair up by thread, the last begun ending first."""
        whole: List[Any] = []
        unpaired = 0
        open_marks: Dict[Tuple[Any, Any], List[Tuple[Any, ...]]] = {}
        for mark in self.marks:
            phase, category, name, pid, tid, time, arguments = mark
            if time is None:
                unpaired += 1
            elif phase == "B":
                open_marks.setdefault((pid, tid), []).append(mark)
            elif open_marks.get((pid, tid)):
                begun = open_marks[pid, tid].pop()
                whole.append(Event("X", begun[1], begun[2], pid, tid, begun[5] / 1000, (time - begun[5]) / 1000,
                                   Arguments(**{**arguments, **begun[6]})))
            else:
                unpaired += 1
        unpaired += sum(map(len, open_marks.values()))
        self.marks.clear()
        if unpaired:
            self._problem("unpaired", unpaired, None)
        if whole:
            block = columns(whole, Block())
            block.counts.clear()
            self._keep(block)

    def table(self, name: str) -> Table:
        """The columns of a table, start and duration in int64 ns; events without a usable time are counted, not kept.
        The parts are forgotten here, so that memory holds them once."""
        parts = self.parts.pop(name)
        if not parts:
            empty = {c: np.asarray(v) for c, v in getattr(columns([], Block()), name).items()}
            return {**empty, **dict.fromkeys(("start", "duration"), np.zeros(0, np.int64))}
        start = _start([part.pop("start") for part in parts])
        whole = {c: np.concatenate([part.pop(c) for part in parts]) for c in list(parts[0])}
        whole.update(start=start, duration=self._duration(whole["duration"], name == "device"))
        usable = known(start)
        if usable.all():
            return whole
        self._problem("time-unusable", int((~usable).sum()), None)
        return {c: v[usable] for c, v in whole.items()}

    def _duration(self, microseconds: np.ndarray, on_device: bool) -> np.ndarray:
        """Nanoseconds. What is negative, absent, longer than a day or, on a device, 0 is unknown, and counted."""
        good = (microseconds >= 0) & (microseconds <= LONGEST_MICROSECONDS)
        for code, wrong in (("duration-negative", microseconds < 0),
                            ("duration-huge", microseconds > LONGEST_MICROSECONDS),
                            ("duration-absent", np.isnan(microseconds)),
                            ("duration-zero", (microseconds == 0) & on_device)):
            if wrong.any():
                self._problem(code, int(wrong.sum()), None)
        if on_device:
            good &= microseconds > 0
        return np.where(good, np.rint(np.where(good, microseconds, 0.0) * 1000), MISSING).astype(np.int64)

    def values(self, column: str) -> List[Any]:
        return list(self.codes[column])


def known(values: np.ndarray) -> np.ndarray:
    """Where an integer column has a value."""
    return values != MISSING


def _start(parts: List[np.ndarray]) -> np.ndarray:
    """Nanoseconds from parts in microseconds (float) or nanoseconds, MISSING where the time is none."""
    runs = [(kind, np.concatenate(list(run))) for kind, run in groupby(parts, key=lambda part: part.dtype.kind)]
    return np.concatenate([_nanoseconds(run) if kind == "f" else run for kind, run in runs])


def _nanoseconds(microseconds: np.ndarray) -> np.ndarray:
    usable = np.abs(microseconds) < LARGEST_MICROSECONDS
    time = np.where(usable, microseconds, 0.0)
    whole = np.floor(time)
    return np.where(usable, whole.astype(np.int64) * 1000 + np.rint((time - whole) * 1000).astype(np.int64), MISSING)
