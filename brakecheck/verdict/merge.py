"""One answer from a run: its measured deltas, and the static ones of its toolchains where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..model import Cause, Comparison, Delta, Reason, Run, State, Verdict
from .causes import causes, refutation
from .decide import decide, of_several
from .measured_verdict import count
from .policy import Policy
from .several import compare_several

NO_CODE = ("does-not-compile", "compiles-now")  # what rejected a source says nothing of the code that came of it later


def compare_run(run: Run, policy: Policy | None = None) -> Comparison:
    """The comparison of the arms of one run."""
    found = compare_several(run, policy)
    return with_static(found, run.static, policy or Policy()) if run.static else found


def with_static(measured: Comparison, static: dict[str, Any], policy: Policy) -> Comparison:
    """Static deltas of the kernels that were not timed (equal machine code is the same without a timer) join the
    measured ones; those of kernels that were timed become changes of their measured deltas."""
    deltas = Comparison.from_json(static["comparison"]).deltas
    timed = {operator: {tuple(pair) for pair in pairs} for operator, pairs in static["timed"].items()}
    every = {pair for pairs in timed.values() for pair in pairs}
    rest = tuple(d for d in deltas if (d.source, d.case) not in every)
    several = len(measured.arms) > 2  # then the arms have the toolchains' names, and a step belongs to one pair of them
    told = tuple(_told(d, [s for s in deltas if (s.source, s.case) in timed.get(d.operator, ())
                           and (not several or s.step == d.step)]) for d in measured.deltas)
    if several:
        measured = replace(measured, causes=(*measured.causes, *_steps(measured, told, deltas, timed)))
    elif not measured.causes:  # which part of the toolchain, for what moved or became wrong or right
        moved = [replace(d, case=f"{d.operator} {d.case}") for d in told if d.state is not State.UNDECIDED]
        found = causes(moved, measured.arms[0], measured.arms[-1])
        measured = replace(measured, causes=tuple(c for c in found if c.component != "unattributed"))
    blamed = tuple(Reason("cause", f"by {c.component}: {c.evidence[0]}"
                          + (f"; and {len(c.evidence) - 1} more" if len(c.evidence) > 1 else ""))
                   for c in measured.causes if measured.verdict.rank >= Verdict.HOLD.rank and c.evidence)
    measured = replace(measured, reasons=(*blamed, *measured.reasons))
    if not rest:  # all of them were timed
        return replace(measured, deltas=told)
    environment, alone, times = measured.environment, {measured.arms[-1].name: measured.verdict}, measured.coverage
    each = {arm.name: decide(_of_arm(arm.name, rest, measured) if several else rest, measured.arms[0], arm, policy)
            for arm in measured.arms[1:]}
    if several:
        alone = {name: Verdict(value) for name, value in environment["verdicts"].items()}
    verdicts = {name: max(alone[name], each[name].verdict, key=lambda v: v.rank) for name in alone}
    lead = max(reversed(verdicts), key=lambda name: verdicts[name].rank)  # of equals the last, as everywhere
    decision = each[lead]
    if several:
        environment = {**environment, "verdicts": {name: v.value for name, v in verdicts.items()}}
        own = [d for d in told if d.step[1] == lead]
        covered = [d for d in own if policy.scope.covers(d)]
        times = {**count(covered), **({"ignored": len(own) - len(covered)} if len(own) > len(covered) else {})}
    coverage = dict(Counter(decision.coverage) + Counter(times))
    coverage = {**dict.fromkeys((*times, *decision.coverage), 0), **coverage}
    if not measured.deltas:  # nothing had to be timed
        return replace(measured, verdict=decision.verdict, headline=decision.headline, reasons=decision.reasons,
                       coverage=coverage, deltas=rest)
    by_code = decision.verdict.rank > alone[lead].rank and decision.verdict.rank >= measured.verdict.rank
    leads = decision if by_code else measured
    headline = leads.headline
    if several:
        headline = of_several(headline.partition(" | GO: ")[0], leads.verdict, lead if leads is decision else "",
                              verdicts)
    return replace(measured, verdict=leads.verdict, headline=headline, coverage=coverage,
                   reasons=(*leads.reasons, *(measured if leads is decision else decision).reasons),
                   deltas=(*told, *rest), environment=environment)


def _of_arm(arm: str, rest: Sequence[Delta], measured: Comparison) -> list[Delta]:
    """Of the steps of kernels that were not timed, what became of each from the base to one of several candidates: code
    that changed and changed back is the same, and what broke stays broken until something mends it."""
    names = [a.name for a in measured.arms]
    reached: dict[tuple[str, str, str, str | None], list[Delta]] = {}
    for d in sorted(rest, key=lambda d: names.index(d.step[1])):
        if names.index(d.step[1]) <= names.index(arm):
            reached.setdefault((d.operator, d.case, d.arch, d.source), []).append(d)
    out = []
    for steps in reached.values():
        last = steps[-1]
        code = [side.get("code_sha256") for side in (steps[0].base, last.candidate)]
        ends = next((d for d in reversed(steps) if d.state in (State.BROKEN, State.FIXED)), last)
        if len(steps) > 1 and all(code) and code[0] == code[1]:
            last = replace(last, state=State.SAME, reason="identical-sass")
        elif ends.state is State.BROKEN and last.state is State.UNDECIDED:
            last = ends
        elif len(steps) > 1 and all(code) and last.state is State.FIXED:  # of a release between: the base worked
            last = replace(last, state=State.UNDECIDED, reason="code")
        out.append(last)
    return out


def _steps(measured: Comparison, told: Sequence[Delta], static: Sequence[Delta],
           timed: dict[str, set[tuple[str, str]]]) -> tuple[Cause, ...]:
    """Which part of the toolchain changed the machine code between the last release that was as fast as the base (or
    the base itself) and the first that is slower, for each case that got slower, the largest loss first. The arms are
    releases in order."""
    arms = {arm.name: arm for arm in measured.arms}
    names = list(arms)
    cases: dict[tuple[str, str, str], list[Delta]] = {}
    for d in sorted(told, key=lambda d: -(d.ratio or 0.0)):
        cases.setdefault((d.operator, d.case, d.arch), []).append(d)
    found: dict[tuple[str, str, str], list[str]] = {}
    for (operator, case, arch), ones in cases.items():
        states = {d.step[1]: d.state for d in ones}
        bad = next((n for n in names if states.get(n) is State.SLOWER), None)
        if bad is None:
            continue
        before = names[1:names.index(bad)]
        good = next((n for n in reversed(before) if states.get(n) in (State.SAME, State.FASTER)), names[0])
        on_the_way = [s for n in names[names.index(good) + 1:names.index(bad) + 1] for s in static
                      if s.step[1] == n and (s.source, s.case) in timed.get(operator, ()) and s.component
                      and s.reason not in NO_CODE]
        parts = dict.fromkeys(p for s in on_the_way for p in (s.component or "").split("+"))
        if parts:
            how = "; ".join(dict.fromkeys(f"in {s.step[1]} by {s.component}" for s in on_the_way))
            if len({s.step for s in on_the_way}) == 1:
                how = on_the_way[0].attribution or how
            found.setdefault(("+".join(sorted(parts)), good, bad), []).append(
                f"{operator} {case} ({arch}) is slower from {good} to {bad}: {how}")
    every = sum(map(len, found.values()))
    return tuple(Cause(component, tuple(lines), refutation(component, arms[good], arms[bad]), len(lines) / every)
                 for (component, good, bad), lines in found.items())


def _told(delta: Delta, static: list[Delta]) -> Delta:
    component = next((d.component for d in static if d.component), None)
    attribution = next((d.attribution for d in static if d.component), None)
    return replace(delta, changes=(*delta.changes, *(c for d in static for c in d.changes)),
                   component=delta.component or component, attribution=delta.attribution or attribution)
