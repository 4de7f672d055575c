"""Recordings of an H200 (tests/data/SOURCE.md says how they were made), from the file to the answer. The figures were
found by hand in the files: sums over their JSON, or counts that follow from the sources of the kernels."""

import gzip
import json
import lzma
import math
from pathlib import Path

import pytest

from brakecheck.cli import main
from brakecheck.evidence import hotspots, kineto, workload
from brakecheck.evidence.diff import diff
from brakecheck.evidence.diff_report import judge
from brakecheck.evidence.recognise import open_evidence
from brakecheck.evidence.step_report import summarise

DATA = Path(__file__).parent / "data"
FLASH, MATH, GROUPED = (DATA / "kineto" / f"h200-moe-{name}.json.gz" for name in ("flash-loop", "math-loop",
                                                                                   "flash-grouped"))
SDPA = "aten::scaled_dot_product_attention"


def events(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code or 0


# ---- traces of one layer of a mixture of experts: attention in one kernel, or in many --------------------------

@pytest.mark.parametrize(("path", "kernels", "copies", "sets", "nanoseconds"), [
    (FLASH, 384, 24, 27, 2_761_990), (MATH, 489, 24, 27, 6_654_855), (GROUPED, 327, 21, 27, 2_781_768)])
def test_every_device_row_has_its_place(path, kernels, copies, sets, nanoseconds):
    found = kineto.read(path)
    assert dict(found.kernels["kind"].value_counts().rows()) == {"kernel": kernels, "memcpy": copies, "memset": sets}
    assert found.kernels["duration"].sum() == nanoseconds
    assert found.kernels["path"].null_count() == found.kernels["step"].null_count() == 0
    assert {p.code for p in found.problems} == {"no-rank"}
    marks = {"router", "experts", "combine", "attention", "backward", "Optimizer.step#SGD.step"}
    assert set(found.kernels["nvtx"].drop_nulls()) == marks


def test_another_attention_is_one_row_of_the_diff():
    result = diff(open_evidence(FLASH), open_evidence(MATH))
    row = next(r for r in result.rows if r.place == SDPA)
    assert row.kind == "split" and row.operator == SDPA and row.text.startswith(f"{SDPA}: split (flash_fwd_kernel -> ")
    assert (row.base.calls, row.base.total, row.candidate.calls, row.candidate.total) == (3, 100_288, 3, 2_148_741)
    assert row.ratio == pytest.approx(21.4257, abs=1e-4) and "fewer than 5 a side" in row.why
    assert row == max(result.rows, key=lambda r: abs(r.difference))
    assert (result.total_base, result.total_candidate) == (2_761_990, 6_654_855)
    assert sum(r.difference for r in result.rows) == sum(result.parts.values()) == 6_654_855 - 2_761_990
    assert math.isclose(sum(r.share for r in result.rows), 1) and abs(result.unattributed_share) < 0.002
    removed = {r.kernel.split("<")[0].rpartition("::")[2] for r in result.rows if r.kind == "removed"}
    assert removed == {"flash_bwd_dot_do_o_kernel", "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel",
                       "flash_bwd_convert_dq_kernel"}
    verdict, headline, _ = judge(result)
    assert verdict.value == "WITHHELD" and headline.startswith("device time +140.9 %")


def test_attention_is_the_same_where_only_the_experts_differ():
    result = diff(open_evidence(FLASH), open_evidence(GROUPED))
    rows = [r for r in result.rows if r.place and SDPA in r.place]
    assert [(r.base.total, r.candidate.total, r.base.kernels) for r in rows] == [
        (100_288, 100_066, rows[0].candidate.kernels)]
    grouped = [r for r in result.rows if r.kind == "added" and "_grouped_mm" in r.place]
    calls = {part: sum(r.candidate.calls for r in grouped if part in r.kernel) for part in ("device_kernel", "prepare")}
    assert calls == {"device_kernel": 18, "prepare": 18}  # two products, forward and twice backward, three steps
    assert result.total_candidate - result.total_base == 19_778


def test_a_step_is_what_its_kernels_and_gaps_add_up_to():
    """Steps by hand: one stream, so kernels do not overlap, and what they leave of the mark is idle."""
    recorded = events(FLASH)
    device = [e for e in recorded if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    marks = [e for e in recorded if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")]
    assert len({e["tid"] for e in device}) == 1 and len(marks) == 3
    (rank,) = summarise(open_evidence(FLASH))["ranks"]
    assert rank["steps"] == 3
    assert rank["duration_ns"] == pytest.approx(sum(m["dur"] for m in marks) / 3 * 1000, rel=0.01)
    parts = rank["parts_ns"]
    assert sum(parts.values()) == pytest.approx(rank["duration_ns"], abs=3)
    busy = sum(e["dur"] for e in device) / 3 * 1000
    assert parts["compute"] + parts["copy"] == pytest.approx(busy, rel=0.02)  # a kernel may end behind its mark
    copies = sum(e["dur"] for e in device if e["cat"] != "kernel") / 3 * 1000
    assert parts["copy"] == pytest.approx(copies, rel=0.05)
    assert parts["idle_host"] > 0.8 * rank["duration_ns"]  # eager, and small: the host is what it waits for


def test_the_mix_of_the_layer():
    mix = workload.extract(open_evidence(FLASH))
    assert mix["time_ns"] == pytest.approx(2_761_990 / 3) and mix["source"]["steps"] == 3
    forward = next(e for e in mix["entries"] if e["operator"] == "aten::_flash_attention_forward")
    assert forward["share"] == pytest.approx(100_288 / 2_761_990) and forward["calls"] == 1
    assert forward["case"]["params"] == {"heads": 32, "length": 1024, "causal": True, "dim": 64}
    backward = next(e for e in mix["entries"] if e["operator"] == "aten::_flash_attention_backward")
    assert backward["case"]["params"] == forward["case"]["params"]  # its inputs lie as those of the forward pass
    product = next(e for e in mix["entries"] if e["operator"] == "aten::mm" and e["shapes"][1] == [1024, 3072])
    assert product["case"]["params"] == {"m": 2048, "n": 3072, "k": 1024, "b": "t"} and product["case"]["fit"] == "same"


# ---- profiles of two programs, compared in one command --------------------------------------------------------

def test_two_profiles_are_compared_in_one_command(tmp_path, capsys):
    timeline = tmp_path / "both.json.gz"
    assert run("diff", DATA / "profile" / "flash", DATA / "profile" / "math", "--json", "--timeline", timeline) == 3
    result = json.loads(capsys.readouterr().out)
    row = next(d for d in result["deltas"] if d["case"].startswith(SDPA))
    assert row["reason"] == "split" and row["ratio"] == pytest.approx(21.4, abs=0.1)
    assert [d["operator"] for d in result["deltas"][:1]] == [SDPA]
    steps = result["environment"]["decomposition"]
    assert [steps[s]["ranks"][0]["steps"] for s in ("base", "candidate")] == [2, 2]
    tracks = {e["args"]["name"] for e in events(timeline) if e["name"] == "process_name"}
    assert any(t.startswith("base") for t in tracks) and any(t.startswith("candidate") for t in tracks)


# ---- hot spots, by source line -----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    pytest.importorskip("ncu_report")
    folder = tmp_path_factory.mktemp("reports")
    found = {}
    for name in ("h200-divergence", "h200-gather-softmax"):
        found[name] = folder / f"{name}.ncu-rep"
        found[name].write_bytes(lzma.decompress((DATA / "ncu" / f"{name}.ncu-rep.xz").read_bytes()))
    return found


def test_lines_where_threads_part(reports):
    divergence, odd_even, scattered, straight = hotspots.from_report(reports["h200-divergence"])
    lines = {s.place.rpartition("/")[2]: s for s in odd_even.spots}
    # 2**20 threads are 32768 warps, and odd lanes part from even ones once in each.
    assert (lines["harness.cu:16"].branches, lines["harness.cu:16"].divergent) == (32768, 32768)
    assert [s.place for s in odd_even.spots if s.divergent] == [lines["harness.cu:16"].place]
    assert lines["harness.cu:17"].active == lines["harness.cu:19"].active == 16
    # Lanes turn 0 to 31 times, in some order: in turn t 32 - t are left, 496 of 31 x 32.
    hottest = divergence.spots[0]
    assert hottest.place.endswith("/divergence.cu:27") and hottest.share > 0.8
    assert hottest.active == pytest.approx(496 / 31, abs=0.1) and hottest.divergent_share == 0.25
    for copy in (scattered, straight):
        assert copy.active == 32 and copy.divergent_share == 0
        assert copy.spots[0].place.endswith("/harness.cu:9") and next(iter(copy.spots[0].stalls)) == "long_scoreboard"
    assert scattered.samples > 1.5 * straight.samples


def test_lines_of_a_triton_kernel(reports, capsys):
    (kernel,) = hotspots.from_report(reports["h200-gather-softmax"])
    assert kernel.name == "gather_softmax" and kernel.active == 32 and kernel.divergent_share == 0 and not kernel.notes
    places = [s.place.rpartition("/")[2] for s in kernel.spots]
    assert places[:3] == ["tri.py:11", "tri.py:12", "tri.py:14"]  # the load's first use, exp, division and store
    assert next(iter(kernel.spots[0].stalls)) == "long_scoreboard"
    assert run("hotspots", reports["h200-gather-softmax"], "--rows", 1) == 0
    assert "tri.py:11" in capsys.readouterr().out.replace("\n", "")


def test_ranges_of_a_report_and_of_its_csv(reports):
    report = open_evidence(reports["h200-divergence"]).kernels
    page = open_evidence(DATA / "ncu" / "h200-divergence.raw.csv.gz").kernels
    assert report["nvtx"].to_list() == ["step > diverging", "step > diverging", 'memory, "strided" > step', None]
    # The page does not escape the quotes of a name.
    assert page["nvtx"].to_list() == ["step > diverging", "step > diverging", 'memory, strided" > step', None]
    assert report["step"].to_list() == page["step"].to_list() == [0, 0, 0, None]
    assert report["duration"].to_list() == pytest.approx(page["duration"].to_list(), rel=0.01)
