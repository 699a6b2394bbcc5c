"""Finds one published generation by the name that a person gives it. Only names are looked at; nothing is read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass

from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.artifact import NAMESPACE, ArtifactKey, parse_manifest_key
from warmseed.seeding.errors import ArtifactRefused
from warmseed.stores.base import PrunableStore, Store
from warmseed.stores.chain import Chain
from warmseed.stores.errors import StoreError
from warmseed.stores.wrappers.base import innermost

__all__ = ["Found", "Wanted", "find_published"]

_LISTED = 100_000  # names looked at in one store
_PATIENCE = 30.0  # seconds for one store's listing: a person waits, and the other stores have answered by then
_CANDIDATES = 20  # named in an error
_HEX = "[0-9a-f]{1,64}"
_RANK = r"dp\d{1,7}_rank\d{1,7}"
_WANTED = re.compile(rf"([a-z0-9][a-z0-9_]{{0,63}})/({_HEX})(?:/({_HEX}))?(?:/({_RANK}))?(?:@(\d{{1,13}}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a person asked for."""

    text: str
    kind: str
    config: str  # the hash, or how it begins
    environment: str = ""  # the same; empty: any
    rank: str = ""  # as ``dp0_rank3``; empty: any
    generation: int = 0  # 0: the newest

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """``KIND/CONFIG-HASH[/ENVIRONMENT-HASH][/RANK-LABEL][@GENERATION]``, where hashes may be cut short.

        Raises:
            ConfigurationError: for anything else.
        """
        parts = _WANTED.fullmatch(text)
        if parts is None:
            raise ConfigurationError(
                f"{printable(text)!r} does not name a generation; write KIND/CONFIG-HASH[/RANK][@GENERATION], as "
                "flashinfer_autotune/0123456789ab/dp0_rank0@2; `warmseed ls` shows what there is"
            )
        kind, config, environment, rank, generation = parts.groups(default="")
        return cls(text, kind, config, environment, rank, int(generation or 0))

    def fits(self, key: ArtifactKey) -> bool:
        """Whether `key` may be what is meant, whatever its generations."""
        return (
            key.kind == self.kind
            and key.config_hash.startswith(self.config)
            and key.environment_hash.startswith(self.environment)
            and self.rank in ("", key.rank_label)
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A generation that lies in some store, whoever signed it."""

    key: ArtifactKey
    generation: int
    generations: tuple[int, ...]  # all that were listed of this artifact, oldest first
    unlisted: Mapping[str, str]  # store -> why it did not say what it holds


async def find_published(chain: Chain, wanted: Wanted) -> Found:
    """The generation that `wanted` means, by the names that the stores of `chain` list.

    Raises:
        ConfigurationError: more than one artifact fits; the message names them.
        ArtifactRefused: ``missing``: nothing fits in the stores that could be asked.
    """
    tiers = chain.all_tiers()
    listings = await asyncio.gather(*(_listed(tier, wanted) for tier in tiers))
    names = [innermost(tier).name for tier in tiers]
    unlisted = {name: why for name, (_, why) in zip(names, listings, strict=True) if why}
    generations: dict[ArtifactKey, set[int]] = {}
    for found, _ in listings:
        for key, generation in found:
            generations.setdefault(key, set()).add(generation)
    fitting = [key for key, known in generations.items() if wanted.generation in (0, *known)]
    if not fitting:
        others = f"; there are {_shown(generations)}" if generations else ""
        failures = "".join(f"; {why}" for why in unlisted.values())
        raise ArtifactRefused("missing", f"no store lists {printable(wanted.text)}{others}{failures}")
    if len(fitting) > 1:
        raise ConfigurationError(
            f"{printable(wanted.text)} may mean {_shown({key: generations[key] for key in fitting})}; name one of them"
        )
    (key,) = fitting
    known = generations[key]
    return Found(key, wanted.generation or max(known), tuple(sorted(known)), unlisted)


async def _listed(tier: Store, wanted: Wanted) -> tuple[list[tuple[ArtifactKey, int]], str]:
    """What one store lists of `wanted`, and why that is not all; a store that fails keeps no other from answering."""
    store, found = innermost(tier), list[tuple[ArtifactKey, int]]()
    if not isinstance(store, PrunableStore):
        return found, f"{store.name} can't list what it holds"
    count = 0
    try:
        async with asyncio.timeout(_PATIENCE):
            async for info in store.list(f"{NAMESPACE}/manifest/{wanted.kind}/{wanted.config}"):
                count += 1
                if count > _LISTED:
                    return found, f"{store.name}: the listing was cut after {_LISTED} objects"
                if (named := parse_manifest_key(info.key)) is not None and wanted.fits(named[0]):
                    found.append(named)
    except TimeoutError:
        return found, f"{store.name}: the listing took over {_PATIENCE:g} s and was given up"
    except StoreError as error:
        return found, printable(error, limit=500)
    return found, ""


def _shown(generations: Mapping[ArtifactKey, set[int]]) -> str:
    """Artifacts as they can be given to the command, a few of them."""
    texts = [
        f"{key.kind}/{key.config_hash[:12]}/{key.environment_hash[:12]}/{key.rank_label} (generations "
        f"{', '.join(map(str, sorted(known)[-5:]))})"
        for key, known in sorted(generations.items(), key=lambda item: item[0].manifest_folder)
    ]
    more = len(texts) - _CANDIDATES
    return ", ".join(texts[:_CANDIDATES]) + (f" and {more} more" if more > 0 else "")
