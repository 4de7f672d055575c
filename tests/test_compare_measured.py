"""`brakecheck compare` on environments and runs, through the command line; workers are stand-ins, so it is quick."""

import json

from test_bundle import cli, python_like


def test_environments_are_measured_kept_and_compared_again(tmp_path, capsys):
    old, new = (f"env:{python_like(tmp_path, n, *f)}" for n, f in (("old", ()), ("new", ("op1=slow",))))
    where = ["--store", tmp_path / "store"]
    report = tmp_path / "r.html"
    assert cli("compare", old, new, *where, "--budget", "60s", "-o", report, "--json") == 2
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert {d["operator"]: d["state"] for d in data["deltas"]} == {"op0": "same", "op1": "slower", "op2": "same"}
    assert data["environment"]["noise_floor"] > 0 and data["environment"]["policy"]["measured"]["margin"] == 0.01
    assert "op1" in data["headline"] and "of the budget left" in err and "op1" in report.read_text()
    (run,) = data["environment"]["runs"]
    (tmp_path / "strict.toml").write_text("[scope]\nignore = ['operator:op1']\n")
    assert cli("compare", run, *where, "--policy", tmp_path / "strict.toml", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["coverage"]["ignored"] == 1 and len(again["deltas"]) == 3
    assert cli("runs", *where, "--json") == 0
    assert [r["id"] for r in json.loads(capsys.readouterr().out)] == [run]


def test_a_stack_against_itself_is_go(tmp_path, capsys):
    same = f"env:{python_like(tmp_path, 'same')}"
    assert cli("compare", same, same, "--store", tmp_path / "s", "--budget", "60s", "--operators", "op0") == 0
    out = capsys.readouterr().out
    assert "same (base) → same (candidate)" in out and "run: " in out


def test_stacks_of_a_file_and_resuming(tmp_path, capsys):
    entries = [f'[stacks.{n}]\nspec = "env:{python_like(tmp_path, n)}"\n' for n in ("one", "two")]
    file = tmp_path / "stacks.toml"
    file.write_text("".join(entries))
    where = ["--store", tmp_path / "store", "--json"]
    assert cli("compare", file, *where, "--budget", "0.001s") == 3
    (run,) = json.loads(capsys.readouterr().out)["environment"]["runs"]
    assert cli("compare", file, *where, "--budget", "60s", "--resume", run) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["environment"]["complete"] and [a["stack"]["name"] for a in data["arms"]] == ["one", "two"]
    assert min(d["base"]["blocks"] for d in data["deltas"]) >= 4
    assert cli("compare", f"{file}:one", f"{file}:three", *where) == 64
    assert "names no stack 'three'" in capsys.readouterr().err


def test_runs_taken_apart(tmp_path, capsys):
    where = ["--store", tmp_path / "store"]
    ids = []
    for name, fault in (("old", ()), ("new", ("op1=slow",))):
        assert cli("run", f"env:{python_like(tmp_path, name, *fault)}", *where, "--json") == 0
        ids.append(json.loads(capsys.readouterr().out)["id"])
    assert cli("compare", *ids, *where, "--json") == 2
    data = json.loads(capsys.readouterr().out)
    assert "not taken together" in next(d["text"] for d in data["deltas"] if d["operator"] == "op1")
    assert [a["name"] for a in data["arms"]] == ["base", "candidate"] and data["environment"]["runs"] == ids


def test_diff_takes_runs(tmp_path, capsys):
    where = ["--store", tmp_path / "store"]
    ids = []
    for name, fault in (("old", ()), ("new", ("op1=slow",))):
        assert cli("run", f"env:{python_like(tmp_path, name, *fault)}", *where, "--json") == 0
        ids.append(json.loads(capsys.readouterr().out)["id"])
    old, new = (tmp_path / "store" / i for i in ids)
    assert cli("diff", old, new, "--json") == 1
    data = json.loads(capsys.readouterr().out)
    states = {d["case"].split(" > ")[0]: (d["state"], d.get("ratio")) for d in data["deltas"]}
    assert [s for s, _ in states.values()] == ["slower", "same", "same"] and states["op1"][0] == "slower"
    assert 1.15 < states["op1"][1] < 1.25  # the stand-in's fault is 20 %
    where = ["--store", tmp_path / "pair", "--budget", "60s", "--json"]
    assert cli("compare", *(f"env:{tmp_path / n / 'bin' / 'python'}" for n in ("old", "new")), *where) == 2
    (pair,) = json.loads(capsys.readouterr().out)["environment"]["runs"]
    assert cli("diff", tmp_path / "pair" / pair, old) == 65
    assert "holds 2 arms: base, candidate" in capsys.readouterr().err
