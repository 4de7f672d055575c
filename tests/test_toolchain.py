"""Toolchains and the cache they live in."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_stack
import pytest

from brakecheck.model import UnavailableError, UsageError
from brakecheck.stack import cache, wheels
from brakecheck.stack.toolchain import disassembler, known_archs, open_stack, open_stacks


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    monkeypatch.delenv("BRAKECHECK_OFFLINE", raising=False)
    fake_stack.prepare(tmp_path, monkeypatch)
    yield tmp_path
    cache.release()


def versions(stack):
    return {c.name: c.version for c in stack.stack.components}


def test_newest_patch_by_default_and_every_component_recorded(fakes):
    stack = open_stack("cuda==12.9")
    assert stack.stack.name == "cuda 12.9.1" and stack.stack.spec == "cuda==12.9"
    assert versions(stack) == {"nvrtc": "12.9.1.0", "ptxas": "12.9.1.0", "headers": "12.9.1.0", "nvdisasm": "13.2.0"}
    for component in stack.stack.components:
        assert Path(component.path).exists() and len(component.sha256) == 64
    assert open_stack("cuda==12.9.0").stack.name == "cuda 12.9.0"
    assert disassembler() == stack.disassembler and stack.disassembler.cuobjdump.is_file()
    assert open_stack("cuda==12.9+nvdisasm==13.2.0").disassembler.component.version == "13.2.0"


def test_several_at_once_share_the_disassembler(fakes):
    stacks = open_stacks(["cuda==12.8", "cuda==12.9", "cuda==13.0", "cuda==12.8"])
    assert [s.stack.name for s in stacks] == ["cuda 12.8.0", "cuda 12.9.1", "cuda 13.0.0", "cuda 12.8.0"]
    assert len(fake_stack.calls("install")) == 4
    with pytest.raises(UsageError, match=r"no CUDA 12\.7"):
        open_stacks(["cuda==12.8", "cuda==12.7"])


def test_overlay_takes_one_component_from_another_release(fakes):
    stack = open_stack("cuda==12.9+ptxas==12.8")
    assert stack.stack.name == "cuda 12.9.1 + ptxas 12.8.0"
    assert versions(stack)["ptxas"] == "12.8.0" and versions(stack)["nvrtc"] == "12.9.1.0"
    assert stack.ptxas.read_text().splitlines()[1] == "# 12.8.0"
    assert "sm_100a" in known_archs(open_stack("cuda==12.9")) and "sm_100a" not in known_archs(stack)


def test_overlay_of_headers_replaces_the_base_headers(fakes):
    base, overlay = open_stack("cuda==12.9"), open_stack("cuda==12.9+cudart==13.0")
    assert overlay.include_dirs == overlay.overlay_includes and len(overlay.include_dirs) == 1
    assert overlay.stack.component("headers").version == "13.0.0.0" and "cu13" in str(overlay.include_dirs[0])
    assert base.overlay_includes == () and overlay.nvrtc == base.nvrtc


def test_a_component_the_release_does_not_have(fakes):
    with pytest.raises(UsageError, match=r"CUDA 12\.8\.0 has no nvcc"):
        open_stack("cuda==12.9+nvcc==12.8")


def test_a_release_that_does_not_exist_names_the_nearest(fakes):
    with pytest.raises(UsageError, match=r"no CUDA 12\.95") as caught:
        open_stack("cuda==12.95")
    assert caught.value.todo == "the nearest: 12.9.1 and 13.0.0"
    with pytest.raises(UsageError) as caught:
        open_stack("cuda==12.9.7")
    assert "12.9.1 and 13.0.0" in caught.value.todo
    with pytest.raises(UsageError) as caught:
        open_stack("cuda==15.1")
    assert caught.value.todo == "the nearest: 13.2.0"


def test_other_kinds_are_no_toolchain(fakes):
    with pytest.raises(UsageError, match="not a CUDA toolchain"):
        open_stack("env:/usr/bin/python3")


def test_warm_cache_asks_nobody(fakes):
    first = open_stack("cuda==12.9")
    before = fake_stack.calls("")
    assert open_stack("cuda==12.9") == first
    assert fake_stack.calls("") == before


@pytest.mark.parametrize("how", ["argument", "variable", "no network"])
def test_offline_with_a_warm_cache(fakes, monkeypatch, how):
    first = open_stack("cuda==12.9")
    go_offline(monkeypatch, how)
    assert open_stack("cuda==12.9", offline=how == "argument") == first


@pytest.mark.parametrize("how", ["argument", "variable", "no network"])
def test_offline_with_a_cold_cache_says_what_is_missing(fakes, monkeypatch, how):
    go_offline(monkeypatch, how)
    with pytest.raises(UnavailableError, match=r"CUDA 12\.9: not in the cache") as caught:
        open_stack("cuda==12.9", offline=how == "argument")
    assert "network" in caught.value.todo


def go_offline(monkeypatch, how):
    if how == "variable":
        monkeypatch.setenv("BRAKECHECK_OFFLINE", "1")
    elif how == "no network":
        monkeypatch.setenv("FAKE_UV", "no-network")


def test_a_resolution_is_refreshed_after_a_day_and_used_stale_offline_with_a_note(fakes, monkeypatch):
    assert open_stack("cuda==12.9").notes == ()
    for file in (cache.root() / "resolutions").iterdir():
        data = json.loads(file.read_text())
        file.write_text(json.dumps({**data, "time": time.time() - 3 * 86400}))
    before = len(fake_stack.calls("resolve"))
    stack = open_stack("cuda==12.9", offline=True)
    assert len(fake_stack.calls("resolve")) == before
    assert any("CUDA 12.9" in note and "3 days old" in note for note in stack.notes)
    assert open_stack("cuda==12.9").notes == ()
    assert len(fake_stack.calls("resolve")) == before + 2  # the toolchain's and the disassembler's
    open_stack("cuda==12.9")
    assert len(fake_stack.calls("resolve")) == before + 2


def test_a_damaged_resolution_is_made_anew(fakes):
    open_stack("cuda==12.9")
    for file in (cache.root() / "resolutions").iterdir():
        file.write_text('{"wanted": ')
    assert open_stack("cuda==12.9").stack.name == "cuda 12.9.1"


def test_an_unwritable_cache_is_explained(fakes, monkeypatch):
    (fakes / "file").write_text("")
    monkeypatch.setenv("BRAKECHECK_CACHE", str(fakes / "file" / "cache"))
    with pytest.raises(UnavailableError, match="cannot be written") as caught:
        open_stack("cuda==12.9")
    assert "BRAKECHECK_CACHE" in caught.value.todo


def test_a_full_disk_is_explained_and_leaves_nothing_behind(fakes):
    def fill(target):
        (target / "part").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UnavailableError, match="no space left"):
        cache.build(cache.root() / "toolchains" / "x", fill)
    assert not (cache.root() / "toolchains" / "x").exists()
    assert not list((cache.root() / "tmp").glob("*/*"))


def opener(folder, **environment):
    return subprocess.Popen([sys.executable, str(Path(fake_stack.__file__)), "cuda==12.9", str(folder)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                            env={**os.environ, **environment})


def test_two_runs_share_the_cache_and_download_once(fakes):
    runs = [opener(fakes, FAKE_UV_SECONDS="0.5") for _ in range(2)]
    outputs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert len(fake_stack.calls("install")) == 2  # the toolchain and the disassembler, once each


def test_a_run_killed_half_way_leaves_nothing_that_is_used(fakes):
    run = opener(fakes, FAKE_UV="hang")
    try:
        deadline = time.monotonic() + 30
        while not list((fakes / "cache" / "tmp").glob("*/*/half")):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    assert not list((fakes / "cache" / "toolchains").glob("*"))
    stack = open_stack("cuda==12.9")
    assert stack.nvrtc.is_file()
    assert not list((fakes / "cache").glob("tmp/*/*/half"))  # swept


def test_pip_configuration_serves_where_uv_has_none(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    for name in [name for name in os.environ if name.startswith("UV_")]:
        monkeypatch.delenv(name)
    assert wheels._pip_configuration()["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    (tmp_path / "uv.toml").write_text("")
    assert wheels._pip_configuration() == {}


@pytest.mark.network
@pytest.mark.parametrize(("text", "major"), [("cuda==12.4", 12), ("cuda==12.9", 12), ("cuda==13.5", 13)])
def test_real_toolchains(text, major):
    stack = open_stack(text)
    found = versions(stack)
    assert found["nvrtc"].startswith(text[6:]) and found["ptxas"].startswith(text[6:])
    assert {"headers", "cccl", "crt", "nvvm", "nvdisasm"} <= set(found) and ("nvcc" in found) == (major == 13)
    for header in ("cuda_fp16.h", "crt/host_defines.h", "cub/cub.cuh"):
        assert any((folder / header).is_file() for folder in stack.include_dirs), header
    assert {"sm_80", "sm_89", "sm_90a"} <= set(known_archs(stack))
    assert ("sm_100a" in known_archs(stack)) == (text != "cuda==12.4")
    assert "disassembl" in subprocess.run([disassembler().nvdisasm, "--help"], capture_output=True, text=True).stdout


@pytest.mark.network
def test_real_release_that_does_not_exist():
    with pytest.raises(UsageError) as caught:
        open_stack("cuda==12.7")
    assert "12.6.3 and 12.8" in caught.value.todo
