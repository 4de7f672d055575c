"""MoE routing, permuting and gradient accumulation as torch operators (namespace brakecheck), with autograd, fake
tensors and torch.compile. Public names: brakecheck.ops.route, router_reduce, permute, unpermute, add_rows,
embedding_gradient.

On a CUDA device of compute capability 8.0 or more our kernels run, compiled at first use (jit.py), so an operator must
have run once for its shape before it is captured into a graph. Elsewhere, and for the dtypes and widths that the
kernels do not take, plain torch. Inputs are taken in the dtype they come in, under autocast too.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..model import BrakecheckError, UsageError
from . import jit
from . import moe_plans as plans

_COOPERATIVE = 2   # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, cuda.h
_STATES = 16       # launches of the router that may be in flight at the same time
_PTX_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Routing(NamedTuple):
    """expert, weight, place: tokens x k, by falling score; place[t, i] is the row of token t's i-th copy when copies
    are sorted by expert, then by token. counts: tokens an expert. offsets: experts + 1, where each expert's rows
    begin."""

    expert: Tensor
    weight: Tensor
    place: Tensor
    counts: Tensor
    offsets: Tensor


# ---- public ---------------------------------------------------------------------------------------------------------

def route(logits: Tensor, k: int, scoring: str = "softmax", bias: Optional[Tensor] = None, renormalise: bool = True,
          scale: float = 1.0) -> Routing:
    """The k best experts of each token (logits: tokens x experts), float32 weights (float64 for float64 logits), and
    where the copies go.

    Scores are the softmax or sigmoid of the logits. bias (experts, float32) counts for the choice alone; without it
    experts are chosen by their logits. Equal scores go to the lower expert. renormalise: the k weights add up to scale.
    A row with a NaN gets experts 0 .. k-1 and NaN weights; in a row of -inf all scores and weights are 0.
    The result does not depend on timing. Gradients flow from weight to logits, none to a row of -inf. At most 16 calls
    may run at once."""
    jit.check_tensors("route", logits, bias=bias)
    if logits.dim() != 2 or not 1 <= k <= min(plans.MOST_K, logits.shape[1]) or logits.shape[1] > plans.MOST_EXPERTS:
        raise UsageError(f"logits {tuple(logits.shape)} with k = {k} cannot be routed", "route",
                         f"give tokens x experts, at most {plans.MOST_EXPERTS} experts and 1 <= k <= {plans.MOST_K}")
    if scoring not in ("softmax", "sigmoid"):
        raise UsageError(f"no scoring {scoring!r}", "route", "use softmax or sigmoid")
    if bias is not None and bias.shape != logits.shape[1:]:
        raise UsageError(f"bias has shape {tuple(bias.shape)}", "route", f"give {logits.shape[1]} values")
    return Routing(*torch.ops.brakecheck.route(logits, bias, k, scoring == "sigmoid", renormalise, scale))


def router_reduce(probability: Tensor, deterministic: bool = False) -> Tensor:
    """Sum over the tokens of each expert's probability (or logit, or gradient), tokens x experts, as a load-balancing
    loss takes it: experts values in float32 (float64 for float64). float32 goes through our kernel, whose result may
    differ in the last bits from run to run; with deterministic, through torch's sum."""
    jit.check_tensors("router_reduce", probability)
    if probability.dim() != 2:
        raise UsageError(f"the probabilities are {tuple(probability.shape)}", "router_reduce", "give tokens x experts")
    return torch.ops.brakecheck.router_reduce(probability, deterministic)


def permute(x: Tensor, place: Tensor) -> Tensor:
    """Each row of x (tokens x width) copied to the rows place[t] (tokens x k, int32) of a tokens k x width tensor.
    place must be a permutation of 0 .. tokens k, as route gives it."""
    _check_rows(x, place, x.shape[:1], "permute")
    return torch.ops.brakecheck.permute(x, place)


def unpermute(y: Tensor, place: Tensor, weight: Optional[Tensor] = None) -> Tensor:
    """out[t] = sum over i of weight[t, i] y[place[t, i]], summed in float32. weight: tokens x k, by default ones."""
    _check_rows(y, place, place.shape[:1], "unpermute", weight)
    if y.shape[0] != place.numel():
        raise UsageError(f"y has {y.shape[0]} rows for a place of {tuple(place.shape)}", "unpermute",
                         "give a row for each place")
    if weight is None:
        weight = torch.ones(place.shape, dtype=torch.float32, device=y.device)
    if weight.shape != place.shape:
        raise UsageError(f"weight is {tuple(weight.shape)}, place {tuple(place.shape)}", "unpermute",
                         "give a weight for each place")
    return torch.ops.brakecheck.unpermute(y, place, weight)


def add_rows(out: Tensor, index: Tensor, rows: Tensor, deterministic: bool = False) -> Tensor:
    """out[index[i]] += rows[i], in place; returns out. out: any x width, rows: n x width, index: n integers in range.
    Where gradients are wanted, it is out.add_(embedding_gradient(rows, index)).

    By default rows of equal index are summed in float32 as far as 32 to 64 neighbours go, then added to memory. With
    deterministic, all rows of an index are (after a sort), and the result does not depend on timing."""
    if out.dim() != 2 or rows.shape != (index.numel(), out.shape[1]) or out.dtype != rows.dtype or index.dim() != 1:
        raise UsageError(f"rows {tuple(rows.shape)} cannot be added to {tuple(out.shape)} by {index.numel()} indices",
                         "add_rows", "give rows x width, n indices and n x width, of one dtype")
    _check_index(index, "add_rows")
    jit.check_tensors("add_rows", out, index=index, rows=rows)
    if torch.is_grad_enabled() and (out.requires_grad or rows.requires_grad):
        return out.add_(torch.ops.brakecheck.embedding_gradient(rows, index, out.shape[0], deterministic))
    torch.ops.brakecheck.add_rows_(out, index, rows, deterministic)
    return out


def embedding_gradient(gradient: Tensor, index: Tensor, rows: int, deterministic: bool = False) -> Tensor:
    """Gradient of a table of `rows` embeddings, for the gradient (n x width) of the looked-up rows `index`. Itself
    differentiable."""
    jit.check_tensors("embedding_gradient", gradient, index=index)
    if gradient.dim() != 2 or index.dim() != 1 or gradient.shape[0] != index.numel():
        raise UsageError(f"gradient is {tuple(gradient.shape)} for {index.numel()} indices", "embedding_gradient",
                         "give n x width and n indices")
    _check_index(index, "embedding_gradient")
    return torch.ops.brakecheck.embedding_gradient(gradient, index, rows, deterministic)


def _check_index(index: Tensor, name: str) -> None:
    if index.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"index is {index.dtype}", name, "give int32 or int64")


def _check_rows(x: Tensor, place: Tensor, tokens: Sequence[int], name: str, weight: Optional[Tensor] = None) -> None:
    jit.check_tensors(name, x, place=place, weight=weight)
    if x.dim() != 2:
        raise UsageError(f"the rows are {tuple(x.shape)}", name, "give rows x width")
    if place.dim() != 2 or place.dtype != torch.int32 or place.shape[:1] != tokens:
        raise UsageError(f"place is {place.dtype} {tuple(place.shape)} for {tokens[0]} tokens", name,
                         "give int32 tokens x k, as route returns it")


# ---- CUDA -----------------------------------------------------------------------------------------------------------

def _ours(x: Tensor) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream


def _dense(x: Tensor) -> Tensor:
    """Contiguous, and at a 16-byte boundary, as vector loads want it."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@functools.cache
def _router(entry: str, device: int, shared: int) -> jit.Kernel:
    """Launched cooperatively: its blocks wait for each other."""
    kernel = jit.Kernel("router.cu", entry, device, (plans.ROUTER_THREADS, 1), shared, 1, ())
    kernel._attribute = jit._Attribute(_COOPERATIVE, b"", (ctypes.c_uint * 3)(1, 0, 0))
    kernel._config.attributes = ctypes.addressof(kernel._attribute)
    kernel._config.attribute_count = 1
    return kernel


@functools.cache
def _states(device: int) -> Any:
    """Where the router's blocks tell each other their counts, zero at first: launches take them in turn."""
    if torch.cuda.is_current_stream_capturing():
        raise BrakecheckError("the router's first call is being captured into a graph", "route",
                              "call it once before the capture")
    state = torch.zeros(_STATES, plans.STATE_WORDS, dtype=torch.int64, device=torch.device("cuda", device))
    torch.cuda.current_stream(device).synchronize()
    return itertools.cycle(state.unbind(0))


def _route_cuda(logits: Tensor, bias: Optional[Tensor], k: int, sigmoid: bool, renormalise: bool,
                scale: float) -> List[Tensor]:
    tokens, experts = logits.shape
    if logits.dtype not in _PTX_TYPES or not _ours(logits):
        return _route_plain(logits, bias, k, sigmoid, renormalise, scale)
    logits, bias = _dense(logits), None if bias is None else bias.float().contiguous()
    out = _route_fake(logits, bias, k, sigmoid, renormalise, scale)
    if tokens == 0:
        return out[:3] + [t.zero_() for t in out[3:]]
    device, dtype = logits.device.index, _PTX_TYPES[logits.dtype]
    numbers = [int(sigmoid), int(renormalise), float(scale)]
    if tokens == 1:
        entry, threads, shift = plans.router_one_plan(experts, k, dtype)
        kernel = jit.kernel("router_one.cu", entry, device, (threads, 1))
        kernel((1, 1), [logits, bias, *out, experts, k, *numbers, shift], _stream(logits))
        return out
    properties = torch.cuda.get_device_properties(device)
    plan = plans.router_plan(tokens, experts, k, dtype, bias is not None, properties.multi_processor_count)
    # In powers of two: one kernel for many shapes. 99 KiB is what every GPU from sm_80 on grants a block.
    shared = 1 << max(13, (plan.shared - 1).bit_length())
    if shared + plans.STATIC_SHARED > getattr(properties, "shared_memory_per_block_optin", 99 << 10):
        return _route_plain(logits, bias, k, sigmoid, renormalise, scale)
    kernel = _router(plan.entry, device, shared)
    kernel((plan.grid, 1), [logits, bias, *out, next(_states(device)), tokens, experts, k, plan.each, *numbers],
           _stream(logits))
    return out


def _router_reduce_cuda(probability: Tensor, deterministic: bool) -> Tensor:
    tokens, experts = probability.shape
    known = probability.dtype == torch.float32 and not deterministic and _ours(probability)
    if not known or probability.numel() == 0 or experts > plans.MOST_REDUCED or tokens >= 1 << 31:
        return _router_reduce_plain(probability, deterministic)
    load = probability.new_zeros(experts)
    shared = 1 << max(10, (4 * experts - 1).bit_length())  # in powers of two: one kernel for many shapes
    kernel = jit.kernel("router_reduce.cu", "router_reduce", probability.device.index, (plans.REDUCE_THREADS, 1),
                        shared, 1, ("INLINE_PTX=0",))
    kernel(plans.reduce_grid(tokens, experts), [_dense(probability), load, tokens, experts], _stream(probability))
    return load


def _vectors(*tensors: Tensor) -> bool:
    """Whether these go through kernels that move 8 bfloat16 at a time."""
    return all(t.dtype == torch.bfloat16 and t.shape[1] % 8 == 0 for t in tensors) and _ours(tensors[0])


def _permute_cuda(x: Tensor, place: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16 or not _ours(x):
        return plans.permute_plain(x, place)
    (tokens, width), k, device = x.shape, place.shape[1], x.device.index
    out = x.new_empty(tokens * k, width)
    if out.numel() == 0:
        return out
    x, place = _dense(x), place.contiguous()
    part = plans.part_of(width)
    items = tokens * plans.blocks(width, part)
    if width % 8 == 0 and torch.cuda.get_device_capability(device) >= (9, 0) and items < 1 << 30:
        kernel = jit.kernel("moe_permute_bulk.cu", "moe_permute_bulk", device, (32, 1), 2 * plans.BULK_STAGES * part)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        kernel((min(items, plans.BULK_BLOCKS_AN_SM * sms), 1), [x, place, out, tokens, width, k, part], _stream(x))
    else:
        kernel = jit.kernel("moe_permute.cu", "moe_permute", device, (256, 1))
        kernel((plans.blocks(tokens, 8), 1), [x, place, out, tokens, width, k], _stream(x))
    return out


def _unpermute_cuda(y: Tensor, place: Tensor, weight: Tensor) -> Tensor:
    (tokens, k), width = place.shape, y.shape[1]
    if not _vectors(y) or tokens * width // 8 >= 1 << 31:
        return plans.unpermute_plain(y, place, weight)
    out = y.new_empty(tokens, width)
    if out.numel() == 0:
        return out
    threads = plans.UNPERMUTE_THREADS
    kernel = jit.kernel("moe_unpermute.cu", plans.unpermute_entry(k), y.device.index, (threads, 1))
    y, place, weight = _dense(y), place.contiguous(), weight.float().contiguous()
    kernel((plans.blocks(tokens * width // 8, threads), 1), [y, place, weight, out, tokens, width, k], _stream(y))
    return out


def _unpermute_backward_cuda(grad: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
    (tokens, k), width = place.shape, y.shape[1]
    if not _vectors(grad, y) or y.numel() == 0:
        return _unpermute_backward_plain(grad, y, place, weight)
    grad_y, grad_weight = y.new_empty(y.shape), weight.new_empty(weight.shape, dtype=torch.float32)
    kernel = jit.kernel("moe_unpermute.cu", f"moe_unpermute_backward<{1 if k == 1 else 8}>", y.device.index,
                        (plans.UNPERMUTE_THREADS, 1))
    kernel((tokens, 1), [_dense(grad), _dense(y), place.contiguous(), weight.float().contiguous(), grad_y, grad_weight,
                         tokens, width, k], _stream(y))
    return grad_y, grad_weight.to(weight.dtype)


def _scatters(out: Tensor, index: Tensor, rows: Tensor) -> bool:
    """Whether our kernels add these rows: whole vectors of 16 bytes, and, but for bfloat16, reductions of 16 bytes."""
    known = str(rows.dtype).split(".")[1] in plans.ELEMENTS and _ours(rows)
    return (known and rows.shape[1] * rows.element_size() % 16 == 0 and out.is_contiguous()
            and out.data_ptr() % 16 == 0 and out.shape[0] < 1 << 31 and rows.shape[0] < 1 << 30
            and (rows.dtype == torch.bfloat16 or torch.cuda.get_device_capability(rows.device) >= (9, 0)))


def _add_rows_cuda(out: Tensor, index: Tensor, rows: Tensor, deterministic: bool) -> None:
    if not _scatters(out, index, rows):
        _add_rows_plain(out, index, rows, deterministic)
    elif rows.numel():
        _scatter("sorted" if deterministic else "runs", out, index, rows)


def _scatter(form: str, out: Tensor, index: Tensor, rows: Tensor, run: int = 0) -> None:
    """One of plans.SCATTER_FORMS, for tensors that _scatters."""
    (n, width), device, dtype = rows.shape, rows.device.index, str(rows.dtype).split(".")[1]
    rows, index = _dense(rows), index.int().contiguous()
    if form != "sorted":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        plan = plans.scatter_plan(form, n, width, out.shape[0], dtype, sms, run)
        kernel = jit.kernel(plan.source, plan.entry, device, (plan.threads, 1), plan.shared, 1, plan.defines)
        kernel(plan.grid, [rows, index, out, n, width, out.shape[0], plan.last], _stream(rows))
        return
    each, threads, defines = 16 // rows.element_size(), plans.SCATTER_THREADS, plans.scatter_defines(dtype)
    columns, runs = plans.scatter_columns(width, each), plans.blocks(n, plans.SORTED_RUN)
    key, order = index.sort(stable=True)
    pieces = torch.empty(2 * runs, width, dtype=torch.float32, device=rows.device)
    first = jit.kernel("scatter_sorted.cu", "scatter_sorted", device, (threads, 1), 0, 1, defines)
    second = jit.kernel("scatter_sorted.cu", "scatter_pieces", device, (plans.PIECE_THREADS, 1), 0, 1, defines)
    first((plans.blocks(runs, threads // columns), plans.blocks(width // each, columns)),
          [rows, key, order.int(), out, pieces, n, width, columns], _stream(rows))
    second((runs, plans.blocks(width, 32 * each)), [key, pieces, out, n, width], _stream(rows))


# ---- plain torch, fake tensors, gradients ---------------------------------------------------------------------------

def _route_plain(logits: Tensor, bias: Optional[Tensor], k: int, sigmoid: bool, renormalise: bool,
                 scale: float) -> List[Tensor]:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    out = plans.route(wide, k, "sigmoid" if sigmoid else "softmax", bias, renormalise, scale)
    return [out[name] for name in ("index", "weight", "place", "counts", "offsets")]


def _route_fake(logits: Tensor, bias: Optional[Tensor], k: int, sigmoid: bool, renormalise: bool,
                scale: float) -> List[Tensor]:
    tokens, experts = logits.shape
    shapes = ((tokens, k), (tokens, k), (tokens, k), (experts,), (experts + 1,))
    weight = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return [logits.new_empty(s, dtype=weight if i == 1 else torch.int32) for i, s in enumerate(shapes)]


def _route_setup(ctx: Any, inputs: Tuple[Any, ...], output: List[Tensor]) -> None:
    logits, _, _, ctx.sigmoid, ctx.renormalise, ctx.scale = inputs
    ctx.save_for_backward(logits, output[0])


def _route_gradient(ctx: Any, grads: List[Optional[Tensor]]) -> Tuple[Any, ...]:
    grad = grads[1]
    if grad is None:
        return None, None, None, None, None, None
    logits, index = ctx.saved_tensors
    wide, chosen = logits if logits.dtype == torch.float64 else logits.float(), index.long()
    wide = wide.masked_fill((wide == -float("inf")).all(1, keepdim=True), 0.0)  # a row of -inf: below
    picked = wide.gather(1, chosen)
    none = (logits.gather(1, chosen) == -float("inf")).all(1, keepdim=True)  # weights are 0, whatever the logits
    if ctx.sigmoid:
        share = picked.sigmoid()
        slope = share * (1 - share)
    else:
        # Renormalised, the softmax's own denominator cancels.
        share = picked.masked_fill(none, 0.0).softmax(1) if ctx.renormalise else wide.softmax(1).gather(1, chosen)
        slope = share
    if ctx.sigmoid and ctx.renormalise:
        total = share.sum(1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        part = (grad - (grad * share).sum(1, keepdim=True) / total) / total * slope
    elif ctx.sigmoid:
        part = grad * slope
    else:
        part = (grad - (grad * share).sum(1, keepdim=True)) * slope if ctx.renormalise else grad * slope
    part = part.masked_fill(none, 0.0)
    full = torch.zeros_like(wide).scatter_(1, chosen, part * ctx.scale)
    if not ctx.sigmoid and not ctx.renormalise:
        full = full - wide.softmax(1) * full.sum(1, keepdim=True)
    return full.to(logits.dtype), None, None, None, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _router_reduce_plain(probability: Tensor, deterministic: bool) -> Tensor:
    return probability.sum(0, dtype=_wide(probability))


def _router_reduce_fake(probability: Tensor, deterministic: bool) -> Tensor:
    return probability.new_empty(probability.shape[1], dtype=_wide(probability))


def _router_reduce_setup(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    ctx.shape, ctx.dtype = inputs[0].shape, inputs[0].dtype


def _router_reduce_gradient(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
    return grad.to(ctx.dtype).expand(ctx.shape), None


def _permute_fake(x: Tensor, place: Tensor) -> Tensor:
    return x.new_empty(x.shape[0] * place.shape[1], x.shape[1])


def _permute_setup(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _permute_gradient(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
    (place,) = ctx.saved_tensors
    return unpermute(grad, place), None


def _unpermute_fake(y: Tensor, place: Tensor, weight: Tensor) -> Tensor:
    return y.new_empty(place.shape[0], y.shape[1])


def _unpermute_setup(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _unpermute_gradient(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
    y, place, weight = ctx.saved_tensors
    grad_y, grad_weight = torch.ops.brakecheck.unpermute_backward(grad, y, place, weight)
    return grad_y, None, grad_weight


def _unpermute_second_gradient(ctx: Any, by_y: Optional[Tensor], by_weight: Optional[Tensor]) -> Tuple[Any, ...]:
    """Of grad_y[place[t, i]] = weight[t, i] grad[t] and grad_weight[t, i] = y[place[t, i]] . grad[t]."""
    grad, y, place, weight = ctx.saved_tensors
    by_y = torch.zeros_like(y) if by_y is None else by_y
    by_weight = torch.zeros_like(weight) if by_weight is None else by_weight
    backward = torch.ops.brakecheck.unpermute_backward
    by_grad = unpermute(by_y, place, weight) + unpermute(y, place, by_weight)
    return by_grad, backward(grad, y, place, by_weight)[0], None, backward(grad, by_y, place, weight)[1]


def _unpermute_backward_plain(grad: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
    (tokens, k), width, at = place.shape, y.shape[1], place.reshape(-1).long()
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    each = grad.to(wide)[:, None, :] * weight.to(wide)[:, :, None]
    grad_y = y.new_empty(y.shape).index_copy_(0, at, each.to(y.dtype).reshape(tokens * k, width))
    dots = (y[at].to(wide).reshape(tokens, k, width) * grad.to(wide)[:, None, :]).sum(2)
    return grad_y, dots.to(weight.dtype)


def _unpermute_backward_fake(grad: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weight.new_empty(weight.shape)


def _add_rows_plain(out: Tensor, index: Tensor, rows: Tensor, deterministic: bool) -> None:
    if deterministic and rows.numel():
        # Summed once in float32: what the sorted kernel computes.
        wide = torch.zeros(out.shape, dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
        wide.index_put_((index.long(),), rows.to(wide.dtype), accumulate=True)
        out.add_(wide.to(out.dtype) if out.dtype == wide.dtype else wide)
    else:
        out.index_add_(0, index, rows)


def _embedding_gradient(add: Callable[..., None]) -> Callable[..., Tensor]:
    def call(gradient: Tensor, index: Tensor, rows: int, deterministic: bool) -> Tensor:
        out = gradient.new_zeros(rows, gradient.shape[1])
        add(out, index, gradient, deterministic)
        return out

    return call


def _embedding_setup(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _embedding_second_gradient(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
    return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the first tensor's device the current one, as torch does for its own operators and not for those of others:
    a kernel is launched in the current context."""
    def call(x: Tensor, *rest: Any) -> Any:
        with torch.cuda.device(x.device):
            return function(x, *rest)

    return call


def _register() -> None:
    operators: List[Tuple[str, Any, Any, Any]] = [
        ("route(Tensor logits, Tensor? bias, int k, bool sigmoid, bool renormalise, float scale) -> Tensor[]",
         _route_plain, _route_cuda, _route_fake),
        ("router_reduce(Tensor probability, bool deterministic) -> Tensor", _router_reduce_plain, _router_reduce_cuda,
         _router_reduce_fake),
        ("permute(Tensor x, Tensor place) -> Tensor", plans.permute_plain, _permute_cuda, _permute_fake),
        ("unpermute(Tensor y, Tensor place, Tensor weight) -> Tensor", plans.unpermute_plain, _unpermute_cuda,
         _unpermute_fake),
        ("unpermute_backward(Tensor grad, Tensor y, Tensor place, Tensor weight) -> (Tensor, Tensor)",
         _unpermute_backward_plain, _unpermute_backward_cuda, _unpermute_backward_fake),
        ("add_rows_(Tensor(a!) out, Tensor index, Tensor rows, bool deterministic) -> ()", _add_rows_plain,
         _add_rows_cuda, lambda *_: None),
        ("embedding_gradient(Tensor gradient, Tensor index, SymInt rows, bool deterministic) -> Tensor",
         _embedding_gradient(_add_rows_plain), _embedding_gradient(_add_rows_cuda),
         lambda gradient, index, rows, deterministic: gradient.new_empty(rows, gradient.shape[1])),
    ]
    for signature, plain, cuda, fake in operators:
        name = "brakecheck::" + signature.split("(")[0]
        torch.library.define(name, signature[signature.index("("):])
        torch.library.impl(name, "CPU", plain)
        torch.library.impl(name, "CUDA", _on_device(cuda))
        torch.library.register_fake(name, fake)
    for name, gradient, setup in (("route", _route_gradient, _route_setup),
                                  ("router_reduce", _router_reduce_gradient, _router_reduce_setup),
                                  ("permute", _permute_gradient, _permute_setup),
                                  ("unpermute", _unpermute_gradient, _unpermute_setup),
                                  ("unpermute_backward", _unpermute_second_gradient, _unpermute_setup),
                                  ("embedding_gradient", _embedding_second_gradient, _embedding_setup)):
        torch.library.register_autograd(f"brakecheck::{name}", gradient, setup_context=setup)


_register()
