"""Flags, environment and one TOML file merged into a checked `PreloadConfig`; flags win, then the environment.

A TOML file holds a ``[preload]`` table whose keys are the flags' names without dashes in front, and
``[stores.NAME]`` tables that the stores read themselves::

    [preload]
    model = "/models/support-bot"
    tensor-parallel-size = 4
    warmup-cache-stores = ["mooncake", "file:/mnt/fleet"]
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from types import UnionType
from typing import Final, Union, get_args, get_origin

import msgspec

from warmseed.daemon.settings.config import ENV_PREFIX, Option, PreloadConfig, decode_secret, options
from warmseed.daemon.settings.rules import check
from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.trust.token import Secret

__all__ = ["CONFIG_BYTES", "nearest", "read_file", "resolve"]

CONFIG_BYTES: Final = 1 << 20  # bytes in the largest configuration file
_TABLES: Final = ("preload", "stores")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off", ""})
_log = logging.getLogger(__name__)


def resolve(
    flags: Mapping[str, object], *, environ: MutableMapping[str, str] | None = None, file: Path | None = None
) -> PreloadConfig:
    """The configuration that `flags`, then the environment, then `file` add up to, checked as a whole.

    `flags` maps field names to values; `None` means that the flag was not given. The environment is
    ``WARMSEED_<FIELD>``; ``WARMSEED_CONFIG`` names the file if `file` does not. ``WARMSEED_SEED_TOKEN``
    is removed from `environ` (default: the process's own), so that no child inherits it.

    Raises:
        ConfigurationError: for an unknown key (naming the nearest known one), a value of the wrong type,
            an unreadable file, or settings that contradict each other.
    """
    environ = os.environ if environ is None else environ
    known = options()
    from_env = _read_environment(environ, known)
    if file is None and (named := environ.get(ENV_PREFIX + "CONFIG")):
        file = Path(named)
    merged: dict[str, object] = read_file(file) if file is not None else {}
    merged.update(from_env)
    for name, value in flags.items():
        if name not in known:
            raise ConfigurationError(f"there is no setting {printable(name)!r}{nearest(name, known)}")
        if value is None:
            continue
        if name == "seed_token":
            _log.warning(
                "--seed-token is visible to every user of this machine in the process list; "
                "put it into a file of mode 0600 and use --seed-token-file"
            )
        merged[name] = value
    if "seed_token" in merged and "seed_token_file" in merged:
        raise ConfigurationError("both a seed token and --seed-token-file are given; keep the file, drop the other")
    config = _typed(merged, known)
    check(config)
    return config


def read_file(path: Path) -> dict[str, object]:
    """The ``[preload]`` table of the TOML file at `path` by field name, and its ``[stores]`` tables under ``stores``.

    Raises:
        ConfigurationError: if the file can't be read, is not TOML, holds a secret, or has an unknown key.
    """
    try:
        if path.stat().st_size > CONFIG_BYTES:
            raise ConfigurationError(f"configuration file {path} is over {CONFIG_BYTES} bytes; is it the right one?")
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"configuration file {path} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"configuration file {path} is not valid TOML: {printable(error)}") from error
    for table in document:
        if table not in _TABLES:
            raise ConfigurationError(
                f"{path}: unknown table [{printable(table)}]{nearest(table, _TABLES)}; known are [preload] and [stores]"
            )
    table = document.get("preload", {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: preload must be a table, written [preload]")
    known = {option.key: option for option in options().values()}
    found: dict[str, object] = {}
    for key, value in table.items():
        option = known.get(key.replace("_", "-"))
        if option is None:
            raise ConfigurationError(f"{path}: unknown key {printable(key)!r}{nearest(key, known)}")
        if option.type == (Secret | None):
            raise ConfigurationError(
                f"{path}: {key} must not stand in a configuration file; write it to a file of mode 0600 and name that "
                f"with {key}-file"
            )
        if option.name in found:
            raise ConfigurationError(f"{path}: {key!r} is given twice, with - and with _")
        found[option.name] = json.dumps(value) if isinstance(value, dict) else value
    if "stores" in document:
        found["stores"] = document["stores"]
    return found


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the known word closest to `word`, or nothing."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _read_environment(environ: MutableMapping[str, str], known: Mapping[str, Option]) -> dict[str, object]:
    by_env = {option.env: option for option in known.values()}
    found: dict[str, object] = {}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX):
            continue
        option = by_env.get(name)
        if option is not None:
            found[option.name] = _from_text(environ[name], option)
        elif close := difflib.get_close_matches(name, list(by_env), n=1, cutoff=0.9):
            # Not refused: other parts of warmseed have variables too, and Kubernetes adds
            # WARMSEED_SERVICE_HOST and the like for a service that is called warmseed.
            _log.warning("environment variable %s is not known and ignored; did you mean %s?", name, close[0])
    environ.pop(ENV_PREFIX + "SEED_TOKEN", None)
    return found


def _from_text(text: str, option: Option) -> object:
    kinds = _kinds(option.type)
    if bool in kinds:
        if text.strip().lower() in _TRUE:
            return True
        if text.strip().lower() in _FALSE:
            return False
        raise ConfigurationError(f"{option.env}={printable(text)!r} is neither true nor false")
    if tuple in kinds:
        if option.name != "engine_args":
            return [part.strip() for part in text.split(",") if part.strip()]
        try:
            return shlex.split(text)
        except ValueError as error:
            raise ConfigurationError(f"{option.env} is not a list of shell words: {error}") from error
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise ConfigurationError(f"{option.env}={printable(text)!r} is not a number") from None
    return text


def _kinds(annotation: object) -> frozenset[object]:
    """The plain types in `annotation`: ``{str, NoneType}`` for ``str | None``, ``{tuple}`` for any tuple."""
    if get_origin(annotation) in (Union, UnionType):
        return frozenset().union(*(_kinds(part) for part in get_args(annotation)))
    return frozenset({get_origin(annotation) or annotation})


def _typed(merged: Mapping[str, object], known: Mapping[str, Option]) -> PreloadConfig:
    if not merged.get("model"):
        raise ConfigurationError("no model is given; name its folder with --model")
    values = dict(merged)
    if isinstance(sources := values.get("seed_sources"), list | tuple):
        values["seed_sources"] = [Endpoint.parse(s) if isinstance(s, str) else s for s in sources]
    if isinstance(buckets := values.get("shape_buckets"), list | tuple):
        values["shape_buckets"] = [int(b) if isinstance(b, str) and b.isdecimal() else b for b in buckets]
    try:
        return msgspec.convert(values, PreloadConfig, dec_hook=decode_secret)
    except msgspec.ValidationError as error:
        # msgspec's text ends with the place, " - at `$.nnodes`".
        text, _, place = str(error).partition(" - at `$.")
        name = re.split(r"[.\[`]", place)[0]
        flag = known[name].flag if name in known else f"[{name}] of the configuration file"
        given = "" if name in ("seed_token", "stores") else f" {printable(repr(merged.get(name)))}"
        raise ConfigurationError(f"{flag}{given}: {printable(text)}") from error
