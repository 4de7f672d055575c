"""One HTML file that holds all of a comparison: no request leaves the page, no script is needed to read it.

Its size is bounded (about 3 MB): tables, details and SASS each have a budget that is spent in the order in which
rows matter, and the page says what had no room.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from ..model import Comparison, Delta
from . import plots, words
from . import rows as r

# (kind, line of the base, line of the candidate), as evidence/sidebyside.py aligns them; the kind may be given as its
# sign. "same" is equal; "operands" has the same opcode with other registers or constants.
SassRow = Tuple[str, Optional[str], Optional[str]]
Sass = Callable[[Delta], Optional[Sequence[SassRow]]]

LEAD = 6                    # rows shown in words at the top
REASONS = 200
TABLE_ROWS = 1500           # rows of a table
MATRIX_CELLS = 8000
DETAIL_BYTES = 1_500_000    # of all details, SASS among them
SASS_KERNELS = 20
SASS_ROWS = 600             # of one kernel, without what is folded away
FOLD, CONTEXT = 8, 3        # equal stretches longer than FOLD are folded, but for CONTEXT lines at each end
MESSAGE_CHARS = 8000
SASS_KINDS = {"same": ("eq", "="), "operands": ("op", "~"), "opcode": ("di", "≠"), "removed": ("rm", "-"),
              "added": ("ad", "+"), "=": ("eq", "="), "~": ("di", "~"), "-": ("rm", "-"), "+": ("ad", "+")}
HASHES = (("ptx_sha256", "PTX"), ("code_sha256", "machine code"), ("text_sha256", "SASS without scheduling"),
          ("cubin_sha256", "cubin file"))


def render(comparison: Comparison, sass: Optional[Sass] = None) -> str:
    """The page. sass(delta) gives the SASS of both sides, aligned, or None where there is none to show."""
    env = _environment()
    static, measured = r.split(comparison)
    ratios = [row.delta.ratio for row in measured if row.delta.ratio]
    ends = [end for row in measured for end in (row.delta.low, row.delta.high) if end]
    scale = plots.Scale.around([*ratios, *ends], r.margin(comparison))
    details, without = _details(env, [*r.notable(static), *r.notable(measured)], sass, comparison)
    counts = words.state_counts(comparison)
    columns = (len(comparison.arms) - 1) * len({d.arch for d in comparison.deltas})
    ordered = sorted([*r.notable(static), *r.notable(measured)], key=lambda row: r.weight(row.delta))
    fits = {"static": static[:TABLE_ROWS], "static_more": max(0, len(static) - TABLE_ROWS),
            "measured": measured[:TABLE_ROWS], "measured_more": max(0, len(measured) - TABLE_ROWS)}
    labels, coverage = words.short_labels(comparison), words.coverage(comparison)
    return env.get_template("report.html.j2").render(
        c=comparison, many=len(comparison.arms) > 2, labels=labels, long=words.long_labels(comparison),
        title=words.title(comparison), meaning=words.MEANING[comparison.verdict], headline=words.headline(comparison),
        verdicts=r.verdicts(comparison), reasons=words.reasons(comparison)[:REASONS], coverage=coverage, counts=counts,
        compared=comparison.coverage.get("compared"), explain=words.EXPLAIN, glyphs=words.GLYPHS,
        bar=Markup(plots.stack(list(counts.items()), coverage)) if counts else "", noun=words.noun(comparison),
        lead=_lead(ordered), lead_arm=r.lead(comparison), notable=len(ordered), **fits,
        details=details, without=without, linked={number for number, _ in details},
        matrix=r.matrix(comparison, max(20, MATRIX_CELLS // max(1, columns))) if r.notable(static) else None,
        operators=r.by_operator(measured), has=_columns(measured), metric=_metric(measured), scale=scale,
        beyond=sum(not scale.low <= ratio <= scale.high for ratio in ratios),
        roofline=_roofline(comparison, measured), strips=_strips(comparison), components=_components(comparison),
        facts=list(_flat(comparison.environment, skip={"telemetry", "verdicts"})),
        version=words.one_line(comparison.environment.get("brakecheck", "")))


def _lead(rows: Sequence[r.Row]) -> List[r.Row]:
    """The first rows, each kernel or case once."""
    first: Dict[Tuple[str, str], r.Row] = {}
    for row in rows:
        first.setdefault((row.delta.operator, row.delta.case), row)
    return list(first.values())[:LEAD]


@functools.lru_cache(maxsize=1)  # compiles the templates once a process
def _environment() -> Environment:
    env = Environment(loader=PackageLoader("brakecheck.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    env.filters.update(one=words.one_line, say=words.sentence, size=words.size, percent=words.percent,
                       duration=words.duration, share=words.share, error=words.error)
    env.globals.update(
        proof=words.proof, since=words.since, reached=words.reached, plural=words.plural, interval=words.interval,
        memory_ratio=r.memory_ratio, memory_of=r.memory_of, part=r.part, seconds=r.seconds, rel_error=r.error,
        wrong=r.wrong,
        forest_row=lambda *a: Markup(plots.forest_row(*a)), forest_axis=lambda s: Markup(plots.forest_axis(s)))
    return env


class Detail(NamedTuple):
    number: int
    text: Markup


def _details(env: Environment, rows: Sequence[r.Row], sass: Optional[Sass],
             comparison: Comparison) -> Tuple[List[Detail], int]:
    """Details of the rows, in order, while the budget lasts; and how many rows had to go without."""
    template = env.get_template("detail.html.j2")
    out: List[Detail] = []
    left, kernels = DETAIL_BYTES, SASS_KERNELS
    labels, many = words.short_labels(comparison), len(comparison.arms) > 2
    for row in rows:
        delta = row.delta
        said = r.message(delta) or ""
        lines = sass(delta) if sass and kernels and delta.evidence == "static" else None
        kernels -= bool(lines)
        text = template.render(
            row=row, delta=delta, labels=labels, many=many, resources=_resources(delta), mix=_mix(delta),
            notes=_notes(delta), hashes=_hashes(delta), facts=_facts(delta),
            said=said[:MESSAGE_CHARS], cut=len(said) > MESSAGE_CHARS,
            sass=_sass(lines) if lines else "", no_sass=bool(sass and not lines and not kernels))
        length = len(text.encode())
        if length > left:
            break
        left -= length
        out.append(Detail(row.number, Markup(text)))
    return out, len(rows) - len(out)


class Pair(NamedTuple):
    """One line of a side-by-side table: what it is, both values as text, whether they differ, and the two bars."""

    what: str
    base: str
    candidate: str
    differs: bool
    bar: Markup = Markup("")


def _resources(delta: Delta) -> List[Pair]:
    out = []
    extra = (("instructions", "instructions", "count"), ("local_ops", "local-memory operations", "count"))
    for key, what, unit in (*words.RESOURCES, *extra):
        base, candidate = r.resource(delta.base, key), r.resource(delta.candidate, key)
        if base is not None or candidate is not None:
            out.append(Pair(what, words.quantity(base, unit), words.quantity(candidate, unit), base != candidate))
    for what, text in (("theoretical occupancy", _occupancy), ("limited by", _limiter)):
        shown = [text(s.get("occupancy")) for s in (delta.base, delta.candidate)]
        if set(shown) != {words.UNKNOWN}:
            out.append(Pair(what, shown[0], shown[1], shown[0] != shown[1]))
    for key, what in (("frontend_seconds", "front end time"), ("ptxas_seconds", "ptxas time")):
        base, candidate = r.resource(delta.base, key), r.resource(delta.candidate, key)
        if base is not None or candidate is not None:
            out.append(Pair(what, words.duration(base), words.duration(candidate), False))
    return out


def _occupancy(side: Any) -> str:
    if not isinstance(side, Mapping) or not side.get("max_warps") or side.get("warps") is None:
        return words.UNKNOWN
    return words.share(side["warps"] / side["max_warps"])


def _limiter(side: Any) -> str:
    return words.one_line(side["limiter"]) if isinstance(side, Mapping) and side.get("limiter") else words.UNKNOWN


def _mix(delta: Delta) -> List[Pair]:
    """Instruction classes that either side has, the largest difference first."""
    base, candidate = dict(delta.base.get("mix") or {}), dict(delta.candidate.get("mix") or {})
    counts = [(str(k), base.get(k, 0), candidate.get(k, 0)) for k in {**base, **candidate}]
    counts = [(k, b, c) for k, b, c in counts if b or c]
    most = max([1, *(max(b, c) for _, b, c in counts)])
    counts.sort(key=lambda item: (-abs(item[2] - item[1]), -max(item[1:]), item[0]))
    both = bool(base and candidate)
    return [Pair(words.one_line(k), words.number(b if base else None), words.number(c if candidate else None),
                 both and b != c, Markup(plots.pair(b, c, most))) for k, b, c in counts[:40]]


def _notes(delta: Delta) -> List[Tuple[str, Mapping[str, Any]]]:
    """(which side, note): a note of both sides once; limits of a launch as notes."""
    found: Dict[str, Tuple[List[str], Mapping[str, Any]]] = {}
    for side, evidence in (("base", delta.base), ("candidate", delta.candidate)):
        for note in [*(evidence.get("notes") or ()), *(evidence.get("limits") or ())]:
            if isinstance(note, Mapping) and note.get("text"):
                found.setdefault(str(note["text"]), ([], note))[0].append(side)
    return [("both" if len(set(sides)) == 2 else sides[0], note) for sides, note in list(found.values())[:30]]


def _hashes(delta: Delta) -> List[Pair]:
    out = []
    for key, what in HASHES:
        base, candidate = delta.base.get(key), delta.candidate.get(key)
        if base or candidate:
            out.append(Pair(what, words.sha(base), words.sha(candidate), base != candidate))
    return out


def _facts(delta: Delta) -> List[Pair]:
    """All that both sides of a measured delta recorded."""
    if delta.evidence == "static":
        return []
    base, candidate = dict(_flat(delta.base, {"message"})), dict(_flat(delta.candidate, {"message"}))
    keys = list({**base, **candidate})[:60]
    return [Pair(k, base.get(k, words.UNKNOWN), candidate.get(k, words.UNKNOWN), base.get(k) != candidate.get(k))
            for k in keys]


def _flat(data: Mapping[str, Any], skip: Iterable[str] = (), prefix: str = "") -> Iterable[Tuple[str, str]]:
    """(dotted name, text) of what a record holds; long lists as their length."""
    for key, value in data.items():
        if key in skip:
            continue
        name = words.one_line(f"{prefix}{key}", 80)
        if isinstance(value, Mapping):
            yield from _flat(value, (), f"{name}.")
        elif isinstance(value, (list, tuple)):
            short = len(value) <= 8 and all(isinstance(v, (str, int, float, bool)) for v in value)
            yield name, ", ".join(map(words.number, value)) if short else words.plural(len(value), "value")
        else:
            yield name, words.number(value)[:400]


def _sass(rows: Sequence[SassRow]) -> Markup:
    """Two columns; an equal stretch is folded into one line that opens."""
    out: List[str] = []
    left, start = SASS_ROWS, 0
    while start < len(rows) and left > 0:
        end = start
        while end < len(rows) and rows[end][0] in ("same", "="):
            end += 1
        length = end - start
        if length > FOLD:
            keep_head, keep_tail = (CONTEXT if start else 0), (CONTEXT if end < len(rows) else 0)
            out += map(_sass_row, rows[start:start + keep_head])
            hidden = rows[start + keep_head:end - keep_tail][:200]
            count = length - keep_head - keep_tail
            more = f"\n… {count - len(hidden)} more" if count > len(hidden) else ""
            body = escape("\n".join(words.one_line(line or "", 160) for _, line, _ in hidden) + more)
            out.append(f"<details><summary>{words.plural(count, 'equal line')}</summary><pre>{body}</pre></details>")
            out += map(_sass_row, rows[end - keep_tail:end])
            left -= keep_head + keep_tail + len(hidden) // 2
            start = end
        else:
            end = max(end, start + 1)
            out += map(_sass_row, rows[start:end])
            left -= end - start
            start = end
    if start < len(rows):
        out.append(f"<p>{words.plural(len(rows) - start, 'more line')} not shown</p>")
    return Markup("".join(out))


def _sass_row(row: SassRow) -> str:
    css, sign = SASS_KINDS.get(row[0], ("di", "?"))
    base, candidate = (escape(words.one_line(line or "", 160)) for line in row[1:])
    return f'<div class="{css}"><i>{sign}</i><code>{base}</code><code>{candidate}</code></div>'


def _columns(rows: Sequence[r.Row]) -> Dict[str, bool]:
    """Which columns of the measured table have anything to show."""
    deltas = [row.delta for row in rows]
    sides = [s for d in deltas for s in (d.base, d.candidate)]
    return {
        "ratio": any(d.ratio is not None for d in deltas),
        "time": any(s.get("median_us") is not None for s in sides),
        "memory": any(r.memory_ratio(d) is not None for d in deltas),
        "numerics": any(r.error(s) is not None or r.wrong(s) for s in sides),
        "arch": len({d.arch for d in deltas}) > 1,
    }


def _metric(rows: Sequence[r.Row]) -> str:
    names = dict.fromkeys(words.one_line(row.delta.metric).replace("_", " ") for row in rows if row.delta.metric)
    return words.listed(list(names), 4) or "the metric"


def _roofline(comparison: Comparison, rows: Sequence[r.Row]) -> Markup:
    points = []
    for delta in (row.delta for row in rows):
        base, candidate = r.achieved(delta.base), r.achieved(delta.candidate)
        side = delta.candidate if candidate else delta.base
        size = r.part(side, "work", "bytes")
        if size and (base or candidate):
            name = f"{delta.operator} {delta.case}"
            points.append(plots.Point(name, r.part(side, "work", "flops") / size, base, candidate))
    roof = [r.part(comparison.environment, "ceilings", key) for key in ("flops", "bandwidth")]
    return Markup(plots.roofline(points, *roof)) if points else Markup("")


def _strips(comparison: Comparison) -> List[Tuple[str, Markup]]:
    series = comparison.environment.get("telemetry") or []
    drawn = [(name, plots.strip(series, key, unit)) for key, name, unit in (
        ("clock", "SM clock, MHz", "MHz"), ("temperature", "Temperature, °C", "degrees Celsius"))]
    return [(name, Markup(svg)) for name, svg in drawn if svg]


def _components(comparison: Comparison) -> List[Tuple[str, List[str], bool]]:
    """(component, version in each arm, whether they differ), those that differ first."""
    arms = comparison.arms
    names = dict.fromkeys(c.name for arm in arms for c in arm.stack.components)
    out = []
    for name in names:
        found = [arm.stack.component(name) for arm in arms]
        versions = [words.one_line(c.version, 60) if c else words.UNKNOWN for c in found]
        out.append((words.one_line(name), versions, len(set(versions)) > 1))
    return sorted(out, key=lambda item: not item[2])
