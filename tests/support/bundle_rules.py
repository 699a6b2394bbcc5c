"""What must hold for any bytes that reach a parser of bundles; the fuzz target and its tests share it.

The first byte of an input says which parser gets the rest.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from warmseed.errors import ConfigurationError
from warmseed.seeding.bundle import tar
from warmseed.seeding.bundle.index import INDEX_BYTES, BundleIndex
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.compiled import groups
from warmseed.seeding.trust import canonical
from warmseed.seeding.trust.dsse import ENVELOPE_BYTES, Envelope, open_envelope
from warmseed.seeding.trust.keys import Keyring, PublicKey, PublisherKey
from warmseed.seeding.trust.manifest import MANIFEST_TYPE, Manifest

__all__ = ["PARSERS", "one_input"]

_KEYRING = Keyring([PublisherKey("fuzz", b"f" * 32).public])
_ROOT = Path("/root-of-the-cache")


def _tar(data: bytes) -> None:
    found = list(tar.members(memoryview(data)))
    again = b"".join(
        tar.header(m.name, m.size, executable=m.executable) + data[m.offset : m.offset + m.size] + tar.padding(m.size)
        for m in found
    )
    if again + tar.trailer(len(again)) != data:
        raise ValueError("an archive was accepted that the writer would not have written")


def _spelling(form: type[Manifest | BundleIndex | Envelope], data: bytes, limit: int) -> None:
    if canonical.encode(canonical.decode(data, form, limit=limit)) != data:
        raise ValueError("accepted in a spelling that is not ours")


def _manifest(data: bytes) -> None:
    _spelling(Manifest, data, ENVELOPE_BYTES)


def _envelope(data: bytes) -> None:
    _spelling(Envelope, data, ENVELOPE_BYTES)
    open_envelope(data, MANIFEST_TYPE, _KEYRING)


def _index(data: bytes) -> None:
    _spelling(BundleIndex, data, INDEX_BYTES)


def _key(data: bytes) -> None:
    try:
        PublicKey.parse(data.decode("utf-8", "replace"))
    except ConfigurationError as error:
        raise ArtifactRefused("malformed", str(error)) from error


def _group(data: bytes) -> None:
    made = groups.to_absolute("H/__grp__k.json", data, _ROOT)
    for child in msgspec.json.decode(made, type=groups.Group).child_paths.values():
        if not child.startswith(f"{_ROOT}/H/") or "/" in child.removeprefix(f"{_ROOT}/H/") or child.endswith("/.."):
            raise ValueError("a group file that points outside its folder")


PARSERS = (_tar, _manifest, _envelope, _index, _key, _group)


def one_input(data: bytes) -> bool:
    """Whether its parser takes `data`; raises if any of the rules is broken."""
    if not data:
        return False
    try:
        PARSERS[data[0] % len(PARSERS)](data[1:])
    except ArtifactRefused as error:
        if not str(error).isprintable():
            raise ValueError("foreign control characters in a message for the log") from error
        return False
    return True
