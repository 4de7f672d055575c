"""A record that grows line by line: a run that is ended keeps what it measured, the same command goes on with it."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional

Row = Dict[str, Any]
NO_DEVICE = 69  # exit status where there is no GPU
ENDED = 143  # exit status of a run that SIGTERM (as `timeout` sends it) or Ctrl-C ended
PEERS = ("triton", "quack-kernels", "nvidia-cutlass-dsl", "liger-kernel", "flash-attn", "vllm")
KERNELS = Path(__file__).resolve().parent.parent / "brakecheck" / "kernels"


def device_facts() -> Row:
    """What a line depends on beside our sources: GPU, torch, CUDA, peers' versions."""
    import torch

    found = {}
    for package in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda,
            "packages": found}


def no_device() -> bool:
    """Whether there is no GPU to measure on, which it says."""
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: run on a machine with an NVIDIA GPU and torch with CUDA", file=sys.stderr)
    return not torch.cuda.is_available()


def hash_of(files: Iterable[Path]) -> str:
    """Of names and contents, whatever the order: two folders may have a file of one name."""
    each = sorted((f.name, hashlib.sha256(f.read_bytes()).hexdigest()) for f in set(files))
    return hashlib.sha256(json.dumps(each).encode()).hexdigest()[:16]


class Record:
    """`data` in the file `path` (None: in memory alone): the facts, "rows", "runs" and what the benchmark adds.

    facts: what must be equal for lines of an earlier run to be kept, as must be the sources (files). Lines whose "ok"
    is false are not kept: they are measured again. runs: date, command and seconds of each phase of each run."""

    def __init__(self, path: Optional[Path], script: str, facts: Row, sources: Iterable[Path]) -> None:
        key = {**facts, "sources": hash_of([Path(script), Path(__file__), *sources])}
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        command = " ".join(["python3", f"benchmarks/{Path(script).name}", *(Path(a).name for a in sys.argv[1:])])
        self.path, self.data = path, {**key, "date": now, "command": command, "rows": [], "runs": []}
        old = self._read()
        other = [k for k in key if old.get(k) != key[k]] if old else []
        if other:
            print(f"# {path} is of other {', '.join(other)}: begun anew", flush=True)
        elif old:
            self.data = {**old, "date": now, "command": command}
            self.data["rows"] = [row for row in old["rows"] if row.get("ok", True)]
            print(f"# {len(self.rows)} lines kept from {path}", flush=True)
        self.seconds: Dict[str, float] = {}
        self.data["runs"].append({"date": now, "command": command, "seconds": self.seconds})

    def _read(self) -> Row:
        try:
            found = json.loads(self.path.read_text()) if self.path else {}
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and "rows" in found else {}

    @property
    def rows(self) -> List[Row]:
        return self.data["rows"]

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        """Replaces the file in one step: no moment at which it is half written."""
        if self.path:
            beside = self.path.with_suffix(self.path.suffix + ".part")
            beside.write_text(json.dumps(self.data, indent=1) + "\n")
            beside.replace(self.path)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds within to those of the phase."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - begin, 1)

    def run(self, work: Callable[[], int]) -> int:
        """work(), and what each phase took. SIGTERM ends it as Ctrl-C does, with what was measured kept."""
        def end(*_: Any) -> None:
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGTERM, end)
        try:
            status = work()
        except KeyboardInterrupt:
            print(f"# ended: {len(self.rows)} lines kept in {self.path}, the same command goes on with them"
                  if self.path else "# ended: no line is kept without --json", file=sys.stderr)
            status = ENDED
        finally:
            signal.signal(signal.SIGTERM, previous)
        self.save()
        print("# seconds: " + ", ".join(f"{name} {took:.1f}" for name, took in self.seconds.items()), flush=True)
        return status
