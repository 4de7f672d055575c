"""Tables of more than two arms: releases in order, the levels of two components crossed, a switch beside the release
that it belongs to. The first arm is the base, all others are candidates; the last is the one that is meant, and the
arms between say what else is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..model import Arm, Comparison, Delta, Measurement, Mitigation, Reason, Run, State, UsageError, Verdict
from . import patterns, signals, statistics
from .decide import of_several
from .measured_verdict import compare_runs, named, scoped
from .mitigate import guard_of
from .policy import Policy

Name = tuple[str, str, str]
WON_BACK = 0.5  # share of a loss that a move has to win back to be offered


def compare_several(run: Run, policy: Policy | None = None) -> Comparison:
    """The comparison of all arms of one run; with two arms the same as `compare_runs`. Verdict and reasons are those of
    the worst candidate, of the last one among equals; environment["verdicts"] has one for each arm after the first."""
    policy = policy or Policy()
    if len(run.arms) < 2:
        raise UsageError(f"{run.id} has one arm only: {run.arms[0].name if run.arms else 'none'}", "compare",
                         "give two runs, or a table in which two arms appear")
    found = compare_runs(run, run, policy)
    if len(run.arms) == 2:
        return found
    pairs = [replace(run, arms=(run.arms[0], arm)) for arm in run.arms[1:-1]]
    others = [compare_runs(pair, pair, policy) for pair in pairs]
    each = dict(zip((a.name for a in run.arms[1:]), (*others, found)))
    deltas = [d for c in each.values() for d in c.deltas]
    mitigations, crossed = _switches(run, found, others), _crossed(run, policy, deltas)
    reasons = [r for r, _ in crossed] + _steps(run, policy, deltas)
    lead = reasons[0].text if reasons else None
    reasons += _trials(run)
    mitigations = [m for _, ms in crossed for m in ms] + mitigations
    known = {m.action for m in mitigations}
    verdicts = {name: c.verdict for name, c in each.items()}
    name = max(reversed(verdicts), key=lambda one: verdicts[one].rank)
    worst, verdict = each[name], verdicts[name]
    if crossed and verdict.rank < Verdict.HOLD.rank:
        verdict = Verdict.HOLD  # the combination is slow: wait, or go there by another way
    first = next((r.code for r in worst.reasons if r.text in worst.headline), "")
    # A step is about time; a BRAKE for another reason comes before it.
    led = lead and verdict is not Verdict.GO and (verdict is not Verdict.BRAKE or first == "slower")
    headline = of_several(f"{verdict.value}: {lead}" if led else worst.headline, verdict, "" if led else name, verdicts)
    warnings = list(dict.fromkeys(w for c in each.values() for w in c.environment.get("warnings", ())))
    return replace(
        worst, verdict=verdict, headline=headline, reasons=(*reasons, *worst.reasons), arms=run.arms,
        deltas=tuple(deltas),
        mitigations=(*mitigations, *(m for m in worst.mitigations if m.action not in known)),
        environment={**worst.environment, **({"warnings": warnings} if warnings else {}),
                     "verdicts": {one: v.value for one, v in verdicts.items()}})


def _by_case(run: Run) -> dict[Name, dict[str, Measurement]]:
    out: dict[Name, dict[str, Measurement]] = {}
    for m in run.measurements:
        out.setdefault(m.name, {})[m.arm] = m
    return out


def _differing(arms: Sequence[Arm]) -> list[str]:
    """Components that do not have one version in all arms."""
    names = dict.fromkeys(c.name for arm in arms for c in arm.stack.components)
    return [n for n in names if len({_level(arm, n) for arm in arms}) > 1]


def _level(arm: Arm, component: str) -> str:
    found = arm.stack.component(component)
    return found.version if found else ""


def _steps(run: Run, policy: Policy, deltas: Sequence[Delta]) -> list[Reason]:
    """Releases in order: where it went bad, and whether it stayed so (F10)."""
    if len(_differing(run.arms)) > 1:
        return []  # levels of two components have no order
    out = []
    for (operator, case, arch), sides in _by_case(run).items():
        known = [(arm.name, sides[arm.name].median_us or 0.0) for arm in run.arms
                 if arm.name in sides and sides[arm.name].median_us]
        step = signals.step_change([us for _, us in known], policy.measured.margin)
        if step is None or step.ratio <= 1:
            continue
        bad, good = known[step.first][0], known[step.first - 1][0]
        if not _slower((operator, case, arch), bad, sides, deltas):
            continue
        stays = f"plateau since ({step.since} releases)" if step.plateau else f"for {step.since} releases"
        text = (f"{named(operator, case, arch)}: {step.ratio:.3g} times as slow; first bad release {bad}, last good "
                f"one {good}; {stays}")
        out.append(Reason("step", text, scoped(operator, case, arch)))
    return out


def _slower(name: Name, arm: str, sides: dict[str, Measurement], deltas: Sequence[Delta]) -> bool:
    """Whether an arm that stands out by its medians was found slower than the base: the medians of equal arms stand
    apart too. A table with one number an arm has nothing else to go by."""
    if all(len(m.blocks) <= 1 for m in sides.values()):
        return True
    return any(d.state is State.SLOWER and (d.operator, d.case, d.arch, d.step[1]) == (*name, arm) for d in deltas)


def _crossed(run: Run, policy: Policy, deltas: Sequence[Delta]) -> list[tuple[Reason, list[Mitigation]]]:
    """Two components crossed: one level of each that is slow only together (F6)."""
    names = _differing(run.arms)
    if len(names) != 2:
        return []
    one, two = names
    levels = {arm.name: (_level(arm, one), _level(arm, two)) for arm in run.arms}
    out = []
    for (operator, case, arch), sides in _by_case(run).items():
        times = {levels[a]: m.median_us for a, m in sides.items() if m.median_us}
        found = patterns.interaction(times, (one, two), policy.measured.margin)
        if found is None:
            continue
        arm = next(a for a in sides if levels[a] == found.levels)
        if arm == run.arms[0].name or not _slower((operator, case, arch), arm, sides, deltas):
            continue  # away from a base that is slow is where one wants to go
        text = (f"{named(operator, case, arch)}: an interaction of {one} {found.levels[0]} with {two} "
                f"{found.levels[1]}, {found.ratio:.3g} times as slow as either alone explains")
        # The driver first: it moves under every stack, while the other component is what one wanted to have.
        moves = sorted(found.moves, key=lambda m: (m.component != "driver", -m.recovers))
        offered = [Mitigation(f"move {'the driver' if m.component == 'driver' else m.component} to {m.to}", True,
                              m.recovers) for m in moves if m.recovers >= WON_BACK]
        out.append((Reason("interaction", text, scoped(operator, case, arch)), offered))
    return out


def _switches(run: Run, last: Comparison, others: Sequence[Comparison]) -> list[Mitigation]:
    """Arms that have the candidate's components and other variables: what setting those wins back, as measured."""
    candidate = run.arms[-1]
    versions = [(c.name, c.version) for c in candidate.stack.components]
    hurt = [d for d in last.deltas if d.state in (State.BROKEN, State.SLOWER)]
    out = []
    for arm, comparison in zip(run.arms[1:-1], others):
        own, there = arm.stack.environment, candidate.stack.environment
        set_here = [f"{k}={v}" for k, v in own.items() if there.get(k) != v]
        if [(c.name, c.version) for c in arm.stack.components] != versions or not set_here or not hurt:
            continue
        fine = {(d.operator, d.case, d.arch) for d in comparison.deltas if d.state not in (State.BROKEN, State.SLOWER)
                and not d.reason.startswith("fails")}
        back = [d for d in hurt if (d.operator, d.case, d.arch) in fine and "trials" not in d.candidate]
        if back:
            guards = [g for g in map(guard_of, set_here) if g]
            out.append(Mitigation(" ".join(set_here), True, len(back) / len(hurt), "; ".join(guards) or None))
    return out


def _trials(run: Run) -> list[Reason]:
    """Counts of failures: whether the arms between have fewer of them than the candidate, or how many more tries it
    takes to know (F26)."""
    out = []
    for (operator, case, arch), sides in _by_case(run).items():
        last = sides.get(run.arms[-1].name)
        for arm in run.arms[1:-1]:
            other = sides.get(arm.name)
            if last is None or other is None or not last.trials or not other.trials:
                continue
            (bad, tries), (fewer, others) = (_counts(m) for m in (last, other))
            found = statistics.compare_counts((bad, tries), (fewer, others), expect="fewer")
            seen = (f"{named(operator, case, arch)}: {fewer} of {others} failed with {arm.name}, {bad} of {tries} "
                    "without")
            if found.enough:
                text = f"{seen}: it helps (p = {found.p:.2g})"
            else:
                more = "" if found.needed is None else f"; {found.needed} tries of each are needed"
                text = f"{seen}: not enough evidence that it helps (p = {found.p:.1f}){more}"
            out.append(Reason("helps" if found.enough else "not-enough-evidence", text,
                              scoped(operator, case, arch)))
    return out


def _counts(m: Measurement) -> tuple[int, int]:
    trials = m.trials or {}
    return trials["failed"], trials["tries"]
