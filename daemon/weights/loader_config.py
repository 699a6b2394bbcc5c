"""What ``--model-loader-extra-config`` may say to the ``ipc_cache`` load format."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from warmseed.daemon.weights.socket import SocketAddress
from warmseed.errors import ConfigurationError, printable

__all__ = ["LoaderConfig"]

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class LoaderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine's side of the weight cache."""

    socket_path: str | None = None  # default: derived from the GPU's UUID
    socket_dir: str | None = None  # default: the user's private folder
    mode: Literal["zero_copy", "copy"] = "zero_copy"
    fallback: bool = True
    connect_timeout_s: Seconds = 5.0
    state_timeout_s: Seconds = 300.0

    @classmethod
    def parse(cls, extra: Mapping[str, object] | None) -> LoaderConfig:
        """The configuration in `extra`, the parsed JSON object; defaults where it is silent.

        Raises:
            ConfigurationError: an unknown key, naming the nearest known one, or a value of the wrong kind.
        """
        given = dict(extra or {})
        for key in given:
            if key not in cls.__struct_fields__:
                near = difflib.get_close_matches(str(key), cls.__struct_fields__, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(cls.__struct_fields__)}"
                raise ConfigurationError(f"model loader extra config has the unknown key {printable(key)!r}{hint}")
        try:
            config = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"model loader extra config: {error}") from error
        if config.socket_path is not None and config.socket_dir is not None:
            raise ConfigurationError("model loader extra config: give socket_path or socket_dir, not both")
        return config

    def address(self, device_uuid: str, *, draft: bool = False) -> SocketAddress:
        """Where this engine looks for the daemon of its device."""
        if self.socket_path is not None:
            return SocketAddress(Path(self.socket_path).absolute())
        directory = None if self.socket_dir is None else Path(self.socket_dir).absolute()
        return SocketAddress.for_device(device_uuid, directory=directory, draft=draft)
