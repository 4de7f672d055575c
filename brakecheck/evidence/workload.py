"""The operator mix of a trace: what a workload runs in a step, how often, and with what share of the time.

File format brakecheck/workload/1: docs/evidence.md.
"""

from __future__ import annotations

import json
from typing import Any, Dict, List, Optional, Tuple, cast

import polars as pl

from ..model import BrakecheckError
from ..ops import Case, catalogue
from .steps import PARTS, decompose
from .table import Recording
from .workload_cases import Call, Stand, stand_in

SCHEMA = "brakecheck/workload/1"
_KEY = ["operator", "shapes", "dtypes", "strides"]


def extract(recording: Recording) -> Dict[str, Any]:
    """The mix of a recording with operators, as the JSON of SCHEMA. Times are nanoseconds a step and rank.

    Time is that of kernels, counted to the innermost operator that launched them. A recording without kernels (a CPU's)
    counts the time of operators on the host without that of the operators inside them.
    BrakecheckError when there are no operators, or nothing has a time.
    """
    if recording.operators is None or not recording.operators.height:
        raise BrakecheckError("this recording knows of no operators, so there is no mix to extract", recording.path,
                              "give a trace of the PyTorch profiler, recorded with record_shapes=True")
    on_device = recording.kernels.filter(pl.col("duration") > 0).height > 0
    rows = _of_steps(_device_rows(recording) if on_device else _host_rows(recording))
    total = int(rows["time"].sum() or 0)
    if not total:
        raise BrakecheckError("nothing in this recording has a time", recording.path, "record at least one whole step")
    visits = max(rows.select("rank", "step").n_unique(), 1)
    ranks = rows["rank"].n_unique()
    tables = _embedding_tables(recording.operators)
    names = catalogue()
    entries = [_entry(group, total, visits, tables, names) for group in _groups(rows)]
    covered = [e for e in entries if "case" in e]
    window = _window(recording) if on_device else {}
    data = {
        "schema": SCHEMA,
        "source": {"path": recording.path, "kind": recording.kind, "steps": visits // ranks, "ranks": ranks,
                   "gpus": [g["name"] for g in recording.metadata.get("gpus", []) if g.get("name")] or None,
                   "versions": recording.metadata.get("versions") or None,
                   "shapes_recorded": rows["shapes"].null_count() < rows.height},
        "clock": "device" if on_device else "host",
        "time_ns": total / visits, **window,
        "covered_share": sum(e["share"] for e in covered),
        "same_share": sum(e["share"] for e in covered if e["case"]["fit"] == "same"),
        "uncovered": _uncovered(entries), "entries": entries}
    data["source"] = {k: v for k, v in data["source"].items() if v is not None}  # type: ignore[attr-defined]
    return data


def _device_rows(recording: Recording) -> pl.DataFrame:
    """One row a kernel with a time: its operator call, and strides from the operator table."""
    operators = cast(pl.DataFrame, recording.operators).with_row_index("call").select(
        pl.col("call").cast(pl.Int64), "strides")
    kernels = recording.kernels.filter(pl.col("duration") > 0)
    operator = pl.coalesce("operator", pl.when(pl.col("kind") == "collective").then(pl.lit("collective")))
    return kernels.join(operators, on="call", how="left", maintain_order="left").select(
        operator.alias("operator"), "shapes", "dtypes", "strides", "rank", "step", "call",
        pl.col("duration").alias("time"), pl.col("name").alias("kernel"))


def _host_rows(recording: Recording) -> pl.DataFrame:
    """One row an operator call, with its time less that of the calls inside it."""
    operators = cast(pl.DataFrame, recording.operators).with_row_index("call")
    if "kind" in operators.columns:
        operators = operators.filter(pl.col("kind").eq_missing("operator") | pl.col("kind").is_null())
    operators = operators.filter(pl.col("start").is_not_null() & (pl.col("duration") >= 0))
    operators = operators.sort("rank", "thread", "start", "depth")
    inside: Dict[int, int] = {}
    open_calls: List[Tuple[int, int]] = []  # (call, end) of the calls around the current one
    place: Any = None
    for call, rank, thread, start, duration in operators.select("call", "rank", "thread", "start",
                                                                "duration").iter_rows():
        if (rank, thread) != place:
            place, open_calls = (rank, thread), []
        while open_calls and open_calls[-1][1] <= start:
            open_calls.pop()
        if open_calls:
            inside[open_calls[-1][0]] = inside.get(open_calls[-1][0], 0) + duration
        open_calls.append((call, start + duration))
    within = pl.Series("within", [inside.get(c, 0) for c in operators["call"]], dtype=pl.Int64)
    own = operators.with_columns(pl.max_horizontal(pl.col("duration") - within, pl.lit(0)).alias("time"))
    return own.filter(pl.col("time") > 0).select(
        pl.col("name").alias("operator"), "shapes", "dtypes", "strides", "rank", "step",
        pl.col("call").cast(pl.Int64), "time", pl.lit(None, dtype=pl.String).alias("kernel"))


def _of_steps(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows that belong to a step, where any does: the rest is warming up."""
    inside = rows.filter(pl.col("step").is_not_null())
    return inside if inside.height else rows


def _groups(rows: pl.DataFrame) -> List[Dict[str, Any]]:
    return rows.group_by(_KEY, maintain_order=True).agg(
        pl.col("time").sum(), pl.struct("rank", "call").n_unique().alias("calls"),
        pl.col("kernel").drop_nulls().unique(maintain_order=True).alias("kernels"),
    ).sort("time", descending=True, maintain_order=True).to_dicts()


def _entry(group: Dict[str, Any], total: int, visits: int, tables: Dict[Tuple[int, int], int],
           names: Dict[str, Any]) -> Dict[str, Any]:
    shapes, dtypes, strides = (_loaded(group[k]) for k in ("shapes", "dtypes", "strides"))
    entry: Dict[str, Any] = {"operator": group["operator"], "shapes": shapes, "dtypes": dtypes, "strides": strides,
                             "calls": group["calls"] / visits if group["operator"] else None,
                             "time_ns": group["time"] / visits, "share": group["time"] / total,
                             "kernels": group["kernels"][:4] or None}
    if group["operator"] is None:
        found: Any = "no operator is recorded for these kernels"
    else:
        found = stand_in(Call(group["operator"], shapes or (), dtypes or (), strides, group["kernels"], tables), names)
    if isinstance(found, Stand):
        entry["case"] = {"operator": found.operator, "name": Case.of(**found.params).name, "params": found.params,
                         "fit": found.fit, **({"note": found.note} if found.note else {})}
    else:
        entry["why"] = found
    return {k: v for k, v in entry.items() if v is not None}


def _loaded(text: Optional[str]) -> Any:
    return None if text is None else json.loads(text)


def _embedding_tables(operators: pl.DataFrame) -> Dict[Tuple[int, int], int]:
    """(tokens, width) -> rows of the tables that the trace looks up."""
    found = {}
    wanted = operators.filter((pl.col("name") == "aten::embedding") & pl.col("shapes").is_not_null())
    for text in wanted["shapes"].unique():
        shapes = json.loads(text)
        if len(shapes) > 1 and len(shapes[0]) == 2 and shapes[1]:
            tokens = 1
            for size in shapes[1]:
                tokens *= size
            found[tokens, shapes[0][1]] = shapes[0][0]
    return found


def _uncovered(entries: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """What no case stands for, by operator and reason, the largest share first."""
    sums: Dict[Tuple[Optional[str], str], float] = {}
    for entry in entries:
        if "why" in entry:
            key = (entry.get("operator"), entry["why"])
            sums[key] = sums.get(key, 0.0) + entry["share"]
    return [{**({"operator": operator} if operator else {}), "share": share, "why": why}
            for (operator, why), share in sorted(sums.items(), key=lambda item: -item[1])]


def _window(recording: Recording) -> Dict[str, float]:
    """step_ns: mean duration of a step; busy_share: the part of it in which a device works. Absent without steps."""
    if not recording.metadata.get("steps"):
        return {}
    table = decompose(recording)
    whole = float(table["duration"].sum() or 0)
    if not whole:
        return {}
    idle = sum(float(table[part].sum()) for part in PARTS if part.startswith("idle_"))
    return {"step_ns": whole / table.height, "busy_share": 1 - idle / whole}
