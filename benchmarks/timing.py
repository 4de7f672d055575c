"""Times calls on a GPU as graph replays, all of a case's candidates in the same process and in turn."""

from __future__ import annotations

import statistics
from typing import Any, Callable, Dict, List, Sequence


def copies_for(bytes_a_call: float) -> int:
    """How many sets of buffers to rotate over so that none is still in the cache when its turn comes. At most 24, so
    calls of a few megabytes and less find theirs there, whoever makes them."""
    import torch

    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 60 << 20)
    return int(min(24, max(2, 5 * cache // max(bytes_a_call, 1) + 1)))


def capture(calls: Sequence[Callable[[], Any]], launches: int) -> Any:
    """A graph that runs the calls in turn, `launches` in all. They have been run once before."""
    import torch

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            calls[i % len(calls)]()
    return graph


def medians(candidates: Dict[str, List[Callable[[], Any]]], launches: int = 0, rounds: int = 11) -> Dict[str, float]:
    """Median microseconds a call of each candidate (a list of calls on rotating buffers). A candidate that cannot be
    captured is timed eagerly, and its name gets a star."""
    import torch

    runs, times = {}, {}
    for name, calls in candidates.items():
        count = launches or max(20, len(calls))
        try:
            runs[name] = (capture(calls, count).replay, count)
        except RuntimeError:
            torch.cuda.synchronize()
            runs[name + "*"] = (lambda calls=calls: [call() for call in calls], len(calls))
    for _ in range(rounds + 1):
        for name, (run, count) in runs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.setdefault(name, []).append(start.elapsed_time(end) * 1e3 / count)
    return {name: statistics.median(each[1:]) for name, each in times.items()}
