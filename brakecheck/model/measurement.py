"""What was measured: blocks of samples, the measurement of an arm on a case, the run that holds them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, fields
from typing import Any, Dict, Optional, Tuple

from .stack import Arm

RUN_SCHEMA = "brakecheck/run/1"


@dataclass(frozen=True)
class Key:
    """How a time was taken. Times with unlike keys are never compared.

    timer: cuda-graph, cuda-events, steady-clock, or the name of another tool. mode: graph, eager or alone (call
    by call). cache: cold or warm. duty: burst or sustained. inputs: the distribution drawn from. harness: version of
    what did the timing."""

    timer: str
    mode: str
    cache: str
    duty: str
    inputs: str
    harness: str

    def unlike(self, other: Key) -> Tuple[str, ...]:
        """The differing parts, each as "inputs: zeros against normal(...)"."""
        return tuple(f"{f.name}: {getattr(self, f.name)} against {getattr(other, f.name)}"
                     for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))


@dataclass(frozen=True)
class Block:
    """The samples of one visit of a worker process. us: microseconds per call, in the order taken.

    pair: blocks of two arms with the same number ran next to each other on one device; None when they did not.
    position: place in the order of all visits. calls: of the implementation in one sample. clocks: SM MHz after each
    sample. before, after: state of the device (sm_mhz, memory_mhz, celsius, watts, reasons). energy_mj: of the block,
    with capture and warm-up; sampling_mj: of its samples and the rests between them.
    seconds: that the visit took for this case, with settling and checks.
    """

    us: Tuple[float, ...]
    pair: Optional[int] = None
    position: Optional[int] = None
    calls: int = 1
    extra_calls: int = 0
    wall_us: Tuple[float, ...] = ()
    clocks: Tuple[float, ...] = ()
    started: Optional[float] = None
    settle_seconds: Optional[float] = None
    settled: Optional[bool] = None
    before: Dict[str, Any] = field(default_factory=dict)
    after: Dict[str, Any] = field(default_factory=dict)
    energy_mj: Optional[float] = None
    sampling_mj: Optional[float] = None
    device: Optional[str] = None
    seconds: Optional[float] = None

    @property
    def median(self) -> float:
        return statistics.median(self.us)


@dataclass(frozen=True)
class Measurement:
    """All blocks of one arm on one case.

    status: ok, error, oom, crash, timeout, missing (operator, implementation or import), unusable (device).
    memory: bytes by kind (allocated, reserved, process, host_peak), medians over the visits.
    memory_spread: the largest less the smallest, of kinds that several visits tell.
    numerics: worker/numerics.py's findings. retention: {"fixed", "growth", "calls"} bytes that stay after calls.
    kernel_sum: {"us", "kernels"} of the profiler. work: {"flops", "bytes", "power_limited"}.
    trials: {"failed", "tries"} where failures were counted (hangs of a number of boots).
    """

    arm: str
    operator: str
    case: str
    arch: str
    status: str
    message: Optional[str] = None
    key: Optional[Key] = None
    blocks: Tuple[Block, ...] = ()
    memory: Dict[str, float] = field(default_factory=dict)
    numerics: Optional[Dict[str, Any]] = None
    retention: Optional[Dict[str, int]] = None
    kernel_sum: Optional[Dict[str, Any]] = None
    first_call_ms: Optional[float] = None
    work: Dict[str, Any] = field(default_factory=dict)
    note: Optional[str] = None
    trials: Optional[Dict[str, int]] = None
    memory_spread: Dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> Tuple[str, str, str]:
        """What makes it comparable with another arm's: operator, case, arch."""
        return self.operator, self.case, self.arch

    @property
    def median_us(self) -> Optional[float]:
        """Median of the medians of the blocks."""
        return statistics.median(b.median for b in self.blocks) if self.blocks else None

    @property
    def mj_per_call(self) -> Optional[float]:
        """Millijoules of a call, over all blocks: the counter steps so rarely that one block may see no step of it, so
        a block without one has to count too."""
        known = [(b.sampling_mj, b.calls * len(b.us)) for b in self.blocks if b.sampling_mj is not None]
        energy = sum(mj for mj, _ in known)
        return energy / sum(calls for _, calls in known) if energy else None


@dataclass(frozen=True)
class Run:
    """The measurements of one invocation, immutable once written. created: ISO 8601. complete: False when it was
    interrupted or the budget ended first. timing: seconds by what they were spent on (wall, measuring, starting).
    static: of arms that are toolchains, {"comparison": its JSON, "timed": {operator: names of its kernels}}: kernels
    whose machine code is equal were not timed."""

    id: str
    created: str
    arms: Tuple[Arm, ...]
    device: Dict[str, Any]
    measurements: Tuple[Measurement, ...]
    options: Dict[str, Any] = field(default_factory=dict)
    command: Tuple[str, ...] = ()
    warnings: Tuple[str, ...] = ()
    complete: bool = True
    timing: Dict[str, float] = field(default_factory=dict)
    schema: str = RUN_SCHEMA
    static: Optional[Dict[str, Any]] = None

    def of_arm(self, arm: str) -> Tuple[Measurement, ...]:
        return tuple(m for m in self.measurements if m.arm == arm)
