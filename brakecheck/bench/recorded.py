"""Whatever holds measurements: a run of the store, the JSON file that a bundle writes, a table of blocks."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..model import BrakecheckError, Measurement, Run
from ..model.codec import decode
from ..model.measurement import RUN_SCHEMA
from . import store as stores
from .table import read_table


def read_recorded(name: str, store: str | None = None) -> Run:
    """The run of a file, a folder, a URL or a run's id."""
    if Path(name).suffix.lower() not in (".csv", ".json"):
        return _sound(stores.read(stores.find(name, store or stores.default_store())), name)
    data = _json(name) if name.lower().endswith(".json") else None
    if isinstance(data, dict) and data.get("schema") == RUN_SCHEMA:
        return _sound(decode(Run, data, f"{name}: $"), name)
    schema = str(data.get("schema", "")) if isinstance(data, dict) else ""
    if schema.startswith("brakecheck/comparison/"):
        raise BrakecheckError("this is a comparison, and no run", name, "two comparisons: brakecheck diff A B")
    if schema.startswith("brakecheck/run/"):
        raise BrakecheckError(f"schema {schema!r} is not known here", name, f"this version reads {RUN_SCHEMA!r}")
    return read_table(name)


def _sound(run: Run, where: str) -> Run:
    """The run. Raises BrakecheckError where it contradicts itself, because one half of it would then be judged and the
    other not be seen."""
    def refuse(what: str) -> None:
        raise BrakecheckError(f"this run is damaged: {what}", where, "measure it again, or correct its file")

    arms = [a.name for a in run.arms]
    names = [(m.arm, *m.name) for m in run.measurements]
    for what, found in (("arm", arms), ("measurement", names)):
        for one, count in Counter(found).items():
            if count > 1:
                refuse(f"the {what} {one if isinstance(one, str) else ' '.join(one)} is there {count} times")
    for m in run.measurements:
        told = f"{m.arm} {m.operator} {m.case}"
        if not all(b.us and all(0 < us < math.inf for us in b.us) for b in m.blocks):
            refuse(f"{told} has a block without times, or with one that is not positive")
        if not isinstance((m.numerics or {}).get("ok", True), bool) or not all(
                isinstance((m.numerics or {}).get(k, {}), dict) for k in ("outputs", "layouts")):
            refuse(f"{told} has numerics that cannot be read")
        if m.trials is not None and not 0 <= m.trials.get("failed", -1) <= m.trials.get("tries", -1):
            refuse(f"{told} counts failures that cannot be: {m.trials}")
    return run


def _json(name: str) -> Any:
    try:
        return json.loads(Path(name).read_text())
    except OSError as problem:
        raise BrakecheckError(f"cannot read the file: {problem.strerror}", name, "check the path") from problem
    except ValueError as problem:
        raise BrakecheckError(f"this is not JSON: {problem}", name, "see docs/blocks.md") from problem


def pooled(runs: Sequence[Run]) -> Run | None:
    """One run of several that compare the same arms on the same kind of device, taken on different occasions: their
    pairs together, each pair still being of one occasion. None where they are not the same comparison.

    What was measured once (memory, first call) is the first run's, but a case that failed or was wrong in any of them
    did so. A case whose key differs between two runs keeps the blocks of the first. One run given twice counts once,
    and so does a visit that two runs hold, because one of them went on with the other."""
    runs = list({r.id: r for r in runs}.values())
    first = runs[0]
    if len(runs) < 2 or len(first.arms) < 2 or any(_compares(r) != _compares(first) for r in runs):
        return None
    found: dict[tuple[str, ...], Measurement] = {}
    pairs = 0
    for run in runs:
        taken = [b.pair for m in run.measurements for b in m.blocks if b.pair is not None]
        for m in run.measurements:
            known = found.get((m.arm, *m.name))
            held = {(b.started, b.us) for b in known.blocks} if known else set()
            blocks = tuple(replace(b, pair=None if b.pair is None else b.pair + pairs) for b in m.blocks
                           if b.started is None or (b.started, b.us) not in held)
            if known is None or _rank(m) > _rank(known):
                found[(m.arm, *m.name)] = replace(m, blocks=blocks)
            elif _rank(m) == _rank(known) and known.key and m.key and not known.key.unlike(m.key):
                found[(m.arm, *m.name)] = replace(known, blocks=(*known.blocks, *blocks))
        pairs += max(taken, default=-1) + 1
    note = f"the pairs of {len(runs)} runs are pooled: {', '.join(r.id for r in runs)}"
    return replace(first, id="+".join(r.id for r in runs), measurements=tuple(found.values()),
                   warnings=(*dict.fromkeys(w for r in runs for w in r.warnings), note),
                   complete=all(r.complete for r in runs),
                   timing={k: sum(r.timing.get(k, 0.0) for r in runs) for k in first.timing})


def _rank(m: Measurement) -> int:
    """Of two measurements of one case, which is kept: what failed above what was wrong above what went well."""
    if m.status in ("unmeasured", "ok"):
        return 2 if m.numerics and not m.numerics.get("ok", True) else int(m.status == "ok")
    return 3


def _compares(run: Run) -> Any:
    arms = [(a.name, a.implementation, sorted((c.name, c.version) for c in a.stack.components), a.stack.environment)
            for a in run.arms]
    return arms, run.device.get("name"), run.device.get("arch")
