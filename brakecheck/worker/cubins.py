"""Kernels that a toolchain made, as operators: each CUDA kernel of the catalogue, launched through the driver on the
buffers of whatever torch this is. The toolchain is then a component of its own.

A manifest is JSON: {"kernels": [{"operator", "kernel", "cubin": path beside the manifest, "entries": {expression:
mangled name}}]}. The operator of the kernel `fused` of `softmax` is called "softmax fused", its implementation "cuda".
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Optional

from ..model import BrakecheckError
from ..ops.base import Case, CudaKernel, Operator
from . import driver

IMPLEMENTATION = "cuda"


def kernel_operators(catalogue: Dict[str, Operator], manifest: Path) -> Dict[str, Operator]:
    """One operator for each kernel of the manifest that this catalogue knows, with the cases that the kernel can run.
    Raises BrakecheckError when the manifest cannot be read."""
    try:
        rows = json.loads(manifest.read_text())["kernels"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise BrakecheckError(f"no manifest of kernels: {problem}", str(manifest), "build it again") from problem
    found = {}
    for row in rows:
        operator = catalogue.get(row["operator"])
        kernel = next((k for k in operator.kernels if k.name == row["kernel"]), None) if operator else None
        if operator is None or kernel is None:
            continue
        name = f"{operator.name} {kernel.name}"
        launcher = Launcher(kernel, manifest.parent / row["cubin"], row["entries"])
        found[name] = replace(operator, name=name, kernels=[kernel], cases=[c for c in operator.cases
                              if kernel.supports(c)], implementations={IMPLEMENTATION: launcher})
    return found


class Launcher:
    """Runs one kernel. The module is loaded at the first call, which is before any capture."""

    def __init__(self, kernel: CudaKernel, cubin: Path, entries: Dict[str, str]) -> None:
        self.kernel, self.cubin, self.entries = kernel, cubin, entries
        self.functions: Optional[Dict[str, driver.Function]] = None

    def __call__(self, case: Case, **inputs: Any) -> Dict[str, Any]:
        if self.functions is None:
            module = driver.Module(self.cubin.read_bytes(), self.cubin.name)
            self.functions = {expression: module.function(name) for expression, name in self.entries.items()}
        run = driver.KernelRun(self.kernel, self.functions, case, inputs)
        run.enqueue()
        return run.outputs
