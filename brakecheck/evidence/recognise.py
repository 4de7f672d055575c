"""What a file is, from its content and never its name, and the reader for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable, Dict, Optional

from ..model import BrakecheckError
from .files import GZIP, read_head
from .table import Problem, Recording

HEAD = 1 << 16
SQLITE = b"SQLite format 3\0"
ELF = b"\x7fELF"
EM_CUDA = 190
FATBIN = b"\x50\xed\x55\xba"  # 0xBA55ED50, little-endian (fatbinary_section.h)
ZSTD = b"\x28\xb5\x2f\xfd"
NCU_REPORT = b"NVR\0"
ACCEPTED = {
    "kineto": "PyTorch profiler trace (JSON)", "nsys": "Nsight Systems SQLite export",
    "ncu": "Nsight Compute report (.ncu-rep)", "ncu-csv": "Nsight Compute CSV", "nsys-csv": "nsys stats CSV",
    "cubin": "cubin", "fatbin": "fatbinary", "build-log": "ptxas or nvcc log", "nccl-log": "NCCL or watchdog log",
    "profile": "brakecheck profile directory", "run": "brakecheck run directory",
    "comparison": "brakecheck comparison (JSON)",
}
BUILD_LOG = re.compile(rb"ptxas (?:info|warning|error|fatal)|^nvcc (?:warning|error|fatal)|"
                       rb"bytes stack frame, \d+ bytes spill", re.M)
NCCL_LOG = re.compile(rb"NCCL (?:INFO|WARN|TRACE|version)|WorkNCCL\(|ProcessGroupNCCL|SeqNum=\d+.{0,200}Timeout\(ms\)=")
NCU_CSV = re.compile(rb'^(?:\xef\xbb\xbf)?"?ID"?,(?=[^\n]*"?Kernel Name"?)', re.M)


def recognise(path: Path) -> str:
    """The kind of evidence, a key of ACCEPTED. gzip is looked through.

    Raises BrakecheckError that says what the file looks like and what is accepted.
    """
    path = Path(path)
    if path.is_dir():
        return _directory(path)
    head = read_head(path, HEAD)
    kind = _binary(head) or _text(head)
    if kind is None:
        raise _unknown(path, _looks_like(head, path))
    return kind


def _binary(head: bytes) -> Optional[str]:
    if head.startswith(SQLITE):
        return "nsys"
    if head.startswith(NCU_REPORT):
        return "ncu"
    if head.startswith(ZSTD):
        return "kineto"  # the one kind that is kept so; its reader looks inside
    if head.startswith(FATBIN):
        return "fatbin"
    if head.startswith(ELF) and len(head) >= 20:
        order = "little" if head[5] == 1 else "big"
        if int.from_bytes(head[18:20], order) == EM_CUDA:  # type: ignore[arg-type]
            return "cubin"
        return "fatbin" if FATBIN in head or b".nv_fatbin" in head else None
    return None


def _text(head: bytes) -> Optional[str]:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] in (b"{", b"["):
        if b'"brakecheck/comparison/' in head:
            return "comparison"
        if re.search(rb'"(?:traceEvents|deviceProperties|schemaVersion|distributedInfo|ph)"\s*:', head):
            return "kineto"
        return None
    if b"\0" in head[:4096] and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None
    if NCU_CSV.search(head):
        return "ncu-csv"
    if _nsys_csv(head):
        return "nsys-csv"
    # A job's log may hold both; a collective that hangs matters more than compiler notes.
    return "nccl-log" if NCCL_LOG.search(head) else "build-log" if BUILD_LOG.search(head) else None


def _nsys_csv(head: bytes) -> bool:
    from .nsys_csv import heading, table_kind

    lines = head.decode("utf-8", "replace").splitlines()[:200]
    return any("," in line and table_kind([heading(c.strip('"')) for c in line.split(",")]) for line in lines)


def _directory(path: Path) -> str:
    try:
        entries = sorted(p for p in path.iterdir() if p.is_file())
    except OSError as error:
        raise BrakecheckError(f"cannot list the directory: {error.strerror}", str(path),
                              "check its permissions") from None
    from .profile_run import read_manifest

    if read_manifest(path):
        return "profile"
    for entry in entries:
        if entry.suffix == ".json" and b'"brakecheck/run/' in read_head(entry, 4096):
            return "run"
    kinds = {k for e in entries[:64] if (k := _binary(h := read_head(e, HEAD)) or _text(h))}
    if kinds in ({"kineto"}, {"cubin"}):
        return kinds.pop()  # traces: one file a rank
    found = f"a directory of {', '.join(sorted(kinds))} files" if kinds else "a directory without known evidence"
    raise _unknown(path, found)


def _looks_like(head: bytes, path: Path) -> str:
    if not head:
        return "damaged gzip" if path.stat().st_size else "an empty file"
    if head.startswith(ELF):
        return "an ELF file without GPU code"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive: unpack it first"
    if head.startswith(GZIP):
        return "damaged or doubly compressed gzip"
    if head.startswith((b"QDSTRM", b"QUADD")) or path.suffix in (".nsys-rep", ".qdrep"):
        return ("an Nsight Systems report in NVIDIA's own format: convert it with nsys export --type sqlite "
                "REPORT.nsys-rep")
    if head.lstrip()[:1] in (b"{", b"["):
        return "JSON that is neither a trace nor a comparison"
    if b"\0" in head[:4096]:
        return f"binary data that starts with {head[:8].hex(' ')}"
    line = head.decode("utf-8", "replace").strip().splitlines()[:1]
    return f"text that starts with {line[0][:60]!r}" if line else "blank text"


def _unknown(path: Path, looks: str) -> BrakecheckError:
    return BrakecheckError(f"this is not evidence that can be read: it looks like {looks}", str(path),
                           f"give one of: {'; '.join(ACCEPTED.values())}")


def open_evidence(path: Path) -> Recording:
    """The recording in a file or directory of any known kind.

    Raises BrakecheckError for what is unknown, damaged, or a comparison already.
    """
    path = Path(path)
    kind = recognise(path)
    reader = READERS.get(kind)
    if reader is None:
        raise BrakecheckError(f"{path} is a {ACCEPTED[kind]}, which is an answer and not a recording", str(path),
                              "give the recordings or runs that it compared")
    return reader(path)


def _kineto(path: Path) -> Recording:
    from . import kineto  # type: ignore[attr-defined]

    return kineto.read(path)  # type: ignore[no-any-return]


def _nsys(path: Path) -> Recording:
    from . import nsys

    return nsys.read(_unpacked(path))


def _ncu(path: Path) -> Recording:
    from . import ncu

    return ncu.read_report(_unpacked(path))


def _ncu_csv(path: Path) -> Recording:
    from . import ncu

    return ncu.read_csv(path)


def _nsys_stats(path: Path) -> Recording:
    from . import nsys_csv

    return nsys_csv.read(path)


def _nccl(path: Path) -> Recording:
    from . import nccl_log

    return nccl_log.read(path)


def _cubin(path: Path) -> Recording:
    from . import static

    return static.read_cubin(path)


def _fatbin(path: Path) -> Recording:
    from . import static

    recording = static.read_fatbin(_unpacked(path))
    recording.path = str(path)
    return recording


def _build_log(path: Path) -> Recording:
    from . import static

    return static.read_build_log(path)


def _run(path: Path) -> Recording:
    from . import runs

    return runs.read(path)


def _profile(path: Path) -> Recording:
    """What `brakecheck profile` kept, with the versions and devices of its manifest where the evidence lacks them."""
    from .profile_run import read_manifest

    manifest = read_manifest(path) or {}
    row = manifest["evidence"][0]
    recording = READERS[row["kind"]](path / row["path"])
    recording.path = str(path)
    launches = manifest.get("options", {}).get("launches")
    if launches and recording.kernels.height >= launches:
        text = f"it was limited to {launches} kernels, which it reached"
        recording.problems.append(Problem("cut", text, str(path)))
    _without_rest(recording, manifest.get("rest_step"))
    recording.metadata["versions"] = {**manifest.get("versions", {}), **recording.metadata.get("versions", {})}
    if not recording.metadata.get("gpus") and manifest.get("devices"):
        recording.metadata["gpus"] = manifest["devices"]
    return recording


def _without_rest(recording: Recording, step: Optional[int]) -> None:
    """Takes away the step that the program's last step began and that nothing ended."""
    import polars as pl

    if step is None:
        return
    kept = pl.when(pl.col("step") != step).then(pl.col("step")).alias("step")
    recording.kernels = recording.kernels.with_columns(kept)
    if recording.operators is not None:
        recording.operators = recording.operators.with_columns(kept)
    recording.metadata["steps"] = [s for s in recording.metadata.get("steps", ()) if s["step"] != step]


def _unpacked(path: Path) -> Path:
    """The file itself, or what is inside its gzip in a temporary file that lives as long as the process: databases and
    reports are read in place, not as streams."""
    with path.open("rb") as handle:
        if handle.read(2) != GZIP:
            return path
    import atexit
    import shutil
    import tempfile
    import zlib

    from .files import open_binary

    with tempfile.NamedTemporaryFile(prefix="brakecheck-", suffix=path.stem, delete=False) as out:
        atexit.register(Path(out.name).unlink, missing_ok=True)
        try:
            with open_binary(path) as packed:
                shutil.copyfileobj(packed, out)
        except (OSError, EOFError, zlib.error) as error:
            raise BrakecheckError(f"the compressed file is damaged or cut off: {error}", str(path),
                                  "copy it again") from None
    return Path(out.name)


READERS: Dict[str, Callable[[Path], Recording]] = {
    "kineto": _kineto, "nsys": _nsys, "ncu": _ncu, "ncu-csv": _ncu_csv, "nsys-csv": _nsys_stats, "nccl-log": _nccl,
    "cubin": _cubin, "fatbin": _fatbin, "build-log": _build_log, "profile": _profile, "run": _run,
}
