"""Nsight Systems: real exports, schema drift, damage, and nsys stats CSV."""

import sqlite3
import time

import polars as pl
import pytest
from evidence_files import damaged, unpacked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brakecheck.evidence import nsys, nsys_csv
from brakecheck.model import BrakecheckError

SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nsys")
    return {n: unpacked(f"nsys/{n}.sqlite", folder) for n in ("two-gpu-before", "two-gpu-after", "graphs-2025.5")}


@pytest.fixture(scope="module")
def before(files):
    return nsys.read(files["two-gpu-before"])


def codes(recording):
    return {p.code: p for p in recording.problems}


def test_every_activity_becomes_a_row(before):
    kinds = dict(before.kernels["kind"].value_counts().iter_rows())
    assert kinds == {"kernel": 3944, "collective": 66, "memcpy": 1020, "memset": 269}
    attention = before.kernels.filter(pl.col("name").str.contains("flash_fwd_kernel"))
    assert attention.height == 68
    assert attention["duration"].sum() == 272_317_378
    assert before.kernels.filter(kind="memcpy")["bytes"].sum() == 272 + 8_046_134_272
    assert set(before.kernels["device"]) == {0, 1}
    assert [p["devices"] for p in before.metadata["processes"]] == [[0], [1]]


def test_operator_path_comes_from_the_ranges_of_emit_nvtx(before):
    collectives = before.kernels.filter(kind="collective").drop_nulls("path")
    assert collectives["path"].unique().to_list() == [
        "AllToAll4D > c10d::alltoall_base_ > record_param_comms > nccl:all_to_all > ncclGroupEnd"]
    products = before.kernels.filter(pl.col("name").str.starts_with("nvjet")).drop_nulls("path")
    assert products["operator"].unique().to_list() == ["aten::addmm"]
    assert not before.kernels["path"].str.contains("op_id").any()
    assert before.operators.filter(name="aten::addmm").height == 336
    assert (before.kernels["launch"] <= before.kernels["start"]).all()


def test_kernels_without_a_launch_row_are_counted_and_have_no_operator(before):
    assert codes(before)["no-launch"].count == 31
    assert before.kernels.filter(pl.col("launch").is_null())["path"].null_count() == 31


def test_versions_and_devices_are_the_recorded_ones(files, before):
    graphs = nsys.read(files["graphs-2025.5"])
    assert graphs.metadata["gpus"][0]["name"] == "NVIDIA GeForce RTX 3060"
    assert graphs.metadata["gpus"][0]["capability"] == "8.6"
    assert tuple(r.metadata["versions"]["nsys_schema"] for r in (graphs, before)) == ("3.24.0", "3.25.0")
    assert "gpus" not in before.metadata
    assert codes(before)["missing-table"].where == "TARGET_INFO_GPU"
    assert before.metadata["window_ns"] == [60111418026, 60411418026]


def test_graph_recorded_as_a_whole_is_named_and_its_kernels_are_not_invented(files):
    graphs = nsys.read(files["graphs-2025.5"])
    whole = graphs.kernels.filter(kind="graph")
    assert whole["duration"].to_list() == [1728, 1376]
    assert whole["grid_x"].null_count() == 2
    assert codes(graphs)["graph-level-trace"].count == 2
    assert "NVTX_EVENTS" in codes(graphs)["missing-table"].where
    assert graphs.operators is None and graphs.kernels["path"].null_count() == graphs.kernels.height


def altered(files, tmp_path, *statements, name="two-gpu-after"):
    path = tmp_path / "altered.sqlite"
    path.write_bytes(files[name].read_bytes())
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return path


def test_renamed_nvtx_table_without_text_ids_is_found_and_said(files, tmp_path):
    plain = nsys.read(files["two-gpu-after"])
    recording = nsys.read(altered(files, tmp_path, "ALTER TABLE NVTX_EVENTS RENAME TO NVTX_RANGES",
                                  "ALTER TABLE NVTX_RANGES DROP COLUMN textId"))
    assert codes(recording)["table-renamed"].where == "NVTX_RANGES"
    assert codes(recording)["missing-column"].where == "NVTX_RANGES.textId"
    addmm = pl.col("operator") == "aten::addmm"
    assert recording.kernels.filter(addmm).height == plain.kernels.filter(addmm).height > 0


def test_missing_kernel_table_is_named_and_is_not_zero_kernels(files, tmp_path):
    recording = nsys.read(altered(files, tmp_path, "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL"))
    problem = codes(recording)["missing-table"]
    assert any(p.where == "CUPTI_ACTIVITY_KIND_KERNEL" for p in recording.problems), problem
    assert set(recording.kernels["kind"]) == {"memcpy", "memset"}
    with pytest.raises(BrakecheckError, match="no device activity"):
        nsys.read(altered(files, tmp_path, "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL",
                          "DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY", "DROP TABLE CUPTI_ACTIVITY_KIND_MEMSET"))


def test_missing_columns_are_null_and_named(files, tmp_path):
    drop = "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN"
    recording = nsys.read(altered(files, tmp_path, f"{drop} registersPerThread", f"{drop} demangledName"))
    assert recording.kernels["registers"].null_count() == recording.kernels.height
    assert recording.kernels.filter(pl.col("name") == "flash_fwd_kernel").height == 60  # the short name
    assert {p.where.split(".")[1] for p in recording.problems if p.code == "missing-column"} == {
        "registersPerThread", "demangledName"}


def test_broken_durations_are_counted_and_never_summed(files, tmp_path):
    recording = nsys.read(altered(
        files, tmp_path, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start - 1 WHERE rowid = 1",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 9223372036854775807 WHERE rowid = 2",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = -9223372036854775808 WHERE rowid = 3",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 'late' WHERE rowid = 4",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET gridX = 1.5 WHERE rowid = 5"))
    assert codes(recording)["broken-duration"].count == 4
    assert {p.where: p.count for p in recording.problems if p.code == "wrong-type"} == {
        "CUPTI_ACTIVITY_KIND_KERNEL.end": 1, "CUPTI_ACTIVITY_KIND_KERNEL.gridX": 1}
    assert 0 < recording.kernels["duration"].sum() < 10**9
    assert recording.kernels.height == nsys.read(files["two-gpu-after"]).kernels.height


def made(tmp_path, ranges):
    """An export of an early schema: no event types, no text ids; three kernels, launched at 15, 25 and 115."""
    path = tmp_path / "made.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript("""
            CREATE TABLE StringIds (id INTEGER, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT, correlationId INT,
              globalPid INT, shortName INT, gridX INT, gridY INT, gridZ INT, blockX INT, blockY INT, blockZ INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, correlationId INT, globalTid INT);
            CREATE TABLE NVTX_EVENTS (start INT, end INT, globalTid INT, text TEXT);
            INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'split_k_reduce');""")
        process, thread = 5 << 24, (5 << 24) | 77
        for i, (launch, name) in enumerate([(15, 1), (25, 2), (115, 1)]):
            connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,0,7,?,?,?,8,1,1,128,1,1)",
                               (launch + 500, launch + 507, i, process, name))
            connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?)",
                               (launch, launch + 2, i, thread))
        connection.executemany("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?)", [(a, b, thread, t) for a, b, t in ranges])
    connection.close()
    return path


def test_steps_shapes_and_positions_come_from_the_ranges(tmp_path):
    operator = "aten::mm, seq = {}, op_id = {}, sizes = [[2, 3], [3, 4]]"
    recording = nsys.read(made(tmp_path, [(0, 99, "step 1"), (10, 40, operator.format(1, 5)), (100, 199, "step 2"),
                                          (110, 140, operator.format(2, 9)), (150, 160, "eval")]))
    assert recording.kernels.select("name", "step", "path", "operator", "position", "shapes", "thread").rows() == [
        ("gemm", 1, "step > aten::mm", "aten::mm", 0, "[[2, 3], [3, 4]]", 77),
        ("split_k_reduce", 1, "step > aten::mm", "aten::mm", 1, "[[2, 3], [3, 4]]", 77),
        ("gemm", 2, "step > aten::mm", "aten::mm", 0, "[[2, 3], [3, 4]]", 77)]
    assert recording.operators.select("name", "step", "depth", "duration").rows() == [
        ("aten::mm", 1, 1, 30), ("aten::mm", 2, 1, 30)]


def test_plain_ranges_are_an_nvtx_path_and_no_operator(tmp_path):
    recording = nsys.read(made(tmp_path, [(0, 99, "forward"), (10, 20, "attention")]))
    assert recording.kernels["nvtx"].to_list() == ["forward > attention", "forward", None]
    assert recording.kernels["path"].null_count() == recording.kernels["operator"].null_count() == 3
    assert recording.operators is None


def test_text_in_place_of_a_database_is_refused(tmp_path):
    path = tmp_path / "a.sqlite"
    path.write_text("not a database at all, just some text that is long enough to be read")
    with pytest.raises(BrakecheckError, match="damaged") as error:
        nsys.read(path)
    assert "nsys export" in error.value.todo
    with pytest.raises(BrakecheckError, match="cannot open"):
        nsys.read(tmp_path / "absent.sqlite")
    with sqlite3.connect(tmp_path / "other.sqlite") as connection:
        connection.execute("CREATE TABLE customers (id INTEGER)")
    connection.close()
    with pytest.raises(BrakecheckError, match="no Nsight Systems export") as error:
        nsys.read(tmp_path / "other.sqlite")
    assert "customers" in error.value.where


@SLOW
@given(cut=st.integers(0, 389_120), flips=st.lists(st.tuples(st.integers(0, 389_120), st.integers(0, 7)), max_size=40))
def test_damaged_database_is_an_error_or_a_recording(files, tmp_path, cut, flips):
    path = tmp_path / "damaged.sqlite"
    path.write_bytes(damaged(files["graphs-2025.5"].read_bytes(), max(cut, 1), flips))
    begin = time.monotonic()
    try:
        recording = nsys.read(path)
    except BrakecheckError as error:
        assert error.where and error.todo
    else:
        assert recording.kernels.height < path.stat().st_size
        assert (recording.kernels["duration"].drop_nulls() >= 0).all()
    assert time.monotonic() - begin < 20


TRACE = """NOTICE: Existing SQLite export found: report.sqlite

Processing [report.sqlite] with [cuda_gpu_trace.py]...
Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),\
Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name
9961685,2707098,67,1,2,2304,128,1,1,160,0.000,0.025,,,,,NVIDIA H100 (1),1,,7,"kernel<int, 3>(float*)"
5000000000,1000000,2,,,,,,,,,,2.000,1000.0,Host,Device,NVIDIA H100 (1),1,,7,[CUDA memcpy Host-to-Device]
"""
SUMMARY = """Time (%),Total Time (us),Instances,Avg (us),Med (us),Min (us),Max (us),StdDev (us),Name
54.5,"600,000.5",120,"5,000.0",4999,4000,6000,100.5,"gemm<a,b>"
18.2,200000,120,1666.6,,,,,ncclDevKernel_AllReduce
"""


def test_trace_csv_has_single_activities_in_base_units():
    recording = nsys_csv.parse(TRACE)
    kernel, copy = recording.kernels.to_dicts()
    assert (kernel["name"], kernel["duration"], kernel["grid_z"], kernel["block_x"]) == (
        "kernel<int, 3>(float*)", 2707098, 2304, 128)
    assert (kernel["shared_dynamic"], kernel["device"], kernel["stream"], kernel["registers"]) == (25_000, 1, 7, 160)
    assert (copy["kind"], copy["bytes"], copy["grid_x"]) == ("memcpy", 2_000_000, None)
    assert recording.metadata["gpus"] == [{"name": "NVIDIA H100"}]


def test_summary_csv_keeps_statistics_and_makes_up_no_call():
    recording = nsys_csv.parse(TRACE + "\n" + SUMMARY + "cut,off\n")
    row = recording.kernels.to_dicts()[2]
    assert row["name"] == "gemm<a,b>" and row["duration"] is None
    values = {c["counter"]: c["value"] for c in recording.counters.filter(kernel=2).iter_rows(named=True)}
    assert values == {"total": 600_000_500, "instances": 120, "average": 5e6, "median": 4_999_000, "least": 4e6,
                      "largest": 6e6, "standard_deviation": 100_500}
    assert recording.kernels["kind"].to_list() == ["kernel", "memcpy", "kernel", "collective"]
    assert recording.metadata["reports"] == ["trace", "kernels"]
    assert codes(recording)["foreign-line"].count == 1
    assert "median" not in {c["counter"] for c in recording.counters.filter(kernel=3).iter_rows(named=True)}


def test_old_headings_and_ranges_are_read():
    old = nsys_csv.parse("Time(%),Total Time (ns),Instances,Average,Minimum,Maximum,Name\n10.0,100,4,25,20,30,k\n")
    assert dict(old.counters.select("counter", "value").iter_rows())["average"] == 25
    ranges = nsys_csv.parse("Time (%),Total Time (ns),Instances,Avg (ns),Style,Range\n95.0,3481709,1,3481709,PushPop,"
                            "step\n")
    assert ranges.metadata["ranges"] == [{"name": "step", "total": 3481709, "instances": 1, "average": 3481709}]


@SLOW
@given(cut=st.integers(0, len(TRACE + SUMMARY)), insert=st.text(max_size=30), at=st.integers(0, 900),
       huge=st.sampled_from(["9" * 400, "1e308", "-1", "nan", "0x10", '"', "1,2,3"]))
def test_damaged_nsys_csv_is_an_error_or_a_recording(cut, insert, at, huge):
    text = (TRACE + "\n" + SUMMARY)[:cut]
    text = text[:at] + insert + text[at:].replace("2707098", huge)
    try:
        recording = nsys_csv.parse(text)
    except BrakecheckError as error:
        assert error.where and error.todo
    else:
        assert recording.kind == "nsys-csv" and recording.metadata["reports"]
