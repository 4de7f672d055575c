"""A brakecheck run as a recording: a row a visit, so that runs and traces meet in one table.

A visit's row is the whole call of a case: its place is the operator and the case, its name the kernels that the
profiler saw, its time the median of the visit. Two runs of one instrument are judged better by `compare`, which pairs
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

from ..bench import store
from ..model import BrakecheckError, Measurement, Run
from .table import Problem, Recording, kernel_frame


def read(path: Path) -> Recording:
    """The recording of a run's folder. BrakecheckError for a run of several arms, which is a comparison already."""
    run = store.read(str(path))
    if len(run.arms) != 1:
        raise BrakecheckError(f"this run holds {len(run.arms)} arms: {', '.join(a.name for a in run.arms)}", str(path),
                              f"see what it found with brakecheck compare {path}; diff takes runs of one arm")
    rows = [row for m in run.measurements for row in _rows(m, run.arms[0].implementation)]
    columns = ("kind", "name", "raw_name", "path", "operator", "position", "step", "duration")
    table = kernel_frame({c: [row[c] for row in rows] for c in columns})
    problems = [Problem("not-measured", f"{m.operator} {m.case} was not measured: {m.status} {m.message or ''}".strip(),
                        str(path), 1) for m in run.measurements if not m.blocks]
    return Recording("run", str(path), table, metadata=_metadata(run), problems=problems)


def _rows(measured: Measurement, implementation: str) -> List[Dict[str, Any]]:
    kernels = (measured.kernel_sum or {}).get("kernels") or {}
    name = " + ".join(kernels) or f"{measured.operator} ({implementation})"
    return [{"kind": "kernel", "name": name, "raw_name": name, "path": f"{measured.operator} > {measured.case}",
             "operator": measured.operator, "position": 0, "step": number, "duration": round(block.median * 1000)}
            for number, block in enumerate(measured.blocks)]


def _metadata(run: Run) -> Dict[str, Any]:
    name = run.device.get("name")
    components = run.arms[0].stack.components
    return {"gpus": [{"name": name}] if name else [], "versions": {c.name: c.version for c in components if c.version}}
