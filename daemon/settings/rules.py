"""Rules between settings: what contradicts what, found before any process starts or any GPU is touched."""

from __future__ import annotations

import difflib
import logging
import os
import stat
from pathlib import Path

from warmseed.daemon.placement import groups_of, layout_of
from warmseed.daemon.settings.config import PreloadConfig, options
from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.trust.token import TOKEN_VARIABLE, read_tokens

__all__ = ["check", "check_secret_file"]

_log = logging.getLogger(__name__)


def check(config: PreloadConfig) -> None:
    """Pass silently if `config` can work as a whole.

    Raises:
        ConfigurationError: for the first contradiction found; the message names the flags and the way out.
    """
    if config.load_format == "ipc_cache":
        raise ConfigurationError(
            "--load-format ipc_cache is for engines that map the daemon's weights; the daemon itself loads from disk: "
            "leave it out"
        )
    if config.engine == "torch" and config.engine_args:
        _refuse_unknown(config.engine_args)
    if config.engine != "torch" and config.shape_buckets:
        raise ConfigurationError(
            f"--shape-buckets is for the torch engine; {config.engine} has its own flags for what it compiles"
        )
    layout = layout_of(config)
    groups_of(config, layout)
    if config.rehearsal and config.rehearsal_deadline <= 0:
        raise ConfigurationError("--rehearsal-deadline 0 leaves no time; use --no-rehearsal to skip it")
    twice = [name for i, name in enumerate(config.warmup_cache_stores) if name in config.warmup_cache_stores[:i]]
    if twice:
        raise ConfigurationError(f"--warmup-cache-stores names {printable(twice[0])} twice")
    _check_trust(config)


def _check_trust(config: PreloadConfig) -> None:
    sources = config.seed_sources
    again = [source for i, source in enumerate(sources) if source in sources[:i]]
    if again:
        raise ConfigurationError(f"seed source {again[0]} is named twice; name each replica once")
    has_token = config.seed_token is not None or config.seed_token_file is not None
    endpoint = "--seed-listen-port" if config.seed_listen_port is not None else None
    if endpoint is None and config.seed_sources:
        endpoint = "--seed-source-host"
    if endpoint and not has_token:
        raise ConfigurationError(
            f"{endpoint} needs the fleet's token: make one with `warmseed token new` and give --seed-token-file"
        )
    if has_token and not endpoint and not config.warmup_cache_stores:
        raise ConfigurationError(
            "a seed token is given, but there is nothing to use it for: add --seed-listen-port, --seed-source-host or "
            "--warmup-cache-stores"
        )
    # Each rank reads the tokens itself; reading them here makes a bad one stop the start before any rank.
    if config.seed_token_file is not None:
        read_tokens(file=Path(config.seed_token_file), environ={})
    elif config.seed_token is not None:
        read_tokens(environ={TOKEN_VARIABLE: config.seed_token.reveal()})
    if config.seed_signing_key is not None:
        check_secret_file(Path(config.seed_signing_key), "--seed-signing-key")
    if config.seed_listen_port is not None:
        here = {"127.0.0.1", "localhost", "::1", config.seed_listen_host}
        for source in config.seed_sources:
            if source.host in here and source.port == config.seed_listen_port:
                raise ConfigurationError(
                    f"seed source {Endpoint(source.host, source.port)} is this replica itself; name another one"
                )
    trusted = has_token or config.seed_signing_key is not None or bool(config.seed_trusted_keys)
    if config.warmup_cache_stores and not trusted and not config.allow_unsigned:
        _log.warning(
            "stores %s will not be used: without --seed-token-file or --seed-trusted-keys nothing in them can be "
            "verified, and nothing can be signed for them",
            ",".join(printable(store) for store in config.warmup_cache_stores),
        )
    if config.allow_unsigned:
        _log.warning(
            "--allow-unsigned: where no signed table is found, one without a signature is taken from %s; whoever can "
            "write there can choose which of FlashInfer's kernels run here",
            ",".join(printable(store) for store in config.warmup_cache_stores) or "a store (none is named)",
        )


def check_secret_file(path: Path, flag: str) -> None:
    """Pass silently if the secret in `path` can be read by this user and by no other.

    Raises:
        ConfigurationError: if it is missing, not a regular file, someone else's, or readable by others.
    """
    try:
        info = path.stat()
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigurationError(f"{flag} {path} can't be read: {error.strerror}") from error
    if not stat.S_ISREG(info.st_mode):
        raise ConfigurationError(f"{flag} {path} is not a regular file")
    if info.st_uid not in (os.geteuid(), 0):
        raise ConfigurationError(f"{flag} {path} belongs to user {info.st_uid}; it must belong to the daemon's user")
    # A Kubernetes secret with fsGroup is root's and 0640: the group is the pod's own.
    exposed = 0o037 if info.st_uid == 0 and os.geteuid() != 0 else 0o077
    if info.st_mode & exposed:
        raise ConfigurationError(
            f"{flag} {path} can be read by others (mode {stat.S_IMODE(info.st_mode):04o}); run: chmod 600 {path}"
        )


def _refuse_unknown(arguments: tuple[str, ...]) -> None:
    flags = [word.partition("=")[0] for word in arguments if word.startswith("-")]
    word = flags[0] if flags else arguments[0]
    close = difflib.get_close_matches(word, [option.flag for option in options().values()], n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigurationError(f"unknown argument {printable(word)} (the torch engine takes none of its own){hint}")
