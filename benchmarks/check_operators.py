"""Every case of every operator once, by each implementation: does it run here, is it right, how long does it take?

    python benchmarks/check_operators.py [--device cuda:0] [--operators gemm_bfloat16,conv2d] [--implementations torch]

Needs torch only. One worker process for each operator, a fresh one after a crash or a hang. One aligned line a case:
state, microseconds, GB/s, TFLOP/s, error against FP64, growth over honest arithmetic, distinct results of all launches,
what is wrong, power-limited, layouts. Exit status 1 if any result is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from pathlib import Path
from typing import Any, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from brakecheck.bench.process import WorkerLost, WorkerProcess  # noqa: E402
from brakecheck.ops.load import load  # noqa: E402
from brakecheck.stack.environment import Environment  # noqa: E402

PLAN = {"visit_us": 20_000, "min_samples": 3, "max_samples": 10}


def lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    here = Environment(f"env:{sys.executable}", "here", (sys.executable,))
    wanted = arguments.implementations.split(",")
    chosen = arguments.operators.split(",") if arguments.operators else []
    for name, operator in load(arguments.ops).items():
        if chosen and name not in chosen:
            continue
        hello = {"device": arguments.device, "ops": arguments.ops}
        worker = WorkerProcess(here, hello)
        for case in operator.cases:
            if not fnmatch.fnmatch(case.name, arguments.cases):
                continue
            for implementation in operator.implementations:
                if wanted != ["all"] and implementation not in wanted:
                    continue
                request = {"do": "measure", "operator": name, "case": case.name, "implementation": implementation,
                           "settle": False, "plan": PLAN}
                try:
                    answer = worker.ask(request, arguments.limit)
                except WorkerLost as lost:
                    answer = {"ok": False, "state": lost.state, "message": lost.message}
                if not answer["ok"] and answer["state"] in ("crash", "timeout"):
                    worker = WorkerProcess(here, hello)
                yield {"operator": name, "case": case.name, "implementation": implementation, **answer}
        worker.close()


def right(found: dict[str, Any]) -> bool:
    """Whether the numerics of a case are right, in its own layout and in all others."""
    return bool(found["ok"]) and all(layout["ok"] for layout in found.get("layouts", {}).values())


def shown(line: dict[str, Any]) -> str:
    where = f"{line['operator']:<18} {line['case'][:58]:<58} {line['implementation'][:27]:<27}"
    if not line["ok"]:
        return f"{where} {line['state'].upper():<8} {line['message'].splitlines()[0][:150]}"
    result = line["result"]
    found, work = result["numerics"], result.get("work", {})
    us = sorted(result["us"])[len(result["us"]) // 2]
    outputs = found.get("outputs", {}).values()
    error = max((o["relative"] for o in outputs if "relative" in o), default=None)
    growth = max((o["growth"] for o in outputs if "growth" in o), default=None)
    bad = [n for n, entry in found.get("layouts", {}).items() if not entry.get("same_in_both_orders", True)]
    notes = [found.get("why", ""), result.get("note", ""), "capped" if work.get("power_limited") else "",
             f"order of layouts matters: {', '.join(bad)}" if bad else "",
             *(f"layout {n}: {e['why']}" for n, e in found.get("layouts", {}).items() if not e["ok"]),
             *(f"layout {n} refused" for n, e in found.get("layouts", {}).items() if "refused" in e)]
    speed = f"{us:10.1f} us {work.get('bytes', 0) / us / 1e3:8.0f} GB/s {work.get('flops', 0) / us / 1e6:8.1f} TFLOP/s"
    times = "-" if growth is None else f"{growth:.2f}"
    errors = f"error {'-' if error is None else format(error, '.1e'):>7} x{times:>5}"
    return (f"{where} {'right' if right(found) else 'WRONG':<8} {speed}  {errors}  "
            f"{found['distinct']} of {found['repeats']}  " + "; ".join(n for n in notes if n))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--operators", default="", help="comma-separated; all when left out")
    parser.add_argument("--implementations", default="all", help="comma-separated")
    parser.add_argument("--cases", default="*", help="glob pattern")
    parser.add_argument("--ops", action="append", default=[], help="file with more operators")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one case")
    parser.add_argument("--json", type=Path, help="write all answers here, one a line")
    arguments = parser.parse_args()
    kept, wrong = [], 0
    for line in lines(arguments):
        print(shown(line), flush=True)
        wrong += line["ok"] and not right(line["result"]["numerics"])
        kept.append(json.dumps(line))
        if arguments.json:
            arguments.json.write_text("\n".join(kept) + "\n")
    states = [json.loads(k) for k in kept]
    print(f"{len(kept)} cases: {sum(s['ok'] for s in states) - wrong} right, {wrong} wrong, "
          f"{sum(not s['ok'] for s in states)} that do not run")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
