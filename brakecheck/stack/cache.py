"""The cache directory: what appears in it under its final name is complete.

A directory is built under `tmp/` of the same file system and renamed into place. Each process owns one lock file there
while it lives; what a killed process left is recognised by its lock being free, and removed.

    toolchains/   CUDA wheels, unpacked          resolutions/  which wheels a release means today
    units/        compiled sources, by content   locks/        one per toolchain, so that one process downloads it
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import shutil
import threading
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional

from ..model import UnavailableError

_TODO = "make room there, or set BRAKECHECK_CACHE to a directory that can be written"
_workspaces: Dict[Path, Path] = {}
_guard = threading.Lock()


def root() -> Path:
    """BRAKECHECK_CACHE, or brakecheck in XDG_CACHE_HOME, or ~/.cache/brakecheck. Not created here."""
    chosen = os.environ.get("BRAKECHECK_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "brakecheck"


@contextlib.contextmanager
def writing(where: Path) -> Iterator[None]:
    """Turns a full disk and an unwritable cache into UnavailableError; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UnavailableError("no space left for the cache", str(where), _TODO) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UnavailableError(f"the cache cannot be written: {error.strerror}", str(error.filename or where),
                                   _TODO) from error
        raise


def scratch(name: str) -> Path:
    """A new empty directory in the cache, this process's own until it ends."""
    path = _workspace(root()) / f"{name}-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    return path


def publish(built: Path, target: Path) -> bool:
    """Renames a finished directory into place. False (and `built` removed) when another process was first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        built.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(built, ignore_errors=True)
        return False
    return True


def build(target: Path, fill: Callable[[Path], None], waiting: Optional[Callable[[], None]] = None) -> Path:
    """`target`, made by `fill(empty directory)` if it is not there. One process at a time builds the same target;
    the others wait (`waiting` is called once) and then find it."""
    if target.is_dir():
        return target
    with writing(target):
        lock = root() / "locks" / f"{target.name}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting:
                    waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
            if target.is_dir():
                return target
            fresh = scratch(target.name)
            try:
                fill(fresh)
                publish(fresh, target)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    return target


def write_json(path: Path, data: Any) -> None:
    """Writes a small file atomically."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = scratch("json")
        (fresh / path.name).write_text(json.dumps(data))
        (fresh / path.name).replace(path)
        fresh.rmdir()


def read_json(path: Path) -> Any:
    """The data, or None where there is no such file or it is damaged (it is then made anew)."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _workspace(base: Path) -> Path:
    with _guard:
        own = _workspaces.get(base)
        if own is None or not own.is_dir():
            _sweep(base / "tmp")
            own = _workspaces[base] = _claim(base / "tmp")
        return own


def _claim(tmp: Path) -> Path:
    tmp.mkdir(parents=True, exist_ok=True)
    while True:
        own = tmp / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        lock = own.with_suffix(".lock")
        handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)  # kept open, and so locked, until the process ends
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            continue
        if os.fstat(handle).st_nlink:  # else a sweep of another process removed it before it was locked
            own.mkdir()
            return own
        os.close(handle)


def _sweep(tmp: Path) -> None:
    for lock in tmp.glob("*.lock"):
        with contextlib.suppress(OSError), lock.open() as handle:  # OSError: its owner lives, or it is gone
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink()


def release() -> None:
    """Removes this process's temporary directories (at the end of a run; a killed run's are swept by the next)."""
    with _guard:
        for own in _workspaces.values():
            if not own.name.startswith(f"{os.getpid()}-"):
                continue  # a forked child: the directory is its parent's
            shutil.rmtree(own, ignore_errors=True)
            own.with_suffix(".lock").unlink(missing_ok=True)
        _workspaces.clear()


atexit.register(release)
