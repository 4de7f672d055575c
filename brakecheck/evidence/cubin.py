"""Reads a cubin (the ELF file ptxas writes) without a GPU and without a toolkit.

Two layouts exist. EI_ABIVERSION 7 (EI_OSABI 0x33: ptxas 12.x for sm_90 and older) has the SM number in the low byte of
e_flags, a feature bit for sm_90a, and the barrier count in the section flags of the code. EI_ABIVERSION 8 (EI_OSABI
0x41: sm_100 and newer from 12.8 on, everything from 13.0 on) has the SM number in the second byte, says sm_90a in the
tool note only, and has the barrier count as an attribute. Both keep one .text.K, .nv.info.K, .nv.shared.K and
.nv.constant0.K section a kernel K. Attribute numbers below are EIATTR_* of nvdisasm; each was found by compiling a
kernel with and without the property, and the figures are checked against ptxas -v in tests/test_cubin.py.

Plain struct instead of an ELF library: every offset is checked here, so a damaged file is an error with its byte
offset and never an exception from inside a parser.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

from ..model import BrakecheckError

ELF_MAGIC = b"\x7fELF"
EM_CUDA = 190
NAME_LIMIT = 1 << 16  # longest name that is believed; mangled names of several thousand characters are real
SHARED_RESERVED = 1024  # from sm_90 on .nv.shared.K starts with what the system reserves of each block

# EIATTR numbers. Format 1: no value, 2: byte, 3: 16 bits, 4: length and bytes.
MAX_THREADS, PARAM_CBANK, REQNTID, FRAME_SIZE, MIN_STACK = 0x05, 0x0A, 0x10, 0x11, 0x12
REGCOUNT, API_VERSION, CLUSTER, NUM_BARRIERS = 0x2F, 0x37, 0x3D, 0x4C

SHT_SYMTAB, SHT_RELA, SHT_NOBITS, SHT_REL = 2, 4, 8, 9
STT_OBJECT, STT_FUNC = 1, 2
STO_CUDA_ENTRY = 0x10


class Section(NamedTuple):
    number: int
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int


class Symbol(NamedTuple):
    name: str
    type: int
    other: int
    section: int
    value: int
    size: int


class Relocation(NamedTuple):
    offset: int
    type: int
    symbol: Symbol
    addend: int


@dataclass(frozen=True)
class CubinKernel:
    """One kernel. Bytes; stack: of the deepest call path, per thread (frame: of the kernel alone); shared: static, per
    block; constant: of its own constant banks; code: its machine code, called functions of its section included.
    parameters: (offset in constant bank 0, size). cluster: blocks a cluster, where fixed at compile time.
    """

    name: str
    section: Section
    registers: int
    frame: Optional[int]
    stack: Optional[int]
    shared: int
    barriers: int
    constant: int
    code: bytes = field(repr=False)
    max_threads: Optional[int] = None
    cluster: Optional[Tuple[int, int, int]] = None
    parameters: Optional[Tuple[int, int]] = None


@dataclass
class Cubin:
    """A parsed cubin. arch: sm_90a and the like (the a or f only where the file says so). abi: EI_ABIVERSION.
    toolkit: CUDA release of the ptxas that wrote it, (12, 4), where it is recorded."""

    where: str
    data: bytes = field(repr=False)
    abi: int
    arch: str
    relocatable: bool
    sections: List[Section] = field(repr=False)
    symbols: List[Symbol] = field(repr=False)
    toolkit: Optional[Tuple[int, int]] = None
    kernels: Tuple[CubinKernel, ...] = ()

    def content(self, section: Section) -> bytes:
        """Bytes of a section; empty for one that occupies no space in the file."""
        return b"" if section.type == SHT_NOBITS else self.data[section.offset:section.offset + section.size]

    @cached_property
    def by_name(self) -> Dict[str, Section]:
        return {s.name: s for s in self.sections}

    @cached_property
    def _relocations(self) -> Dict[int, List[Relocation]]:
        out: Dict[int, List[Relocation]] = {}
        for section in self.sections:
            if section.type in (SHT_RELA, SHT_REL):
                out.setdefault(section.info, []).extend(_relocations(self, section))
        return {k: sorted(v, key=lambda r: r.offset) for k, v in out.items()}

    def relocations(self, section: Section) -> List[Relocation]:
        """What the loader fills into this section, by offset."""
        found = self._relocations.get(section.number)
        if found is None:  # ABI 7 keeps other things in sh_info; the name tells as well
            named = [s for s in self.sections if s.name in (f".rela{section.name}", f".rel{section.name}")]
            found = [r for s in named for r in _relocations(self, s)]
        return found

    @cached_property
    def _objects(self) -> Dict[int, List[Symbol]]:
        out: Dict[int, List[Symbol]] = {}
        for symbol in self.symbols:
            if symbol.type in (STT_OBJECT, STT_FUNC):
                out.setdefault(symbol.section, []).append(symbol)
        return out

    def symbols_of(self, section: Section) -> List[Symbol]:
        """Objects and functions that lie in this section."""
        return self._objects.get(section.number, [])


def read_cubin(source: Union[str, Path, bytes], where: Optional[str] = None) -> Cubin:
    """Reads a cubin from a path or from bytes.

    Raises BrakecheckError with the byte offset for a truncated or damaged file, and for a file of another kind.
    """
    if isinstance(source, bytes):
        data, name = source, where or "cubin"
    else:
        name = where or str(source)
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise BrakecheckError(f"cannot read the cubin: {error.strerror or error}", name,
                                  "check the path and its permissions") from None
    try:
        return _read(data, name)
    except struct.error:  # every access is checked; this is the last line of defence
        raise _damaged(name, 0, "a field lies outside the file") from None


def _damaged(where: str, offset: int, what: str) -> BrakecheckError:
    return BrakecheckError(f"damaged cubin: {what}", f"{where}, byte {offset}", "compile it again, or fetch it again")


def _read(data: bytes, where: str) -> Cubin:
    if data[:4] != ELF_MAGIC:
        kind = "a fat binary" if data[:4] == b"\x50\xed\x55\xba" else "not an ELF file"
        raise BrakecheckError(f"not a cubin: {kind}", f"{where}, byte 0",
                              "name a .cubin file, or unpack fat binaries and objects with cuobjdump -xelf all")
    if len(data) < 64:
        raise _damaged(where, len(data), "the ELF header ends early")
    kind, machine, version = struct.unpack_from("<HHI", data, 16)
    if data[4:6] != b"\x02\x01" or machine != EM_CUDA:
        raise BrakecheckError("not a cubin: an ELF file for another machine", f"{where}, byte 18",
                              "objects and libraries hold cubins inside: unpack them with cuobjdump -xelf all")
    flags = struct.unpack_from("<I", data, 48)[0]
    abi = data[8]
    sections = _sections(data, where)
    cubin = Cubin(where, data, abi, _arch(flags, abi), kind == 1, sections, _symbols(data, sections, where))
    note = cubin.by_name.get(".note.nv.tkinfo")
    named = re.search(rb"-arch[ =]+(sm_\d+[af]?)\b", cubin.content(note)) if note else None
    if named and named.group(1).decode().rstrip("af") == cubin.arch.rstrip("af"):
        cubin.arch = named.group(1).decode()
    cubin.kernels = tuple(_kernels(cubin))
    return cubin


def _arch(flags: int, abi: int) -> str:
    if abi >= 8:
        return f"sm_{flags >> 8 & 0xFF}" + ("a" if flags & 0x8 else "")
    return f"sm_{flags & 0xFF}" + ("a" if flags & 0x800 else "")


def _sections(data: bytes, where: str) -> List[Section]:
    table, = struct.unpack_from("<Q", data, 40)
    entry, count, names = struct.unpack_from("<HHH", data, 58)
    if count == 0 or entry != 64:
        raise _damaged(where, 58, "no section table")
    if table + count * 64 > len(data):
        raise _damaged(where, min(table, len(data)), f"the section table ({count} sections) lies outside the file")
    if names >= count:
        raise _damaged(where, 62, "the section names are in no section")
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * i) for i in range(count)]
    for i, (_, kind, _, _, offset, size, *_rest) in enumerate(raw):
        if kind not in (0, SHT_NOBITS) and offset + size > len(data):
            raise _damaged(where, table + 64 * i, f"section {i} lies outside the file")
    start, size = raw[names][4], raw[names][5]
    cache: Dict[int, str] = {}
    return [Section(i, _name(data, start, size, r[0], where, cache), r[1], r[2], r[4], r[5], r[6], r[7])
            for i, r in enumerate(raw)]


def _name(data: bytes, start: int, size: int, at: int, where: str, cache: Dict[int, str]) -> str:
    """The NUL-terminated name `at` bytes into the string table at `start`."""
    if at in cache:
        return cache[at]
    stop = min(start + size, len(data), start + at + NAME_LIMIT)
    end = data.find(b"\0", start + at, stop) if at < size else -1
    if end < 0:
        raise _damaged(where, start + at, "a name lies outside its string table")
    cache[at] = data[start + at:end].decode("utf-8", "replace")
    return cache[at]


def _symbols(data: bytes, sections: List[Section], where: str) -> List[Symbol]:
    table = next((s for s in sections if s.type == SHT_SYMTAB), None)
    if table is None:
        raise _damaged(where, 40, "no symbol table")
    if table.link >= len(sections):
        raise _damaged(where, table.offset, "the symbol names are in no section")
    names = sections[table.link]
    cache: Dict[int, str] = {}
    out = []
    for offset in range(table.offset, table.offset + table.size - 23, 24):
        name, info, other, section, value, size = struct.unpack_from("<IBBHQQ", data, offset)
        out.append(Symbol(_name(data, names.offset, names.size, name, where, cache) if name else "",
                          info & 15, other, section, value, size))
    return out


def _relocations(cubin: Cubin, section: Section) -> Iterator[Relocation]:
    step, form = (24, "<QIIq") if section.type == SHT_RELA else (16, "<QII")
    for offset in range(section.offset, section.offset + section.size - step + 1, step):
        at, kind, symbol, *addend = struct.unpack_from(form, cubin.data, offset)
        if symbol >= len(cubin.symbols):
            raise _damaged(cubin.where, offset, "a relocation names a symbol that is not there")
        yield Relocation(at, kind, cubin.symbols[symbol], addend[0] if addend else 0)


def _attributes(cubin: Cubin, section: Optional[Section]) -> Iterator[Tuple[int, bytes, int]]:
    """(number, value, byte offset) of each attribute of a .nv.info section."""
    if section is None:
        return
    at, end = section.offset, section.offset + section.size
    while at + 4 <= end:
        form, number, value = struct.unpack_from("<BBH", cubin.data, at)
        if form not in (1, 2, 3, 4):
            raise _damaged(cubin.where, at, f"attribute of unknown format {form} in {section.name[:80]}")
        size = value if form == 4 else 0
        if at + 4 + size > end:
            raise _damaged(cubin.where, at, f"an attribute reaches beyond {section.name[:80]}")
        yield number, (cubin.data[at + 4:at + 4 + size] if form == 4 else cubin.data[at + 2:at + 4]), at
        at += 4 + size


def _kernels(cubin: Cubin) -> Iterator[CubinKernel]:
    per_symbol: Dict[Tuple[int, int], int] = {}
    for number, value, at in _attributes(cubin, cubin.by_name.get(".nv.info")):
        if number in (REGCOUNT, FRAME_SIZE, MIN_STACK):
            if len(value) != 8:
                raise _damaged(cubin.where, at, "a per-kernel attribute has the wrong size")
            symbol, count = struct.unpack("<II", value)
            per_symbol[number, symbol] = count
    constants: Dict[str, int] = {}
    for section in cubin.sections:
        bank = re.match(r"\.nv\.constant\d+\.(.+)", section.name)
        if bank:
            constants[bank.group(1)] = constants.get(bank.group(1), 0) + section.size
    for index, symbol in enumerate(cubin.symbols):
        if symbol.type == STT_FUNC and symbol.other & STO_CUDA_ENTRY and symbol.section < len(cubin.sections):
            section = cubin.sections[symbol.section]
            if not section.name.startswith(".text."):
                raise _damaged(cubin.where, section.offset, f"kernel {symbol.name[:80]} is in no code section")
            registers = per_symbol.get((REGCOUNT, index))
            if registers is None or registers > 255:
                raise _damaged(cubin.where, section.offset, f"no register count for kernel {symbol.name[:80]}")
            yield _kernel(cubin, symbol, section, registers, per_symbol.get((FRAME_SIZE, index)),
                          per_symbol.get((MIN_STACK, index)), constants.get(symbol.name, 0))


def _kernel(cubin: Cubin, symbol: Symbol, section: Section, registers: int, frame: Optional[int],
            stack: Optional[int], constant: int) -> CubinKernel:
    values: Dict[int, bytes] = {}
    for number, value, at in _attributes(cubin, cubin.by_name.get(f".nv.info.{symbol.name}")):
        wanted = {MAX_THREADS: 12, REQNTID: 12, CLUSTER: 12, PARAM_CBANK: 8, API_VERSION: 4}.get(number)
        if wanted is not None and len(value) != wanted:
            raise _damaged(cubin.where, at, "a kernel attribute has the wrong size")
        values[number] = value
    if API_VERSION in values:
        release = struct.unpack("<I", values[API_VERSION])[0]
        cubin.toolkit = divmod(release, 10)
    shared = cubin.by_name.get(f".nv.shared.{symbol.name}")
    shared_bytes = shared.size if shared else 0
    if shared_bytes and int(cubin.arch[3:].rstrip("af")) >= 90:
        shared_bytes = max(0, shared_bytes - SHARED_RESERVED)
    bound = values.get(MAX_THREADS) or values.get(REQNTID)
    x, y, z = struct.unpack("<III", bound) if bound else (0, 0, 0)
    barriers = values[NUM_BARRIERS][0] if NUM_BARRIERS in values else section.flags >> 20 & 0x7F if cubin.abi < 8 else 0
    unknown = {None, 0xFFFFFFFF}  # recursion and calls through pointers leave the depth open
    return CubinKernel(
        symbol.name, section, registers, frame=None if frame in unknown else frame,
        stack=None if stack in unknown else stack, shared=shared_bytes, barriers=barriers, constant=constant,
        code=cubin.content(section), max_threads=x * y * z or None,
        cluster=struct.unpack("<III", values[CLUSTER]) if CLUSTER in values else None,
        parameters=struct.unpack("<HH", values[PARAM_CBANK][4:8]) if PARAM_CBANK in values else None)


def unpack(path: Path, cuobjdump: Path, into: Path) -> List[Path]:
    """Extracts the cubins inside an object, library, executable or fat binary; returns their paths in `into`.

    Raises BrakecheckError with cuobjdump's own words where it cannot read the file.
    """
    into.mkdir(parents=True, exist_ok=True)
    command = [str(cuobjdump), "-xelf", "all", str(path.resolve())]
    done = subprocess.run(command, cwd=into, capture_output=True, text=True)
    found = sorted(into.glob("*.cubin"))
    if done.returncode or not found:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise BrakecheckError(f"cuobjdump found no cubin: {words[0] if words else 'no device code'}", str(path),
                              "name a file with device code for a real architecture (sm_XX, not only PTX)")
    return found


def cubins_in(path: Path, cuobjdump: Path) -> List[Cubin]:
    """The cubins inside an object, library, executable or fat binary. BrakecheckError where there is none."""
    with tempfile.TemporaryDirectory(prefix="brakecheck-") as folder:
        return [read_cubin(p.read_bytes(), f"{path} ({p.name})") for p in unpack(path, cuobjdump, Path(folder))]
