"""Names to back ends: what `--warmup-cache-stores` and the configuration file can ask for.

A store is written as a name (``mooncake``), a URL (``s3://bucket/prefix?region=eu-west-1``) or the name of a table
``[stores.NAME]`` of the configuration file, which holds ``url`` and options. Options come from the environment
(``WARMSEED_STORE_NAME_OPTION``), then the URL, then the table.

Other packages add back ends through the entry-point group ``warmseed.stores``: the entry's name is the scheme, its
object a `Backend`.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec

from warmseed.blocking import run_blocking
from warmseed.errors import ConfigurationError, printable
from warmseed.stores.base import BaseStore, Observer, Store, StoreLimits
from warmseed.stores.chain import Chain, Writes
from warmseed.stores.contained import Contained
from warmseed.stores.disk import DiskStore
from warmseed.stores.wrappers import Breaker, NegativeCache, Retry, SingleFlight

__all__ = ["Backend", "NoOptions", "StoreContext", "known_backends", "open_store", "open_stores", "wrap"]

_log = logging.getLogger(__name__)
_GROUP = "warmseed.stores"
_ENVIRONMENT = "WARMSEED_STORE_"
_BUILT_IN = {
    "file": "warmseed.stores.folder",
    "s3": "warmseed.stores.object",
    "gs": "warmseed.stores.object",
    "az": "warmseed.stores.object",
    "http": "warmseed.stores.object",
    "https": "warmseed.stores.object",
    "redis": "warmseed.stores.redis",
    "rediss": "warmseed.stores.redis",
    "mooncake": "warmseed.stores.mooncake",
}
_EXTRAS = {"warmseed.stores.object": "objects", "warmseed.stores.redis": "redis"}
_LIMITS = tuple(StoreLimits.__dataclass_fields__)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
O = TypeVar("O", bound=msgspec.Struct)  # noqa: E741 - options


@dataclass(frozen=True, slots=True)
class StoreContext:
    """What a back end is told when it is opened."""

    name: str  # how logs and metrics call it
    url: str  # as the operator wrote it, without options; may hold a user and password: never log it
    limits: StoreLimits
    observer: Observer | None


class NoOptions(msgspec.Struct, frozen=True):
    """For back ends that have nothing to set."""


@dataclass(frozen=True, slots=True)
class Backend(Generic[O]):
    """How a kind of store is configured and opened.

    `options` names every option with its type; unknown ones never reach `open`, which checks the configuration
    (not whether the service is up: that may change) and raises `ConfigurationError` naming the fix.
    """

    options: type[O]
    open: Callable[[StoreContext, O], Awaitable[Store]]


@dataclass(frozen=True, slots=True)
class _Spec:
    name: str
    scheme: str
    url: str
    options: Mapping[str, object]


def known_backends() -> tuple[str, ...]:
    """Every scheme that can be asked for, those of other packages included."""
    return tuple(sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=_GROUP))}))


async def open_stores(
    stores: Iterable[str],
    *,
    folder: Path | None,
    disk_bytes: int = 64 << 30,
    table: Mapping[str, Mapping[str, object]] | None = None,
    writes: Writes = "all",
    observer: Observer | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Chain:
    """The chain that the operator asked for: the disk in `folder`, then `stores` in their order, each wrapped.

    `table` is ``[stores]`` of the configuration file. One line is logged that shows the chain as it is.

    Raises:
        ConfigurationError: for a misspelt name or option, or a store that can't be configured; it names the fix.
    """
    opened: list[Store] = []
    try:
        for text in stores:
            store = await open_store(text, table=table, observer=observer, environment=environment)
            taken = {known.name for known in opened} | {"disk"}
            if store.name in taken:
                raise ConfigurationError(
                    f"two stores are called {store.name!r}: give each a table of its own, [stores.NAME] with a url, "
                    "and list the names"
                )
            opened.append(store)
    except BaseException:
        for store in opened:
            await store.aclose()
        raise
    disk = None if folder is None else DiskStore(folder, size_limit=disk_bytes, observer=observer)
    chain = Chain(disk, [wrap(store) for store in opened], writes=writes)
    _log.info("stores: %s (writes: %s)", chain.name or "none", writes)
    return chain


def wrap(store: Store) -> Store:
    """A back end as a tier: retried, cut off when broken, briefly remembered misses, one request a key."""
    return SingleFlight(NegativeCache(Breaker(Retry(store))))


async def open_store(
    text: str,
    *,
    table: Mapping[str, Mapping[str, object]] | None = None,
    observer: Observer | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Store:
    """One bare back end, for operators' commands and tests.

    Raises:
        ConfigurationError: as `open_stores`.
    """
    spec = _parse(text.strip(), table or {})
    backend = await run_blocking(_backend, spec.scheme, table or {})  # imports, so it reads files
    given = {**spec.options, **_from_environment(spec.name, backend, environment)}
    limits, options = _options(spec, backend, given)
    store = await backend.open(StoreContext(spec.name, spec.url, limits, observer), options)
    return store if isinstance(store, BaseStore) else Contained(store, limits=limits, observer=observer)


def _parse(text: str, table: Mapping[str, Mapping[str, object]]) -> _Spec:
    if text in table:
        settings = dict(table[text])
        url = settings.pop("url", text)
        if not isinstance(url, str):
            raise ConfigurationError(f"[stores.{text}] url is not a text")
        inner = _parse(url, {})
        return _Spec(text, inner.scheme, inner.url, {**settings, **inner.options})
    if text.lower().startswith(("http:", "https:")):
        scheme = text.partition(":")[0].lower()
        return _Spec(scheme, scheme, text, {})  # a query there belongs to the server
    url, _, query = text.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    match = _SCHEME.fullmatch(url)
    scheme = url if match is None else match[1].lower()
    return _Spec(scheme, scheme, "" if match is None else url, options)


def _backend(scheme: str, table: Mapping[str, Mapping[str, object]]) -> Backend[msgspec.Struct]:
    for entry in entry_points(group=_GROUP):
        if entry.name == scheme:
            try:
                found = entry.load()
            except Exception as error:
                raise ConfigurationError(
                    f"store {scheme!r}: its package can't be loaded ({type(error).__name__}: {printable(error)})"
                ) from error
            if not isinstance(found, Backend):
                raise ConfigurationError(f"store {scheme!r}: {entry.value} is not a warmseed.stores.registry.Backend")
            return found
    module = _BUILT_IN.get(scheme)
    if module is None:
        known = sorted({*known_backends(), *table})
        raise ConfigurationError(f"no store is called {printable(scheme)!r}{_nearest(scheme, known)}")
    try:
        backend = importlib.import_module(module).BACKEND
    except ImportError as error:
        extra = _EXTRAS.get(module, "")
        raise ConfigurationError(
            f"store {scheme!r} needs a package that is not here ({printable(error)}): pip install 'warmseed[{extra}]'"
        ) from error
    if not isinstance(backend, Backend):
        raise ConfigurationError(f"store {scheme!r}: {module} has no back end")
    return backend


def _options(
    spec: _Spec, backend: Backend[msgspec.Struct], given: Mapping[str, object]
) -> tuple[StoreLimits, msgspec.Struct]:
    names = (*backend.options.__struct_fields__, *_LIMITS)
    for name in given:
        if name not in names:
            raise ConfigurationError(f"store {spec.name!r} has no option {printable(name)!r}{_nearest(name, names)}")
    try:
        limits = msgspec.convert({n: v for n, v in given.items() if n in _LIMITS}, StoreLimits, strict=False)
        options = msgspec.convert({n: v for n, v in given.items() if n not in _LIMITS}, backend.options, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"store {spec.name!r}: {printable(error)}") from error
    if not all(getattr(limits, name) > 0 for name in _LIMITS):
        raise ConfigurationError(f"store {spec.name!r}: {', '.join(_LIMITS)} must be more than 0")
    return limits, options


def _from_environment(name: str, backend: Backend[msgspec.Struct], environment: Mapping[str, str]) -> dict[str, object]:
    prefix = _ENVIRONMENT + re.sub(r"[^A-Za-z0-9]", "_", name).upper() + "_"
    names = {field.upper(): field for field in (*backend.options.__struct_fields__, *_LIMITS)}
    found: dict[str, object] = {}
    for variable, value in environment.items():
        if variable.startswith(prefix):
            option = variable.removeprefix(prefix)
            if option in names:
                found[names[option]] = value
    return found


def _nearest(word: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    return (f"; did you mean {near[0]!r}?" if near else "") + f" Known: {', '.join(names)}"
