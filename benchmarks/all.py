"""Every benchmark of our kernels on this GPU, and one table: operator, case, time, share of copy speed, ratio of the
best peer's time to ours.

    python3 benchmarks/all.py FOLDER [--only moe,micro] [--svg docs]

Writes one record a benchmark into FOLDER: kernels.json (the catalogue against FP64, needs nvcc), rows.json, moe.json,
micro.json. A benchmark that fails is said at the end, and the exit status is 1. About five minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List

HERE = Path(__file__).resolve().parent
BENCHMARKS = {"kernels": ["check_kernels.py", "--nvcc"], "rows": ["rows.py"], "moe": ["moe_ops.py"],
              "micro": ["micro.py"]}
PLOTTED = ("rows", "moe")


def compared(record: Dict[str, Any]) -> Iterator[str]:
    """Lines of the table from a record whose rows stand beside peers."""
    for row in record["rows"]:
        if "ratio_to_best_peer" not in row:
            continue
        case = row["case"].split(" (")[0] if "case" in row else f"{row['rows']} x {row['columns']} {row['dtype']}"
        ratio = f"{row['ratio_to_best_peer']:6.2f} x {row['best_peer']}" if row["best_peer"] else "no peer"
        clock = f"{row['sm_clock_mhz']} MHz" if row.get("sm_clock_mhz") else ""
        yield (f"{row['operator']:20} {case:36} {row['us']['ours']:9.2f} us {row['share_of_copy']:6.0%} of copy "
               f"{ratio:28} {clock}")


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
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: run on a machine with an NVIDIA GPU and torch with CUDA", file=sys.stderr)
        return 69
    arguments.folder.mkdir(parents=True, exist_ok=True)
    failed: List[str] = []
    for name in chosen:
        command = [sys.executable, str(HERE / BENCHMARKS[name][0]), *BENCHMARKS[name][1:], "--json",
                   str(arguments.folder / f"{name}.json")]
        if arguments.svg and name in PLOTTED:
            command += ["--svg", str(arguments.svg)]
        print(f"== {name}", flush=True)
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        if subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode:
            failed.append(name)
    print("== ours beside the best peer (above 1: ours is faster)")
    for name in chosen:
        record = arguments.folder / f"{name}.json"
        if record.exists():
            print("\n".join(compared(json.loads(record.read_text()))))
    if failed:
        print(f"failed: {', '.join(failed)}; see above", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
