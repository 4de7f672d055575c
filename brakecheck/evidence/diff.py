"""Compares two recordings: what changed per call, what in number of calls, and what nobody can say.

Every kernel of both sides is in exactly one row, so the rows' differences add up to the difference of the totals, to
the nanosecond. A row's difference splits into an effect of the number of calls and an effect per call; what an
undecided or unchanged row holds per call is `unattributed`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

import polars as pl

from ..model import Change, State
from . import kernel_names as names
from . import percall
from .align import Bucket, Pair, align, buckets, choose_key, inputs_of, place_unlaunched
from .comparable import Comparable, sequences, step_totals
from .table import Problem, Recording
from .wording import contrast, duration, percent, short

# Relative change of a counter that is worth telling.
COUNTER_CHANGE = 0.1
MOST_COUNTERS = 6
# Counters that say where the time goes come first, as names of metrics or labels of the details page; those of the
# profiler itself, and samples of warps that did not issue (the others count them again), say nothing of a kernel.
TELLING = re.compile(r"hit[_ ]rate|throughput|dram__bytes|pipe_tensor|bank_conflicts|warps_active|occupancy$|"
                     r"issue_stalled_\w+_per_warp_active", re.I)
SILENT = re.compile(r"^profiler__|_not_issued|^device__|^launch__|Triage")
FEW = 3  # kernels of a side that a row names; more are counted
UNORDERED = {"cubin", "fatbin", "build-log", "nccl-log"}
SETTLED = {"slower": State.SLOWER, "faster": State.FASTER, "same": State.SAME, "undecided": State.UNDECIDED}


@dataclass(frozen=True)
class Side:
    """One side of a row. calls: of the job; total, mean, median, mad in ns, absent when no call has a time.

    median and mad are of single calls, and absent when the row has several kernels a job."""

    kernels: Tuple[str, ...]
    calls: int
    total: Optional[int] = None
    mean: Optional[float] = None
    median: Optional[float] = None
    mad: Optional[float] = None
    grid: Tuple[int, ...] = ()
    block: Tuple[int, ...] = ()
    shapes: Optional[str] = None


@dataclass(frozen=True)
class Row:
    """Kernels that do one job. kind: slower per call, faster per call, same per call, more calls, fewer calls,
    undecided, replaced, split, fused, added, removed, other shape, unknown place; without times on a side: same
    resources, other resources.

    ratio, low, high: mean time of a call, candidate / base, with its 99 % interval. state: what is clear of noise.
    difference = calls_effect + per_call_effect = candidate's total - base's (ns). share: of the whole difference.
    """

    kind: str
    state: State
    place: Optional[str]
    operator: Optional[str]
    kernel: str
    text: str
    base: Optional[Side]
    candidate: Optional[Side]
    difference: int
    calls_effect: int
    per_call_effect: int
    unattributed: int
    share: Optional[float] = None
    ratio: Optional[float] = None
    low: Optional[float] = None
    high: Optional[float] = None
    why: Optional[str] = None
    changes: Tuple[Change, ...] = ()


@dataclass(frozen=True)
class Group:
    """All kernels of one family, wherever they were launched. ratio, low, high: time of the candidate's calls over what
    they would have taken at the base's times, so that another mix of calls does not move it; 99 % interval.

    kind: slower per call, faster per call, same per call, undecided, added, removed, replaced. clear: of noise.
    """

    family: str
    kind: str
    clear: bool
    calls_base: int
    calls_candidate: int
    total_base: int
    total_candidate: int
    ratio: Optional[float] = None
    low: Optional[float] = None
    high: Optional[float] = None

    @property
    def text(self) -> str:
        if (self.calls_base and not self.total_base) or (self.calls_candidate and not self.total_candidate):
            counts = f"{self.calls_base} -> {self.calls_candidate} calls"
            return f"{short(self.family)}: {self.kind}, times unknown, {counts}"
        sides = [(t / c if c else None) for t, c in ((self.total_base, self.calls_base),
                                                     (self.total_candidate, self.calls_candidate))]
        if None in sides:
            only = "candidate" if sides[0] is None else "base"
            total, calls = max(self.total_base, self.total_candidate), max(self.calls_base, self.calls_candidate)
            return (f"{short(self.family)}: {self.kind}, only in the {only}, {duration(total / calls)} a call, {calls} "
                    f"calls, {duration(total)} in all")
        change = f" ({percent(self.ratio)} at equal calls)" if self.ratio is not None else ""
        doubt = "" if self.clear or self.kind in ("same per call", "undecided", "added", "removed", "replaced") else \
            ", not clear of noise"
        return (f"{short(self.family)}: {self.kind}{doubt}, {duration(sides[0])} -> {duration(sides[1])} a call{change}"
                f", {self.calls_base} -> {self.calls_candidate} calls, {duration(self.total_base)} -> "
                f"{duration(self.total_candidate)} in all")


@dataclass(frozen=True)
class DiffResult:
    """The answer. key: what the kernels were lined up by (path, nvtx, sequence). Totals in ns of what is compared; None
    for a side whose kernels have no times (all figures of time are then 0 in the rows, and say nothing).

    parts: the whole difference by kind of row, with "calls" for changed numbers of calls and "unattributed"; they add
    up to total_candidate - total_base. unattributed_share is null when nothing differs. facts: what the recordings say
    about their surroundings that differs (versions, transports, channels, choices of a tuner).
    """

    base: Dict[str, Any]
    candidate: Dict[str, Any]
    key: str
    rows: Tuple[Row, ...]
    groups: Tuple[Group, ...]
    warnings: Tuple[str, ...]
    problems: Tuple[str, ...]
    total_base: Optional[int]
    total_candidate: Optional[int]
    unattributed: int
    unattributed_share: Optional[float]
    parts: Dict[str, int] = field(default_factory=dict)
    facts: Tuple[Change, ...] = ()
    steps: Optional[int] = None
    per_call_comparable: bool = True
    complete: bool = True
    totals_comparable: bool = True


def diff(base: Recording, candidate: Recording, margin: float = percall.MARGIN) -> DiffResult:
    """What changed from one recording to the other. margin: a change per call below it counts as none."""
    limits = Comparable(base, candidate)
    key = choose_key(limits.base, limits.candidate)
    (limits.base, limits.candidate), placed = place_unlaunched((limits.base, limits.candidate), key)
    for side, count in zip(("base", "candidate"), placed):
        if count:
            limits.warnings.append(f"{count} kernels of {side} have no launch row; they count to the one place where "
                                   "kernels of their name and grid were launched")
    ours, theirs = (_summaries(buckets(table, key), recording)
                    for table, recording in ((limits.base, base), (limits.candidate, candidate)))
    order = _order(limits, ours, theirs) if key == "sequence" else None
    counters = (_counters(base), _counters(candidate))
    pairs = align(ours, theirs, order, (inputs_of(base), inputs_of(candidate)))
    rows = [_row(pair, limits, margin, counters) for pair in pairs]
    totals = [None if side and not any(b.timed for b in side) else sum(b.total for b in side)
              for side in (ours, theirs)]
    whole = (totals[1] or 0) - (totals[0] or 0)
    warnings = [*limits.warnings, *_shape_warning(rows)]
    unattributed = sum(r.unattributed for r in rows)
    return DiffResult(
        base=_about(base, limits.base), candidate=_about(candidate, limits.candidate), key=key,
        rows=tuple(_with_share(r, whole) for r in sorted(rows, key=_weight)),
        groups=_groups(pairs, limits, margin), warnings=tuple(warnings),
        problems=tuple(_problem(side, p) for side, r in (("base", base), ("candidate", candidate)) for p in r.problems),
        total_base=totals[0], total_candidate=totals[1], unattributed=unattributed,
        unattributed_share=unattributed / whole if whole else None, parts=_parts(rows), facts=facts(base, candidate),
        steps=limits.steps, per_call_comparable=limits.per_call, complete=limits.complete,
        totals_comparable=limits.totals)


def _problem(side: str, problem: Problem) -> str:
    count = f"{problem.count} x " if problem.count > 1 and str(problem.count) not in problem.text else ""
    return f"{side}: {count}{problem.text} ({problem.where})"


def facts(base: Recording, candidate: Recording) -> Tuple[Change, ...]:
    """What differs between the surroundings of two recordings, as far as both say it."""
    one, other = (_flat_facts(r.metadata) for r in (base, candidate))
    return tuple(Change(what, one[what], other[what], f"{what} {one[what]} -> {other[what]}")
                 for what in one if what in other and one[what] != other[what])


def _flat_facts(metadata: Dict[str, Any]) -> Dict[str, Any]:
    out: Dict[str, Any] = dict(metadata.get("versions", {}))
    out.update({k: metadata[k] for k in ("world", "channels", "arch") if k in metadata})
    out.update({f"{kind} channels": n for kind, n in metadata.get("channel_counts", {}).items()})
    if "transports" in metadata:
        out["transports"] = ", ".join(sorted(metadata["transports"]))
    for choice in metadata.get("tuner", []):
        what = f"{choice.get('operation', 'collective')} of {choice['bytes']} bytes"
        out[what] = f"{choice['algorithm']} {choice['protocol']}"
    return out


def _about(recording: Recording, table: pl.DataFrame) -> Dict[str, Any]:
    about = {"path": recording.path, "kind": recording.kind, "kernels": table.height, "step": step_totals(table)}
    keep = ("arch", "gpus", "versions", "coverage", "findings")
    about.update({k: recording.metadata[k] for k in keep if k in recording.metadata})
    return {k: v for k, v in about.items() if v is not None}


def _order(limits: Comparable, ours: List[Bucket], theirs: List[Bucket]) -> Tuple[List[Bucket], List[Bucket]]:
    """The buckets in order of launch; empty for files whose kernels stand in no such order."""
    if UNORDERED & {*limits.kinds}:
        return [], []
    out = []
    for rows, side in zip(sequences(limits.base, limits.candidate), (ours, theirs)):
        by_row = {row: bucket for bucket in side for row in bucket.rows}
        out.append([by_row[row] for row in rows])
    return out[0], out[1]


def _summaries(side: List[Bucket], recording: Recording) -> List[Bucket]:
    """Rows of a summary report (nsys stats) hold many calls each: their statistics are counters."""
    if recording.kind != "nsys-csv" or recording.counters is None:
        return side
    values: Dict[int, Dict[str, float]] = defaultdict(dict)
    for kernel, counter, value in recording.counters.select("kernel", "counter", "value").iter_rows():
        values[kernel][counter] = value
    for bucket in side:
        found = [values[r] for r in bucket.rows if r in values]
        if not found or any("instances" not in v or "total" not in v for v in found):
            continue
        bucket.calls = bucket.timed = round(sum(v["instances"] for v in found))
        bucket.total = round(sum(v["total"] for v in found))
        if len(found) == 1:
            bucket.median = found[0].get("median")
            deviation = found[0].get("standard_deviation")
            bucket.variance = deviation**2 if deviation is not None and math.isfinite(deviation**2) else None
    return side


def _row(pair: Pair, limits: Comparable, margin: float, counters: Sequence[Dict[int, Dict[str, Any]]]) -> Row:
    base, candidate = (_side(s) for s in (pair.base, pair.candidate))
    change = percall.compare(pair.base, pair.candidate, margin) if base and candidate else percall.PerCall()
    difference = sum(b.total for b in pair.candidate) - sum(b.total for b in pair.base)
    calls_effect = 0
    if base and candidate and base.mean is not None:
        calls_effect = round((candidate.calls - base.calls) * base.mean)
    changes = _changes(pair, counters)
    kind, state = _kind(pair, change, base, candidate, limits)
    if kind == "undecided" and change.ratio is None:
        kind = "other resources" if changes else "same resources"
    settled = pair.kind != "matched" or kind in ("slower per call", "faster per call")
    unattributed = difference if kind == "unknown place" else 0 if settled else difference - calls_effect
    first, place = (*pair.candidate, *pair.base)[0], pair.place
    operator = first.operator if place == first.place else place.rpartition(" > ")[2]
    row = Row(kind, state, place or None, operator, first.name, "", base, candidate, difference,
              calls_effect, difference - calls_effect, unattributed, ratio=change.ratio, low=change.low,
              high=change.high, why=change.why, changes=changes)
    return _replace(row, text=words(row))


def _kind(pair: Pair, change: percall.PerCall, base: Optional[Side], candidate: Optional[Side],
          limits: Comparable) -> Tuple[str, State]:
    if pair.kind == "added":
        return "added", State.NEW
    if pair.kind == "removed":
        return "removed", State.MISSING
    if pair.kind in ("unknown place", "other shape") or not base or not candidate:
        return pair.kind, State.UNDECIDED
    state = SETTLED[change.state] if limits.per_call else State.UNDECIDED
    if pair.kind != "matched" and not pair.same_inputs and (base.shapes is None) != (candidate.shapes is None):
        return pair.kind, State.UNDECIDED  # whether the inputs are the same is not known
    if pair.kind != "matched":
        return pair.kind, state
    if state in (State.SLOWER, State.FASTER):
        return f"{state.value} per call", state
    timed = min(sum(b.timed for b in side) for side in (pair.base, pair.candidate))
    large = change.ratio is not None and max(change.ratio, 1 / change.ratio) >= percall.LARGE
    if large and timed >= percall.FEWEST and change.ratio is not None:
        return "slower per call" if change.ratio > 1 else "faster per call", state
    if limits.totals and limits.steps is not None and base.calls != candidate.calls:
        return "more calls" if candidate.calls > base.calls else "fewer calls", state
    return "same per call" if state == State.SAME else "undecided", state


def _groups(pairs: Sequence[Pair], limits: Comparable, margin: float) -> Tuple[Group, ...]:
    """By family, the largest first; families without times have nothing to sum up. Only buckets
    that are matched one to one say anything per call."""
    matched: Dict[str, List[Tuple[Bucket, Bucket]]] = defaultdict(list)
    sums: Dict[str, List[int]] = defaultdict(lambda: [0, 0, 0, 0])
    replaced: set[str] = set()
    timed: set[str] = set()
    for pair in pairs:
        if pair.kind == "matched" and len(pair.base) == len(pair.candidate) == 1:
            matched[pair.base[0].family].append((pair.base[0], pair.candidate[0]))
        for i, side in enumerate((pair.base, pair.candidate)):
            for bucket in side:
                replaced |= {bucket.family} if pair.kind in ("replaced", "split", "fused") else set()
                timed |= {bucket.family} if bucket.timed else set()
                total = sums[bucket.family]
                total[i] += bucket.calls
                total[2 + i] += bucket.total
    out = []
    for name in (n for n in sums if n in timed):
        calls, calls_candidate, total_base, total_candidate = sums[name]
        change = percall.index(matched[name], margin)
        clear = change.state in ("slower", "faster") and limits.per_call
        ratio = change.ratio
        kind = "added" if not calls else "removed" if not calls_candidate else "undecided"
        kind = "replaced" if name in replaced and (kind != "undecided" or ratio is None) else kind
        if ratio is not None and (change.state == "same" or clear or max(ratio, 1 / ratio) >= percall.LARGE):
            kind = "same per call" if change.state == "same" else f"{'slower' if ratio > 1 else 'faster'} per call"
        few = min(sum(p[i].timed for p in matched[name]) for i in (0, 1)) < percall.FEWEST
        out.append(Group(name, "undecided" if few and ratio is not None else kind, clear, calls, calls_candidate,
                         total_base, total_candidate, ratio, change.low, change.high))
    return tuple(sorted(out, key=lambda g: (-max(g.total_base, g.total_candidate), g.family)))


def _side(side: Sequence[Bucket]) -> Optional[Side]:
    if not side:
        return None
    calls, timed = percall.jobs(side), sum(b.timed for b in side)
    total = sum(b.total for b in side) if timed else None
    one = side[0] if len(side) == 1 else None
    mean = total / calls if total is not None and calls else None
    if one is not None and total is not None and one.timed:
        mean = total / one.timed
    return Side(tuple(dict.fromkeys(b.name for b in side)), calls, total, mean, one.median if one else None,
                one.mad if one and one.timed > 1 else None, one.grid or () if one else (),
                one.block or () if one else (), side[0].shapes if len({b.shapes for b in side}) == 1 else None)


def _changes(pair: Pair, counters: Sequence[Dict[int, Dict[str, Any]]]) -> Tuple[Change, ...]:
    """Properties of single kernels that differ, and counters that changed by more than a tenth."""
    if len(pair.base) != 1 or len(pair.candidate) != 1:
        return ()
    a, b = pair.base[0], pair.candidate[0]
    out = []
    properties: Tuple[Tuple[str, Any, Any], ...] = (
        ("kernel", a.plain, b.plain), ("grid", a.grid, b.grid), ("block", a.block, b.block),
        ("registers", a.registers, b.registers), ("shared", a.shared, b.shared))
    for what, old, new in properties:
        if old is not None and new is not None and old != new:
            if what == "kernel":
                old, new = a.name, b.name
            out.append(Change(what, old, new, f"{what} {contrast(str(old), str(new))}"))
    found: Dict[str, Tuple[Any, Change]] = {}  # one of a metric's sum, average, least and most
    theirs = _mean_counters(b, counters[1])
    for name, (one, unit) in _mean_counters(a, counters[0]).items():
        other = theirs.get(name, (None, unit))[0]
        if other is not None and one and other and abs(other / one - 1) > COUNTER_CHANGE and not SILENT.search(name):
            extreme = name.split(".")[1:2] in (["min"], ["max"])
            rank = (TELLING.search(name) is None, extreme, -abs(math.log(abs(other / one))), name)
            change = Change(name, one, other, f"{name} {one:.4g} -> {other:.4g} {unit}".strip())
            metric = name.partition(".")[0]
            found[metric] = min(found.get(metric, (rank, change)), (rank, change), key=lambda f: f[0])
    return (*out, *(change for _, change in sorted(found.values(), key=lambda f: f[0])[:MOST_COUNTERS]))


def _counters(recording: Recording) -> Dict[int, Dict[str, Any]]:
    out: Dict[int, Dict[str, Any]] = defaultdict(dict)
    if recording.counters is None or recording.kind not in ("ncu", "ncu-csv"):
        return out
    for kernel, name, value, unit in recording.counters.select("kernel", "counter", "value", "unit").iter_rows():
        if value is not None and not name.startswith("rule: "):
            out[kernel][name] = (value, unit)
    return out


def _mean_counters(bucket: Bucket, counters: Dict[int, Dict[str, Any]]) -> Dict[str, Tuple[float, str]]:
    collected: Dict[str, List[Tuple[float, str]]] = defaultdict(list)
    for row in bucket.rows:
        for name, entry in counters.get(row, {}).items():
            collected[name].append(entry)
    return {n: (sum(v for v, _ in e) / len(e), e[0][1]) for n, e in collected.items()}


def _shape_warning(rows: Sequence[Row]) -> List[str]:
    time = sum(_time(r) for r in rows)
    other = sum(_time(r) for r in rows if r.kind == "other shape")
    return [f"different input shapes: {other / time:.0%} of the device time is in kernels that ran with another shape "
            "or grid; those rows do not say slower or faster"] if time and other / time > 0.05 else []


def _time(row: Row) -> int:
    return sum(s.total or 0 for s in (row.base, row.candidate) if s)


def _parts(rows: Sequence[Row]) -> Dict[str, int]:
    parts: Dict[str, int] = defaultdict(int)
    for row in rows:
        parts["unattributed"] += row.unattributed
        if row.kind in ("replaced", "split", "fused", "added", "removed", "other shape"):
            parts[row.kind] += row.difference
        elif row.kind != "unknown place":
            parts["calls"] += row.calls_effect
            parts[row.kind] += row.difference - row.calls_effect - row.unattributed
    return {"unattributed": 0, **{k: v for k, v in parts.items() if v}}


def _weight(row: Row) -> Tuple[int, int, str, str]:
    """What is clear first, then what changed, then the rest; within these by time."""
    clear = row.state in (State.SLOWER, State.FASTER)
    quiet = row.kind in ("same per call", "undecided", "unknown place", "same resources")
    effect = row.per_call_effect if row.base and row.candidate else row.difference
    return (0 if clear else 2 if quiet else 1, -abs(effect), row.kernel, row.place or "")


def _with_share(row: Row, whole: int) -> Row:
    return _replace(row, share=row.difference / whole) if whole else row


def _replace(row: Row, **fields: Any) -> Row:
    return Row(**{**{name: getattr(row, name) for name in row.__dataclass_fields__}, **fields})


def launch(side: Side) -> str:
    return f"grid {'x'.join(map(str, side.grid)) or '?'}, block {'x'.join(map(str, side.block)) or '?'}"


def _choice(one: Side, other: Side) -> str:
    """What stood for what."""
    if [names.plain(k) for k in one.kernels] == [names.plain(k) for k in other.kernels]:
        return f"{launch(one)} -> {launch(other)}"
    if max(len(one.kernels), len(other.kernels)) <= FEW:
        return contrast(" + ".join(one.kernels), " + ".join(other.kernels))
    return " -> ".join(short(names.family(side.kernels[0])) + (f" and {len(side.kernels) - 1} more kernels" if
                       len(side.kernels) > 1 else "") for side in (one, other))


def words(row: Row) -> str:
    """One sentence about a row, per call first."""
    name = short(names.family(row.kernel))
    if row.base is None or row.candidate is None:
        side = row.candidate or row.base
        assert side is not None
        time = f", {duration(side.total)} in all" if side.total is not None else ""
        where = {"added": "only in the candidate", "removed": "only in the base"}.get(
            row.kind, f"only in the {'candidate' if row.base is None else 'base'}, with no launch row: its operator is "
            "unknown")
        return f"{name}: {where}, {side.calls} calls{time}"
    one, other = row.base, row.candidate
    if row.operator and max(len(one.kernels), len(other.kernels)) > FEW:
        name = row.operator
    text = f"{name}: {row.kind}"
    if row.kind in ("replaced", "split", "fused"):
        text += f" ({_choice(one, other)})"
    if row.kind == "other shape":
        text += f" ({one.shapes or launch(one)} -> {other.shapes or launch(other)}): not a regression"
    if one.mean is not None and other.mean is not None:
        text += f", {duration(one.mean)} -> {duration(other.mean)} a call"
    if row.ratio is not None and row.kind != "other shape":
        interval = f", 99 % interval {percent(row.low)} .. {percent(row.high)}" if row.low and row.high else ""
        text += f" ({percent(row.ratio)}{interval})"
    if row.kind == "other resources":
        text += ", " + ", ".join(c.text for c in row.changes)
    if one.calls != other.calls:
        text += f", {one.calls} -> {other.calls} calls"
    if row.state == State.UNDECIDED and row.why and row.kind != "other shape" and not row.kind.endswith("resources"):
        text += f"; undecided: {row.why}"
        if row.ratio and one.median and other.median and row.kind.endswith("per call"):
            text += f" (medians {duration(one.median)} -> {duration(other.median)})"
    if row.kind.endswith("er per call") and name.lower().startswith(("nccl", "rccl")):
        text += "; a collective's time includes waiting for the slowest rank"
    return text
