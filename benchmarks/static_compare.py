"""Time of `brakecheck compare` cold and warm, beside the same compiling done naively: a loop in one process a stack.

    python benchmarks/static_compare.py [--base cuda==12.9] [--candidate cuda==13.2] [--json FILE]

Cold: an empty cache of units, wheels present. Warm: the same command again. Naive: for each stack one process that
compiles each source for each architecture in turn with NVRTC, ptxas and nvdisasm, without a report. All in one run, in
turn, on all cores of this machine; the record says how loaded it was.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List

from brakecheck.api import DEFAULT_ARCHS
from brakecheck.ops import catalogue_sources
from brakecheck.stack import cache
from brakecheck.stack.toolchain import CudaStack, disassembler, open_stacks


def naive(spec: str, folder: Path) -> None:
    """What a script would do: one NVRTC, one thing after the other."""
    (stack,), tools = open_stacks([spec]), disassembler()
    nvrtc = load(stack)
    for i, source in enumerate(catalogue_sources()):
        for arch in DEFAULT_ARCHS:
            if int(arch[3:5]) < source.min_arch or (source.archs and arch not in source.archs):
                continue
            options = [f"-arch=compute_{arch[3:]}", f"--std={source.std}", "-lineinfo", "-default-device"]
            options += [f"-I{d}" for d in (*source.include_dirs, *stack.include_dirs)]
            options += [f"-D{d}" for d in source.defines]
            ptx = folder / f"{i}-{arch}.ptx"
            ptx.write_bytes(compile_ptx(nvrtc, Path(source.path), options, [e.expression for e in source.entries]))
            cubin = ptx.with_suffix(".cubin")
            assemble = [stack.ptxas, "-v", f"-arch={arch}", "-lineinfo", ptx, "-o", cubin]
            for command in (assemble, [tools.nvdisasm, "-c", cubin]):
                subprocess.run(command, check=True, capture_output=True)


def load(stack: CudaStack) -> ctypes.CDLL:
    for builtins in stack.nvrtc.parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(stack.nvrtc))


def compile_ptx(nvrtc: ctypes.CDLL, source: Path, options: List[str], expressions: List[str]) -> bytes:
    program = ctypes.c_void_p()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None))
    for expression in expressions:
        if "<" in expression:
            check(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
    flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    check(nvrtc.nvrtcCompileProgram(program, len(options), flags))
    size = ctypes.c_size_t()
    check(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetPTX(program, text))
    check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    return text.raw.rstrip(b"\0")


def check(result: int) -> None:
    if result:
        raise RuntimeError(f"NVRTC error {result}")


def timed(command: List[str], environment: Dict[str, str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode > 3:
        raise SystemExit(done.stderr)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="cuda==12.9")
    parser.add_argument("--candidate", default="cuda==13.2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--naive", nargs=2, metavar=("SPEC", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.naive:
        naive(given.naive[0], Path(given.naive[1]))
        return
    specs = [given.base, given.candidate]
    open_stacks(specs), disassembler()  # wheels present
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch) / "cache"
        own.mkdir()
        for entry in cache.root().iterdir():  # the toolchains, without the units
            if entry.name != "units":
                (own / entry.name).symlink_to(entry, target_is_directory=entry.is_dir())
        environment = {**os.environ, "BRAKECHECK_CACHE": str(own)}
        command = [sys.executable, "-c", "from brakecheck.cli import main; main()", "compare", *specs, "--json"]
        cold = timed(command, environment)
        warm = [timed(command, environment) for _ in range(5)]
        plain = {}
        for spec in specs:
            folder = Path(scratch) / spec
            folder.mkdir()
            plain[spec] = timed([sys.executable, __file__, "--naive", spec, str(folder)], environment)
    total = sum(plain.values())
    middle = statistics.median(warm)
    for name, seconds in (("cold", cold), ("warm, median of 5", middle), ("naive loop, both stacks", total)):
        print(f"{name:<32} {seconds:8.2f} s   {total / seconds:6.1f} x the naive loop")
    record = {
        "benchmark": "static_compare",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/static_compare.py", *sys.argv[1:]]), "cores": os.cpu_count(),
        "machine": platform.machine(), "load_before": load_before, "stacks": specs, "archs": list(DEFAULT_ARCHS),
        "sources": len(catalogue_sources()), "cold_s": cold, "warm_s": warm, "naive_s": plain,
        "ratio_cold": total / cold, "ratio_warm": total / middle,
    }
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
