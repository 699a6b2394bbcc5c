"""Starts that can't work: exit code 2, one line that names the fix, nothing left running."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fake_checkpoint import fake_checkpoint, safetensors
from tests.support.real_nodes import COMMAND, PATIENCE, RealNode, new_token, refused

from warmseed.daemon.settings.paths import state_folder
from warmseed.daemon.weights.socket import DeviceLock, SocketAddress

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RealNode]:
    tmp_path.chmod(0o700)
    found = RealNode(tmp_path / "node", fake_checkpoint(tmp_path / "model"))
    yield found
    found.end()


def refuses(node: RealNode) -> str:
    """The one line of error of a start on `node`; and that nothing of it is left."""
    error = refused(node.preload(), node.environ)
    deadline = time.monotonic() + PATIENCE
    while node.running():
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.02)
    assert node.unfinished() == []
    return error


def test_a_model_folder_that_is_not_there(node: RealNode) -> None:
    node.model = node.folder / "nowhere"
    error = refuses(node)
    assert f"--model {node.model}: no such folder; give the folder that holds config.json" in error


def test_a_model_folder_without_safetensors(node: RealNode) -> None:
    (node.model / "model.safetensors").rename(node.model / "pytorch_model.bin")
    assert "holds no *.safetensors" in refuses(node)


def test_a_model_folder_without_a_configuration(node: RealNode) -> None:
    (node.model / "config.json").unlink()
    assert "config.json: No such file or directory; give the folder that holds config.json" in refuses(node)


def test_truncated_safetensors(node: RealNode) -> None:
    (node.model / "model.safetensors").write_bytes(safetensors()[:-1])
    error = refuses(node)
    assert "model.safetensors: its tensors end at byte 8, but the file holds 7" in error
    assert "download it again" in error


def test_safetensors_cut_within_the_header(node: RealNode) -> None:
    (node.model / "model.safetensors").write_bytes(safetensors()[:20])
    assert "it is truncated or no safetensors file" in refuses(node)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_socket_folder_of_another_user(node: RealNode) -> None:
    node.sockets.mkdir(mode=0o700)
    os.chown(node.sockets, 65534, 65534)
    error = refuses(node)
    assert "belongs to user 65534" in error
    assert "use a sub-folder of your own" in error


def test_a_socket_folder_behind_a_link(node: RealNode) -> None:
    (node.folder / "elsewhere").mkdir(mode=0o700)
    node.sockets.symlink_to(node.folder / "elsewhere")
    assert "sockets are not looked for behind links" in refuses(node)
    assert list((node.folder / "elsewhere").iterdir()) == []


def test_a_socket_folder_that_others_may_write_to(node: RealNode) -> None:
    node.sockets.mkdir()
    node.sockets.chmod(0o777)
    assert "chmod 700 it" in refuses(node)


def test_a_device_that_another_daemon_has(node: RealNode) -> None:
    with DeviceLock(SocketAddress.for_device("cpu0", directory=node.sockets)):
        error = refuses(node)
    assert f"belongs to another daemon (pid {os.getpid()}); stop that one first" in error


def test_a_cache_folder_that_others_may_write_to(node: RealNode) -> None:
    assert node.cache is not None
    node.cache.mkdir()
    node.cache.chmod(0o777)
    error = refuses(node)
    assert "chmod 700 it or name another folder" in error


def test_a_history_of_generations_that_cannot_be_read(node: RealNode) -> None:
    assert node.cache is not None
    history = state_folder(node.cache) / "highest.json"
    node.cache.mkdir(mode=0o700)
    history.mkdir(mode=0o700, parents=True)
    error = refuses(node)
    assert f"{history} can't be read (Is a directory)" in error
    assert "remove it" in error


def test_a_weak_token(node: RealNode) -> None:
    token = node.folder / "token"
    token.write_text("hunter2\n")
    token.chmod(0o600)
    node.extra = ("--seed-token-file", str(token), "--seed-listen-port", "29600")
    error = refuses(node)
    assert "too weak" in error
    assert "warmseed token new" in error
    assert "hunter2" not in error


def test_a_token_file_that_is_not_there(node: RealNode) -> None:
    node.extra = ("--seed-token-file", str(node.folder / "none"), "--seed-listen-port", "29600")
    assert str(node.folder / "none") in refuses(node)


def test_a_token_file_that_others_can_read(node: RealNode) -> None:
    token = new_token(node.folder)
    token.chmod(0o644)
    node.extra = ("--seed-token-file", str(token), "--seed-listen-port", "29600")
    assert f"chmod 600 {token}" in refuses(node)


def test_a_misspelt_store(node: RealNode) -> None:
    node.extra = ("--warmup-cache-stores", "moonkake", "--seed-token-file", str(new_token(node.folder)))
    assert "no store is called 'moonkake'; did you mean 'mooncake'?" in refuses(node)


def test_a_shared_folder_that_is_not_mounted(node: RealNode) -> None:
    missing = node.folder / "mnt"
    node.extra = ("--warmup-cache-stores", f"file:{missing}", "--seed-token-file", str(new_token(node.folder)))
    assert f"{missing} is not a folder; create or mount it" in refuses(node)


def test_a_file_of_trusted_keys_that_is_not_there(node: RealNode) -> None:
    node.extra = ("--seed-trusted-keys", str(node.folder / "keys"))
    assert f"--seed-trusted-keys {node.folder / 'keys'} can't be read" in refuses(node)


def test_a_data_type_that_there_is_not(node: RealNode) -> None:
    node.extra = ("--dtype", "bfloat61")
    assert "did you mean bfloat16?" in refuses(node)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "tpu"), "--device tpu: choose cpu, cuda or cuda:N"),
        (("--dtype", "auto"), "choose one of bfloat16"),
        (("--shape-buckets", "16,many"), "--shape-buckets 16,many: numbers of tokens"),
        (("--shape-buckets", "0"), "a sequence has at least 1 token"),
        (("--load-format", "sharded"), "choose ipc_cache or disk"),
        (("--model-loader-extra-config", "{"), "is not JSON"),
        (("--model-loader-extra-config", '{"sockets_dir": "/x"}'), "did you mean 'socket_dir'?"),
    ],
)
def test_an_engine_says_in_one_line_what_it_can_not_be(node: RealNode, arguments: tuple[str, ...], said: str) -> None:
    assert said in refused([*COMMAND, "run", "--model", str(node.model), *arguments], node.environ)


def test_an_engine_loads_no_compiled_code_from_a_folder_that_others_may_write_to(node: RealNode) -> None:
    assert node.cache is not None
    node.cache.mkdir()
    node.cache.chmod(0o777)
    command = [*COMMAND, "run", "--model", str(node.model), "--cache-root", str(node.cache)]
    assert "nobody else may write to it" in refused(command, node.environ)
