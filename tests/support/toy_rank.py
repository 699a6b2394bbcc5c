"""A small, real rank: it follows the launcher's protocol with real processes, sockets and locks, and no GPU.

What it does beyond that is told in the engine's arguments, so that it travels the way of real settings:
``--toy JSON`` with ``{"pace": seconds a phase, "gloo": bool, "RANK-NAME": {"at": PHASE, "do": ACTION}}``. Actions:
``exit N``, ``kill SIGNAME``, ``hang``, ``deaf`` (ignore SIGTERM from then on), ``child`` (leave a child process),
``garbage`` (write nonsense to the status pipe), ``pid`` (leave the pid in a file),
``orphan`` (leave a grandchild without a parent). ``{"rehearse": [COMMAND…]}``
asks for a rehearsal.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from warmseed.daemon.launcher.processes import die_with_parent
from warmseed.daemon.protocol.rendezvous import connect
from warmseed.daemon.protocol.spec import RankSpec, read_spec
from warmseed.daemon.protocol.status import (
    Alive,
    EngineAttached,
    Failed,
    Metrics,
    Rehearsal,
    Serving,
    StatusWriter,
    TierCounts,
    Used,
    next_order,
    orders,
)

PHASES = ("environment", "bundle", "load", "tables", "rehearsal", "release", "bind")


class Toy:
    def __init__(self, spec: RankSpec, status: StatusWriter, status_fd: int) -> None:
        self.spec = spec
        self.status = status
        self.status_fd = status_fd
        arguments = spec.config.engine_args
        plan = json.loads(arguments[arguments.index("--toy") + 1]) if "--toy" in arguments else {}
        self.pace = float(plan.get("pace", 0.0))
        self.gloo = bool(plan.get("gloo", False))
        self.script = plan.get(spec.name, {})
        folder = Path(spec.config.weight_cache_socket_dir or ".")
        suffix = "_draft" if spec.group == "draft" else ""
        self.socket_path = folder / f"toy_{spec.device}{suffix}.sock"

    def run(self) -> int:
        lock = os.open(f"{self.socket_path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.status.send(Failed(f"another daemon already owns {self.socket_path}", 2))
            return 2
        for phase in PHASES:
            with self.status.phase(phase) as report:
                report.detail["toy"] = True
                self.act(phase)
                if phase == "environment" and self.gloo:
                    self.meet(report.detail)
                if phase == "rehearsal":
                    report.outcome = asyncio.run(self.rehearse())
                time.sleep(self.pace)
        self.serve()
        return 0

    def act(self, phase: str) -> None:
        if self.script.get("at") != phase:
            return
        action, _, argument = self.script["do"].partition(" ")
        match action:
            case "exit":
                self.status.send(Failed(f"told to fail in {phase}", int(argument)))
                os._exit(int(argument))
            case "kill":
                os.kill(os.getpid(), signal.Signals[argument])
                time.sleep(60)
            case "hang":
                time.sleep(3600)
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "child":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
            case "orphan":  # a grandchild that outlives its parent for a moment
                pid = Path(self.socket_path.parent, "orphan.pid")
                subprocess.run(["sh", "-c", f"(sleep 0.2 & echo $! > {pid})"], check=True)
            case "pid":
                Path(self.socket_path.parent, f"{self.spec.name}.pid").write_text(str(os.getpid()))
            case "garbage":
                os.write(self.status_fd, b"not json\n" + b"x" * 40_000 + b"\n" + b'{"event":"phase"}\n')

    def meet(self, detail: dict[str, str | int | float | bool | None]) -> None:
        """Form the real group over gloo and check that every global rank is there exactly once."""
        import torch
        import torch.distributed as dist

        spec = self.spec
        store = connect(spec, 60)
        dist.init_process_group("gloo", store=store, rank=spec.global_rank, world_size=spec.world_size)
        mine = torch.tensor([spec.global_rank, spec.dp_rank, spec.pp_rank, spec.tp_rank])
        everyone = [torch.zeros_like(mine) for _ in range(spec.world_size)]
        dist.all_gather(everyone, mine)
        if [int(row[0]) for row in everyone] != list(range(spec.world_size)):
            raise RuntimeError(f"the group is not complete: {everyone}")
        detail["group"] = ";".join("/".join(str(int(v)) for v in row) for row in everyone)
        dist.destroy_process_group()

    async def rehearse(self) -> str:
        wanted = self.script.get("rehearse")
        if not self.spec.config.rehearsal or self.script.get("skip_rehearsal") or self.spec.orders_fd is None:
            return "skipped"
        self.status.send(Rehearsal(needed=wanted is not None, argv=tuple(wanted or ())))
        async with orders(self.spec.orders_fd) as reader:
            order = await next_order(reader)
        return order.outcome if order is not None else "failed"

    def serve(self) -> None:
        done = False

        def stop(*_: object) -> None:
            nonlocal done
            done = True

        if self.script.get("do") != "deaf":
            signal.signal(signal.SIGTERM, stop)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with closing(listener):
            hidden = f"{self.socket_path}.tmp"
            Path(hidden).unlink(missing_ok=True)
            listener.bind(hidden)
            listener.listen(8)
            os.rename(hidden, self.socket_path)
            self.status.send(Serving(str(self.socket_path), time.monotonic()))
            self.status.send(Alive())
            self.status.send(Metrics((TierCounts("disk", hits=2, misses=1, bytes_read=4096),)))
            self.status.refused(["expired", "expired", "wrong environment"])
            self.status.send(Used("compile_cache", used=True, seconds_saved=12.5))
            self.status.send(EngineAttached(os.getpid(), 0.01))
            self.act("serving")
            listener.settimeout(0.05)
            while not done:
                try:
                    listener.accept()[0].close()
                except TimeoutError:
                    continue
        if self.script.get("do") != "deaf":
            self.socket_path.unlink(missing_ok=True)


def main() -> int:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec-fd", type=int, required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    arguments = parser.parse_args()
    spec = read_spec(arguments.spec_fd)
    return Toy(spec, StatusWriter(arguments.status_fd), arguments.status_fd).run()


if __name__ == "__main__":
    sys.exit(main())
