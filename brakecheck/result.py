"""What a comparison returns to a Python user."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Union

from .model import Comparison, Delta, Run, Unit, Verdict

if TYPE_CHECKING:
    import polars


class Result:
    """A Comparison with the evidence it was made from. `deltas` is a Polars frame, one row a delta. units: what each
    toolchain compiled; run: what was measured (None where nothing was)."""

    def __init__(self, comparison: Comparison, units: Sequence[Sequence[Unit]] = (), run: Optional[Run] = None) -> None:
        self.comparison, self.units, self.run = comparison, units, run

    @property
    def verdict(self) -> Verdict:
        return self.comparison.verdict

    @property
    def headline(self) -> str:
        return self.comparison.headline

    @functools.cached_property
    def deltas(self) -> polars.DataFrame:
        import polars as pl

        flat = (
            "operator",
            "case",
            "arch",
            "evidence",
            "state",
            "reason",
            "text",
            "kernel",
            "source",
            "ratio",
            "low",
            "high",
            "metric",
            "suspicion",
            "component",
        )
        rows = []
        for delta in self.comparison.deltas:
            row: Dict[str, Any] = {name: getattr(delta, name) for name in flat}
            row["state"] = delta.state.value
            row["from"], row["to"] = delta.step
            row["since"] = list(delta.since)
            row["changes"] = [change.text for change in delta.changes]
            rows.append(row)
        number = dict.fromkeys(("ratio", "low", "high", "suspicion"), pl.Float64)
        text = {name: pl.String for name in (*flat, "from", "to") if name not in number}
        lists = {"since": pl.List(pl.String), "changes": pl.List(pl.String)}
        return pl.DataFrame(rows, schema={**text, **number, **lists}, orient="row")

    def to_json(self) -> Dict[str, Any]:
        return self.comparison.to_json()

    def to_html(self, path: Union[str, Path]) -> Path:
        return self.write(path)

    def write(self, path: Union[str, Path]) -> Path:
        """Writes .html, .md, .json or .xml (JUnit), by the suffix of `path`."""
        from .report.write import write

        return write(self.comparison, Path(path), sass=self.sass)

    def sass(self, delta: Delta) -> Optional[List[Any]]:
        """Rows of the side-by-side view of a changed kernel, or None where either side has no code."""
        from .evidence.analyse import sass_text
        from .evidence.sidebyside import aligned

        made = {unit.cubin: unit for units in self.units for unit in units if unit.cubin}
        sides = []
        for evidence in (delta.base, delta.candidate):
            unit = made.get(str(evidence.get("cubin")))
            if unit is None or "kernel" not in evidence:
                return None
            sides.append(sass_text(unit, evidence["kernel"]))
        return list(aligned(sides[0], sides[1]))
