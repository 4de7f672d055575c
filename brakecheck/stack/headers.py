"""Which of the user's own headers a source reaches, found textually."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*(?:include|include_next|import)\b[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\S))',
                      re.MULTILINE)
_ASKED = re.compile(rb'__has_include[ \t]*\([ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)')
_SUFFIXES = {".h", ".hpp", ".hxx", ".hh", ".cuh", ".inl", ".inc", ".ipp", ".cu", ".ptx", ""}


def digests(source: Path, text: bytes, include_dirs: Sequence[Path]) -> List[str]:
    """Sorted "name sha256" of every header that the source can reach beside it or in `include_dirs`, recursively and
    whatever `#if` says: a superset of what the compiler opens there. A header that is named by a macro stands for all
    of those directories' headers."""
    seen: Dict[Path, str] = {}
    waiting = [(source, text)]
    while waiting:
        path, content = waiting.pop()
        places = [path.parent, *include_dirs]
        for found in _named(content, places):
            if found in seen or found == source.resolve():
                continue
            data = _read(found)
            if data is not None:
                seen[found] = hashlib.sha256(data).hexdigest()
                waiting.append((found, data))
    return sorted(f"{path.name} {digest}" for path, digest in seen.items())


def _named(content: bytes, places: Sequence[Path]) -> Iterator[Path]:
    for match in [*_INCLUDE.finditer(content), *_ASKED.finditer(content)]:
        quoted, angled, computed = _groups(match)
        if computed:
            for place in places:
                yield from (p.resolve() for p in sorted(place.glob("*")) if p.suffix in _SUFFIXES and p.is_file())
        name = (quoted or angled or b"").decode(errors="surrogateescape")
        if name:
            # All places, not the first: which one wins can depend on the compiler.
            yield from (p.resolve() for p in (place / name for place in places) if p.is_file())


def _groups(match: re.Match[bytes]) -> Tuple[Optional[bytes], Optional[bytes], Optional[bytes]]:
    quoted, angled = match.group(1), match.group(2)
    return quoted, angled, match.group(3) if match.re is _INCLUDE else None


def _read(path: Path) -> Optional[bytes]:
    try:
        return path.read_bytes()
    except OSError:
        return None  # the compiler will say so, if it needs it
