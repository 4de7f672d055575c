"""Cubins and build logs as recordings: kernels with registers and shared memory, and no times."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from ..model import BrakecheckError
from .files import GZIP, read_text
from .table import Problem, Recording, kernel_frame


def read_cubin(path: Path) -> Recording:
    """The kernels of a cubin (plain or gzip)."""
    from . import cubin, names  # type: ignore[attr-defined]

    try:
        data = Path(path).read_bytes()
        data = gzip.decompress(data) if data.startswith(GZIP) else data
    except (OSError, EOFError, zlib.error) as error:
        raise BrakecheckError(f"cannot read the file: {error}", str(path), "copy it again") from None
    parsed = cubin.read_cubin(data, str(path))
    table = kernel_frame({
        "kind": ["kernel"] * len(parsed.kernels), "name": [names.demangle(k.name) for k in parsed.kernels],
        "raw_name": [k.name for k in parsed.kernels], "registers": [k.registers for k in parsed.kernels],
        "shared_static": [k.shared for k in parsed.kernels]})
    return Recording("cubin", str(path), table, metadata={"arch": parsed.arch})


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
