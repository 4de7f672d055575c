"""Stand-ins for the standard library's headers, which NVRTC does not have and many device sources include.

They forward to libcu++ (cuda/std) of the toolchain, are searched after every other directory, and declare nothing that
only a host could use. CUB before CUDA 12.6 needs them, and so does every source that includes <cstdint>.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Dict

from . import cache

_FORWARDED = ("algorithm", "array", "bit", "complex", "concepts", "cstddef", "functional",
              "initializer_list", "iterator", "limits", "numeric", "optional", "ratio", "span", "tuple", "type_traits",
              "utility")
# Only declared, never callable from device code, or built into NVRTC (printf, assert, memcpy, the C mathematics).
_EMPTY = ("assert.h", "cassert", "cstdio", "cstdlib", "cstring", "math.h", "memory", "stdio.h", "stdlib.h", "string.h")
# Not from cuda/std, where <cmath> costs seconds of compile time from CUDA 12.9 on.
_MATH = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign", "cos", "cosh",
    "erf", "erfc", "exp", "exp2", "expm1", "fabs", "fdim", "floor", "fma", "fmax", "fmin", "fmod", "frexp", "hypot",
    "ilogb", "isfinite", "isinf", "isnan", "ldexp", "lgamma", "log", "log10", "log1p", "log2", "logb", "modf",
    "nearbyint", "nextafter", "pow", "remainder", "rint", "round", "signbit", "sin", "sinh", "sqrt", "tan", "tanh",
    "tgamma", "trunc",
)
_STD = "namespace std { using namespace ::cuda::std; }\n"
_FORWARD = "#pragma once\n#if __has_include(<cuda/std/NAME>)\n#include <cuda/std/NAME>\n" + _STD
# The CCCL wheels before 12.3 hold no libcu++.
_ABSENT = "#else\n#error NVRTC has no <NAME>, and this toolchain no libcu++ to take it from\n"
_OPTIONAL = ("cstddef",)
_INTEGERS = "#else\n" + "".join(
    f"typedef {sign} {kind} {letter}int{bits}_t;\nnamespace std {{ using ::{letter}int{bits}_t; }}\n"
    for bits, kind in (("8", "char"), ("16", "short"), ("32", "int"), ("64", "long"), ("ptr", "long"))
    for sign, letter in (("signed", ""), ("unsigned", "u")))
_CONSTANTS = {
    "cfloat": {"FLT_MAX": "3.402823466e+38F", "FLT_MIN": "1.175494351e-38F", "FLT_EPSILON": "1.192092896e-07F",
               "FLT_DIG": "6", "FLT_MANT_DIG": "24", "DBL_MAX": "1.7976931348623157e+308",
               "DBL_MIN": "2.2250738585072014e-308", "DBL_EPSILON": "2.2204460492503131e-16", "DBL_DIG": "15",
               "DBL_MANT_DIG": "53"},
    "climits": {"CHAR_BIT": "8", "SCHAR_MIN": "(-128)", "SCHAR_MAX": "127", "UCHAR_MAX": "255", "CHAR_MIN": "(-128)",
                "CHAR_MAX": "127", "SHRT_MIN": "(-32768)", "SHRT_MAX": "32767", "USHRT_MAX": "65535",
                "INT_MAX": "2147483647", "INT_MIN": "(-INT_MAX - 1)", "UINT_MAX": "4294967295U",
                "LONG_MAX": "9223372036854775807L", "LONG_MIN": "(-LONG_MAX - 1L)",
                "ULONG_MAX": "18446744073709551615UL", "LLONG_MAX": "9223372036854775807LL",
                "LLONG_MIN": "(-LLONG_MAX - 1LL)", "ULLONG_MAX": "18446744073709551615ULL"},
}


def _header(name: str, otherwise: str = "") -> str:
    return f"{_FORWARD}{otherwise}#endif\n".replace("NAME", name)


def _texts() -> Dict[str, str]:
    texts = {name: _header(name, "" if name in _OPTIONAL else _ABSENT) for name in _FORWARDED}
    texts.update(dict.fromkeys(_EMPTY, "#pragma once\n"))
    for name, constants in _CONSTANTS.items():
        texts[name] = "#pragma once\n" + "".join(
            f"#ifndef {key}\n#define {key} {value}\n#endif\n" for key, value in constants.items())
    # libcu++ puts the types of <cstdint> into the global namespace as well.
    texts["cstdint"] = _header("cstdint", _INTEGERS)
    texts.update({"stdint.h": "#pragma once\n#include <cstdint>\n", "stddef.h": "#pragma once\n#include <cstddef>\n",
                  "float.h": "#pragma once\n#include <cfloat>\n", "limits.h": "#pragma once\n#include <climits>\n"})
    texts["cmath"] = "#pragma once\nnamespace std {\n" + "".join(f"using ::{name};\n" for name in _MATH) + "}\n"
    for name in ("iostream", "ostream"):
        texts[name] = "#pragma once\nnamespace std { class ostream; }\n"
    return texts


_TEXTS = _texts()
DIGEST = hashlib.sha256(repr(sorted(_TEXTS.items())).encode()).hexdigest()


def directory() -> Path:
    """The directory that holds them, in the cache."""
    def fill(target: Path) -> None:
        for name, text in _TEXTS.items():
            (target / name).write_text(text)

    return cache.build(cache.root() / f"host-headers-{DIGEST[:12]}", fill)
