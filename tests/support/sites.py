"""Sites, manifests and cache folders for tests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from warmseed.seeding.environment import Environment
from warmseed.seeding.kinds.base import Capture, Site
from warmseed.seeding.trust.manifest import Index, Manifest

ENVIRONMENT = {
    "machine": "x86_64",
    "cpu_flags": "00aa",
    "glibc": "glibc-2.36",
    "python_abi": "cpython-311-x86_64-linux-gnu",
    "cxx": "g++ 12",
    "torch": "2.13.0",
    "triton": "3.6.0",
    "device": "cpu",
}


def make_site(
    base: Path,
    *,
    caches: tuple[str, ...] = ("inductor", "triton"),
    root: Path | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
    dp_rank: int = 0,
    world_rank: int = 0,
    device_index: int = 0,
    config_hash: str = "a" * 64,
) -> Site:
    """A rank whose state lies below `base`, and its caches below `root` or ``base/cache``."""
    root = root if root is not None else base / "cache"
    return Site(
        config_hash=config_hash,
        config_factors={"model": "m"},
        environment=Environment(environment),
        dp_rank=dp_rank,
        world_rank=world_rank,
        device_index=device_index,
        cache_root=root,
        roots={name: root / name for name in caches},
        state=base / "state",
    )


def make_manifest(capture: Capture, site: Site, *, generation: int = 1, issued_at: int = 1_800_000_000) -> Manifest:
    """What a publisher at `site` signs for `capture`."""
    index = None
    if capture.index is not None:
        index = Index(sha256=hashlib.sha256(capture.index).hexdigest(), length=len(capture.index))
    return Manifest(
        schema=1,
        kind="compile_cache",
        store_key=capture.store_key,
        config_hash=site.config_hash,
        config_digest=site.config_digest,
        dp_rank=site.dp_rank,
        world_rank=site.world_rank,
        device_index=capture.device_index,
        filename=capture.filename,
        sha256=capture.sha256,
        length=capture.length,
        stored=capture.stored,
        index=index,
        environment=dict(capture.environment),
        generation=generation,
        issued_at=issued_at,
        expires_at=issued_at + 86_400 * 30,
        publisher="test",
    )


def fill(root: Path, files: Mapping[str, bytes], *, mtime_ns: int = 1_700_000_000_123_456_789) -> None:
    """Write `files` below `root`, all with one modification time; a name that ends in ``.so`` is executable."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name.endswith(".so") else 0o644)
        os.utime(path, ns=(mtime_ns, mtime_ns))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
