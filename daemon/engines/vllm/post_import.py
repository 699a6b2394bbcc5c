"""Run something when a module has been imported, without importing it: a plugin that costs nothing until it is needed.

vLLM calls its plugins in every process, the API server's included, long before a model is loaded; importing the
loaders there would cost each of them a second.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["when_imported"]

logger = logging.getLogger(__name__)

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback` with the module `name` once it is imported; at once if it is already.

    A callback that raises is logged and costs nothing else: it must not break an import that is not its own.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _call(callback, module)
        return
    _finder.add(name, callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _call(callback: Callback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception:
        logger.exception("warmseed could not set itself up in %s; the ipc_cache load format may be missing", module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it wraps the loader that the other finders come up with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Callback]] = {}

    def add(self, name: str, callback: Callback) -> None:
        with self._lock:
            self._waiting.setdefault(name, []).append(callback)

    def take(self, name: str) -> list[Callback]:
        with self._lock:
            return self._waiting.pop(name, [])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Telling(spec.loader, fullname)
                return spec
        return None


class _Telling(importlib.abc.Loader):
    """A module's own loader, and afterwards the callbacks."""

    def __init__(self, inner: importlib.abc.Loader, name: str) -> None:
        self._inner = inner
        self._name = name

    def __getattr__(self, name: str) -> object:  # resources, source and code come from the module's own loader
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        for callback in _finder.take(self._name):
            _call(callback, module)


_finder = _Finder()
