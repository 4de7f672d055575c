"""Occupancy against NVIDIA's own calculator, launches that cannot work, the architecture table."""

from pathlib import Path

import pytest

from brakecheck.evidence.limits import launch_limits, most_threads, occupancy
from brakecheck.model.arch import ARCHS, arch_of, capability_of

ROWS = [line.split() for line in (Path(__file__).parent / "data/cubins/occupancy.txt").read_text().splitlines()
        if not line.startswith("#")]


@pytest.mark.parametrize("arch", ARCHS)
def test_occupancy_is_the_calculators(arch):
    rows = [r for r in ROWS if r[0] == arch]
    assert len(rows) > 10
    for _, *numbers in rows:
        registers, threads, static, dynamic, barriers, blocks = map(int, numbers)
        got = occupancy(arch, registers, threads, static, dynamic, barriers)
        assert got.warps == blocks * -(-threads // 32), numbers
        assert (got.limiter == "cannot launch") == (blocks == 0)
        assert got.ratio <= 1


def test_limiter_names_what_runs_out():
    assert occupancy("sm_90", 128, 256).limiter == "registers"
    assert occupancy("sm_90", 32, 128, dynamic_shared=100_000).limiter == "shared memory"
    assert occupancy("sm_90", 16, 32, barriers=16).limiter == "barriers"
    assert occupancy("sm_90", 24, 1024).limiter == "warps"
    assert occupancy("sm_90", 16, 32).limiter == "blocks"


def test_feature_suffix_is_the_same_hardware():
    assert arch_of("sm_90a") is arch_of("sm_90") and arch_of("compute_100f") is arch_of("sm_100")
    assert arch_of("sm_42") is None and arch_of("gfx942") is None
    assert (capability_of("sm_120a"), capability_of("x")) == (120, None)
    assert occupancy("sm_42", 32, 128) is None and most_threads("sm_42", 32) is None


def test_registers_60_to_170_fail_at_512_threads():
    """F17: the launch that worked with 60 registers cannot start with 170."""
    assert launch_limits("sm_80", 60, 512) == ()
    (limit,) = launch_limits("sm_80", 170, 512)
    assert (limit.resource, limit.asked, limit.available) == ("registers", 16 * 176 * 32, 65536)
    assert most_threads("sm_80", 170) == 256
    assert launch_limits("sm_80", 170, 256) == ()
    assert launch_limits("sm_80", 170, 257) != ()


def test_shared_memory_is_checked_for_the_whole_fleet():
    """F5: fits an H100, not an L4 (99 KiB)."""
    limits = launch_limits("sm_90", 64, 128, dynamic_shared=100 * 1024, min_arch=80)
    assert {x.arch for x in limits} == {"sm_86", "sm_89", "sm_120", "sm_121"}
    assert all(x.available == 99 * 1024 and "will not launch on " + x.arch in x.text for x in limits)
    assert launch_limits("sm_90", 64, 128, dynamic_shared=99 * 1024, min_arch=80) == ()
    assert {x.arch for x in launch_limits("sm_90a", 64, 128, dynamic_shared=230_000, also=["sm_80"])} == {"sm_80"}
    assert [x.arch for x in launch_limits("sm_90a", 64, 128, dynamic_shared=240_000, also=[])] == ["sm_90"]


def test_other_refusals():
    assert [x.resource for x in launch_limits("sm_90", 32, 512, max_threads=256)] == ["threads"]
    assert [x.available for x in launch_limits("sm_90", 32, 2048, max_threads=256)][0] == 1024
    (limit,) = launch_limits("sm_90", 32, 128, static_shared=50_000, also=["sm_90"])
    assert (limit.resource, limit.available) == ("static shared memory", 49152)


def test_without_a_launch_configuration_only_static_resources_count():
    assert launch_limits("sm_90", 255, None, max_threads=64) == ()
