"""Rounds of comparisons of one environment with itself, kept as they end: a proof can be stopped and resumed, in the
middle of a round too (NAME.journal.jsonl)."""

from __future__ import annotations

import argparse
import fnmatch
import glob
import json
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rivals import RULES  # noqa: E402  (beside this file)

from brakecheck import measuring  # noqa: E402
from brakecheck.bench.controller import Options  # noqa: E402
from brakecheck.model import BrakecheckError, Measurement, Run  # noqa: E402
from brakecheck.ops.load import load  # noqa: E402
from brakecheck.verdict.statistics import rate_bound  # noqa: E402


def parser(about: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=about)
    found.add_argument("--device", default="cpu", help="cpu or cuda:0")
    found.add_argument("--python", default=sys.executable, help="the environment that is compared with itself")
    found.add_argument("--operators", default="", help="comma-separated; the catalogue when left out")
    found.add_argument("--cases", default="*", help="glob pattern")
    found.add_argument("--ops", action="append", default=[], help="file with more operators")
    found.add_argument("--implementation", default="torch")
    found.add_argument("--budget", default="30m", help="for all rounds together; run again to go on")
    found.add_argument("--round", default="30m", help="most time of one round")
    found.add_argument("--max-pairs", type=int, default=40)
    found.add_argument("--most-work", type=float, help="only cases below this many FLOP and this many bytes")
    found.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th case, others in each round")
    found.add_argument("--clock", default="steady", help="cpu device: steady, or cpu-time on a shared machine")
    found.add_argument("--duty", default="burst", help="burst or sustained")
    found.add_argument("--no-settle", action="store_true", help="neither settle nor shuffle, to show what that costs")
    found.add_argument("--visit-ms", type=float, default=100.0, help="sampling time of a visit to a case")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--store", default=measuring.NOT_KEPT, help="keep the raw runs here (needs polars)")
    found.add_argument("--out", help="record to write (default: benchmarks/records/NAME-DEVICE.json)")
    return found


def options(arguments: argparse.Namespace, seed: int, left: float) -> Options:
    names = tuple(n for n in arguments.operators.split(",") if n)
    cases = arguments.cases if arguments.most_work is None else light(arguments, names)
    return Options(
        device=arguments.device, operators=names, cases=cases, ops=tuple(arguments.ops), seed=seed,
        budget=min(left, measuring.seconds_of(arguments.round)), max_pairs=arguments.max_pairs, checks=False,
        shard=(seed % arguments.every, arguments.every),
        settle=not arguments.no_settle, shuffle=not arguments.no_settle,
        plan={"clock": arguments.clock, "duty": arguments.duty, "visit_us": arguments.visit_ms * 1000})


def light(given: argparse.Namespace, names: tuple[str, ...]) -> str:
    """Patterns for the catalogue's cases below so many FLOP and bytes: a CPU takes minutes for those of a GPU."""
    found = []
    for name, operator in load([]).items():
        if names and name not in names or given.implementation not in operator.implementations:
            continue
        for case in operator.cases:
            cost = operator.compute_cost(case) if operator.compute_cost else None
            if cost and max(cost.flops, cost.bytes) < given.most_work and fnmatch.fnmatch(f"{name} {case.name}",
                                                                                         given.cases):
                found.append(glob.escape(f"{name} {case.name}"))
    return "|".join(found)


def cases_of(run: Run, comparison: Any, injects: Sequence[float]) -> list[dict[str, Any]]:
    """One row for each candidate and case: our state, what the rivals say of its first pair, seconds spent, power
    limit. The n-th arm after the base had the n-th share of extra work."""
    measured = {(m.arm, *m.name): m for m in run.measurements}
    shares = {arm.name: inject for arm, inject in zip(run.arms[1:], injects)}
    out = []
    for delta in comparison.deltas:
        base, candidate = (measured.get((arm, delta.operator, delta.case, delta.arch)) for arm in delta.step)
        if base is None or candidate is None or not base.blocks or not candidate.blocks:
            continue
        first = base.blocks[0].us, candidate.blocks[0].us
        pairs = min(len(base.blocks), len(candidate.blocks))
        out.append({
            "inject": shares[delta.step[1]], "injected": candidate.blocks[0].extra_calls / candidate.blocks[0].calls,
            "operator": delta.operator, "case": delta.case, "state": delta.state.value,
            "reason": delta.reason, "ratio": delta.ratio, "low": delta.low, "high": delta.high, "pairs": pairs,
            "us": base.median_us, "seconds": sum(b.seconds or 0.0 for m in (base, candidate) for b in m.blocks[:pairs]),
            "power_limited": power_limited(base) or power_limited(candidate),
            "levels": [[b.median for b in m.blocks[:pairs]] for m in (base, candidate)],
            "within": [_spread(b.us) for b in (base.blocks[0], candidate.blocks[0])],
            "rivals": {rule: decide(*first) for rule, decide in RULES.items()}})
    return out


def _spread(us: Sequence[float]) -> float:
    """Coefficient of variation of one visit's samples."""
    return statistics.stdev(us) / statistics.mean(us) if len(us) > 1 else 0.0


def power_limited(m: Measurement) -> bool:
    """The power cap slowed the clock in some visit, or samples ran below 97 % of the clock the visit began with."""
    return any("power cap" in b.after.get("reasons", ())
               or (b.clocks and b.before.get("sm_mhz") and min(b.clocks) < 0.97 * b.before["sm_mhz"]) for b in m.blocks)


def run_rounds(arguments: argparse.Namespace, name: str, groups: list[list[float]], wanted: float,
               precision: float | None = None) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    """Rounds of one base against a candidate for each share of extra work in a group, the group with the fewest cases
    next, until each has `wanted` cases or the budget ends. Returns where the record goes, all rounds (earlier ones of
    the same record too), and device and stack."""
    out = Path(arguments.out or Path(__file__).parent / "records" / f"{name}-{arguments.device.replace(':', '')}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, journal = out.with_suffix(".partial.jsonl"), out.with_suffix(".journal.jsonl")
    rounds = [json.loads(line) for line in partial.read_text().splitlines()] if partial.exists() else []
    spec, begin, budget = f"env:{arguments.python}", time.monotonic(), measuring.seconds_of(arguments.budget)
    about = rounds[-1]["about"] if rounds else {}
    ended: list[int] = []

    def end(*_: Any) -> None:  # `timeout` ends with this signal: keep what was measured, as after Ctrl-C
        ended.append(1)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    if journal.exists() and rounds:
        rounds.pop()  # goes on below, under the same seed
    while True:
        have = [sum(c["inject"] in group for r in rounds for c in r["cases"]) / len(group) for group in groups]
        left = budget - (time.monotonic() - begin)
        if min(have) >= wanted or left <= 0 or ended:
            return out, rounds, about
        injects = groups[have.index(min(have))]
        seed = arguments.seed + len(rounds)
        try:
            comparison, run = measuring.compare_measured(
                *[spec] * (1 + len(injects)), options=options(arguments, seed, left), inject=injects,
                precision=precision, store=arguments.store,
                implementations=dict.fromkeys(("base", "candidate"), arguments.implementation),
                resume=str(journal) if arguments.store == measuring.NOT_KEPT else None)
        except BrakecheckError as problem:
            raise SystemExit(str(problem)) from problem
        if run is None:
            raise SystemExit(comparison.headline)
        about = {"device": run.device, "components": {c.name: c.version for c in run.arms[0].stack.components}}
        rounds.append({"seed": seed, "run": run.id, "complete": run.complete, "timing": run.timing,
                       "noise": comparison.environment.get("noise"), "about": about,
                       "cases": cases_of(run, comparison, injects)})
        partial.write_text("".join(json.dumps(r) + "\n" for r in rounds))
        if run.complete or not (ended or time.monotonic() - begin >= budget):  # its own time was over
            journal.unlink(missing_ok=True)
        print(f"round {seed}: extra work {', '.join(f'{i:.1%}' for i in injects)}, {len(rounds[-1]['cases'])} "
              f"comparisons, {sum(c['state'] in ('slower', 'faster') for c in rounds[-1]['cases'])} called different, "
              f"{run.timing['wall']:.0f} s", flush=True)


def share(rows: list[dict[str, Any]], hit: Any) -> dict[str, Any]:
    """{"hits", "of", "share", "low", "high"}: with the 95 % interval of Clopper and Pearson."""
    hits = sum(bool(hit(r)) for r in rows)
    if not rows:
        return {"hits": 0, "of": 0}
    low, high = rate_bound(hits, len(rows))
    return {"hits": hits, "of": len(rows), "share": hits / len(rows), "low": low, "high": high}


def write_record(out: Path, what: str, about: dict[str, Any], rounds: list[dict[str, Any]],
                 found: dict[str, Any]) -> None:
    wall = sum(r["timing"]["wall"] for r in rounds)
    controller = max(r["timing"].get("controller_mib", 0.0) for r in rounds)
    measuring_ = sum(r["timing"]["measuring"] for r in rounds)
    record = {"what": what, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
              "command": shlex.join(["python", *sys.argv]), **about, "rounds": len(rounds), "wall_seconds": wall,
              "overhead": 1 - measuring_ / wall if wall else None,
              "starting_seconds": sum(r["timing"]["starting"] for r in rounds), "controller_mib": controller, **found,
              "cases": [{"seed": r["seed"], **c} for r in rounds for c in r["cases"]]}
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {out}")
