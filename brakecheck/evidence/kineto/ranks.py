"""Several trace files at once: a process for each file, as many as there are cores."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Union

import polars as pl

from brakecheck.evidence.table import Problem, Recording
from brakecheck.model import BrakecheckError

from .reader import read_one, shares
from .spawn import command

Progress = Callable[[str, float], None]
_SMALL = 64 << 20  # bytes of all files together; below, processes cost more than they save


def read_files(files: List[Path], workers: int, progress: Optional[Progress]) -> Recording:
    """One Recording of all files, whose kernels and operators carry their rank. A file that cannot be read is a
    problem of the recording; BrakecheckError when none can."""
    at_once = max(min(workers, len(files)), 1)
    small = sum(p.stat().st_size for p in files if p.is_file()) < _SMALL

    def one(path: Path) -> Union[Recording, BrakecheckError]:
        try:
            if at_once == 1 or small:
                return read_one(path, workers, progress)
            found = _in_process(path, max(workers // at_once, 1))
            if progress is not None:
                progress(str(path), 1.0)
            return found
        except BrakecheckError as error:
            return error
        except OSError as error:
            return BrakecheckError(f"cannot read the trace: {error.strerror}", str(path), "check the path")

    with ThreadPoolExecutor(at_once) as executor:
        results = list(executor.map(one, files))
    return _joined(files, results)


def _joined(files: List[Path], results: List[Union[Recording, BrakecheckError]]) -> Recording:
    good = [r for r in results if isinstance(r, Recording)]
    failed = [r for r in results if isinstance(r, BrakecheckError)]
    if not good:
        raise failed[0]
    problems = [Problem("unreadable", e.what, e.where or "", 1) for e in failed]
    ranks = [r.metadata.get("rank") for r in good]
    twice = sorted({r for r in ranks if r is not None and ranks.count(r) > 1})
    if twice:
        text = "several files say that they are of one rank: " + ", ".join(map(str, twice))
        problems.append(Problem("rank-twice", text, str(files[0].parent), len(twice)))
    size = good[0].metadata.get("distributed", {}).get("world_size")
    absent = sorted(set(range(size)) - set(ranks)) if isinstance(size, int) and 1 < size < 2**20 else []
    if absent and None not in ranks:
        named = ", ".join(map(str, absent[:8])) + ", ..." * (len(absent) > 8)
        text = (f"{len(absent)} of {size} ranks are absent ({named}): who waited for them is not known, so wire time "
                "looks longer, and skew shorter")
        problems.append(Problem("rank-absent", text, str(files[0].parent), len(absent)))
    kernels, operators, first = [], [], 0
    for recording in good:
        kernels.append(recording.kernels.with_columns(pl.col("call") + first))
        if recording.operators is not None:
            operators.append(recording.operators)
            first += recording.operators.height
        problems += recording.problems
    metadata: Dict[str, Any] = dict(good[0].metadata)
    metadata.pop("rank", None)
    metadata["steps"] = [s for r in good for s in r.metadata["steps"]]
    shown = ("rank", "events", "coverage", "gpus", "base_time")
    metadata["ranks"] = [{"path": r.path, **{k: r.metadata[k] for k in shown if k in r.metadata}} for r in good]
    metadata["events"] = sum(r.metadata["events"] for r in good)
    metadata["coverage"] = _total([r.metadata["coverage"] for r in good])
    return Recording("kineto", ", ".join(map(str, files)), pl.concat(kernels, rechunk=False),
                     pl.concat(operators, rechunk=False) if operators else None, None, metadata, problems)


def _total(coverages: List[Dict[str, Any]]) -> Dict[str, Any]:
    counts = {k: sum(c[k] for c in coverages) for k in coverages[0] if not k.endswith("_share")}
    return shares(counts)


def _in_process(path: Path, workers: int) -> Recording:
    with tempfile.TemporaryDirectory(prefix="brakecheck-") as folder:
        done = subprocess.run(command("ranks", str(path), folder, str(workers)), capture_output=True, check=False,
                              env={**os.environ, "POLARS_MAX_THREADS": str(max(workers, 1))})
        answer = Path(folder) / "recording"
        if done.returncode or not answer.exists():
            last = (done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise BrakecheckError(f"the process that reads this trace ended early: {last}", str(path),
                                  "check that there is enough memory, and read the trace again")
        result = pickle.loads(answer.read_bytes())
        if isinstance(result, tuple):
            raise BrakecheckError(*result)
        result.kernels = pl.read_ipc(Path(folder) / "kernels")
        result.operators = pl.read_ipc(Path(folder) / "operators")
        return result


def main() -> None:
    """Reads one trace for `_in_process`: argv is the file, the folder to answer in, and the number of workers."""
    path, folder, workers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    result: Any
    try:
        result = read_one(path, workers, None)
        result.kernels.write_ipc(folder / "kernels")
        result.operators.write_ipc(folder / "operators")
        result.kernels, result.operators = pl.DataFrame(), None
    except BrakecheckError as error:
        result = (error.what, error.where, error.todo)
    unfinished = folder / "unfinished"
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.replace(folder / "recording")
