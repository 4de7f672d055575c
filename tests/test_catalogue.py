"""Every kernel of the catalogue, with real compilers: it compiles, its entries are in the cubin, little spills."""

import pytest

from brakecheck.evidence.analyse import analyse
from brakecheck.ops import catalogue_sources
from brakecheck.stack.compile import compile_all
from brakecheck.stack.toolchain import open_stacks

pytestmark = pytest.mark.network
ARCHS = ["sm_80", "sm_89", "sm_90a"]


@pytest.fixture(scope="module")
def units(newest_nvdisasm):
    sources = catalogue_sources()
    made = compile_all(open_stacks(["cuda==12.4", "cuda==13.2"]), sources, ARCHS)
    return {side[0].stack: analyse(side, sources, newest_nvdisasm) for side in made}


def meant(source, arch):
    return (not source.archs or arch in source.archs) and int(arch[3:5]) >= source.min_arch


def test_every_kernel_compiles_on_old_and_new(units):
    wanted = {(s.path, arch) for s in catalogue_sources() for arch in ARCHS if meant(s, arch)}
    for stack, made in units.items():
        failed = {(u.source, u.arch): u.message for u in made if u.status == "failed"}
        assert not failed, f"{stack}: {failed}"
        assert {(u.source, u.arch) for u in made if u.status == "ok"} == wanted


def test_every_entry_is_in_its_cubin_with_its_launch(units):
    for made in units.values():
        for unit in made:
            names = {k.name for k in unit.kernels}
            assert unit.status != "ok" or (names and set(unit.entries.values()) <= names), unit.source
            for kernel in unit.kernels:
                assert kernel.resources.registers > 0 and kernel.instructions > 0
                assert not [x for x in kernel.limits if x.arch == unit.arch], (kernel.demangled, kernel.limits)


def test_kernels_use_what_they_are_about(units):
    """The instructions that a kernel exists to show are in its machine code."""
    for made in units.values():
        mix = {}
        for unit in made:
            if unit.arch == "sm_90a":
                for kernel in unit.kernels:
                    mix[kernel.name] = kernel.mix
        assert any(c.startswith("tensor.hgmma") for c in mix["bf16_gemm_wgmma"])
        assert any(c.startswith("tensor.imma") for c in mix["int8_gemm_plain"])
        assert any(c.startswith(("tma", "copy", "bulk")) for c in mix["int8_gemm_tma"])
        assert not any(c.startswith(("tma", "copy.bulk", "bulk")) for c in mix["int8_gemm_plain"])
        assert any(c.startswith("tma") for c in mix["scatter_bulk"])


def test_little_is_spilled(units):
    for stack, made in units.items():
        for unit in made:
            for kernel in unit.kernels:
                assert (kernel.resources.spill_stores or 0) <= 64, (stack, unit.arch, kernel.demangled)
