"""One call for every comparison: which kind it is follows from what is compared. What the command line calls, and what
Python users call.

    toolchains (cuda==12.9)             compiled and compared without a GPU; with a device their kernels are timed too
    environments (env:, pip:, launch:)  measured side by side, also those that a TOML file names
    recorded runs, tables of blocks     compared as they are
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Set, Union

from . import __version__
from .model import Source, UsageError
from .result import Result
from .toolchains import DEFAULT_ARCHS, Progress, compare_toolchains

if TYPE_CHECKING:
    from .bench.controller import Options
    from .verdict.policy import Policy

__all__ = ["DEFAULT_ARCHS", "Result", "compare", "compare_toolchains", "kind_of"]
KINDS = {"toolchain": "toolchains", "environment": "environments", "recorded": "recorded"}
_RUN_ID = re.compile(r"\d{6,8}(-\d+)?(-[0-9a-f]*)?")


def compare(
    *specs: str,
    sources: Optional[Sequence[Union[str, Path, Source]]] = None,
    archs: Sequence[str] = DEFAULT_ARCHS,
    operators: Sequence[str] = (),
    include_dirs: Sequence[Union[str, Path]] = (),
    defines: Sequence[str] = (),
    std: Optional[str] = None,
    launches: Sequence[str] = (),
    front: str = "nvrtc",
    nvcc: Optional[Union[str, Path]] = None,
    policy: Union[None, str, Path, Policy] = None,
    offline: bool = False,
    jobs: Optional[int] = None,
    progress: Optional[Progress] = None,
    device: Optional[str] = None,
    options: Optional[Options] = None,
    implementation: Optional[str] = None,
    workload: Union[None, str, Path] = None,
    store: Optional[str] = None,
    resume: Optional[str] = None,
    watch: Any = None,
    command: Sequence[str] = (),
) -> Result:
    """Compares stacks, recorded runs or tables; the first is the base. Raises BrakecheckError for what one can mend.

    specs: `cuda==X.Y[.Z]` with overlays (`+ptxas==12.8`); `env:PYTHON`, `pip:torch==2.12.0`, `launch:COMMAND`, with
    overlays (`+nvidia-cublas==13.5.1.27`); FILE.toml:NAME, or FILE.toml for all that it names; a run's id or folder; a
    CSV or JSON table of blocks (docs/blocks.md).

    Of toolchains: sources (.cu or .ptx; the catalogue when none are given), archs, include_dirs, defines, std,
    launches (KERNEL=THREADS[,SHARED]), front ("nvrtc" or "nvcc"; `nvcc`: path of an installed one), jobs, offline.
    Of measuring: device ("cpu", "cuda:0"; with one, toolchains are measured too), options (budget, cases, duty and the
    like), implementation ("base=torch,candidate=triton"), store, resume, watch (called with each visit). Of both:
    operators, policy (a brakecheck.toml or a Policy), workload (a file of `brakecheck workload`, whose cases are then
    measured instead of the catalogue's, or of weights by operator).
    """
    from .verdict.policy import Policy, load_policy

    rules = policy if isinstance(policy, Policy) else load_policy(Path(policy) if policy else None)
    if workload:
        from . import measuring

        rules = replace(rules, measured=replace(rules.measured, weights=measuring.weights_of(str(workload))))
    specs = tuple(expanded(specs))
    kinds = [kind_of(spec, store) for spec in specs]
    _check_used(set(kinds), {
        "--source": sources, "--include": include_dirs, "--define": defines, "--std": std, "--launch": launches,
        "--nvcc": nvcc, "--implementation": implementation, "--resume": resume, "--operators": operators,
        "--device": device, "--cases": options and options.cases != "*", "--ops": options and options.ops},
        timed=device is not None or (options is not None and options.device != "cpu"))
    if "recorded" in kinds:
        return _projected(_recorded(specs, kinds, rules, store), workload)
    if len(specs) < 2:
        raise UsageError("a comparison needs two stacks or more",
                         todo="for instance: brakecheck compare cuda==12.9 cuda==13.2")
    static: Dict[str, Any] = {
        "sources": sources, "operators": operators, "include_dirs": include_dirs, "defines": defines, "std": std,
        "launches": launches, "front": front, "nvcc": nvcc, "offline": offline, "jobs": jobs, "progress": progress}
    if set(kinds) == {"toolchain"} and device is None and options is None:
        if workload:
            raise UsageError("--workload has no meaning here: machine code is compared, and no times to weigh",
                             "--workload", "time the kernels with --device cuda:0, or leave it out")
        return compare_toolchains(*specs, archs=archs, policy=rules, **static)
    if len(set(kinds)) > 1:
        raise UsageError("a toolchain cannot be measured against an environment", " ".join(specs),
                         "name a base and candidates of the same kind")
    from . import measuring
    from .bench.controller import Options

    chosen = options or Options()
    chosen = replace(chosen, device=device or chosen.device, operators=tuple(operators) or chosen.operators)
    how: Dict[str, Any] = {"store": store, "resume": resume, "progress": watch or (lambda _: None), "command": command}
    if kinds[0] == "toolchain":
        from .toolchain_arms import compare_on_device

        return compare_on_device(specs, chosen, rules, static, how)
    chosen = replace(chosen, mix=measuring.mix_of(workload))
    comparison, run = measuring.compare_measured(
        *specs, options=chosen, policy=rules, implementations=measuring.implementations_of(implementation), **how)
    return _projected(_finished(comparison, run), workload)


def _check_used(kinds: Set[str], given: Dict[str, Any], timed: bool) -> None:
    """UsageError for what would not be looked at: a verdict must not seem to cover a source that it never saw.

    timed: toolchains are, which takes a device."""
    if len(kinds) != 1:
        return  # refused below, with another reason
    (kind,) = kinds
    compiled = ("--source", "--include", "--define", "--std", "--launch", "--nvcc")
    chosen = ("--cases", "--ops")
    unused = {"toolchain": ("--implementation", *(() if timed else chosen)), "environment": compiled,
              "recorded": (*compiled, *chosen, "--device", "--implementation", "--resume", "--operators")}[kind]
    for name in unused:
        if given[name]:
            todo = "scope.ignore of a policy leaves operators out" if name == "--operators" else "leave it out"
            raise UsageError(f"{name} has no meaning here: what is compared is {KINDS[kind]}", name, todo)


def expanded(specs: Sequence[str]) -> List[str]:
    """FILE.toml as one spec for each stack that it names, FILE.toml:NAME as that stack's."""
    from .stack.environment import stack_specs

    out: List[str] = []
    for spec in specs:
        file, toml, name = spec.partition(".toml")
        one = toml and (not name or name.startswith(":"))
        out += stack_specs(f"{file}.toml", name[1:]) if one else [spec]
    return out


def kind_of(spec: str, store: Optional[str] = None) -> str:
    """toolchain, environment or recorded. UsageError for what is none of them."""
    from .bench import store as stores
    from .stack.environment import is_environment
    from .stack.spec import parse

    if is_environment(spec) or ".toml:" in spec:
        return "environment"
    if Path(spec).suffix.lower() in (".csv", ".json") or stores.exists(spec):
        return "recorded"
    if _RUN_ID.fullmatch(spec):
        stores.find(spec, store or stores.default_store())
        return "recorded"
    parse(spec)
    return "toolchain"


def _recorded(specs: Sequence[str], kinds: Sequence[str], rules: Policy, store: Optional[str]) -> Result:
    from .bench.recorded import pooled, read_recorded
    from .verdict.measured_verdict import compare_runs
    from .verdict.merge import compare_run

    if set(kinds) != {"recorded"}:
        raise UsageError("recorded runs and tables are compared with their like", " ".join(specs),
                         "give one file that holds both arms, or two runs")
    runs = [read_recorded(spec, store) for spec in specs]
    together = pooled(runs)
    if together:
        return _finished(compare_run(together, rules), together)
    if len(runs) > 2:
        raise UsageError(f"{len(runs)} runs that do not compare the same arms", " ".join(specs),
                         "give two runs, or several of the same comparison")
    if len(runs) == 1 or runs[0].id == runs[1].id:
        return _finished(compare_run(runs[0], rules), runs[-1])
    return _finished(compare_runs(runs[0], runs[1], rules), runs[-1])


def _projected(result: Result, workload: Union[None, str, Path]) -> Result:
    """With what the deltas mean for the workload's end-to-end time, of each candidate, where the workload is a file of
    operator calls."""
    from .model import Reason, encode
    from .verdict import workload as mixes

    if workload is None or not mixes.is_mix(Path(workload)):
        return result
    comparison, mix = result.comparison, mixes.load(Path(workload))
    steps = list(dict.fromkeys(d.step for d in comparison.deltas)) or [("base", "candidate")]
    found = {step[1]: mixes.project(mix, [d for d in comparison.deltas if d.step == step]) for step in steps}
    alone = len(found) == 1
    said = [Reason("workload", one.text if alone else f"{name}: {one.text}") for name, one in found.items()]
    data = {"projection": encode(*found.values())} if alone else {
        "projections": {name: encode(one) for name, one in found.items()}}
    result.comparison = replace(comparison, reasons=(*comparison.reasons, *said),
                                environment={**comparison.environment, **data})
    return result


def _finished(comparison: Any, run: Any) -> Result:
    environment = {"brakecheck": __version__, "python": sys.version.split()[0], **comparison.environment}
    return Result(replace(comparison, environment=environment), (), run)
