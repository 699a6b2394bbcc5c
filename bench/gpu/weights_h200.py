"""The weight cache on real GPUs: how fast, how much memory, and what survives kills, restarts and meddling.

    PYTHONPATH=src python bench/gpu/weights_h200.py            # one GPU with 45 GB free, or two; some five minutes
    PYTHONPATH=src python bench/gpu/weights_h200.py --device cpu --gb 0.2 --tensors 50 --kills 4   # a dry run

Needs torch with CUDA and msgspec. Daemon and engines are processes of their own, as in service. Prints a
table, then one JSON object on the last line; exits with 1 if a check failed. A check that this machine can't make
(two GPUs) is listed as skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MISSING = "skipped"
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


# What the processes have in common ---------------------------------------------------------------


def fingerprint() -> Any:
    """The fingerprint of the benchmark's model."""
    from warmseed.daemon.weights.checkpoint import CheckpointIdentity
    from warmseed.daemon.weights.fingerprint import Fingerprint

    identity = CheckpointIdentity("full", (), "0" * 64)
    return Fingerprint(checkpoint=identity, architecture="Bench", dtype="bfloat16", engine="torch", engine_version="0")


def checksums(tensors: dict[str, Any]) -> dict[str, int]:
    """A sum over each tensor's 16-bit words weighted by their place, computed on the tensor's device."""
    import torch

    found = {}
    for name, tensor in tensors.items():
        total = 0
        for piece in tensor.reshape(-1).split(1 << 24):
            words = piece.view(torch.int16).long()
            total += int((words * torch.arange(1, len(words) + 1, device=words.device)).sum())
        found[name] = total
    return found


def free_bytes(device: str) -> int:
    """Memory nobody uses on the device."""
    import torch

    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    rows = Path("/proc/meminfo").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("MemAvailable"))


def say(**record: Any) -> None:
    """One line to the parent, written at once: forked children share the pipe."""
    os.write(1, json.dumps(record).encode() + b"\n")


# The daemon --------------------------------------------------------------------------------------


def daemon(options: argparse.Namespace) -> None:
    """Make a model, export it, serve it; answer the parent's questions, one a line."""
    import torch

    from warmseed.daemon.weights.export import export_model
    from warmseed.daemon.weights.server import WeightServer
    from warmseed.daemon.weights.socket import SocketAddress
    from warmseed.daemon.weights.transport import transport_for

    device = torch.device(options.device)
    model = torch.nn.Module()
    elements = int(options.gb * 1e9) // options.tensors // 2 // 256 * 256
    for number in range(options.tensors):
        values = torch.randint(-30000, 30000, (elements // 256, 256), dtype=torch.int16, device=device)
        model.register_parameter(f"t{number}", torch.nn.Parameter(values.view(torch.bfloat16), requires_grad=False))
    sums = checksums(dict(model.named_parameters()))
    low = [free_bytes(options.device)]
    inner = transport_for(device.type)

    class Watching:
        """The real transport, noting how much memory is free at the tightest moment."""

        def allocate(self, nbytes: int, where: torch.device) -> Any:
            segment = inner.allocate(nbytes, where)
            low.append(free_bytes(options.device))
            return segment

        def settle(self, where: torch.device) -> None:
            low.append(free_bytes(options.device))
            inner.settle(where)

        map = inner.map

    if device.type == "cuda":
        torch.cuda.empty_cache()
    before = free_bytes(options.device)
    start = time.perf_counter()
    exported = export_model(model, device=device, transport=Watching())
    seconds = time.perf_counter() - start
    same = checksums(dict(model.named_parameters())) == sums

    async def serve() -> None:
        server = WeightServer(exported, fingerprint(), SocketAddress(Path(options.socket)))
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        async with server.serving():
            say(
                export_s=seconds, bytes=exported.nbytes, segments=len(exported.segments), same=same, sums=sums,
                largest_segment=max(s.record.nbytes for s in exported.segments), peak_extra=before - min(low),
                uuid=server.device_uuid,
            )  # fmt: skip
            while question := (await lines.readline()).decode().strip():
                if question == "usage":
                    say(**usage(options.device), leases=len(server.leases))
                elif question == "check":
                    start = time.perf_counter()
                    changed = await asyncio.to_thread(exported.changed_tensors)
                    say(check_ms=(time.perf_counter() - start) * 1e3, changed=list(changed)[:4])
                elif question == "changed":
                    say(changed=list(server.changed)[:4], released=exported.released)

    asyncio.run(serve())


def usage(device: str) -> dict[str, Any]:
    """What this process and its device hold."""
    rows = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "rss_kib": int(rows["VmRSS"].split()[0]),
        "shared_files": len(os.listdir("/dev/shm")),
        "free": free_bytes(device),
    }


# The engine --------------------------------------------------------------------------------------


def engine(options: argparse.Namespace) -> None:
    """Import once, then do what the parent says, one command a line; ``fork`` commands run in children."""
    import torch  # noqa: F401

    import warmseed.daemon.weights.client  # noqa: F401

    say(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command.pop("fork", False):  # this process never touches the GPU, so its children may
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlives the benchmark
                _engine_command(command)
                while True:
                    signal.pause()
        elif command["do"] == "reap":
            while True:
                try:
                    os.waitpid(-1, 0)
                except ChildProcessError:
                    break
            say(reaped=True)
        else:
            _engine_command(command)


_held: list[Any] = []


def _engine_command(command: dict[str, Any]) -> None:
    import torch

    from warmseed.daemon.weights.client import attach
    from warmseed.daemon.weights.errors import WeightCacheUnavailable
    from warmseed.daemon.weights.socket import SocketAddress

    match command["do"]:
        case "attach":
            device = command["device"]
            if device.startswith("cuda"):
                torch.cuda.set_device(device)
                torch.zeros(1, device=device)  # an engine has its context long before it loads
            before = free_bytes(device)
            address = SocketAddress(Path(command["socket"]))
            start = time.perf_counter()
            try:
                attachment = attach(address, fingerprint(), mode=command.get("mode", "zero_copy"), device=device)
            except WeightCacheUnavailable as error:
                return say(pid=os.getpid(), reason=error.reason, message=str(error)[:200])
            wall = (time.perf_counter() - start) * 1e3
            _held[:] = [attachment]
            own = torch.cuda.memory_allocated(device) if device.startswith("cuda") else 0
            say(
                pid=os.getpid(), ms=attachment.seconds * 1e3, wall_ms=wall, extra=before - free_bytes(device), own=own,
                released=attachment.released.outcome if attachment.released else None,
                sums=checksums(attachment.tensors) if command.get("sums") else None,
            )  # fmt: skip
        case "sums":
            try:
                say(sums=checksums(_held[0].tensors))
            except RuntimeError as error:
                say(error=str(error)[:200])
        case "write":
            name = sorted(_held[0].tensors)[0]
            _held[0].tensors[name].view(torch.int16).view(-1)[7] += 1
            if command["device"].startswith("cuda"):
                torch.cuda.synchronize()
            say(wrote=name)
        case "gone":
            say(gone=_held[0].daemon_gone.wait(command["timeout"]))
        case "close":
            _held[0].close()
            _held.clear()
            say(closed=True)
    return None


# The parent --------------------------------------------------------------------------------------


class Child:
    """A daemon or an engine, spoken to in lines of JSON."""

    def __init__(
        self, role: str, options: argparse.Namespace, *, device: str, socket: str = "", env: Any = None
    ) -> None:
        command = [sys.executable, __file__, "--role", role, "--device", device, "--socket", socket]
        command += ["--gb", str(options.gb), "--tensors", str(options.tensors)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
        )
        self.hello = self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a {self.process.args} ended without an answer")
        return json.loads(line)

    def ask(self, question: Any) -> dict[str, Any]:
        self.send(question)
        return self.hear()

    def send(self, question: Any) -> None:
        assert self.process.stdin is not None
        text = question if isinstance(question, str) else json.dumps(question)
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self, *, hard: bool = False) -> None:
        if hard:
            self.process.kill()
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


@contextmanager
def child(*args: Any, **kwargs: Any) -> Iterator[Child]:
    """A child that is gone afterwards, whatever happens."""
    made = Child(*args, **kwargs)
    try:
        yield made
    finally:
        made.end(hard=True)


class Results:
    """Figures and checks, as a table and as JSON."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}
        self.failed: list[str] = []

    def figure(self, name: str, value: Any) -> None:
        self.rows[name] = round(value, 3) if isinstance(value, float) else value
        print(f"{name:44} {self.rows[name]}", flush=True)

    def check(self, name: str, passed: bool, detail: Any = "") -> None:
        self.rows[name] = passed
        print(f"{name:44} {'ok' if passed else 'FAILED'} {'' if passed else detail}", flush=True)
        if not passed:
            self.failed.append(name)


def settled(daemon_child: Child, *, leases: int = 0) -> dict[str, Any]:
    """The daemon's usage once only `leases` engines are left and their memory is back."""
    deadline = time.monotonic() + 60
    last: dict[str, Any] = {}
    while time.monotonic() < deadline:
        now = daemon_child.ask("usage")
        if now["leases"] == leases and last and abs(now["free"] - last["free"]) < 1 << 20:
            return now
        last = now
        time.sleep(0.3)
    return last


def measure(options: argparse.Namespace, folder: Path, results: Results) -> None:
    """Everything on one device."""
    device, socket = options.device, str(folder / "weights.sock")
    with (
        child("daemon", options, device=device, socket=socket) as serving,
        child("engine", options, device=device) as zygote,
    ):
        ready = serving.hello
        attach = {"do": "attach", "fork": True, "device": device, "socket": socket}
        results.figure("bytes", ready["bytes"])
        results.figure("segments", ready["segments"])
        results.figure("export_s", ready["export_s"])
        results.figure("export_peak_extra_bytes", ready["peak_extra"])
        results.check("export keeps every value", ready["same"])
        room = ready["largest_segment"] + (64 << 20)
        results.check("export needs one segment of extra room", ready["peak_extra"] <= room, ready["peak_extra"])

        times, walls = [], []
        for _ in range(options.runs):
            answer = zygote.ask(attach)
            times.append(answer["ms"])
            walls.append(answer["wall_ms"])
            os.kill(answer["pid"], signal.SIGKILL)
        results.figure("attach_ms_median", statistics.median(times))
        results.figure("attach_ms_worst", max(times))
        results.figure("attach_with_imports_ms_median", statistics.median(walls))
        if device != "cpu":  # the dry run shares its processors with whatever else runs there
            results.check("attach under 15 ms", statistics.median(times) < 15, times)
        results.figure("engine_allocated_bytes", answer["own"])
        checked = zygote.ask({**attach, "sums": True})
        results.check("an engine sees every value", checked["sums"] == ready["sums"])
        os.kill(checked["pid"], signal.SIGKILL)
        kill_engines(options, serving, zygote, attach, results)
        two_engines(options, serving, attach, ready, results)
    restart(options, socket, results)
    copy(options, socket, results)
    meddle(options, socket, results)


def kill_engines(
    options: argparse.Namespace, serving: Child, zygote: Child, attach: dict[str, Any], results: Results
) -> None:
    """Many engines, each killed while it maps."""
    before = settled(serving)
    start = time.monotonic()
    for done in range(0, options.kills, options.parallel):
        wave = min(options.parallel, options.kills - done)
        for _ in range(wave):
            zygote.send(attach)
        pids = [zygote.hear()["pid"] for _ in range(wave)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    zygote.ask({"do": "reap"})
    after = settled(serving)
    results.figure("kills", options.kills)
    results.figure("kills_s", time.monotonic() - start)
    results.figure("daemon_free_before", before["free"])
    results.figure("daemon_free_after", after["free"])
    results.figure("daemon_rss_growth_kib", after["rss_kib"] - before["rss_kib"])
    gone = before["free"] - after["free"]
    results.check("killed engines leave no device memory", gone < 32 << 20, gone)
    results.check("killed engines leave no descriptors", after["descriptors"] == before["descriptors"], (before, after))
    results.check(
        "killed engines leave no shared files", after["shared_files"] == before["shared_files"], (before, after)
    )
    results.check("killed engines leave no host memory", after["rss_kib"] - before["rss_kib"] < 16 << 10)


def two_engines(
    options: argparse.Namespace, serving: Child, attach: dict[str, Any], ready: dict[str, Any], results: Results
) -> None:
    """Two engines map at once, and memory is there once."""
    command = {**attach, "fork": False, "sums": True}
    with child("engine", options, device=options.device) as one, child("engine", options, device=options.device) as two:
        first, second = one.ask(command), two.ask(command)
        results.check("two engines at once see every value", first["sums"] == second["sums"] == ready["sums"])
        results.check("the daemon knows both", settled(serving, leases=2)["leases"] == 2)
        answer = serving.ask("check")
        results.figure("integrity_check_ms", answer["check_ms"])


def restart(options: argparse.Namespace, socket: str, results: Results) -> None:
    """The daemon dies under a living engine; a new one takes its place."""
    command = {"do": "attach", "device": options.device, "socket": socket}
    with child("engine", options, device=options.device) as living:
        with child("daemon", options, device=options.device, socket=socket):
            living.ask(command)
        results.check("an engine notices its daemon's death", living.ask({"do": "gone", "timeout": 20})["gone"])
        answer = living.ask({"do": "sums"})
        results.figure("orphaned engine can still read", "sums" in answer or answer["error"])
        with (
            child("daemon", options, device=options.device, socket=socket) as successor,
            child("engine", options, device=options.device) as fresh,
        ):
            seen = fresh.ask({**command, "sums": True})
            results.check("a new daemon serves at the same address", seen["sums"] == successor.hello["sums"], seen)


def copy(options: argparse.Namespace, socket: str, results: Results) -> None:
    """Copy mode from end to end."""
    command = {"do": "attach", "device": options.device, "socket": socket}
    with (
        child("daemon", options, device=options.device, socket=socket) as serving,
        child("engine", options, device=options.device) as copying,
        child("engine", options, device=options.device) as late,
    ):
        before = serving.ask("usage")["free"]
        answer = copying.ask({**command, "mode": "copy", "sums": True})
        results.figure("copy_ms", answer["ms"])
        results.check("copy mode sees every value", answer["sums"] == serving.hello["sums"])
        results.check("copy mode has the daemon release", answer["released"] == "released", answer["released"])
        deadline = time.monotonic() + 20
        while not serving.ask("changed")["released"] and time.monotonic() < deadline:
            time.sleep(0.1)
        results.figure("free_change_after_copy", serving.ask("usage")["free"] - before)
        results.check("later engines are told", late.ask(command).get("reason") == "released")


def meddle(options: argparse.Namespace, socket: str, results: Results) -> None:
    """An engine writes to the mapped weights."""
    command = {"do": "attach", "device": options.device, "socket": socket}
    with (
        child("daemon", options, device=options.device, socket=socket) as serving,
        child("engine", options, device=options.device) as vandal,
        child("engine", options, device=options.device) as late,
    ):
        vandal.ask(command)
        name = vandal.ask({"do": "write", "device": options.device})["wrote"]
        vandal.ask({"do": "close"})
        if options.device == "cpu":
            seen = late.ask({**command, "sums": True})
            results.check("an engine's write stays its own", seen["sums"] == serving.hello["sums"])
            return
        deadline = time.monotonic() + 20
        while not (changed := serving.ask("changed")["changed"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        results.check("an engine's write to the weights is noticed", name in changed, changed)
        answer = late.ask(command)
        results.check("changed weights are served to nobody", answer.get("reason") == "error", answer)


def two_gpus(options: argparse.Namespace, folder: Path, results: Results) -> None:
    """A socket of the first GPU in the hands of an engine on the second, and indices that mean another GPU."""
    import torch

    names = ("a wrong GPU's socket is refused", "a GPU is found by UUID whatever its index")
    if not options.device.startswith("cuda") or torch.cuda.device_count() < 2:
        for name in names:
            results.figure(name, MISSING)
        return
    socket = str(folder / "second.sock")
    small = argparse.Namespace(**{**vars(options), "gb": min(1.0, options.gb)})
    command = {"do": "attach", "socket": socket}
    with child("daemon", small, device="cuda:1", socket=socket) as serving:
        with child("engine", small, device="cuda:0") as wrong:
            answer = wrong.ask({**command, "device": "cuda:0"})
            results.check(names[0], answer.get("reason") == "wrong_gpu", answer)
        with child("engine", small, device="cuda:0", env={"CUDA_VISIBLE_DEVICES": "1"}) as remapped:
            answer = remapped.ask({**command, "device": "cuda:0", "sums": True})
            results.check(names[1], answer.get("sums") == serving.hello["sums"], answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--gb", type=float, default=19.0, help="size of the model, 10**9 bytes")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--runs", type=int, default=7, help="attaches that are timed")
    parser.add_argument("--kills", type=int, default=200, help="engines that are killed")
    parser.add_argument("--parallel", type=int, default=8, help="engines that live at once until they are killed")
    parser.add_argument("--role", choices=["daemon", "engine"], help=argparse.SUPPRESS)
    parser.add_argument("--socket", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
        return daemon(options) if options.role == "daemon" else engine(options)
    results = Results()
    with tempfile.TemporaryDirectory(prefix="warmseed-bench-") as name:
        measure(options, Path(name), results)
        two_gpus(options, Path(name), results)
    print(json.dumps({**results.rows, "failed": results.failed}))
    sys.exit(1 if results.failed else 0)


if __name__ == "__main__":
    main()
