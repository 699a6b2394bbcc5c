"""Which signed objects of a store a set of trusted keys would believe: what to look at before a key is dropped."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from warmseed.errors import printable
from warmseed.seeding.artifact import NAMESPACE
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust.dsse import ENVELOPE_BYTES, open_envelope
from warmseed.seeding.trust.keys import Keyring
from warmseed.seeding.trust.manifest import MANIFEST_TYPE
from warmseed.seeding.trust.statements import DENIAL_TYPE, PIN_TYPE
from warmseed.stores.base import ObjectInfo

__all__ = ["Checked", "ListedStore", "check_keys"]

_PREFIXES = (f"{NAMESPACE}/manifest/", f"{NAMESPACE}/denied/")


class ListedStore(Protocol):
    """A store that can say what it holds."""

    @property
    def name(self) -> str: ...

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]: ...

    async def get(self, key: str, *, limit: int) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class Checked:
    """One signed object."""

    store: str
    key: str
    signers: tuple[str, ...]  # names of the keys that verified; empty when none did
    problem: str = ""  # why it does not verify


async def check_keys(store: ListedStore, keyring: Keyring) -> AsyncGenerator[Checked, None]:
    """Every signed manifest, pin and denial in `store`, as `keyring` sees it.

    Raises:
        StoreError: when the store can't be listed or read.
    """
    for prefix in _PREFIXES:
        async for info in store.list(prefix):
            if not info.key.endswith(".json"):
                continue
            data = await store.get(info.key, limit=ENVELOPE_BYTES)
            if data is None:
                continue  # gone since it was listed
            yield _check(store.name, info.key, data, keyring)


def _check(store: str, key: str, data: bytes, keyring: Keyring) -> Checked:
    if key.startswith(f"{NAMESPACE}/denied/"):
        kind = DENIAL_TYPE
    else:
        kind = PIN_TYPE if key.endswith("/pin.json") else MANIFEST_TYPE
    try:
        opened = open_envelope(data, kind, keyring)
    except ArtifactRefused as error:
        return Checked(store, key, (), printable(error, limit=300))
    return Checked(store, key, tuple(signer.name for signer in opened.signers))
