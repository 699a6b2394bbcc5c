"""FlashInfer's JIT cache: ninja trees of compiled modules, and the sources they were generated from.

Layout: ``.../cached_ops/<module>/{build.ninja,.ninja_log,.ninja_deps,*.o,<module>.so}`` and ``.../generated``,
below ``$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer/<version>/<arch>``. FlashInfer always runs ninja, and ninja
rebuilds unless every path in its files exists as recorded and every modification time is right to the
nanosecond. Before ninja runs FlashInfer writes ``build.ninja`` anew with every path resolved (``jit/cpp_ext.py``), so
a root that is a link, or lies on another mount, rebuilds everything. So there are two ways here:

- the same real root, as a folder and not as a link, with exact times, when the paths in ``build.ninja`` are those that
  FlashInfer would write and ``ninja -n`` says for each module that there is no work to do;
- else a provider package: FlashInfer looks for a package ``flashinfer_jit_cache`` (0.6: ``get_jit_cache_dir``,
  0.7: ``get_jit_cache_providers``) and loads ``<module>/<module>.so`` from it on any path, without ninja.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from warmseed.errors import printable
from warmseed.seeding.bundle.index import CacheRecord, FileRecord
from warmseed.seeding.kinds.base import Site
from warmseed.seeding.kinds.compiled.cache import CompiledCache, Placement

__all__ = ["PROVIDER", "FlashInferCache", "provider_root"]

PROVIDER = "flashinfer_provider"  # the folder in an installed tree
_JIT = frozenset({"cached_ops", "generated"})
NINJA_SECONDS = 20.0  # for one dry run
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_VERSION = re.compile(r"\d+(?:\.\d+){1,3}[A-Za-z0-9.+]{0,32}")


def provider_root(site: Site) -> Path:
    """The folder that engines must have on ``PYTHONPATH`` to find the provider package."""
    return site.cache_root / "python"


class FlashInferCache(CompiledCache):
    """``$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer``, or a version's folder in it."""

    name = "flashinfer"
    needs = ("machine", "glibc", "torch", "flashinfer")
    also = ("tvm_ffi", "device", "compute_capability", "cuda", "nvcc", "cxx")
    prefixes = ("site_packages", "cuda_home")

    def __init__(self, *, ninja: str = "ninja") -> None:
        self._ninja = ninja

    @property
    def folders(self) -> tuple[str, ...]:
        return (self.name, PROVIDER)

    def elsewhere(self, site: Site) -> Sequence[tuple[Path, str]]:
        # Modules that came through a provider package must not get lost in this node's next generation.
        return [(provider_root(site) / "flashinfer_jit_cache" / "jit_cache", "cached_ops/")]

    def skips(self, path: str) -> bool:
        parts = path.split("/")
        if len(parts) > 2 and not _JIT.intersection(parts[:3]):
            return True  # neither <version>/<arch>/cached_ops nor the like
        return super().skips(path) or parts[0] in ("cubins", "autotune") or parts[-1] == "tmp"

    def counts(self, path: str) -> bool:
        return "cached_ops" in path.split("/")  # sources are generated even for a module that is then loaded

    def refuses(self, path: str, size: int) -> str | None:
        return super().refuses(path, size) or (None if _jit_folder(path) else "no part of the JIT cache")

    def place(self, record: CacheRecord, files: Sequence[FileRecord], site: Site) -> Placement | str:
        if record.root == str(site.roots[self.name]) and self._same_prefixes(record, site):
            return self._in_place(files, site)
        return self.provider(record, files, site)

    def _in_place(self, files: Sequence[FileRecord], site: Site) -> Placement | str:
        """The folders of the JIT cache where they were; what lies beside them (cubins, tables) is not ours to move."""
        root = site.roots[self.name]
        inside = {file.path: _jit_folder(file.relative) for file in files}
        links = {f"{self.name}/{folder}": root / folder for folder in sorted(set(inside.values())) if folder}
        taken = {file.path: file.relative for file in files if inside[file.path]}
        return Placement(root, self.name, taken, links=links, real=True) if taken else "it holds no module"

    def place_otherwise(
        self, record: CacheRecord, files: Sequence[FileRecord], site: Site, why: str
    ) -> Placement | str:
        placed = self.provider(record, files, site)
        return f"{why}; {placed}" if isinstance(placed, str) else placed

    def provider(self, record: CacheRecord, files: Sequence[FileRecord], site: Site) -> Placement | str:
        """The compiled modules as a package that FlashInfer finds anywhere; the rest is left out."""
        version = record.environment.get("flashinfer", "")
        if not _VERSION.fullmatch(version):
            return f"FlashInfer {printable(version)!r} has no version a provider package could carry"
        if site.environment.get("flashinfer_jit_cache", "absent") != "absent":
            return "the package flashinfer-jit-cache is installed here and would be hidden by a provider of its name"
        capability = record.environment.get("compute_capability", "")
        modules: dict[str, str] = {}
        taken: dict[str, str] = {}
        architectures: set[str] = set()
        for file in files:
            if not _is_module(file.relative):
                continue
            *above, _, module, _ = file.relative.split("/")
            if not _MODULE.fullmatch(module) or module in modules or not _fits(above, version, capability):
                continue
            modules[module] = file.path
            taken[file.path] = f"flashinfer_jit_cache/jit_cache/{module}/{module}.so"
            architectures.update(above[1].split("_") if len(above) == 2 else _architecture(capability))
        if not taken:
            return f"it holds no compiled module of FlashInfer {version}"
        source = _provider_source(version, [f"sm{name}" for name in sorted(architectures)], sorted(modules))
        return Placement(
            root=provider_root(site),
            folder=PROVIDER,
            files=taken,
            made={"flashinfer_jit_cache/__init__.py": source},
        )

    def prove(self, placement: Placement, site: Site) -> str | None:
        """Ask ninja about every module in place; a rebuild would cost more than the provider package."""
        if placement.folder != self.name:
            return None
        ninja = shutil.which(self._ninja) or shutil.which(self._ninja, path=os.path.dirname(sys.executable))
        if ninja is None:
            return "there is no ninja here to prove that nothing would be rebuilt"
        for relative in placement.files.values():
            if not _is_module(relative):
                continue
            build = placement.root / relative.rpartition("/")[0] / "build.ninja"
            if not build.is_file():
                return f"module {build.parent.name} came without its build.ninja"
            if not _names(build, Path(os.path.realpath(placement.root / relative))):
                return f"{build.parent.name} was built for another place than {os.path.realpath(build.parent)}"
            if why := _would_rebuild(ninja, build):
                return f"ninja would rebuild {build.parent.name}: {why}"
        return None

    def _same_prefixes(self, record: CacheRecord, site: Site) -> bool:
        ours = self.record(site).environment
        return all(record.environment.get(name) == ours.get(name) for name in self.prefixes)


def _jit_folder(relative: str) -> str:
    """The ``cached_ops`` or ``generated`` folder that `relative` lies in, "" for none."""
    parts = relative.split("/")[:-1]
    for depth, part in enumerate(parts[:3], start=1):
        if part in _JIT:
            return "/".join(parts[:depth])
    return ""


def _fits(above: Sequence[str], version: str, capability: str) -> bool:
    """Whether a module below the folders `above` (version and architectures, where known) works for these."""
    if len(above) != 2:
        return not above  # it came through a provider package, of the recorded version
    digits = capability.replace(".", "")
    named = [name.rstrip("af") for name in above[1].split("_")]
    return above[0] == version and (not digits or digits in named)


def _architecture(capability: str) -> list[str]:
    """FlashInfer's name of a GPU's architecture (compilation_context.py), such as ``90a``; none without a GPU."""
    if not re.fullmatch(r"\d{1,2}\.\d", capability):
        return []
    digits = capability.replace(".", "")
    return [digits + ("f" if capability == "12.0" else "a" if int(digits) >= 90 else "")]


def _names(build: Path, module: Path) -> bool:
    """Whether `module` is what the build file makes, as FlashInfer spells it there."""
    try:
        return f"default {module}" in build.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False


def _is_module(relative: str) -> bool:
    """Whether the path is that of a compiled module: ``cached_ops/<module>/<module>.so``."""
    parts = relative.split("/")
    return len(parts) >= 3 and parts[-3] == "cached_ops" and parts[-1] == f"{parts[-2]}.so"


def _would_rebuild(ninja: str, build: Path) -> str | None:
    """Why ninja would do any work for the file `build`, or `None`. A dry run starts no command."""
    try:
        done = subprocess.run(  # noqa: S603 - the ninja that FlashInfer itself would run
            [ninja, "-n", "-d", "explain", "-C", str(build.parent), "-f", str(build)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=NINJA_SECONDS,
            check=False,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError) as error:
        return printable(error)
    if done.returncode == 0 and "no work to do" in done.stdout:
        return None
    said = [line for line in (done.stderr + done.stdout).splitlines() if "explain" in line or "error" in line]
    return printable(said[0] if said else "it says nothing more")


def _provider_source(version: str, architectures: Sequence[str], modules: Sequence[str]) -> bytes:
    return _PACKAGE.format(version=version, architectures=list(architectures), modules=list(modules)).encode()


# For another FlashInfer than the one it is for, the package stands aside: 0.6 refuses to be imported beside a wrong
# version, and an engine that was upgraded must still start.
_PACKAGE = '''"""FlashInfer modules that warmseed installed from a signed bundle."""

import pathlib
import sys
from types import SimpleNamespace

__version__ = {version!r}
_DIR = pathlib.Path(__file__).parent / "jit_cache"
_ARCHITECTURES = {architectures!r}
_MODULES = {modules!r}
_flashinfer = sys.modules.get("flashinfer")
_importing = getattr(sys.modules.get("flashinfer.version"), "__version__", __version__)
if _importing.partition("+")[0] != __version__.partition("+")[0]:
    __version__ = _importing
    _DIR = pathlib.Path(_flashinfer.__file__).parent / "data" / "aot"
    _MODULES = []


def get_jit_cache_dir():
    return str(_DIR)


def get_jit_cache_providers():
    if not _MODULES:
        return []
    return [
        SimpleNamespace(
            provider_id="warmseed",
            distribution="warmseed",
            version=__version__,
            jit_cache_dir=str(_DIR),
            cuda_architectures=list(_ARCHITECTURES),
            modules=list(_MODULES),
        )
    ]
'''
