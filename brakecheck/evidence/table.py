"""The one kernel table that every reader ends in, and the recording around it.

Times are int64 nanoseconds, sizes bytes. What a source does not tell is null, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

import polars as pl

# One row a kernel, memory copy or memory set that ran on a device (or, for Nsight Compute, that was profiled).
KERNEL_SCHEMA: Dict[str, Any] = {
    "kind": pl.String,              # kernel, memcpy, memset, collective
    "name": pl.String,              # demangled
    "raw_name": pl.String,          # as recorded
    "path": pl.String,              # operator call path, outermost first, joined by " > "; null when unknown
    "operator": pl.String,          # innermost operator (aten::mm)
    "nvtx": pl.String,              # NVTX range path, joined by " > "
    "position": pl.Int64,           # n-th kernel of its operator call
    "step": pl.Int64,               # profiler step, or repetition found
    "rank": pl.Int64, "device": pl.Int64, "stream": pl.Int64, "thread": pl.Int64,
    "start": pl.Int64, "duration": pl.Int64,                 # on the device
    "launch": pl.Int64, "launch_duration": pl.Int64,         # on the host
    "correlation": pl.Int64,
    "grid_x": pl.Int64, "grid_y": pl.Int64, "grid_z": pl.Int64,
    "block_x": pl.Int64, "block_y": pl.Int64, "block_z": pl.Int64,
    "registers": pl.Int64, "shared_static": pl.Int64, "shared_dynamic": pl.Int64,
    "bytes": pl.Int64,              # of a copy, set or collective message
    "shapes": pl.String, "dtypes": pl.String,                # JSON lists, of the operator's inputs
    "call": pl.Int64,               # row of the innermost operator call in the operator table
    "module": pl.String,            # path of nn.Modules, joined by " > "
    "shared": pl.Int64,             # static and dynamic together, where only the sum is recorded
    "launch_name": pl.String,       # the runtime call that launched it
    # Of a collective: name, elements a rank sends and receives, element type, ranks in the group, its name, and the
    # elements for each peer (JSON lists).
    "collective": pl.String, "elements_in": pl.Int64, "elements_out": pl.Int64, "message_dtype": pl.String,
    "group_size": pl.Int64, "group": pl.String, "splits_in": pl.String, "splits_out": pl.String,
}
# One row an operator call on the host, or a call of the runtime that waits (kind wait: synchronise, allocate, free).
OPERATOR_SCHEMA: Dict[str, Any] = {
    "name": pl.String, "path": pl.String, "depth": pl.Int64, "step": pl.Int64, "rank": pl.Int64, "thread": pl.Int64,
    "start": pl.Int64, "duration": pl.Int64, "shapes": pl.String, "dtypes": pl.String, "strides": pl.String,
    "kind": pl.String,              # operator, wait
    "nvtx": pl.String, "module": pl.String,                  # annotations and nn.Modules around it, joined by " > "
}
# Counters of a kernel row, long form: values stay in base units (byte, ns, hz, ratio in percent), unit is kept.
COUNTER_SCHEMA: Dict[str, Any] = {"kernel": pl.Int64, "counter": pl.String, "value": pl.Float64, "unit": pl.String,
                                  "text": pl.String}


@dataclass(frozen=True)
class Problem:
    """Something in a file that was repaired, skipped or missing. where: byte offset, row, table or column."""

    code: str
    text: str
    where: str
    count: int = 1


@dataclass
class Recording:
    """What one file (or set of rank files) told. kind: kineto, nsys, ncu, ncu-csv, nsys-csv, nccl-log.

    metadata: device names, versions, clocks, steps as recorded; an unknown stays absent.
    """

    kind: str
    path: str
    kernels: pl.DataFrame
    operators: Optional[pl.DataFrame] = None
    counters: Optional[pl.DataFrame] = None
    metadata: Dict[str, Any] = field(default_factory=dict)
    problems: List[Problem] = field(default_factory=list)


def kernel_frame(columns: Dict[str, Any]) -> pl.DataFrame:
    """A kernel table from the columns that are known; the others are null. Unknown column names are an error."""
    return _frame(columns, KERNEL_SCHEMA)


def operator_frame(columns: Dict[str, Any]) -> pl.DataFrame:
    return _frame(columns, OPERATOR_SCHEMA)


def counter_frame(columns: Dict[str, Any]) -> pl.DataFrame:
    return _frame(columns, COUNTER_SCHEMA)


def _frame(columns: Dict[str, Any], schema: Dict[str, Any]) -> pl.DataFrame:
    unknown = set(columns) - set(schema)
    if unknown:
        raise KeyError(f"not columns of this table: {', '.join(sorted(unknown))}")
    known = pl.DataFrame(columns, schema_overrides={k: schema[k] for k in columns}, strict=False)
    absent = [pl.lit(None, dtype=t).alias(k) for k, t in schema.items() if k not in columns]
    return known.with_columns(absent).select(list(schema))
