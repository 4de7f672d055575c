"""Kernel names for people. Demangling: the C++ runtime, else a pure Python demangler, else the name as it is."""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from typing import Any, Callable, Optional

_LIBRARIES = ("libstdc++.so.6", "libc++abi.so.1", "libc++abi.dylib")


@lru_cache(maxsize=1)
def _native() -> Optional[Callable[[bytes], Optional[str]]]:
    """__cxa_demangle of the C++ runtime; None where no C++ runtime is installed."""
    for name in _LIBRARIES:
        try:
            return _wrapped(ctypes.CDLL(name).__cxa_demangle, ctypes.CDLL(None).free)
        except (OSError, AttributeError):
            continue
    return None


def _wrapped(function: Any, free: Any) -> Callable[[bytes], Optional[str]]:
    function.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]

    def call(mangled: bytes) -> Optional[str]:
        text = function(mangled, None, None, ctypes.byref(ctypes.c_int()))
        if not text:
            return None
        try:
            return ctypes.string_at(text).decode("utf-8", "replace")
        finally:
            free(text)

    return call


def _portable(mangled: str) -> Optional[str]:
    import itanium_demangler

    try:
        parsed = itanium_demangler.parse(mangled)
    except (NotImplementedError, RecursionError):
        return None
    return str(parsed) if parsed is not None else None


@lru_cache(maxsize=65536)
def demangle(name: str) -> str:
    """The C++ name of a mangled one; what is not mangled (extern "C") or cannot be read comes back unchanged."""
    if not name.startswith("_Z"):
        return name
    native = _native()
    try:
        found = native(name.encode()) if native else _portable(name)
    except UnicodeEncodeError:
        return name
    return found or name


def is_called(pattern: str, mangled: str, demangled: str) -> bool:
    """Whether a user who wrote `pattern` meant this kernel: its mangled name, its readable one with or without result,
    parameters, namespaces and template arguments. * and ? stand for anything; blanks do not matter."""
    bare = short_name(demangled)
    unqualified = re.sub(r"^(?:\w+::)+", "", bare)
    names = {mangled, demangled, bare, unqualified, bare.partition("<")[0], base_name(demangled)}
    wanted = re.escape("".join(pattern.split())).replace(r"\*", ".*").replace(r"\?", ".")
    return any(re.fullmatch(wanted, "".join(name.split())) for name in names)


def base_name(demangled: str) -> str:
    """softmax of "void ns::softmax<float, 4>(float*, int)": without result, namespaces, template and parameters."""
    text = demangled.replace("(anonymous namespace)", "").replace("operator<", "operator_lt")
    depth, flat = 0, []
    for char in text:
        depth += char == "<"
        if depth == 0:
            flat.append(char)
        depth -= char == ">" and depth > 0
    head = "".join(flat).split("(")[0].strip()
    return re.split(r"::|\s", head)[-1] if head else demangled


def short_name(case: str, limit: int = 80) -> str:
    """A case's kernel without result and parameters: softmax<float, 4>, or softmax -DPAD=0 with what its source was
    compiled with."""
    name, separator, defines = case.partition(" -D")
    text = name.replace("(anonymous namespace)::", "")
    text = re.sub(r"\(.*", "", text).strip() or name
    text = re.sub(r"^(void|auto|int)\s+", "", text)
    text = text if len(text) <= limit else text[:limit - 1] + "…"
    return text + separator + defines
