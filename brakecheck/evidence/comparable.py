"""What of two recordings can be compared: unlike GPUs, step counts, kinds and cut captures are said, and cut away."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Optional, Set, Tuple

import polars as pl

from .table import Recording

# Launches without a kernel row that the end of a capture explains; more means a profiler that loses kernels.
MOST_DROPPED = 0.02
# Nsight Compute serialises kernels, fixes the clock and flushes caches; a timeline does none of it.
REPLAYED = {"ncu", "ncu-csv"}


class Comparable:
    """The kernel tables limited to what is comparable, and the warnings that say what was not.

    per_call: False when a call's time of one side says nothing about the other's (another GPU, another instrument).
    totals: False when totals cover unlike amounts of work (cut captures, unlike ranks).
    complete: False when a profiler dropped more than MOST_DROPPED of the kernels (F35): what is missing is not known.
    steps: number of steps compared, None when a recording has no steps.
    """

    def __init__(self, base: Recording, candidate: Recording) -> None:
        self.base, self.candidate = (r.kernels.with_row_index("row") for r in (base, candidate))
        self.warnings: List[str] = []
        self.kinds = base.kind, candidate.kind
        self.per_call = True
        self.totals = True
        self.complete = True
        self._kinds(base, candidate)
        self._devices(base, candidate)
        self._cut(base, candidate)
        self._coverage(base, candidate)
        self.steps = self._steps()
        self._ranks()

    def _kinds(self, base: Recording, candidate: Recording) -> None:
        if (base.kind in REPLAYED) != (candidate.kind in REPLAYED):
            self.per_call = False
            self.warnings.append(f"different instruments: {base.kind} against {candidate.kind}. Nsight Compute "
                                 "serialises kernels, fixes clocks and flushes caches, so its times do not "
                                 "compare with a timeline's: only the kernels are compared")
        elif base.kind != candidate.kind and {base.kind, candidate.kind} - REPLAYED:
            self.warnings.append(f"different instruments: {base.kind} against {candidate.kind}; their overheads differ")

    def _devices(self, base: Recording, candidate: Recording) -> None:
        one, other = (gpus(r, "name") for r in (base, candidate))
        if one and other and one != other:
            self.per_call = False
            self.warnings.append(f"different GPUs: {', '.join(sorted(one))} against {', '.join(sorted(other))}. What "
                                 "changed per call is the GPU's doing as much as the software's")
            return
        unknown = [name for name, found in (("base", one), ("candidate", other)) if not found]
        if unknown and {base.kind, candidate.kind} & {"kineto", "nsys", "ncu", "ncu-csv", "nsys-csv"}:
            self.warnings.append(f"the GPU of {' and '.join(unknown)} is not recorded: equal GPUs are assumed, "
                                 "not known")
        one, other = (gpus(r, "capability") for r in (base, candidate))
        if one and other and one != other:
            self.per_call = False
            self.warnings.append(f"different compute capabilities: {', '.join(sorted(one))} against "
                                 f"{', '.join(sorted(other))}")

    def _cut(self, base: Recording, candidate: Recording) -> None:
        for name, recording in (("base", base), ("candidate", candidate)):
            cut = _cut_words(recording)
            if cut:
                self.totals = False
                self.warnings.append(f"{name} is cut: {cut}. Numbers of calls and totals depend on the cut; "
                                     "compare per call")

    def _coverage(self, base: Recording, candidate: Recording) -> None:
        for name, recording in (("base", base), ("candidate", candidate)):
            share = recording.metadata.get("coverage", {}).get("dropped_share")
            if share is not None and share > MOST_DROPPED:
                self.complete = self.totals = False
                self.warnings.append(f"{name} lacks kernels: {share:.1%} of the launches have no kernel row, so the "
                                     "profiler dropped them")

    def _steps(self) -> Optional[int]:
        one, other = (t["step"].drop_nulls().unique().sort().to_list() for t in (self.base, self.candidate))
        if not one or not other:
            if not REPLAYED & {self.kinds[0], self.kinds[1]} and all(t["start"].count() for t in
                                                                     (self.base, self.candidate)):
                self.warnings.append("no steps are marked in both recordings: calls are compared over the whole "
                                     "recordings, and how a step varies is not known")
            return None
        count = min(len(one), len(other))
        if len(one) != len(other):
            self.warnings.append(f"different step counts: {len(one)} against {len(other)}; the last {count} of each "
                                 "are compared")
        self.base = self._last("base", self.base, one[-count:])
        self.candidate = self._last("candidate", self.candidate, other[-count:])
        if count == 1:
            self.warnings.append("one step on each side: how much a step varies by itself is not known")
        return count

    def _last(self, name: str, table: pl.DataFrame, steps: List[int]) -> pl.DataFrame:
        outside = table["step"].null_count()
        if outside:
            self.warnings.append(f"{outside} kernels of {name} belong to no step and are left out")
        return table.filter(pl.col("step").is_in(steps))

    def _ranks(self) -> None:
        one, other = (set(t["rank"].drop_nulls().unique().to_list()) for t in (self.base, self.candidate))
        both = one & other
        if one and other and one != other and both:
            more = [f"{name} has {_listed('rank', found, verb=False)} besides"
                    for name, found in (("base", one - both), ("candidate", other - both)) if found]
            said = f"different ranks: only {_listed('rank', both)} in both and compared"
            self.warnings.append("; ".join([said, *more]))
            self.base, self.candidate = (t.filter(pl.col("rank").is_in(both)) for t in (self.base, self.candidate))
        elif one and other and not both:
            self.totals = self.totals and len(one) == len(other)
            self.warnings.append(f"no rank is in both: {_listed('rank', one, verb=False)} against "
                                 f"{_listed('rank', other, verb=False)}"
                                 + ("" if len(one) == len(other) else "; totals do not compare"))
        devices = [t["device"].drop_nulls().n_unique() for t in (self.base, self.candidate)]
        if all(devices) and devices[0] != devices[1] and not both:
            self.totals = False
            self.warnings.append(f"different numbers of devices: {devices[0]} against {devices[1]}; totals do not "
                                 "compare")


def _listed(word: str, numbers: Set[int], most: int = 8, verb: bool = True) -> str:
    shown = ", ".join(map(str, sorted(numbers)[:most])) + (", ..." if len(numbers) > most else "")
    return f"{word}{'s' if len(numbers) > 1 else ''} {shown}" + (" are" if len(numbers) > 1 else " is") * verb


def gpus(recording: Recording, what: str) -> Set[str]:
    """Names or capabilities of the recording's GPUs, as far as they are recorded."""
    found = [gpu.get(what) for gpu in recording.metadata.get("gpus", [])]
    return {re.sub(r"^NVIDIA ", "", f.strip()) for f in found if isinstance(f, str) and f.strip()}


def _cut_words(recording: Recording) -> Optional[str]:
    window = recording.metadata.get("window_ns")
    if isinstance(window, (list, tuple)) and len(window) == 2:
        return f"a window of {(window[1] - window[0]) / 1e6:.0f} ms was taken out of a longer recording"
    for problem in recording.problems:
        if problem.code in ("truncated", "cut", "truncated-tail"):
            return problem.text
    return None


def step_totals(table: pl.DataFrame) -> Optional[Dict[str, Any]]:
    """Device time of a step (ns): steps, median, mad (of the steps). None without steps."""
    if table["step"].null_count() == table.height:
        return None
    totals = table.drop_nulls("step").group_by("step").agg(pl.col("duration").sum())["duration"].cast(pl.Float64)
    median: Any = totals.median()
    spread: Any = (totals - median).abs().median()
    return {"steps": totals.len(), "median": median, "mad": spread if totals.len() > 1 else None}


def sequences(base: pl.DataFrame, candidate: pl.DataFrame) -> Tuple[List[int], List[int]]:
    """Values of `row` in order of launch, of the device (or rank) that did most on each side."""
    out = []
    for rows in (base, candidate):
        if rows.height and rows["device"].null_count() < rows.height:
            top = rows.group_by("rank", "device", maintain_order=True).len().sort("len", descending=True).row(0)
            rows = rows.filter(pl.col("rank").eq_missing(top[0]) & pl.col("device").eq_missing(top[1]))
        out.append(rows.sort("start", nulls_last=True, maintain_order=True)["row"].to_list())
    return out[0], out[1]
