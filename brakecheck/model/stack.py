"""Component, stack and arm: what is under test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple


@dataclass(frozen=True)
class Component:
    """One versioned part of a stack. `version` is what was found, not what was asked for."""

    name: str
    version: str
    path: Optional[str] = None
    sha256: Optional[str] = None


@dataclass(frozen=True)
class Stack:
    """A named set of components. `spec` is what the user wrote, `name` its resolved short form (cuda 12.9.1)."""

    spec: str
    name: str
    components: Tuple[Component, ...] = ()
    environment: Dict[str, str] = field(default_factory=dict)

    def component(self, name: str) -> Optional[Component]:
        return next((c for c in self.components if c.name == name), None)


@dataclass(frozen=True)
class Arm:
    """What is measured: one stack running one implementation. `name` is base, candidate or the stack's name."""

    name: str
    stack: Stack
    implementation: str = "cuda"


def distinct(names: Sequence[str]) -> List[str]:
    """Names told apart, where a stack is there twice: "a", "a (#2)"."""
    return [name if names.index(name) == i else f"{name} (#{names[: i + 1].count(name)})"
            for i, name in enumerate(names)]
