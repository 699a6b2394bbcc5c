"""One rank's start, step by step, then serving.

    own the device -> open the stores -> adopt the engine's bytecode -> snapshot -> adopt the bundle -> load and export
    the weights -> adopt the tables -> rehearse what is missing -> capture -> release -> bind the socket -> serve

Each step is one timed, named phase. A step that fails costs what it was for and nothing else; only a
configuration that can't work and a model that can't be loaded end the rank.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from warmseed.blocking import run_blocking
from warmseed.daemon import logs
from warmseed.daemon.engines.base import Engine
from warmseed.daemon.engines.bytecode import keep_bytecode
from warmseed.daemon.engines.registry import engine_for
from warmseed.daemon.launcher.processes import die_with_parent, ensure_standard_files
from warmseed.daemon.protocol.spec import RankSpec, read_spec
from warmseed.daemon.protocol.status import (
    Alive,
    EngineAttached,
    EngineDetached,
    Failed,
    RehearsalOutcome,
    Serving,
    StatusWriter,
)
from warmseed.daemon.rank.bytecode import BYTECODE, COMPILING, bytecode_cache, on_trial
from warmseed.daemon.rank.judge import Judge
from warmseed.daemon.rank.rehearsal import rehearse
from warmseed.daemon.rank.seeds import GROUP_SECONDS, Seeds
from warmseed.daemon.rank.tally import Tally
from warmseed.daemon.rank.tuning_group import meeting
from warmseed.daemon.settings.paths import default_cache_root, prepare_cache_root, state_folder
from warmseed.daemon.weights.export import Exported, export_model
from warmseed.daemon.weights.fingerprint import Fingerprint
from warmseed.daemon.weights.server import WeightServer
from warmseed.daemon.weights.socket import DeviceLock, SocketAddress
from warmseed.errors import ConfigurationError, WarmseedError, printable
from warmseed.seeding.adopt import Adoption, Refusal
from warmseed.seeding.gang.gang import GangBroken, agree_run
from warmseed.seeding.gang.rendezvous import Alone, Rendezvous, RendezvousFailed
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.base import Capture, Kind, Site

__all__ = ["Rank", "main"]

_log = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between signs of life
FLUSH = 5.0  # seconds that background writes get when the rank is told to stop
# Kinds of the engine that must be in place before the model is loaded; its others are tables, read at warmup.
BEFORE_LOAD = ("compile_cache",)
_NOTHING = Adoption("", "present")


class Rank:
    """One rank of one group, from its spec to its last engine."""

    def __init__(self, spec: RankSpec, status: StatusWriter) -> None:
        self.spec = spec
        self.status = status
        self.engine: Engine = engine_for(spec)
        root = spec.config.cache_root
        self.cache_root = default_cache_root() if root is None else Path(root).absolute()
        self._adoptions: dict[str, Adoption] = {}
        self._tally = Tally()
        self._released = 0  # bytes

    async def run(self) -> None:
        """Start, then serve until the rank is told to stop.

        Raises:
            ConfigurationError: what was asked for can't work; the launcher ends with 2.
            WarmseedError: the model can't be loaded or exported.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        serving = loop.create_task(self._start())
        stopped = loop.create_task(stop.wait())
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            stopped.cancel()
            serving.result()
            return
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def _start(self) -> None:
        phase = self.status.phase
        async with AsyncExitStack() as stack:
            with phase("own-device"):
                await run_blocking(prepare_cache_root, self.cache_root)
                await run_blocking(keep_bytecode, self.cache_root, self.engine.modules)
                lock = await self._own_device()
                stack.callback(lock.release)
            with phase("open-stores"):
                seeds = await stack.enter_async_context(
                    Seeds.opened(self.spec, self.cache_root, observer=self._tally, count=self.status.refused)
                )
            bytecode = await self._adopt_bytecode(seeds)
            async with on_trial(seeds.trials, [(self._adoptions[kind.name], place) for kind, place in bytecode]):
                # Importing a deep-learning framework takes seconds and needs nobody: it runs beside the seeding.
                preparing = asyncio.create_task(run_blocking(self.engine.prepare))
                stack.callback(preparing.cancel)
                with phase("snapshot"):
                    site = await run_blocking(self._site)
                # A draft runs in the target's engine, on the same caches: what warms it is the target's to keep.
                kinds = self.engine.kinds() if self.spec.group == "target" else ()
                for kind in (k for k in kinds if k.name in BEFORE_LOAD):
                    await self._adopt(seeds, kind, site)
                with phase("import"):
                    await preparing
            exported, fingerprint = await self._weights()
            tables = self._table_site(site)
            group = await stack.enter_async_context(self._tuning_group(seeds, kinds))
            for kind in (k for k in kinds if k.name not in BEFORE_LOAD):
                await self._adopt(seeds, kind, tables, group)
            sites = {kind.name: site if kind.name in BEFORE_LOAD else tables for kind in kinds}
            for kind, place in bytecode:
                kinds, sites = (kind, *kinds), {kind.name: place, **sites}
            judge = Judge(seeds.trials, sites, kinds, self._adoptions, self.status)
            stack.push_async_callback(judge.on_stop)
            server = WeightServer(
                exported, fingerprint, lock.address, on_report=judge.on_report, on_detached=judge.on_detached
            )
            rehearsal = await rehearse(
                self.spec, self.engine, server, self.status, cache_root=self.cache_root, missing=self._missing
            )
            captures = await self._capture(seeds, kinds, sites, judge, rehearsal=rehearsal)
            captures, runs = await self._named_runs(captures, group)
            with phase("release") as report:
                self._released = await run_blocking(self._release)
                report.detail["released_bytes"] = self._released
            with phase("bind"):
                await stack.enter_async_context(server.serving(lock=lock))
                self.status.send(Serving(str(lock.address), time.monotonic()))
            publishing = asyncio.create_task(seeds.publish(captures, sites, runs=runs))
            stack.push_async_callback(_finish, publishing)
            await self._serve(server, judge)

    # The steps -----------------------------------------------------------------------------------

    async def _own_device(self) -> DeviceLock:
        """The lock of this rank's device and role: a second daemon fails here, before anything slow."""
        folder = self.spec.config.weight_cache_socket_dir
        uuid = await run_blocking(self.engine.device_uuid)
        lock = DeviceLock(
            SocketAddress.for_device(
                uuid, directory=None if folder is None else Path(folder), draft=self.spec.group == "draft"
            )
        )
        await run_blocking(lock.acquire)
        return lock

    def _site(self) -> Site:
        identity = self.engine.identity()
        return Site(
            config_hash=identity.config_hash,
            config_factors=identity.factors,
            environment=self.engine.environment(),
            dp_rank=self.spec.dp_rank,
            world_rank=self.spec.copy_rank,
            device_index=self.engine.device_index(),
            cache_root=self.cache_root,
            roots=self.engine.caches(self.cache_root).roots,
            state=state_folder(self.cache_root),
        )

    def _table_site(self, site: Site) -> Site:
        """Where engines look for tables: what tunes together is numbered through, each copy apart from the start."""
        spec = self.spec
        dp, rank = (0, spec.copy_rank) if self.engine.copies_run_apart() else (spec.dp_rank, spec.global_rank)
        return dataclasses.replace(site, config_hash=self.engine.table_hash(), dp_rank=dp, world_rank=rank)

    @asynccontextmanager
    async def _tuning_group(self, seeds: Seeds, kinds: Sequence[Kind]) -> AsyncIterator[Rendezvous]:
        """Where the ranks that tune together decide together; alone where there is nobody to decide with."""
        if not any(isinstance(kind, FlashInferAutotune) for kind in kinds):
            yield Alone()
            return
        async with meeting(self.spec, seeds.tokens, apart=self.engine.copies_run_apart()) as group:
            yield group

    async def _named_runs(
        self, captures: list[tuple[Kind, Capture]], group: Rendezvous
    ) -> tuple[list[tuple[Kind, Capture]], dict[str, str]]:
        """What is to be published, and the name that the group gives to the run it tuned together."""
        if group.world == 1 or self._adoptions.get(FlashInferAutotune.name, _NOTHING).outcome != "none":
            return captures, {}
        try:
            run = await agree_run(group, name="tuned", timeout=GROUP_SECONDS)
        except RendezvousFailed as error:
            _log.warning("tables are not published: %s", printable(error, limit=500))
            self.status.refused(("not-published",))
            return [(kind, capture) for kind, capture in captures if kind.name != FlashInferAutotune.name], {}
        return captures, {FlashInferAutotune.name: run}

    async def _adopt_bytecode(self, seeds: Seeds) -> list[tuple[Kind, Site]]:
        """Have what other nodes compiled of the engine's sources, if this node keeps any.

        One rank does it for the node. The others start to import at once: interpreters look for each file by itself, so
        they find it from the moment that it is there.
        """
        if self.spec.group != "target" or self.spec.local_rank != 0:
            return []
        found = await run_blocking(bytecode_cache, self.cache_root, self.engine.modules)
        if found is None:
            return []
        await self._adopt(seeds, *found)
        return [found]

    async def _adopt(self, seeds: Seeds, kind: Kind, site: Site, group: Rendezvous | None = None) -> None:
        with self.status.phase(f"adopt-{kind.name}") as report:
            try:
                if isinstance(kind, FlashInferAutotune) and group is not None and group.world > 1:
                    adoption = await seeds.adopt_together(kind, site, group)
                else:
                    adoption = await seeds.adopt(kind, site, within=COMPILING if kind.name == BYTECODE else None)
            except GangBroken:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, it costs the adoption and not the start
                told = f"{type(error).__name__}: {printable(error, limit=500)}"
                _log.warning("kind=%s not adopted, made here instead: %s", kind.name, told, exc_info=True)
                adoption = Adoption(kind.name, "none", refusals=(Refusal("here", "error", told),))
            self._adoptions[kind.name] = adoption
            report.outcome = {"none": "miss", "present": "present", "installed": "hit"}[adoption.outcome]
            report.detail["origin"] = adoption.origin
            if adoption.manifest is not None:
                report.detail["generation"] = adoption.manifest.generation
                report.detail["bytes"] = adoption.manifest.length
            if adoption.refusals:
                report.detail["refused"] = "; ".join(
                    f"{printable(r.origin, limit=40)}: {r.reason}" for r in adoption.refusals[-4:]
                )
        self.status.refused(refusal.reason for refusal in adoption.refusals)
        for refusal in adoption.refusals:
            if adoption.outcome == "none" and refusal.reason in ("space", "disk"):
                told = printable(refusal.message, limit=300)
                _log.warning(
                    "kind=%s starts uncached: %s; free some room or name another --cache-root", kind.name, told
                )

    @property
    def _missing(self) -> list[str]:
        """What is worth a rehearsal; bytecode alone is not, every import makes it."""
        return [name for name, adoption in self._adoptions.items() if not adoption.complete and name != BYTECODE]

    async def _weights(self) -> tuple[Exported, Fingerprint]:
        with self.status.phase("load") as report:
            loaded = await run_blocking(self.engine.load)
            report.detail["checkpoint"] = str(loaded.checkpoint)[:80]
        with self.status.phase("export") as report:
            exported = await run_blocking(export_model, loaded.module, device=self.engine.device)
            report.detail["bytes"] = exported.nbytes
            report.detail["segments"] = len(exported.segments)
        return exported, self.engine.fingerprint(loaded.checkpoint)

    async def _capture(
        self,
        seeds: Seeds,
        kinds: Sequence[Kind],
        sites: Mapping[str, Site],
        judge: Judge,
        *,
        rehearsal: RehearsalOutcome,
    ) -> list[tuple[Kind, Capture]]:
        """What this node made itself, read before any engine can change it.

        That is nothing where an engine broke off, which leaves half a cache: who adopts that has no rehearsal of its
        own. Nor is it anything where part of an artifact was adopted and no engine has made the rest: published, that
        part would take the place of the whole.
        """
        captures: list[tuple[Kind, Capture]] = []
        for kind in kinds:
            adoption, site = self._adoptions[kind.name], sites[kind.name]
            if adoption.outcome == "installed" and (adoption.complete or rehearsal != "ok"):
                continue
            if adoption.outcome == "present":
                known = await seeds.hand_on(kind, site, adoption)
                if known is not None:
                    self._adoptions[kind.name] = known
                    continue
            if rehearsal in ("failed", "timeout"):
                continue
            with self.status.phase(f"capture-{kind.name}") as report:
                capture = await seeds.capture(kind, site)
                report.outcome = "ok" if capture is not None else "skipped"
                if capture is not None:
                    report.detail["bytes"] = capture.length
                    captures.append((kind, capture if kind.name == BYTECODE else judge.annotated(capture)))
        return captures

    def _release(self) -> int:
        """Memory that start-up needed and serving does not; bytes given back."""
        before = _resident()
        gc.collect()
        self.engine.release()
        return max(0, before - _resident())

    async def _serve(self, server: WeightServer, judge: Judge) -> None:
        attached: set[int] = set()
        while True:
            now = {lease.pid for lease in server.leases}
            for pid in now - attached:
                self.status.send(EngineAttached(pid))
                await judge.on_attached()
            for pid in attached - now:
                self.status.send(EngineDetached(pid))
            attached = now
            self.status.send(
                self._tally.metrics(engines=len(now), weights=server.memory().nbytes, released=self._released)
            )
            self.status.send(Alive())
            await asyncio.sleep(HEARTBEAT)


async def _finish(publishing: asyncio.Task[None]) -> None:
    """Give background writes a moment; what they do not finish is invisible, and made again by the next start."""
    done, _ = await asyncio.wait({publishing}, timeout=FLUSH)
    if not done:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)


def _resident() -> int:
    """Bytes of this process in memory (proc(5), statm)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """A rank process, as the launcher starts it: ``--spec-fd N --status-fd M``."""
    ensure_standard_files()
    die_with_parent()
    parser = argparse.ArgumentParser(prog="warmseed.daemon.rank.rank")
    parser.add_argument("--spec-fd", type=int, required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    arguments = parser.parse_args()
    logs.install()
    status = StatusWriter(arguments.status_fd)
    try:
        asyncio.run(Rank(read_spec(arguments.spec_fd), status).run())
    except ConfigurationError as error:
        status.send(Failed(printable(error, limit=1000), 2))
        code = 2
    except WarmseedError as error:
        status.send(Failed(printable(error, limit=1000), 1))
        code = 1
    except Exception as error:  # noqa: BLE001 - whatever an engine raises must reach the launcher as a reason
        _log.exception("this rank broke; the launcher ends the group")
        status.send(Failed(f"{type(error).__name__}: {printable(error, limit=1000)}", 1))
        code = 1
    else:
        code = 0
    status.close()
    # Libraries loaded for the engine may hang or crash in their own exit handlers; nothing of ours is left to do.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a reader that left, or no stream at all
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
