"""The verdict on static evidence: what code alone can tell, and never more than that."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ..evidence.names import short_name
from ..model import Arm, Delta, Reason, State, Verdict
from ..model.arch import arch_key
from .policy import Policy, StaticRules

SHOWN = 3  # names in a headline


@dataclass(frozen=True)
class Decision:
    verdict: Verdict
    headline: str
    reasons: Tuple[Reason, ...]
    coverage: Dict[str, int]


def decide(deltas: Sequence[Delta], base: Arm, candidate: Arm, policy: Policy) -> Decision:
    """The verdict of moving from base to candidate. deltas: base against candidate, in order of suspicion.

    BRAKE: something broke that the policy brakes on. HOLD: something broke that it holds on, or a changed kernel is
    over a limit it sets. WITHHELD: kernels changed, are missing, or nothing was compared. GO: all that was compared is
    identical machine code (or works now and did not before). Broken kernels never end in GO, whatever the policy says.
    """
    counted = [d for d in deltas if policy.scope.covers(d)]
    broken = [d for d in counted if d.state is State.BROKEN]
    changed = [d for d in counted if d.state is State.UNDECIDED]
    brakes = [d for d in broken if d.reason in policy.static.brake_on]
    holds = [d for d in broken if d.reason in policy.static.hold_on and d not in brakes]
    over = [(d, text) for d in changed for text in _over(d, policy.static)]
    lost = [d for d in counted if d.state is State.MISSING and _is_loss(d, policy)]
    coverage = _coverage(deltas, counted)
    reasons = [Reason(d.reason, d.text, _scope(d)) for d in broken]
    reasons += [Reason("over-limit", text, _scope(d)) for d, text in over]
    reasons += [Reason("measure", d.text + _why(d), _scope(d)) for d in changed]
    reasons += _missing(counted, lost)
    reasons += [Reason(d.reason, d.text, _scope(d)) for d in counted if d.state is State.FIXED]
    name = called(candidate)
    if brakes:
        verdict, said = Verdict.BRAKE, _broken(brakes, counted, name)
    elif holds or over:
        verdict = Verdict.HOLD
        said = _broken(holds, counted, name) if holds else over[0][1] + _more(len(over) - 1, "limit")
    elif not coverage["compared"]:
        verdict, said = Verdict.WITHHELD, _nothing(counted, len(deltas))
        reasons.append(Reason("nothing-compared", said))
    elif broken:
        verdict, said = Verdict.WITHHELD, _broken(broken, counted, name)
    elif changed:
        verdict, said = Verdict.WITHHELD, _measure(changed, coverage, counted)
    elif lost:
        verdict, said = Verdict.WITHHELD, f"{_lost(lost, name)}; the rest is the same"
    else:
        verdict, said = Verdict.GO, _go(coverage, counted, name)
        if coverage["same"]:
            reasons.insert(0, Reason("identical-sass", said))
    return Decision(verdict, f"{verdict.value}: {said}.", tuple(reasons), coverage)


def of_several(headline: str, verdict: Verdict, worst: str, verdicts: Mapping[str, Verdict]) -> str:
    """The headline of a table of several candidates: which of them it is about, and which are GO."""
    go = ", ".join(name for name, v in verdicts.items() if v is Verdict.GO) or "none"
    said = headline[len(verdict.value) + 2:].rstrip(".")
    return f"{verdict.value}: {'' if verdict is Verdict.GO or not worst else worst + ': '}{said} | GO: {go}"


def called(arm: Arm) -> str:
    """CUDA 13.2.1 for people."""
    name = arm.stack.name or arm.stack.spec
    return "CUDA" + name[4:] if name.startswith("cuda ") else name


def _coverage(deltas: Sequence[Delta], counted: Sequence[Delta]) -> Dict[str, int]:
    """Kernels (each architecture counts) by what happened to them; predictions for other architectures do not count."""
    words = {State.SAME: "same", State.UNDECIDED: "changed"}
    seen = Counter(words.get(d.state, d.state.value) for d in counted if d.reason != "cannot-launch-elsewhere")
    counts = {word: seen[word] for word in ("same", "changed", "broken", "fixed", "missing", "new")}
    counts = {"compared": sum(counts[k] for k in ("same", "changed", "broken", "fixed")), **counts}
    ignored = sum(d.reason != "cannot-launch-elsewhere" for d in deltas) - sum(seen.values())
    return {**counts, "ignored": ignored} if ignored else counts


def _is_loss(delta: Delta, policy: Policy) -> bool:
    """Whether the candidate lacks what the base had (a kernel that works with neither stack is no loss)."""
    compiled = delta.base.get("status") == "ok" and "message" in delta.base  # and could not be read
    if not (delta.base.get("kernel") or compiled) or delta.reason == "launches-nowhere":
        return False
    allowed = any(fnmatchcase(delta.arch, glob) for glob in policy.scope.allow_missing_archs)
    return not (delta.reason == "arch-unknown" and allowed)


def _scope(delta: Delta) -> Dict[str, str]:
    return {"operator": delta.operator, "case": delta.case, "arch": delta.arch}


def _why(delta: Delta) -> str:
    texts = [c.text for c in delta.changes[:SHOWN]]
    return f" ({'; '.join(texts)})" if texts else ""


def _over(delta: Delta, rules: StaticRules) -> List[str]:
    """Sentences for the limits of the policy that a changed kernel is over. What is unknown is over no limit."""
    out = []
    name = f"{short_name(delta.case)} ({delta.arch})"
    for field, key in (("max_registers", "registers"), ("max_shared", "shared"), ("max_code", "code"),
                       ("max_instructions", "instructions")):
        most, one, two = getattr(rules, field), _number(delta.base, key), _number(delta.candidate, key)
        if most is not None and one is not None and two is not None and two > most * one:
            out.append(f"{name}: {key} {one:g} -> {two:g}, the policy allows {most:g} times ({field})")
    before, after = (_number(side, "local_ops") or 0 for side in (delta.base, delta.candidate))
    if rules.max_local_ops is not None and after - before > rules.max_local_ops:
        out.append(f"{name}: {before:g} -> {after:g} local-memory operations, the policy allows "
                   f"{rules.max_local_ops} more (max_local_ops)")
    one, two = (_occupancy(side) for side in (delta.base, delta.candidate))
    if rules.max_occupancy_drop is not None and one and two is not None and 1 - two / one > rules.max_occupancy_drop:
        out.append(f"{name}: occupancy {one:.0%} -> {two:.0%}, the policy allows a loss of "
                   f"{rules.max_occupancy_drop:.0%} (max_occupancy_drop)")
    return out


def _number(side: Mapping[str, Any], key: str) -> Optional[float]:
    value = side.get("resources", {}).get(key, side.get(key))
    return float(value) if value is not None else None


def _occupancy(side: Mapping[str, Any]) -> Optional[float]:
    found = side.get("occupancy")
    return found["warps"] / found["max_warps"] if found else None


def _missing(counted: Sequence[Delta], lost: Sequence[Delta]) -> List[Reason]:
    """One reason for each kind, architecture and message, not one for each kernel."""
    groups: Dict[Tuple[str, str, str], List[Delta]] = {}
    for delta in counted:
        if delta.state is State.MISSING:
            groups.setdefault((delta.reason, delta.arch, delta.candidate.get("message", "")), []).append(delta)
    out = []
    for (reason, arch, _), found in groups.items():
        text = found[0].text + _more(len(found) - 1, "kernel") + ("" if found[0] in lost else " (no loss)")
        scope = _scope(found[0]) if len(found) == 1 else {"arch": arch}
        out.append(Reason(reason, text, scope))
    return out


_VERBS = {
    "does-not-compile": "no longer compiles with {stack} for {archs}",
    "cannot-launch": "can no longer launch on {archs} with {stack}",
    "cannot-launch-elsewhere": "would no longer launch on {archs} with {stack}",
    "wgmma-serialised": "has its wgmma serialised by {stack} for {archs}",
}


def _broken(broken: Sequence[Delta], counted: Sequence[Delta], stack: str) -> str:
    """The first of them by name, with the architectures that it is true of and those that it is not."""
    order = list(_VERBS)
    first = min(broken, key=lambda d: order.index(d.reason))
    alike = [d for d in broken if (d.source, d.kernel, d.case, d.reason)
             == (first.source, first.kernel, first.case, first.reason)]
    archs = sorted({d.arch for d in alike}, key=arch_key)
    own = [d for d in counted if (d.source, d.kernel, d.case) == (first.source, first.kernel, first.case)]
    hurt = {d.arch for d in own if d.state is State.BROKEN}
    fine = sorted({d.arch for d in own if d.state in (State.SAME, State.UNDECIDED, State.FIXED)} - hurt, key=arch_key)
    text = f"{short_name(first.case)} {_VERBS[first.reason].format(stack=stack, archs=_listed(archs))}"
    if fine:
        text += f" (not so for {_listed(fine)})"
    others = {(d.source, d.kernel, d.case) for d in broken} - {(first.source, first.kernel, first.case)}
    return text + _more(len(others), "broken kernel")


def _measure(changed: Sequence[Delta], coverage: Mapping[str, int], counted: Sequence[Delta]) -> str:
    archs = {d.arch for d in counted}
    where = f" over {len(archs)} architectures" if len(archs) > 1 else ""
    names = list(dict.fromkeys(f"{short_name(d.case)} ({d.arch})" for d in changed))
    shown = ", ".join(names[:SHOWN]) + (f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else "")
    they = "it" if len(changed) == 1 else "they"
    return (f"{len(changed)} of {_count(coverage['compared'], 'kernel')}{where} changed; static evidence cannot tell "
            f"whether {they} got slower. Measure {'it' if len(changed) == 1 else 'these first'}: {shown}")


def _lost(lost: Sequence[Delta], stack: str) -> str:
    archs = sorted({d.arch for d in lost}, key=arch_key)
    if all(d.reason == "arch-unknown" for d in lost):
        return f"{stack} cannot build for {_listed(archs)}, so nothing tells what happens there"
    return f"{_count(len(lost), 'kernel')} of the base could not be compared for {_listed(archs)}"


def _nothing(counted: Sequence[Delta], total: int) -> str:
    if total and not counted:
        return "nothing was compared: the policy ignores everything"
    if not counted:
        return "nothing was compared: there is no kernel on either side"
    return f"nothing was compared: {counted[0].text}{_more(len(counted) - 1, 'kernel')}"


def _go(coverage: Mapping[str, int], counted: Sequence[Delta], stack: str) -> str:
    same, fixed = coverage["same"], coverage["fixed"]
    parts = []
    if same:
        parts.append(f"all {_count(same, 'kernel')}" if same > 1 else "the kernel")
        parts[0] += f" compile{'' if same > 1 else 's'} to identical machine code with {stack}"
    if fixed:
        parts.append(f"{_count(fixed, 'kernel')} work{'' if fixed > 1 else 's'} that did not before")
    for word in ("new", "missing"):
        if coverage[word]:
            parts.append(f"{coverage[word]} {word}, not compared")
    return "; ".join(parts)


def _more(count: int, noun: str) -> str:
    return f", and {_count(count, 'more ' + noun)}" if count > 0 else ""


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

