"""What measured operators mean for a workload: deltas weighted by the operator mix of a real trace."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ..model import Delta, State, UsageError
from ..ops import Case

SCHEMA = "brakecheck/workload/1"
SHOWN = 4
ROUNDING = 0.01  # that shares written with a few digits may add up to beyond 1


@dataclass(frozen=True)
class Projection:
    """change: of the workload's device time, candidate / base - 1, if what is not covered stays as it is; [low, high]
    its interval. step_change and its interval: of the step's duration, idle time unchanged; absent when the trace has
    no steps. covered: share of the time with a measured case; approximate: the part of it whose case is only like the
    operator, or that stands for other cases of its operator. uncovered: (operator, share, why), largest first.
    break_even: relative change of the uncovered part that would undo `change`; absent when all is covered.
    """

    change: Optional[float]
    low: Optional[float]
    high: Optional[float]
    covered: float
    approximate: float
    uncovered: Tuple[Tuple[str, float, str], ...]
    step_change: Optional[float] = None
    step_low: Optional[float] = None
    step_high: Optional[float] = None
    break_even: Optional[float] = None

    @property
    def text(self) -> str:
        """One sentence for a report."""
        if self.change is None:
            return "no operator of the workload was measured: nothing to project"
        said = f"device time of the workload {self.change:+.1%} ({self.low:+.1%} .. {self.high:+.1%})"
        if self.step_change is not None:
            said += f", its step {self.step_change:+.1%} ({self.step_low:+.1%} .. {self.step_high:+.1%})"
        said += f", from {self.covered:.0%} of its time"
        if self.approximate:
            said += f" ({self.approximate:.0%} by operators of its kind only)"
        uncovered = 1 - self.covered
        if uncovered > 0.0005:
            said += f"; {uncovered:.0%} is not covered and taken as unchanged"
            if self.break_even is not None and abs(self.break_even) < 1:
                said += f" (a change of {self.break_even:+.1%} there would undo it)"
        return said


def is_mix(path: Path) -> bool:
    """Whether a file is a workload of operator calls, and not one of weights alone."""
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("schema") == SCHEMA


def load(path: Path) -> Dict[str, Any]:
    """A mix as `brakecheck workload` wrote it. UsageError with the field that is wrong."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"cannot read the workload: {error.strerror}", str(path), "check the path") from None
    except ValueError as error:
        raise UsageError(f"the workload is no JSON: {error}", str(path), "make it with brakecheck workload") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise UsageError(f"this is no workload file ({SCHEMA})", f"{path}, field schema",
                         "make it with brakecheck workload")
    entries = data.get("entries")
    if not isinstance(entries, list):
        raise UsageError("the workload has no list of entries", f"{path}, field entries", "make it again")
    for number, entry in enumerate(entries):
        field = f"{path}, field entries[{number}]"
        share = entry.get("share") if isinstance(entry, dict) else None
        if not isinstance(share, (int, float)) or not math.isfinite(share) or not 0 <= share <= 1:
            raise UsageError(f"a share is a number from 0 to 1, not {share!r}", f"{field}.share", "make the file again")
        case = entry.get("case")
        if case is not None and not (isinstance(case, dict) and isinstance(case.get("operator"), str)
                                     and isinstance(case.get("params"), dict)):
            raise UsageError("a case names an operator and its params", f"{field}.case", "make the file again")
    total = sum(entry["share"] for entry in entries)
    if total > 1 + ROUNDING:
        raise UsageError(f"the shares add up to {total:.0%} of the time", f"{path}, field entries",
                         "make the file again")
    busy = data.get("busy_share")
    if busy is not None and not (isinstance(busy, (int, float)) and 0 <= busy <= 1 + ROUNDING):
        raise UsageError(f"busy_share is a number from 0 to 1, not {busy!r}", f"{path}, field busy_share",
                         "make the file again")
    return data


def cases(mix: Mapping[str, Any], least: float = 0.0) -> Dict[str, List[Case]]:
    """The mix as cases of the catalogue's operators, to be measured; those with at least this share of the time."""
    found: Dict[str, Dict[str, Case]] = {}
    shares: Dict[Tuple[str, str], float] = {}
    for entry in mix["entries"]:
        if "case" in entry:
            case = Case.of(**entry["case"]["params"])
            found.setdefault(entry["case"]["operator"], {})[case.name] = case
            key = (entry["case"]["operator"], case.name)
            shares[key] = shares.get(key, 0.0) + entry["share"]
    kept = {op: [c for name, c in by.items() if shares[op, name] >= least] for op, by in found.items()}
    return {op: chosen for op, chosen in kept.items() if chosen}


def weights(mix: Mapping[str, Any]) -> Dict[str, float]:
    """Share of the time by operator of the catalogue."""
    found: Dict[str, float] = {}
    for entry in mix["entries"]:
        if "case" in entry:
            operator = entry["case"]["operator"]
            found[operator] = found.get(operator, 0.0) + entry["share"]
    return found


def project(mix: Mapping[str, Any], deltas: Sequence[Delta]) -> Projection:
    """What the deltas say about the workload. An entry counts with the delta of its very case; without one, with the
    geometric mean of its operator's cases, and an interval that spans all of theirs.

    The errors of different cases are independent and add in quadrature; entries that lean on one delta share its error,
    and an entry that leans on its operator's other cases shares theirs.
    A delta without ratio or interval, and one that is broken or missing on a side, covers nothing.
    """
    exact, by_operator = _usable(deltas)
    leaning: Dict[Tuple[str, str], float] = {}
    ratios: Dict[Tuple[str, str], Tuple[float, float, float]] = {}
    uncovered: Dict[Tuple[str, str], float] = {}
    approximate = 0.0
    for entry in mix["entries"]:
        case, share = entry.get("case"), entry["share"]
        why = entry.get("why", "no case stands for it")
        if case is not None:
            name = Case.of(**case["params"]).name
            key = (case["operator"], name) if (case["operator"], name) in exact else (case["operator"], "")
            found = exact.get(key) or by_operator.get(case["operator"])
            if found is not None:
                ratios[key] = found
                leaning[key] = leaning.get(key, 0.0) + share
                approximate += share if case.get("fit") != "same" or not key[1] else 0.0
                continue
            why = _why_not(deltas, case["operator"])
        place = (entry.get("operator") or "kernels without an operator", why)
        uncovered[place] = uncovered.get(place, 0.0) + share
    listed = tuple((op, share, why) for (op, why), share in sorted(uncovered.items(), key=lambda item: -item[1]))
    covered = sum(leaning.values())
    if not leaning:
        return Projection(None, None, None, 0.0, 0.0, listed)
    change = sum(share * (ratios[key][0] - 1) for key, share in leaning.items())
    low, high = change - _error(leaning, ratios, 1), change + _error(leaning, ratios, 2)
    busy = mix.get("busy_share")
    step = {} if busy is None else {"step_change": busy * change, "step_low": busy * low, "step_high": busy * high}
    rest = 1 - covered
    return Projection(change, low, high, covered, approximate, listed,
                      break_even=-change / rest if rest > 1e-9 else None, **step)


def _error(leaning: Mapping[Tuple[str, str], float], ratios: Mapping[Tuple[str, str], Tuple[float, float, float]],
           side: int) -> float:
    """Half of the projection's interval towards low (1) or high (2)."""
    operators: Dict[str, List[float]] = {}
    for key, share in leaning.items():
        operators.setdefault(key[0], []).append(share * abs(ratios[key][0] - ratios[key][side]))
    return math.hypot(*(sum(parts) if (operator, "") in leaning else math.hypot(*parts)
                        for operator, parts in operators.items()))


def _usable(deltas: Sequence[Delta]) -> Tuple[Dict[Tuple[str, str], Tuple[float, float, float]],
                                              Dict[str, Tuple[float, float, float]]]:
    """(ratio, low, high) by operator and case, and by operator."""
    exact: Dict[Tuple[str, str], Tuple[float, float, float]] = {}
    groups: Dict[str, List[Tuple[float, float, float]]] = {}
    for delta in deltas:
        values = (delta.ratio, delta.low, delta.high)
        timed = delta.metric is None or "time" in delta.metric
        if timed and delta.state not in (State.BROKEN, State.MISSING, State.NEW) and \
                all(v is not None and v > 0 for v in values):
            exact[delta.operator, delta.case] = values  # type: ignore[assignment]
            groups.setdefault(delta.operator, []).append(values)  # type: ignore[arg-type]
    mean = {op: (math.exp(sum(math.log(r) for r, _, _ in found) / len(found)), min(low for _, low, _ in found),
                 max(high for _, _, high in found)) for op, found in groups.items()}
    return exact, mean


def _why_not(deltas: Sequence[Delta], operator: str) -> str:
    mine = [d for d in deltas if d.operator == operator]
    if not mine:
        return f"{operator} was not measured"
    states = sorted({d.state.value for d in mine})
    return f"{operator} is {' and '.join(states)}, without a ratio and interval"
