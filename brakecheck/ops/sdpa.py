"""scaled_dot_product_attention by backend, and attention written out. q, k, v are (heads, length, dim)."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Dict, Tuple

from .base import Case, Missing

BACKENDS: Dict[str, str] = {"math": "MATH", "flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION",
                            "efficient": "EFFICIENT_ATTENTION"}  # name: in torch.nn.attention.SDPBackend
REFUSALS = ("No available kernel", "No viable backend")  # how torch says that the chosen backend cannot


def attend(case: Case, q: Any, k: Any, v: Any, backend: str = "") -> Any:
    """Attention by one backend, by default the one that torch chooses. Raises Missing, with torch's reasons, where the
    backend cannot do this case on this device."""
    import torch

    def call() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=case["causal"])[0]

    if not backend:
        return call()
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = getattr(SDPBackend, BACKENDS[backend])
    except (ImportError, AttributeError) as problem:
        raise Missing(f"this torch cannot choose the attention backend {backend!r}: {problem}") from problem
    with sdpa_kernel(chosen):
        try:
            return call()
        except RuntimeError as problem:
            if not any(refusal in str(problem) for refusal in REFUSALS):
                raise
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                with contextlib.suppress(RuntimeError):  # once more for the reasons, which torch gives as warnings
                    call()
            first = [str(w.message).split(" (Triggered")[0] for w in said]
            raise Missing(f"the attention backend {backend!r} cannot do this case on {q.device.type}: "
                          f"{'; '.join(first) or str(problem).splitlines()[0]}") from problem


def attend_with_lse(case: Case, q: Any, k: Any, v: Any) -> Tuple[Any, Any]:
    """Output and log-sum-exp (heads, length) of flash attention. Raises Missing where it does not run."""
    import torch

    name = "_scaled_dot_product_flash_attention" + ("_for_cpu" if q.device.type == "cpu" else "")
    if not hasattr(torch.ops.aten, name):
        raise Missing(f"this torch has no {name}")
    found = getattr(torch.ops.aten, name)(q[None], k[None], v[None], 0.0, case["causal"])
    return found[0][0], found[1][0]


def dense(case: Case, q: Any, k: Any, v: Any) -> Tuple[Any, Any]:
    """Output and log-sum-exp with all scores in memory, head by head."""
    import torch

    later = None
    if case["causal"]:
        later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
    outs, lses = [], []
    for head in range(q.shape[0]):
        score = q[head] @ k[head].T * q.shape[2] ** -0.5
        if later is not None:
            score = score.masked_fill(later, -float("inf"))
        outs.append(score.softmax(1) @ v[head])
        lses.append(score.logsumexp(1))
    return torch.stack(outs), torch.stack(lses)
