"""What every output shows: deltas folded over architectures, in the order in which they matter; the release matrix.

What a side of a delta (`delta.base`, `delta.candidate`) may hold, all of it optional:

    static    resources {registers, stack, ...}, mix {class: count}, instructions, local_ops, notes [{code, severity,
              text, cause, advice}], limits [{text}], occupancy {warps, max_warps, limiter}, code_sha256, ptx_sha256,
              cubin_sha256, message (the compiler's own words), frontend_seconds, ptxas_seconds
    measured  median_us, memory {allocated: bytes, ...}, numerics {ok, outputs: {name: {relative: error against FP64}}},
              work {flops, bytes}, message

and of `comparison.environment`: policy {measured: {margin: 0.01 is 1 %}}, verdicts {arm: verdict of moving to it},
noise_floor (ratio - 1), ceilings {flops: FLOP/s, bandwidth: byte/s}, telemetry [{arm, time: [s], clock: [MHz],
temperature: [C]}].
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Pattern, Sequence, Tuple

from ..evidence.names import short_name
from ..model import Comparison, Delta, State, Verdict
from ..model.arch import arch_key
from . import words

RANK = {name: i for i, name in enumerate(words.GLYPHS)}


@dataclass(frozen=True)
class Row:
    """Deltas that say the same about one kernel on several architectures. `deltas` has one for each of `archs`.
    label: the case for people, where it is not the case itself."""

    number: int
    archs: Tuple[str, ...]
    deltas: Tuple[Delta, ...]
    label: str = ""

    @property
    def delta(self) -> Delta:
        return self.deltas[0]

    @property
    def state(self) -> str:
        return words.state(self.delta)

    @property
    def name(self) -> str:
        return words.one_line(self.label or self.delta.case)

    @property
    def full_name(self) -> str:
        """With the operator, where cases of several may have one name."""
        return self.name if self.delta.evidence == "static" else f"{words.one_line(self.delta.operator)} {self.name}"

    @property
    def arch_text(self) -> str:
        return ", ".join(map(words.one_line, self.archs))

    def changes(self, limit: int = 0) -> str:
        """What changed, in words; a sentence about the first architecture becomes one about all of them."""
        text = words.changes(self.delta, limit)
        return text if self.delta.changes else _architecture(self.delta.arch).sub(lambda _: self.arch_text, text)


def weight(delta: Delta) -> Tuple[float, ...]:
    """Sort key: what is broken first, then by suspicion, then by the size of the effect."""
    effect = abs(math.log(delta.ratio)) if delta.ratio and delta.ratio > 0 else 0.0
    return (RANK[words.state(delta)], -(delta.suspicion or 0.0), -effect)


def fold(deltas: Iterable[Delta], first: int = 0) -> List[Row]:
    """Rows in the order in which they matter, numbered from `first`. Deltas that differ in nothing but the
    architecture share a row."""
    deltas = list(deltas)
    labels = short_cases(deltas)
    groups: Dict[Tuple[Any, ...], List[Delta]] = {}
    for delta in deltas:
        groups.setdefault(_same(delta), []).append(delta)
    for group in groups.values():
        group.sort(key=lambda d: arch_key(d.arch))
    ordered = sorted(groups.values(), key=lambda g: (min(map(weight, g)), g[0].operator, g[0].case, g[0].arch))
    return [Row(i, tuple(d.arch for d in group), tuple(group), labels.get((group[0].operator, group[0].case), ""))
            for i, group in enumerate(ordered, first)]


def short_cases(deltas: Iterable[Delta]) -> Dict[Tuple[str, str], str]:
    """(operator, case) of kernels -> the name without result and parameters, where that still tells them apart."""
    cases = {(d.operator, d.case): short_name(d.case, 2000) for d in deltas if (d.kernel or "").startswith("_Z")}
    shared = Counter((operator, short) for (operator, _), short in cases.items())
    return {(operator, case): short for (operator, case), short in cases.items() if shared[operator, short] == 1}


def _same(delta: Delta) -> Tuple[Any, ...]:
    said = tuple((c.what, c.text, str(c.base), str(c.candidate)) for c in delta.changes)
    text = said or _architecture(delta.arch).sub("", delta.text)
    return (delta.operator, delta.case, delta.kernel, delta.source, delta.evidence, delta.state, delta.reason,
            delta.step, delta.since, delta.component, text, delta.ratio, delta.low, delta.high)


@functools.lru_cache(maxsize=256)
def _architecture(arch: str) -> Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(arch)}(?!\w)" if arch else r"(?!)")


def counts(rows: Iterable[Row]) -> Dict[str, int]:
    """State word -> how many kernels or cases have it, in the order of words.ordered."""
    names: Dict[str, set] = {}
    for row in rows:
        names.setdefault(row.state, set()).add((row.delta.operator, row.delta.case))
    return {state: len(names[state]) for state in words.ordered(names)}


def notable(rows: Iterable[Row]) -> List[Row]:
    return [row for row in rows if row.delta.state is not State.SAME]


@dataclass(frozen=True)
class Cell:
    """kind: a state word, "still" (as since the change), or "none" (not compared)."""

    kind: str
    text: str


@dataclass(frozen=True)
class Matrix:
    """Kernels by architecture and release; releases are the arms after the base. `more` rows did not fit."""

    archs: Tuple[str, ...]
    arms: Tuple[str, ...]
    rows: Tuple[Tuple[str, str, Tuple[Cell, ...]], ...]
    same: int
    more: int

    @property
    def kinds(self) -> FrozenSet[str]:
        return frozenset(cell.kind for _, _, cells in self.rows for cell in cells)


def matrix(comparison: Comparison, limit: int) -> Matrix:
    """Rows (operator, kernel, cells) of all that differ somewhere, in the order in which they matter. Cells run over
    the releases of the first architecture, then of the second, and so on. Kernels that are the same everywhere are
    counted in `same`."""
    arms = tuple(arm.name for arm in comparison.arms[1:])
    labels, names = words.short_labels(comparison), short_cases(comparison.deltas)
    by_kernel: Dict[Tuple[str, str], Dict[str, List[Delta]]] = {}
    for delta in sorted((d for d in comparison.deltas if d.evidence == "static"), key=weight):
        by_kernel.setdefault((delta.operator, delta.case), {}).setdefault(delta.arch, []).append(delta)
    archs = tuple(sorted({arch for found in by_kernel.values() for arch in found}, key=arch_key))
    out: List[Tuple[str, str, Tuple[Cell, ...]]] = []
    same = 0
    for (operator, case), found in by_kernel.items():
        if all(d.state is State.SAME for deltas in found.values() for d in deltas):
            same += 1
        elif len(out) < limit:
            cells = tuple(_cell(found.get(arch, []), arm, labels) for arch in archs for arm in arms)
            out.append((words.one_line(operator), words.one_line(names.get((operator, case), case)), cells))
    return Matrix(archs, arms, tuple(out), same, len(by_kernel) - same - len(out))


def _cell(deltas: Sequence[Delta], arm: str, labels: Mapping[str, str]) -> Cell:
    if not deltas:
        return Cell("none", "not compared")
    at = labels.get(arm, arm)
    for delta in deltas:
        if delta.step[1] == arm and delta.state is not State.SAME:
            return Cell(words.state(delta), f"{at}: {words.state(delta)}, {words.changes(delta, 2)}")
    for delta in deltas:
        if arm in delta.since and delta.state is not State.SAME:
            word = words.state(delta)
            kind = word if word in ("broken", "missing") else "still"
            return Cell(kind, f"{at}: {word} since {labels.get(delta.step[1], delta.step[1])}")
    return Cell("same", f"{at}: same")


def resource(side: Mapping[str, Any], key: str) -> Optional[float]:
    """A number of model.Resources, or of the kernel itself (instructions, local_ops). None when it is unknown."""
    nested = side.get("resources")
    value = nested.get(key) if isinstance(nested, Mapping) and key in nested else side.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def part(side: Mapping[str, Any], group: str, key: str) -> Any:
    """memory.allocated and the like; None when it is unknown."""
    found = side.get(group)
    return found.get(key) if isinstance(found, Mapping) else None


def seconds(side: Mapping[str, Any]) -> Optional[float]:
    return side["median_us"] * 1e-6 if side.get("median_us") is not None else None


def error(side: Mapping[str, Any]) -> Optional[float]:
    """The largest relative error of its outputs."""
    outputs = part(side, "numerics", "outputs")
    every = outputs.values() if isinstance(outputs, Mapping) else ()
    found = [entry.get("relative") for entry in every if isinstance(entry, Mapping)]
    return max((e for e in found if isinstance(e, (int, float))), default=None)


def wrong(side: Mapping[str, Any]) -> bool:
    return part(side, "numerics", "ok") is False


def achieved(side: Mapping[str, Any]) -> Optional[float]:
    """FLOP/s."""
    flops, time = part(side, "work", "flops"), seconds(side)
    return flops / time if flops and time else None


MEMORY_GRAIN = 2 << 20  # bytes: the segment of torch's allocator, and a large page
MEMORY = ("allocated", "reserved", "process", "host_peak")  # what a case's memory is, best known first


def memory_kind(delta: Delta) -> Optional[str]:
    """The kind of memory that both sides know."""
    return next((k for k in MEMORY if part(delta.base, "memory", k) and part(delta.candidate, "memory", k) is not None),
                None)


def memory_of(delta: Delta, side: Mapping[str, Any]) -> Optional[float]:
    """Bytes of the kind that is shown."""
    kind = memory_kind(delta)
    return part(side, "memory", kind) if kind else None


def memory_ratio(delta: Delta) -> Optional[float]:
    """Peak memory, candidate / base; 1 where they differ by less than what an allocator or a page table rounds to."""
    base, candidate = memory_of(delta, delta.base), memory_of(delta, delta.candidate)
    if not base or candidate is None:
        return None
    return 1.0 if abs(candidate - base) < MEMORY_GRAIN else candidate / base


def message(delta: Delta) -> Optional[str]:
    """The compiler's or worker's own words, of the candidate first (broken) and else of the base (fixed)."""
    for side in (delta.candidate, delta.base):
        if side.get("message"):
            return words.plain(side["message"])
    return None


@dataclass(frozen=True)
class OperatorLine:
    """One operator of a measured comparison. worst: the row that matters most, so that a cliff in one shape shows.
    cases and states count each case once, however many candidates and architectures it was compared on.
    memory: the largest ratio of peak memory; error: the largest relative error of the candidate; wrong: cases whose
    result is."""

    operator: str
    cases: int
    states: Dict[str, int]
    worst: Row
    memory: Optional[float]
    error: Optional[float]
    wrong: int


def by_operator(rows: Sequence[Row]) -> List[OperatorLine]:
    """Operators in the order of their worst row. No mean is taken: it would hide a cliff."""
    groups: Dict[str, List[Row]] = {}
    for row in rows:
        groups.setdefault(row.delta.operator, []).append(row)
    return [_operator(name, [row.delta for row in found], found) for name, found in groups.items()]


def _operator(name: str, deltas: Sequence[Delta], rows: Sequence[Row]) -> OperatorLine:
    memory = [ratio for ratio in map(memory_ratio, deltas) if ratio is not None]
    errors = [e for e in (error(d.candidate) for d in deltas) if e is not None]
    return OperatorLine(name, len({d.case for d in deltas}), counts(rows), rows[0], max(memory, default=None),
                        max(errors, default=None), sum(wrong(d.candidate) for d in deltas))


def split(comparison: Comparison) -> Tuple[List[Row], List[Row]]:
    """(static rows, measured and recorded rows)."""
    static = fold(d for d in comparison.deltas if d.evidence == "static")
    return static, fold((d for d in comparison.deltas if d.evidence != "static"), len(static))


def margin(comparison: Comparison) -> Optional[float]:
    """The practical margin as a fraction, when the policy tells it."""
    rules = part(comparison.environment, "policy", "measured")
    margin = rules.get("margin") if isinstance(rules, Mapping) else None
    return float(margin) if isinstance(margin, (int, float)) else None


def lead(comparison: Comparison) -> str:
    """Name of the candidate that verdict and coverage are about: the worst, of equals the last."""
    found = comparison.environment.get("verdicts")
    known = {v.value: v.rank for v in Verdict}
    told = found if isinstance(found, Mapping) else {}
    names = [arm.name for arm in comparison.arms]
    return max(reversed(names), key=lambda name: known.get(str(told.get(name)), -1))


def verdicts(comparison: Comparison) -> List[Tuple[str, str]]:
    """(label, verdict) of moving from the base to each of several candidates; empty where that is not known."""
    labels, found = words.short_labels(comparison), comparison.environment.get("verdicts")
    if len(comparison.arms) < 3 or not isinstance(found, Mapping):
        return []
    known = {v.value for v in Verdict}
    return [(labels[a.name], str(found[a.name])) for a in comparison.arms[1:] if found.get(a.name) in known]
