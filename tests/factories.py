"""Synthetic comparisons for the report tests. They imitate the shape of real answers; numbers are drawn, not measured.

`python -m tests.factories FOLDER` writes each of them as HTML, to look at.
"""

import functools
import hashlib
import math
import random
import sys
from pathlib import Path

from brakecheck.model import (
    Arm,
    Cause,
    Change,
    Comparison,
    Component,
    Delta,
    Mitigation,
    Reason,
    Stack,
    State,
    Verdict,
)

ARCHS = ("sm_80", "sm_90a", "sm_100a")
OPERATORS = (
    "softmax",
    "layernorm",
    "rmsnorm",
    "transpose",
    "moe_permute",
    "topk_router",
    "attention",
    "gemm",
    "int8_gemm",
    "reduce_scatter",
    "accumulate",
    "spin_lock",
)
TYPES = ("float", "__half", "__nv_bfloat16", "int8_t")
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)> | `tick` @team \x1b[31m "quoted" & \'single\''
MESSAGE = "\n".join(
    [
        f"attention_tile.cu({40 + i}): error: static assertion failed — „Kachel zu groß“: 128 × {i} 字 ≤ limit"
        for i in range(38)
    ]
    + ['\x1b[1m2 errors detected\x1b[0m in the compilation of "attention_tile.cu".', "]]> & <end>"]
)


def digest(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def arm(name, version):
    major, minor = version.split(".")[:2]
    parts = [
        Component("nvrtc", f"{version}.86"),
        Component("ptxas", f"{version}.{61 if major == '12' else 44}"),
        Component("headers", version),
        Component("cccl", f"{int(major) - 10}.{minor}.0"),
        Component("nvdisasm", "13.5.12"),
    ]
    return Arm(name, Stack(f"cuda=={major}.{minor}", f"cuda {version}", tuple(parts)))


def arms(*versions):
    if len(versions) == 2:
        return (arm("base", versions[0]), arm("candidate", versions[1]))
    return tuple(arm(f"cuda {v}", v) for v in versions)


def kernel_names(count):
    out = []
    for i in range(count):
        operator = OPERATORS[i % len(OPERATORS)]
        out.append(
            (
                operator,
                f"{operator}_kernel<{TYPES[(i // len(OPERATORS)) % 4]}, {1 << (i % 5)}>" + ("" if i < 48 else f" #{i}"),
            )
        )
    return out


def side(rng, operator, case, arch, registers, spills=0, version="12.9", notes=()):
    """Evidence of one side, as the static comparison records it."""
    loads = rng.randrange(8, 120)
    mix = {
        "global load 128 bit": loads,
        "global store 128 bit": loads // 2,
        "shared load": loads * 2,
        "shared store": loads,
        "fp32": loads * 7,
        "integer": loads * 5,
        "control": 40 + loads // 3,
        "shuffle": 10,
        "special function": 16,
        "barrier": 4,
    }
    if spills:
        mix |= {"local load": spills, "local store": spills // 2}
    return {
        "resources": {
            "registers": registers,
            "stack": spills * 4,
            "shared": 16384,
            "spill_stores": spills * 2,
            "spill_loads": spills * 4,
            "barriers": 1,
            "constant": 568,
            "code": 16 * sum(mix.values()),
        },
        "mix": mix,
        "instructions": sum(mix.values()),
        "local_ops": spills,
        "occupancy": {
            "threads": 256,
            "dynamic_shared": 0,
            "warps": 48 if registers < 64 else 8,
            "max_warps": 64,
            "limiter": "registers",
        },
        "code_sha256": digest(operator, case, arch, version, registers),
        "text_sha256": digest(case, arch, registers),
        "ptx_sha256": digest(operator, case),
        "cubin_sha256": digest(operator, case, arch, version),
        "notes": list(notes),
        "ptxas_seconds": 0.41,
    }


C7510 = {
    "severity": "warning",
    "code": "C7510",
    "text": "Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "non wgmma instructions defining accumulator registers of a wgmma between start and end of the pipeline stage",
    "cause": "an accumulator is written between two asynchronous products",
    "advice": "initialise accumulators before the first wgmma of the stage",
}


def changed(rng, operator, case, arch, rank, step=("base", "candidate"), since=()):
    low, high = rng.choice([(40, 168), (32, 40), (96, 128), (64, 72), (128, 255)])
    spills = rng.choice([0, 0, 64, 192]) if high > 100 else 0
    base, candidate = (
        side(rng, operator, case, arch, low),
        side(rng, operator, case, arch, high, spills, "13.2", [C7510] if spills > 100 else []),
    )
    changes = [Change("registers", low, high, f"registers {low} -> {high}")]
    if spills:
        changes.append(Change("local_ops", 0, spills, f"local-memory operations 0 -> {spills}"))
    changes.append(
        Change(
            "instructions",
            base["instructions"],
            candidate["instructions"],
            f"instructions {base['instructions']:,} -> {candidate['instructions']:,}",
        )
    )
    return Delta(
        operator,
        case,
        arch,
        "static",
        State.UNDECIDED,
        "code-changed",
        f"Registers grow from {low} to {high}; only a measurement tells what that costs.",
        step,
        since,
        kernel=f"_Z{len(operator)}{operator}_kernelIfLi4EEvPT_PKS0_i",
        source=f"{operator}.cu",
        suspicion=round(100 / (1 + rank), 2),
        component="ptxas",
        changes=tuple(changes),
        base=base,
        candidate=candidate,
    )


def same(rng, operator, case, arch, step=("base", "candidate"), since=()):
    evidence = {"code_sha256": digest(operator, case, arch)}
    return Delta(
        operator,
        case,
        arch,
        "static",
        State.SAME,
        "identical-sass",
        "identical machine code",
        step,
        since,
        kernel=case,
        source=f"{operator}.cu",
        base=evidence,
        candidate=evidence,
    )


def broken(operator, case, arch, step=("base", "candidate"), message=MESSAGE, since=()):
    return Delta(
        operator,
        case,
        arch,
        "static",
        State.BROKEN,
        "does-not-compile",
        "No longer compiles: static assertion failed",
        step,
        since,
        source=f"{operator}.cu",
        component="headers",
        candidate={"message": message},
    )


def summary(deltas):
    count = {"compared": len(deltas)}
    for delta in deltas:
        word = "changed" if delta.state is State.UNDECIDED and delta.evidence == "static" else delta.state.value
        count[word] = count.get(word, 0) + 1
    return count


ENVIRONMENT = {
    "brakecheck": "0.1.0",
    "date": "2026-12-01T09:30:00Z",
    "front": "nvrtc",
    "archs": list(ARCHS),
    "policy": {"measured": {"margin": 0.01}},
}


def go(kernels=24):
    rng = random.Random(1)
    deltas = tuple(same(rng, o, k, a) for o, k in kernel_names(kernels) for a in ARCHS)
    return Comparison(
        Verdict.GO,
        f"All {kernels} kernels compile to identical machine code on all 3 architectures.",
        (Reason("identical", "identical-sass proves that the toolchain changes nothing for these kernels"),),
        arms("12.9.1", "12.9.2"),
        summary(deltas),
        deltas,
        environment=ENVIRONMENT,
    )


def withheld(kernels=60, different=12):
    rng = random.Random(2)
    deltas = []
    for i, (operator, case) in enumerate(kernel_names(kernels)):
        if i < different:
            if i % 3 == 0:
                seed = rng.random()
                deltas += [changed(random.Random(seed), operator, case, a, i) for a in ARCHS]
            else:
                deltas += [
                    changed(rng, operator, case, "sm_90a", i),
                    same(rng, operator, case, "sm_80"),
                    same(rng, operator, case, "sm_100a"),
                ]
        elif i == different:
            deltas += [
                same(rng, operator, case, "sm_80"),
                same(rng, operator, case, "sm_90a"),
                Delta(
                    operator,
                    case,
                    "sm_100a",
                    "static",
                    State.MISSING,
                    "unknown-arch",
                    "ptxas 12.6 does not know sm_100a (first known by 12.8)",
                    source=f"{operator}.cu",
                    component="ptxas",
                    base={"message": "ptxas fatal: Value 'sm_100a' is not defined for option 'gpu-name'"},
                ),
            ]
        else:
            deltas += [same(rng, operator, case, a) for a in ARCHS]
    return Comparison(
        Verdict.WITHHELD,
        f"{different} of {kernels} kernels compile to other machine code: measure these before you move.",
        (
            Reason(
                "changed",
                "5 kernels use more than twice the registers; the first to measure is softmax_kernel<float, 1>",
                {"arch": "sm_90a"},
            ),
            Reason(
                "missing", "1 kernel was not compared on sm_100a, which cuda 12.6 cannot build for", {"arch": "sm_100a"}
            ),
        ),
        arms("12.9.1", "13.2.0"),
        summary(deltas),
        tuple(deltas),
        causes=(
            Cause(
                "ptxas",
                ("PTX is byte-identical, the machine code differs", "all 12 changes appear at 13.0"),
                "assembling the base's PTX with the candidate's ptxas gives the base's machine code",
            ),
        ),
        mitigations=(
            Mitigation("pin ptxas 12.9 (cuda==13.2+ptxas==12.9)", False, guard="a kernel uses PTX ISA 9.0 features"),
        ),
        environment=ENVIRONMENT,
    )


def steps(kernels=40, versions=("12.4.1", "12.9.1", "13.0.2", "13.5.0")):
    rng = random.Random(3)
    names = [f"cuda {v}" for v in versions]
    deltas = []
    for i, (operator, case) in enumerate(kernel_names(kernels)):
        for a in ARCHS[:2]:
            if i % 4 == 0:
                at = 1 + (i // 4) % (len(names) - 1)
                deltas.append(changed(rng, operator, case, a, i, (names[at - 1], names[at]), tuple(names[at + 1 :])))
                if i % 8 == 0 and at + 1 < len(names):
                    deltas[-1] = changed(rng, operator, case, a, i, (names[at - 1], names[at]), ())
                    deltas.append(
                        changed(rng, operator, case, a, i, (names[at], names[at + 1]), tuple(names[at + 2 :]))
                    )
            elif i == 5:
                deltas.append(broken(operator, case, a, (names[1], names[2]), since=tuple(names[3:])))
            else:
                deltas.append(same(rng, operator, case, a, (names[0], names[-1])))
    verdict = Verdict.BRAKE
    return Comparison(
        verdict,
        f"1 kernel no longer compiles from cuda {versions[2]} on; 10 more changed on the way.",
        (Reason("broken", "topk_router_kernel no longer compiles"),),
        arms(*versions),
        summary(deltas),
        tuple(deltas),
        environment={**ENVIRONMENT, "verdicts": dict(zip(names[1:], ["WITHHELD"] * (len(names) - 2) + ["BRAKE"]))},
    )


def brake():
    rng = random.Random(4)
    deltas = [
        broken("attention", "attention_tile<128, 64, „größe“>", "sm_90a"),
        broken("attention", HOSTILE, "sm_80", message='<b>bold</b> "]]>" \x00\x08 end'),
    ]
    deltas.append(
        Delta(
            "gemm",
            "wgmma_gemm<128, 256>",
            "sm_90a",
            "static",
            State.BROKEN,
            "wgmma-serialised",
            "ptxas serialises wgmma, which it had not",
            component="ptxas",
            source="gemm.cu",
            changes=(Change("notes", None, "C7510", "new note C7510: wgmma serialised"),),
            base=side(rng, "gemm", "w", "sm_90a", 168),
            candidate=side(rng, "gemm", "w", "sm_90a", 168, notes=[C7510]),
        )
    )
    deltas.append(
        Delta(
            "layernorm",
            "layernorm_kernel<double, 8>",
            "sm_90a",
            "static",
            State.FIXED,
            "compiles",
            "Compiles now and did not before",
            source="layernorm.cu",
            base={"message": "error: no operator matches"},
        )
    )
    deltas += [changed(rng, o, k, "sm_90a", i) for i, (o, k) in enumerate(kernel_names(4))]
    deltas += [same(rng, o, k, "sm_90a") for o, k in kernel_names(30)[4:]]
    return Comparison(
        Verdict.BRAKE,
        "2 kernels no longer compile and 1 lost asynchronous wgmma.",
        (
            Reason(
                "does-not-compile", "attention_tile<128, 64, „größe“> no longer compiles", {"operator": "attention"}
            ),
            Reason("wgmma-serialised", "wgmma_gemm<128, 256> has wgmma serialised (C7510)", {"operator": "gemm"}),
        ),
        arms("12.9.1", "13.2.0"),
        summary(deltas),
        tuple(deltas),
        mitigations=(Mitigation("pin cuda==12.9 for attention", True, 1.0, "other kernels need 13.x"),),
        environment=ENVIRONMENT,
    )


def measured(cases=60):
    rng = random.Random(5)
    deltas = []
    for i in range(cases):
        operator = OPERATORS[i % len(OPERATORS)]
        rows, columns, dtype = (
            1 << rng.randrange(6, 14),
            1 << rng.randrange(8, 14),
            rng.choice(["bf16", "fp16", "fp32"]),
        )
        ratio = math.exp(rng.gauss(0.0, 0.004))
        if i % 17 == 3:
            ratio *= 1 + rng.uniform(0.02, 0.5)
        if i % 23 == 5:
            ratio /= 1 + rng.uniform(0.02, 0.2)
        if i == 40:
            ratio *= 3.2
        half = rng.uniform(0.001, 0.009)
        low, high = ratio * (1 - half), ratio * (1 + half)
        state = State.SLOWER if low > 1.01 else State.FASTER if high < 1 / 1.01 else State.SAME
        if state is State.SAME and (high > 1.01 or low < 1 / 1.01):
            state = State.UNDECIDED
        intensity = 2.0 ** rng.uniform(-2, 9)
        achieved = min(3.3e12 * intensity, 660e12) * rng.uniform(0.4, 0.9)
        time = intensity * rows * columns * 4 / achieved
        memory = rows * columns * 6
        deltas.append(
            Delta(
                operator,
                f"{dtype} {rows}x{columns}",
                "sm_90a",
                "measured",
                state,
                "interval",
                f"{(ratio - 1) * 100:+.1f} %, decided by 12 blocks",
                ratio=ratio,
                low=low,
                high=high,
                metric="device_time",
                base={
                    "median_us": time * 1e6,
                    "memory": {"allocated": memory},
                    "numerics": {"ok": True, "outputs": {"out": {"relative": 1.2e-3}}},
                    "work": {"flops": intensity * rows * columns * 4, "bytes": rows * columns * 4},
                    "blocks": 12,
                },
                candidate={
                    "median_us": time * ratio * 1e6,
                    "memory": {"allocated": int(memory * (1.19 if i == 3 else 1))},
                    "numerics": {"ok": True, "outputs": {"out": {"relative": 1.3e-3}}},
                    "work": {"flops": intensity * rows * columns * 4, "bytes": rows * columns * 4},
                    "blocks": 12,
                },
            )
        )
    deltas.append(
        Delta(
            "conv3d",
            "bf16 1x64x16x112x112",
            "sm_90a",
            "measured",
            State.BROKEN,
            "crash",
            "the worker died of signal 11",
            candidate={"message": "RuntimeError: CUDNN_STATUS_NOT_SUPPORTED"},
        )
    )
    telemetry = [
        {
            "arm": name,
            "time": [float(t) for t in range(0, 600, 5)],
            "clock": [1980 - 30 * (t % 40 > 30) - 4 * rng.random() if t != 100 else None for t in range(0, 600, 5)],
            "temperature": [48 + 14 * (1 - math.exp(-t / 90)) + k + rng.random() for t in range(0, 600, 5)],
        }
        for k, name in enumerate(("base", "candidate"))
    ]
    stacks = tuple(
        Arm(
            n,
            Stack(
                f"pip:torch=={v}",
                f"torch {v}",
                (Component("torch", v), Component("nvidia-cublas", c), Component("driver", "580.65.06")),
            ),
            "torch",
        )
        for n, v, c in (("base", "2.11.0", "13.0.2.14"), ("candidate", "2.12.0", "13.5.1.27"))
    )
    return Comparison(
        Verdict.HOLD,
        "Slower by 2 % to 48 % in 4 cases, 1 case crashes; nothing gains enough to pay for that.",
        (Reason("slower", "transpose bf16 is 48 % slower"), Reason("memory-growth", "peak memory +19 % in transpose")),
        stacks,
        summary(deltas),
        tuple(deltas),
        environment={
            **ENVIRONMENT,
            "noise_floor": 0.0035,
            "telemetry": telemetry,
            "ceilings": {"flops": 660e12, "bandwidth": 3.3e12},
        },
    )


def sass(delta):
    """Aligned SASS of a delta that changed, as evidence/sass.py makes it: (mark, base, candidate)."""
    rng = random.Random(delta.case)
    rows = []
    for block in range(8):
        for i in range(rng.randrange(4, 60)):
            line = f"IMAD.MOV.U32 R{i % 40}, RZ, RZ, c[0x0][0x{0x160 + 4 * block:x}]"
            rows.append(("=", line, line))
        for i in range(rng.randrange(1, 12)):
            rows.append(
                (
                    "~",
                    f"LDG.E.128.CONSTANT R{4 * i}, [R2.64+0x{i * 16:x}]",
                    f"LDG.E.128 R{8 * i}, desc[UR4][R2.64+0x{i * 16:x}]",
                )
            )
        rows += [("+", "", f"STL.64 [R1+0x{i * 8:x}], R{2 * i}") for i in range(rng.randrange(0, 6))]
        rows += [("-", f"FFMA R{i}, R4, R5, R{i}", "") for i in range(rng.randrange(0, 3))]
    return rows


ALL = {
    "go": go,
    "withheld": withheld,
    "steps": steps,
    "brake": brake,
    "measured": measured,
    "measured500": lambda: measured(500),
    "withheld500": lambda: withheld(500, 480),
    "steps14": lambda: steps(60, tuple(f"12.{i}.0" for i in range(9)) + tuple(f"13.{i}.0" for i in range(5))),
}

ALL = {name: functools.lru_cache(make) for name, make in ALL.items()}

if __name__ == "__main__":
    from brakecheck.report import html

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for label, make in ALL.items():
        text = html.render(make(), sass)
        (folder / f"{label}.html").write_text(text, encoding="utf-8")
        print(f"{label:12} {len(text.encode()) / 1e6:.2f} MB")
