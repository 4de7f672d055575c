"""The verdict on measured deltas: hard rules first, then memory, speed and coverage, each a reason with its scope."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..model import Arm, Comparison, Delta, Measurement, Mitigation, Reason, Run, State, Verdict, encode
from . import patterns
from .differences import differences, sole_cause, unintended
from .measured import HOST, measured_deltas, throughput
from .mitigate import measured_mitigations, moved_optima
from .policy import MeasuredRules, Policy
from .run_facts import facts

Finding = tuple[Verdict, Reason]
NOT_TOLD = "not told"  # what a table leaves out (bench/table.py)
WHY_UNKNOWN = {"not-measured": "not measured", "fails-on-both": "fail on both", "missing-on-both": "missing on both",
               "wrong-on-both": "wrong on both", "not-checked": "not checked on the candidate",
               "unlike-keys": "not measured alike",
               "no-key": "measured nobody knows how", "timer-does-not-wait": "by a timer that does not wait",
               "drift": "drifting"}
LOST = 10.0    # times the base's error that no other order of the same arithmetic explains,
SINGLE = 1e-6  # where it is more than the rounding of float32
DEVICE = ("name", "multiprocessors", "power_limit_watts", "threads")  # of Run.device: what moves times
SHOWN = 12  # differences between two whole environments that are named in a reason


def compare_runs(base: Run, candidate: Run, policy: Policy | None = None) -> Comparison:
    """Two runs, or the first and the last arm of one. Runs taken at different times have no pairs, whatever the numbers
    of their blocks say."""
    if base.id != candidate.id:
        base_found = _unpair(base.of_arm(base.arms[0].name))
        candidate_found = _unpair(candidate.of_arm(candidate.arms[-1].name))
        arms = (replace(base.arms[0], name="base"), replace(candidate.arms[-1], name="candidate"))
    else:
        base_found, candidate_found = list(base.of_arm(base.arms[0].name)), list(base.of_arm(base.arms[-1].name))
        arms = (base.arms[0], candidate.arms[-1])
    return conclude(base_found, candidate_found, arms, policy, facts(base, candidate), other_device(base, candidate))


def other_device(base: Run, candidate: Run) -> str:
    """In what the devices of two runs differ that moves times; "" when in nothing that both tell."""
    a, b = base.device, candidate.device
    return "; ".join(f"device {k}: {a[k]} against {b[k]}" for k in DEVICE if k in a and k in b and a[k] != b[k])


def _unpair(found: Sequence[Measurement]) -> list[Measurement]:
    return [replace(m, blocks=tuple(replace(b, pair=None) for b in m.blocks)) for m in found]


def conclude(base: Sequence[Measurement], candidate: Sequence[Measurement], arms: tuple[Arm, Arm],
             policy: Policy | None = None, environment: dict[str, Any] | None = None,
             refused: str = "") -> Comparison:
    """The comparison of two arms' measurements: deltas, verdict, reasons, mitigations; and a verdict per arch (F3).
    What the policy's scope ignores stays among the deltas and decides nothing. refused: as measured_deltas has it."""
    policy = policy or Policy()
    step = arms[0].name, arms[1].name
    return judged(measured_deltas(base, candidate, policy.measured, step, refused), arms, policy, environment)


def judged(every: Sequence[Delta], arms: tuple[Arm, Arm], policy: Policy, environment: dict[str, Any] | None = None,
           ) -> Comparison:
    """The comparison that these deltas make."""
    rules = policy.measured
    deltas = [d for d in every if policy.scope.covers(d)]
    mitigations = measured_mitigations(deltas, arms, rules)
    findings = (_correctness(deltas) + _coverage(deltas, every, mitigations) + _memory(deltas, mitigations, rules)
                + _speed(deltas, rules) + _gain(deltas, rules))
    findings += _thin(deltas, rules)
    by_arch = {arch: _worst([f for f in findings if f[1].scope.get("arch") in (None, arch)])
               for arch in dict.fromkeys(d.arch for d in deltas)}
    verdict = _worst(findings)
    if verdict is Verdict.GO:
        findings += _unknown(deltas, rules)
    findings.sort(key=lambda f: -f[0].rank)
    differing = differences(*arms)
    asides = [Reason("unintended-difference", f"the stacks also differ in {d.text}", {"component": d.component})
              for d in unintended(differing)]
    untold = [d.text for d in differing if d.intended is None]
    if untold:
        shown = "; ".join(untold[:SHOWN]) + (f"; and {len(untold) - SHOWN} more" if len(untold) > SHOWN else "")
        asides.append(Reason("differences", f"the stacks differ in {shown}"))
    ignored = {"ignored": len(every) - len(deltas)} if len(every) > len(deltas) else {}
    return Comparison(
        verdict, _headline(verdict, findings, throughput(deltas, rules.weights), by_arch),
        (*asides, *(r for _, r in findings)), arms, {**count(deltas), **ignored}, tuple(every),
        causes=tuple(sole_cause(differing, deltas)), mitigations=tuple(mitigations),
        environment={**(environment or {}), "verdict_by_arch": {a: v.value for a, v in by_arch.items()},
                     "policy": encode(policy), "differences": [d.text for d in differing]})


def _worst(findings: Sequence[Finding]) -> Verdict:
    return max((v for v, _ in findings), key=lambda v: v.rank, default=Verdict.GO)


def scoped(operator: str, case: str, arch: str) -> dict[str, str]:
    """Scope of a reason; what is not told is absent."""
    return {k: v for k, v in (("operator", operator), ("case", case), ("arch", arch)) if v not in ("", NOT_TOLD)}


def _scope(d: Delta) -> dict[str, str]:
    return scoped(d.operator, d.case, d.arch)


def named(operator: str, case: str, arch: str) -> str:
    """What a reason is about; a table need not tell the device."""
    return f"{operator} {case}".strip() + ("" if arch in ("", NOT_TOLD) else f" on {arch}")


def _name(d: Delta) -> str:
    return named(d.operator, d.case, d.arch)


def count(deltas: Sequence[Delta]) -> dict[str, int]:
    states = [d.state for d in deltas]
    decided = (State.FASTER, State.SAME, State.SLOWER)
    return {"compared": sum(s in decided for s in states), **{s.value: states.count(s) for s in State}}


# ---- Rules -----------------------------------------------------------------------------------------------------------
def _correctness(deltas: Sequence[Delta]) -> list[Finding]:
    out: list[Finding] = []
    for d in deltas:
        if d.state is State.BROKEN and d.reason == "wrong-result":
            out.append((Verdict.BRAKE, Reason("wrong-result", f"{_name(d)}: {d.text}", _scope(d))))
        elif d.state is State.FIXED and d.reason == "right-result":
            out.append((Verdict.GO, Reason("right-result", f"{_name(d)}: {d.text}: a reason to go", _scope(d))))
        for change in d.changes:
            if change.what in ("determinism", "first-call"):
                out.append((Verdict.HOLD, Reason("not-deterministic", f"{_name(d)}: {change.text}", _scope(d))))
            # Where the operator states no tolerance, nobody said how large an error may become.
            untold = "outputs" in d.candidate.get("numerics", {}) and "tolerance" not in d.candidate["numerics"]
            if change.what.startswith("error.") and untold and change.candidate > max(LOST * change.base, SINGLE):
                text = f"{_name(d)}: {change.text}, and the operator states no tolerance"
                out.append((Verdict.HOLD, Reason("less-precise", text, _scope(d))))
            if change.what == "failures":
                out.append((Verdict.HOLD, Reason("failed-at-times", f"{_name(d)}: {change.text}", _scope(d))))
    return out


def _coverage(deltas: Sequence[Delta], every: Sequence[Delta], mitigations: Sequence[Mitigation]) -> list[Finding]:
    out: list[Finding] = []
    switched = any(m.guard for m in mitigations)
    for d in deltas:
        if d.state is State.BROKEN and d.reason == "unusable" or "fell back to" in d.text:
            out.append((Verdict.WITHHELD, Reason("fell-back", f"{_name(d)}: {d.text}", _scope(d))))
        elif d.state is State.BROKEN and d.reason == "oom" and switched:  # memory that a known switch brings back (F7)
            out.append((Verdict.HOLD, Reason("out-of-memory", f"{_name(d)}: {d.text}", _scope(d))))
        elif d.state is State.BROKEN and d.reason != "wrong-result":
            out.append((Verdict.BRAKE, Reason("broken", f"{_name(d)}: {d.text}", _scope(d))))
        elif d.state is State.FIXED and d.reason != "right-result":
            out.append((Verdict.GO, Reason("fixed", f"{_name(d)}: {d.text}", _scope(d))))
        elif d.state is State.MISSING:
            out.append((Verdict.HOLD, Reason("missing", f"{_name(d)}: {d.text}", _scope(d))))
        elif d.reason in ("unlike-keys", "no-key", "timer-does-not-wait", "drift"):
            out.append((Verdict.WITHHELD, Reason(d.reason, f"{_name(d)}: {d.text}", _scope(d))))
    if not deltas and every:
        out.append((Verdict.WITHHELD, Reason("nothing-measured", "the policy ignores every case")))
    elif all(d.state is State.NEW for d in deltas):
        out.append((Verdict.WITHHELD, Reason("nothing-measured", "no case was measured on both arms")))
    return out


def _thin(deltas: Sequence[Delta], rules: MeasuredRules) -> list[Finding]:
    """Too many cases without an answer withhold a GO, on each arch for itself: one that was measured well says nothing
    of another. New cases count for nothing, as there is nothing to compare them with. `most_undecided` is at most 1, so
    that nothing decided is no GO whatever the policy allows."""
    out: list[Finding] = []
    archs = list(dict.fromkeys(d.arch for d in deltas))
    for arch in archs:
        asked = [d for d in deltas if d.arch == arch and d.state is not State.NEW]
        undecided = [d for d in asked if d.state is State.UNDECIDED]
        if not undecided or len(undecided) < rules.most_undecided * len(asked):
            continue
        where = arch if len(archs) > 1 else ""
        text = f"{len(undecided)} of {len(asked)} cases{f' on {where}' if where else ''} are undecided"
        others = _reasons(undecided)
        longer = sum(others.values()) < len(undecided) or "not-measured" in others
        text += f" ({', '.join(f'{n} {WHY_UNKNOWN[kind]}' for kind, n in others.most_common())})" if others else ""
        text += ": measure longer (--budget), or on a quieter device" if longer else ""
        out.append((Verdict.WITHHELD, Reason("undecided", text, scoped("", "", where))))
    return out


def _unknown(deltas: Sequence[Delta], rules: MeasuredRules) -> list[Finding]:
    """What a GO knows nothing of: it names how many cases, and why; and how many are only undecided because, among so
    many cases, some look slower by chance."""
    undecided = [d for d in deltas if d.state is State.UNDECIDED]
    others = _reasons(undecided)
    told = [f"{n} {WHY_UNKNOWN[kind]}" for kind, n in others.most_common()]
    if len(undecided) > sum(others.values()):
        told.append(f"{len(undecided) - sum(others.values())} undecided")
    out = [f"nothing is known of {len(undecided)} of {len(deltas)} cases: {', '.join(told)}"] if undecided else []
    look = sum(d.low is not None and d.low > 1 + rules.margin for d in undecided)
    if look:
        out[0] += f"; {look} of them {'looks' if look == 1 else 'look'} slower, which chance may do among so many cases"
    lost = [d for d in deltas if d.candidate.get("status") == "ok"
            and set(d.base.get("memory", {})) - set(d.candidate.get("memory", {}))]
    if lost:
        kinds = sorted({kind for d in lost for kind in set(d.base["memory"]) - set(d.candidate.get("memory", {}))})
        out.append(f"memory ({', '.join(kinds)}) of {len(lost)} of {len(deltas)} cases is known on the base only")
    return [(Verdict.GO, Reason("unknown", text)) for text in out]


def _reasons(undecided: Sequence[Delta]) -> Counter[str]:
    """Undecided cases that more time would not decide, by reason."""
    return Counter(d.reason for d in undecided if d.reason in WHY_UNKNOWN)


def _memory(deltas: Sequence[Delta], mitigations: Sequence[Mitigation], rules: MeasuredRules) -> list[Finding]:
    """Growth against its limits; with a switch that brings it back, the move waits for that switch instead (F7). What
    visits of one arm differ by is no ground for a BRAKE, nor is what the host holds: visits differ by whole tensors
    there, and a few of them may differ alike."""
    out: list[Finding] = []
    switched = any(m.guard for m in mitigations)
    for d in deltas:
        for change in d.changes:
            if change.what == "leak":
                out.append((Verdict.BRAKE, Reason("memory-leak", f"{_name(d)}: {change.text}", _scope(d))))
            if not change.what.startswith("memory."):
                continue
            grew = change.candidate / change.base - 1 if change.base else math.inf if change.candidate > 0 else 0.0
            kind = change.what.partition(".")[2]
            wide = max(side.get("memory_spread", {}).get(kind, 0.0) for side in (d.base, d.candidate))
            sure = kind != HOST and change.candidate - wide > (1 + rules.memory_brake) * change.base
            verdict = Verdict.GO
            if math.isinf(grew):  # no limit in percent speaks of this
                verdict = Verdict.HOLD
            elif grew > rules.memory_brake:
                verdict = Verdict.BRAKE if sure and not switched else Verdict.HOLD
            elif grew > rules.memory_hold:
                verdict = Verdict.HOLD
            if verdict is not Verdict.GO:
                speed = "" if d.ratio is None else f", throughput {1 / d.ratio - 1:+.1%}"
                shown = f"memory {grew:+.0%}" if math.isfinite(grew) else "memory where there was none"
                text = f"{_name(d)}: {shown}{speed} ({change.text})"
                text += f"; visits of one arm differ by {wide / 2**20:,.0f} MiB" if wide >= 2**20 else ""
                out.append((verdict, Reason("memory-growth", text, _scope(d))))
    return out


def _speed(deltas: Sequence[Delta], rules: MeasuredRules) -> list[Finding]:
    """Slow cases by operator and arch: which share of the cases, what they have in common, what the loss grows with."""
    out: list[Finding] = []
    groups: dict[tuple[str, str], list[Delta]] = defaultdict(list)
    for d in deltas:
        groups[(d.operator, d.arch)].append(d)
    for (operator, arch), group in sorted(groups.items(), key=lambda g: -_loss(g[1])):
        moved = moved_optima(group, rules)
        for found in moved:
            out.append((Verdict.HOLD, Reason("optimum-moved", f"{named(operator, '', arch)}: {found.text}",
                                             scoped(operator, found.pinned, arch))))
        pinned = {m.pinned for m in moved}
        slow = [d for d in group if d.state is State.SLOWER and d.case not in pinned]
        likely = [d for d in group if d.state is State.UNDECIDED and (d.low or d.ratio or 0) > 1 + rules.unconfirmed
                  and d.case not in pinned]
        if slow:
            out.append(_slow(operator, arch, slow, group, rules))
        if likely:
            out.append(_likely(operator, arch, likely, group))
        for d in group:
            for change in d.changes:
                if change.what == "first_call_ms":
                    out.append((Verdict.HOLD, Reason("compile-time", f"{_name(d)}: {change.text}", _scope(d))))
    return out


def _loss(group: Sequence[Delta]) -> float:
    """Largest ratio of the slower cases; 0 without any."""
    return max((d.ratio or 0.0 for d in group if d.state is State.SLOWER), default=0.0)


def _slow(operator: str, arch: str, slow: list[Delta], group: list[Delta], rules: MeasuredRules) -> Finding:
    worst = max(slow, key=lambda d: d.ratio or 0.0)
    spared = [d.case for d in group if d.state in (State.SAME, State.FASTER)]
    where, common = _common(slow, spared)
    which = (f"{len(slow)} of {len(group)} cases slower{where}, the worst {worst.case} by" if len(group) > 1
             else f"{worst.case} slower by")
    text = (f"{named(operator, '', arch)}: {which} {(worst.ratio or 1) - 1:+.1%} [{(worst.low or 1) - 1:+.1%}, "
            f"{(worst.high or 1) - 1:+.1%}]{_growth(slow)}")
    # A cliff that leaves the other cases alone can be walked around; a loss everywhere cannot.
    everywhere = not spared and len(group) > 1 or len(group) == 1
    verdict = Verdict.BRAKE if everywhere and (worst.low or 0) > 1 + rules.slower_brake else Verdict.HOLD
    return verdict, Reason("slower", text, {**scoped(operator, "", arch), **common})


def _likely(operator: str, arch: str, likely: list[Delta], group: list[Delta]) -> Finding:
    """Losses that too few blocks were taken to confirm: a reason to wait, never one to brake."""
    worst = max(likely, key=lambda d: d.low or d.ratio or 0.0)
    where, common = _common(likely, [d.case for d in group if d not in likely and d.state is not State.SLOWER])
    text = (f"{named(operator, '', arch)}: {len(likely)} of {len(group)} cases look slower{where}, which too few "
            f"blocks were taken to confirm, the worst {worst.case}: {worst.text}{_growth(likely)}")
    return Verdict.HOLD, Reason("slower-unconfirmed", text, {**scoped(operator, "", arch), **common})


def _common(hit: list[Delta], spared: list[str]) -> tuple[str, dict[str, str]]:
    found = patterns.shared([d.case for d in hit], spared)
    return (" with " + ", ".join(f"{k}={v}" for k, v in found.items()) if found else ""), found


def _growth(slow: list[Delta]) -> str:
    grows = patterns.growth({d.case: d.ratio for d in slow if d.ratio})
    return f"; the loss {grows.text}" if grows else ""


def _gain(deltas: Sequence[Delta], rules: MeasuredRules) -> list[Finding]:
    gain = throughput(deltas, rules.weights)
    if gain is None and rules.weights and rules.min_gain <= 0:
        return [(Verdict.GO, Reason("no-weight", "no decided case has a weight: nothing is known of the throughput"))]
    if rules.min_gain <= 0 or any(d.state is State.FIXED for d in deltas) or (gain or 0.0) >= rules.min_gain:
        return []
    if gain is None:
        what = "no decided case has a weight" if rules.weights else "no case is decided"
        return [(Verdict.HOLD, Reason("no-gain", f"{what}: a gain of {rules.min_gain:+.1%}, which a move has to bring, "
                                      "is not known"))]
    return [(Verdict.HOLD, Reason("no-gain", f"throughput {gain:+.1%}: a move has to bring {rules.min_gain:+.1%}"))]


# ---- Words -----------------------------------------------------------------------------------------------------------
def _headline(verdict: Verdict, findings: Sequence[Finding], gain: float | None,
              by_arch: dict[str, Verdict]) -> str:
    leading = [r for v, r in findings if v is verdict and v is not Verdict.GO]
    if leading:
        more = f" (and {len(leading) - 1} more)" if len(leading) > 1 else ""
        text = f"{verdict.value}: {leading[0].text}{more}"
        thin = sorted((r for v, r in findings if v is Verdict.WITHHELD), key=lambda r: r.code != "undecided")
        if verdict is Verdict.HOLD and thin:  # the reason to wait stands; whoever removes it has to know what is left
            text += f"; and the evidence is too thin for a GO: {thin[0].text}"
    else:
        gained = "" if gain is None else f"throughput {round(gain, 3) + 0.0:+.1%}, "  # + 0.0: no -0.0%
        text = f"{verdict.value}: {gained}no case is slower"
        text += "".join(f"; {r.text}" for _, r in findings if r.code == "unknown")
    if len(set(by_arch.values())) > 1:
        text += " | " + ", ".join(f"{v.value} on {arch}" for arch, v in by_arch.items())
    return text
