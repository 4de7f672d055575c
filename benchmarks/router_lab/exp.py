# ruff: noqa
# mypy: ignore-errors
"""Variants of the router: right, then timed in turn in one process."""
import ctypes, json, os, sys, statistics, functools
sys.path.insert(0, "benchmarks")
import torch
from timing import medians, copies_for
from brakecheck import ops
from brakecheck.kernels import jit, moe_plans as plans
HERE = os.path.dirname(os.path.abspath(__file__))
dev = 0
gen = None if sys.argv[2] == "precompile" else torch.Generator(device="cuda").manual_seed(3)
F = {"float32": torch.float32, "bfloat16": torch.bfloat16}
record = []
def stream(): return torch.cuda.current_stream().cuda_stream

def check(x, k, scoring="softmax", bias=None, renorm=True, scale=1.0, what=""):
    ref = plans.route(x.double(), k, scoring, bias, renorm, scale)
    bad = []
    for rep in range(2):
        out = ops.route(x, k, scoring, bias, renorm, scale)
        i, w = out.expert, out.weight
        same = torch.equal(i, ref["index"])
        if bias is not None and not same:
            xx = x.double(); by = (xx.sigmoid() if scoring == "sigmoid" else xx.softmax(1)) + bias.double()
            d = (by.gather(1, i.long()) - by.gather(1, ref["index"].long())).abs()
            same = bool(((i == ref["index"]) | (d < 1e-6)).all())
        if not same: bad.append(f"index {int((i != ref['index']).any(1).sum())} rows")
        flat = i.reshape(-1).long()
        counts = torch.bincount(flat, minlength=x.shape[1]); place = torch.empty_like(flat)
        place[flat.sort(stable=True).indices] = torch.arange(flat.numel(), device="cuda")
        if not torch.equal(out.counts.long(), counts): bad.append("counts")
        if not torch.equal(out.place.long().reshape(-1), place): bad.append("place")
        if not (torch.equal(out.offsets.long()[1:], counts.cumsum(0)) and int(out.offsets[0]) == 0): bad.append("offsets")
        nan = ref["weight"].isnan()
        if not torch.equal(w.isnan(), nan): bad.append("nan")
        elif bias is None:
            e = float(((w.double() - ref["weight"]).nan_to_num()).norm() / ref["weight"].nan_to_num().norm().clamp_min(1e-30))
            if e > 1e-5: bad.append(f"weight {e:.1e}")
    record.append({"check": what or f"{tuple(x.shape)} k{k} {x.dtype} {scoring} bias={bias is not None} renorm={renorm}", "bad": bad})
    if bad: print("WRONG", record[-1], flush=True)
    return not bad

def checks():
    n = ok = 0
    for T, E, k in [(1,256,8),(1,8,2),(1,60,6),(1,255,16),(1,509,10),(1,512,16),(1,1,1),(2,256,8),(16,256,8),(17,33,4),(64,256,8),(65,256,8),(131,60,6),(777,255,16),
                    (517,509,10),(500,512,16),(1000,8,2),(1000,16,16),(2048,256,8),(3333,64,8),(4096,128,8),(8192,256,8),(16384,256,8),(20000,160,6),(65536,256,8),(70000,31,5),(300,1,1)]:
        for dt in F:
            x = torch.randn(T, E, generator=gen, device="cuda").to(F[dt])
            for scoring, b, renorm in [("softmax", 0, True), ("softmax", 0, False), ("sigmoid", 1, True), ("softmax", 1, True), ("sigmoid", 0, False)]:
                if T > 5000 and (scoring, b, renorm) in [("softmax", 1, True), ("sigmoid", 0, False)]: continue
                bias = torch.randn(E, generator=gen, device="cuda") * (0.1 if scoring == "sigmoid" else 0.001) if b else None
                n += 1; ok += check(x, k, scoring, bias, renorm, 2.5)
    for T in (1, 16, 100, 4000):
        for E, k in ((256, 8), (100, 5), (300, 12)):
            for dt in F.values():
                base = torch.randn(T, E, generator=gen, device="cuda")
                for name, x in {"equal": torch.zeros_like(base), "few values": (base * 2).round() / 2, "1e4": base * 50 + 1e4, "denormal": base * 1e-40,
                                "-inf rows": torch.where(torch.arange(T, device="cuda")[:, None] % 3 == 0, torch.full_like(base, -float("inf")), base),
                                "masked": base.masked_fill(torch.rand(T, E, generator=gen, device="cuda") < 0.98, -float("inf")),
                                "half masked": base.masked_fill((torch.arange(E, device="cuda") // 32 % 2 == 0)[None], -float("inf")),
                                "nan": base.masked_fill(torch.rand(T, E, generator=gen, device="cuda") < 0.002, float("nan")),
                                "huge": base * 1e38, "signed zero": torch.where(base > 0, 0.0, -0.0) }.items():
                    n += 1; ok += check(x.to(dt), k, what=f"{name} {T}x{E} k{k} {dt}")
                    if name in ("equal", "few values", "nan", "-inf rows"):
                        n += 1; ok += check(x.to(dt), k, "sigmoid", None, False, what=f"sigmoid {name} {T}x{E} k{k} {dt}")
    print(f"checks: {ok} of {n} right", flush=True)

def make_router(source, entry, threads, shared, defines):
    kernel = jit.Kernel(source, entry, dev, (threads, 1), shared, 1, defines)
    kernel._attribute = jit._Attribute(2, b"", (ctypes.c_uint * 3)(1, 0, 0))
    kernel._config.attributes = ctypes.addressof(kernel._attribute); kernel._config.attribute_count = 1
    return kernel
STATE = None if sys.argv[2] == "precompile" else torch.zeros(16, plans.STATE_WORDS * 2, dtype=torch.int64, device="cuda")
def outputs(T, E, k):
    return [torch.empty(T, k, dtype=torch.int32, device="cuda"), torch.empty(T, k, device="cuda"), torch.empty(T, k, dtype=torch.int32, device="cuda"),
            torch.empty(E, dtype=torch.int32, device="cuda"), torch.empty(E + 1, dtype=torch.int32, device="cuda")]

def spec(T, E, k, dt, bias, lanes=None, defines=(), **_):
    plan = plans.router_plan(T, E, k, dt, bias is not None, 132)
    entry = plan.entry
    per = 4 if ", 8, " in entry else 2
    if lanes:
        held = 64 if lanes == 4 else next(h for h in (8, 16, 32) if lanes * h >= E); per = 32 // lanes
        entry = f"router<{plans.CTYPES[dt]}, {int(bias is not None)}, {lanes}, {held}>"
    each = T if T <= 64 else max(16, plans.blocks(plans.blocks(T, 132), per) * per)
    grid = plans.blocks(T, each); sums = plans.blocks(E, 4) * 4
    shared = 4 * sums * (plans.blocks(each, 32) + 2) + 8 * each + 6 * each * k
    return entry, each, grid, 1 << max(13, (shared - 1).bit_length()), tuple(defines)

def new(T, E, k, dt, bias, sigmoid, renorm, state_row=0, **how):
    entry, each, grid, shared, defines = spec(T, E, k, dt, bias, **how)
    kernel = make_router("router.cu", entry, 512, shared, defines)
    out = outputs(T, E, k)
    def call(x, state=state_row):
        kernel((grid, 1), [x, bias, *out, STATE[state], T, E, k, each, int(sigmoid), int(renorm), 1.0], stream())
        return out
    return call

def old(T, E, k, dt, bias, sigmoid, renorm):
    most = 132
    if T <= 16: lanes, held, each = 32, 8 if E <= 256 else 16, T
    else:
        lanes, held = (16, 32) if E > 256 else (8, 8 if E <= 64 else 16 if E <= 128 else 32)
        each = T if T <= 64 else max(16, plans.blocks(plans.blocks(T, most), 32 // lanes) * (32 // lanes))
    grid, sums = plans.blocks(T, each), plans.blocks(E, 4) * 4
    shared = 4 * sums * (plans.blocks(each, 32) + 2) + 8 * each + 6 * each * k
    kernel = make_router(HERE + "/old_router.cu", f"router<{plans.CTYPES[dt]}, {int(bias is not None)}, {lanes}, {held}>", 512, 1 << max(13, (shared - 1).bit_length()), ())
    out = outputs(T, E, k); hist = torch.empty(grid * sums // 2 + 64, dtype=torch.int32, device="cuda"); st = torch.zeros(8192, dtype=torch.int32, device="cuda")
    def call(x):
        kernel((grid, 1), [x, bias, *out, hist, st, T, E, k, each, int(sigmoid), int(renorm), 1.0], stream())
        return out
    return call

def same(a, b): return all(torch.equal(p, q) for p, q in zip(a, b))
def variants(T, E, sig):
    found = {"new": {}}
    if T > 16:
        if sig and E <= 256: found["16 lanes"] = dict(lanes=16, state_row=2)
    return found

CASES = [(8192,256,8,"float32","softmax"),(16384,256,8,"bfloat16","softmax"),(1,256,8,"float32","softmax"),(65536,256,8,"float32","softmax"),(2048,256,8,"float32","softmax"),(8192,64,8,"float32","softmax"),
             (8192,512,10,"float32","softmax"),(8192,256,8,"float32","sigmoid"),(2048,256,8,"float32","sigmoid"),(65536,256,8,"float32","sigmoid"),(1,256,8,"float32","sigmoid"),(1,256,8,"bfloat16","softmax"),(1,512,10,"float32","softmax"),(64,256,8,"float32","sigmoid"),(8192,64,8,"float32","sigmoid"),(8192,512,10,"float32","sigmoid"),(16384,256,8,"bfloat16","sigmoid"),(512,256,8,"float32","softmax"),(64,256,8,"float32","softmax"),(16,256,8,"float32","softmax"),(8192,128,8,"bfloat16","softmax")]

def times():
    for T, E, k, dt, scoring in CASES:
        x = [torch.randn(T, E, generator=gen, device="cuda").to(F[dt]) for _ in range(copies_for(T * E * (4 if dt == "float32" else 2)))]
        sig = scoring == "sigmoid"; bias = torch.randn(E, device="cuda") * 0.1 if sig else None
        a = (T, E, k, dt, bias, sig, True)
        ways = {"old": old(*a), **({n: new(*a, **how) for n, how in variants(T, E, sig).items()} if T > 1 else {})}
        if T == 1:
            out1 = outputs(T, E, k)
            for n in ONES: ways[n] = one(n, E, k, dt, bias, sig, True, out1)
            for n, e in (("block", "touch_block"), ("warp", "touch")):
                kern = jit.kernel(HERE + "/exp_empty.cu", e, dev, (256 if n == "block" else 64, 1)); y = torch.empty(4096, device="cuda")
                ways["touch " + n] = lambda x, kern=kern, y=y: kern((1, 1), [x, y], stream())
            e = jit.kernel(HERE + "/exp_empty.cu", "empty", dev, (32, 1))
            ways["empty"] = lambda x: e((1, 1), [y], stream())
        ref = [t.clone() for t in ways["old"](x[0])]
        good = {}
        for n, f in list(ways.items()):
            if n.startswith(("empty", "touch")): continue
            try:
                f(x[1 % len(x)]); got = f(x[0]); torch.cuda.synchronize()
                good[n] = same(ref[:1] + ref[2:], got[:1] + got[2:]) and float((ref[1] - got[1]).abs().max()) < 1e-5
            except Exception as err:
                print(n, err); good[n] = False; del ways[n]
        if T == 8192 and E == 256 and not sig or T == 16384 and not sig:
            blk = make_router(HERE + "/exp_empty.cu", "empty", 512, 32768, ()); yy = torch.empty(8, device="cuda")
            ways["empty 132 x 512 coop"] = lambda x: blk((132, 1), [yy], stream())
        t = medians({n: [lambda f=f, i=i: f(x[i]) for i in range(len(x))] for n, f in ways.items()}, rounds=15)
        print(f"{T} x {E} k{k} {dt} {scoring}: " + "  ".join(f"{n} {v:.2f}{'' if good.get(n, True) else ' WRONG'}" for n, v in t.items()), flush=True)
        record.append({"case": [T, E, k, dt, scoring], "us": t, "good": good})

ONES = ("one", "block", "warp", "together 4", "together 16")
def one_spec(name, E, k, dt):
    c = plans.CTYPES[dt]; base, _, rep = name.partition(" "); d = (f"REPEAT={rep}",) if rep else ()
    if base in ("one", "together"):
        entry, threads, shift = plans.router_one_plan(E, k, dt)
        return ("router_one.cu" if base == "one" else HERE + "/one_together.cu"), entry, threads, tuple(x.replace("REPEAT", "TOG") for x in d), (shift,)
    if base.startswith("block"):
        seg = next(s for s in (32, 16, 8, 4, 2, 1) if plans.blocks(E, s) >= k)
        return HERE + f"/one_{base}.cu", f"router_one<{c}>", plans.blocks(E, 32) * 32, d, (seg,)
    return HERE + f"/one_{base}.cu", f"router_one<{c}, {next(h for h in (1, 2, 4, 8, 16) if 32 * h >= E)}>", 32, d, (0,)
def one(name, E, k, dt, bias, sig, renorm, out, scale=1.0):
    source, entry, threads, d, more = one_spec(name, E, k, dt)
    kernel = jit.Kernel(source, entry, dev, (threads, 1), 0, 1, d)
    def call(x):
        kernel((1, 1), [x, bias, *out, E, k, int(sig), int(renorm), scale, *more], stream())
        return out
    return call
def ones():
    n = ok = 0
    for E, k in ((256, 8), (8, 2), (60, 6), (255, 16), (509, 10), (512, 16), (512, 8), (1, 1), (31, 16), (17, 16), (64, 8), (160, 1)):
        for dt in F:
            for name in ("one",):
                for scoring, b, renorm in [("softmax", 0, True), ("softmax", 0, False), ("sigmoid", 1, True), ("softmax", 1, True), ("sigmoid", 0, False)]:
                    for fill in ("normal", "equal", "nan", "-inf", "few", "masked"):
                        x = torch.randn(1, E, generator=gen, device="cuda")
                        x = {"normal": x, "equal": x * 0, "nan": x.masked_fill(x > x.max() - 0.01, float("nan")), "-inf": x * 0 - float("inf"), "few": (x * 2).round() / 2, "masked": x.masked_fill(x < 1, -float("inf"))}[fill].to(F[dt])
                        bias = torch.randn(E, generator=gen, device="cuda") * (0.1 if scoring == "sigmoid" else 0.001) if b else None
                        out = outputs(1, E, k); one(name, E, k, dt, bias, scoring == "sigmoid", renorm, out, 2.5)(x)
                        ref = plans.route(x.double(), k, scoring, bias, renorm, 2.5)
                        exact = plans.route(x.double(), k, scoring, bias, renorm, 2.5, out[0].long().clamp(0, E - 1))
                        good = torch.allclose(out[1].double(), exact["weight"], rtol=1e-5, atol=1e-8, equal_nan=True) and all(torch.equal(o, exact[m]) for o, m in zip(out[2:], ("place", "counts", "offsets")))
                        if torch.equal(out[0], ref["index"]): pass
                        elif bias is None: good = False
                        else:
                            by = (x.double().sigmoid() if scoring == "sigmoid" else x.double().softmax(1)) + bias.double()
                            good = good and bool(((out[0] == ref["index"]) | ((by.gather(1, out[0].long().clamp(0, E - 1)) - by.gather(1, ref["index"].long())).abs() < 1e-6)).all())
                        n += 1; ok += good
                        if not good: print("WRONG", E, k, dt, name, scoring, b, renorm, fill, flush=True)
    print(f"ones: {ok} of {n} right", flush=True); record.append([ok, n])
def captured():
    from brakecheck.ops.load import load
    from brakecheck.ops.make import Make
    from timing import capture
    found = load([])
    for name in ("router", "grouped_gemm"):
        op = found[name]
        for case in op.cases:
            i = op.make_inputs(case, Make("cuda", 1)); ref = op.compute_reference(case, **i); f = op.implementations["torch"]; f = getattr(f, "function", f)
            try:
                kept = []
                g = capture([lambda: kept.append(f(case, **i))], 1); g.replay(); torch.cuda.synchronize(); out = kept[-1]
                good = op.compare(case, i, ref, out) if name == "router" else float((out["out"].double() - ref["out"]).norm() / ref["out"].norm())
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                ts = []
                for _ in range(7): start.record(); g.replay(); end.record(); end.synchronize(); ts.append(start.elapsed_time(end) * 1e3)
                print("captured", name, case.name, good, f"{statistics.median(ts):.1f} us", flush=True); record.append([name, case.name, str(good), ts])
                if name == "grouped_gemm":
                    t = {n: v.transpose(-1, -2).contiguous().transpose(-1, -2) if v.dim() > 1 else v for n, v in i.items()}
                    o = f(case, **t); torch.cuda.synchronize(); print("  strided", float((o["out"].double() - ref["out"]).norm() / ref["out"].norm()), flush=True)
            except Exception as err: print("captured", name, case.name, "FAILED", str(err)[:300], flush=True); record.append([name, case.name, str(err)[:300]])

def compile_one(job):
    try:
        jit.cached_cubin(job[0], job[1], "sm_90a", job[2])
    except Exception as error:
        print("compile", job, error)

def precompile():
    import multiprocessing
    jobs = {("router.cu", f"router<{c}, {b}, {l}, {h}>", ()) for c in plans.CTYPES.values() for b in (0, 1) for l in (8, 16) for h in (8, 16, 32)}
    jobs |= {(sp[0], sp[1], sp[3]) for E, k in ((256, 8), (8, 2), (60, 6), (512, 16), (17, 16), (100, 5), (300, 12)) for dt in F for n in ("one",) for sp in [one_spec(n, E, k, dt)]}
    jobs |= {(sp[0], sp[1], sp[3]) for n in ONES for dt in F for E, k in ((256, 8), (512, 10)) for sp in [one_spec(n, E, k, dt)]}
    for T, E, k, dt, scoring in CASES:
        for how in variants(T, E, scoring == "sigmoid").values():
            entry, _, _, _, defines = spec(T, E, k, dt, 1 if scoring == "sigmoid" else None, **how)
            jobs.add(("router.cu", entry, defines))
    for e in ("router<float, 0, 8, 32>", "router<unsigned short, 0, 8, 32>", "router<float, 0, 32, 8>", "router<float, 0, 8, 8>", "router<float, 0, 16, 32>", "router<float, 1, 8, 32>", "router<unsigned short, 1, 8, 32>", "router<unsigned short, 0, 8, 16>", "router<float, 1, 32, 8>", "router<unsigned short, 0, 32, 8>", "router<float, 0, 32, 16>", "router<float, 1, 8, 8>", "router<float, 1, 16, 32>"):
        jobs.add((HERE + "/old_router.cu", e, ()))
    jobs = sorted(jobs, key=lambda j: ", 1, " not in j[1])
    with multiprocessing.get_context("fork").Pool(16) as pool: pool.map(compile_one, jobs, 1)
    print(len(jobs), "cubins", flush=True)

for step in sys.argv[2:]:
    globals()[step]()
    json.dump(record, open(sys.argv[1] + f"-{step}.json", "w"), indent=1)
