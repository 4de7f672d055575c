"""How much one call changed, and whether that is clear of the noise inside the two recordings.

The statistic is the ratio of mean durations (what totals are made of: total = calls x mean), with Welch's interval on
its logarithm. Several kernels of one job are strata: their means add, and so do the variances of their means.
Calls inside one recording share its clock, its caches and its process, so the interval says how well the two recordings
are known, not how two stacks differ: a diff of recordings never says GO.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

from .align import Bucket

Z = 2.5758293035489004  # 99 %, two-sided: a diff has hundreds of rows
FEWEST = 5  # timed calls a side: below that a spread is not known
# Two recordings of one program on one H200 differ by up to 3 % without a cause (clocks, order, placement).
MARGIN = 0.03
# A change of the mean this large is named after its direction even when its spread does not exclude chance.
LARGE = 1.25


@dataclass(frozen=True)
class PerCall:
    """Ratio candidate / base of the mean time of a call, 99 % interval, and what it says.

    state: slower, faster, same, undecided. why: for undecided, what is missing."""

    ratio: Optional[float] = None
    low: Optional[float] = None
    high: Optional[float] = None
    state: str = "undecided"
    why: Optional[str] = None


def jobs(side: Sequence[Bucket]) -> int:
    """How often the job of these buckets ran: the calls of its rarest kernel (a job runs each kernel at least once)."""
    calls: dict[str, int] = {}
    for bucket in side:
        calls[bucket.plain] = calls.get(bucket.plain, 0) + bucket.calls
    return min(calls.values(), default=0)


def compare(base: Sequence[Bucket], candidate: Sequence[Bucket], margin: float = MARGIN) -> PerCall:
    """PerCall of two sides; times that are unknown on a side leave the ratio unknown."""
    sides = [(_mean(s), _relative_variance(s)) for s in (base, candidate)]
    (one, spread_one), (other, spread_other) = sides
    if not one or other is None or not other:
        return PerCall(why="a side has no times")
    ratio = other / one
    fewest = min(b.timed for b in (*base, *candidate))
    if fewest < FEWEST or spread_one is None or spread_other is None:
        calls = " and ".join(str(sum(b.timed for b in s)) for s in (base, candidate))
        return PerCall(ratio, why=f"{calls} timed calls: with fewer than {FEWEST} a side the noise is not known")
    n, m = (min(b.timed for b in s) for s in (base, candidate))
    return _settle(ratio, spread_one, spread_other, n, m, margin)


def index(pairs: Sequence[Tuple[Bucket, Bucket]], margin: float = MARGIN) -> PerCall:
    """PerCall of many pairs of buckets together: what the candidate's calls took, over what they would have taken at
    the base's mean times. A changed mix of cheap and dear calls does not move it."""
    pairs = [(a, b) for a, b in pairs if a.timed and b.timed]
    sums, spreads = [0.0, 0.0], [0.0, 0.0]
    for pair in pairs:
        weight = pair[1].calls
        for i, bucket in enumerate(pair):
            sums[i] += weight * bucket.total / bucket.timed
            spreads[i] += weight**2 * (bucket.variance if bucket.variance is not None else math.nan) / bucket.timed
    if not sums[0] or not sums[1]:
        return PerCall(why="a side has no times")
    counts = [sum(p[i].timed for p in pairs) for i in (0, 1)]
    ratio = sums[1] / sums[0]
    if min(counts) < FEWEST or any(math.isnan(s) for s in spreads):
        return PerCall(ratio, why=f"{counts[0]} and {counts[1]} timed calls: with few a kernel the noise is not known")
    return _settle(ratio, spreads[0] / sums[0] ** 2, spreads[1] / sums[1] ** 2, counts[0], counts[1], margin)


def _settle(ratio: float, one: float, other: float, n: int, m: int, margin: float) -> PerCall:
    """What a ratio says whose sides have these relative variances and numbers of calls (Welch-Satterthwaite)."""
    parts = one**2 / max(n - 1, 1) + other**2 / max(m - 1, 1)
    degrees = (one + other) ** 2 / parts if parts > 0 else float(n + m - 2)
    half = _t_quantile(degrees) * math.sqrt(one + other)
    low, high = (_exp(math.log(ratio) + h) for h in (-half, half))
    up, down = 1 + margin, 1 / (1 + margin)
    if low > up:
        return PerCall(ratio, low, high, "slower")
    if high < down:
        return PerCall(ratio, low, high, "faster")
    if down <= low and high <= up:
        return PerCall(ratio, low, high, "same")
    return PerCall(ratio, low, high, why="within the noise of these calls" if low <= 1 <= high else
                   f"not clear of the {margin:.0%} by which two recordings of one program differ")


def _exp(value: float) -> float:
    return math.exp(min(700.0, max(-700.0, value)))


def _mean(side: Sequence[Bucket]) -> Optional[float]:
    """Mean time of one job (ns); None when a kernel has no timed call. Untimed calls count as average ones."""
    if not side or any(not b.timed for b in side):
        return None
    return sum(b.total * (b.calls / b.timed) for b in side) / jobs(side)


def _relative_variance(side: Sequence[Bucket]) -> Optional[float]:
    """Variance of the mean's estimate over the mean squared."""
    mean = _mean(side)
    if not mean or any(b.variance is None for b in side):
        return None
    # The mean is sum(calls_i x mean_i) / jobs, and mean_i has the variance variance_i / timed_i.
    variance = sum((b.calls / jobs(side)) ** 2 * (b.variance or 0.0) / b.timed for b in side)
    return variance / mean**2


def _t_quantile(degrees: float, z: float = Z) -> float:
    """Student's t from the normal quantile: Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5; within 0.3 % of it
    from 4 degrees on."""
    v = max(degrees, 1.0)
    return (z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
            + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4))
