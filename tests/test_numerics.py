"""What the worker says about results: energy, partial sums, ties, layouts; and what a comparison makes of it."""

import math

import pytest

from brakecheck.ops import Case, Operator, Tolerance
from brakecheck.ops.base import ROUNDING
from brakecheck.ops.topk import judge_choice
from brakecheck.verdict.numerics import numerics_changes
from brakecheck.worker import numerics
from brakecheck.worker.layouts import check_layouts

torch = pytest.importorskip("torch")
EPSILON = 2.0**-7  # of bfloat16


def judged(reference, out, tolerance=None):
    op = Operator("x", "", cases=[Case.of(n=1)])
    op.reference(lambda case: {"out": reference})
    if tolerance:
        op.tolerance(lambda case: tolerance)
    return numerics.check(op, op.cases[0], {}, {"out": out})


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_an_infinity_is_wrong_where_the_reference_is_finite():
    reference = normal(64, 32)
    out = reference.clone()
    out[3, 4] = math.inf
    for tolerance in (None, Tolerance(0.1, "more than one value of many")):
        found = judged(reference, out, tolerance)
        assert not found["ok"] and "1 infinities where the reference is finite" in found["why"]
    reference[3, 4] = math.inf
    assert judged(reference, out)["ok"]


# ---- energy (F21) ----------------------------------------------------------------------------------------------------
def test_an_output_of_1e_21_is_found_where_all_of_the_reference_is_small():
    small = 1e-4 * normal(64, 32)
    found = judged(small, torch.full((64, 32), 1e-21), Tolerance(2.0, "one that even allows nothing at all"))
    assert found["outputs"]["out"]["largest"] < 1e-3
    assert not found["ok"] and "the reference's energy" in found["why"]


def test_an_output_of_1e_21_is_found_where_some_rows_of_the_reference_are_small():
    reference = normal(64, 32)
    reference[40:48] *= 1e-4
    out = reference.float()
    out[40:48] = 1e-21
    found = judged(reference, out, Tolerance(1e-3, "larger than what is missing"))
    assert found["outputs"]["out"]["relative"] < 1e-3 and found["outputs"]["out"]["lost"] == 8
    assert not found["ok"] and "8 rows have no energy" in found["why"]


def test_rows_that_are_zero_or_noise_in_the_reference_are_not_missed():
    reference = normal(64, 32)
    reference[3], reference[4] = 0.0, 1e-9 * reference[4]  # the second is what is left of a cancellation
    out = reference.float()
    out[4] = 0.0
    found = judged(reference, out, Tolerance(1e-6, "float32"))
    assert found["ok"] and "lost" not in found["outputs"]["out"]


def test_parts_of_a_vector_count_as_rows():
    reference = normal(1000)
    out = reference.clone()
    out[768:] = 0.0  # the last, incomplete part
    assert judged(reference, out)["outputs"]["out"]["lost"] == 1


# ---- partial sums in 16 bits (F22) -----------------------------------------------------------------------------------
def split_k(a, b, parts):
    """a b with K in parts, every partial sum rounded to bfloat16, and added up in bfloat16."""
    pieces = [(x @ y).to(torch.bfloat16) for x, y in zip(a.chunk(parts, 1), b.chunk(parts, 0))]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


@pytest.mark.parametrize("parts", [2, 4, 8, 16])
def test_error_grows_with_the_partitions_and_tells_how_many_there_were(parts):
    a, b = normal(64, 2048), normal(2048, 256, seed=1)
    expected = Tolerance(1.0, "not what is tested", expected=ROUNDING * EPSILON)
    once = judged(a @ b, split_k(a, b, 1), expected)["outputs"]["out"]
    entry = judged(a @ b, split_k(a, b, parts), expected)["outputs"]["out"]
    assert 0.95 < once["growth"] < 1.05 and "partials" not in once
    assert entry["growth"] > 1.3 * once["growth"]
    assert abs(entry["partials"] - parts) <= max(1, parts / 4)


def test_partials_inverts_the_model():
    for parts in (1, 2, 3, 7, 32):
        assert numerics.partials(math.sqrt(1 + (parts + 1) / 2 - 1 / parts) if parts > 1 else 1.0) == parts


def test_a_grown_error_is_a_change_of_the_comparison():
    base = {"outputs": {"c": {"relative": 0.0015}}}
    candidate = {"outputs": {"c": {"relative": 0.0033, "partials": 7}}}
    (change,) = numerics_changes(base, candidate)
    assert change.what == "error.c" and "0.0015 -> 0.0033" in change.text and "7 partial sums" in change.text
    assert numerics_changes(candidate, base) == [] and numerics_changes(base, base) == []


# ---- top-k with ties (F23) -------------------------------------------------------------------------------------------
def choice(index, weight):
    return {"index": torch.tensor(index, dtype=torch.int32), "weight": torch.tensor(weight, dtype=torch.float64)}


def test_a_tie_with_equal_weights_is_an_allowed_change_and_counted():
    scores = torch.tensor([[0.5, 0.2000, 0.2001, 0.1], [0.5, 0.2, 0.1, 0.05]], dtype=torch.float64)
    reference = choice([[0, 2], [0, 1]], [[0.5, 0.2001], [0.5, 0.2]])
    tied = judge_choice(scores, reference, choice([[0, 1], [0, 1]], [[0.5, 0.2], [0.5, 0.2]]), EPSILON, EPSILON)
    assert tied["ok"] and (tied["changed_tokens"], tied["tied_tokens"], tied["wrong_tokens"]) == (1, 1, 0)
    exact = judge_choice(scores, reference, choice([[0, 1], [0, 1]], [[0.5, 0.2], [0.5, 0.2]]), EPSILON)
    assert not exact["ok"] and exact["wrong_tokens"] == 1 and "1 of 2 tokens" in exact["why"]


@pytest.mark.parametrize(
    "index, weight",
    [
        ([[0, 3]], [[0.5, 0.2001]]),  # an expert that is no tie
        ([[0, 1]], [[0.5, 0.25]]),  # a tie, but with another weight
        ([[0, 0]], [[0.5, 0.2001]]),  # chosen twice
        ([[2, 0]], [[0.2001, 0.5]]),  # the right set in the wrong order
        ([[0, 4]], [[0.5, 0.2001]]),  # no such expert
    ],
)
def test_other_changes_are_wrong(index, weight):
    scores = torch.tensor([[0.5, 0.2000, 0.2001, 0.1]], dtype=torch.float64)
    reference = choice([[0, 2]], [[0.5, 0.2001]])
    found = judge_choice(scores, reference, choice(index, weight), EPSILON, EPSILON)
    assert not found["ok"] and found["wrong_tokens"] == 1


def test_tokens_that_changed_experts_are_a_change_of_the_comparison():
    base = {"comparison": {"changed_tokens": 0, "tied_tokens": 0}}
    candidate = {"comparison": {"changed_tokens": 5, "tied_tokens": 5}}
    (change,) = numerics_changes(base, candidate)
    assert change.what == "choices" and (change.base, change.candidate) == (0, 5)


# ---- order of layouts ------------------------------------------------------------------------------------------------
def matrix_sum():
    op = Operator("sum", "", cases=[Case.of(n=16)])
    op.inputs(lambda case, make: {"x": normal(16, 16).float()})
    op.reference(lambda case, x: {"out": x.double().sum(0)})
    op.tolerance(lambda case: Tolerance(1e-5, "float32"))
    op.layout("transposed")(lambda case, x: {"x": x.mT.contiguous().mT})
    return op


def layouts_of(function):
    op, case = matrix_sum(), Case.of(n=16)

    def draw():
        return op.make_inputs(case, None)

    known = numerics.digest(function(case, **draw()))
    return check_layouts(op, case, function, draw, None, known)["transposed"]


def test_layouts_agree_in_both_orders():
    assert layouts_of(lambda case, x: {"out": x.sum(0)}) == {"ok": True, "same_in_both_orders": True}


def test_a_plan_kept_for_the_shape_alone_is_wrong_with_another_layout():
    plans = {}

    def planned(case, x):
        strides = plans.setdefault(tuple(x.shape), x.stride())
        return {"out": x.as_strided(x.shape, strides).sum(0)}

    found = layouts_of(planned)
    assert not found["ok"] and "after the case's own layout: out: relative error" in found["why"]


def test_a_result_that_depends_on_the_call_before_is_seen_although_it_is_right():
    last = []

    def other_order_of_sums(case, x):
        flipped = last[-1:] == ["transposed"]
        last.append("own" if x.is_contiguous() else "transposed")
        return {"out": x.flip(0).sum(0) * (1 + 1e-6 * flipped)}

    found = layouts_of(other_order_of_sums)
    assert found["ok"] and found["same_in_both_orders"] is False
    (change,) = numerics_changes({"layouts": {"t": {"same_in_both_orders": True}}}, {"layouts": {"t": found}})
    assert change.what == "layouts.t"


def test_a_refused_layout_is_no_fault():
    def only_contiguous(case, x):
        if not x.is_contiguous():
            raise RuntimeError("x must be contiguous")
        return {"out": x.sum(0)}

    assert layouts_of(only_contiguous) == {"ok": True, "refused": "RuntimeError: x must be contiguous"}
