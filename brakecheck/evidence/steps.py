"""Where the time of a step goes, for each rank; and gradient synchronisation in stages. Any reader's Recording will do.

Device time is counted by the clock: at every instant of a step's window the device computes, communicates, does both,
only copies, or is idle, so the parts add up to the window.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import polars as pl

from .table import Recording

PARTS = ("compute", "overlap", "communication", "copy", "idle_host", "idle_synchronisation", "idle_queue",
         "idle_unknown")
_STEP_SCHEMA = {"rank": pl.Int64, "step": pl.Int64, "start": pl.Int64, "duration": pl.Int64,
                **dict.fromkeys((*PARTS, "wire", "skew", "carried"), pl.Int64)}
# Around the copies that gradient and parameter synchronisation makes: FSDP 1 and 2, DDP buckets, DeepSpeed ZeRO.
_SYNC = (r"FSDP|reduce_scatter|reduce-scatter|all_gather|all_reduce|allreduce|ReduceScatter|AllGather|"
         r"record_param_comms|copy_bucket|nccl:|c10d::|DistributedDataParallel|ZeRO|deepspeed|partition_grads")
_COPIES = r"copy|::cat$|chunk_cat|split_with_sizes|flatten|unflatten|::div_?$|::mul_?$|zero_$|fill_$"


def decompose(recording: Recording) -> pl.DataFrame:
    """One row a rank and step, all times in ns:

    compute, overlap (with communication), communication (exposed), copy (and nothing else), and idle by cause:
    idle_host (the next kernel was not launched yet), idle_synchronisation (and its thread sat in a waiting call),
    idle_queue (launched, not started), idle_unknown (no launch recorded). These add up to `duration`.
    wire and skew: the exposed communication of collectives that all ranks recorded, apart; null with one rank.
    carried: time within the window in which rows of another step, or of none, ran.
    """
    kernels = with_wire(recording).filter(pl.col("start").is_not_null() & (pl.col("duration") > 0))
    rows: List[Dict[str, Any]] = []
    for rank, windows in _windows(recording, kernels).items():
        mine = kernels.filter(pl.col("rank").eq_missing(rank)).sort("start")
        waits = _waits(recording.operators, rank)
        rows += [{"rank": rank, **row} for row in _rank(mine, windows, waits)]
    return pl.DataFrame(rows, schema=_STEP_SCHEMA)


def with_wire(recording: Recording) -> pl.DataFrame:
    """The kernel table with `wire` and `skew` (ns) for collectives that every rank of the recording has.

    The rank that comes last does not wait, so the shortest duration over the ranks is the time on the wire, and the
    rest of the others' is waiting for it. This needs no common clock. Collectives match by group, name and order.
    """
    kernels = recording.kernels
    absent = [pl.lit(None, dtype=pl.Int64).alias(c) for c in ("wire", "skew")]
    collectives = kernels.with_row_index("row").filter(
        (pl.col("kind") == "collective") & (pl.col("duration") > 0) & pl.col("rank").is_not_null())
    ranks = collectives["rank"].n_unique()
    if ranks < 2:
        return kernels.with_columns(absent)
    what = pl.coalesce("collective", "name").alias("what")
    keyed = collectives.select("row", "rank", "duration", "start", "group", "step", what).sort("rank", "start")
    keyed = keyed.with_columns(pl.int_range(pl.len()).over("rank", "group", "step", "what").alias("n"),
                               pl.len().over("rank", "group", "step", "what").alias("count"))
    of_group = ["group", "step", "what"]
    whole = keyed.filter((pl.col("rank").n_unique().over(of_group) > 1)
                         & (pl.col("count").n_unique().over(of_group) == 1))
    wire = pl.col("duration").min().over([*of_group, "n"])
    split = whole.select("row", wire.alias("wire"), (pl.col("duration") - wire).alias("skew"))
    return kernels.with_row_index("row").join(split, on="row", how="left", maintain_order="left").drop("row")


def gradient_sync(recording: Recording) -> pl.DataFrame:
    """Synchronisation of gradients and parameters (ZeRO, FSDP, DDP) in stages, one row a rank, step and collective:

    calls, bytes, launch (host time in the launching calls), wait (from the launch's end to the start on the device),
    collective (on the device), of which wire and skew where ranks can be compared, and copy (copies, flattening and
    scaling of the same operators, given once a rank and step in the row whose collective is null). Times in ns.
    """
    kernels = with_wire(recording)
    is_collective = pl.col("kind") == "collective"
    launched = pl.col("launch") + pl.col("launch_duration").fill_null(0)
    wait = pl.max_horizontal(pl.col("start") - launched, pl.lit(0)).filter(pl.col("launch").is_not_null())
    what = pl.coalesce("collective", "name").alias("collective")
    stages = kernels.filter(is_collective).group_by("rank", "step", what).agg(
        pl.len().cast(pl.Int64).alias("calls"), _known_sum("bytes"), _known_sum("launch_duration").alias("launch"),
        _sum(wait).alias("wait"),
        _known_sum("duration").alias("collective_time"), _known_sum("wire"), _known_sum("skew"))
    around = pl.coalesce("path", pl.lit("")) + " | " + pl.coalesce("nvtx", pl.lit(""))
    copying = pl.col("kind").is_in(["memcpy", "memset"]) | pl.coalesce("operator", pl.lit("")).str.contains(_COPIES)
    copies = kernels.filter(~is_collective & copying & around.str.contains(_SYNC)).group_by("rank", "step").agg(
        pl.len().cast(pl.Int64).alias("calls"), _known_sum("bytes"), _known_sum("launch_duration").alias("launch"),
        _known_sum("duration").alias("copy")).join(stages, on=["rank", "step"], how="semi", nulls_equal=True)
    return pl.concat([stages, copies], how="diagonal_relaxed").sort("rank", "step", "collective", nulls_last=True)


def _sum(values: pl.Expr) -> pl.Expr:
    """A sum that is null, not 0, when there is nothing to add."""
    return pl.when(values.count() > 0).then(values.sum())


def _known_sum(column: str) -> pl.Expr:
    return _sum(pl.col(column)).alias(column)


def _windows(recording: Recording, kernels: pl.DataFrame) -> Dict[Optional[int], List[Tuple[Optional[int], int, int]]]:
    """For each rank (step, start, end), in order and disjoint. A marked step lasts until the next one begins, the last
    until its mark and its kernels end. Without marks, the numbers that kernels carry; without those, all is one."""
    out: Dict[Optional[int], List[Tuple[Optional[int], int, int]]] = {}
    ends = kernels.group_by("rank", "step").agg(
        (pl.col("start") + pl.col("duration")).max().alias("end"),
        pl.min_horizontal(pl.col("start").min(), pl.col("launch").min()).alias("start"))
    last = {(r["rank"], r["step"]): r["end"] for r in ends.iter_rows(named=True)}
    marks = sorted(recording.metadata.get("steps") or (), key=lambda s: s["start"])
    for mark in marks:
        out.setdefault(mark.get("rank"), []).append((mark["step"], mark["start"], mark["end"]))
    numbered = any(step is not None for _, step in last)
    for row in ends.sort("start").iter_rows(named=True):
        if not marks and (row["step"] is not None or not numbered):
            out.setdefault(row["rank"], []).append((row["step"], row["start"], row["end"]))
    for rank, windows in out.items():
        for i, (step, start, end) in enumerate(windows):
            following = windows[i + 1][1] if i + 1 < len(windows) else max(end, last.get((rank, step)) or end)
            windows[i] = (step, start, max(following, start))
    return out


def _waits(operators: Optional[pl.DataFrame], rank: Optional[int]) -> Dict[Any, Tuple[np.ndarray, np.ndarray]]:
    """For each thread the merged intervals in which it sat in a waiting call of the runtime."""
    if operators is None:
        return {}
    waiting = pl.col("kind").eq_missing("wait") | pl.col("name").str.contains("^(?:cuda|hip|cu).*Synchronize")
    found = operators.filter(pl.col("rank").eq_missing(rank) & waiting & (pl.col("duration") > 0))
    out = {}
    for (thread,), part in found.sort("start").group_by(["thread"]):
        start = part["start"].to_numpy()
        out[thread] = _merged(start, start + part["duration"].to_numpy())
    return out


def _merged(start: np.ndarray, end: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """The union of intervals sorted by start, as disjoint intervals."""
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    return start[first], reach[np.append(first[1:] - 1, len(start) - 1)]


def _covered(intervals: Tuple[np.ndarray, np.ndarray], start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """How much of each [start, end) the disjoint intervals cover."""
    begin, finish = intervals
    total = np.concatenate([[0], np.cumsum(finish - begin)])

    def before(time: np.ndarray) -> np.ndarray:
        row = np.searchsorted(begin, time, side="right") - 1
        inside = np.minimum(time, finish[np.maximum(row, 0)]) - begin[np.maximum(row, 0)]
        return np.where(row < 0, 0, total[np.maximum(row, 0)] + inside)

    return before(end) - before(start)


def _rank(kernels: pl.DataFrame, windows: List[Tuple[Optional[int], int, int]],
          waits: Dict[Any, Tuple[np.ndarray, np.ndarray]]) -> List[Dict[str, Any]]:
    """The parts of each window of one rank. kernels: sorted by start."""
    start = kernels["start"].to_numpy()
    end = start + kernels["duration"].to_numpy()
    kind = kernels["kind"].fill_null("kernel")
    communicates, computes = (kind == "collective").to_numpy(), (kind == "kernel").to_numpy()
    apart = kernels["wire"].is_not_null().to_numpy()
    turn = end - kernels["wire"].fill_null(0).to_numpy()  # where a collective stops waiting for the last rank
    bounds = np.array([b for _, *pair in windows for b in pair], dtype=np.int64)
    times = np.unique(np.concatenate([start, end, turn[apart], bounds]))
    active = {
        "compute": _active(times, start[computes], end[computes]),
        "communication": _active(times, start[communicates], end[communicates]),
        "copy": _active(times, start[~computes & ~communicates], end[~computes & ~communicates]),
        "wire": _active(times, turn[apart], end[apart]), "skew": _active(times, start[apart], turn[apart])}
    left, length = times[:-1], np.diff(times)
    exposed = active["communication"] & ~active["compute"]
    idle = ~(active["compute"] | active["communication"] | active["copy"])
    segments = {
        "compute": active["compute"] & ~active["communication"], "overlap": active["compute"] & active["communication"],
        "communication": exposed, "copy": active["copy"] & ~active["compute"] & ~active["communication"],
        "wire": exposed & active["wire"], "skew": exposed & active["skew"] & ~active["wire"]}
    parts = {name: np.where(mask, length, 0) for name, mask in segments.items()}
    parts.update(_causes(kernels, start, left, times[1:], idle, waits))
    step = kernels["step"].fill_null(-1).to_numpy()
    rows = []
    for number, begin, finish in windows:
        a, b = np.searchsorted(left, [begin, finish])
        row: Dict[str, Any] = {"step": number, "start": begin, "duration": finish - begin}
        row.update({name: int(values[a:b].sum()) for name, values in parts.items()})
        if not (apart & (start < finish) & (end > begin)).any():
            row["wire"] = row["skew"] = None
        foreign = step != (-1 if number is None else number)
        row["carried"] = int(length[a:b][_active(times, start[foreign], end[foreign])[a:b]].sum())
        rows.append(row)
    return rows


def _active(times: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Whether any interval is open in each segment between two times; all starts and ends are among the times."""
    change = np.zeros(len(times), dtype=np.int64)
    np.add.at(change, np.searchsorted(times, start), 1)
    np.add.at(change, np.searchsorted(times, end), -1)
    return np.cumsum(change)[:-1] > 0


def _causes(kernels: pl.DataFrame, start: np.ndarray, left: np.ndarray, right: np.ndarray, idle: np.ndarray,
            waits: Dict[Any, Tuple[np.ndarray, np.ndarray]]) -> Dict[str, np.ndarray]:
    """Idle time of each segment by cause, told by the next row that starts: when its launch returned, and what its
    thread did before. Behind the last row the host had nothing more to do."""
    parts = {f"idle_{c}": np.zeros(len(left), dtype=np.int64) for c in ("host", "synchronisation", "queue", "unknown")}
    rows = np.flatnonzero(idle)
    following = np.searchsorted(start, right[rows], side="left")
    final = following >= len(start)
    following = np.minimum(following, max(len(start) - 1, 0))
    if not len(start):
        parts["idle_host"][rows] = (right - left)[rows]
        return parts
    launch = kernels["launch"]
    known = launch.is_not_null().to_numpy()[following] | final
    returned = (launch.fill_null(0) + kernels["launch_duration"].fill_null(0)).to_numpy()[following]
    until = np.where(final, right[rows], np.clip(returned, left[rows], right[rows]))
    synchronised = np.zeros(len(rows), dtype=np.int64)
    thread = kernels["thread"].fill_null(-1).to_numpy()[following]
    for name, intervals in waits.items():
        mine = np.flatnonzero(((thread == (-1 if name is None else name)) | final) & known)
        covered = _covered(intervals, left[rows][mine], until[mine])
        synchronised[mine] = np.maximum(synchronised[mine], covered)
    parts["idle_synchronisation"][rows] = np.where(known, synchronised, 0)
    parts["idle_host"][rows] = np.where(known, until - left[rows] - synchronised, 0)
    parts["idle_queue"][rows] = np.where(known, right[rows] - until, 0)
    parts["idle_unknown"][rows] = np.where(known, 0, (right - left)[rows])
    return parts
