"""What would win a measured loss back, as far as the same measurements show it: re-tuning, another operator that
does the same work, a known switch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from ..model import Arm, Delta, Mitigation, State
from . import patterns
from .policy import MeasuredRules

# (component, first version of the change, variable, guard): growth of device memory that has a known switch.
MEMORY_SWITCHES = (
    ("nccl", (2, 19), "NCCL_CUMEM_ENABLE=0", "must not be set on multi-node NVLink systems: they need cuMem memory"),
)


def measured_mitigations(deltas: Sequence[Delta], arms: tuple[Arm, Arm], rules: MeasuredRules) -> list[Mitigation]:
    out = []
    groups: dict[tuple[str, str], list[Delta]] = defaultdict(list)
    for d in deltas:
        groups[(d.operator, d.arch)].append(d)
    for (operator, arch), group in groups.items():
        for found in moved_optima(group, rules):
            out.append(Mitigation(f"re-tune {operator} on the candidate: {found.retuned}", True, found.recovers))
        other, when = rules.alternatives.get(operator, (None, ""))
        if other and (other, arch) in groups:
            share = _alternative(group, groups[(other, arch)])
            if share is not None:
                out.append(Mitigation(f"send {when} of {operator} to {other}", True, share))
    grown = any(c.what.startswith("memory.") and c.candidate > c.base for d in deltas for c in d.changes)
    if grown or any(d.state is State.BROKEN and d.reason == "oom" for d in deltas):
        out += [Mitigation(switch, False, guard=guard) for component, since, switch, guard in MEMORY_SWITCHES
                if crossed(arms, component, since)]
    return out


def guard_of(switch: str) -> str | None:
    """When a known switch (NCCL_CUMEM_ENABLE=0) must not be used; None where nothing is known."""
    return next((guard for _, _, known, guard in MEMORY_SWITCHES if known == switch), None)


def crossed(arms: tuple[Arm, Arm], component: str, since: tuple[int, ...]) -> bool:
    """Whether the component moves from before `since` to it or beyond."""
    before, after = (_version(a, component) for a in arms)
    return bool(before and after and before < since <= after)


def moved_optima(group: Sequence[Delta], rules: MeasuredRules) -> list[patterns.OptimumMoved]:
    known = [d for d in group if d.base.get("median_us") and d.candidate.get("median_us")]
    return patterns.optimum_moved({d.case: d.base["median_us"] for d in known},
                                  {d.case: d.candidate["median_us"] for d in known}, rules.margin)


def _alternative(slow: Sequence[Delta], other: Sequence[Delta]) -> float | None:
    """Share of the loss of the worst slow case that the other operator, at the same parameters, does not have."""
    worst = max((d for d in slow if d.ratio and (d.state is State.SLOWER or d.state is State.UNDECIDED)),
                key=lambda d: d.ratio or 0.0, default=None)
    if worst is None:
        return None
    own = patterns.parameters(worst.case)
    fits = [d for d in other if d.candidate.get("median_us")
            and all(own.get(k) == v for k, v in patterns.parameters(d.case).items())]
    loss = worst.candidate["median_us"] - worst.base["median_us"]
    if not fits or loss <= 0:
        return None
    left = min(d.candidate["median_us"] for d in fits) - worst.base["median_us"]
    return max(0.0, min(1.0, 1 - left / loss)) if left < loss else None


def _version(arm: Arm, component: str) -> tuple[int, ...] | None:
    found = arm.stack.component(component)
    digits = re.findall(r"\d+", found.version) if found else []
    return tuple(map(int, digits[:2])) or None
