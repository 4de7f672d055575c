"""Files -> Recording. What takes long to import is imported where it is used: while other processes start and work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Union

from brakecheck.model import BrakecheckError, UsageError

from . import spawn

if TYPE_CHECKING:
    from brakecheck.evidence.table import Problem, Recording

    from .collect import Collector
    from .source import Trace

Progress = Callable[[str, float], None]
_SUFFIXES = (".json", ".json.gz", ".json.zst")
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,6})|^(\d{1,6})\.json", re.IGNORECASE)

_TEXTS = {
    "bare-value": "values that are no JSON (NaN, Infinity, N/A) were read as unknown",
    "byte-order-mark": "a byte order mark stands before the JSON",
    "comma-absent": "commas between events are absent and were supplied",
    "control-character": "control characters were replaced by ?",
    "duration-absent": "events without a duration: it is unknown",
    "duration-huge": "durations longer than a day: unknown, not summed",
    "duration-negative": "negative durations: unknown, not summed",
    "duration-zero": "device rows with a duration of 0: unknown, not summed",
    "inner-quote": "unescaped quotes inside names were escaped",
    "late-child": "events end up to 1 us after the event that they lie in: clock rounding",
    "launch-without-kernel": "launches have no kernel row: the profiler dropped them, or the capture ended before",
    "no-events": "the trace holds metadata only",
    "no-kernels": "the trace holds no kernel",
    "no-rank": "neither distributedInfo nor the file's name tells the rank",
    "not-an-event": "entries of traceEvents that are no objects were skipped",
    "skipped": "damaged events could not be repaired and were skipped",
    "time-unusable": "events without a usable time were skipped",
    "trailing-comma": "superfluous commas were dropped",
    "truncated": "the file is cut: what came after is lost",
    "unpaired": "begin or end events without their counterpart were skipped",
    "kernel-without-launch": "kernels have no launch row: launched before the capture began, or the row is absent",
    "head-unreadable": "the metadata before the events is damaged and was skipped",
    "tail-unreadable": "the metadata behind the events is damaged and was skipped",
    "value-unusable": "numbers that are none, or too large, are unknown",
}


def read_traces(path: Union[str, Path, Sequence[Union[str, Path]]], progress: Optional[Progress] = None,
                workers: Optional[int] = None) -> Recording:
    files = _files(path)
    workers = spawn.cores() if workers is None else workers
    if len(files) == 1:
        return read_one(files[0], workers, progress)
    from .ranks import read_files
    return read_files(files, workers, progress)


def _files(path: Union[str, Path, Sequence[Union[str, Path]]]) -> List[Path]:
    given = [Path(p) for p in ([path] if isinstance(path, (str, Path)) else path)]
    files: List[Path] = []
    for item in given:
        if item.is_dir():
            inside = sorted(p for p in item.iterdir() if p.name.endswith(_SUFFIXES))
            if not inside:
                raise BrakecheckError("no traces in this folder", str(item),
                                      "expected files *.json, *.json.gz or *.json.zst")
            files += inside
        else:
            files.append(item)
    if not files:
        raise UsageError("no trace was given", None, "name a file or a folder")
    return files


def read_one(path: Path, workers: int, progress: Optional[Progress]) -> Recording:
    started = spawn.start(workers) if workers > 1 and spawn.is_large(path) else None
    from . import pool
    from .source import Trace

    try:
        trace = Trace(path)
    except BaseException:
        if started is not None:
            started.close()
        raise
    try:
        with pool.decoding(trace.blocks(), started) as blocks:
            from . import tables  # noqa: F401
            from .collect import Collector
            found = Collector()
            for count, block in enumerate(blocks, 1):
                found.put(block)
                if progress is not None and count % 16 == 0:
                    progress(str(path), trace.fraction())
        trace.finish(found.end)
    finally:
        trace.stream.close()
    found.pair_marks()
    return _recording(path, trace, found)


def _recording(path: Path, trace: Trace, found: Collector) -> Recording:
    from brakecheck.evidence.table import Recording

    from . import tables
    events = sum(found.counts.values())
    metadata = _metadata(trace.metadata)
    rank = rank_of(metadata, path)
    if rank is None:
        found.problems["no-rank"] = [1, None]
    damage = [at for code, (_, at) in found.problems.items() if code in ("skipped", "truncated")]
    damage += [at for code, at, _ in trace.problems if code in ("truncated", "head-unreadable")]
    if not events and damage:
        raise BrakecheckError("no event of this trace can be read", f"{path}, byte {min(damage)}",
                              "export the trace again; this file is damaged or cut")
    kernels, operators, facts = tables.build(found, rank)
    steps = facts.pop("steps")
    metadata.update({"rank": rank, "events": events, "categories": dict(sorted(found.counts.items())),
                     "coverage": shares(facts), "steps": [{"rank": rank, **s} for s in steps]})
    metadata = {k: v for k, v in metadata.items() if v is not None}
    if not events or not kernels.height:
        found.problems["no-kernels" if events else "no-events"] = [1, None]
    return Recording("kineto", str(path), kernels, operators, None, metadata, _problems(path, trace, found, facts))


def shares(facts: Dict[str, Any]) -> Dict[str, Any]:
    """Coverage: of launches, the share whose kernel was recorded; of kernels, the share with a launch row."""
    out = dict(facts)
    if facts["launches"]:
        out["launched_share"] = 1 - facts["launches_without_kernel"] / facts["launches"]
        out["dropped_share"] = facts["launches_without_kernel"] / facts["launches"]
    if facts["kernels"]:
        out["kernels_with_launch_share"] = 1 - facts["without_launch"] / facts["kernels"]
    return out


def rank_of(metadata: Dict[str, Any], path: Path) -> Optional[int]:
    rank = metadata.get("distributed", {}).get("rank")
    if isinstance(rank, int):
        return rank
    found = _RANK_IN_NAME.search(path.name)
    return int(next(g for g in found.groups() if g)) if found else None


def _metadata(recorded: Dict[str, Any]) -> Dict[str, Any]:
    """GPUs, versions, clock and distribution as recorded; what is not there is absent."""
    properties = recorded.get("deviceProperties")
    gpus = []
    for gpu in properties if isinstance(properties, list) else []:
        if isinstance(gpu, dict):
            capability = [gpu.get("computeMajor"), gpu.get("computeMinor")]
            facts = {"id": gpu.get("id"), "name": gpu.get("name"), "memory": gpu.get("totalGlobalMem"),
                     "sms": gpu.get("numSms"), "warp": gpu.get("warpSize"),
                     "capability": None if None in capability else ".".join(map(str, capability))}
            gpus.append({k: v for k, v in facts.items() if v is not None})
    versions = {
        "cuda_runtime": _cuda(recorded.get("cuda_runtime_version")),
        "cuda_driver": _cuda(recorded.get("cuda_driver_version")),
        "hip_runtime": _hip(recorded.get("hip_runtime_version")),
        "hip_driver": _hip(recorded.get("hip_driver_version")),
        "cupti": recorded.get("cupti_version"), "roctracer": recorded.get("roctracer_version"),
        "torch": recorded.get("torch_version") or recorded.get("pytorch_version"),
        "kineto_schema": recorded.get("schemaVersion")}
    distributed = recorded.get("distributedInfo")
    if isinstance(distributed, dict):
        versions["nccl"] = distributed.get("nccl_version")
    return {
        "gpus": gpus, "versions": {k: str(v) for k, v in versions.items() if v is not None},
        "distributed": distributed if isinstance(distributed, dict) else {},
        "base_time": _whole(recorded.get("baseTimeNanoseconds")),
        "options": {k: bool(recorded[k]) for k in ("with_flops", "with_modules", "record_shapes", "profile_memory",
                                                   "with_stack") if k in recorded},
        "trace_name": recorded.get("traceName")}


def _whole(value: Any) -> Optional[int]:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _cuda(value: Any) -> Optional[str]:
    """12040 -> 12.4 (cudaRuntimeGetVersion: 1000 x major + 10 x minor)."""
    return f"{value // 1000}.{value % 1000 // 10}" if isinstance(value, int) and value > 0 else None


def _hip(value: Any) -> Optional[str]:
    """60443483 -> 6.4.43483 (HIP_VERSION: 10,000,000 x major + 100,000 x minor + patch)."""
    if not isinstance(value, int) or value <= 0:
        return None
    return f"{value // 10_000_000}.{value // 100_000 % 100}.{value % 100_000}"


def _problems(path: Path, trace: Trace, found: Collector, facts: Dict[str, Any]) -> List[Problem]:
    from brakecheck.evidence.table import Problem
    out = [Problem(code, text, f"{path}, byte {offset}") for code, offset, text in trace.problems]
    counted = {code: (count, offset) for code, (count, offset) in found.problems.items()}
    for code, fact in (("late-child", "late_children"), ("kernel-without-launch", "without_launch"),
                       ("launch-without-kernel", "launches_without_kernel")):
        if facts[fact]:
            counted[code] = (facts[fact], None)
    for code, (count, offset) in sorted(counted.items()):
        where = str(path) if offset is None else f"{path}, byte {offset}"
        out.append(Problem(code, _TEXTS[code], where, count))
    return out
