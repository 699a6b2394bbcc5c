"""The process that holds the Mooncake client. Runs under any Python that has mooncake: needs nothing of warmseed.

The native client holds the interpreter for minutes when a master is silent, cannot survive a fork, and may abort;
so it lives here, where its owner can kill it. One JSON object a line: first the configuration, then requests on
standard input, answers on standard output. Bytes travel through shared memory that the owner hands over as a
descriptor. Numbers below zero are Mooncake's own error codes.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

MISSING, NOT_READY, NO_ROOM, TOO_SMALL = -704, -703, -200, -600
CHANGING = (MISSING, NOT_READY, TOO_SMALL)  # what a read gives when the value is replaced by a longer one meanwhile
RETRIES = 6
PAUSE = 0.01  # seconds before the second look at a value that is being replaced


class NativeStore(Protocol):
    """What is used of ``mooncake.store.MooncakeDistributedStore``."""

    def get_size(self, name: str) -> int: ...
    def get_into(self, name: str, address: int, size: int) -> int: ...
    def get_into_ranges(
        self,
        addresses: list[int],
        names: list[list[str]],
        to: list[list[list[int]]],
        at: list[list[list[int]]],
        sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]: ...
    def put_from(self, name: str, address: int, size: int, config: object) -> int: ...
    def upsert_from(self, name: str, address: int, size: int, config: object) -> int: ...
    def register_buffer(self, address: int, size: int) -> int: ...
    def unregister_buffer(self, address: int) -> int: ...
    def remove(self, name: str, force: bool) -> int: ...


class Client:
    """Mooncake's store, reduced to what the owner needs; every method may run on several threads."""

    def __init__(self, config: dict[str, Any], store: NativeStore, replicate: Any) -> None:
        self.store = store
        self.plain, self.pinned = replicate(), replicate()
        self.pinned.with_hard_pin = True
        self.memory = mmap.mmap(config["fd"], config["bytes"])
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        store.register_buffer(self.base, config["bytes"])

    def sizes(self, names: list[str]) -> list[int]:
        """Bytes of each object, or an error code."""
        return [self.store.get_size(name) for name in names]

    def fetch(self, name: str, at: int, room: int) -> int:
        """Bytes read to `at`, or the size of an object for which half of `room` is too small.

        Read twice, so that a value that is just being replaced is never a mixture.
        """
        for attempt in range(RETRIES):
            size = self.store.get_size(name)
            if size != NOT_READY:
                if size < 0 or 2 * size > room:
                    return size
                got = self.store.get_into(name, self.base + at, size)
                if got < 0 and got not in CHANGING:
                    return got
                if got == size:
                    again = self.store.get_into(name, self.base + at + size, size)
                    if again == size and self.store.get_size(name) == size and self.same(at, at + size, size):
                        return size
            time.sleep(PAUSE * 2**attempt)
        return NOT_READY

    def load(self, name: str, at: int, size: int, offset: int, whole: int) -> int:
        """`size` bytes of the object from `offset` on, read to `at`."""
        if offset == 0 and size == whole:
            return self.store.get_into(name, self.base + at, size)
        got = self.store.get_into_ranges([self.base + at], [[name]], [[[0]]], [[[offset]]], [[[size]]])
        return got[0][0][0]

    def save(self, name: str, at: int, size: int) -> int:
        """A new object under a name that nobody else uses; checked afterwards, because `put` may lie."""
        return self.put_new(name, self.base + at, size)

    def save_file(self, name: str, path: str, offset: int, size: int) -> int:
        """As `save`, straight from a file."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            start = offset - offset % mmap.ALLOCATIONGRANULARITY
            if os.fstat(fd).st_size < offset + size:
                return -600
            view = mmap.mmap(fd, size + offset - start, mmap.MAP_PRIVATE, offset=start)
        finally:
            os.close(fd)
        anchor = ctypes.c_char.from_buffer(view)
        address = ctypes.addressof(anchor)
        self.store.register_buffer(address, size + offset - start)
        try:
            return self.put_new(name, address + offset - start, size)
        finally:
            self.store.unregister_buffer(address)
            del anchor
            view.close()

    def put_new(self, name: str, address: int, size: int) -> int:
        code = NO_ROOM
        for attempt in range(4):
            code = self.store.put_from(name, address, size, self.plain)
            if code != NO_ROOM:  # a failed put makes the master evict; the next one may fit
                break
            time.sleep(min(1.0, 0.1 * 3**attempt) * random.uniform(0.7, 1.3))  # noqa: S311
        if code != 0:
            return code
        found = self.store.get_size(name)
        return size if found == size else (found if found < 0 else NOT_READY)

    def replace(self, name: str, at: int, size: int) -> int:
        """A small pinned object that may replace another; the value is at `at`, with as much room behind it."""
        code = NOT_READY
        for attempt in range(RETRIES):
            # `put` keeps the old value and says 0; `upsert` replaces, and takes over from a writer that died.
            put = self.store.put_from if self.store.get_size(name) == MISSING else self.store.upsert_from
            code = put(name, self.base + at, size, self.pinned)
            if code == 0:
                found = self.store.get_size(name)
                if found == size and self.store.get_into(name, self.base + at + size, size) == size:
                    if self.same(at, at + size, size) or attempt:  # else another writer's whole value: it came later
                        return size
                elif found >= 0 and attempt:
                    return size
                code = found if found < 0 else NOT_READY
            time.sleep((0.1 if code == NO_ROOM else PAUSE) * 2**attempt * random.uniform(0.5, 1.5))  # noqa: S311
        return code

    def same(self, one: int, two: int, size: int) -> bool:
        return self.memory[one : one + size] == self.memory[two : two + size]

    def remove(self, names: list[str], force: bool) -> list[int]:
        """Codes of the removals."""
        return [self.store.remove(name, force) for name in names]


def parent_gone() -> None:
    """Have the kernel end this process with its owner (prctl PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever native code prints must not end up among the answers
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != here]  # our neighbours are not top-level modules
    parent_gone()
    lock = threading.Lock()

    def answer(**fields: object) -> None:
        with lock:
            answers.write(json.dumps(fields) + "\n")

    config = json.loads(sys.stdin.readline() or "null")
    if config is None:
        return
    try:
        from mooncake.store import (  # type: ignore[import-untyped,import-not-found,unused-ignore]  # native, untyped
            MooncakeDistributedStore,
            ReplicateConfig,
        )
    except Exception as error:  # noqa: BLE001 - a missing library shows as ImportError, a wrong one as anything
        answer(event="import", error=f"{type(error).__name__}: {error}")
        return
    answer(event="imported")
    if config.get("probe"):
        return
    store = MooncakeDistributedStore()
    more = {} if config["tenant"] == "default" else {"tenant_id": config["tenant"]}
    code = store.setup(
        config["host"],
        config["metadata"],
        config["segment"],
        config["buffer"],
        config["protocol"],
        config["devices"],
        config["master"],
        **more,
    )
    if code != 0:
        answer(event="setup", code=code)
        return
    code = store.get_size(f"warmseed/probe/{random.getrandbits(128):032x}")
    if code != MISSING:
        answer(event="test", code=code)
        return
    client = Client(config, store, ReplicateConfig)
    answer(event="ready")

    def serve(request: dict[str, Any]) -> None:
        try:
            method = getattr(client, request["do"])
            answer(id=request["id"], result=method(**request["with"]))
        except Exception as error:  # noqa: BLE001 - the owner is told, whatever it is
            answer(id=request["id"], error=f"{type(error).__name__}: {error}")

    pool = ThreadPoolExecutor(config["threads"])
    for line in sys.stdin:
        pool.submit(serve, json.loads(line))


if __name__ == "__main__":
    try:
        main()
    finally:
        sys.stdout.flush()
        os._exit(0)  # closing the client takes a second and may crash; it holds nothing
