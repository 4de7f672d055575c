"""When a case has been measured enough. Standard library only: a bundle measures where nothing else is installed.

Two looks, each when the interval has become narrow enough. At the first the half width is at most the goal (half the
margin): a case whose interval then lies on one side of the margin is done. One whose interval still holds the margin
(a change of 1.5 % against a margin of 1 %, say) goes on to a finer goal, and is done there whatever it shows. Pairs are
never added until something becomes significant. Beyond the margin the interval has to lie at 99.5 %: the false
discovery rate over all cases asks for more than 95 % of each, and what just cleared the margin would stay undecided.

The interval is the one that verdict/statistics.py judges by (Student's t, one pair in ten trimmed at each end).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Callable, List, Tuple

MIN_PAIRS = 4  # two ABBA quadruples: both orders twice; simulated error rates are in tests/test_statistics.py
TRIM = 0.1
CLEAR = 4.0    # an effect this many half widths away from zero needs no more precision (t > 12 at four pairs)
FINE = 0.4     # the second look's half width, of the first's
# Student's t at 97.5 and 99.75 % for 1 to 30 degrees of freedom (any table of it).
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
T9975 = (127.321, 14.089, 7.453, 5.598, 4.773, 4.317, 4.029, 3.833, 3.690, 3.581, 3.497, 3.428, 3.372, 3.326, 3.286,
         3.252, 3.222, 3.197, 3.174, 3.153, 3.135, 3.119, 3.104, 3.091, 3.078, 3.067, 3.057, 3.047, 3.038, 3.030)


def enough_for(margin: float, goal: float = 0.0) -> Callable[[Sequence[float], Sequence[float]], bool]:
    """The stopping rule of a controller: enough(medians of the base's blocks, of the candidate's), pair by pair.

    margin: smallest change that matters, as a fraction. goal: half width of the first look; half the margin when 0."""
    goal, edge = goal or margin / 2, math.log1p(margin)

    def enough(base: Sequence[float], candidate: Sequence[float]) -> bool:
        logs = [math.log(b / a) for a, b in zip(base, candidate)]
        for n in range(MIN_PAIRS, len(logs) + 1):  # the first that is precise is the first look, whatever came after it
            centre, half = interval(logs[:n])
            if half <= max(goal, abs(centre) / CLEAR):
                beyond = abs(centre) - interval(logs[:n], T9975)[1] > edge
                return beyond or abs(centre) + half <= edge or interval(logs)[1] <= FINE * goal
        return False

    return enough


def interval(logs: Sequence[float], quantiles: Sequence[float] = T975) -> Tuple[float, float]:
    """(centre, half width) of the trimmed mean of three or more log ratios, at 95 % or by T9975 at 99.5 (Yuen 1974)."""
    ordered: List[float] = sorted(logs)
    n = len(ordered)
    cut = int(TRIM * n)
    kept = ordered[cut:n - cut]
    wide = [kept[0]] * cut + kept + [kept[-1]] * cut
    middle = sum(wide) / n
    squares = sum((x - middle) ** 2 for x in wide)
    degrees = len(kept) - 1
    t = quantiles[min(degrees, len(quantiles)) - 1]
    return sum(kept) / len(kept), t * math.sqrt(squares / (len(kept) * degrees))
