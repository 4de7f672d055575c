"""Hot spots by source line: from counters through the interface of ncu_report, from a source page, from a cubin."""

import gzip
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brakecheck.cli import main
from brakecheck.evidence import hotspots
from brakecheck.evidence.cubin import read_cubin
from brakecheck.model import BrakecheckError, UsageError

CUBINS = Path(__file__).parent / "data" / "cubins"
SASS = {0x100: "  LDG.E R2, desc[UR4][R2.64] ", 0x110: "FADD R5, R2, R5", 0x120: "@P0 BRA 0x180", 0x130: "EXIT"}
LINES = {0x100: ("k.cu", 12), 0x110: ("k.cu", 12), 0x120: ("k.cu", 13), 0x130: None}


class Metric:
    """As ncu_report.IMetric with instance values."""

    def __init__(self, values, correlated=True):
        self.keys, self.values, self.correlated = list(values), list(values.values()), correlated

    def has_correlation_ids(self):
        return self.correlated

    def correlation_ids(self):
        return Metric(dict(enumerate(self.keys)))

    def num_instances(self):
        return len(self.values)

    def value(self, i=None):
        return sum(self.values) if i is None else self.values[i]


class Source:
    def __init__(self, place):
        self.place = place

    def file_name(self):
        return self.place[0]

    def line(self):
        return self.place[1]


class Action:
    """As ncu_report.IAction."""

    NameBase_FUNCTION, NameBase_DEMANGLED, NameBase_MANGLED = 0, 1, 2

    def __init__(self, lines=LINES, **metrics):
        self.metrics, self.lines = metrics, lines

    def name(self, base=0):
        return "kernel(float*)"

    def metric_names(self):
        return tuple(self.metrics)

    def metric_by_name(self, name):
        return self.metrics.get(name)

    def sass_by_pc(self, address):
        return SASS.get(address, "")

    def source_info(self, address):
        place = self.lines.get(address)
        return Source(place) if place else None


class Context:
    def __init__(self, *actions):
        self.actions = actions

    def num_ranges(self):
        return 1

    def range_by_idx(self, _):
        return self

    def num_actions(self):
        return len(self.actions)

    def action_by_idx(self, i):
        return self.actions[i]


COUNTERS = {
    "inst_executed": Metric({0x100: 100, 0x110: 100, 0x120: 100, 0x130: 50}),
    "thread_inst_executed": Metric({0x100: 3200, 0x110: 1600, 0x120: 3200, 0x130: 1600}),
    "smsp__pcsamp_sample_count": Metric({0x100: 10, 0x110: 60, 0x120: 30}),
    "smsp__pcsamp_warps_issue_stalled_long_scoreboard": Metric({0x110: 55}),
    "smsp__pcsamp_warps_issue_stalled_wait": Metric({0x110: 5, 0x120: 20}),
    "smsp__pcsamp_warps_issue_stalled_wait_not_issued": Metric({0x100: 999}),
    "branch_inst_executed": Metric({0x120: 100}), "smsp__branch_targets_threads_divergent": Metric({0x120: 25}),
    "gpu__time_duration.sum": Metric({}, correlated=False),
}


def test_counters_of_a_report_come_by_source_line():
    (kernel,) = hotspots.from_report(Path("x"), load=lambda _: Context(Action(**COUNTERS)))
    assert (kernel.name, kernel.samples, kernel.divergent_share, kernel.notes) == ("kernel(float*)", 100, 0.25, ())
    first, second, third = kernel.spots
    assert (first.place, first.samples, first.share, first.active) == ("k.cu:12", 70, 0.7, 24)
    assert first.stalls == {"long_scoreboard": 55 / 60, "wait": 5 / 60}
    assert first.instructions == ("FADD R5, R2, R5", "LDG.E R2, desc[UR4][R2.64]")
    assert (second.place, second.branches, second.divergent_share, second.stalls) == ("k.cu:13", 100, 0.25, {"wait": 1})
    assert (third.place, third.samples, third.share) == ("EXIT", None, None)  # no line, no sample: unknown, not zero


def test_without_lines_each_instruction_is_a_spot_and_the_way_to_lines_is_said():
    (kernel,) = hotspots.from_report(Path("x"), load=lambda _: Context(Action(lines={}, **COUNTERS)))
    assert [s.place for s in kernel.spots[:2]] == ["FADD R5, R2, R5", "@P0 BRA 0x180"]
    assert any("-lineinfo" in note for note in kernel.notes)


def test_a_report_without_source_counters_says_how_to_record_them():
    (kernel,) = hotspots.from_report(Path("x"), load=lambda _: Context(Action(**{"gpu__time": Metric({}, False)})))
    assert kernel.spots == () and "SourceCounters" in kernel.notes[0]
    with pytest.raises(BrakecheckError, match="no profiled kernels"):
        hotspots.from_report(Path("x"), load=lambda _: Context())


HEADING = ",".join(f'"{c}"' for c in (
    "#", "Address", "Source", "Warp Stall Sampling (All Samples)", "Instructions Executed",
    "Thread Instructions Executed", "Divergent Branches", "stall_long_sb", "stall_wait", "stall_wait (not_issued)"))
PAGE = f""""Kernel Name","first(int)"
{HEADING}
"0","7f00","LDG.E R2, [R2]","1,000","10","320","0","900","100","77"
"1","7f10","@P0 BRA 0x20","500","10","160","4","0","500","0"
"Kernel Name","second"
{HEADING}
"0","7f00","EXIT","","3","96","","","",""
"""


def test_a_source_page_has_the_same_rows(tmp_path, capsys):
    page = tmp_path / "page.csv"
    page.write_text(PAGE)
    first, second = hotspots.from_csv(page)
    assert (first.name, first.samples, first.divergent_share, first.active) == ("first(int)", 1500, 0.4, 24)
    assert first.spots[0].stalls == {"long_sb": 0.9, "wait": 0.1} and first.spots[1].divergent_share == 0.4
    assert second.samples is None and "no stall samples" in second.notes[0]
    assert run("hotspots", page, "--kernel", "first") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1500 stall samples" in out and "66.7% LDG.E R2, [R2] long_sb 90%, wait 10%" in out and "second" not in out
    assert "16.0 of 32 active; 40% of branches diverge" in out


@given(st.text(max_size=200), st.integers(0, len(PAGE)))
@settings(max_examples=80, deadline=None)
def test_a_damaged_page_is_read_as_far_as_it_goes_or_refused(tmp_path_factory, noise, at):
    page = tmp_path_factory.mktemp("page") / "page.csv"
    page.write_text(PAGE[:at] + noise + PAGE[at:])
    try:
        assert all(k.spots for k in hotspots.from_csv(page))
    except BrakecheckError as error:
        assert error.todo


@pytest.fixture
def nvdisasm(tmp_path):
    """Answers with what nvdisasm printed for these cubins (tests/test_sass.py)."""
    from test_sass import STAND_IN

    tool = tmp_path / "nvdisasm"
    tool.write_text(STAND_IN.format(python=sys.executable, log=str(tmp_path / "calls"),
                                    data=str(CUBINS / "disassembly.json.gz")))
    tool.chmod(0o755)
    return tool


def test_a_cubin_tells_what_may_diverge_and_wait(nvdisasm, capsys):
    found = hotspots.from_cubins([read_cubin(CUBINS / "13.0-sm_90a.cubin")], nvdisasm)
    kernels = {k.name.split("(")[0]: k for k in found}
    spots = {s.place: s.static for s in kernels["axpy"].spots}
    assert spots == {"small.cu:17": {"early exits": 1, "global loads": 2}}  # the branch to itself behind EXIT is none
    local = {s.place: s.static for s in kernels["local_array"].spots}
    assert local["small.cu:38"] == {"local loads": 1} and local["small.cu:37"]["local stores"] == 16
    assert run("hotspots", CUBINS / "13.0-sm_90a.cubin", "--nvdisasm", nvdisasm, "--kernel", "^calls", "--json") == 0
    (calls,) = json.loads(capsys.readouterr().out)
    assert calls["kind"] == "static" and any("divergent branches" in s["static"] for s in calls["spots"])


@pytest.mark.network
def test_a_fat_binary_is_read_for_each_architecture(newest_nvdisasm, capsys):
    fat = CUBINS / "divergence-13.2.fatbin"
    assert run("hotspots", fat, "--nvdisasm", newest_nvdisasm, "--json") == 0
    kernels = json.loads(capsys.readouterr().out)
    assert [(k["name"], k["arch"]) for k in kernels] == [("divergence", "sm_80"), ("divergence", "sm_90a")]
    for kernel in kernels:  # line 27 of the source is the loop whose length differs by lane
        spot = kernel["spots"][0]
        assert (spot["file"], spot["line"]) == ("divergence.cu", 27) and spot["static"]["loops"] == 2


@pytest.mark.network
def test_diff_of_fat_binaries_keeps_architectures_apart(newest_nvdisasm, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(newest_nvdisasm.parent), prepend=os.pathsep)
    fat = CUBINS / "divergence-13.2.fatbin"
    packed = tmp_path / "library.so.gz"
    packed.write_bytes(gzip.compress(fat.read_bytes()))
    assert run("diff", fat, packed, "--json") == 3
    result = json.loads(capsys.readouterr().out)
    places = {d["case"] for d in result["deltas"]}
    assert len(result["deltas"]) == 2 and {"sm_80", "sm_90a"} == {p.split(":")[0] for p in places}


def test_a_program_without_device_code_is_refused(tmp_path, capsys):
    tool = tmp_path / "cuobjdump"
    tool.write_text("#!/bin/sh\necho 'cuobjdump info    : File does not contain device code' >&2\n")
    tool.chmod(0o755)
    fat = tmp_path / "program"
    fat.write_bytes(b"\x50\xed\x55\xba" + bytes(60))
    assert run("hotspots", fat, "--nvdisasm", tmp_path / "nvdisasm") == 65
    assert "does not contain device code" in capsys.readouterr().err


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code or 0


def test_what_is_wrong_is_said(nvdisasm, tmp_path, capsys):
    cubin = CUBINS / "13.0-sm_90a.cubin"
    for arguments, status, words in (
            ((cubin, "--kernel", "("), 64, "regular expression"), ((cubin, "--rows", "-1"), 64, "--rows"),
            ((cubin, "--nvdisasm", nvdisasm, "--kernel", "nothing"), UsageError.exit_code, "there are: axpy"),
            ((CUBINS / "13.0-sm_80.log",), 65, "hot spots are not in"), ((tmp_path / "none",), 65, "none")):
        assert run("hotspots", *arguments) == status
        assert words in capsys.readouterr().err
    profile = tmp_path / "profile"
    profile.mkdir()
    (profile / "manifest.json").write_text(json.dumps(
        {"schema": "brakecheck/profile/1", "evidence": [{"kind": "kineto", "path": "kineto"}]}))
    assert run("hotspots", profile) == 65 and "--with ncu" in capsys.readouterr().err
