"""Reads what compilers say: ptxas -v figures per kernel, and notes with their cause and what to do.

One reader for one compiler's output and for a recorded build log: several files and architectures, ninja and container
prefixes, ANSI colours, CRLF. Texts of the messages were read from ptxas 12.0 to 13.5 and from public reports (cutlass
issues 1255, 1840, 1904, 2452, 3406; TensorRT-LLM 2116; flash-attention 1658; sglang PR 10572).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Dict, List, NamedTuple, Optional, Tuple

from ..model import Note


@dataclass(frozen=True)
class KernelReport:
    """ptxas -v's figures of one kernel for one architecture; what was not printed is None. Bytes, but for registers,
    barriers and seconds (compile time). stack: frame of the kernel alone; stack_total: with what it calls."""

    kernel: str
    arch: Optional[str] = None
    registers: Optional[int] = None
    stack: Optional[int] = None
    stack_total: Optional[int] = None
    spill_stores: Optional[int] = None
    spill_loads: Optional[int] = None
    shared: Optional[int] = None
    barriers: Optional[int] = None
    constant: Optional[int] = None
    seconds: Optional[float] = None


@dataclass
class BuildLog:
    """Kernels in the order of the log, and notes without repetitions. unattributed: figures of interleaved builds that
    could belong to more than one kernel and were given to none."""

    kernels: List[KernelReport] = field(default_factory=list)
    notes: List[Note] = field(default_factory=list)
    unattributed: int = 0


class _Known(NamedTuple):
    code: str
    pattern: str
    cause: str
    advice: str


_CHECK = ("Compare the kernel's results with a reference on both toolchains: moved synchronisation has hidden wrong "
          "results before.")
# By code where the compiler prints one, else by text: releases number and word the same message differently.
_KNOWN = (
    _Known("C7504", r"setmaxnreg' ignored to maintain compatibility across compilation units",
           "setmaxnreg was dropped because the code is compiled for separate linking (-rdc=true)",
           "Compile this kernel without -rdc=true, or link with -dlto, so that the register hand-over takes effect."),
    _Known("C7508", r"setmaxnreg' ignored; unable to determine register count at entry",
           "setmaxnreg was dropped because the register count at kernel entry is unknown",
           "Give the kernel a minimum of blocks per SM in its launch bounds: __launch_bounds__(threads, 1)."),
    _Known("", r"setmaxnreg' ignored to allow debugging",
           "setmaxnreg was dropped because this is a debug build", "Compare builds without -G."),
    _Known("", r"setmaxnreg' ignored to maintain compatibility into 'extern' call",
           "setmaxnreg was dropped because the kernel calls a function that is not compiled with it",
           "Remove the call (assert and printf are calls: -DNDEBUG), or inline the function."),
    _Known("", r"setmaxnreg' ignored to maintain minimum register requirements",
           "setmaxnreg was dropped because the code needs more registers than it leaves",
           "Raise the register count given to setmaxnreg, or lower what the warp group holds."),
    _Known("C7509", r"serialized due to the presence of Extern calls",
           "wgmma serialised: the kernel calls a function outside this compilation unit (an assert is one)",
           "Compile with -DNDEBUG, remove printf, and define called functions in the same file without -rdc."),
    _Known("C7510", r"serialized due to wgmma pipeline crossing function boundary",
           "wgmma serialised: accumulators are live across a call that was not inlined",
           "Inline the function (__forceinline__), compile with -DNDEBUG, and do not compare builds at -O0."),
    _Known("C7511", r"serialized due to insufficient register resources for the wgmma pipeline",
           "wgmma serialised: too few registers to keep the accumulators while products are in flight",
           "Use a smaller tile or more warp groups, raise the register bound, and do not compare builds at -O0."),
    _Known("", r"serialized due to insufficient register resources for the function",
           "wgmma serialised: the function has too few registers",
           "Raise the register bound (launch bounds, -maxrregcount), or use a smaller tile."),
    _Known("", r"serialized due to non wgmma instructions defining input registers",
           "wgmma serialised: operands in registers are written while products are in flight",
           "Write the operand registers before wgmma.fence, or take the operand from shared memory."),
    _Known("", r"serialized due to non wgmma instructions reading accumulator registers",
           "wgmma serialised: accumulators are read before wgmma.wait_group",
           "Wait for the group (wgmma.wait_group) before the accumulators are read."),
    _Known("C7515", r"serialized due to non wgmma instructions defining accumulator registers",
           "wgmma serialised: something other than wgmma writes accumulators while products are in flight",
           "Initialise accumulators before the pipeline starts (scale-d = 0 for the first product). At -O0 the message "
           "is always there: such a build is not comparable."),
    _Known("", r"serialized due to ill formed pipeline stage",
           "wgmma serialised: fence, commit and wait do not form a pipeline stage on every path",
           "Keep wgmma.fence, the products, commit_group and wait_group in one straight line of control flow."),
    _Known("", r"serialized due to program dependence on compiler-inserted WG\.(?:DP|AR) in divergent path",
           "wgmma serialised: the compiler would have to synchronise inside a divergent branch",
           "Move the products out of code that only some warps of the group run."),
    _Known("C7517", r"(?:warpgroup\.wait|wgmma\.wait_group) is injected",
           "the compiler added a wait because registers of a running wgmma are used before the code waits",
           "Put wgmma.wait_group before the first use of the accumulators. " + _CHECK),
    _Known("C7519", r"(?:warpgroup\.arrive|wgmma\.fence) is injected",
           "the compiler added a fence because registers are written before wgmma reads them",
           "Put wgmma.fence after the last write of operand registers and before the first wgmma. " + _CHECK),
    _Known("C7602", r"Insufficient registers \(\d+\) to compile",
           "one instruction needs more registers than the bound allows",
           "Raise -maxrregcount or lower the threads of the launch bounds to the register target in the message."),
    _Known("", r"uses too much shared data",
           "static shared memory is over what a block may declare",
           "Use dynamic shared memory with cudaFuncAttributeMaxDynamicSharedMemorySize, or a smaller tile."),
    _Known("", r"Unsupported \.version",
           "the PTX was made by a newer compiler than this ptxas",
           "Use the ptxas of the toolkit that made the PTX or a newer one."),
)

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]{0,200}\x07")
_PTXAS = re.compile(r"(?:ptxas|nvlink)( [^\s,;]{1,4000}, line \d+;)? +(info|warning|error|fatal) *: ?(.*)")
_FRAME = re.compile(r"(\d{1,12}) bytes stack frame, (\d{1,12}) bytes spill stores, (\d{1,12}) bytes spill loads")
_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for '?([^\s']+)")
_USED = re.compile(r"Used (\d{1,12}) registers(.*)")
_TIME = re.compile(r"Compile time = (\d{1,12}(?:\.\d{1,12})?) ms")
_CODE = re.compile(r"\((C\d{4})\)\s*")
_ABOUT = re.compile(r"(?:in|for|of)(?: the)? function '?([^\s',;]+?)'?(?=[\s,;.']|$)|Entry function '([^']+)'")
_SOURCE = re.compile(r"^(.{0,300}?\(\d+\)|nvcc|nvrtc)\s*:? *(warning|(?:catastrophic |fatal )?error|fatal)\b[ :]*(.*)")
_ROUTINE = re.compile(r"\d+ bytes (?:gmem|cmem)|Compiling |Function properties|Used \d+ registers|Compile time"
                      r"|Overriding ")
_VOLATILE = re.compile(r"\d+[.:]\d[\d.:,]*|\d{4}-\d\d-\d\d\S*")  # times and dates; "#12" of a build step stays


def parse_log(text: str) -> BuildLog:
    """Figures and notes of a compiler's output or a whole build's log. Never fails: what it does not know, it skips,
    and messages it does not know are notes with their own words."""
    out = BuildLog()
    streams: Dict[str, _Stream] = {}
    reports: Dict[Tuple[str, Optional[str]], Dict[str, object]] = {}
    notes: Dict[Tuple[str, str, Optional[str]], Note] = {}
    for raw in re.split(r"[\r\n]+", _ANSI.sub("", text)):
        if not raw.strip():
            continue
        found = _PTXAS.search(raw)
        if found:
            stream = _stream(streams, raw[:found.start()])
            severity, words = found.group(2), f"{found.group(1) or ''} {found.group(3)}".strip()
            if severity != "info" or not _ROUTINE.match(words):
                _add(notes, _note(severity, words))
            else:
                out.unattributed += stream.figures(words, reports)
            continue
        frame = _FRAME.search(raw)
        if frame:
            _stream(streams, raw[:frame.start()].rstrip(" ")).frame(frame, reports)
            continue
        source = _SOURCE.match(raw.strip())
        if source:
            _add(notes, _note(source.group(2), f"{source.group(1)}: {source.group(3)}".strip()))
    out.kernels = [KernelReport(kernel, arch, **figures)  # type: ignore[arg-type]
                   for (kernel, arch), figures in reports.items()]
    out.notes = list(notes.values())
    return out


def _stream(streams: Dict[str, _Stream], prefix: str) -> _Stream:
    """State of the build step a line belongs to: steps are told apart by what stands before the message, time stamps
    and counters left out."""
    key = _VOLATILE.sub("", prefix).strip()
    return streams.setdefault(key, _Stream())


class _Stream:
    """ptxas names a kernel once and then prints its figures on lines without a name. open: kernels announced whose
    figures are still to come; more than one means that several ptxas write at once."""

    def __init__(self) -> None:
        self.open: List[Tuple[str, Optional[str]]] = []
        self.done: Optional[Tuple[str, Optional[str]]] = None
        self.properties: Optional[Tuple[str, Optional[str]]] = None

    def figures(self, words: str, reports: Dict[Tuple[str, Optional[str]], Dict[str, object]]) -> int:
        """Takes one line in; 1 if its figures could not be given to a kernel."""
        entry = _ENTRY.match(words)
        if entry:
            self.open.append((entry.group(1), entry.group(2)))
            reports.setdefault(self.open[-1], {})
            return 0
        named = _PROPERTIES.match(words)
        if named:
            self.properties = next((k for k in [*self.open, *([self.done] if self.done else [])]
                                    if k[0] == named.group(1)), None)
            return 0
        used = _USED.match(words)
        if used:
            if len(self.open) != 1:
                lost = 1 if self.open else 0
                self.open, self.done = [], None
                return lost
            self.done = self.open.pop()
            reports[self.done].update(_used(used))
            return 0
        time = _TIME.match(words)
        if time and self.done and not self.open:
            reports[self.done]["seconds"] = float(time.group(1)) / 1000
        return 0

    def frame(self, found: re.Match[str], reports: Dict[Tuple[str, Optional[str]], Dict[str, object]]) -> None:
        if self.properties:
            stack, stores, loads = map(int, found.groups())
            reports[self.properties].update(stack=stack, spill_stores=stores, spill_loads=loads)
            self.properties = None


def _used(found: re.Match[str]) -> Dict[str, object]:
    rest = found.group(2)
    out: Dict[str, object] = {"registers": int(found.group(1))}
    for name, pattern in (("barriers", r"used (\d{1,12}) barriers"), ("shared", r"(\d{1,12})(?:\+\d+)? bytes smem"),
                          ("stack_total", r"(\d{1,12}) bytes cumulative stack size")):
        value = re.search(pattern, rest)
        if value:
            out[name] = int(value.group(1))
    banks = re.findall(r"(\d{1,12})(?:\+\d+)? bytes cmem\[\d+\]", rest)
    if banks:
        out["constant"] = sum(map(int, banks))
    return out


def _note(severity: str, words: str) -> Note:
    coded = _CODE.search(words)
    code = coded.group(1) if coded else None
    about = _ABOUT.search(words)
    kernel = next((g for g in about.groups() if g), None) if about else None
    known = (next((k for k in _KNOWN if k.code and k.code == code), None)
             or next((k for k in _KNOWN if re.search(k.pattern, words)), None))
    level = {"fatal": "error", "fatal error": "error", "catastrophic error": "error"}.get(severity, severity)
    if known is None:
        return Note(level, words, code, kernel)
    return Note(level, words, code or known.code or None, kernel, known.cause, known.advice)


def _add(notes: Dict[Tuple[str, str, Optional[str]], Note], note: Note) -> None:
    notes.setdefault((note.severity, note.text, note.kernel), note)


def serialises(note: Note) -> bool:
    """Whether a note says that wgmma products run one after the other."""
    return "serialized due to" in note.text


def needs_check(note: Note) -> bool:
    """Whether a note calls for a comparison of results, not only of speed."""
    return bool(note.advice and _CHECK in note.advice)
