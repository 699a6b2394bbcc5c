"""Reading a node's caches into a bundle."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from warmseed.errors import printable
from warmseed.seeding.artifact import bundle_key
from warmseed.seeding.bundle import tar
from warmseed.seeding.bundle.frames import FrameWriter, Place
from warmseed.seeding.bundle.index import BundleIndex, CacheRecord, FileRecord, write_index
from warmseed.seeding.bundle.walk import (
    FileReader,
    Found,
    Snapshot,
    check_size,
    open_folder,
    take_snapshot,
    wait_until_quiet,
)
from warmseed.seeding.captured import new_payload
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.base import Capture, Site
from warmseed.seeding.kinds.compiled.cache import CompiledCache

__all__ = ["FILENAME", "Quiet", "capture_bundle"]

FILENAME = "bundle.tar"


@dataclass(frozen=True, slots=True)
class Quiet:
    """When a cache counts as finished."""

    settle: float = 0.2  # seconds without a change
    deadline: float = 30.0  # seconds after which a cache that still changes is left for a later start


@dataclass(slots=True)
class _Source:
    """One folder of a cache, opened once, so that all of a capture is of one folder."""

    cache: CompiledCache
    path: Path
    folder: int
    prefix: str = ""  # what stands before the folder's paths in the bundle
    snapshot: Snapshot = field(default_factory=Snapshot)
    paths: tuple[Path, Path] = field(init=False)  # as engines know it, and with its links resolved
    reader: FileReader = field(init=False)

    def __post_init__(self) -> None:
        self.paths = (self.path, Path(os.path.realpath(self.path)))
        self.reader = FileReader(self.folder)

    def skips(self, path: str) -> bool:
        """Whether the file or folder at `path` below the folder is no part of the cache."""
        return self.cache.skips(self.prefix + path)

    def close(self) -> None:
        """Close the folder and what was opened below it."""
        self.reader.__exit__()
        os.close(self.folder)

    def name(self, path: str) -> str:
        """How the bundle calls the file at `path` below the folder."""
        return f"{self.cache.name}/{self.prefix}{path}"


class _Bundle:
    """A bundle being written."""

    def __init__(self, frames: FrameWriter, needles: Sequence[bytes]) -> None:
        self._frames = frames
        self._needles = needles
        self._common = os.path.commonpath(list(needles)) if needles else b""  # one search for most files
        self._order = tar.Order()
        self._added: list[tuple[str, int, Found, bool]] = []
        self.left_out: dict[str, str] = {}

    def add(self, source: _Source, path: str) -> None:
        found = source.snapshot.files[path]
        name = source.name(path)
        if reason := source.cache.refuses(source.prefix + path, found.size):
            self.left_out[printable(name)] = reason
            return
        try:
            check_size(name, found.size)
            place = self._read(source, path, name, found)
        except ValueError as error:
            self.left_out[printable(name)] = str(error)
            return
        except FileNotFoundError as error:
            raise ArtifactRefused("busy", f"{printable(name)!r} went away while it was read") from error
        except (ArtifactRefused, OSError) as error:
            if getattr(error, "reason", "") == "busy":
                raise
            self.left_out[printable(name)] = printable(error)
            return
        self._frames.add(place)
        self._added.append((name, place.size, found, self._holds_a_root(place)))

    def _read(self, source: _Source, path: str, name: str, found: Found) -> Place:
        """The file's bytes, or the cache's own spelling of them, at their place in the tar."""
        if source.cache.examines(path):
            data = source.reader.read(path)
            _check_unchanged(name, len(data), found)
            data = source.cache.captured(path, data, source.paths)
            place = self._place(name, len(data), found)
            place.view[: len(data)] = data
        else:
            place = self._place(name, found.size, found)
            _check_unchanged(name, source.reader.read_into(path, place.view), found)
        return place

    def _place(self, name: str, size: int, found: Found) -> Place:
        header = tar.header(name, size, executable=bool(found.mode & 0o100))
        self._order.check(name)
        return self._frames.place(header, size, tar.padding(size))

    def records(self) -> tuple[FileRecord, ...]:
        """The index's entries, once the frames are finished."""
        return tuple(
            FileRecord(
                path=name,
                size=size,
                mode=found.mode & 0o777,
                mtime_ns=max(0, found.mtime_ns),
                sha256=digest,
                bound=bound,
            )
            for (name, size, found, bound), digest in zip(self._added, self._frames.digests, strict=True)
        )

    def __len__(self) -> int:
        return len(self._added)

    def _holds_a_root(self, place: Place) -> bool:
        if self._common and not place.holds(self._common):
            return False
        return any(place.holds(needle) for needle in self._needles)


def _check_unchanged(name: str, size: int, found: Found) -> None:
    if size != found.size:
        raise ArtifactRefused("busy", f"{printable(name)!r} changed while it was read")


def capture_bundle(
    caches: Sequence[CompiledCache], site: Site, environment: Environment, quiet: Quiet
) -> Capture | None:
    """The caches at `site` as a bundle in `site.state`, or `None` when they are all empty.

    Raises:
        ArtifactRefused: ``busy``, when a cache never came to rest; ``malformed``, when one is no cache.
        OSError: when a cache can't be read or the bundle can't be written.
    """
    sources = _open(caches, site)
    try:
        if not _settle(sources, quiet):
            return None
        folder = site.state / "compiled" / "captured"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = folder / f".{secrets.token_hex(8)}"
        try:
            return _write(sources, site, environment, temporary, quiet)
        finally:
            temporary.unlink(missing_ok=True)
    finally:
        for source in sources:
            source.close()


def _open(caches: Sequence[CompiledCache], site: Site) -> list[_Source]:
    sources: list[_Source] = []
    try:
        for cache in sorted(caches, key=lambda c: c.name.encode()):
            path = site.roots.get(cache.name)
            if path is None:
                continue
            for folder, prefix in ((path, ""), *cache.elsewhere(site)):
                if folder.is_dir():
                    sources.append(_Source(cache, folder, open_folder(folder), prefix))
    except BaseException:
        for source in sources:
            source.close()
        raise
    return sources


def _settle(sources: Sequence[_Source], quiet: Quiet) -> bool:
    """Wait for all caches to be still at once; whether there is any file."""
    for source in sources:
        take = functools.partial(take_snapshot, source.folder, source.skips)
        source.snapshot = wait_until_quiet(take, settle=quiet.settle, deadline=quiet.deadline)
    return any(source.snapshot.files for source in sources)


def _in_order(sources: Sequence[_Source]) -> list[tuple[_Source, str]]:
    """Every file once, by the byte order of its name in the bundle; a cache's own root comes before other folders."""
    files: dict[str, tuple[_Source, str]] = {}
    for source in sources:
        for path in source.snapshot.files:
            files.setdefault(source.name(path), (source, path))
    return [files[name] for name in sorted(files, key=os.fsencode)]


def _write(
    sources: Sequence[_Source], site: Site, environment: Environment, temporary: Path, quiet: Quiet
) -> Capture | None:
    roots = [*site.roots.values(), *(Path(os.path.realpath(root)) for root in site.roots.values())]
    needles = sorted({os.fsencode(root) for root in roots})
    with temporary.open("xb") as out:
        os.fchmod(out.fileno(), 0o600)
        with FrameWriter(out) as frames:
            bundle = _Bundle(frames, needles)
            records: dict[str, CacheRecord] = {}
            linked = {source.name("").rstrip("/") for source in sources}  # links of our own, read as their folders
            for source, path in _in_order(sources):
                before = len(bundle)
                bundle.add(source, path)
                if len(bundle) > before and source.cache.name not in records:
                    records[source.cache.name] = source.cache.record(site)
            for source in sources:
                refused = source.snapshot.refused.items()
                bundle.left_out.update(
                    {printable(source.name(path)): why for path, why in refused if source.name(path) not in linked}
                )
            # Everything is read by now; the last batches are packed and written meanwhile.
            for source in sources:
                if take_snapshot(source.folder, source.skips) != source.snapshot:
                    raise ArtifactRefused(
                        "busy", f"cache {source.cache.name} changed while it was read; captured at a later start"
                    )
            digest = frames.finish(tar.trailer(frames.length))
        out.flush()
        os.fsync(out.fileno())
    if not len(bundle):
        return None
    index = BundleIndex(
        schema=1,
        sha256=digest,
        length=frames.length,
        caches=records,
        files=bundle.records(),
        chunks=tuple(frames.chunks),
    )
    payload = new_payload(temporary.parent, digest)
    os.rename(temporary, payload)
    bound = any(source.cache.device_bound and source.cache.name in records for source in sources)
    return Capture(
        filename=FILENAME,
        payload=payload,
        sha256=digest,
        length=frames.length,
        environment=environment,
        device_index=site.device_index if bound else -1,
        store_key=bundle_key(digest),
        stored=frames.stored,
        index=write_index(index)[0],
        left_out=bundle.left_out,
    )
