"""A worker that makes its times up, so that the controller's logic is tested in milliseconds.

    fake_worker.py SEED LEVEL NOISE [OPERATOR=FAULT ...] [main.py]

Each visit draws its own level (that is the between-process effect). FAULT: crash, crash-once, hang, oom, error, slow
(times 1.2), missing, poison (says crash and lives on, but fails whatever comes after).
"""

import json
import os
import random
import sys
import time
from pathlib import Path

seed, level, noise = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
faults = dict(a.split("=") for a in sys.argv[4:] if "=" in a)


def count(what):
    """How often this was called by any process of this arm: visits are one after the other, so it is repeatable."""
    counter = Path(os.environ["FAKE_FOLDER"]) / f"{what}-{seed}"
    with counter.open("a") as file:
        file.write("x")
    return counter.stat().st_size


count("starts")
poisoned = []
KEY = {"timer": "steady-clock", "mode": "eager", "cache": "cold", "duty": "burst", "inputs": "normal", "harness": "1"}
CASES = {
    f"op{k}": {"title": "", "implementations": ["torch"], "cases": {"n=1": {"params": {"n": 1}}}} for k in range(3)
}


def measure(request):
    fault = faults.get(request["operator"], "")
    marker = Path(os.environ["FAKE_FOLDER"]) / f"crashed-{seed}"
    if fault == "crash" or (fault == "crash-once" and not marker.exists()):
        marker.touch()
        os._exit(7)
    if fault == "poison" or poisoned:
        poisoned.append(1)
        return {"ok": False, "state": "crash" if fault == "poison" else "error", "message": "the device is gone"}
    if fault == "hang":
        time.sleep(600)
    if fault in ("oom", "error", "missing"):
        return {"ok": False, "state": fault, "message": f"{fault} was asked for"}
    own = random.Random(f"{seed} {request['operator']} {count(request['operator'])}")
    scale = 1.2 if fault == "slow" else 1.0
    us = level * scale * (1 + request["plan"]["inject"]) * pow(2.718281828, own.gauss(0, noise))
    return {
        "ok": True,
        "result": {
            "key": KEY,
            "us": [us * own.uniform(0.998, 1.002) for _ in range(9)],
            "calls": request["plan"].get("calls", 5),
            "first_call_ms": 1.0,
            "memory": {"host_peak": 1000},
            "settle": {"seconds": 0.0, "settled": True},
        },
    }


ABOUT = {
    "components": [{"name": "python", "version": "3"}],
    "environment": {},
    "warnings": [],
    "device": {"name": "made up", "arch": "none", "kind": "cpu"},
}
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "exit":
        break
    if request["do"] == "fingerprint" and faults.get("device") == "unusable":
        result = {"ok": False, "state": "unusable", "message": "no CUDA device: the driver supports CUDA 12.4"}
    elif request["do"] == "measure":
        result = measure(request)
    else:
        result = {"ok": True, "result": {"hello": {}, "ready": {}, "fingerprint": ABOUT, "cases": CASES}[request["do"]]}
    print(json.dumps({"id": request["id"], **result}), flush=True)
