"""The Triton kernels beyond the catalogue's cases: other types, strides, -inf, large values. For tests."""

from brakecheck.ops import Case, Operator, Tolerance, in_triton
from brakecheck.ops.sdpa import dense

EPSILON = 1e-5
LIMIT = {"float32": 2e-6, "float16": 5e-4, "bfloat16": 8e-3}  # the interpreter cuts bfloat16 off, compilers round


def _operator(name, cases):
    op = Operator(name, "", cases=cases)
    op.tolerance(lambda case: Tolerance(case.get("limit", LIMIT[case["dtype"]]), "one rounding of the type"))
    return op


def _rows(case, make):
    """Rows of a wider tensor, so that they lie apart."""
    shape = case["rows"], case["columns"]
    return make.normal(shape[0], shape[1] + 3, dtype=case["dtype"], mean=case.get("mean", 0.0),
                       std=case.get("std", 1.0))[:, :shape[1]]


softmax = _operator("triton_softmax", [
    Case.of(rows=4, columns=77, dtype="float32"),
    Case.of(rows=4, columns=1, dtype="bfloat16"),
    Case.of(rows=4, columns=133, dtype="float16"),
    Case.of(rows=4, columns=999, dtype="float32", std=1e4),
    Case.of(rows=4, columns=16385, dtype="float32"),  # more than registers hold
    Case.of(rows=4, columns=40007, dtype="bfloat16", std=1e4),
])


@softmax.inputs
def _(case, make):
    """One row without -inf, one of them all but the last, one all, one by half."""
    x = _rows(case, make)
    x[1, :-1] = x[2] = x[3, :case["columns"] // 2] = -float("inf")
    return {"x": x}


@softmax.reference
def _(case, x):
    out = x.double().softmax(1)
    return {"out": out.nan_to_num(0), "nan": out.isnan().int()}


@softmax.implementation("triton")
def _(case, x):
    out = in_triton.kernels(x).softmax(x).run()["out"]
    return {"out": out.nan_to_num(0), "nan": out.isnan().int()}


norms = [Case.of(rows=3, columns=1, dtype="bfloat16"), Case.of(rows=5, columns=133, dtype="float16"),
         Case.of(rows=2, columns=40007, dtype="bfloat16"), Case.of(rows=3, columns=1000, dtype="float32", std=1e4),
         Case.of(rows=3, columns=1000, dtype="float32", mean=1e4, limit=2e-3)]  # the mean is rounded to float32
layernorm, rmsnorm = _operator("triton_layernorm", norms[1:]), _operator("triton_rmsnorm", norms)


def _norm_inputs(case, make):
    return {"x": _rows(case, make), "weight": make.normal(case["columns"], dtype=case["dtype"], mean=1.0)}


layernorm.inputs(_norm_inputs)
rmsnorm.inputs(_norm_inputs)


def _normed(x, weight):
    return {"out": x / (x.square().mean(1, keepdim=True) + EPSILON).sqrt() * weight.double()}


@layernorm.reference
def _(case, x, weight):
    x = x.double()
    out = _normed(x - x.mean(1, keepdim=True), weight)["out"]
    return {"out": out + weight.double()}


@rmsnorm.reference
def _(case, x, weight):
    return _normed(x.double(), weight)


@layernorm.implementation("triton")
def _(case, x, weight):
    return in_triton.kernels(x).layer_norm(x, weight, weight, EPSILON).run()


@rmsnorm.implementation("triton")
def _(case, x, weight):
    return in_triton.kernels(x).rms_norm(x, weight, EPSILON).run()


matmul = _operator("triton_matmul", [
    Case.of(m=1, n=1, k=1, dtype="float16"),
    Case.of(m=33, n=35, k=301, dtype="float16"),
    Case.of(m=129, n=257, k=65, dtype="float16"),  # tiles for many rows, at their edges
    Case.of(m=130, n=77, k=70, dtype="float16", batch=3, turned=True),
    Case.of(m=17, n=33, k=40, dtype="float16", std=30.0),
])


@matmul.inputs
def _(case, make):
    """turned: both lie column by column. Rows of wider tensors otherwise."""
    m, n, k, std = case["m"], case["n"], case["k"], case.get("std", 1.0)
    if case.get("turned"):
        return {"a": make.normal(case["batch"], k, m, dtype="float16").mT,
                "b": make.normal(case["batch"], n, k, dtype="float16").mT}
    return {"a": make.normal(m, k + 5, dtype="float16", std=std)[:, :k],
            "b": make.normal(k, n + 3, dtype="float16", std=std)[:, :n]}


@matmul.reference
def _(case, a, b):
    return {"c": a.double() @ b.double()}


@matmul.implementation("triton")
def _(case, a, b):
    return in_triton.kernels(a, dots=True).matmul(a, b).run()


attention = _operator("triton_attention", [
    Case.of(heads=2, length=1, dim=64, causal=True, dtype="float16", limit=2e-3),
    Case.of(heads=3, length=63, dim=16, causal=True, dtype="float16", limit=2e-3),
    Case.of(heads=2, length=129, dim=32, causal=False, dtype="float16", limit=2e-3),
    Case.of(heads=1, length=197, dim=64, causal=True, dtype="float16", limit=2e-3),
    Case.of(heads=1, length=257, dim=128, causal=False, dtype="float16", limit=2e-3, std=20.0),
])


@attention.inputs
def _(case, make):
    """q, k and v lie in one tensor, as one projection gives them."""
    drawn = make.normal(case["length"], 3, case["heads"], case["dim"], dtype="float16", std=case.get("std", 1.0))
    return {name: drawn[:, i].transpose(0, 1) for i, name in enumerate("qkv")}


@attention.reference
def _(case, q, k, v):
    out, lse = dense(case, q.double(), k.double(), v.double())
    return {"out": out, "lse": lse}


@attention.implementation("triton")
def _(case, q, k, v):
    return in_triton.kernels(q, dots=True).attention(q, k, v, case["causal"]).run()


ops = [softmax, layernorm, rmsnorm, matmul, attention]
