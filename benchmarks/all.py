"""Every benchmark of our kernels on this GPU, and one table: operator, case, time, share of copy speed, ratio of the
best peer's time to ours.

    python3 benchmarks/all.py FOLDER [--only moe,micro] [--svg docs]

Writes one record a benchmark into FOLDER: kernels.json (the catalogue against FP64, needs nvcc), rows.json, moe.json,
micro.json. A benchmark that fails is said at the end, and the exit status is 1. A run that was cut off (by Ctrl-C, or
by `timeout`) is gone on with by the same command: what FOLDER's records have of the same GPU, torch, peers and sources
is not measured again. Give a new FOLDER to measure all of it anew.

How long it takes is in the records ("runs": seconds of each phase) and printed by each benchmark. On an H200 and 16
cores: `kernels` 25 s, `rows` 207 s (half of it filling the peers' compile caches), `moe` 53 s, `micro` 18 s.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record  # noqa: E402

HERE = Path(__file__).resolve().parent
BENCHMARKS = {"kernels": ["check_kernels.py", "--nvcc"], "rows": ["rows.py"], "moe": ["moe_ops.py"],
              "micro": ["micro.py"]}
PLOTTED = ("rows", "moe")
ENDED = (record.ENDED, -signal.SIGTERM, -signal.SIGINT)  # exit status of a benchmark that was cut off


def compared(found: Dict[str, Any]) -> Iterator[str]:
    """Lines of the table from a record whose rows stand beside peers."""
    for row in found["rows"]:
        if "ratio_to_best_peer" not in row:
            continue
        case = row["case"].split(" (")[0] if "case" in row else f"{row['rows']} x {row['columns']} {row['dtype']}"
        ratio = f"{row['ratio_to_best_peer']:6.2f} x {row['best_peer']}" if row["best_peer"] else "no peer"
        clock = f"{row['sm_clock_mhz']} MHz" if row.get("sm_clock_mhz") else ""
        yield (f"{row['operator']:20} {case:36} {row['us']['ours']:9.2f} us {row['share_of_copy']:6.0%} of copy "
               f"{ratio:28} {clock}")


def call(command: List[str]) -> int:
    """Exit status of a benchmark. It keeps what it measured when it is ended, so it is told, and waited for."""
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    previous = signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    while True:
        try:
            status = process.wait()
            break
        except KeyboardInterrupt:  # the terminal has sent it to the benchmark too
            continue
    signal.signal(signal.SIGTERM, previous)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the records go")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="comma-separated")
    parser.add_argument("--svg", type=Path, help="also draw the plots into this folder")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    unknown = sorted(set(chosen) - set(BENCHMARKS))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}: choose from {', '.join(BENCHMARKS)}")
    if "kernels" in chosen and not shutil.which("nvcc"):
        print("kernels: left out, there is no nvcc", file=sys.stderr)
        chosen.remove("kernels")
    if record.no_device():
        return record.NO_DEVICE
    arguments.folder.mkdir(parents=True, exist_ok=True)
    failed: List[str] = []
    for name in chosen:
        command = [sys.executable, str(HERE / BENCHMARKS[name][0]), *BENCHMARKS[name][1:], "--json",
                   str(arguments.folder / f"{name}.json")]
        if arguments.svg and name in PLOTTED:
            command += ["--svg", str(arguments.svg)]
        print(f"== {name}", flush=True)
        status = call(command)
        if status:
            failed.append(name)
        if status in ENDED:
            print("cut off: the same command goes on", file=sys.stderr)
            break
    print("== ours beside the best peer (above 1: ours is faster)")
    for name in chosen:
        file = arguments.folder / f"{name}.json"
        if file.exists():
            print("\n".join(compared(json.loads(file.read_text()))))
    if failed:
        print(f"failed: {', '.join(failed)}; see above", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
