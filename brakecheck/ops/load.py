"""The catalogue and a user's own operators: `--ops my_ops.py` adds the `op` or `ops` of a Python file."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping

from ..model.errors import BrakecheckError, UsageError
from . import catalogue
from .base import Case, Operator


def load(files: Iterable[str] = ()) -> Dict[str, Operator]:
    """Operators by name: the catalogue, then those of each file, which may replace an operator of the same name."""
    found = catalogue()
    for file in files:
        for operator in load_file(file):
            found[operator.name] = operator
    return found


def mixed(operators: Mapping[str, Operator], mix: Mapping[str, List[Mapping[str, Any]]]) -> Dict[str, Operator]:
    """The operators that a workload's mix names, with its cases. mix: params of each case by operator."""
    return {name: replace(operator, cases=[Case.of(**params) for params in mix[name]])
            for name, operator in operators.items() if name in mix}


def load_file(file: str) -> List[Operator]:
    """The operators that a Python file defines as `op` or `ops`. Raises UsageError when there is no such file and
    BrakecheckError when it does not run or defines none."""
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {file}", "--ops", "give a Python file that defines `op` or `ops`")
    name = f"brakecheck_user_ops_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file", "--ops", "its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        raise BrakecheckError(f"{type(problem).__name__}: {problem}", str(path),
                              "correct this file of operators") from problem
    several = getattr(module, "ops", None) or ([module.op] if hasattr(module, "op") else [])
    operators = [op for op in several if isinstance(op, Operator)]
    if not operators:
        raise BrakecheckError("no operators are defined here", str(path),
                              "assign an Operator to `op`, or a list of them to `ops`")
    for operator in operators:
        _check(operator, f"{path}: {operator.name}")
        if sum(operator.name == other.name for other in operators) > 1:
            raise BrakecheckError(f"two operators are called {operator.name!r}", str(path), "rename one of them")
    return operators


def _check(operator: Operator, where: str) -> None:
    """Raises BrakecheckError for an operator that cannot be measured, before anything is."""
    parts = {"a case": operator.cases, "@op.inputs": operator.make_inputs,
             "@op.implementation": operator.implementations or operator.kernels}
    lacks = [part for part, there in parts.items() if not there]
    if lacks:
        raise BrakecheckError(f"this operator lacks {' and '.join(lacks)}", where, "see docs/adding-a-kernel.md")
    names = [case.name for case in operator.cases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BrakecheckError(f"two cases are called {twice!r}", where, "give them other parameters or names")
