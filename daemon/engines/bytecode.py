"""Python's bytecode, kept below the cache root for an engine whose packages came without any.

An installer that compiles nothing (``uv``, and with it many container images) leaves that to the first import. Where
nothing may be written beside the sources, or a container is thrown away, every start compiles thousands of files again.
Python itself finds bytecode by the path of its source and believes it as long as time and size of the source fit; equal
times are usual in images, so each set of installed packages has a folder of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["bytecode_folder", "bytecode_variables", "installation", "installed_sources", "keep_bytecode"]

_PREFIX = "PYTHONPYCACHEPREFIX"  # where an interpreter looks for bytecode instead of beside the sources
_FORBIDDEN = "PYTHONDONTWRITEBYTECODE"
_FOLDER = "bytecode"
_UNUSED = 30 * 86_400  # seconds after which the bytecode of packages that no daemon has run with is removed


def bytecode_variables(cache_root: Path, modules: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What makes an interpreter keep its bytecode in `bytecode_folder`; empty where there is none."""
    folder = bytecode_folder(cache_root, modules, environ)
    # Where an image forbids to write bytecode, that is meant for the image.
    return {} if folder is None else {_PREFIX: str(folder), _FORBIDDEN: ""}


def bytecode_folder(cache_root: Path, modules: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """Where below `cache_root` bytecode is kept; `None` if `modules` have theirs beside them.

    `modules` are some that every engine imports: what holds for them is taken to hold for the whole installation. An
    operator's own ``PYTHONPYCACHEPREFIX`` stands.
    """
    folder = cache_root / _FOLDER
    chosen = environ.get(_PREFIX, "")
    if chosen and Path(chosen).parent != folder:
        return None
    if all(_compiled(module) for module in modules):
        return None
    return folder / f"{sys.implementation.cache_tag}-{installation(modules)[:16]}"


def keep_bytecode(cache_root: Path, modules: Sequence[str]) -> None:
    """The same for this process, which runs already, and for its children; `cache_root` must be private.

    Bytecode that lies there for packages that are long gone is removed.
    """
    variables = bytecode_variables(cache_root, modules, os.environ)
    if not variables:
        return
    os.environ.update(variables)
    sys.pycache_prefix = variables[_PREFIX]
    sys.dont_write_bytecode = False
    folder = Path(variables[_PREFIX])
    with contextlib.suppress(OSError):  # a disk that can't be written to costs the bytecode alone
        if not folder.exists():
            folder.unlink(missing_ok=True)  # a link to adopted bytecode that somebody has removed
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(folder)
        for other in folder.parent.iterdir():
            if not other.exists() or other.stat().st_mtime < time.time() - _UNUSED:
                _remove(other)


def installation(modules: Sequence[str]) -> str:
    """SHA-256 of what decides whether bytecode from elsewhere is believed here: packages, their places, their times.

    The packages are all that this interpreter can import, by their installers' lists of files; the times are those of
    `modules`, which one installer wrote together with the rest.
    """
    digest = hashlib.sha256()
    for folder, lists in _packages().items():
        for text in (folder, *lists):
            digest.update(hashlib.sha256(os.fsencode(text)).digest())
    for module in modules:
        digest.update(_modified(module).to_bytes(4, "little"))
    return digest.hexdigest()


def installed_sources() -> tuple[str, ...]:
    """The absolute folders of all packages that this interpreter can import, and of Python's own library."""
    return (*_packages(), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


def _remove(folder: Path) -> None:
    if folder.is_symlink():  # to what was adopted: its tree goes when no link leads there
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _source(module: str) -> Path | None:
    """The file of `module`, which need not be there; `None` if its package is not installed."""
    package, *rest = module.split(".")
    spec = None
    with contextlib.suppress(ImportError, ValueError):  # of the package alone: it imports what is above a module
        spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin)
    return source.parent.joinpath(*rest).with_suffix(".py") if rest else source


def _modified(module: str) -> int:
    """When the source of `module` was written, in unix seconds as bytecode has them: 32 bits; 0 if there is none."""
    source = _source(module)
    try:
        return 0 if source is None else int(source.stat().st_mtime) & 0xFFFF_FFFF
    except OSError:
        return 0


def _compiled(module: str) -> bool:
    """Whether Python would find bytecode of `module` beside its source; also for a module that is not installed."""
    source = _source(module)
    if source is None:
        return True
    try:
        status = source.stat()
        with (source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc").open("rb") as file:
            header = file.read(16)
    except FileNotFoundError:
        return not source.exists()
    except OSError:
        return False
    # importlib/_bootstrap_external.py: magic, flags, then the source's time and size, or its hash if a flag says so
    if len(header) < 16 or header[:4] != importlib.util.MAGIC_NUMBER:
        return False
    stated = (int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:16], "little"))
    return header[4] != 0 or stated == (int(status.st_mtime) & 0xFFFF_FFFF, status.st_size & 0xFFFF_FFFF)


def _packages() -> dict[str, list[str]]:
    """The installers' lists of files in each folder of the path that has any, without folders inside another one.

    Importing a package can add some of its own folders (setuptools does, for what it vendors): the name must be the
    same before and after, and the package's list of files names what is in there.
    """
    found = {Path(path): _lists(path) for path in sys.path}
    stocked = {folder for folder, lists in found.items() if lists}
    return {str(folder): found[folder] for folder in sorted(stocked) if stocked.isdisjoint(folder.parents)}


def _lists(path: str) -> list[str]:
    lists = []
    for distribution in importlib.metadata.distributions(path=[path]):
        with contextlib.suppress(OSError, ValueError):  # one that can't be read tells nothing apart
            if text := distribution.read_text("RECORD"):
                lists.append(text)
    return sorted(lists)
