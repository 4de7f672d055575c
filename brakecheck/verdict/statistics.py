"""How large is the change, how sure are we, and when have we measured enough. Pure: numbers in, numbers out.

The unit is the worker process. Two visits that ran next to each other, one of each arm, are a pair; the statistic is
log(median of the candidate's block / median of the base's block), one number a pair.

Why Student's t on these, with one pair trimmed at each end from ten pairs on (Yuen 1974, Biometrika 61:165):
the median of a block and the logarithm leave something close to normal; t is exact there from three pairs, where the
Wilcoxon test cannot reach 95 % with fewer than six pairs at all and the bootstrap covers too little below about ten.
What t cannot do is shrug off a visit that was disturbed: such a pair makes the interval wide (never wrong), the case
goes on, and from ten pairs on the trimmed mean ignores it. Nor can it see that few pairs agree by luck: the spread of
the other cases tells (`among`; bench/stopping.py has the reasons and the arithmetic). One method, fixed in advance:
choosing between two after seeing the data would cost the error rate that it promises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy import stats

from ..bench.stopping import MIN_PAIRS, at_least, trimmed, typical_of
from ..model import State

CONFIDENCE = 0.95


@lru_cache(maxsize=4096)
def _t_quantile(p: float, degrees: float) -> float:
    return float(stats.t.ppf(p, degrees))  # scipy takes 50 us for what a schedule asks thousands of times


@dataclass(frozen=True)
class Estimate:
    """Change of a metric from base to candidate, on the log scale. `count`: pairs, or the smaller arm when unpaired."""

    log_ratio: float
    error: float
    degrees: float
    count: int
    paired: bool = True
    confidence: float = CONFIDENCE

    @property
    def half_width(self) -> float:
        """Of the two-sided interval, log scale (0.005 is about half a percent)."""
        return _t_quantile((1 + self.confidence) / 2, self.degrees) * self.error

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)

    @property
    def low(self) -> float:
        return math.exp(self.log_ratio - self.half_width)

    @property
    def high(self) -> float:
        return math.exp(self.log_ratio + self.half_width)

    def p_beyond(self, margin: float) -> float:
        """Two-sided p of 'the change is within the margin'; at most 1 - confidence exactly when the interval clears
        the margin on one side."""
        if self.error == 0:
            return 0.0 if abs(self.log_ratio) > math.log1p(margin) else 1.0
        distance = (abs(self.log_ratio) - math.log1p(margin)) / self.error
        return min(1.0, 2 * float(stats.t.sf(distance, self.degrees)))


@dataclass(frozen=True)
class Judgement:
    """What one case's estimate says beside all the others. p: adjusted for the number of cases (Benjamini-Hochberg).

    detectable: the smallest change, as a ratio, that this many pairs of this noise would find with 95 % power.
    needed: pairs until the half width is half the margin; None when it cannot be told (fewer than three pairs)."""

    state: State
    p: float | None
    detectable: float | None
    needed: int | None


def paired_logs(base: Sequence[float], candidate: Sequence[float]) -> np.ndarray:
    """log(candidate / base), pair by pair. Raises ValueError on unequal lengths or times that are not positive."""
    a, b = np.asarray(base, dtype=float), np.asarray(candidate, dtype=float)
    if a.shape != b.shape:
        raise ValueError(f"{len(a)} base blocks cannot be paired with {len(b)} candidate blocks")
    if not (np.all(a > 0) and np.all(b > 0) and np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
        raise ValueError("a median of a block must be positive and finite")
    return np.log(b) - np.log(a)


def _trimmed(logs: np.ndarray) -> tuple[float, float, int]:
    """Trimmed mean, its standard error and degrees of freedom (Yuen 1974)."""
    centre, variance, degrees = trimmed(logs.tolist())
    return centre, math.sqrt(variance / len(logs)), degrees


def paired(base: Sequence[float], candidate: Sequence[float], confidence: float = CONFIDENCE) -> Estimate | None:
    """Estimate from the medians of blocks that ran next to each other; None below three pairs."""
    logs = paired_logs(base, candidate)
    if len(logs) < 3:
        return None
    centre, error, degrees = _trimmed(logs)
    return Estimate(centre, error, degrees, len(logs), True, confidence)


def unpaired(base: Sequence[float], candidate: Sequence[float], confidence: float = CONFIDENCE) -> Estimate | None:
    """Estimate from two runs that were not taken together (Welch 1947 on the logs); None below three blocks a side.

    Wider than `paired`, and blind to what differed between the two occasions: say so where it is shown."""
    a, b = np.log(np.asarray(base, dtype=float)), np.log(np.asarray(candidate, dtype=float))
    if min(len(a), len(b)) < 3:
        return None
    (ca, ea, da), (cb, eb, db) = _trimmed(a), _trimmed(b)
    error = math.hypot(ea, eb)
    degrees = error**4 / (ea**4 / da + eb**4 / db) if error > 0 else da + db
    return Estimate(cb - ca, error, degrees, min(len(a), len(b)), False, confidence)


def adjust(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg (1995) adjusted p values, in the order given."""
    return [float(p) for p in stats.false_discovery_control(p_values)] if len(p_values) else []


def among(estimates: Sequence[Estimate | None]) -> list[Estimate | None]:
    """The estimates of all cases of a comparison, those widened that spread less than is typical of the others. What
    was taken in pairs is looked at apart from what was not."""
    typical = {kind: typical_of([(e.error**2 * e.count, e.degrees) for e in estimates if e and e.paired == kind])
               for kind in (True, False)}

    def widened(e: Estimate) -> Estimate:
        variance = e.error**2 * e.count
        counted = at_least(variance, e.degrees, typical[e.paired])
        return replace(e, error=math.sqrt(counted / e.count)) if counted > variance else e

    return [e and widened(e) for e in estimates]


def judge(estimates: Sequence[Estimate | None], margin: float, fdr: float = 0.05) -> list[Judgement]:
    """State of every case. slower, faster: the interval clears the margin and so does the case after controlling the
    false discovery rate over all cases given. same: the interval lies within the margin. Otherwise undecided.

    margin: smallest change that matters, as a fraction (0.01)."""
    known = [i for i, e in enumerate(estimates) if e is not None]
    adjusted = dict(zip(known, adjust([e.p_beyond(margin) for e in estimates if e is not None])))
    edge = math.log1p(margin)
    out = []
    for i, estimate in enumerate(estimates):
        if estimate is None:
            out.append(Judgement(State.UNDECIDED, None, None, None))
            continue
        state = State.UNDECIDED
        if adjusted[i] <= min(fdr, 1 - estimate.confidence):
            state = State.SLOWER if estimate.log_ratio > 0 else State.FASTER
        elif abs(estimate.log_ratio) + estimate.half_width <= edge:
            state = State.SAME
        out.append(Judgement(state, adjusted[i], detectable(estimate, margin), pairs_needed(estimate, margin)))
    return out


def detectable(estimate: Estimate, margin: float, power: float = 0.95) -> float:
    """Smallest slow-down (ratio) whose interval clears the margin with this power, at this noise and count."""
    reach = _t_quantile(power, estimate.degrees) * estimate.error
    return math.exp(math.log1p(margin) + estimate.half_width + reach)


def _width_factor(n: int, confidence: float) -> float:
    """Half width over the standard deviation of the logs that `n` pairs are expected to have (untrimmed)."""
    return _t_quantile((1 + confidence) / 2, n - 1) / math.sqrt(n)


def pairs_needed(estimate: Estimate, margin: float, most: int = 100_000) -> int:
    """Pairs in all until the half width is expected to be half the margin; `most` when even that is too few."""
    spread = estimate.error * math.sqrt(estimate.count)
    goal = margin / 2
    if spread == 0:
        return MIN_PAIRS
    if spread * _width_factor(most, estimate.confidence) > goal:
        return most
    low, high = 2, most  # the factor falls with n, so bisect
    while low < high:
        middle = (low + high) // 2
        if spread * _width_factor(middle, estimate.confidence) <= goal:
            high = middle
        else:
            low = middle + 1
    return max(low, MIN_PAIRS)


def noise_floor(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Noise of A against A: standard deviation of log(second / first) of two visits of the same arm in one ABBA
    quadruple, by the median absolute deviation (a disturbed visit must not set the floor). None below three."""
    logs = paired_logs(first, second)
    if len(logs) < 3:
        return None
    return float(stats.median_abs_deviation(logs, center=lambda x, axis: 0.0, scale="normal"))


def order_effect(base: Sequence[float], candidate: Sequence[float], base_first: Sequence[bool]) -> float | None:
    """p of 'it makes no difference which arm of a pair ran first' (Welch on the two orders); None below two of each.

    A small p means carry-over: the visits did not settle. ABBA cancels it in the estimate; it still costs precision."""
    logs, first = paired_logs(base, candidate), np.asarray(base_first, dtype=bool)
    if min(first.sum(), (~first).sum()) < 2 or np.ptp(logs) == 0:
        return None
    return float(stats.ttest_ind(logs[first], logs[~first], equal_var=False).pvalue)


# ---- Counts: hangs, crashes, failures -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Counts:
    """Fisher's exact test, one-sided. needed: repetitions of each arm that would settle it, with 80 % power at
    p < alpha, if the rates seen are the true ones; None when the rates do not differ in the direction asked about."""

    p: float
    enough: bool
    needed: int | None


def compare_counts(base: tuple[int, int], candidate: tuple[int, int], expect: str = "more",
                   alpha: float = 0.05) -> Counts:
    """Do failures (failed, tries) become more frequent from base to candidate - or, expect="fewer", less?"""
    if expect not in ("more", "fewer"):
        raise ValueError("expect must be 'more' or 'fewer'")
    for bad, tries in (base, candidate):
        if not (0 <= bad <= tries and tries):
            raise ValueError("counts must satisfy 0 <= failed <= tries and tries > 0")
    high, low = (candidate, base) if expect == "more" else (base, candidate)
    total, bad = high[1] + low[1], high[0] + low[0]
    p = float(stats.hypergeom.sf(high[0] - 1, total, bad, high[1]))
    return Counts(p, p < alpha, _counts_needed(high[0] / high[1], low[0] / low[1], alpha))


def _counts_needed(high: float, low: float, alpha: float, power: float = 0.8, most: int = 200) -> int | None:
    if high <= low:
        return None
    for n in range(2, most):
        if _counts_power(high, low, n, alpha) >= power:
            return n
    pooled = (high + low) / 2  # normal approximation where the exact sums get long
    z = stats.norm.ppf(1 - alpha) + stats.norm.ppf(power)
    return math.ceil(2 * pooled * (1 - pooled) * (z / (high - low)) ** 2)


def _counts_power(high: float, low: float, n: int, alpha: float) -> float:
    """Exact power with n tries of each arm, summed over all outcomes (x failures of `high`, y of `low`)."""
    x, y = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    p = stats.hypergeom.sf(x - 1, 2 * n, x + y, n)
    weight = stats.binom.pmf(x, n, high) * stats.binom.pmf(y, n, low)
    return float(weight[p < alpha].sum())


def rate_bound(bad: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson interval of a rate: what `bad` of `total` says about false alarms or power."""
    side = (1 - confidence) / 2
    low = 0.0 if bad == 0 else float(stats.beta.ppf(side, bad, total - bad + 1))
    high = 1.0 if bad == total else float(stats.beta.ppf(1 - side, bad + 1, total - bad))
    return low, high
