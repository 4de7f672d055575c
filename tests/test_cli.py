"""The command line as a user meets it: verdicts, exit codes, clean JSON, clear errors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import brakecheck
from brakecheck.cli import main

CLI = [sys.executable, "-c", "from brakecheck.cli import main; main()"]
KERNEL = """extern "C" __global__ void scale(const float* x, float* y, int n, float a) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = FACTOR * a * x[i];
}
"""


def run(*arguments):
    """(exit status) of the program in this process."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code or 0


@pytest.fixture
def kernel(tmp_path):
    path = tmp_path / "scale.cu"
    path.write_text(KERNEL)
    return path


# ---- errors: what, where, what to do; never a stack trace ------------------------------------------------

@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["compare", "cuda==12.9"], 64, "two stacks"),
        (["compare", "cuda==12.9", "cuda=13"], 64, "cuda=13"),
        (["compare", "cuda==12.9", "cuda==13.2", "--source", "nowhere.cu"], 64, "nowhere.cu"),
        (["compare", "cuda==12.9", "cuda==13.2", "--operators", "soft"], 64, "soft"),
        (["compare", "cuda==12.9", "cuda==13.2", "-o", "report.pdf"], 64, ".pdf"),
        (["compare", "cuda==12.9", "cuda==13.2", "-o", "no/such/folder/report.md"], 65, "no/such/folder"),
        (["compare", "cuda==12.9", "cuda==13.2", "--policy", "nowhere.toml"], 64, "nowhere.toml"),
        (["compare", "cuda==12.9", "cuda==13.2", "--jobs", "many"], 64, "jobs"),
        (["compare", "cuda==12.9", "cuda==13.2", "--arch", "sm_foo"], 64, "sm_foo"),
        (["compare", "cuda==12.9", "cuda==13.2", "--arch", ","], 64, "no architecture"),
        (["compare", "cuda==12.9", "cuda==13.2", "--front", "clang"], 64, "clang"),
        (["compare", "cuda==12.9", "cuda==13.2", "--std", "c++20"], 64, "--source"),
        (["compare", "cuda==12.9", "cuda==13.2", "--launch", "softmax=256"], 64, "--source"),
        (["compare", "cuda==12.9", "cuda==13.2", "--arch", "sm_75"], 64, "sm_80 and newer"),
        (["compare", "cuda==12.9", "cuda==13.2", "--frobnicate"], 64, "frobnicate"),
        (["frobnicate"], 64, "frobnicate"),
        (["compare"], 64, "BASE CANDIDATE"),
        (["doctor", "cuda==12.9", "--driver", "new"], 64, "new"),
        (["doctor", "cuda==12.7"], 64, "12.7"),
        (["ops", "nothing"], 64, "nothing"),
        (["diff", "nowhere", "nowhere", "--timeline", "both.html"], 64, ".html"),
        (["diff", "nowhere", "nowhere", "--timeline", "no/such/folder/both.json"], 64, "folder"),
    ],
)
def test_errors_are_one_clear_message(arguments, status, words, capsys):
    assert run(*arguments) == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("brakecheck: ") and words in err and "Traceback" not in err


def test_no_network_and_no_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BRAKECHECK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    assert run("compare", "cuda==12.9", "cuda==13.2", "--offline") == 69
    err = capsys.readouterr().err
    assert "offline" in err.lower() and "Traceback" not in err


def test_an_unwritable_cache(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("BRAKECHECK_CACHE", str(tmp_path / "file"))
    assert run("compare", "cuda==12.9", "cuda==13.2") >= 64
    assert "Traceback" not in capsys.readouterr().err


def test_a_fault_of_ours_is_said_and_traced_only_on_request(monkeypatch, capsys):
    from brakecheck import api

    def broken(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr(api, "compare", broken)
    assert run("compare", "cuda==12.9", "cuda==13.2") == 70
    err = capsys.readouterr().err
    assert "internal error" in err and "a bug" in err and "Traceback" not in err
    assert run("--debug", "compare", "cuda==12.9", "cuda==13.2") == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.network
def test_ctrl_c_keeps_what_was_finished(tmp_path):
    """SIGINT while compiling: one message, status 130, no process of ours left, and the finished units in the cache."""
    command = [*CLI, "compare", "cuda==12.9", "cuda==13.2"]
    environment = {**os.environ, "BRAKECHECK_CACHE": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    limit = time.monotonic() + 240
    while not list(tmp_path.glob("units/**/unit.json")) and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted" in err and "Traceback" not in err
    assert list(tmp_path.glob("units/**/unit.json"))
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert not left.strip()


# ---- commands that need nothing --------------------------------------------------------------------------

def test_version_and_help(capsys):
    assert run("--version") == 0
    assert brakecheck.__version__ in capsys.readouterr().out
    for arguments in (["--help"], []):
        assert run(*arguments) == 0
        out, err = capsys.readouterr()
        assert "compare" in out and not err


def test_ops_lists_the_catalogue(capsys):
    assert run("ops", "--json") == 0
    found = {row["operator"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(found) >= 16 and sum(len(row["kernels"]) for row in found.values()) >= 16
    assert run("ops", "softmax") == 0
    out = capsys.readouterr().out
    assert "softmax_fused" in out and "tolerance" in out


def test_doctor_predicts_an_old_driver(capsys):
    assert run("doctor", "cuda==13.2", "--driver", "535.104.05", "--arch", "sm_90a", "--json") == 2
    data = json.loads(capsys.readouterr().out)
    (row,) = data["archs"]
    assert row["needs"]["elf_abi"] == 8 and row["needs"]["cubin_driver"].startswith("580")
    assert any(f["severity"] == "error" for f in row["findings"])
    assert run("doctor", "cuda==12.4", "--driver", "580.65.06", "--arch", "sm_80") == 0
    assert "nothing in the way" in capsys.readouterr().out


def test_doctor_predicts_an_assembler_older_than_its_producer(capsys):
    assert run("doctor", "cuda==13.0+ptxas==12.8", "--driver", "580.65.06", "--arch", "sm_90a") == 2
    assert "Unsupported .version" in capsys.readouterr().out


# ---- the main job, with real compilers -------------------------------------------------------------------

@pytest.mark.network
def test_compare_says_what_changed(kernel, tmp_path, capsys):
    report = [tmp_path / f"r{suffix}" for suffix in (".html", ".md", ".xml", ".json")]
    flags = [x for path in report for x in ("-o", path)]
    flags += ["-s", kernel, "-D", "FACTOR=2", "--arch", "sm_80,sm_90a"]
    status = run("compare", "cuda==12.9", "cuda==13.2", *flags)
    out = capsys.readouterr().out
    assert status in (0, 3) and out.count("report: ") == 4
    assert all(path.stat().st_size > 200 for path in report)
    data = json.loads(report[3].read_text())
    assert data["schema"] == "brakecheck/comparison/1" and data["verdict"] in ("GO", "WITHHELD")
    assert data["coverage"]["compared"] == 2 and [a["name"] for a in data["arms"]][0].startswith("cuda 12.9")
    names = {c["name"] for c in data["arms"][1]["stack"]["components"]}
    assert {"nvrtc", "ptxas", "headers", "nvdisasm"} <= names


@pytest.mark.network
def test_a_stack_against_itself_is_go_and_json_is_all_there_is(kernel, capsys):
    assert run("compare", "cuda==12.9", "cuda==12.9", "-s", kernel, "-D", "FACTOR=2", "--arch", "sm_90a", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "GO" and {d["reason"] for d in data["deltas"]} == {"identical-sass"}


@pytest.mark.network
def test_a_source_that_one_stack_rejects_is_broken_or_fixed(tmp_path, capsys):
    """__CUDACC_VER_MAJOR__ lets one release reject it, as a removed intrinsic would."""
    path = tmp_path / "picky.cu"
    path.write_text('#if __CUDACC_VER_MAJOR__ >= 13\n#error gone in 13\n#endif\nextern "C" __global__ void k() {}\n')
    assert run("compare", "cuda==12.9", "cuda==13.2", "-s", path, "--arch", "sm_90a", "--json") == 2
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "BRAKE" and data["deltas"][0]["state"] == "broken"
    assert "gone in 13" in json.dumps(data["deltas"][0])
    run("compare", "cuda==13.2", "cuda==12.9", "-s", path, "--arch", "sm_90a", "--json")
    assert json.loads(capsys.readouterr().out)["deltas"][0]["state"] == "fixed"


@pytest.mark.network
def test_an_architecture_that_a_toolchain_lacks_is_missing_and_the_rest_goes_on(kernel, capsys):
    arguments = ["-s", kernel, "-D", "FACTOR=2", "--arch", "sm_90a,sm_100a", "--json"]
    assert run("compare", "cuda==12.4", "cuda==13.2", *arguments) in (0, 3)
    states = {d["arch"]: d["state"] for d in json.loads(capsys.readouterr().out)["deltas"]}
    assert states["sm_100a"] in ("missing", "new", "fixed") and states["sm_90a"] in ("same", "undecided")


@pytest.mark.network
def test_swapped_ptxas_is_named(tmp_path, capsys):
    """Equal PTX, another cubin: only ptxas can be it (F19)."""
    path = Path(brakecheck.__file__).parent / "kernels" / "cuda" / "accumulate.cu"
    status = run("compare", "cuda==12.9", "cuda==12.9+ptxas==13.2", "-s", path, "--arch", "sm_90a", "--json")
    data = json.loads(capsys.readouterr().out)
    changed = [d for d in data["deltas"] if d["state"] == "undecided"]
    assert status == 3 and changed and {d["component"] for d in changed} == {"ptxas"}
    assert changed[0]["base"]["ptx_sha256"] == changed[0]["candidate"]["ptx_sha256"]


@pytest.mark.network
def test_a_launch_that_cannot_work_is_found_without_a_gpu(tmp_path, capsys):
    """F17: more registers x threads than an SM has, for a launch that the user names; a wrong name is an error."""
    path = tmp_path / "hungry.cu"
    body = "".join(f"  float v{i} = a[{i} * n];\n" for i in range(100))
    rest = "".join(f"  b[{i} * n] = v{i} * v{(i * 7 + 3) % 100};\n" for i in range(100))
    path.write_text(f'extern "C" __global__ void hungry(const float* __restrict__ a, float* b, int n) {{\n{body}'
                    f"  __syncthreads();\n{rest}}}\n")
    arguments = ["compare", "cuda==12.9", "cuda==13.2", "-s", path, "--arch", "sm_90a", "--json", "--launch"]
    assert run(*arguments, "hungry=1024") == 3
    (delta,) = json.loads(capsys.readouterr().out)["deltas"]
    assert delta["reason"] == "launches-nowhere" and delta["candidate"]["limits"][0]["resource"] == "registers"
    run(*arguments, "hungry=128")
    (delta,) = json.loads(capsys.readouterr().out)["deltas"]
    assert delta["candidate"]["occupancy"]["threads"] == 128
    assert run(*arguments, "angry=128") == 64
    assert "the kernels are hungry" in capsys.readouterr().err


@pytest.mark.network
def test_python_interface(kernel, tmp_path):
    result = brakecheck.compare("cuda==12.9", "cuda==13.0", "cuda==13.2", sources=[kernel], defines=["FACTOR=2"],
                                archs=["sm_90a"])
    assert result.verdict.value in ("GO", "WITHHELD")
    assert {"operator", "state", "ratio", "component", "changes"} <= set(result.deltas.columns)
    assert result.deltas.height == len(result.comparison.deltas) >= 1
    assert result.to_html(tmp_path / "r.html").read_text().startswith("<!doctype html>")
