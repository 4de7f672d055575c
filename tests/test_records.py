"""The records that the documentation quotes give the verdicts that it prints."""

from pathlib import Path

import pytest

from brakecheck import api
from brakecheck.model import State, Verdict

RECORDS = Path(__file__).resolve().parent.parent / "benchmarks" / "records"


def compare(*names):
    return api.compare(*(str(RECORDS / name) for name in names)).comparison


def test_a_newer_cublas_changes_nothing_that_four_pooled_pairs_can_see():
    found = compare("2026-12-01-h200-cublas-13.1-13.5-a.json", "2026-12-01-h200-cublas-13.1-13.5-b.json")
    assert found.verdict is Verdict.WITHHELD
    assert (found.coverage["same"], found.coverage["undecided"]) == (1, 27)
    measured = [d for d in found.deltas if d.ratio]
    assert len(measured) == 26 and all(d.candidate["blocks"] == 4 for d in measured)
    assert not [d for d in measured if (d.low or 1) > 1.01 or (d.high or 1) < 0.99]
    assert not [c for d in found.deltas for c in d.changes if c.what == "bits"]
    versions = [arm.stack.component("cublas").version for arm in found.arms]
    assert versions == ["13.1.0.3", "13.5.1.27"]


def test_two_pairs_of_five_toolchains_are_too_few_for_a_verdict():
    found = compare("2026-12-01-h200-cubins-12.4-13.5.json")
    assert found.verdict is Verdict.WITHHELD and len(found.arms) == 5
    wgmma = [d for d in found.deltas if d.operator == "bf16_gemm wgmma" and d.evidence == "measured"]
    assert [d.state for d in wgmma] == [State.UNDECIDED] * 4 and all(1.0 < d.ratio < 1.03 for d in wgmma)


def test_runs_of_other_arms_are_not_pooled():
    from brakecheck.bench.recorded import pooled, read_recorded

    runs = [read_recorded(str(RECORDS / name)) for name in
            ("2026-12-01-h200-cublas-13.1-13.5-a.json", "2026-12-01-h200-cubins-12.4-13.5.json")]
    assert pooled(runs) is None
    with pytest.raises(api.UsageError, match="do not compare the same arms"):
        compare(*["2026-12-01-h200-cublas-13.1-13.5-a.json", "2026-12-01-h200-cubins-12.4-13.5.json"] * 2)


def test_the_terminal_says_how_noisy_and_how_many_pairs(capsys):
    from brakecheck.report import terminal

    terminal.render(compare("2026-12-01-h200-cublas-13.1-13.5-a.json"))
    assert "two visits of one arm differ by 6.14 %; 2 pairs a case" in capsys.readouterr().out
