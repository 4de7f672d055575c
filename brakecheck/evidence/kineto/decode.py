"""One block of events -> columns. Runs in worker processes, so it imports msgspec and numpy only.

Decoding is typed: msgspec builds only the fields below and skips the rest of an event, and nested values (shapes,
grids) stay raw bytes that are dictionary-encoded unseen. What does not fit the types is left to `general`.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Dict, FrozenSet, List, Optional, Sequence, Tuple, Union

import msgspec
import numpy as np

from .layout import (
    ARGUMENTS,
    COMMUNICATION,
    DEVICE,
    DEVICE_ANNOTATION,
    HOST,
    INTEGERS,
    MISSING,
    MODULE,
    MODULE_PREFIX,
    RUNTIME,
)

Raw = msgspec.Raw
_EMPTY = Raw(b"")
_PROBE = 65_536  # bytes of a block that are looked at for old spellings
# Above this many microseconds a float64 no longer holds the third decimal: 2**43 us, unit in the last place 2**-9 us.
EXACT_MICROSECONDS = 2.0**43
LARGEST_MICROSECONDS = 9.2e15  # int64 nanoseconds end here
LONGEST_MICROSECONDS = 86_400e6  # a day; profilers write int64's largest for "never ended"
Table = Dict[str, np.ndarray]


def _arguments_type(fields: Dict[str, Tuple[str, ...]], old: FrozenSet[str] = frozenset()) -> Any:
    """old: those of the former names of fields that the trace uses."""
    members = [(f, *((int, MISSING) if f in INTEGERS else (Raw, _EMPTY))) for f in fields]
    names = {f: next((n for n in known if n in old), known[0]) for f, known in fields.items()}
    return msgspec.defstruct("Arguments", members, gc=False, rename=names.get)


def _event_type(arguments: Any, exact: bool = False) -> Any:
    """exact keeps the digits of the time, for fractions beside an absolute epoch (traces of early 2024)."""
    place = Union[int, str]
    time = (Raw, Raw(b"NaN")) if exact else (float, math.nan)
    return msgspec.defstruct("Event", [
        ("ph", str, ""), ("cat", str, ""), ("name", str, ""), ("pid", place, 0), ("tid", place, 0), ("ts", *time),
        ("dur", float, math.nan), ("args", Optional[arguments], None)], gc=False)


_ALL_ARGUMENTS = {**ARGUMENTS, **COMMUNICATION}
_OLD_NAMES = re.compile('"({})"'.format("|".join(n for names in _ALL_ARGUMENTS.values() for n in names[1:])).encode())
# What `repair` builds events with: every field.
Arguments = _arguments_type(_ALL_ARGUMENTS)
Event = _event_type(Arguments)
ExactEvent = _event_type(Arguments, exact=True)
_NO_ARGUMENTS = Arguments()


@functools.cache
def _decoder(collectives: bool, old: FrozenSet[str], exact: bool) -> Any:
    arguments = _arguments_type(_ALL_ARGUMENTS if collectives else ARGUMENTS, old)
    return msgspec.json.Decoder(List[_event_type(arguments, exact)])  # type: ignore[misc]


@dataclass
class Block:
    """What one block of a trace holds. Tables are dicts of equally long arrays; names, signatures (shapes, dtypes and
    strides as written), geometries (grid and block as written), messages and threads (pid, tid) are local
    dictionaries that the codes in the tables point into.

    marks: begin and end events in file order, still to be paired. counts: events by category.
    problems: code -> [count, first byte offset or None].
    end: byte offset where the array of events was found to end, if it was.
    """

    host: Table = field(default_factory=dict)
    runtime: Table = field(default_factory=dict)
    device: Table = field(default_factory=dict)
    spans: Table = field(default_factory=dict)
    names: List[str] = field(default_factory=list)
    signatures: List[bytes] = field(default_factory=list)
    geometries: List[bytes] = field(default_factory=list)
    messages: List[Optional[Tuple[bytes, ...]]] = field(default_factory=list)
    threads: List[Tuple[Any, Any]] = field(default_factory=list)
    marks: List[Tuple[Any, ...]] = field(default_factory=list)
    counts: Dict[str, int] = field(default_factory=dict)
    problems: Dict[str, List[Any]] = field(default_factory=dict)
    end: Optional[int] = None

    def problem(self, code: str, count: int = 1, offset: Optional[int] = None) -> None:
        known = self.problems.setdefault(code, [0, offset])
        known[0] += count


class Codes(Dict[Any, int]):
    """Values -> small integers, in order of first sight. A hit never leaves C."""

    def __missing__(self, value: Any) -> int:
        code = self[value] = len(self)
        return code

    def of(self, values: List[Any]) -> np.ndarray:
        return np.array([self[v] for v in values], dtype=np.int32)


def has_collectives(text: bytes) -> bool:
    return b'"Collective name"' in text


def decode_typed(array: Any, collectives: bool) -> Optional[Sequence[Any]]:
    """The events of a JSON array (bytes-like), or None when something in it is not as the types say.
    collectives: whether it `has_collectives`; reading their fields makes every event slower."""
    old = frozenset(name.decode() for name in _OLD_NAMES.findall(array, 0, _PROBE))
    try:
        events: Sequence[Any] = _decoder(collectives, old, False).decode(array)
        if any(e.ts >= EXACT_MICROSECONDS and e.ts % 1.0 for e in events[::64]):
            events = _decoder(collectives, old, True).decode(array)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError):
        return None
    return events


def columns(events: Sequence[Any], block: Block, collectives: bool = True) -> Block:
    """Fills the block's tables from decoded events. collectives: whether their fields were decoded. Events without a
    usable time are counted, not kept."""
    by_category: Dict[str, List[Any]] = {}
    for event in events:
        try:
            by_category[event.cat].append(event)
        except KeyError:
            by_category[event.cat] = [event]
    names, signatures, geometries, threads, messages = Codes(), Codes(), Codes(), Codes(), Codes()
    host: List[Any] = []
    kinds: List[int] = []
    runtime: List[Any] = []
    device: List[Any] = []
    device_kinds: List[int] = []
    spans: List[Any] = []
    for category, members in by_category.items():
        block.counts[category] = block.counts.get(category, 0) + len(members)
        if not (category in HOST or category in DEVICE or category in DEVICE_ANNOTATION or is_runtime(category)):
            continue
        if HOST.get(category) == MODULE:
            members = [e for e in members if e.name.startswith(MODULE_PREFIX)]
        whole = [e for e in members if e.ph == "X"]
        if len(whole) < len(members):
            block.marks += [_mark(e) for e in members if e.ph in ("B", "E")]
            members = whole
        if category in DEVICE:
            device += members
            device_kinds += [DEVICE[category]] * len(members)
        elif category in HOST:
            host += members
            kinds += [HOST[category]] * len(members)
        elif category in DEVICE_ANNOTATION:
            spans += members
        else:
            runtime += members
    arguments = [e.args or _NO_ARGUMENTS for e in host]
    block.host = _times(host, block, {
        "kind": np.array(kinds, dtype=np.int8), **_names(host, names, threads),
        "external": _int64([a.external for a in arguments]),
        "signature": signatures.of([b"" if a.dtypes is _EMPTY and a.shapes is _EMPTY
                                    else b"\0".join((a.shapes, a.dtypes, a.strides)) for a in arguments]),
        "message": _messages(arguments, messages, collectives)})
    arguments = [e.args or _NO_ARGUMENTS for e in runtime]
    block.runtime = _times(runtime, block, {
        **_names(runtime, names, threads), "correlation": _int64([a.correlation for a in arguments]),
        "geometry": geometries.of([b"" if a.grid is _EMPTY else b"\0".join((a.grid, a.block)) for a in arguments])})
    arguments = [e.args or _NO_ARGUMENTS for e in device]
    block.device = _times(device, block, {
        "kind": np.array(device_kinds, dtype=np.int8), **_names(device, names, threads),
        "external": _int64([a.external for a in arguments]), "correlation": _int64([a.correlation for a in arguments]),
        "device": _int64([a.device for a in arguments]), "stream": _int64([a.stream for a in arguments]),
        "registers": _int64([a.registers for a in arguments]), "shared": _int64([a.shared for a in arguments]),
        "bytes": _int64([a.bytes for a in arguments]),
        "geometry": geometries.of([b"" if a.grid is _EMPTY else b"\0".join((a.grid, a.block)) for a in arguments]),
        "message": _messages(arguments, messages, collectives)}, on_device=True)
    block.spans = _times(spans, block, _names(spans, names, threads))
    block.names, block.signatures, block.geometries = list(names), list(signatures), list(geometries)
    block.threads, block.messages = list(threads), list(messages)
    return block


def _int64(values: List[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _names(events: List[Any], names: Codes, threads: Codes) -> Table:
    return {"name": names.of([e.name for e in events]), "thread": threads.of([(e.pid, e.tid) for e in events])}


def _messages(arguments: List[Any], messages: Codes, collectives: bool) -> np.ndarray:
    """Codes of what collectives say about their message; the code of None for everything else."""
    codes = np.full(len(arguments), messages[None], dtype=np.int32)
    for i, argument in enumerate(arguments if collectives else ()):
        if argument.collective is not _EMPTY:
            codes[i] = messages[tuple(bytes(getattr(argument, f)) for f in COMMUNICATION)]
    return codes


def is_runtime(category: str) -> bool:
    return category in RUNTIME or category.endswith(("_runtime", "_driver"))


def nanoseconds(value: Any) -> int:
    """Nanoseconds of a time in microseconds given as bytes, text or number, without losing digits. ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError("not a time")
        whole = math.floor(value)
        return whole * 1000 + round((value - whole) * 1000)
    text = (bytes(value).decode("ascii", "replace") if not isinstance(value, str) else value).strip().strip('"')
    number = Decimal(text)
    if not number.is_finite() or number.adjusted() > 18:  # before 1e999999999 is written out as an integer
        raise ValueError("not a time")
    return int((number * 1000).to_integral_value())


def _times(events: List[Any], block: Block, table: Table, on_device: bool = False) -> Table:
    """Adds start and duration (int64 ns) and drops events without a start. A duration that is negative, absent, longer
    than a day or, on a device, 0 is unknown."""
    if not events:
        return {**table, "start": np.zeros(0, np.int64), "duration": np.zeros(0, np.int64)}
    if not isinstance(events[0].ts, float):
        usable, start = _exact_times(events)
    else:
        ts = np.array([e.ts for e in events], dtype=np.float64)
        usable = np.abs(ts) < LARGEST_MICROSECONDS
        whole = np.floor(np.where(usable, ts, 0.0))
        start = whole.astype(np.int64) * 1000 + np.rint((np.where(usable, ts, 0.0) - whole) * 1000).astype(np.int64)
    dur = np.array([e.dur for e in events], dtype=np.float64)
    good = (dur >= 0) & (dur <= LONGEST_MICROSECONDS)
    for code, wrong in (("duration-negative", dur < 0), ("duration-huge", dur > LONGEST_MICROSECONDS),
                        ("duration-absent", np.isnan(dur)), ("duration-zero", (dur == 0) & on_device)):
        if wrong.any():
            block.problem(code, int(wrong.sum()))
    if on_device:
        good &= dur > 0
    table["start"] = start
    table["duration"] = np.where(good, np.rint(np.where(good, dur, 0.0) * 1000), MISSING).astype(np.int64)
    if not usable.all():
        block.problem("time-unusable", int((~usable).sum()))
        return {k: v[usable] for k, v in table.items()}
    return table


def _exact_times(events: List[Any]) -> Tuple[np.ndarray, np.ndarray]:
    start = np.zeros(len(events), dtype=np.int64)
    usable = np.zeros(len(events), dtype=bool)
    for i, event in enumerate(events):
        try:
            value = nanoseconds(event.ts)
        except (ValueError, ArithmeticError):
            continue
        if abs(value) < LARGEST_MICROSECONDS * 1000:
            start[i], usable[i] = value, True
    return usable, start


def _mark(event: Any) -> Tuple[Any, ...]:
    try:
        time: Optional[int] = nanoseconds(event.ts)
    except (ValueError, ArithmeticError):
        time = None
    given = event.args or _NO_ARGUMENTS
    arguments = {f: v if isinstance(v, int) else bytes(v) for f in given.__struct_fields__ if (v := getattr(given, f))}
    return event.ph, event.cat, event.name, event.pid, event.tid, time, arguments
