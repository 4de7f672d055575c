"""The records that the documentation quotes are there, and give the verdicts that it prints."""

import re
from pathlib import Path

import pytest

from brakecheck import api
from brakecheck.model import State, Verdict

RECORDS = Path(__file__).resolve().parent.parent / "benchmarks" / "records"


def compare(*names):
    return api.compare(*(str(RECORDS / name) for name in names)).comparison


def test_the_documentation_names_no_record_and_no_plot_that_is_gone():
    root = RECORDS.parent.parent
    for page in (root / "README.md", *(root / "docs").glob("*.md")):
        text = page.read_text()
        records = set(re.findall(r"\b20\d\d-\d\d-\d\d-[\w.-]+\.json\b", text))
        links = {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link}
        gone = [n for n in records if not (RECORDS / n).exists()] + [n for n in links if not (page.parent / n).exists()]
        assert not gone, page.name


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


def test_five_toolchains_are_held_back_by_a_product_that_a_newer_ptxas_made_slower():
    found = compare("2026-12-01-h200-cubins-12.4-13.5.json")
    assert found.verdict is Verdict.HOLD and len(found.arms) == 5
    assert found.headline.startswith("HOLD: cuda 13.5.0: bf16_gemm wgmma on sm_90: m=4096 n=4096 k=4096 slower by")
    assert set(found.environment["verdicts"].values()) == {"HOLD"}
    states = {(d.operator, d.step[1]): d.state for d in found.deltas if d.evidence == "measured"}
    assert [s for (name, _), s in states.items() if name == "bf16_gemm wgmma"] == [State.SLOWER] * 4
    assert states["bf16_gemm mma", "cuda 13.0.3"] is State.FASTER
    assert {name for (name, _), s in states.items() if s is State.SLOWER} == {"bf16_gemm wgmma", "rmsnorm rows"}
    (product,) = [c for c in found.causes if "wgmma" in c.evidence[0]]
    assert product.component == "ptxas" and "is slower from cuda 12.4.1 to cuda 12.9.2: " in product.evidence[0]
    assert "the PTX is identical, the cubin is not" in product.evidence[0]
    assert found.causes[0] is product and found.reasons[0].text == f"by ptxas: {product.evidence[0]}"
    assert product.refute.startswith("brakecheck compare cuda==12.4 cuda==12.4+ptxas==12.9")


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
