"""Is the result right? Error against FP64, energy, exact integers, ties, NaN, and whether it is the same every time."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Dict, List, Optional

from .timers import tensors_of

ENERGY_LOW, ENERGY_HIGH = 0.25, 4.0  # ||out||^2 / ||ref||^2 outside of this is another result, whatever the tolerance
LOST = 1e-6        # a row with less than this share of the reference's energy was never really computed
SMALL = 1e-10      # rows with less than this share of the largest row's energy may be nothing but rounding
FOLDED = 1 << 22   # words of a digest that are mixed at once
MIXERS = tuple(tuple(x - 2**64 if x >= 2**63 else x for x in row) for row in (  # odd, as signed 64-bit numbers
    (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB),
    (0xD1B54A32D192ED03, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)))
GREW = 1.2         # error beyond what honest arithmetic gives that is worth explaining


def digest(outputs: Dict[str, Any]) -> str:
    """A hash of names, shapes and the very bits of the outputs: equal digests mean bitwise equal results, on whatever
    device and stack. The bits are folded where they lie, because bringing them to the host takes seconds."""
    found = hashlib.sha256()
    for name in sorted(outputs):
        for tensor in tensors_of(outputs[name]):
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_fold(tensor)}".encode())
    return found.hexdigest()


def _fold(tensor: Any) -> List[int]:
    """Two sums of mixed 64-bit words, modulo 2^64. Every word is mixed with its place (the finaliser of SplitMix64,
    Steele, Lea and Flood 2014) before it is added; integers add up to the same in any order."""
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    sums = [0, 0]
    for start in range(0, data.numel(), FOLDED):
        words = data[start:start + FOLDED]
        place = torch.arange(start, start + words.numel(), device=words.device)
        for i, (a, b, c) in enumerate(MIXERS):
            x = words + place * a
            x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * b
            x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * c
            sums[i] = (sums[i] + int((x ^ ((x >> 31) & 0x1FFFFFFFF)).sum())) % 2**64
    return sums


def check(operator: Any, case: Any, inputs: Dict[str, Any], outputs: Dict[str, Any],
          reference: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """{"ok", "why"?, "tolerance"?, "outputs": {name: {...}}} of one call. reference: if it was computed before.

    Of each output: relative (error), largest (error), energy (share of the reference's), nan, and where they apply
    infinite (where the reference is finite), lost (rows without energy), growth (error against that of honest
    arithmetic), partials (16-bit partial sums that would explain the growth), special (infinities that are not), or of
    integers mismatches and elements.

    ok is False when all outputs are missing, or one has another shape, is NaN or infinite where the reference is
    finite, is an integer that differs, exceeds the tolerance, or has another energy, in all or in single rows; `why`
    names the first of these. An operator's own comparison (top-k with ties) replaces the norm. Without a
    reference only NaN and infinities count."""
    tolerance = operator.choose_tolerance(case) if operator.choose_tolerance else None
    found: Dict[str, Any] = {"ok": True, "outputs": {}}
    if tolerance is not None:
        found["tolerance"] = tolerance.relative
    reasons: List[str] = []
    if operator.compute_reference is None:
        bad = sum(int((~t.isfinite()).sum()) for t in tensors_of(outputs) if t.is_floating_point())
        found["ok"], found["not_finite"] = bad == 0, bad
        if bad:
            found["why"] = f"{bad} values are not finite (there is no reference to compare with)"
        return found
    if reference is None:
        reference = operator.compute_reference(case, **inputs)
    judged_by_operator = operator.compare is not None
    absent = [name for name in reference if name not in outputs]
    if len(absent) == len(reference):
        reasons.append(f"none of the outputs {', '.join(map(repr, absent))} was returned")
    elif absent:  # a side output (log-sum-exp) that this implementation does not have
        found["absent"] = absent
    for name, expected in reference.items():
        if name in absent:
            continue
        entry = _compare(expected, outputs[name])
        if tolerance is not None and getattr(tolerance, "expected", None) and "relative" in entry:
            entry["growth"] = entry["relative"] / tolerance.expected
            if entry["growth"] > GREW and entry["growth"] < math.inf:
                entry["partials"] = partials(entry["growth"])
        found["outputs"][name] = entry
        if not judged_by_operator:
            reasons += _faults(name, entry, tolerance.relative if tolerance else None)
        elif entry.get("nan") or entry.get("infinite"):
            reasons.append(f"{name}: {entry.get('nan', 0)} NaN, {entry.get('infinite', 0)} infinities where the "
                           "reference is finite")
    if judged_by_operator:
        verdict = dict(operator.compare(case, inputs, reference, outputs))
        found["comparison"] = {k: v for k, v in verdict.items() if isinstance(v, (bool, int, float, str))}
        if not verdict.get("ok", False):
            reasons.append(str(verdict.get("why", "the operator's own comparison rejects the result")))
    if reasons:
        found["ok"], found["why"] = False, reasons[0]
    return found


def _compare(expected: Any, out: Any) -> Dict[str, Any]:
    import torch

    if tuple(expected.shape) != tuple(out.shape):
        return {"shape": list(out.shape), "expected_shape": list(expected.shape)}
    if not expected.is_floating_point() and not out.is_floating_point():
        return {"mismatches": int((expected.to(out.device) != out).sum()), "elements": out.numel()}
    ref, got = expected.to(torch.float64), out.to(expected.device).to(torch.float64)
    finite = torch.isfinite(ref)
    nan = int((torch.isnan(got) & ~torch.isnan(ref)).sum())
    wrong_special = int(((got != ref) & ~finite & ~torch.isnan(ref)).sum())
    infinite = int((torch.isinf(got) & finite).sum())  # which the norm below leaves out
    ref, got = torch.where(finite, ref, 0.0), torch.where(finite & torch.isfinite(got), got, 0.0)
    size, error = float(torch.linalg.vector_norm(ref)), float(torch.linalg.vector_norm(got - ref))
    entry: Dict[str, Any] = {"nan": nan, "largest": float((got - ref).abs().max()) if ref.numel() else 0.0}
    if infinite:
        entry["infinite"] = infinite
    if wrong_special:
        entry["special"] = wrong_special
    if size > 0:
        entry["relative"] = error / size
        entry["energy"] = float(torch.linalg.vector_norm(got)) ** 2 / size**2
        lost = _lost_rows(ref, got)
        if lost:
            entry["lost"] = lost
    else:
        entry["relative"] = math.inf if error > 0 else 0.0
    return entry


def _lost_rows(ref: Any, got: Any) -> int:
    """Rows (of the last dimension; 256 values of what has short or no rows) whose energy is gone although the
    reference's is not: an output of 1e-21 where the reference is small hides behind the large values of other rows."""
    import torch

    width = ref.shape[-1] if ref.dim() > 1 and ref.shape[-1] >= 8 else 256
    if ref.numel() <= width:
        return 0
    short = -ref.numel() % width
    wanted, found = (torch.nn.functional.pad(t.reshape(-1), (0, short)).reshape(-1, width).square().sum(1)
                     for t in (ref, got))
    return int(((wanted > SMALL * wanted.max()) & (found < LOST * wanted)).sum())


def partials(growth: float) -> int:
    """How many partial sums, each rounded to the output's type and added up in that type, give `growth` times the error
    of one rounding.

    P random parts have a P-th of the variance each. Rounding all of them costs as much as rounding the result once,
    rounding the sum after the i-th part i / P of that: growth^2 = 1 + (P + 1) / 2 - 1 / P."""
    surplus = 2 * growth**2 - 3
    return max(1, round((surplus + math.sqrt(surplus**2 + 8)) / 2))


def _faults(name: str, entry: Dict[str, Any], tolerance: Any) -> List[str]:
    if "shape" in entry:
        return [f"{name} has shape {entry['shape']}, the reference {entry['expected_shape']}"]
    if entry.get("mismatches"):
        return [f"{name}: {entry['mismatches']} of {entry['elements']} integers are wrong"]
    faults = []
    if entry.get("nan"):
        faults.append(f"{name}: {entry['nan']} NaN where the reference is finite (unwritten output is filled with NaN)")
    if entry.get("infinite"):
        faults.append(f"{name}: {entry['infinite']} infinities where the reference is finite")
    if entry.get("special"):
        faults.append(f"{name}: {entry['special']} infinities of the reference are not infinite in the result")
    energy = entry.get("energy")
    if energy is not None and not ENERGY_LOW <= energy <= ENERGY_HIGH:
        faults.append(f"{name} has {energy:.2g} times the reference's energy: it is another result, however small the "
                      f"largest error ({entry['largest']:.2g})")
    if entry.get("lost"):
        faults.append(f"{name}: {entry['lost']} rows have no energy (under a millionth) where the reference has some")
    if tolerance is not None and entry.get("relative", 0.0) > tolerance:
        faults.append(f"{name}: relative error {entry['relative']:.3g} exceeds {tolerance:.3g}")
    return faults


def poison(device: Any, sizes: List[int]) -> List[int]:
    """Fills allocator blocks of these sizes (bytes) with 0xFF, which is NaN in every float format, and frees them: the
    caching allocator hands the same blocks to the next outputs, so what a kernel leaves unwritten shows as NaN.

    Returns the addresses, to tell whether an output really got a poisoned block."""
    import torch

    blocks = [torch.full((max(1, size),), 255, dtype=torch.uint8, device=device) for size in sizes]
    return [block.data_ptr() for block in blocks]
