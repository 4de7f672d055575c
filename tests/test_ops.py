"""The operator catalogue on the CPU: references, costs, launch plans against the kernels' own signatures."""

import re
from pathlib import Path

import pytest

from brakecheck.cli import main
from brakecheck.ops import Case, Scalar, TensorMap, catalogue, catalogue_sources
from brakecheck.ops.base import CLAIMS
from brakecheck.ops.make import Make

torch = pytest.importorskip("torch")

OPERATORS = catalogue()
MOST_SHARED = 227 * 1024  # bytes a block on sm_90 and sm_100
C_TYPES = {
    "float": torch.float32, "int": torch.int32, "bf16": torch.bfloat16, "signed char": torch.int8,
    "unsigned char": torch.uint8, "unsigned short": torch.bfloat16, "u64": torch.int64,
}
C_SCALARS = {"int": "i32", "long long": "i64", "float": "f32"}


def c_type(name, kernel):
    """The dtype of a C type; T is what the kernel's ELEMENT says, bf16 where it says nothing."""
    element = next((d.split("=")[1] for d in kernel.defines if d.startswith("ELEMENT=")), "bf16")
    elements = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return elements[element] if name == "T" else C_TYPES[name]


def small(operator):
    """Cases that a CPU does in milliseconds."""
    if operator.compute_cost is None:  # nothing moves: what the case names is what it takes
        return [c for c in operator.cases if c.get("bytes", 0) < 2e6 and "rounds" not in c.params]
    return [c for c in operator.cases if operator.compute_cost(c).bytes < 2e6 and operator.compute_cost(c).flops < 1e8]


def results(operator, case, inputs, name="torch"):
    """The outputs of an implementation, or what it gives to be judged where it writes none."""
    function = operator.implementations[name]
    try:
        return getattr(function, "checked", function)(case, **inputs)
    finally:
        getattr(function, "close", lambda: None)()


SMALL = [pytest.param(o, c, id=f"{o.name}-{c.name}") for o in OPERATORS.values() for c in small(o)]
PLANS = [pytest.param(o, c, k, id=f"{o.name}-{k.name}-{c.name}")
         for o in OPERATORS.values() for c in small(o) for k in o.kernels if k.supports(c)]


def draw(operator, case, seed=7):
    return operator.make_inputs(case, Make("cpu", seed))


KEPT = {}


def drawn(operator, case):
    """Inputs and reference of a case, made once for all tests (which do not change them)."""
    key = (operator.name, case.name)
    if key not in KEPT:
        inputs = draw(operator, case)
        KEPT[key] = inputs, operator.compute_reference(case, **inputs)
    return KEPT[key]


def judge(operator, case, inputs, out, reference=None):
    """(ok, error) as the kernel check judges: tie-aware where the operator says how, else by norm."""
    reference = reference or operator.compute_reference(case, **inputs)
    if operator.compare:
        verdict = operator.compare(case, inputs, reference, out)
        return verdict["ok"], verdict["error"]
    errors = [float((out[n].double() - reference[n].double()).norm() / reference[n].double().norm().clamp_min(1e-300))
              for n in reference if n in out]
    assert errors, "nothing to compare"
    return max(errors) <= operator.choose_tolerance(case).relative, max(errors)


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors if hasattr(t, "numel"))


def same(a, b):
    return torch.equal(a, b) if hasattr(a, "numel") else a == b


def test_every_operator_has_small_odd_and_real_cases():
    for operator in OPERATORS.values():
        assert len(small(operator)) >= 2, operator.name
        if operator.compute_cost and operator.name not in ("spin_lock", "launch_chain"):
            assert max(operator.compute_cost(c).bytes for c in operator.cases) > 1e6
        odd = [c for c in operator.cases if any(isinstance(v, int) and v % 2 and v > 1 for v in c.params.values())]
        assert len(operator.cases) <= 13, operator.name
        assert odd, f"{operator.name} has no odd-sized case"
        assert "torch" in operator.implementations
        assert ("compile" in operator.implementations) == (operator.timer == "device"), operator.name


@pytest.mark.parametrize("operator, case", SMALL)
def test_torch_agrees_with_the_reference(operator, case):
    inputs, reference = drawn(operator, case)
    ok, error = judge(operator, case, inputs, results(operator, case, inputs), reference)
    assert ok, f"relative error {error}"


OURS = [(operator, case, name) for operator in OPERATORS.values() for case in small(operator)
        for name in operator.implementations if name.startswith("ours")]


def test_operators_to_use_are_implementations_too():
    assert {operator.name for operator, _, _ in OURS} >= {
        "softmax", "softmax_backward", "layernorm", "layernorm_backward", "rmsnorm", "rmsnorm_backward", "router",
        "router_reduce", "moe_permute", "moe_unpermute", "scatter_rows"}


@pytest.mark.parametrize("operator, case, name", OURS)
def test_ours_agrees_with_the_reference(operator, case, name):
    inputs, reference = drawn(operator, case)
    ok, error = judge(operator, case, inputs, operator.implementations[name](case, **inputs), reference)
    assert ok, f"relative error {error}"


@pytest.mark.parametrize("operator, case", SMALL)
def test_a_wrong_element_is_noticed(operator, case):
    inputs, reference = drawn(operator, case)
    whole = torch.contiguous_format  # or reshape would copy
    out = {n: t.clone(memory_format=whole) for n, t in results(operator, case, inputs).items()}
    first = next(iter(out.values())).reshape(-1)
    enough = 2 * operator.choose_tolerance(case).relative * float(first.double().norm())
    first[0] = 2 * abs(first[0]) + 3 + enough
    assert not judge(operator, case, inputs, out, reference)[0]


@pytest.mark.parametrize("operator, case", [p for p in SMALL if p.values[0].compute_cost])
def test_cost_counts_each_byte_once(operator, case):
    inputs, reference = drawn(operator, case)
    cost = operator.compute_cost(case)
    outputs = operator.kernels[0].outputs(case, **inputs) if operator.kernels else results(operator, case, inputs)
    written = size(outputs[n] for n in reference)
    assert written <= cost.bytes <= written + size(inputs.values())
    assert cost.flops >= 0
    assert operator.choose_tolerance(case).why


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda o: o.name)
def test_inputs_depend_on_the_seed_alone(operator):
    case = small(operator)[0]
    one, again, other = draw(operator, case, 1), draw(operator, case, 1), draw(operator, case, 2)
    assert all(same(one[n], again[n]) for n in one)
    assert any(not same(one[n], other[n]) for n in one)


# ---- launch plans ----


def parameters(source, entry):
    """The C types of a kernel's parameters, from its text."""
    text = re.sub(r"//[^\n]*", "", source.read_text())
    name = entry.split("<")[0]
    found = re.search(r"__launch_bounds__\([^)]*\)\s*" + name + r"\s*\(([^)]*)\)", text)
    assert found, f"no kernel {name} in {source}"
    types = []
    for parameter in found[1].split(","):
        words = re.sub(r"const|__restrict__|RESTRICT|__grid_constant__", " ", parameter).replace("*", " * ").split()
        # A parameter of type T is of the instantiation's first argument, router<float, 0, 8, 32>, where that is a type.
        first = entry.partition("<")[2].split(",")[0].rstrip(">")
        types.append(" ".join(first if w == "T" and first and not first.isdigit() else w for w in words[:-1]))
    return types


@pytest.mark.parametrize("operator, case, kernel", PLANS)
def test_launch_plan_fits_the_kernel(operator, case, kernel):
    inputs, reference = drawn(operator, case)
    outputs = kernel.outputs(case, **inputs)
    assert set(kernel.zeroed) <= set(outputs)
    assert set(reference) <= set(outputs)
    entries = {e.expression: e for e in kernel.entries}
    used = set()
    for launch in kernel.launches(case, **inputs, **outputs):
        entry = entries[launch.entry or kernel.entry]
        used.add(entry.expression)
        assert launch.block[0] * launch.block[1] * launch.block[2] == entry.threads <= 1024
        assert all(g >= 1 for g in launch.grid)
        assert launch.grid[0] < 2**31 and launch.grid[1] < 2**16 and launch.grid[2] < 2**16
        assert 0 <= launch.dynamic_shared <= MOST_SHARED
        expected = parameters(kernel.path, entry.expression)
        assert len(expected) == len(launch.arguments), expected
        for ctype, argument in zip(expected, launch.arguments):
            if isinstance(argument, TensorMap):
                assert ctype == "TensorMap" and argument.tensor.is_contiguous()
            elif isinstance(argument, Scalar):
                assert C_SCALARS[ctype] == argument.ctype
            else:
                assert ctype.endswith(" *") and argument.is_contiguous()
                assert argument.dtype == c_type(ctype[:-2], kernel)
    assert used == set(entries), "an entry is compiled and never launched"


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda o: o.name)
def test_real_sizes_stay_within_launch_limits(operator):
    some = small(operator)[0]
    inputs = draw(operator, some)
    for case in operator.cases:
        for kernel in (k for k in operator.kernels if k.supports(case)):
            # A plan reads the case's numbers and only passes its tensors on, so small tensors stand in for large ones.
            for launch in kernel.launches(case, **inputs, **kernel.outputs(some, **inputs)):
                assert launch.grid[0] < 2**31 and launch.grid[1] < 2**16 and launch.grid[2] < 2**16
                assert launch.dynamic_shared <= MOST_SHARED
                assert all(-(2**31) <= a.value < 2**31 for a in launch.arguments
                           if isinstance(a, Scalar) and a.ctype == "i32")


# ---- sources ----


def test_sources_cover_every_kernel_once():
    sources = catalogue_sources()
    keys = [(s.path, s.defines) for s in sources]
    assert len(keys) == len(set(keys)) and len(sources) >= 16
    for operator in OPERATORS.values():
        for kernel in operator.kernels:
            assert kernel.path.is_file()
            source = next(s for s in sources if s.path == str(kernel.path) and s.defines == kernel.defines)
            assert set(kernel.entries) <= set(source.entries)
            assert source.operator == operator.name
    attention = [s for s in sources if s.operator == "attention"]
    assert len(attention) == 1 and len(attention[0].entries) == 4
    wgmma = next(s for s in sources if s.path.endswith("wgmma.cu"))
    assert wgmma.archs == ("sm_90a",) and wgmma.min_arch == 90


def test_defines_are_read_by_their_source():
    for source in catalogue_sources():
        text = Path(source.path).read_text()
        for define in source.defines:
            assert re.search(rf"#ifndef {define.split('=')[0]}\b", text), (source.path, define)


def test_every_file_in_the_folder_is_registered():
    registered = {k.path for o in OPERATORS.values() for k in o.kernels}
    assert registered == set(next(iter(registered)).parent.glob("*.cu"))


def test_the_claims_that_need_a_kernel_have_one():
    claims = {c for o in OPERATORS.values() for c in o.claims}
    assert claims >= {"A2", "A4", "A5", "A9", "A11", "A13", "B2", "B8", "B9", "B12"}
    assert claims == set(CLAIMS)


def test_the_list_of_operators_says_what_their_claims_are(capsys):
    with pytest.raises(SystemExit):
        main(["ops", "accumulate"])
    shown = capsys.readouterr().out
    assert CLAIMS["A9"] in shown and CLAIMS["B8"] not in shown
    assert "out[key] +=" in shown  # and no markup


# ---- the ballot mistake (B8) ----


def ballot_topk(logits, allowed, k, guard):
    """What router_topk.cu does, lane by lane: expert e belongs to lane e % 32."""
    tokens, experts = logits.shape
    index, weight = torch.full((tokens, k), experts, dtype=torch.int32), torch.zeros(tokens, k)
    for token in range(tokens):
        score = torch.where(allowed[token] > 0, logits[token], -float("inf"))
        chosen = []
        for _ in range(k):
            best = [max(((float(score[e]), -e) for e in range(lane, experts, 32)), default=(-float("inf"), 0))
                    for lane in range(32)]
            top = max(b[0] for b in best)
            ballot = sum(1 << lane for lane in range(32) if best[lane][0] == top > -float("inf"))
            if guard and ballot == 0:
                break
            first = (ballot & -ballot).bit_length() - 1  # __ffs(ballot) - 1: -1 when the ballot is empty
            lane = first % 32  # what a shuffle makes of it
            expert = -best[lane][1] if best[lane][0] > -float("inf") else lane
            if first >= 0:
                score[expert] = -float("inf")
            chosen.append((expert, top))
        index[token, :len(chosen)] = torch.tensor([c[0] for c in chosen], dtype=torch.int32)
        weight[token, :len(chosen)] = torch.tensor([c[1] for c in chosen]).softmax(0).nan_to_num(0)
    return {"index": index, "weight": weight}


@pytest.mark.parametrize("allowed", [1.0, 0.05])
@pytest.mark.parametrize("guard", [True, False])
def test_an_empty_ballot_is_wrong_without_its_guard(allowed, guard):
    router = OPERATORS["router_topk"]
    case = Case.of(tokens=16, experts=60, k=6, allowed=allowed)
    inputs = draw(router, case)
    ok, _ = judge(router, case, inputs, ballot_topk(inputs["logits"], inputs["allowed"], case["k"], guard))
    kernel = next(k for k in router.kernels if k.name == ("guarded" if guard else "unguarded"))
    assert ok == (not kernel.wrong_on(case)) == (guard or allowed == 1.0)


def test_equal_scores_may_be_routed_either_way():
    router = OPERATORS["router_topk"]
    case = Case.of(tokens=1, experts=4, k=2, allowed=1.0)
    inputs = {"logits": torch.tensor([[1.0, 3.0, 1.0, 0.0]]), "allowed": torch.ones(1, 4, dtype=torch.uint8)}
    weight = torch.tensor([[3.0, 1.0]]).softmax(1)
    for second, right in ((0, True), (2, True), (3, False), (1, False), (4, False), (-1, False)):
        out = {"index": torch.tensor([[1, second]], dtype=torch.int32), "weight": weight}
        assert judge(router, case, inputs, out)[0] == right, second
