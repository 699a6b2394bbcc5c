"""Nodes for tests of the whole path: real daemons and engines over a tiny model, each in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.support.nodes import free_port
from tests.support.tiny_model import BUCKET

MARK = "WARMSEED_TEST_NODE"  # in the environment of everything a test's node starts
PROMPT = "what is the capital of france ?"
# How long a test may wait for what takes seconds on a quiet machine; reached only when something hangs.
PATIENCE = 240.0
COMMAND = (sys.executable, "-P", "-m", "warmseed.daemon.cli.main")


@dataclass
class RealNode:
    """One pretended machine: its caches, its sockets, its daemon, its engines."""

    folder: Path
    model: Path
    extra: tuple[str, ...] = ()
    cache: Path | None = None  # where its caches are; default: in `folder`
    port: int = 0
    daemon: subprocess.Popen[bytes] | None = None
    engines: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.cache = self.cache or self.folder / "cache"
        self.sockets = self.folder / "sockets"
        self.log = self.folder / "daemon.log"

    @property
    def environ(self) -> dict[str, str]:
        return os.environ | {
            MARK: str(self.folder),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "XDG_CACHE_HOME": str(self.folder / "xdg"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compiled in the process itself: no pool of workers to start
        }

    def preload(self) -> list[str]:
        """The daemon's command line."""
        return [
            *(*COMMAND, "preload", "--engine", "torch", "--model", str(self.model), "--shape-buckets", BUCKET),
            *("--cache-root", str(self.cache), "--weight-cache-socket-dir", str(self.sockets), *self.extra),
        ]

    def start(self) -> RealNode:
        """Start the daemon and wait until it serves."""
        self.port = free_port()
        command = [*self.preload(), "--weight-cache-health-port", str(self.port)]
        with self.log.open("ab") as log:
            self.daemon = subprocess.Popen(command, stdout=log, stderr=log, env=self.environ)
        deadline = time.monotonic() + PATIENCE
        while not self._healthy():
            assert self.daemon.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)
        return self

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Stop the daemon; its exit code."""
        assert self.daemon is not None
        self.daemon.send_signal(how)
        code = self.daemon.wait(PATIENCE)
        self.daemon = None
        return code

    def end(self) -> None:
        """Whatever still runs is killed."""
        for process in (*self.engines, *((self.daemon,) if self.daemon else ())):
            if process.poll() is None:
                process.kill()
                process.wait(PATIENCE)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def said(self) -> str:
        """The daemon's log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def status(self) -> dict[str, Any]:
        """The daemon's own report."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/status.json", timeout=30) as answer:
            return dict(json.load(answer))

    def used(self) -> list[dict[str, Any]]:
        """The verdicts on what was adopted, as soon as there are any."""
        deadline = time.monotonic() + PATIENCE
        while True:
            found = [verdict for rank in self.status()["ranks"] for verdict in rank["used"]]
            if found:
                return found
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def engine(self, *extra: str, model: Path | None = None) -> subprocess.Popen[bytes]:
        """A running engine that answers one prompt a line."""
        command = [
            *(*COMMAND, "run", "--model", str(model or self.model), "--shape-buckets", BUCKET, "--stdin", "--json"),
            *("--cache-root", str(self.cache), "--socket-dir", str(self.sockets), "--max-tokens", "6", *extra),
        ]
        with (self.folder / "engine.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self.environ
            )
        self.engines.append(process)
        return process

    def ask(self, *extra: str, model: Path | None = None) -> dict[str, Any]:
        """The answer of an engine that is started for it and ends again."""
        engine = self.engine(*extra, model=model)
        answer = ask(engine)
        assert engine.stdin is not None
        engine.stdin.close()
        assert engine.wait(PATIENCE) == 0
        return answer

    def engine_said(self) -> str:
        """The engines' standard error."""
        return (self.folder / "engine.log").read_text(errors="replace")

    def running(self) -> list[int]:
        """Every process that belongs to this node, however far it has moved away."""
        marker = f"{MARK}={self.folder}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if marker in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def unfinished(self) -> list[Path]:
        """Sockets, and files that somebody began and did not finish."""
        assert self.cache is not None
        state = self.cache / "warmseed"
        staging = (state / "staging", state / "store" / "staging", state / "compiled" / "captured")
        files = [file for folder in staging if folder.is_dir() for file in folder.iterdir()]
        sockets = [path for path in self.folder.rglob("*") if path.is_socket()]
        return [*files, *sockets]

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def ask(engine: subprocess.Popen[bytes], prompt: str = PROMPT) -> dict[str, Any]:
    """What the running engine answers."""
    pipes: tuple[IO[bytes] | None, IO[bytes] | None] = engine.stdin, engine.stdout
    assert pipes[0] is not None
    assert pipes[1] is not None
    pipes[0].write(prompt.encode() + b"\n")
    pipes[0].flush()
    line = pipes[1].readline()
    assert line, f"the engine ended with {engine.wait(PATIENCE)}"
    return dict(json.loads(line))


def refused(command: list[str], environ: dict[str, str]) -> str:
    """What a command said that must end with exit code 2 and without a traceback: its one line of error."""
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=PATIENCE, check=False)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    errors = [line for line in done.stderr.splitlines() if " ERROR " in line or line.startswith("warmseed")]
    assert len(errors) == 1, done.stderr
    return errors[0]


def new_token(folder: Path) -> Path:
    """A fresh token file in `folder`."""
    path = folder / "token"
    subprocess.run([*COMMAND, "token", "new", "--out", str(path)], check=True, capture_output=True, timeout=PATIENCE)
    return path


def forget(folder: Path) -> None:
    """Remove a node's folder."""
    shutil.rmtree(folder, ignore_errors=True)
