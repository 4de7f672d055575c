"""softmax, layer_norm, rms_norm: numerics of the torch path, autograd, torch.compile, plans, compilation."""

import ctypes
import subprocess
import sys
import warnings

import pytest

from brakecheck.kernels import jit, rows_tuning
from brakecheck.model import BrakecheckError
from brakecheck.ops import catalogue

torch = pytest.importorskip("torch")

from brakecheck import ops  # noqa: E402
from brakecheck.kernels import rows  # noqa: E402

EPSILON = 1e-5


def norm_reference(x, weight, bias, center):
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if center else x
    y = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(got, wanted):
    return float((got.double() - wanted).norm() / wanted.norm())


# ---- numerics ----


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("shape, dim", [((7, 33), -1), ((2, 3, 64), -1), ((5, 6, 7), 1), ((4, 8), 0)])
def test_softmax_agrees_with_float64(dtype, bound, shape, dim):
    x = draw(*shape, dtype=dtype)
    y = ops.softmax(x, dim)
    assert y.dtype == dtype and y.shape == x.shape
    assert relative(y, torch.softmax(x.double(), dim)) < bound


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("n", [1, 33, 64])
@pytest.mark.parametrize("given", ["both", "weight", "none"])
def test_norms_agree_with_float64(dtype, bound, n, given):
    x, weight, bias = draw(3, 5, n, dtype=dtype), draw(n, dtype=dtype, seed=1), draw(n, dtype=dtype, seed=2)
    weight, bias = weight if given != "none" else None, bias if given == "both" else None
    y = ops.rms_norm(x, weight, EPSILON)
    assert y.dtype == dtype and relative(y, norm_reference(x, weight, None, False)) < bound
    if n > 1 or given == "both":  # one element is its own mean: nothing is left of it
        y = ops.layer_norm(x, weight, bias, EPSILON)
        assert y.dtype == dtype and relative(y, norm_reference(x, weight, bias, True)) < bound


@pytest.mark.parametrize("center", [True, False])
def test_residual_is_added_first_and_returned(center):
    x, r, weight = draw(4, 32, dtype=torch.bfloat16), draw(4, 32, dtype=torch.bfloat16, seed=3), draw(32)
    y, total = ops.layer_norm(x, weight, None, EPSILON, r) if center else ops.rms_norm(x, weight, EPSILON, r)
    assert torch.equal(total, x + r)
    assert relative(y, norm_reference(x + r, weight.bfloat16(), None, center)) < 4e-3


def test_values_around_ten_thousand_and_equal_rows():
    x = draw(6, 257) * 0.5 + 1e4
    assert relative(ops.layer_norm(x, eps=EPSILON), norm_reference(x, None, None, True)) < 2e-3  # the mean is a float
    assert torch.equal(ops.softmax(torch.full((2, 4), -1e4)), torch.full((2, 4), 0.25))
    assert torch.equal(ops.layer_norm(torch.full((2, 8), 3.0)), torch.zeros(2, 8))
    assert ops.softmax(torch.full((1, 3), -float("inf"))).isnan().all()


def test_empty_and_scalar_tensors():
    assert ops.softmax(torch.empty(0, 5)).shape == (0, 5)
    assert ops.softmax(torch.tensor(3.0)) == 1
    assert ops.rms_norm(torch.empty(0, 5), torch.ones(5)).shape == (0, 5)


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (2, 0, 3)])
def test_gradients_of_empty_tensors(shape):
    x, weight = torch.empty(shape, requires_grad=True), torch.ones(shape[-1], requires_grad=True)
    for out in (ops.layer_norm(x, weight, weight), ops.rms_norm(x, weight), ops.softmax(x) * weight):
        dx, dweight = torch.autograd.grad(out.sum(), (x, weight))
        assert dx.shape == shape and torch.equal(dweight, torch.zeros_like(weight))


def test_what_a_kernel_would_misread_is_refused():
    x = torch.zeros(2, 4)
    with pytest.raises(BrakecheckError, match="weight is on meta"):
        ops.layer_norm(x, torch.ones(4, device="meta"))
    with pytest.raises(BrakecheckError, match="residual is on meta"):
        ops.rms_norm(x, residual=x.to("meta"))
    for operator in (ops.softmax, ops.layer_norm, ops.rms_norm):
        with pytest.raises(BrakecheckError, match="int32"):
            operator(x.int())
    with pytest.raises(BrakecheckError, match="scalar"):
        ops.layer_norm(torch.tensor(1.0))


def test_wrong_shapes_are_named():
    with pytest.raises(BrakecheckError, match="weight has shape"):
        ops.layer_norm(torch.zeros(2, 4), torch.ones(3))
    with pytest.raises(BrakecheckError, match="residual has shape"):
        ops.rms_norm(torch.zeros(2, 4), residual=torch.zeros(4))


# ---- autograd, fake tensors, compile ----


def test_gradients():
    x, r = (draw(3, 6, seed=s).double().requires_grad_() for s in (0, 1))
    weight, bias = (draw(6, seed=s).double().requires_grad_() for s in (2, 3))
    check = torch.autograd.gradcheck
    assert check(lambda x: ops.softmax(x, 0), (x,))
    assert check(lambda *a: ops.layer_norm(*a), (x, weight, bias))
    assert check(lambda x, w: ops.rms_norm(x, w), (x, weight))
    assert check(lambda x, w, b, r: ops.layer_norm(x, w, b, residual=r), (x, weight, bias, r))
    assert check(lambda x, r: ops.rms_norm(x, residual=r)[0], (x, r))


def test_second_gradients_are_right_or_refused():
    x, weight = (draw(*shape).double().requires_grad_() for shape in ((3, 5), (5,)))
    assert torch.autograd.gradgradcheck(ops.softmax, (x,))
    for norm in (ops.layer_norm, ops.rms_norm):
        (dx,) = torch.autograd.grad(norm(x, weight).square().sum(), x, create_graph=True)
        with pytest.raises(BrakecheckError, match="not implemented"):
            torch.autograd.grad(dx.sum(), x)


def test_gradients_in_float32_agree_with_torch():
    mine, theirs = ([draw(5, 40).requires_grad_(), draw(40, seed=1).requires_grad_(), draw(40, seed=2).requires_grad_()]
                    for _ in range(2))
    dy = draw(5, 40, seed=4)
    got = torch.autograd.grad(ops.layer_norm(*mine), mine, dy)
    wanted = torch.autograd.grad(torch.nn.functional.layer_norm(theirs[0], (40,), theirs[1], theirs[2]), theirs, dy)
    assert all(relative(g, w.double()) < 1e-5 for g, w in zip(got, wanted))


def test_operators_are_registered_rightly():
    x, weight = draw(4, 16).requires_grad_(), draw(16, seed=1).requires_grad_()
    library = torch.ops.brakecheck
    torch.library.opcheck(library.softmax_rows.default, (x,))
    torch.library.opcheck(library.softmax_rows_backward.default, (x, draw(4, 16, seed=3).requires_grad_()))
    torch.library.opcheck(library.norm_rows.default, (x, None, weight, None, EPSILON, True))
    torch.library.opcheck(library.norm_rows.default, (x, draw(4, 16, seed=2), weight, None, EPSILON, False))


def test_fake_tensors_have_shapes_and_no_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(8, 128, dtype=torch.bfloat16)
        assert ops.softmax(x).shape == x.shape
        y, total = ops.rms_norm(x, torch.empty(128), residual=x)
        assert (y.dtype, total.shape) == (torch.bfloat16, x.shape)


def test_meta_tensors_have_gradients_of_the_right_shape():
    x, weight = (torch.empty(*shape, device="meta", requires_grad=True) for shape in ((6, 8), (8,)))
    y, total = ops.layer_norm(ops.softmax(x), weight, weight, residual=x)
    assert [g.shape for g in torch.autograd.grad(y.sum() + total.sum(), (x, weight))] == [(6, 8), (8,)]


def test_compiles_into_one_graph():
    def layer(x, r, weight, bias):
        y, total = ops.layer_norm(x, weight, bias, EPSILON, r)
        return ops.softmax(ops.rms_norm(y * 2, weight)), total

    arguments = [draw(4, 24), draw(4, 24, seed=1), draw(24, seed=2), draw(24, seed=3)]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaves = [a.clone().requires_grad_() for a in arguments]
    same = [a.clone().requires_grad_() for a in arguments]
    out, wanted = compiled(*leaves), layer(*same)
    assert all(torch.equal(a, b) for a, b in zip(out, wanted))
    got = torch.autograd.grad(out[0].square().sum() + out[1].sum(), leaves)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(
        got, torch.autograd.grad(wanted[0].square().sum() + wanted[1].sum(), same)))


def test_autocast_keeps_the_dtype_of_x():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = draw(4, 16) @ draw(16, 16, seed=1)
        assert hidden.dtype == torch.bfloat16
        assert ops.layer_norm(hidden, torch.ones(16), torch.zeros(16)).dtype == torch.bfloat16
        assert ops.softmax(draw(2, 3)).dtype == torch.float32


# ---- without a GPU, without torch ----


def test_importing_the_package_does_not_import_torch():
    code = "import sys, brakecheck, brakecheck.ops as o; o.catalogue(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_falls_back_with_one_warning(monkeypatch):
    monkeypatch.setattr(rows, "_reported", [])
    monkeypatch.setattr(rows, "_usable", lambda x: True)
    monkeypatch.setattr(rows, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(rows, "_processors", lambda device: 132)
    monkeypatch.setattr(rows, "_index", lambda x: 0)

    def broken(*arguments):
        raise BrakecheckError("no compiler here")

    monkeypatch.setattr(rows.jit, "kernel", broken)
    x = draw(4, 16)
    with pytest.warns(UserWarning, match="no compiler here"):
        assert torch.equal(rows._softmax_cuda(x), torch.softmax(x, -1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = rows._norm_cuda(x, None, None, None, EPSILON, True)[0]
    assert relative(y, norm_reference(x, None, None, True)) < 1e-6


def test_launches_of_one_kernel_share_no_state(monkeypatch):
    """Two threads may launch it at the same time, with other grids and streams."""
    seen = []
    monkeypatch.setattr(jit, "call", lambda name, config, *rest: seen.append(config._obj))
    monkeypatch.setattr(jit._thread, "bound", True, raising=False)
    kernel = object.__new__(jit.Kernel)
    kernel.device, kernel.handle, kernel._config = 0, None, jit._Config()
    kernel((3, 1), [], 7)
    kernel((5, 2), [], 8)
    assert [(tuple(c.grid), c.stream) for c in seen] == [((3, 1, 1), 7), ((5, 2, 1), 8)]


# ---- plans ----


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_every_width_has_a_plan_that_covers_it(capability):
    most = 65536 if capability >= (9, 0) else 4096  # vectors: 262,144 float32; and what one block holds
    for vectors in (1, 31, 128, 129, 512, 1000, 4096, 8192, 12800, 32768, 65536):
        plans = [rows_tuning.softmax(vectors, 10**6, 132, capability),
                 rows_tuning.norm(vectors, capability, True, True),
                 rows_tuning.norm(vectors, capability, False, False)]
        assert all((p is not None and p.covers >= vectors) == (vectors <= most) for p in plans)
    assert rows_tuning.norm_backward(0, capability, True) is None  # a row that is no whole number of vectors


def test_few_long_rows_are_spread_over_a_cluster():
    assert rows_tuning.softmax(12800, 4, 132, (9, 0)).cluster == 16
    assert rows_tuning.softmax(12800, 4096, 132, (9, 0)).cluster < 16
    assert rows_tuning.softmax(12800, 4, 132, (8, 0)) is None


def test_plans_stay_within_what_a_block_may_have():
    for plans in rows_tuning.ALL:
        assert [p.covers for p in plans] == sorted(p.covers for p in plans)
        for plan in plans:
            assert plan.team_threads * plan.teams <= 1024 and plan.cluster * plan.group <= 16
            widest = plan.covers * 8
            sums = {rows_tuning.RMS_NORM_BACKWARD: 1, rows_tuning.LAYER_NORM_BACKWARD: 2,
                    rows_tuning.OLD_NORM_BACKWARD: 2}.get(plans, 0)
            streams = 2 if sums or plans == rows_tuning.SOFTMAX_BACKWARD else 1
            assert plan.shared_bytes(widest, 2, streams, sums) + 1024 <= 227 * 1024  # 1024: what is static


def test_plans_of_older_gpus_fit_their_shared_memory():
    for plans, streams, sums in ((rows_tuning.OLD, 1, 0), (rows_tuning.OLD_TWO, 2, 0),
                                 (rows_tuning.OLD_NORM_BACKWARD, 2, 2)):
        for plan in plans:
            assert plan.cluster == plan.group == 1 and plan.load == rows_tuning.DIRECT
            assert plan.shared_bytes(plan.covers * 8, 2, streams, sums) + 1024 <= 99 * 1024  # what sm_86, sm_89 grant


def test_every_kernel_waits_for_the_one_ahead_of_it():
    """They are launched before it has ended; the wait is in Walk::run, or in the kernel itself."""
    for source in ("rows_softmax.cu", "rows_norm.cu"):
        kernels = (jit.CUDA_SOURCES / source).read_text().split("\ntemplate __global__")[0].split("__global__")[1:]
        assert len(kernels) >= 4
        assert all("rows::follow();" in k or "Walk::run(" in k for k in kernels)
    assert "\n    follow();" in (jit.CUDA_SOURCES / "rows.cuh").read_text()


# ---- compilation ----


@pytest.fixture(scope="module")
def nvrtc(tmp_path_factory):
    """NVRTC 13.0 from its wheel."""
    folder = tmp_path_factory.mktemp("nvrtc")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*command, "nvidia-cuda-nvrtc==13.0.*"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the NVRTC wheel is not to be had: {done.stderr.strip().splitlines()[-1:]}")
    for builtins in folder.rglob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(next(folder.rglob("libnvrtc.so.13"))))


def expressions_of(old):
    """Every instantiation that a plan asks for, by file."""
    t = rows_tuning
    softmax = {f"softmax_rows<{p.softmax()}>" for p in (t.OLD if old else (*t.SOFTMAX, t.FEW_ROWS))}
    softmax |= {f"softmax_rows_backward<{p.softmax()}>" for p in (
        t.OLD_TWO if old else (*t.SOFTMAX_BACKWARD, t.FEW_ROWS))}
    norms = {p.norm(False, False) for p in (t.OLD if old else t.RMS_NORM)}
    norms |= {p.norm(True, False) for p in (t.OLD if old else t.LAYER_NORM)}
    norms |= {p.norm(c, True) for p in (t.OLD_TWO if old else t.NORM_RESIDUAL) for c in (True, False)}
    back = t.OLD_NORM_BACKWARD, t.OLD_NORM_BACKWARD
    for center, plans in enumerate(back if old else (t.RMS_NORM_BACKWARD, t.LAYER_NORM_BACKWARD)):
        norms |= {p.norm_backward(center) for p in plans}
        norms |= {f"norm_rows_finish<{p.finish},{256 // p.finish}>" for p in plans}
    any_width = {f"norm_any<{c},{r}>" for c in (0, 1) for r in (0, 1)} | {f"norm_any_backward<{c}>" for c in (0, 1)}
    return {"rows_softmax.cu": sorted(softmax) + ["softmax_any", "softmax_any_backward"],
            "rows_norm.cu": sorted(norms | any_width) + ["norm_rows_finish<16,16>"] * (
                "norm_rows_finish<16,16>" not in norms)}


@pytest.mark.network
@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_compiles_for(arch, element, nvrtc):
    """All that a plan asks for in bfloat16, and every fourth of it in the other types: the code differs by loads."""
    for source, expressions in expressions_of(arch != "sm_90a").items():
        chosen = expressions if element == "bf16" else expressions[::4]
        image, names = jit.compile_cubin(source, chosen, arch, [f"ELEMENT={element}"], nvrtc)
        assert image[:4] == b"\x7fELF" and len(set(names)) == len(chosen)
        assert all(name.encode() in image for name in names)


def test_a_compiler_error_is_shown(nvrtc_stub):
    with pytest.raises(BrakecheckError, match="no such thing"):
        jit.compile_cubin("rows_softmax.cu", ["softmax_any"], "sm_90a", (), nvrtc_stub)


@pytest.fixture
def nvrtc_stub():
    """An NVRTC that creates programs and fails to compile them."""

    class Stub:
        def __getattr__(self, name):
            return lambda *arguments: 0

        def nvrtcCreateProgram(self, program, *rest):
            program._obj.value = 1
            return 0

        def nvrtcCompileProgram(self, *arguments):
            return 6

        def nvrtcGetProgramLogSize(self, program, size):
            size._obj.value = 64
            return 0

        def nvrtcGetProgramLog(self, program, log):
            log.value = b"no such thing"
            return 0

    return Stub()


def test_the_catalogue_runs_our_implementation():
    for name, function in (("softmax", "softmax"), ("layernorm", "layer_norm"), ("rmsnorm", "rms_norm")):
        operator = catalogue()[name]
        assert {"ours", "torch"} <= set(operator.implementations) and callable(getattr(ops, function))
        assert {"rows", "rows-warp"} <= {k.name for k in operator.kernels}
