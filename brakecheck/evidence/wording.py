"""Names, changes and times for people."""

from __future__ import annotations

from typing import Optional


def short(name: str, length: int = 60) -> str:
    return name if len(name) <= length else name[: length - 3] + "..."


def contrast(one: str, other: str, length: int = 60) -> str:
    """old -> new, of long names the part where they begin to differ."""
    if max(len(one), len(other)) > length:
        same = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
        start = max(0, same - 20)
        if start > 3:
            one, other = f"...{one[start:]}", f"...{other[start:]}"
    return f"{short(one, length)} -> {short(other, length)}"


def percent(ratio: Optional[float]) -> str:
    return "?" if ratio is None else f"{(ratio - 1) * 100:+.1f} %" if ratio < 10 else f"{ratio:.3g} x"


def duration(ns: Optional[float]) -> str:
    """1234.5 -> 1.23 us; three digits, the unit that fits."""
    if ns is None:
        return "?"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            return f"{ns / size:.{max(0, 3 - len(str(int(abs(ns) / size))))}f} {unit}"
    return f"{ns:.0f} ns"
