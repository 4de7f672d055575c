"""Sources x architectures x toolchains -> units: PTX, cubin and what the compilers said, cached by content.

CUDA C++ goes through NVRTC (or nvcc) to PTX, and PTX through the stack's own ptxas to a cubin: one path for all
sources, with front end and assembler as separate components.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..model import BrakecheckError, Source, UnavailableError, Unit, UsageError, decode, encode
from ..model.arch import arch_number
from . import cache, compat, headers, hostheaders, nvcc, ptx
from .children import Children, Pool
from .toolchain import CudaStack
from .wheels import Progress

# Part of every key: raise it when the same inputs would give other units.
HARNESS = 1
_UNKNOWN_ARCH = "gpu-architecture"
_DEFAULT_DEVICE = "-default-device"  # unannotated functions are device functions
_DISK_FULL = re.compile(r"No space left|[Ff]ailed to (?:write|open)|[Cc]ould not (?:write|open output)")


@dataclass(frozen=True)
class Task:
    """One unit to make. front: "nvrtc", "nvcc" or "ptx". options: of the front end, without the stack's includes."""

    stack: CudaStack
    source: Source
    arch: str
    front: str
    text: str
    options: Tuple[str, ...]
    key: str
    time_limit: float

    @property
    def name(self) -> str:
        return Path(self.source.path).name


@dataclass(frozen=True)
class _Front:
    """What a front end made. error: its words; fatal: not the source's fault, so not kept in the cache."""

    ptx: Optional[str] = None
    log: str = ""
    seconds: Optional[float] = None
    entries: Dict[str, str] = field(default_factory=dict)
    error: Optional[str] = None
    missing: bool = False
    fatal: bool = False


def compile_all(stacks: Sequence[CudaStack], sources: Sequence[Source], archs: Sequence[str], *, front: str = "nvrtc",
                jobs: Optional[int] = None, time_limit: float = 300,
                progress: Optional[Progress] = None) -> List[List[Unit]]:
    """The units of each stack, source by source and in each by architecture. time_limit: seconds a compiler call.

    A source that does not compile is a unit with status "failed", an architecture that a toolchain does not know (or
    the source is not meant for) one with status "missing". UsageError: an unreadable source, a bad architecture, no
    nvcc. UnavailableError: no space, no host compiler for nvcc. KeyboardInterrupt ends the compilers at once; what was
    finished is in the cache.
    """
    check_request(archs, front)
    host = nvcc.host_compiler(stacks) if front == "nvcc" and any(s.kind == "cu" for s in sources) else ""
    if any(s.kind == "cu" for s in sources):
        for stack in stacks:
            _refuse_impossible(stack, front)
    texts = [_read(source) for source in sources]
    prints = [_fingerprint(source, text) for source, text in zip(sources, texts)]
    tasks = [[_task(stack, source, arch, front, text, marks, host, time_limit)
              for source, text, marks in zip(sources, texts, prints) for arch in archs] for stack in stacks]
    known = _run([task for row in tasks for task in row], jobs or os.cpu_count() or 1, progress)
    return [[_for_task(task, known) for task in row] for row in tasks]


def check_request(archs: Sequence[str], front: str) -> None:
    """UsageError for what no toolchain could be asked: no architecture, a bad one, an unknown front end."""
    if front not in ("nvrtc", "nvcc"):
        raise UsageError(f"{front!r} is no front end", "--front", "choose nvrtc or nvcc")
    if not archs:
        raise UsageError("no architecture is named", "--arch", "write sm_80,sm_90a or the like")
    for arch in archs:
        arch_number(arch)


def _refuse_impossible(stack: CudaStack, front: str) -> None:
    """UsageError for a stack whose ptxas cannot read what its front end writes: known from versions alone."""
    producer, assembler = stack.stack.component(front), stack.stack.component("ptxas")
    if producer is None or assembler is None:
        return
    finding = _too_new(compat.isa_of(producer.version), assembler.version)
    if finding:
        raise UsageError(f"{stack.stack.name} cannot work: {front} {producer.version} writes PTX that its ptxas cannot "
                         f"read. {finding.text}", f"stack {stack.stack.spec!r}", finding.advice)


def _too_new(isa: Optional[str], ptxas: str) -> Optional[compat.Finding]:
    """What is wrong where PTX of this ISA version is too new for this ptxas; None too where a version is unknown."""
    if isa is None or compat.isa_of(ptxas) is None:
        return None
    return next(iter(compat.check_mixed(isa, ptxas)), None)


def _read(source: Source) -> str:
    try:
        return Path(source.path).read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"a source cannot be read: {error.strerror}", source.path, "check the path") from error


def _fingerprint(source: Source, text: str) -> List[str]:
    raw = text.encode(errors="surrogateescape")
    dirs = [Path(d).absolute() for d in source.include_dirs]
    return [hashlib.sha256(raw).hexdigest(), *headers.digests(Path(source.path).absolute(), raw, dirs)]


def _task(stack: CudaStack, source: Source, arch: str, front: str, text: str, marks: List[str], host: str,
          time_limit: float) -> Task:
    front = "ptx" if source.kind == "ptx" else front
    options: Tuple[str, ...] = ()
    if front != "ptx":
        options = (f"--std={source.std}", "-lineinfo", *(f"-D{d}" for d in source.defines),
                   *(f"-I{Path(d).absolute()}" for d in source.include_dirs))
    parts = {"ptx": (), "nvrtc": ("nvrtc", "headers", "cccl", "crt"),
             "nvcc": ("nvcc", "nvvm", "headers", "cccl", "crt")}[front]
    key = [HARNESS, front, Path(source.path).name, marks, options, arch, [e.expression for e in source.entries],
           stack.sha256("ptxas", *parts)]
    if front == "nvrtc":
        key.append(hostheaders.DIGEST)
    if front == "nvcc":
        key += [host, str(stack.nvcc), str(Path(source.path).absolute())]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return Task(stack, source, arch, front, text, options, digest, time_limit)


def _missing(task: Task) -> Optional[str]:
    """Why this toolchain cannot build for this architecture, or the source is not meant for it."""
    stack, source, arch = task.stack, task.source, task.arch
    if not source.is_for(arch):
        return f"{task.name} is for {source.meant}"
    if arch not in stack.ptxas_archs:
        return f"ptxas of {stack.stack.name} does not know {arch}"
    if task.front == "nvrtc" and arch_number(arch) not in stack.nvrtc_archs:
        return f"NVRTC of {stack.stack.name} does not know {arch}"
    if task.front == "ptx":
        built_for = ptx.target(task.text)
        if built_for and not ptx.runs_on(built_for, arch):
            return f"{task.name} is PTX for {built_for}, which does not assemble for {arch}"
    return None


def _unit(task: Task, status: str, **values: Any) -> Unit:
    return Unit(task.source.path, task.arch, task.stack.stack.name, status, task.front, **values)


def _for_task(task: Task, known: Dict[str, Unit]) -> Unit:
    reason = _missing(task)
    if reason:
        return _unit(task, "missing", message=reason)
    # The same content may have been compiled for another stack of this run, or under another path.
    unit = known[task.key]
    if unit.status == "missing":
        return _unit(task, "missing", message=unit.message)
    return replace(unit, source=task.source.path, stack=task.stack.stack.name)


def _run(tasks: Sequence[Task], jobs: int, progress: Optional[Progress]) -> Dict[str, Unit]:
    known: Dict[str, Unit] = {}
    todo: Dict[str, Task] = {}
    wanted = {task.key: task for task in tasks if not _missing(task)}
    for key, task in wanted.items():
        unit = _load(task)
        if unit:
            known[key] = unit
        else:
            todo[key] = task
    if progress:
        progress("compile", len(known), len(wanted), "from the cache")
    if not todo:
        return known
    children = Children()
    pool = Pool(jobs, children)
    executor = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        futures = {executor.submit(_compile, task, pool, children): key for key, task in todo.items()}
        for future in concurrent.futures.as_completed(futures):
            key = futures[future]
            known[key] = future.result()
            if progress:
                progress("compile", len(known), len(wanted), f"{todo[key].name} {todo[key].arch} "
                                                             f"{todo[key].stack.stack.name}")
    except BaseException:
        children.stop()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        pool.close()
    return known


def _compile(task: Task, pool: Pool, children: Children) -> Unit:
    target = _folder(task)
    with cache.writing(target):
        work = cache.scratch("unit")
        try:
            unit, keep = _make(task, work, pool, children)
            if keep:
                (work / "unit.json").write_text(json.dumps(encode(unit)))
                cache.publish(work, target)
            return _located(unit, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _make(task: Task, work: Path, pool: Pool, children: Children) -> Tuple[Unit, bool]:
    """The unit, and whether it may be kept: a crash or a time-out may not happen again. Paths are file names here."""
    front = _front_end(task, work, pool, children)
    timed = {"frontend_seconds": front.seconds, "log": front.log, "entries": front.entries}
    if front.ptx is None:
        status = "missing" if front.missing else "failed"
        return _unit(task, status, message=front.error, **timed), not (front.fatal or front.missing)
    (work / "kernel.ptx").write_bytes(front.ptx.encode(errors="surrogateescape"))
    values = {**timed, "ptx": "kernel.ptx", "ptx_sha256": ptx.identity(front.ptx)}
    start = time.perf_counter()
    ended = children.run([str(task.stack.ptxas), "-v", f"-arch={task.arch}", "-lineinfo", "kernel.ptx", "-o",
                          "kernel.cubin"], work, task.time_limit)
    values["ptxas_seconds"] = time.perf_counter() - start
    values["log"] = "\n".join(filter(None, [front.log, ended.output.strip()]))
    if ended.code == 0:
        cubin = (work / "kernel.cubin").read_bytes()
        values.update(cubin="kernel.cubin", cubin_sha256=hashlib.sha256(cubin).hexdigest())
        return _unit(task, "ok", **values), True
    (work / "kernel.cubin").unlink(missing_ok=True)
    message, fatal = _failure("ptxas", ended.code, ended.output, task, work)
    assembler = task.stack.stack.component("ptxas")
    finding = _too_new(ptx.isa(front.ptx), assembler.version) if assembler else None
    if finding:
        message = f"error: {finding.text}; {finding.advice}\n{message}"
    return _unit(task, "failed", message=message, **values), not fatal


def _front_end(task: Task, work: Path, pool: Pool, children: Children) -> _Front:
    if task.front == "ptx":
        return _Front(task.text, entries={e.expression: e.expression for e in task.source.entries})
    if task.front == "nvcc":
        return _nvcc(task, work, children)
    source_dir = Path(task.source.path).absolute().parent
    request = {
        "name": task.name, "source": task.text, "expressions": [e.expression for e in task.source.entries],
        "options": [f"-arch={task.arch.replace('sm_', 'compute_')}", f"-I{source_dir}", *task.options,
                    *(f"-I{d}" for d in task.stack.include_dirs), f"-I{hostheaders.directory()}"],
    }
    answer = pool.compile(task.stack.nvrtc, request, task.time_limit)
    if _DEFAULT_DEVICE in answer.get("log", "") and answer["result"] == 6:
        # Host declarations, the source's own or those of cuda.h: NVRTC refuses them and names the option that helps.
        request = {**request, "options": [*request["options"], _DEFAULT_DEVICE]}
        again = pool.compile(task.stack.nvrtc, request, task.time_limit)
        if again.get("result") == 0:
            answer = {**again, "log": f"{again['log']}\nbrakecheck: compiled with {_DEFAULT_DEVICE}".strip()}
    if "crash" in answer:
        return _Front(error=answer["crash"], fatal=True)
    log = answer["log"]
    if answer["result"] == 0:
        return _Front(answer["ptx"], log, answer["seconds"], answer["lowered"])
    if answer["result"] == 5 and _UNKNOWN_ARCH in log:  # NVRTC_ERROR_INVALID_OPTION
        return _Front(error=f"NVRTC of {task.stack.stack.name} does not know {task.arch}", missing=True)
    # 5: an option (such as a later C++ standard); 6: NVRTC_ERROR_COMPILATION. Others are NVRTC's own trouble.
    fatal = answer["result"] not in (5, 6)
    return _Front(log=log, seconds=answer["seconds"], error=log or answer["error"], fatal=fatal)


def _nvcc(task: Task, work: Path, children: Children) -> _Front:
    source = Path(task.source.path).absolute()
    expressions = [e.expression for e in task.source.entries]
    start = time.perf_counter()
    ended = children.run(nvcc.command(task.stack, source, task.arch, task.options, expressions, work), work,
                         task.time_limit, env={**os.environ, "TMPDIR": str(work)})
    seconds = time.perf_counter() - start
    log = ended.output.strip()
    if ended.code == 0:
        text = (work / "kernel.ptx").read_bytes().decode(errors="surrogateescape")
        text, entries = nvcc.take_entries(text, expressions)
        return _Front(text, log, seconds, entries)
    if "Unsupported gpu architecture" in log:
        return _Front(error=f"nvcc of {task.stack.stack.name} does not know {task.arch}", missing=True)
    message, fatal = _failure("nvcc", ended.code, ended.output, task, work)
    return _Front(log=log, seconds=seconds, error=message, fatal=fatal)


def _failure(program: str, code: Optional[int], output: str, task: Task, work: Path) -> Tuple[str, bool]:
    """The message of a compiler that ended badly, and whether that was no fault of the source."""
    words = output.strip()
    if code is None:
        return f"{program} took longer than {task.time_limit:g} s and was ended", True
    if _DISK_FULL.search(words):
        raise UnavailableError(f"{program} could not write: {words[:200]}", str(work),
                               "make room there, or set BRAKECHECK_CACHE to a larger disk")
    if code < 0:
        return f"{program} was killed by signal {-code} (out of memory?)\n{words}".strip(), True
    return words or f"{program} ended with exit status {code} and said nothing", not words


def _folder(task: Task) -> Path:
    return cache.root() / "units" / task.key


def _located(unit: Unit, folder: Path) -> Unit:
    return replace(unit, ptx=str(folder / unit.ptx) if unit.ptx else None,
                   cubin=str(folder / unit.cubin) if unit.cubin else None)


def _load(task: Task) -> Optional[Unit]:
    data = cache.read_json(_folder(task) / "unit.json")
    if data is None:
        return None
    try:
        return _located(decode(Unit, data), _folder(task))
    except BrakecheckError:
        return None
