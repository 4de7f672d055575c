"""Shared phrasing, so that terminal, HTML, Markdown and JUnit say the same thing in the same words.

Units: sizes in bytes, times in seconds, ratios candidate / base (above 1 is slower or larger). Every function takes
None for what is unknown and returns UNKNOWN for it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from ..model import Comparison, Delta, Mitigation, Reason, State, Verdict, encode
from ..verdict.policy import Policy

UNKNOWN = "–"
MEANING = {
    Verdict.GO: "safe to move",
    Verdict.HOLD: "wait before you move",
    Verdict.BRAKE: "do not move",
    Verdict.WITHHELD: "the evidence is too thin to decide",
}
GLYPHS = {
    "broken": "✕", "slower": "▲", "changed": "≠", "undecided": "?", "missing": "∅", "fixed": "✓", "new": "+",
    "faster": "▼", "same": "=",
}
EXPLAIN = {
    "broken": "worked on the base, does not on the candidate",
    "slower": "slower by more than the margin",
    "changed": "other machine code: only a measurement can judge it",
    "undecided": "the interval does not clear the margin",
    "missing": "could not be compared",
    "fixed": "did not work on the base, does on the candidate",
    "new": "not there on the base",
    "faster": "faster by more than the margin",
    "same": "no difference that matters",
}
RESOURCES: Tuple[Tuple[str, str, str], ...] = (
    # key in model.Resources, what people call it, unit
    ("registers", "registers a thread", "count"),
    ("stack", "stack a thread", "bytes"),
    ("spill_stores", "spill stores a thread", "bytes"),
    ("spill_loads", "spill loads a thread", "bytes"),
    ("shared", "static shared memory a block", "bytes"),
    ("barriers", "barriers", "count"),
    ("constant", "constant memory", "bytes"),
    ("code", "code size", "bytes"),
    ("max_threads", "most threads a block", "count"),
)
# C0 and C1 controls, surrogates, bidirectional overrides: they move a cursor, break XML or reorder what is read.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


def plain(text: object) -> str:
    """Text without control characters: names and compiler messages are input of strangers. Keeps newline and tab."""
    return _CONTROLS.sub("\ufffd", str(text).replace("\r\n", "\n"))


def one_line(text: object, limit: int = 0) -> str:
    """plain() with runs of white space as one blank, and an ellipsis after `limit` characters (0: no limit)."""
    line = " ".join(plain(text).split())
    return line if not limit or len(line) <= limit else line[: limit - 1].rstrip() + "…"


def sentence(text: object, limit: int = 0) -> str:
    """one_line() of prose, with arrows as arrows. Not for names: operator-> is one."""
    return one_line(text, limit).replace("->", "→")


def plural(count: int, noun: str, many: Optional[str] = None) -> str:
    """1 kernel, 12 kernels, 1,204 cases."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def listed(items: Sequence[str], limit: int = 0) -> str:
    """a, b and c; with a limit: a, b and 3 more."""
    shown = list(items)
    if limit and len(shown) > limit:
        shown = [*shown[:limit], f"{len(items) - limit} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def size(count: Optional[float]) -> str:
    """512 B, 48 KiB, 1.5 GiB."""
    if count is None:
        return UNKNOWN
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    number = f"{value:.0f}" if units[0] == "B" or abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {units[0]}"


def duration(seconds: Optional[float]) -> str:
    """Three significant digits: 12.3 µs, 4.56 ms."""
    if seconds is None:
        return UNKNOWN
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def rate(value: float, unit: str) -> str:
    """2.5 TFLOP/s: SI prefix before the unit."""
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def percent(ratio: Optional[float], digits: int = 1) -> str:
    """A ratio as a change: +6.0 %, −1.2 %; from a factor of two on as the factor: 2.31x."""
    if ratio is None:
        return UNKNOWN
    if ratio >= 2 or ratio <= 0.5:
        return f"{ratio:.2f}x"
    change = round((ratio - 1) * 100, digits) + 0.0
    sign = "−" if change < 0 else "+" if change > 0 else ""
    return f"{sign}{abs(change):.{digits}f} %"


def state_counts(comparison: Comparison) -> Dict[str, int]:
    """The coverage's counts of states, without those of 0, in the order in which they matter."""
    counts = comparison.coverage
    return {state: counts[state] for state in GLYPHS if counts.get(state)}


def share(fraction: float) -> str:
    """84 % of 0.84."""
    return f"{fraction * 100:.0f} %"


def error(relative: Optional[float], wrong: int = 0) -> str:
    """1.2e-03, or how many results are wrong."""
    if wrong:
        return f"{wrong} wrong"
    return UNKNOWN if relative is None else f"{relative:.1e}"


def interval(low: Optional[float], high: Optional[float]) -> str:
    """[+5.4 %, +6.6 %]."""
    return "" if low is None or high is None else f"[{percent(low)}, {percent(high)}]"


def number(value: object) -> str:
    """A count with thousands separated, a fraction with four digits, anything else as it is."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else UNKNOWN
    return one_line(value)


def quantity(value: Optional[float], unit: str) -> str:
    return size(value) if unit == "bytes" and value is not None and value >= 1024 else number(value)


def sha(digest: Optional[str]) -> str:
    """First twelve digits, as git shows them: enough to tell by eye."""
    return digest.removeprefix("sha256:")[:12] if digest else UNKNOWN


def state(delta: Delta) -> str:
    """The word for a delta's state. What static evidence cannot judge is `changed`, not `undecided`."""
    if delta.evidence == "static" and delta.state is State.UNDECIDED:
        return "changed"
    return delta.state.value


def short_labels(comparison: Comparison) -> Dict[str, str]:
    """Arm name -> the shortest label that still tells the arms apart: 12.9.1 rather than cuda 12.9.1."""
    names = [arm.stack.name for arm in comparison.arms]
    words = {name.split(" ", 1)[0] for name in names}
    if len(words) == 1 and all(" " in name for name in names):
        names = [name.split(" ", 1)[1] for name in names]
    return _distinct(comparison, names)


def long_labels(comparison: Comparison) -> Dict[str, str]:
    """Arm name -> the stack's name, with the implementation or the arm's name where that alone tells arms apart."""
    return _distinct(comparison, [arm.stack.name for arm in comparison.arms])


def _distinct(comparison: Comparison, names: List[str]) -> Dict[str, str]:
    arms = comparison.arms
    if len({arm.implementation for arm in arms}) > 1:
        names = [f"{name} {arm.implementation}" for name, arm in zip(names, arms)]
    if len(set(names)) < len(names):
        names = [arm.name if name in arm.name else f"{name} ({arm.name})" for name, arm in zip(names, arms)]
    return {arm.name: plain(name) for arm, name in zip(arms, names)}


def title(comparison: Comparison) -> str:
    """cuda 12.9.1 -> cuda 13.2.0, with the count of the releases between."""
    labels = list(long_labels(comparison).values())
    if len(labels) > 2:
        return f"{labels[0]} → {labels[-1]} ({plural(len(labels), 'stack')})"
    return " → ".join(labels)


def since(step: Tuple[str, str], same: Sequence[str], labels: Dict[str, str]) -> str:
    """since 13.0, the same in 13.2 and 13.5 (of a step that is the same in later releases)."""
    text = f"since {labels.get(step[1], step[1])}"
    if same:
        text += f", the same in {listed([labels.get(s, s) for s in same], 3)}"
    return text


def reached(delta: Delta, labels: Dict[str, str]) -> str:
    """Which of several candidates a delta is about. Of code, since which release it is so; each candidate was timed
    against the base for itself: → 13.2."""
    if delta.evidence == "static":
        return since(delta.step, delta.since, labels)
    return f"→ {labels.get(delta.step[1], delta.step[1])}"


def changes(delta: Delta, limit: int = 0) -> str:
    """What changed: registers 40 -> 168; local-memory operations 0 -> 64. Falls back to the delta's own sentence, which
    comes first where something was measured and has no ratio: it then says what happened."""
    parts = [sentence(c.text or f"{c.what} {number(c.base)} -> {number(c.candidate)}") for c in delta.changes]
    if parts and delta.evidence != "static" and delta.ratio is None:
        parts = [sentence(delta.text or delta.reason), *parts]
    if not parts:
        return sentence(delta.text or delta.reason)
    if limit and len(parts) > limit:
        parts = [*parts[:limit], f"{len(parts) - limit} more"]
    return "; ".join(parts)


def headline(comparison: Comparison) -> str:
    """The headline without the verdict's word in front, which stands beside it everywhere."""
    return one_line(comparison.headline).removeprefix(f"{comparison.verdict.value}:").lstrip()


def reasons(comparison: Comparison) -> List[Reason]:
    """The reasons that say more than the headline and the table: not those that only list what is to be measured."""
    return [reason for reason in comparison.reasons
            if reason.code != "measure" and reason.text.rstrip(".") not in comparison.headline]


def coverage(comparison: Comparison) -> str:
    """60 compared: 46 same, 12 changed, 1 broken, 1 missing."""
    counts = dict(comparison.coverage)
    compared = counts.pop("compared", None)
    parts = [f"{counts[k]:,} {k}" for k in ordered(counts) if counts[k]]
    head = "" if compared is None else f"{compared:,} compared"
    if comparison.deltas and noun(comparison) == "case":  # all of them, and not only those that times decided
        head = plural(sum(n for k, n in counts.items() if k != "ignored"), "case")
    return ": ".join(p for p in (head, ", ".join(parts)) if p) or "nothing was compared"


def noise(comparison: Comparison) -> str:
    """two visits of one arm differ by 0.46 %; 4 to 9 pairs a case. Empty where nothing was measured."""
    floor = comparison.environment.get("noise_floor")
    pairs = [min(d.base["blocks"], d.candidate["blocks"]) for d in comparison.deltas
             if d.base.get("blocks") and d.candidate.get("blocks")]
    parts = [f"two visits of one arm differ by {floor:.2%}".replace("%", " %")] if isinstance(floor, float) else []
    if pairs:
        low, high = min(pairs), max(pairs)
        parts.append(f"{plural(low, 'pair')} a case" if low == high else f"{low} to {high} pairs a case")
    return "; ".join(parts)


def rules(comparison: Comparison) -> str:
    """brakecheck.toml: margin = 0.05; empty where no policy file applied. A GO by other rules than the defaults, which
    may have lain in the folder by chance, must say so."""
    told = comparison.environment.get("policy") or {}
    if not told.get("source"):
        return ""
    usual = encode(Policy())
    changed = [f"{name} = {json.dumps(value)}" for table in usual for name, value in told.get(table, {}).items()
               if value != usual[table].get(name)]
    return f"{told['source']}: {', '.join(changed) or 'the defaults'}"


def warnings(comparison: Comparison) -> List[str]:
    """What the runs behind it warned of, such as libraries of two releases in one stack."""
    return [sentence(text, 300) for text in comparison.environment.get("warnings") or ()]


def ordered(names: Iterable[str]) -> List[str]:
    """State words in the order in which they matter; unknown words last."""
    known = list(GLYPHS)
    return sorted(names, key=lambda n: (known.index(n) if n in known else len(known), n))


def proof(item: Mitigation) -> str:
    """not measured; measured; wins back 97 %, measured."""
    if not item.measured:
        return "not measured"
    return "measured" if item.recovers is None else f"wins back {share(item.recovers)}, measured"


def noun(comparison: Comparison) -> str:
    """What the deltas are about: kernels when the evidence is static, cases when it is measured."""
    return "kernel" if all(d.evidence == "static" for d in comparison.deltas) else "case"
