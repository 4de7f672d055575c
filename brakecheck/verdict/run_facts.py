"""What the report says of the runs behind a comparison: where they ran, how noisy they were, clock and temperature."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..model import Measurement, Run
from ..worker.nvml import slowing
from .measured import noise, places


def facts(base: Run, candidate: Run) -> dict[str, Any]:
    """The environment of a comparison of two runs, or of two arms of one: only what is known (report/rows.py reads
    it). noise_floor is a ratio - 1: what two visits of one arm differ by."""
    one = base.id == candidate.id
    sides = base.of_arm(base.arms[0].name), candidate.of_arm(candidate.arms[-1].name)
    found = noise(*sides) if one else {}
    left_out = _left_out(base, *sides) if one else []
    floor = found.get("floor")
    out: dict[str, Any] = {
        "device": candidate.device, "runs": list(dict.fromkeys([base.id, candidate.id])), "date": candidate.created,
        "command": list(candidate.command), "options": candidate.options, "timing": candidate.timing,
        "warnings": list(dict.fromkeys([*base.warnings, *candidate.warnings, *left_out])),
        "complete": base.complete and candidate.complete, "noise": found,
        "noise_floor": None if floor is None else math.expm1(floor),
        "ceilings": ceilings([m for side in sides for m in side]),
        "telemetry": [line for name, side in zip(("base", "candidate"), sides) if (line := telemetry(name, side))],
    }
    names = [base.arms[0].name, candidate.arms[-1].name] if one else ["base", "candidate"]
    out["conditions"] = {n: c for n, side in zip(names, sides) if (c := conditions(side))}
    out["warnings"] += [text for n, c in out["conditions"].items() for text in _unquiet(n, c)]
    return {k: v for k, v in out.items() if v not in (None, [], {}, "")}


def conditions(found: Sequence[Measurement]) -> dict[str, Any]:
    """Of an arm's visits: how many there were, how many were timed although the clock had not settled, seconds that
    waiting for it took (median), and how many had which reason for a lower clock."""
    blocks = [b for m in found for b in m.blocks if b.settled is not None and b.settle_seconds]  # asked to settle
    if not blocks:
        return {}
    reasons = Counter(r for b in blocks for r in {*b.before.get("reasons", ()), *b.after.get("reasons", ())})
    return {"visits": len(blocks), "unsettled": sum(not b.settled for b in blocks), "reasons": dict(reasons),
            "settle_seconds": statistics.median(b.settle_seconds or 0.0 for b in blocks)}


def _unquiet(arm: str, found: dict[str, Any]) -> list[str]:
    """A power cap is expected of large products; other reasons, and a clock that never settles, are the machine's."""
    out = [f"{arm}: the clock was lowered ({name}) in {count} of {found['visits']} visits"
           for name, count in found["reasons"].items() if slowing([name]) and name != "power cap"]
    if 2 * found["unsettled"] > found["visits"]:
        out.append(f"{arm}: {found['unsettled']} of {found['visits']} visits were timed although the clock had not "
                   "settled: something else uses this device, or it is throttled")
    return out


def _left_out(run: Run, base: Sequence[Measurement], candidate: Sequence[Measurement]) -> list[str]:
    """How many blocks are not compared because the other arm has none with their pair's number. Of the base of several
    candidates that is no loss: each candidate stops by itself, and the base goes on for the others."""
    others, lost = {m.name: m for m in candidate}, {}
    several = len({m.arm for m in run.measurements}) > 2
    for m in base:
        if m.name not in others or not m.status == others[m.name].status == "ok":
            continue
        ours, theirs = (places(x) for x in (m, others[m.name]))
        alone = theirs - ours if several else theirs ^ ours
        if alone and ours & theirs:  # where no pair is whole, the arms are compared unpaired, with all of their blocks
            lost[f"{m.operator} {m.case}"] = len(alone)
    shown = ", ".join(f"{name}: {count}" for name, count in list(lost.items())[:3]) + (", ..." if len(lost) > 3 else "")
    return [f"blocks that are left out, because the other arm has none of the same pair: {sum(lost.values())} "
            f"({shown})"] if lost else []


def ceilings(found: Sequence[Measurement]) -> dict[str, float]:
    """The best rates of all that was measured, as the roof to compare with: FLOP/s, and byte/s of what cannot have come
    from the cache. Nothing where none of the cases has a cost."""
    rates = [(m.work.get("flops", 0.0) / m.median_us * 1e6,
              m.work.get("bytes", 0.0) / m.median_us * 1e6 if m.key and m.key.cache == "cold" else 0.0)
             for m in found if m.median_us and m.work]
    best = {"flops": max((f for f, _ in rates), default=0.0), "bandwidth": max((b for _, b in rates), default=0.0)}
    return best if all(best.values()) else {}


def telemetry(arm: str, found: tuple[Measurement, ...]) -> dict[str, Any] | None:
    """SM clock (MHz) and temperature (C) of an arm's visits over the seconds of the run; None where none was read."""
    blocks = sorted((b for m in found for b in m.blocks if b.started is not None), key=lambda b: b.started or 0.0)
    clocks = [statistics.median(b.clocks) if b.clocks else b.after.get("sm_mhz") for b in blocks]
    celsius = [b.after.get("celsius") for b in blocks]
    if not any(v is not None for v in (*clocks, *celsius)):
        return None
    start = blocks[0].started or 0.0
    return {"arm": arm, "time": [(b.started or 0.0) - start for b in blocks], "clock": clocks, "temperature": celsius}
