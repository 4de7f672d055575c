"""What differs between two stacks besides what was meant to: shown before any verdict, and a cause when it is alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..model import Arm, Cause, Delta, State

# Components that move with another one and are no second difference.
FOLLOWS = {"driver-cuda": "driver", "ptxas (driver)": "driver", "cublaslt": "cublas", "torch-cpu": "pytorch",
           "torch-cuda": "pytorch"}


@dataclass(frozen=True)
class Difference:
    """base, candidate: versions (or hashes, where versions are equal); None when that side does not have it.

    intended: the overlay asked for it; None when the specs do not tell (two whole environments)."""

    component: str
    base: str | None
    candidate: str | None
    intended: bool | None

    @property
    def text(self) -> str:
        return f"{self.component}: {self.base or 'absent'} -> {self.candidate or 'absent'}"


def differences(base: Arm, candidate: Arm) -> list[Difference]:
    """Components and environment variables that differ, in the base's order; equal versions with unequal hashes too."""
    a, b = ({c.name: c for c in arm.stack.components} for arm in (base, candidate))
    out = []
    for name in dict.fromkeys([*a, *b]):
        x, y = a.get(name), b.get(name)
        if x and y and x.version == y.version and (x.sha256 == y.sha256 or not (x.sha256 and y.sha256)):
            continue
        shown = [None if c is None else c.version for c in (x, y)]
        if x and y and x.version == y.version:
            shown = [f"{c.version} (sha256 {str(c.sha256)[:12]})" for c in (x, y)]
        out.append(Difference(name, shown[0], shown[1], _intended(name, base, candidate)))
    variables = [arm.stack.environment for arm in (base, candidate)]
    for name in sorted({*variables[0], *variables[1]}):
        values = [v.get(name) for v in variables]
        if values[0] != values[1] and name not in ("LD_PRELOAD", "LD_LIBRARY_PATH"):  # how overlays are put in front
            out.append(Difference(f"variable {name}", values[0], values[1], None))
    return out


def _intended(component: str, base: Arm, candidate: Arm) -> bool | None:
    """One arm's spec is the other's with overlays: then those are what was meant to change, and nothing else."""
    for one, other in ((base, candidate), (candidate, base)):
        if one.stack.spec == other.stack.spec:
            return False
        if one.stack.spec.startswith(other.stack.spec + "+"):
            added = one.stack.spec[len(other.stack.spec):].lower()
            return component in added or FOLLOWS.get(component, component) in added
    return None


def unintended(found: Sequence[Difference]) -> list[Difference]:
    return [d for d in found if d.intended is False]


def sole_cause(found: Sequence[Difference], deltas: Sequence[Delta]) -> list[Cause]:
    """When one component alone differs, what changed is its doing (F8): nothing else can be, except chance, which the
    intervals account for. Nothing is said when several differ, or when nothing changed."""
    roots = {FOLLOWS.get(d.component, d.component) for d in found}
    changed = [d for d in deltas if d.state in (State.SLOWER, State.FASTER, State.BROKEN, State.FIXED) or d.changes]
    if len(roots) != 1 or not changed:
        return []
    (name,) = roots
    evidence = ("it is the only part in which the stacks differ: " + "; ".join(d.text for d in found),
                f"{len(changed)} of {len(deltas)} cases changed with it")
    return [Cause(name, evidence, f"change {name} alone, in both directions: the effect must come and go with it", 1.0)]
