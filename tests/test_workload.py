"""The operator mix of a trace, what stands for its operators, and what deltas say about the whole."""

import json
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brakecheck import api, measuring
from brakecheck.bench.controller import Options
from brakecheck.cli import main
from brakecheck.evidence import kineto, workload
from brakecheck.evidence.table import Recording, kernel_frame, operator_frame
from brakecheck.evidence.workload_cases import Call, Stand, stand_in
from brakecheck.model import BrakecheckError, Comparison, Delta, State, UsageError, Verdict
from brakecheck.ops import catalogue
from brakecheck.report.terminal import render
from brakecheck.verdict import workload as projection

QWEN = Path(__file__).parent / "data" / "kineto" / "qwen-0.5b-h100.json.gz"
BF = "c10::BFloat16"


def recording(calls, kernels=(), steps=()):
    """calls: (operator, start, duration, shapes, dtypes, strides). kernels: (call, duration, more)."""
    columns = ("name", "start", "duration", "shapes", "dtypes", "strides")
    operators = operator_frame({
        **{c: [json.dumps(v) if isinstance(v, list) else v for v in column]
           for c, column in zip(columns, zip(*calls))},
        "thread": [1] * len(calls), "depth": [0] * len(calls), "kind": ["operator"] * len(calls)})
    rows = [{"kind": "kernel", "name": "k", "start": 10 * i, "duration": duration, "call": call,
             "operator": None if call is None else calls[call][0],
             **{c: json.dumps(calls[call][3 + i]) if call is not None and calls[call][3 + i] is not None else None
                for i, c in enumerate(("shapes", "dtypes"))}, **more}
            for i, (call, duration, more) in enumerate(kernels)]
    table = kernel_frame({c: [r.get(c) for r in rows] for c in sorted({c for r in rows for c in r})})
    return Recording("kineto", "made.json", table, operators, metadata={"steps": list(steps)})


MM = ("aten::mm", 0, 5, [[8, 64], [64, 32]], [BF, BF], [[64, 1], [1, 64]])


# ---- the mix -----------------------------------------------------------------------------------------------

def test_calls_and_shares_of_a_step():
    mix = workload.extract(recording(
        [MM, MM, ("aten::sort", 20, 5, [[8]], ["float"], [[1]])],
        [(0, 300, {"step": 1}), (0, 100, {"step": 1}), (1, 400, {"step": 2}), (2, 150, {"step": 2}),
         (None, 50, {"step": 2}), (0, 999, {"step": None})]))
    assert mix["source"]["steps"] == 2 and mix["clock"] == "device" and mix["time_ns"] == 500
    first, second, third = mix["entries"]
    assert (first["operator"], first["calls"], first["time_ns"], first["share"]) == ("aten::mm", 1, 400, 0.8)
    assert first["strides"] == [[64, 1], [1, 64]]
    assert first["case"] == {"operator": "gemm_bfloat16", "name": "m=8 n=32 k=64 b=t",
                             "params": {"m": 8, "n": 32, "k": 64, "b": "t"}, "fit": "same"}
    assert second["why"] and third == {"time_ns": 25, "share": 0.05, "kernels": ["k"],
                                       "why": "no operator is recorded for these kernels"}
    assert [u["share"] for u in mix["uncovered"]] == [0.15, 0.05]
    assert mix["covered_share"] == mix["same_share"] == 0.8


def test_a_trace_of_the_host_counts_time_once():
    nested = [("aten::linear", 0, 100, [[8, 64], [32, 64]], [BF, BF], None),
              ("aten::addmm", 10, 70, [[32], [8, 64], [64, 32]], [BF] * 3, None),
              ("aten::relu", 200, 50, [[8, 32]], [BF], None)]
    mix = workload.extract(recording(nested))
    assert mix["clock"] == "host" and mix["time_ns"] == 150
    assert {e["operator"]: e["time_ns"] for e in mix["entries"]} == {"aten::addmm": 70, "aten::relu": 50,
                                                                     "aten::linear": 30}


def test_a_recording_without_operators_or_times_is_said():
    with pytest.raises(BrakecheckError, match="no operators"):
        workload.extract(Recording("nsys", "x", kernel_frame({"name": ["k"], "duration": [5]})))
    with pytest.raises(BrakecheckError, match="has a time"):
        workload.extract(recording([("aten::mm", 0, None, None, None, None)]))


def test_the_mix_of_a_real_trace():
    mix = workload.extract(kineto.read(QWEN))
    assert math.isclose(sum(e["share"] for e in mix["entries"]), 1)
    assert mix["source"]["gpus"] == ["NVIDIA H100 80GB HBM3"] and 0.9 < mix["busy_share"] < 1
    largest = mix["entries"][0]
    assert (largest["operator"], largest["calls"], largest["shapes"]) == ("aten::mm", 48, [[8944, 1024], [1024, 2816]])
    assert mix["covered_share"] > 0.9 and 0.2 < mix["same_share"] < 0.5
    for operator, cases in projection.cases(mix, least=0.01).items():
        for case in cases:  # each is a case that the catalogue can count
            assert catalogue()[operator].compute_cost(case).bytes > 0


# ---- what stands for a call ---------------------------------------------------------------------------------

@pytest.mark.parametrize(("operator", "shapes", "dtype", "strides", "names", "expected"), [
    ("linear", [[2, 8, 64], [32, 64]], BF, [[512, 64, 1], [64, 1]], {"bf16_gemm"},
     ("bf16_gemm", {"m": 16, "n": 32, "k": 64}, "same")),
    ("mm", [[8, 64], [64, 32]], "c10::Half", [[64, 1], [32, 1]], {"gemm_float16", "bf16_gemm"},
     ("gemm_float16", {"m": 8, "n": 32, "k": 64, "b": "n"}, "same")),
    ("bmm", [[4, 8, 64], [4, 64, 32]], BF, [[512, 64, 1], [2048, 1, 64]], {"gemm_bfloat16"},
     ("gemm_bfloat16", {"m": 8, "n": 32, "k": 64, "b": "t", "batch": 4}, "same")),
    ("mm", [[8, 64], [64, 32]], BF, [[1, 8], [1, 64]], {"bf16_gemm"},
     ("bf16_gemm", {"m": 8, "n": 32, "k": 64}, "like")),
    ("mm", [[8, 64], [64, 32]], BF, [[1, 8], [32, 1]], {"gemm_bfloat16"},
     ("gemm_bfloat16", {"m": 8, "n": 32, "k": 64, "a": "t", "b": "n"}, "same")),
    ("mm", [[8, 64], [64, 32]], BF, [[1, 16], [32, 1]], {"gemm_bfloat16"},
     ("gemm_bfloat16", {"m": 8, "n": 32, "k": 64, "a": "t", "b": "n"}, "like")),
    ("_int_mm", [[8, 64], [64, 32]], "signed char", [[64, 1], [1, 64]], {"int8_gemm"},
     ("int8_gemm", {"m": 8, "n": 32, "k": 64}, "same")),
    ("native_layer_norm", [[4, 8, 64], [], [64], [64], []], BF, None, {"layernorm"},
     ("layernorm", {"rows": 32, "columns": 64}, "same")),
    ("_softmax", [[4, 8, 64], [], []], BF, None, {"softmax"}, ("softmax", {"rows": 32, "columns": 64}, "like")),
    ("_fused_rms_norm", [[8, 64], [], [64], []], BF, None, {"rms_norm", "rmsnorm"},
     ("rms_norm", {"rows": 8, "columns": 64}, "same")),
    ("_scaled_dot_product_flash_attention", [[2, 4, 128, 64]] * 3, BF, None, {"attention"},
     ("attention", {"heads": 8, "length": 128, "causal": True, "dim": 64}, "like")),
    ("cudnn_convolution", [[2, 8, 16, 16], [4, 8, 3, 3]], BF, None, {"conv2d"},
     ("conv2d", {"n": 2, "channels": 8, "out": 4, "size": [16, 16], "kernel": 3, "stride": 1, "padding": 1,
                 "layout": "contiguous", "groups": 1}, "like")),
    ("copy_", [[4, 8], [4, 8]], BF, None, {"copy"},
     ("copy", {"rows": 1, "columns": 32, "source": "contiguous", "dtype": "bfloat16", "to": "bfloat16"},
      "like")),
    ("_grouped_mm", [[300, 51], [7, 51, 77], [7]], BF, None, {"grouped_gemm"},
     ("grouped_gemm", {"tokens": 300, "experts": 7, "n": 77, "k": 51}, "like")),
    ("cat", [[[4, 8], [4, 24]], []], BF, None, {"elementwise_chain"}, ("elementwise_chain", {"n": 128}, "like")),
    ("mul_", [[4, 8], [8]], "float", None, {"elementwise_chain"}, ("elementwise_chain", {"n": 32}, "like")),
])
def test_what_stands_for_an_operator(operator, shapes, dtype, strides, names, expected):
    found = stand_in(Call(f"aten::{operator}", shapes, [dtype] * len(shapes), strides), names)
    assert isinstance(found, Stand), found
    assert (found.operator, found.params, found.fit) == expected
    assert (found.note is None) == (found.fit == "same")
    assert isinstance(stand_in(Call(f"aten::{operator}", shapes, [dtype] * len(shapes), strides), {}), str)


@pytest.mark.parametrize(("operator", "shapes", "words"), [
    ("nccl:all_reduce", [[8]], "communication"), ("aten::convolution_backward", [[8]], "gradient of a convolution"),
    ("aten::mm", [], "shapes"), ("aten::mm", [[8, 64], [32, 64]], "plain matrix product"),
    ("aten::_flash_attention_forward", [[2, 128, 4, 96]] * 3, "dimension 96"), ("aten::sort", [[8]], "table"),
    ("aten::_flash_attention_forward", [[2, 128, 4, 64], [2, 64, 4, 64]], "unlike queries"),
    ("aten::embedding_dense_backward", [[4, 64], [4]], "not recorded"),
    ("aten::cudnn_batch_norm", [[2, 8, 64, 64]], "batch norm")])
def test_why_nothing_stands_for_it(operator, shapes, words):
    assert words in stand_in(Call(operator, shapes, [BF] * len(shapes)), catalogue())


def test_tf32_is_told_by_the_kernel_and_table_rows_by_the_lookup():
    call = Call("aten::mm", [[8, 64], [64, 32]], ["float"] * 2, [[64, 1], [32, 1]], ["sm80_xmma_gemm_f32f32_tf32f32"])
    assert stand_in(call, {"gemm_float32", "gemm_tf32"}).operator == "gemm_tf32"
    backward = ("aten::embedding_dense_backward", 9, 5, [[2, 4, 64], [2, 4]], ["float", "long int"], None)
    mix = workload.extract(recording([("aten::embedding", 0, 5, [[97, 64], [2, 4]], ["float", "long int"], None),
                                      backward], [(1, 10, {})]))
    assert mix["entries"][0]["case"]["params"] == {"tokens": 8, "rows": 97, "width": 64}


@given(st.lists(st.recursive(st.integers(-5, 70), lambda inner: st.lists(inner, max_size=4), max_leaves=8), max_size=4),
       st.sampled_from(["mm", "addmm", "bmm", "linear", "native_layer_norm", "_softmax", "cat", "add", "_grouped_mm",
                        "_flash_attention_forward", "embedding_dense_backward"]))
@settings(max_examples=150, deadline=None)
def test_odd_shapes_never_raise(shapes, operator):
    found = stand_in(Call(f"aten::{operator}", shapes, [BF] * len(shapes), shapes), catalogue())
    assert isinstance(found, (Stand, str))


# ---- the projection -----------------------------------------------------------------------------------------

def entry(share, case=None, operator="aten::mm", fit="same"):
    base = {"operator": operator, "share": share}
    return {**base, "why": "no"} if case is None else {
        **base, "case": {"operator": case[0], "params": case[1], "name": "", "fit": fit}}


def delta(operator, case, ratio, half=0.0, state=State.SLOWER, **more):
    return Delta(operator, case, "sm_90", "measured", state, "", "", ratio=ratio, low=ratio - half, high=ratio + half,
                 metric="device_time", **more)


def test_projection_is_the_weighted_sum_with_its_interval():
    mix = {"entries": [entry(0.5, ("gemm", {"m": 8})), entry(0.3, ("norm", {"rows": 2})), entry(0.2)],
           "busy_share": 0.5}
    found = projection.project(mix, [delta("gemm", "m=8", 1.10, 0.04), delta("norm", "rows=2", 0.90, 0.10)])
    assert math.isclose(found.change, 0.5 * 0.10 - 0.3 * 0.10)
    assert math.isclose(found.high - found.change, math.hypot(0.5 * 0.04, 0.3 * 0.10))
    assert math.isclose(found.step_change, found.change / 2) and found.covered == 0.8
    assert math.isclose(found.break_even, -0.02 / 0.2) and found.uncovered == (("aten::mm", 0.2, "no"),)
    assert "+2.0% (-1.6% .. +5.6%)" in found.text and "20% is not covered" in found.text


def test_entries_that_lean_on_one_delta_share_its_error():
    mix = {"entries": [entry(0.4, ("gemm", {"m": 8})), entry(0.4, ("gemm", {"m": 8})), entry(0.2, ("gemm", {"m": 9}))]}
    found = projection.project(mix, [delta("gemm", "m=8", 1.0, 0.1)])
    assert math.isclose(found.high, 0.1) and found.approximate == 0.2  # the third has only that delta to lean on
    assert found.break_even is None and found.step_change is None


def test_what_broke_or_was_not_measured_is_uncovered_with_its_reason():
    mix = {"entries": [entry(0.6, ("gemm", {"m": 8})), entry(0.4, ("norm", {"rows": 2}))]}
    found = projection.project(mix, [delta("gemm", "m=8", 1.5, state=State.BROKEN)])
    assert found.change is None and found.covered == 0 and "nothing to project" in found.text
    assert [why for _, _, why in found.uncovered] == ["gemm is broken, without a ratio and interval",
                                                      "norm was not measured"]
    memory = Delta("gemm", "m=8", "sm_90", "measured", State.SLOWER, "", "", ratio=2.0, low=2.0, high=2.0,
                   metric="memory")
    assert projection.project(mix, [memory]).change is None


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.5, 2), st.floats(0, 0.3)), min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_a_projection_lies_between_its_ratios(rows):
    total = sum(share for share, _, _ in rows)
    mix = {"entries": [entry(share / total, ("gemm", {"m": i})) for i, (share, _, _) in enumerate(rows)]}
    found = projection.project(mix, [delta("gemm", f"m={i}", r, h) for i, (_, r, h) in enumerate(rows)])
    ratios = [r - 1 for _, r, _ in rows]
    assert min(ratios) - 1e-9 <= found.change <= max(ratios) + 1e-9
    assert found.low <= found.change <= found.high and math.isclose(found.covered, 1)


# ---- files and command --------------------------------------------------------------------------------------

@pytest.mark.parametrize(("text", "words"), [
    ("{", "no JSON"), ("[]", "no workload"), ('{"schema": "brakecheck/workload/1"}', "entries"),
    ('{"schema": "brakecheck/workload/1", "entries": [{"share": 2}]}', "entries[0].share"),
    ('{"schema": "brakecheck/workload/1", "entries": [{"share": NaN}]}', "entries[0].share"),
    ('{"schema": "brakecheck/workload/1", "entries": [{"share": 1, "case": {"operator": 3}}]}', "entries[0].case")])
def test_a_damaged_workload_is_named_by_field(tmp_path, text, words):
    (tmp_path / "mix.json").write_text(text)
    with pytest.raises(UsageError) as error:
        projection.load(tmp_path / "mix.json")
    assert words in str(error.value)


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code or 0


def test_command_writes_what_can_be_loaded_and_projected(tmp_path, capsys):
    out = tmp_path / "mix.json"
    assert run("workload", QWEN, "-o", out, "--rows", 3) == 0
    shown = capsys.readouterr().out
    assert "covered: 97" in shown and "not covered" in shown and "more: --rows 0" in shown
    mix = projection.load(out)
    weights = projection.weights(mix)
    assert math.isclose(sum(weights.values()), mix["covered_share"])
    deltas = [delta(op, case.name, 1.02, 0.01) for op, found in projection.cases(mix).items() for case in found]
    found = projection.project(mix, deltas)
    assert math.isclose(found.change, 0.02 * mix["covered_share"]) and "its step" in found.text
    assert run("workload", QWEN, "-o", tmp_path / "no" / "mix.json") == UsageError.exit_code
    assert run("workload", QWEN, "--json") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == projection.SCHEMA == workload.SCHEMA


def test_a_measured_comparison_is_weighed_with_the_cases_of_a_mix(tmp_path, capsys):
    """Real workers on the CPU: the candidate does one operator's work twice, another it cannot run, and a third has no
    case. Process time as the clock: this machine may be busy."""
    params = {"n": 32768, "dtype": "float32"}
    entries = [entry(0.5, ("axpy", params)), entry(0.0005, ("axpy", {"n": 4096, "dtype": "float32"})),
               entry(0.3, ("rows", {"M": 3, "N": 5}), "aten::sum"), entry(0.1995, None, "aten::sort")]
    mix = {"schema": projection.SCHEMA, "entries": entries, "busy_share": 0.8}
    (tmp_path / "mix.json").write_text(json.dumps(mix))
    assert measuring.mix_of(tmp_path / "mix.json") == {"axpy": [params], "rows": [{"M": 3, "N": 5}]}
    spec = f"env:{sys.executable}"
    options = Options(ops=(str(Path(__file__).parent / "measure" / "my_ops.py"),), max_pairs=4, checks=False,
                      settle=False, plan={"clock": "cpu-time", "visit_us": 30_000, "sample_us": 1000})
    result = api.compare(spec, spec, options=options, implementation="base=torch,candidate=twice", store=str(tmp_path),
                         workload=tmp_path / "mix.json")
    cases = {(d.operator, d.case): d for d in result.comparison.deltas}
    assert set(cases) == {("axpy", "n=32768 float32"), ("rows", "M=3 N=5")}
    measured, found = cases["axpy", "n=32768 float32"], result.comparison.environment["projection"]
    assert 1.2 < measured.ratio < 4
    share = 0.5005  # the small case leans on the one that was measured
    assert math.isclose(found["change"], share * (measured.ratio - 1))
    assert math.isclose(found["low"], share * (measured.low - 1)) and found["low"] < found["change"] < found["high"]
    assert math.isclose(found["step_change"], 0.8 * found["change"]) and math.isclose(found["covered"], share)
    assert [(op, s) for op, s, _ in found["uncovered"]] == [("aten::sum", 0.3), ("aten::sort", 0.1995)]
    render(result.comparison)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"device time of the workload {found['change']:+.1%} ({found['low']:+.1%} .. {found['high']:+.1%})" in shown
    assert "50% is not covered and taken as unchanged" in shown


def test_each_candidate_is_projected(tmp_path):
    (tmp_path / "mix.json").write_text(json.dumps(
        {"schema": projection.SCHEMA, "entries": [entry(0.5, ("gemm", {"m": 8})), entry(0.5)]}))
    deltas = tuple(delta("gemm", "m=8", ratio, 0.01, step=("old", to)) for to, ratio in (("new", 1.1), ("next", 0.9)))
    comparison = Comparison(Verdict.WITHHELD, "", (), (), {}, deltas)
    found = api._projected(api.Result(comparison, (), None), tmp_path / "mix.json").comparison
    changes = {name: round(p["change"], 6) for name, p in found.environment["projections"].items()}
    assert changes == {"new": 0.05, "next": -0.05} and "projection" not in found.environment
    assert [r.text.split(" device")[0] for r in found.reasons] == ["new:", "next:"]


def test_a_mix_that_nothing_stands_for_is_said(tmp_path):
    (tmp_path / "mix.json").write_text(json.dumps({"schema": projection.SCHEMA, "entries": [entry(1.0)]}))
    with pytest.raises(UsageError, match="no operator of the catalogue"):
        measuring.mix_of(tmp_path / "mix.json")
    (tmp_path / "weights.json").write_text('{"weights": {"gemm": 1}}')
    assert measuring.mix_of(tmp_path / "weights.json") == {} == measuring.mix_of(None)
