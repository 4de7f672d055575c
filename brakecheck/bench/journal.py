"""What happened, line by line, as it happens: a controller that is interrupted, or killed, loses at most the visits of
one pair of each case.

The journal is the only thing the controller keeps; the run is assembled from it, and resuming is reading it."""

from __future__ import annotations

import fcntl
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..model import Block, BrakecheckError, Key, Measurement, UsageError
from ..model.codec import decode

Event = dict[str, Any]


FIRST = b'{"event": "start"'  # what every journal begins with


class Journal:
    """Appends events to `path` and keeps them. A half-written last line (the process was killed) is dropped.

    One process at a time: the file is locked until `close`. A file that is no journal is refused, and left as it is."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.events: list[Event] = []
        self.lock: Any = None
        if path is not None:
            self.lock = path.open("ab")
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError("another process is measuring this run", str(path), "wait until it ends") from None
            except OSError:  # a file system without locks
                pass
            held = path.read_bytes()
            if not (held.startswith(FIRST) or FIRST.startswith(held)):
                raise UsageError("this is no journal of a run", str(path), "give the id of a run (brakecheck runs)")
            lines = held.split(b"\n")
            for number, line in enumerate(lines, 1):
                if not line:
                    continue
                try:
                    self.events.append(json.loads(line))
                except ValueError as problem:
                    if number < len(lines):
                        raise BrakecheckError("a line of the journal cannot be read", f"{path}:{number}",
                                              "delete this line to resume without it") from problem
            self._write()

    def _write(self) -> None:
        if self.path is not None:
            self.path.write_bytes(b"".join(json.dumps(e).encode() + b"\n" for e in self.events))

    def drop(self, unwanted: Callable[[Event], bool]) -> None:
        """Forgets events, in the file too."""
        kept = [e for e in self.events if not unwanted(e)]
        if len(kept) < len(self.events):
            self.events = kept
            self._write()

    def close(self) -> None:
        """Lets another process go on with it."""
        if self.lock is not None:
            self.lock.close()

    def add(self, event: Event) -> None:
        self.events.append(event)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(event) + "\n")

    def of(self, kind: str) -> list[Event]:
        return [e for e in self.events if e["event"] == kind]


def block_of(event: Event) -> Block:
    result = event["result"]
    settle = result.get("settle", {})
    return Block(
        us=tuple(result["us"]), pair=event.get("pair"), position=event.get("position"), calls=result["calls"],
        extra_calls=result.get("extra_calls", 0), wall_us=tuple(result.get("wall_us") or ()),
        clocks=tuple(result.get("clocks", ())), started=result.get("started"), settle_seconds=settle.get("seconds"),
        settled=settle.get("settled"), before=result.get("before", {}), after=result.get("after", {}),
        energy_mj=result.get("energy_mj"), sampling_mj=result.get("sampling_mj"), device=event.get("device"),
        seconds=event.get("seconds"))


def measurements(events: Iterable[Event], arms: list[str], arch: str) -> tuple[Measurement, ...]:
    """One measurement for each arm and case that was visited, in the order of first visits."""
    visits: dict[tuple[str, str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["event"] == "visit":
            visits[(arms[event["arm"]], event["operator"], event["case"])].append(event)
    return tuple(_measurement(*name, arch, found) for name, found in visits.items())


def memory_of(sizes: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Of the bytes that each visit needed, by kind: the median, and how far the visits lie apart."""
    return ({kind: statistics.median(found) for kind, found in sizes.items()},
            {kind: max(found) - min(found) for kind, found in sizes.items() if len(found) > 1})


def _measurement(arm: str, operator: str, case: str, arch: str, visits: list[Event]) -> Measurement:
    good = [v for v in visits if v["ok"]]
    bad = [v for v in visits if not v["ok"]]
    failed = not good or len(bad) > 1  # one failure among good visits is counted, and no failure of the case
    note = next((v["result"]["note"] for v in good if v["result"].get("note")), None)
    if bad and not failed:
        note = f"failed in {len(bad)} of {len(visits)} visits ({bad[-1]['state']}: {bad[-1]['message']})"
    if not good:
        return Measurement(arm, operator, case, arch, bad[-1]["state"], bad[-1]["message"])
    results = [v["result"] for v in good]
    checked: Event = next((r for r in results if "numerics" in r), {})
    memory: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for kind, size in result.get("memory", {}).items():
            memory[kind].append(size)
    middle, spread = memory_of(memory)
    key = decode(Key, results[0]["key"])
    unlike = sorted({part for r in results for part in key.unlike(decode(Key, r["key"]))})
    if unlike:
        note = "visits of this arm are not alike: " + "; ".join(unlike)
    return Measurement(
        arm, operator, case, arch, bad[-1]["state"] if failed else "ok", bad[-1]["message"] if failed else None,
        key=key, blocks=tuple(block_of(v) for v in good if not key.unlike(decode(Key, v["result"]["key"]))),
        memory=middle, memory_spread=spread,
        numerics=checked.get("numerics"), retention=checked.get("retention"), kernel_sum=checked.get("kernel_sum"),
        first_call_ms=statistics.median(r["first_call_ms"] for r in results), work=results[0].get("work", {}),
        note=note, trials={"failed": len(bad), "tries": len(visits)} if bad and not failed else None)
