"""The shared secret of a fleet: its form, where it may come from, and the keys that follow from it.

A token never crosses the wire. One scrypt over it gives a root, and HKDF with one label per purpose
gives every key (`Token.derive`); so the channel's CA and the publisher's key have nothing in common
but the token. Because a stranger who connects can check guesses against what the channel shows
(RFC 9257 says the same of TLS pre-shared keys), a token that could be guessed is refused.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import NoReturn

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from warmseed.errors import ConfigurationError, printable

__all__ = [
    "KEY_ID_LABEL",
    "MANIFEST_LABEL",
    "MAX_TOKENS",
    "TLS_CA_LABEL",
    "TOKEN_VARIABLE",
    "Secret",
    "Token",
    "new_token",
    "parse_token",
    "read_tokens",
    "write_token",
]

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "WARMSEED_SEED_TOKEN"  # noqa: S105 - the name of a variable, not a secret
MAX_TOKENS = 4  # more than two means a rotation that was never finished

TLS_CA_LABEL = b"tls-ca"
MANIFEST_LABEL = b"manifest"
KEY_ID_LABEL = b"key-id"

_PREFIX = "ws1_"
_SECRET_BYTES = 32  # 256 bits
_CHECK_BYTES = 5  # one mistyped token in 2**40 passes for another one
_BODY_CHARACTERS = 52  # base32 of 32 bytes, without its padding
_FOREIGN_MINIMUM = 32  # characters; 128 bits even when every one is a hexadecimal digit
_FOREIGN_MAXIMUM = 1024
_DISTINCT_MINIMUM = 8  # 32 random hexadecimal digits have fewer distinct ones once in 10**7
_FILE_BYTES = 8 << 10
_MAKE_ONE = "make a good one with: warmseed token new"


class Secret:
    """A string that no log line, traceback, repr or format shows; `reveal` is the one way to it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The string itself."""
        return self._value

    def __repr__(self) -> str:
        return "Secret('***')"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        # Digests first: compare_digest takes equal time only for equal lengths, and no non-ASCII str.
        return hmac.compare_digest(_sha256(self._value), _sha256(other._value))

    def __hash__(self) -> int:
        return hash(_sha256(self._value))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not serialised")


class Token:
    """One secret of the fleet, and the keys derived from it."""

    __slots__ = ("__dict__", "_material")

    def __init__(self, material: bytes) -> None:
        self._material = material

    @functools.cached_property
    def _root(self) -> bytes:
        # 64 ms and 32 MiB, once a process: what makes guessing a weak foreign token slow.
        return Scrypt(salt=b"warmseed/v1/token", length=32, n=2**15, r=8, p=1).derive(self._material)

    def derive(self, label: bytes) -> bytes:
        """32 bytes for the purpose `label` alone; the first call takes about 64 ms of CPU and 32 MiB."""
        return HKDF(hashes.SHA256(), 32, salt=b"warmseed/v1", info=label).derive(self._root)

    @functools.cached_property
    def key_id(self) -> str:
        """16 hex digits that name this token in logs and in TLS server names; says nothing about it."""
        return self.derive(KEY_ID_LABEL)[:8].hex()

    def __repr__(self) -> str:
        return "Token('***')"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Token):
            return NotImplemented
        return hmac.compare_digest(hashlib.sha256(self._material).digest(), hashlib.sha256(other._material).digest())

    def __hash__(self) -> int:
        return hash(hashlib.sha256(self._material).digest())

    def __reduce__(self) -> NoReturn:
        raise TypeError("a token is not serialised")


def new_token() -> Secret:
    """A token of 256 random bits: ``ws1_``, base32, and a checksum that catches a mistyped one."""
    material = secrets.token_bytes(_SECRET_BYTES)
    return Secret(_PREFIX + _base32(material) + _base32(_checksum(material)))


def parse_token(text: str) -> Token:
    """The token that `text` spells: one of ours, or a foreign string strong enough to stand in for one.

    Raises:
        ConfigurationError: mistyped, cut, too weak to be safe against guessing, or not printable ASCII.
            The message never holds the text.
    """
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigurationError(
            f"the seed token holds spaces or characters outside printable ASCII; start-up stops; {_MAKE_ONE}"
        )
    if text.lower().startswith(_PREFIX):
        return Token(_parse_own(text.lower()))
    reason = _weakness(text)
    if reason:
        raise ConfigurationError(
            f"the seed token is too weak ({reason}): whoever can connect could guess it; start-up stops; {_MAKE_ONE}"
        )
    return Token(text.encode("ascii"))


def read_tokens(
    *, file: Path | None = None, arguments: Iterable[str] = (), environ: MutableMapping[str, str] | None = None
) -> tuple[Token, ...]:
    """Every token this process was given, the one to dial with first; empty when there is none.

    Sources, of which at most one may be used: `file` (``--seed-token-file``: one token a line, ``#``
    comments; mode 0600, owned by us or root), the variable ``WARMSEED_SEED_TOKEN`` (whitespace between
    several; removed from `environ` so that no child inherits it), `arguments` (``--seed-token``;
    accepted with a warning, because every user of the machine can read a command line).

    Raises:
        ConfigurationError: no token in the file, a file others can read, a weak or mistyped token, the
            same one twice, too many, or two sources at once.
    """
    environ = os.environ if environ is None else environ
    variable = environ.pop(TOKEN_VARIABLE, None)
    given = list(arguments)
    named = [
        name
        for name, used in (
            ("--seed-token-file", file is not None),
            (TOKEN_VARIABLE, variable is not None),
            ("--seed-token", bool(given)),
        )
        if used
    ]
    if len(named) > 1:
        raise ConfigurationError(f"the seed token comes from {' and '.join(named)}; start-up stops; keep one of them")
    if file is not None:
        texts = _read_file(file)
    elif variable is not None:
        texts = variable.split()
    else:
        texts = given
    if given:
        logger.warning(
            "--seed-token shows the token to every user of this machine through /proc; use --seed-token-file or %s",
            TOKEN_VARIABLE,
        )
    if named and not texts:
        raise ConfigurationError(f"{named[0]} holds no token; start-up stops; {_MAKE_ONE}")
    if len(texts) > MAX_TOKENS:
        raise ConfigurationError(f"{named[0]} holds {len(texts)} tokens, at most {MAX_TOKENS}; start-up stops")
    tokens = tuple(parse_token(text) for text in texts)
    if len(set(tokens)) != len(tokens):
        raise ConfigurationError(f"{named[0]} names the same token twice; start-up stops; a rotation needs two")
    return tokens


def write_token(path: Path, secret: Secret) -> None:
    """Store `secret` in a new file that only we can read, as `read_tokens` wants it.

    Raises:
        ConfigurationError: the file exists already, or can't be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="ascii") as stream:
            stream.write(secret.reveal() + "\n")
            stream.flush()
            os.fsync(descriptor)
    except FileExistsError:
        raise ConfigurationError(
            f"the file {printable(path)} exists already; nothing was written; remove it, or name another"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"the token file {printable(path)} can't be written: {error.strerror}") from error


def _parse_own(text: str) -> bytes:
    body = text[len(_PREFIX) :]
    problem = ConfigurationError(
        "the seed token starts as one of ours but its checksum is wrong: mistyped or cut; start-up stops; "
        f"copy it again, or {_MAKE_ONE}"
    )
    try:
        material = base64.b32decode(body[:_BODY_CHARACTERS].upper() + "====")
    except binascii.Error:
        raise problem from None
    # Spelling it again catches a wrong checksum, a wrong length and the spare bits of base32 at once.
    spelled = _base32(material) + _base32(_checksum(material))
    if not hmac.compare_digest(spelled.encode("ascii"), body.encode("ascii")):
        raise problem
    return material


def _weakness(text: str) -> str | None:
    if len(text) < _FOREIGN_MINIMUM:
        return f"{len(text)} characters, at least {_FOREIGN_MINIMUM} needed"
    if len(text) > _FOREIGN_MAXIMUM:
        return f"more than {_FOREIGN_MAXIMUM} characters"
    if len(set(text)) < _DISTINCT_MINIMUM:
        return f"only {len(set(text))} distinct characters"
    # A text that repeats a shorter one is found inside its own doubling before its end.
    if (text + text).find(text, 1) < len(text):
        return "a repetition of a shorter text"
    return None


def _read_file(path: Path) -> list[str]:
    content = _checked_content(path)
    try:
        lines = content.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"the token file {printable(path)} is not plain ASCII; start-up stops; {_MAKE_ONE}"
        ) from None
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _checked_content(path: Path) -> bytes:
    name = printable(path)
    try:
        # O_NONBLOCK: a FIFO in the file's place must not hold up start-up for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigurationError(f"the token file {name} can't be read: {error.strerror}; start-up stops") from error
    try:
        # Of the open file, so that what is checked is what is read.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"the token file {name} is not a regular file; start-up stops")
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigurationError(
                f"the token file {name} belongs to user {status.st_uid}; start-up stops; "
                f"it must belong to user {os.geteuid()} or root"
            )
        if status.st_mode & 0o077:
            raise ConfigurationError(
                f"the token file {name} has mode {stat.S_IMODE(status.st_mode):04o}: others can read or write it; "
                f"start-up stops; run: chmod 600 {name}"
            )
        content = os.read(descriptor, _FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _FILE_BYTES:
        raise ConfigurationError(f"the token file {name} is larger than {_FILE_BYTES} bytes; start-up stops")
    return content


def _checksum(material: bytes) -> bytes:
    return hashlib.sha256(b"warmseed/v1/token-checksum" + material).digest()[:_CHECK_BYTES]


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode("ascii").rstrip("=").lower()


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
