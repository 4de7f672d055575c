"""Runs every CUDA kernel of the catalogue on this machine's GPU against its FP64 reference, and times it.

    python3 benchmarks/check_kernels.py BUNDLE              cubins of a bundle (manifest.json beside them)
    python3 benchmarks/check_kernels.py --nvcc [PATH]       compile the catalogue here, with this nvcc
    ... --operator NAME --json FILE --no-time

Where FILE is of a run that was cut off, the rows that are right are kept.

For each case and kernel: fresh random inputs of two seeds, poisoned outputs, comparison with the reference, every
element written, three launches bit for bit. Then the median time of graph replays, with copies of the buffers that
together exceed the L2 cache several times. Needs torch, and of brakecheck model, ops, kernels and worker alone.

The work is done by a child process, so that a kernel that hangs or loses the context costs its own line and no other.

manifest.json: {"kernels": [{"operator", "kernel", "arch", "toolchain", "cubin", "entries": {expression: mangled}}]}
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from record import KERNELS, Record  # noqa: E402

from brakecheck.model import BrakecheckError, Source, UnavailableError, UsageError  # noqa: E402
from brakecheck.ops import Case, CudaKernel, Operator, catalogue, catalogue_sources  # noqa: E402
from brakecheck.ops.make import Make  # noqa: E402
from brakecheck.worker.driver import KernelRun, Module, driver_version  # noqa: E402

SEEDS = (1, 2)
HANG_SECONDS = 40
TIMED_SECONDS = 0.2  # of device time a case, between 3 and 20 repetitions
Row = Dict[str, Any]


# ---- compiling here -------------------------------------------------------------------------------------------------

def mangled_name(entry: str, cubin: bytes) -> str:
    """The symbol of an entry: extern "C" names are themselves; of a template with arguments that are integers or of
    these types, the symbol in the cubin that starts with its name and arguments (Itanium C++ ABI, 5.1)."""
    types = {"float": "f", "unsigned short": "t"}
    template = re.fullmatch(r"(\w+)<([-\w, ]+)>", entry)
    if not template:
        return entry
    name, arguments = template[1], template[2].split(", ")
    prefix = f"_Z{len(name)}{name}I" + "".join(types.get(a) or f"Li{a.replace('-', 'n')}E" for a in arguments) + "E"
    found = re.search(re.escape(prefix).encode() + rb"\w+", cubin)
    if not found:
        raise BrakecheckError(f"{entry} is not in the cubin", None, "instantiate the template in the kernel's file")
    return found[0].decode()


def compile_all(nvcc: str, arch: str, folder: Path, only: Optional[str]) -> List[Row]:
    """Compiles the catalogue with `nvcc` for `arch` and returns the manifest's kernels; a file that does not compile is
    a row with its message."""
    try:
        banner = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnavailableError(f"nvcc cannot be run: {error}", nvcc, "give its path: --nvcc /path/to/nvcc") from None
    toolchain = "nvcc " + (re.search(r"V(\d+\.\d+\.\d+)", banner) or ["", "of unknown version"])[1]

    number = int(re.sub(r"\D", "", arch))
    sources = [s for s in catalogue_sources() if (not only or s.operator == only)
               and s.min_arch <= number and (not s.archs or arch in s.archs)]
    cubins = {(s.path, s.defines): folder / f"{i}.cubin" for i, s in enumerate(sources)}

    def compiled(source: Source) -> str:
        """The compiler's message; empty where it made a cubin."""
        command = [nvcc, "-cubin", f"-arch={arch}", f"-std={source.std}", "-lineinfo"]
        command += [f"-I{d}" for d in source.include_dirs] + [f"-D{d}" for d in source.defines]
        command += ["-o", str(cubins[source.path, source.defines]), source.path]
        done = subprocess.run(command, capture_output=True, text=True)
        return (done.stderr or done.stdout or f"exit {done.returncode}").strip() if done.returncode else ""

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        messages = dict(zip(cubins.values(), pool.map(compiled, sources)))
    rows = []
    for operator in catalogue().values():
        for kernel in operator.kernels:
            cubin = cubins.get((str(kernel.path), kernel.defines))
            if cubin:
                row: Row = {"operator": operator.name, "kernel": kernel.name, "arch": arch, "toolchain": toolchain}
                if messages[cubin]:
                    rows.append({**row, "message": messages[cubin]})
                else:
                    image = cubin.read_bytes()
                    entries = {e.expression: mangled_name(e.expression, image) for e in kernel.entries}
                    rows.append({**row, "cubin": str(cubin), "entries": entries})
    return rows


def read_bundle(folder: Path, arch: str) -> List[Row]:
    """The manifest's kernels for `arch` (sm_90 runs on sm_90a's GPU too), with absolute paths of their cubins."""
    manifest = folder / "manifest.json"
    try:
        kernels = json.loads(manifest.read_text())["kernels"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"this is no bundle: {error}", str(manifest), "give the folder with manifest.json") from None
    return [{**k, "cubin": str(folder / k["cubin"])} for k in kernels if k["arch"] in (arch, arch.rstrip("a"))]


# ---- one kernel on one case (in the child) --------------------------------------------------------------------------

def compare(operator: Operator, case: Case, inputs: Row, reference: Row, out: Row) -> Row:
    """{"ok", "error", "problem"}: the largest relative error over the outputs that the reference has."""
    import torch

    for name in reference:
        value = out.get(name)
        if value is None:
            continue  # torch's attention does not return the log-sum-exp
        unwritten = value.isnan() if value.is_floating_point() else value == torch.iinfo(value.dtype).min
        if bool(unwritten.any()):
            return {"ok": False, "problem": f"{int(unwritten.sum())} elements of {name} not written, or NaN"}
    if operator.compare and all(name in out for name in reference):
        return operator.compare(case, inputs, reference, out)
    assert operator.choose_tolerance
    tolerance, worst = operator.choose_tolerance(case).relative, 0.0
    for name, wanted in reference.items():
        if name in out:
            difference = (out[name].double() - wanted.double()).norm()
            worst = max(worst, float(difference / wanted.double().norm().clamp_min(1e-300)))
    return {"ok": worst <= tolerance, "error": worst, "tolerance": tolerance}


def check(operator: Operator, case: Case, kernel: CudaKernel, functions: Row, drawn: List[Tuple[Row, Row]]) -> Row:
    """Numerics of a kernel over all seeds: error, coverage, determinism, and whether it was expected to be wrong."""
    import torch

    expected_wrong = kernel.wrong_on(case)
    result: Row = {}
    wrong_seeds = 0
    for inputs, reference in drawn:
        run = KernelRun(kernel, functions, case, inputs)
        first: Row = {}
        for repeat in range(3):
            run.poison()
            run.enqueue()
            torch.cuda.synchronize()
            if repeat == 0:
                first = {name: tensor.clone() for name, tensor in run.outputs.items() if name in reference}
                verdict = compare(operator, case, inputs, reference, run.outputs)
            elif not all(torch.equal(first[name], run.outputs[name]) for name in first):
                result["deterministic"] = False
        result.setdefault("deterministic", True)
        wrong_seeds += not verdict["ok"]
        if "error" in verdict:
            result["error"] = max(result.get("error", 0.0), verdict["error"])
        result.update({k: v for k, v in verdict.items() if k not in ("ok", "error")})
    if expected_wrong:
        result["expected_wrong"] = True
        result["ok"] = wrong_seeds == len(drawn)
        result.pop("problem", None)
        if not result["ok"]:
            result["problem"] = "expected to be wrong here, and is right"
    else:
        result["ok"] = wrong_seeds == 0
    if kernel.deterministic and not result["deterministic"] and not expected_wrong:
        result.update(ok=False, problem="equal inputs gave different bits")
    return result


def copies_for(case_bytes: float) -> int:
    import torch

    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 50 << 20)
    return int(min(16, max(2, 3 * cache // max(case_bytes, 1) + 1)))


def time_kernel(kernel: CudaKernel, functions: Row, case: Case, inputs: Row, case_bytes: float) -> float:
    """Median seconds a launch: replays of a graph that runs once over each copy of the buffers."""
    import torch

    copies = copies_for(case_bytes)
    runs = [KernelRun(kernel, functions, case, {n: t.clone() for n, t in inputs.items()}) for _ in range(copies)]
    for run in runs:
        run.enqueue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run.enqueue()
    return _median(graph.replay) / copies


def time_torch(implementation: Any, case: Case, inputs: Row, case_bytes: float) -> float:
    """Median seconds a call, eagerly, over copies of the inputs (some of these calls cannot be captured)."""
    copies = [{n: t.clone() for n, t in inputs.items()} for _ in range(copies_for(case_bytes))]

    def all_copies() -> None:
        for copy in copies:
            implementation(case, **copy)

    return _median(all_copies) / len(copies)


def _median(work: Any) -> float:
    import torch

    def seconds() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    seconds()  # the first replay uploads the graph
    repeats = int(min(20, max(3, TIMED_SECONDS / max(seconds(), 1e-6))))
    return statistics.median(seconds() for _ in range(repeats))


# ---- the child ------------------------------------------------------------------------------------------------------

def key_of(row: Row) -> str:
    return f"{row['operator']}/{row['kernel']}/{row['toolchain']}"


def work_through(kernels: List[Row], done: Set[str], timed: bool, only: Optional[str]) -> Iterator[Row]:
    """Rows, each announced by {"start": ...} first. done: what is not run (again): "operator/kernel/toolchain/case", or
    without the case for a kernel that hung or lost the context."""
    import torch

    loaded: Dict[str, Module] = {}
    for operator in catalogue().values():
        mine = [k for k in kernels if k["operator"] == operator.name and "entries" in k]
        if not mine or (only and operator.name != only):
            continue
        by_name = {k.name: k for k in operator.kernels}
        for case in operator.cases:
            todo = [k for k in mine if by_name[k["kernel"]].supports(case) and key_of(k) not in done
                    and f"{key_of(k)}/{case.name}" not in done]
            torch_key = {"operator": operator.name, "kernel": "torch", "toolchain": f"torch {torch.__version__}"}
            supported = any(by_name[k["kernel"]].supports(case) for k in mine)
            if not todo and (not supported or f"{key_of(torch_key)}/{case.name}" in done):
                continue
            assert operator.make_inputs and operator.compute_reference and operator.compute_cost
            cost = operator.compute_cost(case)
            drawn = []
            for seed in SEEDS:
                inputs = operator.make_inputs(case, Make("cuda", seed))
                drawn.append((inputs, operator.compute_reference(case, **inputs)))
            for entry in [*todo, torch_key]:
                row = {k: entry[k] for k in ("operator", "kernel", "toolchain")}
                row.update(case=case.name, arch=entry.get("arch"))
                if f"{key_of(entry)}/{case.name}" in done:
                    continue
                yield {"start": row}
                if entry is torch_key:
                    implementation = operator.implementations["torch"]
                    row.update(compare(operator, case, *drawn[0], implementation(case, **drawn[0][0])))
                    seconds = time_torch(implementation, case, drawn[0][0], cost.bytes) if timed else None
                else:
                    kernel = by_name[entry["kernel"]]
                    if entry["cubin"] not in loaded:
                        loaded[entry["cubin"]] = Module(Path(entry["cubin"]).read_bytes(), entry["cubin"])
                    functions = {e: loaded[entry["cubin"]].function(m) for e, m in entry["entries"].items()}
                    row["registers"] = functions[kernel.entry].attributes()["registers"]
                    row.update(check(operator, case, kernel, functions, drawn))
                    seconds = time_kernel(kernel, functions, case, drawn[0][0], cost.bytes) if timed else None
                if seconds:
                    row.update(us=seconds * 1e6, gb_s=cost.bytes / seconds / 1e9, tflop_s=cost.flops / seconds / 1e12)
                yield {"row": row}
            del drawn
            torch.cuda.empty_cache()


def child(arguments: argparse.Namespace) -> int:
    import torch

    plan = json.loads(sys.stdin.read())
    major, minor = driver_version()
    say({"device": torch.cuda.get_device_name(0), "driver": driver_release(), "driver_cuda": f"{major}.{minor}",
         "torch": torch.__version__})
    started: Row = {}
    try:
        for message in work_through(plan["kernels"], set(plan["done"]), not arguments.no_time, arguments.operator):
            started = message.get("start", started)
            say(message)
    except (BrakecheckError, RuntimeError) as error:  # torch reports a lost context as RuntimeError
        if not started:
            raise
        say({"row": {**started, "ok": False, "problem": str(error).splitlines()[0]}, "fatal": True})
        return 1
    return 0


def driver_release() -> Optional[str]:
    """580.159.04 and the like; None where nvidia-smi is not there to ask."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def say(message: Row) -> None:
    print(json.dumps(message), flush=True)


# ---- the parent -----------------------------------------------------------------------------------------------------

def supervise(kernels: List[Row], arguments: argparse.Namespace, record: Record) -> None:
    """Runs children until every case is done or has failed, and adds rows to those that the record has."""
    facts: Row = {}
    done = [f"{key_of(row)}/{row['case']}" for row in record.rows]
    while True:
        before = len(done)
        command = [sys.executable, str(Path(__file__).resolve()), "--child"]
        command += ["--no-time"] if arguments.no_time else []
        command += ["--operator", arguments.operator] if arguments.operator else []
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            started, problem, facts = follow(process, {"kernels": kernels, "done": done}, done, record, facts)
            status = process.wait()
        finally:
            process.kill()
        if status == 0:
            return
        if started:
            record.add({**started, "ok": False, "problem": problem})
            done += [f"{key_of(started)}/{started['case']}", key_of(started)]
            show(record.rows[-1])
        elif len(done) == before:
            raise UnavailableError("the child process ended without a result", None, "see its message above")


def follow(process: Any, plan: Row, done: List[str], record: Record, facts: Row) -> Tuple[Optional[Row], str, Row]:
    """Takes what a child says until it ends or hangs: the case that it left unfinished, why, and what the device is."""
    process.stdin.write(json.dumps(plan))
    process.stdin.close()
    lines: queue.Queue[Optional[str]] = queue.Queue()
    threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
    started: Optional[Row] = None
    while True:
        try:
            line = lines.get(timeout=HANG_SECONDS)
        except queue.Empty:
            process.kill()
            return started, f"no answer for {HANG_SECONDS} s: killed", facts
        if line is None:
            return started, "the process ended", facts
        message = json.loads(line)
        if "start" in message:
            started = message["start"]
        elif "row" in message:
            record.add(message["row"])
            done.append(f"{key_of(message['row'])}/{message['row']['case']}")
            if message.get("fatal"):
                done.append(key_of(message["row"]))
            started = None
            show(message["row"])
        else:
            if not facts:
                print(", ".join(f"{k} {v}" for k, v in message.items() if v), flush=True)
            facts = message
            record.data.update(message)


def _forward(out: Any, lines: queue.Queue[Optional[str]]) -> None:
    for line in out:
        lines.put(line)
    lines.put(None)


def show(row: Row) -> None:
    def number(key: str, form: str) -> str:
        return form.format(row[key]) if row.get(key) is not None else ""

    rate = number("tflop_s", "{:.1f} TFLOP/s") if row.get("tflop_s", 0) > 20 else number("gb_s", "{:.0f} GB/s")
    state = "ok" if row["ok"] else "FAIL"
    if row.get("expected_wrong") and row["ok"]:
        state = "ok (wrong, as it must be)"
    print(f"{row['operator']:18} {row['case']:38} {row['kernel']:17} {row['toolchain']:18} "
          f"{number('us', '{:.1f}'):>9} us {rate:>15} {number('error', '{:.1e}'):>8} {state} {row.get('problem', '')}",
          flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--nvcc", nargs="?", const="nvcc", help="compile the catalogue with this nvcc")
    parser.add_argument("--arch", help="for --nvcc; by default this GPU's, with its feature set (sm_90a)")
    parser.add_argument("--operator", help="only this one")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--no-time", action="store_true", help="numerics only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    if bool(arguments.bundle) == bool(arguments.nvcc):
        raise UsageError("give either a bundle or --nvcc", None, "see --help")
    if arguments.operator and arguments.operator not in catalogue():
        raise UsageError(f"no operator {arguments.operator!r}", "--operator", f"one of {', '.join(catalogue())}")
    device, torch_version, arch = here()
    files = [*(KERNELS / "cuda").iterdir(), *(KERNELS.parent / "ops").glob("*.py"),
             *(KERNELS.parent / "worker" / name for name in ("driver.py", "numerics.py"))]
    if arguments.bundle:
        files += [f for f in arguments.bundle.iterdir() if f.is_file()]
    facts = {"device": device, "torch": torch_version, "timed": not arguments.no_time}
    record = Record(arguments.json, __file__, facts, [f for f in files if f.is_file()])
    return record.run(lambda: work(record, arguments, arguments.arch or arch))


def work(record: Record, arguments: argparse.Namespace, arch: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        with record.phase("compiling"):
            if arguments.nvcc:
                kernels = compile_all(arguments.nvcc, arch, Path(folder), arguments.operator)
            else:
                kernels = read_bundle(arguments.bundle, arch)
        with record.phase("running"):
            supervise(kernels, arguments, record)
    for failed in (k for k in kernels if "message" in k):
        record.add({**failed, "case": "compile", "ok": False, "problem": failed["message"].splitlines()[0]})
        show(record.rows[-1])
        print(failed["message"])
    wrong = [r for r in record.rows if not r["ok"]]
    print(f"{len(record.rows)} rows, {len(wrong)} failed")
    return 1 if wrong or not record.rows else 0


def here() -> Tuple[str, str, str]:
    """This GPU, torch's version and the GPU's architecture, asked in a process of its own: the parent must not hold a
    context."""
    code = ("import torch as t; print(t.cuda.get_device_name(), t.__version__, "
            "'sm_%d%d' % t.cuda.get_device_capability(), sep='\\n')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise UnavailableError("torch sees no GPU", done.stderr.strip().splitlines()[-1], "run on a machine with a GPU")
    device, version, arch = done.stdout.split("\n")[:3]
    return device, version, arch + "a" if int(arch[3:]) >= 90 else arch


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrakecheckError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
