"""What other rules would have said about the same two blocks, one of each arm. Each sees one process a side (their
tools see one process in all); our own verdict sees all pairs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scipy import stats


def t_test(base: Sequence[float], candidate: Sequence[float]) -> bool:
    """Welch's t-test on iterations at 5 %: significant means different."""
    return bool(stats.ttest_ind(base, candidate, equal_var=False).pvalue < 0.05)


def do_bench(base: Sequence[float], candidate: Sequence[float], threshold: float = 0.03) -> bool:
    """Medians, as triton.testing.do_bench gives them, that differ by more than a fixed threshold."""
    return abs(statistics.median(candidate) / statistics.median(base) - 1) > threshold


def nvbench(base: Sequence[float], candidate: Sequence[float]) -> bool:
    """nvbench_compare: means that differ by more than the smaller of the two relative standard deviations."""
    means = [statistics.fmean(x) for x in (base, candidate)]
    noise = min(statistics.stdev(x) / m for x, m in zip((base, candidate), means))
    return abs(means[1] / means[0] - 1) > noise


RULES = {"t-test on iterations": t_test, "do_bench medians, 3 %": do_bench, "nvbench rule": nvbench}
