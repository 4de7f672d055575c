"""The controller: visits of fresh worker processes in ABBA order until every case is precise enough or the budget ends.

Which case needs more is not decided here (verdict/ sits above): `enough` is given all cases' medians (stopping.py).
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import random
import re
import resource
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..model import Arm, Component, Measurement, Run, Stack, UnavailableError, UsageError
from ..stack.environment import Environment, check_overlays
from . import journal as journals
from .journal import Journal
from .process import WorkerLost, WorkerProcess
from .stopping import MIN_PAIRS, Enough

Case = tuple[str, str]
BATCH = 40  # cases that are measured together: enough to hide the start of the next workers, few enough to be finished
OVERDUE = 60.0  # seconds beyond the budget, or another budget if that is more, after which nothing more is begun
RESUMED_WITH = ("budget", "max_pairs", "limit")  # options that a run may go on with in other sizes
AT_ONCE = ("missing", "unusable")  # failures that a second try cannot change


class DeviceUnusable(UnavailableError):
    """A stack that cannot use the device at all, and would have gone on with the CPU (F28): withholds the verdict."""


@dataclass(frozen=True)
class ArmSpec:
    """One arm to measure. inject: share of extra work in each timed window (for power tests; 0 otherwise).

    cubins: manifest of the kernels that a toolchain made (worker/cubins.py), launched in this environment; toolchain:
    the stack that they come from."""

    name: str
    environment: Environment
    implementation: str = "torch"
    inject: float = 0.0
    cubins: str | None = None
    toolchain: Stack | None = None

    @property
    def spec(self) -> str:
        return self.toolchain.spec if self.toolchain else self.environment.spec


@dataclass(frozen=True)
class Options:
    """What to measure and how long. device: cpu, cuda:0. operators: names; empty means all. cases: glob
    patterns over CASE or "OPERATOR CASE", separated by |.

    budget: seconds in all. max_pairs: most pairs a case gets. limit: seconds a visit of one case may take before it
    counts as hung. threads: of a CPU worker (one: two threads that share a busy machine time each other).
    settle, shuffle: off only to show what they are good for. shard: (i, n): every n-th case from the i-th on.
    plan: fields of worker/timers.py's Plan. mix: params of cases by operator, measured instead of the catalogue's."""

    device: str = "cpu"
    operators: tuple[str, ...] = ()
    cases: str = "*"
    ops: tuple[str, ...] = ()
    seed: int = 0
    budget: float = 600.0
    max_pairs: int = 40
    limit: float = 120.0
    threads: int | None = 1
    settle: bool = True
    shuffle: bool = True
    checks: bool = True
    shard: tuple[int, int] = (0, 1)
    plan: dict[str, Any] = field(default_factory=dict)
    mix: dict[str, Any] = field(default_factory=dict)


class Controller:
    """Measures `arms` over the cases: one, or a base and its candidates. `journal` may hold an earlier part of the run.

    A case is measured on a candidate until that pair of arms is precise enough; on the base while any candidate needs
    it."""

    def __init__(self, arms: Sequence[ArmSpec], options: Options, enough: Enough, journal: Journal | None = None,
                 progress: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        self.arms, self.options, self.enough, self.progress = list(arms), options, enough, progress
        check(options)
        self.journal = journal or Journal(None)
        self.begin = time.monotonic()
        self.seconds = {"measuring": 0.0, "starting": 0.0}
        self.hello = {"device": options.device, "ops": [str(Path(o).resolve()) for o in options.ops],
                      "threads": options.threads if options.device == "cpu" else None, "mix": options.mix}
        self.cases: list[Case] = []
        self.active: dict[int, list[Case]] = {}  # of the batch that is being measured, by arm
        self.later = 0  # cases of later batches
        self.waiting: dict[int, list[WorkerProcess]] = {arm: [] for arm in range(len(arms))}
        self.interrupted = False
        self.stopped = False  # set from another thread: stop as if interrupted
        self.step = 2 if len(self.arms) > 1 else 1  # pairs of a round: there and back, or one visit of a single arm
        self.checked = {(e["arm"], e["operator"], e["case"]) for e in self.journal.of("visit") if e["ok"]}
        self.calls = {(e["operator"], e["case"]): e["result"]["calls"] for e in reversed(self.journal.of("visit"))
                      if e["ok"]}
        self.workers: list[WorkerProcess] = []

    # ---- the run ----------------------------------------------------------------------------------------------------
    def run(self, command: Sequence[str] = ()) -> Run:
        """Measures until done; Ctrl-C ends it and what was measured is returned, marked incomplete."""
        complete = False
        try:
            self._prepare()
            complete = self._measure()
        except KeyboardInterrupt:
            self.journal.add({"event": "interrupted"})
            self.interrupted = True
        finally:
            for worker in self.workers:
                worker.kill()
            self.journal.close()
        return self._assemble(complete, command)

    def _prepare(self) -> None:
        """Asks each stack what it is and which cases it has (once in a run, also when it is resumed)."""
        header = {"arms": [[a.spec, a.implementation, a.inject] for a in self.arms],
                  "options": {k: v for k, v in asdict(self.options).items() if k not in RESUMED_WITH}}
        known = self.journal.of("start")
        if known:
            began = {k: v for k, v in known[0]["options"].items() if k not in RESUMED_WITH}
            earlier = {"arms": known[0]["arms"], "options": began}
            if earlier != _plain(header):
                differing = [k for k in header if earlier[k] != _plain(header)[k]]
                raise UsageError(f"this run was started with other {' and '.join(differing)}", str(self.journal.path),
                                 "repeat the command it was started with, or start a new run (of a bundle: remove this "
                                 "file first)")
        else:
            self.journal.add({"event": "start", "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                              **_plain(header)})
        asked: dict[Any, tuple[ArmSpec, WorkerProcess]] = {}  # arms of one environment have one answer
        new = list(enumerate(self.arms))[len(self.journal.of("stack")):]  # what began the run may have ended before
        for index, arm in new:
            if _same(arm) not in asked:
                asked[_same(arm)] = arm, self._worker(index)  # all start at once
        told = {who: self._introduce(arm, worker) for who, (arm, worker) in asked.items()}
        for index, arm in new:
            self.journal.add({"event": "stack", "arm": index, **told[_same(arm)]})
        catalogues = [e["cases"] for e in self.journal.of("stack")]
        self.cases = choose(catalogues, self.options, [arm.implementation for arm in self.arms])
        if self.options.shuffle:
            random.Random(f"{self.options.seed} batches").shuffle(self.cases)

    def _introduce(self, arm: ArmSpec, worker: WorkerProcess) -> dict[str, Any]:
        """What the worker says of its stack, and its cases. Ends it."""
        begin = time.monotonic()
        try:
            packages = [name.replace("-", "_") for name, _, _ in arm.environment.proofs]
            questions = ({"do": "fingerprint", "packages": packages}, {"do": "cases"})
            answers = [worker.ask(question, 300.0) for question in questions]
        except WorkerLost as lost:
            raise UnavailableError(f"the worker of {arm.name} cannot be used: {lost.message}", arm.environment.spec,
                                   "run its Python by hand and import torch") from lost
        for answer in answers:
            if not answer["ok"]:
                kind = DeviceUnusable if answer["state"] == "unusable" else UnavailableError
                raise kind(f"{arm.name} cannot be measured on {self.options.device}: {answer['message']}",
                           answer.get("where", arm.spec),
                           answer.get("todo", "choose another --device, or repair this stack"))
        fingerprint, cases = (a["result"] for a in answers)
        check_overlays(arm.environment, fingerprint)
        worker.close()
        self.seconds["starting"] += time.monotonic() - begin
        return {"fingerprint": fingerprint, "cases": cases}

    # ---- the schedule -----------------------------------------------------------------------------------------------
    def _measure(self) -> bool:
        """Batch after batch. True when no case needs more. Each batch has its share of the budget and is measured at
        least MIN_PAIRS times: when a budget is too small for all cases, some are decided and the rest are not
        measured, instead of all being measured too little to decide any."""
        complete = True
        batches = [self.cases[i:i + BATCH] for i in range(0, len(self.cases), BATCH)]
        for number, batch in enumerate(batches):
            self.later = sum(map(len, batches[number + 1:]))
            complete &= self._measure_batch(number, batch, time.monotonic() + self._left() / (len(batches) - number))
        return complete

    def _measure_batch(self, number: int, batch: list[Case], until: float) -> bool:
        """Quadruples of visits until no case of the batch needs more (True), or the time is over."""
        self.active = {arm: list(batch) for arm in range(len(self.arms))}
        pairs = max((e["pairs"] for e in self.journal.of("round") if e["batch"] == number), default=0)
        if pairs:
            self._retire_cases(pairs)
        self._drop_parted(batch, pairs)
        ahead = self.options.device != "cpu"  # a worker that starts on the CPU disturbs one that measures there
        while any(self.active.values()) and pairs < self.options.max_pairs:
            if pairs >= MIN_PAIRS and time.monotonic() >= until:
                return False
            if self._left() <= 0 and (number or pairs):  # before workers are started that would measure nothing
                return False
            visits = [(arm, pair, self._take(arm)) for arm, pair in self._order(number, pairs)]
            if ahead:
                self._start_ahead([arm for arm, _, _ in visits])
            self._await([w for _, _, w in visits], "hello")
            for arm, pair, worker in visits:
                if self._overdue() or (self._left() <= 0 and (number or pair > 1)):
                    return False
                self._await([worker], "ready")
                self._visit(arm, pair, worker)
            pairs += self.step
            self.journal.add({"event": "round", "batch": number, "pairs": pairs})
            self._retire_cases(pairs)
        return not any(self.active.values())

    def _drop_parted(self, batch: list[Case], pairs: int) -> None:
        """Forgets visits of pairs that an interruption parted: the other arm's visit would come at another time, and
        perhaps on another GPU."""
        begun: dict[tuple[Case, int], set[int]] = {}
        for e in self.journal.of("visit"):
            case = (e["operator"], e["case"])
            if e["pair"] >= pairs and case in batch:
                begun.setdefault((case, e["pair"]), set()).add(e["arm"])
        parted = {(case, pair) for (case, pair), arms in begun.items()
                  if arms < {arm for arm, active in self.active.items() if case in active}}
        self.journal.drop(lambda e: e["event"] == "visit" and ((e["operator"], e["case"]), e["pair"]) in parted)

    def _left(self) -> float:
        return self.options.budget - (time.monotonic() - self.begin)

    def _overdue(self) -> bool:
        """Whether even the first two pairs, which a budget does not cut short, have to end: large cases on a CPU take
        minutes each."""
        return self._left() < -max(self.options.budget, OVERDUE)

    def _order(self, batch: int, first_pair: int) -> list[tuple[int, int]]:
        """(arm, pair) of a round's visits: ABBA or BAAB by the seed, with more arms one order and then the same
        backwards, so that a drift straight in time cancels."""
        arms = [arm for arm, cases in self.active.items() if cases]
        random.Random(f"{self.options.seed} order {batch} {first_pair}").shuffle(arms)
        there, back = ([(arm, pair) for arm in arms] for pair in (first_pair, first_pair + 1))
        return [*there, *reversed(back)] if self.step == 2 else there

    def _take(self, arm: int) -> WorkerProcess:
        return self.waiting[arm].pop() if self.waiting[arm] else self._worker(arm)

    def _start_ahead(self, arms: list[int]) -> None:
        """Workers for the next round import torch while this one is measured."""
        for arm in arms:
            if len(self.waiting[arm]) < arms.count(arm):
                self.waiting[arm].append(self._worker(arm))

    def _worker(self, arm: int) -> WorkerProcess:
        spec = self.arms[arm]
        hello = {**self.hello, "cubins": spec.cubins} if spec.cubins else self.hello
        worker = WorkerProcess(spec.environment, hello)
        self.workers.append(worker)
        return worker

    def _await(self, workers: list[WorkerProcess], what: str) -> None:
        """Waits for imports ("hello") or for the device's context ("ready"), which is not measuring."""
        begin = time.monotonic()
        for worker in workers:
            with contextlib.suppress(WorkerLost):  # shows again, with its reason, at the first question
                if what == "hello":
                    worker.greet()
                else:
                    worker.ask({"do": what}, self.options.limit)
        self.seconds["starting"] += time.monotonic() - begin

    def _visit(self, arm: int, pair: int, worker: WorkerProcess) -> None:
        """One process measures every active case once; a worker that is lost is replaced for the cases after."""
        cases = list(self.active[arm])
        if self.options.shuffle:  # the same order in both visits of a pair: what ran before is then equal too
            random.Random(f"{self.options.seed} cases {pair}").shuffle(cases)
        done = {(e["operator"], e["case"]) for e in self.journal.of("visit") if (e["arm"], e["pair"]) == (arm, pair)}
        for operator, case in cases:
            if (operator, case) in done:
                continue
            if self.stopped:
                raise KeyboardInterrupt
            if self._overdue():
                break
            begin = time.monotonic()
            try:
                answer = worker.ask(self._request(arm, pair, operator, case), self.options.limit)
            except WorkerLost as lost:
                answer = {"ok": False, "state": lost.state, "message": lost.message}
            if not answer["ok"] and answer["state"] in ("crash", "timeout"):  # the others must not pay for this case
                worker = self._worker(arm)
            seconds = time.monotonic() - begin
            self.seconds["measuring"] += seconds
            event = {"event": "visit", "arm": arm, "pair": pair, "position": len(self.journal.events),
                     "operator": operator, "case": case, "seconds": seconds, "device": self.options.device,
                     **{k: v for k, v in answer.items() if k != "id"}}
            self.journal.add(event)
            if answer["ok"]:
                self.checked.add((arm, operator, case))
                self.calls.setdefault((operator, case), answer["result"]["calls"])
            self.progress({"arm": self.arms[arm].name, "pair": pair, "operator": operator, "case": case,
                           "ok": answer["ok"], "active": len(self.active[0]) + self.later, "left": self._left()})
        worker.close()
        self.workers.remove(worker)

    def _request(self, arm: int, pair: int, operator: str, case: str) -> dict[str, Any]:
        spec = self.arms[arm]
        plan: dict[str, Any] = {**self.options.plan, "inject": spec.inject}
        injected = [a.inject for a in self.arms if a.inject > 0]
        if injected:  # all arms get windows of the same length; what was really added is in each block
            plan["granularity"] = math.ceil(1 / min(injected))
        if (operator, case) in self.calls:  # chosen by the first visit: both arms then time the same windows
            plan["calls"] = self.calls[(operator, case)]
        return {"do": "measure", "operator": operator, "case": case, "implementation": spec.implementation,
                "seed": self.options.seed, "settle": self.options.settle, "plan": plan,
                "checks": self.options.checks and (arm, operator, case) not in self.checked}

    def _retire_cases(self, pairs: int) -> None:
        """Drops the cases that are precise enough after `pairs` pairs, and those that an arm cannot run."""
        medians: dict[tuple[int, Case], dict[int, float]] = {}
        failures: dict[tuple[int, Case], list[str]] = {}
        for e in self.journal.of("visit"):
            where = (e["arm"], (e["operator"], e["case"]))
            if e["pair"] >= pairs:
                continue
            if e["ok"]:
                us = sorted(e["result"]["us"])
                medians.setdefault(where, {})[e["pair"]] = (us[(len(us) - 1) // 2] + us[len(us) // 2]) / 2
            else:
                failures.setdefault(where, []).append(e["state"])
        def failed(arm: int, case: Case) -> bool:
            states = failures.get((arm, case), [])
            return len(states) > 1 or any(state in AT_ONCE for state in states)

        def paired(case: Case, arm: int) -> tuple[list[float], list[float]]:
            base, candidate = medians.get((0, case), {}), medians.get((arm, case), {})
            both = sorted(set(base) & set(candidate))
            return [base[p] for p in both], [candidate[p] for p in both]

        def needed(arm: int) -> list[Case]:
            seen = [case for of, case in medians if of == arm]  # the done ones too: they tell what spread is typical
            done = {case for case, enough in zip(seen, self.enough([paired(c, arm) for c in seen])) if enough}
            return [c for c in self.active[arm] if c not in done and not failed(0, c) and not failed(arm, c)]

        compared = range(1, len(self.arms)) if len(self.arms) > 1 else (0,)
        self.active.update({arm: needed(arm) for arm in compared})
        wanted = {case for arm in compared for case in self.active[arm]}
        self.active[0] = [case for case in self.active[0] if case in wanted]

    # ---- the result -------------------------------------------------------------------------------------------------
    def _assemble(self, complete: bool, command: Sequence[str]) -> Run:
        stacks = self.journal.of("stack")
        if not stacks:
            raise KeyboardInterrupt  # nothing was measured yet
        created = self.journal.of("start")[0]["created"]
        device = stacks[0]["fingerprint"]["device"]
        arms = tuple(_arm(a, s["fingerprint"]) for a, s in zip(self.arms, stacks))
        found = journals.measurements(self.journal.events, [a.name for a in self.arms], device["arch"])
        visited = {(m.arm, m.operator, m.case) for m in found}
        why = "it was interrupted first" if self.interrupted else "the budget ended first"
        found += tuple(Measurement(a.name, *case, device["arch"], "unmeasured", why)
                       for case in self.cases for a in self.arms if (a.name, *case) not in visited)
        warnings = tuple(f"{a.name}: {w}" for a, s in zip(self.arms, stacks)
                         for w in s["fingerprint"].get("warnings", ()))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
        timing = {"wall": time.monotonic() - self.begin, **self.seconds, "controller_mib": peak / 1024}
        stamp = created[:19].replace("-", "").replace(":", "").replace("T", "-")
        unique = secrets.token_hex(4)  # several writers may start in the same second, with equal options
        options = {**_plain(asdict(self.options)), **({"interrupted": True} if self.interrupted else {})}
        return Run(f"{stamp}-{unique}", created, arms, device, found, options, tuple(command), warnings, complete,
                   timing)


def check(options: Options) -> None:
    """Raises UsageError for what every worker would refuse, or worse, take for something else."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        raise UsageError(f"there is no device {options.device!r}", "--device", "write cpu, cuda:0 or cuda:0,cuda:1")
    if options.plan.get("duty", "burst") not in ("burst", "sustained"):
        raise UsageError(f"there is no duty {options.plan['duty']!r}", "--duty", "write burst or sustained")
    for file in options.ops:
        if not (file.endswith(".py") and Path(file).is_file()):
            raise UsageError(f"there is no Python file {file}", "--ops", "give a .py file that defines `op` or `ops`")


def _same(arm: ArmSpec) -> Any:
    return arm.environment.command, tuple(sorted(arm.environment.variables.items())), arm.cubins


def choose(catalogues: Sequence[dict[str, Any]], options: Options, implementations: Sequence[str]) -> list[Case]:
    """Cases that any of the arms' catalogues (as a worker's "cases" gives them) has and the options ask for. Raises
    UsageError for what is asked for and nobody has."""
    have = ", ".join(sorted({o for c in catalogues for o in c})) or "no operators"
    for name in options.operators:  # a name that no stack knows would silently narrow what a verdict covers
        if not any(name in catalogue for catalogue in catalogues):
            raise UsageError(f"there is no operator {name!r}", "--operators", f"choose among: {have}")
    written = {o: {n for c in catalogues if o in c for n in c[o]["implementations"]} for o in
               (options.operators or dict.fromkeys(o for c in catalogues for o in c))}
    wanted = dict.fromkeys(implementations)
    for name in wanted:
        if written and not any(name in names for names in written.values()):
            raise UsageError(f"no operator here has an implementation {name!r}", "--implementation",
                             f"choose among: {', '.join(sorted(set().union(*written.values())))}")
    if not options.operators and not options.mix:  # what nobody wrote is no loss of a stack
        written = {o: names for o, names in written.items() if names >= set(wanted)}
    patterns = [p.strip() for p in options.cases.split("|")]
    used: set[str] = set()
    merged: dict[Case, None] = {}
    left_out: dict[str, str] = {}  # pattern -> an operator that it fits, and that is not measured
    for catalogue in catalogues:
        for operator, entry in catalogue.items():
            for case in entry["cases"]:
                fitting = [p for p in patterns
                           if fnmatch.fnmatch(case, p) or fnmatch.fnmatch(f"{operator} {case}", p)]
                if operator not in written:
                    left_out.update(dict.fromkeys(fitting, operator))
                elif fitting:
                    used.update(fitting)
                    merged[(operator, case)] = None
    idle = [p for p in patterns if p not in used]
    fits = left_out.get(idle[0]) if idle else None
    if fits and not options.operators:
        raise UsageError(f"{idle[0]!r} is about {fits}, which does not have both {' and '.join(wanted)}", "--cases",
                         f"--operators {fits} measures it all the same: what is not there counts as missing")
    if not merged:
        raise UsageError("no case is left to measure", "--operators, --cases", f"choose among: {have}")
    if idle:  # as a name that no stack knows
        raise UsageError(f"no case fits {idle[0]!r}", "--cases", "brakecheck ops OPERATOR lists its cases")
    mine, of = options.shard
    return list(merged)[mine::of]


def _arm(spec: ArmSpec, fingerprint: dict[str, Any]) -> Arm:
    components = tuple(Component(c["name"], c.get("version", ""), c.get("path"), c.get("sha256"))
                       for c in fingerprint["components"])
    made = spec.toolchain or Stack(spec.environment.spec, spec.environment.name)
    own = {c.name for c in made.components}  # of a toolchain, which may not be what this environment has installed
    if spec.toolchain:
        own.add("nvcc")  # up to 12.9 toolchains come without: an installed one made none of their kernels
    return Arm(spec.name, replace(made, components=(*made.components, *(c for c in components if c.name not in own)),
                                  environment=fingerprint["environment"]), spec.implementation)


def _plain(value: Any) -> Any:
    """As JSON gives it back, so that it can be compared with what a journal holds."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value

