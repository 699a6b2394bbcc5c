"""Engines that vanish, daemons that go, releases that collide, values that change: who notices, and who pays."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from tests.support.weights_model import digests, fingerprint, loaded, shell
from tests.support.weights_serving import eventually, private_folder, served

from warmseed.daemon.weights import frames
from warmseed.daemon.weights.checkpoint import (
    AnyDigest,
    CheckpointIdentity,
    digest_checkpoint,
    stat_checkpoint,
)
from warmseed.daemon.weights.client import attach, get_memory, map_into, release, send_report
from warmseed.daemon.weights.digest_cache import DigestCache
from warmseed.daemon.weights.errors import (
    FingerprintMismatch,
    UnsupportedPlatformForIPCError,
    WeightCacheError,
    WeightCacheUnavailable,
)
from warmseed.daemon.weights.export import export_model
from warmseed.daemon.weights.memfd import MemfdSegment, MemfdTransport
from warmseed.daemon.weights.messages import Answer, GetState, Report, State, Watch
from warmseed.daemon.weights.server import Lease, ServerLimits, WeightServer
from warmseed.daemon.weights.socket import SocketAddress, connect
from warmseed.errors import ConfigurationError


def soon() -> float:
    return time.monotonic() + 10


STEPS = ["connected", "half a head", "half a request", "asked", "half an answer", "answered", "watching"]


@pytest.mark.parametrize("step", STEPS)
def test_an_engine_that_vanishes_at_any_step_leaves_nothing(tmp_path: Path, step: str) -> None:
    with served(tmp_path / "s") as server:
        with attach(server.address, fingerprint()):
            pass  # what is imported and started on first use is there now
        eventually(lambda: not server._connections, "a closed connection stays")
        before = len(os.listdir("/proc/self/fd"))
        connection = connect(server.address, timeout_s=5)
        request = frames.encode(GetState(fingerprint(), "cpu0", os.getpid()))
        match STEPS.index(step):
            case 1:
                connection.sendall(request[:3])
            case 2:
                connection.sendall(request[:50])
            case 3:
                connection.sendall(request)
            case 4:
                connection.sendall(request)
                connection.recv(10)
            case 5 | 6:
                connection.sendall(request)
                state = frames.read(connection, Answer, limit=1 << 24, who="daemon", deadline=soon())
                assert isinstance(state, State)
                for fd in frames.read_descriptors(connection, len(state.segments), who="daemon", deadline=soon()):
                    os.close(fd)
                if step == "watching":
                    frames.send(connection, Watch(), deadline=soon())
                    frames.read(connection, Answer, limit=1 << 20, who="daemon", deadline=soon())
        eventually(lambda: len(server._connections) == 1, "the connection was not noticed")
        connection.close()
        eventually(lambda: not server._connections, "a vanished engine's connection stays")
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "descriptors stay")
        assert get_memory(server.address).leases == 0


def test_many_engines_at_once_all_get_the_weights(tmp_path: Path) -> None:
    with served(tmp_path / "s") as server:
        seen: list[dict[str, str]] = []

        def engine() -> None:
            with attach(server.address, fingerprint()) as attachment:
                model = shell()
                map_into(model, attachment)
                seen.append(digests(model))

        threads = [threading.Thread(target=engine) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(seen) == 8
        assert all(found == digests(loaded()) for found in seen)
        eventually(lambda: not server.leases, "leases stay")


class TestRelease:
    def test_while_an_engine_maps_it_is_refused(self, tmp_path: Path) -> None:
        with served(tmp_path / "s") as server, attach(server.address, fingerprint()) as attachment:
            answer = release(server.address)
            assert (answer.outcome, answer.leases) == ("in_use", 1)
            assert not attachment.tensors["embed.weight"].isnan().any()
            assert get_memory(server.address).nbytes == attachment.nbytes

    def test_deferred_it_happens_when_the_last_engine_goes_and_nobody_new_is_let_in(self, tmp_path: Path) -> None:
        with served(tmp_path / "s") as server:
            attachment = attach(server.address, fingerprint())
            assert release(server.address, defer=True).outcome == "deferred"
            with pytest.raises(WeightCacheUnavailable) as caught:
                attach(server.address, fingerprint())
            assert caught.value.reason == "released"
            assert not server.exported.released
            attachment.close()
            eventually(lambda: server.exported.released, "the last engine went, the weights stay")
            eventually(server.released.is_set, "nobody is told of the release")
            memory = get_memory(server.address)
            assert (memory.released, memory.nbytes, memory.segment_bytes) == (True, 0, 0)

    def test_twice_is_as_good_as_once(self, tmp_path: Path) -> None:
        with served(tmp_path / "s") as server:
            assert release(server.address).outcome == "released"
            assert release(server.address).outcome == "released"

    def test_of_mapped_weights_is_refused_by_the_engines_own_side(self, tmp_path: Path) -> None:
        with served(tmp_path / "s") as server, attach(server.address, fingerprint()) as attachment:
            with pytest.raises(WeightCacheError, match="mapped"):
                attachment.release()
            assert not server.exported.released

    def test_refused_to_a_copying_engine_it_can_be_asked_for_again(self, tmp_path: Path) -> None:
        with served(tmp_path / "s") as server:
            mapping = attach(server.address, fingerprint())
            copying = attach(server.address, fingerprint(), mode="copy")
            assert copying.released is not None
            assert copying.released.outcome == "in_use"
            mapping.close()
            eventually(lambda: not server.leases, "the lease stays")
            assert copying.release().outcome == "released"
            assert torch.equal(copying.tensors["embed.weight"], loaded().embed.weight)


class TestCopyModeFailure:
    @pytest.fixture
    def full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Memory runs out at the fifth copy."""
        calls = iter(range(1000))
        real = torch.Tensor.clone

        def clone(tensor: torch.Tensor) -> torch.Tensor:
            if next(calls) == 4:
                raise torch.OutOfMemoryError("out of memory")
            return real(tensor)

        monkeypatch.setattr(torch.Tensor, "clone", clone)

    def test_after_the_weights_were_fetched_releases_them_before_the_disk_load(
        self, tmp_path: Path, full: None
    ) -> None:
        with served(tmp_path / "s") as server:
            with pytest.raises(WeightCacheUnavailable, match="out of memory") as caught:
                attach(server.address, fingerprint(), mode="copy")
            assert caught.value.reason == "error"
            assert server.exported.released  # by the time the engine starts to load

    def test_beside_a_mapping_engine_it_takes_nothing_from_that_one(self, tmp_path: Path, full: None) -> None:
        with served(tmp_path / "s") as server, attach(server.address, fingerprint()) as attachment:
            with pytest.raises(WeightCacheUnavailable):
                attach(server.address, fingerprint(), mode="copy")
            assert not server.exported.released
            assert attachment.tensors["embed.weight"].float().isfinite().all()

    def test_before_the_weights_were_fetched_releases_nothing(self, tmp_path: Path) -> None:
        with served(tmp_path / "s") as server:
            with pytest.raises(FingerprintMismatch):
                attach(server.address, fingerprint(dtype="float16"), mode="copy")
            assert not server.exported.released

    def test_what_was_copied_so_far_does_not_hang_on_the_error(self, tmp_path: Path, full: None) -> None:
        with served(tmp_path / "s") as server, pytest.raises(WeightCacheUnavailable) as caught:
            attach(server.address, fingerprint(), mode="copy")
        error: BaseException | None = caught.value
        held: list[torch.Tensor] = []
        while error is not None:
            trace = error.__traceback__
            while trace is not None:
                tables = [v for v in trace.tb_frame.f_locals.values() if isinstance(v, dict)]
                held += [t for table in tables for t in table.values() if isinstance(t, torch.Tensor)]
                trace = trace.tb_next
            error = error.__cause__
        assert held == []


def test_a_failing_map_closes_the_attachment_and_drops_its_tensors(tmp_path: Path) -> None:
    with served(tmp_path / "s") as server:
        attachment = attach(server.address, fingerprint())
        with pytest.raises(WeightCacheUnavailable):
            map_into(torch.nn.Module(), attachment)
        assert attachment.tensors == {}
        eventually(lambda: not server.leases, "a failed engine keeps its lease")


class TestDaemonsEnd:
    def test_on_purpose_is_told_apart_from_a_death(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            with served(tmp_path / "s") as server:
                attachment = attach(server.address, fingerprint())
            assert attachment.daemon_gone.wait(10)
        assert "has stopped" in caplog.text
        assert attachment.tensors["embed.weight"].float().isfinite().all()

    def test_an_engine_that_closes_itself_warns_of_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with served(tmp_path / "s") as server:
            attachment = attach(server.address, fingerprint())
            attachment.close()
            attachment.close()
            eventually(lambda: not server.leases, "the lease stays")
        assert not attachment.daemon_gone.is_set()
        assert "daemon" not in caplog.text

    def test_the_socket_goes_first_and_takes_no_new_engines(self, tmp_path: Path) -> None:
        with served(tmp_path / "s") as server:
            address = server.address
        with pytest.raises(WeightCacheUnavailable) as caught:
            attach(address, fingerprint())
        assert caught.value.reason == "absent"
        assert not address.path.exists()


class TestReports:
    def test_reach_the_rank_as_they_were_sent(self, tmp_path: Path) -> None:
        got: list[Report] = []
        evidence = Report(seconds=2.5, counters={"hits": 3.0}, lines=("a", "b"), new_files=("x/y",))
        with served(tmp_path / "s", on_report=got.append) as server:
            send_report(server.address, evidence)
        assert got == [evidence]

    def test_a_callback_may_be_a_coroutine(self, tmp_path: Path) -> None:
        got: list[Report] = []

        async def take(report: Report) -> None:
            got.append(report)

        with served(tmp_path / "s", on_report=take) as server:
            send_report(server.address, Report(seconds=1))
        assert len(got) == 1

    def test_a_callback_that_fails_costs_the_report_and_not_the_daemon(self, tmp_path: Path) -> None:
        def fail(report: Report) -> None:
            raise RuntimeError("secret detail")

        with served(tmp_path / "s", on_report=fail) as server:
            with pytest.raises(WeightCacheUnavailable, match="RuntimeError") as caught:
                send_report(server.address, Report(seconds=1))
            assert "secret" not in str(caught.value)
            assert get_memory(server.address).tensors

    def test_nobody_listening_is_said(self, tmp_path: Path) -> None:
        with served(tmp_path / "s") as server, pytest.raises(WeightCacheUnavailable, match="no reports"):
            send_report(server.address, Report(seconds=1))


class TestDevices:
    def test_a_socket_of_another_device_is_refused_by_the_daemon(self, tmp_path: Path) -> None:
        with served(tmp_path / "s", device_uuid="cpu1") as server:
            path_only = SocketAddress(server.address.path)
            with pytest.raises(WeightCacheUnavailable) as caught:
                attach(path_only, fingerprint(), device="cpu:0")
            assert caught.value.reason == "wrong_gpu"
            attach(server.address, fingerprint()).close()  # an address derived from the device knows it

    def test_a_derived_address_of_a_device_that_is_not_here_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(WeightCacheUnavailable) as caught:
            attach(SocketAddress(tmp_path / "w.sock", device_uuid="GPU-1234"), fingerprint())
        assert caught.value.reason == "wrong_gpu"

    def test_an_unsupported_device_is_told_even_with_fallback_and_without_a_daemon(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedPlatformForIPCError):
            attach(SocketAddress(tmp_path / "w.sock"), fingerprint(), device="mps", fallback=True)

    def test_a_server_is_not_wired_to_another_gpus_socket(self, tmp_path: Path) -> None:
        exported = export_model(loaded(), device="cpu")
        with pytest.raises(ConfigurationError, match="GPU-1"):
            WeightServer(exported, fingerprint(), SocketAddress(tmp_path / "w", device_uuid="GPU-1"))
        exported.release()


class TestCheckpoints:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        made = tmp_path / "model"
        made.mkdir()
        (made / "model.bin").write_bytes(b"weights" * 100)
        return made

    def key(self, folder: Path, tmp_path: Path) -> CheckpointIdentity:
        return digest_checkpoint(folder, cache=DigestCache(tmp_path / "digests"))

    def test_an_engine_with_other_files_is_asked_for_their_digest_and_then_let_in(
        self, folder: Path, tmp_path: Path
    ) -> None:
        copy = tmp_path / "copy"
        copy.mkdir()
        (copy / "model.bin").write_bytes(b"weights" * 100)
        asked: list[AnyDigest] = []

        def digest(mode: AnyDigest) -> CheckpointIdentity:
            asked.append(mode)
            return digest_checkpoint(copy, mode=mode, cache=DigestCache(tmp_path / "digests"))

        with served(tmp_path / "s", key=fingerprint(checkpoint=self.key(folder, tmp_path))) as server:
            theirs = fingerprint(checkpoint=stat_checkpoint(copy))
            attach(server.address, theirs, digest=digest).close()
            assert asked == ["sketch", "full"]
            with pytest.raises(FingerprintMismatch) as caught:
                attach(server.address, theirs)  # it can't compute one
            assert caught.value.fields == ("checkpoint",)

    def test_a_retrained_checkpoint_is_told_by_its_sketch_without_hashing_all_of_it(
        self, folder: Path, tmp_path: Path
    ) -> None:
        """A fallback must cost next to nothing, and hashing 16 GB takes seconds."""
        asked: list[AnyDigest] = []

        def digest(mode: AnyDigest) -> CheckpointIdentity:
            asked.append(mode)
            return digest_checkpoint(folder, mode=mode, cache=DigestCache(tmp_path / "digests"))

        with served(tmp_path / "s", key=fingerprint(checkpoint=self.key(folder, tmp_path))) as server:
            (folder / "model.bin").write_bytes(b"Weights" * 100)
            with pytest.raises(FingerprintMismatch) as caught:
                attach(server.address, fingerprint(checkpoint=stat_checkpoint(folder)), digest=digest)
            assert asked == ["sketch"]
            assert caught.value.fields == ("checkpoint",)

    def test_a_change_that_the_sketch_does_not_see_is_refused_by_the_digest(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "model.bin").touch()
        os.truncate(folder / "model.bin", 32 << 20)
        key = fingerprint(checkpoint=self.key(folder, tmp_path))
        asked: list[AnyDigest] = []

        def digest(mode: AnyDigest) -> CheckpointIdentity:
            asked.append(mode)
            return digest_checkpoint(folder, mode=mode, cache=DigestCache(tmp_path / "digests"))

        with served(tmp_path / "s", key=key) as server:
            with (folder / "model.bin").open("r+b") as out:
                out.seek(10 << 20)
                out.write(b"1")
            with pytest.raises(FingerprintMismatch) as caught:
                attach(server.address, fingerprint(checkpoint=stat_checkpoint(folder)), digest=digest)
            assert asked == ["sketch", "full"]
            assert caught.value.fields == ("checkpoint",)

    def test_a_retrained_checkpoint_is_refused_by_that_name(self, folder: Path, tmp_path: Path) -> None:
        key = fingerprint(checkpoint=self.key(folder, tmp_path))
        with served(tmp_path / "s", key=key) as server:
            (folder / "model.bin").write_bytes(b"Weights" * 100)
            theirs = fingerprint(checkpoint=stat_checkpoint(folder))
            with pytest.raises(FingerprintMismatch) as caught:
                attach(server.address, theirs, digest=lambda mode: self.key(folder, tmp_path), fallback=False)
            assert caught.value.reason == "mismatch"
            assert caught.value.fields == ("checkpoint",)

    def test_the_digest_is_not_asked_for_when_something_else_differs_anyway(self, folder: Path, tmp_path: Path) -> None:
        def never(mode: AnyDigest) -> CheckpointIdentity:
            raise AssertionError("hashed for nothing")

        with served(tmp_path / "s", key=fingerprint(checkpoint=self.key(folder, tmp_path))) as server:
            theirs = fingerprint(checkpoint=stat_checkpoint(folder), tp_size=2)
            with pytest.raises(FingerprintMismatch) as caught:
                attach(server.address, theirs, digest=never)
            assert "tp_size" in caught.value.fields

    def test_the_very_files_are_recognised_without_a_digest(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = time.time_ns
        monkeypatch.setattr("warmseed.daemon.weights.checkpoint.time.time_ns", lambda: real() + 10**10)
        with served(tmp_path / "s", key=fingerprint(checkpoint=self.key(folder, tmp_path))) as server:
            attach(server.address, fingerprint(checkpoint=stat_checkpoint(folder))).close()


class TestChangedWeights:
    """What happens on memory that engines can write to, as a GPU's is: played by segments that report checksums."""

    class Writable(MemfdTransport):
        def allocate(self, nbytes: int, device: torch.device) -> MemfdSegment:
            return WritableSegment(nbytes)

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[WeightServer]:
        exported = export_model(loaded(), device="cpu", transport=self.Writable())
        with served(tmp_path / "s", exported=exported) as server:
            yield server

    def test_are_reported_by_name_when_the_engine_goes_and_served_to_nobody_after(
        self, server: WeightServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        attach(server.address, fingerprint()).close()
        attach(server.address, fingerprint()).close()
        assert server.changed == ()
        attachment = attach(server.address, fingerprint())
        segment = server.exported.segments[0]
        assert isinstance(segment, WritableSegment)
        segment.sums = (9,)
        attachment.close()
        eventually(lambda: bool(server.changed), "nobody noticed")
        assert "embed.weight" in server.changed
        with pytest.raises(WeightCacheUnavailable, match="in place") as caught:
            attach(server.address, fingerprint())
        assert caught.value.reason == "error"
        assert "changed" in caplog.text

    def test_are_looked_for_when_an_engine_has_gone_and_never_while_one_attaches(self, server: WeightServer) -> None:
        segment = server.exported.segments[0]
        assert isinstance(segment, WritableSegment)
        before = segment.looks
        first = attach(server.address, fingerprint())
        second = attach(server.address, fingerprint())
        assert segment.looks == before
        first.close()
        eventually(lambda: segment.looks == before + 1, "nobody looked")
        second.close()
        eventually(lambda: segment.looks == before + 2, "nobody looked")
        attach(server.address, fingerprint()).close()

    def test_that_can_not_be_read_are_served_to_nobody(self, server: WeightServer) -> None:
        segment = server.exported.segments[0]
        assert isinstance(segment, WritableSegment)
        attachment = attach(server.address, fingerprint())
        segment.broken = True
        attachment.close()
        eventually(lambda: bool(server.changed), "nobody noticed")
        with pytest.raises(WeightCacheUnavailable):
            attach(server.address, fingerprint())
        assert get_memory(server.address).leases == 0


class WritableSegment(MemfdSegment):
    sums: tuple[int, ...] = (1,)
    looks = 0
    broken = False

    def checksum(self) -> tuple[int, ...]:  # type: ignore[override]
        self.looks += 1
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")
        return self.sums


def test_a_fault_of_the_daemons_own_costs_one_engine_its_connection_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(tmp_path / "s") as server:
        with monkeypatch.context() as broken:
            broken.setattr(server, "_refusal", None)
            with pytest.raises(WeightCacheUnavailable) as caught:
                attach(server.address, fingerprint())
            assert caught.value.reason == "error"
        attach(server.address, fingerprint()).close()
    assert "failed" in caplog.text


class TestSeveralAddresses:
    def test_a_private_address_serves_before_the_public_one_exists(self, tmp_path: Path) -> None:
        import asyncio

        exported = export_model(loaded(), device="cpu")
        public = SocketAddress(private_folder(tmp_path / "public") / "w.sock")
        private = SocketAddress(private_folder(tmp_path / "private") / "w.sock")
        server_ready: list[bool] = []

        async def run() -> None:
            server = WeightServer(exported, fingerprint(), public)
            async with server.serving(private):
                attached = await asyncio.to_thread(attach, private, fingerprint())
                attached.close()
                server_ready.append(public.path.exists())
            async with server.serving():
                server_ready.append(public.path.exists())
                server_ready.append(private.path.exists())
                (await asyncio.to_thread(attach, public, fingerprint())).close()

        asyncio.run(run())
        assert server_ready == [False, True, False]
        exported.release()

    def test_an_address_is_left_once_what_its_last_engine_leaves_behind_is_settled(self, tmp_path: Path) -> None:
        """Nobody serves on before a rehearsal that died is judged; a judgment cut off would take back half."""
        import asyncio

        exported = export_model(loaded(), device="cpu")
        private = SocketAddress(private_folder(tmp_path / "private") / "w.sock")

        async def run() -> None:
            heard, leave, settled = asyncio.Event(), asyncio.Event(), asyncio.Event()
            judged: list[int] = []

            async def on_detached(lease: Lease) -> None:
                heard.set()
                await settled.wait()
                judged.append(lease.pid)

            async def serve() -> None:
                server = WeightServer(exported, fingerprint(), private, on_detached=on_detached)
                async with server.serving(private):
                    (await asyncio.to_thread(attach, private, fingerprint())).close()
                    await leave.wait()

            async with asyncio.timeout(20):
                serving = asyncio.create_task(serve())
                await heard.wait()
                leave.set()
                done, _ = await asyncio.wait({serving}, timeout=0.3)
                assert not done
                settled.set()
                await serving
            assert judged == [os.getpid()]

        asyncio.run(run())
        exported.release()

    def test_an_address_in_use_stops_the_server_before_it_serves(self, tmp_path: Path) -> None:
        refused = pytest.raises(ConfigurationError, match="another daemon")
        with served(tmp_path / "s"), refused, served(tmp_path / "s"):
            pytest.fail("two daemons serve one address")


def test_without_fallback_the_wait_for_a_daemon_ends_with_its_timeout(tmp_path: Path) -> None:
    address = SocketAddress(private_folder(tmp_path / "s") / "w.sock")
    start = time.monotonic()
    with pytest.raises(WeightCacheUnavailable) as caught:
        attach(address, fingerprint(), fallback=False, state_timeout_s=0.4)
    assert caught.value.reason == "absent"
    assert 0.2 < time.monotonic() - start < 5


def test_a_full_backlog_is_waited_for_and_then_given_up(tmp_path: Path) -> None:
    path = private_folder(tmp_path / "s") / "w.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(0)
    waiting = []
    for _ in range(2):
        waiting.append(socket.socket(socket.AF_UNIX))
        waiting[-1].setblocking(False)
        try:
            waiting[-1].connect(str(path))
        except BlockingIOError:
            break
    with pytest.raises(WeightCacheUnavailable) as caught:
        connect(SocketAddress(path), timeout_s=0.2)
    assert caught.value.reason == "timeout"
    for each in [*waiting, listener]:
        each.close()


def test_every_refusal_has_a_reason_from_the_documented_list() -> None:
    from warmseed.daemon.weights.errors import REASONS

    assert set(REASONS) == {"absent", "refused", "timeout", "mismatch", "wrong_gpu", "released", "error"}
    assert msgspec.json.encode(REASONS)
    assert ServerLimits().exchange_s < 15
