"""Numbers and units as profilers print them, in base units: byte, ns, hz, cycle, percent.

Nsight Compute scales each value for the reader, row by row: 2.33 Mbyte is 2,330,000 byte. Prefixes are decimal.
"""

from __future__ import annotations

import math
import re
from typing import Optional, Tuple

NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:[eE][+-]?\d{1,3})?|[+-]?\.\d+(?:[eE][+-]?\d{1,3})?")
PREFIX = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
TIME = {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
        "sec": 1e9}
WORDS = {"bytes": "byte", "b": "byte", "registers": "register", "%": "%", "percent": "%"}


def number(text: str) -> Optional[float]:
    """13,485 -> 13485.0; None for n/a, nan, inf and whatever is not one plain number."""
    text = text.strip()
    if not NUMBER.fullmatch(text):
        return None
    value = float(text.replace(",", ""))
    return value if math.isfinite(value) else None


def base_unit(unit: str) -> Tuple[float, str]:
    """Factor and base unit: Mbyte -> (1e6, byte), us -> (1e3, ns), Gbyte/s -> (1e9, byte/s), cycle/us -> (1e6, hz).

    A unit that is not known keeps its name with factor 1: it is never guessed.
    """
    top, slash, bottom = unit.strip().partition("/")
    factor, name = _scaled(top.strip())
    bottom = bottom.strip()
    if not slash:
        return factor, name
    if bottom in TIME:
        factor *= 1e9 / TIME[bottom]
        return (factor, "hz") if name == "cycle" else (factor, f"{name}/s")
    # Nsight Compute prints 2234 %/byte of a report as "2.234 %/Kbyte": its prefix scales the number wherever it stands.
    scale, bottom = _scaled(bottom)
    return factor * scale, f"{name}/{bottom}"


def _scaled(unit: str) -> Tuple[float, str]:
    if unit in TIME:
        return TIME[unit], "ns"
    rest = unit[1:]
    if unit[:1] in PREFIX and rest[:1].isalpha() and len(rest) > 1 or (unit[:1] in PREFIX and rest in ("B", "b")):
        factor, rest = PREFIX[unit[0]], "hz" if rest.lower() == "hz" else rest
        return factor, WORDS.get(rest.lower(), rest)
    if unit.lower() == "hz":
        return 1.0, "hz"
    return 1.0, WORDS.get(unit.lower(), unit)


def to_base(value: Optional[float], unit: str) -> Tuple[Optional[float], str]:
    """Value and unit in base units; the product that is not finite is unknown."""
    factor, name = base_unit(unit)
    if value is None:
        return None, name
    scaled = value * factor
    # 2.33 * 1e6 is 2330000.0000000005 in binary: the recorded digits end long before that.
    scaled = float(f"{scaled:.12g}")
    return (scaled if math.isfinite(scaled) else None), name
