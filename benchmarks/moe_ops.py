"""The MoE operators beside their peers on this GPU: a line a case with the time, the share of copy speed, and the ratio
to the best peer. Every case is checked against float64 first.

    python3 benchmarks/moe_ops.py --json record.json [--svg docs] [--only router] [--no-compile]

Where record.json is of a run that was cut off, the lines it has are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import torch  # noqa: E402
from record import KERNELS, NO_DEVICE, Record, device_facts, no_device  # noqa: E402
from shares import svg  # noqa: E402
from timing import copies_for, medians  # noqa: E402

from brakecheck import ops  # noqa: E402
from brakecheck.kernels import jit, moe  # noqa: E402
from brakecheck.kernels import moe_plans as plans  # noqa: E402
from brakecheck.ops.make import Make  # noqa: E402
from brakecheck.ops.scatter_rows import draw_index  # noqa: E402
from brakecheck.worker import nvml  # noqa: E402

Row = Dict[str, Any]
# operator, case, bytes a call, candidates, error against float64, what the error may be
CaseOf = Tuple[str, str, float, Dict[str, List[Callable[[], Any]]], float, float]
Missing = Callable[[str, str], bool]  # operator, case: is it still to be measured?


def relative(out: Any, reference: Any) -> float:
    return float((out.double() - reference).norm() / reference.norm())


def repeat(call: Callable[[int], Any], copies: int) -> List[Callable[[], Any]]:
    return [lambda i=i: call(i) for i in range(copies)]


def router_cases(make: Make, compiled: bool, missing: Missing) -> Iterator[CaseOf]:
    # Top-k and weights alone: no counts, no places. torch.compile leaves topk to torch, so it is no further peer.
    def peer(x: Any, k: int) -> Any:
        weight, index = x.float().softmax(1).topk(k, dim=1)
        return weight / weight.sum(1, keepdim=True), index

    shapes = [(1, 256, 8, "float32"), (16, 256, 8, "float32"), (64, 256, 8, "float32"),
              (512, 256, 8, "float32"), (2048, 256, 8, "float32"), (8192, 64, 8, "float32"), (8192, 128, 8, "bfloat16"),
              (8192, 256, 8, "float32"),
              (8192, 512, 10, "float32"), (16384, 256, 8, "bfloat16"), (65536, 256, 8, "float32")]
    for tokens, experts, k, dtype in shapes:
        name = f"{tokens} x {experts} k{k} {dtype}"
        if not missing("route", name):
            continue
        size = tokens * experts * (4 if dtype == "float32" else 2)
        copies = copies_for(size)
        x = [make.normal(tokens, experts, dtype=dtype) for _ in range(copies)]
        bias = make.normal(experts, std=0.1)
        reference = plans.route(x[0].double(), k, "softmax", None, True, 1.0)
        out = ops.route(x[0], k)
        right = torch.equal(out.expert, reference["index"]) and all(
            torch.equal(getattr(out, n), reference[n]) for n in ("place", "counts", "offsets"))
        error = relative(out.weight, reference["weight"]) if right else float("inf")
        candidates = {"ours": repeat(lambda i, x=x, k=k: ops.route(x[i], k), copies),
                      "ours sigmoid+bias": repeat(
                          lambda i, x=x, k=k, b=bias: ops.route(x[i], k, "sigmoid", b), copies),
                      "torch": repeat(lambda i, x=x, k=k: peer(x[i], k), copies)}
        candidates.update(router_peers(x, k))
        yield "route", name, size + 12.0 * tokens * k, candidates, error, 1e-5


def router_peers(x: List[Any], k: int) -> Dict[str, List[Callable[[], Any]]]:
    """Top-k and softmax over the chosen, as quack has it: widths and k that are powers of two."""
    try:
        from quack.topk import topk_fwd

        topk_fwd(x[0], k, True)
    except Exception as error:  # noqa: BLE001 - not installed, or no such shape: its own line, not ours
        if not isinstance(error, ImportError):
            print(f"# quack {tuple(x[0].shape)} k{k}: {(str(error) or type(error).__name__).splitlines()[0][:100]}")
        return {}
    return {"quack": repeat(lambda i: topk_fwd(x[i], k, True), len(x))}


def reduce_cases(make: Make, compiled: bool, missing: Missing) -> Iterator[CaseOf]:
    """Sums of router probabilities: ours, which is what the compiler writes, the same with inline PTX, and torch's."""
    for tokens, experts in [(512, 256), (8192, 256), (16384, 64), (65536, 64), (65536, 256)]:
        name = f"{tokens} x {experts} float32"
        if not missing("router_reduce", name):
            continue
        size = 4.0 * tokens * experts
        x = [make.normal(tokens, experts).softmax(1) for _ in range(copies_for(size))]
        inline = jit.kernel("router_reduce.cu", "router_reduce", torch.cuda.current_device(), (plans.REDUCE_THREADS, 1),
                            4 * experts, 1, ("INLINE_PTX=1",))

        def by_hand(p: Any, kernel: jit.Kernel = inline) -> Any:
            load = p.new_zeros(p.shape[1])
            kernel(plans.reduce_grid(*p.shape), [p, load, *p.shape], torch.cuda.current_stream().cuda_stream)
            return load

        calls = {"ours": ops.router_reduce, "ours inline PTX": by_hand, "torch": lambda p: p.sum(0)}
        error = max(relative(call(x[0]), x[0].double().sum(0)) for call in calls.values())
        yield "router_reduce", name, size, {
            of: repeat(lambda i, x=x, call=call: call(x[i]), len(x)) for of, call in calls.items()
        }, error, 1e-5


def permute_cases(make: Make, compiled: bool, missing: Missing) -> Iterator[CaseOf]:
    for tokens, width, k in [(1, 7168, 8), (512, 7168, 8), (4096, 7168, 8), (8192, 4096, 2)]:
        name = f"{tokens} x {k} x {width} bfloat16"
        if not missing("permute", name) and not missing("unpermute", name):
            continue
        moved = 2.0 * tokens * width * (1 + k)
        copies = min(8, copies_for(moved))
        x = [make.normal(tokens, width, dtype="bfloat16") for _ in range(copies)]
        y = [make.normal(tokens * k, width, dtype="bfloat16") for _ in range(copies)]
        weight = make.uniform(tokens, k)
        place = ops.route(make.normal(tokens, 256), k).place
        source = torch.empty(tokens * k, dtype=torch.int64, device="cuda")
        source[place.reshape(-1).long()] = torch.arange(tokens * k, device="cuda") // k

        def sum_of_rows(y: Any, place: Any, weight: Any, width: int = width) -> Any:
            return (y[place.reshape(-1)].reshape(*place.shape, width) * weight[:, :, None]).sum(1).to(y.dtype)

        fused = torch.compile(sum_of_rows) if compiled else None
        error = float(not torch.equal(ops.permute(x[0], place), x[0][source]))
        yield "permute", name, moved, {
            "ours": repeat(lambda i, x=x, p=place: ops.permute(x[i], p), copies),
            "torch gather": repeat(lambda i, x=x, s=source: torch.index_select(x[i], 0, s), copies),
        }, error, 0.0
        some = slice(0, min(tokens, 256))
        reference = plans.unpermute_plain(y[0].double(), place[some], weight[some])
        error = relative(ops.unpermute(y[0], place, weight)[some], reference)
        candidates = {"ours": repeat(lambda i, y=y, p=place, w=weight: ops.unpermute(y[i], p, w), copies),
                      "torch": repeat(lambda i, y=y, p=place, w=weight: sum_of_rows(y[i], p, w), copies)}
        if fused:
            candidates["torch.compile"] = repeat(lambda i, y=y, p=place, w=weight, f=fused: f(y[i], p, w), copies)
        yield "unpermute", name, moved, candidates, error, 2.0**-8
        del x, y


def scatter_cases(make: Make, compiled: bool, missing: Missing) -> Iterator[CaseOf]:
    """Rows added by index in every form that there is (kernels/moe_plans.py), into many rows and into few."""
    shapes = [(16384, 50257, 1024), (65536, 50257, 1024), (500000, 100000, 128), (65536, 64, 1024)]
    for dtype in ("bfloat16", "float32"):
        for n, rows, width in shapes:
            for kind in ("uniform", "zipf", "one"):
                name = f"{n} -> {rows} x {width} {kind}" + (" float32" if dtype == "float32" else "")
                if missing("add_rows", name):
                    yield scatter_case(make, n, rows, width, kind, dtype, name)


def scatter_case(make: Make, n: int, rows: int, width: int, kind: str, dtype: str, name: str) -> CaseOf:
    index = draw_index(make, n, rows, kind)
    g = [make.normal(n, width, dtype=dtype) for _ in range(4)]
    out, wide = torch.zeros(rows, width, dtype=g[0].dtype, device="cuda"), index.long()
    reference = out.double().index_add_(0, index, g[0].double())

    def add(form: str) -> Callable[[Any], Any]:
        return lambda x: moe._scatter(form, out, index, x)

    forms = [f for f in plans.SCATTER_FORMS if not f.startswith("bulk") or torch.cuda.get_device_capability() >= (9, 0)]
    calls: Dict[str, Callable[[Any], Any]] = {"ours": lambda x: ops.add_rows(out, index, x),
                                              **{f"ours {form}": add(form) for form in forms},
                                              "torch": lambda x: out.index_add_(0, index, x)}
    errors = {}
    for form, call in calls.items():
        out.zero_()
        call(g[0])
        errors[form] = relative(out, reference)
    # Each addition to bfloat16 memory rounds: the more of them, the worse, and torch has the most.
    most = 4 * n**0.5 * 2.0**-24 + 1e-6 if dtype == "float32" else max(2.0**-7, 1.2 * errors["torch"])
    right = max(errors.values()) <= most and (dtype == "float32" or errors["ours sorted"] < 2.0**-7)
    name += " (errors: " + ", ".join(f"{form} {error:.0e}" for form, error in errors.items()) + ")"
    calls["torch embedding"] = lambda x: torch.ops.aten.embedding_dense_backward(x, wide, rows, -1, False)
    size = out.element_size()
    moved = size * n * width + 2.0 * size * min(n, int(index.unique().numel())) * width
    candidates = {form: repeat(lambda i, call=call: call(g[i]), len(g)) for form, call in calls.items()}
    return "add_rows", name, moved, candidates, errors["ours"] if right else float("inf"), 1.0


CASES = {"router": router_cases, "reduce": reduce_cases, "permute": permute_cases, "scatter": scatter_cases}


def copy_speed() -> float:
    """GB/s of an elementwise kernel over 512 MiB, read and written."""
    x, y = (torch.zeros(1 << 28, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 4.0 * x.numel() / medians({"copy": [lambda: torch.add(x, 1, out=y)]}, 6)["copy"] / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--rounds", type=int, default=11, help="replays that a median is of, by default 11")
    parser.add_argument("--svg", type=Path, help="also draw a plot for each operator into this folder")
    parser.add_argument("--plot", type=Path, metavar="RECORD", help="draw from this record and measure nothing")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(json.loads(arguments.plot.read_text()), arguments.svg or Path())
        return 0
    if no_device():
        return NO_DEVICE
    sources = [*KERNELS.glob("moe*.py"), KERNELS / "jit.py", Path(__file__).with_name("timing.py"),
               *(f for of in ("router", "moe_", "scatter", "warp", "tma", "tensorcore")
                 for f in (KERNELS / "cuda").glob(f"{of}*"))]
    facts = {**device_facts(), "torch_compile": not arguments.no_compile}
    record = Record(arguments.json, __file__, facts, sources)
    return record.run(lambda: work(record, arguments))


def work(record: Record, arguments: argparse.Namespace) -> int:
    have = {(row["operator"], row["case"].split(" (")[0]) for row in record.rows}
    ceiling = record.data["copy_gb_s"] = copy_speed()
    print(f"copy {ceiling:.0f} GB/s")
    for name, cases in CASES.items():
        if arguments.only in (None, name):
            with record.phase(name):
                for row in measure(cases(Make("cuda", 20261201), not arguments.no_compile,
                                         lambda *case: case not in have), ceiling, arguments.rounds):
                    if (row["operator"], row["case"].split(" (")[0]) not in have:
                        record.add(row)
    print("\n".join(forms(record.rows)))
    if arguments.svg:
        plot(record.data, arguments.svg)
    return int(any(not row["ok"] for row in record.rows))


def measure(cases: Iterator[CaseOf], ceiling: float, rounds: int) -> Iterator[Row]:
    gpu = nvml.open_gpu(None, 0)
    for operator, case, moved, candidates, error, allowed in cases:
        times = medians(candidates, rounds=rounds)
        peers = {n: t for n, t in times.items() if not n.startswith("ours")}
        best = min(peers, key=peers.__getitem__)
        rate = moved / times["ours"] / 1e3
        row = {"operator": operator, "case": case, "us": times, "gb_s": rate, "share_of_copy": rate / ceiling,
               "best_peer": best, "ratio_to_best_peer": peers[best] / times["ours"], "error": error,
               "ok": error <= allowed, "sm_clock_mhz": gpu.clock() if gpu else None}
        others = "  ".join(f"{n} {t:.1f}" for n, t in times.items() if n != "ours")
        print(f"{operator:10} {case:34} {times['ours']:8.2f} us {rate:6.0f} GB/s {100 * rate / ceiling:4.0f} % of copy "
              f"{row['ratio_to_best_peer']:6.2f} x {best:15} {row['sm_clock_mhz'] or '-':>5} MHz "
              f"{'ok' if row['ok'] else 'WRONG'} | {others}", flush=True)
        yield row


def forms(rows: List[Row]) -> Iterator[str]:
    """The forms of adding rows by index in one table: how many times faster than the best of torch each is."""
    ways = plans.SCATTER_FORMS
    chosen = [row for row in rows if row["operator"] == "add_rows"]
    if chosen:
        yield f"{'rows added by index':42} {'torch us':>9} " + " ".join(f"{way:>{max(7, len(way))}}" for way in ways)
    for row in chosen:
        best = min(us for name, us in row["us"].items() if not name.startswith("ours"))
        cells = [f"{best / us:.2f} x" if (us := row["us"].get(f"ours {way}")) else "-" for way in ways]
        yield (f"{row['case'].split(' (')[0]:42} {best:9.1f} "
               + " ".join(f"{cell:>{max(7, len(way))}}" for way, cell in zip(ways, cells)))


def plot(record: Row, folder: Path) -> None:
    """moe-OPERATOR.svg: share of copy speed, a line an implementation."""
    folder.mkdir(parents=True, exist_ok=True)
    for operator in dict.fromkeys(row["operator"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["operator"] == operator]
        shares = {name: [row["share_of_copy"] * row["us"]["ours"] / row["us"][name] if name in row["us"] else None
                         for row in rows] for name in rows[0]["us"]}
        labels = [row["case"].split(" (")[0] for row in rows]
        title = f"{operator}, {record['device']}: share of copy speed"
        (folder / f"moe-{operator.replace('_', '-')}.svg").write_text(svg(title, labels, shares))


if __name__ == "__main__":
    sys.exit(main())
