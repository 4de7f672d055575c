"""Blocks measured elsewhere, as JSON or CSV, read into the same path as our own runs (schema: docs/blocks.md)."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..model import Arm, Block, BrakecheckError, Component, Key, Measurement, Run, Stack

SCHEMA = "brakecheck/blocks/1"
KEY_FIELDS = ("timer", "mode", "cache", "duty", "inputs", "harness")
NOT_TOLD = "not told"  # equal on both sides it can be compared; told on one side only it is refused
STATUSES = ("ok", "error", "oom", "crash", "timeout", "missing", "unusable")


def read_table(file: str) -> Run:
    """The run of a table; its arms are in the order they first appear. Raises BrakecheckError naming file and row."""
    path = Path(file)
    try:
        if path.suffix.lower() == ".csv":
            with path.open(newline="") as lines:
                data: dict[str, Any] = {"blocks": [_row(r) for r in csv.DictReader(lines)]}
        else:
            data = json.loads(path.read_text())
    except OSError as problem:
        raise BrakecheckError(f"cannot read the table: {problem.strerror}", file, "check the path") from problem
    except (ValueError, csv.Error) as problem:
        raise BrakecheckError(f"not a table of blocks: {problem}", file, "see docs/blocks.md") from problem
    if not isinstance(data, dict) or not isinstance(data.get("blocks"), list) or not data["blocks"]:
        raise BrakecheckError("this table has no blocks", f"{file}: blocks", "see docs/blocks.md")
    if data.get("schema", SCHEMA) != SCHEMA:
        raise BrakecheckError(f"schema {data['schema']!r} is not known", f"{file}: schema", f"write {SCHEMA!r}")
    shared = data.get("key", {})
    groups: dict[tuple[str, str, str, str], list[tuple[str, dict[str, Any]]]] = {}
    for number, row in enumerate(data["blocks"]):
        where = f"{file}: blocks[{number}]"
        if not isinstance(row, dict):
            raise BrakecheckError("a block must be an object", where, "see docs/blocks.md")
        for field in ("arm", "operator", "case"):
            if not row.get(field):
                raise BrakecheckError(f"a block lacks {field!r}", where, "see docs/blocks.md")
        name = (str(row["arm"]), str(row["operator"]), str(row["case"]), str(row.get("arch", NOT_TOLD)))
        groups.setdefault(name, []).append((where, {**shared, **row}))
    told = {str(a.get("name")): a for a in data.get("arms", ()) if isinstance(a, dict)}
    for row in data["blocks"]:  # a CSV tells of an arm in the rows of its blocks
        for part in ("components", "variables"):
            if isinstance(row.get(part), dict):
                told.setdefault(str(row["arm"]), {}).setdefault(part, {}).update(row[part])
    names = list(dict.fromkeys([*told, *(g[0] for g in groups)]))
    arms = tuple(_arm(n, told.get(n, {})) for n in names)
    return Run(path.stem, str(data.get("created", "")), arms, data.get("device", {}),
               tuple(_measurement(*name, rows) for name, rows in groups.items()), options={"table": file})


def _arm(name: str, told: Mapping[str, Any]) -> Arm:
    components = tuple(Component(str(k), str(v)) for k, v in told.get("components", {}).items())
    variables = {str(k): str(v) for k, v in told.get("variables", {}).items()}
    return Arm(name, Stack(str(told.get("spec", name)), str(told.get("spec", name)), components, variables),
               str(told.get("implementation", NOT_TOLD)))


def _row(cells: Mapping[str, str | None]) -> dict[str, Any]:
    """A CSV row as the JSON form has it: empty cells are absent, `us` and `clocks` are lists separated by spaces or
    semicolons, memory.NAME, work.NAME and components.NAME are nested."""
    out: dict[str, Any] = {}
    for name, cell in cells.items():
        if name is None or cell is None or cell.strip() == "":
            continue
        if name in ("us", "clocks"):
            out[name] = [float(x) for x in cell.replace(";", " ").split()]
        elif "." in name:
            group, part = name.split(".", 1)
            out.setdefault(group, {})[part] = cell.strip() if group in ("components", "variables") else float(cell)
        elif name in ("pair", "failed", "tries"):
            out[name] = int(cell)
        elif name == "right":
            out[name] = cell.strip().lower() in ("1", "true", "yes")
        else:
            out[name] = float(cell) if name in ("first_call_ms", "rate") else cell
    return out


def _numbers(value: Any, name: str, where: str, positive: bool = True) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value]
    good = all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) and (v > 0 or not positive)
               for v in values)
    if not good or not values:
        raise BrakecheckError(f"{name!r} must be a positive number or a list of them", f"{where}.{name}",
                              "remove what was not measured: an absent value is unknown, 0 is not")
    return tuple(float(v) for v in values)


def _measurement(arm: str, operator: str, case: str, arch: str, rows: list[tuple[str, dict[str, Any]]]) -> Measurement:
    blocks: list[Block] = []
    memory: dict[str, float] = {}
    status, message = "ok", None
    for where, row in rows:
        if row.get("status", "ok") not in STATUSES:
            raise BrakecheckError(f"status {row['status']!r} is not known", f"{where}.status", ", ".join(STATUSES))
        if row.get("status", "ok") != "ok":
            status, message = row["status"], row.get("message")
        memory.update({str(k): _numbers(v, k, f"{where}.memory", False)[0] for k, v in row.get("memory", {}).items()})
        if "rate" in row and "us" not in row:  # microseconds that one unit of the work takes
            row = {**row, "us": [1e6 / rate for rate in _numbers(row["rate"], "rate", where)]}
        if "us" in row:
            clocks = _numbers(row["clocks"], "clocks", where) if row.get("clocks") else ()
            blocks.append(Block(_numbers(row["us"], "us", where), pair=row.get("pair"), position=len(blocks),
                                clocks=clocks, device=row.get("device")))
        elif "status" not in row and not row.get("memory") and "tries" not in row and "failed" not in row:
            raise BrakecheckError("a block has neither times (us) nor memory nor a status", where,
                                  "add us: microseconds per call")
    first = rows[0][1]
    keys = [Key(**{k: str(row.get(k, NOT_TOLD)) for k in KEY_FIELDS}) for _, row in rows]
    unlike = [k for k in keys if k != keys[0]]
    if unlike:
        raise BrakecheckError(f"blocks of one arm and case are not alike: {'; '.join(keys[0].unlike(unlike[0]))}",
                              rows[keys.index(unlike[0])][0], "give them different case names")
    numerics = None
    if "right" in first:
        numerics = {"ok": bool(first["right"]), **({"why": str(first["why"])} if first.get("why") else {})}
    return Measurement(arm, operator, case, arch, status, message, keys[0], tuple(blocks), memory, numerics=numerics,
                       trials=_trials(rows),
                       retention=first.get("retention"), first_call_ms=first.get("first_call_ms"),
                       work={str(k): float(v) for k, v in first.get("work", {}).items()})


def _trials(rows: list[tuple[str, dict[str, Any]]]) -> dict[str, int] | None:
    """Failures and tries, summed over the rows that count them."""
    counted = [(where, row) for where, row in rows if "tries" in row or "failed" in row]
    for where, row in counted:
        failed, tries = row.get("failed"), row.get("tries")
        if not (isinstance(failed, int) and isinstance(tries, int) and 0 <= failed <= tries and tries):
            raise BrakecheckError("failures are counted as whole numbers, failed out of tries", where,
                                  "give both: failed = 2, tries = 3")
    return {k: sum(row[k] for _, row in counted) for k in ("failed", "tries")} if counted else None
