"""Step decomposition on timelines whose answer is known, and the timeline export."""

import gzip
import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brakecheck.evidence import kineto, perfetto, step_report, steps
from brakecheck.evidence.table import Recording, kernel_frame, operator_frame
from brakecheck.model import UsageError

DATA = Path(__file__).parent / "data" / "kineto"


def recording(rows, waits=(), marks=()):
    """rows: (kind, start, end, launch, launch end, more)."""
    kernels = [{"kind": kind, "name": kind, "start": start, "duration": end - start, "launch": launch,
                "launch_duration": None if launch is None else returned - launch, "thread": 1, "rank": 0, "step": 7,
                **more} for kind, start, end, launch, returned, more in rows]
    columns = {c: [k.get(c) for k in kernels] for c in sorted({c for k in kernels for c in k})}
    operators = operator_frame({
        "name": ["cudaDeviceSynchronize"] * len(waits), "kind": ["wait"] * len(waits), "thread": [1] * len(waits),
        "rank": [0] * len(waits), "start": [a for a, _ in waits], "duration": [b - a for a, b in waits]})
    return Recording("kineto", "simulated", kernel_frame(columns), operators,
                     metadata={"steps": [{"rank": r, "step": s, "start": a, "end": b} for r, s, a, b in marks]})


def parts(found, row=0):
    data = found.row(row, named=True)
    return {p: data[p] for p in steps.PARTS if data[p]}


def test_a_known_timeline():
    found = steps.decompose(recording([
        ("kernel", 100, 200, 80, 90, {}),        # the step begins at 50: 40 until the launch returned, 10 in the queue
        ("collective", 150, 260, 140, 145, {}),  # 50 overlap, 60 exposed
        ("memcpy", 250, 300, 240, 245, {}),      # 40 copy
        ("kernel", 500, 600, 480, 490, {}),      # gap 300-500: launch returned at 490, the thread waited 310-400
    ], waits=[(310, 400)], marks=[(0, 7, 50, 650)]))
    assert parts(found) == {"compute": 150, "overlap": 50, "communication": 60, "copy": 40, "idle_host": 40 + 100 + 50,
                            "idle_synchronisation": 90, "idle_queue": 20}
    assert found["duration"][0] == 600 == sum(parts(found).values())
    assert found["wire"][0] is None and found["carried"][0] == 0


def test_a_kernel_without_launch_leaves_the_gap_unexplained():
    found = steps.decompose(recording([("kernel", 100, 200, 80, 90, {}),
                                       ("kernel", 260, 300, None, None, {"step": None})],
                                      marks=[(0, 7, 90, 300)]))
    assert parts(found) == {"compute": 140, "idle_unknown": 60, "idle_queue": 10}
    assert found["carried"][0] == 40


def test_without_marks_the_numbers_of_the_kernels_are_the_steps():
    found = steps.decompose(recording([("kernel", 10, 20, 5, 8, {"step": 1}), ("kernel", 40, 60, 30, 35, {"step": 2})]))
    assert found.select("step", "start", "duration").rows() == [(1, 5, 25), (2, 30, 30)]
    assert parts(found, 0) == {"compute": 10, "idle_host": 3 + 10, "idle_queue": 2}


def test_wire_and_skew_of_two_ranks():
    both = {"group": "0", "collective": "allreduce"}
    found = steps.decompose(recording([
        ("collective", 100, 300, 90, 95, both), ("collective", 400, 450, 390, 395, both),
        ("kernel", 1000, 1100, 900, 950, {"rank": 1}), ("collective", 1200, 1250, 1190, 1195, {**both, "rank": 1}),
        ("collective", 1300, 1420, 1290, 1295, {**both, "rank": 1})],
        marks=[(0, 7, 100, 500), (1, 7, 1000, 1500)]))
    first, second = found.sort("rank").rows(named=True)
    assert (first["communication"], first["wire"], first["skew"]) == (250, 100, 150)
    assert (second["communication"], second["wire"], second["skew"]) == (170, 100, 70)


def test_collectives_that_not_all_ranks_have_stay_whole():
    rows = [("collective", 100, 300, 90, 95, {"group": "0"}), ("collective", 400, 450, 390, 395, {"group": "0"}),
            ("collective", 100, 300, 90, 95, {"group": "0", "rank": 1})]
    assert steps.with_wire(recording(rows))["wire"].null_count() == 3


def test_gradient_synchronisation_in_stages():
    inside = {"path": "FullyShardedDataParallel._post_backward_hook > c10d::_reduce_scatter_base_",
              "operator": "record_param_comms"}
    found = steps.gradient_sync(recording([
        ("kernel", 50, 60, 40, 45, {**inside, "operator": "aten::chunk_cat"}),
        ("collective", 100, 180, 60, 72, {**inside, "collective": "reduce_scatter", "bytes": 4096}),
        ("memcpy", 200, 207, 190, 193, {**inside, "bytes": 64}),
        ("kernel", 300, 400, 290, 295, {"path": "aten::mm", "operator": "aten::mm"})]))
    stages, copies = found.rows(named=True)
    assert (stages["collective"], stages["calls"], stages["bytes"]) == ("reduce_scatter", 1, 4096)
    assert (stages["launch"], stages["wait"], stages["collective_time"], stages["copy"]) == (12, 28, 80, None)
    assert (copies["collective"], copies["copy"], copies["calls"]) == (None, 17, 2)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.sampled_from(["kernel", "collective", "memcpy"]), st.integers(0, 300),
                               st.integers(1, 80), st.none() | st.integers(0, 100), st.integers(0, 20)), max_size=12),
       waits=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=4),
       cuts=st.lists(st.integers(0, 400), min_size=2, max_size=4, unique=True))
def test_parts_add_up(rows, waits, cuts):
    cuts = sorted(cuts)
    found = steps.decompose(recording(
        [(kind, start, start + length, *((None, None) if ahead is None else (start - ahead, start - ahead + took)), {})
         for kind, start, length, ahead, took in rows], [(a, a + n) for a, n in waits],
        [(0, i, a, b) for i, (a, b) in enumerate(zip(cuts, cuts[1:]))]))
    assert found.height == len(cuts) - 1
    assert found.select(pl.sum_horizontal(steps.PARTS) == pl.col("duration")).to_series().all()
    assert found.select(pl.min_horizontal(steps.PARTS) >= 0).to_series().all()


@pytest.mark.parametrize("name", ["nccl", "qwen-0.5b-h100", "qwen-0.5b-mi300", "tiny-base"])
def test_parts_of_real_steps_add_up(name):
    found = steps.decompose(kineto.read(DATA / f"{name}.json.gz"))
    assert found.height >= 1
    assert found.select(pl.sum_horizontal(steps.PARTS) == pl.col("duration")).to_series().all()


def test_export_of_two_sides(tmp_path):
    sides = {"H100": kineto.read(DATA / "qwen-0.5b-h100.json.gz"),
             "MI300": kineto.read(DATA / "qwen-0.5b-mi300.json.gz")}
    path = tmp_path / "both.json.gz"
    count = perfetto.export(path, sides)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert len(events) == count
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["H100 device 0", "H100 host", "H100 steps",
                                      "MI300 device 2", "MI300 host", "MI300 steps"]
    assert [e["ts"] for e in events if e["ph"] == "X" and e["name"] == "step 6"] == [0, 0]
    on_device = [e for e in events if e["ph"] == "X" and names[e["pid"]] == "H100 device 0"]
    assert len(on_device) == sides["H100"].kernels.height
    arrows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) == sum(s.kernels["launch"].count() for s in sides.values())
    assert not list(tmp_path.glob("*.unfinished"))


def test_an_export_is_a_trace_again(tmp_path):
    path = tmp_path / "one.json"
    perfetto.export(path, {"a": kineto.read(DATA / "tiny-base.json.gz")})
    assert kineto.recognise(path.read_bytes()[:4096])


def test_nothing_to_export(tmp_path):
    with pytest.raises(UsageError, match="nothing to export"):
        perfetto.export(tmp_path / "x.json", {"a": Recording("ncu", "x", kernel_frame({}))})


def test_summary_of_steps_adds_up_and_is_said_in_one_line():
    summary = step_report.summarise(recording([
        ("kernel", 100, 200, 80, 90, {}), ("collective", 150, 260, 140, 145, {"bytes": 64}),
        ("kernel", 500, 600, 480, 490, {})], waits=[(310, 400)], marks=[(0, 7, 50, 650)]))
    row = summary["ranks"][0]
    assert (row["steps"], row["duration_ns"], sum(row["parts_ns"].values())) == (1, 600, 600)
    assert "wire_ns" not in row  # one rank cannot tell
    assert summary["synchronisation"] == [{"rank": 0, "calls": 1, "bytes": 64, "launch_ns": 5, "wait_ns": 5,
                                           "collective_ns": 110}]
    first, second = step_report.lines(summary)
    assert first.startswith("rank 0: one step, 600 ns: compute 25.0%, overlap 8.3%, communication 10.0%, idle")
    assert "synchronisation 15.0%" in first and "1 collectives a step" in second


def test_ranks_are_means_over_their_steps_and_cut_in_the_terminal():
    rows = [("kernel", 100 * i, 100 * i + 10 * (rank + 1), 100 * i, 100 * i, {"rank": rank, "step": i})
            for rank in range(10) for i in range(2)]
    marks = [(rank, i, 100 * i, 100 * i + 100) for rank in range(10) for i in range(2)]
    summary = step_report.summarise(recording(rows, marks=marks))
    assert [r["parts_ns"]["compute"] for r in summary["ranks"]] == [10.0 * (rank + 1) for rank in range(10)]
    assert step_report.lines(summary)[-1] == "2 more ranks: --json has all"


def test_a_recording_without_steps_has_no_summary():
    assert step_report.summarise(recording([("kernel", 10, 20, 5, 8, {"step": None})])) is None
