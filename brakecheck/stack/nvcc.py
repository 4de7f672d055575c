"""nvcc as the front end: CUDA C++ to PTX."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from ..model import UnavailableError, UsageError
from .toolchain import CudaStack

# Device variables that hold an entry's address: they instantiate a template without spelling its signature, and the PTX
# names the instance in their initialiser.
_MARK = "brakecheck_entry_"
_MARKED = re.compile(rf"^[^\n]*\b{_MARK}(\d+)\b[^\n=]*=\s*(?:generic\()?\s*([\w$]+)\)?;[^\n]*\n", re.MULTILINE)


def host_compiler(stacks: Sequence[CudaStack]) -> str:
    """The first line of the host compiler's version; nvcc preprocesses with it, so its headers matter.

    UsageError: a stack has no nvcc. UnavailableError: there is no host compiler."""
    for stack in stacks:
        if stack.nvcc is None:
            raise UsageError(f"{stack.stack.name} has no nvcc: before CUDA 13.0 its wheels hold ptxas alone",
                             f"stack {stack.stack.spec!r}", "use the NVRTC front end, or an installed nvcc")
    program = os.environ.get("NVCC_CCBIN") or "gcc"
    found = shutil.which(program)
    if not found:
        raise UnavailableError(f"nvcc needs a host compiler, and there is no {program}", "PATH",
                               "install gcc, set NVCC_CCBIN to one, or use the NVRTC front end, which needs none")
    done = subprocess.run([found, "--version"], capture_output=True, text=True)
    return done.stdout.partition("\n")[0]


def command(stack: CudaStack, source: Path, arch: str, options: Sequence[str], expressions: Sequence[str],
            work: Path) -> List[str]:
    """The command that writes kernel.ptx into `work`. With entries, a translation unit is written there that includes
    the source and takes their addresses."""
    if expressions:
        lines = [f'#include "{source}"']
        lines += [f'extern "C" __device__ void* const {_MARK}{i} = (void*)({e if e.startswith("&") else "&" + e});'
                  for i, e in enumerate(expressions)]
        unit = work / source.name
        unit.write_text("\n".join(lines) + "\n")
    else:
        unit = source
    return [str(stack.nvcc), "-ptx", f"-arch={arch}", *options, *(f"-I{d}" for d in stack.overlay_includes),
            str(unit), "-o", "kernel.ptx"]


def take_entries(text: str, expressions: Sequence[str]) -> Tuple[str, Dict[str, str]]:
    """PTX without the marks, and what they said: expression -> mangled name."""
    names = {int(m.group(1)): m.group(2) for m in _MARKED.finditer(text)}
    return _MARKED.sub("", text), {e: names[i] for i, e in enumerate(expressions) if i in names}
