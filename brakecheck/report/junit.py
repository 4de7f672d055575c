"""JUnit XML for CI: one test case a delta. Broken (and slower, unless the verdict is GO) is a failure; what could not
be decided or compared is skipped, with its reason."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Dict, List

from ..model import Comparison, Delta, Verdict
from . import rows, words

SKIPPED = {"undecided", "changed", "missing"}


def render(comparison: Comparison) -> str:
    """One <testsuite> in <testsuites>; verdict, headline and reasons are its properties."""
    failing = {"broken"} if comparison.verdict is Verdict.GO else {"broken", "slower"}
    labels = words.short_labels(comparison)
    deltas = sorted(comparison.deltas, key=rows.weight)
    states = [words.state(d) for d in deltas]
    totals = {
        "tests": str(len(deltas)), "failures": str(sum(s in failing for s in states)), "errors": "0",
        "skipped": str(sum(s in SKIPPED for s in states)),
    }
    name = words.one_line(f"brakecheck: {words.title(comparison)}")
    root = ET.Element("testsuites", {"name": "brakecheck", **{k: totals[k] for k in totals if k != "skipped"}})
    suite = ET.SubElement(root, "testsuite", {"name": name, **totals})
    properties = ET.SubElement(suite, "properties")
    facts = [("verdict", comparison.verdict.value), ("headline", comparison.headline),
             ("coverage", words.coverage(comparison))]
    for key, value in [*facts, *((f"reason.{r.code}", r.text) for r in comparison.reasons)]:
        ET.SubElement(properties, "property", {"name": words.one_line(key), "value": words.one_line(value)})
    names = _names(deltas, labels)
    for delta, state, case in zip(deltas, states, names):
        test = ET.SubElement(suite, "testcase", {
            "classname": words.one_line(delta.operator), "name": case})
        took = delta.text if delta.ratio is not None and delta.changes else ""  # there is no column of ratios beside it
        said = words.one_line("; ".join(filter(None, (took, words.changes(delta)))) or delta.reason
                              or words.EXPLAIN[state])
        if state in failing:
            failure = ET.SubElement(test, "failure", {"message": said, "type": words.one_line(delta.reason or state)})
            failure.text = rows.message(delta) or said
        elif state in SKIPPED:
            ET.SubElement(test, "skipped", {"message": f"{state}: {said}"})
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _names(deltas: List[Delta], labels: Dict[str, str]) -> List[str]:
    """kernel [sm_90a] 12.9 -> 13.0; numbered where two would be called the same, because CI merges those."""
    seen: Dict[str, int] = {}
    out = []
    for delta in deltas:
        step = " -> ".join(labels.get(s, s) for s in delta.step)
        name = words.one_line(f"{delta.case} [{delta.arch}] {step}")
        key = f"{delta.operator}\0{name}"
        seen[key] = seen.get(key, 0) + 1
        out.append(name if seen[key] == 1 else f"{name} #{seen[key]}")
    return out
