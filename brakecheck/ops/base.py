"""What an operator is: cases, inputs, FP64 reference, cost, tolerance, implementations.

Runs inside the stack under test: Python 3.9, standard library and torch (imported by the functions that need it, so
that a machine without torch can still read the catalogue and compile its kernels).

An operator in ten lines (see docs/adding-a-kernel.md):

    op = Operator("axpy", "y = a x + y", cases=[Case.of(n=1 << 20, dtype="float32")])

    @op.inputs
    def _(case, make): return {"x": make.normal(case["n"]), "y": make.normal(case["n"])}

    @op.reference
    def _(case, x, y): return {"out": 2 * x.double() + y.double()}

    @op.implementation("torch")
    def _(case, x, y): return {"out": 2 * x + y}
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from ..model import Entry, Source
from .compiled import compiled

KERNELS = Path(__file__).resolve().parent.parent / "kernels"


# A GPU's power cap decides the time of a case with this much arithmetic, and this much of it for each byte: on an H200
# bfloat16 products of 4096^3 (1.4e11) vary by 0.3 % from process to process, those of 8192^3 (1.1e12) by 2.9 %.
CAPPED_FLOPS, CAPPED_INTENSITY = 2e11, 100.0
# Root mean square relative error of rounding, in units of the type's epsilon: an ulp / sqrt(12), and values lie
# anywhere between one and two powers of two (averaged over the logarithm): sqrt(3 / (8 ln 2)) / sqrt(12).
ROUNDING = 0.212


class Missing(Exception):
    """This stack or device has no such operator, case, implementation or library backend: the state of that case is
    "missing", not "error"."""


def gpu_of(device: Any) -> int:
    """The index of a torch.device of CUDA. Raises Missing for another."""
    if device.type != "cuda":
        raise Missing(f"this takes an NVIDIA GPU, and is asked for on {device}")
    return int(device.index or 0)


def _always(case: Case) -> bool:
    return True


def _never(case: Case) -> bool:
    return False


@dataclass(frozen=True)
class Case:
    """One shape, dtype and layout of an operator. `params` are JSON scalars or lists; `name` is for people."""

    name: str
    params: Mapping[str, Any]

    @classmethod
    def of(cls, **params: Any) -> Case:
        shown = []
        for key, value in params.items():
            shown.append(str(value) if key == "dtype" else f"{key}={value}")
        return cls(" ".join(shown), params)

    def __getitem__(self, key: str) -> Any:
        return self.params[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.params.get(key, default)


@dataclass(frozen=True)
class Cost:
    """Least work of a case: floating-point (or integer) operations, and bytes that must cross device memory
    (each input read once, each output written once)."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Tolerance:
    """Largest relative error ||out - ref|| / ||ref|| that counts as right, and why it is that large. 0 means exact.
    The norm is the Euclidean one, over each output on its own.

    expected: the error of honest arithmetic (sums in float32, rounded once), if known. A result with several times this
    error lost precision on the way, such as partial sums kept in 16 bits, even where the tolerance allows it."""

    relative: float
    why: str
    expected: Optional[float] = None


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor: `tensor` (row-major, innermost last) read in boxes of `box` elements (innermost last).

    swizzle: 0, 32, 64 or 128 bytes."""

    tensor: Any
    box: Tuple[int, ...]
    swizzle: int = 0


@dataclass(frozen=True)
class Scalar:
    """A number passed by value. ctype: i32, i64 or f32."""

    ctype: str
    value: Any


def i32(value: int) -> Scalar:
    """An `int` argument."""
    return Scalar("i32", value)


def i64(value: int) -> Scalar:
    """A `long long` argument."""
    return Scalar("i64", value)


def f32(value: float) -> Scalar:
    """A `float` argument."""
    return Scalar("f32", value)


def blocks(items: int, each: int) -> int:
    """How many groups of `each` cover `items`: ceil(items / each)."""
    return -(-items // each)


@dataclass(frozen=True)
class Launch:
    """One kernel launch. arguments, in the order of the kernel's parameters: torch tensors (passed as device
    pointers), Scalars, TensorMaps. entry: which of the kernel's entries, by default its first. cooperative: all blocks
    must be resident at once, since they wait for each other."""

    grid: Tuple[int, int, int]
    block: Tuple[int, int, int]
    arguments: Sequence[Any]
    dynamic_shared: int = 0
    cluster: Optional[Tuple[int, int, int]] = None
    entry: Optional[str] = None
    cooperative: bool = False


@dataclass(frozen=True)
class CudaKernel:
    """A kernel of ours in CUDA C++: one file under kernels/cuda, compiled by the toolchain under test.

    source: file name in kernels/cuda. entry: the extern "C" name, or a template instantiation such as
    `attention<64, 64>` (an NVRTC name expression, instantiated in the file too, for nvcc). also: further entries that
    its launches use. threads, dynamic_shared: the launch configuration that static occupancy is computed for.
    min_arch: the lowest compute capability it compiles for (90 for sm_90). archs: the only ones, if not all from there.

    outputs(case, **inputs) allocates what it writes (any content: the runner poisons it); a name that the reference
    does not have is scratch. launches(case, **inputs_and_outputs) says how to launch it. zeroed: outputs that must be
    zero before the launches, which the runner does inside the timed region (the kernel only adds to them).
    deterministic: equal inputs give equal bits. supports(case): cases that it can run, by default all.
    wrong_on(case): cases on which it is known to be wrong, because it reproduces a published mistake.
    """

    name: str
    source: str
    entry: str
    threads: int
    outputs: Callable[..., Dict[str, Any]]
    launches: Callable[..., List[Launch]]
    dynamic_shared: int = 0
    min_arch: int = 80
    archs: Tuple[str, ...] = ()
    also: Tuple[Entry, ...] = ()
    defines: Tuple[str, ...] = ()
    std: str = "c++17"
    zeroed: Tuple[str, ...] = ()
    deterministic: bool = True
    supports: Callable[[Case], bool] = _always
    wrong_on: Callable[[Case], bool] = _never

    @property
    def path(self) -> Path:
        return KERNELS / "cuda" / self.source

    @property
    def entries(self) -> Tuple[Entry, ...]:
        return (Entry(self.entry, self.threads, self.dynamic_shared), *self.also)

    def source_of(self, operator: str) -> Source:
        """What a toolchain is asked to compile for this kernel."""
        return Source(
            str(self.path), operator, std=self.std, defines=self.defines, include_dirs=(str(self.path.parent),),
            entries=self.entries, min_arch=self.min_arch, archs=self.archs,
        )


# What others have said of kernels; docs/findings-moe.md has what was measured.
CLAIMS = {
    "A2": "softmax fused with warp tiles is right, and faster than unfused",
    "A3": "a chain of small kernels with programmatic dependent launch: -18 % of scheduling",
    "A4": "__restrict__ gives better register allocation",
    "A5": "a spin lock of warps with atomicExch, __nanosleep and __syncwarp: 82 -> 137 ns, throughput +22 %",
    "A9": "atomics aggregated within a warp: 118 -> 5.9 cycles",
    "A11": "attention tiles of 128x64 -> 96x64: 58 -> 43 registers, 182.3 -> 217.6 TFLOP/s",
    "A13": "divergence within a warp can be traced to its source lines",
    "B2": "bulk tensor copies (TMA) in an int8 matrix product: 3.2 times the instruction-level parallelism",
    "B3": "conditional nodes of a graph: a launch takes 8.2 -> 0.3 us",
    "B6": "managed memory with advice and prefetch, under sparse access: 18.7 -> 3.2 us",
    "B8": "the guard of a top-k router against the empty ballot: +17.2 % latency",
    "B9": "a padded shared tile in a transpose, against bank conflicts: 42 -> 69 % of the bandwidth",
    "B11": "an arena instead of an allocator: 8.2 -> 0.9 us, fragmentation 37 -> 4.1 %",
    "B12": "inline PTX in a router's reduction: 2.41 -> 3.79 instructions a cycle",
}


@dataclass(frozen=True)
class Calls:
    """What an implementation with a set-up is called by, each without arguments. timed: gives the named outputs, none
    where nothing is written (an allocation). before: called ahead of each timed call and outside of its time, where the
    operator's timer is "alone". checked: called instead of `timed` where the result is judged."""

    timed: Callable[[], Dict[str, Any]]
    before: Optional[Callable[[], Any]] = None
    checked: Optional[Callable[[], Dict[str, Any]]] = None


class Setup:
    """An implementation that has something made before its calls and given back after them: a pool, a captured graph,
    managed memory. make: see Operator.setup.

    It is made at the first call with these very inputs (the same objects), and given back by `close`, which the worker
    calls at the end of a visit, or by a call with other inputs."""

    def __init__(self, make: Callable[..., Iterator[Union[Calls, Callable[[], Dict[str, Any]]]]]) -> None:
        if not inspect.isgeneratorfunction(make):
            raise TypeError("a set-up is a generator function: it yields what is called")
        self._open = contextlib.contextmanager(make)
        self._given = contextlib.ExitStack()
        self._for: Optional[Tuple[Case, Dict[str, Any]]] = None
        self._calls: Calls

    def _made(self, case: Case, inputs: Dict[str, Any]) -> Calls:
        if self._for is None or self._for[0] is not case or any(self._for[1][n] is not v for n, v in inputs.items()):
            self.close()
            made = self._given.enter_context(self._open(case, **inputs))
            if not (isinstance(made, Calls) or callable(made)):
                raise TypeError(f"a set-up yields a function without arguments, or Calls; this one yielded {made!r}")
            self._calls = made if isinstance(made, Calls) else Calls(made)
            self._for = case, inputs
        return self._calls

    def __call__(self, case: Case, **inputs: Any) -> Dict[str, Any]:
        return self._made(case, inputs).timed()

    def before(self, case: Case, **inputs: Any) -> None:
        calls = self._made(case, inputs)
        if calls.before is not None:
            calls.before()

    def checked(self, case: Case, **inputs: Any) -> Dict[str, Any]:
        calls = self._made(case, inputs)
        return (calls.checked or calls.timed)()

    def close(self) -> None:
        self._for = None
        self._given.close()


TIMERS = ("device", "wall", "alone")


@dataclass
class Operator:
    """A named computation. `claims` are those of CLAIMS that it settles.

    timer: what a time of it is. "device": of the work on the device (replay of a captured graph; events around what
    cannot be captured). "wall": of a window of calls on the host's clock, to the end of their work, over one set of
    inputs: for what is about the host, as allocations, launches and copies from it are. "alone": the same of single
    calls, each on an idle device, where a call finds what another left behind."""

    name: str
    title: str
    cases: Sequence[Case]
    claims: Tuple[str, ...] = ()
    kernels: List[CudaKernel] = field(default_factory=list)
    implementations: Dict[str, Callable[..., Dict[str, Any]]] = field(default_factory=dict)
    make_inputs: Optional[Callable[..., Dict[str, Any]]] = None
    compute_reference: Optional[Callable[..., Dict[str, Any]]] = None
    compute_cost: Optional[Callable[[Case], Cost]] = None
    choose_tolerance: Optional[Callable[[Case], Tolerance]] = None
    compare: Optional[Callable[..., Dict[str, Any]]] = None
    layouts: Dict[str, Callable[..., Dict[str, Any]]] = field(default_factory=dict)
    timer: str = "device"

    def __post_init__(self) -> None:
        if self.timer not in TIMERS:  # it would be timed by another one, and nobody told
            raise ValueError(f"operator {self.name!r} has no timer {self.timer!r}; there are {', '.join(TIMERS)}")

    def power_limited(self, case: Case) -> bool:
        """Whether a GPU's power cap is likely to decide this case's time, so that it needs a fixed duty cycle."""
        cost = self.compute_cost(case) if self.compute_cost else None
        return cost is not None and cost.flops >= max(CAPPED_FLOPS, CAPPED_INTENSITY * cost.bytes)

    def inputs(self, function: Callable[..., Dict[str, Any]]) -> Callable[..., Dict[str, Any]]:
        """function(case, make) -> named tensors. `make` draws them (ops/make.py): seeded, recorded distribution."""
        self.make_inputs = function
        return function

    def reference(self, function: Callable[..., Dict[str, Any]]) -> Callable[..., Dict[str, Any]]:
        """function(case, **inputs) -> named outputs in float64 (integers stay integers)."""
        self.compute_reference = function
        return function

    def cost(self, function: Callable[[Case], Cost]) -> Callable[[Case], Cost]:
        """function(case) -> Cost."""
        self.compute_cost = function
        return function

    def tolerance(self, function: Callable[[Case], Tolerance]) -> Callable[[Case], Tolerance]:
        """function(case) -> Tolerance."""
        self.choose_tolerance = function
        return function

    def comparison(self, function: Callable[..., Dict[str, Any]]) -> Callable[..., Dict[str, Any]]:
        """function(case, inputs, reference, out) -> {"ok": bool, "error": float} where a norm cannot judge (top-k with
        ties)."""
        self.compare = function
        return function

    def implementation(self, name: str) -> Callable[..., Callable[..., Dict[str, Any]]]:
        """Registers function(case, **inputs) -> named outputs under `name` (torch, triton, ...). What is registered as
        "torch" is also there as "compile", through torch.compile, unless the operator brings its own, or is about the
        host's part, which a compiler would do away with."""

        def register(function: Callable[..., Dict[str, Any]]) -> Callable[..., Dict[str, Any]]:
            self.implementations[name] = function
            if name == "torch" and self.timer == "device":
                self.implementations.setdefault("compile", compiled(function))
            return function

        return register

    def setup(self, name: str) -> Callable[..., Setup]:
        """Registers a generator function(case, **inputs) under `name`: it makes what the calls need, yields them (one
        function without arguments, or Calls), and after the yield gives back what it made."""

        def register(make: Callable[..., Iterator[Union[Calls, Callable[[], Dict[str, Any]]]]]) -> Setup:
            found = self.implementations[name] = Setup(make)
            return found

        return register

    def layout(self, name: str) -> Callable[..., Callable[..., Dict[str, Any]]]:
        """Registers function(case, **inputs) -> the same values with other strides. The worker calls an implementation
        with both layouts in both orders: neither may be wrong, nor change what the other gives."""

        def register(function: Callable[..., Dict[str, Any]]) -> Callable[..., Dict[str, Any]]:
            self.layouts[name] = function
            return function

        return register

    def cuda(self, kernel: CudaKernel) -> CudaKernel:
        """Registers a CUDA C++ kernel; its `name` becomes an implementation that a toolchain stack can run."""
        self.kernels.append(kernel)
        return kernel
