"""The Triton kernels: in the interpreter against float64, compiled without a GPU, and where there is no Triton."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from brakecheck.bench.process import WorkerProcess
from brakecheck.evidence.cubin import read_cubin
from brakecheck.evidence.diff import diff
from brakecheck.evidence.recognise import open_evidence
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
from brakecheck.worker.device import Device
from brakecheck.worker.layouts import layouts_for
operators = load([sys.argv[2]])
for name, wanted in json.loads(sys.argv[3]):
    op = operators[name]
    case = next(c for c in op.cases if c.name == wanted)
    inputs = op.make_inputs(case, Make("cpu", 3))
    for layout in (None, *layouts_for(Device("cpu"), op, inputs).values()):
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
@pytest.fixture
def cubins(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return importlib.import_module("triton_cubins")


@pytest.mark.parametrize("arch", [80, 90])
def test_every_configuration_compiles_and_fits(cubins, arch):
    for name, plan in cubins.plans().items():
        made = cubins.compiled(plan, arch)
        assert made.metadata.shared <= LEAST_SHARED, name
        cubin = read_cubin(made.asm["cubin"])
        (kernel,) = cubin.kernels
        assert (kernel.name, cubin.arch.rstrip("a")) == (plan.kernel.__name__, f"sm_{arch}")
        assert 0 < kernel.registers <= 65536 // (32 * plan.options["num_warps"])
        assert kernel.frame <= 64, f"{name}: {kernel.frame} bytes a thread"  # little is spilled
        ptx = made.asm["ptx"]
        if "matmul" in name or "attention" in name:
            assert ("wgmma.mma_async" if arch == 90 and name != "matmul-1" else "mma.sync") in ptx
            assert ("cp.async" in ptx) == (name != "matmul-odd")  # its rows are not aligned
        else:
            assert ".v4." in ptx  # 16 bytes a load


def test_cubins_of_two_tritons_are_lined_up_by_file(cubins, tmp_path, monkeypatch, capsys):
    norms = {name: plan for name, plan in cubins.plans().items() if "norm" in name}
    for side, warps in (("old", 4), ("new", 16)):
        made = {name: replace(plan, options={"num_warps": warps}) for name, plan in norms.items()}
        monkeypatch.setattr(cubins, "plans", lambda made=made: made)
        monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / side), "--arch", "80,90"])
        cubins.main()
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == 2 * [
        [name, arch] for name in norms for arch in ("sm80", "sm90")]
    found = diff(open_evidence(tmp_path / "old"), open_evidence(tmp_path / "new"), 0.03)
    assert {row.place: row.text.split(":")[0] for row in found.rows} == {
        f"{name}-{arch}": f"{name}_kernel" for name in norms for arch in ("sm80", "sm90")}
    assert all("registers" in row.changes[0].text for row in found.rows)


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
