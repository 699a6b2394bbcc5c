"""`make demo`: the whole story on real parts, ending with one table.

Four "nodes" on this machine (each its own cache root and socket folder) start the same real model:
A with nothing, B from a shared store alone, C from A's daemon over the network channel, and one with seeding
off for the comparison. Exits non-zero if an answer differs, a cache was not used, or a start failed.
With DEMO_JSON=FILE the figures are also written there.
"""

from __future__ import annotations

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from models import smollm2
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

# Each word of its answer leads by a logit or more: no processor's rounding of bf16 makes another one of it.
PROMPT = "Please tell me the capital of France."
READY_SECONDS = 300.0  # longest a node may take to be ready
ANSWER_SECONDS = 120.0  # longest an engine may take to answer
WARMSEED = [sys.executable, "-P", "-m", "warmseed.daemon.cli.main"]

console = Console(highlight=False)


class DemoFailed(Exception):
    """The story did not go as told."""


@dataclass
class Node:
    """One pretended machine: its caches, its sockets, its daemon."""

    name: str
    folder: Path
    model: Path
    extra: list[str] = field(default_factory=list)
    daemon: subprocess.Popen[bytes] | None = None
    port: int = 0

    @property
    def place(self) -> list[str]:
        return ["--cache-root", str(self.folder / "cache")]

    def start(self) -> float:
        """Start the daemon; seconds until every rank serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        began = time.monotonic()
        command = [*WARMSEED, "preload", "--engine", "torch", "--model", str(self.model), *self.place]
        command += ["--weight-cache-socket-dir", str(self.folder / "sockets")]
        command += ["--weight-cache-health-port", str(self.port), *self.extra]
        with (self.folder / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(command, stdout=log, stderr=log)
        while not self._healthy():
            if self.daemon.poll() is not None:
                raise DemoFailed(f"node {self.name}'s daemon ended with {self.daemon.returncode}: {self._last_words()}")
            if time.monotonic() - began > READY_SECONDS:
                raise DemoFailed(f"node {self.name} is not ready after {READY_SECONDS:g} s: {self._last_words()}")
            time.sleep(0.05)
        return time.monotonic() - began

    def stop(self) -> None:
        if self.daemon is not None:
            self.daemon.terminate()
            try:
                self.daemon.wait(20)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait()
            self.daemon = None

    def status(self) -> dict[str, Any]:
        """What the node says of itself: ranks, tiers, verdicts."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/status.json", timeout=5) as answer:
            return dict(json.load(answer))

    def engine(self) -> Engine:
        return Engine(self)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _last_words(self) -> str:
        lines = (self.folder / "daemon.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "(it said nothing)"


class Engine:
    """A running `warmseed run` that answers prompts until it is killed."""

    def __init__(self, node: Node) -> None:
        command = [*WARMSEED, "run", "--engine", "torch", "--model", str(node.model), *node.place]
        command += ["--load-format", "ipc_cache", "--socket-dir", str(node.folder / "sockets"), "--stdin", "--json"]
        self.began = time.monotonic()
        self.log: IO[bytes] = (node.folder / "engine.log").open("ab")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)

    def ask(self, prompt: str = PROMPT) -> tuple[dict[str, Any], float]:
        """The answer, and seconds since the engine was started until it was there."""
        if self.process.stdin is None or self.process.stdout is None:
            raise DemoFailed("the engine has no pipes")
        self.process.stdin.write(prompt.encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise DemoFailed(f"the engine ended with {self.process.wait()}; see {self.log.name}")
        answer = dict(json.loads(line))
        return answer, answer["first_token_at"] - self.began

    def end(self, how: int = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            if pipe is not None:
                pipe.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def used(node: Node) -> bool:
    """Whether the node's daemon found, from the engine's own evidence, that what it adopted was used."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        verdicts = [verdict for rank in node.status()["ranks"] for verdict in rank["used"]]
        if verdicts:
            for verdict in verdicts:
                console.print(f"     [dim]{verdict['kind']} used: {verdict['used']} ({verdict['reason']})[/dim]")
            return all(verdict["used"] for verdict in verdicts)
        time.sleep(0.05)
    return False


@dataclass
class Start:
    """One whole start: daemon ready, engine up, first token."""

    ready: float
    total: float
    answer: dict[str, Any]


def whole_start(node: Node) -> Start:
    """Daemon, then engine, to the first token; the engine is ended again, the daemon goes on."""
    ready = node.start()
    engine = node.engine()
    answer, seconds = engine.ask()
    verdict(answer)
    engine.end()
    return Start(ready, ready + seconds, answer)


def verdict(answer: dict[str, Any]) -> None:
    console.print(f'     "{answer["text"]}"  [dim]weights from {answer["source"]}, {_phases(answer)}[/dim]')
    if "Paris" not in answer["text"]:
        raise DemoFailed(f"the model answered {answer['text']!r}")
    if answer["source"] != "ipc_cache":
        raise DemoFailed(f"the engine did not map the daemon's weights: {answer.get('fallback')}")


def _phases(answer: dict[str, Any]) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in answer["phases"].items())


@contextmanager
def chapter(title: str) -> Iterator[None]:
    """One part of the story: its title, a clock while it runs."""
    console.print(f"\n[bold]{title}[/bold]")
    columns = SpinnerColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(title)
        yield


def play(base: Path) -> dict[str, Any]:
    """The story; the figures."""
    with chapter("A real model: SmolLM2-135M-Instruct, 269 MB of bf16"):
        model = smollm2(base.parent / "models")
    token = base / "token"
    made = subprocess.run([*WARMSEED, "token", "new", "--out", str(token)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise DemoFailed(f"no token: {made.stderr.strip()}")
    store = base / "store"
    store.mkdir()
    shared = ["--warmup-cache-stores", f"file:{store}", "--seed-token-file", str(token)]
    port = free_port()
    a = Node("A", base / "a", model, [*shared, "--seed-listen-host", "127.0.0.1", "--seed-listen-port", str(port)])
    b = Node("B", base / "b", model, shared)
    peer = ["--seed-token-file", str(token), "--seed-source-host", "127.0.0.1", "--seed-source-port", str(port)]
    c = Node("C", base / "c", model, peer)
    off = Node("off", base / "off", model)
    nodes = (a, b, c, off)
    try:
        with chapter(
            "Node A, nothing cached: load, compile every shape with real C++ kernels, publish a signed bundle"
        ):
            a_start = whole_start(a)
            wait_published(store)
        with chapter("Node A, the engine is killed with SIGKILL and started again: weights mapped, kernels from disk"):
            first = a.engine()
            first.ask()
            first.end(signal.SIGKILL)
            again = a.engine()
            restart, restart_seconds = again.ask()
            verdict(restart)
            again.end()
            a.stop()
        with chapter("Node B, another cache root, nobody else alive: cold start from the store alone"):
            b_start = whole_start(b)
            used_store = used(b)
            b.stop()
        with chapter("Node C, no store: seeded by A's daemon over TLS, only the token in common"):
            a.start()
            c_start = whole_start(c)
            used_d2d = used(c)
            c.stop()
            a.stop()
        with chapter("The same start with seeding off"):
            e_start = whole_start(off)
            off.stop()
    finally:
        for node in nodes:
            node.stop()
    answers = (a_start.answer, restart, b_start.answer, c_start.answer, e_start.answer)
    return {
        "seconds": {
            "off": round(e_start.total, 2),
            "cold": round(a_start.total, 2),
            "restart": round(restart_seconds, 2),
            "store": round(b_start.total, 2),
            "d2d": round(c_start.total, 2),
        },
        "attach_ms": restart["attach_ms"],
        "private_growth": restart["private_growth"],
        "same_tokens": len({tuple(answer["tokens"]) for answer in answers}) == 1,
        "used": {"store": used_store, "d2d": used_d2d},
    }


def wait_published(store: Path) -> None:
    """Publishing goes on behind the daemon's back; B must not start before it is done."""
    until = time.monotonic() + 60
    while not any(store.rglob("head")):
        if time.monotonic() > until:
            raise DemoFailed(f"node A published nothing to {store}")
        time.sleep(0.1)


ROWS = {
    "off": ("seeding off", "everything made on the node"),
    "cold": ("A: first of the fleet", "made here, signed, published"),
    "store": ("B: from the store alone", "bundle verified, installed, used"),
    "d2d": ("C: from A's daemon", "encrypted, one token, used"),
    "restart": ("A: engine restarted", "after SIGKILL, weights mapped"),
}


def show(figures: dict[str, Any]) -> None:
    table = Table(title="From nothing running to the first token", title_style="bold")
    table.add_column("start")
    table.add_column("what happens", style="dim")
    table.add_column("seconds", justify="right")
    table.add_column("of 'off'", justify="right")
    seconds = figures["seconds"]
    for name, (title, what) in ROWS.items():
        table.add_row(title, what, f"{seconds[name]:.1f}", f"{seconds[name] / seconds['off']:.2f}")
    console.print()
    console.print(table)
    console.print(
        f"attach to 269 MB of weights: {figures['attach_ms']:.1f} ms; private memory grew by "
        f"{figures['private_growth']:.2%} of them; same tokens everywhere: {figures['same_tokens']}; "
        f"proven used: store {figures['used']['store']}, d2d {figures['used']['d2d']}"
    )


def main() -> int:
    base = Path(".cache/demo").absolute()
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    base.chmod(0o700)
    began = time.monotonic()
    try:
        figures = play(base)
    except (DemoFailed, OSError) as error:
        console.print(f"[red]demo failed:[/red] {error}\nlogs are in {base}")
        return 1
    show(figures)
    console.print(f"[dim]{time.monotonic() - began:.0f} s in all[/dim]")
    if target := os.environ.get("DEMO_JSON"):
        Path(target).write_text(json.dumps(figures) + "\n")
    good = figures["same_tokens"] and all(figures["used"].values())
    if not good:
        console.print("[red]demo failed:[/red] the tokens differ, or an adopted cache was not used")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
