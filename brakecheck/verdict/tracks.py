"""Kernels followed through the arms: what each arm made of one kernel of one source for one architecture."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath
from typing import Dict, List, Optional, Sequence, Tuple

from ..model import KernelCode, Source, Unit, encode
from .changes import notes_of
from .match import match_kernels


@dataclass(frozen=True)
class Sight:
    """One arm's answer. status: "code" (kernel is set), "failed" (the compiler rejected the source), "no-arch" (the
    toolchain cannot build for the architecture), "gone" (compiled, without this kernel), "unread" (compiled, and the
    code could not be read), "not-built" (no unit)."""

    status: str
    unit: Optional[Unit] = None
    kernel: Optional[KernelCode] = None

    @property
    def message(self) -> Optional[str]:
        return self.unit.message or _unread(self.unit) if self.unit else None

    @cached_property
    def evidence(self) -> Dict[str, object]:
        """What a delta keeps of this side. Unknown values are absent. Deltas share it: do not change it."""
        out: Dict[str, object] = {}
        if self.unit:
            out = {key: getattr(self.unit, key) for key in _OF_UNIT}
            out["message"] = self.message
        if self.kernel:
            out.update({key: getattr(self.kernel, key) for key in _OF_KERNEL}, kernel=self.kernel.name,
                       notes=notes_of(self.kernel, self.unit))
        return {key: encode(value) for key, value in out.items() if value is not None and value != ""}


_OF_UNIT = ("stack", "status", "front", "message", "ptx", "cubin", "ptx_sha256", "cubin_sha256", "frontend_seconds",
            "ptxas_seconds")
_OF_KERNEL = ("resources", "mix", "instructions", "local_ops", "occupancy", "limits", "code_sha256", "text_sha256")


@dataclass
class Track:
    """One kernel over all arms; `sights` has one entry an arm. A source that never compiled is one track without a
    kernel. variant: the defines that tell this compilation of the source from the others: " -DPAD=0"."""

    operator: str
    source: str
    arch: str
    sights: List[Sight] = field(default_factory=list)
    variant: str = ""

    @property
    def last_kernel(self) -> Optional[KernelCode]:
        return next((s.kernel for s in reversed(self.sights) if s.kernel), None)

    @property
    def case(self) -> str:
        """The newest readable name, or the source's where no arm compiled it."""
        kernel = self.last_kernel
        return (kernel.demangled if kernel else PurePath(self.source).name) + self.variant

    @property
    def kernel(self) -> Optional[str]:
        last = self.last_kernel
        return last.name if last else None


def follow(units: Sequence[Sequence[Unit]], sources: Sequence[Source]) -> List[Track]:
    """The tracks of all sources and architectures. units[i]: those of arm i. A source compiled several times for one
    architecture (other defines) is told apart by its position among them. Sorted by operator, source, case, arch."""
    meant: Dict[str, List[Source]] = defaultdict(list)
    for source in sources:
        meant[source.path].append(source)
    cells: Dict[Tuple[str, str, int], List[Optional[Unit]]] = defaultdict(lambda: [None] * len(units))
    for arm, made in enumerate(units):
        seen: Dict[Tuple[str, str], int] = defaultdict(int)
        for unit in made:
            key = (unit.source, unit.arch)
            cells[(*key, seen[key])][arm] = unit
            seen[key] += 1
    tracks = []
    for (path, arch, position), row in cells.items():
        among = meant.get(path) or [Source(path, PurePath(path).stem)]
        source = among[min(position, len(among) - 1)]
        # Else it is not meant for this architecture: nothing is missing.
        if source.is_for(arch):
            variant = _variant(source, among)
            tracks += [replace(track, variant=variant) for track in _follow_one(row, source.operator, path, arch)]
    return sorted(tracks, key=lambda t: (t.operator, t.source, t.case, t.kernel or "", t.arch))


def _variant(source: Source, among: Sequence[Source]) -> str:
    common = set.intersection(*(set(s.defines) for s in among))
    return "".join(f" -D{d}" for d in source.defines if d not in common)


def _follow_one(row: Sequence[Optional[Unit]], operator: str, source: str, arch: str) -> List[Track]:
    tracks: List[Track] = []
    before: List[Sight] = []
    for unit in row:
        blank = _blank(unit)
        if unit is None or unit.status != "ok":
            for track in tracks:
                track.sights.append(blank)
        else:
            known = {track.last_kernel.name: track for track in tracks if track.last_kernel}
            for match in match_kernels([t.last_kernel for t in known.values() if t.last_kernel], unit.kernels):
                if match.base is None:
                    track = Track(operator, source, arch, list(before))
                    tracks.append(track)
                else:
                    track = known[match.base.name]
                track.sights.append(Sight("code", unit, match.candidate) if match.candidate else blank)
        before.append(blank)
    return tracks or [Track(operator, source, arch, before)]


def _blank(unit: Optional[Unit]) -> Sight:
    if unit is None:
        return Sight("not-built")
    if _unread(unit):
        return Sight("unread", unit)
    return Sight({"ok": "gone", "failed": "failed"}.get(unit.status, "no-arch"), unit)


def _unread(unit: Unit) -> Optional[str]:
    """Why a unit that compiled has no kernels to compare: its code could not be read."""
    if unit.status != "ok" or unit.kernels:
        return None
    return next((note.text for note in unit.notes if note.severity == "error"), None)
