"""Compatibility tables against what the toolchains really do, and the failures predicted from versions alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brakecheck.model import UsageError
from brakecheck.stack import compat, driver

DATA = Path(__file__).parent / "data"
OBSERVED = json.loads((DATA / "toolchains.json").read_text())
RELEASES = sorted(compat.RELEASES, key=lambda r: tuple(map(int, r.split("."))))


def codes(found):
    return [(f.severity, f.code) for f in found]


def test_every_release_was_observed():
    assert {row["release"] for row in OBSERVED} == set(compat.RELEASES)


@pytest.mark.parametrize("row", OBSERVED, ids=lambda r: r["release"])
def test_tables_agree_with_what_was_observed(row):
    agree(row)


@pytest.mark.network
def test_tables_agree_with_the_toolchains_in_the_cache():
    cache = Path(os.environ.get("BRAKECHECK_CACHE") or "~/.cache/brakecheck").expanduser() / "toolchains"
    whole = [d for d in sorted(cache.glob("*")) if [*d.glob("nvidia/*/lib/libnvrtc.so.1?")] and
             [*d.glob("nvidia/*/bin/ptxas")]]
    if not whole:
        pytest.skip(f"no toolchain in {cache}")
    for directory in whole:
        command = [sys.executable, DATA / "observe_toolchain.py", directory]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        agree(json.loads(done.stdout))


def agree(row):
    release = compat.release_of(row["release"])
    facts = driver.verify(ptx=row["ptx"])
    assert facts == {"ptx_isa": release.ptx_isa, "ptx_target": "sm_80"}
    assert set(row["archs"]) == set(release.archs)
    assert row["accepts"][-1] == release.ptx_isa
    for isa in ("8.0", "8.8", "9.5"):
        assert (compat.check_mixed(isa, release.name) == []) == (isa in row["accepts"])
    for arch, header in row["cubin_headers"].items():
        facts = driver.verify(cubin=bytes.fromhex(header))
        assert facts == {"elf_abi": compat.elf_abi(release.name, arch), "elf_arch": compat.split_arch(arch)[0]}
    assert ("sm_100" in row["cubin_headers"]) == ("sm_100" in release.archs)


def test_verify_says_nothing_of_what_it_cannot_read():
    assert driver.verify("// nothing", b"MZ" + bytes(100)) == {}
    assert driver.verify() == {}


def test_needs():
    need = compat.needs("12.9.1", "sm_90a")
    assert (need.ptx_isa, need.elf_abi, need.cubin_driver, need.ptx_driver) == ("8.8", 7, "525.60.13", "575.51.03")
    assert not need.portable and need.supported
    need = compat.needs("13.5", "sm_80")
    assert (need.ptx_isa, need.elf_abi, need.cubin_driver) == ("9.5", 8, "580.65.06")
    assert need.ptx_driver is None and need.toolkit_driver is None  # no driver with 13.5 is known: absent
    assert compat.needs("12.6", "sm_80").ptx_driver == "555.42.02"  # 12.5's driver takes PTX 8.5 too
    mixed = compat.needs("12.6", "sm_90a", ptxas="12.8")
    assert (mixed.ptx_isa, mixed.ptxas, mixed.cubin_driver) == ("8.5", "12.8", "525.60.13")


def test_device_kernel_image_is_invalid_is_predicted():
    (first, *_) = compat.check("13.0", "535.104", "sm_90a")
    assert (first.severity, first.code) == ("error", "driver-older-than-assembler")
    assert "device kernel image is invalid" in first.text and "580.65.06" in first.advice
    assert "cuda-compat-13-0" in first.advice


def test_unsupported_version_is_predicted_for_a_mixed_stack():
    (found,) = compat.check_mixed("8.6", "12.6")
    assert "Unsupported .version 8.6; current version is '8.5'" in found.text
    assert "12.8" in found.advice
    found = compat.check("13.0", None, "sm_90a", ptxas="12.8")
    assert codes(found) == [("error", "ptx-newer-than-assembler")]
    assert "Unsupported .version 9.0; current version is '8.7'" in found[0].text
    assert compat.check("12.6", None, "sm_90a", ptxas="12.8") == []


def test_jit_of_an_older_driver():
    found = compat.check("12.9", "535.104.05", "sm_80")
    assert codes(found) == [("error", "ptx-newer-than-driver")]
    assert "575.51.03" in found[0].advice and "current version is '8.2'" in found[0].text
    assert compat.check("12.9", "580.65.06", "sm_80") == []


def test_a_driver_older_than_the_architecture():
    assert ("warning", "driver-older-than-architecture") in codes(compat.check("12.8", "535.104.05", "sm_100a"))
    assert compat.check("12.8", "570.26", "sm_100a") == []


def test_forward_compatibility_package():
    assert codes(compat.check("13.0", "535.104.05", "sm_80", libcuda="12.2"))[0] == (
        "error", "driver-older-than-assembler")
    found = compat.check("13.0", "535.104.05", "sm_80", libcuda="13.0")
    assert codes(found) == [("info", "minor-version-compatibility")]
    assert codes(compat.check("13.5", "580.65.06", "sm_80", libcuda="13.0")) == [("error", "ptx-newer-than-driver")]
    assert compat.check("13.5", "580.65.06", "sm_80", libcuda="13.5") == []
    assert compat.check("13.5", "700.10", "sm_80", libcuda="14.0") == []


def test_a_driver_newer_than_the_tables_is_not_condemned():
    assert codes(compat.check("13.5", "620.10", "sm_80")) == [("warning", "ptx-newer-than-driver")]
    assert compat.check("13.3", "620.10", "sm_80") == []
    assert compat.cuda_of_driver("620.10") == ("13.3", "9.3", False)
    assert compat.cuda_of_driver("390.46") == (None, None, False)
    assert ("warning", "driver-unknown") in codes(compat.check("12.4", "390.46", "sm_80"))


@pytest.mark.parametrize("release, arch, part", [
    ("13.0", "sm_70", "dropped after CUDA 12.9"), ("12.6", "sm_100a", "added in CUDA 12.8"),
    ("12.8", "sm_100f", "added in CUDA 12.9"), ("13.3", "sm_107a", "added in CUDA 13.4"),
    ("13.0", "sm_101a", "dropped after CUDA 12.9"), ("13.0", "sm_199", "does not know"),
])
def test_architectures_of_a_release(release, arch, part):
    (found,) = compat.check(release, None, arch)
    assert found.code == "arch-unknown" and part in found.text


def test_renamed_architecture_names_the_new_one():
    assert "sm_110a" in compat.check("13.0", None, "sm_101a")[0].advice


def test_a_device_that_the_release_dropped():
    found = compat.check("13.0", "580.65.06", "sm_80", device_arch="sm_70")
    dropped = next(f for f in found if f.code == "device-dropped")
    assert "is_available() is true" in dropped.text and dropped.advice == "stay on CUDA 12.9"


@pytest.mark.parametrize("arch, device, expected", [
    ("sm_90a", "sm_90", None), ("sm_90a", "sm_100", "arch-specific"), ("sm_100f", "sm_103", None),
    ("sm_100f", "sm_120", "family-specific"), ("sm_103f", "sm_100", "family-specific"),
    ("sm_100f", "sm_107", "family-unknown"), ("sm_107f", "sm_107", None), ("sm_80", "sm_89", None),
    ("sm_89", "sm_80", "arch-newer-than-device"), ("sm_80", "sm_90", "jit-needed"), ("sm_80", "sm_87", "jit-needed"),
    ("sm_120", "sm_121", None),
])
def test_what_runs_where(arch, device, expected):
    found = compat.check_device(arch, device)
    assert [f.code for f in found] == ([expected] if expected else [])


@pytest.mark.parametrize("call", [
    lambda: compat.check("12.7", None, "sm_90"), lambda: compat.check("12.9", "new", "sm_90"),
    lambda: compat.check("12.9", None, "hopper"), lambda: compat.release_of("latest"),
])
def test_bad_input_is_a_usage_error(call):
    with pytest.raises(UsageError) as error:
        call()
    assert error.value.todo


def test_unknown_release_names_the_nearest():
    with pytest.raises(UsageError) as error:
        compat.release_of("12.7")
    assert "12.6" in error.value.todo and "12.8" in error.value.todo and "13.0" not in error.value.todo


@given(st.sampled_from(RELEASES), st.sampled_from(RELEASES))
def test_own_and_newer_ptxas_read_a_releases_ptx(front, assembler):
    readable = compat.check_mixed(compat.RELEASES[front].ptx_isa, assembler) == []
    if RELEASES.index(assembler) >= RELEASES.index(front):
        assert readable


@given(st.sampled_from(RELEASES), st.sampled_from(sorted(compat.DRIVER_BRANCHES)),
       st.sampled_from(sorted(compat.DRIVER_BRANCHES)), st.sampled_from(["sm_75", "sm_80", "sm_90a"]))
def test_a_newer_driver_never_has_more_errors(release, one, other, arch):
    old, new = sorted([one, other])
    count = [sum(f.severity == "error" for f in compat.check(release, f"{d}.999", arch)) for d in (old, new)]
    assert count[1] <= count[0]


@given(st.sampled_from(RELEASES))
def test_the_driver_of_a_toolkit_satisfies_it(release):
    row = compat.RELEASES[release]
    if row.toolkit_driver:
        assert compat.check(release, row.toolkit_driver, "sm_90a") == []


SMI = """#!/bin/sh
echo "580.65.06, 9.0, NVIDIA H200"
echo "580.65.06, [N/A], Odd, device"
"""


def test_local_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "_cuda_of_libcuda", lambda: "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver.local_driver(tmp_path / "absent") is None
    proc = tmp_path / "version"
    proc.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\nGCC 12\n")
    assert driver.local_driver(proc) == driver.Driver("580.65.06", "13.0")
    proc.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    assert driver.local_driver(proc).version == "535.104.05"
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    found = driver.local_driver(tmp_path / "absent")
    assert found.version == "580.65.06"
    assert found.devices == (driver.Device("NVIDIA H200", "sm_90"), driver.Device("Odd, device", None))
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver'\nexit 9\n")
    assert driver.local_driver(tmp_path / "absent") is None
