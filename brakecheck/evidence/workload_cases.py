"""Which operator and case of the catalogue stands for an operator call of a trace.

One table, from the framework's name to the names that the catalogue has or may come to have for it; the first that
exists is taken. A trace records shapes, types and strides, and no values: what depends on a value (a mask, a dimension)
is taken as the common one and the fit is then "like".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Callable, Collection, Dict, Mapping, Optional, Sequence, Tuple, Union

DTYPES = {
    "c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32", "double": "float64",
    "signed char": "int8", "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8", "int": "int32", "long int": "int64",
    "long": "int64", "bool": "bool", "unsigned char": "uint8",
}
ATTENTION_HEADS = (64, 128)  # head dimensions that the catalogue's attention is about


@dataclass(frozen=True)
class Call:
    """One kind of operator call. shapes, strides: a list of integers an input, [] for what is no tensor; strides is
    None when the trace has none. dtypes: as recorded. kernels: names of what it launched. rows: (tokens, width) ->
    rows of the embedding tables seen in the same trace."""

    operator: str
    shapes: Sequence[Any]
    dtypes: Sequence[str]
    strides: Optional[Sequence[Any]] = None
    kernels: Sequence[str] = ()
    rows: Mapping[Tuple[int, int], int] = field(default_factory=dict)

    def dtype(self, place: int) -> Optional[str]:
        return DTYPES.get(self.dtypes[place]) if place < len(self.dtypes) else None


@dataclass(frozen=True)
class Stand:
    """The catalogue's operator and parameters. fit: "same" computation (up to a bias or scale), or "like": the same
    kind of work on as many elements, `note` says what differs."""

    operator: str
    params: Dict[str, Any]
    fit: str = "same"
    note: Optional[str] = None


Found = Union[Stand, str]  # a string says why there is none
Maker = Callable[[Call, Collection[str]], Found]


def stand_in(call: Call, catalogue: Collection[str]) -> Found:
    """What of the catalogue (its operators' names) stands for a call; else why nothing does."""
    name = call.operator.removeprefix("aten::")
    if re.search(r"nccl|rccl|c10d|record_param_comms|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", name, re.I):
        return "communication"
    maker = next((make for names, make in MAKERS if name in names), None)
    if maker is None and name.rstrip("_") in ELEMENTWISE:
        maker = _elementwise
    if maker is None:
        return "the table of operators does not have it"
    try:
        return maker(call, catalogue)
    except (IndexError, TypeError, ValueError, ZeroDivisionError):
        return "its shapes are not recorded, or are not what this operator takes"


def _first(names: Sequence[str], catalogue: Collection[str]) -> Optional[str]:
    return next((n for n in names if n in catalogue), None)


def _absent(what: str) -> str:
    return f"the catalogue has no {what}"


def _matrix(a_at: int, b_at: int, transposed: bool = False) -> Maker:
    """Matrix products. a: (batch,) rows x K. b: (batch,) K x N, or N x K where `transposed` (linear's weight)."""

    def make(call: Call, catalogue: Collection[str]) -> Found:
        a, b = list(call.shapes[a_at]), list(call.shapes[b_at])
        k, n = (b[-1], b[-2]) if transposed else (b[-2], b[-1])
        batch = a[0] if len(a) == len(b) == 3 else None
        m = a[-2] if batch else math.prod(a[:-1])
        if a[-1] != k or len(b) not in (2, 3) or (len(b) == 3 and not batch):
            return "its shapes are no plain matrix product"
        dtype = call.dtype(a_at)
        if dtype == "float32" and any("tf32" in name for name in call.kernels):
            dtype = "tf32"
        turned, layout, plain = _layout(call, a_at, b_at, transposed)
        params: Dict[str, Any] = {"m": m, "n": n, "k": k, **({"a": "t"} if turned else {}), "b": layout}
        fit: Tuple[str, Optional[str]] = ("same", None) if plain else ("like", "rows lie apart")
        if f"gemm_{dtype}" in catalogue:
            return Stand(f"gemm_{dtype}", {**params, **({"batch": batch} if batch else {})}, *fit)
        older = {"bfloat16": "bf16_gemm", "int8": "int8_gemm"}.get(dtype or "")
        if older in catalogue and not batch and layout == "t":
            fit = ("like", "a is transposed") if turned else fit
            return Stand(str(older), {"m": m, "n": n, "k": k}, *fit)
        kind = f"{'batched ' if batch else ''}matrix product of {dtype or 'unknown type'}"
        return _absent(kind + ("" if layout == "t" else " with b row by row"))

    return make


def _layout(call: Call, a_at: int, b_at: int, transposed: bool) -> Tuple[bool, str, bool]:
    """Whether a lies column by column, "n" or "t" of b, whether all rows are dense. Without strides the usual layout is
    assumed."""
    if call.strides is None or not call.strides[a_at] or not call.strides[b_at]:
        return False, "t" if transposed else "n", call.strides is not None
    dense, columns = [], []
    for shape, strides in ((call.shapes[at], call.strides[at]) for at in (a_at, b_at)):
        columns.append(strides[-2] == 1 and strides[-1] != 1)
        rows, length = (strides[-1], shape[-2]) if columns[-1] else (strides[-2], shape[-1])
        dense.append(rows == length and min(strides[-2:]) == 1)
    return columns[0], "t" if columns[1] != transposed else "n", all(dense)


def _grouped(call: Call, catalogue: Collection[str]) -> Found:
    (tokens, k), (experts, _, n) = call.shapes[0], call.shapes[1]
    name = _first(("grouped_gemm",), catalogue)
    if name is None or call.dtype(0) != "bfloat16":
        return _absent(f"grouped matrix product of {call.dtype(0)}")
    return Stand(name, {"tokens": tokens, "experts": experts, "n": n, "k": k}, "like",
                 "how many tokens an expert has is not recorded")


def _rows(names: Sequence[str], dtype: str, weight_at: Optional[int], what: str, note: Optional[str] = None) -> Maker:
    """Operators on rows. weight_at: the input whose size is the length of a row; None: the last dimension."""

    def make(call: Call, catalogue: Collection[str]) -> Found:
        name = _first(names, catalogue)
        if name is None:
            return _absent(what)
        shape = call.shapes[0]
        weight = call.shapes[weight_at] if weight_at is not None else ()
        columns = math.prod(weight) if weight else shape[-1]
        params = {"rows": math.prod(shape) // columns, "columns": columns}
        if call.dtype(0) != dtype:
            return Stand(name, params, "like", f"the catalogue's is {dtype}, this is {call.dtype(0)}")
        return Stand(name, params, "like" if note else "same", note)

    return make


def _attention(length_at: int, names: Sequence[str] = ("attention",), first: int = 0) -> Maker:
    """length_at: where q's shape has the length; the heads are beside it. first: the input that is q."""

    def make(call: Call, catalogue: Collection[str]) -> Found:
        name = _first(names, catalogue)
        if name is None:
            return _absent(names[0].replace("_", " "))
        q, k = call.shapes[first], call.shapes[first + 1]
        batch, length, head = q[0], q[length_at], q[3]
        if head not in ATTENTION_HEADS or call.dtype(0) != "bfloat16":
            return _absent(f"attention of head dimension {head} in {call.dtype(0)}")
        if q != k:
            return _absent("attention with unlike queries and keys")
        params = {"heads": batch * q[3 - length_at], "length": length, "causal": True, "dim": head}
        return Stand(name, params, "like", "causal or not is not recorded; causal is assumed")

    return make


def _embedding_backward(call: Call, catalogue: Collection[str]) -> Found:
    name = _first(("embedding_grad",), catalogue)
    if name is None:
        return _absent("gradient of an embedding")
    width, tokens = call.shapes[0][-1], math.prod(call.shapes[1])
    rows = call.rows.get((tokens, width))
    if rows is None:
        return "the number of rows of the table is not recorded"
    note = None if call.dtype(0) == "float32" else f"the catalogue's is float32, this is {call.dtype(0)}"
    return Stand(name, {"tokens": tokens, "rows": rows, "width": width}, "like", note or "which tokens is not recorded")


def _elementwise(call: Call, catalogue: Collection[str]) -> Found:
    name = _first(("elementwise", "elementwise_chain"), catalogue)
    if name is None:
        return _absent("elementwise operator")
    return Stand(name, {"n": _elements(call)}, "like", "as many elements, another formula")


def _copy(call: Call, catalogue: Collection[str]) -> Found:
    n, dtype = _elements(call), call.dtype(0)
    if "copy" in catalogue and dtype in ("float32", "float16", "bfloat16"):
        params = {"rows": 1, "columns": n, "source": "contiguous", "dtype": dtype, "to": dtype}
        return Stand("copy", params, "like", "as many elements, in order")
    name = _first(("elementwise", "elementwise_chain"), catalogue)  # the type of a list of tensors is not recorded
    return _absent("copy") if name is None else Stand(name, {"n": n}, "like", "as many elements, another formula")


def _convolution(image_at: int, weight_at: int) -> Maker:
    def make(call: Call, catalogue: Collection[str]) -> Found:
        image, weight = list(call.shapes[image_at]), list(call.shapes[weight_at])
        name = f"conv{len(image) - 2}d"
        if name not in catalogue:
            return _absent(f"convolution in {len(image) - 2} dimensions" if len(image) > 2 else "convolution")
        if len(set(weight[2:])) != 1 or image[1] % weight[1]:
            return "its kernel is not of equal sides, or its groups are unclear"
        params = {"n": image[0], "channels": image[1], "out": weight[0], "size": image[2:], "kernel": weight[2],
                  "stride": 1, "padding": weight[2] // 2, "layout": "contiguous", "groups": image[1] // weight[1]}
        return Stand(name, params, "like", "stride and padding are not recorded; 1 and half the kernel are assumed")

    return make


def _elements(call: Call) -> int:
    """Of the largest input; an input that is a list of tensors counts as their sum."""
    return max(sum(map(math.prod, shape)) if isinstance(shape[0], (list, tuple)) else math.prod(shape)
               for shape in call.shapes if shape)


def _never(what: str, *names: str) -> Maker:
    def make(call: Call, catalogue: Collection[str]) -> Found:
        name = _first(names, catalogue)
        return _absent(what) if name is None else f"how {name} takes these shapes is not in the table yet"

    return make


ELEMENTWISE = {
    "add", "sub", "rsub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "exp", "log", "sigmoid", "tanh", "silu", "gelu",
    "relu", "clamp", "clamp_min", "where", "masked_fill", "cos", "sin", "abs", "reciprocal", "silu_backward",
    "gelu_backward", "threshold_backward", "sigmoid_backward", "tanh_backward", "native_dropout", "bitwise_and",
    "eq", "ne", "lt", "gt", "le", "ge", "fill", "zero", "addcmul", "addcdiv", "lerp",
}
WHOLE = "the catalogue's has the forward pass too"
MAKERS: Sequence[Tuple[Sequence[str], Maker]] = (
    (("mm", "bmm", "matmul", "_int_mm", "_scaled_mm"), _matrix(0, 1)),
    (("addmm", "addmm_", "baddbmm"), _matrix(1, 2)),
    (("linear",), _matrix(0, 1, transposed=True)),
    (("_grouped_mm", "_scaled_grouped_mm"), _grouped),
    (("_softmax", "softmax", "_log_softmax", "log_softmax"),
     _rows(("softmax",), "float32", None, "softmax", "over which dimension is not recorded; the last is assumed")),
    (("_softmax_backward_data", "_log_softmax_backward_data"),
     _rows(("softmax_backward",), "bfloat16", None, "gradient of softmax", WHOLE)),
    (("native_layer_norm", "layer_norm"), _rows(("layer_norm", "layernorm"), "bfloat16", 2, "LayerNorm")),
    (("native_layer_norm_backward",), _rows(("layernorm_backward",), "bfloat16", 5, "gradient of LayerNorm", WHOLE)),
    (("_fused_rms_norm", "rms_norm"), _rows(("rms_norm", "rmsnorm"), "bfloat16", 2, "RMSNorm")),
    (("_fused_rms_norm_backward",),
     _rows(("rmsnorm_backward",), "bfloat16", 4, "gradient of RMSNorm", WHOLE)),
    (("_flash_attention_forward", "_efficient_attention_forward"), _attention(1)),
    (("scaled_dot_product_attention", "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
      "_scaled_dot_product_efficient_attention"), _attention(2)),
    (("_flash_attention_backward", "_efficient_attention_backward"), _attention(1, ("attention_backward",), first=1)),
    (("_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
      "_scaled_dot_product_efficient_attention_backward"), _attention(2, ("attention_backward",), first=1)),
    (("embedding_dense_backward",), _embedding_backward),
    (("cudnn_convolution", "miopen_convolution", "_convolution", "convolution", "conv2d", "conv3d"),
     _convolution(0, 1)),
    (("convolution_backward",), _never("gradient of a convolution", "conv_backward")),
    (("cudnn_batch_norm", "cudnn_batch_norm_backward", "native_batch_norm", "native_batch_norm_backward"),
     _never("batch norm", "batchnorm", "batch_norm")),
    (("copy_", "clone", "contiguous", "cat", "_to_copy", "stack"), _copy),
)
