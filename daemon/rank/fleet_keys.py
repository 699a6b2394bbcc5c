"""Who signs what a rank publishes, and whom it believes: from its tokens, its key files, or its own first start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from warmseed.errors import ConfigurationError
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.token import MANIFEST_LABEL, Token

__all__ = ["fleet_keys", "node_key"]

_log = logging.getLogger(__name__)


def fleet_keys(
    tokens: Sequence[Token], state: Path, *, signing: str | None, trusted: Sequence[str]
) -> tuple[list[PublisherKey], Keyring]:
    """Who signs here, and who is believed.

    One token is enough: a publisher key follows from it. Where trusted keys are listed, only those count. Without
    either, the node believes itself alone, so that its own next start finds what this one made.
    """
    derived = [PublisherKey(f"token-{token.key_id}", token.derive(MANIFEST_LABEL)) for token in tokens]
    if not derived and signing is None and not trusted:
        derived = [node_key(state / "node.key")]
    own = [] if signing is None else [PublisherKey.load(Path(signing))]
    if not trusted:
        keys = own or derived
        return keys, Keyring([key.public for key in (*derived, *own)])
    lines: list[str] = []
    for entry in trusted:
        lines += [entry] if ":" in entry else _key_lines(Path(entry))
    return own, Keyring.parse(lines)


def _key_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise ConfigurationError(f"--seed-trusted-keys {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--seed-trusted-keys {path} holds no lines of name:base64") from error


def node_key(path: Path) -> PublisherKey:
    """This node's own key, made at its first start."""
    try:
        if not path.exists():
            PublisherKey.generate("node").save(path)
    except FileExistsError:  # another rank of this node was first
        pass
    except OSError as error:
        _log.warning("%s can't be written (%s): the next start will not find what this one makes", path, error)
        return PublisherKey.generate("node")
    return PublisherKey.load(path)
