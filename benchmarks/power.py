"""Injected slow-downs: one environment against itself, with real extra calls in the candidate's timed windows. How many
are found, and at what cost in seconds a case?

    python benchmarks/power.py --device cpu --clock cpu-time --most-work 3e6 --every 2 --cases-each 40 --budget 1h
    python benchmarks/power.py --device cuda:0 --effects 3+1.5,5+10,2 --every 10 --budget 9m

A record after each round, and a journal of the one that was cut off: run it again to go on. An effect needs windows of
at least one call over it (34 calls for 3 %), so the products of 8192 cost seconds a visit.
"""

from __future__ import annotations

from rivals import RULES
from rounds import parser, run_rounds, share, write_record


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--effects", default="1,2,3,5,10",
                           help="percent, comma-separated; those joined by + are candidates of one base")
    arguments.add_argument("--cases-each", type=int, default=40, help="case comparisons wanted for each effect")
    arguments.add_argument("--precision", type=float, help="half width to stop at (default: half the margin, 0.005)")
    given = arguments.parse_args()
    groups = [[float(e) / 100 for e in group.split("+")] for group in given.effects.split(",")]
    out, rounds, about = run_rounds(given, "power", groups, given.cases_each, given.precision)
    table = {}
    for effect in sorted({e for group in groups for e in group}):
        for limited in (False, True):
            rows = [c for r in rounds for c in r["cases"]
                    if c["inject"] == effect and c["power_limited"] == limited]
            if rows:
                table[f"{effect:.1%}{' power-limited' if limited else ''}"] = {
                    "found": share(rows, lambda c: c["state"] == "slower"),
                    "wrong_direction": share(rows, lambda c: c["state"] == "faster"),
                    "seconds_per_case": sum(c["seconds"] for c in rows) / len(rows),
                    "rivals": {rule: share(rows, lambda c, r=rule: c["rivals"][r]) for rule in RULES}}
    write_record(out, "power against injected slow-downs", about, rounds, {"effects": table})
    for name, line in table.items():
        f = line["found"]
        print(f"{name:<22} found {f['hits']:>4} of {f['of']:<4} {f['share']:6.1%} [{f['low']:.1%}, {f['high']:.1%}]  "
              f"{line['seconds_per_case']:6.2f} s a case  "
              + "  ".join(f"{rule}: {s['share']:.0%}" for rule, s in line["rivals"].items()))


if __name__ == "__main__":
    main()
