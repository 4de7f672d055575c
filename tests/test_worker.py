"""The worker protocol against a real worker process: results, failures, and what it says about itself."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from brakecheck.bench.process import WorkerLost, WorkerProcess
from brakecheck.model import UnavailableError, UsageError
from brakecheck.stack.environment import Environment, check_overlays, put_in_front, read_stack
from brakecheck.worker import fingerprint, numerics, timers
from brakecheck.worker.device import Device, cpu_cache_bytes
from brakecheck.worker.fingerprint import mixed_sets

OPS = str(Path(__file__).parent / "measure" / "my_ops.py")
HERE = Environment(f"env:{sys.executable}", "here", (sys.executable,))
HELLO = {"device": "cpu", "ops": [OPS], "threads": 1}
QUICK = {"plan": {"visit_us": 5_000, "sample_us": 500, "clock": "cpu-time"}, "settle": False}


@pytest.fixture(scope="module")
def worker():
    found = WorkerProcess(HERE, HELLO)
    yield found
    found.close()


def ask(worker, implementation, operator="axpy", case="n=16384 float32", **more):
    request = {"do": "measure", "operator": operator, "case": case, "implementation": implementation, **QUICK, **more}
    return worker.ask(request, 60)


def test_a_block_has_times_key_memory_and_right_numerics(worker):
    result = ask(worker, "torch", case="n=131072 float32")["result"]
    cold = 2 * (cpu_cache_bytes() or 32 << 20) <= timers.MOST_BUFFERS * 12 * 131072  # some servers have 300 MiB
    assert result["key"] == {
        "timer": "cpu-time",
        "mode": "eager",
        "duty": "burst",
        "harness": "2",
        "cache": "cold" if cold else "warm",
        "inputs": "normal(mean=0.0 std=1.0)",
    }
    assert len(result["us"]) >= 7 and min(result["us"]) > 1
    found = result["numerics"]
    assert found["ok"] and found["distinct"] == 1 and found["first_equals_second"] and found["poisoned"]
    assert 0 < found["outputs"]["out"]["relative"] < 1e-6
    assert result["retention"]["growth"] < 4096 and result["work"]["bytes"] == 12 * 131072


@pytest.mark.parametrize("implementation, why", [("tiny", "times the reference's energy"), ("unwritten", "1 NaN")])
def test_wrong_results_are_found_however_small_the_error(worker, implementation, why):
    found = ask(worker, implementation)["result"]["numerics"]
    assert not found["ok"] and why in found["why"]


def test_strided_inputs_and_the_order_of_layouts(worker):
    found = {name: ask(worker, name, "rows", "M=3 N=5")["result"]["numerics"]["layouts"]
             for name in ("torch", "strideless", "picky", "forgetful")}
    assert found["torch"] == {"strided": {"ok": True, "same_in_both_orders": True}}
    assert not found["strideless"]["strided"]["ok"] and "relative error" in found["strideless"]["strided"]["why"]
    assert found["picky"]["strided"]["ok"] and "contiguous inputs" in found["picky"]["strided"]["refused"]
    assert found["forgetful"]["strided"] == {"ok": True, "same_in_both_orders": False}


def test_integers_must_be_equal(worker):
    assert ask(worker, "torch", "count", "M=17 K=16 N=16")["result"]["numerics"]["ok"]
    found = ask(worker, "odd", "count", "M=17 K=16 N=16")["result"]["numerics"]
    assert not found["ok"] and "16 of 272 integers" in found["why"]


def test_layouts_of_the_catalogue_are_called_in_both_orders_and_work_is_described(worker):
    result = ask(worker, "torch", "gemm_int8", "m=17 n=16 k=16 b=t")["result"]
    assert result["numerics"]["ok"] and result["numerics"]["outputs"]["c"]["mismatches"] == 0
    assert result["numerics"]["layouts"] == {"transposed": {"ok": True, "same_in_both_orders": True}}
    assert result["work"] == {"flops": 2 * 17 * 16 * 16, "bytes": 17 * 16 + 16 * 16 + 4 * 17 * 16,
                              "power_limited": False}


def test_a_backend_that_is_not_there_is_missing(worker):
    answer = ask(worker, "cudnn", "attention", "heads=2 length=64 causal=False")
    assert not answer["message"].startswith("Missing:")  # which the state says
    assert answer["state"] == "missing" and "'cudnn' cannot do this case on cpu" in answer["message"]


def test_results_that_change_from_launch_to_launch_are_counted(worker):
    assert ask(worker, "random")["result"]["numerics"]["distinct"] > 1


def test_a_leak_grows(worker):
    assert ask(worker, "leaky")["result"]["retention"]["growth"] >= 4 << 20


def test_injected_work_is_really_done(worker):
    """Four extra calls for each: five times the time. Wide bounds, because this machine may be busy."""
    plan = {**QUICK["plan"], "visit_us": 50_000}
    plain = ask(worker, "torch", checks=False, plan=plan)["result"]
    slowed = ask(worker, "torch", checks=False, plan={**plan, "inject": 4.0, "calls": plain["calls"]})["result"]
    assert slowed["calls"] == plain["calls"] and slowed["extra_calls"] == 4 * plain["calls"]
    assert 2 < min(slowed["us"]) / min(plain["us"]) < 12


@pytest.mark.parametrize(
    "implementation, state, message",
    [
        ("error", "error", "no such luck"),
        ("oom", "oom", "asked for too much"),
        ("import", "missing", "not_there"),
        ("absent", "missing", "it has: compile, crash"),
    ],
)
def test_failures_are_states_with_the_message(worker, implementation, state, message):
    answer = ask(worker, implementation, "trouble", "n=1024")
    assert not answer["ok"] and answer["state"] == state and message in answer["message"]


def test_what_libraries_print_does_not_corrupt_the_protocol(worker):
    assert ask(worker, "noisy", "trouble", "n=1024")["ok"]


def test_unknown_requests_are_refused_and_cases_are_listed(worker):
    assert "cannot do" in worker.ask({"do": "dance"}, 10)["message"]
    cases = worker.ask({"do": "cases"}, 10)["result"]
    assert "torch" in cases["axpy"]["implementations"] and "n=16384 float32" in cases["axpy"]["cases"]


def test_crash_is_a_state_and_a_device_that_is_not_there_is_never_replaced():
    dying = WorkerProcess(HERE, {**HELLO, "device": "cuda:7"})
    answer = dying.ask({"do": "fingerprint"}, 60)
    assert not answer["ok"] and answer["state"] == "unusable" and "torch sees" in answer["message"]
    assert dying.ask({"do": "hello", **HELLO}, 60)["ok"]
    with pytest.raises(WorkerLost, match="SIGABRT") as lost:
        ask(dying, "crash", "trouble", "n=1024")
    assert lost.value.state == "crash" and dying.process.poll() is not None


def test_a_file_of_operators_that_fails_is_named_as_it_is(tmp_path):
    (tmp_path / "mine.py").write_text("1 / 0")
    worker = WorkerProcess(HERE, {**HELLO, "ops": [str(tmp_path / "mine.py")]})
    answer = worker.ask({"do": "cases"}, 60)
    worker.close()
    assert answer["message"] == "ZeroDivisionError: division by zero" and answer["where"] == str(tmp_path / "mine.py")
    assert answer["todo"] == "correct this file of operators"


@pytest.mark.parametrize("value, said", [("1", [fingerprint.INTERPRETED]), ("0", [])])
def test_times_of_interpreted_kernels_are_warned_of(monkeypatch, value, said):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert [w for w in fingerprint.fingerprint(Device("cpu"))["warnings"] if "TRITON" in w] == said


def test_after_an_error_that_the_device_does_not_recover_from_the_worker_ends():
    poisoned = WorkerProcess(HERE, HELLO)
    answer = ask(poisoned, "poison", "trouble", "n=1024")
    assert answer["state"] == "crash" and "device-side assert" in answer["message"]
    assert poisoned.process.wait(timeout=10) == 0


def test_a_python_without_torch_says_so(tmp_path):
    bare = WorkerProcess(Environment("env:bare", "bare", (sys.executable, "-S", "-I")), HELLO)
    answer = bare.ask({"do": "cases"}, 60)
    bare.close()
    assert not answer["ok"] and answer["state"] == "missing" and "torch" in answer["message"]
    with pytest.raises(UnavailableError, match="cannot start"):
        WorkerProcess(Environment("env:none", "none", (str(tmp_path / "python"),)), HELLO)


def test_launched_without_our_files_and_with_a_library_in_front_that_is_proved_in_use(tmp_path):
    """Shipped through stdin past a launcher's banner, with a copy of the OpenMP runtime in front: the fingerprint must
    name the copy, and an overlay that is not what is used must be refused."""
    import torch

    own = next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), None)
    if own is None:
        pytest.skip("this torch brings no OpenMP runtime of its own")
    script = tmp_path / "launch"
    script.write_text(f'#!/bin/sh\ncd /\necho "welcome to the cluster"\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    folder = tmp_path / "overlay" / "lib"
    folder.mkdir(parents=True)
    shutil.copy(own, folder / own.name)
    far = Environment("launch:x", "far", (str(script),), ship=True)
    swapped = put_in_front(far, "openmp-runtime", "1.0", tmp_path / "overlay")
    worker = WorkerProcess(swapped, HELLO)
    fingerprint = worker.ask({"do": "fingerprint"}, 60)["result"]
    assert "axpy" in worker.ask({"do": "cases"}, 10)["result"]
    worker.close()
    assert fingerprint["device"]["kind"] == "cpu"
    assert fingerprint["environment"]["LD_PRELOAD"] == str(folder / own.name)
    (used,) = [c for c in fingerprint["components"] if c["name"] == "openmp"]
    assert used["path"] == str((folder / own.name).resolve()) and len(used["sha256"]) == 64
    check_overlays(swapped, fingerprint)
    used["path"] = str(own)
    with pytest.raises(UnavailableError, match="is not what this stack uses"):
        check_overlays(swapped, fingerprint)


def test_variables_reach_a_python_that_does_not_inherit_them(tmp_path):
    """`env -i` starts with none, as a container does."""
    file = tmp_path / "stacks.toml"
    file.write_text(f'[stacks.a]\nspec = "launch:env -i {sys.executable}"\nvariables = {{NCCL_CUMEM_ENABLE = "0"}}\n')
    worker = WorkerProcess(read_stack(str(file), "a"), HELLO)
    told = worker.ask({"do": "fingerprint"}, 60)["result"]["environment"]
    worker.close()
    assert told == {"NCCL_CUMEM_ENABLE": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    file.write_text('[stacks.a]\nspec = "launch:docker run -i image python"\nvariables = {LD_PRELOAD = "/a.so"}\n')
    with pytest.raises(UsageError, match="LD_PRELOAD is read before"):
        read_stack(str(file), "a")


def test_a_hang_is_killed(worker):
    """Last of this worker's tests: it does not survive."""
    with pytest.raises(WorkerLost, match="no answer within 1 s") as lost:
        worker.ask({"do": "measure", "operator": "trouble", "case": "n=1024", "implementation": "hang", **QUICK}, 1)
    assert lost.value.state == "timeout" and worker.process.wait(10) != 0


# ---- Parts that need no process ------------------------------------------------------------------
def test_compilers_are_told_apart_by_who_brings_them(tmp_path, monkeypatch):
    for name, version in (("nvcc", "13.0.88"), ("ptxas", "13.0.90")):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho release 13.0, V{version}")
        program.chmod(0o755)
    for name in ("libcuda.so.580.65.06", "libnvidia-ptxjitcompiler.so.580.65.06"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "libnvidia-ptxjitcompiler.so.1").symlink_to("libnvidia-ptxjitcompiler.so.580.65.06")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(fingerprint, "mapped", lambda: [str(tmp_path / "libcuda.so.580.65.06")])
    found = {c["name"]: c for c in fingerprint._compilers()}
    assert found["nvcc"]["version"] == "13.0.88" and found["ptxas (toolkit)"]["version"] == "13.0.90"
    assert found["ptxas (driver)"]["version"] == "580.65.06" and len(found["ptxas (driver)"]["sha256"]) == 64


def test_what_torch_brings_of_others_has_a_version_of_its_own():
    names = ("libtorch_cpu.so", "libgomp-24e2ab19.so.1.0.0", "libcusparseLt-f80c68d1.so.0")
    packages = {f"/torch/lib/{name}": "torch 2.5.1" for name in names}
    assert [fingerprint.file_version(path, packages) for path in packages] == ["2.5.1", "1.0.0", None]


def test_energy_is_that_of_the_sampling_windows():
    readings = iter([1000, 4000])
    device = SimpleNamespace(cuda=False, energy=lambda: next(readings), clock=lambda: None)
    sampled = timers._sample(device, timers.Plan(max_samples=3), timers.Sampled("t", "m", 2), lambda: 10.0)
    assert sampled.energy_mj == 3000 and sampled.us == [5.0] * 3


def test_mixed_sets_are_named():
    assert mixed_sets(["/a/libcublas.so.12", "/a/libcublasLt.so.12", "/a/libcudnn.so.9", "/b/libnccl.so.2"]) == []
    (text,) = mixed_sets(["/a/libcublas.so.12", "/b/libcublasLt.so.12"])
    assert "mixed set of cuBLAS" in text and "libcublasLt from /b" in text
    overlay = ["/a/libcublas.so.12", "/a/libcublasLt.so.12", "/o/libcublas.so.12", "/o/libcublasLt.so.12"]
    assert mixed_sets(overlay, overlay[2:]) == []  # torch calls one set, the other lies idle
    assert mixed_sets(overlay, overlay[1:3]) and mixed_sets(overlay, overlay[2:3]) and mixed_sets(overlay)


def test_rotation_exceeds_the_cache_and_fits_the_memory():
    assert timers.rotation_size(1 << 20, 32 << 20, 64 << 30) * (1 << 20) >= 4 * (32 << 20) / 2
    assert timers.rotation_size(1 << 34, 32 << 20, 64 << 30) == 1
    assert timers.rotation_size(1 << 34, 32 << 20, 200 << 30) == 2
    assert timers.rotation_size(64, 32 << 20, 64 << 30) == timers.MOST_BUFFERS


def test_extra_calls_are_whole_and_spread():
    order, extra = timers.order_of(100, 0.03)
    assert extra == 3 and len(order) == 103
    assert timers.order_of(10, 0.0) == (list(range(10)), 0)
    plan = timers.Plan(inject=0.01)
    assert plan.choose_calls(1e6, 4) >= 100


def test_tie_aware_comparison_replaces_the_norm():
    import torch

    from brakecheck.ops import Case, Operator

    op = Operator("topk", "", cases=[Case.of(n=4)])
    op.reference(lambda case, x: {"index": torch.tensor([0, 1])})
    op.comparison(lambda case, inputs, reference, out: {"ok": sorted(out["index"].tolist()) == [0, 1]})
    assert numerics.check(op, op.cases[0], {"x": 0}, {"index": torch.tensor([1, 0])})["ok"]
    wrong = numerics.check(op, op.cases[0], {"x": 0}, {"index": torch.tensor([1, 2])})
    assert not wrong["ok"] and "comparison rejects" in wrong["why"]


def test_infinity_and_shape_are_judged():
    import torch

    from brakecheck.ops import Case, Operator

    op = Operator("x", "", cases=[Case.of(n=2)])
    op.reference(lambda case: {"out": torch.tensor([1.0, float("inf")], dtype=torch.float64)})
    good = numerics.check(op, op.cases[0], {}, {"out": torch.tensor([1.0, float("inf")])})
    lost = numerics.check(op, op.cases[0], {}, {"out": torch.tensor([1.0, 3.0])})
    shaped = numerics.check(op, op.cases[0], {}, {"out": torch.tensor([1.0])})
    absent = numerics.check(op, op.cases[0], {}, {})
    assert good["ok"] and "not infinite" in lost["why"]
    assert "shape" in shaped["why"] and "none of the outputs" in absent["why"]
