"""Kills a put before each of its system calls, then looks at what a fresh process finds.

Usage: kill_at_each_step.py FOLDER SIZE; prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.support.faulty_os import faults, kill_before
from warmseed.stores.disk import DiskStore

KEY = "kind/some/folder/doc"


async def put(folder: Path, value: bytes) -> None:
    await DiskStore(folder).put(KEY, value)


async def look(folder: Path, old: bytes, new: bytes) -> str:
    store = DiskStore(folder)
    value = await store.get(KEY, limit=1 << 30)
    listed = [info.key async for info in store.list()]
    left = os.listdir(folder / "staging") if (folder / "staging").exists() else []
    if listed not in ([], [KEY]) or left:
        return f"left behind: {listed} {left}"
    await store.put("kind/next", b"works")
    return {old: "old", new: "new", None: "none"}.get(value, "torn")


def in_child(work: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - the parent asks only how it ended
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main() -> None:
    base, size = Path(sys.argv[1]), int(sys.argv[2])
    old, new = b"o" * size, b"n" * (size + 1)
    seen: dict[str, int] = {}
    for before in (True, False):
        for call in range(1, 200):
            folder = base / f"{before}-{call}"
            if before:
                in_child(lambda folder=folder: asyncio.run(put(folder, old)))

            def killed(folder: Path = folder, call: int = call) -> None:
                with faults(kill_before(call)):
                    asyncio.run(put(folder, new))

            status = in_child(killed)
            out, into = os.pipe()

            def report(folder: Path = folder, into: int = into) -> None:
                os.write(into, asyncio.run(look(folder, old, new)).encode())

            in_child(report)
            os.close(into)
            found = os.read(out, 4096).decode() or "the next start failed"
            os.close(out)
            allowed = {"old", "new"} if before else {"none", "new"}
            seen[found if found in allowed else f"BAD {found} at {call}"] = seen.get(found, 0) + 1
            if status == 0:
                break
    print(json.dumps(seen))


main()
