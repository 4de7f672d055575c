"""Disassembly, classes and the identity of code, on cubins of six releases."""

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brakecheck.evidence import sass
from brakecheck.evidence.analyse import analyse, check_launches, sass_text
from brakecheck.evidence.cubin import read_cubin
from brakecheck.evidence.names import is_called
from brakecheck.evidence.opcodes import class_of
from brakecheck.evidence.sidebyside import aligned
from brakecheck.model import BrakecheckError, Entry, Source, UnavailableError, Unit, UsageError

DATA = Path(__file__).parent / "data/cubins"
CUBINS = sorted(DATA.glob("*.cubin"))

# Answers with what nvdisasm printed for this code when the cubins were made.
STAND_IN = """#!{python}
import gzip, hashlib, json, sys
with open({log!r}, "a") as log: log.write(" ".join(sys.argv[1:]) + "\\n")
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.5, V13.5.37"); sys.exit()
if "SM42" in sys.argv:
    sys.exit("nvdisasm fatal   : Value 'SM42' is not defined for option 'binary'")
known = json.loads(gzip.open({data!r}).read())
key = hashlib.sha256(open(sys.argv[-1], "rb").read()).hexdigest()
if key not in known:
    sys.exit("nvdisasm error   : Unrecognized operation for functional unit at address 0x00000000")
print(json.dumps(known[key]))
"""


@pytest.fixture
def nvdisasm(tmp_path):
    tool = tmp_path / "nvdisasm"
    tool.write_text(STAND_IN.format(python=sys.executable, log=str(tmp_path / "calls"),
                                    data=str(DATA / "disassembly.json.gz")))
    tool.chmod(0o755)
    return tool


def recorded(path):
    """Kernel name -> (cubin, kernel, instructions) without starting a process."""
    known = json.loads(gzip.decompress((DATA / "disassembly.json.gz").read_bytes()))
    cubin = read_cubin(path)
    starts, blob = {}, b""
    for kernel in cubin.kernels:
        starts.setdefault(kernel.code, len(blob))
        blob += kernel.code if starts[kernel.code] == len(blob) else b""
    raw = [i for f in known[hashlib.sha256(blob).hexdigest()][1] for i in f["sass-instructions"]]
    out = {}
    for kernel in cubin.kernels:
        start = starts[kernel.code]
        out[kernel.name] = cubin, kernel, sass._dress(raw[start // 16:(start + len(kernel.code)) // 16], start,
                                                      cubin, kernel)
    return out


def hashes(stem, name):
    return sass.identity(*recorded(DATA / f"{stem}.cubin")[name])


def test_labels_names_and_lines():
    _, _, code = recorded(DATA / "13.5-sm_80.cubin")["calls"]
    text = "\n".join(sass.text_of(code))
    assert "CALL.REL.NOINC _Z9slow_pathdi" in text and "\n_Z9slow_pathdi:\n" in text
    assert "@!P0 BRA L1  // small.cu:" in text and "\nL1:\n" in text
    assert code[-1].opcode == "BRA" and not any(i.opcode == "NOP" for i in code)  # the padding is gone
    assert [i.address for i in code] == list(range(0, 16 * len(code), 16))


def test_relocated_operands_name_their_target():
    text = "\n".join(sass.text_of(recorded(DATA / "12.0-sm_80.cubin")["tables"][2]))
    assert "{lookup+0x0" in text


def test_identity_survives_the_elf_layout():
    """12.4 to 13.0 changed the ELF ABI and nothing else for these kernels (12.9 and 13.0 are ABI 7 and 8)."""
    for name in ("axpy", "tables", "calls", "local_array", "_Z8scale_byILi3EfEvPT0_"):
        same = {hashes(f"{release}-sm_80", name) for release in ("12.4", "12.9", "13.0")}
        assert len(same) == 1, name
    assert hashes("13.0-sm_80", "axpy") == hashes("13.5-sm_80", "axpy")


def test_text_names_what_only_scheduling_changed():
    old, new = hashes("12.0-sm_80", "axpy"), hashes("12.4-sm_80", "axpy")
    assert old[1] == new[1] and old[0] != new[0]


def test_changed_code_changes_both():
    old, new = hashes("13.0-sm_80", "tables"), hashes("13.2-sm_80", "tables")
    assert old[0] != new[0] and old[1] != new[1]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_identity_survives_another_module(arch):
    """Constants and variables lie elsewhere when the module holds others before them."""
    plain, moved = recorded(DATA / f"13.5-{arch}.cubin"), recorded(DATA / f"moved-13.5-{arch}.cubin")
    assert set(moved) == {*plain, "other"}
    offsets = {n: [i.operands for i in plain[n][2] if "c[0x3]" in i.operands] !=
               [i.operands for i in moved[n][2] if "c[0x3]" in i.operands] for n in plain}
    assert offsets["tables"]  # the code did move
    for name in plain:
        assert sass.identity(*plain[name]) == sass.identity(*moved[name]), name


def patched(stem, name, where, value):
    """hashes of a kernel after one byte of the file was changed; the instructions as before."""
    cubin, _, code = recorded(DATA / f"{stem}.cubin")[name]
    data = bytearray(cubin.data)
    data[where(cubin)] ^= value
    other = read_cubin(bytes(data))
    return sass.identity(other, next(k for k in other.kernels if k.name == name), code)


def instruction(name, number, byte):
    return lambda cubin: next(k for k in cubin.kernels if k.name == name).section.offset + 16 * number + byte


@pytest.mark.parametrize("stem", ["12.4-sm_80", "13.5-sm_80", "13.5-sm_90a", "13.5-sm_120a"])
def test_a_stall_count_is_not_called_identical(stem):
    before = hashes(stem, "axpy")
    after = patched(stem, "axpy", instruction("axpy", 3, 13), 0x02)  # bit 105: lowest of the stall count
    assert after[0] != before[0] and after[1] == before[1]


@pytest.mark.parametrize("stem", ["12.4-sm_80", "13.5-sm_90a", "13.5-sm_120a"])
def test_every_bit_of_the_code_counts(stem):
    cubin, kernel, code = recorded(DATA / f"{stem}.cubin")["axpy"]
    before = sass.identity(cubin, kernel, code)[0]
    for at in range(0, 16 * len(code)):
        changed = bytearray(kernel.code)
        changed[at] ^= 0x10
        assert sass.identity(cubin, replace(kernel, code=bytes(changed)), code)[0] != before, at


@pytest.mark.parametrize("stem", ["12.0-sm_80", "12.4-sm_80", "13.5-sm_80", "13.5-sm_90a", "13.5-sm_120a"])
@pytest.mark.parametrize("section, symbol", [(".nv.constant3", "coefficient"), (".nv.global.init", "lookup")])
def test_a_constant_is_not_called_identical(stem, section, symbol):
    def where(cubin):
        found = next(s for s in cubin.symbols if s.name == symbol)
        return cubin.by_name[section].offset + found.value + 2

    before, after = hashes(stem, "tables"), patched(stem, "tables", where, 0x40)
    assert after[0] != before[0] and after[1] != before[1]
    assert patched(stem, "axpy", where, 0x40) == hashes(stem, "axpy")  # which does not use it


def test_a_register_count_is_not_called_identical():
    cubin, kernel, code = recorded(DATA / "13.5-sm_80.cubin")["axpy"]
    more = replace(kernel, registers=kernel.registers + 8)
    assert set(sass.identity(cubin, more, code)).isdisjoint(sass.identity(cubin, kernel, code))


@pytest.mark.parametrize("opcode, kind", [
    ("LDG.E.128.CONSTANT", "load.global.b128"), ("LDG.E.ENL2.256", "load.global.b256"),
    ("STG.E.U8", "store.global.b8"), ("LDS.64", "load.shared.b64"), ("LDC.64", "load.const"),
    ("LDSM.16.M88.4", "load.shared.b128"), ("LDSM.16.M88", "load.shared.b32"), ("STL.128", "store.local.b128"),
    ("LDL", "load.local.b32"), ("LD.E.S16", "load.generic.b16"), ("HMMA.16816.F32.BF16", "tensor.hmma"),
    ("HGMMA.64x8x16.F32.BF16", "tensor.hgmma"), ("UTCHMMA", "tensor.utchmma"), ("UTMALDG.2D", "tma"),
    ("UBLKCP.S.G", "tma"), ("LDGSTS.E.BYPASS.128", "cp_async"), ("ATOMS.ADD", "atomic.shared"),
    ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "reduce.global"), ("BAR.SYNC.DEFER_BLOCKING", "barrier"),
    ("SYNCS.ARRIVE.TRANS64", "mbarrier"), ("SHFL.BFLY", "shuffle"), ("MUFU.EX2", "special"), ("FFMA", "fp32"),
    ("DFMA", "fp64"), ("HFMA2.MMA", "fp16"), ("IMAD.WIDE.U32", "int"), ("UIADD3.X", "uniform"),
    ("F2FP.BF16.F32.PACK_AB", "convert"), ("XYZZY.32", "other"), ("UXYZZY", "other"),
])
def test_classes(opcode, kind):
    assert class_of(opcode) == kind


@pytest.mark.parametrize("path", CUBINS, ids=lambda p: p.stem)
def test_every_instruction_has_a_class(path):
    for name, (_, _, code) in recorded(path).items():
        assert sass.unknown_opcodes(code) == []
        mix = sass.mix_of(code)
        assert sum(mix.values()) == len(code) > 5
        assert (sass.local_operations(mix) > 0) == (name == "local_array")


def test_unknown_opcodes_are_listed():
    code = [sass.Instruction(0, "", "XYZZY.64", "R1")]
    assert sass.unknown_opcodes(code) == ["XYZZY.64"] and sass.mix_of(code) == {"other": 1}


# --- units -------------------------------------------------------------------------------------------------------

def units(tmp_path, *stems):
    out = []
    for stem in stems:
        path = tmp_path / f"{stem}.cubin"
        shutil.copy(DATA / path.name, path)
        release, arch = stem.removeprefix("moved-").split("-")
        out.append(Unit("small.cu", arch, f"cuda {release}", "ok", cubin=str(path),
                        log=(DATA / f"{stem}.log").read_text(),
                        entries={"scale_by<3, float>": "_Z8scale_byILi3EfEvPT0_"}))
    return out


SOURCES = [Source("small.cu", "small", min_arch=80, entries=(
    Entry("scale_by<3, float>", 128), Entry("axpy", 1024, 160_000), Entry("axpy", 64)))]


def test_units_get_kernels_occupancy_limits_and_spills(tmp_path, nvdisasm):
    seen = []
    failed = Unit("small.cu", "sm_100a", "cuda 12.4", "missing", message="unknown", log="k.cu(3): error: no such thing")
    done = analyse([*units(tmp_path, "12.4-sm_80", "13.5-sm_90a"), failed], SOURCES, nvdisasm, jobs=2,
                   progress=lambda *step: seen.append(step))
    assert [u.stack for u in done] == ["cuda 12.4", "cuda 13.5", "cuda 12.4"]
    kernels = {k.name: k for k in done[0].kernels}
    axpy, scale = kernels["axpy"], kernels["_Z8scale_byILi3EfEvPT0_"]
    assert scale.demangled == "void scale_by<3, float>(float*)" and scale.occupancy.threads == 128
    assert (axpy.resources.registers, axpy.resources.spill_stores, axpy.resources.spill_loads) == (10, 0, 0)
    assert axpy.occupancy.limiter == "shared memory" and axpy.occupancy.warps == 32
    assert {x.arch for x in axpy.limits} == {"sm_86", "sm_89", "sm_120", "sm_121"}
    assert kernels["tables"].occupancy is None and kernels["tables"].resources.max_threads == 256
    assert kernels["local_array"].local_ops > 0
    assert done[2].kernels == () and [n.severity for n in done[2].notes] == ["error"]
    assert seen[-1][:3] == ("disassemble", 2, 2)


def test_launches_of_a_user_find_their_kernels_by_name(tmp_path, nvdisasm):
    names = {"axpy": 64, "scale_by<3,float>": 128, "tab*": 256, "local_array": 32}
    mine = [Source("small.cu", "small", launches=tuple(Entry(n, t) for n, t in names.items()))]
    done = analyse(units(tmp_path, "13.5-sm_90a"), mine, nvdisasm)
    got = {k.demangled: k.occupancy.threads for k in done[0].kernels if k.occupancy}
    assert got == {"axpy": 64, "void scale_by<3, float>(float*)": 128, "tables": 256, "local_array": 32}
    check_launches(done, mine)
    with pytest.raises(UsageError) as error:
        check_launches(done, [Source("small.cu", "small", launches=(Entry("axpi", 64),))])
    assert "axpi" in error.value.what and "axpy" in error.value.todo


@pytest.mark.parametrize("pattern", ["f", "ns::f", "f<4,2>", "ns::f<4, 2>", "void ns::f<4, 2>(float*)", "_Zf", "n*f"])
def test_what_people_call_a_kernel(pattern):
    assert is_called(pattern, "_Zf", "void ns::f<4, 2>(float*)")
    assert not is_called("g", "_Zf", "void ns::f<4, 2>(float*)")


def test_notes_reach_the_kernel_they_are_about(tmp_path, nvdisasm):
    (unit,) = units(tmp_path, "13.5-sm_90a")
    serial = "wgmma.mma_async instructions are serialized due to the presence of Extern calls"
    text = f"ptxas info    : (C7509) {serial} in the function 'axpy'\nptxas info    : (C7508) 'setmaxnreg' ignored; x"
    (done,) = analyse([replace(unit, log=unit.log + text)], [], nvdisasm)
    assert [n.code for n in done.notes] == ["C7509", "C7508"]
    assert {k.name: [n.code for n in k.notes] for k in done.kernels if k.notes} == {"axpy": ["C7509"]}


def test_second_time_needs_no_disassembly_and_is_equal(tmp_path, nvdisasm):
    given_units = units(tmp_path, "12.4-sm_80", "13.5-sm_80")
    first = analyse(given_units, SOURCES, nvdisasm, jobs=1)  # not what was recorded together: taken one by one
    calls = (tmp_path / "calls").read_text().count("--binary")
    second = analyse(given_units, SOURCES, nvdisasm)
    assert second == first and calls == 3 and (tmp_path / "calls").read_text().count("--binary") == calls
    other_launch = analyse(given_units, [], nvdisasm)
    assert all(k.occupancy is None for u in other_launch for k in u.kernels)


def test_damaged_memory_of_the_analysis_is_made_again(tmp_path, nvdisasm):
    (unit,) = units(tmp_path, "13.5-sm_75")
    first = analyse([unit], [], nvdisasm)
    for kept in tmp_path.glob("*.code-*.json"):
        kept.write_text('{"sha256": "')
    assert analyse([unit], [], nvdisasm) == first
    shutil.copy(DATA / "13.5-sm_80.cubin", unit.cubin)  # another file under the same name
    assert analyse([replace(unit, arch="sm_80")], [], nvdisasm) != first


def test_one_bad_cubin_leaves_the_others(tmp_path, nvdisasm):
    good, truncated, gone, foreign = units(tmp_path, "13.5-sm_80", "12.4-sm_80", "12.9-sm_80", "13.0-sm_80")
    Path(truncated.cubin).write_bytes(Path(truncated.cubin).read_bytes()[:9000])
    Path(gone.cubin).unlink()
    data = bytearray(Path(foreign.cubin).read_bytes())
    data[next(s for s in read_cubin(bytes(data)).sections if s.name == ".text.axpy").offset] ^= 0xFF
    Path(foreign.cubin).write_bytes(data)
    done = analyse([good, truncated, gone, foreign], [], nvdisasm)
    assert done[0].kernels and not any(u.kernels for u in done[1:])
    words = ["damaged cubin", "cannot read the cubin", "cannot disassemble"]
    assert all(w in u.notes[-1].text and u.notes[-1].severity == "error" for w, u in zip(words, done[1:]))


def test_unknown_architecture_and_missing_tool(tmp_path, nvdisasm):
    (unit,) = units(tmp_path, "13.5-sm_80")
    (done,) = analyse([replace(unit, arch="sm_42")], [], nvdisasm)
    assert "SM42" in done.notes[-1].text and done.kernels == ()
    with pytest.raises(UnavailableError, match="does not run"):
        analyse([unit], [], tmp_path / "nothing")


def test_sass_text(tmp_path, nvdisasm):
    (unit,) = units(tmp_path, "13.5-sm_80")
    with pytest.raises(BrakecheckError, match="no disassembly"):
        sass_text(unit, "axpy")
    (done,) = analyse([unit], [], nvdisasm)
    assert "FFMA" in sass_text(done, "axpy") and "small.cu:" in sass_text(done, "axpy")
    with pytest.raises(BrakecheckError, match="no kernel nope"):
        sass_text(done, "nope")


# --- side by side ------------------------------------------------------------------------------------------------

def side(rows, which):
    return [getattr(r, which) for r in rows if getattr(r, which) is not None]


def test_aligned_marks_what_changed():
    base = "MOV R1, R2\nLDG.E R2, [R4]  // k.cu:3\nFADD R3, R2, R2\nSTG.E [R4], R3\nEXIT"
    candidate = "MOV R1, R2\nLDG.E R2, [R4]  // k.cu:4\nFADD R5, R2, R2\nMUFU.EX2 R5, R5\nSTG.E.64 [R4], R5\nEXIT"
    kinds = [(r.kind, r.base, r.candidate) for r in aligned(base, candidate)]
    assert [k for k, *_ in kinds] == ["same", "same", "operands", "opcode", "added", "same"]


def test_aligned_is_bounded_for_large_repetitive_kernels():
    base = ["FFMA R0, R1", "LDS R2, [R3]"] * 10_000
    candidate = ["FFMA R9, R1", "LDS.64 R2, [R3]"] * 10_000
    rows = aligned("\n".join(base), "\n".join(candidate))
    assert side(rows, "base") == base and side(rows, "candidate") == candidate
    assert {r.kind for r in rows} == {"operands", "opcode"}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["A R1", "A R2", "B R1", "@P0 C R1", "D"]), max_size=30),
       st.lists(st.sampled_from(["A R1", "A R2", "B R1", "@P0 C R1", "D"]), max_size=30))
def test_no_line_is_lost(base, candidate):
    rows = aligned("\n".join(base), "\n".join(candidate))
    assert side(rows, "base") == base and side(rows, "candidate") == candidate
    assert all(r.kind != "same" or r.base == r.candidate for r in rows)


# --- the real disassembler ---------------------------------------------------------------------------------------

@pytest.mark.network
def test_one_run_equals_a_run_per_cubin(newest_nvdisasm):
    """The code of several cubins laid end to end disassembles as each cubin does through its ELF file."""
    tool = str(newest_nvdisasm)
    by_arch = defaultdict(list)
    for path in CUBINS:
        by_arch[path.stem.rsplit("-", 1)[1]].append(read_cubin(path))
    for arch, cubins in ((a, [c[0], c[-1]]) for a, c in by_arch.items() if a != "sm_75"):
        kernels = [(c, k) for c in cubins for k in c.kernels]
        found = iter(sass.disassemble(kernels, arch, Path(tool)))
        for cubin in cubins:
            out = subprocess.run([tool, "--emit-json", cubin.where], capture_output=True, text=True, check=True).stdout
            functions = {f["function-name"]: f["sass-instructions"] for f in json.loads(out)[1]}
            for kernel in cubin.kernels:
                for mine, theirs in zip(next(found), functions[kernel.name]):
                    assert (mine.opcode, mine.predicate) == (theirs["opcode"], theirs.get("predicate", ""))
                    control = "control-flow" in theirs.get("other-attributes", ()) or mine.opcode == "LEPC"
                    if not control and "{" not in mine.operands:
                        assert mine.operands.replace(", ", ",") == theirs.get("operands", "")
