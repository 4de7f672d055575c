"""From what toolchains made of kernels to a comparison: deltas over releases, causes, verdict. Nothing is timed."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ..evidence.names import short_name
from ..model import Arm, Change, Comparison, Delta, Source, State, Unit, UsageError, Verdict, encode
from ..model.arch import arch_number, plain_arch
from .causes import attribute, causes, mitigations
from .changes import changes, elsewhere, notes_of, own_limits, same_resources, serialised, suspicion
from .decide import called, decide, of_several
from .policy import Policy
from .tracks import Sight, Track, follow

Cause = Tuple[Optional[str], Optional[str]]  # component, what tells it
# (path of a base's PTX, name of another arm) -> what that arm's ptxas made of it.
Crossed = Mapping[Tuple[str, str], Unit]
RANK = {state: rank for rank, state in enumerate(
    (State.BROKEN, State.UNDECIDED, State.MISSING, State.FIXED, State.NEW, State.SAME))}


def compare_static(arms: Sequence[Arm], units: Sequence[Sequence[Unit]], sources: Sequence[Source],
                   policy: Optional[Policy] = None, environment: Optional[Dict[str, Any]] = None,
                   crossed: Optional[Crossed] = None) -> Comparison:
    """The comparison of two or more arms (the first is the base) on static evidence.

    units[i]: what arm i made of the sources, kernels filled in. Deltas are steps between consecutive arms: a change is
    one delta at the first arm that has it, with the later arms that are the same in `since`. The verdict is the worst
    of the base against each candidate; environment["verdicts"] has all. crossed: what a later arm's ptxas made of an
    earlier arm's PTX, which tells front end and assembler apart. UsageError for fewer than two arms.
    """
    if len(arms) < 2 or len(units) != len(arms):
        raise UsageError(f"a comparison needs two stacks or more, found {len(arms)}", None, "name base and candidate")
    policy = policy or Policy()
    tracks = follow(units, sources)
    compiled = _compiled(units)
    judges = [_Judge(track, arms, compiled.get(track.source, set()), crossed or {}) for track in tracks]
    steps = [delta for judge in judges for delta in judge.steps()]
    judged = []
    for i in range(1, len(arms)):
        pairs = sorted((delta for judge in judges for delta in judge.pair(0, i)), key=_order)
        judged.append((decide(pairs, arms[0], arms[i], policy), pairs, arms[i]))
    verdicts = {arm.name: decision.verdict for decision, _, arm in judged}
    decision, pairs, worst = max(reversed(judged), key=lambda found: found[0].verdict.rank)  # of equals the last
    headline = decision.headline
    if len(arms) > 2:
        headline = f"{of_several(headline, decision.verdict, worst.name, verdicts)}."
    return Comparison(
        verdict=decision.verdict, headline=headline, reasons=decision.reasons, arms=tuple(arms),
        coverage=decision.coverage, deltas=tuple(sorted(steps, key=_order)),
        causes=causes(pairs, arms[0], worst), mitigations=mitigations(pairs, arms[0], worst),
        environment={**(environment or {}), "policy": encode(policy), "verdicts": encode(verdicts)})


def verdicts_of(comparison: Comparison) -> Dict[str, Verdict]:
    """Arm name -> the verdict of moving from the base to it."""
    return {name: Verdict(value) for name, value in comparison.environment.get("verdicts", {}).items()}


def _order(delta: Delta) -> Tuple[Any, ...]:
    return (RANK.get(delta.state, len(RANK)), -(delta.suspicion or 0.0), delta.operator, delta.case, delta.kernel or "",
            delta.arch, delta.step)


def _compiled(units: Sequence[Sequence[Unit]]) -> Dict[str, Set[str]]:
    """Source -> architectures that some arm compiled it for."""
    out: Dict[str, Set[str]] = {}
    for made in units:
        for unit in made:
            if unit.status == "ok":
                out.setdefault(unit.source, set()).add(plain_arch(unit.arch))
    return out


class _Judge:
    """Deltas of one track. compiled: the architectures that some arm compiled its source for."""

    def __init__(self, track: Track, arms: Sequence[Arm], compiled: Set[str], crossed: Crossed) -> None:
        self.track, self.arms, self.compiled, self.crossed = track, arms, compiled, crossed

    def steps(self) -> List[Delta]:
        """One delta for each change over consecutive arms; one for all arms when nothing ever changes."""
        sights = self.track.sights
        starts: List[Tuple[int, int]] = []
        for i in range(1, len(sights)):
            state, reason = judge(sights[i - 1], sights[i])
            unchanged = state is State.SAME or reason == "launches-nowhere"
            around = {sights[i - 1].status, sights[i].status}
            if unchanged or not (around & {"code"} or ("unread" in around and len(around) == 2)):
                continue
            seen = [j for j in range(i) if sights[j].kernel]
            back = state is State.NEW and seen
            starts.append((seen[-1] if back else i - 1, i))
        if not starts:
            return self.pair(0, 1, tuple(arm.name for arm in self.arms[2:]))
        ends = [start for _, start in starts[1:]] + [len(sights)]
        return [delta for (before, i), end in zip(starts, ends)
                for delta in self.pair(before, i, tuple(arm.name for arm in self.arms[i + 1:end]))]

    def pair(self, i: int, j: int, since: Tuple[str, ...] = ()) -> List[Delta]:
        """Arm i against arm j: the track's delta, and one for each other architecture that would not launch it."""
        base, candidate = self.track.sights[i], self.track.sights[j]
        state, reason = judge(base, candidate)
        changed: Tuple[Change, ...] = ()
        rank = None
        if base.kernel and candidate.kernel and state is not State.SAME:
            notes = [notes_of(base.kernel, base.unit), notes_of(candidate.kernel, candidate.unit)]
            changed = changes(base.kernel, candidate.kernel, *notes)
            rank = suspicion(base.kernel, candidate.kernel, reason == "wgmma-serialised")
        cause: Cause = (None, None)
        if state in (State.BROKEN, State.FIXED, State.UNDECIDED):
            between = self.crossed.get((base.unit.ptx or "", self.arms[j].name)) if base.unit else None
            cause = attribute(base, candidate, self.arms[i], self.arms[j], between)
        delta = self._delta(i, j, since, self.track.arch, state, reason, changed, rank, cause)
        return [delta, *self._elsewhere(i, j, since, cause)]

    def _elsewhere(self, i: int, j: int, since: Tuple[str, ...], cause: Cause) -> List[Delta]:
        base, candidate = self.track.sights[i].kernel, self.track.sights[j].kernel
        if base is None or candidate is None:
            return []
        before, out = elsewhere(base), []
        for arch, limit in sorted(elsewhere(candidate).items()):
            if arch in before or arch in self.compiled or plain_arch(self.track.arch) != self._nearest(arch):
                continue
            change = Change("limit", None, limit.asked, f"{limit.text} (predicted from the code for {self.track.arch})")
            out.append(self._delta(i, j, since, arch, State.BROKEN, "cannot-launch-elsewhere", (change,), None, cause))
        return out

    def _nearest(self, arch: str) -> str:
        """The compiled architecture whose code tells most about another: the next lower one, else the lowest."""
        lower = [a for a in self.compiled if arch_number(a) <= arch_number(arch)]
        return max(lower, key=arch_number) if lower else min(self.compiled, key=arch_number)

    def _delta(self, i: int, j: int, since: Tuple[str, ...], arch: str, state: State, reason: str,
               changed: Tuple[Change, ...], rank: Optional[float], cause: Cause) -> Delta:
        track, sights = self.track, self.track.sights
        return Delta(
            operator=track.operator, case=track.case, arch=arch, evidence="static", state=state, reason=reason,
            text=self._text(i, j, arch, reason, changed), step=(self.arms[i].name, self.arms[j].name), since=since,
            kernel=track.kernel, source=track.source, suspicion=rank, component=cause[0],
            attribution=cause[1], changes=changed,
            base=sights[i].evidence, candidate=sights[j].evidence)

    def _text(self, i: int, j: int, arch: str, reason: str, changed: Tuple[Change, ...]) -> str:
        base, candidate = self.track.sights[i], self.track.sights[j]
        name, one, two = short_name(self.track.case), called(self.arms[i]), called(self.arms[j])
        said = {
            "does-not-compile": f"{name} no longer compiles with {two} for {arch}: {first_error(candidate.message)}",
            "compiles-now": f"{name} compiles with {two} for {arch}, and did not with {one}",
            "launches-now": f"{name} can launch on {arch} with {two}, and could not with {one}",
            "fails-everywhere": f"{name} compiles for {arch} with neither stack: {first_error(candidate.message)}",
            "arch-unknown": f"{two} cannot build {name} for {arch}: {first_error(candidate.message)}",
            "arch-new": f"{one} cannot build {name} for {arch}, {two} can: {first_error(base.message)}",
            "kernel-gone": f"{name} is not in what {two} made for {arch}",
            "kernel-new": f"{name} is not in what {one} made for {arch}",
            "not-read": f"{name} was compiled for {arch}, and its code cannot be read: "
                        f"{first_error(candidate.message or base.message)}",
            "no-kernel": f"{name} holds no kernel for {arch} with either stack; a template has to be instantiated: "
                         "template __global__ void scale<float>(float*);",
            "not-built": f"{name} was not built by both stacks for {arch}",
            "identical-sass": f"{name} is identical machine code for {arch}",
            "schedule-only": f"{name}: the same instructions for {arch} in another schedule",
            "resources-only": f"{name}: the same instructions for {arch}, other resources",
            "changed-sass": f"{name}: other machine code for {arch}" + (
                "" if changed else ", with as many instructions of each class"),
        }.get(reason)
        if reason == "launches-nowhere" and candidate.kernel:
            said = f"{name} can launch on {arch} with neither stack: {own_limits(candidate.kernel)[0].text}"
        if reason in ("cannot-launch", "cannot-launch-elsewhere", "wgmma-serialised"):
            note = candidate.kernel and serialised(notes_of(candidate.kernel, candidate.unit))
            limits = own_limits(candidate.kernel) if candidate.kernel else ()
            why = (changed[0].text if reason == "cannot-launch-elsewhere" else limits[0].text if limits
                   else note.text if note else "")
            verb = {"cannot-launch": "can no longer launch", "cannot-launch-elsewhere": "would no longer launch",
                    "wgmma-serialised": "has its wgmma serialised, and had not,"}[reason]
            said = f"{name} {verb} on {arch} with {two}: {why}"
        return said or f"{name}: {reason}"


def judge(base: Sight, candidate: Sight) -> Tuple[State, str]:
    """State and reason of one answer against another. Correctness comes before speed: what no longer compiles, launches
    or keeps its wgmma asynchronous is broken, whatever else changed."""
    one, two = base.kernel, candidate.kernel
    states = {base.status, candidate.status}
    if states == {"unread", "failed"}:
        return (State.BROKEN, "does-not-compile") if base.status == "unread" else (State.FIXED, "compiles-now")
    if (base.status, candidate.status) == ("no-arch", "unread"):
        return State.NEW, "arch-new"
    if "unread" in states and not states & {"no-arch", "not-built"}:
        return State.MISSING, "not-read"
    if one is None and two is None:
        if candidate.status == "failed":
            return State.MISSING, "fails-everywhere"
        if base.status == candidate.status == "gone":
            return State.MISSING, "no-kernel"
        return State.MISSING, {"no-arch": "arch-unknown", "not-built": "not-built"}.get(candidate.status, "kernel-gone")
    if two is None:
        if candidate.status == "failed":
            return State.BROKEN, "does-not-compile"
        return State.MISSING, {"no-arch": "arch-unknown", "gone": "kernel-gone"}.get(candidate.status, "not-built")
    if one is None:
        if base.status == "failed":
            return State.FIXED, "compiles-now"
        return State.NEW, {"no-arch": "arch-new", "gone": "kernel-new"}.get(base.status, "not-built")
    return _judge_code(base, candidate)


def _judge_code(base: Sight, candidate: Sight) -> Tuple[State, str]:
    one, two = base.kernel, candidate.kernel
    assert one is not None and two is not None
    blocked = bool(own_limits(one)), bool(own_limits(two))
    if blocked == (False, True):
        return State.BROKEN, "cannot-launch"
    if blocked == (True, False):
        return State.FIXED, "launches-now"
    if blocked == (True, True):
        return State.MISSING, "launches-nowhere"
    if serialised(notes_of(two, candidate.unit)) and not serialised(notes_of(one, base.unit)):
        return State.BROKEN, "wgmma-serialised"
    if one.code_sha256 == two.code_sha256:
        return State.SAME, "identical-sass"
    if one.text_sha256 == two.text_sha256:
        return State.UNDECIDED, "schedule-only" if same_resources(one, two) else "resources-only"
    return State.UNDECIDED, "changed-sass"


def first_error(message: Optional[str]) -> str:
    """The line of a compiler's message that says what is wrong."""
    lines = [line.strip() for line in (message or "").splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
    return (telling or lines or ["it gave no message"])[0][:300]
