"""The Triton kernels: in the interpreter against float64, compiled without a GPU, and where there is no Triton."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from brakecheck.bench.process import WorkerProcess
from brakecheck.evidence.cubin import read_cubin
from brakecheck.ops import Case, catalogue, in_triton
from brakecheck.ops.base import Missing
from brakecheck.ops.load import load
from brakecheck.ops.make import Make
from brakecheck.stack.environment import Environment

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent
OPS = str(ROOT / "tests" / "measure" / "triton_ops.py")
OPERATORS = {name: op for name, op in load([OPS]).items() if "triton" in op.implementations}
LEAST_SHARED = 99 * 1024  # bytes a block may have on sm_86, sm_89 and sm_120


def dots(name):
    return "gemm" in name or "attention" in name or "matmul" in name


def bfloat16(name, case):
    return case.get("dtype", "bfloat16" if name != "gemm_float16" else "") == "bfloat16"


def small(op):
    """Cases that the interpreter does in a second."""
    cost = op.compute_cost
    return [c for c in op.cases if not cost or (cost(c).bytes < 1e6 and cost(c).flops < 3e7)]


def test_the_operators_that_have_triton():
    assert {n for n, op in catalogue().items() if "triton" in op.implementations} == {
        "softmax", "layernorm", "rmsnorm", "elementwise_chain", "bf16_gemm", "gemm_float16", "gemm_bfloat16",
        "attention"}


# ---- in the interpreter ----
# Triton looks for TRITON_INTERPRET when it is imported, so its kernels run in a process of their own.
EACH = """
import json, sys
sys.path.insert(0, sys.argv[1])
from brakecheck.ops.load import load
from brakecheck.ops.make import Make
from brakecheck.worker import numerics
operators = load([sys.argv[2]])
for name, wanted in json.loads(sys.argv[3]):
    op = operators[name]
    case = next(c for c in op.cases if c.name == wanted)
    inputs = op.make_inputs(case, Make("cpu", 3))
    for layout in (None, *op.layouts.values()):
        given = layout(case, **inputs) if layout else inputs
        found = numerics.check(op, case, given, op.implementations["triton"](case, **given))
        print(json.dumps([name, wanted, found]))
"""


def test_agrees_with_float64():
    pytest.importorskip("triton")
    wanted = [(name, case.name) for name, op in OPERATORS.items() for case in small(op)
              if not (dots(name) and bfloat16(name, case))]
    command = [sys.executable, "-c", EACH, str(ROOT), OPS, json.dumps(wanted)]
    ran = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
                         check=False)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {(name, case) for name, case, _ in found} == set(wanted) and len(wanted) > 25
    assert not [each for each in found if not each[2]["ok"] or "absent" in each[2]]


@pytest.mark.parametrize("name, state", [("softmax", None), ("gemm_float16", None), ("gemm_bfloat16", "missing")])
def test_a_worker_runs_it_in_the_interpreter_or_says_why_not(name, state):
    pytest.importorskip("triton")
    here = Environment("env:this", "here", (sys.executable,), {"TRITON_INTERPRET": "1"})
    worker = WorkerProcess(here, {"device": "cpu", "threads": 1})
    plan = {"visit_us": 1, "min_samples": 1, "max_samples": 1}
    answer = worker.ask({"do": "measure", "operator": name, "case": small(OPERATORS[name])[0].name,
                         "implementation": "triton", "settle": False, "plan": plan}, 120)
    worker.close()
    if state:
        assert answer["state"] == state and "bit patterns of bfloat16" in answer["message"]
    else:
        assert answer["ok"] and answer["result"]["numerics"]["ok"], answer


# ---- compiled without a GPU ----
ELEMENTS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def plans(kernels):
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    row, qkv = empty(8192), [empty(16, 2048, dim) for dim in (64, 128)]
    return {
        "softmax": kernels.softmax(empty(4096, 8192, dtype=torch.float32)),
        "softmax-long": kernels.softmax(empty(512, 131072, dtype=torch.float32)),
        "layernorm": kernels.layer_norm(empty(4096, 8192), row, row, 1e-5),
        "rmsnorm": kernels.rms_norm(empty(4096, 8192), row, 1e-5),
        "elementwise": kernels.elementwise_chain(row, row, row),
        "matmul-1": kernels.matmul(empty(1, 4096), empty(4096, 4096).T),
        "matmul-64": kernels.matmul(empty(64, 4096), empty(4096, 4096)),
        "matmul-4096": kernels.matmul(empty(4096, 4096), empty(4096, 4096).T),
        "matmul-odd": kernels.matmul(empty(131, 77), empty(66, 77).T),
        "attention-64": kernels.attention(qkv[0], qkv[0], qkv[0], False),
        "attention-128-causal": kernels.attention(qkv[1], qkv[1], qkv[1], True),
    }


def compiled(plan, arch):
    """What a launch of the plan would compile, for sm_<arch>."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, dict(plan.constants), {}
    for i, (name, value) in enumerate(zip(plan.kernel.arg_names, plan.arguments)):
        tensor = isinstance(value, torch.Tensor)
        if not tensor and value == 1:
            constants[name] = 1
        else:
            signature[name] = ELEMENTS[value.dtype] if tensor else "i32" if isinstance(value, int) else "fp32"
        if tensor or value % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    signature = {name: signature.get(name, "constexpr") for name in plan.kernel.arg_names}
    source = ASTSource(plan.kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=plan.options)


NAMES = ["softmax", "softmax-long", "layernorm", "rmsnorm", "elementwise", "matmul-1", "matmul-64", "matmul-4096",
         "matmul-odd", "attention-64", "attention-128-causal"]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", NAMES)
def test_compiles_and_fits(name, arch, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from brakecheck.kernels import triton_kernels

    plan = plans(triton_kernels)[name]
    made = compiled(plan, arch)
    assert made.metadata.shared <= LEAST_SHARED
    cubin = read_cubin(made.asm["cubin"])
    (kernel,) = cubin.kernels
    assert (kernel.name, cubin.arch.rstrip("a")) == (plan.kernel.__name__, f"sm_{arch}")
    assert 0 < kernel.registers <= 65536 // (32 * plan.options["num_warps"])
    assert kernel.frame <= 64  # bytes a thread: little is spilled
    if "matmul" in name or "attention" in name:
        tensor_cores = "wgmma.mma_async" if arch == 90 and name != "matmul-1" else "mma.sync"
        assert tensor_cores in made.asm["ptx"]
        assert ("cp.async" in made.asm["ptx"]) == (name != "matmul-odd")  # odd rows are not aligned
    else:
        assert ".v4." in made.asm["ptx"]  # 16 bytes a load


def test_all_plans_are_compiled():
    pytest.importorskip("triton")
    from brakecheck.kernels import triton_kernels

    assert list(plans(triton_kernels)) == NAMES


# ---- where it cannot run ----
def drawn(name="softmax"):
    op = catalogue()[name]
    return op, op.cases[0], op.make_inputs(op.cases[0], Make("cpu", 1))


def test_without_triton_it_is_missing_and_the_catalogue_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "brakecheck.kernels.triton_kernels", raising=False)
    monkeypatch.delattr("brakecheck.kernels.triton_kernels", raising=False)
    op, case, inputs = drawn()
    with pytest.raises(Missing, match="this environment has no Triton that can be used: import of triton"):
        op.implementations["triton"](case, **inputs)


def test_on_a_cpu_it_is_missing_and_says_how_it_would_run(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    op, case, inputs = drawn()
    with pytest.raises(Missing, match="no cpu device; TRITON_INTERPRET=1"):
        op.implementations["triton"](case, **inputs)


def test_what_the_kernels_do_not_take_is_missing(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(Missing, match="rows of 65536 elements at most, not 65537"):
        in_triton.kernels(torch.empty(1), row=65537)
    q = torch.empty(1, 4, 80)
    with pytest.raises(Missing, match="head dimensions of 16, 32, 64 and 128, not 80"):
        catalogue()["attention"].implementations["triton"](Case.of(causal=True), q=q, k=q, v=q)
