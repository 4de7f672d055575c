"""The steps of a recording in a few figures and lines: mean parts of a step for each rank, gradient synchronisation."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import polars as pl

from .steps import PARTS, decompose, gradient_sync
from .table import Recording
from .wording import duration

MOST_RANKS = 8  # lines in a terminal; all are in the data
TELLING = 0.0005  # share of a step below which a part would be shown as 0.0 %
_STAGES = ("launch", "wait", "collective_time", "wire", "skew", "copy")


def summarise(recording: Recording) -> Optional[Dict[str, Any]]:
    """Means over the steps, for each rank; None where the recording knows of no steps or has no times.

    {"ranks": [{"rank", "steps", "duration_ns", "parts_ns": {compute, overlap, communication, copy, idle_*},
    "wire_ns", "skew_ns", "carried_ns"}], "synchronisation": [{"rank", "calls", "bytes", "launch_ns", "wait_ns",
    "collective_ns", "wire_ns", "skew_ns", "copy_ns"}]}, all a step; parts_ns add up to duration_ns (but for rounding),
    and what is unknown is absent. synchronisation holds ranks with collectives only.
    """
    numbered = recording.kernels["step"].null_count() < recording.kernels.height
    if not recording.metadata.get("steps") and not numbered:
        return None
    table = decompose(recording)
    if not table.height:
        return None
    ranks = []
    for (rank,), rows in table.group_by(["rank"], maintain_order=True):
        means = {c: rows[c].mean() for c in ("duration", *PARTS, "wire", "skew", "carried")}
        facts = {"rank": rank, "steps": rows.height, "duration_ns": means["duration"],
                 "parts_ns": {part: means[part] for part in PARTS if means[part]},
                 **{f"{name}_ns": means[name] for name in ("wire", "skew", "carried")}}
        ranks.append(_known(facts))
    counts = {r.get("rank"): r["steps"] for r in ranks}
    found: Dict[str, Any] = {"ranks": ranks}
    synchronisation = [_stages(rank, rows, counts.get(rank, 1)) for (rank,), rows in
                       gradient_sync(recording).filter(pl.col("step").is_not_null())
                       .group_by(["rank"], maintain_order=True)]
    if synchronisation:
        found["synchronisation"] = synchronisation
    return found


def _stages(rank: Optional[int], rows: pl.DataFrame, steps: int) -> Dict[str, Any]:
    collectives = rows.filter(pl.col("collective").is_not_null())
    sums: Dict[str, Any] = {"rank": rank, "calls": collectives["calls"].sum() / steps}
    if collectives["bytes"].null_count() == 0:
        sums["bytes"] = collectives["bytes"].sum() / steps
    for stage in _STAGES:
        if stage not in rows.columns:
            continue
        known = rows[stage].drop_nulls()
        sums[f"{stage.removesuffix('_time')}_ns"] = known.sum() / steps if len(known) else None
    return _known(sums)


def _known(facts: Dict[str, Any]) -> Dict[str, Any]:
    return {k: v for k, v in facts.items() if v is not None}


def lines(summary: Dict[str, Any]) -> List[str]:
    """A line a rank, and one a rank with gradient synchronisation; ranks beyond MOST_RANKS are counted."""
    out = []
    for kind, text in (("ranks", _step), ("synchronisation", _synchronisation)):
        rows = summary.get(kind, ())
        out += [text(row) for row in rows[:MOST_RANKS]]
        if len(rows) > MOST_RANKS:
            out.append(f"{len(rows) - MOST_RANKS} more ranks: --json has all")
    return out


def _rank(row: Dict[str, Any]) -> str:
    return f"rank {row['rank']}: " if "rank" in row else ""


def _step(row: Dict[str, Any]) -> str:
    parts, whole = row["parts_ns"], row["duration_ns"]
    count = f"{row['steps']} steps, mean" if row["steps"] > 1 else "one step,"
    if not whole:
        return f"{_rank(row)}{count} without duration"

    def share(names: List[str]) -> str:
        return f"{sum(parts.get(n, 0) for n in names) / whole:.1%}"

    shown = [f"{name} {share([name])}" for name in PARTS[:4] if parts.get(name, 0) >= TELLING * whole]
    idle = [name for name in PARTS[4:] if parts.get(name, 0) >= TELLING * whole]
    if idle:
        causes = ", ".join(f"{name.removeprefix('idle_')} {share([name])}" for name in idle)
        shown.append(f"idle {share(idle)} ({causes})")
    text = f"{_rank(row)}{count} {duration(whole)}: {', '.join(shown)}"
    if "wire_ns" in row:
        text += f"; exposed communication is {duration(row['wire_ns'])} wire, {duration(row['skew_ns'])} skew"
    if row.get("carried_ns"):
        text += f"; {duration(row['carried_ns'])} of it belongs to other steps or none"
    return text


def _synchronisation(row: Dict[str, Any]) -> str:
    names = ("launch", "wait", "collective", "wire", "skew", "copy")
    stages = ", ".join(f"{name} {duration(row[f'{name}_ns'])}" for name in names if f"{name}_ns" in row)
    return f"{_rank(row)}synchronisation, {row['calls']:.4g} collectives a step: {stages}"
