"""A diff of recordings in the words of the product: deltas, reasons, verdict.

One recording a side can show that something is slower in it; it cannot show that an upgrade is safe, since two
recordings of one stack differ too. So the verdict is HOLD or WITHHELD, never GO.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from ..model import Arm, Comparison, Component, Delta, Reason, Stack, State, Verdict
from . import kernel_names as names
from .diff import DiffResult, Row, Side, launch
from .percall import MARGIN
from .wording import duration, percent


def to_comparison(result: DiffResult, decomposition: Optional[Dict[str, Any]] = None) -> Comparison:
    """The Comparison (evidence "recorded") of a diff. decomposition: of each side's steps (step_report.summarise)."""
    verdict, headline, reasons = judge(result)
    deltas = tuple(_delta(row, result) for row in result.rows)
    coverage = {"compared": sum(d.state not in (State.NEW, State.MISSING) for d in deltas)}
    for state in State:
        count = sum(d.state == state for d in deltas)
        if count:
            coverage[state.value] = count
    timed = result.total_base is not None and result.total_candidate is not None
    environment: Dict[str, Any] = {
        "warnings": list(result.warnings), "problems": list(result.problems), "aligned_by": result.key,
        "total_base_ns": result.total_base, "total_candidate_ns": result.total_candidate, "steps": result.steps,
        "parts_ns": result.parts if timed else None, "unattributed_ns": result.unattributed if timed else None,
        "unattributed_share": result.unattributed_share,
        "facts": [{"what": f.what, "text": f.text} for f in result.facts] or None,
        "decomposition": decomposition or None,
        "groups": [{"text": g.text, "family": g.family, "kind": g.kind, "ratio": g.ratio} for g in result.groups],
    }
    return Comparison(verdict, headline, reasons, tuple(_arm(n, s) for n, s in (("base", result.base), ("candidate",
                      result.candidate))), coverage, deltas,
                      environment={k: v for k, v in environment.items() if v is not None})


def judge(result: DiffResult) -> Tuple[Verdict, str, Tuple[Reason, ...]]:
    """Verdict, one line that says why, and the reasons."""
    slower = [r for r in result.rows if r.state == State.SLOWER]
    reasons: List[Reason] = [Reason("slower-per-call", r.text, _scope(r)) for r in slower]
    for side in (result.base, result.candidate):
        for finding in side.get("findings", []):
            reasons.append(Reason(finding["code"], f"{finding['component']}: {finding['text']} ({finding['where']})"))
    reasons += [Reason("not-comparable", w) for w in result.warnings]
    reasons.append(Reason("one-recording", "one recording a side cannot show that an upgrade is safe: two recordings "
                          "of one stack differ too. Measure both stacks with brakecheck compare"))
    if slower and result.complete:
        first = slower[0]
        headline = f"{len(slower)} of {len(result.rows)} are slower per call, clear of noise; first: {first.text}"
        return Verdict.HOLD, headline, tuple(reasons)
    if not result.complete:
        headline = "a recording lacks kernels: what is missing may be what changed"
    elif empty := [n for n in ("base", "candidate") if all(getattr(r, n) is None for r in result.rows)]:
        headline = f"no kernel in {' and '.join(empty)}: there is nothing to compare"
    elif not result.per_call_comparable:
        headline = "the recordings are of unlike GPUs or instruments: nothing is decided, what follows is description"
    elif not any(r.ratio is not None for r in result.rows):
        headline = "no kernel has times on both sides: only names, launches and resources are compared"
    elif result.totals_comparable and abs(_growth(result) - 1) > MARGIN:
        headline = (f"device time {percent(_growth(result))}, and nothing is slower per call clear of noise: see what "
                    "was replaced, added or called more often")
    else:
        headline = "nothing is slower per call clear of noise, which one recording a side cannot turn into a GO"
    return Verdict.WITHHELD, headline, tuple(reasons)


def _growth(result: DiffResult) -> float:
    """Device time, candidate / base; 1 where it is not known."""
    return result.total_candidate / result.total_base if result.total_base and result.total_candidate else 1.0


def _scope(row: Row) -> Dict[str, str]:
    return {"operator": row.operator or names.family(row.kernel), "case": _case(row)}


def _case(row: Row) -> str:
    side = row.candidate or row.base
    parts = [row.place or "", side.shapes or (launch(side) if side.grid else "") if side else ""]
    return " | ".join(p for p in parts if p) or names.family(row.kernel)


def _delta(row: Row, result: DiffResult) -> Delta:
    found = {gpu["capability"] for gpu in result.candidate.get("gpus", []) if gpu.get("capability")}
    arch = result.candidate.get("arch") or ("sm_" + found.pop().replace(".", "") if len(found) == 1 else "unknown")
    return Delta(operator=row.operator or names.family(row.kernel), case=_case(row), arch=arch, evidence="recorded",
                 state=row.state, reason=row.kind.replace(" ", "-"), text=row.text, kernel=row.kernel, ratio=row.ratio,
                 low=row.low, high=row.high, metric="device_time" if row.ratio is not None else None,
                 changes=row.changes, base=_side(row.base, row), candidate=_side(row.candidate, row, with_effects=True))


def _side(side: Any, row: Row, with_effects: bool = False) -> Dict[str, Any]:
    known = all(s is None or s.total is not None for s in (row.base, row.candidate))
    effects = {"difference_ns": row.difference, "calls_effect_ns": row.calls_effect, "share": row.share} \
        if with_effects and known else {}
    if not isinstance(side, Side):
        return {k: v for k, v in effects.items() if v is not None}
    values = {"calls": side.calls, "total_ns": side.total, "mean_ns": side.mean, "median_ns": side.median,
             "mad_ns": side.mad, "grid": list(side.grid) or None, "block": list(side.block) or None,
             "shapes": side.shapes, "kernels": list(side.kernels), **effects}
    return {k: v for k, v in values.items() if v is not None}


def _arm(name: str, side: Dict[str, Any]) -> Arm:
    components = tuple(Component(name, str(version)) for name, version in side.get("versions", {}).items())
    return Arm(name, Stack(spec=side["path"], name=side["path"].rsplit("/", 1)[-1], components=components),
               implementation=side["kind"])


def summary(result: DiffResult) -> str:
    """The totals in one line, and what is not attributed."""
    unknown = [name for name, total in (("base", result.total_base), ("candidate", result.total_candidate))
               if total is None]
    if unknown or result.total_base is None or result.total_candidate is None:
        return f"no times in {' and '.join(unknown)}: nothing to sum up"
    text = f"device time {duration(result.total_base)} -> {duration(result.total_candidate)}"
    if result.total_base:
        text += f" ({percent(result.total_candidate / result.total_base)})"
    if not result.totals_comparable:
        text += ", of unlike amounts of work"
    text += f"; unattributed {duration(result.unattributed)}"
    if result.unattributed_share is not None:
        text += f" ({abs(result.unattributed_share):.1%} of the difference)"
    return text
