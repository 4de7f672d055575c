"""Prints what one CUDA toolchain really does, as one entry of toolchains.json: the truth that the tables are tested on.

    uv pip install --target DIR 'cuda-toolkit[nvrtc,nvcc]==12.9.*'
    python tests/data/observe_toolchain.py DIR
"""

import ctypes
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = b'extern "C" __global__ void k(float* p, int n) { int i = blockIdx.x * 256 + threadIdx.x; if (i < n) p[i]++; }'
HEAD = (".version", ".target", ".address_size")
ISAS = [f"8.{n}" for n in range(9)] + [f"9.{n}" for n in range(8)]


def compile_one(nvrtc, arch):
    """(PTX text, cubin bytes) or None where this NVRTC does not know the architecture."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE, b"k.cu", 0, None, None)
    if nvrtc.nvrtcCompileProgram(program, 1, (ctypes.c_char_p * 1)(f"-arch={arch}".encode())):
        return None
    out = []
    for kind in ("PTX", "CUBIN"):
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer)
        out.append(buffer.raw)
    return out[0].rstrip(b"\0").decode(), out[1]


def accepted(ptxas, ptx):
    """PTX ISA versions that this ptxas reads."""
    good = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.ptx")
        for isa in ISAS:
            path.write_text(re.sub(r"\.version \S+", f".version {isa}", ptx))
            done = subprocess.run([ptxas, "-arch=sm_80", path, "-o", path.with_suffix(".cubin")], capture_output=True)
            if done.returncode == 0:
                good.append(isa)
    return good


def main(root):
    library = next(Path(root).glob("nvidia/*/lib/libnvrtc.so.1?"))
    for builtins in library.parent.glob("libnvrtc-builtins*"):
        ctypes.CDLL(str(builtins))
    nvrtc = ctypes.CDLL(str(library))
    ptxas = next(Path(root).glob("nvidia/*/bin/ptxas"))
    said = [subprocess.run([ptxas, flag], capture_output=True, text=True).stdout for flag in ("--version", "--help")]
    made = {arch: compile_one(nvrtc, arch) for arch in ("sm_80", "sm_90a", "sm_100")}
    print(json.dumps({
        "release": re.search(r"release (\d+\.\d+)", said[0])[1],
        "ptxas": re.search(r"V(\d\S+)", said[0])[1],
        "archs": sorted(set(re.findall(r"'(sm_\w+)'", said[1]))),
        "accepts": accepted(ptxas, made["sm_80"][0]),
        "ptx": "\n".join(line for line in made["sm_80"][0].splitlines() if line.startswith(HEAD)),
        "cubin_headers": {arch: both[1][:64].hex() for arch, both in made.items() if both},
    }))


if __name__ == "__main__":
    main(sys.argv[1])
