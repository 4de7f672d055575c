"""One block of events -> columns. Runs in worker processes, so it imports little: msgspec, no numpy.

Decoding is typed: msgspec builds only the fields below and skips the rest of an event, and nested values (shapes,
grids) stay raw bytes that are dictionary-encoded unseen. What does not fit the types is left to `repair`. The JSON
readers of DuckDB 2.0 and Polars 2.1 took 1.3 and 1.8 times as long a core, for fewer fields (2026-12-01).
"""

from __future__ import annotations

import functools
import math
import re
from array import array
from decimal import Decimal
from operator import attrgetter
from typing import Any, Dict, FrozenSet, Iterable, List, Optional, Sequence, Tuple, Union

import msgspec

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
    OTHER_PHASES,
    RUNTIME,
)

Raw = msgspec.Raw
_EMPTY = Raw(b"")
_PLACES, _PROBE = 16, 1024  # where in a block old spellings are looked for: so many places, so many bytes each
# Above this many microseconds a float64 no longer holds the third decimal: 2**43 us, unit in the last place 2**-9 us.
EXACT_MICROSECONDS = 2.0**43
LARGEST_MICROSECONDS = 9.2e15  # int64 nanoseconds end here
Table = Dict[str, array]
_SIGNATURE, _GEOMETRY = attrgetter("shapes", "dtypes", "strides"), attrgetter("grid", "block")


class _Told:
    """Stands for a field whose value is not wanted: that it is there at all goes through `_tell`."""


def _tell(kind: Any, value: Any) -> Any:
    _Collectives.met = True
    return kind()


def _arguments_type(fields: Dict[str, Tuple[str, ...]], old: FrozenSet[str] = frozenset(),
                    told: Optional[str] = None) -> Any:
    """old: those of the former names of fields that the trace uses. told: a field that need only be noticed."""
    members = [(f, *((int, MISSING) if f in INTEGERS else (_Told if f == told else Raw, _EMPTY))) for f in fields]
    names = {f: next((n for n in known if n in old), known[0]) for f, known in fields.items()}
    return msgspec.defstruct("Arguments", members, gc=False, rename=names.get)


def _fields(arguments: Any, exact: bool) -> List[Any]:
    """exact keeps the digits of the time, for fractions beside an absolute epoch (traces of early 2024)."""
    place = Union[int, str]
    time = (Raw, Raw(b"NaN")) if exact else (float, math.nan)
    return [("cat", str, ""), ("name", str, ""), ("pid", place, 0), ("tid", place, 0), ("ts", *time),
            ("dur", float, math.nan), ("args", Optional[arguments], None)]


def _event_type(arguments: Any, exact: bool = False) -> Any:
    return msgspec.defstruct("Event", [("ph", str, ""), *_fields(arguments, exact)], gc=False)


def _event_types(arguments: Any, exact: bool) -> Any:
    """The same, told apart by phase: of events that are neither whole, begin nor end only the category is decoded."""
    types = [msgspec.defstruct("Event", _fields(arguments, exact), gc=False, tag_field="ph", tag=phase,
                               namespace={"ph": phase}) for phase in "XBE"]
    nothing = {"name": "", "ts": 0.0, "args": None}
    types += [msgspec.defstruct("Event", [("cat", str, "")], gc=False, tag_field="ph", tag=phase,
                                namespace={"ph": phase, **nothing}) for phase in OTHER_PHASES]
    return Union[tuple(types)]


_ALL_ARGUMENTS = {**ARGUMENTS, **COMMUNICATION}
_OLD_NAMES = re.compile('"({})"'.format("|".join(n for names in _ALL_ARGUMENTS.values() for n in names[1:])).encode())
# What `repair` builds events with: every field.
Arguments = _arguments_type(_ALL_ARGUMENTS)
Event = _event_type(Arguments)
ExactEvent = _event_type(Arguments, exact=True)
_NO_ARGUMENTS = Arguments()
_TELLTALE = next(iter(COMMUNICATION))  # the field that every collective has


@functools.cache
def _decoder(collectives: bool, old: FrozenSet[str], exact: bool, phases: bool) -> Any:
    """collectives: with the fields of collectives, which make every event slower; else only one that tells of them.
    phases: see `_event_types`."""
    fields = _ALL_ARGUMENTS if collectives else {**ARGUMENTS, _TELLTALE: COMMUNICATION[_TELLTALE]}
    arguments = _arguments_type(fields, old, None if collectives else _TELLTALE)
    event = (_event_types if phases else _event_type)(arguments, exact)
    return msgspec.json.Decoder(List[event], dec_hook=_tell)  # type: ignore[valid-type]


class Block(msgspec.Struct):
    """What one block of a trace holds. Tables are dicts of equally long arrays; names, signatures (shapes, dtypes and
    strides as written), geometries (grid and block as written), messages and threads (pid, tid) are local
    dictionaries that the codes in the tables point into. A table's start is in microseconds (float) or, of exact
    decoding, nanoseconds (int64, MISSING when unusable); its duration in microseconds (NaN when absent).

    marks: begin and end events in file order, still to be paired. counts: events by category.
    problems: code -> [count, first byte offset or None].
    end: byte offset where the array of events was found to end, if it was.
    """

    host: Table = {}
    runtime: Table = {}
    device: Table = {}
    spans: Table = {}
    names: List[str] = []
    signatures: List[bytes] = []
    geometries: List[bytes] = []
    messages: List[Optional[Tuple[bytes, ...]]] = []
    threads: List[Tuple[Any, Any]] = []
    marks: List[Tuple[Any, ...]] = []
    counts: Dict[str, int] = {}
    problems: Dict[str, List[Any]] = {}
    end: Optional[int] = None

    def problem(self, code: str, count: int = 1, offset: Optional[int] = None) -> None:
        known = self.problems.setdefault(code, [0, offset])
        known[0] += count


class Codes(Dict[Any, int]):
    """Values -> small integers, in order of first sight. A hit never leaves C."""

    def __missing__(self, value: Any) -> int:
        code = self[value] = len(self)
        return code

    def of(self, values: Iterable[Any]) -> array:
        return array("i", map(self.__getitem__, values))


def decode_typed(text: Any) -> Optional[Sequence[Any]]:
    """The events of a JSON array (bytes-like), or None when something in it is not as the types say."""
    places = range(0, len(text), max(len(text) // _PLACES, _PROBE))
    old = frozenset(name.decode() for at in places for name in _OLD_NAMES.findall(text, at, at + _PROBE + 32))
    try:
        try:
            return _decode(text, old, True)
        except msgspec.ValidationError:  # an event has no phase, or one that is not known
            return _decode(text, old, False)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError):
        return None


def _decode(text: Any, old: FrozenSet[str], phases: bool) -> Sequence[Any]:
    collectives = _Collectives.seen
    _Collectives.met = False
    events: Sequence[Any] = _decoder(collectives, old, False, phases).decode(text)
    found = _Collectives.met  # a look at every event would cost a tenth of the decoding
    if collectives:
        found = bool([True for e in events if e.args is not None and e.args.collective is not _EMPTY])
    exact = any(e.ts >= EXACT_MICROSECONDS and e.ts % 1.0 for e in events[::64])
    if exact or found > collectives:
        events = _decoder(found, old, exact, phases).decode(text)
    _Collectives.seen = found
    return events


class _Collectives:
    """seen: whether the latest block had collectives; the next one is decoded with their fields at once. met: whether
    the field that tells of them was there in what is being decoded."""

    seen = False
    met = False


def columns(events: Sequence[Any], block: Block) -> Block:
    """Fills the block's tables from decoded events."""
    by_category: Dict[str, List[Any]] = {}
    for event in events:
        try:
            by_category[event.cat].append(event)
        except KeyError:
            by_category[event.cat] = [event]
    host, kinds, runtime, device, device_kinds, spans = [], array("b"), [], [], array("b"), []  # type: ignore[var-annotated]
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
            device_kinds += array("b", [DEVICE[category]]) * len(members)
        elif category in HOST:
            host += members
            kinds += array("b", [HOST[category]]) * len(members)
        elif category in DEVICE_ANNOTATION:
            spans += members
        else:
            runtime += members
    names, signatures, geometries, threads, messages = Codes(), Codes(), Codes(), Codes(), Codes()
    arguments = [e.args or _NO_ARGUMENTS for e in host]
    block.host = {
        "kind": kinds, **_common(host, names, threads), "external": array("q", [a.external for a in arguments]),
        "signature": signatures.of(map(b"\0".join, map(_SIGNATURE, arguments))),
        "message": _messages(arguments, messages)}
    arguments = [e.args or _NO_ARGUMENTS for e in runtime]
    block.runtime = {
        **_common(runtime, names, threads), "correlation": array("q", [a.correlation for a in arguments]),
        "geometry": _geometry(arguments, geometries)}
    arguments = [e.args or _NO_ARGUMENTS for e in device]
    block.device = {
        "kind": device_kinds, **_common(device, names, threads),
        "external": array("q", [a.external for a in arguments]),
        "correlation": array("q", [a.correlation for a in arguments]),
        "device": array("q", [a.device for a in arguments]), "stream": array("q", [a.stream for a in arguments]),
        "registers": array("q", [a.registers for a in arguments]), "shared": array("q", [a.shared for a in arguments]),
        "bytes": array("q", [a.bytes for a in arguments]),
        "geometry": _geometry(arguments, geometries), "message": _messages(arguments, messages)}
    block.spans = _common(spans, names, threads)
    block.names, block.threads, block.messages = list(names), list(threads), list(messages)
    block.signatures = [b"" if s.startswith(b"\0\0") else s for s in signatures]  # neither shapes nor dtypes
    block.geometries = [b"" if g.startswith(b"\0") else g for g in geometries]
    return block


def _common(events: List[Any], names: Codes, threads: Codes) -> Table:
    exact = bool(events) and not isinstance(events[0].ts, float)
    pids, tids = [e.pid for e in events], [e.tid for e in events]
    if events and pids.count(pids[0]) == tids.count(tids[0]) == len(events):  # of one thread, as most blocks are
        thread = array("i", [threads[pids[0], tids[0]]]) * len(events)
    else:
        thread = threads.of(zip(pids, tids))
    return {"name": names.of([e.name for e in events]), "thread": thread,
            "start": array("q", map(_exact, events)) if exact else array("d", [e.ts for e in events]),
            "duration": array("d", [e.dur for e in events])}


def _geometry(arguments: List[Any], geometries: Codes) -> array:
    return geometries.of(map(b"\0".join, map(_GEOMETRY, arguments)))


def _messages(arguments: List[Any], messages: Codes) -> array:
    """Codes of what collectives say about their message; the code of None for everything else."""
    codes = array("i", [messages[None]]) * len(arguments)
    for i, argument in enumerate(arguments):
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


def _exact(event: Any) -> int:
    """Nanoseconds, MISSING when the time is none."""
    try:
        value = nanoseconds(event.ts)
    except (ValueError, ArithmeticError):
        return MISSING
    return value if abs(value) < LARGEST_MICROSECONDS * 1000 else MISSING


def _mark(event: Any) -> Tuple[Any, ...]:
    try:
        time: Optional[int] = nanoseconds(event.ts)
    except (ValueError, ArithmeticError):
        time = None
    given = event.args or _NO_ARGUMENTS
    arguments = {f: v if isinstance(v, int) else bytes(v) for f in given.__struct_fields__ if (v := getattr(given, f))}
    return event.ph, event.cat, event.name, event.pid, event.tid, time, arguments
