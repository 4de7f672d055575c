"""Blocks -> whole columns of one trace, with one dictionary for each kind of text."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from .decode import Arguments, Block, Codes, Event, Table, columns
from .layout import MISSING

TABLES = ("host", "runtime", "device", "spans")
_DICTIONARIES = {"name": "names", "signature": "signatures", "geometry": "geometries", "thread": "threads",
                 "message": "messages"}


class Collector:
    """Takes blocks in any order. `table` then gives each table in file order."""

    def __init__(self) -> None:
        self.codes: Dict[str, Codes] = {column: Codes() for column in _DICTIONARIES}
        self.parts: Dict[str, Dict[int, Table]] = {table: {} for table in TABLES}
        self.marks: Dict[int, List[Tuple[Any, ...]]] = {}
        self.counts: Dict[str, int] = {}
        self.problems: Dict[str, List[Any]] = {}
        self.end: Optional[Tuple[int, int]] = None  # (number of the block, byte offset) where the events end
        self.last = -1

    def put(self, number: int, block: Block) -> None:
        self.last = max(self.last, number)
        if block.end is not None and (self.end is None or number < self.end[0]):
            self.end = (number, block.end)
        maps = {}
        for column, attribute in _DICTIONARIES.items():
            codes = self.codes[column]
            maps[column] = np.array([codes[v] for v in getattr(block, attribute)], dtype=np.int32)
        for name in TABLES:
            table: Table = getattr(block, name)
            if table and len(table["start"]):
                self.parts[name][number] = {c: maps[c][v] if c in maps else v for c, v in table.items()}
        if block.marks:
            self.marks[number] = block.marks
        for category, count in block.counts.items():
            self.counts[category] = self.counts.get(category, 0) + count
        for code, (count, offset) in block.problems.items():
            self._problem(code, count, offset)

    def _problem(self, code: str, count: int, offset: Optional[int]) -> None:
        known = self.problems.setdefault(code, [0, offset])
        known[0] += count
        if offset is not None and (known[1] is None or offset < known[1]):
            known[1] = offset

    def forget_after(self, number: int) -> None:
        """Drops what blocks after `number` gave: the events ended in that one, and what followed was metadata."""
        everything: List[Dict[int, Any]] = [*self.parts.values(), self.marks]
        for parts in everything:
            for later in [n for n in parts if n > number]:
                del parts[later]

    def pair_marks(self) -> None:
        """Makes whole events of begin and end events, which pair up by thread, the last begun ending first."""
        whole: List[Any] = []
        unpaired = 0
        open_marks: Dict[Tuple[Any, Any], List[Tuple[Any, ...]]] = {}
        for number in sorted(self.marks):
            for mark in self.marks[number]:
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
            self.put(self.last + 1, block)

    def table(self, name: str) -> Table:
        """The columns of a table; it is forgotten here, so that memory holds it once."""
        parts = self.parts.pop(name)
        numbers = sorted(parts)
        if not numbers:
            return columns([], Block()).__dict__[name]
        whole = {}
        for column in list(parts[numbers[0]]):
            whole[column] = np.concatenate([parts[n].pop(column) for n in numbers])
        return whole

    def values(self, column: str) -> List[Any]:
        return list(self.codes[column])


def known(values: np.ndarray) -> np.ndarray:
    """Where an integer column has a value."""
    return values != MISSING
