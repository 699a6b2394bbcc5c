"""The kind ``flashinfer_autotune``: one rank's autotune table, in whichever of its two homes the engine reads."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from warmseed.seeding.artifact import object_key
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.bounded import JsonLimits
from warmseed.seeding.kinds.autotune.capture import capture_tables
from warmseed.seeding.kinds.autotune.compare import require_same
from warmseed.seeding.kinds.autotune.convert import store_of_table, table_of_stores
from warmseed.seeding.kinds.autotune.files import held_folder, read_file, replace_file
from warmseed.seeding.kinds.autotune.home import label, metadata_of, per_rank_path
from warmseed.seeding.kinds.autotune.install import Placed, place_store, place_table
from warmseed.seeding.kinds.autotune.layout import (
    KIND,
    MANAGED_ROOT,
    PER_RANK_ROOT,
    managed_filename,
    per_rank_filename,
)
from warmseed.seeding.kinds.autotune.local import LocalTable, Standing, examine_table, heal_table
from warmseed.seeding.kinds.autotune.managed import ManagedStore, decode_stores, entry_paths
from warmseed.seeding.kinds.autotune.table import Table, parse_table
from warmseed.seeding.kinds.autotune.undo import (
    Undo,
    forget,
    managed_files,
    recall,
    remember,
    remember_digest,
    remember_managed,
    remembered_digest,
)
from warmseed.seeding.kinds.autotune.usage import new_keys_of, usage_of, verdict
from warmseed.seeding.kinds.base import Capture, Evidence, Installation, Site, Verdict
from warmseed.seeding.rejected import move_aside
from warmseed.seeding.trust.manifest import Manifest

__all__ = ["FlashInferAutotune"]

_log = logging.getLogger(__name__)


class FlashInferAutotune:
    """Captures, checks and installs the autotune table of one rank.

    `Site.roots` says which homes the engine reads: ``flashinfer_autotune`` is the v1 root (the folder of
    ``<config hash>/``), ``flashinfer_autotune_v2`` the managed store's root (the folder of ``v2/``). What was
    captured from one is converted for the other. `overlap` says who wins where this node and the seeded table
    tuned the same operation; ranks of a group need ``seeded``, see `install.merge`.
    """

    name = KIND

    def __init__(self, *, overlap: Literal["local", "seeded"] = "seeded", allow_wildcards: bool = False) -> None:
        self.overlap: Literal["local", "seeded"] = overlap
        self._allow_wildcards = allow_wildcards

    def environment(self, site: Site) -> Environment:
        """FlashInfer's own metadata, under its own names; ``unknown`` where this node can't tell."""
        return metadata_of(site)

    def capture(self, site: Site) -> Capture | None:
        """The table as FlashInfer saved it, or `None` if it tuned nothing.

        Raises:
            CannotJudge: this node does not know its own environment now.
            ArtifactRefused: ``malformed``, ``environment`` or ``space``: the table must stay on this node.
            OSError: if the disk fails.
        """
        return capture_tables(site)

    def check(self, manifest: Manifest, payload: Path, site: Site) -> None:
        """Nothing, if `install` would accept the table; the disk is not touched.

        Raises:
            CannotJudge: this node does not know its own environment now.
            ArtifactRefused: as `install`.
        """
        table, stores, _ = self._validated(manifest, payload, site)
        if table is None and PER_RANK_ROOT in site.roots and MANAGED_ROOT not in site.roots:
            table_of_stores(stores)

    def install(self, manifest: Manifest, payload: Path, index: bytes | None, site: Site) -> Installation:
        """Validate the table whole, then put it where the engine reads, by a rename.

        Raises:
            CannotJudge: this node does not know its own environment now.
            ArtifactRefused: ``kind``, ``key``, ``rank``, ``length``, ``digest``, ``malformed``, ``environment``, or
                ``relocation`` where the engine reads no tables here; nothing has changed then.
            OSError: if the disk fails; nothing has changed then.
        """
        table, stores, data = self._validated(manifest, payload, site)
        ours = self.environment(site)
        wanted = [name for name in (PER_RANK_ROOT, MANAGED_ROOT) if name in site.roots]
        if not wanted:
            raise ArtifactRefused("relocation", "the engine on this node reads no autotune tables; nothing installed")
        left_out: dict[str, str] = {}
        local: LocalTable | None = None
        if PER_RANK_ROOT in wanted:
            try:
                table = table or table_of_stores(stores)
            except ArtifactRefused as refused:
                if wanted == [PER_RANK_ROOT]:
                    raise
                left_out[PER_RANK_ROOT] = str(refused)
                wanted.remove(PER_RANK_ROOT)
        if MANAGED_ROOT in wanted and not stores:
            stores = (store_of_table(table or Table({}, {})),)
            left_out.update(stores[0].left_out)
        if PER_RANK_ROOT in wanted and table is not None:
            local = self._room_for(examine_table(per_rank_path(site), ours), ours, site)
        return self._place(manifest, site, table, data, stores, local, wanted, left_out)

    def _validated(
        self, manifest: Manifest, payload: Path, site: Site
    ) -> tuple[Table | None, tuple[ManagedStore, ...], bytes]:
        """The payload's contents, read once: what is checked here is what is written later, byte for byte."""
        ours = self.environment(site)
        what = f"table {manifest.sha256[:12]} of generation {manifest.generation}"
        per_rank = per_rank_filename(site.dp_rank, site.world_rank)
        managed = managed_filename(site.dp_rank, site.world_rank)
        if manifest.kind != KIND:
            raise ArtifactRefused("kind", f"{what} is of kind {manifest.kind!r}, not {KIND}")
        if manifest.config_hash != site.config_hash:
            raise ArtifactRefused("key", f"{what} is of configuration {manifest.config_hash[:12]}")
        if (manifest.dp_rank, manifest.world_rank) != (site.dp_rank, site.world_rank) or manifest.filename not in (
            per_rank,
            managed,
        ):
            raise ArtifactRefused(
                "rank",
                f"{what} is {manifest.filename!r} of dp rank {manifest.dp_rank}, rank {manifest.world_rank}; "
                f"this is dp rank {site.dp_rank}, rank {site.world_rank}: it would never hit here",
            )
        require_same(manifest.environment, ours, what, allow_wildcards=self._allow_wildcards)
        data = read_file(payload, JsonLimits().size)
        if data is None or len(data) != manifest.length:
            raise ArtifactRefused("length", f"{what} has {len(data or b'')} bytes, not {manifest.length}")
        if hashlib.sha256(data).hexdigest() != manifest.sha256:
            raise ArtifactRefused("digest", f"{what} changed after it was verified; nothing was installed")
        table, stores = (
            (parse_table(data, what), ()) if manifest.filename == per_rank else (None, decode_stores(data, what))
        )
        for metadata in [table.metadata] if table else [store.metadata for store in stores]:
            require_same(metadata, ours, what, allow_wildcards=self._allow_wildcards)
        return table, stores, data

    def _room_for(self, local: LocalTable, ours: Environment, site: Site) -> LocalTable:
        """`local` after everything that is no good table of ours was moved aside."""
        healed = heal_table(local, ours, site.state)
        if healed.standing is Standing.VAGUE:
            move_aside(healed.path, site.state, reason="environment", detail=healed.reason)
            return LocalTable(healed.path, Standing.ABSENT)
        return healed

    def _place(
        self,
        manifest: Manifest,
        site: Site,
        table: Table | None,
        data: bytes,
        stores: tuple[ManagedStore, ...],
        local: LocalTable | None,
        wanted: list[str],
        left_out: dict[str, str],
    ) -> Installation:
        files: dict[str, str] = {}
        previous = local.data if local is not None and local.standing is Standing.GOOD else None
        replaced: dict[str, bytes] = {}
        placed: list[Placed] = []
        keys = tuple(table.entries) if table is not None else tuple(key for store in stores for key in store.entries)
        remember(site.state, manifest.sha256, manifest.generation, Undo(table=previous, keys=keys))
        try:
            if MANAGED_ROOT in wanted:
                for store in stores:
                    done = place_store(store, site.roots[MANAGED_ROOT], site.state, overlap=self.overlap)
                    placed.append(done)
                    replaced.update(done.replaced)
                    files.update({f"{MANAGED_ROOT}/{name}": digest for name, digest in done.files.items()})
                names = entry_paths(stores)
                remember_managed(site.state, label(site), names)
            if PER_RANK_ROOT in wanted and table is not None and local is not None:
                relative = per_rank_path(site).relative_to(site.roots[PER_RANK_ROOT])
                text = data if not stores else table.encode()
                done = place_table(table, text, site.roots[PER_RANK_ROOT], relative, local=local, overlap=self.overlap)
                placed.append(done)
                files.update({f"{PER_RANK_ROOT}/{name}": digest for name, digest in done.files.items()})
        except BaseException:
            _take_back_entries(site, files, replaced)
            raise
        remember_digest(site.state, label(site), manifest.sha256)
        if replaced:
            undo = Undo(table=previous, keys=keys, entries=replaced)
            remember(site.state, manifest.sha256, manifest.generation, undo)
        _log.info(
            "installed table sha256=%s generation=%d added=%d kept=%d left_out=%d",
            manifest.sha256[:12],
            manifest.generation,
            sum(item.added for item in placed),
            sum(item.kept for item in placed),
            len(left_out),
        )
        return Installation(
            kind=KIND,
            generation=manifest.generation,
            sha256=manifest.sha256,
            files=files,
            left_out=left_out,
            complete=PER_RANK_ROOT not in left_out,
        )

    def present(self, site: Site) -> bool:
        """Whether every home the engine reads already holds a good table of this configuration."""
        ours = self.environment(site)
        if ours.unknown or not ({PER_RANK_ROOT, MANAGED_ROOT} & set(site.roots)):
            return False
        if PER_RANK_ROOT in site.roots and examine_table(per_rank_path(site), ours).standing is not Standing.GOOD:
            return False
        if MANAGED_ROOT in site.roots:
            names = managed_files(site.state, label(site))
            return bool(names) and all(_has_content(site.roots[MANAGED_ROOT] / name) for name in names)
        return True

    def heal(self, site: Site) -> tuple[str, ...]:
        """Move a local table that would crash or be ignored at every start aside; a line for each thing done.

        Raises:
            OSError: if the folder can't be written.
        """
        if PER_RANK_ROOT not in site.roots:
            return ()
        ours = self.environment(site)
        found = examine_table(per_rank_path(site), ours)
        healed = heal_table(found, ours, site.state)
        if healed is found:
            return ()
        outcome = "an earlier one was put back" if healed.standing is Standing.GOOD else "it will be tuned or fetched"
        return (f"{found.path}: {found.reason}; moved aside, {outcome}",)

    def judge(self, installation: Installation, evidence: Evidence, site: Site) -> Verdict:
        """Whether FlashInfer served anything from the table, and why we say so."""
        undo = recall(site.state, installation.sha256, installation.generation)
        new_keys: tuple[str, ...] | None = None
        if PER_RANK_ROOT in site.roots:
            now = examine_table(per_rank_path(site), self.environment(site))
            if now.table is None and any(name.startswith(PER_RANK_ROOT + "/") for name in installation.files):
                return Verdict(False, f"{now.path} is {now.standing.value} after warmup", {"tables": False})
            if now.table is not None:
                before = undo.keys if undo.table is None else (*undo.keys, *parse_table(undo.table).entries)
                new_keys = new_keys_of(dict.fromkeys(before), now.table.entries)
        return verdict(usage_of(evidence), entries=len(undo.keys), new_keys=new_keys)

    def retract(self, installation: Installation, site: Site) -> None:
        """Move what was installed aside and put back what was there before.

        Raises:
            OSError: if the folder can't be written.
        """
        undo = recall(site.state, installation.sha256, installation.generation)
        detail = f"generation {installation.generation} ({installation.sha256[:12]}) was taken back"
        for name, digest in installation.files.items():
            path, root = _installed_path(site, name)
            if path is None:
                continue
            if root == MANAGED_ROOT and not _still(path, digest):
                continue  # the engine has tuned this operation itself since
            move_aside(path, site.state, reason="probation", detail=detail)
        _put_back(site, undo)
        remember_managed(site.state, label(site), ())
        remember_digest(site.state, label(site), "")
        forget(site.state, installation.sha256, installation.generation)

    def held(self, site: Site) -> tuple[str, ...]:
        """Digests of what the local table was installed from or published as, and of the v1 file as it is."""
        found = [remembered_digest(site.state, label(site))]
        if PER_RANK_ROOT in site.roots:
            local = examine_table(per_rank_path(site), self.environment(site))
            found.append(hashlib.sha256(local.data).hexdigest() if local.data else "")
        return tuple(digest for digest in dict.fromkeys(found) if digest)

    def set_aside(self, site: Site, why: str) -> None:
        """Move this rank's local table aside, good as it is, so that nothing hits.

        Raises:
            OSError: if the folder can't be written.
        """
        paths = [per_rank_path(site)] if PER_RANK_ROOT in site.roots else []
        if MANAGED_ROOT in site.roots:
            paths += [site.roots[MANAGED_ROOT] / name for name in managed_files(site.state, label(site))]
        for path in paths:
            if path.is_symlink() or path.exists():
                move_aside(path, site.state, reason="gang", detail=why)
        if MANAGED_ROOT in site.roots:
            remember_managed(site.state, label(site), ())
        remember_digest(site.state, label(site), "")

    def reference_manifest(self, payload: Path, site: Site, *, issued_at: int, publisher: str) -> Manifest:
        """A description of an unsigned table that stock vLLM stored, as if this node had published it.

        For fleets that share a store with stock vLLM and said so; `install` then applies every rule to it.

        Raises:
            ArtifactRefused: ``malformed``.
            OSError: if the payload can't be read.
        """
        data = read_file(payload, JsonLimits().size) or b""
        table = parse_table(data, "the unsigned table")
        return Manifest(
            schema=1,
            kind=KIND,
            store_key=object_key(hashlib.sha256(data).hexdigest()),
            config_hash=site.config_hash,
            config_digest=site.config_hash,
            dp_rank=site.dp_rank,
            world_rank=site.world_rank,
            device_index=-1,
            filename=per_rank_filename(site.dp_rank, site.world_rank),
            sha256=hashlib.sha256(data).hexdigest(),
            length=len(data),
            environment=dict(table.metadata),
            generation=1,
            issued_at=issued_at,
            expires_at=issued_at + 86_400,
            publisher=publisher,
        )


def _installed_path(site: Site, name: str) -> tuple[Path | None, str]:
    root, _, relative = name.partition("/")
    return (site.roots[root] / relative, root) if root in site.roots else (None, root)


def _has_content(path: Path) -> bool:
    """Whether FlashInfer could serve this entry; after a power cut it may be there and empty."""
    try:
        return path.stat(follow_symlinks=False).st_size > 0
    except OSError:
        return False


def _still(path: Path, digest: str) -> bool:
    try:
        data = read_file(path, JsonLimits().size)
    except (ArtifactRefused, OSError):
        return False
    return data is not None and hashlib.sha256(data).hexdigest() == digest


def _take_back_entries(site: Site, files: Mapping[str, str], replaced: Mapping[str, bytes]) -> None:
    """Undo the managed half of an installation whose per-rank half failed."""
    for name, digest in files.items():
        path, root = _installed_path(site, name)
        if path is not None and root == MANAGED_ROOT and _still(path, digest):
            path.unlink(missing_ok=True)
    _put_back(site, Undo(entries=dict(replaced)))


def _put_back(site: Site, undo: Undo) -> None:
    if undo.table is not None and PER_RANK_ROOT in site.roots:
        path = per_rank_path(site)
        with held_folder(path.parent, create=True) as folder:
            replace_file(folder, path.name, undo.table)
    for relative, data in undo.entries.items():
        path = site.roots[MANAGED_ROOT] / relative
        with held_folder(path.parent, create=True) as folder:
            replace_file(folder, path.name, data, only_new=True)
