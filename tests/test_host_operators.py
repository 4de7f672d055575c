"""Operators that are about the host (allocation, launches, copies from it), and what they ask of worker and catalogue:
set-ups, other timers, results that are judged apart from what is timed."""

import ctypes
import sys
from types import SimpleNamespace

import pytest

from brakecheck.kernels import jit
from brakecheck.model import BrakecheckError, UnavailableError
from brakecheck.ops import Case, Operator, allocation, catalogue, conditional_nodes
from brakecheck.ops.base import Calls, Missing, Setup
from brakecheck.ops.make import Make
from brakecheck.worker import main as worker_main
from brakecheck.worker import numerics, timers
from brakecheck.worker.device import Device
from brakecheck.worker.measure import measure

torch = pytest.importorskip("torch")
NAMES = ("allocation", "launch_chain", "host_copy", "managed_memory", "conditional_nodes")
OPERATORS = catalogue()
QUICK = {"visit_us": 2_000, "sample_us": 200, "min_samples": 3}
EVERYWHERE = {"torch", "arena"}


def judged(op, case, name, device):
    function, inputs = op.implementations[name], op.make_inputs(case, Make(device, 3))
    try:
        return numerics.check(op, case, inputs, getattr(function, "checked", function)(case, **inputs))
    finally:
        getattr(function, "close", lambda: None)()


# ---- the operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_takes_a_gpu_is_missing_without_one(name):
    op = OPERATORS[name]
    assert op.timer in ("wall", "alone") and len(op.implementations) >= 3
    for implementation in set(op.implementations) - EVERYWHERE:
        with pytest.raises(Missing, match="takes an NVIDIA GPU, and is asked for on cpu"):
            judged(op, op.cases[0], implementation, "cpu")
    assert judged(op, op.cases[0], "torch", "cpu")["ok"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_every_implementation_is_right_on_a_gpu(name):
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    op, left_out = OPERATORS[name], []
    for case in op.cases:
        for implementation in op.implementations:
            try:
                found = judged(op, case, implementation, "cuda:0")
                assert found["ok"], (case.name, implementation, found["why"])
            except Missing as problem:
                left_out.append((implementation, str(problem)))
    assert set(left_out) <= {("while", "a WHILE node that is entered needs a body that ends it"),
                             ("graph-dependent", "programmatic dependent launch starts with compute capability 9.0")}


def test_blocks_that_are_not_ones_own_are_noticed(monkeypatch):
    """An allocator that gives the same memory twice, and one whose blocks are shorter than they say."""
    case = Case.of(rounds=2, experts=2)
    values = torch.arange(sum(map(len, allocation.requests(case)))).to(torch.uint8)
    reference = allocation.op.compute_reference(case, values=values, device=None)["held"]
    whole = torch.zeros(1 << 25, dtype=torch.uint8)

    def found(allocate, view):
        a = allocation.Allocator(allocate, lambda block: None, view, lambda: 0)
        return allocation._checked(case, a, values)()["held"]

    own = found(lambda n: torch.empty(n, dtype=torch.uint8), lambda block, n: block)
    assert torch.equal(own, reference)
    assert not torch.equal(found(lambda n: 0, lambda start, n: whole[start:start + n]), reference)


def test_the_requests_of_a_case_do_not_change():
    """A record's fragmentation is of these."""
    rounds = allocation.requests(Case.of(rounds=100, experts=64))
    assert len(rounds) == 100 and max(map(sum, rounds)) == 758_440_584 and rounds == list(allocation.expert_sizes(100))
    assert all(sorted(order) == list(range(len(r))) for r, order in zip(rounds, allocation.orders(rounds)))
    assert allocation.requests(Case.of(bytes=5, times=2)) == [[5], [5]]


def test_nodes_of_graphs_have_the_drivers_layout():
    assert ctypes.sizeof(conditional_nodes._Conditional) == 256  # CUgraphNodeParams
    assert ctypes.sizeof(conditional_nodes._Kernel) == 72 and ctypes.sizeof(conditional_nodes._Memset) == 40


def test_work_is_in_the_body_that_the_condition_chooses(monkeypatch):
    """The driver enters body 0 of an IF for 1 and body 1 for 0; of a SWITCH body number `value`, if there is one."""
    made = []

    def conditional(kind, bodies, value):
        made.append((kind, value, [[] for _ in range(bodies)]))
        return made[-1][2], 0

    chain, work = SimpleNamespace(conditional=conditional), lambda body: body.append("work")
    for add in (conditional_nodes._if, conditional_nodes._if_else, conditional_nodes._switch):
        for condition in (True, False):
            add(chain, condition, work)
            kind, value, bodies = made[-1]
            chosen = {conditional_nodes.IF: 0 if value else 1, conditional_nodes.SWITCH: value}[kind]
            ran = chosen < len(bodies) and bodies[chosen] == ["work"]
            assert ran == condition, (add.__name__, condition)


# ---- set-ups ---------------------------------------------------------------------------------------------------------


def made_by(log, **calls):
    op = Operator("x", "", cases=[Case.of(n=1)], timer="alone")

    @op.setup("s")
    def _(case, x):
        log.append("made")
        yield Calls(lambda: log.append("timed") or {}, **calls)
        log.append("given back")

    return op, op.implementations["s"]


def test_a_set_up_is_made_once_for_its_inputs_and_given_back():
    log = []
    op, function = made_by(log, before=lambda: log.append("before"), checked=lambda: {"out": 1})
    case, one, two = op.cases[0], torch.ones(1), torch.ones(1)
    assert isinstance(function, Setup) and function(case, x=one) == {}
    function.before(case, x=one)
    assert function.checked(case, x=one) == {"out": 1} and log == ["made", "timed", "before"]
    function(case, x=two)  # equal values elsewhere
    assert log[3:] == ["given back", "made", "timed"]
    function.close()
    function.close()
    assert log[6:] == ["given back"]


def test_a_set_up_that_fails_is_tried_again():
    tries = []
    op = Operator("x", "", cases=[Case.of(n=1)])

    @op.setup("s")
    def _(case):
        tries.append(1)
        if len(tries) == 1:
            raise Missing("not yet")
        yield lambda: {"out": 1}

    with pytest.raises(Missing):
        op.implementations["s"](op.cases[0])
    assert op.implementations["s"](op.cases[0]) == {"out": 1}


def test_a_mistake_in_a_set_up_is_named():
    op = Operator("x", "", cases=[Case.of(n=1)])
    with pytest.raises(TypeError, match="a set-up is a generator function"):
        op.setup("plain")(lambda case: {"out": 1})

    @op.setup("values")
    def _(case):
        yield {"out": 1}

    with pytest.raises(TypeError, match="yields a function without arguments, or Calls"):
        op.implementations["values"](op.cases[0])
    with pytest.raises(ValueError, match="no timer 'walls'; there are device, wall, alone"):
        Operator("x", "", cases=[], timer="walls")


def test_only_device_work_is_compiled():
    for timer, expected in (("device", {"torch", "compile"}), ("wall", {"torch"}), ("alone", {"torch"})):
        op = Operator("x", "", cases=[], timer=timer)
        op.implementation("torch")(lambda case: {})
        assert set(op.implementations) == expected


# ---- the worker ------------------------------------------------------------------------------------------------------


def visit(op, name, **request):
    return measure(Device("cpu"), {op.name: op}, {"operator": op.name, "case": op.cases[0].name, "implementation": name,
                                                  "settle": False, "plan": QUICK, **request})


def test_a_visit_calls_one_by_one_what_is_timed_alone_and_closes():
    log = []
    op, _ = made_by(log, before=lambda: log.append("before"), checked=lambda: {"out": torch.ones(2)})
    op.inputs(lambda case, make: {"x": make.normal(1)})
    op.reference(lambda case, x: {"out": torch.ones(2, dtype=torch.float64)})
    found = visit(op, "s", checks=False)
    assert found["key"]["mode"] == "alone" and found["key"]["timer"] == "steady-clock" and found["buffers"] == 1
    assert log[:2] == ["made", "timed"] and log[-1] == "given back" and log.count("made") == 1
    middle = log[2:-1]
    assert middle == ["before", "timed"] * (len(middle) // 2) and len(middle) // 2 >= 3 * found["calls"]
    checked = visit(op, "s")
    assert checked["numerics"]["ok"] and checked["numerics"]["distinct"] == 1
    assert "work" not in checked and log[-1] == "given back"
    op.reference(lambda case, x: {"out": torch.full((2,), 5.0, dtype=torch.float64)})
    assert not visit(op, "s")["numerics"]["ok"]


def test_what_happens_before_a_call_is_not_timed():
    import time

    op, _ = made_by([], before=lambda: time.sleep(0.01))
    op.inputs(lambda case, make: {"x": make.normal(1)})
    assert max(visit(op, "s", checks=False, plan={**QUICK, "max_samples": 3})["us"]) < 5000


def test_a_window_that_a_much_faster_arm_chose_is_cut():
    plan = timers.Plan(calls=1000)
    assert timers._calls(plan, 5000.0) == 40
    assert timers._calls(timers.Plan(calls=1000), 2.0) == 1000
    assert timers._calls(timers.Plan(calls=1000, inject=0.01), 5000.0) == 1000  # whole extra calls need them all


def test_what_a_machine_lacks_is_missing_and_the_drivers_words_for_memory_are_understood(monkeypatch):
    assert worker_main._state(UnavailableError("no NVRTC")) == "missing"
    assert worker_main._state(BrakecheckError("cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)")) == "oom"
    monkeypatch.setattr(jit, "_driver", lambda: SimpleNamespace())
    with pytest.raises(UnavailableError, match="no cuGraphConditionalHandleCreate"):
        jit.call("cuGraphConditionalHandleCreate")


def test_two_allocators_are_compared_and_reported_without_operations(tmp_path, capsys):
    from brakecheck.cli import main

    stack, page = f"env:{sys.executable}", tmp_path / "r.html"
    with pytest.raises(SystemExit) as ended:
        main(["compare", stack, stack, "--operators", "allocation", "--cases", "bytes=512 *", "--device", "cpu",
              "--implementation", "base=torch,candidate=arena", "--budget", "1s", "--store", "-", "-o", str(page)])
    assert ended.value.code in (0, 1, 2, 3)
    shown = capsys.readouterr().out
    assert "allocation" in shown and "allocation" in page.read_text() and "TFLOP" not in shown
