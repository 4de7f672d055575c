"""Work that is done or left out: decided by the host, masked, and by conditional nodes of a CUDA graph (claim B3).

Each of `nodes` conditions holds with a probability of `taken` %; where it holds, `turns` kernels add one to a counter
(none of them: what is timed is the condition). The conditions of a graph have the values that its handles start with.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from ..kernels import jit
from .base import Case, Missing, Operator, Tolerance, gpu_of
from .make import Make

CHOICES = 8  # bodies of a SWITCH node
IF, WHILE, SWITCH = 0, 1, 2   # CU_GRAPH_COND_TYPE_...
_CONDITIONAL = 13             # CU_GRAPH_NODE_TYPE_CONDITIONAL
_ASSIGN_DEFAULT = 1           # CU_GRAPH_COND_ASSIGN_DEFAULT: this value at every launch
_CUBIN, _LIBRARY = 0, 4       # CU_JIT_INPUT_CUBIN, CU_JIT_INPUT_LIBRARY

op = Operator(
    "conditional_nodes", "work that is done where a condition holds: `nodes` of them, one after the other",
    cases=[
        Case.of(nodes=5, taken=40, turns=3),
        Case.of(nodes=50, taken=0, turns=0),
        Case.of(nodes=50, taken=100, turns=0),
        Case.of(nodes=50, taken=0, turns=1),
        Case.of(nodes=50, taken=25, turns=1),
        Case.of(nodes=50, taken=100, turns=1),
        Case.of(nodes=50, taken=100, turns=10),
    ],
    claims=("B3",), timer="wall",
)


@op.inputs
def _(case: Case, make: Make) -> Dict[str, Any]:
    return {"flags": (make.uniform(case["nodes"], high=100.0) < case["taken"]).float()}


@op.reference
def _(case: Case, flags: Any) -> Dict[str, Any]:
    return {"count": flags.double().sum()[None] * case["turns"]}


@op.tolerance
def _(case: Case) -> Tolerance:
    return Tolerance(0.0, "whole numbers")


@op.implementation("torch")
def _(case: Case, flags: Any) -> Dict[str, Any]:
    """The host waits for each condition."""
    count = flags.new_zeros(1)
    for flag in flags:
        if bool(flag):
            for _ in range(case["turns"]):
                count.add_(1.0)
    return {"count": count}


@op.setup("masked")
def _(case: Case, flags: Any) -> Iterator[Callable[[], Dict[str, Any]]]:
    """A graph of torch's kernels that do the work whether it is wanted or not."""
    import torch

    stream = torch.cuda.Stream(gpu_of(flags.device))
    count, graph = flags.new_zeros(1), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(flags.device))
    with torch.cuda.graph(graph, stream=stream):
        count.zero_()
        for flag in flags:
            for _ in range(case["turns"]):
                count.add_(flag)

    def call() -> Dict[str, Any]:
        graph.replay()
        return {"count": count}

    yield call


# ---- graphs, node by node --------------------------------------------------------------------------------------------

class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = [("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
                ("shared", ctypes.c_uint), ("arguments", ctypes.c_void_p), ("extra", ctypes.c_void_p),
                ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p)]


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS"""

    _fields_ = [("to", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint),
                ("element", ctypes.c_uint), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


class _Conditional(ctypes.Structure):
    """CUgraphNodeParams with CUDA_CONDITIONAL_NODE_PARAMS: 12.4 and newer; IF with two bodies and SWITCH from 12.8."""

    _fields_ = [("type", ctypes.c_int), ("reserved0", ctypes.c_int * 3), ("handle", ctypes.c_uint64),
                ("kind", ctypes.c_int), ("size", ctypes.c_uint), ("bodies", ctypes.POINTER(ctypes.c_void_p)),
                ("context", ctypes.c_void_p), ("rest", ctypes.c_char * (232 - 32)), ("reserved2", ctypes.c_longlong)]


class Chain:
    """A graph, or the body of a conditional node: nodes one after the other."""

    def __init__(self, graph: ctypes.c_void_p, context: ctypes.c_void_p) -> None:
        self.graph, self.context = graph, context
        self._last: List[ctypes.c_void_p] = []

    def _add(self, function: str, *rest: Any) -> None:
        node = ctypes.c_void_p()
        after = (ctypes.c_void_p * max(len(self._last), 1))(*self._last)
        edges = [None] if function == "cuGraphAddNode_v2" else []  # what is known of the dependencies: nothing
        jit.call(function, ctypes.byref(node), self.graph, after, *edges, ctypes.c_size_t(len(self._last)), *rest)
        self._last = [node]

    def zero(self, tensor: Any) -> None:
        """A node that clears a tensor of 32-bit values."""
        params = _Memset(tensor.data_ptr(), 0, 0, 4, tensor.numel(), 1)
        self._add("cuGraphAddMemsetNode", ctypes.byref(params), self.context)

    def kernel(self, function: ctypes.c_void_p, arguments: Sequence[Any]) -> None:
        """A node of one warp. arguments: ctypes values, which the driver copies."""
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(a) for a in arguments])
        three = ctypes.c_uint * 3
        params = _Kernel(function, three(1, 1, 1), three(32, 1, 1), 0, ctypes.addressof(pointers))
        self._add("cuGraphAddKernelNode_v2", ctypes.byref(params))

    def conditional(self, kind: int, bodies: int, value: int) -> Tuple[List[Chain], int]:
        """A conditional node whose condition is `value`: its bodies, and its handle."""
        handle = ctypes.c_uint64()
        jit.call("cuGraphConditionalHandleCreate", ctypes.byref(handle), self.graph, self.context,
                 ctypes.c_uint(value), ctypes.c_uint(_ASSIGN_DEFAULT))
        params = _Conditional(type=_CONDITIONAL, handle=handle.value, kind=kind, size=bodies, context=self.context)
        self._add("cuGraphAddNode_v2", ctypes.byref(params))
        return [Chain(ctypes.c_void_p(params.bodies[i]), self.context) for i in range(bodies)], handle.value


@contextlib.contextmanager
def graph(device: int, fill: Callable[[Chain], Any]) -> Iterator[Callable[[], None]]:
    """What launches the graph that fill(chain) makes, on torch's current stream."""
    import torch

    jit.bind(device)
    made, run, context = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    jit.call("cuCtxGetCurrent", ctypes.byref(context))
    jit.call("cuGraphCreate", ctypes.byref(made), 0)
    try:
        fill(Chain(made, context))
        jit.call("cuGraphInstantiateWithFlags", ctypes.byref(run), made, ctypes.c_ulonglong(0))
        yield lambda: jit.call("cuGraphLaunch", run, ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream))
    finally:
        torch.cuda.synchronize(device)
        if run:
            jit.call("cuGraphExecDestroy", run)
        jit.call("cuGraphDestroy", made)


@contextlib.contextmanager
def linked(source: str, entry: str, device: int) -> Iterator[ctypes.c_void_p]:
    """A kernel that calls the device runtime, linked with it by the driver."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    cubin, names = jit.compile_cubin(source, [entry], f"sm_{major}{minor}", relocatable=True)
    library = str(jit.device_runtime()).encode()
    jit.bind(device)
    state, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    image, size = ctypes.c_void_p(), ctypes.c_size_t()
    jit.call("cuLinkCreate_v2", 0, None, None, ctypes.byref(state))
    try:
        jit.call("cuLinkAddData_v2", state, _CUBIN, ctypes.c_char_p(cubin), ctypes.c_size_t(len(cubin)), None, 0, None,
                 None)
        jit.call("cuLinkAddFile_v2", state, _LIBRARY, ctypes.c_char_p(library), 0, None, None)
        jit.call("cuLinkComplete", state, ctypes.byref(image), ctypes.byref(size))
        jit.call("cuModuleLoadData", ctypes.byref(module), image)
    finally:
        jit.call("cuLinkDestroy", state)
    try:
        jit.call("cuModuleGetFunction", ctypes.byref(function), module, names[0].encode())
        yield function
    finally:
        jit.call("cuModuleUnload", module)


def _graph(name: str, add: Callable[[Chain, bool, Callable[[Chain], None]], Any]) -> None:
    """Registers a graph in which add(chain, condition, work) makes each node."""

    @op.setup(name)
    def _(case: Case, flags: Any) -> Iterator[Callable[[], Dict[str, Any]]]:
        device, count = gpu_of(flags.device), flags.new_full((1,), float("nan"))
        kernel = jit.kernel("micro/chain.cu", "small", device, (32, 1)) if case["turns"] else None
        counter = ctypes.c_uint64(count.data_ptr())

        def work(chain: Chain) -> None:
            for _ in range(case["turns"]):
                chain.kernel(kernel.handle, [counter])  # type: ignore[union-attr]

        def fill(chain: Chain) -> None:
            chain.zero(count)
            for condition in flags.bool().tolist():
                add(chain, condition, work)

        with graph(device, fill) as launch:

            def call() -> Dict[str, Any]:
                launch()
                return {"count": count}

            yield call


def _known(chain: Chain, condition: bool, work: Callable[[Chain], None]) -> None:
    """No conditional node: a graph of what is known to be wanted, the least that the others can take."""
    if condition:
        work(chain)


def _if(chain: Chain, condition: bool, work: Callable[[Chain], None]) -> None:
    work(chain.conditional(IF, 1, condition)[0][0])


def _if_else(chain: Chain, condition: bool, work: Callable[[Chain], None]) -> None:
    """The work is in the second body."""
    work(chain.conditional(IF, 2, not condition)[0][1])


def _switch(chain: Chain, condition: bool, work: Callable[[Chain], None]) -> None:
    """All bodies hold the work; the last of them is chosen, or none."""
    for body in chain.conditional(SWITCH, CHOICES, CHOICES - condition)[0]:
        work(body)


for _name, _add in (("known", _known), ("if", _if), ("if-else", _if_else), ("switch", _switch)):
    _graph(_name, _add)


@op.setup("while")
def _(case: Case, flags: Any) -> Iterator[Callable[[], Dict[str, Any]]]:
    """The body is one kernel, and is entered `turns` times."""
    device, count = gpu_of(flags.device), flags.new_full((1,), float("nan"))
    turns, conditions = case["turns"], flags.bool().tolist()
    if any(conditions) and not turns:
        raise Missing("a WHILE node that is entered needs a body that ends it")
    left = flags.new_full((1,), turns).int()
    with contextlib.ExitStack() as held:
        function = held.enter_context(linked("micro/turn.cu", "turn", device)) if turns else None

        def fill(chain: Chain) -> None:
            chain.zero(count)
            for condition in conditions:
                (body,), handle = chain.conditional(WHILE, 1, condition)
                if function:
                    body.kernel(function, [ctypes.c_uint64(count.data_ptr()), ctypes.c_uint64(left.data_ptr()),
                                           ctypes.c_uint64(handle), ctypes.c_int(turns)])

        launch = held.enter_context(graph(device, fill))

        def call() -> Dict[str, Any]:
            launch()
            return {"count": count}

        yield call
