"""Sources, architectures and toolchains to units."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import fake_stack
import pytest

from brakecheck.model import Entry, Source, UnavailableError, UsageError
from brakecheck.stack import cache, nvcc, ptx
from brakecheck.stack import compile as compiling
from brakecheck.stack.compile import compile_all
from brakecheck.stack.files import user_sources
from brakecheck.stack.toolchain import open_stack, with_installed_nvcc

KERNEL = """
#include "scale.cuh"
template <typename T, int N> __global__ void scale(T* a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) a[i] = a[i] * T(N) + T(OFFSET);
}
extern "C" __global__ void plain(float* a) { a[threadIdx.x] += 1; }
"""
ENTRIES = (Entry("scale<float, 4>"), Entry("plain"))


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    monkeypatch.delenv("BRAKECHECK_OFFLINE", raising=False)
    fake_stack.prepare(tmp_path, monkeypatch)
    yield tmp_path
    cache.release()


def source(folder, text, name="kernel.cu", **values):
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return Source(str(path), path.stem, "ptx" if name.endswith(".ptx") else "cu", **values)


def statuses(row):
    return [unit.status for unit in row]


def test_units_come_stack_by_stack_source_by_source_arch_by_arch(fakes):
    stacks = [open_stack("cuda==12.8"), open_stack("cuda==13.0")]
    sources = [source(fakes, "x", "a.cu", entries=ENTRIES), source(fakes, "y", "b.cu")]
    seen = []
    units = compile_all(stacks, sources, ["sm_80", "sm_90a"], progress=lambda *args: seen.append(args))
    assert [[(Path(u.source).name, u.arch, u.stack) for u in row] for row in units] == [
        [(name, arch, stack) for name in ("a.cu", "b.cu") for arch in ("sm_80", "sm_90a")]
        for stack in ("cuda 12.8.0", "cuda 13.0.0")]
    unit = units[0][0]
    assert set(unit.entries) == {"scale<float, 4>", "plain"} and unit.front == "nvrtc"
    assert unit.entries["plain"] in Path(unit.ptx).read_text()
    assert Path(unit.cubin).read_text().startswith("cubin of 12.8.0") and "Used 8 registers" in unit.log
    assert unit.ptx_sha256 == units[1][0].ptx_sha256 and unit.cubin_sha256 != units[1][0].cubin_sha256
    assert seen[0][:3] == ("compile", 0, 8) and seen[-1][:3] == ("compile", 8, 8)


def test_second_run_compiles_nothing_and_gives_the_same(fakes):
    stack, sources = open_stack("cuda==12.9"), [source(fakes, "x", entries=ENTRIES)]
    first = compile_all([stack], sources, ["sm_80", "sm_89"])
    before = fake_stack.calls("")
    assert compile_all([stack], sources, ["sm_80", "sm_89"]) == first
    assert fake_stack.calls("") == before


def test_the_same_stack_twice_is_compiled_once(fakes):
    stack = open_stack("cuda==12.9")
    both = compile_all([stack, stack], [source(fakes, "x")], ["sm_80"])
    assert both[0] == both[1] and len(fake_stack.calls("nvrtc")) == 1


def test_what_a_unit_depends_on(fakes):
    """Each change must compile again; what does not reach the compiler must not."""
    folder = fakes / "src"
    stack = open_stack("cuda==12.9")

    def recompiled(text='#include "a.h"\n', **values):
        before = len(fake_stack.calls("nvrtc"))
        compile_all([stack], [source(folder, text, include_dirs=(str(fakes / "inc"),), **values)], ["sm_80"])
        return len(fake_stack.calls("nvrtc")) - before

    (fakes / "inc").mkdir()
    for path, text in {"src/a.h": "#include <b.h>\n", "inc/b.h": "1", "inc/other.h": "1"}.items():
        folder.mkdir(exist_ok=True)
        (fakes / path).write_text(text)
    assert recompiled() == 1 and recompiled() == 0
    (fakes / "inc/other.h").write_text("2")
    assert recompiled() == 0
    (fakes / "inc/b.h").write_text("2")
    assert recompiled() == 1
    (folder / "b.h").write_text("3")  # now found beside a.h first
    assert recompiled() == 1
    assert recompiled(defines=("A=1",)) == 1 and recompiled(std="c++20") == 1 and recompiled(entries=ENTRIES) == 1
    assert recompiled("#include HEADER\n") == 1 and recompiled("#include HEADER\n") == 0
    (fakes / "inc/other.h").write_text("4")
    assert recompiled("#include HEADER\n") == 1


def test_missing_is_not_failed(fakes):
    stacks = [open_stack("cuda==12.8"), open_stack("cuda==12.9")]
    old, new = compile_all(stacks, [source(fakes, "x", min_arch=90)], ["sm_80", "sm_90a", "sm_100a"])
    assert statuses(old) == ["missing", "ok", "missing"] and statuses(new) == ["missing", "ok", "ok"]
    assert old[0].message == "kernel.cu is for sm_90 and newer"
    assert old[2].message == "ptxas of cuda 12.8.0 does not know sm_100a"
    mixed = open_stack("cuda==12.8+ptxas==12.9")
    assert compile_all([mixed], [source(fakes, "x")], ["sm_100a"])[0][0].message.startswith("NVRTC of cuda 12.8.0")


def test_failures_carry_the_compilers_words_and_the_rest_goes_on(fakes):
    stack = open_stack("cuda==12.9")
    sources = [source(fakes, text, f"{text.lower()}.cu") for text in ("SYNTAX", "CRASH", "BADPTX", "GOOD")]
    units = compile_all([stack], sources, ["sm_80"], jobs=2)[0]
    assert statuses(units) == ["failed", "failed", "failed", "ok"]
    assert units[0].message == "syntax.cu(1): error: SYNTAX"
    assert "SIGABRT" in units[1].message and "went up in smoke" in units[1].message
    assert "Unknown symbol 'BADPTX'" in units[2].message and units[2].ptx and not units[2].cubin
    before = len(fake_stack.calls("nvrtc"))
    assert statuses(compile_all([stack], sources, ["sm_80"])[0]) == statuses(units)
    assert fake_stack.calls("nvrtc")[before:] == ["nvrtc crash.cu"]  # a crash may not happen again


def test_time_limit_ends_front_end_and_assembler(fakes):
    sources = [source(fakes, text, f"{text.lower()}.cu") for text in ("SLEEP", "SLOWPTX", "GOOD")]
    start = time.monotonic()
    units = compile_all([open_stack("cuda==12.9")], sources, ["sm_80"], jobs=3, time_limit=1.5)[0]
    assert statuses(units) == ["failed", "failed", "ok"] and time.monotonic() - start < 20
    assert units[0].message == "NVRTC took longer than 1.5 s and was ended"
    assert units[1].message == "ptxas took longer than 1.5 s and was ended"


INTERRUPTED = """
import sys
from pathlib import Path
import fake_stack
fake_stack.prepare(Path(sys.argv[1]))
from brakecheck.model import Source
from brakecheck.stack.compile import compile_all
from brakecheck.stack.toolchain import open_stack
try:
    compile_all([open_stack("cuda==12.9")], [Source(p, Path(p).stem) for p in sys.argv[2:]], ["sm_80"], jobs=3)
except KeyboardInterrupt:
    sys.exit(99)
"""


def test_interrupt_kills_children_and_keeps_what_is_finished(fakes):
    """In a process of its own: where tests run in threads, the signal would reach another one."""
    good = [source(fakes, f"good {i}", f"good{i}.cu") for i in range(3)]
    slow = [source(fakes, "SLEEP", "sleep.cu"), source(fakes, "SLOWPTX", "slow.cu")]
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(fakes), *(s.path for s in [*good, *slow])],
                               env={**os.environ, "PYTHONPATH": path})
    deadline, units = time.monotonic() + 50, fakes / "cache" / "units"
    while len(list(units.glob("**/unit.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 99  # the slow ones sleep for a minute
    left = subprocess.run(["pgrep", "-f", str(fakes)], capture_output=True, text=True, check=False).stdout
    assert not left.split()
    before = len(fake_stack.calls("nvrtc"))
    assert statuses(compile_all([open_stack("cuda==12.9")], good, ["sm_80"])[0]) == ["ok"] * 3
    assert len(fake_stack.calls("nvrtc")) == before


def test_two_processes_may_compile_the_same(fakes):
    stack, one = open_stack("cuda==12.9"), source(fakes, "x")
    results = []

    def compile_it():
        results.append(compile_all([stack], [one], ["sm_80"]))

    threads = [threading.Thread(target=compile_it) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {statuses(r[0])[0] for r in results} == {"ok"}
    assert len({r[0][0].cubin_sha256 for r in results}) == 1 and Path(results[0][0][0].cubin).is_file()


def test_full_disk_while_compiling(fakes, monkeypatch):
    stack = open_stack("cuda==12.9")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiling.cache, "publish", full)
    with pytest.raises(UnavailableError, match="no space left"):
        compile_all([stack], [source(fakes, "x")], ["sm_80"])


def test_ptx_sources_are_assembled_by_each_ptxas(fakes):
    stacks = [open_stack("cuda==12.8"), open_stack("cuda==12.9")]
    sources = user_sources([source(fakes, ".version 8.0\n.target sm_90a\n.entry k() { ret; }", "k.ptx").path])
    rows = compile_all(stacks, sources, ["sm_80", "sm_90a", "sm_100a"])
    assert statuses(rows[1]) == ["missing", "ok", "missing"] and rows[1][1].front == "ptx"
    assert "k.ptx is for sm_90a only" in rows[1][2].message
    assert rows[0][1].ptx_sha256 == rows[1][1].ptx_sha256 and rows[0][1].cubin_sha256 != rows[1][1].cubin_sha256
    assert fake_stack.calls("nvrtc") == []


def test_usage_errors(fakes):
    stack, one = open_stack("cuda==12.9"), source(fakes, "x")
    with pytest.raises(UsageError, match="no architecture|not an architecture"):
        compile_all([stack], [one], ["90a"])
    with pytest.raises(UsageError, match="no front end"):
        compile_all([stack], [one], ["sm_80"], front="clang")
    with pytest.raises(UsageError, match="has no nvcc"):
        compile_all([stack], [one], ["sm_80"], front="nvcc")
    with pytest.raises(UsageError, match="no nvcc"):
        with_installed_nvcc(stack, fakes / "nowhere")
    with pytest.raises(UsageError, match="cannot be read") as caught:
        compile_all([stack], [Source(str(fakes / "gone.cu"), "gone")], ["sm_80"])
    assert "gone.cu" in caught.value.where


def test_user_sources(tmp_path):
    one = source(tmp_path, "x", "soft max.cu")
    made = user_sources([one.path], [str(tmp_path)], ["A", "B=2"], "c++20")[0]
    assert (made.operator, made.kind, made.defines, made.std) == ("soft max", "cu", ("A", "B=2"), "c++20")
    assert made.include_dirs == (str(tmp_path),)
    bad = [({"paths": [str(tmp_path / "gone.cu")]}, "No such file"), ({"paths": [str(tmp_path)]}, "unknown kind"),
           ({"paths": ["a.py"]}, "unknown kind"), ({"paths": [], "include_dirs": ["nowhere"]}, "does not exist"),
           ({"paths": [], "defines": ["2x"]}, "no definition"), ({"paths": [], "std": "c++7"}, "no C++ standard"),
           ({"paths": [source(tmp_path, "text", "x.ptx").path]}, "no .target")]
    for arguments, words in bad:
        with pytest.raises(UsageError) as caught:
            user_sources(**arguments)
        assert words in caught.value.what and caught.value.todo


def test_a_file_named_twice_is_one_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.cu", "b.cu"):
        Path(name).write_text("")
    assert [s.path for s in user_sources(["a.cu", "b.cu", str(tmp_path / "a.cu")])] == ["a.cu", "b.cu"]


def test_launches_of_user_sources(tmp_path):
    path = tmp_path / "scale.cu"
    path.write_text("// brakecheck: launch scale<float, 4>=256,65536\n__global__ void k();\n")
    (found,) = user_sources([str(path)], launches=["k=1024"])
    assert found.launches == (Entry("k", 1024), Entry("scale<float, 4>", 256, 65536)) and found.entries == ()
    path.write_text("int x;\n  // brakecheck: lunch k=1\n")
    with pytest.raises(UsageError) as error:
        user_sources([str(path)])
    assert "lunch" in error.value.what and error.value.where.endswith("scale.cu, line 2")
    path.write_text("")
    for wrong in ("k", "k=", "=1", "k=0", "k=1,x", "k=1,2,3"):
        with pytest.raises(UsageError, match="launch configuration"):
            user_sources([str(path)], launches=[wrong])


def test_ptx_is_for_what_its_target_assembles_for(tmp_path):
    path = tmp_path / "k.ptx"
    meant = {}
    for target in ("sm_80", "sm_90a", "sm_100f"):
        path.write_text(f".version 8.8\n.target {target}\n")
        (found,) = user_sources([str(path)])
        meant[target] = [a for a in ("sm_75", "sm_80", "sm_90a", "sm_100a", "sm_103f", "sm_120a") if found.is_for(a)]
    assert meant == {"sm_80": ["sm_80", "sm_90a", "sm_100a", "sm_103f", "sm_120a"], "sm_90a": ["sm_90a"],
                     "sm_100f": ["sm_100a", "sm_103f"]}


def test_ptx_newer_than_the_assembler_is_refused_before_it_is_met(fakes):
    """F27: with its own front end such a stack can never work; a file of PTX is explained beside ptxas's words."""
    stack = open_stack("cuda==13.2+ptxas==12.9")
    with pytest.raises(UsageError) as error:
        compile_all([stack], [source(fakes, "x")], ["sm_80"])
    assert "PTX is ISA 9.2, ptxas 12.9 knows up to 8.8" in error.value.what and "ptxas 13.2" in error.value.todo
    new = fakes / "new.ptx"
    new.write_text(".version 9.2\n.target sm_80\nBADPTX\n")
    (((unit,),),) = [compile_all([stack], user_sources([str(new)]), ["sm_80"])]
    first, _, rest = unit.message.partition("\n")
    assert unit.status == "failed" and first.startswith("error: the PTX is ISA 9.2") and "ptxas 13.2" in first
    assert "BADPTX" in rest


def test_ptx_identity_sees_code_only():
    plain = ".version 8.8\n.target sm_90\n.visible .entry k()\n{\n\tret;\n}\n"
    dressed = ("//\n// Generated by a compiler\n//\n.version 9.2\n.target sm_90\n\n.visible .entry k() // kernel\n{\n"
               "\t.loc\t1 4 3\n$L__tmp0:\n\tret;\n}\n\t.file\t1 \"/a//b.cu\"\n"
               "\t.section\t.debug_str\n\t{\n$L__info_string0:\n.b8 97\n\t}\n")
    assert ptx.identity(plain) == ptx.identity(dressed)
    assert ptx.identity(plain) != ptx.identity(plain.replace("ret", "exit"))
    assert ptx.identity(plain) != ptx.identity(plain.replace("sm_90", "sm_80"))


@pytest.mark.parametrize(("built_for", "arch", "works"), [
    ("sm_80", "sm_90a", True), ("sm_90", "sm_80", False), ("sm_90a", "sm_90a", True), ("sm_90a", "sm_100a", False),
    ("sm_100f", "sm_103a", True), ("sm_100f", "sm_120a", False), ("sm_103f", "sm_100f", False),
    ("sm_100f", "sm_101a", False)])
def test_which_ptx_assembles_for_what(built_for, arch, works):
    assert ptx.runs_on(built_for, arch) == works


def test_nvcc_marks_are_read_and_removed():
    text = (".global .align 8 .u64 brakecheck_entry_0 = _Z1kIfEvPT_;\n"
            ".visible .const .align 8 .u64 brakecheck_entry_1 = generic(plain);\n.visible .entry plain()\n")
    assert nvcc.take_entries(text, ["k<float>", "plain"]) == (
        ".visible .entry plain()\n", {"k<float>": "_Z1kIfEvPT_", "plain": "plain"})


def test_nvcc_without_a_host_compiler(fakes, monkeypatch):
    program = fakes / "nvcc"
    program.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    stack = with_installed_nvcc(open_stack("cuda==12.9"), program)
    assert stack.stack.component("nvcc").version == "13.0.88"
    monkeypatch.setenv("NVCC_CCBIN", "no-such-compiler")
    with pytest.raises(UnavailableError, match="needs a host compiler"):
        compile_all([stack], [source(fakes, "x")], ["sm_80"], front="nvcc")


def elf_machine(path):
    data = Path(path).read_bytes()
    assert data[:4] == b"\x7fELF"
    return int.from_bytes(data[18:20], "little")


@pytest.mark.network
def test_real_compilers(tmp_path):
    stacks = [open_stack(f"cuda=={release}") for release in ("12.4", "12.9", "13.5")]
    (tmp_path / "scale.cuh").write_text("#define OFFSET 1\n")
    good = source(tmp_path, KERNEL, entries=ENTRIES)
    bad = source(tmp_path, "__global__ void f() { nonsense; }", "bad.cu")
    cub = source(tmp_path, "#include <cub/block/block_reduce.cuh>\n#include <cuda_bf16.h>\n"
                 "__global__ void sum(float* a) { using R = cub::BlockReduce<float, 128>;\n"
                 "__shared__ typename R::TempStorage t; float s = R(t).Sum(*a); if (!threadIdx.x) *a = s; }", "cub.cu")
    rows = compile_all(stacks, [good, bad], ["sm_80", "sm_90a", "sm_100a"])
    for row, newest in zip(rows, ("missing", "ok", "ok")):
        assert statuses(row[:3]) == ["ok", "ok", newest], [u.message for u in row]
        assert statuses(row[3:]) == ["failed", "failed", "missing" if newest == "missing" else "failed"]
        assert row[0].entries == {"scale<float, 4>": "_Z5scaleIfLi4EEvPT_i", "plain": "plain"}
        assert elf_machine(row[0].cubin) == 190 and '"nonsense" is undefined' in row[3].message
        assert "registers" in row[0].log and row[0].frontend_seconds > 0 and row[0].ptxas_seconds > 0
    assert len({row[0].cubin_sha256 for row in rows}) == 3
    assert compile_all(stacks[:1], [cub], ["sm_80"])[0][0].status == "ok"
    start = time.perf_counter()
    assert compile_all(stacks, [good, bad], ["sm_80", "sm_90a", "sm_100a"]) == rows
    assert time.perf_counter() - start < 1


@pytest.mark.network
@pytest.mark.parametrize("release", ["12.0", "12.9", "13.5"])
def test_real_nvrtc_with_headers_of_the_standard_library(tmp_path, release):
    text = """#include <cstdint>
    #include <cmath>
    #include <cfloat>
    #include <climits>
    #include <cstdio>
    #include <cassert>
    #include <cuda.h>
    int host_or_device(int x) { return x + 1; }
    __global__ void f(std::uint32_t* a, const __grid_constant__ CUtensorMap map) {
      assert(a); a[threadIdx.x] = host_or_device(int(std::sqrt(FLT_MAX)) + INT_MAX); printf("%p", &map); }"""
    unit = compile_all([open_stack(f"cuda=={release}")], [source(tmp_path, text)], ["sm_90"])[0][0]
    assert unit.status == "ok", unit.message
    assert "compiled with -default-device" in unit.log


@pytest.mark.network
def test_real_mixed_stack_and_ptx_source(tmp_path):
    (tmp_path / "scale.cuh").write_text("#define OFFSET 2\n")
    one = source(tmp_path, KERNEL, entries=ENTRIES)
    plain, mixed = compile_all([open_stack("cuda==12.4"), open_stack("cuda==12.4+ptxas==12.9")], [one], ["sm_90a"])
    assert plain[0].ptx_sha256 == mixed[0].ptx_sha256 and plain[0].cubin_sha256 != mixed[0].cubin_sha256
    assembled = compile_all([open_stack("cuda==13.5")], user_sources([plain[0].ptx]), ["sm_90a", "sm_80"])[0]
    assert statuses(assembled) == ["ok", "missing"] and assembled[0].ptx_sha256 == plain[0].ptx_sha256


@pytest.mark.network
def test_real_nvcc_front_end(tmp_path):
    (tmp_path / "scale.cuh").write_text("#define OFFSET 3\n")
    bad = source(tmp_path, "__global__ void f() { nonsense; }", "bad.cu")
    sources = [source(tmp_path, KERNEL, entries=ENTRIES), bad]
    units = compile_all([open_stack("cuda==13.5")], sources, ["sm_90a"], front="nvcc")[0]
    assert statuses(units) == ["ok", "failed"], units
    assert units[0].entries == {"scale<float, 4>": "_Z5scaleIfLi4EEvPT_i", "plain": "plain"}
    assert "brakecheck_entry" not in Path(units[0].ptx).read_text() and elf_machine(units[0].cubin) == 190
    assert "nonsense" in units[1].message


def test_worker_that_cannot_load_its_library_says_so(tmp_path):
    worker = Path(compiling.__file__).with_name("nvrtc_worker.py")
    (tmp_path / "libnvrtc.so.12").write_text("not a library")
    done = subprocess.run([sys.executable, "-I", "-S", str(worker), str(tmp_path / "libnvrtc.so.12")],
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and '"error"' in done.stdout and "libnvrtc.so.12" in done.stdout
    assert "Traceback" not in done.stderr
