"""Micro-experiments on this GPU, each a question with two or more answers: launch chains, conditional graph nodes,
allocation, copies from the host, managed memory, counters. A line an answer; --json keeps them. WHILE nodes with a body
need nvcc, counters need ncu: without them these are left out, with a message.

    python3 benchmarks/micro.py --json record.json [--only allocate]

Where record.json is of a run that was cut off, the experiments that it ended are kept.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import torch  # noqa: E402
from record import KERNELS, NO_DEVICE, Record, device_facts, no_device  # noqa: E402
from timing import medians  # noqa: E402

from brakecheck.kernels import jit  # noqa: E402
from brakecheck.kernels.arena import Arena  # noqa: E402
from brakecheck.model import BrakecheckError  # noqa: E402

SOURCE = str(Path(__file__).resolve().parent / "micro.cu")
Answer = Tuple[str, str, float, str]  # question, answer, value, unit
cuda = jit._call


def seconds(work: Callable[[], Any], repeats: int = 9) -> float:
    """Median seconds from call to the end of its work on the device."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def host_seconds(work: Callable[[], Any], repeats: int) -> List[float]:
    """Seconds of each call on the host, rising."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


# ---- launching ------------------------------------------------------------------------------------------------------

def dependent(name: str) -> jit.Kernel:
    """A kernel launched with programmatic stream serialisation (CU_LAUNCH_ATTRIBUTE 6)."""
    kernel = jit.Kernel(SOURCE, name, torch.cuda.current_device(), (128, 1), 0, 1, ())
    kernel._attribute = jit._Attribute(6, b"", (ctypes.c_uint * 3)(1, 0, 0))
    kernel._config.attributes = ctypes.addressof(kernel._attribute)
    kernel._config.attribute_count = 1
    return kernel


def launches() -> Iterator[Answer]:
    """A chain of 100 small kernels, each adding to what the one before it wrote (A3)."""
    x = torch.zeros(132, device="cuda")
    plain = jit.kernel(SOURCE, "small", torch.cuda.current_device(), (128, 1))
    ways = [("graph", plain)]
    if torch.cuda.get_device_capability() >= (9, 0):
        ways.append(("graph, dependent launch", dependent("small_dependent")))

    def chain(kernel: Any) -> Callable[[], None]:
        return lambda: [kernel((132, 1), [x], stream()) for _ in range(100)] and None

    def eager() -> None:
        for _ in range(100):
            x.add_(1.0)

    yield "100 small kernels", "torch, eager", 1e6 * seconds(eager), "us"
    yield "100 small kernels", "driver launches", 1e6 * seconds(chain(plain)), "us"
    for name, kernel in ways:
        x.zero_()
        value = medians({name: [chain(kernel)]}, 1)[name]
        yield "100 small kernels", name, value, "us"
    assert x.unique().numel() == 1, "a dependent kernel ran before what it depends on"


class _ConditionalParams(ctypes.Structure):
    """CUgraphNodeParams with CUDA_CONDITIONAL_NODE_PARAMS: 12.4 and newer."""

    _fields_ = [("type", ctypes.c_int), ("reserved0", ctypes.c_int * 3), ("handle", ctypes.c_uint64),
                ("kind", ctypes.c_int), ("size", ctypes.c_uint), ("bodies", ctypes.POINTER(ctypes.c_void_p)),
                ("context", ctypes.c_void_p), ("rest", ctypes.c_char * (232 - 32)), ("reserved2", ctypes.c_longlong)]


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = [("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
                ("shared", ctypes.c_uint), ("arguments", ctypes.c_void_p), ("extra", ctypes.c_void_p),
                ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p)]


def graph_of(count: int, add: Callable[[ctypes.c_void_p, List[ctypes.c_void_p]], ctypes.c_void_p]) -> float:
    """Median microseconds a node of a chain of `count` nodes that add(graph, dependencies) makes."""
    graph, run = ctypes.c_void_p(), ctypes.c_void_p()
    cuda("cuGraphCreate", ctypes.byref(graph), 0)
    last: List[ctypes.c_void_p] = []
    for _ in range(count):
        last = [add(graph, last)]
    cuda("cuGraphInstantiateWithFlags", ctypes.byref(run), graph, ctypes.c_ulonglong(0))
    side = torch.cuda.Stream()
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(side)
        cuda("cuGraphLaunch", run, ctypes.c_void_p(side.cuda_stream))
        end.record(side)
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / count)
    cuda("cuGraphExecDestroy", run)
    cuda("cuGraphDestroy", graph)
    return statistics.median(times[2:])


def conditionals() -> Iterator[Answer]:
    """What a conditional node of a graph costs, its body one small kernel or empty, taken and not (B3)."""
    x = torch.zeros(132, device="cuda")
    kernel = jit.kernel(SOURCE, "small", torch.cuda.current_device(), (128, 1))
    pointer = ctypes.c_void_p(x.data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    context = ctypes.c_void_p()
    cuda("cuCtxGetCurrent", ctypes.byref(context))

    def array(nodes: List[ctypes.c_void_p]) -> Any:
        return (ctypes.c_void_p * max(len(nodes), 1))(*nodes)

    def add_kernel(graph: ctypes.c_void_p, after: List[ctypes.c_void_p], function: Any = kernel._handle,
                   given: Any = arguments, threads: int = 32) -> ctypes.c_void_p:
        three = ctypes.c_uint * 3
        params = _KernelParams(function, three(1, 1, 1), three(threads, 1, 1), 0, ctypes.addressof(given))
        node = ctypes.c_void_p()
        cuda("cuGraphAddKernelNode_v2", ctypes.byref(node), graph, array(after), ctypes.c_size_t(len(after)),
             ctypes.byref(params))
        return node

    def adder(kind: int, size: int, value: int, body: Any = None) -> Any:
        def add(graph: ctypes.c_void_p, after: List[ctypes.c_void_p]) -> ctypes.c_void_p:
            handle, node = ctypes.c_uint64(), ctypes.c_void_p()
            cuda("cuGraphConditionalHandleCreate", ctypes.byref(handle), graph, context, ctypes.c_uint(value),
                 ctypes.c_uint(1))  # CU_GRAPH_COND_ASSIGN_DEFAULT: this value at every launch
            params = _ConditionalParams(type=13, handle=handle.value, kind=kind, size=size, context=context)
            cuda("cuGraphAddNode_v2", ctypes.byref(node), graph, array(after), None, ctypes.c_size_t(len(after)),
                 ctypes.byref(params))
            for i in range(size):
                inside = ctypes.c_void_p(params.bodies[i])
                body(inside, handle.value) if body else add_kernel(inside, [])
            return node

        return add

    yield "graph node", "kernel", graph_of(50, add_kernel), "us"
    def empty(graph: ctypes.c_void_p, handle: int) -> None:
        """A body with no node; a WHILE that is entered must have one, or nothing ends it."""

    for name, kind, size, value, body in (
            ("IF, taken", 0, 1, 1, None), ("IF, not taken", 0, 1, 0, None), ("IF ELSE, else", 0, 2, 0, None),
            ("WHILE, not entered", 1, 1, 0, None), ("SWITCH of 8, last", 2, 8, 7, None),
            ("SWITCH of 8, none", 2, 8, 8, None), ("IF, taken, empty", 0, 1, 1, empty),
            ("IF, not taken, empty", 0, 1, 0, empty), ("WHILE, not entered, empty", 1, 1, 0, empty),
            ("SWITCH of 8, last, empty", 2, 8, 7, empty), ("SWITCH of 8, none, empty", 2, 8, 8, empty)):
        try:
            yield "graph node", name, graph_of(50, adder(kind, size, value, body)), "us"
        except BrakecheckError as error:
            print(f"graph node {name}: {error}", file=sys.stderr)
    turn = loop_body()
    for turns in (1, 2, 10) if turn else ():
        left = torch.full((1,), turns, dtype=torch.int32, device="cuda")

        def turns_left(graph: ctypes.c_void_p, handle: int, left: Any = left, turns: int = turns) -> None:
            given = [ctypes.c_uint64(handle), ctypes.c_void_p(left.data_ptr()), ctypes.c_int(turns)]
            pointers = (ctypes.c_void_p * 3)(*[ctypes.addressof(v) for v in given])
            add_kernel(graph, [], turn, pointers, 1)

        yield "graph node", f"WHILE, {turns} turn{'s' * (turns > 1)}", graph_of(50, adder(1, 1, 1, turns_left)), "us"
        assert int(left) == turns, "a WHILE node did not end its turns"


def loop_body() -> Any:
    """The kernel of micro_while.cu, through nvcc; None, with a message, where there is none."""
    function, module = ctypes.c_void_p(), ctypes.c_void_p()
    source = Path(__file__).resolve().parent / "micro_while.cu"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "while.cubin"
        major, minor = torch.cuda.get_device_capability()
        command = ["nvcc", f"-arch=sm_{major}{minor}", "-rdc=true", "-dlink", "-cubin", "-o", str(cubin), str(source)]
        try:
            subprocess.run([*command, "-lcudadevrt"], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            print(f"WHILE with a body: left out, it needs nvcc: {why}", file=sys.stderr)
            return None
        cuda("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin.read_bytes()))
    cuda("cuModuleGetFunction", ctypes.byref(function), module, b"turn")
    return function


# ---- allocation -----------------------------------------------------------------------------------------------------

def expert_sizes(rounds: int) -> Iterator[List[int]]:
    """Requests of a layer, round by round: 1 to 64 experts with 1 to 512 tokens each, an index and a weight a token,
    and activations of width 7168 in and out, 2048 inside, bfloat16."""
    generator = random.Random(20261201)
    for _ in range(rounds):
        tokens = [generator.randint(1, 512) for _ in range(generator.randint(1, 64))]
        yield [8 * t for t in tokens] + [2 * t * width for t in tokens for width in (7168, 4096, 2048, 7168)]


def allocate() -> Iterator[Answer]:
    """Latency of allocate + free, and fragmentation over 100 rounds (B11)."""
    pool, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    cuda("cuDeviceGetDefaultMemPool", ctypes.byref(pool), torch.cuda.current_device())

    def keep(threshold: int) -> None:
        cuda("cuMemPoolSetAttribute", pool, 4, ctypes.byref(ctypes.c_uint64(threshold)))  # RELEASE_THRESHOLD

    def plain(size: int) -> None:
        cuda("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        cuda("cuMemFree_v2", pointer)

    def ordered(size: int, wait: bool) -> None:
        cuda("cuMemAllocAsync", ctypes.byref(pointer), ctypes.c_size_t(size), ctypes.c_void_p(stream()))
        cuda("cuMemFreeAsync", pointer, ctypes.c_void_p(stream()))
        if wait:
            torch.cuda.synchronize()

    arena = Arena(2 << 30)

    def ours(size: int) -> None:
        arena.free(arena.allocate(size))

    for size in (512, 64 << 10, 1 << 20, 64 << 20, 1 << 30):
        shown = f"allocate {size} bytes"
        ways: List[Tuple[str, Callable[[int], Any], int, int]] = [
            ("cuMemAlloc", plain, 0, 40), ("pool, cold", lambda n: ordered(n, True), 0, 40),
            ("pool, warm", lambda n: ordered(n, False), 2**64 - 1, 400),
            ("torch", lambda n: torch.empty(n, dtype=torch.uint8, device="cuda"), 0, 400), ("arena", ours, 0, 20000)]
        for name, call, threshold, repeats in ways:
            keep(threshold)
            call(size)
            times = host_seconds(lambda call=call, size=size: call(size), repeats)
            yield shown, name, 1e6 * times[len(times) // 2], "us"
            yield shown, f"{name}, 99th of 100", 1e6 * times[len(times) * 99 // 100], "us"
    yield "empty driver call", "through ctypes", 1e6 * host_seconds(
        lambda: cuda("cuDriverGetVersion", ctypes.byref(ctypes.c_int())), 1000)[500], "us"
    slots = arena.slots(64 << 20, 4)
    one, back = arena.allocate, arena.free
    start = time.perf_counter()
    for _ in range(200000):
        back(one(4096))
    yield "allocate, mean of 200000", "arena", 5 * (time.perf_counter() - start), "us"
    one, back = slots.allocate, slots.free
    start = time.perf_counter()
    for _ in range(200000):
        back(one())
    yield "allocate, mean of 200000", "slots of the arena", 5 * (time.perf_counter() - start), "us"
    keep(0)
    yield from fragmentation(pool)


def fragmentation(pool: ctypes.c_void_p) -> Iterator[Answer]:
    """Share of the memory held at the fullest moment of any round that no request uses, 100 rounds of expert_sizes.
    Within a round blocks go back in a random order."""
    rounds = list(expert_sizes(100))
    most = max(map(sum, rounds))
    arena, generator = Arena(-(-2 * most // 256) * 256), random.Random(1)
    worst = 0.0
    for sizes in rounds:
        starts = [arena.allocate(n) for n in sizes]
        worst = max(worst, 1 - sum(sizes) / arena.top)
        generator.shuffle(starts)
        for s in starts:
            arena.free(s)
        assert arena.top == 0
    yield "fragmentation, 100 rounds", "arena", 100 * worst, "%"
    yield "held after 100 rounds", "arena", 100 * (arena.peak / most - 1), "% over the largest round"
    del arena
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for sizes in rounds:
        blocks = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in sizes]
        generator.shuffle(blocks)
        while blocks:
            blocks.pop()
    yield "held after 100 rounds", "torch", 100 * ((torch.cuda.memory_reserved() - before) / most - 1), \
        "% over the largest round"
    torch.cuda.empty_cache()
    cuda("cuMemPoolSetAttribute", pool, 4, ctypes.byref(ctypes.c_uint64(2**64 - 1)))
    pointer, held = ctypes.c_uint64(), ctypes.c_uint64()
    for sizes in rounds:
        made = []
        for n in sizes:
            cuda("cuMemAllocAsync", ctypes.byref(pointer), ctypes.c_size_t(n), ctypes.c_void_p(stream()))
            made.append(pointer.value)
        generator.shuffle(made)
        for p in made:
            cuda("cuMemFreeAsync", ctypes.c_uint64(p), ctypes.c_void_p(stream()))
    torch.cuda.synchronize()
    cuda("cuMemPoolGetAttribute", pool, 5, ctypes.byref(held))  # RESERVED_MEM_CURRENT
    yield "held after 100 rounds", "pool", 100 * (held.value / most - 1), "% over the largest round"
    cuda("cuMemPoolSetAttribute", pool, 4, ctypes.byref(ctypes.c_uint64(0)))
    cuda("cuMemPoolTrimTo", pool, ctypes.c_size_t(0))


# ---- memory of the host ---------------------------------------------------------------------------------------------

CHUNK = 4 << 20   # bytes: an expert's slice
CHUNKS = 256      # 1 GiB in all, far below what the GPU has free


def reader() -> Callable[[int, List[int]], None]:
    kernel = jit.kernel(SOURCE, "read_chunks", torch.cuda.current_device(), (256, 1))
    total = torch.zeros(1, dtype=torch.int32, device="cuda")

    def read(address: int, chosen: Any) -> None:
        class At:  # what jit takes for a pointer
            @staticmethod
            def data_ptr() -> int:
                return address

        kernel((64, 16), [At, chosen, total, chosen.numel(), CHUNK // 16], stream())

    return read


def host_copies() -> Iterator[Answer]:
    """256 MiB from the host, three ways; and 25 % of 1 GiB of experts, by a kernel that reads them in place."""
    size = 256 << 20
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    for name, source in (("pageable", torch.ones(size, dtype=torch.uint8)),
                         ("pinned", torch.ones(size, dtype=torch.uint8).pin_memory())):
        took = seconds(lambda source=source: target.copy_(source, non_blocking=True), 5)
        yield "host to device, 256 MiB", name, size / took / 1e9, "GB/s"
    read = reader()
    pinned = torch.ones(size, dtype=torch.uint8).pin_memory()
    every = torch.arange(size // CHUNK, dtype=torch.int32, device="cuda")
    took = seconds(lambda: read(pinned.data_ptr(), every), 5)
    yield "host to device, 256 MiB", "read by a kernel (zero copy)", size / took / 1e9, "GB/s"


def managed() -> Iterator[Answer]:
    """Managed memory that the host wrote, a quarter of its chunks read by a kernel (B6): first read, second read."""
    read = reader()
    generator = torch.Generator().manual_seed(7)
    chosen = torch.randperm(CHUNKS, generator=generator)[:CHUNKS // 4].int().cuda()
    address, device = ctypes.c_uint64(), torch.cuda.current_device()
    size, useful = CHUNKS * CHUNK, CHUNKS // 4 * CHUNK
    free, _ = torch.cuda.mem_get_info()
    if size * 4 > free:
        print("managed memory: left out, the GPU has too little free memory", file=sys.stderr)
        return

    def advise(what: int, where: int) -> None:
        cuda("cuMemAdvise", address, ctypes.c_size_t(size), what, where)

    def prefetch() -> None:
        for c in chosen.tolist():
            cuda("cuMemPrefetchAsync", ctypes.c_uint64(address.value + c * CHUNK), ctypes.c_size_t(CHUNK), device,
                 ctypes.c_void_p(stream()))

    ways: Dict[str, Callable[[], Any]] = {
        "no advice": lambda: None,
        "read mostly": lambda: advise(1, device),
        "stays on the host, mapped": lambda: (advise(3, -1), advise(5, device)),
        "prefetch of the chosen": prefetch,
    }
    for name, prepare in ways.items():
        cuda("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(size), 1)
        ctypes.memset(address.value, 1, size)
        start = time.perf_counter()
        prepare()
        torch.cuda.synchronize()
        ready = time.perf_counter() - start
        times = []
        for _ in range(2):
            start = time.perf_counter()
            read(address.value, chosen)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        first = times[0] + (ready if name.startswith("prefetch") else 0.0)
        yield "managed, 256 MiB of 1 GiB, first read", name, useful / first / 1e9, "GB/s"
        yield "managed, 256 MiB of 1 GiB, first read, a chunk of 4 MiB", name, 1e6 * first / chosen.numel(), "us"
        yield "managed, 256 MiB of 1 GiB, second read", name, useful / times[1] / 1e9, "GB/s"
        cuda("cuMemFree_v2", address)


def profiled() -> None:
    """One launch of each kernel whose counters a profiler is asked for: transpose (B9), router_reduce (B12)."""
    device = torch.cuda.current_device()
    x, out = torch.randn(4096, 4096, device="cuda"), torch.empty(4096, 4096, device="cuda")
    for pad in (0, 1):
        kernel = jit.kernel("transpose.cu", "transpose", device, (32, 8), 0, 1, (f"PAD={pad}",))
        kernel((128, 128), [x, out, 4096, 4096], stream())
    p, load = torch.randn(65536, 64, device="cuda").softmax(1), torch.zeros(64, device="cuda")
    for inline in (0, 1):
        kernel = jit.kernel("router_reduce.cu", "router_reduce", device, (256, 1), 256, 1, (f"INLINE_PTX={inline}",))
        kernel((256, 1), [p, load, 65536, 64], stream())
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
    kernels = [KERNELS / "cuda" / name for name in ("transpose.cu", "router_reduce.cu", "warp.cuh")]
    record = Record(arguments.json, __file__, device_facts(), [
        Path(SOURCE), Path(SOURCE).with_name("micro_while.cu"), Path(__file__).with_name("timing.py"), *kernels,
        KERNELS / "arena.py", KERNELS / "jit.py"])
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
