"""Cubins, fat binaries and build logs as recordings: kernels with registers and shared memory, and no times."""

from __future__ import annotations

import gzip
import shutil
import zlib
from pathlib import Path
from typing import Any, List, Optional, Sequence

from ..model import BrakecheckError
from .files import GZIP, read_text
from .table import Problem, Recording, kernel_frame


def read_cubin(path: Path) -> Recording:
    """The kernels of a cubin (plain or gzip), or of a folder of them: there a file's name is the path of its kernels,
    so that each is lined up with its namesake."""
    path = Path(path)
    if not path.is_dir():
        return _recording("cubin", path, [_opened(path)])
    files = [f for f in sorted(path.iterdir()) if f.suffix == ".cubin"]
    return _recording("cubin", path, [_opened(f) for f in files], [f.stem for f in files])


def _opened(path: Path) -> Any:
    from . import cubin

    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data.startswith(GZIP) else data
    except (OSError, EOFError, zlib.error) as error:
        raise BrakecheckError(f"cannot read the file: {error}", str(path), "copy it again") from None
    return cubin.read_cubin(data, str(path))


def read_fatbin(path: Path) -> Recording:
    """The kernels of a fat binary, object, library or executable. With code for several architectures, the architecture
    is their path, so that each is lined up with its like."""
    from . import cubin

    return _recording("fatbin", path, cubin.cubins_in(path, cuobjdump()))


def cuobjdump() -> Path:
    """On PATH, else a wheel's. UnavailableError where there is none and none can be downloaded."""
    found = shutil.which("cuobjdump")
    if found:
        return Path(found)
    from ..stack.toolchain import disassembler

    return disassembler().cuobjdump


def _recording(kind: str, path: Path, cubins: List[Any], files: Sequence[str] = ()) -> Recording:
    from . import names

    archs = sorted({c.arch for c in cubins})
    places: Sequence[Optional[str]] = files or [f"{c.arch}: machine code" if len(archs) > 1 else None for c in cubins]
    kernels = [(place, k) for place, c in zip(places, cubins) for k in c.kernels]
    table = kernel_frame({
        "kind": ["kernel"] * len(kernels), "name": [names.demangle(k.name) for _, k in kernels],
        "raw_name": [k.name for _, k in kernels], "registers": [k.registers for _, k in kernels],
        "shared_static": [k.shared for _, k in kernels], "path": [place for place, _ in kernels]})
    return Recording(kind, str(path), table, metadata={"arch": ", ".join(archs)})


def read_build_log(path: Path) -> Recording:
    """The kernels that ptxas -v reported; its messages are problems, with their code where they have one."""
    from . import buildlog, names  # type: ignore[attr-defined]

    log = buildlog.parse_log(read_text(path))
    kernels = [k for k in log.kernels if k.registers is not None]
    table = kernel_frame({
        "kind": ["kernel"] * len(kernels), "name": [names.demangle(k.kernel) for k in kernels],
        "raw_name": [k.kernel for k in kernels], "registers": [k.registers for k in kernels],
        "shared_static": [k.shared for k in kernels]})
    problems = [Problem(n.code or n.severity, n.text, n.kernel or "log") for n in log.notes]
    return Recording("build-log", str(path), table, problems=problems)
