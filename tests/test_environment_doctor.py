"""Environments: mixed sets, symbols, architectures, drivers, variables, permissions; and the command over all of it."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brakecheck.cli import main
from brakecheck.model import BrakecheckError, UnavailableError, UsageError
from brakecheck.stack import elf
from brakecheck.stack import environment as environments
from brakecheck.stack import environment_doctor as doctor
from brakecheck.stack import environment_rules as rules
from brakecheck.stack.driver import Device, Driver

ELF = Path(__file__).parent / "data" / "elf"
SITE = "/opt/env/lib/python3.11/site-packages"


def codes(findings, severity=None):
    return [f.code for f in findings if severity in (None, f.severity)]


# ---- F29: mixed sets ---------------------------------------------------------------------------------------

def test_cublas_and_cublaslt_from_two_prefixes_are_a_mixed_set():
    (found,) = rules.mixed_sets([f"{SITE}/nvidia/cublas/lib/libcublas.so.12",
                                 "/usr/local/cuda-12.4/lib64/libcublasLt.so.12.4.5.8"])
    assert found.code == "mixed-set" and found.severity == "error"
    assert "libcublas.so.12 from" in found.text and "/usr/local/cuda-12.4/lib64" in found.text


def test_one_place_is_no_mixed_set_and_a_library_loaded_twice_is_said():
    one = [f"{SITE}/nvidia/cudnn/lib/libcudnn{part}.so.9" for part in ("", "_ops", "_graph", "_cnn")]
    assert rules.mixed_sets([*one, f"{SITE}/nvidia/cublas/lib/libcublas.so.12", "/usr/lib/libnot.so"]) == []
    assert codes(rules.mixed_sets([*one, "/usr/lib/libnccl.so.2", f"{SITE}/nvidia/nccl/lib/libnccl.so.2"])) == [
        "loaded-twice"]


# ---- F30: symbols ------------------------------------------------------------------------------------------

@pytest.fixture
def environment(tmp_path):
    """A site-packages folder with libcuvs.so and the older libnvJitLink.so.13."""
    for package, name in (("libcuvs", "libcuvs.so"), ("nvidia/cu13", "libnvJitLink.so.13")):
        (tmp_path / package / "lib").mkdir(parents=True)
        shutil.copy(ELF / name, tmp_path / package / "lib" / name)
    return tmp_path


def test_a_symbol_newer_than_the_library_is_found_without_running(environment):
    found = doctor.examine(doctor.Facts("test", folders=[str(environment)], readable=True)).findings
    assert codes(found) == ["symbol-missing"]
    assert "libcuvs.so needs __nvJitLinkGetErrorLog_13_1 of libnvJitLink.so.13" in found[0].text
    assert "it provides up to 13_0" in found[0].text and "14_0" not in found[0].text  # weak: may be absent


def test_the_newer_library_on_a_path_in_front_settles_it(environment, tmp_path):
    front = tmp_path / "front"
    front.mkdir()
    shutil.copy(ELF / "libnvJitLink-13.1.so", front / "libnvJitLink.so.13")
    facts = doctor.Facts("test", mapped=[str(front / "libnvJitLink.so.13")], folders=[str(environment)], readable=True,
                         variables={"LD_LIBRARY_PATH": str(front)})
    assert codes(doctor.examine(facts).findings, "error") == []
    run_path = environment / "libcuvs" / "lib" / "run"  # where its own run path points: behind LD_LIBRARY_PATH
    run_path.mkdir()
    shutil.copy(ELF / "libnvJitLink.so.13", run_path / "libnvJitLink.so.13")
    assert elf.resolve(elf.read_library(environment / "libcuvs/lib/libcuvs.so"), "libnvJitLink.so.13", {},
                       [str(front)]) == str(front / "libnvJitLink.so.13")


def test_symbols_without_version_are_judged_by_their_prefix_only():
    libraries = [elf.read_library(ELF / name) for name in ("libtorch_cuda.so", "libnccl.so.2")]
    (found,) = elf.check_symbols(libraries, {"libnccl.so.2": str(ELF / "libnccl.so.2")})
    assert "ncclCommWindowRegister" in found.text and "unrelated" not in found.text
    assert elf.check_symbols(libraries[:1], {}) == []  # who provides it is not known


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12000), st.binary(min_size=1, max_size=8), st.booleans())
def test_damaged_libraries_are_one_clear_error(tmp_path_factory, at, noise, cut):
    data = (ELF / "libcuvs.so").read_bytes()
    at %= len(data)
    path = tmp_path_factory.mktemp("elf") / "libcuvs.so"
    path.write_bytes(data[:at] if cut else data[:at] + noise + data[at + len(noise):])
    try:
        elf.read_library(path)
    except BrakecheckError as error:
        assert str(path) in (error.where or "")


# ---- F31, F28: devices and drivers -------------------------------------------------------------------------

@pytest.mark.parametrize(("archs", "device", "expected"), [
    (["sm_75", "sm_80", "sm_90"], "sm_60", "device-dropped"), (["sm_75", "sm_80"], "sm_70", "device-dropped"),
    (["sm_80", "sm_90"], "sm_89", None), (["sm_90a"], "sm_90", None), (["sm_80", "compute_90"], "sm_120", "jit-needed"),
    (["sm_80", "sm_90"], "sm_120", "device-dropped")])
def test_a_device_without_code_is_said(archs, device, expected):
    found = rules.device_archs(archs, [("GPU", device)])
    assert codes(found) == ([expected] if expected else [])
    assert rules.device_archs([], [("GPU", device)]) == []


def test_wheels_newer_than_the_driver_run_on_the_cpu():
    facts = doctor.Facts("test", {"torch": "2.9.0+cu130", "nvidia-cuda-runtime": "13.0.48"})
    found = doctor.examine(facts, Driver("550.54.15", "12.4")).findings
    assert "driver-old" in codes(found, "error") and "CPU" in found[0].text
    assert doctor.examine(facts, Driver("580.65.06", "13.0")).findings == ()
    assert codes(doctor.examine(facts, None, "sm_70").findings) == ["device-dropped"]


def test_parts_of_two_drivers_and_forward_compatibility():
    mixed = ["/usr/local/cuda-13/compat/libcuda.so.580.65.06", "/usr/lib/libnvidia-ptxjitcompiler.so.535.104.05"]
    assert codes(rules.driver_mix(mixed, None)) == ["driver-mix"]
    assert codes(rules.driver_mix(mixed[:1], "535.104.05")) == ["forward-compatibility"]
    assert codes(rules.driver_mix(["/usr/lib/libcuda.so.535.104.05"], "580.65.06"), "warning") == ["libcuda-old"]
    assert rules.driver_mix(["/usr/lib/libcuda.so.535.104.05", "/usr/lib/libcuda.so.1"], "535.104.05") == []


def test_an_assembler_newer_than_the_driver_is_named_by_its_producer(tmp_path):
    ptxas = tmp_path / "triton/backends/nvidia/bin/ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    ptxas.chmod(0o755)
    facts = doctor.Facts("test", folders=[str(tmp_path)], readable=True)
    found = doctor.examine(facts, Driver("535.104.05", "12.2", (Device("A100", "sm_80"),)))
    assert [c.version for c in found.components if c.name == "ptxas (triton)"] == ["13.0.88"]
    (finding,) = found.findings
    assert finding.code == "driver-older-than-assembler" and finding.text.startswith("ptxas (triton) 13.0.88")


# ---- packages, variables, permissions ----------------------------------------------------------------------

def test_freeze_of_every_form_and_mixed_majors():
    found = doctor.parse_freeze(["torch==2.9.0+cu130", "nvidia_cublas_cu12==12.4.5.8  # comment", "-e git+ssh://x",
                                 "nvidia-cublas @ file:///w/nvidia_cublas-13.0.2.14-py3-none-linux_x86_64.whl",
                                 "triton                   3.5.1", "# nothing", "Package Version"])
    assert found == {"torch": "2.9.0+cu130", "nvidia-cublas-cu12": "12.4.5.8", "nvidia-cublas": "13.0.2.14",
                     "triton": "3.5.1"}
    assert codes(rules.packages(found)) == ["two-majors"]
    assert codes(rules.packages({"torch": "2.9.0+cu130", "nvidia-cuda-runtime-cu12": "12.8.90"})) == ["other-major"]
    assert codes(rules.packages({"nvidia-nvjitlink": "13.0.39", "nvidia-cuda-nvrtc": "13.1.80"})) == ["nvjitlink-old"]
    assert rules.packages({"torch": "2.9.0+cu130", "nvidia-cuda-runtime": "13.0.48", "nvidia-nvjitlink": "13.0.39",
                           "nvidia-ml-py": "13.580.0"}) == []


def test_variables_that_change_a_measurement():
    found = rules.tuning({"NVIDIA_TF32_OVERRIDE": "0", "NCCL_ALGO": "Ring", "PYTORCH_CUDA_ALLOC_CONF": "x:1",
                          "PYTORCH_ALLOC_CONF": "x:1", "CUDA_HOME": "/usr", "PATH": "/bin", "NCCL_P2P_DISABLE": "1",
                          "TRITON_CACHE_DIR": "/x", "LD_PRELOAD": ""})
    assert [f.text.split("=")[0] for f in found] == ["NCCL_ALGO", "NCCL_P2P_DISABLE", "NVIDIA_TF32_OVERRIDE",
                                                     "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
                                                     "TRITON_CACHE_DIR"]
    assert codes(found, "warning") == ["variable", "variable"] and "TF32 off" in found[2].text


def test_permission_to_read_counters(tmp_path):
    params, paranoid = tmp_path / "params", tmp_path / "paranoid"
    params.write_text("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n")
    paranoid.write_text("4\n")
    assert codes(doctor.permissions(params, paranoid, root=False)) == ["counters-restricted", "sampling-restricted"]
    assert [f.severity for f in doctor.permissions(params, paranoid, root=True)] == ["info"]
    params.write_text("RmProfilingAdminOnly: 0\n")
    assert codes(doctor.permissions(params, tmp_path / "none", root=False)) == ["counters-open"]
    assert doctor.permissions(tmp_path / "none", tmp_path / "none", root=False) == []


# ---- asking a Python, saved files, the command -------------------------------------------------------------

def test_a_python_is_asked_and_a_failing_import_is_a_finding(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libcusparse.so.12: undefined symbol: __nvJitLinkComplete_12_4')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = doctor.ask([sys.executable], "test")
    assert facts.python == sys.version.split()[0] and "pytest" in facts.packages
    (found,) = [f for f in doctor.examine(facts).findings if f.code == "import-fails"]
    assert "__nvJitLinkComplete_12_4" in found.text
    (tmp_path / "torch" / "__init__.py").write_text("import os; os.abort()")
    facts = doctor.ask([sys.executable], "test")
    assert "signal 6" in facts.torch["error"] and facts.packages


def test_a_python_without_torch_cannot_be_measured():
    (found,) = doctor._about_torch(doctor.Facts("test", python="3.12.1"), None)
    assert (found.severity, found.code) == ("warning", "no-torch")
    assert not doctor._about_torch(doctor.Facts("saved files"), None)


def test_a_python_that_does_not_answer_is_said(tmp_path):
    with pytest.raises(UnavailableError, match="does not start"):
        doctor.ask([str(tmp_path / "none")], "test")
    with pytest.raises(UnavailableError, match="without an answer"):
        doctor.ask(["false"], "test")


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code or 0


def test_command_on_saved_files(tmp_path, capsys):
    maps, freeze = tmp_path / "maps", tmp_path / "freeze"
    line = "7f00-7f01 r-xp 00000000 08:01 123   {}\n"
    maps.write_text(line.format("/a/lib/libcublas.so.12") + line.format("/b/lib/libcublasLt.so.12") + "7f02 rw-p\n"
                    + line.format("/usr/lib/libcuda.so.550.54.15 (deleted)"))
    freeze.write_text("torch==2.9.0+cu130\nnvidia-cuda-runtime==13.0.48\n")
    assert run("doctor", "--maps", maps, "--freeze", freeze, "--driver", "550.54.15", "--json") == 2
    data = json.loads(capsys.readouterr().out)
    assert codes_of(data) == {"mixed-set", "driver-old"}
    assert {"name": "libcublas", "version": "12", "path": "/a/lib/libcublas.so.12"} in data["components"]
    assert run("doctor", "--freeze", freeze) == 0
    assert "nothing in the way" in capsys.readouterr().out


def codes_of(data):
    return {f["code"] for f in data["findings"]}


def test_command_on_this_python(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("__version__ = '0'\nclass version: cuda = None\n"
                                       "class cuda:\n  is_available = staticmethod(lambda: False)\n")
    assert run("doctor", f"env:{sys.executable}") >= 1
    out = capsys.readouterr().out
    assert "switches TF32 off" in out and "python" in out


@pytest.mark.parametrize(("arguments", "words"), [
    (["cuda==12.9", "--maps", "x"], "two things"), (["env:/no/such/python"], "no Python"),
    (["--maps", "/no/such/file"], "cannot read"), (["pip:torch"], "pip:torch"),
    (["env:/x/python+nvidia-cublas==13.1"], "no Python"),
    (["--freeze", "x", "--device-arch", "hopper"], "hopper")])
def test_command_says_what_is_wrong(arguments, words, capsys):
    assert run("doctor", *arguments) == UsageError.exit_code
    assert words in capsys.readouterr().err


def test_a_saved_file_without_content_is_said(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(BrakecheckError, match="no file is mapped"):
        doctor.saved(empty, None)
    with pytest.raises(BrakecheckError, match="no package"):
        doctor.saved(None, empty)


def test_a_launched_python_is_asked_through_stdin(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise ImportError('no libcudart.so.13')")
    assert run("doctor", f"launch:env -u NCCL_ALGO {sys.executable}", "--json") == 2
    data = json.loads(capsys.readouterr().out)
    assert "import-fails" in codes_of(data) and not any("ptxas" in c["name"] for c in data["components"])


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Instead of uv: an environment is a link to this Python, an overlay a folder with a library or a module."""
    calls = []

    def uv(*arguments):
        calls.append(arguments)
        if arguments[0] == "venv":
            python = Path(arguments[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)
        elif "--target" in arguments:
            target = Path(arguments[arguments.index("--target") + 1])
            name, version = arguments[-1].split("==")
            inside = target / "nvidia" / "cu13" / "lib" if name.startswith("nvidia") else target / name
            inside.mkdir(parents=True)
            if name == "nvidia-nvjitlink":
                shutil.copy(ELF / "libnvJitLink.so.13", inside)
            elif name == "triton":
                (inside / "__init__.py").write_text("")
                (target / f"triton-{version}.dist-info").mkdir()
                (target / f"triton-{version}.dist-info" / "METADATA").write_text(f"Name: triton\nVersion: {version}\n")

    monkeypatch.setattr(environments, "_uv", uv)
    monkeypatch.setenv("BRAKECHECK_CACHE", str(tmp_path / "cache"))
    return calls


def test_a_pip_spec_is_built_and_examined_with_its_overlays(built, capsys):
    spec = "pip:torch==2.12.0+nvidia-nvjitlink==13.1.2+triton==9.9.9"
    run("doctor", spec, "--json")
    data = json.loads(capsys.readouterr().out)
    assert data["subject"] == spec and built[1][-1] == "torch==2.12.0"
    versions = {c["name"]: c["version"] for c in data["components"]}
    assert versions["nvidia-nvjitlink"] == "13.1.2" and versions["triton"] == "9.9.9"
    assert any("nvidia-nvjitlink-13.1.2" in c.get("path", "") for c in data["components"])
    assert "overlay-unused" not in codes_of(data)


def test_an_overlay_that_is_not_used_is_said(built, capsys):
    assert run("doctor", f"env:{sys.executable}+nvidia-cublas==13.1.0.3", "--json") == 2
    data = json.loads(capsys.readouterr().out)
    (found,) = [f for f in data["findings"] if f["code"] == "overlay-unused"]
    assert "nvidia-cublas==13.1.0.3 was put in front" in found["text"]
