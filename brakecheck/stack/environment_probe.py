"""Runs inside the Python that is examined (standard library only, Python 3.9): what it loads, as JSON on stdout.

torch is imported and no kernel is run. The part "before" is printed first, on a line of its own, so that an import that
kills the process still leaves it.
"""

from __future__ import annotations

import json
import os
import site
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List


def packages() -> Dict[str, str]:
    found: Dict[str, str] = {}
    for package in metadata.distributions():
        name = package.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), package.version)
    return found


def mapped() -> List[str]:
    """Files mapped into this process, in the order of their addresses; none where there is no /proc."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(None, 5) for line in lines]
    return list(dict.fromkeys(f[5] for f in fields if len(f) == 6 and f[5].startswith("/")))


def torch_facts() -> Dict[str, Any]:
    try:
        import torch
    except ModuleNotFoundError as error:
        return {} if error.name == "torch" else {"error": str(error)}
    except Exception as error:  # an undefined symbol, a library that is absent: exactly what is looked for
        return {"error": f"{type(error).__name__}: {error}"}
    facts: Dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda,
                             "hip": getattr(torch.version, "hip", None)}
    try:
        flags = torch._C._cuda_getArchFlags() if torch.version.cuda else None
    except (AttributeError, RuntimeError):
        flags = None
    facts["archs"] = flags.split() if flags else None
    try:
        facts["available"] = torch.cuda.is_available()
        if facts["available"]:
            facts["devices"] = [[torch.cuda.get_device_name(i), "sm_{}{}".format(*torch.cuda.get_device_capability(i))]
                                for i in range(torch.cuda.device_count())]
    except Exception as error:
        facts["device_error"] = f"{type(error).__name__}: {error}"
    return {k: v for k, v in facts.items() if v is not None}


def main() -> None:
    folders = [sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *site.getsitepackages()]
    before = {"python": sys.version.split()[0], "executable": sys.executable, "packages": packages(),
              "folders": list(dict.fromkeys(folders)), "variables": dict(os.environ)}
    print(json.dumps(before), flush=True)
    print(json.dumps({"torch": torch_facts(), "mapped": mapped()}), flush=True)


if __name__ == "__main__":
    main()
