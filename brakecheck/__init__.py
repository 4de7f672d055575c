"""brakecheck: GO, HOLD or BRAKE for a new CUDA stack, operator by operator, on measured evidence.

    import brakecheck
    c = brakecheck.compare("cuda==12.9", "cuda==13.2")
    c.verdict, c.headline, c.deltas        # deltas: a Polars frame
    c.to_html("report.html")
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["compare"]


def __getattr__(name: str) -> Any:
    # Lazily, because worker/ and ops/ are imported where none of the controller's dependencies exist.
    if name == "compare":
        from .api import compare

        return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
