"""Stand-ins for uv, NVRTC and ptxas: the stack layer's behaviour without network, wheels or a minute's wait.

`python fake_stack.py SPEC` opens a stack with them in a process of its own and prints its components as JSON.
"""

import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path

RELEASES = ["12.8.0", "12.9.0", "12.9.1.0", "13.0.0.0", "13.2.0"]
PTXAS = r"""#!/bin/sh
# RELEASE
case "$*" in
--help) echo "Allowed values: 'compute_80','sm_80','sm_89','sm_90','sm_90a'MORE."; exit 0;;
esac
echo "ptxas" >> "$FAKE_LOG"
if grep -q BADPTX kernel.ptx; then echo "ptxas kernel.ptx, line 4; error: Unknown symbol 'BADPTX'"; exit 255; fi
if grep -q SLOWPTX kernel.ptx; then sleep 60; fi
echo "ptxas info    : Used 8 registers"
{ echo "cubin of RELEASE"; cat kernel.ptx; } > kernel.cubin
"""
RUNTIME_HEADER = "#define FAKE_CUDA 1\n"


def prepare(folder, monkeypatch=None):
    """Patches the layer to use the stand-ins; the environment variables reach child processes too."""
    import uv

    from brakecheck.stack import children, toolchain

    program = folder / "uv"
    if not program.exists():
        program.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S {Path(__file__).resolve()} --uv \"$@\"\n")
        program.chmod(0o755)
    worker = folder / "nvrtc.py"
    worker.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                      "import fake_stack\nfake_stack.nvrtc(sys.argv[1])\n")
    put = monkeypatch.setattr if monkeypatch else setattr
    put(uv, "find_uv_bin", lambda: str(program))
    put(children, "_WORKER", worker)
    put(toolchain, "_WORKER", worker)
    environment = {"BRAKECHECK_CACHE": str(folder / "cache"), "FAKE_LOG": str(folder / "log"),
                   "UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if monkeypatch else os.environ.__setitem__(name, value)


def log(text):
    with Path(os.environ["FAKE_LOG"]).open("a") as handle:
        handle.write(text + "\n")


def calls(word):
    path = Path(os.environ["FAKE_LOG"])
    return [line for line in path.read_text().splitlines() if line.startswith(word)] if path.exists() else []


def numbers(version):
    return [int(part) for part in version.split(".")]


def fake_uv(arguments):
    mode = os.environ.get("FAKE_UV", "")
    if "--offline" in arguments:
        sys.exit("error: No solution found when resolving dependencies")
    if mode == "no-network":
        sys.exit("error: Request failed after 3 retries\n  cause: Failed to fetch: the index\n")
    if arguments[1] == "compile":
        log("resolve")
        requirement = sys.stdin.read().strip()
        extras = (re.search(r"\[(.*)\]", requirement) or [None, ""])[1].split(",")
        found = re.search(r"(==|<|>)([\d.]+?)(\.\*)?$", requirement)
        kind, version = found.groups()[:2] if found else (">", "0")
        fits = {"==": lambda r: r == version or r.startswith(version + "."),
                "<": lambda r: numbers(r) < numbers(version), ">": lambda r: numbers(r) > numbers(version)}[kind]
        releases = [r for r in RELEASES if fits(r)]
        if not releases:
            print("error: No solution found when resolving dependencies", file=sys.stderr)
            sys.exit(1)
        release = releases[0] if "lowest" in arguments else releases[-1]
        print(f"cuda-toolkit=={release}")
        suffix = "-cu12" if release.startswith("12.") else ""
        names = {"nvrtc": "nvidia-cuda-nvrtc", "nvcc": "nvidia-cuda-nvcc", "cudart": "nvidia-cuda-runtime",
                 "nvdisasm": "nvidia-cuda-nvdisasm", "cuobjdump": "nvidia-cuda-cuobjdump"}
        for extra in extras:
            if extra in names:
                print(f"{names[extra]}{suffix}=={release}")
        return
    log("install")
    target = Path(arguments[arguments.index("--target") + 1])
    if mode == "hang":
        (target / "half").write_text("half")
        time.sleep(60)
    time.sleep(float(os.environ.get("FAKE_UV_SECONDS", "0")))
    for pin in (a for a in arguments if re.match(r"nvidia-.*==", a)):
        wheel(target, *pin.split("=="))


def wheel(target, name, release):
    bare = re.sub(r"-cu12$", "", name)
    own = {"nvidia-cuda-nvrtc": "cuda_nvrtc", "nvidia-cuda-nvcc": "cuda_nvcc"}.get(bare, "cuda_runtime")
    top = f"nvidia/{own if name.endswith('-cu12') else 'cu13'}"
    more = "" if release.startswith("12.8") else ",'sm_100a'"
    files = {
        "nvidia-cuda-nvrtc": {"lib/libnvrtc.so.12": f"nvrtc {release}"},
        "nvidia-cuda-nvcc": {"bin/ptxas": PTXAS.replace("RELEASE", release).replace("MORE", more)},
        "nvidia-cuda-runtime": {"include/cuda_runtime.h": RUNTIME_HEADER},
        "nvidia-cuda-nvdisasm": {"bin/nvdisasm": "nvdisasm"}, "nvidia-cuda-cuobjdump": {"bin/cuobjdump": "cuobjdump"},
    }[bare]
    record = target / f"{name.replace('-', '_')}-{release}.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    for path, text in files.items():
        file = target / top / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    record.write_text("".join(f"{top}/{path},,\n" for path in files))


def nvrtc(library):
    release = Path(library).read_text().split()[1]
    print(json.dumps({"version": [12, 0], "archs": [80, 89, 90, *([] if release.startswith("12.8") else [100])]}),
          flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        source = request["source"]
        log(f"nvrtc {request['name']}")
        if "CRASH" in source:
            print("worker went up in smoke", file=sys.stderr, flush=True)
            os.abort()
        if "SLEEP" in source:
            time.sleep(60)
        answer = {"result": 0, "error": None, "log": "", "seconds": 0.01}
        if "SYNTAX" in source:
            answer.update(result=6, error="NVRTC_ERROR_COMPILATION", log=f"{request['name']}(1): error: SYNTAX")
        else:
            names = {e: "_Z" + hashlib.sha256(e.encode()).hexdigest()[:8] for e in request["expressions"]}
            body = "\n".join(f".visible .entry {n}() {{ ret; }}" for n in [*names.values(), "plain"])
            bad = "BADPTX" if "BADPTX" in source else "SLOWPTX" if "SLOWPTX" in source else ""
            answer.update(ptx=f"// made by {release}\n.version 8.0\n.target sm_80\n{bad}\n{body}\n", lowered=names)
        print(json.dumps(answer), flush=True)


def main():
    if sys.argv[1] == "--uv":
        return fake_uv(sys.argv[2:])
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    prepare(Path(sys.argv[2]))
    from brakecheck.model import encode
    from brakecheck.stack.toolchain import open_stack

    print(json.dumps(encode(open_stack(sys.argv[1]).stack)))
    return None


if __name__ == "__main__":
    main()
