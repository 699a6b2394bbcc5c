"""The child process from its owner's side: started when needed, killed when it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from warmseed.errors import ConfigurationError, printable
from warmseed.stores.errors import StoreTimeout, StoreUnavailable
from warmseed.stores.mooncake.config import MooncakeConfig

__all__ = ["Helper", "probe"]

_log = logging.getLogger(__name__)
_CHILD = Path(__file__).with_name("child.py")
_START = 9.0  # seconds until the client must be set up; a master that refuses costs 4.4
_LINE = 1 << 20  # bytes in one answer
_THREADS = 8
_CLOSING = "closing"
# Read by the native code when it is imported: few retries, short calls, quiet.
_NATIVE = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_RPC_TIMEOUT_MS": "5000",
}


class Helper:
    """One child; `submit` starts a new one when the last has died."""

    def __init__(
        self, config: MooncakeConfig, *, name: str, python: str, memory: int, memory_bytes: int, kill_after: float
    ) -> None:
        self._config, self._name, self._python = config, name, python
        self._memory, self._memory_bytes = memory, memory_bytes
        self._kill_after = kill_after  # seconds after which an unanswered request ends the child
        self._starting = asyncio.Lock()
        self._running: _Running | None = None

    async def submit(self, method: str, arguments: Mapping[str, object]) -> asyncio.Future[object]:
        """The answer-to-be of the child's `method`; it ends by itself, by an answer or by the child's death.

        Await it shielded: a caller that leaves must not end it, because native code may still be writing into
        the shared memory until it has ended. It raises `StoreTimeout` when the child had to be killed for not
        answering, `StoreUnavailable` when it died.

        Raises:
            StoreUnavailable: when no child can be started.
            StoreTimeout: when it could not be set up in time.
        """
        return (await self._alive()).submit(method, arguments)

    @property
    def pid(self) -> int | None:
        """The child's process id, `None` when there is none."""
        return self._running.process.pid if self._running is not None and not self._running.dead else None

    def kill(self, why: str) -> None:
        """End the child now; for outcomes that nobody can know."""
        if self._running is not None:
            self._running.kill(why)

    async def aclose(self) -> None:
        """End the child and wait for it."""
        running, self._running = self._running, None
        if running is not None:
            running.kill(_CLOSING)
            await running.gone()

    async def _alive(self) -> _Running:
        async with self._starting:
            if self._running is None or self._running.dead:
                if self._running is not None:
                    await self._running.gone()
                await self._start()
            if self._running is None:
                raise StoreUnavailable(f"{self._name}: the store is closed")
            return self._running

    async def _start(self) -> None:
        running = self._running = await _spawn(self._python, self._memory, self._name, self._kill_after)
        config = self._config
        try:
            async with asyncio.timeout(_START):
                await running.send(
                    {
                        "fd": self._memory,
                        "bytes": self._memory_bytes,
                        "threads": _THREADS,
                        "host": config.host,
                        "metadata": config.metadata,
                        "segment": config.segment,
                        "buffer": config.buffer,
                        "protocol": config.protocol,
                        "devices": config.devices,
                        "master": config.master,
                        "tenant": config.tenant,
                    }
                )
                event = await running.event()
                if event.get("event") == "imported":
                    event = await running.event()
        except BaseException as error:
            running.kill("it did not start")
            if isinstance(error, TimeoutError):
                raise StoreTimeout(
                    f"{self._name}: the client was not set up within {_START:g} s: the master at {config.master} is "
                    "silent; treated as a miss"
                ) from error
            raise
        if event.get("event") != "ready":
            running.kill("it could not be set up")
            raise StoreUnavailable(f"{self._name}: {_why(event, config, running.last_words())}; treated as a miss")
        running.begin()


class _Running:
    """A child that is up."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, kill_after: float) -> None:
        self.process, self._name, self._kill_after = process, name, kill_after
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[object]] = {}
        self._stderr: deque[str] = deque(maxlen=20)
        self._why, self._timeout = "", False
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._listen_to_errors())]

    @property
    def dead(self) -> bool:
        return bool(self._why) or self.process.returncode is not None

    def begin(self) -> None:
        """Start taking answers."""
        self._tasks.append(asyncio.get_running_loop().create_task(self._listen()))

    async def send(self, message: Mapping[str, object]) -> None:
        if self.process.stdin is None or self.dead:
            raise StoreUnavailable(f"{self._name}: the client process is gone; treated as a miss")
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # the listener notices too, and says more
            await self.process.stdin.drain()

    async def event(self) -> dict[str, object]:
        """The next line of a child that is starting."""
        if self.process.stdout is None:
            return {}
        line = await self.process.stdout.readline()
        message = json.loads(line) if line else {"event": "died"}
        return message if isinstance(message, dict) else {}

    def submit(self, method: str, arguments: Mapping[str, object]) -> asyncio.Future[object]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, even if nobody waits
        if self.dead or self.process.stdin is None:
            future.set_exception(self._error())
            return future
        number = next(self._ids)
        self._waiting[number] = future
        late = f"{method} was not answered in {self._kill_after:g} s"
        timer = loop.call_later(self._kill_after, lambda: self.kill(late, timeout=True))
        future.add_done_callback(lambda _: timer.cancel())
        # Not drained: a request is small, and one that is half cancelled would leave its answer to nobody.
        self.process.stdin.write(json.dumps({"id": number, "do": method, "with": dict(arguments)}).encode() + b"\n")
        return future

    def kill(self, why: str, *, timeout: bool = False) -> None:
        """End the child; what it was asked fails once it is gone."""
        if not self._why:
            self._why, self._timeout = why, timeout
            _log.log(
                logging.DEBUG if why == _CLOSING else logging.WARNING,
                "store=%s client process %d killed: %s",
                self._name,
                self.process.pid,
                why,
            )
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        asyncio.get_running_loop().call_later(1.0, self._fail)  # should the kernel not let it die

    def _error(self) -> StoreUnavailable:
        kind = StoreTimeout if self._timeout else StoreUnavailable
        words = f": {printable(self.last_words())}" if self._stderr and not self._timeout else ""
        return kind(f"{self._name}: the client process is gone ({self._why}{words}); treated as a miss")

    def _fail(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(self._error())

    def last_words(self) -> str:
        return " / ".join(self._stderr)

    async def gone(self) -> None:
        """Wait for the process and for the tasks that listen to it."""
        await self.process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        transport = getattr(self.process, "_transport", None)  # asyncio closes it only when it is collected
        if transport is not None:
            transport.close()

    async def _listen(self) -> None:
        stdout = self.process.stdout
        try:
            while stdout is not None and (line := await stdout.readline()):
                message = json.loads(line)
                future = self._waiting.pop(message.get("id", -1), None)
                if future is None or future.done():
                    continue
                if "error" in message:
                    future.set_exception(StoreUnavailable(f"{self._name}: {printable(message['error'])}"))
                else:
                    future.set_result(message.get("result"))
        except (ValueError, AttributeError) as error:
            self.kill(f"its answers are damaged ({printable(error)})")
            return
        self._why = self._why or "it ended by itself"
        self._fail()

    async def _listen_to_errors(self) -> None:
        stderr = self.process.stderr
        while stderr is not None:
            try:
                line = await stderr.readline()
            except ValueError:
                continue  # a line longer than the limit; the buffer was cleared
            if not line:
                return
            self._stderr.append(printable(line.decode(errors="replace").strip(), limit=300))


async def _spawn(python: str, memory: int, name: str, kill_after: float) -> _Running:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WARMSEED_")} | {
        k: v for k, v in _NATIVE.items() if k not in os.environ
    }
    try:
        process = await asyncio.create_subprocess_exec(
            python or sys.executable,
            str(_CHILD),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(memory,) if memory >= 0 else (),
            env=environment,
            limit=_LINE,
        )
    except OSError as error:
        raise StoreUnavailable(f"{name}: {python or sys.executable} can't be started: {error.strerror}") from error
    return _Running(process, name, kill_after)


async def probe(python: str, *, name: str) -> None:
    """Check that the interpreter `python` (ours, if empty) can load Mooncake's client; no connection is made.

    Raises:
        ConfigurationError: when it can't; the message says what to install.
    """
    try:
        running = await _spawn(python, -1, name, 10.0)
    except StoreUnavailable as error:
        raise ConfigurationError(f"{error}; set helper_python to an interpreter that has mooncake") from error
    try:
        async with asyncio.timeout(30):
            with contextlib.suppress(StoreUnavailable):  # it ended at once; the event says so too
                await running.send({"probe": True})
            event = await running.event()
    except TimeoutError:
        event = {"event": "import", "error": "no answer within 30 s"}
    finally:
        running.kill(_CLOSING)
        await running.gone()
    if event.get("event") != "imported":
        why = printable(event.get("error", "it died"))
        raise ConfigurationError(
            f"store {name!r}: {python or sys.executable} can't load mooncake ({why}): "
            "pip install 'warmseed[mooncake]' and, on Debian, apt-get install libibverbs1 libnuma1 libcurl4; or set "
            "helper_python to an interpreter that has it"
        )


def _why(event: Mapping[str, object], config: MooncakeConfig, words: str) -> str:
    code = event.get("code")
    match event.get("event"):
        case "setup":
            return f"the client can't reach the master at {config.master} (setup gave {code})"
        case "test" if code == -900:
            return f"the master at {config.master} does not answer as it should (-900): another version of Mooncake?"
        case "test":
            return f"the master at {config.master} answered a first question with {code}"
        case "import":
            return f"mooncake can't be loaded ({printable(event.get('error'))})"
    return f"the client process ended while it started: {printable(words)}"
