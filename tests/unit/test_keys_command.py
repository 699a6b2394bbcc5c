"""``warmseed keys``: a change of keys can be checked before a node stops believing what it has."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from warmseed.daemon.cli.keys import app
from warmseed.daemon.settings.paths import state_folder
from warmseed.errors import ConfigurationError
from warmseed.seeding.artifact import ArtifactKey, bundle_key, denial_key
from warmseed.seeding.environment import Environment
from warmseed.seeding.trust.keys import PublisherKey
from warmseed.seeding.trust.manifest import Manifest, sign_manifest
from warmseed.seeding.trust.statements import Denial, sign_denial
from warmseed.stores.base import Body
from warmseed.stores.disk import DiskStore
from warmseed.stores.folder import FolderStore

OLD, NEW = PublisherKey("old", b"o" * 32), PublisherKey("new", b"n" * 32)
ENVIRONMENT = Environment({"gpu": "H200"})
KEY = ArtifactKey(kind="compile_cache", config_hash="a" * 64, environment_hash=ENVIRONMENT.digest)


def manifest(generation: int) -> Manifest:
    return Manifest(
        schema=1,
        kind=KEY.kind,
        store_key=bundle_key("c" * 64),
        config_hash=KEY.config_hash,
        config_digest="b" * 64,
        dp_rank=0,
        world_rank=0,
        device_index=-1,
        filename="bundle.tar",
        sha256="c" * 64,
        length=1,
        environment=dict(ENVIRONMENT),
        generation=generation,
        issued_at=1,
        expires_at=2,
        publisher="p",
    )


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, ConfigurationError):
        raise result.exception
    return result.exit_code, result.stdout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node that holds one manifest of each kind of publisher, and a shared folder with a denial."""
    (tmp_path / "shared").mkdir()

    async def fill() -> None:
        disk = DiskStore(state_folder(tmp_path))
        await disk.put(KEY.manifest_key(1), Body.of(sign_manifest(manifest(1), [OLD])))
        await disk.put(KEY.manifest_key(2), Body.of(sign_manifest(manifest(2), [OLD, NEW])))
        await disk.put(KEY.head_key, Body.of(b"2"))
        await disk.aclose()
        shared = FolderStore(tmp_path / "shared")
        denial = Denial(schema=1, kind="x", sha256="c" * 64, reason="r", issued_at=1, expires_at=2, publisher="p")
        await shared.put(denial_key("c" * 64), Body.of(sign_denial(denial, [NEW])))
        await shared.aclose()

    asyncio.run(fill())
    return tmp_path


def test_a_new_key_is_private_and_its_public_half_is_printed(tmp_path: Path) -> None:
    code, said = run("new", "builder", "--out", str(tmp_path / "k"), "--json")
    assert code == 0
    shown = json.loads(said)
    assert PublisherKey.load(tmp_path / "k").public.keyid == shown["key_id"]
    assert (tmp_path / "k").read_text().split(":")[1].strip() not in said
    with pytest.raises(ConfigurationError, match="never overwritten"):
        run("new", "builder", "--out", str(tmp_path / "k"))


def test_dropping_a_key_names_what_would_stop_verifying(root: Path) -> None:
    shared = f"file:{root / 'shared'}"
    arguments = ["check", "--cache-root", str(root), "--store", shared, "--json"]
    code, said = run(*arguments, "--seed-trusted-keys", str(OLD.public), "--seed-trusted-keys", str(NEW.public))
    assert (code, json.loads(said)["checked"], json.loads(said)["would_stop_verifying"]) == (0, 3, [])
    code, said = run(*arguments, "--seed-trusted-keys", str(NEW.public))
    assert code == 1
    assert [one["key"] for one in json.loads(said)["would_stop_verifying"]] == [KEY.manifest_key(1)]


def test_people_are_told_in_lines(root: Path) -> None:
    (root / "keys").write_text(f"# our builders\n{OLD.public}\n")
    code, said = run("check", "--cache-root", str(root), "--seed-trusted-keys", str(root / "keys"))
    assert code == 0
    assert "2 of 2 signed objects verify" in said


def test_a_check_without_keys_is_a_usage_error(root: Path) -> None:
    with pytest.raises(ConfigurationError, match="no keys"):
        run("check", "--cache-root", str(root))
    with pytest.raises(ConfigurationError, match="neither"):
        run("check", "--cache-root", str(root), "--seed-trusted-keys", "nonsense")
