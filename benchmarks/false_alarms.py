"""A/A: one environment against itself. How often is a case called slower or faster that cannot be?

    python benchmarks/false_alarms.py --device cpu --comparisons 400 --budget 2h
    python benchmarks/false_alarms.py --device cuda:0 --comparisons 200 --budget 25m
    python benchmarks/false_alarms.py --device cuda:0 --no-settle --out benchmarks/records/false-alarms-no-settle.json

Run it again with the same --out to go on. The record holds every case, and what the rival rules say of the same blocks.
"""

from __future__ import annotations

from rivals import RULES
from rounds import parser, run_rounds, share, write_record


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--comparisons", type=int, default=400, help="case comparisons wanted in all")
    arguments.add_argument("--candidates", type=int, default=1, help="arms compared with the same base, to save visits")
    given = arguments.parse_args()
    wanted = given.comparisons / given.candidates
    out, rounds, about = run_rounds(given, "false-alarms", [[0.0] * given.candidates], wanted)
    rows = [c for r in rounds for c in r["cases"]]
    able = [c for c in rows if c["pairs"] >= 3]  # fewer never call anything different
    found = {"false_alarms": share(rows, lambda c: c["state"] in ("slower", "faster")),
             "false_alarms_of_three_pairs": share(able, lambda c: c["state"] in ("slower", "faster")),
             "same": share(rows, lambda c: c["state"] == "same"),
             "undecided": share(rows, lambda c: c["state"] == "undecided"),
             "seconds_per_case": sum(c["seconds"] for c in rows) / max(1, len(rows)),
             "rivals": {rule: share(rows, lambda c, r=rule: c["rivals"][r]) for rule in RULES}}
    write_record(out, "A/A false alarms", about, rounds, found)
    for name, line in [("brakecheck", found["false_alarms"]),
                       ("with 3 pairs or more", found["false_alarms_of_three_pairs"]), *found["rivals"].items()]:
        if line["of"]:
            interval = f"[{line['low']:.2%}, {line['high']:.2%}]"
            print(f"{name:<24} {line['hits']:>5} of {line['of']:<5} {line['share']:7.2%}  {interval}")


if __name__ == "__main__":
    main()
