"""The general path: blocks of events that are damaged, or written in types that the fast path does not expect.

Three steps, each only when the one before it failed: known bad tokens and bytes are replaced and the block is decoded
again; every event is decoded by itself; an event that still fails has its quotes mended, or is skipped and counted.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .decode import Arguments, Block, ExactEvent, columns, decode_typed
from .layout import ARGUMENTS, COMMUNICATION, INTEGERS, MISSING

# End of one event and start of the next. What it finds inside an event does not decode, so a wrong guess is noticed.
BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|args|dur)"\s*:)')
_NEXT = re.compile(r'\}\s*,?\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|args|id|dur)"\s*:)')
_BARE = rb"[-+]?nan(?:\([^)]*\))?|[-+]?inf(?:inity)?|N/A|undefined|None"
_BARE_VALUE = re.compile(rb'(?<=[^\\]")(\s*:\s*)(?:' + _BARE + rb")(?=\s*[,}])", re.IGNORECASE)
_BARE_ITEM = re.compile(r"(?<=[:,\[])(\s*)(?:" + _BARE.decode() + r")(?=\s*[,}\]])", re.IGNORECASE)
_TRAILING_COMMA = re.compile(r",(?=\s*[}\]])")
# The same with its key and one comma: without them the rest has the types that the fast path expects.
_BARE_MEMBER = re.compile(rb'"[^"\\]*"\s*:\s*(?:' + _BARE + rb')\s*,|,\s*"[^"\\]*"\s*:\s*(?:' + _BARE + rb")(?=\s*\})",
                          re.IGNORECASE)
# What may stand behind the quote that ends a string.
_BEHIND_STRING = re.compile(r'\s*(?::\s*["\[{\dntf\-]|[}\]]\s*(?:[,}\]]|$)|,\s*(?:"[^"]*"\s*:|["\[{\dntf\-]))')
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_LARGEST_EVENT = 4 << 20  # bytes; a longer piece between two boundaries is not mended
_FIELD_OF = {name: field for field, names in {**ARGUMENTS, **COMMUNICATION}.items() for name in names}
_INT64 = 2**63 - 1


class Task(NamedTuple):
    """A piece of a trace. array: bytes-like "[" + events + "]". offset: of the first event in the (decompressed) file.
    final: it ends with the array's end and what follows it, instead of an event."""

    array: Any
    offset: int
    final: bool


def decode_block(task: Task) -> Block:
    if not task.final:
        block = _typed(task.array)
        if block is not None:
            return block
        mended, counts = _replace_tokens(bytes(task.array))
        block = _typed(mended) if counts else None
        if block is not None:
            for code, (count, at) in counts.items():
                block.problem(code, count, task.offset + at - 1)
            return block
    return _one_by_one(bytes(task.array)[1:-1], task.offset, task.final, Block())


def _typed(array: Any) -> Optional[Block]:
    events = decode_typed(array)
    try:
        return None if events is None else columns(events, Block())
    except OverflowError:  # an integer beyond 64 bits
        return None


def _replace_tokens(text: bytes) -> Tuple[bytes, Dict[str, Tuple[int, int]]]:
    counts: Dict[str, Tuple[int, int]] = {}
    first = _CONTROL.search(text)
    if first:
        text, count = _CONTROL.subn(b"?", text)
        counts["control-character"] = (count, first.start())
    first = _BARE_VALUE.search(text)
    if first:
        text, count = _BARE_MEMBER.subn(b"", text)
        counts["bare-value"] = (count, first.start())
    return text, counts


class _Events:
    """Walks the events of a text in latin-1, whose characters are the file's bytes, so positions are byte offsets."""

    def __init__(self, block: Block, offset: int) -> None:
        self.block, self.offset = block, offset
        self.position = 0
        self.decoder = json.JSONDecoder(strict=False, parse_constant=self._constant, parse_float=str)

    def _constant(self, _: str) -> None:
        self.block.problem("bare-value", 1, self.offset + self.position)

    def decode(self, text: str, position: int, piece_of: int = 0) -> Tuple[Any, int]:
        """The value at `position`. piece_of: where the text begins, when it is a piece of the whole."""
        self.position = piece_of + position
        return self.decoder.raw_decode(text, position)


def _one_by_one(data: bytes, offset: int, final: bool, block: Block) -> Block:
    data = data.rstrip(b"\0") if final else data  # a disk that filled up leaves zeros
    first = _CONTROL.search(data)
    if first:
        data, count = _CONTROL.subn(b"?", data)
        block.problem("control-character", count, offset + first.start())
    text = data.decode("latin-1")
    walk = _Events(block, offset)
    events: List[Any] = []
    position, length = _skip(text, 0), len(text)
    while position < length:
        if text[position] == "]":
            block.end = offset + position + 1
            break
        try:
            value, end = walk.decode(text, position)
        except (ValueError, RecursionError):
            value, end = _mend(text, position, walk, final)
        if isinstance(value, dict):
            events.append(_event(value, block, offset + position))
        elif value is not None:
            block.problem("not-an-event", 1, offset + position)
        position = _skip(text, end)
        if position < length and text[position] == ",":
            position = _skip(text, position + 1)
            if position < length and text[position] in ",]":
                block.problem("trailing-comma", 1, offset + position)
                while position < length and text[position] == ",":
                    position = _skip(text, position + 1)
        elif position < length and text[position] == "{":
            block.problem("comma-absent", 1, offset + position)
        elif position < length and text[position] != "]":
            following = _NEXT.search(text, position)
            block.problem("skipped", 1, offset + position)
            position = following.end() if following else length
    if final and block.end is None:
        block.problem("truncated", 1, offset + length)
    return columns(events, block)


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _mend(text: str, position: int, walk: _Events, final: bool) -> Tuple[Optional[Dict[str, Any]], int]:
    """The damaged event at `position`, and where the next one starts. None when it cannot be mended."""
    at = walk.offset + position
    following = _NEXT.search(text, position)
    end = following.start() + 1 if following else len(text)
    if not following:
        close = re.search(r"\}\s*(?=\]\s*[,}]|\]\s*$)", text[position:])
        if close:
            end = position + close.start() + 1
        elif final:
            return None, len(text)  # the caller reports the cut
    piece = text[position:end]
    if len(piece) <= _LARGEST_EVENT:
        repaired, bare = _BARE_ITEM.subn(r"\1null", piece)
        repaired, commas = _TRAILING_COMMA.subn("", repaired)
        for candidate, quotes in ((repaired, 0), _escape_inner_quotes(repaired)):
            try:
                value, used = walk.decode(candidate, 0, position)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and not candidate[used:].strip(" \t\r\n,"):
                for code, count in (("bare-value", bare), ("trailing-comma", commas), ("inner-quote", quotes)):
                    if count:
                        walk.block.problem(code, count, at)
                return value, end
    walk.block.problem("skipped", 1, at)
    return None, end


def _escape_inner_quotes(piece: str) -> Tuple[str, int]:
    """Escapes quotes inside strings. A quote ends a string only before `:`, `}`, `]`, or before a comma that a new key
    or value follows."""
    out: List[str] = []
    inside, count, last = False, 0, 0
    for found in re.finditer(r'\\.|"', piece, re.DOTALL):
        if found.group() != '"':
            continue
        at = found.start()
        if not inside:
            inside = True
        elif _BEHIND_STRING.match(piece, at + 1):
            inside = False
        else:
            out += [piece[last:at], '\\"']
            last, count = at + 1, count + 1
    return "".join(out) + piece[last:], count


def _event(value: Dict[str, Any], block: Block, at: int) -> Any:
    """An Event from a decoded object of any types. Fields that make no sense are unknown, and counted."""
    arguments = value.get("args")
    fields: Dict[str, Any] = {}
    for key, item in (arguments.items() if isinstance(arguments, dict) else ()):
        name = _FIELD_OF.get(key)
        if name is None or item is None:
            continue
        if name in INTEGERS:
            number = _integer(item)
            if number is None:
                block.problem("value-unusable", 1, at)
            fields[name] = MISSING if number is None else number
        else:
            fields[name] = json.dumps(item).encode()
    time = value.get("ts")
    if isinstance(time, (dict, list, bool)) or time is None:
        time = "NaN"
    return ExactEvent(ph=_text(value.get("ph")), cat=_text(value.get("cat")), name=_text(value.get("name")),
                      pid=_place(value.get("pid")), tid=_place(value.get("tid")), ts=str(time).encode(),
                      dur=_number(value.get("dur")), args=Arguments(**fields) if fields else None)


def _integer(value: Any) -> Optional[int]:
    if isinstance(value, str):
        try:
            value = float(value) if not value.strip().lstrip("+-").isdigit() else int(value)
        except ValueError:
            return None
    if isinstance(value, float) and math.isfinite(value):
        value = int(value)
    return value if isinstance(value, int) and abs(value) <= _INT64 else None


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _text(value: Any) -> str:
    return value.encode("latin-1", "replace").decode("utf-8", "replace") if isinstance(value, str) else str(value or "")


def _place(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and value.isdigit() and len(value) < 19 else _text(value)
