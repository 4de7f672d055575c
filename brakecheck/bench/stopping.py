"""When a case has been measured enough. Standard library only: a bundle measures where nothing else is installed.

Two looks, each when the interval has become narrow enough. At the first the half width is at most the goal (half the
margin): a case whose interval then lies on one side of the margin is done. One whose interval still holds the margin
(a change of 1.5 % against a margin of 1 %, say) goes on to a finer goal, and is done there whatever it shows. Pairs are
never added until something becomes significant. Beyond the margin the interval has to lie at 99.5 %: the false
discovery rate over all cases asks for more than 95 % of each, and what just cleared the margin would stay undecided.

The interval is the one that verdict/statistics.py judges by (Student's t, one pair in ten trimmed at each end).

Few pairs can agree by luck: where a shared machine has two speeds, four visits of one arm find the fast one and four of
the other the slow one in one case of 128, and nothing inside such a case tells. The other cases do. So a case that
spreads less than the others is not quite taken at its word: its variance counts as at least the mean of its own and the
typical one, weighted by degrees of freedom, where the typical one weighs the more the more alike the cases are (the
empirical prior of Smyth 2004, Stat. Appl. Genet. Mol. Biol. 3:3; used to widen only).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Callable, List, Optional, Tuple

MIN_PAIRS = 4  # two ABBA quadruples: both orders twice; simulated error rates are in tests/test_statistics.py
TRIM = 0.1
CLEAR = 4.0    # an effect this many half widths away from zero needs no more precision (t > 12 at four pairs)
FINE = 0.4     # the second look's half width, of the first's
CASES = 10     # fewer do not tell what spread is typical
WEIGHT = 20.0  # most degrees of freedom that the typical spread counts for
# Student's t at 97.5 and 99.75 % for 1 to 30 degrees of freedom (any table of it).
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
T9975 = (127.321, 14.089, 7.453, 5.598, 4.773, 4.317, 4.029, 3.833, 3.690, 3.581, 3.497, 3.428, 3.372, 3.326, 3.286,
         3.252, 3.222, 3.197, 3.174, 3.153, 3.135, 3.119, 3.104, 3.091, 3.078, 3.067, 3.057, 3.047, 3.038, 3.030)


Enough = Callable[[Sequence[Tuple[Sequence[float], Sequence[float]]]], List[bool]]


def enough_for(margin: float, goal: float = 0.0) -> Enough:
    """The stopping rule of a controller: for all cases of two arms, each as (medians of the base's blocks, of the
    candidate's) pair by pair, whether the case has been measured enough.

    margin: smallest change that matters, as a fraction. goal: half width of the first look; half the margin when 0."""
    goal, edge = goal or margin / 2, math.log1p(margin)

    def one(logs: Sequence[float], typical: Optional[Typical]) -> bool:
        for n in range(MIN_PAIRS, len(logs) + 1):  # the first that is precise is the first look, whatever came after it
            centre, half = interval(logs[:n], typical=typical)
            if half <= max(goal, abs(centre) / CLEAR):
                beyond = abs(centre) - interval(logs[:n], T9975, typical)[1] > edge
                return beyond or abs(centre) + half <= edge or interval(logs, typical=typical)[1] <= FINE * goal
        return False

    def enough(cases: Sequence[Tuple[Sequence[float], Sequence[float]]]) -> List[bool]:
        logs = [[math.log(b / a) for a, b in zip(*case)] for case in cases]
        typical = typical_of([trimmed(x)[1:] for x in logs if len(x) > 2])
        return [one(x, typical) for x in logs]

    return enough


def interval(logs: Sequence[float], quantiles: Sequence[float] = T975,
             typical: Optional[Typical] = None) -> Tuple[float, float]:
    """(centre, half width) of the trimmed mean of three or more log ratios, at 95 % or by T9975 at 99.5 (Yuen 1974)."""
    centre, variance, degrees = trimmed(logs)
    t = quantiles[min(degrees, len(quantiles)) - 1]
    return centre, t * math.sqrt(at_least(variance, degrees, typical) / len(logs))


def trimmed(logs: Sequence[float]) -> Tuple[float, float, int]:
    """Trimmed mean of three or more log ratios; their variance, such that variance / len(logs) is that of the mean; its
    degrees of freedom."""
    ordered: List[float] = sorted(logs)
    n = len(ordered)
    cut = int(TRIM * n)
    kept = ordered[cut:n - cut]
    wide = [kept[0]] * cut + kept + [kept[-1]] * cut
    middle = sum(wide) / n
    degrees = len(kept) - 1
    return sum(kept) / len(kept), sum((x - middle) ** 2 for x in wide) * n / (len(kept) * degrees), degrees


# ---- What spread is typical ------------------------------------------------------------------------------------------
Typical = Tuple[float, float]  # variance, and the degrees of freedom that it counts for


def at_least(variance: float, degrees: float, typical: Optional[Typical]) -> float:
    """A case's variance, or what it counts as among cases of which another variance is typical: never less."""
    if typical is None:
        return variance
    usual, weight = typical
    return max(variance, (weight * usual + degrees * variance) / (weight + degrees))


def typical_of(spreads: Sequence[Tuple[float, float]]) -> Optional[Typical]:
    """The typical one of (variance, degrees of freedom) of each case, from the moments of the logarithms of the
    variances (Smyth 2004, section 6.2); None with fewer than ten cases. Variances of zero say nothing."""
    known = [(v, d) for v, d in spreads if v > 0 and d > 0]
    if len(known) < CASES:
        return None
    logs = [math.log(v) - _digamma(d / 2) + math.log(d / 2) for v, d in known]
    mean = sum(logs) / len(logs)
    excess = sum((x - mean) ** 2 for x in logs) / (len(logs) - 1) - sum(_trigamma(d / 2) for _, d in known) / len(known)
    low, high = 0.01, WEIGHT / 2  # trigamma falls: bisect for the weight whose trigamma is what cases differ by
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if _trigamma(middle) > excess else (low, middle)
    return math.exp(mean + _digamma(high) - math.log(high)), 2 * high


def _digamma(x: float) -> float:
    """Derivative of log gamma, x > 0: upwards by its recurrence, then the asymptotic series."""
    below = 0.0
    while x < 8:
        below, x = below - 1 / x, x + 1
    y = 1 / (x * x)
    return below + math.log(x) - 0.5 / x - y * (1 / 12 - y * (1 / 120 - y / 252))


def _trigamma(x: float) -> float:
    below = 0.0
    while x < 8:
        below, x = below + 1 / (x * x), x + 1
    y = 1 / (x * x)
    return below + 1 / x + y / 2 + y / x * (1 / 6 - y * (1 / 30 - y / 42))
