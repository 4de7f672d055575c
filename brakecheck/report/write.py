"""A comparison as a file; the suffix says which."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Callable, Dict, Optional, Union

from ..model import BrakecheckError, Comparison, UnavailableError, UsageError
from . import html, junit, markdown

PLAIN: Dict[str, Callable[[Comparison], str]] = {
    ".md": markdown.render,
    ".xml": junit.render,
    ".json": lambda comparison: json.dumps(comparison.to_json(), indent=1, ensure_ascii=False) + "\n",
}


HTML = (".html", ".htm")


def check(path: Union[str, Path]) -> str:
    """The suffix of a path that `write` can write; the same errors as it, before any work is done."""
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in HTML and suffix not in PLAIN:
        raise UsageError(f"no report format for {suffix or 'a name without suffix'!r}", str(target),
                         "end the name in .html, .md, .xml (JUnit) or .json")
    if target.is_dir():
        raise BrakecheckError("a folder cannot be written as a report", str(target), "name a file in it")
    if not os.access(target.parent, os.W_OK):
        raise BrakecheckError("a report cannot be written there: no such folder, or not yours to write", str(target),
                              "make the folder, or name another place")
    return suffix


def write(comparison: Comparison, path: Union[str, Path], sass: Optional[html.Sass] = None) -> Path:
    """Writes .html, .md, .xml (JUnit) or .json and returns the path. A file is there whole or not at all: it is
    written under another name in the same folder and renamed.

    sass: SASS side by side for a delta, for the HTML. Raises UsageError for another suffix, BrakecheckError for a
    path that cannot be written, UnavailableError for a full disk."""
    target = Path(path)
    suffix = check(target)
    text = html.render(comparison, sass) if suffix in HTML else PLAIN[suffix](comparison)
    _replace(target, text.encode("utf-8", "replace"))
    return target


def _replace(target: Path, data: bytes) -> None:
    temporary: Optional[str] = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes files private; a report gets what the user's umask gives any other file.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
        temporary = None
    except OSError as error:
        raise _explain(error, target) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _explain(error: OSError, target: Path) -> BrakecheckError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnavailableError("the disk is full, the report was not written", str(target),
                                "free some space or name another place; an older file of this name is untouched")
    todo = {
        errno.ENOENT: f"make the folder {target.parent} first",
        errno.EACCES: "choose a folder that you may write to",
        errno.EROFS: "choose a folder that is not read-only",
        errno.EISDIR: "give the name of a file, not of a folder",
        errno.ENAMETOOLONG: "give a shorter name",
    }.get(error.errno or 0, "choose another path")
    return BrakecheckError(f"the report cannot be written: {error.strerror or error}", str(target), todo)
