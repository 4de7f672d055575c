"""A plot of shares of a ceiling over cases, as SVG."""

from __future__ import annotations

from html import escape
from typing import Dict, List, Optional, Sequence

COLOURS = ("#0b6e4f", "#888888", "#c0392b", "#b5651d", "#6a5acd", "#2471a3", "#d4a017", "#00838f",
           "#ad1457", "#5d4037", "#455a64")


def svg(title: str, cases: Sequence[str], shares: Dict[str, List[Optional[float]]], marks: Sequence[float] = ()) -> str:
    """shares: for each line its value at each case (None: not there). The first line is drawn thick. marks: shares that
    get a dashed line of their own."""
    width, height, left, right, top, bottom = 880, 380, 170, 130, 34, 130
    highest = max(1.05, *(s for line in shares.values() for s in line if s))

    def x(i: int) -> float:
        return left + i * (width - left - right) / max(len(cases) - 1, 1)

    def y(share: float) -> float:
        return top + (highest - share) / highest * (height - top - bottom)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui,sans-serif" '
           f'font-size="12" role="img"><title>{escape(title)}</title><rect width="100%" height="100%" fill="#fff"/>',
           f'<text x="{left}" y="18" font-weight="600">{escape(title)}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1, *marks):
        dash = ' stroke-dasharray="4 3"' if share in marks else ""
        at = y(share)
        out.append(f'<line x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ccc"{dash}/>'
                   f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end" fill="#555">{share:.0%}</text>')
    for i, case in enumerate(cases):
        place = f"translate({x(i):.1f},{height - bottom + 16}) rotate(-32)"
        out.append(f'<text transform="{place}" text-anchor="end" fill="#555">{escape(case)}</text>')
    labels: List[float] = []
    order = sorted(shares, key=lambda name: -(shares[name][-1] or 0))
    for name in order:
        colour = COLOURS[list(shares).index(name) % len(COLOURS)]
        points = [(x(i), y(s)) for i, s in enumerate(shares[name]) if s is not None]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        thick = 3 if name == next(iter(shares)) else 1.5
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"/>')
        labels.append(max([points[-1][1] + 4, *(label + 14 for label in labels[-1:])]))  # from above down, apart
        out.append(f'<text x="{points[-1][0] + 6:.1f}" y="{labels[-1]:.1f}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>\n"])
