"""One NVRTC in a process of its own: `python nvrtc_worker.py LIBNVRTC`, JSON lines on standard input and output.

Two NVRTCs cannot live in one process (their builtins libraries clash), so each toolchain gets its own. Started by path,
standard library only.

The first line out: {"version": [12, 9], "archs": [50, ...]}, or {"error": "..."} and the end of the process.
A request: {"name": "softmax.cu", "source": "...", "options": [...], "expressions": ["softmax<float, 4>"]}.
Its answer: {"result": 0, "error": null, "log": "...", "seconds": 0.4, "ptx": "...", "lowered": {expression: "_Z..."}}
where `result` is the nvrtcResult (0 success, 5 invalid option, 6 compilation error) and `error` its name.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional


class Nvrtc:
    """The functions of libnvrtc that are needed, with the documented C signatures."""

    def __init__(self, path: Path) -> None:
        # libnvrtc opens its builtins by bare name; loaded first from the same directory, they are found whatever
        # LD_LIBRARY_PATH says. Early releases have one builtins file, later ones an `.alt` variant beside it.
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(str(path))
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def name(self, result: int) -> str:
        return (self.lib.nvrtcGetErrorString(result) or b"").decode(errors="replace")

    def call(self, function: str, *arguments: Any) -> None:
        result = getattr(self.lib, function)(*arguments)
        if result:
            raise RuntimeError(f"{function}: {self.name(result)}")

    def version(self) -> List[int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return [major.value, minor.value]

    def archs(self) -> List[int]:
        count = ctypes.c_int()
        self.call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        values = (ctypes.c_int * count.value)()
        self.call("nvrtcGetSupportedArchs", values)
        return sorted(values)

    def text(self, size_function: str, function: str, program: Any) -> str:
        size = ctypes.c_size_t()
        self.call(size_function, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(function, program, buffer)
        return buffer.value.decode(errors="replace")

    def compile(self, request: Dict[str, Any]) -> Dict[str, Any]:
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), request["source"].encode(errors="surrogateescape"),
                  request["name"].encode(errors="surrogateescape"), 0, None, None)
        try:
            for expression in request["expressions"]:
                self.call("nvrtcAddNameExpression", program, expression.encode())
            options = [option.encode(errors="surrogateescape") for option in request["options"]]
            start = time.perf_counter()
            result = self.lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            answer: Dict[str, Any] = {
                "result": result, "error": self.name(result) if result else None,
                "seconds": time.perf_counter() - start,
                "log": self.text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program).strip(),
            }
            if result == 0:
                answer["ptx"] = self.text("nvrtcGetPTXSize", "nvrtcGetPTX", program)
                answer["lowered"] = {e: self.lowered(program, e) for e in request["expressions"]}
            return answer
        finally:
            self.lib.nvrtcDestroyProgram(ctypes.byref(program))

    def lowered(self, program: Any, expression: str) -> str:
        name = ctypes.c_char_p()
        self.call("nvrtcGetLoweredName", program, expression.encode(), ctypes.byref(name))
        return (name.value or b"").decode()


def serve(library: Path, send: Callable[[Dict[str, Any]], None]) -> Optional[int]:
    try:
        nvrtc = Nvrtc(library)
        send({"version": nvrtc.version(), "archs": nvrtc.archs()})
    except (OSError, RuntimeError, AttributeError) as error:
        send({"error": f"{library}: {error}"})
        return 1
    for line in sys.stdin:
        try:
            send(nvrtc.compile(json.loads(line)))
        except RuntimeError as error:
            send({"result": -1, "error": str(error), "log": "", "seconds": 0.0})
    return 0


def main() -> Optional[int]:
    # What the library itself prints must not mix with the answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(answer: Dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    return serve(Path(sys.argv[1]), send)


if __name__ == "__main__":
    sys.exit(main())
