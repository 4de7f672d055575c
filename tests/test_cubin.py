"""The cubin reader against ptxas's own figures, both ELF layouts, and damaged files."""

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brakecheck.evidence.buildlog import parse_log
from brakecheck.evidence.cubin import read_cubin, unpack
from brakecheck.evidence.lines import source_lines
from brakecheck.model import BrakecheckError

DATA = Path(__file__).parent / "data/cubins"
CUBINS = sorted(DATA.glob("*.cubin"))
SMALL = (DATA / "13.5-sm_90a.cubin").read_bytes()
OLD = (DATA / "12.4-sm_80.cubin").read_bytes()


@pytest.mark.parametrize("path", CUBINS, ids=lambda p: p.stem)
def test_figures_are_those_of_ptxas(path):
    cubin, log = read_cubin(path), parse_log(path.with_suffix(".log").read_text())
    reports = {r.kernel: r for r in log.kernels}
    assert {k.name for k in cubin.kernels} == set(reports) and len(reports) >= 5
    for kernel in cubin.kernels:
        report = reports[kernel.name]
        assert (kernel.registers, kernel.shared, kernel.frame) == (report.registers, report.shared or 0, report.stack)
        if report.barriers is not None:  # ptxas 12.0 does not print them
            assert kernel.barriers == report.barriers
        if report.stack_total is not None:
            assert kernel.stack == report.stack_total
        if report.constant is not None:  # not printed for sm_90 and newer
            assert kernel.constant == report.constant
        assert len(kernel.code) == kernel.section.size and len(kernel.code) % 128 == 0


@pytest.mark.parametrize("path", CUBINS, ids=lambda p: p.stem)
def test_header_says_layout_architecture_and_release(path):
    release, arch = path.stem.removeprefix("moved-").split("-")
    cubin = read_cubin(path)
    number = int(re.sub(r"\D", "", arch))
    assert cubin.arch == arch
    assert cubin.abi == (8 if release.startswith("13") or number >= 100 else 7)
    assert cubin.toolkit == tuple(map(int, release.split(".")))
    assert not cubin.relocatable


def test_bounds_cluster_and_parameters():
    kernels = {k.name: k for k in read_cubin(DATA / "12.4-sm_90a.cubin").kernels}
    assert kernels["tables"].max_threads == 256 and kernels["axpy"].max_threads is None
    assert kernels["cluster"].cluster == (2, 1, 1) and kernels["axpy"].cluster is None
    assert kernels["axpy"].parameters == (0x210, 24)  # two pointers, a float, an int
    assert kernels["calls"].stack == 0 and kernels["local_array"].stack == 64


def test_source_lines():
    cubin = read_cubin(DATA / "13.0-sm_80.cubin")
    kernel = next(k for k in cubin.kernels if k.name == "axpy")
    lines = source_lines(cubin)[kernel.section.number]
    text = (DATA / "small.cu").read_text().splitlines()
    assert lines[0].startswith("small.cu:") and 0 in lines
    assert any("y[i] = a * x[i] + y[i]" in text[int(x.split(":")[1]) - 1] for x in lines.values())


@pytest.mark.parametrize("data, what, offset", [
    (b"", "not an ELF file", 0),
    (b"#include <cuda.h>" * 10, "not an ELF file", 0),
    (b"\x50\xed\x55\xba" + bytes(90), "fat binary", 0),
    (b"\x7fELF", "header ends early", 4),
    (b"\x7fELF\x02\x01" + bytes(12) + b"\x3e" + bytes(60), "another machine", 18),
    (SMALL[:20_000], "outside the file", None),
])
def test_other_files_are_named(data, what, offset):
    with pytest.raises(BrakecheckError) as error:
        read_cubin(data, "x.cubin")
    assert what in error.value.what and error.value.todo
    assert re.fullmatch(r"x\.cubin, byte \d+", error.value.where)
    if offset is not None:
        assert error.value.where == f"x.cubin, byte {offset}"


def test_missing_file_is_an_error_not_a_trace(tmp_path):
    with pytest.raises(BrakecheckError, match="cannot read"):
        read_cubin(tmp_path / "none.cubin")


def test_damage_in_an_attribute_is_found_at_its_place():
    cubin = read_cubin(SMALL)
    section = cubin.by_name[".nv.info.axpy"]
    broken = bytearray(SMALL)
    struct.pack_into("<BBH", broken, section.offset, 4, 0x17, 60_000)
    with pytest.raises(BrakecheckError) as error:
        read_cubin(bytes(broken), "x")
    assert error.value.where == f"x, byte {section.offset}"


def readable(data):
    """Reads everything that is read lazily; only BrakecheckError may come out."""
    try:
        cubin = read_cubin(data, "fuzz")
        source_lines(cubin)
        for section in cubin.sections:
            cubin.relocations(section)
            cubin.content(section)
    except BrakecheckError as error:
        assert error.where and error.todo


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([SMALL, OLD]), st.integers(0, 25_000))
def test_truncation(data, size):
    readable(data[:size])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([SMALL, OLD]), st.data())
def test_bit_flips(data, draw):
    head = st.integers(0, 63)
    table = struct.unpack_from("<Q", data, 40)[0]
    places = draw.draw(st.lists(head | st.integers(table, len(data) - 1) | st.integers(0, len(data) - 1),
                                min_size=1, max_size=8))
    broken = bytearray(data)
    for place in places:
        broken[place] ^= 1 << draw.draw(st.integers(0, 7))
    readable(bytes(broken))


def test_unpack_reports_the_tools_words(tmp_path):
    tool = tmp_path / "cuobjdump"
    tool.write_text("#!/bin/sh\necho 'cuobjdump fatal : no device code' >&2\nexit 255\n")
    tool.chmod(0o755)
    with pytest.raises(BrakecheckError, match="no device code"):
        unpack(DATA / "small.cu", tool, tmp_path / "out")
    tool.write_text("#!/bin/sh\ntouch b.cubin a.cubin\n")
    assert [p.name for p in unpack(DATA / "small.cu", tool, tmp_path / "out")] == ["a.cubin", "b.cubin"]
