"""The driver-API launcher against a driver that records its calls."""

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from brakecheck.model import BrakecheckError, UnavailableError
from brakecheck.ops import Case, Launch, TensorMap, catalogue
from brakecheck.ops.base import f32, i32, i64
from brakecheck.ops.make import Make
from brakecheck.worker import driver

torch = pytest.importorskip("torch")


class RecordingDriver:
    """Answers like libcuda; `fails` names a call that returns CUDA_ERROR_NO_BINARY_FOR_GPU."""

    def __init__(self):
        self.calls, self.fails = [], None

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            return 209 if name == self.fails else 0

        return call

    def cuGetErrorName(self, code, name):
        name._obj.value = b"CUDA_ERROR_NO_BINARY_FOR_GPU"

    def cuGetErrorString(self, code, text):
        text._obj.value = b"no kernel image is available"

    def last(self, name):
        return next(arguments for called, arguments in reversed(self.calls) if called == name)


@pytest.fixture
def cuda(monkeypatch):
    fake = RecordingDriver()
    monkeypatch.setattr(driver, "_library", lambda: fake)
    return fake


def function():
    return driver.Function(ctypes.c_void_p(77), "kernel", SimpleNamespace(name="x.cubin"))


def test_arguments_are_packed_by_value():
    x = torch.zeros(3)
    pointer, a, b, c = driver.pack([x, i32(-5), i64(1 << 40), f32(0.5)])
    assert (pointer.value, a.value, b.value, c.value) == (x.data_ptr(), -5, 1 << 40, 0.5)
    assert [ctypes.sizeof(v) for v in (pointer, a, b, c)] == [8, 4, 8, 4]


@pytest.mark.parametrize("bad, words", [(3, "a int"), (torch.zeros(4, 4).T, "not contiguous")])
def test_an_argument_that_cannot_be_passed_is_named(bad, words):
    with pytest.raises(BrakecheckError, match=words) as caught:
        driver.pack([torch.zeros(1), bad], "softmax")
    assert "argument 1 of softmax" in str(caught.value)


def test_launch_reaches_the_driver(cuda):
    x = torch.zeros(8)
    launch = Launch((5, 6, 7), (32, 2, 1), [x, i32(9)], dynamic_shared=65536, cluster=(2, 1, 1))
    prepared = function().prepare(launch)
    prepared.enqueue(stream=1234)
    assert cuda.last("cuFuncSetAttribute")[1:] == (8, 65536)
    config, handle, pointers, extra = cuda.last("cuLaunchKernelEx")
    config = config._obj
    assert (list(config.grid), list(config.block), config.shared, config.stream) == ([5, 6, 7], [32, 2, 1], 65536, 1234)
    attribute = ctypes.cast(config.attributes, ctypes.POINTER(driver._Attribute)).contents
    assert (config.attribute_count, attribute.id, list(attribute.cluster)) == (1, 4, [2, 1, 1])
    assert handle.value == 77 and extra is None
    assert ctypes.cast(pointers[0], ctypes.POINTER(ctypes.c_void_p)).contents.value == x.data_ptr()
    assert ctypes.cast(pointers[1], ctypes.POINTER(ctypes.c_int)).contents.value == 9


def test_a_cluster_above_the_portable_size_is_opted_into(cuda):
    function().prepare(Launch((16, 1, 1), (32, 1, 1), [], cluster=(16, 1, 1)))
    assert cuda.last("cuFuncSetAttribute")[1:] == (14, 1)
    cuda.calls.clear()
    function().prepare(Launch((8, 1, 1), (32, 1, 1), [], cluster=(8, 1, 1)))
    assert not cuda.calls


def test_a_tensor_map_is_described_from_the_innermost_dimension(cuda):
    value = driver.encode_tensor_map(TensorMap(torch.zeros(40, 64, dtype=torch.bfloat16), (16, 32), swizzle=64))
    assert ctypes.sizeof(value) == 128 and ctypes.addressof(value) % 64 == 0
    _, kind, rank, _, sizes, strides, box, steps, interleave, swizzle, _, fill = cuda.last("cuTensorMapEncodeTiled")
    assert (kind, rank, interleave, swizzle, fill) == (9, 2, 0, 2, 0)
    assert (list(sizes), list(strides), list(box), list(steps)) == ([64, 40], [128], [32, 16], [1, 1])


def test_a_tensor_map_of_the_wrong_rank_is_refused(cuda):
    with pytest.raises(BrakecheckError, match="cannot be encoded"):
        driver.encode_tensor_map(TensorMap(torch.zeros(4, 4), (4,)))


def test_an_error_of_the_driver_has_its_name_place_and_advice(cuda):
    cuda.fails = "cuLaunchKernelEx"
    prepared = function().prepare(Launch((1, 1, 1), (32, 1, 1), []))
    with pytest.raises(driver.DriverError) as caught:
        prepared.enqueue(stream=0)
    assert caught.value.code == 209 and caught.value.name == "CUDA_ERROR_NO_BINARY_FOR_GPU"
    text = str(caught.value)
    assert "cuLaunchKernelEx failed" in text and "kernel, grid (1, 1, 1)" in text and "architecture" in text


def test_a_kernel_run_poisons_zeroes_and_launches_each_entry(cuda):
    operator, case = catalogue()["softmax"], Case.of(rows=2, columns=8)
    kernel = next(k for k in operator.kernels if k.name == "unfused")
    functions = {e.expression: driver.Function(ctypes.c_void_p(i), e.expression, None)
                 for i, e in enumerate(kernel.entries, 1)}
    run = driver.KernelRun(kernel, functions, case, operator.make_inputs(case, Make("cpu", 1)))
    run.poison()
    assert all(bool(t.isnan().all()) for t in run.outputs.values())
    for prepared in run._prepared:
        prepared.enqueue(stream=0)
    assert [a[1].value for n, a in cuda.calls if n == "cuLaunchKernelEx"] == [1, 2, 3]


def test_without_a_driver_the_message_says_so(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    driver._library.cache_clear()
    with pytest.raises(UnavailableError, match="driver cannot be loaded"):
        driver.driver_version()


# ---- benchmarks/check_kernels.py, the parts that need no GPU ----


@pytest.fixture(scope="module")
def check_kernels():
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "check_kernels.py"
    spec = importlib.util.spec_from_file_location("check_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_template_entries_are_found_by_their_mangled_name(check_kernels):
    image = b"\0.text._Z9attentionILi64ELi128EEvPKtif\0_Z9attentionILi64ELi64EEvPKtif\0"
    assert check_kernels.mangled_name("softmax_fused", image) == "softmax_fused"
    assert check_kernels.mangled_name("attention<64, 64>", image) == "_Z9attentionILi64ELi64EEvPKtif"
    with pytest.raises(BrakecheckError, match="not in the cubin"):
        check_kernels.mangled_name("attention<32, 64>", image)


def test_unwritten_elements_are_reported_as_such(check_kernels):
    operator, case = catalogue()["transpose"], Case.of(rows=2, columns=3)
    inputs = operator.make_inputs(case, Make("cpu", 1))
    reference = operator.compute_reference(case, **inputs)
    out = {"out": inputs["x"].T.contiguous()}
    assert check_kernels.compare(operator, case, inputs, reference, out)["ok"]
    out["out"][1, 1] = float("nan")
    verdict = check_kernels.compare(operator, case, inputs, reference, out)
    assert not verdict["ok"] and "1 elements of out not written" in verdict["problem"]


def test_usage_errors_are_one_message(check_kernels, monkeypatch):
    monkeypatch.setattr("sys.argv", ["check_kernels.py"])
    with pytest.raises(BrakecheckError, match="either a bundle or --nvcc"):
        check_kernels.main()
    monkeypatch.setattr("sys.argv", ["check_kernels.py", "--nvcc", "--operator", "sofmax"])
    with pytest.raises(BrakecheckError, match="no operator 'sofmax'"):
        check_kernels.main()
