"""MoE operators on the CPU (plain torch), their launch plans, the arena; and, with the network, that every kernel of
theirs compiles for the architectures we promise."""

import ctypes
import random
import re
import subprocess
import sys
import zipfile

import pytest

from brakecheck import ops
from brakecheck.kernels import jit
from brakecheck.kernels import moe_plans as plans
from brakecheck.kernels.arena import Arena
from brakecheck.model import BrakecheckError, UsageError

torch = pytest.importorskip("torch")


def arena(size):
    return Arena(size, lambda n: torch.zeros(n, dtype=torch.uint8))


# ---- route ----


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_route_chooses_and_weighs_by_definition(scoring, renormalise):
    logits = torch.randn(37, 11, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(0.3, -0.3, 11)
    index, weight, place, counts, offsets = ops.route(logits, 3, scoring, bias, renormalise, scale=2.5)
    score = logits.double().sigmoid() if scoring == "sigmoid" else logits.double().softmax(1)
    for token in range(37):
        best = sorted(range(11), key=lambda e: -(score[token, e] + bias[e].double()))[:3]
        assert index[token].tolist() == best
        wanted = score[token, best]
        wanted = 2.5 * (wanted / wanted.sum() if renormalise else wanted)
        torch.testing.assert_close(weight[token].double(), wanted, rtol=1e-5, atol=1e-7)
    copies = sorted((int(index[t, i]), t, i) for t in range(37) for i in range(3))
    assert all(int(place[t, i]) == row for row, (_, t, i) in enumerate(copies))
    assert counts.tolist() == [sum(c[0] == e for c in copies) for e in range(11)]
    assert offsets.tolist() == [0, *counts.cumsum(0).tolist()]


def test_ties_go_to_the_lower_expert_and_bad_rows_are_defined():
    logits = torch.zeros(4, 6)
    logits[1, 2] = float("nan")
    logits[2] = -float("inf")
    logits[3] = torch.tensor([-0.0, 0.0, -1.0, 0.0, 1.0, 1.0])
    index, weight, place, counts, _ = ops.route(logits, 3)
    assert index.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [4, 5, 0]]
    assert weight[1].isnan().all() and weight[2].tolist() == [0, 0, 0]
    assert torch.allclose(weight[0], torch.full((3,), 1 / 3))
    assert int(counts.sum()) == 12 and place.reshape(-1).sort().values.tolist() == list(range(12))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_gradient_of_the_weights(scoring, renormalise):
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(2)).requires_grad_()
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
    routing = ops.route(logits, 3, scoring, None, renormalise, 1.5)
    (ours,) = torch.autograd.grad((routing.weight * weight).sum(), logits)
    twin = logits.detach().double().requires_grad_()
    score = twin.sigmoid() if scoring == "sigmoid" else twin.softmax(1)
    chosen = score.gather(1, routing.expert.long())
    chosen = 1.5 * (chosen / chosen.sum(1, keepdim=True) if renormalise else chosen)
    (wanted,) = torch.autograd.grad((chosen * weight).sum(), twin)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: ops.route(x, 3, scoring, None, renormalise, 1.5).weight, twin)
    assert torch.autograd.gradgradcheck(lambda x: ops.route(x, 3, scoring, None, renormalise, 1.5).weight, twin)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_rows_whose_weights_are_zero_get_no_gradient(scoring, renormalise):
    """A row of -inf (padding), and one whose bias chooses experts that are masked: not NaN, as softmax gives."""
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(6))
    logits[1] = -float("inf")
    logits[2, :2] = -float("inf")
    logits.requires_grad_()
    routing = ops.route(logits, 2, scoring, torch.tensor([9.0, 9, 0, 0, 0, 0]), renormalise)
    assert routing.expert[2].tolist() == [0, 1] and routing.weight[1:].eq(0).all()
    (grad,) = torch.autograd.grad(routing.weight.square().sum(), logits)
    assert grad.isfinite().all() and grad[1:].eq(0).all()


@pytest.mark.parametrize("call, word", [
    (lambda: ops.route(torch.zeros(3, 4), 5), "k = 5"),
    (lambda: ops.route(torch.zeros(3, 600), 2), "600"),
    (lambda: ops.route(torch.zeros(3, 4), 2, "tanh"), "tanh"),
    (lambda: ops.route(torch.zeros(3, 4), 2, bias=torch.zeros(3)), "bias"),
    (lambda: ops.permute(torch.zeros(3, 4), torch.zeros(2, 2, dtype=torch.int32)), "place"),
    (lambda: ops.unpermute(torch.zeros(6, 4), torch.zeros(3, 2)), "place"),
    (lambda: ops.add_rows(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 5)), "rows"),
    (lambda: ops.add_rows(torch.zeros(3, 4), torch.zeros(2), torch.zeros(2, 4)), "index is torch.float32"),
    (lambda: ops.embedding_gradient(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int32), 5), "2 indices"),
    (lambda: ops.permute(torch.zeros(4), torch.zeros(4, 1, dtype=torch.int32)), "rows are"),
    (lambda: ops.unpermute(torch.zeros(5, 4), torch.zeros(2, 2, dtype=torch.int32)), "5 rows"),
    (lambda: ops.unpermute(torch.zeros(4, 4), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 3)), "weight is"),
    (lambda: ops.route(torch.zeros(3, 4, dtype=torch.int32), 2), "int32"),
    (lambda: ops.router_reduce(torch.zeros(3, 4, dtype=torch.int32)), "int32"),
    (lambda: ops.router_reduce(torch.zeros(3)), "probabilities are"),
    (lambda: ops.route(torch.zeros(3, 4), 2, bias=torch.zeros(4, device="meta")), "bias is on meta"),
    (lambda: ops.permute(torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int32, device="meta")), "place is on meta"),
    (lambda: ops.add_rows(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, device="meta")),
     "rows is on meta"),
])
def test_wrong_shapes_are_said(call, word):
    with pytest.raises(UsageError, match=word):
        call()


# ---- router_reduce ----


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tokens, experts", [(0, 8), (1, 1), (517, 61)])
def test_router_reduce_with_gradients(tokens, experts, dtype, deterministic):
    drawn = torch.Generator().manual_seed(8)
    probability = torch.randn(experts, tokens, generator=drawn).t().softmax(1).to(dtype).requires_grad_()
    load = ops.router_reduce(probability, deterministic)
    assert load.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(load.double(), probability.double().sum(0), rtol=1e-5, atol=1e-6)
    grad = torch.randn(experts, generator=drawn).to(load.dtype)
    (got,) = torch.autograd.grad(load, probability, grad)
    assert got.dtype == dtype and torch.equal(got, grad.to(dtype).expand(tokens, experts))


def test_second_gradients_of_router_reduce():
    probability = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops.router_reduce, probability)
    assert torch.autograd.gradgradcheck(lambda p: ops.router_reduce(p * p), probability)


def test_the_operators_are_not_hidden_by_the_catalogues_modules():
    """A module of ops/ with the name of an operator would take its place once the catalogue was read."""
    ops.catalogue()
    assert all(callable(getattr(ops, name)) for names in ops._USABLE.values() for name in names)


# ---- permute, unpermute, add_rows ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_permute_and_back(dtype):
    x = torch.randn(7, 5, dtype=dtype)
    routing = ops.route(torch.randn(7, 4), 2)
    y = ops.permute(x, routing.place)
    for t in range(7):
        for i in range(2):
            assert torch.equal(y[routing.place[t, i]], x[t])
    back = ops.unpermute(y, routing.place, routing.weight)
    torch.testing.assert_close(back, x, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    torch.testing.assert_close(ops.unpermute(y, routing.place), (2 * x.double()).to(dtype))


def test_gradients_of_permute_and_unpermute():
    place = ops.route(torch.randn(4, 3), 2).place
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.permute(x, place), x)
    y = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y, w: ops.unpermute(y, place, w), (y, weight))
    assert torch.autograd.gradgradcheck(lambda x: ops.permute(x, place), x)
    assert torch.autograd.gradgradcheck(lambda y, w: ops.unpermute(y, place, w), (y, weight))


def test_gradients_of_rows_that_are_not_contiguous():
    """The kernel writes rows one after the other, whatever the strides of what it reads."""
    place = ops.route(torch.randn(4, 3), 2).place
    y, weight = torch.randn(16, 8).t().bfloat16(), torch.rand(2, 4).t()
    backward = torch.ops.brakecheck.unpermute_backward
    got, wanted = (backward(torch.ones(4, 16).bfloat16(), a, place, w)
                   for a, w in ((y, weight), (y.contiguous(), weight.contiguous())))
    assert all(g.is_contiguous() and torch.equal(g, w) for g, w in zip(got, wanted))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = backward(torch.ones(4, 16).bfloat16(), mode.from_tensor(y), mode.from_tensor(place),
                        mode.from_tensor(weight))
    assert [f.stride() for f in fake] == [g.stride() for g in got]


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_added_rows(deterministic):
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    out = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 3, 3, 1, 0])
    assert torch.autograd.gradcheck(lambda r: ops.embedding_gradient(r, index, 4, deterministic), rows)
    assert torch.autograd.gradcheck(lambda o, r: ops.add_rows(o * 1, index, r, deterministic), (out, rows))
    with torch.no_grad():
        assert not ops.add_rows(out.clone(), index, rows).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_compiles_into_one_graph(dtype):
    def layer(x, logits, weight, table, index):
        routing = ops.route(logits, 2, "sigmoid")
        out = ops.unpermute(ops.permute(x, routing.place) * weight, routing.place, routing.weight)
        out = out * ops.router_reduce(logits.softmax(1)).square().sum().to(out.dtype)
        return out, ops.add_rows(table * 1, index, out), ops.embedding_gradient(out, index, 3, True)

    draw = torch.Generator().manual_seed(7)
    x, logits, weight, table = (torch.randn(*s, generator=draw).to(dtype) for s in ((6, 8), (6, 4), (8,), (3, 8)))
    index, results = torch.tensor([0, 2, 2, 1, 0, 2]), []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (x, logits, weight, table)]
        out = function(*leaves, index)
        results.append([*out, *torch.autograd.grad(sum(o.square().sum() for o in out), leaves)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)


def test_meta_tensors_and_autocast():
    x = torch.empty(6, 8, device="meta", requires_grad=True)
    routing = ops.route(torch.empty(6, 4, device="meta"), 2)
    out = ops.unpermute(ops.permute(x, routing.place), routing.place, routing.weight)
    assert torch.autograd.grad(out.sum(), x)[0].shape == (6, 8) and routing.offsets.shape == (5,)
    load = ops.router_reduce(x)
    assert load.shape == (8,) and torch.autograd.grad(load.sum(), x)[0].shape == (6, 8)
    assert ops.embedding_gradient(x, torch.empty(6, dtype=torch.int32, device="meta"), 9).shape == (9, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = torch.randn(6, 8) @ torch.randn(8, 4)
        routing = ops.route(hidden, 2)
        assert (hidden.dtype, routing.weight.dtype) == (torch.bfloat16, torch.float32)
        assert ops.router_reduce(hidden).dtype == torch.float32
        assert ops.unpermute(ops.permute(hidden, routing.place), routing.place, routing.weight).dtype == torch.bfloat16


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch):
    from contextlib import contextmanager

    from brakecheck.kernels import moe

    current = []

    @contextmanager
    def device(chosen):
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    x = torch.zeros(1, device="meta")
    assert moe._on_device(lambda x, k: (current[:], k))(x, 3) == ([x.device], 3) and not current


@pytest.mark.parametrize("deterministic", [False, True])
def test_add_rows(deterministic):
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(4))
    index = torch.tensor([1, 1, 0, 4, 1, 0, 1, 4, 1], dtype=torch.int32)
    out = torch.ones(6, 4)
    assert ops.add_rows(out, index, rows, deterministic) is out
    wanted = torch.ones(6, 4, dtype=torch.float64)
    for i, row in zip(index, rows):
        wanted[i] += row.double()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)
    assert ops.embedding_gradient(rows.bfloat16(), index, 6, deterministic)[5].tolist() == [0, 0, 0, 0]


def test_empty_tensors():
    routing = ops.route(torch.zeros(0, 8), 2)
    assert routing.expert.shape == (0, 2) and routing.counts.tolist() == [0] * 8
    assert ops.permute(torch.zeros(0, 16), routing.place).shape == (0, 16)
    assert ops.unpermute(torch.zeros(0, 16), routing.place).shape == (0, 16)
    none = torch.zeros(0, dtype=torch.int32)
    assert ops.add_rows(torch.ones(3, 8), none, torch.zeros(0, 8)).tolist() == torch.ones(3, 8).tolist()


def test_gradients_of_empty_tensors():
    logits, y = torch.zeros(0, 8, requires_grad=True), torch.zeros(0, 16, requires_grad=True)
    routing = ops.route(logits, 2)
    out = ops.unpermute(ops.permute(y, routing.place), routing.place, routing.weight)
    assert [g.shape for g in torch.autograd.grad(out.sum(), (logits, y))] == [(0, 8), (0, 16)]
    rows = torch.zeros(0, 8, requires_grad=True)
    summed = ops.embedding_gradient(rows, torch.zeros(0, dtype=torch.int32), 3)
    assert torch.autograd.grad(summed.sum(), rows)[0].shape == (0, 8)


def test_the_operators_pass_torchs_own_check():
    place = ops.route(torch.randn(4, 3), 2).place
    y = torch.randn(8, 3, requires_grad=True)
    calls = {
        "route": (torch.randn(4, 3, requires_grad=True), None, 2, False, True, 1.0),
        "router_reduce": (torch.randn(4, 3, requires_grad=True), False),
        "permute": (torch.randn(4, 3, requires_grad=True), place),
        "unpermute": (y, place, torch.rand(4, 2, requires_grad=True)),
        "add_rows_": (torch.zeros(3, 4), torch.tensor([0, 2]), torch.ones(2, 4), False),
    }
    for name, arguments in calls.items():
        operator = getattr(torch.ops.brakecheck, name)
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    rows = torch.ones(2, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.brakecheck.embedding_gradient, (rows, torch.tensor([0, 2]), 3, False))


# ---- plans ----


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 500, 4097, 65536])
@pytest.mark.parametrize("experts, k", [(1, 1), (8, 2), (255, 8), (256, 16), (509, 10), (512, 16)])
@pytest.mark.parametrize("sms", [66, 108, 132, 160])
def test_router_plan_covers_every_token_within_limits(tokens, experts, k, sms):
    plan = plans.router_plan(tokens, experts, k, "float32", False, sms)
    assert (plan.grid - 1) * plan.each < tokens <= plan.grid * plan.each
    assert plan.grid <= min(sms, plans.MOST_BLOCKS) and plan.each <= 4095
    lanes, held = map(int, re.findall(r"\d+", plan.entry)[1:])
    assert lanes * held >= experts
    if sms >= 108:  # a block of an A100, after rounding up to a power of two
        assert (1 << (plan.shared - 1).bit_length()) + plans.STATIC_SHARED <= 164 * 1024


@pytest.mark.parametrize("experts, k", [(1, 1), (8, 2), (17, 16), (60, 6), (256, 8), (509, 10), (512, 16)])
def test_plan_of_one_token_has_as_many_segments_as_it_needs(experts, k):
    _, threads, shift = plans.router_one_plan(experts, k, "float32")
    assert experts <= threads <= 512 and threads % 32 == 0
    assert 0 <= shift <= 5 and k <= plans.blocks(experts, 1 << shift) <= 32


@pytest.mark.parametrize("width", [8, 64, 4096, 7168, 16384, 12296])
def test_parts_of_a_row(width):
    part = plans.part_of(width)
    assert part % 8 == 0 and part <= plans.MOST_PART
    assert plans.blocks(width, part) == plans.blocks(width, plans.MOST_PART)
    columns = plans.scatter_columns(width)
    assert columns & (columns - 1) == 0 and 8 <= columns <= plans.SCATTER_THREADS


@pytest.mark.parametrize("tokens", [1, 32, 257, 8192, 65536, 1 << 24])
@pytest.mark.parametrize("experts", [1, 8, 33, 256, 8192])
def test_blocks_of_router_reduce(tokens, experts):
    across, down = plans.reduce_grid(tokens, experts)
    assert 1 <= across <= plans.blocks(tokens, plans.REDUCE_THREADS) and 1 <= down <= plans.blocks(experts, 32)
    assert across * down <= 1024 and (down == 1 or across * down <= 256)


@pytest.mark.parametrize("form", [form for form in plans.SCATTER_FORMS if form != "sorted"])
@pytest.mark.parametrize("dtype", plans.ELEMENTS)
@pytest.mark.parametrize("n, width, rows", [(1, 8, 1), (33, 72, 9), (16384, 1024, 50257), (500000, 128, 64),
                                            (65536, 1024, 64), (7, 4104, 3)])
def test_plans_of_added_rows_cover_every_row_once(form, dtype, n, width, rows):
    plan, size = plans.scatter_plan(form, n, width, rows, dtype, 132), 4 if dtype == "float32" else 2
    defines = dict(d.split("=") for d in plan.defines)
    if form.startswith("bulk"):  # its blocks walk: any number of them covers all batches
        assert plan.last * size <= plans.SCATTER_PART and plan.last * size % 16 == 0
        assert plan.grid[1] * plan.last >= width > (plan.grid[1] - 1) * plan.last
        assert 1 <= plan.grid[0] <= plans.blocks(n, plans.SCATTER_BATCH) and plan.shared <= 48 << 10
        return
    each = 4 * int(defines.get("WORDS", 4)) // size
    groups = plan.threads // plan.last
    assert plan.last * groups == plan.threads and groups <= plan.threads // 8
    assert plan.grid[0] * groups * int(defines["RUN"]) >= n > (plan.grid[0] - 1) * groups * int(defines["RUN"])
    assert plan.grid[1] * plan.last * each >= width > (plan.grid[1] - 1) * plan.last * each


# ---- arena ----


def test_arena_repeats_its_addresses():
    a = arena(1 << 16)
    first = [a.allocate(n) for n in (1, 256, 257, 1000)]
    assert first == [0, 256, 512, 1024]
    a.reset()
    assert [a.allocate(n) for n in (1, 256, 257, 1000)] == first and a.peak == 2048


def test_arena_takes_blocks_back_in_any_order():
    a = arena(1 << 16)
    one, two, three = (a.allocate(256) for _ in range(3))
    a.free(two)
    assert a.top == 768  # `three` still lies above
    a.free(three)
    assert a.top == 256  # and gives `two` back with itself
    assert a.allocate(256) == two
    a.free(two)
    a.free(one)
    assert a.top == 0


def test_arena_keeps_what_is_in_use_apart():
    """Random requests and returns against a plain record of who holds which bytes."""
    generator, a, held, highest = random.Random(5), arena(1 << 23), {}, 0
    for _ in range(3000):
        if held and generator.random() < 0.5:
            start = generator.choice(list(held))
            a.free(start)
            del held[start]
        else:
            size = generator.randrange(0, 3000)
            start = a.allocate(size)
            end = start + max(size, 1)
            assert start % 256 == 0 and all(end <= s or start >= e for s, e in held.items())
            held[start] = end
            highest = max(highest, a.top)
        assert a.top == max((-(-e // 256) * 256 for e in held.values()), default=0) and a.peak == highest
    with pytest.raises(UsageError):
        a.free(max(held) + 1)
    for start in list(held):
        a.free(start)
    assert a.top == 0


def test_arena_errors():
    a = arena(1024)
    held = a.allocate(700)
    with pytest.raises(BrakecheckError, match="256 of 1024 are free"):
        a.allocate(257)
    a.free(held)
    for wrong in (held, 5):
        with pytest.raises(UsageError):
            a.free(wrong)
    below, above = a.allocate(256), a.allocate(256)
    a.free(below)
    with pytest.raises(UsageError):
        a.free(below)
    a.free(above)
    for size in (0, 100, -256):
        with pytest.raises(UsageError):
            arena(size)


def test_arena_tensors_do_not_overlap_and_slots_come_back():
    a = arena(1 << 16)
    x, y = a.tensor((3, 5), torch.float32), a.tensor((7,), torch.bfloat16)
    x.fill_(1.0)
    y.fill_(2.0)
    assert float(x.sum()) == 15 and float(y.sum()) == 14 and y.data_ptr() - x.data_ptr() == 256
    slots = a.slots(1000, 3)
    taken = [slots.allocate() for _ in range(3)]
    assert len(set(taken)) == 3 and all(t % 256 == 0 for t in taken)
    with pytest.raises(IndexError):
        slots.allocate()
    slots.free(taken[1])
    assert slots.allocate() == taken[1]


# ---- compiling ----

ROUTERS = sorted({plans.router_plan(tokens, experts, k, dtype, bias, 132).entry
                  for tokens in (2, 65, 65536) for experts in (64, 128, 256, 512) for k in (8, 16)
                  for dtype in plans.CTYPES for bias in (False, True)})
KERNELS = [
    *(("router.cu", ROUTERS[i::4], (), 80) for i in range(4)),
    ("router_one.cu", ("router_one<float>", "router_one<unsigned short>"), (), 80),
    ("moe_permute.cu", ("moe_permute",), (), 80), ("moe_permute_bulk.cu", ("moe_permute_bulk",), (), 90),
    ("moe_unpermute.cu", (*map(plans.unpermute_entry, (1, 2, 3, 4, 6, 8)), "moe_unpermute_backward<1>",
                          "moe_unpermute_backward<8>"), (), 80),
    *{(plan.source, (plan.entry,), plan.defines, 90 if form.startswith("bulk") else 80): None
      for form in plans.SCATTER_FORMS if form != "sorted" for dtype in plans.ELEMENTS
      for plan in (plans.scatter_plan(form, n, 4096, rows, dtype, 132) for n, rows in ((1, 1), (1 << 20, 1),
                                                                                       (1 << 20, 999)))},
    *(("scatter_sorted.cu", ("scatter_sorted", "scatter_pieces"), plans.scatter_defines(dtype), 80)
      for dtype in plans.ELEMENTS),
    ("router_reduce.cu", ("router_reduce",), ("INLINE_PTX=0",), 80),
    ("accumulate_private.cu", ("accumulate_private",), (), 80),
    ("micro/chain.cu", ("small", "small_dependent"), (), 80), ("micro/chunk_sums.cu", ("chunk_sums",), (), 80),
]


def test_every_form_of_the_router_is_compiled():
    assert len(ROUTERS) == 24  # two types, with bias or not, 8 or 16 lanes, 8, 16 or 32 scores a lane


@pytest.fixture(scope="session")
def nvrtc(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvrtc")
    done = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder),
                           "nvidia-cuda-nvrtc==13.0.*"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"NVRTC's wheel cannot be had: {done.stderr.strip().splitlines()[-1]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    for builtins in folder.rglob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(next(folder.rglob("libnvrtc.so.13"))))


@pytest.mark.network
@pytest.mark.parametrize("source, entries, defines, least", KERNELS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_kernels_compile(nvrtc, source, entries, defines, least, arch):
    if int(arch[3:5]) < least:
        pytest.skip(f"{source} is for sm_{least} on")
    image, names = jit.compile_cubin(source, entries, arch, defines, nvrtc)
    assert image[:4] == b"\x7fELF" and len(names) == len(entries)
    assert all(name.encode() in image for name in names)
