"""Machine code as text: nvdisasm's output per kernel, instruction classes, and the identity of code.

**One nvdisasm run for many kernels.** nvdisasm spends 0.3-0.6 s building its tables for an architecture before it
reads the first instruction. So the code of all kernels of one architecture is laid end to end and disassembled as a
raw binary in one run; the result equals the per-cubin disassembly instruction for instruction (tests/test_sass.py),
except for what only the ELF file knows: names of called functions, relocated operands and source lines, which are
put in here.

**What moves between releases without meaning.** Found by comparing cubins of 12.0 to 13.5 (sm_75 to sm_120):
  - the ELF file around the code: ABI version, layout and order of sections, symbol numbers, new attributes and notes;
  - NOPs after the last instruction, which pad the section to 128 bytes;
  - offsets in constant banks 3 (__constant__ variables) and 4 (addresses of __device__ variables): they depend on
    what else lies in the module, and headers of different releases bring different variables along.
Branches are relative, and registers and immediates have not moved: they are compared as is. Parameters have kept
their place in bank 0 (0x160, 0x210 from sm_90, 0x380 from sm_100), and the place is part of the identity. ptxas 12.0
patches addresses of __device__ variables into instructions (relocations) where later ones load them from bank 4: that
is other code, and stays a difference.

`code_sha256` hashes every other bit, scheduling control (bits 105-125: stall counts, barriers, reuse) included,
together with what the code refers to: content of constant and initialised variables, called functions, registers,
shared memory, stack, barriers and launch bounds. `text_sha256` hashes the disassembly instead of the bits, without
the .reuse flags.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

from ..model import BrakecheckError, UnavailableError
from .cubin import STT_FUNC, Cubin, CubinKernel, Section, Symbol
from .lines import source_lines
from .opcodes import class_of

INSTRUCTION = 16  # bytes, on every architecture since sm_70
_TARGET = re.compile(r"\b0x([0-9a-f]+)$")
_BANK = re.compile(r"c\[0x([34])\]\[([^\]]*)\]")
_GENERATED = re.compile(r"^(\$|__unnamed|\.L)|_INTERNAL_")


class Instruction(NamedTuple):
    """address: byte offset in the kernel's section. label: name if something jumps here."""

    address: int
    predicate: str
    opcode: str
    operands: str
    label: str = ""
    line: str = ""

    @property
    def text(self) -> str:
        return " ".join(p for p in (self.predicate, self.opcode, self.operands) if p)


def nvdisasm_version(nvdisasm: Path) -> str:
    """Release and build of a disassembler (V13.5.37). UnavailableError if it does not run."""
    try:
        out = subprocess.run([str(nvdisasm), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnavailableError(f"nvdisasm does not run: {error}", str(nvdisasm),
                               "name the nvdisasm of CUDA 13.2 or newer") from None
    found = re.search(r"V\d[\d.]*", out)
    return found.group(0) if found else out.strip()[-40:]


def disassemble(kernels: Sequence[Tuple[Cubin, CubinKernel]], arch: str, nvdisasm: Path) -> List[List[Instruction]]:
    """Instructions of each kernel, all for one architecture (sm_90a), in one nvdisasm run.

    UnavailableError where nvdisasm does not know the architecture; BrakecheckError where it rejects the code.
    """
    if not kernels:
        return []
    starts: Dict[bytes, int] = {}  # equal code of several releases is read once
    size = 0
    for _, kernel in kernels:
        if kernel.code not in starts:
            starts[kernel.code] = size
            size += len(kernel.code)
    blob = b"".join(starts)
    raw = _run(blob, arch, nvdisasm, kernels[0][0].where)
    if len(raw) * INSTRUCTION != len(blob):
        raise BrakecheckError(f"nvdisasm read {len(raw)} instructions of {len(blob) // INSTRUCTION}",
                              kernels[0][0].where, "use the newest nvdisasm; the code may be of another architecture")
    out = []
    for cubin, kernel in kernels:
        first, count = starts[kernel.code] // INSTRUCTION, len(kernel.code) // INSTRUCTION
        out.append(_dress(raw[first:first + count], first * INSTRUCTION, cubin, kernel))
    return out


def _run(blob: bytes, arch: str, nvdisasm: Path, where: str) -> List[Dict[str, Any]]:
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(blob)
        file.flush()
        try:
            done = subprocess.run([str(nvdisasm), "--emit-json", "--binary", arch.replace("sm_", "SM"), file.name],
                                  capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise UnavailableError(f"nvdisasm does not run: {error.strerror}", str(nvdisasm),
                                   "name the nvdisasm of CUDA 13.2 or newer") from None
    if done.returncode:
        words = " ".join(done.stderr.split())[:300]
        kind = UnavailableError if "not defined for option" in words or "is not a" in words else BrakecheckError
        raise kind(f"nvdisasm cannot disassemble code for {arch}: {words}", where,
                   "the newest nvdisasm reads code for sm_75 and newer")
    try:
        functions = json.loads(done.stdout)[1]
        return [i for f in functions for i in f["sass-instructions"]]
    except (ValueError, LookupError, TypeError):
        raise BrakecheckError("nvdisasm's output is not the JSON that brakecheck reads", str(nvdisasm),
                              "use the nvdisasm of CUDA 13.2 or newer") from None


def _dress(raw: Sequence[Dict[str, Any]], base: int, cubin: Cubin, kernel: CubinKernel) -> List[Instruction]:
    """Addresses from the start of the section, labels and function names for jump targets, relocated operands."""
    inside = cubin.symbols_of(kernel.section)
    own = f"${kernel.name}$"  # prefix of functions that were put into this kernel's section
    functions = {s.value: s.name[len(own) if s.name.startswith(own) else 0:]
                 for s in inside if s.type == STT_FUNC and s.name != kernel.name}
    relocated = {r.offset // INSTRUCTION: r for r in cubin.relocations(kernel.section)}
    size, plain = len(raw) * INSTRUCTION, []
    targets: Dict[int, int] = {}
    for index, item in enumerate(raw):
        operands = str(item.get("operands", "")).replace(",", ", ")
        jump = "control-flow" in item.get("other-attributes", ()) or item["opcode"] == "LEPC"
        found = _TARGET.search(operands) if jump else None
        if found and base <= int(found.group(1), 16) < base + size:
            targets[index] = int(found.group(1), 16) - base
        if index in relocated:
            relocation = relocated[index]
            operands += f" {{{_shown(relocation.symbol)}+{relocation.addend:#x}, type {relocation.type}}}"
        plain.append((str(item.get("predicate", "")), str(item["opcode"]), operands))
    names = dict(functions)
    for number, target in enumerate(sorted(set(targets.values()) - set(functions))):
        names[target] = f"L{number}"
    lines = source_lines(cubin).get(kernel.section.number, {})
    out, line = [], ""
    for index, (predicate, opcode, operands) in enumerate(plain):
        address = index * INSTRUCTION
        line = lines.get(address, line)
        if index in targets:
            operands = _TARGET.sub("", operands) + names[targets[index]]
        out.append(Instruction(address, predicate, opcode, operands, names.get(address, ""), line))
    return _without_padding(out)


def _without_padding(code: List[Instruction]) -> List[Instruction]:
    end = len(code)
    while end and code[end - 1].opcode == "NOP":
        end -= 1
    return code[:end]


def mix_of(code: Iterable[Instruction]) -> Dict[str, int]:
    """Instruction counts by class, most frequent first."""
    return dict(Counter(class_of(i.opcode) for i in code).most_common())


def unknown_opcodes(code: Iterable[Instruction]) -> List[str]:
    """Opcodes that no class claims."""
    return sorted({i.opcode for i in code if class_of(i.opcode) == "other"})


def local_operations(mix: Dict[str, int]) -> int:
    return sum(n for kind, n in mix.items() if kind.startswith(("load.local", "store.local")))


def text_of(code: Iterable[Instruction]) -> List[str]:
    """One line an instruction, as people read it; labels and function names on lines of their own, source after //."""
    lines = []
    for i in code:
        if i.label:
            lines.append(f"{i.label}:")
        tail = f"  // {i.line}" if i.line else ""
        lines.append(f"{i.predicate:>6} {i.opcode} {i.operands}".rstrip() + tail)
    return lines


def identity(cubin: Cubin, kernel: CubinKernel, code: Sequence[Instruction]) -> Tuple[str, str]:
    """(code_sha256, text_sha256) of a kernel; see the head of this file for what they cover."""
    frame = repr((kernel.registers, kernel.shared, kernel.frame, kernel.stack, kernel.barriers, kernel.max_threads,
                  kernel.cluster, kernel.parameters))
    bits, text = hashlib.sha256(frame.encode()), hashlib.sha256(frame.encode())
    for section in _own_banks(cubin, kernel):
        for digest in (bits, text):
            digest.update(_content(cubin, section, 0, section.size).encode())
    relocated = {r.offset // INSTRUCTION: r for r in cubin.relocations(kernel.section)}
    for i in code:
        word = kernel.code[i.address:i.address + INSTRUCTION]
        operands = i.operands.replace(".reuse", "")
        refers = []
        for bank, inner in _BANK.findall(operands):
            reference, offset = _bank_reference(cubin, int(bank), inner)
            word = _masked(word, offset)
            operands = operands.replace(f"c[0x{bank}][{inner}]", f"c[{reference}]")
            refers.append(reference)
        if i.address // INSTRUCTION in relocated:
            r = relocated[i.address // INSTRUCTION]
            refers.append(f"{r.type}:{r.addend}:{_described(cubin, r.symbol)}")
        bits.update(word + "|".join(refers).encode())
        text.update(f"{i.label}:{i.predicate} {i.opcode} {operands} {refers}\n".encode())
    for part in _called(cubin, kernel):
        for digest in (bits, text):
            digest.update(part.encode())
    return bits.hexdigest(), text.hexdigest()


def _masked(word: bytes, offset: int) -> bytes:
    """The instruction with the constant bank offset zeroed, if it stands where it has been found: bits 38-53, for LDCU
    of sm_100 and newer 37-53. Anything else stays as it is, which at worst calls equal code different."""
    value = int.from_bytes(word, "little")
    for start in (38, 37):
        field = (1 << 54) - (1 << start)
        if offset and (value & field) >> start == offset:
            return (value & ~field).to_bytes(INSTRUCTION, "little")
    return word


def _own_banks(cubin: Cubin, kernel: CubinKernel) -> Iterator[Section]:
    """Constant banks of this kernel alone that have content: jump tables and literals. Bank 0 is filled at launch."""
    for section in cubin.sections:
        if re.fullmatch(r"\.nv\.constant[1-9]\d*\." + re.escape(kernel.name), section.name):
            yield section


def _bank_reference(cubin: Cubin, bank: int, inner: str) -> Tuple[str, int]:
    """What c[0x3][inner] or c[0x4][inner] stands for (name, size and content of the variable), and the offset that
    this replaces. An index register may reach anything in the bank, so then all of it counts, at its place."""
    section = cubin.by_name.get(f".nv.constant{bank}")
    fixed = re.fullmatch(r"0x([0-9a-f]+)|U?RZ(?:\+0x([0-9a-f]+))?", inner)
    if section is None or fixed is None:
        whole = _content(cubin, section, 0, section.size) if section else "absent"
        return f"@{bank}:{whole}[{inner}]", 0
    offset = int(fixed.group(1) or fixed.group(2) or "0", 16)
    if bank == 4:
        slot = next((r for r in cubin.relocations(section) if r.offset <= offset < r.offset + 8), None)
        if slot is not None:
            return f"@{_described(cubin, slot.symbol)}+{slot.addend + offset - slot.offset:#x}", offset
    symbol = next((s for s in cubin.symbols_of(section) if s.value <= offset < s.value + max(s.size, 1)), None)
    if symbol is None:
        return f"@{bank}:{_content(cubin, section, 0, section.size)}[{inner}]", 0
    return f"@{_described(cubin, symbol)}+{offset - symbol.value:#x}", offset


def _shown(symbol: Symbol) -> str:
    """Name of a variable; names that the compiler numbers are left out (the content tells them apart)."""
    return "" if _GENERATED.search(symbol.name) else symbol.name


def _described(cubin: Cubin, symbol: Symbol, depth: int = 3) -> str:
    if not 0 < symbol.section < len(cubin.sections):
        return _shown(symbol)
    section = cubin.sections[symbol.section]
    if symbol.type == STT_FUNC or section.name.startswith(".text."):
        return f"{_shown(symbol)}():{_content(cubin, section, symbol.value, symbol.size, depth)}"
    return f"{_shown(symbol)}:{symbol.size}:{_content(cubin, section, symbol.value, symbol.size, depth)}"


def _content(cubin: Cubin, section: Section, start: int, size: int, depth: int = 3) -> str:
    """Digest of a piece of a data section, pointers inside it followed (three deep)."""
    digest = hashlib.sha256(cubin.content(section)[start:start + size])
    for r in cubin.relocations(section):
        if start <= r.offset < start + size and depth:
            digest.update(f"{r.offset - start}:{r.addend}:{_described(cubin, r.symbol, depth - 1)}".encode())
    return digest.hexdigest()[:24]


def _called(cubin: Cubin, kernel: CubinKernel) -> List[str]:
    """Functions of other sections that the kernel's code refers to, transitively, with a digest of their code; and
    where there are any, all data of the module, since what of it they use is not followed."""
    seen: Dict[str, str] = {}
    todo = [kernel.section]
    while todo:
        for r in cubin.relocations(todo.pop()):
            if 0 < r.symbol.section < len(cubin.sections) and r.symbol.name not in seen:
                section = cubin.sections[r.symbol.section]
                if section.name.startswith(".text.") and section != kernel.section:
                    seen[r.symbol.name] = hashlib.sha256(cubin.content(section)).hexdigest()
                    todo.append(section)
    names = (".nv.constant3", ".nv.constant4", ".nv.global.init") if seen else ()
    data = [cubin.by_name[n] for n in names if n in cubin.by_name]
    return [*(f"{n}={d}" for n, d in sorted(seen.items())), *(_content(cubin, s, 0, s.size) for s in data)]
