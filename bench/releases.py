"""Two releases of compiled caches, an older one and one in which 2 % of the files changed, from peer to peer."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

import bundle  # beside this file

from warmseed.blocking import run_blocking
from warmseed.seeding.adopt import Adopter, Adoption
from warmseed.seeding.artifact import ArtifactKey
from warmseed.seeding.channel.client import SeedClient, new_instance
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.server import SeedServer
from warmseed.seeding.channel.sources import Patience
from warmseed.seeding.kinds.base import Site
from warmseed.seeding.origins.origins import PeerOrigin, StoreOrigin
from warmseed.seeding.origins.shelf import Shelf
from warmseed.seeding.publish import Publisher
from warmseed.seeding.trust.judge import Trust
from warmseed.seeding.trust.keys import Keyring
from warmseed.seeding.trust.probation import Probation
from warmseed.seeding.trust.token import read_tokens
from warmseed.stores.registry import open_stores

OLD, NEW = "a" * 64, "b" * 64  # their configurations
FILES, BYTES = 3000, 180 << 20
CHANGED = 0.02  # of the files


async def serve(token_file: Path, folder: Path) -> None:
    """Publish both releases and serve them; at each line that comes, say how many bytes of objects went out."""
    root = _site(folder, OLD).roots["inductor"]
    bundle.write_corpus(root, files=FILES, total=BYTES)
    chain = await open_stores([], folder=folder / "state" / "store")
    shelf, publisher = Shelf(chain), Publisher(chain, [bundle.KEY], publisher="bench")
    for release in (OLD, NEW):
        if release == NEW:
            bundle.change(root, CHANGED)
        site = _site(folder, release)
        capture = bundle.KIND.capture(site)
        if capture is None:
            raise RuntimeError("nothing was captured")
        published = await publisher.publish(capture, bundle.KIND.name, site)
        key = ArtifactKey(
            kind=bundle.KIND.name, config_hash=release, environment_hash=bundle.KIND.environment(site).digest
        )
        shelf.put(key, published.envelope, published.manifest)
    server = SeedServer(shelf, read_tokens(file=token_file), host="127.0.0.1", port=0, instance=new_instance())
    async with server.listening():
        print(server.addresses[0][1], flush=True)
        while await run_blocking(sys.stdin.readline):
            print(server.counters()["payload_bytes"], flush=True)


async def adopt_both(client: SeedClient, process: subprocess.Popen[str], port: int) -> dict[str, float]:
    """What a mirror that has no store but its disk moves for the newer release, once it has the older one."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        await _adopt(_site(base, OLD), client, port)
        before = _sent(process)
        new = await _adopt(_site(base, NEW), client, port)
        moved = _sent(process) - before
    if new.manifest is None or new.manifest.stored is None or new.manifest.index is None:
        raise RuntimeError(f"nothing was adopted: {new.refusals}")
    whole = new.manifest.stored.length + new.manifest.index.length
    return {
        "delta_2pct_fraction_d2d": moved / whole,
        "delta_2pct_mib_d2d": moved / (1 << 20),
        "delta_whole_mib_d2d": whole / (1 << 20),
    }


def _site(base: Path, release: str) -> Site:
    return dataclasses.replace(bundle.make_site(base), config_hash=release)


async def _adopt(site: Site, client: SeedClient, port: int) -> Adoption:
    kind, state = bundle.KIND, site.state
    chain = await open_stores([], folder=state / "store")
    patience, peer = Patience(wait_seconds=5.0), Endpoint("127.0.0.1", port)
    origins = [StoreOrigin(chain), PeerOrigin(client, [peer], patience, environment=kind.environment(site))]
    trust = Trust(Keyring([bundle.KEY.public]))
    try:
        adopter = Adopter(origins, trust=trust, probation=Probation(state), state=state, budget=120.0)
        return await adopter.adopt(kind, site)
    finally:
        await chain.aclose()


def _sent(process: subprocess.Popen[str]) -> int:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the source has no pipes")
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())
