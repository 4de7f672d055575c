"""Blocks measured elsewhere, as JSON or CSV, read into the same path as our own runs (schema: docs/blocks.md)."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..model import Arm, Block, BrakecheckError, Component, Key, Measurement, Run, Stack
from .journal import memory_of

SCHEMA = "brakecheck/blocks/1"
KEY_FIELDS = ("timer", "mode", "cache", "duty", "inputs", "harness")
NOT_TOLD = "not told"  # equal on both sides it can be compared; told on one side only it is refused
STATUSES = ("ok", "error", "oom", "crash", "timeout", "missing", "unusable")
MOST = 1e18  # a larger number is no time, no size and no rate
TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
NESTED = ("memory", "work", "components", "variables", "retention")
FIELDS = ("arm", "operator", "case", "arch", "us", "rate", "failed", "tries", "pair", "clocks", "status", "message",
          "right", "why", "first_call_ms", "device", *NESTED, *KEY_FIELDS)


def read_table(file: str) -> Run:
    """The run of a table; its arms are in the order they first appear. Raises BrakecheckError naming file and row."""
    path = Path(file)
    try:
        if path.suffix.lower() == ".csv":
            with path.open(newline="", encoding="utf-8-sig") as lines:  # spreadsheets write a mark in front
                rows = csv.DictReader(lines)
                data: dict[str, Any] = {"blocks": [_row(r, f"{file}:{rows.line_num}") for r in rows]}
        else:
            data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise BrakecheckError(f"cannot read the table: {problem.strerror}", file, "check the path") from problem
    except (ValueError, csv.Error) as problem:
        raise BrakecheckError(f"not a table of blocks: {problem}", file, "see docs/blocks.md") from problem
    if not isinstance(data, dict) or not isinstance(data.get("blocks"), list) or not data["blocks"]:
        raise BrakecheckError("this table has no blocks", f"{file}: blocks", "see docs/blocks.md")
    if data.get("schema", SCHEMA) != SCHEMA:
        raise BrakecheckError(f"schema {data['schema']!r} is not known", f"{file}: schema", f"write {SCHEMA!r}")
    _objects(data, ("key", "device"), f"{file}: ")
    if not isinstance(data.get("arms", []), list) or not all(isinstance(a, dict) for a in data.get("arms", [])):
        raise BrakecheckError("'arms' must be a list of objects", f"{file}: arms", "see docs/blocks.md")
    shared = data.get("key", {})
    groups: dict[tuple[str, str, str, str], list[tuple[str, dict[str, Any]]]] = {}
    for number, row in enumerate(data["blocks"]):
        where = f"{file}: blocks[{number}]"
        if not isinstance(row, dict):
            raise BrakecheckError("a block must be an object", where, "see docs/blocks.md")
        for field in ("arm", "operator", "case"):
            if not row.get(field):
                raise BrakecheckError(f"a block lacks {field!r}", where,
                                      f"its fields are {', '.join(map(str, row))}: see docs/blocks.md")
        _check_types(row, where)
        name = (str(row["arm"]), str(row["operator"]), str(row["case"]), str(row.get("arch", NOT_TOLD)))
        groups.setdefault(name, []).append((where, {**shared, **row}))
    told = {str(a.get("name")): a for a in data.get("arms", ())}
    for number, arm in enumerate(told):
        _objects(told[arm], ("components", "variables"), f"{file}: arms[{number}].")
        if arm not in {g[0] for g in groups}:
            raise BrakecheckError(f"there is no block of the arm {arm!r}", f"{file}: arms[{number}].name",
                                  f"blocks name {', '.join(dict.fromkeys(g[0] for g in groups))}; of an arm that could "
                                  "not run give a status")
    for row in data["blocks"]:  # a CSV tells of an arm in the rows of its blocks
        for part in ("components", "variables"):
            if isinstance(row.get(part), dict):
                told.setdefault(str(row["arm"]), {}).setdefault(part, {}).update(row[part])
    names = list(dict.fromkeys([*told, *(g[0] for g in groups)]))
    arms = tuple(_arm(n, told.get(n, {})) for n in names)
    unread = dict.fromkeys(str(k) for row in data["blocks"] for k in row if k not in FIELDS)
    warnings = (f"{file}: not read, because no field has this name: {', '.join(unread)}",) if unread else ()
    return Run(str(path), str(data.get("created", "")), arms, data.get("device", {}),
               tuple(_measurement(*name, rows) for name, rows in groups.items()), options={"table": file},
               warnings=warnings)


def _objects(data: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in names:
        if not isinstance(data.get(name, {}), dict):
            raise BrakecheckError(f"{name!r} must be an object of names and values", where + name, "see docs/blocks.md")


def _check_types(row: Mapping[str, Any], where: str) -> None:
    """Of what is not checked where it is read."""
    _objects(row, NESTED, f"{where}.")
    for name, kind, wanted in (("pair", int, "a whole number"), ("right", bool, "true or false"),
                               ("device", str, "a name"), ("status", str, "a name"), ("message", str, "a text")):
        value = row.get(name)
        if name in row and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise BrakecheckError(f"{name!r} must be {wanted}, not {value!r:.80}", f"{where}.{name}",
                                  "remove what was not measured: an absent value is unknown")
    for name, values in (("first_call_ms", [row[n] for n in ("first_call_ms",) if n in row]),
                         *((n, list(row.get(n, {}).values())) for n in ("memory", "work", "retention"))):
        if values:
            _numbers(values, name, where, positive=False)


def _arm(name: str, told: Mapping[str, Any]) -> Arm:
    components = tuple(Component(str(k), str(v)) for k, v in told.get("components", {}).items())
    variables = {str(k): str(v) for k, v in told.get("variables", {}).items()}
    return Arm(name, Stack(str(told.get("spec", name)), str(told.get("spec", name)), components, variables),
               str(told.get("implementation", NOT_TOLD)))


def _row(cells: Mapping[str | None, Any], where: str) -> dict[str, Any]:
    """A CSV row as the JSON form has it: empty cells are absent, `us` and `clocks` are lists separated by spaces or
    semicolons, memory.NAME, work.NAME and components.NAME are nested."""
    if None in cells:  # samples separated by commas, or a comma in a case that is not quoted
        raise BrakecheckError(f"{len(cells[None])} more cells than the first line has names", where,
                              "separate samples by spaces or semicolons; put a case with a comma in quotes")
    out: dict[str, Any] = {}
    for name, cell in cells.items():
        name, cell = (name or "").strip(), (cell or "").strip()
        if not name or not cell:
            continue
        try:
            if name in ("us", "clocks"):
                out[name] = [float(x) for x in cell.replace(";", " ").split()]
            elif "." in name:
                group, part = name.split(".", 1)
                out.setdefault(group, {})[part] = cell if group not in ("memory", "work", "retention") else float(cell)
            elif name in ("pair", "failed", "tries"):
                out[name] = int(cell)
            elif name == "right":
                out[name] = TRUTH[cell.lower()]
            else:
                out[name] = float(cell) if name in ("first_call_ms", "rate") else cell
        except (ValueError, KeyError):
            wanted = {"right": "true or false", "pair": "a whole number", "failed": "a whole number",
                      "tries": "a whole number"}.get(name, "a number")
            raise BrakecheckError(f"{cell!r:.80} is not {wanted}", f"{where} ({name})",
                                  "leave a cell empty for what is unknown") from None
    return out


def _numbers(value: Any, name: str, where: str, positive: bool = True) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value]
    good = all(isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < MOST and (v > 0 or not positive)
               for v in values)  # not of NaN either
    if not good or not values:
        wanted = "a positive number or a list of them" if positive else "numbers"
        raise BrakecheckError(f"{name!r} must be {wanted}", f"{where}.{name}",
                              "remove what was not measured: an absent value is unknown, 0 is not")
    return tuple(float(v) for v in values)


def _measurement(arm: str, operator: str, case: str, arch: str, rows: list[tuple[str, dict[str, Any]]]) -> Measurement:
    blocks: list[Block] = []
    memory: dict[str, list[float]] = defaultdict(list)
    status, message = "ok", None
    taken: set[tuple[Any, Any]] = set()
    for where, row in rows:
        if row.get("status", "ok") not in STATUSES:
            raise BrakecheckError(f"status {row['status']!r} is not known", f"{where}.status", ", ".join(STATUSES))
        if row.get("status", "ok") != "ok":
            status, message = row["status"], row.get("message")
        for kind, size in row.get("memory", {}).items():
            memory[str(kind)] += _numbers(size, kind, f"{where}.memory", False)
        if "rate" in row and "us" not in row:  # microseconds that one unit of the work takes
            row = {**row, "us": [1e6 / rate for rate in _numbers(row["rate"], "rate", where)]}
        if "us" in row:
            clocks = _numbers(row["clocks"], "clocks", where) if row.get("clocks") else ()
            place = row.get("pair"), row.get("device")
            if place[0] is not None and place in taken:
                raise BrakecheckError(f"pair {place[0]} of this arm and case is there twice", f"{where}.pair",
                                      "number the blocks, or leave the pair out where nothing ran side by side")
            taken.add(place)
            blocks.append(Block(_numbers(row["us"], "us", where), pair=row.get("pair"), position=len(blocks),
                                clocks=clocks, device=row.get("device")))
        elif "status" not in row and not row.get("memory") and "tries" not in row and "failed" not in row:
            raise BrakecheckError("a block has neither times (us) nor memory nor a status", where,
                                  "add us: microseconds per call")
    if len({block.pair is None for block in blocks}) > 1:  # those without would be left out of a paired comparison
        raise BrakecheckError(f"of {arm} {operator} {case} some blocks have a pair and some have none", rows[0][0],
                              "number all of them, or none")
    told: dict[str, Any] = {}  # by the first row that tells it
    for _, row in rows:
        told = {**row, **told}
    keys = [Key(**{k: str(row.get(k, NOT_TOLD)) for k in KEY_FIELDS}) for _, row in rows]
    unlike = [k for k in keys if k != keys[0]]
    if unlike:
        raise BrakecheckError(f"blocks of one arm and case are not alike: {'; '.join(keys[0].unlike(unlike[0]))}",
                              rows[keys.index(unlike[0])][0], "give them different case names")
    numerics = None
    checked = [row for _, row in rows if "right" in row]
    if checked:  # one wrong result makes the case wrong
        judged = next((row for row in checked if not row["right"]), checked[0])
        numerics = {"ok": judged["right"], **({"why": str(judged["why"])} if judged.get("why") else {})}
    middle, spread = memory_of(memory)
    return Measurement(arm, operator, case, arch, status, message, keys[0], tuple(blocks), numerics=numerics,
                       trials=_trials(rows), memory=middle, memory_spread=spread,
                       retention=told.get("retention"), first_call_ms=told.get("first_call_ms"),
                       work={str(k): float(v) for k, v in told.get("work", {}).items()})


def _trials(rows: list[tuple[str, dict[str, Any]]]) -> dict[str, int] | None:
    """Failures and tries, summed over the rows that count them."""
    counted = [(where, row) for where, row in rows if "tries" in row or "failed" in row]
    for where, row in counted:
        failed, tries = row.get("failed"), row.get("tries")
        if not (isinstance(failed, int) and isinstance(tries, int) and 0 <= failed <= tries and tries):
            raise BrakecheckError("failures are counted as whole numbers, failed out of tries", where,
                                  "give both: failed = 2, tries = 3")
    return {k: sum(row[k] for _, row in counted) for k in ("failed", "tries")} if counted else None
