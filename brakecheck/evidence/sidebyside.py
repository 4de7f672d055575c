"""Two disassemblies of one kernel, line against line, for the report.

Anchored first on lines that occur once on each side (patience diff), so that a kernel of 20,000 instructions stays
cheap; gaps between anchors are matched by opcode, so that renumbered registers still face each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

EDITS = 250  # longest edit script of a gap that is searched for; the work grows with its square


class Row(NamedTuple):
    """One line of the view. kind: "same"; "operands" (equal opcode, other registers or constants); "opcode" (another
    instruction in its place); "removed" (only in base); "added" (only in candidate)."""

    kind: str
    base: Optional[str]
    candidate: Optional[str]


def aligned(base: str, candidate: str) -> List[Row]:
    """Rows of the side-by-side view of two texts as sass_text gives them. No line of either side is lost."""
    a, b = base.splitlines(), candidate.splitlines()
    keys_a, keys_b = [_key(x) for x in a], [_key(x) for x in b]
    rows: List[Row] = []
    at_a = at_b = 0
    for i, j in [*_anchors(keys_a, keys_b), (len(a), len(b))]:
        rows += _gap(a[at_a:i], b[at_b:j])
        if i < len(a):
            rows.append(Row("same", a[i], b[j]))
        at_a, at_b = i + 1, j + 1
    return rows


def _key(line: str) -> str:
    """The instruction without source line, reuse flags and spacing."""
    return " ".join(line.split("  // ")[0].replace(".reuse", "").split())


def _opcode(line: str) -> str:
    words = _key(line).split()
    if words and words[0].startswith("@"):
        words = words[1:]
    return words[0] if words else ""


def _anchors(a: Sequence[str], b: Sequence[str]) -> List[Tuple[int, int]]:
    """Positions of equal lines, increasing on both sides: common head and tail, and unique lines between."""
    head = 0
    while head < min(len(a), len(b)) and a[head] == b[head]:
        head += 1
    tail = 0
    while tail < min(len(a), len(b)) - head and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    once_a, once_b = Counter(a[head:len(a) - tail]), Counter(b[head:len(b) - tail])
    where = {x: j for j, x in enumerate(b[:len(b) - tail]) if j >= head and once_b[x] == 1}
    pairs = [(i, where[x]) for i, x in enumerate(a[:len(a) - tail]) if i >= head and once_a[x] == 1 and x in where]
    middle = _increasing(pairs)
    return [*((i, i) for i in range(head)), *middle,
            *((len(a) - tail + k, len(b) - tail + k) for k in range(tail))]


def _increasing(pairs: List[Tuple[int, int]]) -> List[Tuple[int, int]]:
    """Longest run of pairs whose second members increase (the first ones do already)."""
    ends: List[int] = []
    last: List[int] = []
    before: List[int] = []
    for n, (_, j) in enumerate(pairs):
        k = bisect_left(ends, j)
        ends[k:k + 1] = [j]
        last[k:k + 1] = [n]
        before.append(last[k - 1] if k else -1)
    out: List[Tuple[int, int]] = []
    n = last[-1] if last else -1
    while n >= 0:
        out.append(pairs[n])
        n = before[n]
    return out[::-1]


def _gap(a: Sequence[str], b: Sequence[str]) -> List[Row]:
    """Rows of two stretches without a common anchor: matched by opcode, the rest faced in order."""
    matches = _edit([_opcode(x) for x in a], [_opcode(x) for x in b])
    rows: List[Row] = []
    at_a = at_b = 0
    for i, j in [*matches, (len(a), len(b))]:
        both = min(i - at_a, j - at_b)
        rows += [Row(_kind(x, y), x, y) for x, y in zip(a[at_a:at_a + both], b[at_b:at_b + both])]
        rows += [Row("removed", x, None) for x in a[at_a + both:i]]
        rows += [Row("added", None, y) for y in b[at_b + both:j]]
        if i < len(a) and j < len(b):
            rows.append(Row(_kind(a[i], b[j]), a[i], b[j]))
        at_a, at_b = i + 1, j + 1
    return rows


def _kind(a: str, b: str) -> str:
    if _key(a) == _key(b):
        return "same"
    return "operands" if _opcode(a) == _opcode(b) else "opcode"


def _edit(a: Sequence[str], b: Sequence[str]) -> List[Tuple[int, int]]:
    """Matching positions of a shortest edit script (Myers 1986), or none at all when it is longer than EDITS: difflib
    would need minutes for the repetitive opcodes of an unrolled kernel."""
    furthest = {1: 0}
    trace: List[Dict[int, int]] = []
    for edits in range(min(len(a) + len(b), EDITS) + 1):
        trace.append(dict(furthest))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and furthest.get(k - 1, -1) < furthest.get(k + 1, -1))
            x = furthest.get(k + 1, 0) if down else furthest.get(k - 1, 0) + 1
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
            furthest[k] = x
            if x >= len(a) and x - k >= len(b):
                return _backtrack(trace, len(a), len(b))
    return []


def _backtrack(trace: List[Dict[int, int]], x: int, y: int) -> List[Tuple[int, int]]:
    out: List[Tuple[int, int]] = []
    for edits in range(len(trace) - 1, -1, -1):
        furthest, k = trace[edits], x - y
        down = k == -edits or (k != edits and furthest.get(k - 1, -1) < furthest.get(k + 1, -1))
        before = k + 1 if down else k - 1
        start_x = furthest.get(before, 0) if edits else 0
        start_y = start_x - before if edits else 0
        while x > start_x and y > start_y:
            x, y = x - 1, y - 1
            out.append((x, y))
        if edits:
            x, y = start_x, start_y
    return out[::-1]
