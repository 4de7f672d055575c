"""How fast and in how much memory traces are read: brakecheck, a plain orjson load, and HolisticTraceAnalysis (HTA).

    python benchmarks/kineto_read.py TRACE.json.gz [--folder DIR] [--hta PYTHON] [--rounds 3] [--record FILE.json]

Builds from TRACE, a real one, larger ones in DIR: its events repeated with shifted times and new correlation ids, in
the layout that Kineto writes. Every measurement is a process of its own; time is from its start to its end, memory
the largest sum of resident sets over the process and its children. PYTHON is of an environment in which
`pip install holistictraceanalysis` worked.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

ROOT = Path(__file__).resolve().parent.parent
READ = "from brakecheck.evidence import kineto; r = kineto.read({path!r}); print(r.kernels.height, r.operators.height)"
ORJSON = "import orjson; d = orjson.loads(open({path!r}, 'rb').read()); print(len(d['traceEvents']))"
HTA = ("from hta.common.trace import Trace; t = Trace(trace_files={{0: {path!r}}}, trace_dir=''); "
       "t.parse_traces(max_ranks=1, use_multiprocessing=False); t.decode_symbol_ids(); print(len(t.get_trace(0)))")


def build(source: Path, target: Path, size: int) -> int:
    """Writes a trace of about `size` bytes; returns the number of events."""
    data = source.read_bytes()
    trace = json.loads(gzip.decompress(data) if source.suffix == ".gz" else data)
    events = trace.pop("traceEvents")
    trace.setdefault("distributedInfo", {"rank": 0})  # HTA reads nothing without a rank
    times = [e["ts"] for e in events if "ts" in e]
    period = max(times) - min(times) + 1000
    largest = max(e.get("args", {}).get("correlation", 0) for e in events) + 1
    external = max(e.get("args", {}).get("External id", 0) for e in events) + 1
    count, step = 0, 0
    with target.open("w") as out:
        out.write(json.dumps(trace, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        while out.tell() < size:
            for event in events:
                out.write((",\n" if count else "") + _event(event, step, period, largest, external))
                count += 1
            step += 1
        out.write("\n  ]\n}\n")
    return count


def _event(event: Dict[str, Any], copy: int, period: float, largest: int, external: int) -> str:
    """One event as Kineto lays it out: head, times, arguments on lines of their own."""
    args = dict(event["args"]) if "args" in event else None
    if args is not None:
        for key, stride in (("correlation", largest), ("External id", external)):
            if key in args:
                args[key] += copy * stride
    head = {k: v for k, v in event.items() if k not in ("ts", "dur", "args")}
    if "id" in head and isinstance(head["id"], int):
        head["id"] += copy * largest
    if str(head.get("name", "")).startswith("ProfilerStep#"):
        head["name"] = f"ProfilerStep#{copy}"
    text = "  {\n    " + json.dumps(head)[1:-1]
    if "ts" in event:
        text += f',\n    "ts": {event["ts"] + copy * period:.3f}'
    if "dur" in event:
        text += f', "dur": {event["dur"]:.3f}'
    if args is not None:
        text += ',\n    "args": {\n      ' + json.dumps(args)[1:-1] + "\n    }"
    return text + "\n  }"


def measure(command: List[str], environment: Dict[str, str]) -> Dict[str, Any]:
    """Seconds, processor seconds, and the largest sum of resident sets (MB) of a process and its children."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    peak = 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        peak = max(peak, sum(map(_resident, _family(process.pid))))
        time.sleep(0.1)  # a look takes a millisecond or two from readers that use every core
    seconds = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    out, err = process.communicate()
    if process.returncode:
        return {"error": (err.strip().splitlines() or ["no output"])[-1]}
    return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_mb": peak / 1e6,
            "answer": out.strip().splitlines()[-1]}


def _family(pid: int) -> List[int]:
    found = [pid]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("kineto-read"))
    parser.add_argument("--hta", help="Python of an environment with holistictraceanalysis")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hta-rounds", type=int, default=1)
    parser.add_argument("--no-large", action="store_true", help="leave out the 2 GB trace")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    medium, large = options.folder / "400mb.json", options.folder / "2gb.json"
    packed = options.folder / "400mb.json.gz"
    if not medium.exists():
        build(options.trace, medium, 400_000_000)
    if not packed.exists():
        with medium.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
            while chunk := source.read(1 << 20):
                target.write(chunk)
    if not large.exists() and not options.no_large:
        build(options.trace, large, 2_000_000_000)
    ours = {**os.environ, "PYTHONPATH": str(ROOT)}
    this = [sys.executable, "-c"]
    cases: List[tuple] = [("brakecheck", path, [*this, READ.format(path=str(path))], ours, options.rounds)
                          for path in (medium, packed, *([] if options.no_large else [large]))]
    cases.append(("orjson.loads", medium, [*this, ORJSON.format(path=str(medium))], ours, options.rounds))
    if options.hta:
        command = [options.hta, "-c", HTA.format(path=str(medium))]
        cases.append(("HTA", medium, command, dict(os.environ), options.hta_rounds))
    runs: Dict[tuple, List[Dict[str, Any]]] = {}
    load = os.getloadavg()
    for turn in range(max(c[4] for c in cases)):  # rounds of all, so that a busy minute does not hit one of them alone
        for reader, path, command, environment, rounds in cases:
            if turn < rounds:
                runs.setdefault((reader, path), []).append(measure(command, environment))
    rows = [_row(reader, path, found) for (reader, path), found in runs.items()]
    base = next((r["seconds"] for r in rows if r["reader"] == "HTA" and "seconds" in r), None)
    print(f"{'reader':<14}{'file':<14}{'MB':>7}{'s':>9}{'cpu s':>8}{'MB/s':>8}{'peak MB':>9}{'x HTA':>8}")
    for row in rows:
        if "seconds" not in row:
            print(f"{row['reader']:<14}{row['file']:<14}{row['mb']:>7.0f}  {row['error']}")
            continue
        ratio = f"{base / row['seconds']:.1f}" if base and row["mb"] < 1000 else ""
        print(f"{row['reader']:<14}{row['file']:<14}{row['mb']:>7.0f}{row['seconds']:>9.2f}"
              f"{row['cpu_seconds']:>8.2f}{row['mb'] / row['seconds']:>8.0f}{row['peak_mb']:>9.0f}{ratio:>8}")
    if options.record:
        options.record.parent.mkdir(parents=True, exist_ok=True)
        options.record.write_text(json.dumps({
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", "benchmarks/kineto_read.py", *sys.argv[1:]]),
            "cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
            "load_before": load, "load_after": os.getloadavg(), "rows": rows}, indent=1) + "\n")


def _row(reader: str, path: Path, found: List[Dict[str, Any]]) -> Dict[str, Any]:
    size = path.with_suffix("").stat().st_size if path.suffix == ".gz" else path.stat().st_size
    row: Dict[str, Any] = {"reader": reader, "file": path.name, "mb": size / 1e6, "rounds": len(found)}
    errors = [f["error"] for f in found if "error" in f]
    if errors:
        return {**row, "error": errors[0]}
    return {**row, "seconds": statistics.median(f["seconds"] for f in found),
            "all_seconds": [round(f["seconds"], 3) for f in found],
            "cpu_seconds": statistics.median(f["cpu_seconds"] for f in found),
            "peak_mb": max(f["peak_mb"] for f in found), "answer": found[0]["answer"]}


def _cpu() -> Optional[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


if __name__ == "__main__":
    main()
