"""Operators for tests: a good one, and ones that go wrong in every way that a worker must survive."""

import os
import time

from brakecheck.ops import Case, Cost, Operator, Tolerance

axpy = Operator("axpy", "y = 2 x + y", cases=[Case.of(n=1 << k, dtype="float32") for k in (14, 17)])


@axpy.inputs
def _(case, make):
    return {"x": make.normal(case["n"]), "y": make.normal(case["n"])}


@axpy.reference
def _(case, x, y):
    return {"out": 2 * x.double() + y.double()}


@axpy.cost
def _(case):
    return Cost(2 * case["n"], 12 * case["n"])


@axpy.tolerance
def _(case):
    return Tolerance(1e-6, "two roundings of fp32")


@axpy.implementation("torch")
def _(case, x, y):
    return {"out": 2 * x + y}


@axpy.implementation("twice")
def _(case, x, y):
    2 * x + y
    return {"out": 2 * x + y}


@axpy.implementation("tiny")
def _(case, x, y):
    return {"out": (2 * x + y) * 1e-21}


@axpy.implementation("unwritten")
def _(case, x, y):
    import torch

    out = torch.empty_like(x)
    out[1:] = 2 * x[1:] + y[1:]
    return {"out": out}


KEPT = []


@axpy.implementation("leaky")
def _(case, x, y):
    import torch

    KEPT.append(torch.ones(1 << 20))
    return {"out": 2 * x + y}


@axpy.implementation("random")
def _(case, x, y):
    import torch

    return {"out": 2 * x + y + 1e-7 * torch.rand_like(x)}


integers = Operator("count", "int product", cases=[Case.of(M=17, K=16, N=16)])


@integers.inputs
def _(case, make):
    return {
        "a": make.integers(case["M"], case["K"], low=-8, high=8),
        "b": make.integers(case["K"], case["N"], low=-8, high=8),
    }


@integers.reference
def _(case, a, b):
    return {"out": a.long() @ b.long()}


@integers.implementation("torch")
def _(case, a, b):
    return {"out": a @ b}


@integers.implementation("odd")
def _(case, a, b):
    out = a @ b
    out[-1] = 0
    return {"out": out}


trouble = Operator("trouble", "goes wrong", cases=[Case.of(n=1024)])


@trouble.inputs
def _(case, make):
    return {"x": make.normal(case["n"])}


@trouble.implementation("torch")
def _(case, x):
    return {"out": x + 1}


@trouble.implementation("error")
def _(case, x):
    raise ValueError("no such luck")


@trouble.implementation("oom")
def _(case, x):
    raise MemoryError("asked for too much")


@trouble.implementation("import")
def _(case, x):
    import not_there  # noqa: F401


@trouble.implementation("crash")
def _(case, x):
    os.abort()


@trouble.implementation("poison")
def _(case, x):
    from brakecheck.worker.device import Device

    def fail(self):
        raise RuntimeError("device-side assert triggered")

    Device.sync = fail
    fail(None)


@trouble.implementation("hang")
def _(case, x):
    time.sleep(3600)


@trouble.implementation("noisy")
def _(case, x):
    print("a library talks to stdout")
    os.write(1, b"and so does C\n")
    return {"out": x + 1}


rows = Operator("rows", "sum of each row", cases=[Case.of(M=3, N=5)])


@rows.inputs
def _(case, make):
    return {"x": make.normal(case["M"], case["N"])}


@rows.reference
def _(case, x):
    return {"out": x.double().sum(1)}


@rows.tolerance
def _(case):
    return Tolerance(1e-6, "five roundings of fp32")


@rows.implementation("torch")
def _(case, x):
    return {"out": x.sum(1)}


@rows.implementation("strideless")
def _(case, x):
    import torch

    return {"out": torch.as_strided(x, x.shape, (case["N"], 1)).sum(1)}


@rows.implementation("picky")
def _(case, x):
    if not x.is_contiguous():
        raise ValueError("contiguous inputs, please")
    return {"out": x.sum(1)}


SEEN = set()


@rows.implementation("forgetful")
def _(case, x):
    SEEN.add(x.stride())
    return {"out": x.sum(1) * (1 + 1e-7 * len(SEEN))}


ops = [axpy, integers, trouble, rows]
