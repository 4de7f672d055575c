"""Deltas from two arms' measurements: first whether both worked and are right, then whether they may be compared, then
how the times differ. Memory and numerics ride along as changes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..model import Change, Delta, Measurement, State
from . import signals, statistics
from .numerics import numerics_changes
from .policy import MeasuredRules
from .statistics import Estimate, Judgement

# Fixed workspaces that libraries keep per handle and stream (cuBLAS documentation, CUBLAS_WORKSPACE_CONFIG): bytes.
WORKSPACES = {8_519_680: "cuBLAS workspace, 8,320 KiB", 32 << 20: "cuBLAS workspace on Hopper, 32 MiB"}
HOST = "host_peak"
OURS = ("cuda-graph", "cuda-events", "steady-clock", "cpu-time")


@dataclass(frozen=True)
class _Sides:
    """The two measurements of one case and what has been found out about them so far."""

    base: Measurement | None
    candidate: Measurement | None
    estimate: Estimate | None = None
    spread: signals.Spread | None = None
    settled: tuple[State, str, str] | None = None  # state, reason, text: decided without looking at the times

    @property
    def any(self) -> Measurement:
        found = self.base or self.candidate
        assert found is not None
        return found


def measured_deltas(base: Iterable[Measurement], candidate: Iterable[Measurement], rules: MeasuredRules | None = None,
                    step: tuple[str, str] = ("base", "candidate"), refused: str = "") -> tuple[Delta, ...]:
    """One delta for each operator, case and arch that either arm has, in the base's order.

    Blocks with the same pair number are compared pair by pair; where there are none, the arms are compared unpaired,
    which is wider and said so. refused: why no time of one may be compared with the other's, if so."""
    rules = rules or MeasuredRules()
    a, b = {m.name: m for m in base}, {m.name: m for m in candidate}
    sides = [_sides(a.get(name), b.get(name), refused) for name in dict.fromkeys([*a, *b])]
    sides = _reject_timers(sides)
    widened = statistics.among([None if s.settled else s.estimate for s in sides])
    sides = [replace(s, estimate=e) if e else s for s, e in zip(sides, widened)]
    judgements = statistics.judge([s.estimate for s in sides if s.settled is None], rules.margin, rules.fdr)
    waiting = iter(judgements)
    return tuple(_delta(s, None if s.settled else next(waiting), rules, step) for s in sides)


# ---- Before the times ------------------------------------------------------------------------------------------------
def _sides(base: Measurement | None, candidate: Measurement | None, refused: str = "") -> _Sides:
    settled = (_tried(base, candidate) or _worked(base, candidate) or _right(base, candidate)
               or _alike(base, candidate, refused))
    if settled or base is None or candidate is None:
        return _Sides(base, candidate, settled=settled)
    x, y = _paired_medians(base, candidate)
    estimate = statistics.paired(x, y)
    medians = [[block.median for block in m.blocks] for m in (base, candidate)]
    if estimate is None and not x:
        drifting = next((d for d in (_drift(base), _drift(candidate)) if d), None)
        if drifting:
            text = f"{drifting.text}, and the arms were not interleaved: A then B cannot be compared"
            return _Sides(base, candidate, settled=(State.UNDECIDED, "drift", text))
        estimate = statistics.unpaired(medians[0], medians[1])
    return _Sides(base, candidate, estimate, signals.spread(medians[0], medians[1]))


def _tried(base: Measurement | None, candidate: Measurement | None) -> tuple[State, str, str] | None:
    """Counts of failures in a number of tries (hangs, crashes): Fisher's exact test (F26)."""
    if base is None or candidate is None or not base.trials or not candidate.trials:
        return None
    a, b = ((m.trials["failed"], m.trials["tries"]) for m in (base, candidate) if m.trials)
    worse = b[0] * a[1] >= a[0] * b[1]
    found = statistics.compare_counts(a, b, "more" if worse else "fewer")
    text = f"failed in {b[0]} of {b[1]} tries, on the base in {a[0]} of {a[1]}"
    if found.enough:
        state, reason = (State.BROKEN, "fails-more-often") if worse else (State.FIXED, "fails-less-often")
        return state, reason, f"{text}: more than chance (p = {found.p:.2g})"
    needed = "" if found.needed is None else f": {found.needed} tries of each would tell"
    return State.UNDECIDED, "few-tries", f"{text}, which chance may do (p = {found.p:.2g}){needed}"


def _worked(base: Measurement | None, candidate: Measurement | None) -> tuple[State, str, str] | None:
    waiting = next((m for m in (candidate, base) if m is not None and m.status == "unmeasured"), None)
    if waiting is not None:
        return State.UNDECIDED, "not-measured", f"not measured: {waiting.message}"
    if candidate is None or (candidate.status == "missing" and base is not None and base.status == "ok"):
        return State.MISSING, "not-measured", "measured on the base only" + _why(candidate)
    if base is None or (base.status == "missing" and candidate.status == "ok"):
        return State.NEW, "new-case", "measured on the candidate only" + _why(base)
    if base.status != "ok" and candidate.status != "ok":
        whys = dict.fromkeys((_why(base), _why(candidate)))
        if base.status == candidate.status == "missing":
            return State.UNDECIDED, "missing-on-both", f"missing on both{''.join(whys)}"
        return State.UNDECIDED, "fails-on-both", f"fails on both{''.join(whys)}"
    if candidate.status != "ok":
        return State.BROKEN, candidate.status, f"works on the base, not on the candidate{_why(candidate)}"
    if base.status != "ok":
        return State.FIXED, base.status, f"works on the candidate, not on the base{_why(base)}"
    return None


def _why(m: Measurement | None) -> str:
    return f" ({m.status}: {(m.message or 'no message').splitlines()[0][:200]})" if m is not None else ""


def _right(base: Measurement | None, candidate: Measurement | None) -> tuple[State, str, str] | None:
    if base is None or candidate is None or (base.numerics is None and candidate.numerics is None):
        return None
    if candidate.numerics is None:
        return State.UNDECIDED, "not-checked", "the candidate's result was not checked, the base's was"
    if base.numerics is None:
        if candidate.numerics.get("ok", True):
            return None
        return State.BROKEN, "wrong-result", (f"the candidate's result is wrong{_because(candidate)}; the base's was "
                                              "not checked")
    good, now = base.numerics.get("ok", True), candidate.numerics.get("ok", True)
    if good and not now:
        return State.BROKEN, "wrong-result", f"the candidate's result is wrong{_because(candidate)}"
    if now and not good:
        return State.FIXED, "right-result", f"the base's result is wrong, the candidate's right{_because(base)}"
    if good and now:
        return _layouts(base.numerics.get("layouts") or {}, candidate.numerics.get("layouts") or {})
    if not good:
        return State.UNDECIDED, "wrong-on-both", f"the result is wrong on both{_because(candidate)}"
    return None


def _because(m: Measurement) -> str:
    why = (m.numerics or {}).get("why")
    return f": {why}" if why else ""


def _layouts(base: Mapping[str, Any], candidate: Mapping[str, Any]) -> tuple[State, str, str] | None:
    """Inputs of the same values in other layouts. A layout that is refused is no fault: it says so."""
    for name, after in candidate.items():
        before = base.get(name, {})
        if before.get("ok") and not after["ok"]:
            return State.BROKEN, "wrong-result", f"in layout {name} the candidate's result is wrong: {after.get('why')}"
        if before and not before["ok"] and after["ok"]:
            return State.FIXED, "right-result", f"in layout {name} the base's result is wrong: {before.get('why')}"
        if before.get("same_in_both_orders") and after.get("same_in_both_orders") is False:
            return State.BROKEN, "wrong-result", (f"the candidate's result depends on whether layout {name} was called "
                                                  "before: something is cached by a key without the strides")
    return None


def _alike(base: Measurement | None, candidate: Measurement | None, refused: str) -> tuple[State, str, str] | None:
    """Unlike keys are refused: another timer, cache policy, input distribution, mode, duty or harness (F12, F14)."""
    if base is None or candidate is None:
        return None
    if base.key is None or candidate.key is None:
        return State.UNDECIDED, "no-key", "how the times were taken is not recorded: refused"
    unlike = [*filter(None, [refused]), *base.key.unlike(candidate.key)]
    if unlike:
        return State.UNDECIDED, "unlike-keys", f"not measured alike, refused: {'; '.join(unlike)}"
    return None


def _reject_timers(sides: list[_Sides]) -> list[_Sides]:
    """Settles all cases of an operator whose times do not depend on the work (F13)."""
    by_operator: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for s in sides:
        for arm, m in (("base", s.base), ("candidate", s.candidate)):
            if m is not None and m.blocks and m.work:
                by_operator[(m.operator, arm)].append(m)
    bad: dict[str, str] = {}
    for (operator, arm), found in by_operator.items():
        work = [m.work.get("bytes", 0.0) + m.work.get("flops", 0.0) for m in found]
        # A launch costs a few microseconds; below that, honest times do not depend on the work either.
        check = signals.work_independent(work, [(m.median_us or 0.0) * 1e-6 for m in found], fixed=15e-6)
        if check and check.suspicious:
            bad[operator] = f"{arm}: {check.text}"
    return [_Sides(s.base, s.candidate, settled=(State.UNDECIDED, "timer-does-not-wait", bad[s.any.operator]))
            if s.any.operator in bad and s.settled is None else s for s in sides]


# ---- The times -------------------------------------------------------------------------------------------------------
def places(m: Measurement) -> set[tuple[int, str | None]]:
    """What makes blocks of two arms a pair."""
    return {(b.pair, b.device) for b in m.blocks if b.pair is not None}


def _paired_medians(base: Measurement, candidate: Measurement) -> tuple[list[float], list[float]]:
    a = {(b.pair, b.device): b.median for b in base.blocks if b.pair is not None}
    b = {(b.pair, b.device): b.median for b in candidate.blocks if b.pair is not None}
    both = sorted(set(a) & set(b), key=str)
    return [a[p] for p in both], [b[p] for p in both]


def _drift(m: Measurement | None) -> signals.Drift | None:
    for block in m.blocks if m else ():
        found = signals.drift(block.us, block.clocks or None)
        if found and found.found:
            return found
    return None


def _delta(s: _Sides, judgement: Judgement | None, rules: MeasuredRules, step: tuple[str, str]) -> Delta:
    m, changes = s.any, _changes(s.base, s.candidate, rules)
    timer = next((x.key.timer for x in (s.base, s.candidate) if x and x.key), None)
    evidence = "measured" if timer is None or timer in OURS else "recorded"
    facts: dict[str, Any] = {"base": _facts(s.base), "candidate": _facts(s.candidate)}
    if s.settled is not None:
        state, reason, text = s.settled
        return Delta(m.operator, m.case, m.arch, evidence, state, reason, text, step, changes=changes, **facts)
    assert judgement is not None
    if s.estimate is None:
        return _few_blocks(s, rules, evidence, step, changes, facts)
    e = s.estimate
    facts["candidate"].update(p=judgement.p, detectable=judgement.detectable, pairs_needed=judgement.needed)
    reason, text = _explain(e, judgement, rules)
    if s.spread and judgement.state is State.UNDECIDED:
        text += f"; one side has several values ({', '.join(f'{v:.4g}' for v in s.spread.levels)} us)"
    for side, found in (("base", _drift(s.base)), ("candidate", _drift(s.candidate))):
        if found:
            text += f"; {side}: {found.text}"
    return Delta(m.operator, m.case, m.arch, evidence, judgement.state, reason, text, step, ratio=e.ratio, low=e.low,
                 high=e.high, metric="time", changes=changes, **facts)


def _explain(e: Estimate, judgement: Judgement, rules: MeasuredRules) -> tuple[str, str]:
    units = "pairs" if e.paired else "blocks a side"
    span = f"{e.ratio - 1:+.1%} [{e.low - 1:+.1%}, {e.high - 1:+.1%}] from {e.count} {units}"
    if not e.paired:
        span += ", not taken together: what differed between the two occasions is not in the interval"
    if judgement.state is not State.UNDECIDED:
        return {"slower": "time", "faster": "time", "same": "within-margin"}[judgement.state.value], span
    if e.p_beyond(rules.margin) <= 1 - e.confidence:  # what would be found, and when, is known of one case alone
        return "undecided", f"{span}: not beyond the margin once all cases are counted; more pairs would tell"
    needed = judgement.needed or 0
    need = f"{needed} pairs would decide it" if needed < 1000 else "locked clocks or another GPU would decide it"
    if needed <= e.count:
        need = "too near the margin for a few more pairs to decide it"
    found = f"a slow-down of {(judgement.detectable or 1) - 1:.1%} would have been found"
    return "undecided", f"{span}: a margin of {rules.margin:.1%} is inside; {found}; {need}"


def _few_blocks(s: _Sides, rules: MeasuredRules, evidence: str, step: tuple[str, str], changes: tuple[Change, ...],
                facts: dict[str, Any]) -> Delta:
    """Fewer than three blocks a side: a range where the base has several values (F4), and a request for more."""
    assert s.base is not None and s.candidate is not None
    m, more = s.any, f"measure at least {statistics.MIN_PAIRS} pairs"
    a, b = [x.median for x in s.base.blocks], [x.median for x in s.candidate.blocks]
    if not a or not b:
        return Delta(m.operator, m.case, m.arch, evidence, State.UNDECIDED, "no-blocks",
                     f"no times were recorded: {more}", step, changes=changes, **facts)
    low, high = min(b) / max(a), max(b) / min(a)
    if s.spread:
        shown = ", ".join(f"{v:.4g}" for v in s.spread.levels)
        return Delta(m.operator, m.case, m.arch, evidence, State.UNDECIDED, "several-values",
                     f"{low - 1:+.0%} to {high - 1:+.0%}: one side has several values ({shown} us): {more}", step,
                     low=low, high=high, metric="time", changes=changes, **facts)
    middle = (statistics.paired_logs([sum(a) / len(a)], [sum(b) / len(b)]))[0]
    if len(a) == len(b) == 1:  # one number a side has no range
        return Delta(m.operator, m.case, m.arch, evidence, State.UNDECIDED, "few-blocks",
                     f"{low - 1:+.1%} from one block a side: {more}", step, ratio=math.exp(middle), metric="time",
                     changes=changes, **facts)
    return Delta(m.operator, m.case, m.arch, evidence, State.UNDECIDED, "few-blocks",
                 f"{low - 1:+.1%} to {high - 1:+.1%} from {min(len(a), len(b))} block(s) a side: {more}", step,
                 ratio=math.exp(middle), low=low, high=high, metric="time", changes=changes, **facts)


def _facts(m: Measurement | None) -> dict[str, Any]:
    """What is shown of one side: medians, memory, error, first call; only what is known."""
    if m is None:
        return {}
    found: dict[str, Any] = {"status": m.status, "blocks": len(m.blocks), "median_us": m.median_us,
                             "first_call_ms": m.first_call_ms, "memory": m.memory or None,
                             "memory_spread": m.memory_spread or None, "note": m.note,
                             "message": m.message, "work": m.work or None, "trials": m.trials,
                             "mj_per_call": m.mj_per_call}
    if m.numerics:
        known = ("ok", "why", "tolerance", "distinct", "digest", "outputs", "layouts")
        found["numerics"] = {k: m.numerics[k] for k in known if k in m.numerics}
        errors = [o["relative"] for o in m.numerics.get("outputs", {}).values() if "relative" in o]
        found["relative_error"] = max(errors) if errors else None
    if m.kernel_sum and "us" in m.kernel_sum:
        found["kernels_us"] = m.kernel_sum["us"]
    walls = [w for b in m.blocks for w in b.wall_us]
    if walls and m.key and m.key.mode == "graph":
        found["wall_us"] = sorted(walls)[len(walls) // 2]
    if m.work and m.median_us:
        found["gb_per_s"] = m.work.get("bytes", 0.0) / m.median_us / 1e3 or None
        found["tflops"] = m.work.get("flops", 0.0) / m.median_us / 1e6 or None
    return {k: v for k, v in found.items() if v is not None}


# ---- What else changed -----------------------------------------------------------------------------------------------
def _changes(base: Measurement | None, candidate: Measurement | None, rules: MeasuredRules) -> tuple[Change, ...]:
    if base is None or candidate is None:
        return ()
    out = [_memory_change(kind, base.memory[kind], candidate.memory[kind])
           for kind in base.memory if kind in candidate.memory
           and abs(candidate.memory[kind] - base.memory[kind]) >= _memory_floor(kind, base, candidate, rules)]
    if candidate.trials and candidate.trials["failed"] and not base.trials:
        failed, tries = candidate.trials["failed"], candidate.trials["tries"]
        told = candidate.note or f"failed in {failed} of {tries} tries"
        out.append(Change("failures", 0, failed / tries, f"{told}; no failure of the base is known"))
    kept = retention_change(base, candidate)
    if kept:
        out.append(kept)
    a, b = base.numerics or {}, candidate.numerics or {}
    if a.get("distinct") == 1 and b.get("distinct", 1) > 1:
        out.append(Change("determinism", 1, b["distinct"], f"{b['distinct']} different results from {b.get('repeats')} "
                          "equal launches, where the base gives one"))
    if a.get("digest") and a.get("distinct") == b.get("distinct") == 1 and a["digest"] != b.get("digest"):
        out.append(Change("bits", a["digest"][:12], b["digest"][:12], "the results differ in their bits"))
    out += numerics_changes(a, b)
    if a.get("first_equals_second") and b.get("first_equals_second") is False:
        out.append(Change("first-call", "equal", "differs", "the first call gives other bits than the second, where "
                          "the base's are equal"))
    first = (base.first_call_ms, candidate.first_call_ms)
    if first[0] and first[1] and first[1] >= rules.compile_floor_ms and first[1] / first[0] - 1 > rules.compile_hold:
        text = f"the first call (compilation, tuning) takes {first[1] / 1000:.0f} s instead of {first[0] / 1000:.0f} s"
        out.append(Change("first_call_ms", *first, text))
    return tuple(out)


def _memory_floor(kind: str, base: Measurement, candidate: Measurement, rules: MeasuredRules) -> float:
    """Bytes of difference from which on memory of this kind has changed. The resident set depends on what the process
    did before, in an order that is random: what visits of one arm differ by is no change."""
    if kind != HOST:
        return rules.memory_floor
    return max(rules.host_floor, *(m.memory_spread.get(kind, 0.0) for m in (base, candidate)))


def _memory_change(kind: str, base: float, candidate: float) -> Change:
    grew = f" ({candidate / base - 1:+.0%})" if base > 0 else ""
    sizes = f"{base / 2**20:,.0f} -> {candidate / 2**20:,.0f} MiB"
    return Change(f"memory.{kind}", base, candidate, f"{kind} memory {sizes}{grew}")


def retention_change(base: Measurement, candidate: Measurement, floor: int = 1 << 20) -> Change | None:
    """What newly stays allocated after the calls (F9): a leak when it grows with every call, else a fixed workspace."""
    a, b = base.retention or {}, candidate.retention or {}
    grows, fixed = b.get("growth", 0) - a.get("growth", 0), b.get("fixed", 0) - a.get("fixed", 0)
    if grows >= 4096:
        text = f"a leak: {b['growth']:,} bytes more stay after every call"
        return Change("leak", a.get("growth", 0), b["growth"], text)
    if a and b and fixed >= floor:
        known = WORKSPACES.get(fixed)
        return Change("workspace", a["fixed"], b["fixed"], f"a fixed workspace of {fixed:,} bytes stays, not a leak"
                      + (f" (equals {known})" if known else ""))
    return None


def throughput(deltas: Sequence[Delta], weights: Mapping[str, float] | None = None) -> float | None:
    """What decided cases say about throughput: +0.023 is 2.3 % more; None when none is decided, or none has a weight.

    weights: share of a workload's time by operator; its time then becomes the weighted sum of the operators' ratios
    (each the geometric mean of its cases). Without weights all operators count alike, as a geometric mean. For the
    headline and for the gain a move must bring; no rule on losses uses it."""
    logs: dict[str, list[float]] = defaultdict(list)
    for d in deltas:
        if d.ratio is not None and d.state is not State.UNDECIDED:
            logs[d.operator].append(math.log(d.ratio))
    means = {operator: sum(found) / len(found) for operator, found in logs.items()}
    if weights:
        shares = {operator: weights[operator] for operator in means if weights.get(operator, 0.0) > 0}
        if not shares:
            return None
        return sum(shares.values()) / sum(share * math.exp(means[o]) for o, share in shares.items()) - 1
    return math.exp(-sum(means.values()) / len(means)) - 1 if means else None


def noise(base: Sequence[Measurement], candidate: Sequence[Measurement]) -> dict[str, float]:
    """The noise of this comparison itself, from A against A: two visits of one arm in the same ABBA quadruple.

    floor: standard deviation of their log ratio over all cases. order: p of 'it makes no difference which arm of a pair
    ran first' (carry-over when small). Absent where there are too few pairs."""
    first, second = [], []
    for m in (*base, *candidate):
        by_pair = {b.pair: b.median for b in m.blocks if b.pair is not None}
        for pair in by_pair:
            if pair % 2 == 0 and pair + 1 in by_pair:
                first.append(by_pair[pair])
                second.append(by_pair[pair + 1])
    found = {"floor": statistics.noise_floor(first, second)}
    a, b, base_first = [], [], []
    others = {m.name: m for m in candidate}
    for m in base:
        other = {x.pair: x for x in others[m.name].blocks} if m.name in others else {}
        for block in m.blocks:
            partner = other.get(block.pair) if block.pair is not None else None
            if partner is not None and block.position is not None and partner.position is not None:
                a.append(block.median)
                b.append(partner.median)
                base_first.append(block.position < partner.position)
    found["order"] = statistics.order_effect(a, b, base_first) if a else None
    return {k: v for k, v in found.items() if v is not None}
