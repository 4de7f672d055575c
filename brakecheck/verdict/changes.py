"""What differs between two versions of one kernel, and how suspicious that is."""

from __future__ import annotations

from math import log2
from typing import Dict, List, Optional, Sequence, Tuple

from ..evidence.buildlog import serialises
from ..evidence.limits import most_threads
from ..model import Change, KernelCode, Limit, Note, Unit
from ..model.arch import plain_arch
from . import mix as m


def notes_of(kernel: KernelCode, unit: Optional[Unit]) -> Tuple[Note, ...]:
    """The kernel's own notes, and those of its unit that name it."""
    own = tuple(n for n in (unit.notes if unit else ()) if n.kernel == kernel.name and n not in kernel.notes)
    return kernel.notes + own


def serialised(notes: Sequence[Note]) -> Optional[Note]:
    """The note that says wgmma is serialised, if there is one."""
    return next((n for n in notes if serialises(n)), None)


def own_limits(kernel: KernelCode) -> Tuple[Limit, ...]:
    """Launches that cannot work on the architecture that the kernel was compiled for."""
    return tuple(x for x in kernel.limits if plain_arch(x.arch) == plain_arch(kernel.arch))


def elsewhere(kernel: KernelCode) -> Dict[str, Limit]:
    """Architecture -> what would not launch there, of those that the kernel was not compiled for."""
    return {plain_arch(x.arch): x for x in kernel.limits if plain_arch(x.arch) != plain_arch(kernel.arch)}


def same_resources(base: KernelCode, candidate: KernelCode) -> bool:
    """Whether both take the same of what limits occupancy. What is unknown on a side does not differ."""
    pairs = [(getattr(base.resources, f), getattr(candidate.resources, f))
             for f in ("registers", "stack", "shared", "barriers", "max_threads")]
    return all(None in pair or pair[0] == pair[1] for pair in pairs)


def changes(base: KernelCode, candidate: KernelCode, base_notes: Sequence[Note] = (),
            candidate_notes: Sequence[Note] = ()) -> Tuple[Change, ...]:
    """Every property that differs, the most telling first. Unknown on either side: no change is claimed."""
    out = [*_tensor(base, candidate), *_notes(base_notes, candidate_notes), *_limits(base, candidate)]
    if base.occupancy and candidate.occupancy and base.occupancy.ratio != candidate.occupancy.ratio:
        one, two = base.occupancy, candidate.occupancy
        out.append(Change("occupancy", round(one.ratio, 4), round(two.ratio, 4),
                          f"occupancy {one.ratio:.0%} -> {two.ratio:.0%} (limited by {two.limiter})"))
    out += _largest_block(base, candidate)
    out += _number("local_ops", "local-memory operations", base.local_ops, candidate.local_ops)
    out += _memory(base, candidate)
    for key, words in _RESOURCES:
        out += _number(key, words, getattr(base.resources, key), getattr(candidate.resources, key))
    out += _number("instructions", "instructions", base.instructions, candidate.instructions)
    known = {name for name in {*base.mix, *candidate.mix} if m.tensor_kinds({name: 1}) or m.memory_space(name)}
    known |= {name for name in base.mix if not candidate.mix.get(name) and m.count({name: 1}, *(w for w, _ in _COPIES))}
    for name in sorted({*base.mix, *candidate.mix} - known - {"nop"}) if base.mix and candidate.mix else ():
        out += _number(f"mix:{name}", f"{name} instructions", base.mix.get(name, 0), candidate.mix.get(name, 0))
    if base.name != candidate.name:
        out.append(Change("name", base.name, candidate.name, f"renamed from {base.demangled}"))
    return tuple(out)


_RESOURCES = (
    ("registers", "registers"), ("shared", "static shared memory (bytes)"), ("stack", "stack (bytes)"),
    ("barriers", "barriers"), ("max_threads", "most threads a block"), ("code", "code size (bytes)"),
    ("constant", "constant memory (bytes)"), ("spill_stores", "spill stores (bytes)"),
    ("spill_loads", "spill loads (bytes)"),
)


def suspicion(base: KernelCode, candidate: KernelCode, newly_serialised: bool = False) -> float:
    """How likely it is that this change costs time: what is larger is measured first. No unit, and no prediction.

    A sum of what usually costs, each at least 0 and growing with the damage; nothing is subtracted for improvements,
    because one of them cannot be weighed against a loss without measuring.

    | weight              | for                                                                                  |
    |---------------------|--------------------------------------------------------------------------------------|
    | 100                 | an older kind of tensor-core instruction, or none any more (HGMMA -> HMMA)           |
    | 100                 | wgmma serialised now                                                                 |
    | 60 x share lost     | theoretical occupancy; where it is unknown 5 x log2 of the growth of registers       |
    | 40                  | no TMA copies any more; the same for cp.async copies                                 |
    | 30 x log2 narrower  | mean width of loads or stores of one memory space (128 -> 32 bit: 60)                |
    | 8 x log2 growth     | local-memory operations in the SASS (each counted from 1)                            |
    | 20 x log2 growth    | all memory instructions                                                              |
    | 10 x log2 growth    | all instructions                                                                     |
    | 4 x log2 growth     | barrier instructions                                                                 |
    | 1, 0.5 or 0.1       | instructions changed, only resources did, or only the schedule did                   |

    Spill stores and loads as ptxas reports them add nothing: they do not tell how often they run, and kernels with few
    were slower than kernels with many. Local-memory operations in the code do count.
    """
    score = 1.0
    if base.text_sha256 == candidate.text_sha256:
        score = 0.1 if same_resources(base, candidate) else 0.5
    if m.tensor_generation(candidate.mix) < m.tensor_generation(base.mix) and candidate.mix:
        score += 100
    if newly_serialised:
        score += 100
    if base.occupancy and candidate.occupancy:
        if base.occupancy.ratio > 0:
            score += 60 * max(0.0, 1 - candidate.occupancy.ratio / base.occupancy.ratio)
    else:
        score += 5 * _growth(base.resources.registers, candidate.resources.registers)
    score += 8 * _growth(base.local_ops, candidate.local_ops)
    score += 10 * _growth(base.instructions, candidate.instructions)
    if base.mix and candidate.mix:
        score += _mix_suspicion(base, candidate)
    return round(score, 3)


def _mix_suspicion(base: KernelCode, candidate: KernelCode) -> float:
    score = sum(40.0 for word, _ in _COPIES if m.count(base.mix, word) and not m.count(candidate.mix, word))
    for space, direction in m.spaces(base.mix):
        one, two = (m.mean_width(k.mix, space, direction) for k in (base, candidate))
        if one and two and space != "local":
            score += 30 * max(0.0, log2(one / two))
    score += 20 * _growth(m.memory(base.mix), m.memory(candidate.mix))
    return score + 4 * _growth(m.count(base.mix, "barrier", "mbarrier"), m.count(candidate.mix, "barrier", "mbarrier"))


_COPIES = (("tma", "TMA copies"), ("async", "cp.async copies"))  # word of the class, what people call them


def _growth(base: int, candidate: int) -> float:
    return max(0.0, log2((1 + candidate) / (1 + base)))


def _number(key: str, words: str, base: Optional[int], candidate: Optional[int]) -> List[Change]:
    if base is None or candidate is None or base == candidate:
        return []
    return [Change(key, base, candidate, f"{words} {base} -> {candidate}")]


def _largest_block(base: KernelCode, candidate: KernelCode) -> List[Change]:
    """Registers bound the threads a block may have; said where that bound moved and the launch is not known."""
    if base.occupancy or candidate.occupancy:
        return []
    one, two = (most_threads(k.arch, k.resources.registers) for k in (base, candidate))
    return _number("largest_block", "threads that the registers allow a block", one, two)


def _tensor(base: KernelCode, candidate: KernelCode) -> List[Change]:
    one, two = m.tensor_kinds(base.mix), m.tensor_kinds(candidate.mix)
    if one == two or not base.mix or not candidate.mix:
        return []
    said = [", ".join(f"{kind} x {n}" for kind, n in sorted(kinds.items())) or "none" for kinds in (one, two)]
    old, new = m.tensor_generation(base.mix), m.tensor_generation(candidate.mix)
    remark = ": an older kind" if 0 < new < old else ": no tensor cores any more" if new < old else ""
    return [Change("tensor", said[0], said[1], f"tensor-core instructions {said[0]} -> {said[1]}{remark}")]


def _memory(base: KernelCode, candidate: KernelCode) -> List[Change]:
    if not base.mix or not candidate.mix:
        return []
    out = []
    for space, direction in m.spaces(base.mix, candidate.mix):
        one, two = (m.widths(k.mix, space, direction) or "none" for k in (base, candidate))
        if one != two and space != "local":
            out.append(Change(f"{space}_{direction}", one, two, f"{space} {direction}s {one} -> {two}"))
    for word, name in _COPIES:
        before, after = m.count(base.mix, word), m.count(candidate.mix, word)
        if before and not after:
            out.append(Change(word, before, after, f"{name} {before} -> 0: lost"))
    return out


def _notes(base: Sequence[Note], candidate: Sequence[Note]) -> List[Change]:
    one, two = ({n.code or n.text: n for n in notes} for notes in (base, candidate))
    out = [Change(f"note:{key}", None, two[key].text, f"ptxas says now: {_said(two[key])}")
           for key in sorted(two.keys() - one.keys())]
    return out + [Change(f"note:{key}", one[key].text, None, f"ptxas no longer says: {_said(one[key])}")
                  for key in sorted(one.keys() - two.keys())]


def _said(note: Note) -> str:
    text = note.cause or note.text
    return f"{note.code} {text}" if note.code and note.code not in text else text


def _limits(base: KernelCode, candidate: KernelCode) -> List[Change]:
    one, two = ({(x.arch, x.resource): x for x in k.limits} for k in (base, candidate))
    gained = [two[key] for key in sorted(two.keys() - one.keys())]
    lost = [one[key] for key in sorted(one.keys() - two.keys())]
    return ([Change("limit", None, x.asked, f"cannot launch on {x.arch}: {x.text}") for x in gained]
            + [Change("limit", x.asked, None, f"can launch on {x.arch} again") for x in lost])
