"""Kernels in Triton: softmax, LayerNorm, RMSNorm, matrix product, elementwise chain, attention forward.

They measure Triton itself, so each is written as the field writes it, and has one configuration, chosen by size: what
an autotuner picks may change from process to process. They run from sm_80 on, in what shared memory an sm_89 has (99
KiB a block), and in the interpreter. Triton 3.2 on; the reader of the catalogue need not have it, so only
implementations import this file (through ops/in_triton.py).

Every operator is a Plan, made from tensors and not yet launched: a test compiles the same plans without a GPU.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
from dataclasses import dataclass
from typing import Any, Dict, Tuple

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x log2 e), and exp2 is one instruction
WIDEST_ROW = 1 << 16  # elements that a norm holds in registers: 64 a thread, with 32 warps
SOFTMAX_BLOCK = 1 << 14  # elements of a row that softmax holds in registers


@dataclass(frozen=True, eq=False)
class Plan:
    """A launch: kernel[grid](*arguments, **constants, **options). outputs: the tensors among the arguments that it
    writes, by name."""

    kernel: Any
    grid: Tuple[int, ...]
    arguments: Tuple[Any, ...]
    constants: Dict[str, Any]
    options: Dict[str, int]
    outputs: Dict[str, torch.Tensor]

    def run(self) -> Dict[str, torch.Tensor]:
        self.kernel[self.grid](*self.arguments, **self.constants, **self.options)
        return self.outputs


def _together(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it, whose last dimension lies together: what kernels of rows are written for."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _warps(elements: int) -> int:
    """16 elements a thread, in powers of two from one warp to 32."""
    return min(32, max(1, elements // 512))


# ---- rows ----


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # times a stride it may pass 2^31
    x_row, out_row = x_ptr + row * x_stride, out_ptr + row * out_stride
    lane = tl.arange(0, BLOCK)
    if WHOLE:
        x = tl.load(x_row + lane, mask=lane < columns, other=-float("inf")).to(tl.float32)
        exponential = tl.exp(x - tl.max(x, axis=0))
        out = exponential / tl.sum(exponential, axis=0)
        tl.store(out_row + lane, out.to(out_ptr.dtype.element_ty), mask=lane < columns)
    else:  # each lane has a maximum and a sum of its own, so that the loop has no reduction
        highest = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            x = tl.load(x_row + start + lane, mask=start + lane < columns, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(highest, x)
            base = tl.where(higher == -float("inf"), 0.0, higher)  # or -inf - -inf would be NaN
            total = total * tl.exp(highest - base) + tl.exp(x - base)
            highest = higher
        maximum = tl.max(highest, axis=0)
        scale = 1.0 / tl.sum(total * tl.exp(highest - maximum), axis=0)
        for start in range(0, columns, BLOCK):
            x = tl.load(x_row + start + lane, mask=start + lane < columns, other=-float("inf")).to(tl.float32)
            out = tl.exp(x - maximum) * scale
            tl.store(out_row + start + lane, out.to(out_ptr.dtype.element_ty), mask=start + lane < columns)


def softmax(x: torch.Tensor) -> Plan:
    """out: softmax of each row of x (rows, columns), in float32, rounded to the type of x once."""
    x = _together(x)
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    whole = columns <= SOFTMAX_BLOCK
    block = triton.next_power_of_2(columns) if whole else SOFTMAX_BLOCK // 2
    return Plan(softmax_kernel, (rows,), (x, out, columns, x.stride(0), out.stride(0)),
                {"BLOCK": block, "WHOLE": whole}, {"num_warps": _warps(block)}, {"out": out})


@triton.jit
def layernorm_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, columns, x_stride, out_stride, epsilon,
                     BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < columns
    x = tl.load(x_ptr + row * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, axis=0) / columns, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / columns + epsilon)
    weight = tl.load(weight_ptr + lane, mask=inside).to(tl.float32)
    bias = tl.load(bias_ptr + lane, mask=inside).to(tl.float32)
    out = centred * scale * weight + bias
    tl.store(out_ptr + row * out_stride + lane, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rmsnorm_kernel(x_ptr, weight_ptr, out_ptr, columns, x_stride, out_stride, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < columns
    x = tl.load(x_ptr + row * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / columns + epsilon)
    out = x * scale * tl.load(weight_ptr + lane, mask=inside).to(tl.float32)
    tl.store(out_ptr + row * out_stride + lane, out.to(out_ptr.dtype.element_ty), mask=inside)


def _norm(kernel: Any, x: torch.Tensor, parameters: Tuple[torch.Tensor, ...], epsilon: float) -> Plan:
    x, parameters = _together(x), tuple(map(_together, parameters))
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    return Plan(kernel, (rows,), (x, *parameters, out, columns, x.stride(0), out.stride(0), epsilon), {"BLOCK": block},
                {"num_warps": _warps(block)}, {"out": out})


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> Plan:
    """out: LayerNorm of each row of x (rows, columns; WIDEST_ROW of them at most), in float32."""
    return _norm(layernorm_kernel, x, (weight, bias), epsilon)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Plan:
    """out: RMSNorm of each row of x (rows, columns; WIDEST_ROW of them at most), in float32."""
    return _norm(rmsnorm_kernel, x, (weight,), epsilon)


# ---- elementwise ----


@triton.jit
def elementwise_chain_kernel(gate_ptr, up_ptr, residual_ptr, out_ptr, n, BLOCK: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < n
    gate = tl.load(gate_ptr + lane, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + lane, mask=inside).to(tl.float32)
    residual = tl.load(residual_ptr + lane, mask=inside).to(tl.float32)
    out = residual + gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + lane, out.to(out_ptr.dtype.element_ty), mask=inside)


def elementwise_chain(gate: torch.Tensor, up: torch.Tensor, residual: torch.Tensor) -> Plan:
    """out: residual + silu(gate) up, in float32, rounded once."""
    gate, up, residual = gate.contiguous(), up.contiguous(), residual.contiguous()
    out, block = torch.empty_like(gate), 1024
    return Plan(elementwise_chain_kernel, (triton.cdiv(gate.numel(), block),),
                (gate, up, residual, out, gate.numel()), {"BLOCK": block}, {"num_warps": 4}, {"out": out})


# ---- matrix product ----


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, m, n, k, a_batch, a_m, a_k, b_batch, b_k, b_n, c_batch, c_m, c_n,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    # Blocks that run at the same time lie in GROUP rows of tiles: they share tiles of a and of b in L2.
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    tile_m = first + tile % (GROUP * tiles_n) % height
    tile_n = tile % (GROUP * tiles_n) // height

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_at = a_ptr + batch * a_batch + row[:, None].to(tl.int64) * a_m + depth[None, :] * a_k
    b_at = b_ptr + batch * b_batch + depth[:, None] * b_k + column[None, :].to(tl.int64) * b_n
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        a = tl.load(a_at, mask=(row[:, None] < m) & (depth[None, :] < k - start), other=0.0)
        b = tl.load(b_at, mask=(depth[:, None] < k - start) & (column[None, :] < n), other=0.0)
        total = tl.dot(a, b, total)
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    c_at = c_ptr + batch * c_batch + row[:, None].to(tl.int64) * c_m + column[None, :] * c_n
    tl.store(c_at, total.to(c_ptr.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < n))


def matmul(a: torch.Tensor, b: torch.Tensor) -> Plan:
    """c = a b of 16-bit floats (m, k) and (k, n), or a batch of them, with any strides; sums in float32."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    batches = a.shape[:-2]  # none or one
    c = torch.empty((*batches, m, n), dtype=a.dtype, device=a.device)
    together = all(s == 1 or s % 8 == 0 for s in (*a.stride(), *b.stride()))
    if m <= 128:  # narrow tiles, so that there are blocks for all multiprocessors; deep ones, as reading b is the work
        block_m, block_n, block_k, warps = min(max(16, triton.next_power_of_2(m)), 64), 32, 128, 4
    elif together:
        block_m, block_n, block_k, warps = 128, 128, 64, 8
    else:  # an element a load, each with its address: large tiles would spill them
        block_m, block_n, block_k, warps = 64, 64, 32, 4
    stages = min(6, 98304 // (2 * (block_m + block_n) * block_k))
    strides = [s for t in (a, b, c) for s in (t.stride() if batches else (0, *t.stride()))]
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n), batches[0] if batches else 1)
    return Plan(matmul_kernel, grid, (a, b, c, m, n, k, *strides),
                {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": 8},
                {"num_warps": warps, "num_stages": stages}, {"c": c})


# ---- attention ----


@triton.jit
def _attend(total, highest, weight, q, k_at, v_at, k_length, v_length, scale, row, start, end, length,
            CHECKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Adds the keys from start to end. CHECKED: some of them may be beyond the last one, or later than a query."""
    for first in range(start, end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        if CHECKED:
            k = tl.load(k_at + first * k_length, mask=key[None, :] < length, other=0.0)
            v = tl.load(v_at + first * v_length, mask=key[:, None] < length, other=0.0)
        else:
            k = tl.load(k_at + first * k_length)
            v = tl.load(v_at + first * v_length)
        score = tl.dot(q, k)
        if CHECKED:
            seen = key[None, :] < length
            if CAUSAL:
                seen = seen & (key[None, :] <= row[:, None])
            score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1) * scale)
        shrink = tl.exp2(highest - higher)
        part = tl.exp2(score * scale - higher[:, None])
        weight = weight * shrink + tl.sum(part, axis=1)
        total = tl.dot(part.to(v.dtype), v, total * shrink[:, None])
        highest = higher
    return total, highest, weight


@triton.jit
def attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, length, scale, q_head, q_length, k_head, k_length, v_head,
                     v_length, out_head, out_length, CAUSAL: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr):
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)  # causal: the longest first
    row, dim, key = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, DIM), tl.arange(0, BLOCK_N)
    inside = row[:, None] < length
    q = tl.load(q_ptr + head * q_head + row[:, None] * q_length + dim[None, :], mask=inside, other=0.0)
    k_at = k_ptr + head * k_head + key[None, :] * k_length + dim[:, None]
    v_at = v_ptr + head * v_head + key[:, None] * v_length + dim[None, :]
    total = tl.zeros((BLOCK_M, DIM), tl.float32)
    highest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    end = length
    if CAUSAL:
        end = min(length, (block + 1) * BLOCK_M)
        whole = min(block * BLOCK_M, length) // BLOCK_N * BLOCK_N
    else:
        whole = length // BLOCK_N * BLOCK_N
    total, highest, weight = _attend(total, highest, weight, q, k_at, v_at, k_length, v_length, scale, row, 0, whole,
                                     length, False, CAUSAL, BLOCK_N)
    total, highest, weight = _attend(total, highest, weight, q, k_at, v_at, k_length, v_length, scale, row, whole, end,
                                     length, True, CAUSAL, BLOCK_N)
    out = total / weight[:, None]
    at = out_ptr + head * out_head + row[:, None] * out_length + dim[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)
    lse = (highest + tl.log2(weight)) * 0.6931471805599453  # ln 2
    tl.store(lse_ptr + head * length + row, lse, mask=row < length)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Plan:
    """out: softmax(q k^T / sqrt(dim)) v of 16-bit floats (heads, length, dim), dim a power of two from 16
    to 128; lse: the logarithm of each row's sum of exponentials, float32 (heads, length)."""
    q, k, v = map(_together, (q, k, v))
    heads, length, dim = q.shape
    out = torch.empty((heads, length, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, length), dtype=torch.float32, device=q.device)
    strides = [s for t in (q, k, v, out) for s in t.stride()[:2]]
    return Plan(attention_kernel, (triton.cdiv(length, 64), heads),
                (q, k, v, out, lse, length, LOG2_E * dim**-0.5, *strides),
                {"CAUSAL": causal, "DIM": dim, "BLOCK_M": 64, "BLOCK_N": 64},
                {"num_warps": 4, "num_stages": 3 if dim <= 64 else 2}, {"out": out, "lse": lse})
