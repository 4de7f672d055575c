"""The nouns of brakecheck as frozen dataclasses, and their JSON form. Imports nothing of ours."""

from .code import Entry, KernelCode, Limit, Note, Occupancy, Resources, Source, Unit
from .codec import decode, encode
from .comparison import Cause, Change, Comparison, Delta, Mitigation, Reason, State, Verdict
from .errors import BrakecheckError, UnavailableError, UsageError
from .measurement import Block, Key, Measurement, Run
from .stack import Arm, Component, Stack, distinct

__all__ = [
    "Arm", "Block", "BrakecheckError", "Cause", "Change", "Comparison", "Component", "Delta", "Entry", "KernelCode",
    "Key", "Limit", "Measurement", "Mitigation", "Note", "Occupancy", "Reason", "Resources", "Run", "Source", "Stack",
    "State",
    "UnavailableError", "Unit", "UsageError", "Verdict", "decode", "distinct", "encode",
]
