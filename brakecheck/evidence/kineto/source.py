"""Bytes of a trace: plain, gzip or Zstandard; its head, its blocks of events, its tail."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from brakecheck.model import BrakecheckError, UnavailableError

from .layout import BLOCK, is_packed
from .repair import BOUNDARY, Task

_CHUNK = 1 << 15    # compressed bytes inflated at a time: to about half a block
_HEAD = 64 << 20    # the metadata before the events may not be longer
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_SPACE = " \t\r\n"


class Stream:
    """Sequential reading of a file, decompressed by its content. `cut` tells why it ended early, if it did."""

    def __init__(self, path: Path) -> None:
        try:
            self.size = path.stat().st_size
            self.file = path.open("rb", buffering=0)
            magic = self.file.read(4)
            self.file.seek(0)
        except OSError as error:
            raise BrakecheckError(f"cannot read the trace: {error.strerror}", str(path), "check the path") from error
        self.path, self.compressed_read, self.cut = path, 0, ""
        self.pieces = self._inflated(magic) if is_packed(magic) else None
        self.rest = memoryview(b"")  # of the latest piece

    def close(self) -> None:
        self.file.close()

    def fill(self, size: int, begun: bytes = b"") -> bytes:
        """What was begun and `size` bytes more, fewer at the end."""
        text = bytearray(len(begun) + size)
        text[:len(begun)] = begun
        with memoryview(text) as view:
            count = self.fill_into(view[len(begun):])
        return bytes(text[:len(begun) + count])

    def fill_into(self, target: memoryview) -> int:
        """Bytes read: as many as the target has, fewer at the end."""
        at = 0
        while at < len(target) and (count := self._read_into(target[at:])):
            at += count
        return at

    def _read_into(self, target: memoryview) -> int:
        """Bytes read, 0 at the end."""
        if self.pieces is None:
            count = self.file.readinto(target)
            self.compressed_read += count
            return count
        piece = self.rest or memoryview(next(self.pieces, b""))
        count = min(len(piece), len(target))
        target[:count] = piece[:count]
        self.rest = piece[count:]
        return count

    def _inflated(self, magic: bytes) -> Iterator[bytes]:
        inflate = _gzip() if magic[:2] == b"\x1f\x8b" else _zstandard(self.path)
        inflater = inflate()
        while True:
            chunk = self.file.read(_CHUNK)
            self.compressed_read += len(chunk)
            if not chunk:
                if not inflater.eof:
                    self.cut = f"compressed data ends early at byte {self.compressed_read}"
                return
            while chunk:
                if inflater.eof:  # another member follows, or padding
                    if not chunk.strip(b"\0"):
                        break
                    inflater = inflate()
                try:
                    piece = inflater.decompress(chunk)
                except Exception as error:  # each library has an error type of its own
                    start = self.compressed_read - len(chunk)
                    self.cut = f"compressed data is damaged between bytes {start} and {self.compressed_read}: {error}"
                    return
                if piece:
                    yield piece
                chunk = inflater.unused_data if inflater.eof else b""


def _gzip() -> Any:
    try:
        from isal import isal_zlib  # three times as fast as zlib
        return lambda: isal_zlib.decompressobj(31)
    except ImportError:
        return lambda: zlib.decompressobj(31)


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise UnavailableError("this trace is compressed with Zstandard, and the package zstandard is not installed",
                               str(path), "pip install zstandard, or decompress the file first") from None
    return lambda: zstandard.ZstdDecompressor().decompressobj()


class Trace:
    """One trace file. Iterate `blocks`; `metadata` and `problems` are complete once they are exhausted.

    problems: (code, byte offset, text).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stream = Stream(path)
        self.metadata: Dict[str, Any] = {}
        self.problems: List[Tuple[str, int, str]] = []
        self.has_events = False
        self.last = (0, b"")

    def fraction(self) -> float:
        """Share of the file that has been read."""
        return self.stream.compressed_read / max(self.stream.size, 1)

    def blocks(self) -> Iterator[Task]:
        """The events in pieces that end between two events; a piece is there until the next one is asked for. The final
        one holds the last event and all that follows it; call `finish` with what its decoding found."""
        head, start = self._head()
        if not self.has_events:
            return
        # One buffer for all, for fresh memory costs more than reading. It holds "[", what is left, and what is read.
        offset, used = start, 1 + len(head) - start
        text = bytearray(2 * BLOCK)
        text[:used] = b"[" + head[start:]
        while True:
            wanted = max(BLOCK - used, BLOCK // 4)
            if used + wanted > len(text):  # not resized: a piece of it may be looked at still
                text = text + bytearray(len(text))
            count = self.stream.fill_into(memoryview(text)[used:used + wanted])
            used += count
            cut = _last_boundary(text, used)
            if cut is not None:
                text[cut[0]] = ord("]")  # instead of the comma or space behind the last event
                yield Task(memoryview(text)[:cut[0] + 1], offset, False)
                offset += cut[1] - 1
                rest = text[cut[1]:used]
                used = 1 + len(rest)
                text[1:used] = rest
            elif used > _HEAD:
                raise BrakecheckError(f"no event ends within {_HEAD >> 20} MiB", f"{self.path}, byte {offset}",
                                      "this is not a trace of the PyTorch profiler, or it is damaged here")
            if not count:
                break
        self.last = (offset, bytes(text[1:used]))
        yield Task(b"[%b]" % self.last[1], offset, True)

    def finish(self, end: Optional[int]) -> None:
        """Reads the metadata behind the events. end: byte offset behind the events' closing bracket, where known."""
        offset, text = self.last
        if self.stream.cut:
            self.problems.append(("truncated", offset + len(text), self.stream.cut))
        self.stream.close()
        if end is None:
            return
        text = text[end - offset:] if end >= offset else _from(self.path, end)
        tail = text.decode("latin-1")
        self._members(tail, _past(tail, 0, _SPACE), end)

    def _head(self) -> Tuple[bytes, int]:
        """What was read, and where in it the first event is."""
        head = self.stream.fill(BLOCK)
        base = 0
        if head.startswith(codecs.BOM_UTF8):
            base = len(codecs.BOM_UTF8)
            self.problems.append(("byte-order-mark", 0, "a byte order mark stands before the JSON"))
        first = head[base:base + 4096].lstrip()[:1]
        if first == b"[":
            self.has_events = True
            return head, head.index(b"[") + 1
        if first != b"{":
            shown = head[base:base + 20]
            raise BrakecheckError(f"not a JSON trace: it begins with {shown!r}" if shown else "the trace is empty",
                                  f"{self.path}, byte {base}", "give a Chrome trace as torch.profiler exports it")
        while True:
            text = head.decode("latin-1")
            end, done = self._members(text, text.index("{") + 1, 0)
            if self.has_events or done:
                return head, end
            longer = self.stream.fill(len(head), head)
            if len(longer) == len(head) or len(head) > _HEAD:
                break
            head = longer
        found = _EVENTS.search(head)
        if found is None:
            self.problems.append(("truncated", end, "the file ends, or is damaged, before any event"))
            return head, len(head)
        self.problems.append(("head-unreadable", end, "the metadata before the events is damaged and was skipped"))
        self.has_events = True
        return head, found.end()

    def _members(self, text: str, position: int, offset: int) -> Tuple[int, bool]:
        """Reads `"key": value` pairs of the outermost object into the metadata, up to the events or the closing brace.
        (position, whether it ended there); the position of the first thing that does not parse otherwise."""
        decoder = json.JSONDecoder(strict=False)
        while True:
            position = _past(text, position, _SPACE + ",")
            if text[position:position + 1] == "}":
                return position + 1, True
            try:
                key, value_at = decoder.raw_decode(text, position)
                value_at = _past(text, value_at, _SPACE + ":")
                if key == "traceEvents" and text[value_at:value_at + 1] == "[":
                    self.has_events = True
                    return value_at + 1, False
                value, end = decoder.raw_decode(text, value_at)
                if end >= len(text):  # a number may go on in what was not read yet
                    return position, False
            except (ValueError, RecursionError):
                if offset:
                    code = "truncated" if position >= len(text) else "tail-unreadable"
                    self.problems.append((code, offset + position, "the metadata behind the events is incomplete"))
                return position, False
            if isinstance(key, str):
                self.metadata[_utf8(key)] = _utf8(value)
            position = end


def _last_boundary(text: bytearray, length: int) -> Optional[Tuple[int, int]]:
    """(end of an event, start of the next) for the last two events that lie in the first bytes of the text."""
    window = 1 << 14
    while True:
        found = list(BOUNDARY.finditer(text, max(0, length - window), length))
        if found:
            return found[-1].start() + 1, found[-1].end()
        if window >= length:
            return None
        window *= 8


def _from(path: Path, offset: int) -> bytes:
    """The bytes of a trace from `offset` on, at most what a head may have."""
    stream = Stream(path)
    try:
        while offset > 0:
            skipped = stream.fill(min(offset, BLOCK))
            if not skipped:
                return skipped
            offset -= len(skipped)
        return stream.fill(_HEAD)
    finally:
        stream.close()


def _past(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("latin-1", "replace").decode("utf-8", "replace")
    if isinstance(value, list):
        return [_utf8(v) for v in value]
    if isinstance(value, dict):
        return {_utf8(k): _utf8(v) for k, v in value.items()}
    return value
