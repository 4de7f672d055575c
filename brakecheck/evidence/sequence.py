"""Longest common subsequence of two launch sequences, bit-parallel: 20,000 x 20,000 launches in well under a second.

Hyyro, "Bit-parallel LCS-length computation revisited" (2004): one row of the table is one big integer. A clear bit j in
row i says that the common subsequence grows at column j; keeping all rows allows the way back.
"""

from __future__ import annotations

from typing import Dict, Hashable, List, Sequence, Tuple

LONGEST = 20_000


def common(a: Sequence[Hashable], b: Sequence[Hashable]) -> List[Tuple[int, int]]:
    """Index pairs (i, j), ascending, with a[i] == b[j]; as many as possible. Only the first LONGEST of each count."""
    a, b = a[:LONGEST], b[:LONGEST]
    masks: Dict[Hashable, int] = {}
    for j, token in enumerate(b):
        masks[token] = masks.get(token, 0) | (1 << j)
    full = (1 << len(b)) - 1
    row, rows = full, []
    for token in a:
        matches = row & masks.get(token, 0)
        row = ((row + matches) | (row - matches)) & full
        rows.append(row)
    out: List[Tuple[int, int]] = []
    i, j = len(a), len(b)
    while i and j:
        if rows[i - 1] >> (j - 1) & 1:  # no growth at this column
            j -= 1
        elif i > 1 and not rows[i - 2] >> (j - 1) & 1:  # the row above has it too
            i -= 1
        else:
            i, j = i - 1, j - 1
            out.append((i, j))
    return out[::-1]


def gaps(pairs: Sequence[Tuple[int, int]], n: int, m: int) -> List[Tuple[range, range]]:
    """What lies between matched pairs on each side, where both sides have something. The edges come last, and only
    when nothing at all matches or both hold equally many: a capture may begin and end anywhere."""
    out = [(range(i + 1, k), range(j + 1, p)) for (i, j), (k, p) in zip(pairs, pairs[1:]) if k - i > 1 and p - j > 1]
    if not pairs:
        return [(range(n), range(m))] if n and m else []
    (i, j), (k, p) = pairs[0], pairs[-1]
    if 0 < i == j:
        out.append((range(i), range(j)))
    if 0 < n - k - 1 == m - p - 1:
        out.append((range(k + 1, n), range(p + 1, m)))
    return out
