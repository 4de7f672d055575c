"""Micro-experiments on this GPU, each a question with two or more answers: launch chains, conditional graph nodes,
allocation, copies from the host, managed memory, counters. A line an answer; --json keeps them. What is run is the
catalogue's operators of these names (brakecheck/ops), which `brakecheck compare` compares; counters need ncu.

    python3 benchmarks/micro.py --json record.json [--only allocate]

Where record.json is of a run that was cut off, the experiments that it ended are kept. What this machine lacks is left
out, with a message.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import torch  # noqa: E402
from record import KERNELS, NO_DEVICE, Record, device_facts, no_device  # noqa: E402

from brakecheck.kernels import jit  # noqa: E402
from brakecheck.kernels.arena import Arena  # noqa: E402
from brakecheck.model import BrakecheckError  # noqa: E402
from brakecheck.ops import Case, catalogue  # noqa: E402
from brakecheck.ops.allocation import ALLOCATORS, expert_sizes, orders  # noqa: E402
from brakecheck.ops.base import Missing  # noqa: E402
from brakecheck.ops.make import Make  # noqa: E402
from brakecheck.worker import numerics  # noqa: E402

Answer = Tuple[str, str, float, str]  # question, answer, value, unit
MEASURED = ("launch_chain", "conditional_nodes", "allocation", "host_copy", "managed_memory")


def seconds(work: Callable[[], Any], repeats: int = 9) -> float:
    """Median seconds from call to the end of its work on the device."""
    return statistics.median([seconds_of(work) for _ in range(repeats + 1)][1:])


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds from call, on an idle device, to the end of its work."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def host_seconds(work: Callable[[], Any], repeats: int) -> List[float]:
    """Seconds of each call on the host, rising."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)


def device_us(work: Callable[[], Any]) -> float:
    """Median microseconds of a call on the device, by events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(12):
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times[2:])


def opened(operator: str, names: Dict[str, str],
           case: Case) -> Iterator[Tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """(answer, call, before) of implementations of an operator (names: by answer) on the same inputs. What they give is
    checked. One whose needs this machine lacks is left out, with a message."""
    op = catalogue()[operator]
    inputs = op.make_inputs(case, Make("cuda", 7))
    reference = op.compute_reference(case, **inputs)
    for answer, name in names.items():
        function = op.implementations[name]
        try:
            found = numerics.check(op, case, inputs, getattr(function, "checked", function)(case, **inputs), reference)
            assert found["ok"], f"{operator} {name}: {found['why']}"
            before = getattr(function, "before", lambda case, **inputs: None)
            yield answer, partial(function, case, **inputs), partial(before, case, **inputs)
        except (Missing, BrakecheckError) as error:
            print(f"{operator} {name} {case.name}: left out: {error}", file=sys.stderr)
        finally:
            getattr(function, "close", lambda: None)()


# ---- launching ------------------------------------------------------------------------------------------------------

def launches() -> Iterator[Answer]:
    """A chain of 100 small kernels, each adding to what the one before it wrote (A3)."""
    names = {"torch, eager": "torch", "driver launches": "driver", "torch, graph": "torch-graph", "graph": "graph",
             "graph, dependent launch": "graph-dependent"}
    for answer, call, _ in opened("launch_chain", names, Case.of(kernels=100, n=132)):
        yield "100 small kernels", answer, device_us(call) if "graph" in answer else 1e6 * seconds(call), "us"


def conditionals() -> Iterator[Answer]:
    """What a conditional node of a graph costs, its body one small kernel or empty, taken and not (B3)."""
    ways: List[Tuple[int, int, Dict[str, str]]] = [(100, 1, {"kernel": "known"})]
    for turns, end in ((1, ""), (0, ", empty")):
        ways += [
            (100, turns, {f"IF, taken{end}": "if", f"IF ELSE, else{end}": "if-else",
                          f"SWITCH of 8, last{end}": "switch"}),
            (0, turns, {f"IF, not taken{end}": "if", f"WHILE, not entered{end}": "while",
                        f"SWITCH of 8, none{end}": "switch"})]
    ways += [(100, turns, {f"WHILE, {turns} turn{'s' * (turns > 1)}": "while"}) for turns in (1, 2, 10)]
    for taken, turns, names in ways:
        case = Case.of(nodes=50, taken=taken, turns=turns)
        for answer, call, _ in opened("conditional_nodes", names, case):
            yield "graph node", answer, device_us(call) / case["nodes"], "us"


# ---- allocation -----------------------------------------------------------------------------------------------------

NAMES = {"cuda-malloc": "cuMemAlloc", "pool-cold": "pool, cold", "pool": "pool, warm", "torch": "torch",
         "arena": "arena"}
REPEATS = {"cuda-malloc": 40, "pool-cold": 40, "pool": 400, "torch": 400, "arena": 20000}


def allocate() -> Iterator[Answer]:
    """Latency of allocate + free, and fragmentation over 100 rounds (B11)."""
    device = torch.device("cuda", torch.cuda.current_device())
    for size in (512, 64 << 10, 1 << 20, 64 << 20, 1 << 30):
        for name, answer in NAMES.items():
            with ALLOCATORS[name](device, size) as a:

                def one(a: Any = a, size: int = size) -> None:
                    a.free(a.allocate(size))
                    a.end()

                one()
                times = host_seconds(one, REPEATS[name])
            yield f"allocate {size} bytes", answer, 1e6 * times[len(times) // 2], "us"
            yield f"allocate {size} bytes", f"{answer}, 99th of 100", 1e6 * times[len(times) * 99 // 100], "us"
    version = ctypes.c_int()
    yield "empty driver call", "through ctypes", 1e6 * host_seconds(
        lambda: jit.call("cuDriverGetVersion", ctypes.byref(version)), 1000)[500], "us"
    arena = Arena(1 << 30)
    slots = arena.slots(64 << 20, 4)
    take, back = arena.allocate, arena.free
    start = time.perf_counter()
    for _ in range(200000):
        back(take(4096))
    yield "allocate, mean of 200000", "arena", 5 * (time.perf_counter() - start), "us"
    take, back = slots.allocate, slots.free
    start = time.perf_counter()
    for _ in range(200000):
        back(take())
    yield "allocate, mean of 200000", "slots of the arena", 5 * (time.perf_counter() - start), "us"
    del a, one, arena, slots  # and with them their memory
    yield from fragmentation(device)


def fragmentation(device: Any) -> Iterator[Answer]:
    """Memory that is held after 100 rounds of expert_sizes, over what the largest asks for; within a round blocks go
    back in a random order. Of the arena also the share below its top that no request uses, at a round's fullest."""
    rounds = list(expert_sizes(100))
    most = max(map(sum, rounds))
    arena, worst = Arena(-(-2 * most // 256) * 256, lambda n: None), 0.0
    for sizes, order in zip(rounds, orders(rounds)):
        starts = [arena.allocate(n) for n in sizes]
        worst = max(worst, 1 - sum(sizes) / arena.top)
        for i in order:
            arena.free(starts[i])
        assert arena.top == 0
    yield "fragmentation, 100 rounds", "arena", 100 * worst, "%"
    for name in ("arena", "torch", "pool"):
        yield "held after 100 rounds", name, 100 * (held_after(name, device, rounds) / most - 1), \
            "% over the largest round"


def held_after(name: str, device: Any, rounds: List[List[int]]) -> int:
    """Bytes that an allocator, none of whose memory is there before, holds after these rounds."""
    torch.cuda.empty_cache()
    with ALLOCATORS[name](device, max(map(sum, rounds))) as a:
        for sizes, order in zip(rounds, orders(rounds)):
            blocks: List[Any] = [a.allocate(n) for n in sizes]
            for i in order:
                a.free(blocks[i])
                blocks[i] = None
        return a.held()


# ---- memory of the host ---------------------------------------------------------------------------------------------

def host_copies() -> Iterator[Answer]:
    """256 MiB from the host, three ways."""
    names, size = {"pageable": "torch", "pinned": "pinned", "read by a kernel (zero copy)": "zero-copy"}, 256 << 20
    for answer, call, _ in opened("host_copy", names, Case.of(words=size // 4)):
        yield "host to device, 256 MiB", answer, size / seconds(call, 5) / 1e9, "GB/s"


def managed() -> Iterator[Answer]:
    """A table of the host, a quarter of its chunks read by a kernel (B6): first read, second read. Of managed memory,
    of pinned memory, and gathered by the host."""
    case = Case.of(chunks=256, chosen=64, bytes=4 << 20, read="first")
    names = {"no advice": "managed", "read mostly": "read-mostly", "stays on the host, mapped": "mapped",
             "prefetch of the chosen": "prefetch", "pinned, read in place": "pinned", "pinned, copied": "pinned-copy",
             "gathered by the host": "torch"}
    useful = case["chosen"] * case["bytes"]
    question = "managed, 256 MiB of 1 GiB"
    for answer, call, before in opened("managed_memory", names, case):
        before()
        first, second = (seconds_of(call) for _ in range(2))
        yield f"{question}, first read", answer, useful / first / 1e9, "GB/s"
        yield f"{question}, first read, a chunk of 4 MiB", answer, 1e6 * first / case["chosen"], "us"
        yield f"{question}, second read", answer, useful / second / 1e9, "GB/s"


def profiled() -> None:
    """One launch of each kernel whose counters a profiler is asked for: transpose (B9), router_reduce (B12)."""
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
    x, out = torch.randn(4096, 4096, device="cuda"), torch.empty(4096, 4096, device="cuda")
    for pad in (0, 1):
        kernel = jit.kernel("transpose.cu", "transpose", device, (32, 8), 0, 1, (f"PAD={pad}",))
        kernel((128, 128), [x, out, 4096, 4096], stream)
    p, load = torch.randn(65536, 64, device="cuda").softmax(1), torch.zeros(64, device="cuda")
    for inline in (0, 1):
        kernel = jit.kernel("router_reduce.cu", "router_reduce", device, (256, 1), 256, 1, (f"INLINE_PTX={inline}",))
        kernel((256, 1), [p, load, 65536, 64], stream)
    torch.cuda.synchronize()


METRICS = {
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "bank conflicts of loads",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": "bank conflicts of stores",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of DRAM peak",
    "smsp__inst_executed.sum": "instructions", "sm__inst_executed.avg.per_cycle_active": "instructions a cycle",
    "gpu__time_duration.sum": "us, profiled",
}
PROFILED = {"transpose": ["no padding", "padded"], "router_reduce": ["compiler's own", "inline PTX"]}


def counters() -> Iterator[Answer]:
    """What Nsight Compute counts in one launch of each kernel of profiled(), this file run under it."""
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base",
               "--metrics", ",".join(METRICS), "--kernel-name", "regex:transpose|router_reduce",
               sys.executable, __file__, "--only", "profiled"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        print(f"counters: left out, they need ncu: {error}", file=sys.stderr)
        return
    table = list(csv.reader(line for line in done.stdout.splitlines() if line.startswith('"')))
    if done.returncode or len(table) != 6:  # names, units, four kernels
        raise BrakecheckError("ncu gave no counters: " + (done.stdout + done.stderr)[-400:].strip(), "ncu",
                              "see its message")
    seen: Dict[str, int] = {}
    for line in table[2:]:
        row = dict(zip(table[0], line))
        name = "transpose" if "transpose" in row["Kernel Name"] else "router_reduce"
        answer = PROFILED[name][seen.setdefault(name, 0)]
        seen[name] += 1
        for metric, unit in METRICS.items():
            value = float(row[metric].replace(",", ""))
            yield f"{name}: counters", answer, value / 1e3 if metric.startswith("gpu__time") else value, unit


EXPERIMENTS = {"launches": launches, "conditionals": conditionals, "allocate": allocate, "host": host_copies,
               "managed": managed, "counters": counters}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the answers here")
    parser.add_argument("--only", choices=[*EXPERIMENTS, "profiled"])
    arguments = parser.parse_args()
    if no_device():
        return NO_DEVICE
    torch.zeros(1, device="cuda")
    if arguments.only == "profiled":
        profiled()
        return 0
    cuda, ops = KERNELS / "cuda", KERNELS.parent / "ops"
    record = Record(arguments.json, __file__, device_facts(), [
        *(cuda / name for name in ("transpose.cu", "router_reduce.cu", "warp.cuh")), *(cuda / "micro").glob("*.cu"),
        *(ops / f"{name}.py" for name in MEASURED), KERNELS / "arena.py", KERNELS / "jit.py"])
    return record.run(lambda: work(record, arguments.only))


def work(record: Record, only: Optional[str]) -> int:
    ended = record.data.setdefault("ended", [])
    record.rows[:] = [row for row in record.rows if row["experiment"] in ended]
    for name, experiment in EXPERIMENTS.items():
        if only not in (None, name) or name in ended:
            continue
        with record.phase(name):
            for question, answer, value, unit in experiment():
                record.add({"experiment": name, "question": question, "answer": answer, "value": value, "unit": unit})
                print(f"{question:52} {answer:30} {value:12.3f} {unit}", flush=True)
        if record.rows and record.rows[-1]["experiment"] == name:  # else it was left out, and said why
            ended.append(name)
            record.save()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrakecheckError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
