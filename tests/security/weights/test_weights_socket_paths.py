"""Sockets, folders and locks that are not what they must be, and who may be at the other end."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.weights_serving import private_folder

from warmseed.daemon.weights.errors import SocketPathRefused, WeightCacheUnavailable
from warmseed.daemon.weights.socket import (
    DeviceLock,
    SocketAddress,
    bind_private,
    check_peer,
    connect,
    default_socket_dir,
    socket_path,
)
from warmseed.errors import ConfigurationError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return private_folder(tmp_path / "sockets")


@pytest.fixture
def address(folder: Path) -> SocketAddress:
    return SocketAddress(folder / "weights.sock", private=True)


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def refused(address: SocketAddress) -> list[str]:
    """What daemon and engine say of the address; both must refuse it."""
    said = []
    with pytest.raises(ConfigurationError) as daemon, DeviceLock(address) as lock:
        bind_private(lock).withdraw()
    said.append(str(daemon.value))
    with pytest.raises(WeightCacheUnavailable) as engine:
        connect(address, timeout_s=1)
    assert engine.value.reason == "refused"
    said.append(str(engine.value))
    return said


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o750, 0o705, 0o711])
def test_a_private_folder_open_to_others_is_refused_with_its_mode(address: SocketAddress, mode: int) -> None:
    address.path.parent.chmod(mode)
    assert all(f"{mode:04o}" in text for text in refused(address))


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_an_operators_folder_that_others_can_write_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert all("may write there" in text for text in refused(SocketAddress(folder / "w.sock")))


def test_an_operators_folder_that_others_can_only_read_is_used_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.chmod(0o755)
    with DeviceLock(SocketAddress(folder / "w.sock")):
        assert "chmod 700" in caplog.text


def test_a_folder_behind_a_symbolic_link_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert all("links" in text for text in refused(SocketAddress(tmp_path / "link" / "w.sock", private=True)))


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SocketPathRefused):
        DeviceLock(SocketAddress(tmp_path / "file" / "w.sock")).acquire()


def test_a_folder_of_another_user_is_refused(address: SocketAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: me + 1)
    assert all(f"belongs to user {me}" in text for text in refused(address))


def test_a_folder_under_one_that_others_can_rename_is_refused(tmp_path: Path) -> None:
    open_parent = tmp_path / "open"
    private_folder(open_parent / "mine")
    open_parent.chmod(0o777)
    assert all("replace it" in text for text in refused(SocketAddress(open_parent / "mine" / "w.sock")))
    open_parent.chmod(0o1777)  # sticky, as the temporary folder is
    DeviceLock(SocketAddress(open_parent / "mine" / "w.sock")).acquire()


@pytest.mark.parametrize("kind", ["file", "folder", "link", "fifo"])
def test_what_is_no_socket_is_neither_connected_to_nor_removed(
    address: SocketAddress, kind: str, tmp_path: Path
) -> None:
    real = listening(tmp_path / "real.sock")
    match kind:
        case "file":
            address.path.write_text("precious")
        case "folder":
            address.path.mkdir()
        case "link":
            address.path.symlink_to(tmp_path / "real.sock")
        case "fifo":
            os.mkfifo(address.path)
    before = address.path.lstat()
    refused(address)
    assert address.path.lstat().st_ino == before.st_ino
    real.close()


@pytest.mark.parametrize("name", ["x" * 65, "ü" * 40])
def test_a_name_too_long_for_a_socket_address_is_refused_at_once(folder: Path, name: str) -> None:
    with pytest.raises(SocketPathRefused, match="64 bytes"):
        DeviceLock(SocketAddress(folder / name)).acquire()


def test_a_path_longer_than_a_socket_address_works_all_the_same(folder: Path) -> None:
    deep = SocketAddress(folder / ("d" * 100) / ("e" * 100) / "weights.sock", private=True)
    with DeviceLock(deep) as lock:
        bound = bind_private(lock)
        connect(deep, timeout_s=1).close()
        bound.withdraw()
    assert not deep.path.exists()


def test_the_socket_is_the_owners_alone_whatever_the_umask(address: SocketAddress) -> None:
    old = os.umask(0)
    try:
        with DeviceLock(address) as lock:
            bound = bind_private(lock)
            assert stat.S_IMODE(address.path.stat().st_mode) == 0o600
            assert stat.S_IMODE(address.lock_path.stat().st_mode) == 0o600
            bound.withdraw()
    finally:
        os.umask(old)


def test_folders_made_on_the_way_are_private(folder: Path) -> None:
    address = SocketAddress(folder / "a" / "b" / "w.sock", private=True)
    with DeviceLock(address):
        assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "a" / "b").stat().st_mode) == 0o700


class TestLock:
    def test_a_second_daemon_fails_at_once_names_the_first_and_leaves_its_socket(self, address: SocketAddress) -> None:
        with DeviceLock(address) as lock:
            bound = bind_private(lock)
            code = (
                "import sys; from pathlib import Path\n"
                "from warmseed.daemon.weights.socket import DeviceLock, SocketAddress\n"
                "DeviceLock(SocketAddress(Path(sys.argv[1]), private=True)).acquire()"
            )
            second = subprocess.run(
                [sys.executable, "-c", code, str(address)], capture_output=True, text=True, timeout=60
            )
            assert "ConfigurationError" in second.stderr
            assert f"pid {os.getpid()}" in second.stderr
            connect(address, timeout_s=1).close()
            bound.withdraw()

    def test_a_stale_socket_is_replaced_under_the_lock_only(self, address: SocketAddress) -> None:
        listening(address.path).close()
        with pytest.raises(WeightCacheUnavailable) as caught:
            connect(address, timeout_s=1)
        assert caught.value.reason == "refused"
        with pytest.raises(ConfigurationError, match="without its lock"):
            bind_private(DeviceLock(address))
        with DeviceLock(address) as lock:
            bound = bind_private(lock)
            connect(address, timeout_s=1).close()
            bound.withdraw()

    def test_a_pid_that_now_means_another_process_is_not_blamed(self, address: SocketAddress) -> None:
        holder = DeviceLock(address)
        holder.acquire()
        address.lock_path.write_text(f"{os.getpid()} 12345\n")  # our pid, but another start time
        with pytest.raises(ConfigurationError, match="is gone"):
            DeviceLock(address).acquire()
        holder.release()

    @pytest.mark.parametrize("content", ["", "x", "1 2 3", "-5 7", "99999999999999 1"])
    def test_a_damaged_lock_file_still_locks(self, address: SocketAddress, content: str) -> None:
        holder = DeviceLock(address)
        holder.acquire()
        address.lock_path.write_text(content)
        with pytest.raises(ConfigurationError, match="another daemon"):
            DeviceLock(address).acquire()
        holder.release()
        DeviceLock(address).acquire()

    def test_the_lock_goes_with_the_process(self, address: SocketAddress) -> None:
        code = (
            "import os, sys; from pathlib import Path\n"
            "from warmseed.daemon.weights.socket import DeviceLock, SocketAddress, bind_private\n"
            "lock = DeviceLock(SocketAddress(Path(sys.argv[1]), private=True)); lock.acquire(); bind_private(lock)\n"
            "print('held', flush=True); os.kill(os.getpid(), 9)"
        )
        dead = subprocess.run([sys.executable, "-c", code, str(address)], stdout=subprocess.PIPE, text=True, timeout=60)
        assert dead.stdout == "held\n"
        assert address.path.exists()
        with DeviceLock(address) as lock:
            bind_private(lock).withdraw()

    def test_a_link_in_the_locks_place_is_refused(self, address: SocketAddress, tmp_path: Path) -> None:
        (tmp_path / "victim").write_text("precious")
        address.lock_path.symlink_to(tmp_path / "victim")
        with pytest.raises(SocketPathRefused):
            DeviceLock(address).acquire()
        assert (tmp_path / "victim").read_text() == "precious"

    def test_children_started_meanwhile_do_not_inherit_the_lock(self, address: SocketAddress) -> None:
        lock = DeviceLock(address)
        lock.acquire()
        with subprocess.Popen(
            [sys.executable, "-c", "print(1, flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=False,
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()  # the program runs: what is closed on exec is closed
            lock.release()
            DeviceLock(address).acquire()
            child.kill()

    def test_what_a_daemon_killed_before_the_rename_left_behind_is_swept(self, address: SocketAddress) -> None:
        leftover = address.path.with_name(f".{address.path.name}.0123abcd")
        listening(leftover).close()
        other = address.path.with_name(".other.sock.0123abcd")
        listening(other).close()
        with DeviceLock(address) as lock:
            bind_private(lock).withdraw()
        assert not leftover.exists()
        assert other.exists()

    def test_a_withdrawn_socket_does_not_take_its_successors_path_along(self, address: SocketAddress) -> None:
        with DeviceLock(address) as lock:
            first = bind_private(lock)
            second = bind_private(lock)
            first.withdraw()
            connect(address, timeout_s=1).close()
            second.withdraw()


class TestPeer:
    def test_our_own_user_is_let_in_with_its_pid(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert check_peer(ours).pid == os.getpid()

    def test_another_user_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        me = os.geteuid()
        ours, theirs = socket.socketpair()
        monkeypatch.setattr("os.geteuid", lambda: me + 1)
        with ours, theirs, pytest.raises(WeightCacheUnavailable, match=f"user {me}"):
            check_peer(ours)

    def test_a_peer_the_kernel_says_nothing_about_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs = socket.socketpair()
        monkeypatch.delattr("socket.SO_PEERCRED")
        with ours, theirs, pytest.raises(WeightCacheUnavailable, match="can't be told"):
            check_peer(ours)

    def test_a_network_socket_has_no_peer_of_ours(self) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        with server, client, pytest.raises(WeightCacheUnavailable):
            check_peer(client)

    def test_the_engine_checks_the_listener_too(self, address: SocketAddress, monkeypatch: pytest.MonkeyPatch) -> None:
        def foreign(connection: socket.socket) -> None:
            raise WeightCacheUnavailable("refused", "the peer runs as another user")

        monkeypatch.setattr("warmseed.daemon.weights.socket.check_peer", foreign)
        with DeviceLock(address) as lock:
            bound = bind_private(lock)
            with pytest.raises(WeightCacheUnavailable, match="another user"):
                connect(address, timeout_s=1)
            bound.withdraw()


def test_paths_follow_the_device_and_not_its_index() -> None:
    folder = Path("/run/w")
    target, draft = socket_path(folder, "GPU-1"), socket_path(folder, "GPU-1", draft=True)
    assert target != socket_path(folder, "GPU-2")
    assert draft.name == target.stem + "_draft.sock"
    assert socket_path(folder, "GPU-1") == target
    assert len(draft.name) <= 64


def test_the_default_folder_is_one_a_user_and_under_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/somewhere")
    assert default_socket_dir() == Path(f"/somewhere/warmseed_weights_{os.geteuid()}")
    assert SocketAddress.for_device("GPU-1").private


def test_nothing_is_left_open_after_refusals(address: SocketAddress) -> None:
    before = len(os.listdir("/proc/self/fd"))
    address.path.write_text("")
    for _ in range(3):
        refused(address)
    assert len(os.listdir("/proc/self/fd")) == before
