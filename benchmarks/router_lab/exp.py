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

def spec(T, E, k, dt, bias, threads=512, group=16, lanes=None, defines=(), **_):
    plan = plans.router_plan(T, E, k, dt, bias is not None, 132)
    entry = plan.entry
    per = 4 if ", 8, " in entry else 2
    if lanes:
        held = 64 if lanes == 4 else next(h for h in (8, 16, 32) if lanes * h >= E); per = 32 // lanes
        entry = f"router<{plans.CTYPES[dt]}, {int(bias is not None)}, {lanes}, {held}>"
    each = T if T <= 64 else max(16, plans.blocks(plans.blocks(T, 132), per) * per)
    grid = plans.blocks(T, each); sums = plans.blocks(E, 4) * 4
    shared = 4 * sums * (plans.blocks(each, 32) + 2) + 8 * each + 6 * each * k
    return entry, each, grid, 1 << max(13, (shared - 1).bit_length()), (f"ROUTER_THREADS={threads}", f"ROUTER_GROUP={group}", *defines)

def new(T, E, k, dt, bias, sigmoid, renorm, threads=512, state_row=0, **how):
    entry, each, grid, shared, defines = spec(T, E, k, dt, bias, threads, **how)
    kernel = make_router(HERE + "/exp_router.cu", entry, threads, shared, defines)
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
    if T > 16 and not sig:
        found["1024"] = dict(threads=1024, state_row=1)
        found["group 8"] = dict(group=8, state_row=2)
        found["group 24"] = dict(group=24, state_row=3)
        if E <= 256: found["16 lanes"] = dict(lanes=16, state_row=4)
        if E == 256: found["4 lanes"] = dict(lanes=4, state_row=6)
        if E <= 256: found["32 groups"] = dict(defines=("REGS2",), state_row=7)
        found["1024, 16 lanes"] = dict(threads=1024, lanes=16, state_row=5)
    return found

CASES = [(8192,256,8,"float32","softmax"),(16384,256,8,"bfloat16","softmax"),(1,256,8,"float32","softmax"),(65536,256,8,"float32","softmax"),(2048,256,8,"float32","softmax"),(8192,64,8,"float32","softmax"),
             (8192,512,10,"float32","softmax"),(8192,256,8,"float32","sigmoid"),(16384,256,8,"bfloat16","sigmoid"),(512,256,8,"float32","softmax"),(64,256,8,"float32","softmax"),(16,256,8,"float32","softmax"),(8192,128,8,"bfloat16","softmax")]

def times():
    for T, E, k, dt, scoring in CASES:
        x = [torch.randn(T, E, generator=gen, device="cuda").to(F[dt]) for _ in range(copies_for(T * E * (4 if dt == "float32" else 2)))]
        sig = scoring == "sigmoid"; bias = torch.randn(E, device="cuda") * 0.1 if sig else None
        a = (T, E, k, dt, bias, sig, True)
        ways = {"old": old(*a), **{n: new(*a, **how) for n, how in variants(T, E, sig).items()}}
        if T == 1:
            kernel = jit.kernel("router_one.cu", plans.router_one_entry(E, dt), dev, (32, 1)); out1 = outputs(T, E, k)
            ways["one"] = lambda x: (kernel((1, 1), [x, bias, *out1, E, k, int(sig), 1, 1.0], stream()), out1)[1]
            e = jit.kernel(HERE + "/exp_empty.cu", "empty", dev, (32, 1)); t = jit.kernel(HERE + "/exp_empty.cu", "touch", dev, (64, 1)); y = torch.empty(1024, device="cuda")
            ways["empty"] = lambda x: e((1, 1), [y], stream())
            ways["touch"] = lambda x: t((1, 1), [x, y], stream())
        ref = [t.clone() for t in ways["old"](x[0])]
        good = {}
        for n, f in list(ways.items()):
            if n in ("empty", "touch"): continue
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

def stamps():
    names = ["loaded", "chosen(warp 0)", "all warps", "counted+published", "weights", "waited+added", "synced", "scan", "places"]
    for T, dt in ((8192, "float32"), (16384, "bfloat16"), (64, "float32")):
        plan = plans.router_plan(T, 256, 8, dt, False, 132)
        for threads in (512, 1024):
            image, mangled = jit.cached_cubin(HERE + "/exp_router.cu", plan.entry, "sm_90a", (f"ROUTER_THREADS={threads}", "STAMPS"))
            module, f, ptr, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
            kernel = make_router(HERE + "/exp_router.cu", plan.entry, threads, 32768, (f"ROUTER_THREADS={threads}", "STAMPS"))
            jit._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
            jit._call("cuModuleGetFunction", ctypes.byref(f), module, mangled.encode())
            jit._call("cuFuncSetAttribute", f, 8, 32768)
            kernel._handle = f
            jit._call("cuModuleGetGlobal_v2", ctypes.byref(ptr), ctypes.byref(size), module, b"stamps")
            out = outputs(T, 256, 8); rows = []
            xs = [torch.randn(T, 256, generator=gen, device="cuda").to(F[dt]) for _ in range(12)]
            flush = torch.empty(64 << 20, device="cuda")
            for rep in range(9):
                flush.zero_()
                for x in xs[:4] if rep else xs[:1]:
                    kernel((plan.grid, 1), [x, None, *out, STATE[9], T, 256, 8, plan.each, 0, 1, 1.0], stream())
                torch.cuda.synchronize()
                host = (ctypes.c_longlong * (144 * 16))()
                jit._call("cuMemcpyDtoH_v2", host, ptr, ctypes.c_size_t(144 * 16 * 8))
                t = torch.tensor(list(host)).reshape(144, 16)[:plan.grid, :10]
                if plan.grid == 1: t[:, 6] = t[:, 5]
                rows.append((t[:, 1:] - t[:, :-1]).double().median(0).values)
            med = torch.stack(rows[2:]).median(0).values
            print(f"stamps {T} {dt} {threads}: total {int(med.sum())}  " + "  ".join(f"{n} {int(v)}" for n, v in zip(names, med)), flush=True)
            record.append({"stamps": [T, dt, threads], "cycles": dict(zip(names, map(int, med)))})

def compile_one(job):
    try:
        jit.cached_cubin(job[0], job[1], "sm_90a", job[2])
    except Exception as error:
        print("compile", job, error)

def precompile():
    import multiprocessing
    jobs = {("router.cu", f"router<{c}, {b}, {l}, {h}>", ()) for c in plans.CTYPES.values() for b in (0, 1) for l in (8, 16) for h in (8, 16, 32)}
    jobs |= {("router_one.cu", f"router_one<{c}, {h}>", ()) for c in plans.CTYPES.values() for h in (8, 16)}
    for T, E, k, dt, scoring in CASES:
        for how in variants(T, E, scoring == "sigmoid").values():
            entry, _, _, _, defines = spec(T, E, k, dt, 1 if scoring == "sigmoid" else None, **how)
            jobs.add((HERE + "/exp_router.cu", entry, defines))
    for t in (512, 1024):
        for c in plans.CTYPES.values(): jobs.add((HERE + "/exp_router.cu", f"router<{c}, 0, 8, 32>", (f"ROUTER_THREADS={t}", "STAMPS")))
    for e in ("router<float, 0, 8, 32>", "router<unsigned short, 0, 8, 32>", "router<float, 0, 32, 8>", "router<float, 0, 8, 8>", "router<float, 0, 16, 32>", "router<float, 1, 8, 32>", "router<unsigned short, 1, 8, 32>", "router<unsigned short, 0, 8, 16>"):
        jobs.add((HERE + "/old_router.cu", e, ()))
    jobs = sorted(jobs, key=lambda j: ", 1, " not in j[1])
    with multiprocessing.get_context("fork").Pool(16) as pool: pool.map(compile_one, jobs, 1)
    print(len(jobs), "cubins", flush=True)

for step in sys.argv[2:]:
    globals()[step]()
    json.dump(record, open(sys.argv[1] + f"-{step}.json", "w"), indent=1)
