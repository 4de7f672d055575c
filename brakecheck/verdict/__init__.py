"""Deltas, policy and verdict: from evidence to GO, HOLD, BRAKE or WITHHELD."""

from .policy import Policy, load_policy
from .static import compare_static, verdicts_of

__all__ = ["Policy", "compare_static", "load_policy", "verdicts_of"]
