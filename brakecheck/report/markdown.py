"""A comment for a pull request: the verdict, a table of at most fifteen rows, the rest folded. Under 60 KB always
(GitHub refuses comments of more than 65,536 characters)."""

from __future__ import annotations

import re
from typing import List, Sequence

from ..model import Comparison, Verdict
from . import rows as r
from . import words

LIMIT = 60_000  # bytes of UTF-8
ROWS = 15
MARKUP = re.compile(r"[\\`*\[\]<>|~&]|(?<!\w)_|_(?!\w)|#(?=\d)")
SIGNS = {Verdict.GO: "🟢", Verdict.HOLD: "🟡", Verdict.BRAKE: "🔴", Verdict.WITHHELD: "🔵"}


def render(comparison: Comparison) -> str:
    """The comment. What has no room is counted, and named as far as there is room, the broken first."""
    static, measured = r.split(comparison)
    notable = sorted([*r.notable(static), *r.notable(measured)], key=lambda row: r.weight(row.delta))
    head = [
        f"## {SIGNS[comparison.verdict]} {comparison.verdict.value}: {words.MEANING[comparison.verdict]}",
        f"**{text(words.headline(comparison), 1000)}**",
        f"{text(words.title(comparison), 300)} · {text(words.coverage(comparison))}",
    ]
    if words.rules(comparison):
        head.append(f"Policy {text(words.rules(comparison))}")
    head += [f"Warning: {text(one)}" for one in words.warnings(comparison)[:5]]
    steps = r.verdicts(comparison)
    if steps:
        head.append("Moving to " + ", ".join(f"{text(label)}: **{verdict}**" for label, verdict in steps))
    if notable:
        head.append(_table(comparison, notable[:ROWS]))
    if len(notable) > ROWS:
        head.append(f"{len(notable) - ROWS} more below and in the HTML report.")
    fixed = "\n\n".join(head)
    parts = [_reasons(comparison), _advice(comparison), _messages(notable), _stacks(comparison)]
    room = LIMIT - len(fixed.encode()) - 200
    names = _names(comparison, notable[ROWS:], room * 2 // 3)
    room -= len(names.encode())
    kept = [fixed, *([names] if names else [])]
    for part in parts:
        length = len(part.encode()) + 2
        if part and length <= room:
            kept.append(part)
            room -= length
    return "\n\n".join(kept) + "\n"


def text(value: object, limit: int = 400) -> str:
    """One line in which nothing is markup, a mention or HTML."""
    line = MARKUP.sub(lambda match: f"&#{ord(match[0])};", words.one_line(value, limit))
    return line.replace("@", "@\u2060").replace("://", ":\u2060//")


def code(value: object, limit: int = 200) -> str:
    """A code span that holds anything, inside a table too."""
    line = words.one_line(value, limit).replace("|", "\\|")
    ticks = "`"
    while ticks in line:
        ticks += "`"
    pad = " " if "`" in line else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def _table(comparison: Comparison, rows: Sequence[r.Row]) -> str:
    labels, steps = words.short_labels(comparison), len(comparison.arms) > 2
    measured = any(row.delta.ratio is not None for row in rows)
    columns = ["State", "Kernel" if words.noun(comparison) == "kernel" else "Case", "Arch", "What changed"]
    columns += (["Ratio"] if measured else []) + (["Since"] if steps else []) + ["By"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        delta = row.delta
        name = code(row.name) if delta.evidence == "static" else f"{text(delta.operator)} {code(row.name)}"
        cells = [f"{words.GLYPHS[row.state]} **{row.state}**", name, text(row.arch_text),
                 text(row.changes(3), 300)]
        if measured:
            cells.append(f"{words.percent(delta.ratio)} {text(words.interval(delta.low, delta.high))}".strip())
        if steps:
            cells.append(text(words.reached(delta, labels).removeprefix("since ")))
        cells.append(text(delta.component or words.UNKNOWN))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{text(summary)}</summary>\n\n{body}\n\n</details>"


def _names(comparison: Comparison, rows: Sequence[r.Row], room: int) -> str:
    """The rows that the table has no room for, one short line each."""
    labels, steps = words.short_labels(comparison), len(comparison.arms) > 2
    lines: List[str] = []
    left = room - 300
    for row in rows:
        changed = text(row.changes(2), 120)
        where = f"{row.arch_text}, {words.reached(row.delta, labels)}" if steps else row.arch_text
        line = f"- {row.state}: {code(row.full_name, 160)} ({text(where, 120)}) {changed}"
        if len(line.encode()) + 1 > left:
            lines.append(f"- and {len(rows) - len(lines)} more, in the HTML report")
            break
        left -= len(line.encode()) + 1
        lines.append(line)
    return _folded(f"{len(rows)} more", "\n".join(lines)) if rows else ""


def _reasons(comparison: Comparison) -> str:
    lines = [f"- {text(words.sentence(reason.text))} ({code(reason.code)})" for reason in comparison.reasons[:50]]
    return _folded("Why", "\n".join(lines)) if lines else ""


def _advice(comparison: Comparison) -> str:
    lines = []
    for cause in comparison.causes[:20]:
        share = "" if cause.share is None else f" ({words.share(cause.share)})"
        lines.append(f"- cause: **{text(cause.component)}**{share}: {text(words.sentence('; '.join(cause.evidence)))}. "
                     f"Refuted if: {text(cause.refute)}")
    for item in comparison.mitigations[:20]:
        guard = f". Not when: {text(item.guard)}" if item.guard else ""
        lines.append(f"- mitigation: {text(item.action)} ({words.proof(item)}){guard}")
    return _folded("Causes and mitigations", "\n".join(lines)) if lines else ""


def _messages(rows: Sequence[r.Row]) -> str:
    blocks = []
    for row in [row for row in rows if row.state == "broken" and r.message(row.delta)][:5]:
        said = (r.message(row.delta) or "").strip()[:3000]
        fence = "```"
        while fence in said:
            fence += "`"
        blocks.append(f"{code(row.full_name)} ({text(row.arch_text)})\n\n{fence}text\n{said}\n{fence}")
    return _folded("Messages of what broke", "\n\n".join(blocks)) if blocks else ""


def _stacks(comparison: Comparison) -> str:
    arms = comparison.arms[:14]
    names = sorted({c.name for arm in arms for c in arm.stack.components})
    if not names:
        return ""
    labels = words.long_labels(comparison)
    table = [["Component", *(labels[arm.name] for arm in arms)]]
    for name in names[:60]:
        found = [arm.stack.component(name) for arm in arms]
        table.append([name, *(c.version if c else words.UNKNOWN for c in found)])
    lines = ["| " + " | ".join(text(cell, 80) for cell in line) + " |" for line in table]
    lines.insert(1, "|" + "---|" * len(table[0]))
    return _folded("Stacks", "\n".join(lines))
