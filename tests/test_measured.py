"""Verdicts on tables of numbers: the mission's example and the field reports on speed, memory, numerics, coverage."""

import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest

from brakecheck.bench.table import read_table
from brakecheck.model import Arm, Block, BrakecheckError, Component, Key, Measurement, Run, Stack, State, Verdict
from brakecheck.verdict.measured import measured_deltas, throughput
from brakecheck.verdict.measured_verdict import compare_runs, conclude
from brakecheck.verdict.patterns import interaction
from brakecheck.verdict.policy import MeasuredRules, Policy
from brakecheck.verdict.several import compare_several

KEY = Key("cuda-graph", "graph", "cold", "burst", "normal(mean=0.0 std=1.0)", "1")
MIB = 2**20


def measured(arm, operator, case, us, pairs=6, arch="sm_90", noise=0.002, paired=True, **more):
    """A measurement whose block medians scatter by `noise` around `us`; us None: no blocks."""
    rng = np.random.default_rng(zlib.crc32(f"{arm} {operator} {case} {arch}".encode()))
    blocks = (
        ()
        if us is None
        else tuple(
            Block((float(us * np.exp(rng.normal(0, noise))),), pair=k if paired else None, position=k)
            for k in range(pairs)
        )
    )
    return Measurement(
        arm, operator, case, arch, more.pop("status", "ok"), key=more.pop("key", KEY), blocks=blocks, **more
    )


def arms(base=(), candidate=()):
    return (
        Arm("base", Stack("base", "base", tuple(Component(*c) for c in base))),
        Arm("candidate", Stack("candidate", "candidate", tuple(Component(*c) for c in candidate))),
    )


def judged(rows, policy=None, **components):
    """rows: (operator, case, base us, candidate us, keywords of both sides or {"base": {...}, "candidate": {...}})."""
    base, candidate = [], []
    for operator, case, a, b, *more in rows:
        how = dict(more[0]) if more else {}
        own = {side: how.pop(side, {}) for side in ("base", "candidate")}
        base.append(measured("base", operator, case, a, **how, **own["base"]))
        candidate.append(measured("candidate", operator, case, b, **how, **own["candidate"]))
    return conclude(base, candidate, arms(**components), policy)


def reason(comparison, code):
    return next(r for r in comparison.reasons if r.code == code)


def test_more_memory_for_little_throughput_is_a_brake_that_says_so():
    found = judged(
        [
            (
                "decode step",
                "batch=64",
                1000.0,
                1000.0 / 1.023,
                {"base": {"memory": {"allocated": 10_000 * MIB}}, "candidate": {"memory": {"allocated": 11_900 * MIB}}},
            )
        ]
    )
    assert found.verdict is Verdict.BRAKE
    assert "memory +19%, throughput +2." in found.headline and "10,000 -> 11,900 MiB" in found.headline
    assert found.deltas[0].state is State.FASTER


def test_little_growth_is_a_hold_and_noise_of_a_few_mib_is_nothing():
    def grown(to):
        return judged(
            [
                (
                    "op",
                    "n=1",
                    10.0,
                    10.0,
                    {"base": {"memory": {"allocated": 1000 * MIB}}, "candidate": {"memory": {"allocated": to * MIB}}},
                )
            ]
        ).verdict

    assert (grown(1070), grown(1030), grown(1000)) == (Verdict.HOLD, Verdict.GO, Verdict.GO)
    small = judged(
        [
            (
                "op",
                "n=1",
                10.0,
                10.0,
                {"base": {"memory": {"host_peak": 1 * MIB}}, "candidate": {"memory": {"host_peak": 9 * MIB}}},
            )
        ]
    )
    assert small.verdict is Verdict.GO


# ---- F1 ------------------------------------------------------------------------------------------
F1 = [
    ("bmm", "batch=1 M=1 N=1 K=4096", 12.4, 15.3),
    ("bmm", "batch=1 M=1 N=1 K=16384", 12.2, 53.9),
    ("bmm", "batch=1 M=1 N=1 K=131072", 12.0, 412.5),
    ("bmm", "batch=128 M=128 N=128 K=128", 100.0, 100.2),
    ("bmm", "batch=256 M=256 N=256 K=256", 400.0, 330.0),
    ("bmm", "batch=512 M=512 N=512 K=512", 900.0, 900.0),
    ("mm", "M=1 N=1 K=131072", 12.0, 12.0),
]


def test_batch_one_with_long_k_is_scoped_named_and_mitigated():
    found = judged(F1)
    assert found.verdict is Verdict.HOLD
    slow = reason(found, "slower")
    assert slow.scope["batch"] == "1" and "3 of 6 cases" in slow.text
    assert "grows with K" in slow.text and re.search(r"34\.\dx at K=131072", slow.text)
    (mitigation,) = found.mitigations
    assert mitigation.action == "send batch 1 of bmm to mm" and mitigation.measured and mitigation.recovers > 0.99
    assert {d.case: d.state for d in found.deltas}["batch=256 M=256 N=256 K=256"] is State.FASTER


def test_moved_optimum_is_not_a_regression_of_the_tuned_kernel():
    found = judged(
        [
            (
                "matmul",
                "M=4096 num_warps=4",
                1885.0,
                3761.0,
                {"base": {"first_call_ms": 50_000.0}, "candidate": {"first_call_ms": 780_000.0}},
            ),
            ("matmul", "M=4096 num_warps=8", 1901.0, 1931.0),
        ]
    )
    moved = reason(found, "optimum-moved")
    assert found.verdict is Verdict.HOLD and "num_warps=8" in moved.text
    assert found.mitigations[0].action.startswith("re-tune matmul") and found.mitigations[0].recovers > 0.95
    assert "780 s instead of 50 s" in reason(found, "compile-time").text


def test_verdict_per_compute_capability():
    rows = [
        measured(arm, "paged attention", "decode", us, arch=arch)
        for arm, arch, us in (
            ("base", "sm_90", 227.0),
            ("candidate", "sm_90", 340.0),
            ("base", "sm_86", 300.0),
            ("candidate", "sm_86", 300.0),
        )
    ]
    found = conclude(rows[::2], rows[1::2], arms())
    assert found.environment["verdict_by_arch"] == {"sm_90": "BRAKE", "sm_86": "GO"}
    assert "BRAKE on sm_90, GO on sm_86" in found.headline
    assert reason(found, "slower").scope["arch"] == "sm_90"


def test_base_with_two_values_gives_a_range_and_asks_for_more():
    base = Measurement("base", "conv", "n=1", "sm_90", "ok", key=KEY, blocks=(Block((451.0,)), Block((501.0,))))
    candidate = Measurement("candidate", "conv", "n=1", "sm_90", "ok", key=KEY, blocks=(Block((608.0,)),))
    (delta,) = measured_deltas([base], [candidate])
    assert delta.state is State.UNDECIDED and delta.reason == "several-values" and delta.ratio is None
    assert "+21% to +35%" in delta.text and "measure at least 4 pairs" in delta.text


def test_interaction_of_one_driver_with_one_compiler():
    times = {
        ("3.1", "old driver"): 14.71,
        ("3.1", "new driver"): 15.89,
        ("3.2", "old driver"): 14.54,
        ("3.2", "new driver"): 22.03,
        ("3.3", "old driver"): 14.53,
        ("3.3", "new driver"): 14.95,
    }
    found = interaction(times, ("triton", "driver"), 0.01)
    (move, other) = found.moves
    assert found.levels == ("3.2", "new driver") and (move.component, move.to) == ("driver", "old driver")
    assert move.recovers > 0.99 and found.ratio > 1.4 and (other.component, other.to) == ("triton", "3.3")
    assert interaction({k: v for k, v in times.items() if k[0] != "3.2"}, ("triton", "driver"), 0.05) is None
    assert interaction({("a", "x"): 1.0, ("a", "y"): 2.0, ("b", "x"): 3.0}, ("t", "d"), 0.01) is None


# ---- Memory --------------------------------------------------------------------------------------
def test_nccl_growth_is_a_hold_with_a_guarded_switch():
    how = {"base": {"memory": {"process": 9_000 * MIB}}, "candidate": {"memory": {"process": 10_500 * MIB}}}
    found = judged(
        [("all-reduce", "graphs=30", 100.0, 100.0, how)], base=[("nccl", "2.18.3")], candidate=[("nccl", "2.19.3")]
    )
    assert found.verdict is Verdict.HOLD and reason(found, "memory-growth")
    (mitigation,) = found.mitigations
    assert (
        mitigation.action == "NCCL_CUMEM_ENABLE=0"
        and "multi-node NVLink" in mitigation.guard
        and not mitigation.measured
    )
    same = judged(
        [("all-reduce", "graphs=30", 100.0, 100.0, how)], base=[("nccl", "2.19.3")], candidate=[("nccl", "2.20")]
    )
    assert same.verdict is Verdict.BRAKE and not same.mitigations


def test_fixed_workspace_is_not_a_leak_and_a_leak_is():
    def kept(fixed, growth):
        return judged(
            [
                (
                    "mm",
                    "n=1",
                    10.0,
                    10.0,
                    {
                        "base": {"retention": {"fixed": 0, "growth": 0, "calls": 8}},
                        "candidate": {"retention": {"fixed": fixed, "growth": growth, "calls": 8}},
                    },
                )
            ]
        )

    workspace = kept(8_519_680, 0)
    assert workspace.verdict is Verdict.GO
    assert "fixed workspace of 8,519,680 bytes" in workspace.deltas[0].changes[0].text
    assert "cuBLAS workspace" in workspace.deltas[0].changes[0].text
    leak = kept(1 << 20, 1 << 20)
    assert leak.verdict is Verdict.BRAKE and "after every call" in reason(leak, "memory-leak").text


def test_memory_that_moves_with_the_driver_alone_is_its_doing():
    """The CUDA of the build stays, the driver moves (F8): two components, and the cause is the one that moved."""
    how = {
        "base": {"memory": {"process": 3900 * MIB}},
        "candidate": {"memory": {"process": 1167 * MIB}},
    }
    found = judged(
        [("graph capture", "graphs=35", 100.0, 100.0, how)],
        base=[("driver", "525.60"), ("driver-cuda", "12.0"), ("cuda-build", "12.1")],
        candidate=[("driver", "550.54"), ("driver-cuda", "12.4"), ("cuda-build", "12.1")],
    )
    (cause,) = found.causes
    assert cause.component == "driver" and "525.60 -> 550.54" in cause.evidence[0] and found.verdict is Verdict.GO
    two = judged(
        [("op", "n=1", 100.0, 120.0)],
        base=[("driver", "1"), ("cuda-build", "12.1")],
        candidate=[("driver", "2"), ("cuda-build", "12.4")],
    )
    assert not two.causes


def test_a_difference_that_was_not_meant_comes_first():
    base, candidate = arms([("cublas", "13.0"), ("python", "3.11")], [("cublas", "13.5"), ("python", "3.12")])
    candidate = replace(candidate, stack=replace(candidate.stack, spec="base+nvidia-cublas==13.5"))
    rows = [measured(arm, "mm", "n=1", 10.0) for arm in ("base", "candidate")]
    found = conclude(rows[:1], rows[1:], (base, candidate))
    assert found.reasons[0].code == "unintended-difference" and "python: 3.11 -> 3.12" in found.reasons[0].text
    assert len([r for r in found.reasons if r.code == "unintended-difference"]) == 1


# ---- Keys, timers, drift -------------------------------------------------------------------------
@pytest.mark.parametrize(
    "part, value",
    [
        ("inputs", "zeros"),
        ("harness", "2"),
        ("timer", "cuda-events"),
        ("mode", "eager"),
        ("cache", "warm"),
        ("duty", "sustained"),
    ],
)
def test_unlike_keys_are_refused(part, value):
    found = judged([("mm", "n=8192", 1000.0, 900.0, {"candidate": {"key": replace(KEY, **{part: value})}})])
    (delta,) = found.deltas
    assert delta.state is State.UNDECIDED and delta.reason == "unlike-keys" and delta.ratio is None
    assert f"{part}: " in delta.text and found.verdict is Verdict.WITHHELD


def test_a_timer_that_does_not_wait_withholds_the_verdict():
    rows = [
        ("mm", f"n={2**k}", 30.0 + k % 3, 30.0 + (k + 1) % 3, {"work": {"flops": 2.0 * 8**k, "bytes": 12.0 * 4**k}})
        for k in range(5, 14)
    ]
    found = judged(rows)
    assert found.verdict is Verdict.WITHHELD and all(d.reason == "timer-does-not-wait" for d in found.deltas)


def test_plain_a_then_b_under_a_falling_clock_is_refused():
    def falling(arm, scale):
        us = tuple(scale * 1e3 / x for x in (1425, 1450, 1373, 1237))
        return Measurement(
            arm,
            "mm",
            "n=1",
            "sm_90",
            "ok",
            key=KEY,
            blocks=tuple(Block(us, clocks=(1965, 1900, 1750, 1580)) for _ in range(4)),
        )

    (delta,) = measured_deltas([falling("base", 1.0)], [falling("candidate", 1.05)])
    assert delta.reason == "drift" and "clock" in delta.text and "not interleaved" in delta.text


# ---- Coverage and numerics -----------------------------------------------------------------------
def test_states_of_cases_that_fail():
    def state(base, candidate):
        (delta,) = measured_deltas(
            [measured("base", "op", "c", None if base != "ok" else 1.0, status=base, message="why")],
            [measured("candidate", "op", "c", None if candidate != "ok" else 1.0, status=candidate, message="why")],
        )
        return delta.state, delta.reason

    assert state("ok", "crash") == (State.BROKEN, "crash")
    assert state("oom", "ok") == (State.FIXED, "oom")
    assert state("error", "timeout") == (State.UNDECIDED, "fails-on-both")
    assert state("ok", "missing") == (State.MISSING, "not-measured")
    assert state("missing", "ok") == (State.NEW, "new-case")
    assert (
        judged([("op", "c", 1.0, None, {"candidate": {"status": "crash", "message": "boom"}})]).verdict is Verdict.BRAKE
    )
    assert judged([("op", "c", 1.0, None, {"candidate": {"status": "missing"}})]).verdict is Verdict.HOLD


def test_falling_back_to_the_cpu_withholds():
    why = "torch sees no CUDA device: this torch is built for CUDA 13.0, the driver supports CUDA 12.4"
    found = judged([("op", "c", 1.0, None, {"candidate": {"status": "unusable", "message": why}})])
    assert found.verdict is Verdict.WITHHELD and "12.4" in reason(found, "fell-back").text


def test_correctness_outranks_speed_in_both_directions():
    wrong = {"ok": False, "why": "out: 16 of 272 integers are wrong"}
    worse = judged(
        [("int8 mm", "M=17", 10.0, 5.0, {"base": {"numerics": {"ok": True}}, "candidate": {"numerics": wrong}})]
    )
    assert worse.verdict is Verdict.BRAKE and "integers are wrong" in worse.headline
    better = judged(
        [("int8 mm", "M=17", 10.0, 20.0, {"base": {"numerics": wrong}, "candidate": {"numerics": {"ok": True}}})]
    )
    assert better.verdict is Verdict.GO and better.deltas[0].state is State.FIXED
    assert "a reason to go" in reason(better, "right-result").text


@pytest.mark.parametrize("before, after, state", [
    ({"ok": True}, {"ok": False, "why": "far off"}, State.BROKEN),
    ({"ok": True, "refused": "no"}, {"ok": False, "why": "far off"}, State.BROKEN),
    ({"ok": False, "why": "far off"}, {"ok": True}, State.FIXED),
    ({"ok": True, "same_in_both_orders": True}, {"ok": True, "same_in_both_orders": False}, State.BROKEN),
    ({"ok": False}, {"ok": False}, State.SAME), (None, {"ok": False}, State.SAME)])
def test_results_that_depend_on_the_layout(before, after, state):
    sides = {side: {"numerics": {"ok": True, "layouts": {"strided": found} if found else {}}}
             for side, found in (("base", before), ("candidate", after))}
    found = judged([("mm", "n=1", 10.0, 10.0, sides)])
    assert found.deltas[0].state is state
    assert found.verdict is {State.BROKEN: Verdict.BRAKE}.get(state, Verdict.GO)


def test_lost_determinism_is_a_hold():
    found = judged(
        [
            (
                "scatter",
                "n=1",
                10.0,
                10.0,
                {
                    "base": {"numerics": {"ok": True, "distinct": 1, "digest": "a"}},
                    "candidate": {"numerics": {"ok": True, "distinct": 3, "repeats": 4}},
                },
            )
        ]
    )
    assert found.verdict is Verdict.HOLD and "3 different results from 4" in reason(found, "not-deterministic").text


def test_equal_arms_go_and_a_required_gain_holds_them():
    rows = [("op", f"n={k}", 10.0, 10.0) for k in range(20)]
    assert judged(rows).verdict is Verdict.GO
    assert judged(rows, Policy(measured=MeasuredRules(min_gain=0.02))).verdict is Verdict.HOLD
    assert abs(throughput(judged(rows).deltas)) < 0.01


def test_gain_of_a_workload_weighs_its_operators():
    deltas = judged([("attention", "n=1", 10.0, 20.0, {"noise": 0.0}), ("mm", "n=1", 10.0, 5.0, {"noise": 0.0})]).deltas
    assert throughput(deltas) == pytest.approx(0.0)
    assert throughput(deltas, {"attention": 0.1, "mm": 0.9}) == pytest.approx(1 / (0.1 * 2 + 0.9 * 0.5) - 1)
    assert throughput(deltas, {"conv": 1.0}) is None and throughput(()) is None


def test_a_bimodal_base_is_named_although_it_has_enough_pairs():
    base = [10.0, 12.0, 10.01, 12.01]
    sides = [
        Measurement(arm, "op", "c", "sm_90", "ok", key=KEY, blocks=tuple(Block((u,), k, k) for k, u in enumerate(us)))
        for arm, us in (("base", base), ("candidate", [11.0, 11.01, 11.0, 11.01]))
    ]
    (delta,) = measured_deltas(sides[:1], sides[1:])
    assert delta.state is State.UNDECIDED and "several values (10, 12 us)" in delta.text


def test_mostly_undecided_is_withheld_with_what_would_decide_it():
    found = judged([("op", f"n={k}", 10.0, 10.0, {"noise": 0.03}) for k in range(4)])
    assert found.verdict is Verdict.WITHHELD
    assert "pairs would decide it" in found.deltas[0].text and found.deltas[0].candidate["detectable"] > 1.02


def test_an_undecided_case_is_promised_no_fewer_pairs_than_it_has():
    (delta,) = judged([("mm", "n=1", 10.0, 10.1, {"pairs": 16, "noise": 0.001})]).deltas
    assert delta.state is State.UNDECIDED
    assert delta.text.endswith("; too near the margin for a few more pairs to decide it")


def test_a_go_counts_what_only_looks_slower_among_many_cases():
    found = judged([("mm", f"n={i}", 10.0, 10.3 if i == 7 else 10.0, {"pairs": 4}) for i in range(400)])
    (delta,) = [d for d in found.deltas if d.case == "n=7"]
    assert delta.state is State.UNDECIDED and delta.low > 1.01
    assert delta.text.endswith(": not beyond the margin once all cases are counted; more pairs would tell")
    assert found.verdict is Verdict.GO
    assert "1 of them looks slower, which chance may do among so many cases" in found.headline


@pytest.mark.parametrize("noise, verdict", [(0.05, Verdict.WITHHELD), (0.001, Verdict.HOLD)])
def test_a_first_bad_release_is_one_that_was_found_slower(noise, verdict):
    wave = [np.exp(noise * k) for k in (-1, 1, 0, 1, -1, 0)]  # the medians step by 4 %, whatever the noise

    def arm(name, us, shift):
        blocks = tuple(Block((us * wave[(k + shift) % 6],), k, k) for k in range(6))
        return Measurement(name, "mm", "n=1", "sm_90", "ok", key=KEY, blocks=blocks)

    found = (arm("a", 10.0, 0), arm("b", 10.4, 1), arm("c", 10.38, 2))
    compared = compare_several(Run("r", "2026", tuple(Arm(n, Stack(n, n)) for n in "abc"), {}, found))
    assert compared.verdict is verdict
    assert ("first bad release b" in compared.headline) is (verdict is Verdict.HOLD)


@pytest.mark.parametrize("slow, noise, verdict, said", [
    ("A1", 0.001, Verdict.GO, False), ("A2", 0.001, Verdict.BRAKE, True), ("none", 0.1, Verdict.WITHHELD, False)])
def test_an_interaction_is_a_reason_to_wait_where_a_candidate_has_it(slow, noise, verdict, said):
    names = ("A1", "A2", "B1", "B2")
    arms_ = tuple(Arm(n, Stack(n, n, (Component("driver", n[0]), Component("triton", n[1])))) for n in names)
    found = tuple(measured(n, "mm", "n=2", 12.0 if n == slow else 10.0, noise=noise) for n in names)
    compared = compare_several(Run("r", "2026", arms_, {}, found))
    assert compared.verdict is verdict
    assert ("an interaction of driver A with triton 2" in compared.headline) is said
    assert said or not any(r.code == "interaction" for r in compared.reasons)


def test_what_is_missing_on_both_sides_does_not_fail():
    found = judged([("mm", "n=1", None, None, {"status": "missing", "message": "no Triton"})])
    assert found.deltas[0].text == "missing on both (missing: no Triton)"
    assert "1 of 1 cases are undecided (1 missing on both)" in found.headline


# ---- Tables --------------------------------------------------------------------------------------
def test_table_of_blocks_as_json_and_csv_gives_the_same_verdict(tmp_path):
    rows = [
        {
            "arm": arm,
            "operator": "mm",
            "case": "n=1",
            "arch": "sm_90",
            "pair": k,
            "us": [us * (1 + 0.001 * k)],
            "memory": {"allocated": 1e9},
        }
        for k in range(5)
        for arm, us in (("old", 10.0), ("new", 10.5))
    ]
    (tmp_path / "t.json").write_text(
        json.dumps({"schema": "brakecheck/blocks/1", "key": {"timer": "nvbench"}, "blocks": rows})
    )
    lines = ["arm,operator,case,arch,pair,us,memory.allocated,timer"]
    lines += [f"{r['arm']},mm,n=1,sm_90,{r['pair']},{r['us'][0]},1e9,nvbench" for r in rows]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    a, b = (read_table(str(tmp_path / name)) for name in ("t.json", "t.csv"))
    assert a.measurements == b.measurements
    found = compare_runs(a, a)
    assert found.deltas[0].state is State.SLOWER and found.deltas[0].ratio == pytest.approx(1.05)
    assert found.deltas[0].evidence == "recorded"


@pytest.mark.parametrize(
    "text, what",
    [
        ('{"blocks": []}', "no blocks"),
        ("{", "not a table"),
        ('{"blocks": [{"arm": "a", "operator": "o"}]}', "lacks 'case'"),
        ('{"blocks": [{"arm": "a", "operator": "o", "case": "c", "us": 0}]}', "positive number"),
        ('{"blocks": [{"arm": "a", "operator": "o", "case": "c"}]}', "neither times"),
        ('{"blocks": [{"arm": "a", "operator": "o", "case": "c", "us": 1, "status": "fine"}]}', "is not known"),
        ('{"schema": "other/1", "blocks": [{}]}', "is not known"),
    ],
)
def test_bad_tables_are_named_errors(tmp_path, text, what):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(BrakecheckError, match=what) as problem:
        read_table(str(tmp_path / "t.json"))
    assert "t.json" in problem.value.where


def test_runs_taken_apart_are_compared_unpaired_and_say_so():
    from brakecheck.model import Run

    runs = [
        Run(name, "", (Arm(name, Stack(name, name)),), {}, (measured(name, "mm", "n=1", us),))
        for name, us in (("a", 10.0), ("b", 11.0))
    ]
    (delta,) = compare_runs(*runs).deltas
    assert delta.state is State.SLOWER and "not taken together" in delta.text
    settled = [replace(r, arms=(replace(r.arms[0], name="base"),), measurements=tuple(replace(
        m, arm="base", blocks=tuple(replace(b, settled=True, settle_seconds=0.1) for b in m.blocks))
        for m in r.measurements)) for r in runs]  # each of `brakecheck run`
    assert set(compare_runs(*settled).environment["conditions"]) == {"base", "candidate"}
    there, here = ({"name": name, "power_limit_watts": 700.0} for name in ("NVIDIA H100", "NVIDIA H200"))
    elsewhere = compare_runs(replace(runs[0], device=there), replace(runs[1], device=here))
    assert elsewhere.verdict is Verdict.WITHHELD and elsewhere.reasons[-1].code == "undecided"
    assert "device name: NVIDIA H100 against NVIDIA H200" in elsewhere.deltas[0].text
    assert compare_runs(runs[0], replace(runs[1], device=here)).deltas[0].state is State.SLOWER  # not told: not unlike
