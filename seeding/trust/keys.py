"""Publisher keys: who may sign what a fleet installs.

A key is Ed25519. In a fleet with one token every node derives the same publisher key from it; in a hardened
fleet builders hold a key file and nodes list ``name:base64`` public keys.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.trust.edwards import in_prime_order_subgroup

__all__ = ["Keyring", "PublicKey", "PublisherKey"]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_KEY_FILE_BYTES = 4096  # bytes in the largest key file ever read


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"key name {printable(name)!r} is not 1 to 64 of a-z 0-9 . _ - beginning with a letter or digit"
        )
    return name


def _split(text: str, what: str) -> tuple[str, bytes]:
    name, colon, encoded = text.strip().partition(":")
    if not colon:
        raise ConfigurationError(f"{what} is not of the form name:base64")
    try:
        raw = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigurationError(f"{what} {printable(name)!r} is not of the form name:base64") from error
    if len(raw) != 32:
        raise ConfigurationError(f"{what} {printable(name)!r} holds {len(raw)} bytes; an Ed25519 key has 32")
    return _check_name(name), raw


class PublicKey:
    """A trusted publisher: a name for people and an Ed25519 public key.

    Raises (on construction):
        ConfigurationError: for a bad name, a key of the wrong length, or a point of small order, which
            would "verify" any message.
    """

    __slots__ = ("_key", "keyid", "name", "raw")

    def __init__(self, name: str, raw: bytes) -> None:
        self.name = _check_name(name)
        if len(raw) != 32 or not in_prime_order_subgroup(raw):
            raise ConfigurationError(
                f"public key {name!r} is not a point of Ed25519's prime-order group; such a key accepts "
                "forged signatures, so it is refused: make a new one with `warmseed keys new`"
            )
        self.raw = raw
        self.keyid = hashlib.sha256(raw).hexdigest()[:32]
        self._key = Ed25519PublicKey.from_public_bytes(raw)

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """The key written as ``name:base64``.

        Raises:
            ConfigurationError: for anything else, and for unsafe keys.
        """
        return cls(*_split(text, "public key"))

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether `signature` is this key's over `message`."""
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and other.raw == self.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __str__(self) -> str:
        return f"{self.name}:{base64.b64encode(self.raw).decode('ascii')}"

    def __repr__(self) -> str:
        return f"PublicKey({str(self)!r})"


class PublisherKey:
    """A secret key that signs manifests. Its repr shows the public half only."""

    __slots__ = ("_key", "public")

    def __init__(self, name: str, seed: bytes) -> None:
        if len(seed) != 32:
            raise ConfigurationError(f"signing key {printable(name)!r} holds {len(seed)} bytes; an Ed25519 seed has 32")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = PublicKey(name, self._key.public_key().public_bytes_raw())

    @classmethod
    def generate(cls, name: str) -> PublisherKey:
        """A fresh random key called `name`."""
        return cls(name, os.urandom(32))

    @property
    def name(self) -> str:
        """The key's name, as it appears in ``--seed-trusted-keys``."""
        return self.public.name

    def sign(self, message: bytes) -> bytes:
        """The 64-byte signature of `message`."""
        return self._key.sign(message)

    def save(self, path: Path) -> None:
        """Write the key to the new file `path`, mode 0600, and to disk before returning.

        Raises:
            FileExistsError: if there is something at `path`: a key is never overwritten.
            OSError: if the file can't be written.
        """
        text = f"{self.name}:{base64.b64encode(self._key.private_bytes_raw()).decode('ascii')}\n"
        # Under another name first: a reader, or the next start after a full disk, must never find half a key.
        temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode("ascii"))
                file.flush()
                os.fsync(handle)
            os.link(temporary, path)  # unlike a rename, it fails where there is something
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> PublisherKey:
        """The key in the file `path`.

        Raises:
            ConfigurationError: if the file can't be read, belongs to another user, is readable by others,
                or holds no key.
        """
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(f"signing key file {path} can't be read: {error.strerror}") from error
        try:
            info = os.fstat(handle)
            if not stat.S_ISREG(info.st_mode) or info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o077:
                raise ConfigurationError(
                    f"signing key file {path} must be a regular file of this user that no one else can read: "
                    f"chmod 600 {path}"
                )
            text = os.read(handle, _KEY_FILE_BYTES)
        finally:
            os.close(handle)
        try:
            return cls(*_split(text.decode("ascii"), "signing key"))
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"signing key file {path} holds no name:base64 key") from error

    def __repr__(self) -> str:
        return f"PublisherKey({self.public.name!r}, keyid={self.public.keyid!r})"


class Keyring:
    """The public keys this node trusts, by key id. The verifying key never comes from an envelope."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[PublicKey] = ()) -> None:
        self._keys = {key.keyid: key for key in keys}

    @classmethod
    def parse(cls, lines: Iterable[str]) -> Keyring:
        """The keyring of ``name:base64`` lines; blank lines and lines that begin with ``#`` are skipped.

        Raises:
            ConfigurationError: for a bad line, or one name for two keys.
        """
        keys: dict[str, PublicKey] = {}
        for line in lines:
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            key = PublicKey.parse(line)
            if keys.setdefault(key.name, key) != key:
                raise ConfigurationError(f"two trusted keys are both called {key.name!r}; give each its own name")
        return cls(keys.values())

    def find(self, keyid: str) -> PublicKey | None:
        """The trusted key with `keyid`, or `None`."""
        return self._keys.get(keyid)

    def __iter__(self) -> Iterator[PublicKey]:
        return iter(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"Keyring({[str(key) for key in self._keys.values()]!r})"
