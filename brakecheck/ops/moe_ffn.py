"""The feed-forward layer of a mixture of experts: rows to their experts, gated MLP, weighted sum back."""

from __future__ import annotations

from typing import Any, Callable, Dict

from .base import Case, Cost, Operator, Tolerance
from .experts import grouped, one_by_one
from .make import Make

op = Operator(
    "moe_ffn", "sum over a token's k experts of weight down(silu(gate x) up x), bfloat16",
    cases=[
        Case.of(tokens=5, experts=4, k=2, width=64, inner=32),
        Case.of(tokens=77, experts=8, k=3, width=72, inner=40),
        Case.of(tokens=1, experts=16, k=4, width=64, inner=48),
        Case.of(tokens=128, experts=8, k=2, width=4096, inner=1792),
        Case.of(tokens=4096, experts=8, k=2, width=4096, inner=1792),
        Case.of(tokens=4096, experts=64, k=8, width=2048, inner=768),
    ],
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    """index: the k different experts of each token. up: gate and up projection, one after the other."""
    tokens, experts, k, width, inner = (case[n] for n in ("tokens", "experts", "k", "width", "inner"))
    score, index = make.normal(tokens, experts).topk(k, dim=1)
    return {
        "x": make.normal(tokens, width, dtype="bfloat16"),
        "index": index.int(),
        "weight": score.softmax(1),
        "up": make.normal(experts, 2 * inner, width, std=width**-0.5, dtype="bfloat16"),
        "down": make.normal(experts, width, inner, std=inner**-0.5, dtype="bfloat16"),
    }


@op.reference
def _(case: Case, x: Any, index: Any, weight: Any, up: Any, down: Any) -> Dict[str, Any]:
    out = x.double().new_zeros(x.shape)
    for expert in range(case["experts"]):
        token, place = (index == expert).nonzero(as_tuple=True)
        gate, value = (x[token].double() @ up[expert].double().T).chunk(2, dim=1)
        row = (gate / (1 + (-gate).exp()) * value) @ down[expert].double().T
        out.index_add_(0, token, weight[token, place, None].double() * row)
    return {"out": out}


@op.cost
def _(case: Case) -> Cost:
    tokens, experts, k, width, inner = (case[n] for n in ("tokens", "experts", "k", "width", "inner"))
    copies = tokens * k
    used = min(copies, experts)
    moved = 2 * (2 * tokens * width + 3 * used * inner * width) + 8 * copies
    return Cost(flops=copies * (6 * inner * width + 5 * inner + 2 * width), bytes=moved)


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(2.0**-6, "rounded to bfloat16 after each of five steps, 2^-8 at worst each, with random signs")


def _layer(product: Callable[..., Any]) -> Callable[..., Dict[str, Any]]:
    def layer(case: Case, x: Any, index: Any, weight: Any, up: Any, down: Any) -> Dict[str, Any]:
        import torch

        k = case["k"]
        expert = index.reshape(-1)
        order = expert.argsort(stable=True)
        count = torch.zeros(case["experts"] + 1, dtype=torch.int32, device=x.device)
        count.index_add_(0, expert.long() + 1, torch.ones_like(expert))
        offsets = count.cumsum(0).int()
        gate, value = product(x[order // k], up, offsets).chunk(2, dim=1)
        row = product(torch.nn.functional.silu(gate) * value, down, offsets)
        back = torch.empty_like(row)
        back[order] = row
        return {"out": torch.bmm(weight.to(x.dtype)[:, None], back.reshape(-1, k, x.shape[1]))[:, 0]}

    return layer


op.implementation("torch")(_layer(grouped))
op.implementation("loop")(_layer(one_by_one))
