"""Operators of the library: backends that are missing, settings, layouts, power and memory; a user's own operator."""

import re
from pathlib import Path

import pytest

from brakecheck.ops import Case, Operator, catalogue
from brakecheck.ops.base import Cost, Missing
from brakecheck.ops.load import load
from brakecheck.ops.make import Make

torch = pytest.importorskip("torch")
OPERATORS = catalogue()
DOCS = Path(__file__).resolve().parent.parent / "docs"
MOST = 5 << 29  # bytes of all rotating buffers on a GPU with this cache
CACHE = 60 << 20


def draw(name, case):
    return OPERATORS[name].make_inputs(case, Make("cpu", 3))


def first(name, **wanted):
    return next(c for c in OPERATORS[name].cases if all(c.get(k) == v for k, v in wanted.items()))


def test_every_case_fits_a_gpu_with_its_rotating_buffers():
    for operator in OPERATORS.values():
        for case in operator.cases:
            each = operator.compute_cost(case).bytes if operator.compute_cost else case.get("bytes", 0)
            assert each + 4 * CACHE + each < MOST, f"{operator.name} {case.name}: {each:,.0f} bytes"


def test_large_products_and_attention_are_power_limited_and_copies_are_not():
    def limited(name, **wanted):
        return OPERATORS[name].power_limited(first(name, **wanted))

    assert limited("gemm_bfloat16", m=8192) and limited("attention", length=8192)
    assert limited("attention_backward", length=8192, heads=16)
    assert not limited("gemm_bfloat16", m=4096) and not limited("gemm_bfloat16", m=1, n=4096)
    assert not any(OPERATORS["copy"].power_limited(c) for c in OPERATORS["copy"].cases)
    unknown = Operator("x", "", cases=[Case.of(n=1)])
    assert not unknown.power_limited(unknown.cases[0])
    unknown.cost(lambda case: Cost(1e12, 1e11))  # much, but little of it for each byte
    assert not unknown.power_limited(unknown.cases[0])


def test_the_shapes_that_broke_libraries_are_there():
    for dtype in ("float32", "tf32", "float16", "bfloat16", "fp8", "int8"):
        shapes = {(c["m"], c["n"], c["k"], c["b"]) for c in OPERATORS[f"gemm_{dtype}"].cases}
        assert {(17, 16, 16, "t"), (64, 4096, 14336, "t")} <= shapes
        assert {1, 16, 17, 64, 128} <= {m for m, *_ in shapes}


# ---- attention backends ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["attention", "attention_backward"])
def test_a_backend_that_is_not_there_is_missing_with_the_reason(name):
    operator = OPERATORS[name]
    case = operator.cases[0]
    with pytest.raises(Missing, match="'cudnn' cannot do this case on cpu: No viable backend"):
        operator.implementations["cudnn"](case, **draw(name, case))


def test_backends_and_their_side_output_agree_with_the_reference():
    operator = OPERATORS["attention"]
    case = first("attention", packed=True)
    inputs = draw("attention", case)
    assert not inputs["q"].is_contiguous()
    reference = operator.compute_reference(case, **inputs)
    for name in ("math", "flash", "flash-with-lse"):
        out = operator.implementations[name](case, **inputs)
        assert float((out["out"].double() - reference["out"]).norm() / reference["out"].norm()) < 1e-2
    torch.testing.assert_close(out["lse"].double(), reference["lse"], rtol=1e-3, atol=1e-3)


# ---- matrix products -------------------------------------------------------------------------------------------------
def test_settings_of_a_product_hold_during_the_call_only():
    matmul = torch.backends.cuda.matmul
    seen = []

    class Spy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.mm:
                seen.append((matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction))
            return super().__torch_function__(function, types, args, kwargs or {})

    before = matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction
    for dtype, name in (("tf32", "torch"), ("float32", "torch"), ("bfloat16", "full-precision-reduction"),
                        ("bfloat16", "reduced-precision-reduction")):
        case = first(f"gemm_{dtype}", m=17)
        inputs = draw(f"gemm_{dtype}", case)
        OPERATORS[f"gemm_{dtype}"].implementations[name](case, a=inputs["a"].as_subclass(Spy), b=inputs["b"])
    assert [s[0] for s in seen[:2]] == [True, False] and [s[1] for s in seen[2:]] == [False, True]
    assert (matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction) == before


def test_operands_have_the_strides_that_the_case_says():
    strided = draw("gemm_bfloat16", first("gemm_bfloat16", pad=8))
    assert strided["a"].stride() == (64, 1) and strided["b"].stride() == (32, 1)
    fp8 = draw("gemm_fp8", first("gemm_fp8", m=17, n=16))
    assert fp8["a"].stride() == (16, 1) and fp8["b"].stride() == (1, 16)  # row-major times column-major


@pytest.mark.parametrize("operator", [o for o in OPERATORS.values() if o.layouts], ids=lambda o: o.name)
def test_layouts_change_strides_and_no_value(operator):
    case = operator.cases[0]
    inputs = draw(operator.name, case)
    moved = False
    for relayout in operator.layouts.values():
        other = relayout(case, **inputs)
        assert set(other) == set(inputs)
        assert all(torch.equal(other[n], inputs[n]) for n in inputs)
        moved |= any(other[n].stride() != inputs[n].stride() for n in inputs)
    assert moved


# ---- torch.compile ---------------------------------------------------------------------------------------------------
def test_each_case_is_compiled_once_and_equal_to_eager(monkeypatch):
    graphs = []

    def backend(graph, inputs):  # the one that makes C++ takes half a minute
        graphs.append(graph)
        return graph

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: compile_with(f, dynamic=dynamic, backend=backend))
    op = Operator("axpy", "", cases=[Case.of(n=n, a=2.0) for n in range(3, 14)])
    op.implementation("torch")(lambda case, x: {"out": case["a"] * x + case.get("b", 1)})
    for case in op.cases:  # more than the eight variants of a function that the compiler allows
        x = torch.arange(case["n"], dtype=torch.float32)
        for _ in range(2):
            assert torch.equal(op.implementations["compile"](case, x=x)["out"], 2 * x + 1)
    assert len(graphs) == len(op.cases)


def test_an_own_compile_is_kept():
    op = Operator("x", "", cases=[Case.of(n=1)])
    own = op.implementation("compile")(lambda case: {"out": 1})
    op.implementation("torch")(lambda case: {"out": 2})
    assert op.implementations["compile"] is own


# ---- a user's own operator -------------------------------------------------------------------------------------------
def test_the_ten_lines_of_the_documentation_work(tmp_path):
    text = (DOCS / "adding-a-kernel.md").read_text()
    (code,) = re.findall(r"```python\n(from brakecheck\.ops import Case, Operator\n.*?)```", text, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 11
    file = tmp_path / "my_ops.py"
    file.write_text(code)
    operator = load([str(file)])["rope"]
    assert set(operator.implementations) == {"torch", "compile"}
    for case in operator.cases:
        inputs = operator.make_inputs(case, Make("cpu", 1))
        out, reference = operator.implementations["torch"](case, **inputs), operator.compute_reference(case, **inputs)
        torch.testing.assert_close(out["out"].double(), reference["out"], rtol=1e-5, atol=1e-5)
