"""Which event lies in which, and the paths that follow from it; arrays only."""

from __future__ import annotations

from typing import Dict, List, Tuple

import numpy as np

# A child may end this much after its parent, ns: profilers round both to a microsecond, or stop the clock in between.
TOLERANCE = 1_000


def order_of(thread: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Rows sorted by thread, then start, then the longer first; equal rows keep their order."""
    span = int(start.max() - start.min()) + 1 if len(start) else 1
    threads = int(thread.max()) + 1 if len(thread) else 1
    if span * threads >= 2**62:
        return np.lexsort((-end, start, thread))
    key = thread.astype(np.int64) * span + (start - (start.min() if len(start) else 0))
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    same = ordered[1:] == ordered[:-1]
    if same.any():
        tied = np.zeros(len(key), dtype=bool)
        tied[1:] |= same
        tied[:-1] |= same
        rows = order[tied]
        order[tied] = rows[np.lexsort((-end[rows], key[rows]))]
    return order


def parents_of(thread: np.ndarray, start: np.ndarray, end: np.ndarray) -> Tuple[np.ndarray, int]:
    """For rows sorted as `order_of` does: the row of the innermost event that each lies in (-1: none), and how many
    end after their parent within the tolerance.

    Every row first guesses its predecessor. A guess that ended before, ends too early or is of another thread is
    replaced by the guess's own guess: whatever lies between those two was refused by the former already, and would be
    by this row. The guesses double their reach, so rounds are few.
    """
    rows = len(start)
    parent = np.arange(-1, rows - 1, dtype=np.int64)
    open_rows = np.arange(rows)[1:]
    while len(open_rows):
        guess = parent[open_rows]
        other = thread[guess] != thread[open_rows]
        wrong = other | (start[open_rows] >= end[guess]) | (end[open_rows] > end[guess] + TOLERANCE)
        parent[open_rows[other]] = -1
        open_rows = open_rows[wrong & ~other]
        parent[open_rows] = parent[parent[open_rows]]
        open_rows = open_rows[parent[open_rows] >= 0]
    inside = parent >= 0
    late = int((end[inside] > end[parent[inside]]).sum())
    return parent, late


def depths_of(parent: np.ndarray) -> np.ndarray:
    """Number of ancestors of each row."""
    depth = (parent >= 0).astype(np.int32)
    jump = parent.copy()
    open_rows = np.flatnonzero(jump >= 0)
    while len(open_rows):
        above = jump[open_rows]
        depth_above, jump_above = depth[above], jump[above]
        depth[open_rows] += depth_above
        jump[open_rows] = jump_above
        open_rows = open_rows[jump_above >= 0]
    return depth


def levels_of(depth: np.ndarray) -> List[np.ndarray]:
    """Rows of each depth, outermost first."""
    small = depth.astype(np.int16) if len(depth) and depth.max() < 2**15 else depth  # numpy sorts these by counting
    order = np.argsort(small, kind="stable")
    bounds = np.cumsum(np.bincount(depth)) if len(depth) else np.zeros(0, dtype=np.int64)
    return np.split(order, bounds[:-1]) if len(bounds) else []


def inherit(levels: List[np.ndarray], parent: np.ndarray, own: np.ndarray) -> np.ndarray:
    """own where it is not negative, else the value of the nearest ancestor that has one, else -1."""
    value = own.copy()
    for rows in levels[1:]:
        rows = rows[value[rows] < 0]
        value[rows] = value[parent[rows]]
    return value


class Paths:
    """Paths as numbers: a path is its parent path and one more name. -1 is the empty path."""

    def __init__(self, names: int) -> None:
        self.names = names
        self.ids: Dict[int, int] = {}

    def assign(self, levels: List[np.ndarray], parent: np.ndarray, name: np.ndarray, member: np.ndarray) -> np.ndarray:
        """The path of each row: of its parent, and the row's own name where it is a member."""
        path = np.full(len(parent), -1, dtype=np.int64)
        for level, rows in enumerate(levels):
            if level:
                path[rows] = path[parent[rows]]
            rows = rows[member[rows]]
            keys, inverse = np.unique((path[rows] + 1) * self.names + name[rows], return_inverse=True)
            path[rows] = np.array([self.ids.setdefault(int(k), len(self.ids)) for k in keys], dtype=np.int64)[inverse]
        return path

    def texts(self, names: List[str]) -> List[str]:
        """Each path as text, joined by " > "."""
        out: List[str] = []
        for key in self.ids:
            above, name = divmod(key, self.names)
            out.append(f"{out[above - 1]} > {names[name]}" if above else names[name])
        return out
