"""ptxas -v figures and compiler notes, from one compiler and from whole build logs."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brakecheck.evidence import names
from brakecheck.evidence.buildlog import KernelReport, needs_check, parse_log, serialises

DATA = Path(__file__).parent / "data/cubins"


def ptxas(kernel, arch, registers, rest="", frame=(0, 0, 0), seconds=None):
    """What ptxas -v prints for one kernel."""
    lines = [f"ptxas info    : Compiling entry function '{kernel}' for '{arch}'",
             f"ptxas info    : Function properties for {kernel}",
             "    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads".format(*frame),
             f"ptxas info    : Used {registers} registers{rest}"]
    return lines + ([f"ptxas info    : Compile time = {seconds * 1000:.3f} ms"] if seconds else [])


def test_figures_of_old_and_new_releases():
    old = parse_log("\n".join(["ptxas info    : 36 bytes gmem, 16 bytes cmem[3]",
                               *ptxas("k", "sm_80", 40, ", 16 bytes smem, 376 bytes cmem[0], 8 bytes cmem[2]")]))
    assert old.kernels == [KernelReport("k", "sm_80", 40, stack=0, spill_stores=0, spill_loads=0, shared=16,
                                        constant=384)]
    new = parse_log("\n".join(ptxas("k", "sm_90a", 168, ", used 2 barriers, 384 bytes cumulative stack size",
                                    (384, 64, 128), 0.0181)))
    assert new.kernels == [KernelReport("k", "sm_90a", 168, 384, 384, 64, 128, barriers=2, seconds=0.0181)]
    assert old.notes == new.notes == []


@pytest.mark.parametrize("path", sorted(DATA.glob("*.log")), ids=lambda p: p.stem)
def test_real_logs_have_figures_for_every_kernel_and_no_notes(path):
    log = parse_log(path.read_text())
    assert len(log.kernels) >= 5 and log.notes == [] and log.unattributed == 0
    assert all(k.registers and k.spill_loads is not None and k.arch == path.stem.split("-")[-1] for k in log.kernels)


def test_whole_build_with_colours_prefixes_and_carriage_returns():
    one, two = ptxas("a", "sm_80", 32), ptxas("b", "sm_90", 64, frame=(8, 4, 4))
    log = parse_log("\r\n".join([
        "[1/3] Building CUDA object a.o", *(f"\x1b[36m{x}\x1b[0m" for x in one), "[2/3] Building CUDA object b.o", *two,
        "#12 34.5 " + "ptxas info    : Compiling entry function 'c' for 'sm_80'",
        "#13 34.6 " + "ptxas info    : Compiling entry function 'd' for 'sm_80'",
        "#12 35.1 " + "ptxas info    : Used 12 registers",
        "#13 35.9 " + "ptxas info    : Used 13 registers",
    ]))
    assert {(k.kernel, k.registers) for k in log.kernels} == {("a", 32), ("b", 64), ("c", 12), ("d", 13)}
    assert next(k for k in log.kernels if k.kernel == "b").spill_stores == 4


def test_interleaved_figures_are_given_to_nobody():
    """Two ptxas write to one terminal without a prefix: whose registers these are cannot be told."""
    log = parse_log("\n".join([
        "ptxas info    : Compiling entry function 'a' for 'sm_80'",
        "ptxas info    : Compiling entry function 'b' for 'sm_80'",
        "ptxas info    : Used 12 registers", "ptxas info    : Used 13 registers"]))
    assert [k.registers for k in log.kernels] == [None, None] and log.unattributed >= 1


def test_figures_of_called_functions_are_not_the_kernels():
    log = parse_log("\n".join([*ptxas("k", "sm_80", 24), "ptxas info    : Function properties for _Z9slow_pathdi",
                               "    512 bytes stack frame, 256 bytes spill stores, 256 bytes spill loads"]))
    assert [(k.kernel, k.stack) for k in log.kernels] == [("k", 0)]


LONG = "_ZN7cutlass13device_kernelI" + "N4cute5tupleIJNS_1CILi128EEE" * 120 + "EEvT_"
SERIAL = "Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
MESSAGES = {
    "C7504": "Potential Performance Loss: 'setmaxnreg' ignored to maintain compatibility across compilation units.",
    "C7508": "Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.",
    "C7509": SERIAL + f"the presence of Extern calls in the function '{LONG}'",
    "C7510": SERIAL + f"wgmma pipeline crossing function boundary at a function call in the function '{LONG}'",
    "C7511": SERIAL + f"insufficient register resources for the wgmma pipeline in the function '{LONG}'",
    "C7515": SERIAL + "non wgmma instructions defining accumulator registers of a wgmma between start and end of the "
                      f"pipeline stage in the function '{LONG}'",
    "C7517": "warpgroup.wait is injected in around line 27304 by compiler to allow use of registers defined by GMMA in "
             f"function '{LONG}'",
    "C7519": f"warpgroup.arrive is injected in around line 6317 by compiler to allow use of registers in GMMA in "
             f"function '{LONG}'",
}


@pytest.mark.parametrize("code", MESSAGES)
def test_known_notes_have_their_own_cause_and_advice(code):
    (note,) = parse_log(f"ptxas info    : ({code}) {MESSAGES[code]}").notes
    assert note.code == code and note.severity == "info" and MESSAGES[code] in note.text
    assert note.kernel == (LONG if LONG in MESSAGES[code] else None) and len(LONG) > 1000
    others = [parse_log(f"ptxas info    : ({c}) {m}").notes[0] for c, m in MESSAGES.items() if c != code]
    assert note.cause not in [o.cause for o in others] and note.advice not in [o.advice for o in others]
    assert serialises(note) == (code in {"C7509", "C7510", "C7511", "C7515"})
    assert needs_check(note) == (code in {"C7517", "C7519"})
    assert parse_log(f"ptxas info : {MESSAGES[code]}").notes[0].cause == note.cause  # older releases print no code


def test_advice_fits_the_cause():
    advice = {c: parse_log(f"ptxas info : ({c}) {m}").notes[0].advice for c, m in MESSAGES.items()}
    assert "-DNDEBUG" in advice["C7509"] and "nline the function" in advice["C7510"] and "-O0" in advice["C7515"]
    assert "launch bounds" in advice["C7508"] and "-rdc" in advice["C7504"] and "reference" in advice["C7517"]


def test_wording_of_13_5_is_the_same_note():
    (note,) = parse_log("ptxas info    : (C7517) wgmma.wait_group is injected in around line 1167 by compiler to allow "
                        "use of registers defined by GMMA in function 'warpgroup'").notes
    assert note.kernel == "warpgroup" and needs_check(note)


@pytest.mark.parametrize("line, severity, code, kernel, text", [
    ("ptxas info    : (C7999) Something new in function 'k'", "info", "C7999", "k",
     "(C7999) Something new in function 'k'"),
    ("ptxas error   : Entry function 'k' uses too much shared data (0x13880 bytes, 0xc000 max)", "error", None, "k",
     "uses too much shared data"),
    ("ptxas fatal   : (C7602) Insufficient registers (24) to compile instruction at line 1057 in function tensor. Try "
     "to compile with register target of 28 or higher.", "error", "C7602", "tensor", "register target of 28"),
    ("ptxas k.ptx, line 9; fatal   : Unsupported .version 9.5; current version is '8.4'", "error", None, None,
     "k.ptx, line 9; Unsupported .version 9.5"),
    ("ptxas warning : Registers are spilled to local memory in function 'k', 148 bytes spill stores, 148 bytes spill "
     "loads", "warning", None, "k", "148 bytes"),
    ("k.cu(2): error: identifier \"x\" is undefined", "error", None, None, "k.cu(2): identifier"),
    ("k.cu(2): warning #177-D: variable \"y\" was declared but never referenced", "warning", None, None, "#177-D"),
    ("nvcc warning : Support for offline compilation is deprecated", "warning", None, None, "deprecated"),
])
def test_other_messages_are_kept_in_their_own_words(line, severity, code, kernel, text):
    (note,) = parse_log(line).notes
    assert (note.severity, note.code, note.kernel) == (severity, code, kernel) and text in note.text


def test_odd_numbers_are_skipped():
    start = ptxas("k", "sm_80", 24)
    many = "9" * 5000
    log = parse_log("\n".join([*start, "ptxas info    : Compile time = 1.5.5 ms",
                               f"ptxas info    : Used {many} registers",
                               f"{many} bytes stack frame, 1 bytes spill stores, 1 bytes spill loads"]))
    assert [(k.registers, k.seconds, k.stack) for k in log.kernels] == [(24, None, 0)]


def test_repeated_notes_count_once():
    line = f"ptxas info    : (C7508) {MESSAGES['C7508']}\n"
    assert len(parse_log(line * 50).notes) == 1


def test_a_long_log_is_quick():
    lines = [x for i in range(4000) for x in ptxas(f"k{i}", "sm_80", 32, ", 376 bytes cmem[0]")]
    text = "\n".join([*lines, "x" * 500_000])
    start = time.perf_counter()
    assert len(parse_log(text).kernels) == 4000
    assert time.perf_counter() - start < 5


PIECES = ["ptxas info    : ", "Compiling entry function 'k' for 'sm_80'", "Used 12 registers", ", used 1 barriers",
          "\n", "\r\n", "Function properties for k", "1 bytes stack frame, 2 bytes spill stores, 3 bytes spill loads",
          "(C7510) ", "'", "(", "in function ", "\x1b[31m", "Compile time = 1.5.5 ms", "k.cu(3): error: ",
          "ptxas x, line 3; fatal : ", "Used " + "9" * 5000 + " registers"]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=20), max_size=20))
def test_nothing_breaks_the_reader(pieces):
    log = parse_log("".join(pieces))
    assert all(n.text is not None and n.severity in {"info", "warning", "error"} for n in log.notes)


@pytest.mark.parametrize("mangled, name", [
    ("_Z8scale_byILi3EfEvPT0_", "void scale_by<3, float>(float*)"), ("axpy", "axpy"), ("_Z", "_Z"), ("_Zé", "_Zé"),
    ("_ZN2ns1kEPf", "ns::k(float*)"), ("_Z" + "9" * 50, "_Z" + "9" * 50),
])
def test_demangle(mangled, name):
    assert names.demangle(mangled) == name


def test_demangling_without_a_cxx_runtime(monkeypatch):
    monkeypatch.setattr(names, "_native", lambda: None)
    names.demangle.cache_clear()
    assert names.demangle("_ZN2ns1kEPf") == "ns::k(float*)"
    assert names.demangle("_Z" + "9" * 50) == "_Z" + "9" * 50
    names.demangle.cache_clear()


def test_thousands_of_long_names_are_quick():
    start = time.perf_counter()
    for i in range(3000):
        names.demangle("_Z" + "1kI" + "Li1E" * 300 + f"Li{i}EEvv")
    assert time.perf_counter() - start < 3
