"""A matrix product for tests on a GPU, right and wrong ways."""

from brakecheck.ops import Case, Cost, Operator, Tolerance

op = Operator("mm", "c = a b", cases=[Case.of(n=1024)])


@op.inputs
def _(case, make):
    n = case["n"]
    return {"a": make.normal(n, n, dtype="bfloat16"), "b": make.normal(n, n, dtype="bfloat16")}


@op.reference
def _(case, a, b):
    return {"c": a.double() @ b.double()}


@op.cost
def _(case):
    return Cost(2.0 * case["n"] ** 3, 6.0 * case["n"] ** 2)


@op.tolerance
def _(case):
    return Tolerance(4e-3, "rounding to bf16")


@op.implementation("torch")
def _(case, a, b):
    return {"c": a @ b}


@op.implementation("synchronising")
def _(case, a, b):
    c = a @ b
    c[0, 0].item()
    return {"c": c}


@op.implementation("cpu")
def _(case, a, b):
    return {"c": (a.cpu() @ b.cpu())}
