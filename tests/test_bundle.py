"""Bundles: made here, measured where only Python is, compared here; and toolchains as arms."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from brakecheck import bundling, toolchain_arms
from brakecheck.bench.bundle import main as run_bundle
from brakecheck.bench.bundle import measure_bundle, read_manifest
from brakecheck.bench.controller import Options
from brakecheck.bench.stopping import enough_for
from brakecheck.cli import main
from brakecheck.model import UnavailableError, UsageError
from brakecheck.verdict.policy import Policy

FAKE = Path(__file__).parent / "measure" / "fake_worker.py"


def cli(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code or 0


def python_like(folder, name, *faults):
    """An executable that answers as a worker does, whatever it is asked to run."""
    path = folder / name / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\nFAKE_FOLDER="{folder}" exec "{sys.executable}" -S "{FAKE}" {name} 10.0 0.001 '
                    f'{" ".join(faults)}\n')
    path.chmod(0o755)
    return path


def test_a_bundle_is_measured_without_our_dependencies_and_compared_here(tmp_path, capsys):
    old, new = python_like(tmp_path, "old"), python_like(tmp_path, "new", "op1=slow")
    folder = tmp_path / "b"
    assert cli("bundle", f"env:{old}", f"env:{new}", "-o", folder, "--implementation", "torch") == 0
    assert "python b/run.py" in capsys.readouterr().out
    command = [sys.executable, "-I", "-S", str(folder / "run.py"), "--device", "cpu"]  # -S: no installed packages
    done = subprocess.run([*command, "--budget", "60s"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (result,) = folder.glob("run-*.json")
    assert "brakecheck compare" in done.stdout and not list(folder.glob("journal*"))
    assert cli("compare", result, "--json") in (1, 2)
    data = json.loads(capsys.readouterr().out)
    assert {d["operator"]: d["state"] for d in data["deltas"]} == {"op0": "same", "op1": "slower", "op2": "same"}
    assert all("ratio" in d and d["base"]["blocks"] >= 4 for d in data["deltas"])
    assert cli("show", result) == 0 and "op1" in capsys.readouterr().out
    here = subprocess.run([sys.executable, "-m", "brakecheck", "--version"], cwd=folder, capture_output=True, text=True,
                          env={})
    assert here.returncode == 64 and "this folder is a bundle" in here.stderr and "run.py" in here.stderr
    wrong = subprocess.run([*command, "--budget", "soon"], capture_output=True, text=True)
    assert wrong.returncode == 64 and "not a time" in wrong.stderr and "Traceback" not in wrong.stderr
    wrong = subprocess.run([*command, "--out", str(tmp_path / "none" / "r.json")], capture_output=True, text=True)
    assert wrong.returncode == 64 and "no such folder" in wrong.stderr and "pair" not in wrong.stderr  # nothing ran


def test_an_attempt_that_measured_nothing_does_not_bind_the_next(tmp_path):
    python_like(tmp_path, "old")
    folder = tmp_path / "b"
    assert cli("bundle", "env:this", f"env:{tmp_path}/old", "-o", folder, "--implementation", "torch") == 0
    with pytest.raises(UnavailableError):
        measure_bundle(folder, "cpu", 60.0, python="/bin/false")
    assert not list(folder.glob("journal*"))
    assert measure_bundle(folder, "cpu", 60.0, python=str(tmp_path / "old" / "bin" / "python")).complete


def test_a_damaged_bundle_says_so(tmp_path, capsys):
    (tmp_path / "manifest.json").write_text('{"schema": "brakecheck/bundle/1"}')
    assert run_bundle(tmp_path, ["--device", "cpu"]) == 64 and "this is no bundle" in capsys.readouterr().err
    text = '{"schema": "brakecheck/bundle/1", "arms": [5], "options": {}, "margin": 0.01}'
    (tmp_path / "manifest.json").write_text(text)
    assert run_bundle(tmp_path, ["--device", "cpu"]) == 70 and "make the bundle again" in capsys.readouterr().err


def test_what_cannot_be_written_is_not_lost(tmp_path):
    python_like(tmp_path, "old")
    folder = tmp_path / "b"
    assert cli("bundle", f"env:{tmp_path}/old", f"env:{tmp_path}/old", "-o", folder, "--implementation", "torch") == 0

    def full(run):
        raise OSError(28, "No space left on device", "r.json")

    with pytest.raises(OSError):
        measure_bundle(folder, "cpu", 60.0, keep=full)
    starts = (tmp_path / "starts-old").stat().st_size
    kept = []
    assert measure_bundle(folder, "cpu", 60.0, keep=kept.append).complete and len(kept) == 1
    assert (tmp_path / "starts-old").stat().st_size == starts  # nothing was measured again
    assert not list(folder.glob("journal*"))


def test_an_interrupted_bundle_goes_on(tmp_path, capsys):
    for name in ("old", "new"):
        python_like(tmp_path, name)
    folder, store = tmp_path / "b", tmp_path / "store"
    specs = [f"env:{tmp_path}/{name}" for name in ("old", "new")]
    bundling.write_bundle(specs, folder, Options(), Policy())
    assert cli("run", folder, "--device", "cpu", "--budget", "0.001s", "--store", store) == 0
    assert (folder / "journal-cpu.jsonl").exists() and "incomplete" in capsys.readouterr().out
    assert cli("run", folder, "--device", "cpu", "--budget", "60s", "--store", store, "--json") == 0
    run = json.loads(capsys.readouterr().out)
    assert run["complete"] and min(len(m["blocks"]) for m in run["measurements"]) >= 4
    assert cli("compare", run["id"], "--store", store) == 0


def test_bundles_that_cannot_be_made(tmp_path):
    def refused(*specs, folder="new"):
        with pytest.raises(UsageError) as caught:
            bundling.write_bundle(specs, tmp_path / folder, Options(), Policy())
        return str(caught.value)

    (tmp_path / "there").mkdir()
    assert "is there already" in refused("env:this", "env:this", folder="there")
    assert "two stacks or more" in refused("env:this") and "cannot build" in refused("env:this", "pip:torch==2.12.0")
    assert "two toolchains or two environments" in refused("env:this", "cuda==12.9")
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new*"))
    with pytest.raises(UsageError, match="no bundle"):
        read_manifest(tmp_path)
    kernels = {"schema": "brakecheck/bundle/1", "arms": [{"cubins": "cubins/base/manifest.json"}]}
    (tmp_path / "manifest.json").write_text(json.dumps(kernels))
    with pytest.raises(UsageError, match="cannot run on the CPU"):
        measure_bundle(tmp_path, "cpu", 1.0)


@pytest.mark.parametrize("asked, said", [
    (("--operators", "nosuch"), "there is no operator 'nosuch'"),
    (("--operators", "softmax", "--implementation", "base=torch,candidate=nosuch"), "implementation 'nosuch'"),
    (("--cases", "softmax rows=nosuch*"), "no case fits 'softmax rows=nosuch*'|no case is left"),
])
def test_what_nobody_could_measure_is_said_where_the_bundle_is_made(tmp_path, capsys, asked, said):
    assert cli("bundle", "env:this", "env:this", "-o", tmp_path / "b", *asked) == 64
    assert re.search(said, capsys.readouterr().err) and list(tmp_path.iterdir()) == []


def test_the_rule_without_scipy_stops_on_width():
    few, quiet = ([1.0] * 3, [1.0] * 3), ([1.0, 1.001, 1.0, 1.0], [1.0] * 4)
    noisy, large = ([1.0, 1.1, 1.0, 0.9], [1.0] * 4), ([1.0, 1.01, 1.0, 0.99], [2.0] * 4)
    assert enough_for(0.01)([few, quiet, noisy, large]) == [False, True, False, True]


def test_toolchains_need_a_gpu_and_say_so(monkeypatch, capsys):
    assert cli("compare", "cuda==12.9", "cuda==13.2", "--device", "cpu") == 64
    assert "cannot run on the CPU" in capsys.readouterr().err
    monkeypatch.setattr(toolchain_arms, "local_driver", lambda: None)
    with pytest.raises(UnavailableError, match="cannot be asked"):
        toolchain_arms.arch_of_device("cuda:0")
    from brakecheck.stack.driver import Device, Driver

    monkeypatch.setattr(toolchain_arms, "local_driver",
                        lambda: Driver("580.0", None, (Device("x", "sm_89"), Device("y", "sm_90"))))
    assert (toolchain_arms.arch_of_device("cuda:0"), toolchain_arms.arch_of_device("cuda:1")) == ("sm_89", "sm_90a")


@pytest.mark.network
def test_a_bundle_of_toolchains_holds_the_kernels_that_differ(tmp_path):
    folder = tmp_path / "b"
    made = bundling.write_bundle(["cuda==12.9", "cuda==13.2"], folder, Options(operators=("softmax",)), Policy(),
                                 static={"operators": ["softmax"]})
    manifest = read_manifest(folder)
    assert made.timed == len(manifest["static"]["timed"]) >= 1
    sides = [json.loads((folder / arm["cubins"]).read_text())["kernels"] for arm in manifest["arms"]]
    assert [k["kernel"] for k in sides[0]] == [k["kernel"] for k in sides[1]]
    for arm, kernels in zip(manifest["arms"], sides):
        for kernel in kernels:
            image = ((folder / arm["cubins"]).parent / kernel["cubin"]).read_bytes()
            assert all(name.encode() in image for name in kernel["entries"].values())
    assert manifest["arms"][0]["toolchain"]["name"].startswith("cuda 12.9")
    assert str(Path(bundling.__file__).parent) not in (folder / "manifest.json").read_text()
