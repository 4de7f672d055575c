"""Softmax, LayerNorm and RMSNorm on this machine's GPU: right against FP64, then timed beside their peers.

    python3 benchmarks/rows.py [--json FILE] [--svg FOLDER]   check, time, write the record and the plots; where FILE
                                                              is of a run that was cut off, what it has is kept
    python3 benchmarks/rows.py --check [--small]              numerics alone; --small: few, for compute-sanitizer
    python3 benchmarks/rows.py --plot RECORD --svg FOLDER     plots from a record, no GPU needed

A line a case: operator, case, us, GB/s, share of the copy, ratio of the best peer's time to ours, SM clock. Bytes are
each input read once and each output written once. "copy" is torch.add(x, 1), a kernel that reads and writes as much;
torch's own copy_ is a cudaMemcpy, which is slower from 512 MiB on. All arms of a case are graphs over rotating buffers
of several times L2 (4 x 102,400 stays in it), replayed in turn in one process; the median over rounds counts. Peers
that are not installed are left out. The seconds of each phase are printed at the end and kept in the record.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Set, Tuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from record import KERNELS, NO_DEVICE, Record, device_facts, no_device  # noqa: E402

SHAPES = ((16384, 1024), (8192, 4096), (4096, 8192), (4096, 32768), (2048, 131072))
OTHERS = (8192, 4096)  # for float16 and float32, and with a residual
OPERATORS = ("softmax", "rms_norm", "layer_norm")
EPSILON = 1e-5
Arms = Dict[str, Callable[[int], Any]]
Line = Tuple[str, str, int, int, str]  # operator, "" or backward or residual, rows, columns, dtype


def lines() -> List[Line]:
    """What is timed, in this order: what has a target comes first, in case the run is cut off."""
    found: List[Line] = [(name, "", rows, n, "bfloat16") for rows, n in SHAPES for name in OPERATORS]
    found += [("softmax", part, 4, 102400, "bfloat16") for part in ("", "backward")]
    found += [(name, "backward", rows, n, "bfloat16") for rows, n in SHAPES for name in OPERATORS]
    found += [(name, "residual", rows, n, "bfloat16") for rows, n in (OTHERS, SHAPES[3]) for name in OPERATORS[1:]]
    return found + [(name, part, *OTHERS, dtype) for dtype in ("float16", "float32") for part in ("", "backward")
                    for name in OPERATORS]


def key_of(row: Dict[str, Any]) -> Line:
    name, _, part = row["operator"].partition(" ")
    return name, part, row["rows"], row["columns"], row["dtype"]


# ---- numerics -------------------------------------------------------------------------------------------------------

def fills(small: bool) -> Dict[str, Callable[[Any], Any]]:
    import torch

    def masked(x: Any) -> Any:
        x = x.clone()
        x[..., ::3] = -float("inf")
        return x

    chosen = {
        "normal": lambda x: x,
        "around 1e4": lambda x: x * 50 + 1e4,
        "around -1e4": lambda x: x * 50 - 1e4,
        "denormal": lambda x: x * torch.finfo(x.dtype).smallest_normal / 64,
        "equal": lambda x: torch.full_like(x, 3.5),
        "masked": masked,
    }
    return {"normal": chosen["normal"]} if small else chosen


def reference(name: str, x: Any, dy: Any, weight: Any, bias: Any) -> Tuple[Any, List[Any]]:
    """Output and gradients in float64 by torch's own autograd."""
    import torch

    leaves = [t.double().detach().requires_grad_() for t in (x, weight, bias)]
    if name == "softmax":
        y, used = torch.softmax(leaves[0], -1), leaves[:1]
    elif name == "layer_norm":
        y, used = torch.nn.functional.layer_norm(leaves[0], x.shape[-1:], leaves[1], leaves[2], EPSILON), leaves
    else:
        y, used = leaves[0] * (leaves[0].square().mean(-1, keepdim=True) + EPSILON).rsqrt() * leaves[1], leaves[:2]
    return y.detach(), list(torch.autograd.grad(y, used, dy.double()))


def ours(name: str, x: Any, weight: Any, bias: Any, residual: Any = None) -> Any:
    from brakecheck import ops

    if name == "softmax":
        return ops.softmax(x)
    if name == "layer_norm":
        return ops.layer_norm(x, weight, bias, EPSILON, residual)
    return ops.rms_norm(x, weight, EPSILON, residual)


def check(small: bool) -> List[Dict[str, Any]]:
    """One row for each (operator, dtype, fill, shape): the largest error relative to the output's own scale."""
    import torch

    rows_of = []
    widths = (1, 8, 64, 264, 1000, 1001, 1024, 2048, 3000, 4096, 4099, 8192, 12000, 32768, 40000, 102400, 131072,
              262144)
    few = (1, 64, 264, 1001, 1024, 4096, 12000, 40000, 131072)
    torch.manual_seed(0)
    for dtype, sizes in (
        (torch.bfloat16, few if small else widths),
        (torch.float32, few[1:5] if small else (64, 1000, 1001, 8192, 32768, 131072, 262144)),
        (torch.float16, () if small else (1001, 1024, 8192, 131072)),
    ):
        for n in sizes:
            for fill, make in fills(small).items():
                if fill != "normal" and n not in (264, 1001, 8192, 131072):
                    continue
                rows = 5 if small or fill != "normal" else 17 if n > 1e4 else 131
                x = make(torch.randn(rows, n, device="cuda")).to(dtype)
                dy = torch.randn(rows, n, device="cuda").to(dtype)
                weight, bias = (torch.randn(n, device="cuda").to(dtype) for _ in range(2))
                for name in OPERATORS:
                    if fill == "masked" and name != "softmax":
                        continue
                    row = {"operator": name, "dtype": str(dtype)[6:], "rows": rows, "columns": n, "fill": fill}
                    rows_of.append({**row, **compare(name, x, dy, weight, bias)})
    rows_of += [special(name) for name in ("strides", "residual", "empty", "-inf rows", "deterministic")]
    return rows_of


def compare(name: str, x: Any, dy: Any, weight: Any, bias: Any) -> Dict[str, Any]:
    import torch

    wanted, gradients = reference(name, x, dy, weight, bias)
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = ours(name, *leaves)
    used = {"softmax": leaves[:1], "rms_norm": leaves[:2], "layer_norm": leaves}[name]
    got = torch.autograd.grad(y, used, dy)
    result: Dict[str, Any] = {"ok": True}
    resolution = torch.finfo(x.dtype).eps
    for label, one, right in zip(("y", "dx", "dweight", "dbias"), (y.detach(), *got), (wanted, *gradients)):
        scale = right.norm()
        error = float((one.double() - right).norm() / scale) if scale > 0 else float((one.double() - right).norm())
        if label == "dx" and name == "softmax":  # dx is the difference of terms of the size of y dy
            error = float((one.double() - right).norm() / (wanted * dy.double()).norm())
        # What lies under the smallest normal number is rounded to a fixed step.
        step = torch.finfo(x.dtype).smallest_normal * resolution
        error -= 0.5 * step * one.numel() ** 0.5 / max(float(scale), 1e-300)
        # float32: mean and rstd are rounded to it, and values around 1e4 with a spread of 50 cancel 200-fold.
        bound = (2 if label == "dx" else 0.5) * resolution
        if x.dtype == torch.float32:
            bound = 3e-6 if label == "y" else 3e-5
        if float(x.double().abs().amax()) > 5e3 and x.dtype == torch.float32:
            bound *= 40
        if name == "layer_norm" and label in ("dx", "dweight") and float(x.double().std()) < 1e-3:
            bound = 1.0  # nothing but rounding is left of x - mean
        result[label] = error
        result["ok"] = result["ok"] and bool(torch.isfinite(one).all()) and error <= bound
    return result


def special(what: str) -> Dict[str, Any]:
    import torch

    from brakecheck import ops

    x = torch.randn(37, 1024, device="cuda", dtype=torch.bfloat16)
    w, b = torch.randn(1024, device="cuda").bfloat16(), torch.randn(1024, device="cuda").bfloat16()
    if what == "strides":
        wide = torch.randn(64, 37, 2050, device="cuda", dtype=torch.bfloat16)
        pairs = [(ops.softmax(v, d), torch.softmax(v.double(), d)) for v, d in (
            (wide.transpose(0, 1), -1), (wide[:, :, 1:1025], -1), (wide[:, :, ::2], -1), (wide, 0), (wide, 1))]
        ok = all(float((a.double() - r).norm() / r.norm()) < 4e-3 for a, r in pairs)
    elif what == "residual":
        ok = True
        for n in (264, 1001, 1024, 3000, 8192, 32768, 131072):
            for name in ("layer_norm", "rms_norm"):
                v, r = (torch.randn(9, n, device="cuda").bfloat16() for _ in range(2))
                scale, shift = torch.randn(n, device="cuda").bfloat16(), torch.randn(n, device="cuda").bfloat16()
                y, total = ours(name, v, scale, shift, r)
                right, _ = reference(name, v + r, v, scale, shift)
                ok = ok and torch.equal(total, v + r) and float((y.double() - right).norm() / right.norm()) < 4e-3
    elif what == "empty":
        ok = all(ours(name, torch.empty(0, 1024, device="cuda", dtype=x.dtype), w, b).shape == (0, 1024)
                 for name in OPERATORS) and ops.softmax(torch.empty(4, 0, device="cuda")).shape == (4, 0)
    elif what == "-inf rows":
        v = x.clone()
        v[3] = -float("inf")
        y = ops.softmax(v)
        ok = bool(y[3].isnan().all()) and bool(y[:3].isfinite().all()) and bool(y[4:].isfinite().all())
    else:
        big = torch.randn(5000, 1024, device="cuda").bfloat16().requires_grad_()
        scale = w.clone().requires_grad_()
        got = [torch.autograd.grad(ours("layer_norm", big, scale, b), (big, scale), big.detach()) for _ in range(3)]
        ok = all(torch.equal(g, h) for again in got[1:] for g, h in zip(got[0], again))
    return {"operator": "all", "fill": what, "ok": bool(ok)}


# ---- arms -----------------------------------------------------------------------------------------------------------

def plain(name: str) -> Callable[..., Any]:
    import torch
    from torch.nn import functional

    if name == "softmax":
        return lambda x, w, b: torch.softmax(x, -1)
    if name == "layer_norm":
        return lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b, EPSILON)
    return lambda x, w, b: functional.rms_norm(x, x.shape[-1:], w, EPSILON)


def peer_forwards(name: str) -> Dict[str, Callable[..., Any]]:
    """(x, weight, bias) -> y, differentiable, of each peer that is installed."""
    import torch

    found: Dict[str, Callable[..., Any]] = {"torch": plain(name),
                                           "torch.compile": torch.compile(plain(name), fullgraph=True, dynamic=False)}
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        found["Liger"] = {
            "softmax": lambda x, w, b: LigerSoftmaxFunction.apply(x),
            "layer_norm": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, EPSILON),
            "rms_norm": lambda x, w, b: LigerRMSNormFunction.apply(x, w, EPSILON, 0.0, "llama", False),
        }[name]
    except ImportError:
        pass
    return found


def quack_keeps_kernels() -> bool:
    """Whether this quack has a cache on disk: older ones compile in every process."""
    return any(importlib.util.find_spec("quack") and importlib.util.find_spec(f"quack.{m}")
               for m in ("cache", "cache_utils"))


def quack_forward(name: str) -> Optional[Callable[..., Any]]:
    try:
        from quack.rmsnorm import layernorm_fwd, rmsnorm_fwd
        from quack.softmax import softmax_fwd
    except ImportError:
        return None
    return {
        "softmax": lambda x, w, b: softmax_fwd(x),
        "layer_norm": lambda x, w, b: layernorm_fwd(x, w, b, eps=EPSILON),
        "rms_norm": lambda x, w, b: rmsnorm_fwd(x, w, eps=EPSILON)[0],
    }[name]


def quack_both(name: str) -> Dict[str, Callable[..., Any]]:
    """quack with autograd: it has none for LayerNorm."""
    try:
        from quack.rmsnorm import rmsnorm
        from quack.softmax import softmax
    except ImportError:
        return {}
    return {"softmax": {"quack": lambda x, w, b: softmax(x)},
            "rms_norm": {"quack": lambda x, w, b: rmsnorm(x, w, eps=EPSILON)}}.get(name, {})


def fused_adds(name: str) -> Dict[str, Callable[..., Any]]:
    """(x, residual, weight) -> norm and sum, of the peers that have it in one kernel: RMSNorm alone."""
    found: Dict[str, Callable[..., Any]] = {}
    if name != "rms_norm":
        return found
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        found["Liger"] = lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, EPSILON, 0.0, "llama", False)
    except ImportError:
        pass
    try:
        from quack.rmsnorm import rmsnorm_fwd

        found["quack"] = lambda x, r, w: rmsnorm_fwd(x, w, residual=r, eps=EPSILON)
    except ImportError:
        pass
    return found


class Case:
    """Rotating buffers of one operator and shape, and the arms over them."""

    def __init__(self, name: str, rows: int, n: int, dtype: Any) -> None:
        import torch

        self.name, self.rows, self.n = name, rows, n
        one = rows * n * dtype.itemsize
        self.copies = max(4, min(16, int(500e6 / one) + 1)) if one > 1 << 22 else 8
        self.x = [torch.randn(rows, n, device="cuda", dtype=dtype) for _ in range(self.copies)]
        self.dy = [torch.randn(rows, n, device="cuda", dtype=dtype) for _ in range(min(self.copies, 8))]
        self.w, self.b = (torch.randn(n, device="cuda", dtype=dtype) for _ in range(2))
        self.bytes = one

    def forward(self) -> Arms:
        import torch

        x, w, b = self.x, self.w, self.b
        arms: Arms = {"copy": lambda i: torch.add(x[i], 1), "ours": lambda i: ours(self.name, x[i], w, b)}
        wide = (w.float(), b.float())
        for peer, function in peer_forwards(self.name).items():
            arms[peer] = lambda i, function=function: function(x[i], w, b)
        quack = quack_forward(self.name)
        if quack:
            weights = wide if self.name == "layer_norm" else (w, b)
            arms["quack"] = lambda i: quack(x[i], *weights)
        return arms

    def residual(self) -> Arms:
        """Arms of norm(x + residual), which give the sum too; dy serves as the residual."""
        import torch

        def separate(x: Any, r: Any) -> Any:
            total = x + r
            return plain(self.name)(total, self.w, self.b), total

        x, r = self.x, self.dy
        compiled = torch.compile(separate, fullgraph=True, dynamic=False)
        arms: Arms = {"copy": lambda i: torch.add(x[i], 1),
                      "ours": lambda i: ours(self.name, x[i], self.w, self.b, r[i]),
                      "torch": lambda i: separate(x[i], r[i]), "torch.compile": lambda i: compiled(x[i], r[i])}
        for peer, function in fused_adds(self.name).items():
            arms[peer] = lambda i, function=function: function(x[i], r[i], self.w)
        return arms

    def backward(self) -> Arms:
        """Arms over outputs that were computed before; each works on as many buffers as there are dy."""
        import torch

        arms: Arms = {"copy": lambda i: torch.add(self.x[i], 1)}
        used = {"softmax": 1, "rms_norm": 2, "layer_norm": 3}[self.name]
        peers = {"ours": lambda x, w, b: ours(self.name, x, w, b), **peer_forwards(self.name), **quack_both(self.name)}
        for peer, function in peers.items():
            leaves = [[t.detach().requires_grad_() for t in (x, self.w, self.b)] for x in self.x[:len(self.dy)]]
            try:
                outputs = [function(*leaf) for leaf in leaves]
            except Exception as error:  # a peer's failure is its own line, not ours
                print(f"# {peer} backward {self.name} {self.rows}x{self.n}: {str(error).splitlines()[0][:100]}")
                continue
            arms[peer] = lambda i, leaves=leaves, outputs=outputs: torch.autograd.grad(
                outputs[i], leaves[i][:used], self.dy[i], retain_graph=True)
        return arms


LAUNCHES = 24  # at least, in a graph: its own start is 5 to 10 us, which four launches would be charged 2 us each


def capture(arms: Arms, copies: int) -> Dict[str, Tuple[Any, int]]:
    """A graph of each arm over all copies, and its calls."""
    import torch

    graphs: Dict[str, Tuple[Any, int]] = {}
    stream = torch.cuda.current_stream()
    launches = -(-LAUNCHES // copies) * copies
    for name, call in arms.items():
        try:
            call(0)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                kept: Deque[Any] = collections.deque(maxlen=copies)  # outputs rotate too
                for i in range(launches):
                    kept.append(call(i % copies))
            graphs[name] = graph, launches
            del kept
        except Exception as error:  # noqa: BLE001 - a peer's failure is its own line, not ours
            if name in ("ours", "copy"):
                raise
            print(f"# {name}: {str(error).splitlines()[0][:120]}")
    return graphs


def replay(graphs: Dict[str, Tuple[Any, int]], rounds: int) -> Dict[str, float]:
    """Median microseconds a call of each arm, its graphs replayed in turn."""
    import torch

    times: Dict[str, List[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name, (graph, launches) in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(start.elapsed_time(end) * 1e3 / launches)
    return {name: statistics.median(values) for name, values in times.items()}


def sm_clock() -> Optional[int]:
    """MHz now, from NVML; None where it cannot be asked."""
    try:
        lib = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, clock = ctypes.c_void_p(), ctypes.c_uint()
    if lib.nvmlInit_v2() or lib.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
        return None
    return None if lib.nvmlDeviceGetClockInfo(device, 1, ctypes.byref(clock)) else clock.value


def graphs_of(wanted: Line, with_quack: bool = True) -> Tuple[Case, Dict[str, Tuple[Any, int]]]:
    import torch

    name, part, rows, n, dtype = wanted
    torch._dynamo.reset()
    case = Case(name, rows, n, getattr(torch, dtype))
    copies = len(case.dy) if part else case.copies
    with torch.set_grad_enabled(part == "backward"):
        arms = case.backward() if part == "backward" else case.residual() if part else case.forward()
        if not with_quack:
            arms.pop("quack", None)
        return case, capture(arms, copies)


def time_all(record: Record, missing: List[Line], rounds: int) -> None:
    import torch

    for wanted in missing:
        with record.phase("compiling and capturing"):
            case, graphs = graphs_of(wanted)
        with record.phase("timing"):
            times = replay(graphs, rounds)
        name, part, *_ = wanted
        streams = {"": 2, "backward": 3, "residual": 4}[part]
        row = line(f"{name} {part}".strip(), case, times, streams)
        show(row)
        record.add(row)
        del case, graphs
        torch.cuda.empty_cache()


def line(label: str, case: Case, times: Dict[str, float], streams: int) -> Dict[str, Any]:
    rates = {k: (2 if k == "copy" else streams) * case.bytes / t / 1e3 for k, t in times.items()}
    peers = {k: t for k, t in times.items() if k not in ("ours", "copy")}
    best = min(peers, key=lambda k: peers[k]) if peers else None
    return {"operator": label, "rows": case.rows, "columns": case.n,
            "dtype": str(case.x[0].dtype)[6:],
            "us": {k: round(t, 3) for k, t in times.items()}, "gb_s": {k: round(r, 1) for k, r in rates.items()},
            "share_of_copy": round(rates["ours"] / rates["copy"], 4), "best_peer": best,
            "ratio_to_best_peer": round(peers[best] / times["ours"], 3) if best else None, "sm_clock_mhz": sm_clock()}


def show(row: Dict[str, Any]) -> None:
    peers = "  ".join(f"{k} {v:.0f}" for k, v in row["gb_s"].items() if k != "ours")
    ratio = f"{row['ratio_to_best_peer']:5.2f}x {row['best_peer']}" if row["best_peer"] else ""
    print(f"{row['operator']:20s} {row['rows']:>6d} x {row['columns']:<7d} {row['dtype']:8s} "
          f"{row['us']['ours']:9.2f} us {row['gb_s']['ours']:6.0f} GB/s {row['share_of_copy']:6.1%} of copy "
          f"{ratio:20s} {row['sm_clock_mhz'] or '-':>5} MHz | GB/s: {peers}",
          flush=True)


# ---- plots ----------------------------------------------------------------------------------------------------------

COLOURS = {"ours": "#0b6e4f", "quack": "#b5651d", "Liger": "#6a5acd", "torch.compile": "#c0392b", "torch": "#888888"}


def svg(title: str, rows: List[Dict[str, Any]]) -> str:
    """Share of the copy speed against width, a line an arm; 95 % is marked."""
    width, height, left, right, top, bottom = 640, 300, 52, 116, 34, 42

    def x(i: int) -> float:
        return left + i * (width - left - right) / max(len(rows) - 1, 1)

    def y(share: float) -> float:
        return top + (1.05 - min(share, 1.05)) / 1.05 * (height - top - bottom)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui,sans-serif" '
           f'font-size="12" role="img"><title>{title}</title><rect width="100%" height="100%" fill="#fff"/>',
           f'<text x="{left}" y="18" font-weight="600">{title}: share of copy speed</text>']
    for share in (0, 0.25, 0.5, 0.75, 0.95):
        dash = ' stroke-dasharray="4 3"' if share == 0.95 else ""
        at = y(share)
        out.append(f'<line x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ccc"{dash}/>'
                   f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end" fill="#555">{share:.0%}</text>')
    for i, row in enumerate(rows):
        out.append(f'<text x="{x(i):.1f}" y="{height - 22}" text-anchor="middle" fill="#555">{row["rows"]} x '
                   f'{row["columns"]}</text>')
    taken: List[float] = []
    last = rows[-1]["gb_s"]
    for arm in sorted(COLOURS, key=lambda a: -last.get(a, 0)):
        points = [(x(i), y(r["gb_s"][arm] / r["gb_s"]["copy"])) for i, r in enumerate(rows) if arm in r["gb_s"]]
        if not points:
            continue
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        thickness = 3 if arm == "ours" else 1.5
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[arm]}" stroke-width="{thickness}"/>')
        label = points[-1][1]
        while any(abs(label - t) < 14 for t in taken):
            label += 2
        taken.append(label)
        out.append(f'<text x="{points[-1][0] + 6:.1f}" y="{label + 4:.1f}" fill="{COLOURS[arm]}">{arm}</text>')
    return "\n".join([*out, "</svg>\n"])


def plot(record: Dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for operator in dict.fromkeys(r["operator"] for r in record["rows"] if "residual" not in r["operator"]):
        rows = [r for r in record["rows"] if r["operator"] == operator and r["rows"] > 100 and r["dtype"] == "bfloat16"]
        if not rows:  # of a run that was cut off
            continue
        name = "rows-" + operator.replace(" ", "-").replace("_", "-") + ".svg"
        (folder / name).write_text(svg(f"{operator} bfloat16, {record['device']}", rows))


# ---- command --------------------------------------------------------------------------------------------------------

def warm(jobs: int, missing: List[Line]) -> None:
    """Fills the peers' compile caches for these lines in parallel, so that the timed process finds them."""
    waiting: Dict[Tuple[str, int, str], List[Line]] = {}
    for wanted in missing:
        waiting.setdefault((wanted[0], wanted[3], wanted[4]), []).append(wanted)
    tasks = list(waiting.values())
    running: List[subprocess.Popen[bytes]] = []
    try:
        while tasks or running:
            running = [p for p in running if p.poll() is None]
            while tasks and len(running) < jobs:
                running.append(subprocess.Popen([sys.executable, str(Path(__file__).resolve()), "--warm",
                                                 json.dumps(tasks.pop())],
                                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            if running:
                running[0].wait()
    finally:
        for process in running:
            process.kill()


def warm_one(wanted: List[Line]) -> None:
    """In a process of its own: compiles what these lines need, but nothing that the next process compiles again."""
    with on_a_stream():
        for each in wanted:
            graphs_of(each, quack_keeps_kernels())


@contextlib.contextmanager
def on_a_stream() -> Iterator[None]:
    import torch
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # the backward graphs are replayed
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plot:
        plot(json.loads(arguments.plot.read_text()), arguments.svg or Path())
        return 0
    if no_device():
        return NO_DEVICE
    warnings.filterwarnings("error", "brakecheck's row kernels")  # a fall-back to torch must not pass for ours
    if arguments.warm:
        warm_one([tuple(each) for each in json.loads(arguments.warm)])
        return 0
    sources = [*KERNELS.glob("rows*.py"), KERNELS / "jit.py", *(KERNELS / "cuda").glob("rows*")]
    record = Record(arguments.json, __file__, device_facts(), sources)
    return record.run(lambda: work(record, arguments))


def work(record: Record, arguments: argparse.Namespace) -> int:
    checked = record.data.get("checks", [])
    if arguments.check or not checked or not all(c["ok"] for c in checked):
        with record.phase("checks"):
            checked = check(arguments.small)
    wrong = [c for c in checked if not c["ok"]]
    print(f"numerics: {len(checked) - len(wrong)} of {len(checked)} right", flush=True)
    for c in wrong:
        print("  wrong:", json.dumps(c))
    if not arguments.small:
        record.data["checks"] = checked
        record.save()
    if arguments.check:
        return 1 if wrong else 0
    have: Set[Line] = {key_of(row) for row in record.rows}
    missing = [each for each in lines() if each not in have]
    with record.phase("filling torch.compile's cache"):
        warm(max(1, min(16, (os.cpu_count() or 2) - 1)), missing)
    with on_a_stream():
        time_all(record, missing, arguments.rounds)
    if arguments.svg:
        plot(record.data, arguments.svg)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
