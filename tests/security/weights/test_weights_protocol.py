"""What strangers and liars may send on the socket, in either direction, and what becomes of it."""

from __future__ import annotations

import array
import contextlib
import gc
import os
import pickletools
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from tests.support.weights_model import fingerprint
from tests.support.weights_serving import eventually, private_folder, served

from warmseed.daemon.weights import frames
from warmseed.daemon.weights.client import attach, get_memory
from warmseed.daemon.weights.errors import WeightCacheUnavailable
from warmseed.daemon.weights.export import export_model
from warmseed.daemon.weights.layout import SegmentRecord, TensorRecord
from warmseed.daemon.weights.memfd import MemfdSegment
from warmseed.daemon.weights.messages import Answer, GetMemory, GetState, Memory, Refusal, State, Watch, Watching
from warmseed.daemon.weights.server import ServerLimits, WeightServer
from warmseed.daemon.weights.socket import DeviceLock, SocketAddress, bind_private, connect

SHORT = ServerLimits(exchange_s=0.3)
PICKLE = b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R."


def frame(body: bytes, *, magic: bytes = b"WSW1", length: int | None = None) -> bytes:
    return magic + struct.pack("!I", len(body) if length is None else length) + body


def served_honestly(server: WeightServer) -> None:
    with attach(server.address, fingerprint(), state_timeout_s=20) as attachment:
        assert len(attachment.tensors) > 5


BAD_REQUESTS = {
    "pickle": PICKLE,
    "framed pickle": frame(PICKLE),
    "vllm's framing": struct.pack("!Q", len(PICKLE)) + PICKLE,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "length over the limit": frame(b"", length=(16 << 20) + 1),
    "largest length": frame(b"", length=0xFFFFFFFF),
    "empty message": frame(b""),
    "no map": frame(msgspec.msgpack.encode([1, 2])),
    "unknown request": frame(msgspec.msgpack.encode({"request": "shutdown"})),
    "an answer": frame(msgspec.msgpack.encode({"answer": "done"})),
    "unknown field": frame(msgspec.msgpack.encode({"request": "get_memory", "x": 1})),
    "bool for a number": frame(msgspec.msgpack.encode({"request": "report", "seconds": True})),
    "nan": frame(msgspec.msgpack.encode({"request": "report", "seconds": float("nan")})),
    "missing fields": frame(msgspec.msgpack.encode({"request": "get_state"})),
    "deep nesting": frame(b"\x91" * 200_000),
    "huge claimed map": frame(b"\xdf\xff\xff\xff\xff"),
    "trailing bytes": frame(msgspec.msgpack.encode({"request": "get_memory"}) + b"\xc0"),
    "half a message": frame(b"\x81", length=100)[:-1],
    "not utf-8": frame(b"\x81\xa7request\xa2\xff\xfe"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BAD_REQUESTS))
def test_a_malformed_request_costs_its_sender_the_connection_and_nobody_else_anything(
    tmp_path: Path, name: str
) -> None:
    with served(tmp_path / "s", limits=ServerLimits(exchange_s=2)) as server:
        with connect(server.address, timeout_s=5) as stranger:
            stranger.sendall(BAD_REQUESTS[name])
            answers = answers_until_the_end(stranger)
        assert all(isinstance(answer, Refusal) and answer.reason == "error" for answer in answers)
        assert len(answers) <= 1
        served_honestly(server)


def answers_until_the_end(connection: socket.socket) -> list[object]:
    """Every message the daemon sends before it closes, which it must do."""
    found: list[object] = []
    deadline = time.monotonic() + 10
    with contextlib.suppress(ConnectionResetError):  # closed with bytes of ours unread
        while answer := frames.read(connection, Answer, limit=1 << 20, who="daemon", deadline=deadline):
            found.append(answer)
    return found


def test_silent_clients_hold_up_nobody_and_are_cut_off(tmp_path: Path) -> None:
    with served(tmp_path / "s", limits=SHORT) as server:
        silent = [connect(server.address, timeout_s=5) for _ in range(20)]
        start = time.monotonic()
        served_honestly(server)
        assert time.monotonic() - start < 5
        for stranger in silent:
            stranger.settimeout(10)
            assert stranger.recv(1) == b""
            stranger.close()


def test_a_client_that_sends_byte_by_byte_meets_the_deadline_of_the_whole_request(tmp_path: Path) -> None:
    with served(tmp_path / "s", limits=SHORT) as server, connect(server.address, timeout_s=5) as slow:
        start = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for byte in frame(b"\x00" * 1000):
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
            pytest.fail("a request that takes for ever was taken")
        assert time.monotonic() - start < 10


def test_a_client_that_does_not_read_its_answer_is_cut_off(tmp_path: Path) -> None:
    limits = ServerLimits(exchange_s=5, state_s=0.3)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(1)) for _ in range(20_000))
    with served(tmp_path / "s", exported=export_model(model, device="cpu"), limits=limits) as server:
        with connect(server.address, timeout_s=5) as deaf:
            frames.send(deaf, GetState(fingerprint(), "cpu0", 1), deadline=time.monotonic() + 5)
            eventually(lambda: len(server.leases) == 1, "no lease was taken")
            eventually(lambda: not server.leases, "a deaf engine keeps its lease")
        with attach(server.address, fingerprint()) as attachment:
            assert len(attachment.tensors) == 20_000


def test_an_engine_that_never_says_it_maps_loses_its_lease(tmp_path: Path) -> None:
    with served(tmp_path / "s", limits=SHORT) as server, connect(server.address, timeout_s=5) as hung:
        frames.send(hung, GetState(fingerprint(), "cpu0", 1), deadline=time.monotonic() + 5)
        eventually(lambda: len(server.leases) == 1, "no lease was taken")
        eventually(lambda: not server.leases, "a hung engine keeps its lease")


def test_more_connections_than_allowed_are_told_so(tmp_path: Path) -> None:
    with served(tmp_path / "s", limits=ServerLimits(connections=2)) as server:
        held = [connect(server.address, timeout_s=5) for _ in range(2)]
        eventually(lambda: len(server._connections) == 2, "connections were not accepted")
        with pytest.raises(WeightCacheUnavailable, match="too many") as caught:
            get_memory(server.address)
        assert caught.value.reason == "refused"
        held[0].close()
        eventually(lambda: len(server._connections) == 1, "a closed connection keeps its slot")
        assert get_memory(server.address).tensors
        held[1].close()


def test_descriptors_nobody_asked_for_are_not_taken(tmp_path: Path) -> None:
    with served(tmp_path / "s", limits=ServerLimits(exchange_s=5)) as server:
        eventually(lambda: not server._connections, "")
        before = len(os.listdir("/proc/self/fd"))
        with connect(server.address, timeout_s=5) as stranger:
            rights = array.array("i", [0] * 200)
            message = frames.encode(GetMemory())
            stranger.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            answer = frames.read(stranger, Answer, limit=1 << 20, who="daemon", deadline=time.monotonic() + 5)
            assert isinstance(answer, Memory)
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "descriptors stay open")


# The engine's side: a daemon that lies ---------------------------------------------------------


@contextmanager
def lying_daemon(folder: Path, act: Callable[[socket.socket], None]) -> Iterator[SocketAddress]:
    """Something at the address that reads one request and then does `act`."""
    address = SocketAddress(private_folder(folder) / "w.sock")
    with DeviceLock(address) as lock:
        bound = bind_private(lock)
        bound.listener.setblocking(True)
        bound.listener.settimeout(20)

        def work() -> None:
            accepted, _ = bound.listener.accept()
            with accepted:
                accepted.settimeout(20)
                head = accepted.recv(8, socket.MSG_WAITALL)
                accepted.recv(struct.unpack("!4sI", head)[1], socket.MSG_WAITALL)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the engine has hung up
                    act(accepted)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield address
        finally:
            thread.join(20)
            bound.withdraw()


def state(tensors: list[TensorRecord] | None = None, **changes: object) -> State:
    fields: dict[str, object] = {
        "device_uuid": "cpu0",
        "pid": 1,
        "nbytes": 4096,
        "segments": (SegmentRecord("memfd", 4096),),
        "tensors": tuple(tensors or [TensorRecord("w", "parameter", "uint8", (4096,), (1,), 0, 0)]),
    }
    return State(**{**fields, **changes})  # type: ignore[arg-type]


def send_state(connection: socket.socket, message: State, descriptors: list[int], *, batch: int = 64) -> None:
    connection.sendall(frames.encode(message))
    for start in range(0, len(descriptors), batch):
        rights = array.array("i", descriptors[start : start + batch])
        connection.sendmsg([b"D"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    connection.settimeout(5)
    try:
        connection.recv(1 << 16)  # the watch request, or the end
        connection.sendall(frames.encode(Watching(1)))
    except OSError:
        pass


def refused_by_engine(folder: Path, act: Callable[[socket.socket], None], **options: object) -> WeightCacheUnavailable:
    """What `attach` says; and it leaves no descriptor open."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with lying_daemon(folder, act) as address, pytest.raises(WeightCacheUnavailable) as caught:
        attach(address, fingerprint(), **{"state_timeout_s": 10.0, **options})  # type: ignore[arg-type]
    error = caught.value
    caught.value.__traceback__ = None
    del caught
    assert len(os.listdir("/proc/self/fd")) <= before
    return error


@pytest.fixture
def sealed() -> Iterator[int]:
    segment = MemfdSegment(4096)
    segment.seal()
    yield segment.descriptor
    segment.close()


@pytest.mark.parametrize(
    "record",
    [
        TensorRecord("w", "parameter", "object", (4096,), (1,), 0, 0),
        TensorRecord("w", "parameter", "uint8", (4097,), (1,), 0, 0),
        TensorRecord("w", "parameter", "uint8", (1,), (1,), 0, 4096),
        TensorRecord("w", "parameter", "uint8", (1,), (1,), 7, 0),
        TensorRecord("w", "parameter", "int64", (1,), (1,), 0, 4),
        TensorRecord("w", "parameter", "float32", (2, 2), (1 << 40, 1), 0, 0),
    ],
)
def test_tensors_that_can_not_lie_where_they_are_said_to_are_refused_before_any_torch_call(
    tmp_path: Path, record: TensorRecord, sealed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("frombuffer", "empty", "as_tensor"):
        monkeypatch.setattr(torch, name, None)
    error = refused_by_engine(tmp_path / "s", lambda c: send_state(c, state([record]), [sealed]))
    assert error.reason == "error"
    assert "'w'" in str(error)


def test_a_negative_size_is_no_message_at_all(tmp_path: Path, sealed: int) -> None:
    record = TensorRecord("w", "parameter", "uint8", (-1,), (1,), 0, 0)
    assert "malformed" in str(refused_by_engine(tmp_path / "s", lambda c: send_state(c, state([record]), [sealed])))


def test_a_state_for_another_device_is_refused_before_it_is_mapped(tmp_path: Path, sealed: int) -> None:
    wrong = state(device_uuid="GPU-9")
    assert refused_by_engine(tmp_path / "s", lambda c: send_state(c, wrong, [sealed])).reason == "wrong_gpu"


@pytest.mark.parametrize("count", [0, 2, 250])
def test_too_many_or_too_few_descriptors_are_refused_and_all_closed(tmp_path: Path, count: int, sealed: int) -> None:
    error = refused_by_engine(
        tmp_path / "s", lambda c: send_state(c, state(), [sealed] * count, batch=250), state_timeout_s=1.0
    )
    assert error.reason in ("error", "timeout")


@pytest.mark.parametrize("kind", ["folder", "file", "unsealed", "short", "half sealed", "socket", "pipe"])
def test_a_descriptor_that_is_no_sealed_memory_of_that_size_is_refused(tmp_path: Path, kind: str) -> None:
    opened: list[int] = []
    match kind:
        case "folder":
            opened.append(os.open(tmp_path, os.O_RDONLY))
        case "file":
            (tmp_path / "f").write_bytes(b"\0" * 4096)
            opened.append(os.open(tmp_path / "f", os.O_RDWR))
        case "unsealed" | "half sealed":
            import fcntl

            opened.append(os.memfd_create("x", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC))
            os.ftruncate(opened[0], 4096)
            if kind == "half sealed":
                fcntl.fcntl(opened[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        case "short":
            segment = MemfdSegment(4095)
            segment.seal()
            opened.append(os.dup(segment.descriptor))
            segment.close()
        case "socket":
            one, two = socket.socketpair()
            opened += [one.detach(), two.detach()]
        case "pipe":
            opened += os.pipe()
    error = refused_by_engine(tmp_path / "s", lambda c: send_state(c, state(), opened[:1]))
    assert error.reason == "error"
    assert "nothing is mapped" in str(error)
    for descriptor in opened:
        os.close(descriptor)


@pytest.mark.parametrize(
    "answer",
    [
        b"", PICKLE, frame(PICKLE), frame(b"", length=0xFFFFFFFF), frame(b"\xc0" * 10, length=500),
        frames.encode(Watching(1)), frames.encode(GetMemory()), frame(b"\x91" * 100_000),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_an_error_and_no_hang(tmp_path: Path, answer: bytes) -> None:
    assert refused_by_engine(tmp_path / "s", lambda c: c.sendall(answer)).reason == "error"


def test_a_daemon_that_never_answers_costs_the_engine_its_timeout_only(tmp_path: Path) -> None:
    done = threading.Event()
    start = time.monotonic()
    error = refused_by_engine(tmp_path / "s", lambda c: done.wait(0.6), state_timeout_s=0.2)
    assert error.reason == "timeout"
    assert time.monotonic() - start < 5


def test_received_descriptors_are_not_inherited_by_children(sealed: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendmsg([b"D"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sealed]))])
        (received,) = frames.read_descriptors(ours, 1, who="daemon", deadline=time.monotonic() + 5)
        assert not os.get_inheritable(received)
        os.close(received)


# No pickle ---------------------------------------------------------------------------------------


def test_no_module_of_the_weight_cache_can_unpickle() -> None:
    assert "REDUCE" in {code.name for code, _, _ in pickletools.genops(PICKLE)}  # the bait is live
    package = Path(frames.__file__).parent
    for path in package.glob("*.py"):
        assert not re.search(
            r"\b(import pickle|pickle\.|marshal|torch\.load|reduce_tensor|eval\()", path.read_text()
        ), path


def test_a_whole_attach_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was unpickled")

    for name in ("_pickle.loads", "pickle.loads", "pickle.load", "pickle.Unpickler"):
        monkeypatch.setattr(name, never)
    with served(tmp_path / "s") as server:
        served_honestly(server)


def test_the_protocol_side_works_without_torch_in_the_process() -> None:
    modules = "frames messages layout fingerprint checkpoint socket loader_config errors lease safetensors"
    code = "import sys\n" + "\n".join(f"import warmseed.daemon.weights.{m}" for m in modules.split())
    code += "\nraise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_watching_without_a_lease_is_allowed_and_holds_nothing(tmp_path: Path) -> None:
    with served(tmp_path / "s", limits=SHORT) as server, connect(server.address, timeout_s=5) as watcher:
        frames.send(watcher, Watch(), deadline=time.monotonic() + 5)
        answer = frames.read(watcher, Answer, limit=1 << 20, who="daemon", deadline=time.monotonic() + 5)
        assert isinstance(answer, Watching)
        time.sleep(0.05)
        assert get_memory(server.address).leases == 0
