"""A process of its own that installs one bundle: `FOLDER` holds what `write_job` wrote."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tests.support.sites import make_manifest, make_site
from warmseed.seeding.kinds.base import Capture, Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.inductor import InductorCache
from warmseed.seeding.kinds.compiled.triton import TritonCache
from warmseed.seeding.trust.manifest import Manifest

__all__ = ["kind", "write_job"]


def kind() -> CompileCacheKind:
    """The kind that both sides use."""
    return CompileCacheKind([InductorCache(), TritonCache()], quiet=Quiet(settle=0.0))


def write_job(folder: Path, capture: Capture, source: Site, *, generation: int) -> None:
    """Write what the process reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest").write_bytes(msgspec.json.encode(make_manifest(capture, source, generation=generation)))
    (folder / "payload").write_bytes(capture.payload.read_bytes())
    (folder / "index").write_bytes(capture.index or b"")


def main(folder: Path, base: Path) -> None:
    """Install the job in `folder` for a rank below `base`."""
    manifest = msgspec.json.decode((folder / "manifest").read_bytes(), type=Manifest)
    kind().install(manifest, folder / "payload", (folder / "index").read_bytes(), make_site(base))
    print("installed", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
