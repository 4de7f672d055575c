"""Alignment and diff: the real pairs, constructed changes, and what must hold for any two recordings."""

import gzip
import json
import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from evidence_files import DATA, unpacked
from hypothesis import given, settings
from hypothesis import strategies as st

from brakecheck.evidence import nccl_log, ncu, nsys, nsys_csv, percall
from brakecheck.evidence.diff import diff
from brakecheck.evidence.diff_report import judge, to_comparison
from brakecheck.evidence.kernel_names import family, place, plain
from brakecheck.evidence.sequence import common, gaps
from brakecheck.evidence.table import Recording, counter_frame, kernel_frame, operator_frame
from brakecheck.evidence.wording import contrast, duration, percent
from brakecheck.model import Comparison, State, Verdict


def recording(rows, kind="kineto", **metadata):
    """A recording of rows (name, duration, other columns)."""
    names = sorted({c for _, _, more in rows for c in more})
    columns = {"kind": ["kernel"] * len(rows), "name": [r[0] for r in rows], "duration": [r[1] for r in rows],
               "start": [1000 * i for i in range(len(rows))]}
    columns.update({n: [r[2].get(n) for r in rows] for n in names})
    return Recording(kind, "made.json", kernel_frame(columns), metadata=metadata)


def calls(name, path, mean, n=30, seed=0, spread=0.02, **more):
    """n calls around `mean` ns."""
    draw = random.Random(f"{seed}{name}{path}")
    return [(name, round(mean * draw.lognormvariate(0, spread)), {"path": path, "grid_x": 8, "block_x": 128, **more})
            for _ in range(n)]


def kinds(result):
    return sorted(r.kind for r in result.rows)


def adds_up(result):
    whole = (result.total_candidate or 0) - (result.total_base or 0)
    assert sum(r.difference for r in result.rows) == whole
    assert sum(result.parts.values()) == whole
    assert sum(r.calls_effect + r.per_call_effect for r in result.rows) == whole
    assert sum(r.unattributed for r in result.rows) == result.unattributed == result.parts["unattributed"]
    if whole:
        rounding = 2.0**-52 * sum(abs(r.share) for r in result.rows)  # large shares may cancel
        assert sum(r.share for r in result.rows) == pytest.approx(1, abs=1e-6 + rounding)
    assert sum(g.total_candidate - g.total_base for g in result.groups) == whole
    return True


# The real pairs -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def two_gpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-gpu")
    return [nsys.read(unpacked(f"nsys/two-gpu-{n}.sqlite", folder)) for n in ("before", "after")]


def test_two_gpu_pair_per_call_first_totals_second(two_gpu):
    result = diff(*two_gpu)
    assert result.key == "path" and adds_up(result)
    groups = {g.family: g for g in result.groups}
    attention = groups["flash_fwd_kernel"]
    assert (attention.calls_base, attention.calls_candidate) == (68, 60)
    assert (round(attention.total_base / 1e6, 1), round(attention.total_candidate / 1e6, 1)) == (272.3, 240.8)
    assert attention.kind == "same per call" and attention.ratio == pytest.approx(1, abs=0.01)
    collective = groups["ncclDevKernel_SendRecv"]
    assert collective.kind == "slower per call"
    assert (round(collective.total_base / collective.calls_base / 1e6, 3),
            round(collective.total_candidate / collective.calls_candidate / 1e6, 3)) == (0.385, 0.544)
    assert not collective.clear  # a few long waits make it: the interval of the mean reaches below 1
    assert {r.kind for r in result.rows if "flash" in r.kernel} == {"same per call"}
    assert abs(result.unattributed_share) < 0.05


def test_two_gpu_pair_says_at_the_top_what_is_not_comparable(two_gpu):
    result = diff(*two_gpu)
    words = "\n".join(result.warnings)
    assert "base is cut: a window of 300 ms" in words and "candidate is cut" in words
    assert "GPU of base and candidate is not recorded" in words and "no steps are marked" in words
    assert "no launch row" in words
    assert not result.totals_comparable
    assert to_comparison(result).verdict == Verdict.WITHHELD


@pytest.mark.parametrize("number", ["0001", "0004"])
def test_one_call_a_side_is_within_noise_and_said_so(number):
    result = diff(*(ncu.read_csv(DATA / "ncu" / f"kernel-{number}-ncu{v}.details.csv") for v in ("", "-v2")))
    row, = result.rows
    assert (row.kind, row.state) == ("undecided", State.UNDECIDED) and adds_up(result)
    assert "noise is not known" in row.text and row.low is None
    assert result.unattributed == row.difference != 0 and result.unattributed_share == 1


def test_another_grid_is_another_shape_and_no_regression():
    result = diff(*(ncu.read_csv(DATA / "ncu" / f"kernel-0002-ncu{v}.details.csv") for v in ("", "-v2")))
    row, = result.rows
    assert (row.kind, row.state) == ("other shape", State.UNDECIDED) and adds_up(result)
    assert "448x1x1" in row.text and "1712x1x1" in row.text and "not a regression" in row.text
    assert any("different input shapes" in w for w in result.warnings)
    changed = {c.what: (c.base, c.candidate) for c in row.changes}
    assert changed["dram__bytes_read.sum"] == (4_620_000, 17_570_000)


def test_one_model_on_two_gpus_lines_up_by_operator():
    kineto = pytest.importorskip("brakecheck.evidence.kineto")
    base, candidate = (kineto.read(DATA / "kineto" / f"qwen-0.5b-{gpu}.json.gz") for gpu in ("h100", "mi300"))
    result = diff(base, candidate)
    assert result.key == "path" and adds_up(result)
    assert result.warnings[0].startswith("different GPUs") and "MI300X" in result.warnings[0]
    attention = next(r for r in result.rows if r.kernel == "attn_fwd")
    assert attention.kind == "replaced" and attention.place.endswith("aten::_flash_attention_forward")
    assert "flash_fwd_kernel" in attention.base.kernels[0] and attention.base.calls == attention.candidate.calls == 24
    assert not [r for r in result.rows if r.state in (State.SLOWER, State.FASTER)]
    paired = sum(r.base.total or 0 for r in result.rows if r.base and r.candidate)
    assert paired / result.total_base > 0.95


# Constructed changes ------------------------------------------------------------------------------------------------

GEMM = "aten::linear > aten::addmm"


def test_renamed_kernel_at_the_same_call_is_replaced():
    base = recording([*calls("ampere_sgemm_128x64_tn", GEMM, 1000), *calls("softmax", "aten::softmax", 500)])
    candidate = recording([*calls("nvjet_tst_192x192_h", GEMM, 1200, seed=1), *calls("softmax", "aten::softmax", 500)])
    result = diff(base, candidate)
    assert kinds(result) == ["replaced", "same per call"] and adds_up(result)
    row = result.rows[0]
    assert (row.place, row.state) == (GEMM, State.SLOWER) and row.low > 1.15
    assert "ampere_sgemm_128x64_tn -> nvjet_tst_192x192_h" in row.text
    assert {c.what for c in row.changes} == {"kernel"}


def test_other_tile_of_one_family_is_a_choice_even_where_shapes_are_unknown():
    base = recording(calls("sm80_gemm_128x64", GEMM, 1000))
    candidate = recording([(n, t, {**m, "grid_x": 99}) for n, t, m in calls("sm90_gemm_256x128", GEMM, 1300)])
    row, = diff(base, candidate).rows
    assert (row.kind, row.state) == ("replaced", State.SLOWER)


def test_split_and_fused_compare_the_time_of_the_whole_call():
    one = recording(calls("gemm_bias_gelu", GEMM, 1000))
    two = recording([*calls("gemm_bias", GEMM, 900, position=0), *calls("gelu", GEMM, 300, position=1)])
    split, fused = diff(one, two), diff(two, one)
    assert kinds(split) == ["split"] and kinds(fused) == ["fused"] and adds_up(split) and adds_up(fused)
    assert split.rows[0].ratio == pytest.approx(1.2, rel=0.02) and split.rows[0].state == State.SLOWER
    assert split.rows[0].ratio == pytest.approx(1 / fused.rows[0].ratio)
    assert "gemm_bias_gelu -> gemm_bias + gelu" in split.rows[0].text


def test_replacement_below_a_renamed_operator_is_found_at_their_common_caller():
    base = recording(calls("gemm_a", "aten::linear > aten::addmm", 1000))
    candidate = recording(calls("gemm_b", "aten::linear > aten::_scaled_mm", 1000))
    assert kinds(diff(base, candidate)) == ["replaced"]
    unrelated = recording(calls("gemm_b", "aten::conv2d > aten::cudnn", 1000))
    assert kinds(diff(base, unrelated)) == ["added", "removed"]


def test_layers_are_one_place_and_are_aggregated():
    base = recording([r for i in range(6) for r in calls("gemm", f"blocks.{i}.mlp > aten::mm", 1000, n=5, seed=i)])
    row, = diff(base, base).rows
    assert (row.place, row.base.calls, row.kind) == ("blocks.*.mlp > aten::mm", 30, "same per call")
    assert row.base.median == pytest.approx(1000, rel=0.05) and row.base.mad > 0


def test_shapes_tell_another_choice_from_another_input():
    shape = '[[8, 8], [8, 8]]'
    base = recording(calls("gemm", "aten::mm", 1000, shapes=shape))
    choice = diff(base, recording([(name, time, {**more, "grid_x": 16})
                                   for name, time, more in calls("gemm", "aten::mm", 1500, shapes=shape)]))
    assert kinds(choice) == ["replaced"] and choice.rows[0].state == State.SLOWER
    other = diff(base, recording(calls("gemm", "aten::mm", 9000, shapes='[[64, 64], [64, 64]]')))
    assert kinds(other) == ["other shape"] and other.rows[0].state == State.UNDECIDED
    assert to_comparison(other).verdict == Verdict.WITHHELD
    unknown = diff(base, recording(calls("other_gemm", "aten::mm", 9000)))
    assert kinds(unknown) == ["replaced"] and unknown.rows[0].state == State.UNDECIDED


def test_more_calls_at_equal_time_are_no_slow_down_per_call():
    def steps(n):
        return recording([(name, d, {**m, "step": s}) for s in (1, 2, 3)
                          for name, d, m in calls("gemm", "aten::mm", 1000, n=n, seed=s)])

    row, = diff(steps(20), steps(30)).rows
    assert (row.kind, row.state) == ("more calls", State.SAME)
    assert row.calls_effect == pytest.approx(30_000, rel=0.02) and abs(row.per_call_effect) < 2000
    assert kinds(diff(steps(30), steps(20))) == ["fewer calls"]


def test_unlike_step_counts_are_cut_to_the_common_number():
    def steps(*numbers):
        return recording([(name, d, {**m, "step": s}) for s in numbers
                          for name, d, m in calls("k", "aten::mm", 1000, seed=s)])

    result = diff(steps(1, 2, 3, 4), steps(1, 2, 3))
    assert result.steps == 3 and result.rows[0].base.calls == 90
    assert any("different step counts: 4 against 3" in w for w in result.warnings)
    assert result.base["step"]["steps"] == 3 and result.base["step"]["mad"] is not None
    single = diff(steps(1), steps(5))
    assert any("one step on each side" in w for w in single.warnings) and single.base["step"].get("mad") is None


def test_unlike_gpus_instruments_and_lost_kernels_decide_nothing():
    slow = calls("k", "aten::mm", 2000, seed=1)
    base = recording(calls("k", "aten::mm", 1000), gpus=[{"name": "NVIDIA H100"}])
    cases = ((recording(slow, gpus=[{"name": "AMD MI300X"}]), "different GPUs: H100 against AMD MI300X"),
             (recording(slow, kind="ncu", gpus=[{"name": "NVIDIA H100"}]), "different instruments"))
    for candidate, words in cases:
        result = diff(base, candidate)
        assert result.warnings[0].startswith(words) and not result.per_call_comparable
        assert result.rows[0].state == State.UNDECIDED and to_comparison(result).verdict == Verdict.WITHHELD
    lost = recording(slow, gpus=[{"name": "NVIDIA H100"}], coverage={"dropped_share": 0.1})
    assert to_comparison(diff(base, lost)).verdict == Verdict.WITHHELD


def test_kernels_without_launch_row_join_their_like_or_stay_unattributed():
    known = calls("k", "aten::mm", 1000)
    lone = [("mystery", 7000, {"path": None, "grid_x": 1, "block_x": 32})]
    base = recording([*known, ("k", 1000, {"path": None, "grid_x": 8, "block_x": 128})])
    result = diff(base, recording([*known, *lone]))
    assert kinds(result) == ["same per call", "unknown place"] and adds_up(result)
    assert next(r for r in result.rows if r.kind == "same per call").base.calls == 31
    assert result.unattributed >= 7000
    assert any("operator is unknown" in r.text for r in result.rows)


def test_without_paths_order_of_launches_finds_the_renamed_kernel():
    def run(names):
        return recording([(n, 1000 + 10 * i, {"grid_x": 4, "block_x": 64})
                          for _ in range(10) for i, n in enumerate(names)])

    result = diff(run(["embed", "sm80_gemm_128x64", "norm", "add"]), run(["embed", "sm90_wgmma_x", "norm", "add"]))
    assert result.key == "sequence" and adds_up(result)
    replaced, = (r for r in result.rows if r.kind == "replaced")
    assert (replaced.base.kernels, replaced.candidate.kernels) == (("sm80_gemm_128x64",), ("sm90_wgmma_x",))
    fused = diff(run(["embed", "mul", "add", "norm"]), run(["embed", "mul_add", "norm"]))
    assert [r.kind for r in fused.rows if r.kind not in ("same per call", "undecided")] == ["fused"]
    cut = diff(run(["embed", "a", "norm", "add"]), recording([("norm", 1000, {"grid_x": 4, "block_x": 64})] * 5))
    assert "replaced" not in kinds(cut)


def test_summaries_compare_means_with_their_recorded_deviation():
    header = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n"
    base, candidate = (nsys_csv.parse(f"{header}90,{100 * mean},100,{mean},{mean},1,9999,{mean // 50},gemm\n")
                       for mean in (5000, 6000))
    result = diff(base, candidate)
    row, = result.rows
    assert (row.kind, row.state) == ("slower per call", State.SLOWER) and adds_up(result)
    assert row.ratio == pytest.approx(1.2) and result.total_base == 500_000 and row.base.calls == 100


def test_recordings_without_times_compare_resources():
    def static(registers, *names):
        table = kernel_frame({"kind": ["kernel"] * 2, "name": names or ["k", "l"], "registers": [registers, 32]})
        return Recording("cubin", "a.cubin", table, metadata={"arch": "sm_90a"})

    assert kinds(diff(static(40, "a", "b"), static(40, "c", "d"))) == ["added", "added", "removed", "removed"]

    result = diff(static(40), static(168))
    assert kinds(result) == ["other resources", "same resources"] and adds_up(result)
    assert "registers 40 -> 168" in result.rows[0].text and result.rows[0].state == State.UNDECIDED
    comparison = to_comparison(result)
    assert comparison.verdict == Verdict.WITHHELD and comparison.deltas[0].arch == "sm_90a"
    assert result.total_base is None and not result.groups  # unknown, not 0
    assert not [k for k in comparison.environment if k.endswith("_ns")]
    assert not [k for d in comparison.deltas for side in (d.base, d.candidate) for k in side if k.endswith("_ns")]


def test_logs_compare_versions_transports_and_choices():
    line = "n:1:2 [0] NCCL INFO "
    base, candidate = (nccl_log.parse(
        f"{line}NCCL version {version}+cuda12.4\n{line}Channel 00/0 : 0[0] -> 1[1] via {via}\n"
        f"{line}AllReduce: 4096 Bytes -> Algo {algorithm} proto LL time 1.0\n{line}{n} coll channels, 0 nvls channels, "
        "4 p2p channels\n") for version, via, algorithm, n in (("2.18.3", "P2P/IPC", "RING", 16),
                                                               ("2.19.3", "SHM", "TREE", 8)))
    assert [f.text for f in diff(base, candidate).facts] == [
        "nccl 2.18.3 -> 2.19.3", "collective channels 16 -> 8", "transports P2P/IPC -> SHM",
        "AllReduce of 4096 bytes RING LL -> TREE LL"]
    race = nccl_log.parse("[Rank 1] Process group watchdog thread terminated with exception: CUDA error: operation not "
                          "permitted when stream is capturing")
    comparison = to_comparison(diff(base, race))
    assert comparison.reasons[0].code == "capture-watchdog-race" and comparison.reasons[0].text.startswith("framework")


# Verdict and form ---------------------------------------------------------------------------------------------------

def test_clear_slow_down_is_hold_and_never_go():
    base = recording([*calls("gemm", "aten::mm", 1000), *calls("norm", "aten::norm", 400)], gpus=[{"name": "A"}])
    candidate = recording([*calls("gemm", "aten::mm", 1100, seed=1), *calls("norm", "aten::norm", 300)],
                          gpus=[{"name": "A"}])
    comparison = to_comparison(diff(base, candidate))
    assert comparison.verdict == Verdict.HOLD
    assert comparison.reasons[0].code == "slower-per-call"
    assert comparison.reasons[0].scope["case"].startswith("aten::mm")
    assert {d.reason: d.state for d in comparison.deltas} == {
        "slower-per-call": State.SLOWER, "faster-per-call": State.FASTER}
    assert all(d.evidence == "recorded" for d in comparison.deltas)
    assert to_comparison(diff(candidate, candidate)).verdict == Verdict.WITHHELD
    data = json.loads(json.dumps(comparison.to_json()))
    assert Comparison.from_json(data).verdict == Verdict.HOLD
    assert comparison.coverage == {"compared": 2, "faster": 1, "slower": 1}


def test_equal_processes_give_few_alarms_and_a_slow_down_is_found():
    alarms = found = 0
    for seed in range(60):
        base = recording(calls("k", "aten::mm", 1000, seed=f"a{seed}", spread=0.1))
        alarms += diff(base, recording(calls("k", "aten::mm", 1000, seed=f"b{seed}", spread=0.1))).rows[0].state in (
            State.SLOWER, State.FASTER)
        found += diff(base, recording(calls("k", "aten::mm", 1150, seed=f"c{seed}", spread=0.1))).rows[0].state \
            == State.SLOWER
    assert alarms <= 1 and found >= 50


PATHS = st.sampled_from([None, "aten::mm", "aten::linear > aten::addmm", "m.0 > aten::mm", "m.1 > aten::mm", "x > y"])
ROWS = st.lists(st.tuples(
    st.sampled_from(["k", "k2", "sm80_gemm_64x64", "sm90_gemm_128x64", "void ns::f<int>(int)", ""]),
    st.one_of(st.none(), st.integers(0, 10**15)),
    st.fixed_dictionaries({}, optional={
        "path": PATHS, "grid_x": st.sampled_from([1, 8, 64]), "block_x": st.just(128), "step": st.sampled_from([1, 2]),
        "shapes": st.sampled_from(["[[1]]", "[[2]]"]), "position": st.integers(0, 3), "device": st.integers(0, 1)})),
    max_size=25)


@settings(deadline=None, max_examples=150)
@given(ROWS, ROWS)
def test_rows_of_any_two_recordings_add_up_and_hold_every_kernel_once(one, other):
    result = diff(recording(one), recording(other))
    assert adds_up(result)
    for side, count in (("base", result.base["kernels"]), ("candidate", result.candidate["kernels"])):
        held = [bucket for row in result.rows if (bucket := getattr(row, side))]
        assert sum(s.total or 0 for s in held) == (getattr(result, f"total_{side}") or 0)
        assert bool(held) == bool(count)
    json.dumps(to_comparison(result).to_json())
    assert to_comparison(result).verdict != Verdict.GO


@settings(deadline=None, max_examples=60)
@given(ROWS)
def test_a_recording_does_not_differ_from_itself(rows):
    result = diff(recording(rows), recording(rows))
    assert result.total_base == result.total_candidate
    assert not {r.kind for r in result.rows} & {"replaced", "split", "fused", "added", "removed", "more calls"}
    assert all(r.difference == 0 for r in result.rows if r.kind != "unknown place")


# Parts --------------------------------------------------------------------------------------------------------------

@given(st.lists(st.integers(0, 4), max_size=30), st.lists(st.integers(0, 4), max_size=30))
def test_common_subsequence_is_longest(a, b):
    pairs = common(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(p[0] < q[0] and p[1] < q[1] for p, q in pairwise(pairs))
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    assert len(pairs) == table[-1][-1]


def test_gaps_lie_between_matches_and_at_equal_edges():
    assert gaps([(0, 0), (3, 2)], 4, 3) == [(range(1, 3), range(1, 2))]
    assert gaps([], 2, 3) == [(range(2), range(3))]
    assert gaps([(2, 1)], 3, 2) == []  # the capture begins elsewhere
    assert gaps([(1, 1)], 2, 2) == [(range(1), range(1))]


@pytest.mark.parametrize(("name", "expected"), [
    ("void flash::flash_fwd_kernel<Traits<(int)128>>(flash::Params)", "flash_fwd_kernel"),
    ("sm80_xmma_gemm_f16f16_f16f32_tn_n_tilesize128x64x64_stage3", None),
    ("triton_poi_fused_add_0", "triton_poi_fused_add"), ("ampere_sgemm_128x64_tn", "sgemm_tn"),
    ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "nvjet_tst_v_bz_coopB_bias_TNN"),
    ("void at::native::elementwise_kernel<128, at::native::BinaryFunctor<float, MulFunctor<float>>>(int)",
     "elementwise_kernel[Mul]"),
    ("void at::native::(anonymous namespace)::layer_norm_kernel<float>(int)", "layer_norm_kernel"),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_nn>(int)", "Kernel2[simt_sgemm_nn]"),
    ("[CUDA memcpy Device-to-Device]", "[CUDA memcpy Device-to-Device]"), ("", ""), ("<<<>>>", "<<<>>>")])
def test_family_drops_what_a_build_chooses(name, expected):
    if expected is None:
        assert family(name) == family(name.replace("sm80", "sm90"))
    else:
        assert family(name) == expected


@given(st.text(max_size=60))
def test_names_never_raise(text):
    assert isinstance(family(text) + plain(text) + place(text), str)


def test_place_and_plain_drop_numbering_only():
    assert place("blocks.17.attn > Linear_3 > c10d::all_") == "blocks.*.attn > Linear_* > c10d::all_"
    assert plain("f<(int)128, [lambda() (instance 3)]>") == plain("f<128,[lambda()]>")
    assert plain("gemm_128x64") != plain("gemm_128x128")


def test_interval_is_students():
    for degrees, quantile in ((4, 4.6041), (5, 4.0321), (8, 3.3554), (20, 2.8453), (200, 2.6006)):  # printed tables
        assert percall._t_quantile(degrees) == pytest.approx(quantile, rel=0.003)


def test_wording_shows_where_long_names_differ_and_times_in_three_digits():
    one, other = ("void at::native::very_long_prefix::" * 2 + x for x in ("kernel<128, 4>", "kernel<256, 4>"))
    assert contrast(one, other) == "...long_prefix::kernel<128, 4> -> ...long_prefix::kernel<256, 4>"
    assert contrast("a", "b") == "a -> b"
    assert [duration(t) for t in (None, 0, 999, 1234.5, 12_345, 123_456, 5e6, 2e9)] == [
        "?", "0 ns", "999 ns", "1.23 us", "12.3 us", "123 us", "5.00 ms", "2.00 s"]
    assert [percent(r) for r in (1.5, 0.5, 12.0, None)] == ["+50.0 %", "-50.0 %", "12 x", "?"]


# The command --------------------------------------------------------------------------------------------------------

RUN = "import typer; from brakecheck.cli.diff import diff; app = typer.Typer(); app.command()(diff); app()"


def command(*arguments):
    return subprocess.run([sys.executable, "-c", RUN, *map(str, arguments)], capture_output=True, text=True,
                          cwd=Path(__file__).parent.parent, timeout=120)


def test_command_prints_verdict_warnings_and_rows_or_json():
    files = [DATA / "ncu" / f"kernel-0002-ncu{v}.details.csv" for v in ("", "-v2")]
    shown = command(*files)
    assert shown.returncode == Verdict.WITHHELD.exit_code, shown.stderr
    lines = " ".join(shown.stdout.split())
    assert lines.startswith("WITHHELD") and lines.index("warning") < lines.index("other shape")
    assert "448x1x1" in lines
    data = json.loads(command(*files, "--json").stdout)
    assert data["schema"] == "brakecheck/comparison/1" and data["verdict"] == "WITHHELD"
    assert data["deltas"][0]["reason"] == "other-shape" and data["deltas"][0]["evidence"] == "recorded"


def test_command_shows_steps_and_writes_a_timeline(tmp_path):
    files = [DATA / "kineto" / f"qwen-0.5b-{gpu}.json.gz" for gpu in ("h100", "mi300")]
    shown = command(*files, "--rows", "1", "--timeline", tmp_path / "both.json.gz")
    words = " ".join(shown.stdout.split())
    assert "where a step's time goes base: one step, 49.4 ms: compute 91.5%" in words, shown.stderr
    events = json.loads(gzip.decompress((tmp_path / "both.json.gz").read_bytes()))["traceEvents"]
    assert f"timeline of {len(events)} events" in words
    data = json.loads(command(*files, "--json").stdout)
    assert set(data["environment"]["decomposition"]) == {"base", "candidate"}


def test_a_diff_does_not_import_what_it_does_not_need():
    code = ("import sys; from brakecheck.evidence import diff, recognise; "
            "print(sorted({'scipy', 'pandas', 'torch', 'duckdb', 'ncu_report', 'sqlite3'} & set(sys.modules)))")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                         cwd=Path(__file__).parent.parent)
    assert out.stdout.strip() == "[]", out.stderr
    assert pl.__name__ == "polars"


# Found by using it ---------------------------------------------------------------------------------------------------

def attention(kernels, inputs="[[2,64]]", **metadata):
    """Calls of one operator, each a kernel or many; what is inside has shapes of its own."""
    names = [f"part{kernels}_{i}x" for i in range(kernels)]
    rows = [row for n in names for row in calls(n, f"aten::sdpa > aten::{n}", 1000, shapes=f'["{n}"]')]
    found = recording([*rows, *calls("norm", "aten::norm", 500)], **metadata)
    return replace(found, operators=operator_frame({"path": ["aten::sdpa"], "shapes": [inputs]}))


def test_an_operator_in_one_kernel_or_in_twenty_is_one_row():
    result = diff(attention(1), attention(20))
    row = next(r for r in result.rows if r.place == "aten::sdpa")
    assert (row.kind, row.state, row.operator) == ("split", State.SLOWER, "aten::sdpa") and adds_up(result)
    assert row.text.startswith("aten::sdpa: split (part1 -> part20 and 19 more kernels), 1.00 us -> ")
    assert row.ratio == pytest.approx(20, rel=0.02) and kinds(result) == ["same per call", "split"]
    other = diff(attention(1), attention(20, inputs="[[4,64]]"))
    assert next(r for r in other.rows if r.place == "aten::sdpa").kind == "other shape"


def test_only_ranks_of_both_are_compared():
    one, other = (recording([row for r in ranks for row in calls("k", "aten::mm", 1000, rank=r, seed=r)])
                  for ranks in ((0, 2), (0, 1, 2)))
    result = diff(one, other)
    assert "only ranks 0, 2 are in both and compared; candidate has rank 1 besides" in result.warnings[-1]
    assert result.totals_comparable and result.total_base == result.total_candidate
    apart = diff(*(recording(calls("k", "aten::mm", 1000, rank=r)) for r in (0, 1)))
    assert any("no rank is in both: rank 0 against rank 1" in w for w in apart.warnings)


def test_a_side_without_kernels_or_times_is_said():
    some = recording(calls("k", "aten::mm", 1000))
    assert judge(diff(recording([]), some))[1] == "no kernel in base: there is nothing to compare"
    untimed = recording([("k", None, {"path": "aten::mm", "grid_x": 8, "block_x": 128})])
    assert "times unknown, 1 -> 30 calls" in diff(untimed, some).groups[0].text


def test_a_grown_total_is_in_the_headline():
    more = calls("new", "aten::sort", 400)
    base, grown = (recording([*calls("k", "aten::mm", 1000), *extra]) for extra in ((), more))
    verdict, headline, _ = judge(diff(base, grown))
    assert verdict == Verdict.WITHHELD and headline.startswith("device time +39.9 %")


def test_telling_counters_come_first():
    def counted(values):
        rows = [(0, name, value, "", None) for name, value in values.items()]
        found = recording([("k", 1000, {"path": "aten::mm"})], kind="ncu")
        columns = ("kernel", "counter", "value", "unit", "text")
        return replace(found, counters=counter_frame({c: [r[i] for r in rows] for i, c in enumerate(columns)}))

    base = {"profiler__replayer_bytes.sum": 1.0, "smsp__x_not_issued": 1.0, "smsp__inst_executed.sum": 1.0,
            "lts__t_sector_hit_rate.pct": 50.0, "dram__throughput.avg": 10.0, "dram__throughput.max": 10.0}
    result = diff(counted(base), counted({n: v * (9 if v == 1 else 2) for n, v in base.items()}))
    assert [c.what for c in result.rows[0].changes] == ["dram__throughput.avg", "lts__t_sector_hit_rate.pct",
                                                        "smsp__inst_executed.sum"]
