"""A worker on a GPU: graph replay, clocks, memory, profiler, injected work."""

import sys
from pathlib import Path

import pytest

from brakecheck.bench.process import WorkerProcess
from brakecheck.stack.environment import Environment

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
OPS = str(Path(__file__).parent / "measure" / "gpu_ops.py")


@pytest.fixture(scope="module")
def worker():
    found = WorkerProcess(Environment("env:here", "here", (sys.executable,)), {"device": "cuda:0", "ops": [OPS]})
    yield found
    found.close()


def ask(worker, implementation, **more):
    answer = worker.ask(
        {"do": "measure", "operator": "mm", "case": "n=1024", "implementation": implementation, **more}, 120
    )
    assert answer["ok"], answer["message"]
    return answer["result"]


def test_device_time_by_graph_with_clocks_memory_and_kernels(worker):
    result = ask(worker, "torch")
    assert result["key"]["timer"] == "cuda-graph" and result["key"]["cache"] == "cold"
    assert result["numerics"]["ok"] and result["numerics"]["poisoned"] and result["numerics"]["graph_equals_eager"]
    assert result["memory"]["allocated"] >= 3 * 2 * 1024 * 1024
    assert result["settle"]["settled"] and len(result["clocks"]) == len(result["us"])
    kernels = result["kernel_sum"]
    assert kernels["kernels"] and 0.5 < kernels["us"] / min(result["us"]) < 2
    assert result["retention"]["growth"] == 0
    assert 1 < min(result["us"]) < 200 and min(result["wall_us"]) > 0.5 * min(result["us"])


def test_injected_work_shows_in_device_time(worker):
    plain = ask(worker, "torch", checks=False, plan={"granularity": 20})
    slowed = ask(worker, "torch", checks=False, plan={"inject": 0.5, "calls": plain["calls"]})
    assert 1.35 < min(slowed["us"]) / min(plain["us"]) < 1.65


def test_what_cannot_be_captured_is_timed_eagerly_and_says_so(worker):
    result = ask(worker, "synchronising", checks=False)
    assert result["key"]["timer"] == "cuda-events" and result["key"]["mode"] == "eager" and "captured" in result["note"]
    assert ask(worker, "torch", checks=False)["key"]["timer"] == "cuda-graph"  # the context survived the failed capture


def test_falling_back_to_the_cpu_is_an_error(worker):
    answer = worker.ask({"do": "measure", "operator": "mm", "case": "n=1024", "implementation": "cpu"}, 120)
    assert not answer["ok"] and "fell back to cpu" in answer["message"]


def test_fingerprint_names_the_libraries_in_use(worker):
    result = worker.ask({"do": "fingerprint"}, 200)["result"]
    found = {c["name"]: c for c in result["components"]}
    for name in ("driver", "driver-cuda", "cuda-build", "cublas", "cublaslt", "cudnn", "cuda-runtime"):
        assert name in found, f"{name} is not among {sorted(found)}"
    assert len(found["cublas"]["sha256"]) == 64 and found["cublas"]["version"]
    assert result["device"]["arch"].startswith("sm_") and result["device"]["uuid"].startswith("GPU-")
