"""Implementations in Triton (kernels/triton_kernels.py), where the stack has a Triton that can run them."""

from __future__ import annotations

import os
from typing import Any

from .base import Missing


def kernels(tensor: Any, row: int = 0, dots: bool = False) -> Any:
    """The module of kernels, for a tensor's device. row: elements of a row that its kernel has to hold in registers.
    dots: it multiplies matrices of the tensor's type. Raises Missing where it cannot run."""
    try:
        from ..kernels import triton_kernels
    except ImportError as problem:
        raise Missing(f"this environment has no Triton that can be used: {problem}") from problem
    if not tensor.is_cuda:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise Missing(f"Triton has no {tensor.device.type} device; TRITON_INTERPRET=1 runs its kernels in Python")
        if dots and str(tensor.dtype) == "torch.bfloat16":
            raise Missing("Triton's interpreter multiplies the bit patterns of bfloat16 (triton issue 11584)")
    if row > triton_kernels.WIDEST_ROW:
        raise Missing(f"the Triton kernel takes rows of {triton_kernels.WIDEST_ROW} elements at most, not {row}")
    return triton_kernels
