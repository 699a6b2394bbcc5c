"""Nodes of a small fleet on one machine, each with a real daemon and real vLLM engines, for tests and benchmarks.

Run it with an interpreter that has vLLM and warmseed beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warmseed.daemon.engines.bytecode import bytecode_variables
from warmseed.daemon.engines.vllm.layout import MODULES, layout_below

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("vllm_child.py")
WARMSEED = (sys.executable, "-P", "-m", "warmseed.daemon.cli.main")
# The first one's answer is the same on every processor: each word leads by more than bf16 rounds away.
PROMPTS = ("Please tell me the capital of France.", "Write one sentence about the sea.")
# Given explicitly, `LLM` and `vllm serve` have one configuration and with it one set of caches.
SHAPE = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 2048}
PATIENCE = 600.0  # seconds for any one step; a cold start on a busy two-core machine takes three minutes


class NodeFailed(Exception):
    """A process did not do what the story needs; the message ends with its last words, `log` holds all of them."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__("\n".join([message, *log.splitlines()[-60:]]))
        self.log = log


def smollm2() -> Path:
    """The converted SmolLM2-135M-Instruct, made once and kept in the user's cache."""
    given = os.environ.get("WARMSEED_TEST_MODEL")
    return Path(given) if given else Path(runpy.run_path(str(ROOT / "bench" / "models.py"))["smollm2"]())


def flags(shape: dict[str, Any]) -> list[str]:
    """Keyword arguments of `LLM` as `vllm serve` and `warmseed preload` spell them."""
    words: list[str] = []
    for name, value in shape.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


@dataclass
class Answer:
    """What an engine process said."""

    import_s: float
    init_s: float
    answers: list[dict[str, Any]]
    log: str
    accepted: int = 0  # tokens that a draft had guessed, where the engine counts them: ``disable_log_stats=False``

    @property
    def tokens(self) -> list[list[int]]:
        return [answer["tokens"] for answer in self.answers]

    @property
    def logprobs(self) -> list[list[float]]:
        """How sure the engine was of each token: tells weights apart that say the same words."""
        return [answer["logprobs"] for answer in self.answers]

    @property
    def mapped(self) -> bool:
        return "from warmseed's weight cache daemon" in self.log

    @property
    def fell_back(self) -> bool:
        return "falling back to disk loading" in self.log


@dataclass
class Node:
    """One pretended machine: its caches, its sockets, its daemon, its engines."""

    name: str
    folder: Path
    model: Path
    extra: Sequence[str] = ()  # of `warmseed preload`
    shape: dict[str, Any] = field(default_factory=lambda: dict(SHAPE))
    variables: dict[str, str] = field(default_factory=dict)
    logs: Path | None = None  # where what its processes say outlives its folder
    daemon: subprocess.Popen[bytes] | None = None
    port: int = 0

    @property
    def cache_root(self) -> Path:
        return self.folder / "cache"

    @property
    def sockets(self) -> Path:
        return self.folder / "sockets"

    @property
    def environment(self) -> dict[str, str]:
        """Of every process of this node: its own caches, no network."""
        base = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "WARMSEED_"))}
        own = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **self.variables}
        layout = layout_below(self.cache_root, base, flashinfer="", arch="")
        return {**base, **own, **layout.variables, **bytecode_variables(self.cache_root, MODULES, base)}

    # The daemon -----------------------------------------------------------------------------------

    def start(self, *, patience: float = PATIENCE) -> float:
        """Start the daemon; seconds until every rank serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        began = time.monotonic()
        command = [*WARMSEED, "preload", "--engine", "vllm", "--model", str(self.model)]
        command += ["--cache-root", str(self.cache_root), "--weight-cache-socket-dir", str(self.sockets)]
        command += ["--weight-cache-health-port", str(self.port), *self.extra, *flags(self.shape)]
        with self._daemon_log().open("ab") as log:
            self.daemon = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        while not healthy(self.port):
            if self.daemon.poll() is not None:
                raise NodeFailed(f"node {self.name}: the daemon ended with {self.daemon.returncode}\n{self.words()}")
            if time.monotonic() - began > patience:
                raise NodeFailed(f"node {self.name}: not ready after {patience:g} s\n{self.words()}")
            time.sleep(0.1)
        return time.monotonic() - began

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End the daemon; its exit code."""
        if self.daemon is None:
            return 0
        daemon, self.daemon = self.daemon, None
        daemon.send_signal(how)
        try:
            return daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            return daemon.wait()

    def status(self) -> dict[str, Any]:
        """What the node says of itself: ranks, phases, verdicts."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/status.json", timeout=5) as answer:
            return dict(json.load(answer))

    def verdicts(self, *, patience: float = 10.0) -> list[dict[str, Any]]:
        """What the daemon concluded from its engines' evidence, once it has."""
        until = time.monotonic() + patience
        while True:
            found = [verdict for rank in self.status()["ranks"] for verdict in rank["used"]]
            if found or time.monotonic() > until:
                return found
            time.sleep(0.1)

    def _daemon_log(self) -> Path:
        folder = self.logs or self.folder
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self.name}-daemon.log"

    def words(self, lines: int = 40) -> str:
        """The end of the daemon's log."""
        text = self._daemon_log().read_text(errors="replace")
        return "\n".join(text.strip().splitlines()[-lines:])

    # Engines --------------------------------------------------------------------------------------

    def loader(self, **extra: Any) -> dict[str, Any]:
        """The keyword arguments that make an engine map this node's weights."""
        settings = {"socket_dir": str(self.sockets), **extra}
        return {"load_format": "ipc_cache", "model_loader_extra_config": settings}

    def ask(
        self,
        *,
        prompts: Sequence[str] = PROMPTS,
        max_tokens: int = 16,
        model: Path | None = None,
        patience: float = PATIENCE,
        **engine: Any,
    ) -> Answer:
        """Run one `LLM` engine to its answers.

        Raises:
            NodeFailed: it did not answer; the message holds its log.
        """
        given = {
            "model": str(model or self.model),
            "prompts": list(prompts),
            "max_tokens": max_tokens,
            "engine": {**self.shape, **engine},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        child = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(given)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            log, _ = child.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            log = "(no answer in time)"
        finally:
            with contextlib.suppress(ProcessLookupError):  # its own group: engine core and workers
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        (self.logs or self.folder).mkdir(parents=True, exist_ok=True)
        with ((self.logs or self.folder) / f"{self.name}-engine.log").open("a") as out:
            out.write(log)
        for line in reversed(log.splitlines()):
            if line.startswith('{"answers"'):
                said = json.loads(line)
                return Answer(said["import_s"], said["init_s"], said["answers"], log, int(said["accepted"]))
        raise NodeFailed(f"node {self.name}: the engine gave no answer", log)

    @contextlib.contextmanager
    def serving(self, *, patience: float = PATIENCE, **engine: Any) -> Iterator[Server]:
        """A running `vllm serve`, ready to answer."""
        server = Server(self, {**self.shape, **engine})
        try:
            server.wait_ready(patience)
            yield server
        finally:
            server.kill()


class Server:
    """``vllm serve`` as users run it."""

    def __init__(self, node: Node, engine: dict[str, Any]) -> None:
        self.port = free_port()
        self.node = node
        self.began = time.monotonic()
        vllm = Path(sys.executable).with_name("vllm")
        # Unpacked without an installer, vLLM has no script of its own.
        program = [str(vllm)] if vllm.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        command = [*program, "serve", str(node.model), "--served-model-name", "m", "--host", "127.0.0.1"]
        self._path = (node.logs or node.folder) / f"{node.name}-serve.log"
        with self._path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *flags(engine)],
                stdout=log,
                stderr=log,
                env=node.environment,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._path.read_text(errors="replace")

    def wait_ready(self, patience: float) -> float:
        """Seconds from the start to a healthy server."""
        while not healthy(self.port):
            if self.process.poll() is not None or time.monotonic() - self.began > patience:
                raise NodeFailed("vllm serve did not become ready", self.log)
            time.sleep(0.2)
        return time.monotonic() - self.began

    def ask(self, prompt: str, *, max_tokens: int = 16) -> str:
        """One greedy answer, through the OpenAI client that vLLM's users have."""
        from openai import OpenAI

        with OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=120) as client:
            answer = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": prompt}], temperature=0.0, max_tokens=max_tokens
            )
        return answer.choices[0].message.content or ""

    def kill(self) -> None:
        """SIGKILL to the whole process group: what an out-of-memory killer or a crash leaves."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def healthy(port: int) -> bool:
    """Whether ``/health`` on this port of this machine answers 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def new_token(folder: Path) -> Path:
    """A fleet's secret in a file."""
    path = folder / "token"
    subprocess.run([*WARMSEED, "token", "new", "--out", str(path)], check=True, capture_output=True, timeout=60)
    return path


def wait_published(store: Path, *, kind: str = "compile_cache", rank: str = "*", patience: float = 60.0) -> None:
    """Until the store holds a signed manifest of `kind` for `rank`, such as ``dp0_rank1``."""
    until = time.monotonic() + patience
    while not any(store.glob(f"**/manifest/{kind}/**/{rank}/*.json")):
        if time.monotonic() > until:
            raise NodeFailed(f"nothing was published to {store}: {[str(p) for p in store.rglob('*')][:20]}")
        time.sleep(0.1)
