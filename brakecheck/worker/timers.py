"""Timers: device time of CUDA-graph replay, eager device and wall time, kernel sum of the profiler, the host's clock.

All of them call the implementation over a rotation of input buffers that together exceed the last-level cache several
times over: the cache is cold because the next buffer was not in it, so nothing has to be flushed inside the window.
Times are microseconds per call. An injected slow-down adds whole extra calls inside the timed window.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from .device import Device

COLD = 4          # rotation holds this many times the last-level cache
MOST_BUFFERS = 64
MOST_BYTES = 320 << 20  # drawing more takes longer than timing: servers show a share of 300 MiB of cache to each guest
LONG = 5          # visits that take this many times their time are content with three samples
KEEP = 1 << 30    # outputs of one captured graph that may stay alive, bytes
MOST_CALLS = 20_000  # of a window
LONGEST_US = 200_000.0  # of a window on the host's clock that holds more than one call
ROUND_US = 20_000.0  # most time that a sample may take only to go once through all buffers
BURST_SHARE = 0.4  # busy share of a burst duty cycle: a power cap averages over tens of milliseconds


@dataclass
class Rotation:
    """Buffers of equal content in distinct memory. `call(i)` runs the implementation on the i-th of them, round and
    round."""

    function: Callable[..., Dict[str, Any]]
    case: Any
    buffers: List[Dict[str, Any]]
    bytes_each: int

    def call(self, i: int) -> Dict[str, Any]:
        return self.function(self.case, **self.buffers[i % len(self.buffers)])


@dataclass
class Sampled:
    """timer, mode: part of the measurement's key. us: per call, one a sample. clocks: SM MHz after each sample."""

    timer: str
    mode: str
    calls: int
    extra: int = 0
    us: List[float] = field(default_factory=list)
    clocks: List[int] = field(default_factory=list)
    note: Optional[str] = None
    seconds: float = 0.0  # that all samples took, rests between them included
    energy_mj: Optional[int] = None  # that the device took in these seconds


@dataclass
class Plan:
    """How much to sample. calls: fixed by the controller after the first visit, so that both arms do the same.

    inject: extra work as a share (0.03): whole extra calls, so `calls` is raised to hold at least one of them.
    granularity: least calls a sample, which gives an uninjected arm the same windows as its injected partner.
    clock: of a CPU visit: steady (wall time), or cpu-time (of the process), which a busy shared machine disturbs less
    but which does not see waiting."""

    sample_us: float = 2000.0
    visit_us: float = 75_000.0
    min_samples: int = 7
    max_samples: int = 50
    duty: str = "burst"
    calls: Optional[int] = None
    inject: float = 0.0
    granularity: int = 1
    clock: str = "steady"

    def choose_calls(self, estimate_us: float, buffers: int = 1) -> int:
        """Calls of one sample; at least one round through `buffers` unless that would take longer than ROUND_US."""
        if self.calls is None:
            estimate_us = max(estimate_us, 0.01)
            enough = max(self.granularity, math.ceil(self.sample_us / estimate_us))
            enough = max(enough, math.ceil(1 / self.inject) if self.inject else 1)
            enough = max(enough, min(buffers, math.ceil(ROUND_US / estimate_us)))
            self.calls = min(MOST_CALLS, self.granularity * math.ceil(enough / self.granularity))
        return self.calls


def tensors_of(value: Any) -> Iterator[Any]:
    """All tensors in a nest of dicts, lists and tuples."""
    if hasattr(value, "element_size") and hasattr(value, "stride"):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def bytes_of(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(value))


def rotation_size(bytes_each: int, cache: int, free: int) -> int:
    """Buffers that exceed the cache COLD times, at most MOST_BUFFERS, MOST_BYTES and a third of the free memory; at
    least 1."""
    want = math.ceil(min(COLD * cache, MOST_BYTES) / max(bytes_each, 1)) + 1
    fits = max(1, free // 3 // max(bytes_each, 1))
    return max(1, min(want, fits, MOST_BUFFERS))


def cache_policy(rotation: Rotation, cache: int) -> str:
    """cold: the rotation exceeds twice the cache. warm: the case is so small (or so large) that it cannot."""
    return "cold" if rotation.bytes_each * len(rotation.buffers) >= 2 * cache else "warm"


def order_of(calls: int, inject: float) -> Tuple[List[int], int]:
    """Which buffer each call of a window uses, with `inject` x calls extra ones spread evenly through it."""
    extra = round(calls * inject)
    order: List[int] = []
    done = 0
    for i in range(calls):
        order.append(i)
        while done < extra and (done + 1) * calls <= (i + 1) * extra:
            order.append(i + calls // 2)
            done += 1
    return order, extra


def _rest(device: Device, plan: Plan, busy: float) -> None:
    """Keeps the duty cycle: a burst rests after each sample, sustained load does not."""
    if device.cuda and plan.duty == "burst":
        time.sleep(min(0.05, busy * (1 / BURST_SHARE - 1)))


def _sample(device: Device, plan: Plan, sampled: Sampled, window: Callable[[], float]) -> Sampled:
    """Repeats `window` (runs one sample, returns its microseconds) until the visit's share of time is used."""
    energy, start = device.energy(), time.perf_counter()
    gc.disable()
    try:
        while len(sampled.us) < plan.max_samples:
            took = window()
            sampled.us.append(took / sampled.calls)
            clock = device.clock()
            if clock is not None:
                sampled.clocks.append(clock)
            _rest(device, plan, took / 1e6)
            used = (time.perf_counter() - start) * 1e6
            if used > plan.visit_us and len(sampled.us) >= (plan.min_samples if used < LONG * plan.visit_us else 3):
                break
    finally:
        gc.enable()
        sampled.seconds = time.perf_counter() - start
    after = device.energy()
    if energy is not None and after is not None:
        sampled.energy_mj = after - energy
    return sampled


def estimate_us(device: Device, rotation: Rotation) -> float:
    """Rough wall time of a call after warming up, to size the windows."""
    for i in range(2):
        rotation.call(i)
    device.sync()
    count = 1
    while True:
        begin = time.perf_counter()
        for i in range(count):
            rotation.call(i)
        device.sync()
        took = time.perf_counter() - begin
        if took > 0.002 or count >= 256:
            return took / count * 1e6
        count *= 4


def warm_up(device: Device, rotation: Rotation, seconds: float) -> None:
    """Sustained duty cycle: load until clocks have fallen to what the power cap allows."""
    begin, i = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(8):
            rotation.call(i)
            i += 1
        device.sync()


# ---- the host's clock ------------------------------------------------------------------------------------------------
def _clock(device: Device, plan: Plan) -> Tuple[str, Callable[[], int]]:
    """Name and nanoseconds. The processor time of a process does not see it wait for a GPU."""
    if plan.clock == "cpu-time" and not device.cuda:
        return "cpu-time", time.process_time_ns
    return "steady-clock", time.perf_counter_ns


def _calls(plan: Plan, estimate_us: float) -> int:
    """Calls of a window. Another arm, a thousand times faster, may have chosen more than this one does in a second."""
    calls = plan.choose_calls(estimate_us)
    if calls * estimate_us > LONGEST_US and plan.granularity == 1 and not plan.inject:
        plan.calls = calls = max(1, int(LONGEST_US / estimate_us))
    return calls


def host_samples(device: Device, rotation: Rotation, plan: Plan) -> Sampled:
    """Windows of calls to the end of their work: of operators on a CPU, and of those that are about the host."""
    calls = _calls(plan, estimate_us(device, rotation))
    order, extra = order_of(calls, plan.inject)
    offset = 0
    timer, now = _clock(device, plan)

    def window() -> float:
        nonlocal offset
        offset += calls  # go on where the last window stopped, so that short windows too see every buffer in turn
        device.sync()
        begin = now()
        for i in order:
            rotation.call(offset + i)
        device.sync()
        return (now() - begin) / 1000

    return _sample(device, plan, Sampled(timer, "eager", calls, extra), window)


def single_samples(device: Device, rotation: Rotation, plan: Plan) -> Sampled:
    """Calls one by one, each from an idle device to the end of its work. What an implementation does `before` each of
    them is outside of the time."""
    before = getattr(rotation.function, "before", lambda case, **inputs: None)
    timer, now = _clock(device, plan)

    def single(i: int) -> float:
        before(rotation.case, **rotation.buffers[i % len(rotation.buffers)])
        device.sync()
        begin = now()
        rotation.call(i)
        device.sync()
        return (now() - begin) / 1000

    single(0)
    calls = _calls(plan, single(1))
    order, extra = order_of(calls, plan.inject)
    return _sample(device, plan, Sampled(timer, "alone", calls, extra), lambda: sum(map(single, order)))


# ---- CUDA ------------------------------------------------------------------------------------------------------------
def graph_samples(device: Device, rotation: Rotation, plan: Plan) -> Tuple[Sampled, Any]:
    """Device time of replaying one graph of `calls` calls, by events. Also returns the outputs of the last call that
    was captured, to be checked against eager ones. Raises what the capture raises."""
    torch = device.torch
    stream = torch.cuda.Stream(device.index)
    stream.wait_stream(torch.cuda.current_stream(device.index))
    with torch.cuda.stream(stream):
        for i in range(3):
            outputs = rotation.call(i)
    device.sync()
    fixed = plan.calls is not None
    calls = plan.choose_calls(estimate_us(device, rotation), len(rotation.buffers))
    del rotation.buffers[calls:]  # a graph repeats its calls: buffers beyond them would count as cold and never be used
    graph = _Graph(torch, stream, rotation, order_of(calls, plan.inject)[0], outputs)
    took = min(graph.window(), graph.window())
    if not fixed and took < plan.sample_us / 2:
        # The estimate was the host's time, and a replay needs none of it. Small kernels vary from one node of a graph
        # to the next (3.4 % between visits with 64 calls of a 2 us kernel, 1.5 % with 264): a window has to hold many.
        plan.calls = calls = min(MOST_CALLS, plan.granularity * int(calls * plan.sample_us / took / plan.granularity))
        graph = _Graph(torch, stream, rotation, order_of(calls, plan.inject)[0], outputs)
        graph.window()
    sampled = Sampled("cuda-graph", "graph", calls, order_of(calls, plan.inject)[1])
    return _sample(device, plan, sampled, graph.window), graph.outputs


class _Graph:
    """The captured calls of one window, with events around their replay."""

    def __init__(self, torch: Any, stream: Any, rotation: Rotation, order: List[int], outputs: Dict[str, Any]) -> None:
        keep_every = bytes_of(outputs) * len(order) <= KEEP
        self.kept: List[Any] = []
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            for i in order:
                self.outputs = rotation.call(i)
                if keep_every:
                    self.kept.append(self.outputs)  # distinct memory for each call's outputs: they rotate too
        self.begin, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def window(self) -> float:
        self.begin.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) * 1000


def event_samples(device: Device, rotation: Rotation, plan: Plan) -> Sampled:
    """Device time of eager calls between two events, for what cannot be captured. It includes gaps where the host is
    too slow to keep the stream filled: mode "eager" is never compared with mode "graph"."""
    torch = device.torch
    calls = plan.choose_calls(estimate_us(device, rotation), len(rotation.buffers))
    del rotation.buffers[calls:]
    order, extra = order_of(calls, plan.inject)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def window() -> float:
        begin.record()
        for i in order:
            rotation.call(i)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000

    return _sample(device, plan, Sampled("cuda-events", "eager", calls, extra), window)


def wall_samples(device: Device, rotation: Rotation, plan: Plan, count: int = 3) -> List[float]:
    """Wall time of eager calls, host included, with one synchronisation at the end of each window."""
    calls = max(1, min(plan.calls or 1, 50))
    order, _ = order_of(calls, plan.inject if calls * plan.inject >= 1 else 0.0)
    out = []
    for _ in range(count):
        device.sync()
        begin = time.perf_counter_ns()
        for i in order:
            rotation.call(i)
        device.sync()
        out.append((time.perf_counter_ns() - begin) / 1000 / calls)
    return out


def kernel_sum(device: Device, rotation: Rotation, calls: int = 3) -> Optional[Dict[str, Any]]:
    """Sum of the kernels' durations of a call by torch's profiler, and their names: {"us", "kernels"}. None where the
    profiler sees no device (CPU, or CUPTI refused)."""
    if not device.cuda:
        return None
    from torch.profiler import ProfilerActivity, profile

    device.sync()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for i in range(calls):
            rotation.call(i)
        device.sync()
    total, names = 0.0, {}  # type: float, Dict[str, int]
    for event in recorded.events():
        if "CUDA" in str(getattr(event, "device_type", "")) and not getattr(event, "is_user_annotation", False):
            total += float(event.time_range.elapsed_us())
            names[event.name] = names.get(event.name, 0) + 1
    if not names:
        return None
    return {"us": total / calls, "kernels": {name: count / calls for name, count in sorted(names.items())}}
