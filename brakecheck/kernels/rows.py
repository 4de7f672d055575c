"""Softmax, LayerNorm and RMSNorm over the last dimension as torch operators (namespace brakecheck), with autograd, fake
tensors and torch.compile. Public names: brakecheck.ops.softmax, layer_norm, rms_norm. Of softmax there are second
gradients too; the norms refuse them.

On a CUDA device of compute capability 8.0 or more the kernels of cuda/rows_softmax.cu and cuda/rows_norm.cu run,
compiled at first use (jit.py); elsewhere, and for float64, plain torch. Reductions are in float32 (float64 for
float64). Under autocast an operator keeps the dtype of x, and brings weight and bias to it.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, List, Optional, Tuple, Union

import torch
from torch import Tensor

from ..model import BrakecheckError, UsageError
from . import jit
from . import rows_tuning as tuning

_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_ANY_THREADS = 512   # block of the kernels for any width
DEPENDENT = True     # programmatic dependent launch: worth 0.5 us (docs/findings-rows.md)


# ---- public ---------------------------------------------------------------------------------------------------------

def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax of x over `dim`, in the dtype of x; any shape and strides.

    A row that is -inf throughout, or holds NaN or +inf, gives NaN, as in torch."""
    jit.check_tensors("softmax", x)
    if x.dim() == 0:
        return torch.ops.brakecheck.softmax_rows(x.reshape(1)).reshape(())
    if dim in (-1, x.dim() - 1):
        return torch.ops.brakecheck.softmax_rows(x)
    return torch.ops.brakecheck.softmax_rows(x.transpose(dim, -1)).transpose(dim, -1)


def layer_norm(x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-5,
               residual: Optional[Tensor] = None) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba, Kiros, Hinton 2016).

    With residual (shape of x): first s = x + residual, rounded to the dtype of x; returns (norm of s, s)."""
    return _norm(x, weight, bias, eps, residual, True)


def rms_norm(x: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6,
             residual: Optional[Tensor] = None) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang, Sennrich 2019); residual as in layer_norm."""
    return _norm(x, weight, None, eps, residual, False)


def _norm(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, residual: Optional[Tensor],
          center: bool) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    operator = "layer_norm" if center else "rms_norm"
    jit.check_tensors(operator, x, weight=weight, bias=bias, residual=residual)
    if x.dim() == 0:
        raise UsageError("x is a scalar", operator, "give a tensor of at least one dimension")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.shape != x.shape[-1:]:
            raise BrakecheckError(f"{name} has shape {tuple(other.shape)}, x {tuple(x.shape)}", name,
                                  f"give {name} one element for each of the last dimension of x")
    if residual is not None and residual.shape != x.shape:
        raise BrakecheckError(f"residual has shape {tuple(residual.shape)}, x {tuple(x.shape)}", "residual",
                              "expand residual to the shape of x")
    weight, bias, residual = (t if t is None or t.dtype == x.dtype else t.to(x.dtype) for t in (weight, bias, residual))
    y, total, _, _ = torch.ops.brakecheck.norm_rows(x, residual, weight, bias, eps, center)
    return y if residual is None else (y, total)


# ---- plain torch ----------------------------------------------------------------------------------------------------

def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _softmax_plain(x: Tensor) -> Tensor:
    return torch.softmax(x, -1).contiguous()


def _softmax_backward_plain(y: Tensor, dy: Tensor) -> Tensor:
    wide, gradient = _wide(y), _wide(dy)
    return (wide * (gradient - (wide * gradient).sum(-1, keepdim=True))).to(y.dtype).contiguous()


def _norm_plain(x: Tensor, residual: Optional[Tensor], weight: Optional[Tensor], bias: Optional[Tensor], eps: float,
                center: bool) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x.new_empty(0) if residual is None else (x + residual).contiguous()
    wide = _wide(x if residual is None else total)
    mean = wide.mean(-1) if center else wide.new_empty(0)
    centred = wide - mean.unsqueeze(-1) if center else wide
    rstd = (centred.square().mean(-1) + eps).rsqrt()
    y = centred * rstd.unsqueeze(-1)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype).contiguous(), total, mean, rstd


Gradients = Tuple[Tensor, Tensor, Tensor]


def _norm_backward_plain(x: Tensor, dy: Tensor, weight: Optional[Tensor], mean: Tensor, rstd: Tensor,
                         center: bool) -> Gradients:
    wide, gradient = _wide(x), _wide(dy)
    hat = (wide - mean.unsqueeze(-1) if center else wide) * rstd.unsqueeze(-1)
    scaled = gradient if weight is None else gradient * weight
    shift = scaled.mean(-1, keepdim=True) if center else 0.0
    dx = rstd.unsqueeze(-1) * (scaled - shift - hat * (scaled * hat).mean(-1, keepdim=True))
    rows = (math.prod(x.shape[:-1]), x.shape[-1])
    dgamma = (gradient * hat).reshape(rows).sum(0).to(x.dtype)
    dbeta = gradient.reshape(rows).sum(0).to(x.dtype) if center else x.new_empty(0)
    return dx.to(x.dtype).contiguous(), dgamma, dbeta


# ---- our kernels ----------------------------------------------------------------------------------------------------

@functools.cache
def _capability(device: int) -> Tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_reported: List[str] = []


def _usable(x: Tensor) -> bool:
    known = x.dtype in _ELEMENTS and torch.version.cuda is not None
    return known and not _reported and _capability(_index(x)) >= (8, 0)


def _report(error: BrakecheckError) -> None:
    """Falls back to torch for the rest of the process, and says why once."""
    if not _reported:
        _reported.append(str(error))
        warnings.warn(f"brakecheck's row kernels are not available, plain torch is used: {error}", stacklevel=4)


def _index(x: Tensor) -> int:
    return x.device.index if x.device.index is not None else torch.cuda.current_device()


def _aligned(*tensors: Optional[Tensor]) -> bool:
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


def _vectors(x: Tensor) -> int:
    """16-byte vectors of a row, or 0 if it is not a whole number of them."""
    size = x.shape[-1] * x.element_size()
    return 0 if size % 16 else size // 16


def _run(kernel: jit.Kernel, grid: Tuple[int, int], device: torch.device, arguments: List[Any]) -> None:
    with torch.cuda.device(device):
        kernel(grid, arguments, torch.cuda.current_stream(device).cuda_stream)


def _kernel(source: str, expression: str, x: Tensor, threads: int, shared: int = 0, cluster: int = 1) -> jit.Kernel:
    defines = (f"ELEMENT={_ELEMENTS[x.dtype]}",)
    return jit.kernel(source, expression, _index(x), (threads, 1), shared, cluster, defines, DEPENDENT)


def _planned(source: str, expression: str, plan: tuning.Plan, x: Tensor, streams: int, rows: int,
             sums: int = 0) -> Tuple[jit.Kernel, int]:
    """The kernel of a plan, and the blocks of its grid: a team for all rows, or as many persistent teams as fit."""
    shared = plan.shared_bytes(x.shape[-1], x.element_size(), streams, sums)
    hardware = plan.cluster * plan.group
    kernel = _kernel(source, expression, x, plan.team_threads * plan.teams, shared, hardware)
    needed = -(-rows // (plan.teams * plan.rows)) * plan.cluster
    needed = -(-needed // hardware) * hardware
    return kernel, min(needed, max(kernel.resident, hardware)) if plan.persistent or sums else needed


def _softmax_cuda(x: Tensor) -> Tensor:
    if not _usable(x):
        return _softmax_plain(x)
    x = x.contiguous()
    y = torch.empty_like(x)
    rows = x.numel() // max(x.shape[-1], 1)
    if x.numel() == 0:
        return y
    plan = tuning.softmax(_vectors(x), rows, _processors(_index(x)), _capability(_index(x)))
    arguments = [x, y, rows, x.shape[-1]]
    try:
        if plan is None or not _aligned(x, y):
            _run(_kernel("rows_softmax.cu", "softmax_any", x, _ANY_THREADS), (rows, 1), x.device, arguments)
        else:
            kernel, blocks = _planned("rows_softmax.cu", f"softmax_rows<{plan.softmax()}>", plan, x, 1, rows)
            _run(kernel, (blocks, 1), x.device, arguments)
    except BrakecheckError as error:
        _report(error)
        return _softmax_plain(x)
    return y


def _softmax_backward_cuda(y: Tensor, dy: Tensor) -> Tensor:
    if not _usable(y):
        return _softmax_backward_plain(y, dy)
    y, dy = y.contiguous(), dy.contiguous()
    dx = torch.empty_like(y)
    rows = y.numel() // max(y.shape[-1], 1)
    if y.numel() == 0:
        return dx
    plan = tuning.softmax_backward(_vectors(y), rows, _processors(_index(y)), _capability(_index(y)))
    arguments = [y, dy, dx, rows, y.shape[-1]]
    try:
        if plan is None or not _aligned(y, dy, dx):
            _run(_kernel("rows_softmax.cu", "softmax_any_backward", y, _ANY_THREADS), (rows, 1), y.device, arguments)
        else:
            kernel, blocks = _planned("rows_softmax.cu", f"softmax_rows_backward<{plan.softmax()}>", plan, y, 2,
                                      rows)
            _run(kernel, (blocks, 1), y.device, arguments)
    except BrakecheckError as error:
        _report(error)
        return _softmax_backward_plain(y, dy)
    return dx


def _norm_cuda(x: Tensor, residual: Optional[Tensor], weight: Optional[Tensor], bias: Optional[Tensor], eps: float,
               center: bool) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _usable(x) or x.shape[-1] == 0:
        return _norm_plain(x, residual, weight, bias, eps, center)
    given = residual
    x = x.contiguous()
    residual, weight, bias = (None if t is None else t.contiguous() for t in (residual, weight, bias))
    y, n = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // n
    total = x.new_empty(0) if residual is None else torch.empty_like(x)
    mean = x.new_empty(x.shape[:-1] if center else (0,), dtype=torch.float32)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if rows == 0:
        return y, total, mean, rstd
    arguments = [x, residual, weight, bias, y, total if residual is not None else None, mean if center else None, rstd,
                 rows, n, float(eps)]
    plan = tuning.norm(_vectors(x), _capability(_index(x)), center, residual is not None)
    try:
        if plan is None or not _aligned(x, residual, weight, bias, y, total):
            expression = f"norm_any<{int(center)},{int(residual is not None)}>"
            _run(_kernel("rows_norm.cu", expression, x, _ANY_THREADS), (rows, 1), x.device, arguments)
        else:
            kernel, blocks = _planned("rows_norm.cu", plan.norm(center, residual is not None), plan, x, 1, rows)
            _run(kernel, (blocks, 1), x.device, arguments)
    except BrakecheckError as error:
        _report(error)
        return _norm_plain(x, given, weight, bias, eps, center)
    return y, total, mean, rstd


def _norm_backward_cuda(x: Tensor, dy: Tensor, weight: Optional[Tensor], mean: Tensor, rstd: Tensor,
                        center: bool) -> Gradients:
    if not _usable(x) or x.numel() == 0:
        return _norm_backward_plain(x, dy, weight, mean, rstd, center)
    x, dy, weight = x.contiguous(), dy.contiguous(), None if weight is None else weight.contiguous()
    dx, n = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // n
    dgamma = x.new_empty(n)
    dbeta = torch.empty_like(dgamma) if center else x.new_empty(0)
    plan = tuning.norm_backward(_vectors(x), _capability(_index(x)), center)
    try:
        if plan is None or not _aligned(x, dy, weight, dx):
            kernel = _kernel("rows_norm.cu", f"norm_any_backward<{int(center)}>", x, _ANY_THREADS)
            blocks = slots = min(rows, kernel.resident)
            wide = 16
        else:
            kernel, blocks = _planned("rows_norm.cu", plan.norm_backward(center), plan, x, 2, rows, 1 + center)
            slots, wide = blocks // (plan.cluster * plan.group), plan.finish
        pitch = -(-n // 4) * 4  # norm_rows_finish reads four floats at a time
        partial = x.new_empty((2 if center else 1, slots, pitch), dtype=torch.float32)
        second = partial[1] if center else None
        _run(kernel, (blocks, 1), x.device,
             [x, dy, weight, mean if center else None, rstd, dx, partial, second, rows, n, pitch])
        finish = _kernel("rows_norm.cu", f"norm_rows_finish<{wide},{256 // wide}>", x, 256)
        _run(finish, (-(-n // (4 * wide)), 2 if center else 1), x.device,
             [partial, second, dgamma, dbeta if center else None, slots, n, pitch])
    except BrakecheckError as error:
        _report(error)
        return _norm_backward_plain(x, dy, weight, mean, rstd, center)
    return dx, dgamma, dbeta


# ---- registration ---------------------------------------------------------------------------------------------------

def _statistics(x: Tensor, center: bool) -> Tuple[Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[:-1] if center else (0,), dtype=dtype), x.new_empty(x.shape[:-1], dtype=dtype)


def _softmax_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _softmax_backward_fake(y: Tensor, dy: Tensor) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _norm_fake(x: Tensor, residual: Optional[Tensor], weight: Optional[Tensor], bias: Optional[Tensor], eps: float,
               center: bool) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x.new_empty(0 if residual is None else x.shape)
    return (torch.empty_like(x, memory_format=torch.contiguous_format), total, *_statistics(x, center))


def _norm_backward_fake(x: Tensor, dy: Tensor, weight: Optional[Tensor], mean: Tensor, rstd: Tensor,
                        center: bool) -> Gradients:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(x.shape[-1]), x.new_empty(x.shape[-1] if center else 0)


def _softmax_setup(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _softmax_gradient(ctx: Any, dy: Tensor) -> Tensor:
    return torch.ops.brakecheck.softmax_rows_backward(ctx.saved_tensors[0], dy)


def _softmax_backward_setup(ctx: Any, inputs: Tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _softmax_second_gradient(ctx: Any, g: Tensor) -> Tuple[Tensor, Tensor]:
    """Of dx = y (dy - sum(y dy)), with g flowing into dx: by y and by dy."""
    y, dy = ctx.saved_tensors
    by_y = g * (dy - (y * dy).sum(-1, keepdim=True)) - dy * (g * y).sum(-1, keepdim=True)
    return by_y, torch.ops.brakecheck.softmax_rows_backward(y, g)


def _no_second_gradient(ctx: Any, *_: Any) -> None:
    """mean and rstd are saved as constants: torch would take a wrong gradient through them."""
    raise BrakecheckError("gradients of the gradients of layer_norm and rms_norm are not implemented", "norm_rows",
                          "use torch.nn.functional's where you need them")


def _norm_setup(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _, center = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)
    ctx.center, ctx.has_residual, ctx.has_bias = center, residual is not None, bias is not None
    ctx.mark_non_differentiable(mean, rstd)


def _norm_gradient(ctx: Any, dy: Tensor, dtotal: Optional[Tensor], *_: Any) -> Tuple[Optional[Tensor], ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dgamma, dbeta = torch.ops.brakecheck.norm_rows_backward(x, dy, weight, mean, rstd, ctx.center)
    if ctx.has_residual and dtotal is not None:
        dx = dx + dtotal
    return (dx, dx if ctx.has_residual else None, None if weight is None else dgamma,
            dbeta if ctx.has_bias else None, None, None)


def _register() -> None:
    tensors = "Tensor, Tensor, Tensor"
    for name, signature, plain, cuda, fake in (
        ("softmax_rows", "(Tensor x) -> Tensor", _softmax_plain, _softmax_cuda, _softmax_fake),
        ("softmax_rows_backward", "(Tensor y, Tensor dy) -> Tensor", _softmax_backward_plain, _softmax_backward_cuda,
         _softmax_backward_fake),
        ("norm_rows", "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool center)"
         f" -> ({tensors}, Tensor)", _norm_plain, _norm_cuda, _norm_fake),
        ("norm_rows_backward", "(Tensor x, Tensor dy, Tensor? weight, Tensor mean, Tensor rstd, bool center)"
         f" -> ({tensors})", _norm_backward_plain, _norm_backward_cuda, _norm_backward_fake),
    ):
        full = f"brakecheck::{name}"
        torch.library.define(full, signature, tags=torch.Tag.needs_fixed_stride_order)
        torch.library.impl(full, "CPU", plain)
        torch.library.impl(full, "CUDA", cuda)
        torch.library.register_fake(full, fake)
    torch.library.register_autograd("brakecheck::softmax_rows", _softmax_gradient, setup_context=_softmax_setup)
    torch.library.register_autograd("brakecheck::norm_rows", _norm_gradient, setup_context=_norm_setup)
    torch.library.register_autograd("brakecheck::softmax_rows_backward", _softmax_second_gradient,
                                    setup_context=_softmax_backward_setup)
    torch.library.register_autograd("brakecheck::norm_rows_backward", _no_second_gradient)


_register()
