"""The static comparison: compile with each toolchain, analyse, compare. Needs no GPU."""

from __future__ import annotations

import datetime
import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from . import __version__
from .model import Arm, Source, Unit, UsageError, distinct
from .result import Result

if TYPE_CHECKING:
    from .stack.toolchain import CudaStack
    from .verdict.policy import Policy

DEFAULT_ARCHS = ("sm_80", "sm_89", "sm_90a")
Progress = Callable[[str, int, int, str], None]


def compare_toolchains(
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
) -> Result:
    """Compares CUDA toolchains on kernels, without a GPU. The first spec is the base.

    specs: two or more of `cuda==X.Y[.Z]`, each with overlays (`+ptxas==12.8`). sources: .cu or .ptx files; the built-in
    catalogue (or its `operators`) when none are given. archs: sm_80, sm_90a, ... launches: how the kernels of `sources`
    are launched, KERNEL=THREADS[,SHARED], for occupancy and launches that cannot work. front: "nvrtc" or "nvcc"
    (`nvcc`: path of an installed one). policy: a brakecheck.toml or a Policy. Raises BrakecheckError for what the
    caller can mend.
    """
    from .evidence.analyse import analyse, check_launches
    from .stack.compile import check_request, compile_all
    from .stack.toolchain import disassembler, open_stacks, with_installed_nvcc
    from .verdict.policy import Policy, load_policy
    from .verdict.static import compare_static

    if len(specs) < 2:
        raise UsageError(
            "a comparison needs two stacks or more", todo="for instance: brakecheck compare cuda==12.9 cuda==13.2"
        )
    rules = policy if isinstance(policy, Policy) else load_policy(Path(policy) if policy else None)
    check_request(archs, front)  # before the downloads, not after
    chosen = collect_sources(
        sources, operators=operators, include_dirs=include_dirs, defines=defines, std=std, launches=launches
    )
    _check_archs(chosen, archs, own=bool(sources))
    stacks = open_stacks(specs, offline=offline, progress=progress)
    if nvcc:
        front, stacks = "nvcc", [with_installed_nvcc(stack, Path(nvcc)) for stack in stacks]
    tools = disassembler(offline=offline, progress=progress)
    units = compile_all(stacks, chosen, list(archs), front=front, jobs=jobs, progress=progress)
    crossed = _cross(stacks, units, jobs, progress)
    # All in one call: code that several stacks, or a swap, have in common is disassembled once.
    together = [unit for side in [*units, list(crossed.values())] for unit in side]
    ready = iter(analyse(together, chosen, tools.nvdisasm, jobs=jobs, progress=progress))
    analysed = [[next(ready) for _ in side] for side in units]
    check_launches((unit for side in analysed for unit in side), chosen)
    arms = [Arm(name, stack.stack) for name, stack in zip(distinct([s.stack.name for s in stacks]), stacks)]
    swapped = {(ptx, arms[j].name): unit for (ptx, j), unit in zip(crossed, ready)}
    comparison = compare_static(arms, analysed, chosen, rules, crossed=swapped)
    environment = {
        "brakecheck": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "archs": list(archs),
        "front": front,
        "sources": len(chosen),
        "disassembler": tools.component.version,
        "notes": list(dict.fromkeys(note for stack in stacks for note in stack.notes)),
        **comparison.environment,
    }
    return Result(replace(comparison, environment=environment), analysed)


def _cross(
    stacks: Sequence[CudaStack], units: Sequence[Sequence[Unit]], jobs: Optional[int], progress: Optional[Progress]
) -> Dict[Tuple[str, int], Unit]:
    """The PTX of changed units, assembled by the ptxas of the stack that it is compared with: one component swapped.

    Keys: (path of the PTX, number of the stack whose ptxas it was). A ptxas that is older than the PTX rejects it, and
    then that unit tells nothing.
    """
    from .evidence.cubin import read_cubin
    from .stack.compile import compile_all

    def code(unit: Unit) -> Dict[str, bytes]:
        return {kernel.name: kernel.code for kernel in read_cubin(Path(unit.cubin or "")).kernels}

    last = len(stacks) - 1
    wanted: Dict[Tuple[int, str], List[Source]] = {}
    for i, j in sorted({*((k, k + 1) for k in range(last)), *((0, k) for k in range(1, last + 1))}):
        if stacks[i].sha256("ptxas") == stacks[j].sha256("ptxas"):
            continue
        for one, two in zip(units[i], units[j]):
            if one.status != "ok" or two.status != "ok" or one.front == "ptx" or one.ptx_sha256 == two.ptx_sha256:
                continue
            if one.ptx and code(one) != code(two):
                wanted.setdefault((j, one.arch), []).append(Source(one.ptx, Path(one.source).stem, "ptx"))
    found = {}
    for (j, arch), sources in wanted.items():
        (made,) = compile_all([stacks[j]], sources, [arch], jobs=jobs, progress=progress)
        found.update({(unit.source, j): unit for unit in made})
    return found


def collect_sources(
    sources: Optional[Sequence[Union[str, Path, Source]]] = None,
    *,
    operators: Sequence[str] = (),
    include_dirs: Sequence[Union[str, Path]] = (),
    defines: Sequence[str] = (),
    std: Optional[str] = None,
    launches: Sequence[str] = (),
) -> List[Source]:
    """The user's files as sources, or the catalogue's kernels (of `operators`, when named). UsageError: options of the
    one given with the other."""
    from .ops import catalogue, catalogue_sources

    _check_options(bool(sources), operators, include_dirs, std, launches)
    if sources:
        from .stack.files import user_sources

        given = [s for s in sources if isinstance(s, Source)]
        paths = [str(s) for s in sources if not isinstance(s, Source)]
        return given + user_sources(paths, [str(d) for d in include_dirs], list(defines), std or "c++17", launches)
    if operators:
        known = catalogue()
        for name in operators:
            if name not in known:
                raise UsageError(f"no operator is called {name!r}", "--operators", f"choose from: {', '.join(known)}")
    found = [s for s in catalogue_sources() if not operators or s.operator in operators]
    if not found:
        raise UsageError("none of these operators has a CUDA kernel of ours", "--operators", "see `brakecheck ops`")
    return [replace(s, defines=(*s.defines, *defines)) for s in found] if defines else found


def _check_options(
    own: bool, operators: Sequence[str], include_dirs: Sequence[Any], std: Optional[str], launches: Sequence[str]
) -> None:
    if own and operators:
        raise UsageError("operators are of the catalogue, and sources replace it", "--operators", "leave one out")
    options = {"--include": include_dirs, "--std": std, "--launch": launches}
    if not own and any(options.values()):
        name = next(name for name, value in options.items() if value)
        raise UsageError(f"{name} is about your own sources, and there are none", name, "add --source FILE.cu")


def _check_archs(sources: Sequence[Source], archs: Sequence[str], own: bool) -> None:
    """UsageError where a source of the user's, or the whole choice of the catalogue, is for none of the architectures:
    nothing would be compared."""
    idle = [s for s in sources if not any(s.is_for(arch) for arch in archs)]
    if idle and (own or len(idle) == len(sources)):
        name, meant = Path(idle[0].path).name, idle[0].meant
        raise UsageError(f"{name} is for {meant}, and not for {', '.join(archs)}", "--arch", "add one that it is for")
