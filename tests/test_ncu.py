"""Nsight Compute: real CSV, the variants of the format, and reports behind the ncu_report interface."""

import gzip
import lzma
import math

import pytest
from evidence_files import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from brakecheck.evidence import hotspots, ncu
from brakecheck.evidence.recognise import open_evidence
from brakecheck.evidence.units import base_unit, number, to_base
from brakecheck.model import BrakecheckError, UnavailableError

FILES = sorted((DATA / "ncu").glob("*.csv"))


def counters(recording, kernel=0):
    rows = recording.counters.filter(kernel=kernel).iter_rows(named=True)
    return {c["counter"]: (c["value"], c["unit"]) for c in rows}


@pytest.mark.parametrize(("name", "duration", "grid", "block"), [
    ("0001-ncu", 6460, 224, (32, 4)), ("0001-ncu-v2", 6750, 224, (32, 4)), ("0002-ncu", 8420, 448, (16, 4)),
    ("0002-ncu-v2", 18340, 1712, (16, 4)), ("0004-ncu", 4740, 2, (128, 1)), ("0004-ncu-v2", 4700, 2, (128, 1))])
def test_real_details_pages(name, duration, grid, block):
    recording = ncu.read_csv(DATA / "ncu" / f"kernel-{name}.details.csv")
    row, = recording.kernels.to_dicts()
    assert (row["duration"], row["grid_x"], (row["block_x"], row["block_y"])) == (duration, grid, block)
    assert recording.metadata["gpus"] == [{"capability": "12.0"}]
    assert recording.counters.height == 48 and not recording.problems
    assert row["registers"] is None  # this report did not collect it


def test_units_change_by_row_and_end_in_base_units():
    values = counters(ncu.read_csv(DATA / "ncu" / "kernel-0001-ncu.details.csv"))
    assert values["dram__bytes_read.sum"] == (2_330_000, "byte")
    assert values["dram__bytes_write.sum"] == (0, "byte")
    assert values["GPU Speed Of Light Throughput / Elapsed Cycles"] == (12_904, "cycle")
    assert values["GPU Speed Of Light Throughput / DRAM Frequency"] == (13_720_000_000, "hz")
    assert values["Memory Workload Analysis / Memory Throughput"] == (360_510_000_000, "byte/s")
    assert values["GPU Speed Of Light Throughput / Memory Throughput"] == (20.52, "%")
    assert values["flop_count_hp.sum"][0] is None  # n/a is unknown, not 0
    assert values["rule: IssueSlotUtilization"] == (79.48, "%")


@pytest.mark.parametrize(("value", "unit", "expected"), [
    ("2.33", "Mbyte", (2_330_000, "byte")), ("13,485", "", (13_485, "")), ("6.46", "us", (6460, "ns")),
    ("1.5", "cycle/usecond", (1_500_000, "hz")), ("1.99", "Ghz", (1.99e9, "hz")), ("3", "msecond", (3e6, "ns")),
    ("4", "Kbyte/block", (4000, "byte/block")), ("7", "register/thread", (7, "register/thread")),
    ("1", "Kinst", (1000, "inst")), ("5", "widget", (5, "widget")),
    ("n/a", "Gbyte/s", (None, "byte/s")), ("nan", "%", (None, "%"))])
def test_numbers_and_units(value, unit, expected):
    assert to_base(number(value), unit) == expected


@given(st.text(max_size=12), st.floats())
def test_units_never_raise_and_stay_finite(unit, value):
    scaled, name = to_base(value if math.isfinite(value) else None, unit)
    assert scaled is None or math.isfinite(scaled)
    assert base_unit(unit)[0] > 0 and isinstance(name, str)


BANNER = """==PROF== Connected to process 1
my program says "hello, world"
==PROF== Profiling "k" - 0: 0%....100% - 8 passes
"""
TWELVE = '''"ID","Process ID","Process Name","Host Name","Kernel Name","Kernel Time","Context","Stream","Section Name",\
"Metric Name","Metric Unit","Metric Value"
"0","1","python","h","void k<float, 2>(float *, int)","2020-Jan-01","1","7","Launch","launch__registers_per_thread",\
"register/thread","40"
"0","1","python","h","void k<float, 2>(float *, int)","2020-Jan-01","1","7","Launch","gpu__time_duration.sum",\
"usecond","13,485.5"
'''
FIFTEEN = '''"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",\
"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","python","h","k","1","7","(128, 1, 1)","(64, 2, 1)","0","9.0","GPU","Duration","us","2"
"1","1","python","h","k","1","7","(128, 1, 1)","(64, 2, 1)","0","9.0","GPU","Duration","ms","2"
==PROF== Disconnected from process 1
'''
RAW = '''"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",\
"Device","CC","device__attribute_display_name","dram__bytes_read.sum","gpu__time_duration.sum","launch__registers_per_thread"
"","","","","","","","","","","","","Mbyte","us","register/thread"
"0","1","python","h","a<int, 3>(int)","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","NVIDIA H100","2.33","1.25","32"
"1","1","python","h","b","1","7","(256, 1, 1)","(8, 1, 1)","0","9.0","NVIDIA H100","n/a","3,000","40"
'''


def test_twelve_columns_with_banner_and_program_output():
    row, = ncu.parse_csv(BANNER + TWELVE).kernels.to_dicts()
    assert (row["name"], row["registers"], row["duration"]) == ("void k<float, 2>(float *, int)", 40, 13_485_500)
    assert row["grid_x"] is None


def test_fifteen_columns_two_launches_of_one_kernel_are_two_rows():
    recording = ncu.parse_csv(BANNER + FIFTEEN)
    assert recording.kernels["duration"].to_list() == [2000, 2_000_000]
    assert recording.kernels["grid_y"].to_list() == [2, 2] and not recording.problems


def test_raw_page_takes_units_from_its_second_line():
    recording = ncu.parse_csv(BANNER + RAW)
    assert recording.kernels["name"].to_list() == ["a<int, 3>(int)", "b"]
    assert recording.kernels["duration"].to_list() == [1250, 3_000_000]
    assert counters(recording)["dram__bytes_read.sum"] == (2_330_000, "byte")
    assert counters(recording, 1)["dram__bytes_read.sum"] == (None, "byte")
    assert recording.metadata["gpus"] == [{"name": "NVIDIA H100", "capability": "9.0"}]


def test_foreign_lines_inside_the_table_are_counted():
    recording = ncu.parse_csv(FIFTEEN + "loss 0.3\nloss 0.2\n")
    problem, = recording.problems
    assert (problem.code, problem.count) == ("foreign-line", 2) and problem.where.startswith("line ")


@pytest.mark.parametrize("text", ["", BANNER, "a,b\n1,2\n", FIFTEEN.splitlines()[0]])
def test_csv_without_kernels_is_refused(text):
    with pytest.raises(BrakecheckError) as error:
        ncu.parse_csv(text, "x.csv")
    assert error.value.where == "x.csv" and error.value.todo


@settings(deadline=None, max_examples=60)
@given(which=st.sampled_from([TWELVE, FIFTEEN, RAW]), cut=st.integers(0, 1200), at=st.integers(0, 1200),
       insert=st.one_of(st.text(max_size=20), st.sampled_from(['"', '","', "9" * 400, "\0", "\n\n", "1e999", '"ID",'])))
def test_damaged_csv_is_an_error_or_a_recording(which, cut, at, insert):
    text = which[:cut]
    try:
        recording = ncu.parse_csv(text[:at] + insert + text[at:])
    except BrakecheckError as error:
        assert error.where and error.todo
    else:
        assert recording.kernels.height > 0
        assert all(math.isfinite(v) for v in recording.counters["value"].drop_nulls())


class Metric:
    def __init__(self, value, unit=""):
        self._value, self._unit = value, unit

    def has_value(self):
        return self._value is not None

    def value(self):
        return self._value

    def unit(self):
        return self._unit


class Domain:
    def __init__(self, *ranges):
        self.ranges = ranges

    def push_pop_ranges(self):
        return self.ranges

    def start_end_ranges(self):
        return ()


class State:
    def __init__(self, *ranges):
        self.ranges = ranges or ("step", "attention")

    def domains(self):
        return (0,)

    def domain_by_id(self, _):
        return Domain(*self.ranges)


class Action:
    """As ncu_report.IAction."""

    NameBase_FUNCTION, NameBase_DEMANGLED, NameBase_MANGLED = 0, 1, 2

    def __init__(self, name, state=None, **metrics):
        self._name, self._state, self._metrics = name, state, metrics

    def name(self, base=0):
        return {1: f"{self._name}(int)", 2: f"_Z{self._name}"}[base]

    def metric_names(self):
        return tuple(self._metrics)

    def metric_by_name(self, name):
        return self._metrics[name]

    def nvtx_state(self):
        return self._state


class Context:
    """As ncu_report.IContext, which is one range here and holds its own actions."""

    def __init__(self, *actions):
        self._actions = actions

    def num_ranges(self):
        return 1

    def range_by_idx(self, _):
        return self

    def num_actions(self):
        return len(self._actions)

    def action_by_idx(self, i):
        return self._actions[i]


METRICS = {
    "gpu__time_duration.sum": Metric(1250.0, "nsecond"), "launch__grid_dim_x": Metric(64),
    "launch__grid_dim_y": Metric(2),
    "launch__grid_dim_z": Metric(1), "launch__block_dim_x": Metric(128), "launch__registers_per_thread": Metric(32),
    "device__attribute_display_name": Metric("NVIDIA H200"), "dram__throughput": Metric(2.5, "Gbyte/second"),
    "device__attribute_compute_capability_major": Metric(9), "device__attribute_compute_capability_minor": Metric(0),
    "launch__stream_id": Metric(7), "lost": Metric(None), "broken": Metric(float("nan"), "%"),
}


def test_report_through_the_interface_of_ncu_report():
    context = Context(Action("k", State(), **METRICS), Action("l"))
    recording = ncu.read_report(DATA / "x.ncu-rep", load=lambda _: context)
    first, second = recording.kernels.to_dicts()
    assert (first["name"], first["raw_name"], first["nvtx"]) == ("k(int)", "_Zk", "step > attention")
    assert (first["duration"], first["grid_x"], first["grid_y"], first["block_x"]) == (1250, 64, 2, 128)
    assert (first["registers"], first["stream"]) == (32, 7)
    assert (second["duration"], second["nvtx"]) == (None, None)
    assert recording.metadata["gpus"] == [{"name": "NVIDIA H200", "capability": "9.0"}]
    values = counters(recording)
    assert values["dram__throughput"] == (2.5e9, "byte/s")
    assert "lost" not in values and values["broken"] == (None, "%")


def test_operators_of_a_report_are_calls_with_shapes():
    """Texts of ranges as Nsight Compute kept them on an H200."""
    outer = ("measured", "attention, op_id = 2973",
             "aten::linear, op_id = 2981, sizes = [[2, 1024, 1024], [3072, 1024], []], input_op_ids = [(2974,0)]")
    inner = [f"aten::mm, op_id = {n}, sizes = [[2048, 1024], [1024, 3072]], input_op_ids = [(2986,0), (2982,0)]"
             for n in (2988, 2990)]
    states = [State(*outer, inner[0]), State(*outer, inner[0]), State(*outer, inner[1]), State("measured")]
    context = Context(*(Action("k", s, **METRICS) for s in states))
    recording = ncu.read_report(DATA / "x.ncu-rep", load=lambda _: context)
    path = "measured > attention > aten::linear > aten::mm"
    rows = recording.kernels.select("path", "operator", "position", "shapes", "nvtx").rows()
    shapes = "[[2048, 1024], [1024, 3072]]"
    assert rows == [(path, "aten::mm", 0, shapes, path), (path, "aten::mm", 1, shapes, path),
                    (path, "aten::mm", 0, shapes, path), (None, None, None, None, "measured")]
    assert recording.metadata["inputs"] == [
        ("measured > attention", None), ("measured > attention > aten::linear", "[[2, 1024, 1024], [3072, 1024], []]"),
        (path, shapes)]


def test_empty_or_failing_report_is_refused():
    with pytest.raises(BrakecheckError, match="no profiled kernels"):
        ncu.read_report(DATA / "x.ncu-rep", load=lambda _: Context())

    def fails(_):
        raise RuntimeError("bad magic")

    with pytest.raises(BrakecheckError, match="bad magic"):
        ncu.read_report(DATA / "x.ncu-rep", load=fails)


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ncu_report", None)
    with pytest.raises(UnavailableError) as error:
        ncu.read_report(DATA / "x.ncu-rep")
    assert "pip install ncu-report" in error.value.todo


def test_garbage_report_is_refused_by_the_real_package(tmp_path):
    pytest.importorskip("ncu_report")
    path = tmp_path / "x.ncu-rep"
    path.write_bytes(b"NVR\0" + bytes(range(256)) * 8)
    with pytest.raises(BrakecheckError):
        ncu.read_report(path)


@pytest.fixture(scope="module")
def h200(tmp_path_factory):
    """The recorded report and its CSV pages, unpacked."""
    folder = tmp_path_factory.mktemp("ncu")
    for packed, opener in (("ncu-rep.xz", lzma.open), ("details.csv.gz", gzip.open), ("raw.csv.gz", gzip.open),
                           ("source.csv.gz", gzip.open)):
        with opener(DATA / "ncu" / f"h200-softmax.{packed}") as handle:
            (folder / f"h200-softmax.{packed.rpartition('.')[0]}").write_bytes(handle.read())
    return folder / "h200-softmax.ncu-rep"


@pytest.mark.parametrize("page", ["details", "raw"])
def test_report_and_its_csv_pages_agree(h200, page):
    """A real report, and the pages that ncu --import printed of it."""
    pytest.importorskip("ncu_report")
    report = h200
    whole, table = open_evidence(report), open_evidence(report.with_suffix(f".{page}.csv"))
    assert whole.kernels.height == table.kernels.height
    for ours, theirs in zip(whole.kernels.iter_rows(named=True), table.kernels.iter_rows(named=True)):
        assert [ours[c] for c in ("grid_x", "grid_y", "block_x", "registers")] == [
            theirs[c] for c in ("grid_x", "grid_y", "block_x", "registers")]
        assert ours["duration"] == pytest.approx(theirs["duration"], rel=0.01)  # pages print three digits
    for kernel in range(whole.kernels.height):
        ours, theirs = counters(whole, kernel), counters(table, kernel)
        both = [n for n in theirs if n in ours and None not in (ours[n][0], theirs[n][0])]
        assert page == "details" or len(both) > 20
        for name in both:
            assert theirs[name][1] in (ours[name][1], ""), name  # a page leaves some units out
            shown = max(ours[name][0], 0) if theirs[name][0] == 0 else ours[name][0]  # noise below 0 is printed as 0
            assert shown == pytest.approx(theirs[name][0], rel=0.02, abs=0.01), name


def test_hot_spots_of_a_report_and_of_its_source_page_agree(h200):
    pytest.importorskip("ncu_report")

    def newest(tool):
        raise AssertionError("no disassembler is needed")

    report = {k.name: k for k in hotspots.open_hotspots(h200, newest)}
    page = {k.name: k for k in hotspots.open_hotspots(h200.with_suffix(".source.csv"), newest)}
    first = next(n for n in report if "distribution_elementwise" in n)
    ours, theirs = report[first], next(iter(page.values()))
    assert ours.samples == pytest.approx(theirs.samples, rel=0.01) and ours.samples > 1000
    assert ours.spots[0].instructions[0].split()[0] == theirs.spots[0].instructions[0].split()[0]
    assert ours.spots[0].share == pytest.approx(theirs.spots[0].share, rel=0.05)
