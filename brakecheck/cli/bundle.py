"""brakecheck bundle: what another machine needs to measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, List, Optional

import typer

from .console import progress_bar


def bundle(
    stacks: Annotated[List[str], typer.Argument(
        metavar="BASE CANDIDATE",
        help="cuda==12.9 cuda==13.2; or env:PATH of Pythons there, env:this, launch:COMMAND.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make.")],
    operators: Annotated[str, typer.Option(help="Only these operators, comma-separated.")] = "",
    cases: Annotated[str, typer.Option(help="Glob patterns over 'CASE' or 'OPERATOR CASE', with | between.")] = "*",
    arch: Annotated[str, typer.Option(help="Architecture of the GPU there, for toolchains.")] = "sm_90a",
    implementation: Annotated[Optional[str], typer.Option(help="base=torch,candidate=triton, or one name.")] = None,
    ops: Annotated[Optional[List[str]], typer.Option(help="Python file with operators of your own.")] = None,
    duty: Annotated[str, typer.Option(help="burst or sustained.")] = "burst",
    seed: Annotated[int, typer.Option(help="Of inputs and of all orders.")] = 0,
    policy: Annotated[Optional[Path], typer.Option(help="Policy file, for the margin.")] = None,
    offline: Annotated[bool, typer.Option(help="Use the cache only, never the network.")] = False,
) -> int:
    """Make a folder that measures two stacks on a machine without network: python FOLDER/run.py."""
    from ..bundling import write_bundle
    from ..verdict.policy import load_policy
    from .compare import split
    from .run import options_of

    chosen = options_of("cuda:0", operators, cases, ops, "10m", seed, duty)
    with progress_bar() as progress:
        made = write_bundle(stacks, out, chosen, load_policy(policy), arch=arch, implementation=implementation,
                            static={"operators": split(operators), "offline": offline, "progress": progress})
    print(f"{made.folder}: {made.files} files, to compare {' and '.join(made.arms)}")
    print(f"there:  python {made.folder.name}/run.py --device cuda:0\nhere:   brakecheck compare run-ID.json")
    return 0
