"""Implementations of the catalogue beside each other: graph replays in turn, in one process, on rotating inputs.

    python benchmarks/implementations.py [--implementations torch,triton] [--operators softmax,attention] [--cases '*']

Needs torch and a GPU. One aligned line a case and implementation: microseconds, GB/s, TFLOP/s, ratio to the first
implementation, seconds of the first call (compilation is in there). For a look: whether something got slower is
decided by fresh processes (brakecheck compare --implementation base=torch,candidate=triton).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from pathlib import Path
from typing import Any, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from record import NO_DEVICE, device_facts, no_device  # noqa: E402
from timing import copies_for, medians  # noqa: E402

from brakecheck.ops import catalogue  # noqa: E402
from brakecheck.ops.base import Missing  # noqa: E402
from brakecheck.ops.make import Make  # noqa: E402

LARGE = 1e11  # operations from which 8 calls a replay are enough


def lines(op: Any, case: Any, implementations: list[str]) -> Iterator[dict[str, Any]]:
    import torch

    cost = op.compute_cost(case)
    inputs = [op.make_inputs(case, Make("cuda:0", seed)) for seed in range(min(8, copies_for(cost.bytes)))]
    calls, first = {}, {}
    for name in implementations:
        function = op.implementations[name]
        begin = time.perf_counter()
        try:
            function(case, **inputs[0])
        except Missing:
            continue
        torch.cuda.synchronize()
        first[name] = time.perf_counter() - begin
        calls[name] = [lambda each=each, function=function: function(case, **each) for each in inputs]
    found = medians(calls, launches=8 if cost.flops > LARGE else 24)
    for name, us in found.items():
        yield {"operator": op.name, "case": case.name, "implementation": name, "us": round(us, 2),
               "gb_s": round(cost.bytes / us / 1e3), "tflop_s": round(cost.flops / us / 1e6, 1),
               "ratio": round(us / next(iter(found.values())), 3), "first_s": round(first[name.rstrip("*")], 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--implementations", default="torch,triton", help="comma-separated")
    parser.add_argument("--operators", default="", help="comma-separated; all that have them when left out")
    parser.add_argument("--cases", default="*", help="glob pattern")
    parser.add_argument("--json", type=Path, help="write facts and lines here")
    arguments = parser.parse_args()
    if no_device():
        return NO_DEVICE
    wanted, chosen = arguments.implementations.split(","), arguments.operators.split(",")
    rows = []
    for name, op in catalogue().items():
        if (name not in chosen and chosen != [""]) or not set(wanted) <= set(op.implementations):
            continue
        for case in op.cases:
            for row in lines(op, case, wanted) if fnmatch.fnmatch(case.name, arguments.cases) else ():
                rows.append(row)
                print(f"{name:<18} {case.name:<48} {row['implementation']:<10} {row['us']:9.2f} us  "
                      f"{row['gb_s']:5} GB/s {row['tflop_s']:7.1f} TFLOP/s  x {row['ratio']:.3f}  "
                      f"{row['first_s']:5.2f} s first", flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps({**device_facts(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
