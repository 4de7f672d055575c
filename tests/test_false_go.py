"""What must never end in GO, nor in a stack trace: evidence that is missing, contradictory, or misread."""

import json
from dataclasses import replace

import pytest

from brakecheck import api
from brakecheck.bench import store
from brakecheck.bench.controller import Options
from brakecheck.bench.journal import measurements
from brakecheck.bench.recorded import pooled
from brakecheck.bench.table import read_table
from brakecheck.cli import main
from brakecheck.model import (
    Arm,
    Block,
    BrakecheckError,
    Change,
    Delta,
    Key,
    Measurement,
    Run,
    Stack,
    State,
    UsageError,
    Verdict,
)
from brakecheck.model.codec import encode
from brakecheck.report import words
from brakecheck.verdict.measured_verdict import conclude
from brakecheck.verdict.policy import load_policy

KEY = {"timer": "steady-clock", "mode": "eager", "cache": "cold", "duty": "burst", "inputs": "normal", "harness": "1"}
SAME = (10, 10.01, 9.99, 10, 10)
SLOW = (20, 20.01, 19.99, 20, 20)


def rows(arm, times=SAME, case="n=1", **more):
    return [{"arm": arm, "operator": "mm", "case": case, "pair": i, "us": [us, us], **more}
            for i, us in enumerate(times)]


def both(**candidate):
    return rows("base") + rows("candidate", **candidate)


def table(folder, blocks, name="t.json", **more):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"blocks": blocks, **more}))
    return str(path)


def compared(*files, **more):
    return api.compare(*files, **more)


def test_equal_times_are_a_go(tmp_path):
    assert compared(table(tmp_path, both())).verdict is Verdict.GO  # what all of these tests take something away from


# ---- Results ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", [0, 4])
def test_one_wrong_result_makes_the_case_wrong(tmp_path, which):
    blocks = rows("base", right=True) + rows("candidate", right=True)
    blocks[5 + which].update(right=False, why="off by one")
    found = compared(table(tmp_path, blocks))
    assert found.verdict is Verdict.BRAKE and "off by one" in found.headline


def test_a_wrong_result_counts_where_the_base_was_not_checked(tmp_path):
    assert compared(table(tmp_path, both(right=False))).verdict is Verdict.BRAKE


def test_a_result_that_was_not_checked_is_not_taken_for_right(tmp_path):
    found = compared(table(tmp_path, rows("base", right=True) + rows("candidate")))
    assert found.verdict is Verdict.WITHHELD and found.comparison.deltas[0].reason == "not-checked"


@pytest.mark.parametrize("error, tolerance, verdict", [
    (0.5, None, Verdict.HOLD), (0.5, 1.0, Verdict.GO), (6e-7, None, Verdict.GO), (2e-7, None, Verdict.GO)])
def test_an_error_that_nobody_allowed_is_a_reason_to_wait(error, tolerance, verdict):
    def side(arm, relative):
        numerics = {"ok": True, "outputs": {"out": {"relative": relative}}}
        blocks = tuple(Block((us,), pair=i) for i, us in enumerate(SAME))
        return Measurement(arm, "mm", "n=1", "none", "ok", None, Key(**KEY), blocks,
                           numerics={**numerics, **({"tolerance": tolerance} if tolerance else {})})

    arms = tuple(Arm(name, Stack(name, name)) for name in ("base", "candidate"))
    found = conclude([side("base", 5e-8)], [side("candidate", error)], arms)
    assert found.verdict is verdict and ("states no tolerance" in found.headline) == (verdict is Verdict.HOLD)


def test_failures_count_where_the_base_counted_none(tmp_path):
    blocks = both()
    blocks[-1].update(failed=2, tries=5)
    found = compared(table(tmp_path, blocks))
    assert found.verdict is Verdict.HOLD and "failed in 2 of 5 tries" in found.headline


def test_memory_that_the_base_did_not_need_is_growth(tmp_path):
    blocks = rows("base", memory={"process": 0}) + rows("candidate", memory={"process": 2**34})
    found = compared(table(tmp_path, blocks))
    assert found.verdict is Verdict.HOLD and "where there was none" in found.headline


def test_two_failed_visits_are_a_failure_whatever_came_after():
    def visit(pair, ok):
        answer = {"result": {"key": KEY, "us": [10.0], "calls": 1, "first_call_ms": 1.0}} if ok else {
            "state": "crash", "message": "signal 11"}
        return {"event": "visit", "arm": 0, "pair": pair, "operator": "mm", "case": "n=1", "ok": ok, **answer}

    (once,) = measurements([visit(p, p != 1) for p in range(4)], ["a"], "none")
    (twice,) = measurements([visit(p, p % 2 == 1) for p in range(4)], ["a"], "none")
    assert (once.status, once.trials) == ("ok", {"failed": 1, "tries": 4}) and twice.status == "crash"


# ---- What was not decided --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("most", [0.5, 1.0])
def test_nothing_decided_is_no_go_whatever_the_policy_allows(tmp_path, most):
    policy = tmp_path / "p.toml"
    policy.write_text(f"[measured]\nmost_undecided = {most}")
    noisy = rows("base", (10, 12, 8, 10)) + rows("candidate", (14, 10, 8, 17))
    assert compared(table(tmp_path, noisy), policy=policy).verdict is Verdict.WITHHELD


def test_a_go_says_what_it_knows_nothing_of(tmp_path):
    blocks = both()
    for case, more in (("n=2", {"status": "crash"}), ("n=3", {"right": False})):
        blocks += [r for arm in ("base", "candidate") for r in rows(arm, case=case, **more)]
    blocks += [r for case in ("n=4", "n=5") for arm in ("base", "candidate") for r in rows(arm, case=case)]
    found = compared(table(tmp_path, blocks))
    assert found.verdict is Verdict.GO
    assert "nothing is known of 2 of 5 cases: 1 fail on both, 1 wrong on both" in found.headline


@pytest.mark.parametrize("more, why", [({"status": "crash"}, "fail on both"), ({"right": False}, "wrong on both"),
                                       ({"inputs": None}, "not measured alike")])
def test_half_of_the_cases_without_an_answer_are_no_go(tmp_path, more, why):
    def arm(name, case):
        inputs = {"inputs": name} if "inputs" in more else more
        return rows(name, case=case, **inputs)

    blocks = both() + [r for arm_name in ("base", "candidate") for r in arm(arm_name, "n=2")]
    blocks += rows("candidate", case="n=3") + rows("candidate", case="n=4")  # new cases carry nothing
    found = compared(table(tmp_path, blocks)).comparison
    assert found.verdict is Verdict.WITHHELD
    assert any(f"1 of 2 cases are undecided (1 {why})" in r.text for r in found.reasons)
    blocks += [r for arm_name in ("base", "candidate") for r in rows(arm_name, case="n=5")]
    left = compared(table(tmp_path, blocks)).comparison
    assert not any(r.code == "undecided" for r in left.reasons)


def test_an_architecture_of_which_nothing_is_known_is_no_go(tmp_path):
    blocks = [r for k in range(5) for arm in ("base", "candidate") for r in rows(arm, case=f"n={k}", arch="sm_90")]
    blocks += [r for arm in ("base", "candidate") for r in rows(arm, arch="sm_80", status="crash")]
    found = compared(table(tmp_path, blocks)).comparison
    assert found.environment["verdict_by_arch"] == {"sm_90": "GO", "sm_80": "WITHHELD"}
    assert found.verdict is Verdict.WITHHELD and "1 of 1 cases on sm_80 are undecided" in found.headline


def test_a_reason_to_wait_does_not_hide_how_little_is_known(tmp_path):
    blocks = rows("base", memory={"process": 0}) + rows("candidate", memory={"process": 2**34})
    blocks += [r for n in "23" for arm in ("base", "candidate") for r in rows(arm, case=f"n={n}", status="oom")]
    found = compared(table(tmp_path, blocks))
    assert found.verdict is Verdict.HOLD and "memory where there was none" in found.headline
    assert "too thin for a GO: 2 of 3 cases are undecided (2 fail on both)" in found.headline


# ---- Several candidates ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("times, status, said", [
    ((SLOW, SAME), 2, "BRAKE: b: "), ((SAME, SLOW), 2, "BRAKE: c: "), ((SAME, SAME), 0, "GO: throughput")])
def test_the_worst_candidate_decides_and_the_others_are_named(tmp_path, capsys, times, status, said):
    # The operators' components differ in two ways, so that the arms are no series of releases.
    blocks = [{**r, "components": {"x": x, "y": y}} for arm, us, x, y in zip("abc", (SAME, *times), "112", "121")
              for r in rows(arm, us)]
    with pytest.raises(SystemExit) as stop:
        main(["compare", table(tmp_path, blocks), "--json"])
    found = json.loads(capsys.readouterr().out)
    go = [arm for arm, us in zip("bc", times) if us is SAME]
    assert (stop.value.code or 0) == status and found["headline"].startswith(said)
    assert found["headline"].endswith(f" | GO: {', '.join(go)}")
    assert found["environment"]["verdicts"] == {arm: "GO" if arm in go else "BRAKE" for arm in "bc"}


def test_what_is_right_in_the_last_candidate_only_is_said_of_the_one_before(tmp_path):
    later = [1.05 * us for us in SAME]  # where it went slow is no reason for this BRAKE
    blocks = [r for arm, us, right in (("a", SAME, True), ("b", SAME, False), ("c", SAME, True))
              for r in rows(arm, us, right=right, why="off by one")]
    blocks += [r for arm, us in zip("abc", (SAME, later, SAME)) for r in rows(arm, us, case="n=2")]
    found = compared(table(tmp_path, blocks))
    assert found.verdict is Verdict.BRAKE and "off by one" in found.headline and "| GO: c" in found.headline


# ---- Memory ----------------------------------------------------------------------------------------------------------
def grown(kind, base, candidate):
    """Sizes in MiB, one for each visit."""
    def side(arm, sizes):
        return [{"arm": arm, "operator": "mm", "case": "n=1", "pair": i, "us": [10.0], "memory": {kind: size * 2**20}}
                for i, size in enumerate(sizes)]

    return side("base", base) + side("candidate", candidate)


@pytest.mark.parametrize("kind, base, candidate, verdict", [
    ("host_peak", (300, 420, 310, 300), (300, 400, 410, 400), Verdict.GO),  # visits of one arm move as much
    ("host_peak", (40, 40, 40, 40), (80, 80, 80, 80), Verdict.GO),  # less than host_floor
    ("host_peak", (300, 310, 300, 320), (600, 610, 600, 605), Verdict.HOLD),
    ("allocated", (300, 300, 300, 300), (400, 400, 400, 400), Verdict.BRAKE),
    ("allocated", (300, 420, 310, 300), (300, 400, 410, 400), Verdict.HOLD)])
def test_what_visits_of_one_arm_differ_by_is_no_brake(tmp_path, kind, base, candidate, verdict):
    found = compared(table(tmp_path, grown(kind, base, candidate)))
    assert found.verdict is verdict
    assert (f"visits of one arm differ by {max(base) - min(base)} MiB" in found.headline) == (verdict is Verdict.HOLD)


def test_a_run_keeps_how_far_its_visits_lie_apart(tmp_path):
    pytest.importorskip("polars")
    run = read_table(table(tmp_path, grown("host_peak", (300, 420), (300, 400))))
    again = store.read(store.write(replace(run, id="r"), str(tmp_path / "s")))
    assert [m.memory_spread for m in again.measurements] == [{"host_peak": 120 * 2**20}, {"host_peak": 100 * 2**20}]


def test_a_go_says_which_memory_it_does_not_know(tmp_path):
    found = compared(table(tmp_path, rows("base", memory={"process": 2**30}) + rows("candidate")))
    assert found.verdict is Verdict.GO
    assert "memory (process) of 1 of 1 cases is known on the base only" in found.headline


def test_new_cases_alone_are_no_comparison(tmp_path):
    blocks = rows("candidate") + rows("base", case="n=2")
    text = table(tmp_path, blocks)
    assert compared(text).verdict is not Verdict.GO
    with pytest.raises(BrakecheckError, match="no block of the arm 'old'"):
        read_table(table(tmp_path, both(), arms=[{"name": "old"}, {"name": "candidate"}]))


def test_a_gain_that_is_not_known_is_not_reached(tmp_path):
    policy = tmp_path / "p.toml"
    policy.write_text("[measured]\nmin_gain = 0.1\n[measured.weights]\nnot_measured = 1.0")
    found = compared(table(tmp_path, both()), policy=policy)
    assert found.verdict is Verdict.HOLD and "is not known" in found.headline
    policy.write_text("[measured.weights]\nnot_measured = 1.0")
    assert any(r.code == "no-weight" for r in compared(table(tmp_path, both()), policy=policy).comparison.reasons)


# ---- Several runs ----------------------------------------------------------------------------------------------------
def test_one_table_given_twice_counts_once(tmp_path):
    few = table(tmp_path, rows("base", SAME[:2]) + rows("candidate", SAME[:2]))
    assert compared(few, few).verdict is Verdict.WITHHELD


def test_a_visit_that_two_runs_hold_counts_once():
    def run(name, pairs):
        made = [Measurement(arm, "mm", "n=1", "none", "ok", None, Key(**KEY),
                            tuple(Block((10.0 + p,), pair=p, started=100.0 + p) for p in range(pairs)))
                for arm in ("base", "candidate")]
        return Run(name, "", tuple(Arm(arm, Stack(arm, arm)) for arm in ("base", "candidate")), {}, tuple(made))

    together = pooled([run("interrupted", 2), run("went-on", 5)])
    assert together is not None and [len(m.blocks) for m in together.measurements] == [5, 5]


def test_tables_of_one_name_in_two_folders_are_two(tmp_path):
    old = table(tmp_path / "old", rows("base"))
    new = table(tmp_path / "new", rows("candidate", SLOW))
    assert compared(old, new).verdict is Verdict.BRAKE


@pytest.mark.parametrize("second", [{"right": False}, {"status": "crash"}])
def test_what_went_wrong_in_one_of_several_runs_did_go_wrong(tmp_path, second):
    files = [table(tmp_path, rows("base", right=True) + rows("candidate", right=True), "a.json"),
             table(tmp_path, rows("base", right=True) + rows("candidate", **{"right": True, **second}), "b.json")]
    assert compared(*files).verdict is compared(*reversed(files)).verdict is Verdict.BRAKE


def test_runs_with_other_variables_are_not_one_comparison(tmp_path):
    files = [table(tmp_path, both(variables={"NCCL_CUMEM_ENABLE": v}), f"{v}.json") for v in "01"]
    assert not any("pooled" in w for w in compared(*files).comparison.environment.get("warnings", ()))


def test_of_two_runs_the_first_arm_is_compared_with_the_last(tmp_path):
    old = table(tmp_path, rows("one") + rows("two", SLOW), "old.json")
    new = table(tmp_path, rows("one") + rows("three", SLOW), "new.json")
    assert compared(old, new).verdict is Verdict.BRAKE  # of "one" against "three", not of "two"


@pytest.mark.parametrize("change, what", [
    (lambda d: d["arms"][1].update(name="base"), "the arm base is there 2 times"),
    (lambda d: d["measurements"].append(d["measurements"][-1]), "the measurement candidate mm n=1 .* is there 2 times"),
    (lambda d: d["measurements"][0]["blocks"][0].update(us=[]), "without times"),
    (lambda d: d["measurements"][0]["blocks"][0].update(us=[-1.0]), "not positive"),
    (lambda d: d["measurements"][0]["blocks"][0].update(us=[float("nan")]), "not positive"),
    (lambda d: d["measurements"][0].update(numerics={"ok": "yes"}), "numerics that cannot be read"),
    (lambda d: d["measurements"][0].update(trials={"failed": 5, "tries": 3}), "counts failures that cannot be")])
def test_a_run_that_contradicts_itself_is_refused(tmp_path, change, what):
    data = encode(read_table(table(tmp_path, both())))
    change(data)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    with pytest.raises(BrakecheckError, match=what):
        compared(str(path))


@pytest.mark.parametrize("schema, what", [
    ("brakecheck/comparison/1", "a comparison"), ("brakecheck/run/99", "not known")])
def test_other_files_of_ours_are_named(tmp_path, schema, what):
    with pytest.raises(BrakecheckError, match=what):
        compared(table(tmp_path, [], schema=schema))


def test_a_run_with_damaged_tables_says_so(tmp_path):
    polars = pytest.importorskip("polars")
    run = read_table(table(tmp_path, both()))
    where = store.write(replace(run, id="r"), str(tmp_path / "s"))
    samples = polars.read_parquet(f"{where}/samples.parquet")
    for damaged in (samples.head(0), samples.drop("us")):
        damaged.write_parquet(f"{where}/samples.parquet")
        with pytest.raises(BrakecheckError, match="this run is damaged"):
            compared(where)


# ---- Tables ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("field, value", [
    ("pair", [1]), ("pair", "1"), ("us", 10**400), ("memory", 5), ("memory", {"process": "much"}), ("work", [1]),
    ("first_call_ms", "long"), ("retention", "none"), ("right", "false"), ("components", ["x"]), ("device", {})])
def test_wrong_types_name_the_field(tmp_path, field, value):
    blocks = both()
    blocks[0][field] = value
    with pytest.raises(BrakecheckError) as problem:
        read_table(table(tmp_path, blocks))
    assert f"t.json: blocks[0].{field}" in problem.value.where and problem.value.todo


@pytest.mark.parametrize("more", [{"key": "x"}, {"device": "x"}, {"arms": None}, {"arms": ["base"]}])
def test_wrong_types_of_a_table_name_the_field(tmp_path, more):
    with pytest.raises(BrakecheckError) as problem:
        read_table(table(tmp_path, both(), **more))
    assert f"t.json: {next(iter(more))}" in problem.value.where


def test_a_pair_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(BrakecheckError, match="pair 4 .* twice"):
        read_table(table(tmp_path, [*both(), {**both()[-1], "us": [99]}]))


def test_blocks_without_a_partner_are_counted(tmp_path, capsys):
    blocks = both()
    blocks[-1]["pair"] = 9  # the base has pair 4, the candidate pair 9
    def told(given):
        return [w for w in compared(table(tmp_path, given)).comparison.environment.get("warnings", ()) if "pair" in w]

    assert told(both()) == []
    (said,) = told(blocks)
    assert "left out" in said and said.endswith(": 2 (mm n=1: 2)")
    # Each of several candidates stops by itself: what the base went on to measure for another is not lost.
    more = rows("base", (*SAME, *SAME)) + rows("early") + rows("late", (*SAME, *SAME))
    assert told(more) == [] and len(told([*more, {**more[-1], "pair": 99}])) == 1


def test_blocks_with_and_without_pairs_are_not_mixed(tmp_path):
    alone = [{k: v for k, v in r.items() if k != "pair"} for r in rows("candidate", SLOW)]
    with pytest.raises(BrakecheckError, match="some blocks have a pair and some have none"):
        read_table(table(tmp_path, [*both(), *alone]))


def test_fields_that_nobody_reads_are_named(tmp_path):
    found = compared(table(tmp_path, both(rigth=False)))
    assert any("rigth" in w for w in found.comparison.environment["warnings"])


@pytest.mark.parametrize("line, where, what", [
    ("base,mm,n=1,10,11,12", "t.csv:3", "more cells"), ("base,mm,n=1,1O,", "t.csv:3 (us)", "'1O' is not a number"),
    ("base,mm,n=1,10,perhaps", "t.csv:3 (right)", "not true or false")])
def test_csv_errors_name_line_and_column(tmp_path, line, where, what):
    (tmp_path / "t.csv").write_text(f"arm,operator,case,us,right\nbase,mm,n=1,10,yes\n{line}\n")
    with pytest.raises(BrakecheckError, match=what) as problem:
        read_table(str(tmp_path / "t.csv"))
    assert where in problem.value.where


def test_csv_of_a_spreadsheet(tmp_path):
    (tmp_path / "t.csv").write_text("\ufeffarm, operator,case ,us\nbase ,mm,n=1,10\ncandidate,mm, n=1,10\n", "utf-8")
    assert [a.name for a in read_table(str(tmp_path / "t.csv")).arms] == ["base", "candidate"]
    assert len({m.name for m in read_table(str(tmp_path / "t.csv")).measurements}) == 1


def test_what_would_not_be_looked_at_is_refused(tmp_path):
    recorded, workload = table(tmp_path, both()), tmp_path / "w.json"
    workload.write_text('{"weights": {"softmax": 1.0}}')
    for specs, more in (((recorded,), {"operators": ["mm"]}), ((recorded,), {"sources": ["my.cu"]}),
                        (("env:a", "env:b"), {"sources": ["my.cu"]}), (("env:a", "env:b"), {"launches": ["k=1"]}),
                        ((recorded,), {"options": Options(cases="mm *")}), ((recorded,), {"device": "cpu"}),
                        (("cuda==12.9", "cuda==13.2"), {"options": Options(ops=("my.py",))}),
                        (("cuda==12.9", "cuda==13.2"), {"implementation": "triton"}),
                        (("cuda==12.9", "cuda==13.2"), {"workload": workload})):
        with pytest.raises(UsageError, match="has no meaning here"):
            compared(*specs, **more)


# ---- Reports ---------------------------------------------------------------------------------------------------------
def test_a_lax_policy_and_warnings_are_said_everywhere(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "brakecheck.toml").write_text("[measured]\nmargin = 0.9\nslower_brake = 0.1")
    blocks = rows("base") + rows("candidate", [1.5 * us for us in SAME], rigth=True)
    with pytest.raises(SystemExit) as stop:
        main(["compare", table(tmp_path, blocks), "-o", "r.md", "-o", "r.html"])
    assert not stop.value.code  # as the policy says
    for told in (capsys.readouterr().out, (tmp_path / "r.md").read_text(), (tmp_path / "r.html").read_text()):
        assert "margin" in told and "0.9" in told and "rigth" in told
    assert "brakecheck.toml: margin = 0.9" in (tmp_path / "r.md").read_text()  # and not what equals the default


def test_reports_say_what_happened_first_and_of_which_operator(tmp_path, capsys):
    blocks = []
    for k in range(20):  # more than a comment's table has room for
        blocks += [{**r, "operator": f"op{k:02}"} for r in rows("base", right=True) + rows("candidate", right=False)]
        blocks += [{**r, "operator": f"ok{k:02}"} for r in both()]
    blocks += [{**r, "operator": "dies"} for r in rows("base") + rows("candidate", status="crash", message="signal 11")]
    with pytest.raises(SystemExit):
        main(["compare", table(tmp_path, blocks), "-o", str(tmp_path / "r.md")])
    comment, shown = (tmp_path / "r.md").read_text(), capsys.readouterr().out
    assert "41 cases: 21 broken, 20 same" in comment and "Message for dies n=1" in shown
    assert "- broken: `op19 n=1`" in comment and "`dies n=1`" in comment
    delta = Delta("mm", "n=1", "none", "measured", State.BROKEN, "wrong-result", "the result is wrong",
                  changes=(Change("bits", "a", "b", "the results differ in their bits"),))
    assert words.changes(delta) == "the result is wrong; the results differ in their bits"


# ---- Policy and workload ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule, todo", [("margin = 5", "write margin = 0.05"), ("margin = nan", ""),
                                        ("memory_brake = 10", "memory_brake = 0.1"), ("min_gain = inf", ""),
                                        ("most_undecided = 50", "0.5"), ("weights = {mm = nan}", "")])
def test_rules_that_would_switch_themselves_off_are_refused(tmp_path, rule, todo):
    (tmp_path / "p.toml").write_text(f"[measured]\n{rule}")
    with pytest.raises(UsageError) as problem:
        load_policy(tmp_path / "p.toml")
    assert todo in problem.value.todo and "p.toml:" in problem.value.where


@pytest.mark.parametrize("data", [
    {"weights": {"mm": 0}}, {"weights": {"mm": float("inf")}},
    {"schema": "brakecheck/workload/1", "entries": [{"share": 0.9}, {"share": 0.9}]},
    {"schema": "brakecheck/workload/1", "entries": [], "busy_share": "all"}])
def test_workloads_that_do_not_add_up_are_refused(tmp_path, data):
    (tmp_path / "w.json").write_text(json.dumps(data))
    with pytest.raises(UsageError):
        compared(table(tmp_path, both()), workload=tmp_path / "w.json")


@pytest.mark.parametrize("budget", ["nan", "inf", "0", "-1m", "", "1e999h"])
def test_budgets_that_are_no_time(tmp_path, budget, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compare", "env:x", "env:y", f"--budget={budget}"])
    assert stop.value.code == 64 and "is not a time" in capsys.readouterr().err
