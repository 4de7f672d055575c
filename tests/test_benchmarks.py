"""The benchmarks of our kernels, as far as no GPU is needed: what is timed first, what a run that was cut off keeps."""

import argparse
import contextlib
import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["x"])
    return importlib.import_module


# ---- the record ------------------------------------------------------------------------------------------------------


def test_sources_of_one_name_in_two_folders_hash_alike_in_every_process(tmp_path):
    """Sets of paths come in another order in each process: a run that was cut off found other sources than its own."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.py").write_text(folder)
    code = f"import record, pathlib; print(record.hash_of(pathlib.Path({str(tmp_path)!r}).glob('*/rows.py')))"
    found = {subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(FOLDER)},
                            capture_output=True, text=True, check=True).stdout for seed in range(8)}
    assert len(found) == 1 and found != {""}


def test_lines_are_kept_for_the_same_machine_and_sources_alone(load, tmp_path, capsys):
    record, file, source = load("record"), tmp_path / "r.json", tmp_path / "kernel.cu"
    source.write_text("one")

    def opened(device):
        return record.Record(file, str(FOLDER / "rows.py"), {"device": device}, [source])

    first = opened("A")
    with first.phase("timing"):
        for row in ({"case": 1}, {"case": 2, "ok": True}, {"case": 3, "ok": False}):
            first.add(row)
    first.save()
    again = opened("A")
    assert [row["case"] for row in again.rows] == [1, 2]  # what was wrong is measured again
    assert len(again.data["runs"]) == 2 and again.data["runs"][0]["seconds"].keys() == {"timing"}
    assert "2 lines kept" in capsys.readouterr().out
    assert opened("B").rows == [] and "other device" in capsys.readouterr().out
    source.write_text("two")
    assert opened("A").rows == [] and "other sources" in capsys.readouterr().out
    file.write_text("{ half a reco")
    assert opened("A").rows == []


SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
from pathlib import Path
from record import Record
record = Record(Path(sys.argv[1]), __file__, {{}}, [])
def work():
    for case in range(4):
        if case not in [row["case"] for row in record.rows]:
            if case == int(sys.argv[2]):
                print("waiting", flush=True)
                time.sleep(60)
            with record.phase("timing"):
                record.add({{"case": case}})
    return 0
sys.exit(record.run(work))
"""


def test_a_run_that_timeout_ends_keeps_its_lines_and_goes_on(tmp_path):
    script, file = tmp_path / "script.py", tmp_path / "r.json"
    script.write_text(SCRIPT.format(folder=str(FOLDER)))
    process = subprocess.Popen([sys.executable, str(script), str(file), "2"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    while process.stdout.readline().strip() != "waiting":
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 143 and "2 lines kept" in err and "# seconds: timing" in out
    assert [row["case"] for row in json.loads(file.read_text())["rows"]] == [0, 1]
    done = subprocess.run([sys.executable, str(script), str(file), "-1"], capture_output=True, text=True)
    assert done.returncode == 0 and [r["case"] for r in json.loads(file.read_text())["rows"]] == [0, 1, 2, 3]


# ---- what each benchmark does with it --------------------------------------------------------------------------------


def test_the_shapes_that_have_a_target_come_first(load):
    rows = load("rows")
    lines = rows.lines()
    assert len(lines) == len(set(lines))
    assert set(lines[:15]) == {(name, "", *shape, "bfloat16") for name in rows.OPERATORS for shape in rows.SHAPES}
    assert lines[15][:4] == ("softmax", "", 4, 102400)
    for record in FOLDER.glob("records/*h200-rows*.json"):
        if "rows" in (found := json.loads(record.read_text())):
            assert {rows.key_of(row) for row in found["rows"]} <= set(lines)


def test_a_record_that_was_cut_off_is_drawn_as_far_as_it_goes(load, tmp_path):
    rows = load("rows")
    record = json.loads((FOLDER / "records" / "2026-12-01-h200-rows.json").read_text())
    record["rows"].append({**record["rows"][0], "operator": "softmax backward", "rows": 4, "columns": 102400})
    record["rows"] = [row for row in record["rows"] if row["operator"] != "softmax backward" or row["rows"] == 4]
    rows.plot(record, tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert "rows-softmax.svg" in drawn and "rows-softmax-backward.svg" not in drawn


def test_rows_measures_what_is_missing(load, tmp_path, monkeypatch):
    rows, seen = load("rows"), []

    class Case:
        def __init__(self, wanted):
            self.rows, self.n, self.bytes = wanted[2], wanted[3], 1e6
            self.x = [argparse.Namespace(dtype="torch.bfloat16")]

    def graphs_of(wanted):
        if len(seen) == 3:
            seen.clear()
            raise KeyboardInterrupt
        seen.append(wanted)
        return Case(wanted), {}

    monkeypatch.setattr(rows, "graphs_of", graphs_of)
    monkeypatch.setattr(rows, "replay", lambda *_: {"ours": 2.0, "copy": 1.0, "torch": 4.0})
    monkeypatch.setattr(rows, "warm", lambda jobs, missing: seen.append(len(missing)) if not missing else None)
    monkeypatch.setattr(rows, "lines", lambda: [("softmax", "", n, 8, "bfloat16") for n in range(200, 205)])
    monkeypatch.setattr(rows, "on_a_stream", contextlib.nullcontext)
    checks = []
    monkeypatch.setattr(rows, "check", lambda small: checks.append(1) or [{"ok": True}])
    arguments = argparse.Namespace(check=False, small=False, rounds=1, svg=None)

    def run():
        record = rows.Record(tmp_path / "r.json", rows.__file__, {}, [])
        return record.run(lambda: rows.work(record, arguments)), [row["rows"] for row in record.rows]

    assert run() == (143, [200, 201, 202])
    assert run() == (0, [200, 201, 202, 203, 204])
    assert checks == [1] and [wanted[2] for wanted in seen] == [203, 204]


def test_moe_measures_what_is_missing(load, tmp_path, monkeypatch):
    moe = load("moe_ops")
    made = []

    def cases(make, compiled, missing):
        for case in ("a", "b", "c"):
            if missing("route", case):
                made.append(case)
                if case == "c" and len(made) == 3:
                    raise KeyboardInterrupt
                yield "route", f"{case} (errors: 0)", 1e6, {}, 1.0 * (case == "b"), 0.0  # b is wrong

    monkeypatch.setattr(moe, "CASES", {"router": cases})
    monkeypatch.setattr(moe, "copy_speed", lambda: 4000.0)
    monkeypatch.setattr(moe, "Make", lambda *_: None)
    monkeypatch.setattr(moe, "medians", lambda _, rounds: {"ours": 1.0, "torch": 2.0})
    arguments = argparse.Namespace(only=None, no_compile=True, svg=None, rounds=1)

    def run():
        record = moe.Record(tmp_path / "r.json", moe.__file__, {}, [])
        return record.run(lambda: moe.work(record, arguments)), [row["case"][0] for row in record.rows]

    assert run() == (143, ["a", "b"])
    assert run() == (1, ["a", "b", "c"]) and made == ["a", "b", "c", "b", "c"]


def test_micro_repeats_an_experiment_that_was_cut_off(load, tmp_path, monkeypatch):
    micro, made = load("micro"), []

    def first():
        made.append("first")
        yield "question", "answer", 1.0, "us"

    def second():
        made.append("second")
        yield "another", "one", 2.0, "us"
        if made.count("second") == 1:
            raise KeyboardInterrupt
        yield "another", "two", 3.0, "us"

    monkeypatch.setattr(micro, "EXPERIMENTS", {"first": first, "second": second, "left out": lambda: iter(())})

    def run():
        record = micro.Record(tmp_path / "r.json", micro.__file__, {}, [])
        status = record.run(lambda: micro.work(record, None))
        return status, [row["answer"] for row in record.rows], record.data["ended"]

    assert run() == (143, ["answer", "one"], ["first"])
    assert run() == (0, ["answer", "one", "two"], ["first", "second"])
    assert made == ["first", "second", "second"]


def test_the_catalogues_check_runs_what_is_missing(load, tmp_path, monkeypatch):
    """A child that is killed costs a row; the next run asks for that row and those that were not reached."""
    check = load("check_kernels")
    child = tmp_path / "child.py"
    child.write_text('''
import json, os, sys
plan = json.loads(sys.stdin.read())
print(json.dumps({"device": "A"}), flush=True)
for case in "abc":
    row = {"operator": "o", "kernel": "k", "toolchain": "t", "case": case}
    if f"o/k/t/{case}" not in plan["done"] and "o/k/t" not in plan["done"]:
        print(json.dumps({"start": row}), flush=True)
        if case == "b" and os.environ.get("BROKEN"):
            os._exit(9)
        print(json.dumps({"row": {**row, "ok": True}}), flush=True)
''')
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: popen([sys.executable, str(child)], **rest))
    arguments = argparse.Namespace(no_time=True, operator=None)

    def run():
        record = check.Record(tmp_path / "r.json", check.__file__, {}, [])
        check.supervise([], arguments, record)
        return [(row["case"], row["ok"]) for row in record.rows]

    monkeypatch.setenv("BROKEN", "1")
    assert run() == [("a", True), ("b", False)]
    monkeypatch.delenv("BROKEN")
    assert run() == [("a", True), ("b", True), ("c", True)]


# ---- all of them -----------------------------------------------------------------------------------------------------


def test_all_of_them_go_on_where_they_were_cut_off(load, tmp_path, monkeypatch, capsys):
    everything = load("all")
    script = tmp_path / "fake.py"
    script.write_text('''
import json, sys
from pathlib import Path
file = Path(sys.argv[sys.argv.index("--json") + 1])
row = {"operator": "route", "case": "1 x 256 (x)", "us": {"ours": 2.0}, "share_of_copy": 0.5, "best_peer": "torch",
       "ratio_to_best_peer": 3.0, "sm_clock_mhz": 1980}
cut = "--cut" in sys.argv and not file.exists()
file.write_text(json.dumps({"rows": [row]}))
sys.exit(143 if cut else 0)
''')
    monkeypatch.setattr(everything, "HERE", tmp_path)
    monkeypatch.setattr(everything, "BENCHMARKS", {"moe": ["fake.py", "--cut"], "micro": ["fake.py"]})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["all.py", str(tmp_path / "out"), "--only", "moe,micro"])
    assert everything.main() == 1
    assert "goes on" in capsys.readouterr().err and not (tmp_path / "out" / "micro.json").exists()
    assert everything.main() == 0
    assert capsys.readouterr().out.count("3.00 x torch") == 2


def test_all_of_them_pass_the_end_on(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text("import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
                      "print('ready', flush=True)\ntime.sleep(60)")
    code = (f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import all\n"
            f"print(all.call([sys.executable, {str(script)!r}]), flush=True)")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "ready"
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0].strip() == "143"
