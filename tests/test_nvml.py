"""The NVML calls against a made-up driver library, compiled here: layouts and argument types, without a GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brakecheck.worker import nvml

ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from brakecheck.worker import nvml
gpu = nvml.open_gpu("GPU-abc")
print(json.dumps({"state": gpu.state(), "about": gpu.describe(), "process": gpu.process_memory(),
                  "energy": gpu.energy(), "driver": nvml.driver_versions(), "other": nvml.open_gpu("GPU-x") is None,
                  "index": nvml.open_gpu(None, 0) is not None, "none": nvml.open_gpu(None, 3) is None}))
"""


def test_readings_of_a_device(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make up a driver library with")
    here = Path(__file__).parent
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, here / "measure" / "nvml.c"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(here.parent)],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["state"] == {
        "sm_mhz": 1980, "memory_mhz": 3201, "celsius": 41, "watts": 123.456, "reasons": ["power cap"],
    }
    assert found["about"] == {
        "name": "Made Up 100", "uuid": "GPU-abc", "max_sm_mhz": 1980, "power_limit_watts": 700.0, "memory_bytes": 2**37,
        "links": {"GPU-2": "NVLink", "GPU-3": "SYS"}, "nvlinks": 4,
    }
    assert found["process"] == 3 << 30 and found["energy"] == 1 << 40
    assert found["driver"] == {"driver": "580.65.06", "driver-cuda": "13.0"}
    assert found["other"] and found["index"] and found["none"]


def test_which_reasons_slow_a_clock():
    assert nvml.slowing(["idle", "power cap"]) and nvml.slowing(["thermal (hardware)"])
    assert not nvml.slowing(["idle"]) and not nvml.slowing(["application clocks"]) and not nvml.slowing([])
