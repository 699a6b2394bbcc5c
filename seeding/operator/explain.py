"""Why one node's cache is not another's: which input of two configurations or two environments differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from warmseed.blocking import run_blocking
from warmseed.errors import printable
from warmseed.seeding.artifact import FACTORS_BYTES, object_key
from warmseed.seeding.environment import Difference, Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.operator.golden import list_artifacts
from warmseed.seeding.trust.keys import Keyring
from warmseed.seeding.trust.manifest import Manifest
from warmseed.stores.chain import Chain

__all__ = ["Explanation", "Side", "compare_sides", "read_side", "side_of_manifest"]

_FILE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Side:
    """One of two things to compare, as far as it is known."""

    name: str
    environment: Mapping[str, str] | None = None
    factors: Mapping[str, str] | None = None  # every input of the configuration's hash
    config_hash: str = ""
    config_digest: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What differs, and what could not be compared."""

    configuration: tuple[Difference, ...] = ()
    environment: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing differs in what could be compared."""
        return not (self.configuration or self.environment)


def compare_sides(theirs: Side, ours: Side) -> Explanation:
    """Every input that differs between the two. Pure."""
    notes: list[str] = []
    configuration: tuple[Difference, ...] = ()
    environment: tuple[Difference, ...] = ()
    if theirs.factors is not None and ours.factors is not None:
        configuration = Environment(ours.factors).differences(theirs.factors)
        if not configuration and theirs.config_hash != ours.config_hash and theirs.config_hash and ours.config_hash:
            notes.append("the engines hash equal inputs differently: their releases compute the hash in another way")
    elif theirs.config_digest and ours.config_digest:
        same = theirs.config_digest == ours.config_digest
        if not same:
            configuration = (Difference("config_digest", theirs.config_digest, ours.config_digest),)
            notes.append("the configurations differ, and no store holds the inputs of both")
    elif theirs.config_hash and ours.config_hash and theirs.config_hash != ours.config_hash:
        configuration = (Difference("config_hash", theirs.config_hash, ours.config_hash),)
        notes.append("the configurations differ, and no store holds the inputs of both")
    if configuration and theirs.config_hash and theirs.config_hash == ours.config_hash:
        notes.append("the engine's hash is equal all the same: it carries 40 bits, or leaves these inputs out")
    if theirs.environment is not None and ours.environment is not None:
        environment = Environment(ours.environment).differences(theirs.environment)
        unknown = [difference.field for difference in environment if "unknown" in (difference.theirs, difference.ours)]
        if unknown:
            notes.append(
                f"{', '.join(unknown)}: one side does not know; such a table is neither published nor installed"
            )
    else:
        notes.append("the environment of one side is not known, so environments were not compared")
    return Explanation(configuration, environment, tuple(notes))


async def read_side(text: str, chain: Chain | None, keyring: Keyring) -> Side:
    """What `text` names: a file (table, managed store's folder, manifest, inputs) or a configuration's hash.

    Raises:
        ArtifactRefused: ``missing`` or ``malformed``.
        StoreError: when a store fails.
    """
    data = await run_blocking(_read, Path(text))
    if data is not None:
        return await _of_file(data, text, chain)
    if chain is None:
        raise ArtifactRefused("missing", f"{printable(text)} is no file")
    newest: Manifest | None = None
    async for found in list_artifacts(chain, keyring):
        if not found.manifest.config_hash.startswith(text) or len(text) < 8:
            continue
        if newest is None or newest.issued_at <= found.manifest.issued_at:
            newest = found.manifest
    if newest is None:
        raise ArtifactRefused(
            "missing", f"{printable(text)} is neither a file nor the hash of a published configuration"
        )
    return await side_of_manifest(newest, text, chain)


async def side_of_manifest(manifest: Manifest, name: str, chain: Chain | None) -> Side:
    """A manifest's environment, and its configuration's inputs where a store has them."""
    factors: Mapping[str, str] | None = None
    if chain is not None:
        data = await chain.get(object_key(manifest.config_digest), limit=FACTORS_BYTES)
        if data is not None:
            factors = _texts(data)
            if factors is not None and Environment(factors).digest != manifest.config_digest:
                factors = None
    return Side(name, manifest.environment, factors, manifest.config_hash, manifest.config_digest)


def _read(path: Path) -> bytes | None:
    if path.is_dir():
        path = path / "manifest.json"
    if not path.is_file():
        return None
    with path.open("rb") as source:
        return source.read(_FILE_BYTES)


async def _of_file(data: bytes, name: str, chain: Chain | None) -> Side:
    try:
        value = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise ArtifactRefused("malformed", f"{name} does not parse: {printable(error)}") from None
    if not isinstance(value, dict):
        raise ArtifactRefused("malformed", f"{name} is no object")
    if "payload" in value and "payloadType" in value:
        return await side_of_manifest(_unverified(value, name), name, chain)
    if isinstance(metadata := value.get("_metadata"), dict):
        return Side(name, {str(field): str(text) for field, text in metadata.items()})
    if "cache_schema" in value:
        return Side(name, {str(field): str(text) for field, text in value.items() if field != "cache_schema"})
    if (factors := _texts(data)) is not None:
        return Side(name, None, factors, "", Environment(factors).digest)
    raise ArtifactRefused("malformed", f"{name} is neither a table, nor a manifest, nor a configuration's inputs")


def _unverified(value: Mapping[str, object], name: str) -> Manifest:
    """A manifest for reading only: nothing is installed on its word."""
    try:
        return msgspec.json.decode(msgspec.convert(value["payload"], bytes), type=Manifest)
    except (msgspec.MsgspecError, ArtifactRefused) as error:
        raise ArtifactRefused("malformed", f"{name} holds no manifest: {printable(error)}") from None


def _texts(data: bytes) -> dict[str, str] | None:
    try:
        found = json.loads(data)
    except ValueError:
        return None
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        return None
    return found
