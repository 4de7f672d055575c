"""Inline SVG, written by hand. Colours come from the page's style sheet by class; sizes from the box around it.

Plots that sit in a table row have no text of their own: the numbers stand beside them as text, for every reader.
They stretch to their cell (preserveAspectRatio none) with strokes that do not stretch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import List, Mapping, Optional, Sequence, Tuple

from . import words

TICKS = (0.1, 0.2, 0.25, 1 / 3, 0.5, 2 / 3, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0, 1.01, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0,
         4.0, 5.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """Logarithmic axis from `low` to `high` on 0..100; margin: half width of the band around 1, as a fraction."""

    low: float
    high: float
    margin: Optional[float] = None

    def at(self, value: float) -> float:
        """Position of a ratio in percent of the width, held inside the axis."""
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return round(100 * min(max(share, 0.0), 1.0), 2)

    @classmethod
    def around(cls, ratios: Sequence[float], margin: Optional[float] = None) -> Scale:
        """An axis symmetric around 1 for most of the ratios: three times the reach of the inner 80 %, or all of them
        if that is less. One cliff of 10x would else press the other cases into a line; it is drawn as an arrow."""
        effects = sorted(abs(math.log(r)) for r in ratios if r > 0) or [0.0]
        inner = effects[min(len(effects) - 1, int(0.8 * len(effects)))]
        reach = max(0.02, 3 * (margin or 0.0), min(effects[-1], max(3 * inner, 0.1)) * 1.1)
        return cls(math.exp(-reach), math.exp(reach), margin)

    def ticks(self, most: int = 5) -> List[float]:
        """Round ratios inside the axis, 1 among them, as many as stay apart."""
        inside = [t for t in TICKS if self.low < t < self.high]
        kept = [1.0]
        for tick in sorted(inside, key=lambda t: -abs(math.log(t))):
            if len(kept) < most and all(abs(self.at(tick) - self.at(k)) >= 80 / most for k in kept):
                kept.append(tick)
        return sorted(kept)


def forest_row(ratio: float, low: Optional[float], high: Optional[float], state: str, scale: Scale) -> str:
    """One line of a forest plot: margin band, line at 1, interval and point. Rows stack into one plot."""
    parts = []
    if scale.margin:
        left, right = scale.at(1 / (1 + scale.margin)), scale.at(1 + scale.margin)
        parts.append(f'<rect class="band" x="{left}" width="{right - left:.2f}" height="20"/>')
    one = scale.at(1.0)
    parts.append(f'<path class="one" d="M{one} 0V20"/>')
    if low is not None and high is not None:
        parts.append(f'<path class="ci {state}" d="M{scale.at(low)} 10H{scale.at(high)}"/>')
    if ratio > scale.high or ratio < scale.low:
        tip, tail = (100, 98) if ratio > scale.high else (0, 2)
        parts.append(f'<path class="off {state}" d="M{tail} 7L{tip} 10L{tail} 13"/>')
    else:
        parts.append(f'<path class="dot {state}" d="M{scale.at(ratio)} 10h.01"/>')
    return _stretched("forest", 20, parts)


def _stretched(css: str, height: int, parts: Sequence[str]) -> str:
    return (f'<svg class="{css}" viewBox="0 0 100 {height}" preserveAspectRatio="none" aria-hidden="true">'
            f'{"".join(parts)}</svg>')


def _drawing(css: str, width: int, height: int, label: str, parts: Sequence[str]) -> str:
    return (f'<svg class="{css}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
            f'{"".join(parts)}</svg>')


def forest_axis(scale: Scale) -> str:
    """Labels of the axis as text over the plot column, with positions in percent."""
    labels = []
    for tick in scale.ticks():
        text = "1" if tick == 1 else words.percent(tick, 0) if 0.5 < tick < 2 else f"{tick:.3g}x"
        labels.append(f'<span style="left:{scale.at(tick)}%">{escape(text)}</span>')
    return f'<span class="axis" aria-hidden="true">{"".join(labels)}</span>'


def pair(base: Optional[float], candidate: Optional[float], most: float) -> str:
    """Two thin bars, base over candidate, to the scale of `most`."""
    parts = []
    for css, top, value in (("base", 1, base), ("cand", 9, candidate)):
        if value:
            parts.append(f'<rect class="{css}" y="{top}" width="{100 * value / most:.2f}" height="6"/>')
    return _stretched("pair", 16, parts)


def stack(parts: Sequence[Tuple[str, int]], label: str) -> str:
    """One bar of (state word, count), shares of the whole, with a hair line between; `label` is read aloud."""
    total = sum(count for _, count in parts)
    x, out = 0.0, []
    for i, (state, count) in enumerate(parts):
        width = 100 * count / total
        gap = 0.3 if i < len(parts) - 1 else 0.0
        out.append(f'<rect class="s-{state}" x="{x:.2f}" width="{max(width - gap, 0.2):.2f}" height="10"/>')
        x += width
    return (f'<svg class="stack" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(label)}">{"".join(out)}</svg>')


def _decades(low: float, high: float) -> List[float]:
    return [10.0**e for e in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]


@dataclass(frozen=True)
class Point:
    """A case on the roofline: intensity in FLOP/byte; achieved in FLOP/s on the base and on the candidate."""

    name: str
    intensity: float
    base: Optional[float]
    candidate: Optional[float]


def roofline(points: Sequence[Point], flops: Optional[float] = None, bandwidth: Optional[float] = None) -> str:
    """Scatter of both arms, log-log: hollow is the base, filled the candidate, a line joins the two of one case.

    flops (FLOP/s) and bandwidth (byte/s) draw the roof (Williams, Waterman, Patterson, CACM 52(4), 2009)."""
    width, height, left, top, right, bottom = 680, 380, 66, 14, 16, 44
    ys = [v for p in points for v in (p.base, p.candidate) if v]
    xs = [p.intensity for p in points]
    if not ys:
        return ""
    x0, x1 = min(xs) / 1.6, max(xs) * 1.6
    if flops and bandwidth:
        x0, x1 = min(x0, flops / bandwidth / 2), max(x1, flops / bandwidth * 2)
    y0, y1 = min(ys) / 1.8, max([*ys, flops or 0.0]) * 1.8

    def px(value: float) -> float:
        share = math.log(value / x0) / math.log(x1 / x0)
        return round(left + (width - left - right) * share, 1)

    def py(value: float) -> float:
        share = math.log(value / y0) / math.log(y1 / y0)
        return round(height - bottom - (height - top - bottom) * min(max(share, 0.0), 1.0), 1)

    out = []
    for tick in _decades(x0, x1):
        out.append(f'<path class="grid" d="M{px(tick)} {top}V{height - bottom}"/>'
                   f'<text x="{px(tick)}" y="{height - bottom + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in _decades(y0, y1):
        out.append(f'<path class="grid" d="M{left} {py(tick)}H{width - right}"/>'
                   f'<text x="{left - 8}" y="{py(tick) + 4}" text-anchor="end">{escape(words.rate(tick, ""))}</text>')
    if flops and bandwidth:
        ridge, start = flops / bandwidth, max(x0, y0 / bandwidth)
        out.append(f'<path class="roof" d="M{px(start)} {py(start * bandwidth)}L{px(ridge)} {py(flops)}H{px(x1)}"/>')
    for p in points:
        x, tip = px(p.intensity), escape(words.one_line(p.name))
        if p.base and p.candidate:
            out.append(f'<path class="join" d="M{x} {py(p.base)}V{py(p.candidate)}"/>')
        for css, value in (("base", p.base), ("cand", p.candidate)):
            if value:
                out.append(f'<circle class="{css}" cx="{x}" cy="{py(value)}" r="4"><title>{tip}: '
                           f'{escape(words.rate(value, "FLOP/s"))}</title></circle>')
    out.append(f'<text x="{(left + width - right) / 2}" y="{height - 6}" text-anchor="middle">FLOP / byte</text>')
    out.append(f'<text text-anchor="middle" transform="translate(14 {height / 2}) rotate(-90)">FLOP/s</text>')
    cases = words.plural(len(points), "case")
    label = f"Roofline of {cases}: achieved FLOP/s over FLOP per byte, base hollow, candidate filled"
    return _drawing("plot", width, height, label, out)


def strip(series: Sequence[Mapping[str, object]], key: str, unit: str) -> str:
    """A quantity over time, one line an arm (the first arm's is drawn as base). series: {arm, time: [s], key: [...]}.

    Gaps (None) break the line. Empty when nobody recorded it."""
    width, height, left, top, right, bottom = 680, 130, 66, 10, 16, 26
    lines = []
    for i, item in enumerate(series):
        times, values = item.get("time"), item.get(key)
        if isinstance(times, (list, tuple)) and isinstance(values, (list, tuple)):
            lines.append((i, list(zip(times, values))))
    known = [(t, v) for _, pts in lines for t, v in pts if v is not None]
    if not known:
        return ""
    t0, t1 = min(t for t, _ in known), max(t for t, _ in known)
    v0, v1 = min(v for _, v in known), max(v for _, v in known)
    pad = (v1 - v0) * 0.1 or max(abs(v1) * 0.02, 1.0)
    v0, v1 = v0 - pad, v1 + pad

    def px(t: float) -> float:
        return round(left + (width - left - right) * (t - t0) / ((t1 - t0) or 1), 1)

    def py(v: float) -> float:
        return round(height - bottom - (height - top - bottom) * (v - v0) / (v1 - v0), 1)

    out = [f'<path class="grid" d="M{left} {py(v)}H{width - right}"/><text x="{left - 8}" y="{py(v) + 4}" '
           f'text-anchor="end">{v:,.0f}</text>' for v in (v0 + pad, v1 - pad)]
    for i, pts in lines:
        path, pen = [], "M"
        for t, v in pts:
            if v is None:
                pen = "M"
            else:
                path.append(f"{pen}{px(t)} {py(v)}")
                pen = "L"
        out.append(f'<path class="line {"base" if i == 0 else "cand"}" d="{"".join(path)}"/>')
    out.append(f'<text x="{left}" y="{height - 8}">{t0:.0f} s</text>'
               f'<text x="{width - right}" y="{height - 8}" text-anchor="end">{t1:.0f} s</text>')
    label = f"{key} over time in {unit}: {known[0][1]:,.0f} at first, {known[-1][1]:,.0f} at the end"
    return _drawing("plot strip", width, height, label, out)
