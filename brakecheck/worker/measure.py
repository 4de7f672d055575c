"""One visit to one case: settle, call, check, time. Everything that a block of the measurement is made of."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any, Callable, Dict, List, Optional, Tuple

from ..ops.base import Missing
from . import memory, numerics, timers
from .device import Device
from .layouts import check_layouts, layouts_for

HARNESS = "2"  # raised whenever timing or what is timed changes: blocks of unlike harnesses are never compared
REPEATS = 4    # launches that must give the same bits


class Laps:
    """What a visit spends its time on, in seconds by part."""

    def __init__(self) -> None:
        self.seconds: Dict[str, float] = {}
        self.begin = time.perf_counter()

    def end(self, part: str, but: float = 0.0) -> None:
        now = time.perf_counter()
        self.seconds[part], self.begin = now - self.begin - but, now


def find(operators: Dict[str, Any], operator: str, case: str,
         implementation: str) -> Tuple[Any, Any, Callable[..., Any]]:
    """Operator, case and function by name. Raises Missing."""
    if operator not in operators:
        raise Missing(f"there is no operator {operator!r}")
    op = operators[operator]
    found = next((c for c in op.cases if c.name == case), None)
    if found is None:
        raise Missing(f"operator {operator!r} has no case {case!r}")
    if implementation not in op.implementations:
        have = ", ".join(sorted(op.implementations)) or "none"
        raise Missing(f"operator {operator!r} has no implementation {implementation!r} here (it has: {have})")
    return op, found, op.implementations[implementation]


def measure(device: Device, operators: Dict[str, Any], request: Dict[str, Any]) -> Dict[str, Any]:
    """The block as JSON data. request: operator, case, implementation; seed; checks (memory growth, numerics,
    repeated launches, profiler: once per arm is enough); settle; plan (fields of timers.Plan)."""
    op, case, function = find(operators, request["operator"], request["case"], request["implementation"])
    try:
        return _measure(device, op, case, function, request)
    finally:
        getattr(function, "close", lambda: None)()  # of a set-up (ops/base.py)


def _measure(device: Device, op: Any, case: Any, function: Callable[..., Any],
             request: Dict[str, Any]) -> Dict[str, Any]:
    seed = int(request.get("seed", 0))
    known = {f.name for f in fields(timers.Plan)}
    plan = timers.Plan(**{k: v for k, v in request.get("plan", {}).items() if k in known})
    laps = Laps()
    settled = device.settle() if request.get("settle", True) else {"seconds": 0.0, "settled": False}
    laps.end("settle")
    watch = memory.Watch(device)
    make = _make(device, seed)
    inputs = op.make_inputs(case, make)
    outputs, first = _first_calls(device, function, case, inputs)
    used = watch.report()
    laps.end("first_call")
    rotation = _rotation(device, op, case, function, inputs, outputs, seed)
    laps.end("inputs")
    if plan.duty == "sustained":
        timers.warm_up(device, rotation, 1.0)
    before, energy, begin = device.state(), device.energy(), time.time()
    sampled, captured = _time(device, rotation, plan, op.timer)
    laps.end("capture_and_warm_up", but=sampled.seconds)
    laps.seconds["sampling"] = sampled.seconds
    after, energy_after = device.state(), device.energy()
    result: Dict[str, Any] = {
        "key": {"timer": sampled.timer, "mode": sampled.mode, "duty": plan.duty, "harness": HARNESS,
                "cache": timers.cache_policy(rotation, device.cache_bytes()), "inputs": _distribution(make.drawn)},
        "us": sampled.us, "calls": sampled.calls, "extra_calls": sampled.extra, "clocks": sampled.clocks,
        "buffers": len(rotation.buffers), "started": begin, "settle": settled, "before": before, "after": after,
        "wall_us": timers.wall_samples(device, rotation, plan) if device.cuda and op.timer == "device" else None,
        "first_call_ms": first, "memory": used, "spent": laps.seconds,
    }
    laps.end("wall")
    if sampled.note:
        result["note"] = sampled.note
    if energy is not None and energy_after is not None and energy_after > energy:
        result["energy_mj"] = energy_after - energy
    if sampled.energy_mj is not None:
        result["sampling_mj"] = sampled.energy_mj
    if op.compute_cost:
        cost = op.compute_cost(case)
        result["work"] = {"flops": cost.flops, "bytes": cost.bytes, "power_limited": op.power_limited(case)}
    if request.get("checks", True):
        result["numerics"] = _check(device, op, case, function, seed, outputs, captured)
        result["retention"] = memory.retention(device, lambda: function(case, **inputs))
        result["kernel_sum"] = _profile(device, rotation)
        laps.end("checks")
    return {k: v for k, v in result.items() if v is not None}


def _make(device: Device, seed: int) -> Any:
    from ..ops.make import Make

    return Make(device.name, seed)


def _first_calls(device: Device, function: Callable[..., Any], case: Any, inputs: Dict[str, Any]) -> Tuple[Any, float]:
    """Outputs of the first call, and its milliseconds (compilation, lazy loading and tuning are in there)."""
    device.sync()
    begin = time.perf_counter()
    outputs = function(case, **inputs)
    device.sync()
    took = (time.perf_counter() - begin) * 1000
    if not isinstance(outputs, dict):
        raise TypeError(f"an implementation returns named outputs, this one returned {type(outputs).__name__}")
    if device.cuda:
        elsewhere = [t.device for t in timers.tensors_of(outputs) if not t.is_cuda]
        if elsewhere:
            raise RuntimeError(f"fell back to {elsewhere[0]}: the result is not on {device.name}")
    return outputs, took


def _rotation(device: Device, op: Any, case: Any, function: Any, inputs: Any, outputs: Any,
              seed: int) -> timers.Rotation:
    """Draws the inputs again with the same seed: equal values in distinct memory, whatever their strides."""
    each = timers.bytes_of(inputs) + timers.bytes_of(outputs)
    if op.timer != "device":
        return timers.Rotation(function, case, [inputs], each)
    count = timers.rotation_size(each, device.cache_bytes(), device.free_bytes())
    more = [op.make_inputs(case, _make(device, seed)) for _ in range(count - 1)]
    return timers.Rotation(function, case, [inputs, *more], each)


def _time(device: Device, rotation: timers.Rotation, plan: timers.Plan,
          timer: str) -> Tuple[timers.Sampled, Optional[Any]]:
    if timer == "alone":
        return timers.single_samples(device, rotation, plan), None
    if timer == "wall" or not device.cuda:
        return timers.host_samples(device, rotation, plan), None
    try:
        return timers.graph_samples(device, rotation, plan)
    except RuntimeError as problem:
        if "out of memory" in str(problem).lower():
            raise
        device.torch.cuda.synchronize(device.index)
        sampled = timers.event_samples(device, rotation, plan)
        sampled.note = f"cannot be captured in a graph: {str(problem).splitlines()[0][:200]}"
        return sampled, None


def _check(device: Device, op: Any, case: Any, function: Any, seed: int, first: Any,
           captured: Optional[Any]) -> Dict[str, Any]:
    inputs = op.make_inputs(case, _make(device, seed))
    function = getattr(function, "checked", function)
    first = first or function(case, **inputs)
    sizes = [timers.bytes_of(t) for t in timers.tensors_of(first)]
    second, poisoned = _poisoned_call(device, function, case, inputs, sizes)
    fresh = op.make_inputs(case, _make(device, seed))
    reference = op.compute_reference(case, **fresh) if op.compute_reference else None
    found = numerics.check(op, case, fresh, second, reference)
    digest = _digest_of(found)
    digests = [digest(first), digest(second)]
    for _ in range(REPEATS - 2):
        digests.append(digest(function(case, **op.make_inputs(case, _make(device, seed)))))
    found.update(digest=digests[0], poisoned=poisoned, repeats=len(digests), distinct=len(set(digests)),
                 first_equals_second=digests[0] == digests[1])
    if captured is not None and len(set(digests)) == 1:
        found["graph_equals_eager"] = digest(captured) == digests[0]
    layouts = layouts_for(device, op, fresh) if found["ok"] else {}
    if layouts:
        known = digests[0] if len(set(digests)) == 1 else None
        found["layouts"] = check_layouts(op, case, function, lambda: op.make_inputs(case, _make(device, seed)),
                                         reference, known, layouts, digest)
    return found


def _digest_of(found: Dict[str, Any]) -> Callable[[Any], str]:
    """Digest of the outputs that were compared: what is beyond the reference is scratch, and may hold anything."""
    named = set(found["outputs"])
    return lambda outputs: numerics.digest({k: v for k, v in outputs.items() if k in named} if named else outputs)


def _poisoned_call(device: Device, function: Any, case: Any, inputs: Any, sizes: List[int]) -> Tuple[Any, bool]:
    """A call whose outputs start as NaN, and whether that is known to have worked for all of them."""
    torch = device.torch
    if device.cuda:
        addresses = set(numerics.poison(device.name, sizes))
        outputs = function(case, **inputs)
        device.sync()
        return outputs, all(t.data_ptr() in addresses for t in timers.tensors_of(outputs))
    # Fresh pages of the host are zero however they were left, so torch itself has to fill them.
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        return function(case, **inputs), bool(getattr(torch.utils.deterministic, "fill_uninitialized_memory", False))
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn)


def _profile(device: Device, rotation: timers.Rotation) -> Optional[Dict[str, Any]]:
    try:
        return timers.kernel_sum(device, rotation)
    except Exception as problem:  # a profiler that cannot start must not cost the measurement
        return {"error": f"{type(problem).__name__}: {problem}"[:200]}


def _distribution(drawn: List[Dict[str, Any]]) -> str:
    """Kinds and parameters of the draws without shapes, which the case has: "normal(mean=0.0 std=1.0)"."""
    seen = []
    for draw in drawn:
        parameters = " ".join(f"{k}={v}" for k, v in draw.items() if k not in ("kind", "shape", "dtype"))
        text = f"{draw['kind']}({parameters})"
        if text not in seen:
            seen.append(text)
    return "; ".join(seen) or "not drawn"
