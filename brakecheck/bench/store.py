"""The run store: a folder (or any fsspec URL) with one folder a run; many writers, no server, no lock.

    RUN/manifest.json         the run without its measurements; written last: a run without it does not exist
    RUN/measurements.parquet  one row for each arm and case: status, key, memory, numerics
    RUN/blocks.parquet        one row for each visit: pair, position, settling, device state before and after
    RUN/samples.parquet       one row for each sample: microseconds per call, SM clock after it

DuckDB and Polars query the Parquet files in place. Locally a run is written under a temporary name and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..model import Block, BrakecheckError, Key, Measurement, Run, UsageError
from ..model.codec import decode, encode

if TYPE_CHECKING:  # at run time only where tables are touched: a machine that only measures may not have it
    import polars as pl

FILES = ("measurements.parquet", "blocks.parquet", "samples.parquet")
JSON_FIELDS = ("memory", "memory_spread", "numerics", "retention", "kernel_sum", "work", "trials")
KEY_FIELDS = ("timer", "mode", "cache", "duty", "inputs", "harness")


def default_store() -> str:
    """$BRAKECHECK_STORE, else the user's data folder."""
    chosen = os.environ.get("BRAKECHECK_STORE")
    return chosen or str(Path(os.environ.get("XDG_DATA_HOME", "~/.local/share")).expanduser() / "brakecheck" / "runs")


def _remote(url: str) -> bool:
    return "://" in url


def write(run: Run, store: str) -> str:
    """Writes a run and returns where it is. A run is immutable: writing one that is there raises BrakecheckError."""
    where = f"{store.rstrip('/')}/{run.id}"
    if exists(where):
        raise BrakecheckError(f"run {run.id} is there already, and runs are immutable", where, "choose another store")
    parent = Path(store) if not _remote(store) else Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{run.id}-", dir=parent))
    try:
        for name, frame in zip(FILES, _frames(run)):
            frame.write_parquet(temporary / name)
        manifest = encode(replace(run, measurements=()))
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        if _remote(store):
            import fsspec

            files, path = fsspec.core.url_to_fs(where)
            files.makedirs(path, exist_ok=True)
            for name in (*FILES, "manifest.json"):  # the manifest last: object stores have no rename
                files.put_file(str(temporary / name), f"{path}/{name}")
        else:
            temporary.chmod(0o755)
            temporary.rename(where)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return where


def exists(where: str) -> bool:
    if _remote(where):
        import fsspec

        files, path = fsspec.core.url_to_fs(where)
        return bool(files.exists(f"{path}/manifest.json"))
    return (Path(where) / "manifest.json").is_file()


def find(name: str, store: str) -> str:
    """Where a run is: a folder or URL as it is, else the run of the store whose id is (or begins with) `name`."""
    if exists(name):
        return name
    fitting = [r["id"] for r in listing(store) if r["id"].startswith(name)]
    if len(fitting) != 1:
        what = f"{len(fitting)} runs begin with {name!r}" if fitting else f"there is no run {name!r}"
        raise UsageError(what, store, "`brakecheck runs` lists them")
    return f"{store.rstrip('/')}/{fitting[0]}"


def listing(store: str) -> list[dict[str, Any]]:
    """Manifests of all runs, oldest first. Folders without a manifest are writers at work, and left out. Of one that
    cannot be read no more is told than its id, and that it is damaged."""
    out = []
    if _remote(store):
        import fsspec

        files, path = fsspec.core.url_to_fs(store)
        manifests = files.glob(f"{path}/*/manifest.json") if files.exists(path) else []
        texts = [(m, files.cat_file(m)) for m in manifests]
    else:
        texts = [(str(m), m.read_bytes()) for m in Path(store).glob("[!.]*/manifest.json")]
    for where, text in texts:
        try:
            manifest = json.loads(text)
            assert manifest["id"] and isinstance(manifest["arms"], list) and isinstance(manifest["device"], dict)
            out.append(manifest)
        except (ValueError, TypeError, KeyError, AssertionError):
            out.append({"id": where.split("/")[-2], "created": "", "arms": [], "device": {}, "damaged": True})
    return sorted(out, key=lambda m: str(m.get("created", "")))


def unfinished(store: str) -> list[tuple[str, list[str]]]:
    """(journal, specs of its arms) of what was measured here without becoming a run: its process was killed, or still
    measures."""
    kept = {str(r.get("options", {}).get("journal", "")) for r in listing(store)} if not _remote(store) else set()
    out = []
    for path in sorted(Path(store).glob(".journals/*.jsonl")) if not _remote(store) else ():
        with path.open() as file:
            first = file.readline()
        if str(path) not in kept and first.endswith("\n"):
            out.append((str(path), [arm[0] for arm in json.loads(first)["arms"]]))
    return out


def read(where: str) -> Run:
    """A run from its folder or URL. Raises UsageError when there is none, BrakecheckError when it is damaged."""
    if not exists(where):
        raise UsageError(f"there is no run at {where}", "run", "`brakecheck runs` lists them")
    import polars

    try:
        if _remote(where):
            import fsspec

            with fsspec.open(f"{where}/manifest.json", "r") as file:
                manifest = json.load(file)
            frames = []
            for name in FILES:
                with fsspec.open(f"{where}/{name}", "rb") as file:
                    frames.append(polars.read_parquet(file.read()))
        else:
            manifest = json.loads((Path(where) / "manifest.json").read_text())
            frames = [polars.read_parquet(Path(where) / name) for name in FILES]
        run = decode(Run, {**manifest, "measurements": []}, where)
        return replace(run, measurements=_measurements(*frames))
    except (OSError, ValueError, TypeError, LookupError, polars.exceptions.PolarsError) as problem:
        why = f"{problem}" if isinstance(problem, (OSError, ValueError)) else f"{type(problem).__name__}: {problem}"
        raise BrakecheckError(f"this run is damaged: {why}", where, "measure it again") from problem


def _frames(run: Run) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    import polars

    rows, blocks, samples = [], [], []
    for number, m in enumerate(run.measurements):
        data = encode(replace(m, blocks=(), key=None))
        row = {"measurement": number, **{k: data.get(k) for k in
               ("arm", "operator", "case", "arch", "status", "message", "first_call_ms", "note")}}
        row.update({k: getattr(m.key, k) if m.key else None for k in KEY_FIELDS})
        row.update({k: json.dumps(data[k]) if data.get(k) else None for k in JSON_FIELDS})
        rows.append(row)
        for index, b in enumerate(m.blocks):
            flat = encode(replace(b, us=(), clocks=(), wall_us=()))
            blocks.append({"measurement": number, "block": index, **{k: flat.get(k) for k in _BLOCK if k in _PLAIN},
                           "wall_us": list(b.wall_us), "before": json.dumps(b.before), "after": json.dumps(b.after)})
            clocks = b.clocks if len(b.clocks) == len(b.us) else (None,) * len(b.us)
            samples += [{"measurement": number, "block": index, "sample": i, "us": us, "sm_mhz": clock}
                        for i, (us, clock) in enumerate(zip(b.us, clocks))]
    kinds: dict[str, Any] = {"text": polars.String, "int": polars.Int64, "real": polars.Float64, "bool": polars.Boolean,
                             "reals": polars.List(polars.Float64)}
    first, second, third = (polars.DataFrame(data, schema={k: kinds[v] for k, v in columns.items()})
                            for data, columns in ((rows, _MEASUREMENT), (blocks, _BLOCK), (samples, _SAMPLE)))
    return first, second, third


_TEXT, _INT, _REAL = "text", "int", "real"
_MEASUREMENT = {
    "measurement": _INT, **dict.fromkeys(("arm", "operator", "case", "arch", "status", "message"), _TEXT),
    "first_call_ms": _REAL, "note": _TEXT, **dict.fromkeys((*KEY_FIELDS, *JSON_FIELDS), _TEXT)}
_BLOCK = {
    "measurement": _INT, "block": _INT, "pair": _INT, "position": _INT, "calls": _INT, "extra_calls": _INT,
    "started": _REAL, "settle_seconds": _REAL, "settled": "bool", "energy_mj": _REAL,
    "sampling_mj": _REAL, "device": _TEXT, "seconds": _REAL, "wall_us": "reals", "before": _TEXT, "after": _TEXT}
_PLAIN = [k for k in _BLOCK if k not in ("measurement", "block", "wall_us", "before", "after")]
_LATER = ("sampling_mj",)  # columns that older runs do not have
_SAMPLE = {"measurement": _INT, "block": _INT, "sample": _INT, "us": _REAL, "sm_mhz": _REAL}


def _measurements(rows: pl.DataFrame, blocks: pl.DataFrame, samples: pl.DataFrame) -> tuple[Measurement, ...]:
    taken: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    for number, index, us, clock in samples.sort("measurement", "block", "sample").select(
            "measurement", "block", "us", "sm_mhz").iter_rows():
        entry = taken.setdefault((number, index), ([], []))
        entry[0].append(us)
        if clock is not None:
            entry[1].append(clock)
    by_measurement: dict[int, list[Block]] = {}
    for row in blocks.sort("measurement", "block").iter_rows(named=True):
        us, clocks = taken[(row["measurement"], row["block"])]
        by_measurement.setdefault(row["measurement"], []).append(Block(
            tuple(us), clocks=tuple(clocks), wall_us=tuple(row["wall_us"]), before=json.loads(row["before"]),
            after=json.loads(row["after"]), **{k: row[k] for k in _PLAIN if k in row or k not in _LATER}))
    out = []
    for row in rows.sort("measurement").iter_rows(named=True):
        key = Key(**{k: row[k] for k in KEY_FIELDS}) if row["timer"] is not None else None
        nested = {k: json.loads(row[k]) for k in JSON_FIELDS if row.get(k)}
        out.append(Measurement(
            row["arm"], row["operator"], row["case"], row["arch"], row["status"], row["message"], key,
            tuple(by_measurement.get(row["measurement"], ())), first_call_ms=row["first_call_ms"], note=row["note"],
            **nested))
    return tuple(out)
