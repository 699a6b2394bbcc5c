"""A rank that serves the small model at argv[1] until its standard input ends; prints one JSON line when ready."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from weights_model import digests, fingerprint, loaded

from warmseed.daemon.weights.export import export_model
from warmseed.daemon.weights.messages import Report
from warmseed.daemon.weights.server import WeightServer
from warmseed.daemon.weights.socket import SocketAddress


async def main(path: str, seed: int) -> None:
    model = loaded(seed)
    exported = export_model(model, device="cpu", segment_bytes=512)
    expected = digests(model)
    reports: list[Report] = []
    server = WeightServer(exported, fingerprint(), SocketAddress(Path(path)), on_report=reports.append)
    async with server.serving():
        print(json.dumps({"ready": True, "digests": expected}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    print(json.dumps({"reports": len(reports), "digests_now": digests(model) if not exported.released else None}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
