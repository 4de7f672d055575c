"""The controller: ABBA order, stopping, failures, resuming; the store; and one comparison with real workers."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import polars
import pytest

from brakecheck import api, measuring
from brakecheck.bench import store
from brakecheck.bench.controller import ArmSpec, Controller, Options, choose
from brakecheck.bench.journal import Journal
from brakecheck.cli import main
from brakecheck.model import BrakecheckError, State, UnavailableError, UsageError, Verdict
from brakecheck.ops.load import load_file
from brakecheck.stack.environment import Environment, open_environment, read_stack, stack_specs
from brakecheck.verdict.measured_verdict import compare_runs
from brakecheck.verdict.policy import MeasuredRules
from brakecheck.verdict.several import compare_several

FAKE = str(Path(__file__).parent / "measure" / "fake_worker.py")
OPS = str(Path(__file__).parent / "measure" / "my_ops.py")
ENOUGH = measuring.enough_for(MeasuredRules().margin)


def fake(folder, name, *faults, level=10.0, noise=0.001, inject=0.0):
    command = (sys.executable, "-S", FAKE, name, str(level), str(noise), *faults)
    return ArmSpec(name, Environment(f"fake:{name}", name, command, {"FAKE_FOLDER": str(folder)}), "torch", inject)


def controller(arms, journal=None, **options):
    return Controller(arms, Options(**{"budget": 60.0, "max_pairs": 12, **options}), ENOUGH, journal)


def states(run):
    return {d.operator: d.state for d in compare_runs(run, run).deltas}


def test_visits_are_abba_with_fresh_processes_and_equal_case_order(tmp_path):
    found = controller([fake(tmp_path, "a"), fake(tmp_path, "b")])
    run = found.run()
    visits = found.journal.of("visit")
    order = list(dict.fromkeys((v["arm"], v["pair"]) for v in visits))
    for k in range(0, len(order), 4):
        a = order[k][0]
        assert [arm for arm, _ in order[k : k + 4]] == [a, 1 - a, 1 - a, a]
        assert [pair for _, pair in order[k : k + 4]] == [k // 2, k // 2, k // 2 + 1, k // 2 + 1]
    for pair in {v["pair"] for v in visits}:
        sides = [[v["operator"] for v in visits if (v["arm"], v["pair"]) == (arm, pair)] for arm in (0, 1)]
        assert sides[0] == sides[1]
    starts = (tmp_path / "starts-a").stat().st_size
    assert starts == 1 + len({v["pair"] for v in visits})
    assert run.complete and set(states(run).values()) == {State.SAME}


def test_slow_case_is_found_and_quiet_cases_stop_early(tmp_path):
    run = controller([fake(tmp_path, "a"), fake(tmp_path, "b", "op1=slow")]).run()
    assert states(run) == {"op0": State.SAME, "op1": State.SLOWER, "op2": State.SAME}
    assert all(4 <= len(m.blocks) <= 8 for m in run.measurements)
    found = compare_runs(run, run)
    assert 0.0002 < found.environment["noise"]["floor"] < 0.01
    assert next(d for d in found.deltas if d.operator == "op1").ratio == pytest.approx(1.2, abs=0.02)


def test_failures_are_states_and_the_run_goes_on(tmp_path):
    run = controller([fake(tmp_path, "a", "op2=oom"), fake(tmp_path, "b", "op0=crash", "op1=hang")], limit=0.5).run()
    found = {d.operator: d for d in compare_runs(run, run).deltas}
    assert (found["op0"].state, found["op0"].reason) == (State.BROKEN, "crash") and "exit status 7" in found["op0"].text
    assert (found["op1"].state, found["op1"].reason) == (State.BROKEN, "timeout") and "0 s: killed" in found["op1"].text
    assert (found["op2"].state, found["op2"].reason) == (State.FIXED, "oom")
    assert compare_runs(run, run).verdict is Verdict.BRAKE and run.complete


def test_a_case_that_breaks_the_device_costs_no_other_case(tmp_path):
    """A failed assertion in a kernel leaves a CUDA context in which every later call fails."""
    run = controller([fake(tmp_path, "a"), fake(tmp_path, "b", "op1=poison")]).run()
    assert states(run) == {"op0": State.SAME, "op1": State.BROKEN, "op2": State.SAME}


def test_a_failure_that_does_not_come_back_is_a_note(tmp_path):
    run = controller([fake(tmp_path, "a"), fake(tmp_path, "b", "op0=crash-once")]).run()
    (m,) = [m for m in run.of_arm("b") if m.operator == "op0"]
    assert m.status == "ok" and "failed in 1 of" in m.note
    found = compare_runs(run, run)  # and a reason to wait, where the base did not fail
    assert found.verdict is Verdict.HOLD and "failed in 1 of" in found.headline and "exit status 7" in found.headline


def test_what_could_not_be_checked_is_checked_by_the_next_visit(tmp_path):
    found = controller([fake(tmp_path, "a"), fake(tmp_path, "b", "op0=crash-once")])
    asked = []
    request = found._request
    found._request = lambda *a: (lambda r: asked.append((*a[:3], r["checks"])) or r)(request(*a))
    found.run()
    assert [(pair, checks) for arm, pair, operator, checks in asked if (arm, operator) == (1, "op0")][:3] == [
        (0, True), (1, True), (2, False)]


def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "open_environment", lambda spec: fake(tmp_path, spec[4:]).environment)
    for text in ("notes without an end of line", '{"event": "visit"}\n', '{"id": "run"}'):
        path = tmp_path / "notes"
        path.write_text(text)
        with pytest.raises(UsageError, match="no journal"):
            measuring.measure("env:a", store=str(tmp_path / "store"), resume=str(path))
        assert path.read_text() == text
    (tmp_path / "empty").touch()
    with pytest.raises(UsageError, match="empty"):
        measuring.measure("env:a", store=str(tmp_path / "store"), resume=str(tmp_path / "empty"))
    assert (tmp_path / "empty").exists()


def test_a_run_that_was_killed_is_listed_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measuring, "open_environment", lambda spec: fake(tmp_path, spec[4:]).environment)
    folder = str(tmp_path / "s")

    def killed(event):
        raise MemoryError  # nothing that is handled: as if the process ended here

    with pytest.raises(MemoryError):
        measuring.measure("env:a", store=folder, progress=killed)
    with pytest.raises(SystemExit):
        main(["runs", "--store", folder])
    told = capsys.readouterr().out
    assert "no run yet: fake:a" in told
    path = told.split("--resume ")[1].strip()
    assert measuring.measure("env:a", store=folder, resume=path).complete and not store.unfinished(folder)


def test_ctrl_c_is_no_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measuring, "open_environment", lambda spec: fake(tmp_path, spec[4:]).environment)
    visit = Controller._visit

    def stop(self, arm, pair, worker):
        visit(self, arm, pair, worker)
        if pair == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Controller, "_visit", stop)
    with pytest.raises(SystemExit) as ended:
        main(["compare", "env:a", "env:b", "--store", str(tmp_path / "s")])
    assert ended.value.code == 130 and "incomplete: --resume goes on" in capsys.readouterr().out


def test_a_damaged_run_does_not_hide_the_others(tmp_path, capsys):
    for name, text in (("r1", "{"), ("r2", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["runs", "--store", str(tmp_path)])
    assert not ended.value.code and capsys.readouterr().out.count("damaged") == 2


@pytest.mark.parametrize("options, what", [
    ({"device": "tpu"}, "no device 'tpu'"), ({"plan": {"duty": "full"}}, "no duty 'full'"),
    ({"ops": ("none.py",)}, "no Python file none.py"), ({"device": "cuda:0, cuda:0"}, "there twice")])
def test_options_that_would_be_taken_for_something_else(tmp_path, monkeypatch, options, what):
    monkeypatch.setattr(measuring, "open_environment", lambda spec: fake(tmp_path, spec[4:]).environment)
    with pytest.raises(UsageError, match=what):
        measuring.measure("env:a", Options(**options), store=str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("command, what", [(("false",), "the worker died"), (("no-such-command",), "cannot start")])
def test_what_is_no_python_says_so(tmp_path, command, what):
    arms = [fake(tmp_path, "a"), ArmSpec("b", Environment("launch:x", "x", command, ship=True))]
    with pytest.raises(UnavailableError, match=what):
        controller(arms).run()


def test_an_implementation_that_no_operator_has(tmp_path):
    arms = [replace(fake(tmp_path, name), implementation="trition") for name in "ab"]
    with pytest.raises(UsageError, match="no operator here has an implementation 'trition'"):
        controller(arms, operators=("op0",)).run()


@pytest.mark.parametrize("text, what", [
    ("op = Operator('x', '', cases=[])", "lacks a case and @op.inputs and @op.implementation"),
    ("op = Operator('x', '', cases=[Case.of(n=1), Case.of(n=1)])\nop.inputs(print)\nop.implementation('a')(print)",
     "two cases are called 'n=1'"),
    ("ops = [Operator('x', '', cases=[Case.of(n=1)]) for _ in range(2)]\n"
     "for op in ops: op.inputs(print), op.implementation('a')(print)", "two operators are called 'x'")])
def test_operators_that_cannot_be_measured(tmp_path, text, what):
    (tmp_path / "o.py").write_text(f"from brakecheck.ops import Case, Operator\n{text}\n")
    with pytest.raises(BrakecheckError, match=what):
        load_file(str(tmp_path / "o.py"))


def test_a_run_that_ended_before_its_stacks_answered_asks_them_again(tmp_path):
    path = tmp_path / "j"
    whole = controller([fake(tmp_path, "a"), fake(tmp_path, "b")], Journal(path))
    whole.run()
    for lines in (1, 2):  # the start, and the answer of one stack
        path.write_text("".join(f"{json.dumps(e)}\n" for e in whole.journal.events[:lines]))
        again = controller([fake(tmp_path, "a"), fake(tmp_path, "b")], Journal(path))
        assert again.run().complete and [e["arm"] for e in again.journal.of("stack")] == [0, 1]


@pytest.mark.parametrize("entry, what", [('variabels = {A = "1"}', "no field 'variabels'"),
                                         ("variables = 5", "variables is a table")])
def test_stacks_that_are_not_what_was_meant(tmp_path, entry, what):
    file = tmp_path / "s.toml"
    file.write_text(f'[stacks.a]\nspec = "env:{sys.executable}"\n{entry}\n')
    with pytest.raises(UsageError, match=what):
        read_stack(str(file), "a")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not valid TOML"):
        stack_specs(str(file))


def test_environments_that_every_project_calls_the_same_are_told_apart(tmp_path):
    for project in ("old", "new"):
        (tmp_path / project / ".venv" / "bin").mkdir(parents=True)
        (tmp_path / project / ".venv" / "bin" / "python").symlink_to(sys.executable)
    names = [open_environment(f"env:{tmp_path / project / '.venv'}").name for project in ("old", "new")]
    assert names == ["old/.venv", "new/.venv"]


def test_a_budget_ends_the_first_pairs_too_when_it_is_far_exceeded(tmp_path, monkeypatch):
    monkeypatch.setattr("brakecheck.bench.controller.OVERDUE", 0.0)
    found = controller([fake(tmp_path, "a"), fake(tmp_path, "b")], budget=2.0)
    seen = []

    def slow(event):
        seen.append(event)
        found.begin -= 2.5  # as if each case took that long

    found.progress = slow
    run = found.run()
    assert len(seen) == 2 and not run.complete
    assert {m.status for m in run.of_arm("b")} | {m.status for m in run.of_arm("a")} >= {"ok", "unmeasured"}


def test_one_journal_has_one_writer(tmp_path):
    first = Journal(tmp_path / "j")
    with pytest.raises(UsageError, match="another process"):
        Journal(tmp_path / "j")
    first.close()
    Journal(tmp_path / "j").close()


def test_an_operator_that_no_stack_knows_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="no operator 'op7'"):
        controller([fake(tmp_path, "a"), fake(tmp_path, "b")], operators=("op0", "op7")).run()


def test_budget_and_most_pairs_end_a_noisy_case_undecided(tmp_path):
    noisy = [fake(tmp_path, "a", noise=0.1), fake(tmp_path, "b", noise=0.1)]
    run = controller(noisy, max_pairs=4).run()
    assert not run.complete and {len(m.blocks) for m in run.measurements} == {4}
    assert set(states(run).values()) <= {State.UNDECIDED}
    at_once = controller(noisy, budget=1e-9).run()
    assert not at_once.complete and {len(m.blocks) for m in at_once.measurements} == {2}


def test_interrupt_keeps_what_was_measured_and_resume_goes_on(tmp_path):
    path = tmp_path / "journal.jsonl"
    arms = [fake(tmp_path, "a"), fake(tmp_path, "b")]
    first = controller(arms, Journal(path))
    seen = []

    def stop(event):
        seen.append(event)
        if len(seen) == 8:
            raise KeyboardInterrupt

    first.progress = stop
    run = first.run()
    assert not run.complete and sum(len(m.blocks) for m in run.measurements) == 8
    assert {m.message for m in run.measurements if m.status == "unmeasured"} <= {"it was interrupted first"}
    with path.open("a") as file:
        file.write('{"event": "visit", "ar')  # killed while writing
    second = controller(arms, Journal(path))
    done = second.run()
    visits = [(v["arm"], v["pair"], v["operator"]) for v in second.journal.of("visit")]
    assert done.complete and len(visits) == len(set(visits)) and done.id != run.id and done.created == run.created
    assert len(Journal(path).of("visit")) == len(visits)
    before = {(e["arm"], e["pair"], e["operator"]) for e in first.journal.of("visit")}
    kept = [e for e in second.journal.of("visit") if e in first.journal.events]
    assert 0 < len(kept) < len(before)  # both visits of a pair are from before the interruption, or both from after it
    assert all((1 - e["arm"], e["pair"], e["operator"]) in before for e in kept)
    with pytest.raises(UsageError, match="other options"):
        controller(arms, Journal(path), seed=5).run()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "not json", *lines[1:]]))
    with pytest.raises(BrakecheckError, match="cannot be read"):
        Journal(path)


def test_pattern_and_names_choose_cases(tmp_path):
    arms = [fake(tmp_path, "a"), fake(tmp_path, "b")]
    assert {m.operator for m in controller(arms, operators=("op1",), max_pairs=2).run().measurements} == {"op1"}
    assert {m.operator for m in controller(arms, cases="op2*", max_pairs=2).run().measurements} == {"op2"}
    with pytest.raises(UsageError, match="no case is left"):
        controller(arms, cases="nothing").run()
    with pytest.raises(UsageError, match="no case fits 'op7"):
        controller(arms, cases="op2*|op7*").run()


def test_cases_of_several_devices_are_shared_out_and_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "arm", lambda name, *_: fake(tmp_path, name))
    found, run = measuring.compare_measured("a", "b", options=Options(device="cpu,cuda:0", max_pairs=8),
                                            store=str(tmp_path / "s"))
    assert {d.operator: d.state for d in found.deltas} == dict.fromkeys(("op0", "op1", "op2"), State.SAME)
    assert run.options["device"] == "cpu,cuda:0" and not list((tmp_path / "s" / ".journals").iterdir())
    with pytest.raises(UsageError, match="nothing to resume"):
        measuring.compare_measured("a", "b", resume=run.id, store=str(tmp_path / "s"))


def test_one_stack_is_measured_as_often_as_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "arm", lambda name, *_: fake(tmp_path, name))
    run = measuring.measure("a", visits=3, store=str(tmp_path / "s"))
    assert {len(m.blocks) for m in run.measurements} == {3} and run.complete


def test_a_stack_without_the_device_withholds_the_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "arm", lambda name, *_: fake(tmp_path, name, "device=unusable"))
    found, run = measuring.compare_measured("a", "b", store=str(tmp_path / "s"))
    assert found.verdict is Verdict.WITHHELD and run is None and found.reasons[0].code == "fell-back"
    assert "driver supports CUDA 12.4" in found.headline


def test_commands_measure_list_and_show(tmp_path, monkeypatch):
    import typer
    from typer.testing import CliRunner

    from brakecheck.cli import run as commands

    monkeypatch.setattr(measuring, "arm", lambda name, *_: fake(tmp_path, name, "op2=oom"))
    app = typer.Typer()
    for command in (commands.run, commands.runs, commands.show):
        app.command()(command)
    where = ["--store", str(tmp_path / "s")]
    ran = CliRunner().invoke(app, ["run", "env:x", "--visits", "2", *where])
    assert ran.exit_code == 0 and "op0" in ran.output and "oom was asked" in ran.output
    listed = json.loads(CliRunner().invoke(app, ["runs", "--json", *where]).output)
    shown = CliRunner().invoke(app, ["show", listed[0]["id"][:15], "--json", *where])
    assert len(json.loads(shown.output)["measurements"]) == 3
    monkeypatch.setattr(measuring, "arm", lambda name, *_: fake(tmp_path, name, "op1=hang"))
    hung = CliRunner().invoke(app, ["run", "env:x", "--visits", "1", "--limit", "1s", *where])
    assert "timeout" in hung.output and "within 1 s" in hung.output
    assert CliRunner().invoke(app, ["run", "env:x", "--limit", "long", *where]).exception.where == "--limit"
    assert "no runs in" in CliRunner().invoke(app, ["runs", "--store", str(tmp_path / "none")]).output


def test_implementations_are_compared_where_both_are_written():
    told = {"implementations": ["torch"], "cases": {"n=1": {}}}
    catalogue = {"mm": {**told, "implementations": ["torch", "mine"]}, "copy": told}

    def chosen(mine, **options):
        return [operator for operator, _ in choose([catalogue, catalogue], Options("cpu", **options), ["torch", mine])]

    assert chosen("torch") == ["mm", "copy"] and chosen("mine") == ["mm"]
    assert chosen("mine", operators=("mm", "copy")) == ["mm", "copy"]  # asked for by name: that it is missing is said
    with pytest.raises(UsageError, match="'copy .*is about copy, which does not have both torch and mine"):
        chosen("mine", cases="copy *|mm *")
    with pytest.raises(UsageError, match="no case fits 'copy"):
        chosen("mine", cases="copy *|mm *", operators=("mm",))
    with pytest.raises(UsageError, match="implementation 'triton'"):
        chosen("triton")


def test_a_machine_that_does_not_settle_or_is_throttled_is_said(tmp_path):
    run = controller([fake(tmp_path, "a"), fake(tmp_path, "b")], max_pairs=4).run()
    def under(settled, *reasons):
        blocks = {"settle_seconds": 0.2, "settled": settled, "before": {"reasons": list(reasons)}}
        return compare_runs(*[replace(run, measurements=tuple(
            replace(m, blocks=tuple(replace(b, **blocks) for b in m.blocks)) for m in run.measurements))] * 2)

    quiet = under(True, "idle", "power cap")
    assert quiet.environment["conditions"]["a"] == {
        "visits": 12, "unsettled": 0, "reasons": {"idle": 12, "power cap": 12}, "settle_seconds": 0.2}
    assert "warnings" not in quiet.environment
    said = under(False, "thermal (software)").environment["warnings"]
    assert len(said) == 4 and "thermal (software)) in 12 of 12" in said[0] and "had not settled" in said[1]


# ---- Store ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["folder", "url"])
def test_a_run_comes_back_as_it_was(tmp_path, kind):
    run = controller([fake(tmp_path, "a"), fake(tmp_path, "b", "op0=oom")], max_pairs=4).run(("brakecheck", "compare"))
    where = str(tmp_path / "runs") if kind == "folder" else "memory://runs"
    written = store.write(run, where)
    assert store.read(written) == run and [m["id"] for m in store.listing(where)] == [run.id]
    assert store.find(run.id[:-2], where) == written
    with pytest.raises(BrakecheckError, match="immutable"):
        store.write(run, where)
    with pytest.raises(UsageError, match="there is no run"):
        store.find("other", where)
    if kind == "folder":
        (tmp_path / "runs" / run.id / "blocks.parquet").write_bytes(b"")
        with pytest.raises(BrakecheckError, match="damaged"):
            store.read(written)


def test_parquet_is_queried_in_place(tmp_path):
    duckdb = pytest.importorskip("duckdb")
    run = controller([fake(tmp_path, "a"), fake(tmp_path, "b")], max_pairs=2).run()
    where = store.write(run, str(tmp_path / "runs"))
    tables = f"'{where}/samples.parquet' join '{where}/measurements.parquet' using (measurement)"
    query = f"select arm, count(*) from {tables} group by arm"
    assert sorted(duckdb.sql(query).fetchall()) == [("a", 54), ("b", 54)]


def test_energy_of_a_call_counts_visits_that_saw_no_step_of_the_counter(tmp_path):
    run = controller([fake(tmp_path, "a"), fake(tmp_path, "b")], max_pairs=2).run()
    m = run.measurements[0]
    calls = m.blocks[0].calls * len(m.blocks[0].us)
    m = replace(m, blocks=tuple(replace(b, sampling_mj=mj) for b, mj in zip(m.blocks, (0.0, 900.0))))
    assert m.mj_per_call == pytest.approx(450 / calls) and run.measurements[1].mj_per_call is None
    where = store.write(replace(run, measurements=(m,)), str(tmp_path / "runs"))
    assert store.read(where).measurements == (m,)
    blocks = polars.read_parquet(f"{where}/blocks.parquet").drop("sampling_mj")  # as older runs have it
    blocks.write_parquet(f"{where}/blocks.parquet")
    assert store.read(where).measurements[0].mj_per_call is None


# ---- Specs ---------------------------------------------------------------------------------------
def test_specs_that_cannot_be_read_say_what_to_write(tmp_path):
    for spec in ("env:/no/such/python", "launch:", "pip:", "conda:x", "launch:docker run x+nvidia-cublas==13.5.1.27"):
        with pytest.raises(UsageError):
            open_environment(spec)
    found = open_environment(f"env:{sys.executable}")
    assert found.command == (sys.executable,) and not found.ship
    assert open_environment("launch:docker run -i image python").command[-1] == "python"
    file = tmp_path / "stacks.toml"
    file.write_text(f'[stacks.old]\nspec = "env:{sys.executable}"\n[stacks.old.variables]\nNCCL_CUMEM_ENABLE = "0"\n')
    assert stack_specs(str(file)) == [f"{file}:old"]
    assert read_stack(str(file), "old").variables == {"NCCL_CUMEM_ENABLE": "0"}
    assert measuring.arm("base", f"{file}:old").environment.name == "old"
    file.write_text('[stacks.old]\nspec = "cuda==12.9"\n[stacks.new]\nspec = "cuda==13.2+ptxas==13.5"\n')
    assert api.expanded([str(file)]) == ["cuda==12.9", "cuda==13.2+ptxas==13.5"]
    assert api.expanded([f"{file}:old", "a.json"]) == ["cuda==12.9", "a.json"]
    file.write_text('[stacks.old]\nspec = "cuda==12.9"\nvariables = {A = "1"}\n')
    with pytest.raises(UsageError, match="a spec and nothing else"):
        api.expanded([str(file)])
    for text in ("", "[stacks.x]\n", "[["):
        file.write_text(text)
        with pytest.raises(UsageError):
            read_stack(str(file), "x")


def test_words_of_the_command_line():
    assert (
        measuring.seconds_of("10m") == 600 and measuring.seconds_of("90") == 90 and measuring.seconds_of("1h") == 3600
    )
    assert measuring.implementations_of("base=torch,candidate=triton") == {"base": "torch", "candidate": "triton"}
    assert measuring.implementations_of("triton") == {"base": "triton", "candidate": "triton"}
    for bad in ("x=1", "base="):
        with pytest.raises(UsageError):
            measuring.implementations_of(bad)
    for bad in ("", "soon", "-1m"):
        with pytest.raises(UsageError):
            measuring.seconds_of(bad)


# ---- The whole of it, with real workers ----------------------------------------------------------
def test_added_work_is_found_and_told_from_equal_work(tmp_path):
    """Real processes, real torch, real extra work. Process time as the clock: this machine may be busy."""
    spec = f"env:{sys.executable}"
    options = Options(
        operators=("axpy",),
        cases="n=16384*",
        ops=(OPS,),
        max_pairs=4,
        checks=True,
        settle=False,
        plan={"clock": "cpu-time", "visit_us": 40_000, "sample_us": 1000},
    )
    found, run = measuring.compare_measured(spec, spec, options=options, inject=[4.0], store=str(tmp_path))
    (delta,) = found.deltas
    assert delta.state is State.SLOWER and 2 < delta.ratio < 12 and found.verdict is Verdict.BRAKE
    assert delta.base["numerics"]["ok"] and delta.base["numerics"]["digest"] == delta.candidate["numerics"]["digest"]
    assert store.read(store.find(run.id, str(tmp_path))) == run
    assert run.arms[0].stack.component("pytorch") and json.dumps(found.to_json())
    base = replace(run, id="other", measurements=run.of_arm("base"))
    (same,) = compare_runs(base, replace(base, id="again")).deltas
    assert same.state is not State.SLOWER


def test_several_candidates_share_the_base_and_each_stops_on_its_own(tmp_path):
    arms = [fake(tmp_path, "a"), fake(tmp_path, "b"), fake(tmp_path, "c", "op1=slow", noise=0.01)]
    found = controller(arms)
    run = found.run()
    order = list(dict.fromkeys((v["arm"], v["pair"]) for v in found.journal.of("visit")))
    there, back = order[:3], order[3:6]
    assert [arm for arm, _ in back] == [arm for arm, _ in reversed(there)] and {p for _, p in there} == {0}
    blocks = {(m.arm, m.operator): len(m.blocks) for m in run.measurements}
    assert blocks["b", "op0"] < blocks["c", "op0"] == blocks["a", "op0"]
    compared = compare_several(run)
    states = {(d.step, d.operator): d.state for d in compared.deltas}
    assert states[("a", "c"), "op1"] is State.SLOWER and states[("a", "b"), "op1"] is State.SAME
    assert compared.environment["verdicts"] == {"b": "GO", "c": "BRAKE"}


def test_a_small_budget_decides_some_cases_and_says_which_it_did_not_reach(tmp_path, monkeypatch):
    monkeypatch.setattr("brakecheck.bench.controller.BATCH", 1)
    found = controller([fake(tmp_path, "a"), fake(tmp_path, "b")], budget=1e-9)
    run = found.run()
    by_state = {d.operator: (d.state, d.reason) for d in compare_runs(run, run).deltas}
    assert not run.complete and len(by_state) == 3
    assert sorted(reason for _, reason in by_state.values()) == ["few-blocks", "not-measured", "not-measured"]
    assert (tmp_path / "starts-a").stat().st_size == 1 + 2  # for its questions, and for two visits of one batch
    ample = controller([fake(tmp_path, "a"), fake(tmp_path, "b")], budget=60.0).run()
    assert ample.complete and set(states(ample).values()) == {State.SAME}
