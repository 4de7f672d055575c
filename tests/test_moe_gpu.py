"""The router's kernels against plain torch in float64, on a GPU."""

import pytest

from brakecheck import ops
from brakecheck.kernels import moe_plans as plans
from brakecheck.ops.make import Make
from brakecheck.ops.scatter_rows import draw_index

torch = pytest.importorskip("torch")
moe = pytest.importorskip("brakecheck.kernels.moe")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPES = [(1, 256, 8), (1, 60, 6), (1, 509, 16), (2, 8, 2), (17, 33, 4), (65, 256, 8), (777, 255, 16), (517, 509, 10),
          (8192, 256, 8), (20000, 160, 6), (300, 1, 1)]
SCORINGS = [("softmax", False, True), ("softmax", False, False), ("sigmoid", True, True), ("softmax", True, True)]


def judge(x, k, scoring="softmax", bias=None, renormalise=True):
    """Exact choice without a bias; with one, scores closer than 1e-6 may swap. All else follows from the choice; shares
    of what float32 cannot hold (experts chosen by their bias alone) may be anything from 0 to the scale. Twice: the
    state is used again."""
    wanted = plans.route(x.double(), k, scoring, bias, renormalise, 2.5)["index"].long()
    for _ in range(2):
        index, weight, place, counts, offsets = ops.route(x, k, scoring, bias, renormalise, 2.5)
        apart = index != wanted
        if bias is not None:
            by = (x.double().sigmoid() if scoring == "sigmoid" else x.double().softmax(1)) + bias.double()
            apart &= (by.gather(1, index.long()) - by.gather(1, wanted)).abs() > 1e-6
        assert not bool(apart.any())
        exact = plans.route(x.double(), k, scoring, bias, renormalise, 2.5, index.long())
        faint = plans.route(x.double(), k, scoring, bias, False, 1.0, index.long())["weight"].sum(1) < 1e-30
        torch.testing.assert_close(weight[~faint].double(), exact["weight"][~faint], rtol=1e-4, atol=1e-7,
                                   equal_nan=True)
        assert bool(((weight[faint] >= 0) & (weight[faint] <= 2.5)).all())
        assert torch.equal(counts, exact["counts"]) and torch.equal(offsets, exact["offsets"])
        assert torch.equal(place, exact["place"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, experts, k", SHAPES)
@pytest.mark.parametrize("scoring, biased, renormalise", SCORINGS)
def test_router(tokens, experts, k, scoring, biased, renormalise, dtype):
    torch.manual_seed(1)
    x = torch.randn(tokens, experts, device="cuda").to(dtype)
    bias = torch.randn(experts, device="cuda") * (0.1 if scoring == "sigmoid" else 0.001) if biased else None
    judge(x, k, scoring, bias, renormalise)


FILLS = {
    "equal": torch.zeros_like, "few values": lambda x: (x * 2).round() / 2, "around 1e4": lambda x: x * 50 + 1e4,
    "denormal": lambda x: x * 1e-40, "large": lambda x: x.clamp(-3.3, 3.3) * 1e38,
    "signed zeros": lambda x: torch.where(x > 0, 0.0, -0.0),
    "masked": lambda x: x.masked_fill(x < 1.9, -float("inf")),
    "-inf rows": lambda x: x.masked_fill((torch.arange(len(x), device="cuda") % 3 == 0)[:, None], -float("inf")),
    "nan": lambda x: x.masked_fill(x > 2.9, float("nan")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, experts, k", [(1, 256, 8), (100, 100, 5), (1000, 300, 12), (4000, 256, 8)])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("scoring, biased, renormalise", SCORINGS)
def test_router_where_scores_are_special(tokens, experts, k, fill, scoring, biased, renormalise, dtype):
    torch.manual_seed(2)
    x = FILLS[fill](torch.randn(tokens, experts, device="cuda")).to(dtype)
    judge(x, k, scoring, torch.randn(experts, device="cuda") * 0.1 if biased else None, renormalise)


def test_router_in_a_graph_beside_other_shapes():
    """Launches of several shapes that share states, in an order of their own."""
    torch.manual_seed(3)
    x = [torch.randn(t, e, device="cuda") for t, e in ((4000, 256), (300, 64), (70, 512), (9000, 8))]
    kept = [ops.route(v, 4) for v in x]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [ops.route(v, 4) for _ in range(20) for v in x]
    for _ in range(3):
        for out in captured:
            out.place.fill_(-1)
        graph.replay()
        for i, out in enumerate(captured):
            assert all(torch.equal(a, b) for a, b in zip(out, kept[i % len(x)]))


# ---- permute, unpermute, rows added by index -------------------------------------------------------------------------


def draw(*shape, strided, dtype=torch.bfloat16):
    """Normal values; strided: every second column of a larger tensor, from the second on, stored by columns."""
    if not strided:
        return torch.randn(*shape, device="cuda").to(dtype)
    return torch.randn(2 * shape[1] + 1, shape[0], device="cuda").to(dtype).t()[:, 1::2]


def close(got, wanted, bound=2.0**-8):
    assert got.shape == wanted.shape and bool(got.isfinite().all())
    assert float((got.double() - wanted).norm()) <= bound * float(wanted.norm()) + 1e-30


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("tokens, experts, k, width", [(0, 8, 2, 64), (1, 8, 1, 8), (33, 8, 3, 77), (130, 60, 6, 520),
                                                       (65, 16, 8, 7168), (37, 16, 16, 4104)])
def test_permute_and_unpermute_with_gradients(tokens, experts, k, width, strided):
    torch.manual_seed(4)
    place = ops.route(torch.randn(tokens, experts, device="cuda"), k).place
    if strided:
        place = place.t().contiguous().t()
    x, y = draw(tokens, width, strided=strided), draw(tokens * k, width, strided=strided)
    assert torch.equal(ops.permute(x, place), plans.permute_plain(x, place))
    weight, grad = draw(tokens, k, strided=strided, dtype=torch.float32), draw(tokens, width, strided=strided)
    leaves = [t.detach().requires_grad_() for t in (y, weight)]
    wide = [t.detach().double().requires_grad_() for t in (y, weight)]
    out, wanted = ops.unpermute(leaves[0], place, leaves[1]), plans.unpermute_plain(wide[0], place, wide[1])
    close(out.detach(), wanted.detach())
    for got, right in zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(wanted, wide, grad.double())):
        close(got, right)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("n, rows, width", [(0, 5, 64), (1, 1, 8), (301, 97, 77), (1000, 7, 520), (40000, 500, 136)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_rows_added_by_index_with_gradients(n, rows, width, deterministic, index_type, strided):
    torch.manual_seed(5)
    values, index = draw(n, width, strided=strided), torch.randint(rows, (n,), device="cuda", dtype=index_type)
    wanted = torch.zeros(rows, width, device="cuda", dtype=torch.float64).index_add_(0, index, values.double())
    adds = max(n / rows, 1)
    bound = 2.0**-8 if deterministic else 2.0**-7 * adds**0.5
    values.requires_grad_()
    out = ops.embedding_gradient(values, index, rows, deterministic)
    close(out.detach(), wanted, bound)
    if deterministic:
        assert torch.equal(out, ops.embedding_gradient(values, index, rows, True))
    grad = torch.randn(rows, width, device="cuda").bfloat16()
    assert torch.equal(torch.autograd.grad(out, values, grad)[0], grad[index.long()])


FORMS = [*plans.SCATTER_FORMS, "ours"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", plans.ELEMENTS)
@pytest.mark.parametrize("indices", ["uniform", "zipf", "one"])
@pytest.mark.parametrize("n, rows, width", [(1, 1, 8), (33, 3, 8), (301, 97, 72), (1000, 7, 520), (2111, 50, 4104),
                                            (40000, 3, 136)])
def test_every_form_of_adding_rows(form, dtype, indices, n, rows, width):
    """To rows that are not zero before. Each addition to memory rounds once more: sqrt(additions) roundings."""
    if form.startswith("bulk") and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk reductions are for compute capability 9.0 on")
    make = Make("cuda", 6)
    index, g = draw_index(make, n, rows, indices), make.normal(n, width, dtype=dtype)
    start = make.normal(rows, width, dtype=dtype)
    out, wanted = start.clone(), start.double().index_add_(0, index.long(), g.double())
    ops.add_rows(out, index, g) if form == "ours" else moe._scatter(form, out, index, g)
    most = float(torch.bincount(index.long()).max()) + 1
    close(out, wanted, torch.finfo(g.dtype).eps * most**0.5)


@pytest.mark.parametrize("form", [form for form in plans.SCATTER_FORMS if form != "sorted"])
@pytest.mark.parametrize("dtype", plans.ELEMENTS)
def test_rows_outside_the_table_are_skipped(form, dtype):
    if form.startswith("bulk") and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk reductions are for compute capability 9.0 on")
    make = Make("cuda", 7)
    g, index = make.normal(100, 264, dtype=dtype), make.integers(100, low=-3, high=13)
    around = torch.zeros(14, 264, device="cuda", dtype=g.dtype)
    moe._scatter(form, around[2:12], index, g)
    inside = (index >= 0) & (index < 10)
    wanted = torch.zeros(10, 264, device="cuda", dtype=torch.float64).index_add_(0, index[inside], g[inside].double())
    close(around[2:12], wanted, 2.0**-5)
    assert not around[:2].any() and not around[12:].any()


@pytest.mark.parametrize("tokens, experts", [(0, 8), (1, 1), (33, 8), (517, 61), (4097, 257), (100, 8192), (100, 8193)])
@pytest.mark.parametrize("strided", [False, True])
def test_router_reduce_with_gradients(tokens, experts, strided):
    torch.manual_seed(9)
    probability = draw(tokens, experts, strided=strided, dtype=torch.float32).softmax(1).requires_grad_()
    load = ops.router_reduce(probability)
    close(load.detach(), probability.detach().double().sum(0), 1e-5)
    assert torch.equal(ops.router_reduce(probability, True), probability.sum(0))
    grad = torch.randn(experts, device="cuda")
    assert torch.equal(torch.autograd.grad(load, probability, grad)[0], grad.expand(tokens, experts))
