"""`redis:` and `rediss:`: objects in a Redis (or Valkey) server.

A key is a hash: ``size``, ``modified`` (unix seconds by the server's clock), and ``data`` for objects up to 4 MiB; for
larger ones ``generation``, with the bytes in strings ``<key>@<generation>:<index>`` of 4 MiB each. Those are written
first, under a name used once and with an expiry that is lifted together with the switch of the hash: a reader sees the
old object or the new one, and what a killed writer left expires by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import msgspec
import redis.asyncio
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.typing import EncodableT, FieldT

from warmseed.blocking import run_blocking
from warmseed.errors import ConfigurationError, printable
from warmseed.stores.base import (
    Body,
    ObjectInfo,
    ObjectReader,
    Observer,
    PieceReader,
    StoreLimits,
    length_from,
)
from warmseed.stores.errors import ObjectInvalid, StoreFull, StoreRefused
from warmseed.stores.prunable import BasePrunableStore
from warmseed.stores.registry import Backend, StoreContext

__all__ = ["BACKEND", "RedisOptions", "RedisStore"]

_PART = 4 << 20  # bytes
_UNFINISHED = 3600  # seconds after which the parts of a write that never ended expire
_REPLACED = 600  # seconds for which readers of a replaced object still find its parts
_SECRET_BYTES = 64 << 10  # bytes
_DIGITS = 15  # of the largest number in a hash


class RedisOptions(msgspec.Struct, frozen=True):
    """What can be set for a Redis store."""

    password_file: str = ""
    ca_file: str = ""  # rediss: certificates to trust instead of the system's
    prefix: str = ""  # put before every key
    ttl: int = 0  # seconds after which an object expires; 0: never


class RedisStore(BasePrunableStore):
    """Objects in one Redis database."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        name: str = "redis",
        prefix: str = "",
        ttl: int = 0,
        limits: StoreLimits | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(name, limits=limits, observer=observer)
        self._client, self._prefix, self._ttl = client, prefix, ttl

    async def _look(self, key: str, *fields: str) -> list[bytes | None]:
        with _refusals(self.name, key):
            found = self._client.hmget(self._prefix + key, list(fields))
            return cast("list[bytes | None]", await found)

    async def _get(self, key: str, limit: int) -> bytes | None:
        data, size, generation = await self._look(key, "data", "size", "generation")
        if data is not None or size is None:
            return data
        length = _number(size, self.name, key)
        if length > limit:
            raise ObjectInvalid(f"{self.name}: {key} states {length} bytes, over the limit of {limit}; not read")
        return b"".join([piece async for piece in self._parts(key, generation, length, 0)])

    @asynccontextmanager
    async def _open(self, key: str, offset: int) -> AsyncIterator[ObjectReader | None]:
        data, size, generation = await self._look(key, "data", "size", "generation")
        if data is not None:
            length_from(len(data), offset, self.name, key)
            yield PieceReader.of(data[offset:])
        elif size is None:
            yield None
        else:
            whole = _number(size, self.name, key)
            left = length_from(whole, offset, self.name, key)
            async with contextlib.aclosing(self._parts(key, generation, whole, offset)) as pieces:
                yield PieceReader(left, pieces)

    async def _parts(self, key: str, generation: bytes | None, size: int, offset: int) -> AsyncGenerator[bytes, None]:
        """The object's bytes; the next part is asked for while one is handed out."""
        base = self._base(key, (generation or b"").decode("ascii", "replace"))
        indexes = range(offset // _PART, -(-size // _PART))
        loop = asyncio.get_running_loop()

        async def part(index: int) -> bytes:
            with _refusals(self.name, key):
                data = cast("bytes | None", await self._client.get(f"{base}{index}"))
            if data is None or len(data) != min(_PART, size - index * _PART):
                raise ObjectInvalid(f"{self.name}: a part of {key} is gone or cut; dropped")
            return data

        ahead: asyncio.Task[bytes] | None = None
        try:
            for index in indexes:
                data = await (ahead or part(index))
                ahead = loop.create_task(part(index + 1)) if index + 1 in indexes else None
                yield data[offset % _PART :] if index == indexes.start else data
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _write(self, key: str, body: Body) -> None:
        with _refusals(self.name, key):
            (old,) = await self._look(key, "generation")
            if body.size <= _PART:
                await self._switch(key, {"data": await body.read(), "size": str(body.size)}, old, "", 0)
                return
            generation = secrets.token_hex(8)
            base, index, buffer = self._base(key, generation), 0, bytearray()
            async for piece in body.chunks():
                buffer += piece
                while len(buffer) >= _PART:
                    await self._client.set(f"{base}{index}", bytes(buffer[:_PART]), ex=_UNFINISHED)
                    del buffer[:_PART]
                    index += 1
            if buffer:
                await self._client.set(f"{base}{index}", bytes(buffer), ex=_UNFINISHED)
                index += 1
            await self._switch(key, {"size": str(body.size), "generation": generation}, old, base, index)

    async def _switch(
        self, key: str, fields: Mapping[FieldT, EncodableT], old: bytes | None, base: str, parts: int
    ) -> None:
        """Make the new object visible in one transaction."""
        name = self._prefix + key
        with contextlib.suppress(NoPermissionError):  # a user without that right writes objects of unknown age
            seconds, _ = await self._client.time()
            fields = {**fields, "modified": str(seconds)}
        async with self._client.pipeline(transaction=True) as batch:
            batch.delete(name)
            batch.hset(name, mapping=fields)
            for part in range(parts):
                if self._ttl:
                    batch.expire(f"{base}{part}", self._ttl)
                else:
                    batch.persist(f"{base}{part}")
            if self._ttl:
                batch.expire(name, self._ttl)
            results = await batch.execute()
        if parts and not all(results[2 : 2 + parts]):
            await self._client.delete(name)
            raise StoreFull(f"{self.name}: parts of {key} were evicted before it was whole; nothing was kept")
        if old:
            await self._expire_parts(key, old.decode("ascii", "replace"))

    async def _expire_parts(self, key: str, generation: str) -> None:
        base, index = self._base(key, generation), 0
        while await self._client.expire(f"{base}{index}", _REPLACED):
            index += 1

    async def _stat(self, key: str) -> ObjectInfo | None:
        size, modified = await self._look(key, "size", "modified")
        if size is None:
            return None
        known = modified is not None and modified.isdigit() and len(modified) <= _DIGITS
        return ObjectInfo(key, _number(size, self.name, key), float(modified or 0) if known else None)

    async def _list(self, prefix: str) -> AsyncGenerator[ObjectInfo, None]:
        start = self._prefix + prefix
        with _refusals(self.name, prefix):
            async for raw in self._client.scan_iter(match=_literal(start) + "*", _type="HASH"):
                key = cast("bytes", raw).decode(errors="replace").removeprefix(self._prefix)
                info = await self._stat(key)
                if info is not None:
                    yield info

    async def _delete(self, key: str) -> bool:
        (old,) = await self._look(key, "generation")
        with _refusals(self.name, key):
            removed = await self._client.delete(self._prefix + key)
        if old:
            await self._expire_parts(key, old.decode("ascii", "replace"))
        return bool(removed)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _base(self, key: str, generation: str) -> str:
        return f"{self._prefix}{key}@{generation}:"


@contextlib.contextmanager
def _refusals(store: str, key: str) -> Iterator[None]:
    """Redis' own words for full and for forbidden, as the contract's."""
    try:
        yield
    except OutOfMemoryError as error:
        raise StoreFull(f"{store}: no room for {key} ({printable(error)}); nothing was kept") from error
    except (ReadOnlyError, NoPermissionError, AuthenticationError, AuthorizationError) as error:
        raise StoreRefused(f"{store}: {key}: not allowed ({printable(error)}); check password and user") from error


def _number(raw: bytes, store: str, key: str) -> int:
    if not raw.isdigit() or len(raw) > _DIGITS:
        raise ObjectInvalid(f"{store}: {key} states no length ({printable(raw)}); dropped")
    return int(raw)


def _literal(text: str) -> str:
    return "".join(f"\\{c}" if c in "*?[]\\" else c for c in text)


async def _open(context: StoreContext, options: RedisOptions) -> RedisStore:
    limits = context.limits
    parts = urlsplit(context.url)
    if not parts.hostname:
        raise ConfigurationError(f"store {context.name!r} names no host: redis://host:6379/0")
    password = await run_blocking(_secret, options.password_file, context.name) if options.password_file else None
    more = await run_blocking(_quiet)
    if password is not None:
        more["password"] = password
    if options.ca_file:
        if parts.scheme != "rediss":
            raise ConfigurationError(f"store {context.name!r}: ca_file is for rediss: only")
        more["ssl_ca_certs"] = options.ca_file
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            context.url,
            max_connections=32,
            timeout=limits.deadline,
            socket_timeout=limits.deadline,
            socket_connect_timeout=min(5.0, limits.deadline),
            decode_responses=False,
            **more,
        )
        client = redis.asyncio.Redis.from_pool(pool)
    except (ValueError, RedisError) as error:
        raise ConfigurationError(f"store {context.name!r} can't be configured: {printable(error)}") from error
    return RedisStore(
        client,
        name=context.name,
        prefix=options.prefix,
        ttl=options.ttl,
        limits=limits,
        observer=context.observer,
    )


def _quiet() -> dict[str, str | None]:
    """Settings that keep the library from looking up its own version on disk for every connection, on the loop."""
    if find_spec("redis.driver_info") is not None:
        return {"driver_info": None}
    return {"lib_name": None, "lib_version": None}


def _secret(path: str, name: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(_SECRET_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"store {name!r}: the password file {path} can't be read: {error}") from error


BACKEND = Backend(RedisOptions, _open)
