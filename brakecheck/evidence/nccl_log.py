"""NCCL logs (NCCL_DEBUG=INFO, with COLL and TUNING where they were on) and the lines of torch's NCCL watchdog.

What a log says is facts (versions, transports, channels, choices of the tuner, time-outs); what follows from them is
findings: a named component with the text that says why.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from ..model import BrakecheckError
from .files import read_text
from .table import Problem, Recording, kernel_frame

# host:pid:tid [gpu] NCCL INFO message; torchrun and Ray put prefixes before it, newer releases a time stamp.
LINE = re.compile(r"(?P<host>[\w.<>-]+):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) \[(?P<gpu>\d{1,4})\] (?:\S+ )?"
                  r"NCCL (?P<level>INFO|WARN|TRACE|VERSION) (?P<message>.*)")
VERSION = re.compile(r"NCCL version (\d+(?:\.\d+){1,3}\S*?)(?:\+cuda(\d+\.\d+))?(?:\s|$)")
CHANNEL = re.compile(r"(?:Channel|Ring) (\d{1,4})(?:/\d+)? ?: (\d{1,6})\[\w*\] -> (\d{1,6})\[\w*\]"
                     r"(?: \[(?:send|receive)\])? via (\S+)")
RANK = re.compile(r"\brank (\d{1,6}) nranks (\d{1,6})")
COUNTS = re.compile(r"(\d{1,4}) coll channels, (?:(\d{1,4}) collnet channels, )?(?:(\d{1,4}) nvls channels, )?"
                    r"(\d{1,4}) p2p channels")
TUNER = re.compile(r"(?:(?P<op>\w+): )?(?P<bytes>\d{1,18}) Bytes -> Algo (?P<algo>\w+) proto (?P<proto>\w+)"
                   r"(?:.*?time (?P<time>[\d.]{1,20}))?")
COLLECTIVE = re.compile(r"(?P<op>[A-Z]\w+): opCount (?P<count>[0-9a-f]{1,16}) .*?\bcount (?P<n>\d{1,18}) datatype "
                        r"(?P<type>\d{1,3}) .*?comm (?P<comm>\w+) \[nranks=(?P<nranks>\d{1,6})\]")
WATCHDOG = re.compile(r"WorkNCCL\((?P<fields>[^)]*?Timeout\(ms\)=\d{1,12}[^)]*)\)|"
                      r"(?P<bare>_?[A-Z][A-Z_]+, SeqNum=\d.*?Timeout\(ms\)=\d{1,12})")
WATCHDOG_RANK = re.compile(r"\[(?:PG[^\]]*?)?Rank (\d{1,6})\]|\[rank(\d{1,6})\]", re.I)
CAPTURE = re.compile(r"not permitted (?:when stream is capturing|on an event last recorded in a capturing stream)|"
                     r"StreamCapture(?:Unsupported|Invalidated|Implicit)|ErrorCapturedEvent", re.I)
WATCHDOG_THREAD = re.compile(r"watchdog thread terminated|workCleanupLoop|ncclCommWatchdog|WorkNCCL::|"
                             r"ProcessGroupNCCL\.cpp", re.I)
# ncclDataType_t (nccl.h): int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16, fp8 e4m3, fp8 e5m2
TYPE_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
GATHERS = ("ALLGATHER", "ALL_GATHER")
SCATTERS = ("REDUCE_SCATTER", "REDUCESCATTER")


@dataclass(frozen=True)
class Timeout:
    """One watchdog line. Elements per rank; ranks: group size, where the operation's in and out sizes give it."""

    operation: str
    sequence: int
    line: int
    rank: Optional[int] = None
    elements_in: Optional[int] = None
    elements_out: Optional[int] = None
    timeout_ms: Optional[int] = None
    ranks: Optional[int] = None


@dataclass(frozen=True)
class Finding:
    """What follows from the log. component: who it is about (framework, program, nccl, network). where: lines."""

    code: str
    component: str
    text: str
    where: str


def read(path: Path) -> Recording:
    """The recording in a log. Kernel rows are the collectives of NCCL_DEBUG_SUBSYS=COLL (no times: a log has none);
    metadata holds versions (nccl, and nccl_cuda that it was built for), ranks, transports, channels, tuner, timeouts,
    findings.

    Raises BrakecheckError when no line is NCCL's or the watchdog's.
    """
    return parse(read_text(path), str(path))


def parse(text: str, path: str = "<log>") -> Recording:
    """As read, of text."""
    lines = text.splitlines()
    messages = [(i, m) for i, line in enumerate(lines, 1) if "NCCL" in line and (m := LINE.search(line))]
    timeouts = [t for i, line in enumerate(lines, 1) if "Timeout(ms)=" in line and (t := _timeout(line, i))]
    races = _capture_lines(lines)
    if not messages and not timeouts and not races:
        raise BrakecheckError("no line of NCCL or of torch's watchdog found", path,
                              "record with NCCL_DEBUG=INFO (and NCCL_DEBUG_SUBSYS=INIT,COLL,TUNING for more)")
    ranks = _ranks(messages)
    rows = _collectives(messages, ranks)
    warnings = [m["message"].strip() for _, m in messages if m["level"] == "WARN"]
    findings = [*disagreements(timeouts), *_order(rows), *races]
    metadata = {
        **_versions(lines), "ranks": sorted({r for r, _ in ranks.values()}) or None,
        "world": max((n for _, n in ranks.values()), default=None), **_channels(messages),
        "tuner": _tuner(messages) or None, "warnings": warnings or None,
        "timeouts": [{k: v for k, v in asdict(t).items() if v is not None} for t in timeouts] or None,
        "findings": [asdict(f) for f in findings] or None,
    }
    table = kernel_frame({c: [row.get(c) for row in rows] for c in ("kind", "name", "raw_name", "rank", "device",
                                                                    "correlation", "bytes")})
    problems = [Problem("nccl-warning", w, "NCCL WARN", n) for w, n in Counter(warnings).items()]
    return Recording("nccl-log", path, table, metadata={k: v for k, v in metadata.items() if v is not None},
                     problems=problems)


def _timeout(line: str, number: int) -> Optional[Timeout]:
    match = WATCHDOG.search(line)
    if not match:
        return None
    text = match["fields"] or match["bare"]
    fields = dict(re.findall(r"([A-Za-z]+(?:\(ms\))?)=(\w+)", text))
    operation = fields.get("OpType") or re.match(r"\s*(\w+)", text)[1]  # type: ignore[index]
    sizes = [int(fields[k][:18]) if fields.get(k, "").isdigit() else None for k in ("NumelIn", "NumelOut")]
    limit, sequence = fields.get("Timeout(ms)", ""), fields.get("SeqNum", "")
    if not sequence.isdigit():
        return None
    rank = WATCHDOG_RANK.search(line)
    return Timeout(operation, int(sequence[:18]), number, int(rank[1] or rank[2]) if rank else None, sizes[0], sizes[1],
                   int(limit[:18]) if limit.isdigit() else None, group_size(operation, sizes[0], sizes[1]))


def group_size(operation: str, elements_in: Optional[int], elements_out: Optional[int]) -> Optional[int]:
    """Ranks of the group: an all-gather's output is its input times them, a reduce-scatter's the other way round."""
    name = operation.upper()
    gather, scatter = any(g in name for g in GATHERS), any(s in name for s in SCATTERS)
    if not elements_in or not elements_out or not (gather or scatter):
        return None
    large, small = (elements_out, elements_in) if gather else (elements_in, elements_out)
    return large // small if large % small == 0 else None


def disagreements(timeouts: Sequence[Timeout]) -> List[Finding]:
    """Ranks that wait in different collectives at one sequence number do not agree on the order of collectives."""
    out: List[Finding] = []
    by_sequence: Dict[int, List[Timeout]] = {}
    for timeout in timeouts:
        by_sequence.setdefault(timeout.sequence, []).append(timeout)
    for sequence, group in sorted(by_sequence.items()):
        seen: Dict[Tuple[Any, ...], List[Timeout]] = {}
        for t in group:
            seen.setdefault((t.operation, t.elements_in, t.elements_out), []).append(t)
        if len(seen) < 2 or len({t.rank for t in group if t.rank is not None}) < 2:
            continue
        words = "; ".join(f"{_ranks_text(t.rank for t in ts)} in {op} ({n_in} -> {n_out} elements)"
                          for (op, n_in, n_out), ts in seen.items())
        out.append(Finding("order-of-collectives", "program", f"sequence {sequence}: {words}. The ranks do not run the "
                           "same collectives in the same order, as when data decides which modules run: change the "
                           "program (run every module on every rank), not NCCL",
                           _lines(t.line for t in group)))
    if not out and timeouts:
        out.extend(_plain_timeouts(by_sequence))
    return out


def _plain_timeouts(by_sequence: Dict[int, List[Timeout]]) -> Iterable[Finding]:
    sequence, group = min(by_sequence.items())
    first = group[0]
    size = f" of {first.ranks} ranks" if first.ranks else ""
    limit = f" after {first.timeout_ms} ms" if first.timeout_ms is not None else ""
    ranks = {t.rank for t in group if t.rank is not None}
    silent = f"; ranks that did not report: {_ranks_text(set(range(first.ranks)) - ranks)}" \
        if first.ranks and 1 < len(ranks) < first.ranks <= 4096 else ""
    yield Finding("collective-timeout", "unknown", f"{first.operation}{size} with sequence number {sequence} timed "
                  f"out{limit} on {_ranks_text(ranks)}{silent}. A time-out alone does not tell a slow or dead rank "
                  "from ranks that disagree on the order of collectives: compare the last collectives of every rank",
                  _lines(t.line for t in group))


def _capture_lines(lines: Sequence[str]) -> List[Finding]:
    """A capture error raised on the watchdog's thread, near its own lines (stack and message are printed together)."""
    hits = [i for i, line in enumerate(lines) if CAPTURE.search(line)
            and any(WATCHDOG_THREAD.search(near) for near in lines[max(0, i - 8): i + 9])]
    if not hits:
        return []
    return [Finding("capture-watchdog-race", "framework", "the watchdog thread queried the event of a collective while "
                    "another thread captured a CUDA graph in global mode: a race in the framework (PyTorch PR 104555), "
                    "neither NCCL nor the driver. It strikes now and then: one clean run does not show that it is "
                    "fixed; if it struck in a share p of the runs, ln(0.05)/ln(1-p) clean runs are needed (59 at 5 %)",
                    _lines(i + 1 for i in hits))]


def _ranks(messages: List[Tuple[int, Any]]) -> Dict[Tuple[str, str, str], Tuple[int, int]]:
    """(host, pid, gpu) -> rank and group size, of the largest communicator that it took part in."""
    out: Dict[Tuple[str, str, str], Tuple[int, int]] = {}
    for _, m in messages:
        found = RANK.search(m["message"])
        if found:
            key = (m["host"], m["pid"], m["gpu"])
            value = (int(found[1]), int(found[2]))
            if key not in out or value[1] > out[key][1]:
                out[key] = value
    return out


def _collectives(messages: List[Tuple[int, Any]],
                 ranks: Dict[Tuple[str, str, str], Tuple[int, int]]) -> List[Dict[str, Any]]:
    rows = []
    for line, m in messages:
        found = COLLECTIVE.search(m["message"])
        if not found:
            continue
        rank = ranks.get((m["host"], m["pid"], m["gpu"]))
        kind = int(found["type"])
        size = int(found["n"]) * TYPE_BYTES[kind] if kind < len(TYPE_BYTES) else None
        rows.append({"kind": "collective", "name": found["op"], "raw_name": found["op"], "device": int(m["gpu"]),
                     "rank": rank[0] if rank else None, "correlation": int(found["count"], 16) & (2**63 - 1),
                     "bytes": size if size is not None and size < 2**62 else None, "line": line,
                     "world": int(found["nranks"]), "who": (m["host"], m["pid"], m["gpu"])})
    return rows


def _order(rows: List[Dict[str, Any]]) -> List[Finding]:
    """Collectives with one count and group size that are different operations on different ranks."""
    by_count: Dict[Tuple[int, int], List[Dict[str, Any]]] = {}
    for row in rows:
        by_count.setdefault((row["world"], row["correlation"]), []).append(row)
    for (world, count), group in sorted(by_count.items()):
        whos = [row["who"] for row in group]
        if len(set(whos)) != len(whos) or len(whos) != world:
            continue  # several communicators share this count, or some rank is not in the log
        if len({(row["name"], row["bytes"]) for row in group}) > 1:
            words = "; ".join(f"{r['who'][0]} GPU {r['who'][2]}: {r['name']} of {r['bytes']} bytes" for r in group[:4])
            return [Finding("order-of-collectives", "program", f"collective number {count} of {world} ranks differs: "
                            f"{words}. The ranks do not agree on the order of collectives: the program, not NCCL",
                            _lines(r["line"] for r in group))]
    return []


def _versions(lines: Sequence[str]) -> Dict[str, Any]:
    found = [m for line in lines if "NCCL version" in line and (m := VERSION.search(line))]
    versions = sorted({m[1] for m in found})
    cuda = sorted({m[2] for m in found if m[2]})
    out = {"nccl": ", ".join(versions), "nccl_cuda": ", ".join(cuda)}  # several in a job of mixed installations
    return {"versions": {k: v for k, v in out.items() if v}} if any(out.values()) else {}


def _channels(messages: List[Tuple[int, Any]]) -> Dict[str, Any]:
    transports: Counter[str] = Counter()
    channels = set()
    counts: Dict[str, int] = {}
    for _, m in messages:
        found = CHANNEL.search(m["message"])
        if found:
            transports[re.sub(r"^NET/(IB|Socket|\w+)/\d+", r"NET/\1", found[4])] += 1
            channels.add(int(found[1]))
        sizes = COUNTS.search(m["message"])
        if sizes:
            names = ("collective", "collnet", "nvls", "p2p")
            counts = {n: int(v) for n, v in zip(names, sizes.groups()) if v is not None}
    return {"transports": dict(transports.most_common()) or None, "channels": len(channels) or None,
            "channel_counts": counts or None}


def _tuner(messages: List[Tuple[int, Any]]) -> List[Dict[str, Any]]:
    """Choices of the tuner, one an (operation, bytes, algorithm, protocol), with how often."""
    seen: Counter[Tuple[Optional[str], int, str, str]] = Counter()
    for _, m in messages:
        found = TUNER.search(m["message"])
        if found:
            seen[found["op"], int(found["bytes"]), found["algo"], found["proto"]] += 1
    names = ("operation", "bytes", "algorithm", "protocol")
    return [{**{k: v for k, v in zip(names, choice) if v is not None}, "count": n}
            for choice, n in sorted(seen.items(), key=lambda e: (e[0][1], str(e[0])))]


def _ranks_text(ranks: Iterable[Optional[int]]) -> str:
    known = sorted({r for r in ranks if r is not None})
    if not known:
        return "a rank"
    shown = ", ".join(map(str, known[:8])) + (" ..." if len(known) > 8 else "")
    return f"rank{'s' if len(known) > 1 else ''} {shown}"


def _lines(numbers: Iterable[int]) -> str:
    listed = sorted(set(numbers))
    shown = ", ".join(map(str, listed[:6])) + (" ..." if len(listed) > 6 else "")
    return f"line{'s' if len(listed) > 1 else ''} {shown}"
