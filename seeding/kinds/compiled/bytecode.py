"""Python's bytecode of an engine's packages, as interpreters keep it with ``PYTHONPYCACHEPREFIX``.

Layout: ``<root>/<folder of the source>/<module>.<cache tag>.pyc`` (importlib/_bootstrap_external.py, PEP 3147). An
interpreter finds a file by the path of its source and believes it while the time and size of the source are those in
its header; otherwise it compiles and replaces it. Nothing in a file depends on the root.
"""

from __future__ import annotations

from collections.abc import Iterable

from warmseed.seeding.kinds.compiled.cache import CompiledCache

__all__ = ["Bytecode"]


class Bytecode(CompiledCache):
    """The folder of one set of installed packages; which set is up to the configuration that names the artifact.

    `sources` are the absolute folders that they lie in. Of others nothing is taken: an interpreter also compiles what
    is nobody else's, such as the modules beside an operator's own script.
    """

    name = "bytecode"
    needs = ("python_abi",)

    def __init__(self, sources: Iterable[str]) -> None:
        self._sources = tuple(f"{source.strip('/')}/" for source in sources)

    def skips(self, path: str) -> bool:
        below = f"{path}/"
        if not any(below.startswith(source) or source.startswith(below) for source in self._sources):
            return True
        return ".pyc." in path.rpartition("/")[2]  # being written: importlib renames it when it is whole

    def counts(self, path: str) -> bool:
        return False  # of a module that the publisher never imported; one that was compiled again has changed

    def refuses(self, path: str, size: int) -> str | None:
        if not path.endswith(".pyc"):
            return "no bytecode"
        return None if size else "empty: its writer was interrupted"
