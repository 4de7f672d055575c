"""Reading evidence files: plain or gzip by content, with sizes kept in bounds."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from ..model import BrakecheckError

GZIP = b"\x1f\x8b"
# Text logs and CSVs are read whole; what is larger is not one (or is a decompression bomb).
LARGEST_TEXT = 1 << 30


def open_binary(path: Path) -> BinaryIO:
    """The file's bytes, decompressed when it is gzip, whatever its name says."""
    try:
        handle = Path(path).open("rb")  # noqa: SIM115 (the caller closes it)
        magic = handle.read(2)
        handle.seek(0)
    except OSError as error:
        raise BrakecheckError(f"cannot open the file: {error.strerror or error}", str(path),
                              "check the path and its permissions") from None
    if magic == GZIP:
        return cast(BinaryIO, gzip.GzipFile(fileobj=handle))
    return handle


def read_head(path: Path, size: int) -> bytes:
    """The first `size` bytes, decompressed; a damaged gzip gives what could be read before the damage."""
    head = b""
    with open_binary(path) as handle:
        try:
            while len(head) < size:
                chunk = handle.read(min(size - len(head), 4096))
                if not chunk:
                    break
                head += chunk
        except (OSError, EOFError, zlib.error):
            pass
    return head


def read_text(path: Path) -> str:
    """The whole text, UTF-8 with replacement of what is not. Raises BrakecheckError when cut off or over 1 GiB."""
    with open_binary(path) as handle:
        try:
            data = handle.read(LARGEST_TEXT + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise BrakecheckError(f"the compressed file is damaged or cut off: {error}", str(path),
                                  "copy it again, or decompress what is left with gzip -dc") from None
    if len(data) > LARGEST_TEXT:
        raise BrakecheckError("the text is over 1 GiB", str(path), "cut out the part that matters")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")  # PowerShell redirection
    return data.decode("utf-8-sig", "replace")
