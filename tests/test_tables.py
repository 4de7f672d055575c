"""What users reported, as tables of numbers through the command line: verdict, exit status, the wanted words."""

import json
from pathlib import Path

import pytest

from brakecheck.cli import main

BLOCKS = Path(__file__).parent / "data" / "blocks"


def compared(name, capsys):
    """(exit status, comparison) of a table."""
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(BLOCKS / name), "--json"])
    return stop.value.code or 0, json.loads(capsys.readouterr().out)


def words(data):
    texts = [data["headline"], *(r["text"] for r in data["reasons"]), *(d["text"] for d in data["deltas"])]
    return "\n".join(texts)


def test_more_memory_for_little_throughput_is_a_brake(capsys):
    status, data = compared("growth.json", capsys)
    assert status == 2 and data["verdict"] == "BRAKE"
    assert "memory +19%, throughput +2.3%" in data["headline"]
    assert data["deltas"][0]["state"] == "faster"


def test_a_cliff_at_batch_one_is_scoped_and_can_be_walked_around(capsys):
    status, data = compared("F1.csv", capsys)
    assert status == 1 and "batch=1" in data["headline"]
    assert "grows with K: 1.23x at K=4096, 34.4x at K=131072" in data["headline"]
    (way,) = data["mitigations"]
    assert way["action"] == "send batch 1 of bmm to mm" and way["recovers"] > 0.99
    assert next(r for r in data["reasons"] if r["code"] == "slower-unconfirmed")["scope"]["batch"] == "1"


def test_the_optimum_moved(capsys):
    status, data = compared("F2.csv", capsys)
    assert status == 1 and "the optimum moved: num_warps=4 is 2x, but num_warps=8" in data["headline"]
    assert data["mitigations"][0]["action"].startswith("re-tune matmul")
    assert data["deltas"][1]["candidate"]["first_call_ms"] == 780_000


def test_a_base_with_two_values_gives_a_range(capsys):
    status, data = compared("F4.csv", capsys)
    (delta,) = data["deltas"]
    assert status == 1 and "+21% to +35%" in data["headline"] and "measure at least 4 pairs" in data["headline"]
    assert "ratio" not in delta and delta["low"] == pytest.approx(1.2136, abs=1e-3)


def test_a_driver_and_a_compiler_that_are_slow_only_together(capsys):
    status, data = compared("F6.csv", capsys)
    assert status == 1 and "an interaction of driver B with triton 2" in data["headline"]
    assert data["mitigations"][0]["action"] == "move the driver to C" and data["mitigations"][0]["recovers"] > 0.9


def test_memory_that_a_switch_brings_back(capsys):
    status, data = compared("F7.json", capsys)
    (way,) = data["mitigations"]
    assert status == 1 and "out of memory" in data["headline"] and way["measured"]
    assert way["action"] == "NCCL_CUMEM_ENABLE=0" and "multi-node NVLink" in way["guard"]


def test_the_first_bad_release_and_the_plateau_since(capsys):
    status, data = compared("F10.csv", capsys)
    assert status == 1 and "first bad release 3, last good one 2; plateau since (6 releases)" in data["headline"]
    assert data["environment"]["verdicts"]["8"] == "HOLD" and len(data["deltas"]) == 7


def test_counts_of_hangs(capsys):
    status, data = compared("F26.csv", capsys)
    assert status == 2 and "failed in 2 of 3 tries" in data["headline"] and "p = 0.0085" in data["headline"]
    knob = next(r["text"] for r in data["reasons"] if r["code"] == "not-enough-evidence")
    assert "p = 0.3" in knob and "7 tries of each are needed" in knob and not data.get("mitigations")


@pytest.mark.parametrize("row, what", [("failed,tries\nbase,o,c,3,2", "failed out of tries"),
                                       ("failed\nbase,o,c,1", "give both"), ("rate\nbase,o,c,0", "positive")])
def test_bad_counts_and_rates_are_named(tmp_path, capsys, row, what):
    (tmp_path / "t.csv").write_text(f"arm,operator,case,{row}\n")
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(tmp_path / "t.csv")])
    assert stop.value.code >= 64 and what in capsys.readouterr().err


def test_one_arm_alone_and_mixed_kinds_are_refused(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("arm,operator,case,us\nbase,o,c,1\n")
    for given, what in (([str(tmp_path / "t.csv")], "one arm only"),
                        ([str(BLOCKS / "F4.csv"), "cuda==12.9"], "compared with their like"),
                        (["cuda==12.9", "env:/nowhere/python"], "cannot be measured against"),
                        (["20200101-000000", "cuda==12.9"], "no run"), (["nowhere.json"], "cannot read")):
        with pytest.raises(SystemExit) as stop:
            main(["compare", *given])
        assert stop.value.code >= 64 and what in capsys.readouterr().err


def test_weights_of_a_workload(tmp_path, capsys):
    (tmp_path / "w.json").write_text('{"weights": {"decode step": 1.0}}')
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(BLOCKS / "growth.json"), "--workload", str(tmp_path / "w.json"), "--json"])
    policy = json.loads(capsys.readouterr().out)["environment"]["policy"]
    assert stop.value.code == 2 and policy["measured"]["weights"] == {"decode step": 1.0}
    (tmp_path / "w.json").write_text('{"weights": {"decode step": "much"}}')
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(BLOCKS / "growth.json"), "--workload", str(tmp_path / "w.json")])
    assert stop.value.code == 64 and "share of time" in capsys.readouterr().err
