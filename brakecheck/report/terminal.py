"""The comparison in a terminal: verdict, what changed, what to do, one line of coverage.

Colour is never alone: each state has its word and its sign. Names and messages are printed as text, never as markup
or control sequences. On a terminal that cannot show Unicode, signs become ASCII.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..model import Comparison, Verdict
from . import rows as r
from . import words

COLOURS = {Verdict.GO: "green", Verdict.HOLD: "yellow", Verdict.BRAKE: "red", Verdict.WITHHELD: "blue"}
STYLES = {"broken": "bold red", "slower": "red", "changed": "yellow", "undecided": "yellow", "missing": "magenta",
          "fixed": "green", "new": "cyan", "faster": "green", "same": "dim"}
ASCII = str.maketrans({"→": "->", "✕": "x", "▲": "^", "≠": "!", "∅": "0", "✓": "v", "▼": "v", "–": "-",
                       "−": "-", "…": "~", "·": "-", "•": "*", "×": "x", "µ": "u"})
WIDE = 110
REASONS = 5
BEHIND = 6  # changes of code shown behind measured times


def render(comparison: Comparison, console: Optional[Console] = None, limit: int = 20,
           report: str = "write one with --report FILE.html") -> None:
    """Prints the comparison. limit: rows of the table; `report` says where all of them are ("see report.html")."""
    console = console or Console()
    paint = _Paint(console)
    static, measured = r.split(comparison)
    shown: List[RenderableType] = [_verdict(comparison, paint)]
    if measured:
        shown.append(_operators(r.by_operator(measured), paint))
        if r.notable(measured):
            shown.append(_cases(comparison, r.notable(measured), paint, limit, report))
    if r.notable(static):  # what was measured comes first, and then a few of the changes behind it
        shown.append(_changes(comparison, r.notable(static), paint, min(limit, BEHIND) if measured else limit, report))
    shown += _messages([*static, *measured], paint)
    shown += _advice(comparison, paint)
    shown.append(paint("\nCoverage  ", "bold").append_text(paint(words.coverage(comparison))))
    if words.noise(comparison):
        shown.append(paint("Noise     ", "bold").append_text(paint(words.noise(comparison))))
    if words.rules(comparison):
        shown.append(paint("Policy    ", "bold").append_text(paint(words.rules(comparison))))
    shown += [paint("Warning   ", "bold").append_text(paint(text)) for text in words.warnings(comparison)]
    console.print(Group(*shown))


class _Paint:
    """Text in a style, made of characters that the console can show."""

    def __init__(self, console: Console) -> None:
        self.width = console.width
        self.ascii = console.options.ascii_only

    def __call__(self, text: object, style: str = "") -> Text:
        shown = words.plain(text)
        if self.ascii:
            shown = shown.translate(ASCII).encode("ascii", "replace").decode("ascii")
        return Text().append(shown, style)  # a span, so that text appended later does not inherit the style

    def state(self, state: str) -> Text:
        return self(f"{words.GLYPHS[state]} {state}", STYLES[state])


def _verdict(comparison: Comparison, paint: _Paint) -> Panel:
    colour = COLOURS[comparison.verdict]
    first = paint(f" {comparison.verdict.value} ", f"bold reverse {colour}")
    first.append_text(paint(f"  {words.MEANING[comparison.verdict]}", f"bold {colour}"))
    lines: List[RenderableType] = [first, Text(), paint(words.headline(comparison), "bold")]
    found = r.verdicts(comparison)
    if found:
        lines.append(paint(", ".join(f"{label} {verdict}" for label, verdict in found)))
    reasons = words.reasons(comparison)
    for reason in reasons[:REASONS]:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(paint("•", colour), paint(words.sentence(reason.text, 400)))
        lines.append(grid)
    if len(reasons) > REASONS:
        lines.append(paint(f"  {words.plural(len(reasons) - REASONS, 'more reason')} in the HTML report", "dim"))
    return Panel(Group(*lines), title=paint(words.title(comparison)), title_align="left", border_style=colour,
                 box=ROUNDED, padding=(1, 2))


def _changes(comparison: Comparison, rows: Sequence[r.Row], paint: _Paint, limit: int, report: str) -> RenderableType:
    labels, steps = words.short_labels(comparison), len(comparison.arms) > 2
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("State", no_wrap=True)
    if paint.width >= WIDE:
        table.add_column("Kernel", overflow="fold", ratio=4)
        table.add_column("Architecture", overflow="fold", ratio=2)
        table.add_column("What changed", overflow="fold", ratio=5)
        if steps:
            table.add_column("Since", overflow="fold", ratio=3)
        table.add_column("By", overflow="fold")
        table.expand = True
    else:
        table.add_column("Kernel and what changed", overflow="fold")
    for row in rows[:limit]:
        changed = words.one_line(row.changes(4), 240)
        since = words.since(row.delta.step, row.delta.since, labels).removeprefix("since ")
        component = words.one_line(row.delta.component or words.UNKNOWN)
        if paint.width >= WIDE:
            table.add_row(paint.state(row.state), paint(row.name), paint(row.arch_text, "dim"), paint(changed),
                          *([paint(since)] if steps else []), paint(component))
            continue
        small = [row.arch_text, f"by {component}" if row.delta.component else "", f"since {since}" if steps else ""]
        meta = paint("  " + " · ".join(part for part in small if part), "dim")
        table.add_row(paint.state(row.state), paint(row.name, "bold").append_text(meta))
        table.add_row("", paint(changed))
    return Group(_heading("What changed, the most suspicious first", paint), table, *_rest(rows, limit, paint, report))


def _operators(lines: Sequence[r.OperatorLine], paint: _Paint) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="bold")
    memory, error = (any(getattr(line, name) is not None for line in lines) for name in ("memory", "error"))
    table.add_column("Operator", overflow="fold")
    table.add_column("Worst", no_wrap=True)
    table.add_column("Cases", no_wrap=True)
    table.add_column("Ratio and interval", overflow="fold")
    for shown, name in ((memory, "Memory"), (error, "Error")):
        if shown:
            table.add_column(name, no_wrap=True, justify="right")
    for line in lines:
        state = line.worst.state
        table.add_row(paint(words.one_line(line.operator), "bold"), paint.state(state),
                      paint(f"{line.states[state]} of {line.cases}"), paint(_ratio(line.worst)),
                      *([paint(words.percent(line.memory))] if memory else []),
                      *([paint(words.error(line.error, line.wrong), "red" if line.wrong else "")] if error else []))
    return Group(_heading("Operators: the worst case of each, the most memory, the largest error", paint), table)


def _cases(comparison: Comparison, rows: Sequence[r.Row], paint: _Paint, limit: int, report: str) -> RenderableType:
    labels, many = words.short_labels(comparison), len(comparison.arms) > 2
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("State", no_wrap=True)
    table.add_column("Case", overflow="fold")
    table.add_column("Ratio and interval", overflow="fold")
    for row in rows[:limit]:
        name = paint(f"{words.one_line(row.delta.operator)} ", "dim").append_text(paint(row.name))
        if many:
            name.append_text(paint(f" → {labels.get(row.delta.step[1], row.delta.step[1])}", "dim"))
        note = words.one_line(row.delta.text or row.delta.reason, 160)
        cell = paint(_ratio(row)) if row.delta.ratio else paint(note)
        table.add_row(paint.state(row.state), name, cell)
    return Group(_heading("Cases that differ or could not be decided", paint), table,
                 *_rest(rows, limit, paint, report))


def _ratio(row: r.Row) -> str:
    delta = row.delta
    return f"{words.percent(delta.ratio)} {words.interval(delta.low, delta.high)}".strip()


def _rest(rows: Sequence[r.Row], limit: int, paint: _Paint, report: str) -> List[RenderableType]:
    """What the table has no room for: a count, but a broken one always by name."""
    hidden = rows[limit:]
    if not hidden:
        return []
    out: List[RenderableType] = []
    broken = [f"{row.full_name} ({row.arch_text})" for row in hidden if row.state == "broken"]
    if broken:
        out.append(paint("Also broken: ", "bold red").append_text(paint("; ".join(broken))))
    out.append(paint(f"{len(hidden)} more: all of them are in the HTML report ({report})", "dim"))
    return out


def _messages(rows: Sequence[r.Row], paint: _Paint, most: int = 3, lines: int = 6) -> List[RenderableType]:
    """The compilers' own words on what broke, shortened: the report has all of it."""
    first: Dict[str, r.Row] = {}
    for row in rows:
        text = r.message(row.delta) if row.state == "broken" else None
        if text:
            first.setdefault(text, row)
    out: List[RenderableType] = []
    for text, row in list(first.items())[:most]:
        every = text.strip().splitlines()
        shown = [words.one_line(line, 200) for line in every[:lines]]
        cut = [f"… {words.plural(len(every) - lines, 'more line')}"] if len(every) > lines else []
        out.append(_heading(f"Message for {row.full_name} ({row.arch_text})", paint))
        out.append(Padding(paint("\n".join([*shown, *cut]), "dim"), (0, 0, 0, 2)))
    return out


def _advice(comparison: Comparison, paint: _Paint) -> List[RenderableType]:
    out: List[RenderableType] = []
    if comparison.causes:
        out.append(_heading("Causes", paint))
    for cause in comparison.causes:
        share = "" if cause.share is None else f" ({words.share(cause.share)} of the change)"
        out.append(_item(f"{cause.component}{share}: {'; '.join(cause.evidence)}",
                         f"refuted if: {cause.refute}" if cause.refute else None, paint))
    if comparison.mitigations:
        out.append(_heading("Mitigations", paint))
    for item in comparison.mitigations:
        guard = f"not when: {item.guard}" if item.guard else None
        out.append(_item(f"{item.action} ({words.proof(item)})", guard, paint))
    return out


def _item(text: str, small: Optional[str], paint: _Paint) -> RenderableType:
    body = paint(words.sentence(text))
    if small:
        body.append_text(paint("\n" + words.one_line(small), "dim"))
    grid = Table.grid(padding=(0, 1))
    grid.add_row(paint(" •"), body)
    return grid


def _heading(text: str, paint: _Paint) -> Text:
    return paint("\n" + text, "bold")
