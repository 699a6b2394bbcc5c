"""`s3:`, `gs:`, `az:` and `http:` through obstore.

Credentials come from where the clouds' own tools find them (environment, instance role, workload identity), or from
files named in the options. An HTTP server serves reads; it is written to where it allows PUT.
"""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec
import obstore
from obstore.exceptions import (
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import HTTPStore, ObjectStore, from_url

from warmseed.blocking import run_blocking
from warmseed.errors import ConfigurationError, printable
from warmseed.stores.base import CHUNK, Body, ObjectInfo, ObjectReader, Observer, StoreLimits, length_from
from warmseed.stores.errors import StoreRefused
from warmseed.stores.prunable import BasePrunableStore
from warmseed.stores.registry import Backend, StoreContext

if TYPE_CHECKING:  # they exist for type checkers only
    from obstore.store import ClientConfig, RetryConfig

__all__ = ["BACKEND", "ObjectOptions", "ObjectStoreTier", "split_credentials"]

_WHOLE = 8 << 20  # bytes up to which an object is one request; larger ones go in parts of this size
_AT_ONCE = 4  # parts on their way at the same time
_SECRET_BYTES = 64 << 10  # bytes in the largest credentials file
_ABSENT = (NotFoundError, FileNotFoundError)  # which of the two, depends on obstore's version
_FORBIDDEN = (PermissionDeniedError, UnauthenticatedError, PermissionError)
_CONNECT = timedelta(seconds=5)


class ObjectOptions(msgspec.Struct, frozen=True):
    """What can be set for an object store."""

    endpoint: str = ""  # S3-compatible service, such as http://minio:9000
    region: str = ""
    anonymous: bool = False  # do not sign requests
    access_key_file: str = ""  # file that holds the access key id
    secret_key_file: str = ""  # file that holds the secret access key
    token_file: str = ""  # http: file that holds a bearer token
    settings: str = ""  # any other that obstore knows, by its name there: "name=value, name=value"


class _Stream(Protocol):
    def __aiter__(self) -> AsyncIterator[bytes]: ...


class ObjectStoreTier(BasePrunableStore):
    """Objects in a bucket, container or HTTP folder."""

    def __init__(
        self, store: ObjectStore, *, name: str, limits: StoreLimits | None = None, observer: Observer | None = None
    ) -> None:
        super().__init__(name, limits=limits, observer=observer)
        self._store = store

    @asynccontextmanager
    async def _open(self, key: str, offset: int) -> AsyncIterator[ObjectReader | None]:
        try:
            if offset:
                meta = await obstore.head_async(self._store, key)
                if length_from(meta["size"], offset, self.name, key) == 0:
                    yield _Reader(0, _nothing())
                    return
                options: obstore.GetOptions = {"range": {"offset": offset}}
                if meta["e_tag"] is not None:
                    options["if_match"] = meta["e_tag"]  # the object whose length we know, or none
                result = await obstore.get_async(self._store, key, options=options)
            else:
                result = await obstore.get_async(self._store, key)
        except _ABSENT:
            yield None
            return
        except _FORBIDDEN as error:
            raise self._refused("reading", key, error) from error
        start, end = result.range
        yield _Reader(end - start, aiter(cast(_Stream, result.stream(min_chunk_size=CHUNK))))

    async def _write(self, key: str, body: Body) -> None:
        try:
            if body.size <= _WHOLE:
                await obstore.put_async(self._store, key, await body.read(), use_multipart=False)
            else:
                await obstore.put_async(
                    self._store,
                    key,
                    body.chunks(),
                    use_multipart=True,
                    chunk_size=_WHOLE,
                    max_concurrency=_AT_ONCE,
                )
        except _FORBIDDEN as error:
            raise self._refused("writing", key, error) from error

    async def _stat(self, key: str) -> ObjectInfo | None:
        try:
            meta = await obstore.head_async(self._store, key)
        except _ABSENT:
            return None
        except _FORBIDDEN as error:
            raise self._refused("looking for", key, error) from error
        return ObjectInfo(key, meta["size"], meta["last_modified"].timestamp())

    def _refused(self, doing: str, key: str, error: Exception) -> StoreRefused:
        return StoreRefused(
            f"{self.name}: {doing} {key} is not allowed ({type(error).__name__}: {printable(error)}); check the "
            "credentials. S3 also answers so for a missing key when the right to list is missing"
        )

    async def _list(self, prefix: str) -> AsyncGenerator[ObjectInfo, None]:
        folder = prefix.rpartition("/")[0]
        try:
            async for batch in obstore.list(self._store, prefix=folder or None):
                for meta in batch:
                    if meta["path"].startswith(prefix):
                        yield ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
        except _FORBIDDEN as error:
            raise self._refused("listing", prefix, error) from error

    async def _delete(self, key: str) -> bool:
        there = await self._stat(key) is not None
        if there:
            try:
                await obstore.delete_async(self._store, key)
            except _FORBIDDEN as error:
                raise self._refused("deleting", key, error) from error
        return there


class _Reader:
    def __init__(self, size: int, pieces: AsyncIterator[bytes]) -> None:
        self._size, self._pieces = size, pieces

    @property
    def size(self) -> int:
        return self._size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            yield bytes(piece)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def split_credentials(url: str) -> tuple[str, dict[str, str]]:
    """The URL without user and password, and the header that carries them instead, so that no log shows them."""
    parts = urlsplit(url)
    if parts.username is None:
        return url, {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    host = parts.netloc.rpartition("@")[2]
    header = {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
    return urlunsplit(parts._replace(netloc=host)), header


async def _open(context: StoreContext, options: ObjectOptions) -> ObjectStoreTier:
    url, headers = split_credentials(_normal(context.url))
    if options.token_file:
        token = await run_blocking(_secret, options.token_file, context.name)
        headers = {"Authorization": f"Bearer {token}"}
    client: ClientConfig = {
        "timeout": timedelta(seconds=context.limits.stream_deadline),
        "connect_timeout": _CONNECT,
        "allow_http": url.startswith("http:") or options.endpoint.startswith("http:"),
    }
    if headers:
        client["default_headers"] = headers
    retry: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=context.limits.deadline)}
    name, limits, observer = context.name, context.limits, context.observer
    try:
        if url.startswith(("http:", "https:")):
            if options.endpoint or options.region or options.settings:
                raise ConfigurationError(f"store {name!r}: endpoint, region and settings are not for http")
            from warmseed.stores.http import HttpTier

            http = HTTPStore.from_url(url, client_options=client, retry_config=retry)
            return HttpTier(http, url=url, headers=headers, name=name, limits=limits, observer=observer)
        config = await run_blocking(_config, options, context.name)
        store = from_url(url, config=config, client_options=client, retry_config=retry)  # type: ignore[call-overload]  # one overload a cloud
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigurationError(f"store {name!r} can't be configured: {printable(error)}") from error
    return ObjectStoreTier(store, name=name, limits=limits, observer=observer)


def _normal(url: str) -> str:
    """``s3:bucket/prefix`` as ``s3://bucket/prefix``."""
    match = re.fullmatch(r"([a-z0-9]+):/*(.+)", url, re.IGNORECASE)
    if match is None:
        raise ConfigurationError(f"{printable(url)!r} names no bucket or host: s3://bucket/prefix, https://host/folder")
    return f"{match[1].lower()}://{match[2].rstrip('/')}"


def _config(options: ObjectOptions, name: str) -> Mapping[str, str | bool]:
    config: dict[str, str | bool] = {}
    for setting in filter(None, (part.strip() for part in options.settings.split(","))):
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigurationError(f"store {name!r}: settings are written name=value, not {printable(setting)!r}")
        config[key.strip()] = value.strip()
    if options.endpoint:
        config["endpoint"] = options.endpoint
    if options.region:
        config["region"] = options.region
    if options.anonymous:
        config["skip_signature"] = True
    if options.access_key_file:
        config["access_key_id"] = _secret(options.access_key_file, name)
    if options.secret_key_file:
        config["secret_access_key"] = _secret(options.secret_key_file, name)
    return config


def _secret(path: str, name: str) -> str:
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_SECRET_BYTES)
        return raw.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"store {name!r}: the credentials file {path} can't be read: {error}") from error


BACKEND = Backend(ObjectOptions, _open)
