"""Traces of the PyTorch profiler (Kineto) and what looks like them: Chrome JSON of 2021 to now, CUDA or ROCm.

Importing this is cheap, for the worker processes import it too: tables come with the first `read`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Callable, Optional, Sequence, Union

if TYPE_CHECKING:
    from brakecheck.evidence.table import Recording


def recognise(head: bytes) -> bool:
    """Whether a file that begins so (decompressed, some kilobytes) is such a trace."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] not in (b"{", b"["):
        return False
    if b'"traceEvents"' in text or b'"deviceProperties"' in text or b'"distributedInfo"' in text:
        return True
    return b'"ph"' in text and (b'"ts"' in text or b'"cat"' in text)


def read(path: Union[str, Path, Sequence[Union[str, Path]]], *,
         progress: Optional[Callable[[str, float], None]] = None, workers: Optional[int] = None) -> Recording:
    """The recording of one trace, or of the traces of several ranks: files, or a folder of one file a rank, each plain,
    gzip or Zstandard.

    progress(file, share read) is called now and then. workers: processes that decode, all cores by default.
    BrakecheckError when a file is no trace or nothing in it can be read; it names the byte offset.
    """
    from .reader import read_traces
    return read_traces(path, progress, workers)
