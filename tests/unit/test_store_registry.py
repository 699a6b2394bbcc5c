"""What an operator can ask for, and what stops a start with a line that names the fix."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest
from tests.support.waiting import run

from warmseed.errors import ConfigurationError
from warmseed.stores import registry
from warmseed.stores.base import BaseStore, Store, StoreLimits
from warmseed.stores.contained import Contained
from warmseed.stores.folder import FolderStore
from warmseed.stores.object import split_credentials
from warmseed.stores.registry import Backend, NoOptions, StoreContext, open_store, open_stores
from warmseed.stores.wrappers import innermost
from warmseed.testing.fake_store import FakeStore

Table = Mapping[str, Mapping[str, object]]
NONE: dict[str, str] = {}


def refused(text: str, *, table: Table | None = None, environment: dict[str, str] | None = None) -> str:
    async def work() -> None:
        await open_store(text, table=table, environment=environment or NONE)

    with pytest.raises(ConfigurationError) as caught:
        asyncio.run(work())
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("mooncacke", "mooncake"), ("Redsi://h", "redis"), ("S4://b", "s3"), ("fiel:/x", "file"), ("flete", "fleet")],
)
def test_a_misspelt_store_names_the_nearest_known_one(text: str, nearest: str) -> None:
    assert f"did you mean '{nearest}'?" in refused(text, table={"fleet": {"url": "redis://h"}})


@pytest.mark.parametrize(
    ("text", "table", "fix"),
    [
        ("redis://h?tl=3", {}, "did you mean 'ttl'?"),
        ("redis://h?ttl=soon", {}, "ttl"),
        ("redis://h?deadline=0", {}, "more than 0"),
        ("fleet", {"fleet": {"url": "redis://h", "dedline": 3}}, "did you mean 'deadline'?"),
        ("fleet", {"fleet": {"url": 3}}, "url"),
        ("redis:", {}, "redis://host"),
        ("redis://h?ca_file=/x", {}, "rediss"),
        ("redis://h?password_file=/no/such", {}, "/no/such"),
        ("file:relative", {}, "absolute"),
        ("file:/no/such/folder", {}, "mount"),
        ("s3:", {}, "s3://bucket/prefix"),
        ("s3://b?settings=nonsense", {}, "name=value"),
        ("s3://b?settings=no_such_setting=1", {}, "no_such_setting"),
        ("s3://b?secret_key_file=/no/such", {}, "/no/such"),
        ("mooncake", {}, "MOONCAKE_CONFIG_PATH"),
        ("mooncake:/no/such.json", {}, "/no/such.json"),
        ("\x1b[31mevil\n", {}, "\\x1b[31mevil"),
    ],
)
def test_what_cannot_work_stops_the_start_and_names_the_fix(
    text: str, table: Table, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    message = refused(text, table=table)
    assert fix in message
    assert "\n" not in message
    assert "\x1b" not in message


def test_environment_wins_over_url_and_url_over_the_table(tmp_path: Path) -> None:
    async def work() -> None:
        table = {"fleet": {"url": f"file:{tmp_path}?deadline=2", "deadline": 3, "stream_deadline": 33.0}}
        store = await open_store("fleet", table=table, environment=NONE)
        assert isinstance(store, FolderStore)
        assert store.name == "fleet"
        assert store.limits == StoreLimits(deadline=2, stream_deadline=33)
        store = await open_store("fleet", table=table, environment={"WARMSEED_STORE_FLEET_DEADLINE": "1.5"})
        assert isinstance(store, FolderStore)
        assert store.limits.deadline == 1.5

    run(work)


def test_one_line_at_start_shows_the_chain_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        with caplog.at_level(logging.INFO):
            (tmp_path / "shared").mkdir()
            chain = await open_stores(
                [f"file:{tmp_path}/shared", "redis://user:hunter2@127.0.0.1:1/0"],
                folder=tmp_path / "store",
                writes="first",
                environment=NONE,
            )
            await chain.aclose()
        lines = [r.getMessage() for r in caplog.records if r.name == registry.__name__]
        wrapped = "|retry|breaker|negative|flight"
        assert lines == [f"stores: disk -> file{wrapped} -> redis{wrapped} (writes: first)"]
        assert "hunter2" not in caplog.text + repr(chain) + repr([*map(innermost, chain.tiers)])

    run(work)


def test_two_stores_of_one_name_are_refused(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(ConfigurationError, match=r"\[stores.NAME\]"):
            await open_stores([f"file:{tmp_path}", f"file:{tmp_path}"], folder=None, environment=NONE)
        table = {"disk": {"url": f"file:{tmp_path}"}}
        with pytest.raises(ConfigurationError, match="disk"):
            await open_stores(["disk"], folder=tmp_path, table=table, environment=NONE)

    run(work)


class Options(msgspec.Struct, frozen=True):
    colour: str = "red"


async def _open_plugin(context: StoreContext, options: Options) -> Store:
    return FakeStore(f"{context.name}-{options.colour}")


class Bare:
    """A third party's store without our base class: it raises what it likes and never ends."""

    name = "bare"

    async def get(self, key: str, *, limit: int) -> bytes | None:
        if key == "kind/hang":
            await asyncio.Event().wait()
        if key == "kind/long":
            return b"x" * 1000
        raise KeyError("anything")

    async def stat(self, key: str) -> object:
        raise RuntimeError("anything")

    async def aclose(self) -> None: ...


async def _open_bare(context: StoreContext, options: NoOptions) -> Store:
    return Bare()  # type: ignore[return-value]


PLUGIN = Backend(Options, _open_plugin)
BARE = Backend(NoOptions, _open_bare)
NOT_A_BACKEND = object()


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("plugin", f"{__name__}:PLUGIN", "warmseed.stores"),
        EntryPoint("bare", f"{__name__}:BARE", "warmseed.stores"),
        EntryPoint("wrong", f"{__name__}:NOT_A_BACKEND", "warmseed.stores"),
        EntryPoint("broken", "no_such_module:X", "warmseed.stores"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "warmseed.stores" else [])


@pytest.mark.usefixtures("plugins")
def test_other_packages_add_stores_with_options_of_their_own() -> None:
    async def work() -> None:
        store = await open_store("plugin://x?colour=blue", environment=NONE)
        assert store.name == "plugin-blue"
        with pytest.raises(ConfigurationError, match="did you mean 'colour'"):
            await open_store("plugin://x?color=blue", environment=NONE)
        for text, why in {"wrong": "Backend", "broken": "can't be loaded", "plugn": "did you mean 'plugin'"}.items():
            with pytest.raises(ConfigurationError, match=why):
                await open_store(text, environment=NONE)

    run(work)


@pytest.mark.usefixtures("plugins")
def test_a_third_partys_store_is_held_to_the_contract() -> None:
    async def work() -> None:
        store = await open_store("bare?deadline=0.2", environment=NONE)
        assert isinstance(store, Contained)
        for key in ("kind/a", "kind/hang", "kind/long"):
            with pytest.raises(registry_errors()):
                await store.get(key, limit=10)
        with pytest.raises(registry_errors()):
            await store.stat("kind/a")

    run(work)


def registry_errors() -> type[Exception]:
    from warmseed.stores.errors import StoreError

    return StoreError


def test_every_built_in_back_end_can_be_loaded() -> None:
    async def work() -> None:
        for scheme in ("file", "s3", "gs", "az", "http", "https", "redis", "rediss", "mooncake"):
            backend = await asyncio.to_thread(registry._backend, scheme, {})
            assert isinstance(backend, Backend)
            assert not issubclass(backend.options, BaseStore)

    run(work)


def test_credentials_in_a_url_become_a_header() -> None:
    url, headers = split_credentials("https://user:p%40ss@host:8443/folder?x=1")
    assert url == "https://host:8443/folder?x=1"
    assert headers == {"Authorization": "Basic dXNlcjpwQHNz"}
    assert split_credentials("https://host/x") == ("https://host/x", {})


def test_known_back_ends_include_those_of_installed_packages() -> None:
    assert {"file", "s3", "mooncake"} <= set(registry.known_backends())
    assert importlib.metadata.entry_points(group="warmseed.stores") is not None
