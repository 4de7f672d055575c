"""Source lines of machine code: the .debug_line section that -lineinfo leaves in a cubin (DWARF 2 to 4 line programs).

The addresses in a cubin's line table are zero until relocated; each set_address operand has a relocation that names
the code section it belongs to. Lines are a convenience of the report: a table that cannot be read gives no lines.
"""

from __future__ import annotations

import struct
from typing import Dict, List, Tuple

from ..model import BrakecheckError
from .cubin import Cubin


def source_lines(cubin: Cubin) -> Dict[int, Dict[int, str]]:
    """Section number -> address -> "k.cu:12", the line from that address on. Empty without -lineinfo."""
    section = cubin.by_name.get(".debug_line")
    if section is None:
        return {}
    try:
        owners = {r.offset: r.symbol.section for r in cubin.relocations(section)}
        return _programs(cubin.content(section), owners)
    except (BrakecheckError, struct.error, IndexError, ValueError):
        return {}


def _programs(data: bytes, owners: Dict[int, int]) -> Dict[int, Dict[int, str]]:
    out: Dict[int, Dict[int, str]] = {}
    at = 0
    while at + 10 <= len(data):
        length, version, header = struct.unpack_from("<IHI", data, at)
        end = at + 4 + length
        if not 2 <= version <= 4 or end > len(data):
            break
        _program(data, at + 10, at + 10 + header, end, version, owners, out)
        at = end
    return out


def _leb(data: bytes, at: int, signed: bool = False) -> Tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 63:
            raise ValueError("LEB128 number too long")
    if signed and byte & 0x40:
        value -= 1 << shift
    return value, at


def _files(data: bytes, at: int) -> List[str]:
    """Base names of the files of a header; the directory table before them is skipped."""
    while data[at]:
        at = data.index(b"\0", at) + 1
    at += 1
    names = [""]  # files count from 1
    while data[at]:
        stop = data.index(b"\0", at)
        names.append(data[at:stop].decode("utf-8", "replace").replace("\\", "/").rsplit("/", 1)[-1])
        at = stop + 1
        for _ in range(3):
            _, at = _leb(data, at)
    return names


def _program(data: bytes, at: int, start: int, end: int, version: int, owners: Dict[int, int],
             out: Dict[int, Dict[int, str]]) -> None:
    step = data[at]
    at += 2 if version >= 4 else 1
    base, span, special = struct.unpack_from("<bBB", data, at + 1)
    arguments = data[at + 4:at + 3 + special]
    files = _files(data, at + 3 + special)
    address, file, line, owner = 0, 1, 1, -1
    at = start
    while at < end:
        code = data[at]
        at += 1
        emit = False
        if code >= special:
            address += (code - special) // span * step
            line += base + (code - special) % span
            emit = True
        elif code == 0:
            size, at = _leb(data, at)
            if data[at] == 1:
                address, file, line, owner = 0, 1, 1, -1
            elif data[at] == 2:
                owner = owners.get(at + 1, -1)
                address = struct.unpack_from("<Q", data, at + 1)[0]
            at += size
        elif code == 1:
            emit = True
        elif code == 2:
            value, at = _leb(data, at)
            address += value * step
        elif code == 3:
            value, at = _leb(data, at, signed=True)
            line += value
        elif code == 4:
            file, at = _leb(data, at)
        elif code == 8:
            address += (255 - special) // span * step
        elif code == 9:
            address += struct.unpack_from("<H", data, at)[0]
            at += 2
        else:
            for _ in range(arguments[code - 1]):
                _, at = _leb(data, at)
        if emit and owner >= 0:
            out.setdefault(owner, {})[address] = f"{files[file] if file < len(files) else ''}:{line}"
