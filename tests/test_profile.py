"""Running a program under a profiler: with PyTorch on the CPU for real, with Nsight by its command line."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brakecheck.cli import main
from brakecheck.evidence import profile_run
from brakecheck.evidence.diff import diff
from brakecheck.evidence.profile_run import COLLECTIVES, Plan
from brakecheck.evidence.recognise import READERS, open_evidence, recognise
from brakecheck.model import BrakecheckError, UnavailableError, UsageError

PROGRAM = """
import sys, torch
torch.set_num_threads(1)
layer = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU())
for _ in range(int(sys.argv[1])):
    layer(torch.randn(4, 16)).sum().backward()
sys.exit(int(sys.argv[2]))
"""
# Stands for torch where only the hook is tested.
FAKE = "raise ImportError('broken')"


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code or 0


# ---- the real thing, on the CPU ----------------------------------------------------------------------------

@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A program of five steps that ends with status 3, profiled but for its first step and its last two."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("profile")
    (folder / "my.py").write_text(PROGRAM)
    out = folder / "first"
    options = ("--step", "forward", "--skip", 1, "--steps", 2)  # an optimizer would import half of torch more
    assert run("profile", "-o", out, *options, "--", sys.executable, folder / "my.py", 5, 3) == 3
    return out


def test_the_folder_holds_evidence_and_how_it_was_made(profiled):
    manifest = json.loads((profiled / "manifest.json").read_text())
    assert manifest["schema"] == "brakecheck/profile/1" and manifest["exit_status"] == 3
    assert manifest["command"][-2:] == ["5", "3"] and manifest["versions"]["torch"] and manifest["steps"] >= 3
    assert [p.name for p in profiled.iterdir() if p.name.startswith("facts")] == []
    recording = open_evidence(profiled)
    steps = recording.operators["step"].drop_nulls().unique()
    assert recognise(profiled) == "profile" and len(steps) == 2
    linear = recording.operators.filter(recording.operators["name"] == "aten::linear")
    assert linear.height == 2 and json.loads(linear["shapes"][0])[:2] == [[4, 16], [8, 16]]
    assert recording.metadata["versions"]["torch"] == manifest["versions"]["torch"]


def test_what_runs_behind_the_last_step_does_not_count(profiled, tmp_path):
    shutil.copytree(profiled, tmp_path / "copy")
    path = tmp_path / "copy" / "manifest.json"
    steps = open_evidence(profiled).metadata["steps"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "rest_step": steps[-1]["step"]}))
    recording = open_evidence(tmp_path / "copy")
    assert recording.metadata["steps"] == steps[:-1]
    assert recording.operators["step"].drop_nulls().unique().to_list() == [s["step"] for s in steps[:-1]]


def test_diff_and_workload_take_the_folder(profiled, capsys):
    assert run("diff", profiled, profiled) == 3  # a CPU has no kernels: nothing that could be compared
    assert "WITHHELD" in capsys.readouterr().out
    assert run("workload", profiled, "--json") == 0
    mix = json.loads(capsys.readouterr().out)
    addmm = next(e for e in mix["entries"] if e["operator"] == "aten::addmm")
    assert mix["clock"] == "host" and addmm["calls"] == 1 and mix["source"]["steps"] == 2


# ---- programs that leave nothing ---------------------------------------------------------------------------

@pytest.mark.parametrize(("program", "words"), [
    ("print('no torch here')", "status 0"), ("import sys; sys.exit(7)", "status 7")])
def test_a_program_without_torch_leaves_nothing_and_says_so(tmp_path, program, words):
    with pytest.raises(BrakecheckError) as error:
        profile_run.profile(Plan((sys.executable, "-c", program)), tmp_path / "out")
    assert "kineto recorded nothing" in error.value.what and words in error.value.what
    assert list(tmp_path.iterdir()) == []


def test_the_program_keeps_its_own_sitecustomize(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['MINE'] = 'kept'")
    variables = {"PYTHONPATH": f"{profile_run.HOOK}:{tmp_path}", "BRAKECHECK_PROFILE": str(tmp_path), "PATH": "/bin"}
    done = subprocess.run([sys.executable, "-c", "import os; print(os.environ['MINE'])"], env=variables,
                          capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "kept", done.stderr


def test_a_torch_that_does_not_import_stays_the_programs_own_error(tmp_path):
    (tmp_path / "torch.py").write_text(FAKE)
    variables = {"PYTHONPATH": f"{profile_run.HOOK}:{tmp_path}", "BRAKECHECK_PROFILE": str(tmp_path), "PATH": "/bin"}
    done = subprocess.run([sys.executable, "-c", "import torch"], env=variables, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 1 and done.stderr.strip().endswith("ImportError: broken")


class Torch:
    """What the hook touches of torch before it records."""

    __version__ = "0"
    version = type("version", (), {"cuda": None})


@pytest.mark.parametrize(("skip", "steps", "expected"), [
    (0, 0, ["begin", "next", "next", "next", "next"]), (2, 1, ["begin", "end"]), (1, 2, ["begin", "next", "end"]),
    (0, 1, ["begin", "end"]), (9, 0, [])])
def test_recording_begins_and_ends_with_the_steps(skip, steps, expected, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("hook", profile_run.HOOK / "sitecustomize.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    for name, value in (("", tmp_path), ("_SKIP", skip), ("_STEPS", steps)):
        monkeypatch.setenv(f"BRAKECHECK_PROFILE{name}", str(value))
    recorder, seen = hook.Recorder(Torch), []
    recorder.profiler = type("profiler", (), {"step": lambda self: seen.append("next")})()
    monkeypatch.setattr(recorder, "begin", lambda: (seen.append("begin"), setattr(recorder, "open", True)))
    monkeypatch.setattr(recorder, "end", lambda: (seen.append("end"), setattr(recorder, "open", False)))
    if skip == 0:
        recorder.begin()
    for _ in range(4):
        recorder.advance()
    assert seen == expected


# ---- Nsight: command lines ----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclKernel_AllGather_RING_LL",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>", "one_shot_all_reduce_kernel", "rcclGenericKernel",
    "multimem_all_reduce_kernel", "void nvshmem_barrier"])
def test_collectives_are_not_replayed(name):
    expression = profile_kernel_name()
    assert not re.search(expression, name) and re.search(expression, "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n")
    assert COLLECTIVES in expression


def profile_kernel_name():
    words = profile_run.command_line(Plan(("python", "my.py"), "ncu"), Path("/d"))
    return words[words.index("--kernel-name") + 1].removeprefix("regex:")


def test_command_lines_of_nsight():
    plan = Plan(("python", "my.py"), "ncu", skip=2, ranges=("forward", "mine@layer"), launches=9, replay="application")
    words = profile_run.command_line(plan, Path("/d"))
    text = " ".join(words)
    assert words[0] == "ncu" and words[-2:] == ["python", "my.py"] and "--replay-mode application" in text
    assert "--nvtx-include forward/ --nvtx-include mine@layer" in text and "--launch-count 9" in text
    assert "--profile-from-start off" in text and "--section WarpStateStats" in text
    assert "--nvtx-include" not in profile_run.command_line(Plan(("python",), "ncu"), Path("/d"))
    system = profile_run.command_line(Plan(("python",), "nsys", skip=1), Path("/d"))
    assert system[:4] == ["nsys", "profile", "--output", "/d/nsys"] and "cudaProfilerApi" in system


@pytest.fixture
def nsys(tmp_path, monkeypatch):
    """An nsys that copies a recorded export."""
    import gzip

    data = gzip.decompress((Path(__file__).parent / "data" / "nsys" / "two-gpu-before.sqlite.gz").read_bytes())
    (tmp_path / "export").write_bytes(data)
    tool = tmp_path / "bin" / "nsys"
    tool.parent.mkdir()
    tool.write_text(f"""#!/bin/sh
case "$1" in
  --version) echo "NVIDIA Nsight Systems version 2025.5.1.0" ;;
  profile) touch "$3.nsys-rep" ;;
  export) while [ "$1" != --output ]; do shift; done; cp {tmp_path}/export "$2" ;;
esac
""")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")


def test_an_nsys_profile_is_exported_and_compared(nsys, tmp_path, capsys):
    for name in ("one", "two"):
        assert run("profile", "--with", "nsys", "-o", tmp_path / name, "--", "true") == 0
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text())
    assert manifest["versions"]["nsys"] == "2025.5.1.0" and manifest["evidence"][0]["path"] == "nsys.sqlite"
    capsys.readouterr()
    assert run("diff", tmp_path / "one", tmp_path / "two") == 3
    assert "unattributed 0 ns" in " ".join(capsys.readouterr().out.split())


# ---- errors -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("plan", "error", "words"), [
    (Plan(()), UsageError, "no program"), (Plan(("no-such-program",)), UsageError, "no-such-program"),
    (Plan(("true",), "perf"), UsageError, "choose from"), (Plan(("true",), steps=-1), UsageError, "negative"),
    (Plan(("true",), step="epoch"), UsageError, "epoch"), (Plan(("true",), ranges=("x",)), UsageError, "--with ncu"),
    (Plan(("true",), "ncu"), UnavailableError, "PATH")])
def test_a_plan_that_cannot_work_is_refused_before_it_runs(plan, error, words, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(error) as raised:
        profile_run.profile(plan, tmp_path / "out")
    assert words in str(raised.value) and not list(tmp_path.iterdir())


def test_an_existing_folder_is_never_overwritten(tmp_path):
    with pytest.raises(UsageError, match="exists"):
        profile_run.profile(Plan(("true",)), tmp_path)


@pytest.mark.parametrize("manifest", ["{", '{"schema": "brakecheck/profile/1"}',
                                      '{"schema": "brakecheck/profile/1", "evidence": [{"kind": "ncu", "path": "/x"}]}',
                                      '{"schema": "brakecheck/profile/1", "evidence": [{"kind": "x", "path": "x"}]}'])
def test_a_damaged_manifest_is_said(manifest, tmp_path):
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(BrakecheckError, match="manifest"):
        open_evidence(tmp_path)


def test_a_profile_that_reached_its_limit_is_cut(tmp_path, monkeypatch):
    """What comes after the last kernel that was allowed says nothing. A CSV stands for the report."""
    sides = []
    for name, kernels in (("a", 3), ("b", 2)):
        folder = tmp_path / name
        folder.mkdir()
        rows = "".join(f'"{i}","1","p","h","k{i}","1","7","(32, 1, 1)","(1, 1, 1)","0","9.0","S","Duration","us","2"\n'
                       for i in range(kernels))
        (folder / "ncu.csv").write_text(
            '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
            '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"\n' + rows)
        (folder / "manifest.json").write_text(json.dumps({
            "schema": "brakecheck/profile/1", "options": {"launches": 3},
            "evidence": [{"kind": "ncu", "path": "ncu.csv"}]}))
        sides.append(folder)
    monkeypatch.setitem(READERS, "ncu", READERS["ncu-csv"])
    full, short = (open_evidence(s) for s in sides)
    assert [p.code for p in full.problems] == ["cut"] and short.problems == []
    assert any("base is cut: it was limited to 3 kernels" in w for w in diff(full, short).warnings)
