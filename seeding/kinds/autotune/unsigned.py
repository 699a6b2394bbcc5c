"""Adopts a table that stock vLLM left in a shared store, where the operator has said that unsigned ones will do."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from pathlib import Path

from warmseed.blocking import run_blocking
from warmseed.errors import WarmseedError, printable
from warmseed.seeding.adoption import Adoption, Refusal
from warmseed.seeding.artifact import ArtifactKey
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.bounded import JsonLimits
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.autotune.layout import per_rank_filename
from warmseed.seeding.kinds.base import Installation, Site
from warmseed.seeding.origins.origins import StoreOrigin
from warmseed.seeding.origins.payload import prepare_staging, remove_staged
from warmseed.seeding.trust.judge import Trust
from warmseed.seeding.trust.manifest import Manifest
from warmseed.seeding.trust.probation import Probation
from warmseed.stores.chain import Chain
from warmseed.stores.errors import StoreError

__all__ = ["adopt_unsigned"]

_log = logging.getLogger(__name__)


async def adopt_unsigned(
    chain: Chain,
    kind: FlashInferAutotune,
    site: Site,
    *,
    trust: Trust,
    probation: Probation,
    limit: asyncio.Timeout,
    now: int,
) -> Adoption:
    """Install the first table that a store has under stock vLLM's name for it and that passes every other rule.

    The fleet's pins and denials stand, the table goes on trial like a signed one, and nothing is kept or handed on.
    `limit`, which the caller has entered, is for fetching: it is lifted before an installation, since one that is given
    up half way would go on behind our back. `now` is in unix seconds. Never raises for what it finds.
    """
    start, refusals = time.monotonic(), list[Refusal]()
    key = ArtifactKey(
        kind=kind.name,
        config_hash=site.config_hash,
        environment_hash=(await run_blocking(kind.environment, site)).digest,
        dp_rank=site.dp_rank,
        world_rank=site.world_rank,
    )
    name = key.reference_key(per_rank_filename(site.dp_rank, site.world_rank))
    staged = site.state / "staging" / f"unsigned.{secrets.token_hex(8)}"
    try:
        pin = await StoreOrigin(chain).pin(key)
        if pin is not None and trust.pinned(pin, key, now=now) is not None:
            raise ArtifactRefused("pinned", "the fleet is pinned to a signed table, so no unsigned one is taken")
        await run_blocking(prepare_staging, staged.parent)
        async for answer in chain.answers(name, limit=JsonLimits().size, fresh=True):
            try:
                await run_blocking(staged.write_bytes, answer.data)
                manifest = await run_blocking(
                    kind.reference_manifest, staged, site, issued_at=now, publisher=f"unsigned, {answer.tier}"
                )
                await _check(chain, manifest, trust, probation, now)
                until = limit.when()
                limit.reschedule(None)
                try:
                    installation = await _install(kind, manifest, staged, site, probation, key.rank_label)
                except (WarmseedError, OSError):
                    limit.reschedule(until)
                    raise
            except (WarmseedError, OSError) as error:
                reason = error.reason if isinstance(error, ArtifactRefused) else "failed"
                refusals.append(Refusal(answer.tier, reason, printable(error, limit=500)))
                continue
            _log.warning(
                "kind=%s table %s of store %s installed WITHOUT A SIGNATURE, as --allow-unsigned says",
                *(kind.name, manifest.sha256[:12], answer.tier),
            )
            seconds = time.monotonic() - start
            return Adoption(
                kind.name, "installed", manifest.publisher, manifest, b"", installation, seconds, tuple(refusals)
            )
    except ArtifactRefused as error:
        refusals.append(Refusal(chain.name, error.reason, str(error)))
    except (StoreError, OSError) as error:
        refusals.append(Refusal(chain.name, "unavailable", printable(error, limit=500)))
    finally:
        await run_blocking(remove_staged, [staged])
    return Adoption(kind.name, "none", seconds=time.monotonic() - start, refusals=tuple(refusals))


async def _check(chain: Chain, manifest: Manifest, trust: Trust, probation: Probation, now: int) -> None:
    """See that neither the fleet nor this node has anything against the payload.

    Raises:
        ArtifactRefused: ``denied`` or ``probation``.
        StoreError: when a store fails.
    """
    denial = await StoreOrigin(chain).denial(manifest.sha256)
    if denial is not None:
        try:
            trust.deny(denial, now=now)
        except ArtifactRefused as error:
            _log.warning("a denial of %s is ignored: %s", manifest.sha256[:12], error)
    if reason := trust.denied(manifest.sha256, now=now):
        raise ArtifactRefused("denied", f"table {manifest.sha256[:12]} is {reason}")
    await run_blocking(probation.check, manifest.sha256)


async def _install(
    kind: FlashInferAutotune, manifest: Manifest, payload: Path, site: Site, probation: Probation, rank: str
) -> Installation:
    await run_blocking(probation.begin, kind.name, manifest.sha256, manifest.generation, rank)
    try:
        return await run_blocking(kind.install, manifest, payload, None, site)
    except (WarmseedError, OSError):
        await run_blocking(probation.withdraw, manifest.sha256, rank)
        raise
