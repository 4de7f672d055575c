"""Questions to an instruction mix: tensor-core generation, width of memory accesses, counts of a class.

A mix counts instructions by class (evidence/opcodes.py lists them: tensor.hgmma, load.global.b128). Classes are read by
the words in their names, so that a class added there needs no change here.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Dict, FrozenSet, List, Mapping, Optional, Tuple

# Tensor-core instructions by generation: a kernel that falls back to an older one cannot reach the rate of the newer.
# tcgen05 of Blackwell (UTCHMMA...), wgmma of Hopper (HGMMA...), mma.sync (HMMA...).
GENERATIONS: Tuple[Tuple[int, str], ...] = ((3, r"UTC\w*MMA"), (2, r"[HIQBD]GMMA"), (1, r"[HIQBDO]MMA"))
_TENSOR = re.compile("|".join(pattern for _, pattern in GENERATIONS), re.IGNORECASE)
_SPACES = ("global", "shared", "local", "generic")


@lru_cache(maxsize=1024)
def words_of(name: str) -> FrozenSet[str]:
    """{"load", "global", "b128"} of load.global.b128."""
    return frozenset(re.split(r"[^a-z0-9]+", name.lower()))


@lru_cache(maxsize=1024)
def memory_space(name: str) -> Optional[Tuple[str, str]]:
    """("global", "load") of a class of memory accesses, None of any other."""
    words = words_of(name)
    space = next((s for s in _SPACES if s in words), None)
    direction = next((d for d in ("load", "store") if d in words), None)
    return (space, direction) if space and direction else None


@lru_cache(maxsize=1024)
def bits_of(name: str) -> Optional[int]:
    """128 of load.global.b128; None of a class without a width."""
    found = re.search(r"\bb(\d+)\b", name)
    return int(found[1]) if found else None


@lru_cache(maxsize=1024)
def tensor_kind(name: str) -> Optional[str]:
    """HGMMA of tensor.hgmma, None of any other class."""
    found = _TENSOR.search(name)
    return found[0].upper() if found else None


def tensor_kinds(mix: Mapping[str, int]) -> Dict[str, int]:
    """SASS mnemonic -> count: {"HGMMA": 64}."""
    return {kind: n for name, n in mix.items() if n and (kind := tensor_kind(name))}


def tensor_generation(mix: Mapping[str, int]) -> int:
    """3 with any tcgen05 instruction, 2 with any wgmma, 1 with any mma, 0 without tensor cores."""
    kinds = tensor_kinds(mix)
    return max((g for g, pattern in GENERATIONS if any(re.fullmatch(pattern, kind) for kind in kinds)), default=0)


def accesses(mix: Mapping[str, int], space: str, direction: str) -> List[Tuple[int, int]]:
    """(bits, count) of the accesses of one space and direction, widest first; those of unknown width are left out."""
    return sorted(((bits, n) for name, n in mix.items() if n and memory_space(name) == (space, direction)
                   and (bits := bits_of(name)) is not None), reverse=True)


def mean_width(mix: Mapping[str, int], space: str, direction: str) -> Optional[float]:
    """Mean bits of one access; None without accesses of a known width."""
    found = accesses(mix, space, direction)
    total = sum(n for _, n in found)
    return sum(bits * n for bits, n in found) / total if total else None


def widths(mix: Mapping[str, int], space: str, direction: str) -> str:
    """"b128 x 4, b32 x 2": accesses by width, widest first."""
    return ", ".join(f"b{bits} x {n}" for bits, n in accesses(mix, space, direction))


def spaces(*mixes: Mapping[str, int]) -> List[Tuple[str, str]]:
    """All (space, direction) in any of the mixes."""
    return sorted({found for mix in mixes for name in mix if (found := memory_space(name))})


def count(mix: Mapping[str, int], *words: str) -> int:
    """Instructions of all classes whose name has one of these words."""
    return sum(n for name, n in mix.items() if not words_of(name).isdisjoint(words))


def memory(mix: Mapping[str, int]) -> int:
    """Loads and stores of every space."""
    return sum(n for name, n in mix.items() if memory_space(name))
