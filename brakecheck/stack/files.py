"""The user's own files as sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from ..model import Entry, Source, UsageError
from ..model.arch import arch_number
from . import ptx

KINDS = {".cu": "cu", ".cuh": "cu", ".cpp": "cu", ".cc": "cu", ".ptx": "ptx"}
_DEFINE = re.compile(r"[A-Za-z_]\w*(\([\w, .]*\))?(=.*)?", re.DOTALL)
_LAUNCH = re.compile(r"(.+)=(\d+)(?:,(\d+))?", re.DOTALL)
_MARKED = re.compile(r"^[ \t]*//[ \t]*brakecheck:(.*)$", re.MULTILINE)
_STANDARDS = ("c++03", "c++11", "c++14", "c++17", "c++20", "c++23")


def user_sources(paths: Sequence[str], include_dirs: Sequence[str] = (), defines: Sequence[str] = (),
                 std: str = "c++17", launches: Sequence[str] = ()) -> List[Source]:
    """One Source a file (however often it is named), called by its stem; PTX is for what its `.target` assembles for.

    launches: KERNEL=THREADS[,SHARED] (see `launch`), for every file; a file says the same of its own kernels in a line
    `// brakecheck: launch KERNEL=THREADS[,SHARED]`. UsageError: a file that cannot be read or is of unknown kind, a
    missing include directory, a bad define, standard or launch.
    """
    if std not in _STANDARDS:
        raise UsageError(f"{std!r} is no C++ standard", "--std", f"choose one of {', '.join(_STANDARDS)}")
    for define in defines:
        if not _DEFINE.fullmatch(define):
            raise UsageError(f"{define!r} is no definition", "-D", "write NAME or NAME=VALUE")
    for folder in include_dirs:
        if not Path(folder).is_dir():
            raise UsageError("this include directory does not exist", f"-I {folder}", "check the path")
    given = tuple(launch(text, f"--launch {text}") for text in launches)
    dirs = tuple(str(Path(d).absolute()) for d in include_dirs)
    once: Dict[Path, str] = {}
    for path in paths:
        once.setdefault(Path(path).absolute(), path)
    return [_source(Path(path), dirs, tuple(defines), std, given) for path in once.values()]


def launch(text: str, where: str) -> Entry:
    """The launch configuration KERNEL=THREADS[,SHARED]: threads a block, bytes of dynamic shared memory a block.
    KERNEL is a name without parameters (softmax), with template arguments (softmax<float, 4>) or mangled; * and ?
    stand for anything. UsageError for anything else."""
    found = _LAUNCH.fullmatch(text.strip())
    if not found or int(found.group(2)) == 0:
        raise UsageError(f"{text.strip()!r} is no launch configuration", where,
                         "write KERNEL=THREADS or KERNEL=THREADS,SHARED (bytes): softmax=256,65536")
    return Entry(found.group(1).strip(), int(found.group(2)), int(found.group(3) or 0))


def _marked(path: Path, text: str) -> Tuple[Entry, ...]:
    out = []
    for found in _MARKED.finditer(text):
        word, _, rest = found.group(1).strip().partition(" ")
        where = f"{path}, line {text.count(chr(10), 0, found.start()) + 1}"
        if word != "launch":
            raise UsageError(f"{word!r} is nothing that a source can tell brakecheck", where,
                             "write // brakecheck: launch KERNEL=THREADS[,SHARED]")
        out.append(launch(rest, where))
    return tuple(out)


def _source(path: Path, include_dirs: Tuple[str, ...], defines: Tuple[str, ...], std: str,
            given: Tuple[Entry, ...]) -> Source:
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(f"a source of unknown kind: {path.suffix or 'no suffix'}", str(path),
                         "give CUDA C++ (.cu) or PTX (.ptx)")
    try:
        text = path.read_text(errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"a source cannot be read: {error.strerror}", str(path), "check the path") from error
    if kind == "cu":
        return Source(str(path), path.stem, kind, std, defines, include_dirs, launches=(*given, *_marked(path, text)))
    target = ptx.target(text)
    if target is None:
        raise UsageError("this PTX has no .target", str(path), "check that it is PTX text, as compilers write it")
    return Source(str(path), path.stem, kind, std, min_arch=arch_number(target),
                  archs=() if target[-1].isdigit() else ptx.targets(target),
                  launches=(*given, *_marked(path, text)))
