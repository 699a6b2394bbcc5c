"""What a launcher tells a rank."""

from __future__ import annotations

from typing import Any

import msgspec

from warmseed.daemon.protocol.spec import RankSpec
from warmseed.daemon.settings.config import PreloadConfig

__all__ = ["spec"]


def spec(**settings: Any) -> RankSpec:
    """The only rank of a torch engine, configured with `settings`."""
    config = msgspec.convert({"engine": "torch", "model": "/models/m", **settings}, PreloadConfig)
    return RankSpec(
        group="target",
        local_rank=0,
        global_rank=0,
        world_size=1,
        local_size=1,
        dp_rank=0,
        pp_rank=0,
        tp_rank=0,
        device=0,
        rendezvous_host="127.0.0.1",
        rendezvous_port=1,
        config=config,
    )
