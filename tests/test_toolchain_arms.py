"""Toolchains as measured arms, where no GPU is: the kernels' launchers on a driver that records, and how measured and
static deltas become one answer."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_driver import RecordingDriver

from brakecheck.bench.controller import ArmSpec, Controller, Options
from brakecheck.model import (
    Arm,
    Block,
    BrakecheckError,
    Change,
    Comparison,
    Delta,
    Key,
    Measurement,
    Run,
    Stack,
    State,
    Verdict,
)
from brakecheck.stack.environment import Environment
from brakecheck.verdict.merge import compare_run

KEY = Key("cuda-graph", "graph", "cold", "burst", "normal", "1")
SOURCE = "softmax_fused.cu"


def test_kernels_of_a_manifest_are_operators_launched_through_the_driver(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from brakecheck.ops import Case, catalogue
    from brakecheck.ops.make import Make
    from brakecheck.worker import cubins, driver
    from brakecheck.worker.measure import find

    fake = RecordingDriver()
    monkeypatch.setattr(driver, "_library", lambda: fake)
    monkeypatch.setattr(driver, "use_torch_context", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
    (tmp_path / "a.cubin").write_bytes(b"cubin")
    row = {"operator": "softmax", "kernel": "unfused", "cubin": "a.cubin",
           "entries": {e: e for e in ("softmax_row_max", "softmax_row_sum", "softmax_normalise")}}
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"kernels": [row, {**row, "operator": "gone"}, {**row, "kernel": "gone"}]}))
    found = cubins.kernel_operators(catalogue(), manifest)
    assert list(found) == ["softmax unfused"]
    op, case, launch = find(found, "softmax unfused", found["softmax unfused"].cases[0].name, "cuda")
    inputs = op.make_inputs(Case.of(rows=2, columns=8), Make("cpu", 1))
    for _ in range(2):
        outputs = launch(Case.of(rows=2, columns=8), **inputs)
    assert set(outputs) == {"out", "maximum", "total"} and outputs["out"].shape == (2, 8)
    names = [name for name, _ in fake.calls]
    assert names.count("cuModuleLoadData") == 1 and names.count("cuLaunchKernelEx") == 6
    assert fake.last("cuLaunchKernelEx")[0]._obj.stream == 5
    manifest.write_text("[]")
    with pytest.raises(BrakecheckError, match="no manifest of kernels"):
        cubins.kernel_operators(catalogue(), manifest)


def test_an_arm_hands_its_cubins_to_its_workers_and_keeps_its_toolchain(monkeypatch):
    from brakecheck.bench import controller

    asked = []
    monkeypatch.setattr(controller, "WorkerProcess", lambda environment, hello: asked.append(hello))
    environment = Environment("env:x", "x", ("python",))
    arms = [ArmSpec(n, environment, "cuda", cubins=f"/{n}", toolchain=Stack(f"cuda=={n}", n)) for n in ("1", "2")]
    both = Controller(arms, Options(device="cuda:0"), lambda a, b: True)
    both._worker(0), both._worker(1)
    assert [a["cubins"] for a in asked] == ["/1", "/2"] and arms[1].spec == "cuda==2"


def measured(arm, us, pairs=6):
    blocks = tuple(Block((us * (1 + 0.0003 * k),), pair=k, position=k) for k in range(pairs))
    return Measurement(arm, "softmax fused", "rows=1", "sm_90", "ok", key=KEY, blocks=blocks)


def static(state, kernel, **more):
    return Delta("softmax", kernel, "sm_90a", "static", state, more.pop("reason", "code"), "text", kernel=kernel,
                 source=SOURCE, base={"kernel": kernel}, candidate={"kernel": kernel}, **more)


def run(deltas, us=(10.0, 10.0)):
    arms = (Arm("base", Stack("cuda==1", "cuda 1")), Arm("candidate", Stack("cuda==2", "cuda 2")))
    comparison = Comparison(Verdict.WITHHELD, "", (), arms, {}, tuple(deltas))
    told = {"comparison": comparison.to_json(), "timed": {"softmax fused": [[SOURCE, "fused"]]}}
    return Run("r", "2026", arms, {}, (measured("base", us[0]), measured("candidate", us[1])), static=told)


def test_equal_machine_code_is_the_same_and_timed_kernels_tell_what_changed():
    grew = Change("registers", 40, 168, "registers a thread 40 -> 168")
    changed = static(State.UNDECIDED, "fused", changes=(grew,), component="ptxas", attribution="swapped")
    same = static(State.SAME, "other", reason="identical-sass")
    found = compare_run(run([changed, same], (10.0, 12.0)))
    by_case = {d.case: d for d in found.deltas}
    assert set(by_case) == {"rows=1", "other"} and by_case["other"].reason == "identical-sass"
    assert by_case["rows=1"].state is State.SLOWER and by_case["rows=1"].changes == (grew,)
    assert by_case["rows=1"].component == "ptxas" and found.verdict is Verdict.BRAKE
    assert found.coverage["same"] == 1 and found.coverage["compared"] == 2
    assert compare_run(run([changed, same])).verdict is Verdict.GO


def test_where_every_kernel_was_timed_the_times_decide():
    assert compare_run(run([static(State.UNDECIDED, "fused")])).verdict is Verdict.GO


def test_of_several_toolchains_code_and_times_decide_together():
    names = ("1", "2", "3")
    arms = tuple(Arm(n, Stack(f"cuda=={n}", f"cuda {n}")) for n in names)
    deltas = (static(State.BROKEN, "gone", reason="does-not-compile", step=("1", "2")),
              static(State.FIXED, "gone", reason="compiles", step=("2", "3")))
    told = {"comparison": Comparison(Verdict.BRAKE, "", (), arms, {}, deltas).to_json(), "timed": {}}
    found = compare_run(Run("r", "2026", arms, {}, tuple(measured(n, 10.0) for n in names), static=told))
    assert found.environment["verdicts"] == {"2": "BRAKE", "3": "GO"}
    assert found.verdict is Verdict.BRAKE and found.headline.endswith(" | GO: 3")
    assert found.headline.startswith("BRAKE: 2: ") and "CUDA 2" in found.headline
    assert found.coverage["compared"] == 2 and found.coverage["fixed"] == 0  # the kernel that was timed, and this one


def test_headline_and_coverage_are_of_one_candidate_where_times_hold_one_and_code_another():
    arms = tuple(Arm(n, Stack(f"cuda=={n}", f"cuda {n}")) for n in "123")
    broken = static(State.BROKEN, "gone", reason="cannot-launch-elsewhere", step=("2", "3"))
    told = {"comparison": Comparison(Verdict.HOLD, "", (), arms, {}, (broken,)).to_json(), "timed": {}}
    times = (measured("1", 10.0), measured("2", 10.3), measured("3", 10.0))
    found = compare_run(Run("r", "2026", arms, {}, times, static=told))
    assert found.environment["verdicts"] == {"2": "HOLD", "3": "HOLD"}
    assert found.verdict is Verdict.HOLD and found.headline.startswith("HOLD: 3: ")
    assert found.coverage["slower"] == 0 and found.coverage["same"] == 1  # of the third, as the headline
    assert any(r.code == "slower" for r in found.reasons)


@pytest.mark.parametrize("codes, states, verdict", [
    ("aba", "??", "GO"), ("abc", "??", "WITHHELD"), ("abc", "x?", "BRAKE"), ("aba", "x?", "GO"), ("abb", "x", "BRAKE"),
    ("a-a", "x+", "GO"), ("a-b", "x+", "WITHHELD"), ("-ab", "+?", "WITHHELD")])
def test_code_that_was_not_timed_is_compared_with_the_base_over_all_steps(codes, states, verdict):
    """x broken, + fixed, ? changed; the verdict of moving from the first to the last of three toolchains."""
    arms = tuple(Arm(n, Stack(f"cuda=={n}", f"cuda {n}")) for n in "123")
    words = {"x": (State.BROKEN, "wgmma-serialised"), "+": (State.FIXED, "compiles-now"),
             "?": (State.UNDECIDED, "code")}

    def side(code):
        return {} if code == "-" else {"kernel": "k", "code_sha256": code}

    deltas = [replace(static(words[s][0], "k", reason=words[s][1], step=("123"[i], "123"[i + 1])),
                      base=side(codes[i]), candidate=side(codes[i + 1])) for i, s in enumerate(states)]
    if len(states) == 1:
        deltas[0] = replace(deltas[0], since=("3",))
    told = {"comparison": Comparison(Verdict.WITHHELD, "", (), arms, {}, tuple(deltas)).to_json(), "timed": {}}
    found = compare_run(Run("r", "2026", arms, {}, tuple(measured(n, 10.0) for n in "123"), static=told))
    assert found.environment["verdicts"]["3"] == verdict
    assert found.coverage["compared"] == 2


@pytest.mark.parametrize("between, reason, parts", [
    (9.0, "code", {"ptxas"}), (10.0, "code", {"ptxas"}), (None, "code", {"nvrtc", "ptxas"}),
    (None, "does-not-compile", {"ptxas"})])
def test_a_cause_lies_after_the_last_release_that_was_no_slower(between, reason, parts):
    names = ("1", "2", "3")
    arms = tuple(Arm(n, Stack(f"cuda=={n}.0", f"cuda {n}")) for n in names)
    deltas = (static(State.UNDECIDED, "fused", step=("1", "2"), component="nvrtc", attribution="one", reason=reason),
              static(State.UNDECIDED, "fused", step=("2", "3"), component="ptxas", attribution="two"))
    told = {"comparison": Comparison(Verdict.WITHHELD, "", (), arms, {}, deltas).to_json(),
            "timed": {"softmax fused": [[SOURCE, "fused"]]}}
    times = (measured("1", 10.0), *([measured("2", between)] if between else []), measured("3", 10.5))
    (cause,) = compare_run(Run("r", "2026", arms, {}, times, static=told)).causes
    assert set(cause.component.split("+")) == parts
    assert f"is slower from {'2' if between else '1'} to 3: " in cause.evidence[0]


def test_a_kernel_that_no_longer_compiles_outweighs_equal_times():
    gone = static(State.BROKEN, "gone", reason="does-not-compile")
    found = compare_run(run([static(State.UNDECIDED, "fused"), gone]))
    assert found.verdict is Verdict.BRAKE and found.coverage["broken"] == 1


def test_a_wrong_result_that_another_assembler_puts_right_is_its_doing_and_a_reason_to_go():
    """Byte-identical PTX, wrong with one ptxas and right with the next (F19)."""
    why = "the PTX is identical, the cubin is not"
    told = run([static(State.UNDECIDED, "fused", component="ptxas", attribution=why)])
    wrong, right = told.measurements
    told = replace(told, measurements=(replace(wrong, numerics={"ok": False}), replace(right, numerics={"ok": True})))
    found = compare_run(told)
    assert found.verdict is Verdict.GO and "right-result" in [r.code for r in found.reasons]
    (cause,) = found.causes
    assert (cause.component, cause.share) == ("ptxas", 1.0)
    assert cause.evidence == (f"{why}: softmax fused rows=1 (sm_90)",)
