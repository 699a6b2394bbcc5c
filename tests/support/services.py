"""Real services on loopback for the tests of stores, each a process of its own; all of them die with the test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

START = 30.0  # seconds a service may take to answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(name: str) -> str:
    """The path of an installed program; one beside this interpreter first."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed; the tests of stores need it")
    return found


def wait_until(ready: Callable[[], bool], what: str, *, seconds: float = START) -> None:
    """Poll `ready` until it is true.

    Raises:
        TimeoutError: when it is not within `seconds`.
    """
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} not ready within {seconds} s")
        time.sleep(0.02)


def http_get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bytes(answer.read())


def answers(url: str, containing: bytes = b"") -> bool:
    try:
        return containing in http_get(url)
    except (OSError, urllib.error.URLError):
        return False


def listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in `log`; killed at the end."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@dataclass
class Mooncake:
    """A master and storage nodes."""

    folder: Path
    flags: tuple[str, ...] = ()
    segment: str = "1GB"
    rpc: int = 0
    metrics: int = 0
    master: subprocess.Popen[bytes] | None = None
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start_master(self) -> None:
        self.rpc, self.metrics = self.rpc or free_port(), self.metrics or free_port()
        command = [
            program("mooncake_master"),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.rpc}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.metrics}",
            "--enable_metric_reporting=false",
            *self.flags,
        ]
        self.master = self.stack.enter_context(running(command, self.folder / "master.log", GLOG_minloglevel="2"))
        health = f"http://127.0.0.1:{self.metrics}/health"
        master = self.master

        def ready() -> bool:
            if master.poll() is not None:
                raise RuntimeError(f"mooncake_master ended with {master.returncode}; see {self.folder}/master.log")
            return listening(self.rpc) and answers(health, b'"service_ready":true')

        wait_until(ready, "mooncake_master")

    def start_node(self, metadata: str = "P2PHANDSHAKE") -> subprocess.Popen[bytes]:
        before = len(self.segments())
        command = [
            program("mooncake_client"),
            "--host=127.0.0.1",
            f"--port={free_port()}",
            f"--global_segment_size={self.segment}",
            f"--master_server_address=127.0.0.1:{self.rpc}",
            f"--metadata_server={metadata}",
            "--protocol=tcp",
        ]
        node = self.stack.enter_context(running(command, self.folder / "node.log", MC_LOG_LEVEL="ERROR"))
        self.nodes.append(node)
        wait_until(lambda: len(self.segments()) > before, "mooncake_client")
        return node

    def segments(self) -> list[str]:
        with contextlib.suppress(OSError):
            return http_get(f"http://127.0.0.1:{self.metrics}/get_all_segments").decode().split()
        return []

    def all_keys(self) -> list[str]:
        return http_get(f"http://127.0.0.1:{self.metrics}/get_all_keys").decode().split()

    def clear(self) -> None:
        url = f"http://127.0.0.1:{self.metrics}/api/v1/remove_all"
        request = urllib.request.Request(f"{url}?force=true", method="POST", data=b"{}")
        with urllib.request.urlopen(request, timeout=5) as answer:
            answer.read()

    def config(self, **more: object) -> Path:
        path = self.folder / "mooncake.json"
        path.write_text(
            json.dumps(
                {
                    "mode": "standalone-store",
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": f"127.0.0.1:{self.rpc}",
                    "protocol": "tcp",
                    "device_name": "",
                    "global_segment_size": 0,
                    "local_buffer_size": "64mb",
                    "some_future_field": {"ignored": True},
                    **more,
                }
            )
        )
        return path


@contextlib.contextmanager
def mooncake(folder: Path, *flags: str, nodes: int = 1, segment: str = "1GB") -> Iterator[Mooncake]:
    """A Mooncake cluster on loopback; about half a second."""
    with contextlib.ExitStack() as stack:
        cluster = Mooncake(folder, flags, segment, stack=stack)
        cluster.start_master()
        for _ in range(nodes):
            cluster.start_node()
        yield cluster


class RawMooncake:
    """Mooncake's own client in a process of its own: the way around our store."""

    def __init__(self, cluster: Mooncake, *tenant: str) -> None:
        script = Path(__file__).with_name("mooncake_raw.py")
        with (cluster.folder / "raw.log").open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(script), f"127.0.0.1:{cluster.rpc}", *tenant],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "MC_LOG_LEVEL": "ERROR", "MC_STORE_CLIENT_SETUP_RETRIES": "1"},
            )
        self._read()

    def ask(self, method: str, key: str, value: object = None) -> object:
        self.begin(method, key, value)
        return self._read()

    def begin(self, method: str, key: str, value: object = None) -> None:
        if self._process.stdin is None:
            raise RuntimeError("the raw client has no input")
        self._process.stdin.write(json.dumps([method, key, value]).encode() + b"\n")
        self._process.stdin.flush()

    def get(self, key: str) -> bytes | None:
        """The object under `key`, put together if it lies in parts."""
        found = self.ask("get", key)
        if not isinstance(found, str):
            return None
        data = bytes.fromhex(found)
        magic = b"WARMSEED-PARTS/1\n"
        if not data.startswith(magic):
            return data
        parts = [self.ask("get", name) for name in json.loads(data.removeprefix(magic))["names"]]
        return None if None in parts else b"".join(bytes.fromhex(str(part)) for part in parts)

    def _read(self) -> object:
        if self._process.stdout is None:
            raise RuntimeError("the raw client has no output")
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def redis_server(folder: Path, *arguments: str) -> Iterator[int]:
    """A Redis server on loopback that keeps nothing on disk; yields its port."""
    port = free_port()
    command = [
        program("redis-server"),
        *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)),
        *arguments,
    ]
    with running(command, folder / "redis.log"):
        wait_until(lambda: listening(port), "redis-server")
        yield port


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """A moto server that speaks S3; yields its endpoint."""
    port = free_port()
    with running([program("moto_server"), "-H", "127.0.0.1", "-p", str(port)], folder / "moto.log"):
        wait_until(lambda: listening(port), "moto_server")
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def http_server(folder: Path, *arguments: str) -> Iterator[str]:
    """A plain HTTP server of the files below `folder`; yields its URL."""
    port = free_port()
    script = Path(__file__).with_name("http_folder.py")
    with running([sys.executable, str(script), str(port), str(folder), *arguments], folder.parent / "http.log"):
        wait_until(lambda: listening(port), "http_folder")
        yield f"http://127.0.0.1:{port}"
