"""Deltas, verdict and comparison: the JSON contract `brakecheck/comparison/1`. Fields are added, never renamed."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Tuple

from . import codec
from .stack import Arm

SCHEMA = "brakecheck/comparison/1"


class State(str, enum.Enum):
    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    UNDECIDED = "undecided"
    BROKEN = "broken"
    FIXED = "fixed"
    MISSING = "missing"
    NEW = "new"


class Verdict(str, enum.Enum):
    GO = "GO"
    HOLD = "HOLD"
    BRAKE = "BRAKE"
    WITHHELD = "WITHHELD"

    @property
    def exit_code(self) -> int:
        return {"GO": 0, "HOLD": 1, "BRAKE": 2, "WITHHELD": 3}[self.value]

    @property
    def rank(self) -> int:
        """Of several, the one with the highest rank holds: a reason that was seen outranks what is not known."""
        return ("GO", "WITHHELD", "HOLD", "BRAKE").index(self.value)


@dataclass(frozen=True)
class Change:
    """One property that differs between two arms: registers 40 -> 168."""

    what: str
    base: Any
    candidate: Any
    text: str


@dataclass(frozen=True)
class Delta:
    """Comparison of two arms on one case.

    case: the case, or for static evidence the kernel's readable name. step: (from, to) names of the arms compared;
    with more than two stacks, `to` is the first release that has the change. since: the arms after `to` that are
    the same as it. ratio: candidate / base of `metric` (above 1 is slower or larger), [low, high] its interval.
    suspicion: rank of a change that only a measurement can judge, larger is measured first; no unit.
    component: the one that made the change, where the evidence tells; attribution: what tells it.
    base, candidate: the evidence of each side (Resources, mix, hashes; medians, memory, errors).
    """

    operator: str
    case: str
    arch: str
    evidence: str
    state: State
    reason: str
    text: str
    step: Tuple[str, str] = ("base", "candidate")
    since: Tuple[str, ...] = ()
    kernel: Optional[str] = None
    source: Optional[str] = None
    ratio: Optional[float] = None
    low: Optional[float] = None
    high: Optional[float] = None
    metric: Optional[str] = None
    suspicion: Optional[float] = None
    component: Optional[str] = None
    attribution: Optional[str] = None
    changes: Tuple[Change, ...] = ()
    base: Dict[str, Any] = field(default_factory=dict)
    candidate: Dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reason:
    """Why the verdict is what it is. scope narrows it: operator, case, arch."""

    code: str
    text: str
    scope: Dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cause:
    """A candidate explanation. share: of the change it accounts for, 0..1. refute: what would show it to be wrong."""

    component: str
    evidence: Tuple[str, ...]
    refute: str
    share: Optional[float] = None


@dataclass(frozen=True)
class Mitigation:
    """An action. recovers: share of the loss it won back when measured, 0..1. guard: when it must not be used."""

    action: str
    measured: bool
    recovers: Optional[float] = None
    guard: Optional[str] = None


@dataclass(frozen=True)
class Comparison:
    """The answer. coverage counts cases by what happened to them (compared, same, changed, broken, fixed, missing, new,
    undecided). environment: versions, policy, options, dates that are needed to repeat it."""

    verdict: Verdict
    headline: str
    reasons: Tuple[Reason, ...]
    arms: Tuple[Arm, ...]
    coverage: Dict[str, int]
    deltas: Tuple[Delta, ...]
    causes: Tuple[Cause, ...] = ()
    mitigations: Tuple[Mitigation, ...] = ()
    environment: Dict[str, Any] = field(default_factory=dict)
    schema: str = SCHEMA

    def to_json(self) -> Dict[str, Any]:
        data = codec.encode(self)
        return {"schema": data.pop("schema"), **data}

    @classmethod
    def from_json(cls, data: Any) -> Comparison:
        return codec.decode(cls, data)
