"""What the tests share: one cache for downloaded toolchains, and the disassembler that is in it."""

import os

import pytest
from hypothesis import settings

from brakecheck.model import UnavailableError

# CI draws the same examples each time, so that it fails for what changed; other runs look for new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def newest_nvdisasm():
    """Path of the newest disassembler, downloaded into the cache when it is not there yet."""
    from brakecheck.stack.toolchain import disassembler

    try:
        return disassembler().nvdisasm
    except UnavailableError as error:
        pytest.skip(f"no disassembler: {error.what}")
