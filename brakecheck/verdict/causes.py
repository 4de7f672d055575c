"""Which component made a change, how to refute that, and what can be done about it."""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Sequence, Set, Tuple

from ..evidence.names import short_name
from ..model import Arm, Cause, Delta, Mitigation, State, Unit, UsageError
from ..stack import compat
from .tracks import Sight

TOOLS = {"nvdisasm", "cuobjdump"}  # they read code, they do not make it
HEADERS = {"headers", "cccl", "crt"}
FRONTS = {"nvrtc": {"nvrtc"}, "nvcc": {"nvcc", "nvvm", "crt"}, "ptx": set()}
_CAUSED = (State.UNDECIDED, State.BROKEN, State.FIXED, State.SLOWER, State.FASTER)


def differing(one: Arm, two: Arm, front: Optional[str] = None) -> Set[str]:
    """Components that could make code differ and are not the same in both stacks. front: leaves out the front end that
    was not used. nvvm is part of nvcc."""
    names = {c.name for arm in (one, two) for c in arm.stack.components} - TOOLS
    found = set()
    for name in names:
        a, b = one.stack.component(name), two.stack.component(name)
        if a is None or b is None or (a.version, a.sha256) != (b.version, b.sha256):
            found.add(name)
    if front in FRONTS:
        found -= set().union(*FRONTS.values()) - FRONTS[front] - HEADERS
    if front == "ptx":
        found -= HEADERS
    return {"nvcc" if name == "nvvm" and front == "nvcc" else name for name in found}


def attribute(base: Sight, candidate: Sight, one: Arm, two: Arm,
              crossed: Optional[Unit] = None) -> Tuple[Optional[str], Optional[str]]:
    """(component, why) of a change between two answers; (None, None) where the evidence does not tell.

    In turn: the only component that differs between the stacks; the step that rejected the source; equal PTX with
    another cubin, which leaves ptxas alone; `crossed`, the base's PTX assembled by the candidate's ptxas, which is a
    swap of that one component; other PTX, which the front end or its headers made. The last is the weakest (PTX may
    differ without meaning while ptxas made the change), and is only reached where there is no crossed unit.
    """
    unit, other = candidate.unit, base.unit
    if unit is None or other is None or "no-arch" in (base.status, candidate.status):
        return None, None
    names = differing(one, two, unit.front)
    if len(names) == 1:
        name = next(iter(names))
        return name, f"{name} is the only component that differs between the two stacks"
    if "failed" in (base.status, candidate.status):
        failed = unit if candidate.status == "failed" else other
        if failed.front == "ptx" or failed.ptx_sha256 is not None:
            return "ptxas", "the front end made PTX, and ptxas rejected it"
        return failed.front, f"{failed.front} rejected the source{_or_headers(names)}"
    if unit.front != other.front:
        return None, None
    if unit.front == "ptx":
        return "ptxas", "the source is PTX, so only ptxas worked on it"
    if unit.ptx_sha256 is None or other.ptx_sha256 is None:
        return None, None
    if unit.ptx_sha256 == other.ptx_sha256:
        return "ptxas", "the PTX is identical, the cubin is not"
    swapped = _swapped(base, candidate, crossed)
    if swapped == "candidate":
        return "ptxas", "the base's PTX, assembled by the candidate's ptxas, gives the candidate's machine code"
    if swapped == "base":
        return unit.front, ("the base's PTX, assembled by the candidate's ptxas, still gives the base's machine code"
                            + _or_headers(names))
    if swapped == "neither":
        return f"{unit.front}+ptxas", "each of the two changes the machine code: shown by swapping ptxas alone"
    too = "; ptxas differs too and may have a part in it" if "ptxas" in names else ""
    return unit.front, f"the PTX differs{_or_headers(names)}{too}"


def _swapped(base: Sight, candidate: Sight, crossed: Optional[Unit]) -> Optional[str]:
    """Whose machine code comes of the base's PTX and the candidate's ptxas: "base", "candidate" or "neither"."""
    if crossed is None or crossed.status != "ok" or base.kernel is None or candidate.kernel is None:
        return None
    made = next((k.code_sha256 for k in crossed.kernels if k.name == base.kernel.name), None)
    if made is None:
        return None
    if made == candidate.kernel.code_sha256:
        return "candidate"
    return "base" if made == base.kernel.code_sha256 else "neither"


def causes(deltas: Sequence[Delta], base: Arm, candidate: Arm) -> Tuple[Cause, ...]:
    """One candidate explanation a component, the largest share first; what no evidence explains is `unattributed`.

    deltas: base against candidate. share: of the kernels that changed, broke or were fixed.
    """
    changed = [d for d in deltas if d.state in _CAUSED and d.reason != "cannot-launch-elsewhere"]
    by_component: Dict[str, List[Delta]] = {}
    for delta in changed:
        by_component.setdefault(delta.component or "unattributed", []).append(delta)
    out = []
    for component, found in sorted(by_component.items(), key=lambda item: (-len(item[1]), item[0])):
        reasons: Dict[str, List[str]] = {}
        for delta in found:
            reasons.setdefault(delta.attribution or "no PTX of both sides to tell by", []).append(
                f"{short_name(delta.case)} ({delta.arch})")
        evidence = tuple(f"{why}: {_listed(names)}" for why, names in sorted(reasons.items()))
        out.append(Cause(component, evidence, refutation(component, base, candidate), len(found) / len(changed)))
    return tuple(out)


def refutation(component: str, base: Arm, candidate: Arm) -> str:
    """The command that would show a cause to be wrong, and how to read it.

    A newer ptxas reads older PTX and not the other way round, so the newer of the two is put behind the older front.
    """
    old, new = _ptxas(base), _ptxas(candidate)
    one, two = base.stack.spec, candidate.stack.spec
    front = " --front nvcc" if component == "nvcc" else ""
    if len(differing(base, candidate)) == 1:
        return (f"brakecheck compare {one} {one}: if these kernels differ there too, the build is not reproducible, "
                f"and {component} is not the cause")
    if component == "unattributed" or old is None or new is None:
        return "keep the PTX of both stacks and compare again: equal PTX names ptxas, other PTX the front end"
    forward = _numbers(new) >= _numbers(old)
    mixed = with_ptxas(one, new) if forward else with_ptxas(two, old)
    if (component == "ptxas") == forward:
        pair = f"{one} {mixed}"
    else:
        pair = f"{mixed} {two}"
    same_ptxas = "" if component == "ptxas" else " (both with one ptxas)"
    return (f"brakecheck compare {pair}{front}{same_ptxas}: if these kernels are the same there, {component} is not "
            "the cause")


def mitigations(deltas: Sequence[Delta], base: Arm, candidate: Arm) -> Tuple[Mitigation, ...]:
    """What can be done about what is broken or changed, none of it measured yet."""
    broken = [d for d in deltas if d.state is State.BROKEN]
    by_ptxas = [d for d in broken if d.component == "ptxas"]
    names: Dict[Tuple[str, Optional[str]], List[str]] = {}
    for delta in deltas:
        if delta.state in (State.BROKEN, State.UNDECIDED):
            for advice in _advice(delta):
                names.setdefault(advice, []).append(short_name(delta.case))
    found = [Mitigation(f"{_listed(who)}: {action}", False, guard=guard) for (action, guard), who in names.items()]
    return (*([_pin_ptxas(by_ptxas, base, candidate)] if by_ptxas else []), *found)


def _advice(delta: Delta) -> List[Tuple[str, Optional[str]]]:
    """(action, guard) for what this change brought."""
    out: List[Tuple[str, Optional[str]]] = []
    known = {n.get("code") or n["text"] for n in delta.base.get("notes", ())}
    gained = [n for n in delta.candidate.get("notes", ()) if (n.get("code") or n["text"]) not in known]
    out += [(n["advice"], None) for n in gained if n.get("advice")]
    if delta.reason == "cannot-launch" and any(x["resource"] == "registers" for x in delta.candidate["limits"]):
        out.append(("declare the block size with __launch_bounds__, so that ptxas keeps to the registers there are",
                    "it may spill: look at the local-memory operations, and measure"))
    return out


def _pin_ptxas(broken: Sequence[Delta], base: Arm, candidate: Arm) -> Mitigation:
    """The base's ptxas behind the candidate's front end where it can read that PTX, else the base's cubins."""
    old, front = _ptxas(base), _release(candidate)
    names = _listed([short_name(d.case) for d in broken])
    try:
        readable = old is not None and front is not None and not compat.check_mixed(
            compat.release_of(front).ptx_isa, old)
    except UsageError:
        readable = False
    if readable and old is not None:
        return Mitigation(f"pin ptxas: {with_ptxas(candidate.stack.spec, old)} for {names}", False)
    return Mitigation(f"build {names} with {base.stack.spec} and keep those cubins: newer drivers load them", False,
                      guard=f"ptxas {old} cannot read PTX of {candidate.stack.spec}" if old else None)


def with_ptxas(spec: str, release: str) -> str:
    """cuda==12.9 with another release's ptxas: cuda==12.9+ptxas==13.2."""
    return re.sub(r"\+ptxas==[^+]+", "", spec) + f"+ptxas=={release}"


def _or_headers(names: Set[str]) -> str:
    found = sorted(names & HEADERS)
    return f" (or its headers: {', '.join(found)} differ)" if found else ""


def _ptxas(arm: Arm) -> Optional[str]:
    """Release X.Y of the arm's ptxas: of the spec's overlay, of the component, or of the toolkit."""
    component = arm.stack.component("ptxas")
    found = re.search(r"\+ptxas==(\d+\.\d+)", arm.stack.spec) or (
        component and re.match(r"(\d+\.\d+)", component.version))
    return found[1] if found else _release(arm)


def _release(arm: Arm) -> Optional[str]:
    found = re.match(r"cuda==(\d+\.\d+)", arm.stack.spec.strip())
    return found[1] if found else None


def _numbers(release: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def _listed(names: Sequence[str], limit: int = 5) -> str:
    shown = list(dict.fromkeys(names))
    more = len(shown) - limit
    return ", ".join(shown[:limit]) + (f" and {more} more" if more > 0 else "")
