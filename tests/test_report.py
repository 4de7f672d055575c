"""What the reports say, that they cannot be injected into, and that they stay small and quick."""

import errno
import io
import json
import re
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import factories
import pytest
from rich.console import Console

from brakecheck.model import BrakecheckError, Change, Comparison, Delta, Reason, State, UnavailableError, UsageError
from brakecheck.report import html, junit, markdown, plots, rows, terminal, words, write
from brakecheck.report.write import _replace

VOID = {"meta", "br", "input", "img", "hr", "link"}
SVG_SINGLE = {"rect", "path", "circle"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on a tag that is closed in the wrong order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.ids = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]} at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def shown(comparison, width=100, **options):
    out = io.StringIO()
    terminal.render(comparison, Console(file=out, width=width, **options), limit=20)
    return out.getvalue()


class Pages(dict):
    """HTML by factory name, rendered once."""

    def __missing__(self, name):
        self[name] = html.render(factories.ALL[name](), factories.sass)
        return self[name]


class Parsed(dict):
    def __init__(self, pages):
        self.pages = pages

    def __missing__(self, name):
        self[name] = Page(self.pages[name])
        return self[name]


SMALL = [name for name in factories.ALL if not name.endswith("500")]


@pytest.fixture(scope="module")
def pages():
    return Pages()


@pytest.fixture(scope="module")
def parsed(pages):
    return Parsed(pages)


@pytest.mark.parametrize("name", SMALL)
def test_html_is_well_formed_and_loads_nothing(pages, parsed, name):
    page = parsed[name]
    assert len(page.ids) == len(set(page.ids))
    for tag, attributes in page.tags:
        assert tag not in {"link", "iframe", "object", "embed", "img"}
        assert "src" not in attributes and "srcset" not in attributes
        if "href" in attributes:
            assert attributes["href"].startswith("#") and attributes["href"][1:] in page.ids
        assert not [a for a in attributes if a.startswith("on")]
    assert "url(" not in pages[name] and "@import" not in pages[name] and "fetch(" not in pages[name]
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    for _, attributes in page.tags:
        for reference in attributes.get("aria-labelledby", "").split():
            assert reference in page.ids


@pytest.mark.parametrize("name", SMALL)
def test_html_says_the_verdict_first(parsed, name):
    comparison = factories.ALL[name]()
    text = parsed[name].text
    head = text[text.index("brakecheck") :][:400]
    assert comparison.verdict.value in head and words.MEANING[comparison.verdict] in head
    assert comparison.headline in text


@pytest.mark.parametrize("name", ["brake", "steps", "measured"])
def test_every_broken_kernel_is_named_in_every_format(parsed, name):
    comparison = factories.ALL[name]()
    broken = [words.one_line(d.case) for d in comparison.deltas if d.state is State.BROKEN]
    assert broken
    suite = ET.fromstring(junit.render(comparison))
    failed = " ".join(c.get("name") for c in suite.iter("testcase") if c.find("failure") is not None)
    page, text, comment = parsed[name].text, shown(comparison, 300), markdown.render(comparison)
    for case in broken:
        assert case in failed and case in page and case in text
        assert case.replace("|", "\\|") in comment


def test_broken_kernels_beyond_the_limit_are_still_named():
    base = factories.brake()
    many = replace(base, deltas=tuple(factories.broken("gemm", f"kernel_{i}", "sm_90a") for i in range(60)))
    text = shown(many, 200)
    assert all(f"kernel_{i} " in text for i in range(60))
    assert "40 more" in text


def test_signatures_are_shortened_while_names_stay_apart():
    def delta(case, kernel="_Zx", operator="k"):
        return Delta(operator, case, "sm_90a", "static", State.UNDECIDED, "changed-sass", "", kernel=kernel)

    cases = ["void f<4>(float*, int)", "void ns::g(float)", "void ns::g(int)", "plain (odd)"]
    deltas = [delta(case, "plain" if "odd" in case else "_Zx") for case in cases]
    assert {row.name for row in rows.fold(deltas)} == {"f<4>", *cases[1:]}


def test_names_and_messages_are_text_and_never_markup(pages):
    text = pages["brake"]
    assert "<script>alert" not in text and "onerror=alert(1)>" not in text and "<b>bold</b>" not in text
    page = Page(text)
    assert words.one_line(factories.HOSTILE) in page.text and "\x1b" not in text and "\x00" not in text
    out = shown(factories.brake(), 200, force_terminal=True, no_color=True)
    assert "\x1b[31m" not in out and '<script>alert("x")</script>' in out
    comment = markdown.render(factories.brake())
    line = next(line for line in comment.splitlines() if "alert(" in line and line.startswith("|"))
    assert "\\|" in line and "@team" in line.split("``")[1]
    assert len(re.findall(r"(?<!\\)\|", line)) == 6
    hostile = replace(factories.go(), headline="[x](javascript:1) <img> @someone #12 a|b `c`")
    first = markdown.render(hostile).splitlines()[2]
    assert not set("<>[]`|") & set(first) and "@s" not in first and " #12" not in first


def test_markup_of_rich_is_not_interpreted():
    comparison = replace(factories.go(), headline="array[bold]index[/bold] [link=x]y[/link]")
    assert "array[bold]index[/bold] [link=x]y[/link]" in shown(comparison)


@pytest.mark.parametrize("name", factories.ALL)
@pytest.mark.parametrize("width", [80, 160])
def test_terminal_fits_and_carries_no_colour_when_not_asked(name, width):
    text = shown(factories.ALL[name](), width)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) < 140
    assert words.coverage(factories.ALL[name]()) in " ".join(text.split())


def test_terminal_colours_the_verdict_word_only():
    text = shown(factories.brake(), 80, force_terminal=True, color_system="standard")
    assert "\x1b[1;7;31m BRAKE \x1b[0m\x1b[1;31m  do not move\x1b[0m" in text


def test_terminal_without_unicode():
    raw = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    terminal.render(factories.brake(), Console(file=raw, width=80))
    raw.flush()
    text = raw.buffer.getvalue().decode("ascii")
    assert "BRAKE" in text and "x broken" in text and "40 -> 168" in text


def test_terminal_counts_identical_kernels_only():
    comparison = factories.withheld()
    text = shown(comparison)
    same = {d.case for d in comparison.deltas} - {d.case for d in comparison.deltas if d.state is not State.SAME}
    assert not [case for case in same if case in text]
    assert "159 same" in text


def test_rows_fold_architectures_and_order_by_what_matters():
    found = rows.fold(factories.withheld().deltas)
    assert found[0].archs == ("sm_80", "sm_90a", "sm_100a") and found[0].delta.suspicion == 100
    changed = [row.delta.suspicion for row in found if row.state == "changed"]
    assert changed == sorted(changed, reverse=True) and len(changed) == 12
    assert [row.state for row in rows.fold(factories.brake().deltas)][:4] == ["broken"] * 3 + ["changed"]


def test_sentences_about_several_architectures_are_one_row():
    deltas = [
        Delta("f", "f<1>", arch, "static", State.MISSING, "kernel-gone", f"f is not in what CUDA 13.0 made for {arch}")
        for arch in ("sm_90a", "sm_90")
    ]
    (row,) = rows.fold(deltas)
    assert row.archs == ("sm_90", "sm_90a") and row.changes() == "f is not in what CUDA 13.0 made for sm_90, sm_90a"


def test_reasons_that_only_repeat_the_table_are_not_in_the_panel():
    reasons = (Reason("measure", "softmax changed much"), Reason("over-limit", "registers 40 -> 200 is over the limit"))
    comparison = replace(factories.withheld(), reasons=reasons)
    text = shown(comparison)
    assert "softmax changed much" not in text and "registers 40 → 200 is over" in text


def test_matrix_tells_a_step_from_what_follows():
    grid = rows.matrix(factories.steps(), 100)
    assert grid.arms == ("cuda 12.9.1", "cuda 13.0.2", "cuda 13.5.0") and grid.archs == ("sm_80", "sm_90a")
    kinds = {name: [cell.kind for cell in cells[:3]] for _, name, cells in grid.rows}
    assert kinds["topk_router_kernel<float, 1>"] == ["same", "broken", "broken"]
    assert kinds["softmax_kernel<float, 1>"] == ["changed", "changed", "still"]
    assert kinds["softmax_kernel<__half, 4>"] == ["changed", "still", "still"]
    assert grid.same + len(grid.rows) == 40 and grid.more == 0
    only = rows.matrix(factories.brake(), 100)
    assert {cell.kind for _, name, cells in only.rows if name.startswith("wgmma") for cell in cells} == {
        "none",
        "broken",
    }


def test_several_candidates_have_a_verdict_each(parsed):
    comparison = factories.steps()
    assert "12.9.1 WITHHELD 13.0.2 WITHHELD 13.5.0 BRAKE" in parsed["steps"].text
    assert "12.9.1 WITHHELD, 13.0.2 WITHHELD, 13.5.0 BRAKE" in shown(comparison)
    assert "13.5.0: **BRAKE**" in markdown.render(comparison)


def test_a_case_timed_with_several_candidates_is_one_case_and_says_which_candidate():
    names = ("12.4.1", "12.9.1", "13.5.0")
    deltas = tuple(Delta("mm", "n=1", "sm_90", "measured", State.SLOWER, "time", "", (f"cuda {names[0]}", f"cuda {n}"),
                         ratio=r, low=r, high=r) for n, r in zip(names[1:], (1.02, 1.03)))
    comparison = replace(factories.steps(versions=names), deltas=deltas)
    assert "1 of 1" in shown(comparison)
    grew = replace(deltas[0], text="+2.0% from 4 pairs", changes=(Change("registers", 64, 62, "registers 64 -> 62"),))
    assert 'message="+2.0% from 4 pairs; registers 64 → 62"' in junit.render(replace(comparison, deltas=(grew,)))
    assert "| → 13.5.0 |" in markdown.render(comparison) and "| → 12.9.1 |" in markdown.render(comparison)
    page = html.render(comparison)
    assert "→ 13.5.0" in page and "since 13.5.0" not in page


def test_coverage_and_labels_are_of_the_candidate_that_decides():
    steps = factories.steps(versions=("12.4.1", "13.0.2", "13.5.0"))
    steps = replace(steps, environment={**steps.environment, "verdicts": {"cuda 13.0.2": "BRAKE", "cuda 13.5.0": "GO"}})
    assert "compared (12.4.1 → 13.0.2)" in html.render(steps)
    twice = replace(steps, arms=(steps.arms[0], replace(steps.arms[0], name="cuda 12.4.1 (#2)"), steps.arms[2]))
    assert list(words.short_labels(twice).values()) == ["cuda 12.4.1", "cuda 12.4.1 (#2)", "cuda 13.5.0"]


def test_many_reasons_are_folded_and_the_verdict_is_said_once():
    reasons = tuple(Reason("over-limit", f"kernel_{i} over") for i in range(40))
    comparison = replace(factories.withheld(), headline="WITHHELD: 40 of 60 changed.", reasons=reasons)
    text = shown(comparison)
    assert "kernel_4 over" in text and "kernel_5 over" not in text and "35 more reasons" in text
    assert text.count("WITHHELD") == 1
    page = html.render(comparison)
    assert "35 more reasons" in page and "kernel_39 over" in page


def test_sass_takes_the_rows_of_the_aligner():
    rows_ = [
        ("same", "A", "A"),
        ("operands", "B 1", "B 2"),
        ("opcode", "C", "D"),
        ("removed", "E", None),
        ("added", None, "F"),
    ]
    text = html._sass(rows_)
    assert re.findall(r'<div class="(..)"', text) == ["eq", "op", "di", "rm", "ad"] and "None" not in text


def test_details_show_both_sides(parsed):
    text = parsed["withheld"].text
    assert "registers a thread 96 128" in text
    assert "C7510, candidate" in text and "Cause: an accumulator is written" in text
    assert "SASS side by side" in text and "equal lines" in text


def test_unknown_is_absent_and_never_zero():
    delta = Delta(
        "gemm",
        "k",
        "sm_80",
        "static",
        State.UNDECIDED,
        "code-changed",
        "text",
        base={"resources": {"registers": 40}},
        candidate={"resources": {"registers": 0, "stack": 8}},
    )
    comparison = replace(factories.go(), deltas=(delta,))
    text = Page(html.render(comparison)).text
    assert "registers a thread 40 0" in text and "stack a thread – 8" in text
    assert "barriers" not in text and "Instructions by class" not in text and "Hashes" not in text


def test_static_reports_have_no_measured_sections(parsed):
    text = parsed["withheld"].text
    for heading in ("Roofline", "Operators", "While it was measured", "Every case"):
        assert heading not in text
    measured = parsed["measured"].text
    for heading in ("Roofline", "Operators", "While it was measured", "Every case"):
        assert heading in measured
    assert "Where it changed" not in measured and "Every kernel" not in measured


def test_measured_rows_have_ratio_interval_memory_and_numerics(pages, parsed):
    text = parsed["measured"].text
    assert "+19.0 %" in text and "1.3e-03" in text and "Noise floor: 0.35 %" in text and "3.18x [3.17x, 3.19x]" in text
    assert pages["measured"].count('class="forest"') == 60


@pytest.mark.parametrize("name", ["measured500", "withheld500"])
def test_five_hundred_are_quick_and_small(name):
    comparison = factories.ALL[name]()
    start = time.perf_counter()
    page, comment, suite = (
        html.render(comparison, factories.sass),
        markdown.render(comparison),
        junit.render(comparison),
    )
    assert time.perf_counter() - start < 6
    assert len(page.encode()) < 3_000_000 and len(comment.encode()) < 60_000
    assert int(ET.fromstring(suite).find("testsuite").get("tests")) == len(comparison.deltas)


def test_size_stays_bounded_whatever_the_messages():
    long = "ä" * 20_000
    deltas = tuple(factories.broken("gemm", f"kernel_{i}_{'x' * 300}", "sm_90a", message=long) for i in range(300))
    comparison = replace(factories.brake(), deltas=deltas, headline=long[:3000])
    assert len(html.render(comparison).encode()) < 3_000_000
    assert len(markdown.render(comparison).encode()) < 60_000


def test_sass_beyond_the_budget_is_said_to_be_missing(pages):
    assert pages["withheld500"].count('class="sassbox"') == html.SASS_KERNELS
    assert "SASS is shown for the most suspicious kernels only" in pages["withheld500"]
    rows_ = [("~", f"A{i}", f"B{i}") for i in range(5000)]
    assert "4,400 more lines not shown" in html._sass(rows_)


def test_sass_folds_equal_stretches_only():
    equal = [("=", f"E{i}", f"E{i}") for i in range(30)]
    text = html._sass([("~", "a<b", "c&d"), *equal, ("+", "", "NEW"), ("=", "t", "t")])
    assert "<summary>24 equal lines</summary>" in text and "a&lt;b" in text and "c&amp;d" in text
    assert text.count('class="eq"') == 7 and "E15" in text


def test_junit_counts_and_reasons():
    comparison = factories.brake()
    suite = ET.fromstring(junit.render(comparison)).find("testsuite")
    cases = suite.findall("testcase")
    assert len(cases) == int(suite.get("tests")) == len(comparison.deltas)
    assert len(suite.findall("testcase/failure")) == int(suite.get("failures")) == 3
    assert len(suite.findall("testcase/skipped")) == int(suite.get("skipped")) == 4
    assert len({(c.get("classname"), c.get("name")) for c in cases}) == len(cases)
    texts = [f.text for f in suite.iter("failure")]
    assert any("„Kachel zu groß“" in t and t.count("\n") > 35 for t in texts)
    assert suite.find("properties/property[@name='verdict']").get("value") == "BRAKE"


def test_junit_agrees_with_a_go():
    slow = [d for d in factories.measured().deltas if d.state is State.SLOWER]
    go = replace(factories.go(), deltas=tuple(slow))
    assert ET.fromstring(junit.render(go)).find("testsuite").get("failures") == "0"
    assert ET.fromstring(junit.render(replace(factories.measured(), deltas=tuple(slow)))).find("testsuite").get(
        "failures"
    ) == str(len(slow))


def test_markdown_has_at_most_fifteen_rows_and_names_the_rest():
    comment = markdown.render(factories.withheld(60, 40))
    table = [line for line in comment.splitlines() if line.startswith("| ") and "**" in line]
    assert len(table) == 15 and len({line.count("|") for line in table}) == 1
    assert "26 more" in comment and comment.count("<details>") == comment.count("</details>")


@pytest.mark.parametrize("suffix", [".html", ".md", ".xml", ".json"])
def test_write_chooses_by_suffix(tmp_path, suffix):
    path = write(factories.brake(), tmp_path / f"größe{suffix}")
    assert path.stat().st_size > 1000 and [p.name for p in tmp_path.iterdir()] == [path.name]
    if suffix == ".json":
        assert Comparison.from_json(json.loads(path.read_text("utf-8"))) == factories.brake()


def test_write_refuses_what_it_cannot_do(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="'.pdf'"):
        write(factories.go(), tmp_path / "report.pdf")
    with pytest.raises(BrakecheckError) as caught:
        write(factories.go(), tmp_path / "no" / "such" / "report.md")
    assert "make the folder" in str(caught.value)
    (tmp_path / "folder.md").mkdir()
    with pytest.raises(BrakecheckError, match="cannot be written"):
        write(factories.go(), tmp_path / "folder.md")


def test_full_disk_keeps_the_older_report(tmp_path, monkeypatch):
    target = tmp_path / "report.md"
    target.write_text("older")

    def full(self, other):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UnavailableError, match="disk is full"):
        _replace(target, b"newer")
    assert target.read_text() == "older" and [p.name for p in tmp_path.iterdir()] == ["report.md"]


def test_words():
    assert words.size(49152) == "48 KiB" and words.size(512) == "512 B" and words.size(None) == "–"
    assert words.percent(1.06) == "+6.0 %" and words.percent(0.988) == "−1.2 %" and words.percent(2.31) == "2.31x"
    assert words.percent(1.0) == "0.0 %" and words.percent(0.99999) == "0.0 %"
    assert words.plural(1, "kernel") == "1 kernel" and words.plural(1204, "case") == "1,204 cases"
    assert words.duration(12.3e-6) == "12.3 µs" and words.duration(0.0) == "0 ns"
    assert (
        words.since(("a", "b"), ("c", "d"), {"b": "13.0", "c": "13.2", "d": "13.5"})
        == "since 13.0, the same in 13.2 and 13.5"
    )
    assert words.listed([]) == "" and words.listed(["a"]) == "a" and words.listed(list("abcde"), 2) == "a, b and 3 more"


def test_labels_tell_equal_stacks_apart():
    base, candidate = factories.arms("12.9.1", "12.9.1")
    assert list(words.short_labels(replace(factories.go(), arms=(base, candidate))).values()) == [
        "12.9.1 (base)",
        "12.9.1 (candidate)",
    ]
    other = replace(candidate, implementation="triton")
    assert list(words.long_labels(replace(factories.go(), arms=(base, other))).values()) == [
        "cuda 12.9.1 cuda",
        "cuda 12.9.1 triton",
    ]


def test_forest_axis_is_not_crushed_by_one_cliff():
    scale = plots.Scale.around([1.001] * 50 + [0.99] * 50 + [8.0], 0.01)
    assert scale.high < 1.3 and scale.at(1.0) == 50 and scale.at(8.0) == 100
    assert 'class="off slower"' in plots.forest_row(8.0, 7.9, 8.1, "slower", scale)
    assert 'class="dot same"' in plots.forest_row(1.0, 0.99, 1.01, "same", scale)
    assert plots.Scale.around([], None).ticks() and 1.0 in plots.Scale.around([1.5, 3.0]).ticks()


def test_plots_leave_out_what_is_unknown():
    assert plots.strip([{"arm": "base", "time": [0, 1], "clock": [None, None]}], "clock", "MHz") == ""
    gap = plots.strip([{"arm": "base", "time": [0, 1, 2, 3], "clock": [5, None, 6, 7]}], "clock", "MHz")
    assert re.search(r'd="(M[^ML]+)(M[^ML]+)(L[^ML]+)"', gap)
    assert plots.roofline([plots.Point("x", 1.0, None, None)]) == ""
    drawn = plots.roofline([plots.Point("<x>", 2.0, 1e12, None)], 660e12, 3.3e12)
    assert "&lt;x&gt;" in drawn and drawn.count("<circle") == 1 and 'class="roof"' in drawn


def test_an_empty_comparison_is_still_a_page():
    empty = replace(factories.go(), deltas=(), coverage={})
    assert "nothing was compared" in Page(html.render(empty)).text
    assert "nothing was compared" in shown(empty) and "nothing was compared" in markdown.render(empty)
    assert ET.fromstring(junit.render(empty)).find("testsuite").get("tests") == "0"


def test_the_wheel_has_the_templates():
    folder = Path(html.__file__).parent / "templates"
    assert {p.name for p in folder.iterdir()} >= {
        "report.html.j2",
        "detail.html.j2",
        "macros.html.j2",
        "style.css.j2",
        "script.js",
    }
