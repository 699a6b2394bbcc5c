"""`mooncake`: a Mooncake store beside the KV cache, configured by the same JSON as vLLM's connector."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from warmseed.blocking import run_blocking
from warmseed.errors import ConfigurationError
from warmseed.stores.mooncake.config import read_config
from warmseed.stores.mooncake.helper import probe
from warmseed.stores.mooncake.store import MooncakeStore
from warmseed.stores.registry import Backend, StoreContext

__all__ = ["BACKEND", "MooncakeOptions", "MooncakeStore"]


class MooncakeOptions(msgspec.Struct, frozen=True):
    """What can be set for a Mooncake store beside vLLM's own file."""

    config: str = ""  # path of the JSON; also ``mooncake:/path``; default: MOONCAKE_CONFIG_PATH
    helper_python: str = ""  # an interpreter that has mooncake, where ours has not


async def _open(context: StoreContext, options: MooncakeOptions) -> MooncakeStore:
    path = options.config or urlsplit(context.url).path or os.environ.get("MOONCAKE_CONFIG_PATH", "")
    if not path:
        raise ConfigurationError(
            f"store {context.name!r} needs its configuration: set MOONCAKE_CONFIG_PATH to the JSON file that vLLM's "
            "MooncakeStoreConnector uses, or write mooncake:/path/to/it.json"
        )
    config = await run_blocking(read_config, Path(path), os.environ)
    await probe(options.helper_python, name=context.name)
    return MooncakeStore(
        config,
        name=context.name,
        python=options.helper_python,
        limits=context.limits,
        observer=context.observer,
    )


BACKEND = Backend(MooncakeOptions, _open)
