"""Bundles from the wrong hand, or damaged on the way: refused whole, with nothing left behind."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zstandard
from tests.support.sites import fill, make_manifest, make_site, tree
from tests.support.tars import pack

from warmseed.seeding.bundle import tar
from warmseed.seeding.bundle.index import BundleIndex, CacheRecord, FileRecord, read_index, write_index
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.base import Capture, Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.inductor import InductorCache
from warmseed.seeding.kinds.compiled.triton import TritonCache
from warmseed.seeding.trust.manifest import Index, Manifest


def kind() -> CompileCacheKind:
    return CompileCacheKind([InductorCache(), TritonCache()], quiet=Quiet(settle=0.0))


@pytest.fixture
def good(tmp_path: Path) -> tuple[Manifest, Path, bytes, Site]:
    """A good bundle, and the site it is for."""
    source = make_site(tmp_path / "source")
    fill(source.roots["inductor"], {"ab/k.so": b"x" * 5000, "ab/k.py": b"pass"})
    capture = kind().capture(source)
    assert capture is not None
    assert capture.index is not None
    return make_manifest(capture, source), capture.payload, capture.index, make_site(tmp_path / "target")


def assert_untouched(site: Site) -> None:
    assert not any(os.path.lexists(root) for root in site.roots.values())
    base = site.state / "compiled"
    for name in ("staging", "trees"):
        assert not (base / name).exists() or list((base / name).iterdir()) == []


def refused(manifest: Manifest, payload: Path, index: bytes | None, site: Site) -> ArtifactRefused:
    with pytest.raises(ArtifactRefused) as caught:
        kind().install(manifest, payload, index, site)
    assert_untouched(site)
    return caught.value


def resigned(
    site: Site, data: bytes, files: Mapping[str, tuple[bytes, bool]], **changes: object
) -> tuple[Manifest, bytes]:
    """A manifest and an index that a malicious but trusted publisher could sign for `data`."""
    records = tuple(
        FileRecord(
            path=name,
            size=len(files[name][0]),
            mode=0o755 if files[name][1] else 0o644,
            mtime_ns=1,
            sha256=hashlib.sha256(files[name][0]).hexdigest(),
        )
        for name in sorted(files, key=str.encode)
    )
    environment = dict(InductorCache().environment(site)) | dict(TritonCache().environment(site))
    caches = {
        name: CacheRecord(root=str(site.roots[name]), environment=dict(cache.environment(site)))
        for name, cache in (("inductor", InductorCache()), ("triton", TritonCache()))
    }
    digest = hashlib.sha256(data).hexdigest()
    index = BundleIndex(schema=1, sha256=digest, length=len(data), caches=caches, files=records)
    raw, bound = write_index(index)
    capture = Capture(
        filename="bundle.tar",
        payload=Path("/nonexistent"),
        sha256=digest,
        length=len(data),
        environment=kind().environment(site),
        device_index=-1,
        store_key="k",
        index=raw,
    )
    manifest = msgspec.structs.replace(make_manifest(capture, site), environment=environment, index=bound, **changes)
    return manifest, raw


# -- on the way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "reasons"),
    [
        (lambda b: b"", {"length"}),
        (lambda b: b[: len(b) // 2], {"length", "malformed"}),
        (lambda b: b[:-1], {"length", "malformed"}),
        (lambda b: b + b, {"length"}),
        (lambda b: b + zstandard.compress(b"1"), {"length"}),
        (lambda b: b"garbage" * 1000, {"length", "digest"}),
        (lambda b: zstandard.compress(b"\0" * (64 << 20)), {"length"}),
        (lambda b: zstandard.compress(b"wrong"), {"length"}),
    ],
)
def test_a_payload_that_is_not_the_signed_one_is_refused_before_it_is_parsed(
    good: tuple[Manifest, Path, bytes, Site], damage: Callable[[bytes], bytes], reasons: set[str]
) -> None:
    manifest, payload, index, site = good
    payload.write_bytes(damage(payload.read_bytes()))
    assert refused(manifest, payload, index, site).reason in reasons


def test_every_single_flipped_byte_of_a_plain_tar_is_refused(good: tuple[Manifest, Path, bytes, Site]) -> None:
    manifest, payload, index, site = good
    data = bytearray(zstandard.ZstdDecompressor().stream_reader(payload.read_bytes(), read_across_frames=True).read())
    for position in range(0, len(data), 997):
        data[position] ^= 1
        payload.write_bytes(data)
        assert refused(manifest, payload, index, site).reason == "digest"
        data[position] ^= 1


def test_a_plain_tar_is_taken_as_well_as_a_compressed_one(good: tuple[Manifest, Path, bytes, Site]) -> None:
    manifest, payload, index, site = good
    data = zstandard.ZstdDecompressor().stream_reader(payload.read_bytes(), read_across_frames=True).read()
    payload.write_bytes(data)
    kind().install(manifest, payload, index, site)
    assert set(tree(site.roots["inductor"])) == {"ab/k.so", "ab/k.py"}


@pytest.mark.parametrize("case", ["none", "unbound", "cut", "flipped", "respelt", "of another bundle"])
def test_an_index_that_is_not_the_signed_one_is_refused(good: tuple[Manifest, Path, bytes, Site], case: str) -> None:
    manifest, payload, index, site = good
    bad: bytes | None = {
        "none": None,
        "unbound": index,
        "cut": index[:-1],
        "flipped": index[:50] + bytes([index[50] ^ 1]) + index[51:],
        "respelt": index + b" ",
        "of another bundle": index,
    }[case]
    if case == "unbound":
        manifest = msgspec.structs.replace(manifest, index=None)
    if case == "respelt":
        manifest = msgspec.structs.replace(
            manifest, index=Index(sha256=hashlib.sha256(index + b" ").hexdigest(), length=len(index) + 1)
        )
    if case == "of another bundle":
        manifest = msgspec.structs.replace(manifest, sha256="0" * 64)
    assert refused(manifest, payload, bad, site).reason in ("malformed", "length", "digest")


def test_a_zstd_frame_that_asks_for_gigabytes_of_window_is_refused(good: tuple[Manifest, Path, bytes, Site]) -> None:
    manifest, payload, index, site = good
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=30)
    payload.write_bytes(
        zstandard.ZstdCompressor(compression_params=parameters).compressobj().compress(os.urandom(1 << 20))
    )
    assert refused(manifest, payload, index, site).reason in ("malformed", "length")


# -- from a trusted but malicious publisher ------------------------------------------------------------------


def header(**fields: object) -> bytes:
    info = tarfile.TarInfo("inductor/x")
    for name, value in fields.items():
        setattr(info, name, value)
    return info.tobuf(tarfile.PAX_FORMAT)


def archive(*members: tarfile.TarInfo, kind: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as writer:
        for member in members:
            writer.addfile(member, io.BytesIO(b"\0" * member.size))
    return out.getvalue()


def info(name: str, **fields: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def path_max_chain() -> bytes:
    """The shape of CVE-2025-4517: links whose expansion passes PATH_MAX, then a file through them."""
    members, long = [], "d" * 247
    steps = "abcdefghijklmnop"
    path = ""
    for step in steps:
        members.append(info(os.path.join(path, long), type=tarfile.DIRTYPE))
        members.append(info(os.path.join(path, step), type=tarfile.SYMTYPE, linkname=long))
        path = os.path.join(path, long)
    link = os.path.join("/".join(steps), "l" * 254)
    members.append(info(link, type=tarfile.SYMTYPE, linkname="../" * len(steps)))
    members.append(info("escape", type=tarfile.SYMTYPE, linkname=link + "/../../../outside"))
    members.append(info("escape/file"))
    return archive(*members)


HOSTILE: dict[str, bytes] = {
    "absolute": archive(info("/inductor/x")),
    "dot dot": archive(info("inductor/../../x")),
    "symlink": archive(info("inductor/x", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
    "hardlink": archive(info("inductor/x", type=tarfile.LNKTYPE, linkname="/etc/passwd")),
    "character device": archive(info("inductor/x", type=tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "block device": archive(info("inductor/x", type=tarfile.BLKTYPE)),
    "fifo": archive(info("inductor/x", type=tarfile.FIFOTYPE)),
    "folder": archive(info("inductor/x", type=tarfile.DIRTYPE)),
    "contiguous": archive(info("inductor/x", type=tarfile.CONTTYPE)),
    "sparse": archive(info("inductor/x", type=tarfile.GNUTYPE_SPARSE), kind=tarfile.GNU_FORMAT),
    "setuid": archive(info("inductor/x", mode=0o4755)),
    "owner": archive(info("inductor/x", uid=1000)),
    "time": archive(info("inductor/x", mtime=1)),
    "owner's name": archive(info("inductor/x", uname="root")),
    "gnu long name": archive(info("inductor/" + "x" * 200), kind=tarfile.GNU_FORMAT),
    "old v7": archive(info("inductor/x"), kind=tarfile.USTAR_FORMAT).replace(b"ustar\x0000", b"\0" * 8),
    "PATH_MAX chain": path_max_chain(),
    "duplicate": pack({"inductor/x": (b"1", False)})[:1024] + pack({"inductor/x": (b"1", False)}),
    "data after the end": pack({"inductor/x": (b"1", False)}) + b"\0" * 10240,
    "no end": pack({"inductor/x": (b"1", False)})[:1024],
    "no padding of the record": pack({"inductor/x": (b"1", False)})[:2048],
    "out of order": pack({"inductor/b": (b"", False)})[:512] + pack({"inductor/a": (b"", False)}),
    "negative size": header(size=0)[:124] + b"-0000000001\0" + header(size=0)[136:] + bytes(9728),
    "base 256 size": header(size=1 << 40) + bytes(9728),
    "size past the end": header(size=(1 << 33) - 1) + bytes(9728),
    "bad padding": pack({"inductor/x": (b"1", False)})[:1023] + b"!" + pack({"inductor/x": (b"1", False)})[1024:],
    "global PAX": header(type=tarfile.XGLTYPE, size=0) + pack({"inductor/x": (b"1", False)}),
    "huge PAX header": header(type=tarfile.XHDTYPE, name="././@PaxHeader", size=(1 << 30)) + bytes(9728),
    "empty": b"",
    "zeros": bytes(512),
}


def elsewhere(folder: Path, site: Site) -> set[Path]:
    """Everything below `folder` that is not the site's own state."""
    own = site.state.parent
    return {path for path in folder.rglob("*") if own not in (path, *path.parents)}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_that_is_not_canonical_is_refused_although_it_was_signed(
    good: tuple[Manifest, Path, bytes, Site], tmp_path: Path, name: str
) -> None:
    *_, site = good
    data = HOSTILE[name]
    payload = tmp_path / "payload"
    payload.write_bytes(data)
    manifest, index = resigned(site, data, {"inductor/x": (b"1", False)})
    outside = elsewhere(tmp_path, site)
    start = time.monotonic()
    assert refused(manifest, payload, index, site).reason in ("malformed", "length")
    assert time.monotonic() - start < 1
    assert elsewhere(tmp_path, site) == outside


@pytest.mark.parametrize(
    "files", [["inductor/Ab", "inductor/aB"], ["inductor/a", "inductor/a/b"], ["inductor/é", "inductor/É"]]
)
def test_names_that_a_file_system_could_confuse_are_refused(files: list[str]) -> None:
    with pytest.raises(ArtifactRefused):
        list(tar.members(pack(dict.fromkeys(files, (b"1", False)))))


def test_too_many_members_are_refused_at_the_first_one_too_many() -> None:
    body = b"".join(tar.header(f"inductor/{number:07d}", 0, executable=False) for number in range(tar.MEMBERS + 2))
    start = time.monotonic()
    with pytest.raises(ArtifactRefused, match=f"more than {tar.MEMBERS}"):
        list(tar.members(memoryview(body)))
    assert time.monotonic() - start < 20


def test_a_header_that_asks_for_a_gigabyte_costs_no_memory() -> None:
    for data in (HOSTILE["huge PAX header"], HOSTILE["size past the end"], HOSTILE["base 256 size"]):
        tracemalloc.start()
        with pytest.raises(ArtifactRefused):
            list(tar.members(memoryview(data)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20


@pytest.mark.parametrize("case", ["missing", "extra", "size", "digest", "executable"])
def test_a_bundle_that_its_own_index_does_not_describe_is_refused(
    good: tuple[Manifest, Path, bytes, Site], tmp_path: Path, case: str
) -> None:
    *_, site = good
    files = {"inductor/a": (b"1", False), "inductor/b.cubin": (b"2", False)}
    told = dict(files)
    match case:
        case "missing":
            del told["inductor/b.cubin"]
        case "extra":
            told["inductor/c"] = (b"3", False)
        case "size":
            told["inductor/b.cubin"] = (b"", False)
        case "digest":
            told["inductor/b.cubin"] = (b"3", False)
        case "executable":
            told["inductor/b.cubin"] = (b"2", True)
    data = pack(files)
    payload = tmp_path / "payload"
    payload.write_bytes(data)
    manifest, index = resigned(site, data, told)
    assert refused(manifest, payload, index, site).reason in ("malformed", "digest")


@pytest.mark.parametrize("child", ["/etc/passwd", "../x", "..", "a/b", ".", "", "k.cubin\n"])
def test_a_group_file_that_points_elsewhere_is_refused(
    good: tuple[Manifest, Path, bytes, Site], tmp_path: Path, child: str
) -> None:
    *_, site = good
    for group in ({child: child}, {"k.cubin": child}):
        body = msgspec.json.encode({"child_paths": group})
        files = {"triton/H/__grp__k.json": (body, False), "triton/H/k.cubin": (b"c", False)}
        data = pack(files)
        payload = tmp_path / "payload"
        payload.write_bytes(data)
        manifest, index = resigned(site, data, files)
        assert refused(manifest, payload, index, site).reason == "relocation"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"child_paths":{"a":1}}', b'{"child_paths":{}, "x":1}'])
def test_a_broken_group_file_is_refused(good: tuple[Manifest, Path, bytes, Site], tmp_path: Path, body: bytes) -> None:
    *_, site = good
    files = {"triton/H/__grp__k.json": (body, False)}
    payload = tmp_path / "payload"
    payload.write_bytes(pack(files))
    manifest, index = resigned(site, pack(files), files)
    assert refused(manifest, payload, index, site).reason == "relocation"


@pytest.mark.parametrize(
    "path", ["../x", "/x", "x", "inductor", "inductor/", "other/x", "inductor/../x", "inductor//x"]
)
def test_an_index_cannot_name_a_path_outside_its_caches(path: str) -> None:
    text = (
        '{"caches":{"inductor":{"environment":{},"root":"/r"}},"chunks":[],"files":[{"bound":false,"mode":420,"mtime_ns":1,'
        f'"path":"{path}","sha256":"{"0" * 64}","size":1}}],"length":1,"schema":1,"sha256":"{"0" * 64}"}}'
    ).encode()
    with pytest.raises(ArtifactRefused):
        read_index(text, Index(sha256=hashlib.sha256(text).hexdigest(), length=len(text)))


def test_a_folder_swapped_for_a_link_while_files_are_written_stops_the_walk(
    good: tuple[Manifest, Path, bytes, Site], tmp_path: Path
) -> None:
    *_, site = good
    files = {f"inductor/{n:02d}/{m}/k.so": (b"x" * 2000, True) for n in range(40) for m in "abc"}
    data = pack(files)
    payload = tmp_path / "payload"
    payload.write_bytes(data)
    manifest, index = resigned(site, data, files)
    outside, done = tmp_path / "outside", threading.Event()
    outside.mkdir()
    staging = site.state / "compiled" / "staging"

    def attack() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError):
                for folder in staging.glob("*/inductor/*"):
                    folder.rename(folder.with_name("moved"))
                    folder.symlink_to(outside)

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        for _ in range(15):
            with contextlib.suppress(ArtifactRefused, OSError):
                kind().install(manifest, payload, index, site)
            shutil.rmtree(site.state, ignore_errors=True)
    finally:
        done.set()
        attacker.join(10)
    assert list(outside.rglob("*")) == []


def test_nothing_is_installed_where_the_disk_is_too_full(
    good: tuple[Manifest, Path, bytes, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, payload, index, site = good
    real = os.statvfs

    def full(path: object) -> os.statvfs_result:
        return os.statvfs_result([*real(path)[:3], 10, 10, *real(path)[5:]])  # type: ignore[arg-type]

    monkeypatch.setattr(os, "statvfs", full)
    assert refused(manifest, payload, index, site).reason == "space"


def test_a_manifest_for_another_kind_or_device_is_refused(good: tuple[Manifest, Path, bytes, Site]) -> None:
    manifest, payload, index, site = good
    assert refused(msgspec.structs.replace(manifest, kind="flashinfer_autotune"), payload, index, site).reason == "kind"
    assert refused(manifest, payload, index, replace(site, device_index=7)).reason == "rank"
