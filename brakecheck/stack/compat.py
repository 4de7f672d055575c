"""What a cubin or PTX of a CUDA release needs, and whether a driver and a device have it: from versions alone.

Tables (by CUDA toolkit release X.Y; there is no 12.7 toolkit, its PTX ISA 8.6 exists in driver branch 565 only):

- PTX ISA, cubin ELF ABI and architectures: observed on 2026-12-01 from the newest wheels of each release (NVRTC's PTX
  and cubin of a small kernel, nvrtcGetSupportedArchs, ptxas --help, and which `.version` each ptxas takes). They agree
  with the PTX ISA release history, https://docs.nvidia.com/cuda/parallel-thread-execution/#release-notes.
- Toolkit driver: the driver that a release was made with, CUDA Toolkit release notes, table "CUDA Toolkit and
  Corresponding Driver Versions" (Linux, first release of each X.Y), https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/.
  13.4 and later come without a driver for Linux: absent here.
- Minimum driver: same notes, table "Minimum Required Driver Version for CUDA Minor Version Compatibility".
- Who runs what: CUDA programming guide, "Binary compatibility", "PTX compatibility", "Family-specific targets".

An unknown is None, never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from ..model import UsageError
from ..model.arch import split_arch

_UP_TO_12_6 = "50 52 53 60 61 62 70 72 75 80 86 87 89 90 90a"
_12_8 = f"{_UP_TO_12_6} 100 100a 101 101a 120 120a"
_12_9 = f"{_12_8} 100f 101f 103 103a 103f 120f 121 121a 121f"
_13_0 = "75 80 86 87 88 89 90 90a 100 100a 100f 103 103a 103f 110 110a 110f 120 120a 120f 121 121a 121f"
_13_4 = f"{_13_0} 107 107a 107f"


@dataclass(frozen=True)
class Release:
    """One CUDA toolkit release. toolkit_driver: None where the release came without one."""

    name: str
    ptx_isa: str
    toolkit_driver: Optional[str]
    archs: Tuple[str, ...]

    @property
    def major(self) -> int:
        return int(self.name.split(".")[0])


RELEASES: Dict[str, Release] = {
    name: Release(name, isa, driver, tuple(f"sm_{a}" for a in archs.split())) for name, isa, driver, archs in [
        ("12.0", "8.0", "525.60.13", _UP_TO_12_6),
        ("12.1", "8.1", "530.30.02", _UP_TO_12_6),
        ("12.2", "8.2", "535.54.03", _UP_TO_12_6),
        ("12.3", "8.3", "545.23.06", _UP_TO_12_6),
        ("12.4", "8.4", "550.54.14", _UP_TO_12_6),
        ("12.5", "8.5", "555.42.02", _UP_TO_12_6),
        ("12.6", "8.5", "560.28.03", _UP_TO_12_6),
        ("12.8", "8.7", "570.26", _12_8),
        ("12.9", "8.8", "575.51.03", _12_9),
        ("13.0", "9.0", "580.65.06", _13_0),
        ("13.1", "9.1", "590.44.01", _13_0),
        ("13.2", "9.2", "595.45.04", _13_0),
        ("13.3", "9.3", "610.43.02", _13_0),
        ("13.4", "9.4", None, _13_4),
        ("13.5", "9.5", None, _13_4),
    ]
}

# Oldest driver that loads cubins of every release of a CUDA major (minor-version compatibility).
MINIMUM_DRIVER: Dict[int, str] = {12: "525.60.13", 13: "580.65.06"}

# Driver branch -> (CUDA version it reports, highest PTX ISA its JIT takes). The JIT is the ptxas of that CUDA version.
DRIVER_BRANCHES: Dict[int, Tuple[str, str]] = {
    450: ("11.0", "7.0"), 455: ("11.1", "7.1"), 460: ("11.2", "7.2"), 465: ("11.3", "7.3"), 470: ("11.4", "7.4"),
    495: ("11.5", "7.5"), 510: ("11.6", "7.6"), 515: ("11.7", "7.7"), 520: ("11.8", "7.8"), 525: ("12.0", "8.0"),
    530: ("12.1", "8.1"), 535: ("12.2", "8.2"), 545: ("12.3", "8.3"), 550: ("12.4", "8.4"), 555: ("12.5", "8.5"),
    560: ("12.6", "8.5"), 565: ("12.7", "8.6"), 570: ("12.8", "8.7"), 575: ("12.9", "8.8"), 580: ("13.0", "9.0"),
    590: ("13.1", "9.1"), 595: ("13.2", "9.2"), 610: ("13.3", "9.3"),
}

RENAMED = {101: 110}  # Jetson Thor: sm_101 up to CUDA 12.9, sm_110 from 13.0 on
TEGRA = {53, 62, 72, 87}  # binary compatibility never crosses between these and other devices, nor among them
FAMILIES = {100: {100, 103}, 103: {103}, 101: {101}, 110: {110}, 120: {120, 121}, 121: {121}}  # of sm_NNNf


@dataclass(frozen=True)
class Finding:
    """severity: "error" (will not work), "warning" (may not, or unknown), "info". code: short and stable."""

    severity: str
    code: str
    text: str
    advice: Optional[str] = None


@dataclass(frozen=True)
class Needs:
    """What the output of one stack needs. release made the PTX, ptxas assembled it (the same one unless mixed).

    cubin_driver: oldest driver that loads the cubin. ptx_driver: oldest driver whose JIT takes the PTX.
    toolkit_driver: the driver the release was made with. supported: ptxas has this architecture.
    portable: the code runs on newer devices too (False for sm_90a and the like).
    """

    release: str
    ptxas: str
    arch: str
    supported: bool
    portable: bool
    ptx_isa: str
    elf_abi: int
    cubin_driver: str
    ptx_driver: Optional[str] = None
    toolkit_driver: Optional[str] = None


def release_of(text: str) -> Release:
    """The table's row for "12.9", "12.9.1" or "cuda==12.9". UsageError naming the nearest for an unknown release."""
    found = re.fullmatch(r"(?:cuda==?)?(\d+)\.(\d+)(?:\.\d+)*", text.strip())
    row = RELEASES.get(f"{found[1]}.{found[2]}") if found else None
    if row is None:
        wanted = (int(found[1]), int(found[2])) if found else None
        below = [r for r in RELEASES if wanted and _version(r) < wanted][-1:]
        above = [r for r in RELEASES if wanted and _version(r) > wanted][:1]
        near = below + above or list(RELEASES)
        raise UsageError(f"no compatibility data for CUDA {text!r}", "CUDA release", f"use one of: {', '.join(near)}")
    return row


def isa_of(release: str) -> Optional[str]:
    """PTX ISA of what this CUDA release ("13.2.78") writes; None for one that the table does not have."""
    row = RELEASES.get(".".join(release.split(".")[:2]))
    return row.ptx_isa if row else None


def elf_abi(release: str, arch: str) -> int:
    """EI_ABIVERSION of cubins: 8 from CUDA 13.0 on, and for sm_100 and newer already in 12.8 and 12.9; else 7."""
    return 8 if release_of(release).major >= 13 or split_arch(arch)[0] >= 100 else 7


def needs(release: str, arch: str, ptxas: Optional[str] = None) -> Needs:
    """What PTX and cubin of this release (assembled by another `ptxas` release, if given) need to run."""
    front, assembler = release_of(release), release_of(ptxas or release)
    number, suffix = split_arch(arch)
    branch = next((b for b, (_, isa) in DRIVER_BRANCHES.items() if _version(isa) >= _version(front.ptx_isa)), None)
    ptx_driver = next((r.toolkit_driver for r in RELEASES.values() if r.ptx_isa == front.ptx_isa), None)
    if ptx_driver is None and branch is not None:
        ptx_driver = str(branch)
    return Needs(
        front.name, assembler.name, f"sm_{number}{suffix}", f"sm_{number}{suffix}" in assembler.archs, suffix == "",
        front.ptx_isa, elf_abi(assembler.name, arch), MINIMUM_DRIVER[assembler.major], ptx_driver, front.toolkit_driver,
    )


def cuda_of_driver(driver_version: str) -> Tuple[Optional[str], Optional[str], bool]:
    """(CUDA version, highest PTX ISA of the JIT, whether that is exact) of a Linux driver such as "535.104.05".

    A branch between two known ones has at least the lower one's; newer than every known one: at least the newest's.
    """
    version = _driver(driver_version)
    known = [b for b in DRIVER_BRANCHES if b <= version[0]]
    if not known:
        return None, None, False
    cuda, isa = DRIVER_BRANCHES[known[-1]]
    return cuda, isa, known[-1] == version[0]


def check(release: str, driver_version: Optional[str], arch: str, device_arch: Optional[str] = None,
          ptxas: Optional[str] = None, libcuda: Optional[str] = None) -> List[Finding]:
    """What will and will not work, worst first.

    driver_version: None when there is no driver to judge. device_arch: architecture of the GPU it is to run on.
    ptxas: release of the assembler where it is not `release`'s own. libcuda: CUDA version that libcuda reports (13.0),
    where it is known: it loads the code, and with a forward-compatibility package it is newer than the kernel driver.
    """
    need = needs(release, arch, ptxas)
    found = [*_check_arch(need), *check_mixed(need.ptx_isa, need.ptxas)]
    if driver_version is not None:
        found += _check_driver(need, driver_version, libcuda)
    if device_arch is not None:
        found += check_device(arch, device_arch)
        row = release_of(need.ptxas)
        number, _ = split_arch(device_arch)
        if number < min(split_arch(a)[0] for a in row.archs):
            found.append(Finding(
                "error", "device-dropped", f"CUDA {row.name} has no code for this device (sm_{number}): libraries and "
                "wheels of it load, torch.cuda.is_available() is true, and the first kernel fails",
                f"stay on CUDA {_last_with(f'sm_{number}')}" if _last_with(f"sm_{number}") else None))
    rank = {"error": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda f: rank[f.severity])


def check_mixed(ptx_isa: str, ptxas_release: str) -> List[Finding]:
    """Whether a ptxas can read PTX of this ISA version; nothing when it can."""
    assembler = release_of(ptxas_release)
    if _version(ptx_isa) <= _version(assembler.ptx_isa):
        return []
    newer = next((r.name for r in RELEASES.values() if _version(r.ptx_isa) >= _version(ptx_isa)), None)
    return [Finding(
        "error", "ptx-newer-than-assembler",
        f"the PTX is ISA {ptx_isa}, ptxas {assembler.name} knows up to {assembler.ptx_isa}; it will say "
        f"\"Unsupported .version {ptx_isa}; current version is '{assembler.ptx_isa}'\"",
        f"use ptxas {newer} or newer, or an older compiler in front" if newer else "use an older compiler in front")]


def check_device(arch: str, device_arch: str) -> List[Finding]:
    """Whether a cubin (and the PTX beside it) built for `arch` runs on a device; nothing when the cubin does."""
    (built, suffix), (device, _) = split_arch(arch), split_arch(device_arch)
    where = f"code for {arch} on a device of sm_{device}"
    if suffix == "a":
        if built == device:
            return []
        return [Finding("error", "arch-specific", f"{where}: neither cubin nor PTX runs, it is for sm_{built} only",
                        f"build for sm_{device}, or without the suffix if the kernel allows")]
    if suffix == "f":
        family = FAMILIES.get(built)
        if device == built or (family is not None and device in family):
            return []
        if family is None or (device // 10 == built // 10 and device not in set().union(*FAMILIES.values())):
            return [Finding("warning", "family-unknown", f"{where}: it is not known whether it is of the family")]
        return [Finding("error", "family-specific", f"{where}: neither cubin nor PTX runs outside of its family",
                        f"build for sm_{device}")]
    same = built == device or (built // 10 == device // 10 and built <= device and not {built, device} & TEGRA)
    if same:
        return []
    if built > device:
        return [Finding("error", "arch-newer-than-device", f"{where}: the device is older than the code",
                        f"build for sm_{device}")]
    return [Finding("warning", "jit-needed", f"{where}: the cubin does not run; PTX kept beside it is compiled by the "
                    "driver at first use, with the driver's own ptxas", f"build for sm_{device} too")]


def _check_arch(need: Needs) -> List[Finding]:
    if need.supported:
        return []
    number, _ = split_arch(need.arch)
    having = [r.name for r in RELEASES.values() if need.arch in r.archs]
    text, advice = f"ptxas {need.ptxas} does not know {need.arch}", None
    if having and _version(need.ptxas) < _version(having[0]):
        text, advice = f"{text}: added in CUDA {having[0]}", f"use CUDA {having[0]} or newer"
    elif having:
        text, advice = f"{text}: dropped after CUDA {having[-1]}", f"stay on CUDA {having[-1]} for this architecture"
        if number in RENAMED:
            now = need.arch.replace(str(number), str(RENAMED[number]))
            advice = f"build for {now}: the new name of the same device"
    return [Finding("error", "arch-unknown", text, advice)]


def _check_driver(need: Needs, driver_version: str, libcuda: Optional[str]) -> List[Finding]:
    found = []
    cuda, isa, exact = cuda_of_driver(driver_version)
    if libcuda is not None:
        cuda, isa, exact = libcuda, *_isa_of_cuda(libcuda)
    named = f"driver {driver_version}" + (f" (CUDA {cuda}{'' if exact or libcuda else ' or newer'})" if cuda else "")
    major = _version(libcuda)[0] if libcuda else 0
    if _driver(driver_version) < _driver(need.cubin_driver) and major < _version(need.ptxas)[0]:
        found.append(Finding(
            "error", "driver-older-than-assembler",
            f"{named} is too old for cubins of ptxas {need.ptxas} (ELF ABI {need.elf_abi}): loading fails with "
            "\"device kernel image is invalid\"",
            f"use driver {need.cubin_driver} or newer, an older toolkit, or on data-center GPUs the package "
            f"cuda-compat-{need.ptxas.replace('.', '-')}"))
    first = next((r for r in RELEASES.values() if need.arch in r.archs), None)
    since = first.toolkit_driver if first and first.name != "12.0" else None
    if first and since and _driver(driver_version) < _driver(since):
        found.append(Finding(
            "warning", "driver-older-than-architecture",
            f"{named} is older than the first CUDA release with {need.arch} ({first.name}, driver {since}): it "
            "may not know such a device", f"use driver {since} or newer"))
    if isa is None:
        found.append(Finding("warning", "driver-unknown", f"{named}: no data on what its JIT takes"))
    elif _version(isa) < _version(need.ptx_isa):
        limit = f"up to {isa}" if exact else f"up to {isa} at least"
        found.append(Finding(
            "error" if exact else "warning", "ptx-newer-than-driver",
            f"the JIT of {named} takes PTX ISA {limit}, the PTX is {need.ptx_isa}: PTX without a cubin "
            f"{'fails' if exact else 'may fail'} with \"the provided PTX was compiled with an unsupported "
            f"toolchain\" (\"Unsupported .version {need.ptx_isa}; current version is '{isa}'\")",
            "ship cubins for every device"
            + (f", or use driver {need.ptx_driver} or newer" if need.ptx_driver else "")))
    if not found and need.toolkit_driver and _driver(driver_version) < _driver(need.toolkit_driver):
        found.append(Finding("info", "minor-version-compatibility", f"{named} is older than the one of CUDA "
                             f"{need.release} ({need.toolkit_driver}): cubins run, newer driver features may not"))
    return found


def _isa_of_cuda(cuda: str) -> Tuple[Optional[str], bool]:
    """(PTX ISA of the JIT of this CUDA version, whether that is exact); at least that for one newer than all known."""
    known = sorted({*DRIVER_BRANCHES.values(), *((r.name, r.ptx_isa) for r in RELEASES.values())},
                   key=lambda row: _version(row[0]))
    below = [row for row in known if _version(row[0]) <= _version(cuda)]
    return (below[-1][1], below[-1][0] == cuda) if below else (None, False)


def _last_with(arch: str) -> Optional[str]:
    having = [r.name for r in RELEASES.values() if arch in r.archs]
    return having[-1] if having else None


def _version(text: str) -> Tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _driver(text: str) -> Tuple[int, ...]:
    if not re.fullmatch(r"\d{3,4}(\.\d+){0,3}", text.strip()):
        raise UsageError(f"{text!r} is not a driver version", "--driver", "write it as 580.65.06")
    return tuple(int(part) for part in text.strip().split("."))
