"""One rank of a group in a process of its own: ``gang_rank.py SETTINGS`` decides, prints what became of it, ends.

It speaks to the real rendezvous. What it "installs" is one file that holds the run's name, so a test can see
what every rank has in place whatever way its process ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from warmseed.errors import WarmseedError
from warmseed.seeding.gang.gang import GangBroken, Offer, decide_together
from warmseed.seeding.gang.rendezvous import TcpRendezvous


class FileMember:
    """A member whose table is a file."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.settings = settings
        self.file = Path(str(settings["file"]))
        self.log: list[str] = []

    def misbehave(self, step: str) -> None:
        """Do at `step` what the test asked for."""
        fault = self.settings.get(step)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            Path(f"{self.file}.stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "fail":
            raise WarmseedError(f"the test has rank {self.settings['rank']} fail to {step}")

    async def offers(self) -> Sequence[Offer]:
        self.misbehave("offers")
        return [Offer(**offer) for offer in self.settings["runs"]]  # type: ignore[attr-defined]

    async def take(self, run: str) -> None:
        self.misbehave("take")
        self.file.write_text(run)
        self.misbehave("taken")

    async def withdraw(self) -> None:
        self.log.append("withdraw")
        self.file.unlink()

    async def stand_down(self) -> None:
        self.log.append("stand_down")


async def main() -> None:
    settings = json.loads(sys.argv[1])
    member = FileMember(settings)
    world = settings["world"]
    answer: dict[str, object] = {"rank": settings["rank"]}
    async with TcpRendezvous.opened(
        rank=settings["rank"],
        world=world,
        group="target",
        host="127.0.0.1",
        port=settings["port"],
        secret=settings.get("secret", "s").encode(),
    ) as meeting:
        member.misbehave("start")
        try:
            decision = await decide_together(meeting, member, name="tables", timeout=settings["timeout"])
            answer |= {"outcome": decision.outcome, "run": decision.run, "reason": decision.reason}
        except GangBroken as broken:
            answer |= {"outcome": "broken", "run": "", "reason": str(broken)}
        print(json.dumps({**answer, "log": member.log}), flush=True)
        # Serve late ranks until the test closes our stdin.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
