"""Convolutions of images and of videos, bfloat16, channels last and first."""

from __future__ import annotations

from typing import Any, Dict, List

from .base import ROUNDING, Case, Cost, Operator, Tolerance
from .make import Make


def _place(x: Any, layout: str) -> Any:
    import torch

    if layout == "contiguous":
        return x.contiguous()
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def _operator(axes: int, title: str, cases: List[Case]) -> Operator:
    """cases: n, channels (in), out (channels), size (of the input, one number an axis), kernel, stride, padding,
    groups, layout."""
    operator = Operator(f"conv{axes}d", title, cases=cases)

    def sizes(case: Case) -> List[int]:
        return [(s + 2 * case["padding"] - case["kernel"]) // case["stride"] + 1 for s in case["size"]]

    def convolve(case: Case, x: Any, w: Any) -> Any:
        import torch

        function = torch.nn.functional.conv2d if axes == 2 else torch.nn.functional.conv3d
        return function(x, w, stride=case["stride"], padding=case["padding"], groups=case.get("groups", 1))

    @operator.inputs
    def _(case: Case, make: Make) -> Dict[str, Any]:
        inside = case["channels"] // case.get("groups", 1)
        x = make.normal(case["n"], case["channels"], *case["size"], dtype="bfloat16")
        w = make.normal(case["out"], inside, *[case["kernel"]] * axes, dtype="bfloat16")
        return {"x": _place(x, case["layout"]), "w": _place(w, case["layout"])}

    @operator.reference
    def _(case: Case, x: Any, w: Any) -> Dict[str, Any]:
        return {"out": convolve(case, x.double().contiguous(), w.double().contiguous())}

    @operator.cost
    def _(case: Case) -> Cost:
        inside, places, read = case["channels"] // case.get("groups", 1), case["n"], case["n"] * case["channels"]
        for before, after in zip(case["size"], sizes(case)):
            places, read = places * after, read * before
        weights = case["out"] * inside * case["kernel"] ** axes
        return Cost(flops=2 * places * weights, bytes=2 * (read + weights + places * case["out"]))

    @operator.tolerance
    def _(case: Case) -> Tolerance:
        return Tolerance(2.0**-8, "rounding the result to bfloat16, 2^-8 at worst; sums are float32",
                         expected=ROUNDING * 2.0**-7)

    @operator.implementation("torch")
    def _(case: Case, x: Any, w: Any) -> Dict[str, Any]:
        return {"out": convolve(case, x, w)}

    @operator.layout("channels-last")
    def _(case: Case, x: Any, w: Any) -> Dict[str, Any]:
        return {"x": _place(x, "channels_last"), "w": _place(w, "channels_last")}

    @operator.layout("contiguous")
    def _(case: Case, x: Any, w: Any) -> Dict[str, Any]:
        return {"x": _place(x, "contiguous"), "w": _place(w, "contiguous")}

    return operator


def _case(n: int, channels: int, out: int, size: List[int], kernel: int = 3, stride: int = 1, padding: int = 1,
          layout: str = "channels_last", **more: int) -> Case:
    return Case.of(n=n, channels=channels, out=out, size=size, kernel=kernel, stride=stride, padding=padding,
                   layout=layout, **more)


ops = [
    _operator(2, "convolution of images, bfloat16", [
        _case(2, 16, 8, [8, 8]),
        _case(1, 3, 13, [17, 19], 7, 2, 3, "contiguous"),
        _case(3, 24, 24, [9, 11], groups=24),
        _case(64, 3, 64, [224, 224], 7, 2, 3),
        _case(64, 256, 256, [56, 56]),
        _case(64, 256, 256, [56, 56], layout="contiguous"),
        _case(64, 1024, 512, [28, 28], 1, 1, 0),
        _case(64, 512, 512, [56, 56], groups=512),
    ]),
    _operator(3, "convolution of videos, bfloat16", [
        _case(1, 8, 16, [4, 6, 6]),
        _case(1, 3, 7, [5, 9, 7], 3, 2, 1, "contiguous"),
        _case(1, 16, 128, [16, 128, 128]),
        _case(1, 128, 128, [16, 64, 64]),
        _case(1, 128, 128, [16, 64, 64], layout="contiguous"),
        _case(8, 3, 96, [8, 112, 112], 2, 2, 0),
    ]),
]
