"""Whatever holds measurements: a run of the store, the JSON file that a bundle writes, a table of blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..model import BrakecheckError, Run
from ..model.codec import decode
from ..model.measurement import RUN_SCHEMA
from . import store as stores
from .table import read_table


def read_recorded(name: str, store: str | None = None) -> Run:
    """The run of a file, a folder, a URL or a run's id."""
    if Path(name).suffix.lower() not in (".csv", ".json"):
        return stores.read(stores.find(name, store or stores.default_store()))
    data = _json(name) if name.lower().endswith(".json") else None
    if isinstance(data, dict) and data.get("schema") == RUN_SCHEMA:
        return decode(Run, data, name)
    return read_table(name)


def _json(name: str) -> Any:
    try:
        return json.loads(Path(name).read_text())
    except OSError as problem:
        raise BrakecheckError(f"cannot read the file: {problem.strerror}", name, "check the path") from problem
    except ValueError as problem:
        raise BrakecheckError(f"this is not JSON: {problem}", name, "see docs/blocks.md") from problem
