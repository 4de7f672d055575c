"""CUDA wheels through uv and the user's own index configuration."""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence

import uv

from ..model import BrakecheckError, UnavailableError, UsageError
from . import cache

METAPACKAGE = "cuda-toolkit"
FRESH_SECONDS = 24 * 3600
Progress = Callable[[str, int, int, str], None]

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
_NETWORK = re.compile(r"Failed to fetch|error sending request|dns error|connect|timed out", re.IGNORECASE)
_finding = threading.Lock()  # find_uv_bin fills sysconfig's tables, and two threads doing that fail
_PIP_TO_UV = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}


@dataclass(frozen=True)
class Resolution:
    """Which wheels a release means: distribution name -> version. note: set when it is older than a day and could not
    be refreshed."""

    pins: Dict[str, str]
    note: Optional[str] = None

    @property
    def release(self) -> str:
        return self.pins[METAPACKAGE]


def is_offline(offline: bool = False) -> bool:
    """True when asked for, or by BRAKECHECK_OFFLINE or UV_OFFLINE."""
    return offline or any(os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}
                          for name in ("BRAKECHECK_OFFLINE", "UV_OFFLINE"))


def resolve(release: Optional[str], extras: Sequence[str], *, offline: bool = False) -> Resolution:
    """The newest patch of `release` ("12.9" or "12.9.1"; None: the newest CUDA of all) with these parts.

    The answer is kept for 24 hours. UsageError: no such release (the nearest are named). UnavailableError: no network
    and nothing kept.
    """
    wanted = f"{METAPACKAGE}[{','.join(extras)}]" + (f"=={release}.*" if release else "")
    kept_at = cache.root() / "resolutions" / f"{hashlib.sha256(wanted.encode()).hexdigest()[:16]}.json"
    kept = cache.read_json(kept_at)
    if not isinstance(kept, dict) or kept.get("wanted") != wanted:
        kept = None
    age = time.time() - kept["time"] if kept else None
    if kept and age is not None and 0 <= age < FRESH_SECONDS:
        return Resolution(kept["pins"])
    offline = is_offline(offline)
    done = _uv(["pip", "compile", "-q", "--no-annotate", "--no-header", "-"], offline, wanted)
    if done.returncode == 0:
        pins = dict(_PIN.findall(done.stdout))
        cache.write_json(kept_at, {"wanted": wanted, "time": time.time(), "pins": pins})
        return Resolution(pins)
    if offline or _NETWORK.search(done.stderr):
        if kept and age is not None:
            return Resolution(kept["pins"], f"no network: what CUDA {release or 'newest'} means is {age / 86400:.0f} "
                                            "days old")
        raise _unreachable(f"CUDA {release or '(newest)'}: not in the cache, and the package index was not reached",
                           done.stderr, offline)
    if release and "No solution found" in done.stderr:
        raise _no_release(release, offline)
    raise UnavailableError(f"uv could not resolve {wanted}: {_last_words(done.stderr)}", None,
                           "check uv's index configuration; CUDA wheels exist for Linux on x86-64 and AArch64")


def install(pins: Dict[str, str], target: Path, *, offline: bool = False) -> None:
    """Unpacks these wheels into `target`."""
    requirements = [f"{name}=={version}" for name, version in sorted(pins.items()) if name != METAPACKAGE]
    done = _uv(["pip", "install", "-q", "--no-deps", "--target", str(target), *requirements], is_offline(offline))
    if done.returncode == 0:
        return
    if "No space left" in done.stderr:
        raise UnavailableError("no space left for the CUDA wheels", str(target),
                               "make room there, or set BRAKECHECK_CACHE and UV_CACHE_DIR to a larger disk")
    what = f"{', '.join(requirements)}: not in the cache, and not downloaded"
    if is_offline(offline) or _NETWORK.search(done.stderr):
        raise _unreachable(what, done.stderr, is_offline(offline))
    raise UnavailableError(f"{what}: {_last_words(done.stderr)}", str(target),
                           "check uv's index configuration; CUDA wheels exist for Linux on x86-64 and AArch64")


def _no_release(release: str, offline: bool) -> UsageError:
    nearest: List[str] = []
    for requirement, order in ((f"<{release}", "highest"), (f">{release}", "lowest")):
        done = _uv(["pip", "compile", "-q", "--no-annotate", "--no-header", "--resolution", order, "-"], offline,
                   f"{METAPACKAGE}{requirement}")
        nearest += [version for name, version in _PIN.findall(done.stdout) if name == METAPACKAGE]
    return UsageError(f"the package index has no CUDA {release}", f"cuda=={release}",
                      f"the nearest: {' and '.join(map(short, nearest))}" if nearest else
                      "the package index has no cuda-toolkit at all: check uv's index configuration")


def short(release: str) -> str:
    """12.9.2.0 -> 12.9.2: some releases carry a build number."""
    return re.sub(r"^(\d+\.\d+\.\d+)\.0$", r"\1", release)


def _unreachable(what: str, stderr: str, offline: bool) -> UnavailableError:
    if offline:
        return UnavailableError(what, "offline", "run once with a network (and without BRAKECHECK_OFFLINE) to fill the "
                                "cache, or copy the cache of another machine")
    return UnavailableError(f"{what}: {_last_words(stderr)}", None,
                            "check the network and uv's index configuration (UV_DEFAULT_INDEX, uv.toml)")


def _last_words(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return " ".join(lines[:4])[:400] or "it said nothing"


def _uv(arguments: Sequence[str], offline: bool, text: Optional[str] = None) -> subprocess.CompletedProcess[str]:
    try:
        with _finding:
            binary = uv.find_uv_bin()
    except FileNotFoundError as error:
        raise BrakecheckError("the uv program is not installed", str(error), "pip install uv") from error
    command = [binary, *arguments, "--python", sys.executable, *(["--offline"] if offline else [])]
    environment = {**os.environ, "UV_NO_PROGRESS": "1", **_pip_configuration()}
    return subprocess.run(command, input=text, capture_output=True, text=True, env=environment)


def _pip_configuration() -> Dict[str, str]:
    """The index that pip is configured for, in uv's variables, where uv itself is not configured: uv does not read
    pip's configuration, and a user behind a mirror has often set only that. pip's extra indexes are left out: uv would
    take every version from the first index that has the package. Files in pip's own order, later ones win."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    config = os.environ.get("UV_CONFIG_FILE")
    uv_files = [Path(config)] if config else [home / "uv" / "uv.toml", Path("/etc/uv/uv.toml"), Path("uv.toml")]
    if any(name.startswith(("UV_INDEX", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX")) for name in os.environ) or any(
            file.exists() for file in uv_files):
        return {}
    files = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), Path.home() / ".pip" / "pip.conf",
             home / "pip" / "pip.conf", Path(sys.prefix) / "pip.conf",
             Path(os.environ.get("PIP_CONFIG_FILE", os.devnull))]
    parser = configparser.RawConfigParser(strict=False)
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        parser.read(files)
    found: Dict[str, str] = {}
    for option, variable in _PIP_TO_UV.items():
        value = os.environ.get(f"PIP_{option.upper().replace('-', '_')}") or parser.get("global", option, fallback=None)
        if value and variable not in os.environ:
            found[variable] = value
    return found
