"""Small archives for tests."""

from __future__ import annotations

from collections.abc import Mapping

from warmseed.seeding.bundle import tar


def pack(files: Mapping[str, tuple[bytes, bool]]) -> bytes:
    """A canonical archive of `files`: name -> (bytes, executable)."""
    out = bytearray()
    for name in sorted(files, key=lambda n: n.encode("utf-8", "surrogatepass")):
        body, executable = files[name]
        out += tar.header(name, len(body), executable=executable) + body + tar.padding(len(body))
    return bytes(out + tar.trailer(len(out)))
