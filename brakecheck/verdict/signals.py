"""What a list of timings gives away about how it was taken: drift, a timer that does not wait, a baseline with two
values, the release where it went bad. Pure: numbers in, findings out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Drift:
    """A trend inside one block. change: relative change of time from its first to its last part. p: of 'no trend'.

    clock_change: relative change of the SM clock over the same span (None when clocks were not sampled).
    explained: share of the time's trend that a clock of that change would cause (time x clock constant), 0..1.
    found: the trend is larger than the margin, and either too regular for chance or matched by the clock."""

    change: float
    p: float
    clock_change: float | None
    explained: float | None
    found: bool

    @property
    def text(self) -> str:
        words = f"time moved by {self.change:+.1%} inside a block"
        if self.clock_change is not None and self.explained is not None and self.explained >= 0.5:
            words += f" while the clock moved by {self.clock_change:+.1%}"
        return words


def drift(times: Sequence[float], clocks: Sequence[float] | None = None, margin: float = 0.01) -> Drift | None:
    """Trend of a block's times (any unit) in the order they were taken; None below four samples.

    Neighbouring samples are not independent, so at most sixteen medians of consecutive parts are ranked (Kendall);
    a clock that moves with the times is evidence enough where there are too few parts for a rank test."""
    if len(times) < 4:
        return None
    logs = np.array([np.median(part) for part in np.array_split(np.log(times), min(16, len(times)))])
    position = np.arange(len(logs))
    slope = float(stats.theilslopes(logs, position).slope)
    change = math.expm1(slope * (len(logs) - 1))
    p = float(stats.kendalltau(position, logs).pvalue) if np.ptp(logs) > 0 else 1.0
    clock_change = explained = None
    if clocks is not None and len(clocks) >= 2 and min(clocks) > 0:
        end = max(1, len(clocks) // 4)
        clock_change = float(np.median(clocks[-end:]) / np.median(clocks[:end]) - 1)
        expected = -math.log1p(clock_change)
        trend = math.log1p(change)
        explained = max(0.0, min(1.0, expected / trend)) if trend != 0 else 0.0
    large = abs(change) > margin
    by_clock = clock_change is not None and abs(clock_change) > 2 * margin and (explained or 0.0) >= 0.5
    return Drift(change, p, clock_change, explained, large and (p < 0.01 or by_clock))


@dataclass(frozen=True)
class WorkCheck:
    """Whether time grows with work over the cases of one operator. work_span, time_span: largest over smallest."""

    work_span: float
    time_span: float
    suspicious: bool

    @property
    def text(self) -> str:
        return (f"work grows {self.work_span:.3g}-fold over the cases and time only {self.time_span:.2g}-fold: "
                "the timer does not wait for the work")


def work_independent(work: Sequence[float], times: Sequence[float], fixed: float = 0.0) -> WorkCheck | None:
    """Finds a timer that returns before the work is done (F13): None below three cases or less than a 64-fold span.

    work: flops or bytes of each case; times in seconds; fixed: launch cost in seconds that each call is allowed (time
    below it says nothing). Honest timers may be flat while the launch dominates, so it takes more than a flat line:
    over a span of at least 64 in work the times must span less than its eighth root, with no rank correlation, or the
    largest case must be no slower than three times the smallest although work spans more than 4096."""
    pairs = sorted((w, t) for w, t in zip(work, times) if w > 0 and t > 0)
    if len(pairs) < 3 or pairs[-1][0] / pairs[0][0] < 64:
        return None
    ws, ts = np.array([w for w, _ in pairs]), np.array([t for _, t in pairs])
    work_span, time_span = float(ws[-1] / ws[0]), float(ts.max() / ts.min())
    if ts.max() <= fixed:
        return WorkCheck(work_span, time_span, False)
    rank = float(stats.spearmanr(ws, ts).statistic) if np.ptp(ts) > 0 else 0.0
    flat = time_span < work_span**0.125 and rank < 0.9
    return WorkCheck(work_span, time_span, bool(flat or (work_span > 4096 and time_span < 3)))


@dataclass(frozen=True)
class Spread:
    """A ratio that is only known as a range, because the base itself had several values (F4)."""

    low: float
    high: float
    levels: tuple[float, ...]


def levels(values: Sequence[float], gap: float = 0.05) -> tuple[float, ...]:
    """The distinct levels of repeated medians: sorted values, split wherever neighbours differ by more than `gap` and
    by more than four times the median step inside the groups. One level is the normal case."""
    if not values:
        return ()
    ordered = sorted(values)
    steps = [math.log(b / a) for a, b in zip(ordered, ordered[1:])]
    small = [s for s in steps if s <= math.log1p(gap)]
    limit = max(math.log1p(gap), 4 * float(np.median(small)) if small else 0.0)
    groups = [[ordered[0]]]
    for value, step in zip(ordered[1:], steps):
        if step > limit:
            groups.append([])
        groups[-1].append(value)
    return tuple(float(np.median(g)) for g in groups)


def spread(base: Sequence[float], candidate: Sequence[float]) -> Spread | None:
    """The range of candidate / base when either side has more than one level; None when both have one."""
    a, b = levels(base), levels(candidate)
    if len(a) < 2 and len(b) < 2:
        return None
    return Spread(min(b) / max(a), max(b) / min(a), a if len(a) > 1 else b)


@dataclass(frozen=True)
class Step:
    """Where a series of releases went bad (or good): `first` is the index of the first release of the new level,
    ratio: new level / old level, since: how many releases stay there (counting itself), plateau: all of the rest do."""

    first: int
    ratio: float
    since: int
    plateau: bool


def step_change(values: Sequence[float], margin: float = 0.01) -> Step | None:
    """The one largest step in a series with a value per release (F10); None when no step stands out.

    The split minimises the squared error of the logs; it stands out when the step is larger than the margin and
    than three times the largest deviation inside either level; fewer than three values cannot tell it from noise."""
    if len(values) < 3:
        return None
    logs = np.log(np.asarray(values, dtype=float))
    costs = [((logs[:k] - logs[:k].mean()) ** 2).sum() + ((logs[k:] - logs[k:].mean()) ** 2).sum()
             for k in range(1, len(logs))]
    k = 1 + int(np.argmin(costs))
    before, after = float(np.median(logs[:k])), float(np.median(logs[k:]))
    noise = max(float(np.abs(logs[:k] - before).max()), float(np.abs(logs[k:] - after).max()))
    if abs(after - before) <= max(math.log1p(margin), 3 * noise):
        return None
    near = np.abs(logs[k:] - after) <= max(math.log1p(margin), abs(after - before) / 4)
    since = int(np.argmin(near)) if not near.all() else len(near)
    return Step(k, math.exp(after - before), since, bool(near.all()))
