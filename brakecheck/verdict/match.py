"""Which kernel of one toolchain's output is which of another's: names may change, positions do change."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Dict, Hashable, List, Optional, Sequence, Tuple

from ..evidence.names import base_name
from ..model import KernelCode

SIMILAR = 0.7  # least similarity of two kernels that only share their base name


@dataclass(frozen=True)
class Match:
    """A kernel on both sides, or on one (the other is None: missing or new).

    how: "name", "code" or "text" (renamed, equal hashes), "similar" (renamed and changed), "missing", "new".
    """

    base: Optional[KernelCode]
    candidate: Optional[KernelCode]
    how: str


def match_kernels(base: Sequence[KernelCode], candidate: Sequence[KernelCode]) -> List[Match]:
    """Pairs the kernels of one source and architecture. Independent of the order of either side.

    In turn: equal mangled name (which holds the template arguments); equal code; equal text; the same base name and a
    similar mix where each is the other's single best partner. Every kernel is in exactly one match.
    """
    left, right = _by_name(base), _by_name(candidate)
    found = [Match(left.pop(name), right.pop(name), "name") for name in sorted(left.keys() & right.keys())]
    for how, key in (("code", lambda k: k.code_sha256), ("text", lambda k: k.text_sha256)):
        found += _equal(left, right, key, how)
    found += _similar(left, right)
    found += [Match(left[name], None, "missing") for name in sorted(left)]
    found += [Match(None, right[name], "new") for name in sorted(right)]
    return found


def similarity(one: KernelCode, other: KernelCode) -> float:
    """0..1: the share of instructions that the two mixes have in common; of their totals where a mix is unknown."""
    if not one.mix or not other.mix:
        low, high = sorted([one.instructions, other.instructions])
        return low / high if high else 1.0
    classes = one.mix.keys() | other.mix.keys()
    common = sum(min(one.mix.get(c, 0), other.mix.get(c, 0)) for c in classes)
    return common / max(sum(one.mix.values()), sum(other.mix.values()), 1)


def _by_name(kernels: Sequence[KernelCode]) -> Dict[str, KernelCode]:
    return {kernel.name: kernel for kernel in kernels}


def _equal(left: Dict[str, KernelCode], right: Dict[str, KernelCode], key: Callable[[KernelCode], Hashable],
           how: str) -> List[Match]:
    """Renamed kernels with equal hashes. Where several share a hash, the same base name first, then by name: which of
    them is taken makes no difference to the evidence, as their code is the same."""
    groups: Dict[Hashable, Tuple[List[str], List[str]]] = defaultdict(lambda: ([], []))
    for side, kernels in enumerate((left, right)):
        for name in sorted(kernels):
            groups[key(kernels[name])][side].append(name)
    found = []
    for ours, theirs in groups.values():
        for same_base in (True, False):
            for name in list(ours):
                partner = next((t for t in theirs if not same_base or
                                base_name(left[name].demangled) == base_name(right[t].demangled)), None)
                if partner is not None:
                    ours.remove(name)
                    theirs.remove(partner)
                    found.append(Match(left.pop(name), right.pop(partner), how))
    return found


def _similar(left: Dict[str, KernelCode], right: Dict[str, KernelCode]) -> List[Match]:
    forward, backward = _best(left, right), _best(right, left)
    pairs = [(ours, theirs) for ours, theirs in sorted(forward.items()) if backward.get(theirs) == ours]
    return [Match(left.pop(ours), right.pop(theirs), "similar") for ours, theirs in pairs]


def _best(ours: Dict[str, KernelCode], theirs: Dict[str, KernelCode]) -> Dict[str, str]:
    """Name -> the only most similar kernel with the same base name, where it is similar enough."""
    best = {}
    for name, kernel in ours.items():
        wanted = base_name(kernel.demangled)
        scores = sorted(((similarity(kernel, other), other_name) for other_name, other in theirs.items()
                         if base_name(other.demangled) == wanted), reverse=True)
        if scores and scores[0][0] >= SIMILAR and (len(scores) == 1 or scores[0][0] > scores[1][0]):
            best[name] = scores[0][1]
    return best
