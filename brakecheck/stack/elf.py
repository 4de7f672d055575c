"""Which symbols a shared library needs and provides, read from the file: nothing is loaded, nothing runs.

The dynamic linker reports a missing symbol when it is first called (or, bound early, when the library loads), which may
be hours into a job. The same answer stands in .dynsym, .gnu.version_r and .dynamic.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple

from ..model import BrakecheckError
from .compat import Finding

# Symbols that carry the release they came with: __nvJitLinkGetErrorLog_13_1.
RELEASED = re.compile(r"^(\w+?)_(\d{1,2})_(\d{1,2})$")
# Prefix of a library's symbols -> the library, for libraries whose symbols have no ELF version.
OWNERS = (
    (re.compile(r"^p?nccl[A-Z]"), "libnccl.so"), (re.compile(r"^cublasLt[A-Z]"), "libcublasLt.so"),
    (re.compile(r"^cublas[A-Z]"), "libcublas.so"), (re.compile(r"^cusparseLt[A-Z]"), "libcusparseLt.so"),
    (re.compile(r"^cusparse[A-Z]"), "libcusparse.so"), (re.compile(r"^cusolverMg"), "libcusolverMg.so"),
    (re.compile(r"^cusolver[A-Z]"), "libcusolver.so"),
    (re.compile(r"^cufft[A-Z]"), "libcufft.so"), (re.compile(r"^curand[A-Z]"), "libcurand.so"),
    (re.compile(r"^nvrtc[A-Z]"), "libnvrtc.so"), (re.compile(r"^_*nvJitLink[A-Z]"), "libnvJitLink.so"),
    (re.compile(r"^cudnn[A-Z]"), "libcudnn.so"), (re.compile(r"^cupti[A-Z]"), "libcupti.so"),
)
STB_GLOBAL, SHN_UNDEF = 1, 0  # weak symbols may stay undefined
SHOWN = 3  # symbols named in one finding
MOST_VERSIONS = 4096  # entries of a version table; a damaged count would loop for hours


@dataclass(frozen=True)
class Library:
    """needs: (symbol, library that must provide it or None, version or None). provides: names, and name@version where
    versions are given. needed: names of libraries (DT_NEEDED). search: run path, with $ORIGIN replaced; before: whether
    it comes before LD_LIBRARY_PATH (DT_RPATH)."""

    path: str
    soname: Optional[str]
    needed: Tuple[str, ...]
    needs: Tuple[Tuple[str, Optional[str], Optional[str]], ...]
    provides: FrozenSet[str]
    search: Tuple[str, ...] = ()
    before: bool = False

    @property
    def name(self) -> str:
        return Path(self.path).name


def read_library(path: Path) -> Library:
    """BrakecheckError, with the path, for what is no ELF file of 64 bits or is damaged."""
    from elftools.common.exceptions import ELFError
    from elftools.construct import ConstructError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as file:
            elf = ELFFile(file)
            if elf.elfclass != 64 or not elf.little_endian:
                raise BrakecheckError("not a shared library of 64 bits, little-endian", str(path), "check the file")
            end = path.stat().st_size
            for section in elf.iter_sections():  # a damaged size must not become an allocation of terabytes
                if section["sh_type"] != "SHT_NOBITS" and section["sh_offset"] + section["sh_size"] > end:
                    raise BrakecheckError("a section of the library reaches beyond its end", str(path),
                                          "install it again: it is cut or damaged")
            return _read(elf, path)
    except OSError as error:
        raise BrakecheckError(f"cannot read the library: {error.strerror}", str(path), "check the path") from None
    except (ELFError, ConstructError, struct.error, UnicodeError, ValueError, IndexError, KeyError, TypeError,
            AttributeError, AssertionError) as error:  # pyelftools lets all of these out of a damaged file
        raise BrakecheckError(f"the library is damaged or no ELF file: {error}", str(path),
                              "install it again") from None


def _read(elf, path: Path) -> Library:  # type: ignore[no-untyped-def]
    dynamic, symbols = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
    if dynamic is None or symbols is None:
        return Library(str(path), None, (), (), frozenset())
    tags: Dict[str, List[str]] = {}
    for tag in dynamic.iter_tags():
        for name in ("needed", "soname", "rpath", "runpath"):
            if hasattr(tag, name):
                tags.setdefault(name, []).append(getattr(tag, name))
    run = tags.get("runpath") or tags.get("rpath") or []
    origin = str(path.resolve().parent)
    search = tuple(re.sub(r"\$\{?ORIGIN\}?", origin, part) for text in run for part in text.split(":") if part)
    needs, provides = _symbols(elf, symbols)
    return Library(str(path), next(iter(tags.get("soname", ())), None), tuple(tags.get("needed", ())), needs, provides,
                   search, "runpath" not in tags and "rpath" in tags)


def _symbols(elf, section):  # type: ignore[no-untyped-def]
    """Raw records, since hundreds of thousands of objects would take seconds (Elf64_Sym: 24 bytes)."""
    names = elf.get_section(section["sh_link"]).data()
    indices = elf.get_section_by_name(".gnu.version")
    versions = [v & 0x7FFF for (v,) in struct.iter_unpack("<H", indices.data())] if indices else []
    wanted: Dict[int, Tuple[str, str]] = {}
    table = elf.get_section_by_name(".gnu.version_r")
    for need, parts in islice(table.iter_versions(), MOST_VERSIONS) if table else ():
        for part in parts:
            wanted[part["vna_other"]] = (need.name, part.name)
    defined: Dict[int, str] = {}
    table = elf.get_section_by_name(".gnu.version_d")
    for definition, parts in islice(table.iter_versions(), MOST_VERSIONS) if table else ():
        defined[definition["vd_ndx"]] = next(parts).name
    needs: List[Tuple[str, Optional[str], Optional[str]]] = []
    provides: Set[str] = set()
    for number, (at, info, _, index, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", section.data())):
        if not at:
            continue
        name = names[at:names.index(b"\0", at)].decode("utf-8", "replace")
        version = versions[number] if number < len(versions) else 0
        if index != SHN_UNDEF:
            provides.add(name)
            if version in defined:
                provides.add(f"{name}@{defined[version]}")
        elif info >> 4 == STB_GLOBAL:
            needs.append((name, *wanted.get(version, (None, None))))
    return tuple(needs), frozenset(provides)


def resolve(library: Library, needed: str, known: Mapping[str, str], paths: Sequence[str]) -> Optional[str]:
    """The file that the dynamic linker takes for a name: run path and LD_LIBRARY_PATH (`paths`) in the linker's order,
    then `known` (name -> file: what is loaded before, or what the environment has). None when it is the system's."""
    order = [*library.search, *paths] if library.before else [*paths, *library.search]
    found = next((str(Path(folder) / needed) for folder in order if (Path(folder) / needed).is_file()), None)
    return os.path.realpath(found) if found else known.get(needed)


def check_symbols(libraries: Sequence[Library], known: Mapping[str, str], paths: Sequence[str] = ()) -> List[Finding]:
    """A finding for each pair of libraries of which one needs what the other does not provide.

    Judged are symbols whose provider is certain: those with an ELF version, which names it, and those whose name tells
    (OWNERS), as long as the provider is one of the libraries needed directly and can be read.
    """
    by_path = {os.path.realpath(lib.path): lib for lib in libraries}
    found = []
    for library in by_path.values():
        providers = {name: by_path[path] for name in library.needed
                     if (path := resolve(library, name, known, paths)) and path in by_path}
        absent: Dict[str, List[str]] = {}
        for symbol, owner, version in library.needs:
            name = owner or _owner(symbol, providers)
            provider = providers.get(name) if name else None
            if provider is None or not name or not provider.provides:
                continue
            versioned = version is not None and any("@" in p for p in provider.provides)
            if (f"{symbol}@{version}" if versioned else symbol) not in provider.provides:
                absent.setdefault(name, []).append(symbol)
        found += [_missing(library, providers[name], symbols) for name, symbols in absent.items()]
    return found


def _owner(symbol: str, providers: Mapping[str, Library]) -> Optional[str]:
    stem = next((library for pattern, library in OWNERS if pattern.match(symbol)), None)
    return next((name for name in providers if stem and name.startswith(stem)), None)


def _missing(library: Library, provider: Library, symbols: List[str]) -> Finding:
    shown = ", ".join(sorted(symbols)[:SHOWN]) + (f" and {len(symbols) - SHOWN} more" if len(symbols) > SHOWN else "")
    text = f"{library.name} needs {shown} of {provider.name}, which does not provide "
    text += f"{'it' if len(symbols) == 1 else 'them'}"
    releases = [r for s in symbols if (r := RELEASED.match(s))]
    if releases:
        same = {r[1] for r in releases}
        have = [(int(r[2]), int(r[3])) for s in provider.provides if (r := RELEASED.match(s)) and r[1] in same]
        have = have or [(int(r[2]), int(r[3])) for s in provider.provides if (r := RELEASED.match(s))]
        if have:
            text += " (it provides up to {}_{})".format(*max(have))
    return Finding("error", "symbol-missing", f"{text}: {library.path}, {provider.path}",
                   f"install a newer {provider.name.split('.so')[0].removeprefix('lib')}, or an older "
                   f"{library.name.split('.so')[0].removeprefix('lib')}")
