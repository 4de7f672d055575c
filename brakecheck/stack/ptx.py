"""PTX as text: what it is for, and its identity."""

from __future__ import annotations

import hashlib
import re
from typing import Optional, Tuple

from ..model.arch import split_arch
from .compat import FAMILIES, RELEASES

_BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_DEBUG_SECTION = re.compile(r"^\s*\.section\s+\.debug\w*\s*\{.*?^\s*\}", re.DOTALL | re.MULTILINE)
_LOCATION = re.compile(r"^\s*\.(?:file|loc|version)\b.*$", re.MULTILINE)
_LINE_COMMENT = re.compile(r"//.*$", re.MULTILINE)
_DEBUG_LABEL = re.compile(r"^\$L__(?:tmp|func_begin|func_end|info_string)\w*:\s*$", re.MULTILINE)
_VERSION = re.compile(r"^\s*\.version\s+(\d+\.\d+)", re.MULTILINE)
_TARGET = re.compile(r"^\s*\.target\s+(sm_\d+[af]?)", re.MULTILINE)


def identity(text: str) -> str:
    """SHA-256 of the code alone: without comments (which hold the generator's banner), line tables, debug sections and
    the `.version` line, which every front end stamps with its own release. Equal hashes are equal code for ptxas."""
    for pattern in (_BLOCK_COMMENT, _DEBUG_SECTION, _LOCATION, _LINE_COMMENT, _DEBUG_LABEL):
        text = pattern.sub("", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode(errors="surrogateescape")).hexdigest()


def target(text: str) -> Optional[str]:
    """sm_90a of `.target sm_90a`; None where the file does not say."""
    found = _TARGET.search(text)
    return found.group(1) if found else None


def isa(text: str) -> Optional[str]:
    """8.8 of `.version 8.8`; None where the file does not say."""
    found = _VERSION.search(text)
    return found.group(1) if found else None


def targets(built_for: str) -> Tuple[str, ...]:
    """Every architecture that any release knows and that PTX for this target assembles for."""
    known = dict.fromkeys(arch for release in RELEASES.values() for arch in release.archs)
    return tuple(arch for arch in known if runs_on(built_for, arch))


def runs_on(built_for: str, arch: str) -> bool:
    """Whether PTX for one target assembles for `arch`: sm_80 for 80 and newer, sm_90a for sm_90a alone, sm_100f for its
    family. Source: PTX ISA, `.target`."""
    (number, suffix), (wanted, _) = split_arch(built_for), split_arch(arch)
    if suffix == "a":
        return arch == built_for
    if suffix == "f":
        return wanted in FAMILIES.get(number, {number})
    return wanted >= number
