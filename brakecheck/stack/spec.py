"""What a user writes to name a stack."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Tuple

from ..model import UsageError

# Parts of a CUDA toolkit that can be taken from another release. "headers" is what the index calls cudart.
COMPONENTS = ("nvrtc", "nvcc", "ptxas", "headers", "cccl", "crt", "nvvm", "nvdisasm")
ALIASES = {"cudart": "headers"}

FORMS = (
    "cuda==12.9 or cuda==12.9.1 (a toolchain from wheels); cuda==12.6+ptxas==12.8 (one component of another release); "
    "env:/path/to/python; pip:torch==2.9.1,triton==3.5.1; launch:COMMAND; SPEC+package==version"
)
_RELEASE = re.compile(r"\d+\.\d+(\.\d+){0,2}")
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(\[[A-Za-z0-9._,-]+\])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")
# A plus sign starts an overlay only before NAME==: versions have plus signs of their own (2.9.1+cu130).
_OVERLAY = re.compile(r"\+(?=[A-Za-z0-9._-]+==)")


@dataclass(frozen=True)
class StackSpec:
    """A parsed spec. kind: "cuda", "env", "pip" or "launch". base: the release, the path of a Python, the
    comma-separated requirements, or the command. overlays: (component or package, version). text: as written."""

    kind: str
    base: str
    overlays: Tuple[Tuple[str, str], ...]
    text: str


def parse(text: str) -> StackSpec:
    """Raises UsageError with the position and what is accepted."""
    spec = text.strip()
    if not spec:
        raise UsageError("an empty stack spec", None, f"write one of: {FORMS}")
    if spec.startswith("launch:"):
        return StackSpec("launch", _nonempty(text, spec, "launch:", "a command that ends in a Python"), (), text)
    head, *tail = _OVERLAY.split(spec)
    overlays = tuple(tuple(part.split("==", 1)) for part in tail)
    position = text.index(head) + len(head) + 1
    for (name, version), part in zip(overlays, tail):
        if not _PACKAGE.fullmatch(name) or not _VERSION.fullmatch(version):
            raise _wrong(text, position, f"{part!r} is not PACKAGE==VERSION", "write the overlay as +ptxas==12.8")
        position += len(part) + 1
    if head.startswith("env:"):
        kind, base = "env", _nonempty(text, head, "env:", "the path of a Python")
    elif head.startswith("pip:"):
        kind, base = "pip", _requirements(text, head)
    else:
        kind, base = "cuda", _release(text, head)
        overlays = tuple(_component(text, name, version) for name, version in overlays)
    names = [name for name, _ in overlays]
    for name in names:
        if names.count(name) > 1:
            raise _wrong(text, text.rindex(f"{name}=="), f"{name} is given twice", "keep one of them")
    return StackSpec(kind, base, overlays, text)  # type: ignore[arg-type]


def _release(text: str, head: str) -> str:
    name, separator, version = head.partition("==")
    if name == "cuda" and separator and _RELEASE.fullmatch(version):
        return version
    found = re.fullmatch(r"(?:cuda)?[=:@ -]*v?(\d+\.\d+(\.\d+)?)", head, re.IGNORECASE)
    if found:
        raise _wrong(text, 0, f"{head!r} is not a stack spec", f"did you mean cuda=={found.group(1)}?")
    if name == "cuda" and separator:
        plus = version.find("+")
        if plus >= 0 and _RELEASE.fullmatch(version[:plus]):
            raise _wrong(text, text.index("+"), f"{version[plus:]!r} is not an overlay",
                         f"write +COMPONENT==RELEASE; components: {', '.join(COMPONENTS)}")
        raise _wrong(text, text.index("==") + 2, f"{version!r} is not a CUDA release",
                     "write two or three numbers: cuda==12.9 (its newest patch) or cuda==12.9.1")
    raise _wrong(text, 0, f"{head!r} is not a stack spec", f"write one of: {FORMS}")


def _component(text: str, name: str, version: str) -> Tuple[str, str]:
    position = text.index(f"+{name}==") + 1
    name = ALIASES.get(name, name)
    if name not in COMPONENTS:
        near = difflib.get_close_matches(name, COMPONENTS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise _wrong(text, position, f"{name!r} is no component of a CUDA toolchain",
                     f"{hint}components: {', '.join(COMPONENTS)}")
    if not _RELEASE.fullmatch(version):
        raise _wrong(text, position + len(name) + 2, f"{version!r} is not a CUDA release",
                     f"write the CUDA release to take {name} from, such as {name}==12.8")
    return name, version


def _requirements(text: str, head: str) -> str:
    base = _nonempty(text, head, "pip:", "requirements such as torch==2.9.1,triton==3.5.1")
    position = text.index("pip:") + len("pip:")
    for part in base.split(","):
        name, separator, version = part.strip().partition("==")
        if not separator or not _PACKAGE.fullmatch(name) or not _VERSION.fullmatch(version):
            raise _wrong(text, position, f"{part!r} is not PACKAGE==VERSION", "pin each package: torch==2.9.1")
        position += len(part) + 1
    return ",".join(part.strip() for part in base.split(","))


def _nonempty(text: str, head: str, prefix: str, wanted: str) -> str:
    rest = head[len(prefix):].strip()
    if not rest:
        raise _wrong(text, text.index(prefix) + len(prefix), f"nothing after {prefix!r}", f"write {wanted}")
    return rest


def _wrong(text: str, position: int, what: str, todo: str) -> UsageError:
    return UsageError(what, f"stack spec {text!r}, character {position + 1}", todo)
