"""The one tar that holds a given set of files: own writer, own reader, nothing else accepted.

A bundle is a POSIX tar of regular files only. Names are checked and strictly increasing, modes are 0644 or
0755, times, owners and device numbers are zero; a name that does not fit the classic header gets one PAX
record. The reader parses a header, encodes what it parsed, and compares: any other bytes are refused. So
equal files give equal bytes on every host, and links, devices, sparse files, long-name tricks and every
other feature of tar do not exist here. `tarfile` reads these archives, and is never used to read one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from warmseed.errors import printable
from warmseed.seeding.errors import ArtifactRefused

__all__ = ["BLOCK", "MEMBERS", "Member", "Order", "check_name", "header", "members", "padding", "trailer"]

BLOCK = 512  # bytes
RECORD = 20 * BLOCK  # bytes; the end of an archive is padded to a whole record
MEMBERS = 100_000  # files in the largest bundle
NAME_BYTES = 1024  # bytes in the longest name
COMPONENT_BYTES = 255  # bytes in the longest part of a name: what Linux file systems take
MEMBER_BYTES = 1 << 33  # bytes; what eleven octal digits of the classic header can say
_PAX_BYTES = 1088  # bytes in the longest PAX record a name can need

_PLAIN = re.compile(r"[A-Za-z0-9._+@=-]+(?:/[A-Za-z0-9._+@=-]+)*")
_SIZE = re.compile(rb"[0-7]{11}\0")
_DOTS = re.compile(r"(?:^|/)\.{1,2}(?:/|$)")

_END = bytes(100) + b"ustar\x0000" + bytes(247)  # of a header block, after its kind: the same in all
_MODES = {mode: b"%07o\0%07o\0%07o\0" % (mode, 0, 0) for mode in (0, 0o644, 0o755)}  # with the owner and the group
_MTIME = b"%011o\0" % 0
# What the bytes that are the same in all blocks of a mode add up to, as if the checksum's own field held spaces.
_SUMS = {mode: sum(owned) + sum(_MTIME) + sum(_END) + sum(b" " * 8) for mode, owned in _MODES.items()}

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a bundle."""

    name: str
    size: int  # bytes
    executable: bool
    offset: int  # of its bytes in the archive


def _refuse(message: str) -> NoReturn:
    raise ArtifactRefused("malformed", f"not a canonical bundle: {message}; nothing was installed")


def check_name(name: str) -> str:
    """`name`, if a bundle may hold a file of that name: relative, NFC, no part that climbs or hides.

    Raises:
        ArtifactRefused: ``malformed``.
    """
    if _PLAIN.fullmatch(name) and len(name) <= COMPONENT_BYTES and not _DOTS.search(name):
        return name  # nearly all names, and nothing below could refuse one of them
    try:
        raw = name.encode("utf-8")
    except UnicodeEncodeError:
        _refuse(f"name {printable(name)!r} is not Unicode text")
    if not 0 < len(raw) <= NAME_BYTES:
        _refuse(f"a name of {len(raw)} bytes")
    for part in raw.split(b"/"):
        if part in (b"", b".", b"..") or len(part) > COMPONENT_BYTES:
            _refuse(f"name {printable(name)!r} has a part that is empty, a dot or too long")
    if not name.isascii():
        if unicodedata.normalize("NFC", name) != name:
            _refuse(f"name {printable(name)!r} is not in NFC")
        if any(unicodedata.category(c) in ("Cc", "Cs", "Cn") for c in name):
            _refuse(f"name {printable(name)!r} holds a control or unassigned character")
    elif not name.isprintable():
        _refuse(f"name {printable(name)!r} holds a control character")
    if "\\" in name:
        _refuse(f"name {printable(name)!r} holds a backslash")
    return name


def _block(name: bytes, mode: int, size: int, kind: bytes) -> bytes:
    """One ustar header block, as Python's `tarfile` writes it in PAX format."""
    length = b"%011o\0" % size
    checksum = sum(name) + sum(length) + sum(kind) + _SUMS[mode]
    return b"%b%b%b%b%06o\0 %b%b" % (name.ljust(100, b"\0"), _MODES[mode], length, _MTIME, checksum, kind, _END)


def _pax(name: str) -> bytes:
    body = b" path=" + name.encode("utf-8") + b"\n"
    length = len(body) + len(str(len(body)))
    if len(str(length)) != len(str(len(body))):
        length += 1
    return str(length).encode("ascii") + body


def header(name: str, size: int, *, executable: bool) -> bytes:
    """Everything that stands before the bytes of the file `name`: one block, or three with a PAX record.

    Raises:
        ArtifactRefused: ``malformed``, for a name or a size that bundles do not hold.
    """
    check_name(name)
    if not 0 <= size < MEMBER_BYTES:
        _refuse(f"{printable(name)!r} has {size} bytes")
    mode = 0o755 if executable else 0o644
    if name.isascii() and len(name) <= 100:
        return _block(name.encode("ascii"), mode, size, b"0")
    record = _pax(name)
    return (
        _block(b"././@PaxHeader", 0, len(record), b"x")
        + record
        + padding(len(record))
        + _block(name.encode("ascii", "replace")[:100], mode, size, b"0")
    )


def padding(size: int) -> bytes:
    """The zeros between a file of `size` bytes and the next header."""
    return bytes(-size % BLOCK)


def trailer(length: int) -> bytes:
    """The end of an archive whose members take `length` bytes."""
    return bytes(2 * BLOCK + -(length + 2 * BLOCK) % RECORD)


def _octal(raw: bytes) -> int:
    if not _SIZE.fullmatch(raw):
        _refuse("a size that is not eleven octal digits")
    return int(raw[:11], 8)


def _name(data: Buffer, offset: int, first: bytes) -> tuple[str, int]:
    """The name of the member whose header begins at `offset`, and where its own block lies."""
    if first[156:157] != b"x":
        raw, block = first[:100].rstrip(b"\0"), offset
    else:
        size = _octal(first[124:136])
        if not 0 < size <= _PAX_BYTES:
            _refuse(f"a PAX header of {size} bytes")
        record = bytes(data[offset + BLOCK : offset + BLOCK + size])
        _, found, rest = record.partition(b" path=")
        if not found or not rest.endswith(b"\n"):
            _refuse("a PAX header that holds anything but a path")
        raw, block = rest[:-1], offset + BLOCK + size + -size % BLOCK
    try:
        return raw.decode("utf-8"), block
    except UnicodeDecodeError:
        _refuse("a name that is not UTF-8")


def members(data: Buffer) -> Iterator[Member]:
    """The files of the archive `data`, in order, each only after its header was found canonical.

    The last thing checked is the end of the archive: a caller that must know that all of it is canonical
    runs this to its end.

    Raises:
        ArtifactRefused: ``malformed``, at the first byte that the writer would not have written.
    """
    total, offset, count = len(data), 0, 0
    order = Order()
    while True:
        first = bytes(data[offset : offset + BLOCK])
        if len(first) < BLOCK:
            _refuse("it ends in the middle of a header")
        if not any(first):
            break
        count += 1
        if count > MEMBERS:
            _refuse(f"more than {MEMBERS} files")
        name, block = _name(data, offset, first)
        own = bytes(data[block : block + BLOCK])
        size, executable = _octal(own[124:136]), own[100:107] == b"0000755"
        encoded = header(name, size, executable=executable)
        if bytes(data[offset : block + BLOCK]) != encoded:
            _refuse(f"the header of {printable(name)!r} is not the one that its name, size and mode give")
        begin = offset + len(encoded)
        end = begin + size
        offset = end + -size % BLOCK
        if offset > total:
            _refuse(f"it ends in the middle of {printable(name)!r}")
        if bytes(data[end:offset]) != padding(size):
            _refuse(f"the padding of {printable(name)!r} is not zero")
        order.check(name)
        yield Member(name, size, executable, begin)
    end_of_archive = trailer(offset)
    if total - offset != len(end_of_archive) or any(data[offset:]):
        _refuse("its end is not two blocks of zeros and the padding of a record")


class Order:
    """What the names so far allow the next one to be."""

    __slots__ = ("_folded", "_folder", "_previous")

    def __init__(self) -> None:
        self._previous = b""
        self._folder = ""  # of the name before; most names share it
        self._folded: dict[str, str] = {}  # case-folded file or folder -> its spelling, "" for a file

    def check(self, name: str) -> None:
        """Remember `name`, if it comes after the one before and no file system could take it for another.

        Raises:
            ArtifactRefused: ``malformed``.
        """
        raw = name.encode("utf-8")
        if raw <= self._previous:
            _refuse(f"{printable(name)!r} stands out of order or twice")
        self._previous = raw
        folder = name.rpartition("/")[0]
        if folder != self._folder:
            self._enter(folder)
        folded = name.casefold()
        if folded in self._folded:
            _refuse(f"{printable(name)!r} is another name's file or folder, or differs from it only by case")
        self._folded[folded] = ""

    def _enter(self, path: str) -> None:
        """Remember the folder `path` and those it lies in."""
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            folder = "/".join(parts[:depth])
            if self._folded.setdefault(folder.casefold(), folder) != folder:
                _refuse(f"{printable(folder)!r} is both a file and a folder, or spelled in two ways")
        self._folder = path
