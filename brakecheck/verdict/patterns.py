"""What many deltas have in common: which cases are hit, along what the loss grows, whether only the optimum moved, and
whether it takes two components together. Named, so that a cliff is never hidden in a mean."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

TUNING = re.compile(r"^(num_warps|num_stages|num_ctas|maxnreg|config|tile|BLOCK_?\w*)$")


def parameters(case: str) -> dict[str, str]:
    """"M=1 K=4096 bf16" -> {"M": "1", "K": "4096"}."""
    return dict(re.findall(r"(\w+)=([^\s,]+)", case))


def shared(hit: Sequence[str], spared: Sequence[str]) -> dict[str, str]:
    """Parameters that every case hit has alike and no case spared has: {"batch": "1"}. Empty when nothing tells them
    apart."""
    if not hit or not spared:
        return {}
    first = parameters(hit[0])
    others = [parameters(c) for c in spared]
    return {k: v for k, v in first.items()
            if all(parameters(c).get(k) == v for c in hit) and all(o.get(k) != v for o in others)}


@dataclass(frozen=True)
class Growth:
    """A loss that grows with a parameter: ratios at its smallest and largest value."""

    parameter: str
    first: float
    last: float
    first_ratio: float
    last_ratio: float

    @property
    def text(self) -> str:
        return (f"grows with {self.parameter}: {self.first_ratio:.3g}x at {self.parameter}={self.first:g}, "
                f"{self.last_ratio:.3g}x at {self.parameter}={self.last:g}")


def growth(ratios: Mapping[str, float]) -> Growth | None:
    """The parameter along which the ratio (by case name) rises without exception over three or more values while all
    the other parameters stay; the strongest one when there are several."""
    best = None
    names = {k for case in ratios for k in parameters(case)}
    for name in sorted(names):
        groups: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        for case, ratio in ratios.items():
            rest = parameters(case)
            value = rest.pop(name, "")
            if re.fullmatch(r"\d+(\.\d+)?", value):
                groups.setdefault(tuple(sorted(rest.items())), []).append((float(value), ratio))
        for points in groups.values():
            points.sort()
            rising = all(b[1] > a[1] for a, b in zip(points, points[1:]))
            if len(points) >= 3 and rising and points[-1][1] > 1.05 * points[0][1]:
                found = Growth(name, points[0][0], points[-1][0], points[0][1], points[-1][1])
                if best is None or found.last_ratio > best.last_ratio:
                    best = found
    return best


@dataclass(frozen=True)
class OptimumMoved:
    """The configuration that was best on the base is slow on the candidate, another one is not (F2)."""

    pinned: str
    retuned: str
    pinned_ratio: float
    retuned_ratio: float
    recovers: float

    @property
    def text(self) -> str:
        return (f"the optimum moved: {self.pinned} is {self.pinned_ratio:.3g}x, but {self.retuned} on the candidate is "
                f"{self.retuned_ratio:.3g}x of the base's best")


def optimum_moved(base: Mapping[str, float], candidate: Mapping[str, float], margin: float) -> list[OptimumMoved]:
    """Times by case of one operator, where cases differ in tuning parameters (num_warps, BLOCK_M) alone."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for case in base:
        if case in candidate:
            own = parameters(case)
            fixed = tuple(sorted((k, v) for k, v in own.items() if not TUNING.match(k)))
            if len(fixed) < len(own):
                groups.setdefault(fixed, []).append(case)
    out = []
    for cases in groups.values():
        pinned, retuned = min(cases, key=base.__getitem__), min(cases, key=candidate.__getitem__)
        loss, rest = candidate[pinned] - base[pinned], candidate[retuned] - base[pinned]
        if pinned != retuned and candidate[pinned] > base[pinned] * (1 + margin) and rest < loss / 2:
            out.append(OptimumMoved(pinned, retuned, candidate[pinned] / base[pinned],
                                    candidate[retuned] / base[pinned], min(1.0, 1 - rest / loss)))
    return out


@dataclass(frozen=True)
class Move:
    """One component taken to another level; recovers: share of the loss that the table shows to come back there."""

    component: str
    to: str
    recovers: float


@dataclass(frozen=True)
class Interaction:
    """One level of each of two components is slow together, neither is alone (F6). moves: out of it, best first."""

    levels: tuple[str, str]
    ratio: float
    moves: tuple[Move, ...]


def interaction(times: Mapping[tuple[str, str], float], names: tuple[str, str], margin: float) -> Interaction | None:
    """times: (level of the first component, level of the second) -> time, all combinations. None when the effects of
    the two simply multiply (within five margins) or the table is not complete."""
    rows, columns = sorted({r for r, _ in times}), sorted({c for _, c in times})
    if len(rows) < 2 or len(columns) < 2 or len(times) != len(rows) * len(columns):
        return None
    worst = max(times, key=times.__getitem__)
    others_row = [c for c in columns if c != worst[1]]
    others_column = [r for r in rows if r != worst[0]]
    # What the cell would be if effects multiplied, from every square of four cells that it is part of.
    expected = [times[(worst[0], c)] * times[(r, worst[1])] / times[(r, c)] for r in others_column for c in others_row]
    ratio = times[worst] / float(np.median(expected))
    if math.log(ratio) <= 5 * math.log1p(margin):
        return None
    by_row = min(others_column, key=lambda r: times[(r, worst[1])])
    by_column = min(others_row, key=lambda c: times[(worst[0], c)])
    loss = times[worst] - min(times.values())
    moves = [Move(name, to, min(1.0, (times[worst] - left) / loss)) for name, to, left in (
        (names[0], by_row, times[(by_row, worst[1])]), (names[1], by_column, times[(worst[0], by_column)]))]
    return Interaction(worst, ratio, tuple(sorted(moves, key=lambda m: -m.recovers)))
