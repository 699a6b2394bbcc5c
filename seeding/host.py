"""What compiled code depends on that is a property of this host: ABI, instruction set, compilers."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from warmseed.seeding.environment import UNKNOWN

__all__ = ["host_facts"]

COMPILER_SECONDS = 10.0  # for a compiler to say its version


@cache
def host_facts() -> dict[str, str]:
    """Facts by field name; what can't be determined is `UNKNOWN`. Blocks: it asks the C++ compiler once."""
    return {
        "machine": platform.machine() or UNKNOWN,
        "cpu_flags": _cpu_flags(),
        "glibc": "-".join(filter(None, platform.libc_ver())) or UNKNOWN,
        "python_abi": str(sysconfig.get_config_var("SOABI") or UNKNOWN),
        "cxx": _compiler(),
        "torch": _version("torch"),
        "triton": _version("triton"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A digest of the instruction set: kernels are compiled for exactly the CPU they were built on."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return UNKNOWN
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return hashlib.sha256(" ".join(sorted(value.split())).encode()).hexdigest()[:16]
    return UNKNOWN


def _compiler() -> str:
    """First line of ``$CXX --version``; its command line is part of what Inductor hashes."""
    command = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if command is None:
        return "absent"
    try:
        said = subprocess.run(  # noqa: S603 - the compiler this environment would use anyway
            [command, "--version"], capture_output=True, text=True, timeout=COMPILER_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return said.stdout.splitlines()[0].strip() if said.stdout else UNKNOWN
