"""The user's rules for a verdict, read from `brakecheck.toml` (docs/policy.md describes every field)."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import math
import re
import sys
import typing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from ..model import Delta, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "brakecheck.toml"
BREAKS = ("does-not-compile", "cannot-launch", "cannot-launch-elsewhere", "wgmma-serialised")


@dataclass(frozen=True)
class Scope:
    """Table [scope]: what the verdict is about. What is ignored stays in the report and is counted as ignored.

    ignore: "operator:NAME" or a kernel's name, mangled or readable; * and ? stand for anything.
    ignore_archs: architectures that nobody runs. allow_missing_archs: architectures that a toolchain may lack.
    """

    ignore: Tuple[str, ...] = ()
    ignore_archs: Tuple[str, ...] = ()
    allow_missing_archs: Tuple[str, ...] = ()

    def covers(self, delta: Delta) -> bool:
        """Whether this delta counts for the verdict."""
        if any(fnmatchcase(delta.arch, glob) for glob in self.ignore_archs):
            return False
        names = [delta.case, delta.kernel or "", f"operator:{delta.operator}"]
        return not any(fnmatchcase(name, glob) for glob in self.ignore for name in names)


FRACTIONS = ("margin", "fdr", "slower_brake", "unconfirmed", "memory_hold", "memory_brake", "most_undecided",
             "max_occupancy_drop")


@dataclass(frozen=True)
class StaticRules:
    """Table [static]: what code alone decides.

    brake_on, hold_on: which kinds of breakage make BRAKE, which HOLD (does-not-compile, cannot-launch,
    cannot-launch-elsewhere: predicted for an architecture that was not compiled for, wgmma-serialised).
    max_...: candidate / base above which a changed kernel makes HOLD instead of WITHHELD; absent: no such rule.
    max_occupancy_drop: the share of the base's theoretical occupancy that may be lost (0.25 is a quarter).
    max_local_ops: local-memory operations that a kernel may gain.
    """

    brake_on: Tuple[str, ...] = ("does-not-compile", "cannot-launch", "wgmma-serialised")
    hold_on: Tuple[str, ...] = ("cannot-launch-elsewhere",)
    max_registers: Optional[float] = None
    max_shared: Optional[float] = None
    max_code: Optional[float] = None
    max_instructions: Optional[float] = None
    max_occupancy_drop: Optional[float] = None
    max_local_ops: Optional[int] = None


@dataclass(frozen=True)
class MeasuredRules:
    """Table [measured]: what timings decide. Static evidence does not read it. Fractions are of the base (0.01 is 1 %).

    margin: smallest change of time that matters; a case is slower or faster only when its interval clears it.
    fdr: false discovery rate over all cases of the comparison.
    slower_brake: a case that is slower by more than this is a BRAKE, below it a HOLD.
    unconfirmed: a slow-down this large is a HOLD although too few blocks were taken to confirm it.
    memory_hold, memory_brake: growth of a case's memory; growth below memory_floor bytes (of the host's resident set:
        host_floor) never counts.
    min_gain: throughput a move must bring to be a GO; 0 asks for no gain.
    most_undecided: share of undecided cases above which a GO is withheld.
    compile_hold, compile_floor_ms: growth of the first call (compilation, tuning), and the size from which it counts.
    weights: share of a workload's time by operator, for the gain; without it all operators count alike.
    alternatives: operator -> (operator that does the same work, when), offered where only the first became slow.
    """

    margin: float = 0.01
    fdr: float = 0.05
    slower_brake: float = 0.10
    unconfirmed: float = 0.05
    memory_hold: float = 0.05
    memory_brake: float = 0.10
    memory_floor: int = 16 << 20
    host_floor: int = 64 << 20
    min_gain: float = 0.0
    most_undecided: float = 0.5
    compile_hold: float = 1.0
    compile_floor_ms: float = 60_000.0
    weights: Mapping[str, float] = field(default_factory=dict)
    alternatives: Mapping[str, Tuple[str, str]] = field(default_factory=lambda: {"bmm": ("mm", "batch 1")})


@dataclass(frozen=True)
class Policy:
    """All rules; the defaults are what applies without a file. source: the file it was read from."""

    scope: Scope = field(default_factory=Scope)
    static: StaticRules = field(default_factory=StaticRules)
    measured: MeasuredRules = field(default_factory=MeasuredRules)
    source: Optional[str] = None


def load_policy(path: Optional[Path] = None, directory: Optional[Path] = None) -> Policy:
    """The policy of `path`; without one, of `brakecheck.toml` in `directory` where there is one, else the defaults.

    UsageError with file, line and field: unreadable, not TOML, an unknown field (the nearest is named), a wrong type.
    """
    if path is None:
        path = (directory or Path()) / FILE
        if not path.is_file():
            return Policy()
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"the policy cannot be read: {why}", str(path), "give a readable TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the policy is not TOML: {error}", str(path), "correct that line") from error
    policy = _table(Policy, data, (), _Place(str(path), text))
    return dataclasses.replace(policy, source=str(path))


@dataclass(frozen=True)
class _Place:
    path: str
    text: str

    def of(self, keys: Tuple[str, ...]) -> str:
        """file:line (field) of a key, by its table's header and name."""
        table, line = "", 0
        for number, content in enumerate(self.text.splitlines(), 1):
            header = re.match(r"\s*\[([^\]]+)\]", content)
            if header:
                table = header[1].strip()
                line = number if table == keys[0] and not line else line
            elif re.match(rf"\s*[\"']?{re.escape(keys[-1])}[\"']?\s*=", content) and table == ".".join(keys[:-1]):
                line = number
                break
        return f"{self.path}:{line or 1} ({'.'.join(keys)})"


def _table(cls: Any, data: Mapping[str, Any], keys: Tuple[str, ...], place: _Place) -> Any:
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls) if f.name != "source"]
    values: Dict[str, Any] = {}
    for name, value in data.items():
        where = place.of((*keys, name))
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            todo = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"the policy has no field {name!r} here", where, f"{todo}fields: {', '.join(known)}")
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise UsageError(f"{name} is a table", where, f"write [{name}] on a line of its own")
            values[name] = _table(hints[name], value, (*keys, name), place)
        elif typing.get_origin(hints[name]) is collections.abc.Mapping:  # a table whose keys are the user's: operators
            if not isinstance(value, dict):
                raise UsageError(f"{name} is a table", where, f"write [{'.'.join((*keys, name))}] on a line of its own")
            item = typing.get_args(hints[name])[1]
            values[name] = {key: _value(item, entry, key, place.of((*keys, name, key)))
                            for key, entry in value.items()}
        else:
            values[name] = _value(hints[name], value, name, where)
    return cls(**values)


def _value(hint: Any, value: Any, name: str, where: str) -> Any:
    if hint in (Tuple[str, ...], Tuple[str, str]):
        most = 2 if hint == Tuple[str, str] else None
        strings = isinstance(value, list) and all(isinstance(v, str) for v in value)
        if not strings or len(value) != (most or len(value)):
            raise UsageError(f"{name} is a list of {'two ' if most else ''}strings, found {value!r}", where,
                             f"write {name} = " + ('["mm", "batch 1"]' if most else '["..."]'))
        if name in ("brake_on", "hold_on"):
            for item in value:
                if item not in BREAKS:
                    near = difflib.get_close_matches(item, BREAKS, 1)
                    raise UsageError(f"{item!r} is no kind of breakage", where,
                                     (f"did you mean {near[0]}? " if near else "") + f"kinds: {', '.join(BREAKS)}")
        return tuple(value)
    whole = int in (hint, *typing.get_args(hint))
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise UsageError(f"{name} is a {'whole ' if whole else ''}number, found {value!r}", where,
                         f"write {name} = {'10' if whole else '1.25'}")
    if not 0 <= value < math.inf:
        raise UsageError(f"{name} must be 0 or more and finite, found {value!r}", where, "write 0 or more")
    if name in FRACTIONS and value > 1:  # a percentage by mistake, which would switch the rule off
        raise UsageError(f"{name} is a fraction from 0 to 1, found {value!r}", where,
                         f"for {value:g} % write {name} = {value / 100:g}")
    return value if whole else float(value)
