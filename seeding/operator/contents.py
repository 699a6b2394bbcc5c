"""What is in the payload of a manifest, as far as that can be told without fetching a large one.

Everything is read by the digests of a manifest that must be verified, past the disk's cache: unlike
`Chain.get_verified` nothing is filled, and a bad copy stays where it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from warmseed.blocking import run_blocking
from warmseed.errors import printable
from warmseed.seeding.artifact import FACTORS_BYTES, object_key
from warmseed.seeding.bundle.index import INDEX_BYTES, FileRecord, read_index
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.bounded import JsonLimits
from warmseed.seeding.kinds.autotune.keys import split_key
from warmseed.seeding.kinds.autotune.layout import KIND, managed_filename
from warmseed.seeding.kinds.autotune.managed import decode_stores
from warmseed.seeding.kinds.autotune.table import parse_table
from warmseed.seeding.trust.manifest import Manifest
from warmseed.stores.chain import Chain
from warmseed.stores.errors import StoreError
from warmseed.stores.wrappers.verifying import sha256_of

__all__ = ["Cache", "Contents", "read_contents", "read_factors"]


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache of a bundle."""

    name: str
    root: str  # where it lay on the node that captured it
    count: int  # files
    nbytes: int
    files: tuple[FileRecord, ...]  # largest first


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in the payload, as far as that can be told without fetching a large one."""

    caches: tuple[Cache, ...] = ()
    operations: Mapping[str, int] = field(default_factory=dict)  # of a table: operation -> entries
    unread: str = ""  # why nothing is known


async def read_contents(chain: Chain, manifest: Manifest) -> Contents:
    """The files of a bundle by its file index, or the operations of a table; what can't be told is said."""
    try:
        if manifest.index is not None:
            return await _of_bundle(chain, manifest)
        if manifest.kind == KIND and manifest.stored is None:
            return await _of_table(chain, manifest)
    except (ArtifactRefused, StoreError) as error:
        return Contents(unread=str(error))
    return Contents(unread=f"nothing is known of what the kind {printable(manifest.kind)} holds")


async def read_factors(chain: Chain, manifest: Manifest) -> Mapping[str, str] | None:
    """Every input of the configuration, or `None` where no store has them as they were signed."""
    digest = manifest.config_digest
    data = await _object(chain, object_key(digest), sha256=digest, limit=FACTORS_BYTES)
    try:
        return None if data is None else msgspec.json.decode(data, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


async def _of_bundle(chain: Chain, manifest: Manifest) -> Contents:
    """The files of a bundle, by its file index; the payload is not fetched.

    Raises:
        ArtifactRefused: ``length``, ``digest``, ``malformed`` or ``missing``.
    """
    stated = manifest.index
    if stated is None or stated.length > INDEX_BYTES:
        size = 0 if stated is None else stated.length
        raise ArtifactRefused("length", f"its file index has {size} bytes; {INDEX_BYTES} are read at most")
    data = await _object(chain, object_key(stated.sha256), sha256=stated.sha256, limit=stated.length)
    if data is None:
        raise ArtifactRefused("missing", "no store has its file index as it was signed")
    index = await run_blocking(read_index, data, stated)
    if (index.sha256, index.length) != (manifest.sha256, manifest.length):
        raise ArtifactRefused("malformed", "its file index describes another bundle")
    files: dict[str, list[FileRecord]] = {name: [] for name in index.caches}
    for file in sorted(index.files, key=lambda file: (-file.size, file.path)):
        files[file.cache].append(file)
    return Contents(
        tuple(
            Cache(name, index.caches[name].root, len(known), sum(file.size for file in known), tuple(known))
            for name, known in files.items()
        )
    )


async def _of_table(chain: Chain, manifest: Manifest) -> Contents:
    """The operations of a table.

    Raises:
        ArtifactRefused: ``length``, ``malformed`` or ``missing``.
        StoreError: ``InvalidKey``: the manifest names a store key that is none.
    """
    if manifest.length > JsonLimits().size:
        raise ArtifactRefused("length", f"the table has {manifest.length} bytes; {JsonLimits().size} are read at most")
    data = await _object(chain, manifest.store_key, sha256=manifest.sha256, limit=manifest.length)
    if data is None:
        raise ArtifactRefused("missing", "no store has the table as it was signed")
    managed = manifest.filename == managed_filename(manifest.dp_rank, manifest.world_rank)

    def count() -> dict[str, int]:
        if managed:
            keys = [key for store in decode_stores(data, "the table") for key in store.entries]
        else:
            keys = list(parse_table(data).entries)
        return dict(Counter(split_key(key)[0] for key in keys).most_common())

    return Contents(operations=await run_blocking(count))


async def _object(chain: Chain, key: str, *, sha256: str, limit: int) -> bytes | None:
    """The first answer of this digest; unlike `Chain.get_verified` it leaves every store as it is."""
    async for answer in chain.answers(key, limit=limit):
        if await sha256_of(answer.data) == sha256:
            return answer.data
    return None
