"""Is a top-k choice right? Ties may fall either way; everything else may not."""

from __future__ import annotations

from typing import Any, Dict, Optional


def judge_choice(scores: Any, reference: Dict[str, Any], out: Dict[str, Any], weight_error: float,
                 resolution: float = 0.0, none: Optional[int] = None) -> Dict[str, Any]:
    """Judges `index` and `weight` (tokens, k) of `out` against the reference's, for an Operator's comparison.

    scores: exact, float64 (tokens, experts). Two scores tie when they differ by at most `resolution` of the larger one:
    0 where the scores themselves are the inputs, an epsilon of the type that they were rounded to before the choice.
    none: the index that says "no expert is left", which must stand exactly where the reference has it.

    changed_tokens: whose set of experts is not the reference's. tied_tokens: those of them that ties explain, with
    weights equal to the reference's within weight_error; an allowed change. wrong_tokens: all others that are wrong
    (another expert, one chosen twice, an order that the scores do not have)."""
    experts = scores.shape[1]
    index, wanted = out["index"].long(), reference["index"].long()
    if index.shape != wanted.shape:
        return {"ok": False, "error": float("inf"), "why": f"index has shape {tuple(index.shape)}"}
    weight, right = out["weight"].double(), reference["weight"].double()
    inside = (index >= 0) & (index < experts)
    chosen, best = scores.gather(1, index.clamp(0, experts - 1)), scores.gather(1, wanted)
    equal = (chosen == best) | ((chosen - best).abs() <= resolution * best.abs())
    bad = ~inside | ~equal
    if none is not None:
        bad |= (index == none) != (wanted == none)
    ranked, ranked_wanted = index.sort(1).values, wanted.sort(1).values
    twice = ranked[:, 1:] == ranked[:, :-1]
    if none is not None:
        twice &= ranked[:, 1:] != none
    changed = (ranked != ranked_wanted).any(1)
    off = ~((weight - right).abs() <= weight_error * right.abs().amax(1, keepdim=True))
    wrong = bad.any(1) | twice.any(1) | (changed & off.any(1))
    error = float((weight - right).norm() / right.norm().clamp_min(1e-300))
    found: Dict[str, Any] = {
        "ok": not bool(wrong.any()) and error <= weight_error, "error": error, "changed_tokens": int(changed.sum()),
        "tied_tokens": int((changed & ~wrong).sum()), "wrong_tokens": int(wrong.sum()), "wrong_choices": int(bad.sum()),
    }
    if found["wrong_tokens"]:
        found["why"] = (f"{found['wrong_tokens']} of {index.shape[0]} tokens go to other experts, which ties do not "
                        f"explain ({found['tied_tokens']} more are explained by ties)")
    elif not found["ok"]:
        found["why"] = f"weights: relative error {error:.3g} exceeds {weight_error:.3g}"
    return found
