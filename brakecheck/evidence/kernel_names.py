"""Kernel names and call paths without what changes between builds: what is left identifies the work.

`plain` keeps everything that chooses the machine code (tiles, template arguments) and drops what compilers number
afresh (lambda instances, hashes). `family` drops the choices as well: two tiles of one matrix product are one family.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import List

# A functor or operator named in template arguments tells two elementwise kernels apart.
FUNCTOR = re.compile(r"(\w*?[A-Za-z]\w*?)(?:Functor|_kernel_cuda|_kernel_impl|Ops|Op)\b")
PLUMBING = {"gpu", "gpu_kernel_impl_nocast", "gpu_kernel", "Binary", "Unary"}
# Names that say nothing: what the template was made for does.
GENERIC = {"kernel", "kernel2", "device_kernel", "kernel_cutlass"}
TILE = re.compile(r"(?:tile(?:size)?)?\d+(?:x\d+)+(?:x?[a-z]{0,2}\d*)?")
ARCH = re.compile(r"(?:sm|compute|gfx)_?\d{2,4}[af]?|(?:ampere|hopper|blackwell|volta|turing|ada|cutlass|xmma)", re.I)
HASH = re.compile(r"(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}", re.I)
LAMBDA = re.compile(r"\(instance \d+\)|#\d+|\{lambda[^{}]*\}")
INDEX = re.compile(r"(?<=[._#:\[( ])\d+(?=$|[._\]) ,>])")


@lru_cache(maxsize=65536)
def plain(name: str) -> str:
    """The name without lambda numbering, hashes and white space that demanglers put in differently."""
    text = LAMBDA.sub("", name)
    text = re.sub(r"(?<![A-Za-z0-9])" + HASH.pattern + r"(?![A-Za-z0-9])", "*", text)
    text = re.sub(r"\((?:unsigned )?(?:int|long|bool|char|short)(?: long)*\)(?=[\d\w])", "", text)  # (int)128 -> 128
    return re.sub(r"\s+", "", text)


@lru_cache(maxsize=65536)
def family(name: str) -> str:
    """void ns::kernel<float, 128>(int) -> kernel; sm80_xmma_gemm_f16_128x64_tn -> gemm_f16_tn; triton_poi_add_3 ->
    triton_poi_add. A functor in the template arguments is kept: elementwise_kernel[Mul]."""
    if name.startswith("[CUDA "):
        return re.sub(r" (?:kind )?\d+\]$", "]", name)
    if name.startswith("Cijk_"):  # Tensile (rocBLAS, hipBLASLt): the tile and everything after it is tuning
        return name.split("_MT")[0]
    head, inside = _outside_brackets(name)
    word = re.split(r"[\s*&]+", head.strip())[-1].split("::")[-1] or head.strip() or name
    tokens = [t for t in re.split(r"[_.\-]+", word) if t]
    kept = [t for t in tokens if not t.isdigit() and not TILE.fullmatch(t) and not ARCH.fullmatch(t)
            and not HASH.fullmatch(t) and not re.fullmatch(r"v\d+|stages?\d+|warpgroupsize\w*|\d+x?", t)]
    base = "_".join(kept) or word
    if base.lower() in GENERIC:
        inner = max(re.findall(r"[A-Za-z_]\w{7,}", inside), key=len, default="")
        return f"{base}[{family(inner)}]" if inner and inner.lower() not in GENERIC else base
    functors = [m[1] for m in FUNCTOR.finditer(inside) if m[1] not in PLUMBING]
    return f"{base}[{functors[0]}]" if functors else base


def _outside_brackets(name: str) -> tuple[str, str]:
    """The name up to its argument list without what is in <>, and what was in <>."""
    depth, head, inside = 0, [], []
    for i, letter in enumerate(name[:20_000]):
        if letter == "<":
            depth += 1
        elif letter == ">":
            depth = max(0, depth - 1)
        elif depth:
            inside.append(letter)
            continue
        elif letter == "(":
            if name.startswith("(anonymous", i):
                continue
            break
        else:
            head.append(letter)
        if depth:
            inside.append(" ")
    return "".join(head).replace("anonymous namespace)::", ""), "".join(inside)


@lru_cache(maxsize=65536)
def place(path: str) -> str:
    """The call path with every index as *: blocks.17 and blocks.3 are one place of the program."""
    parts: List[str] = []
    for part in path.split(" > "):
        word = re.sub(r"^ProfilerStep#\d+$", "ProfilerStep", part)
        parts.append(INDEX.sub("*", word))
    return " > ".join(parts)
