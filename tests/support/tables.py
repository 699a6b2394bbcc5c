"""Autotune tables for tests: the ones FlashInfer wrote on an H200, and others made from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warmseed.seeding.artifact import object_key
from warmseed.seeding.environment import Environment
from warmseed.seeding.kinds.autotune.home import environment_fields
from warmseed.seeding.kinds.autotune.layout import PER_RANK_ROOT, per_rank_filename
from warmseed.seeding.kinds.base import Capture, Site
from warmseed.seeding.trust.manifest import Manifest

DATA = Path(__file__).parents[1] / "data" / "h200"
H200_V1 = (DATA / "autotune_v1.json").read_bytes()
H200_V2 = DATA / "autotune_v2"  # the root's ``v2`` folder
H200: dict[str, str] = json.loads(H200_V1)["_metadata"]
HOT = ["cuda_graph_profile_replays", None, "l2_cache_policy", "hot"]
NOW = 1_800_000_000
CONFIG = "c" * 64


def key_of(number: int, *, runner: str = "CublasFp8GemmRunner") -> str:
    """A lookup key as FlashInfer spells it."""
    return (
        f"('fp8_gemm', '{runner}', ((1, {number}, 4096), (1, 4096, 2048), (), (), (1, -1, 2048), (-1,)), "
        "(torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16))"
    )


def table_text(entries: int = 3, *, metadata: Any = H200, tactic: int = 0, first: int = 1, **sections: Any) -> bytes:
    """A table of so many entries, spelled as FlashInfer does."""
    value: dict[str, Any] = {} if metadata is ... else {"_metadata": metadata}
    for number in range(first, first + entries):
        value[key_of(number)] = ["CublasFp8GemmRunner", tactic, HOT]
    value.update(sections)
    return json.dumps(value, indent=2).encode()


def with_entry(key: str, value: Any) -> bytes:
    """A good table with one entry replaced or added."""
    table = json.loads(table_text(3))
    table[key] = value
    return json.dumps(table, indent=2).encode()


def table_site(
    base: Path,
    *,
    metadata: Mapping[str, str] = H200,
    homes: tuple[str, ...] = (PER_RANK_ROOT,),
    dp_rank: int = 0,
    world_rank: int = 0,
    config_hash: str = CONFIG,
) -> Site:
    """One rank of a node whose FlashInfer sees `metadata`."""
    return Site(
        config_hash=config_hash,
        config_factors={"model": "m", "max_num_batched_tokens": "8192"},
        environment=Environment({**environment_fields(metadata), "torch": "2.13.0"}),
        dp_rank=dp_rank,
        world_rank=world_rank,
        device_index=0,
        cache_root=base / "cache",
        roots={home: base / "cache" / home for home in homes},
        state=base / "state",
    )


def local_path(site: Site) -> Path:
    """Where vLLM would read this rank's v1 table."""
    return site.roots[PER_RANK_ROOT] / site.config_hash / per_rank_filename(site.dp_rank, site.world_rank)


def put_local(site: Site, data: bytes) -> Path:
    """Leave `data` where vLLM would read it."""
    path = local_path(site)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def payload_of(base: Path, data: bytes) -> Path:
    """A staging file with `data`."""
    path = base / f"staged-{hashlib.sha256(data).hexdigest()[:8]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def table_manifest(data: bytes, site: Site, **changes: Any) -> Manifest:
    """What an honest publisher signs for `data` at `site`; `changes` make it less so."""
    digest = hashlib.sha256(data).hexdigest()
    fields: dict[str, Any] = {
        "schema": 1,
        "kind": "flashinfer_autotune",
        "store_key": object_key(digest),
        "config_hash": site.config_hash,
        "config_digest": site.config_digest,
        "dp_rank": site.dp_rank,
        "world_rank": site.world_rank,
        "device_index": -1,
        "filename": per_rank_filename(site.dp_rank, site.world_rank),
        "sha256": digest,
        "length": len(data),
        "environment": dict(H200),
        "generation": 1,
        "issued_at": NOW,
        "expires_at": NOW + 86_400,
        "publisher": "test",
    }
    return Manifest(**(fields | changes))


def manifest_of_capture(capture: Capture, site: Site, **changes: Any) -> Manifest:
    """What a publisher signs for something it captured."""
    return table_manifest(
        capture.payload.read_bytes(),
        site,
        filename=capture.filename,
        environment=dict(capture.environment),
        **changes,
    )
