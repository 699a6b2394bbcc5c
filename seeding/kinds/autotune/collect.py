"""What FlashInfer itself says of this node's environment, asked in a child process and remembered for one boot.

`flashinfer.autotuner._collect_metadata` reads the GPU's name, which creates a CUDA context, and its import takes
seconds: neither has a place in a supervisor. A node that can't see its GPU for a moment answers ``unknown``;
such an answer is used once and never remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from warmseed.errors import printable
from warmseed.seeding.environment import UNKNOWN
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.files import held_folder, read_file, replace_file
from warmseed.seeding.kinds.autotune.table import METADATA_FIELDS

__all__ = ["Collected", "collect"]

_log = logging.getLogger(__name__)
_ANSWER_BYTES = 64 << 10
_STDERR_BYTES = 4 << 10
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME")
_Line = Annotated[str, msgspec.Meta(max_length=1024)]

# Runs in the engine's own Python. The answer goes to a copy of stdout; whatever libraries print goes to stderr.
_PROGRAM = """
import json, os, sys
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from flashinfer import autotuner
found = {"metadata": {str(k): str(v) for k, v in autotuner._collect_metadata().items()}}
try:
    from flashinfer.jit import env
    folder = env.FLASHINFER_WORKSPACE_DIR  # <base>/.cache/flashinfer/<version>/<arch>, without arch on a CPU
    found["arch"] = folder.name if folder.parent.name == found["metadata"]["flashinfer_version"] else ""
except Exception:
    found["arch"] = ""
json.dump(found, answer)
answer.close()
os._exit(0)
"""


class Collected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """FlashInfer's answer."""

    metadata: dict[_Line, _Line]  # ``_metadata`` as it would write it; ``unknown`` where it can't tell
    arch: _Line = ""  # of its cache folders, such as ``90a``; empty without a GPU
    reason: _Line = ""  # why nothing is known, for people

    @property
    def complete(self) -> bool:
        """Whether every field is known."""
        return set(METADATA_FIELDS) <= set(self.metadata) and UNKNOWN not in self.metadata.values()


def collect(
    state: Path,
    *,
    python: str = sys.executable,
    device: int | None = None,
    environ: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> Collected:
    """The metadata of the FlashInfer that `python` would import, on CUDA device `device` of those it sees.

    Never raises for what the child does: without FlashInfer, without a GPU, or past `timeout` seconds, every
    field is ``unknown`` and `Collected.reason` says why. Blocks for that long at most.
    """
    variables = dict(os.environ if environ is None else environ)
    name = _name(python, device, variables)
    if (known := _remembered(state, name)) is not None:
        return known
    found = _ask(python, device, variables, timeout)
    if found.complete:
        try:
            with held_folder(state / "tables" / "environment", create=True) as folder:
                replace_file(folder, name, msgspec.json.encode(found), durable=False)
        except OSError as error:
            _log.warning("the environment is not remembered, so the next start asks again: %s", error)
    else:
        vague = sorted(name for name, value in found.metadata.items() if value == UNKNOWN)
        _log.warning("FlashInfer does not know its %s: %s", ", ".join(vague), found.reason or "it did not say why")
    return found


def _ask(python: str, device: int | None, variables: dict[str, str], timeout: float) -> Collected:
    if device is not None:
        visible = variables.get("CUDA_VISIBLE_DEVICES", "").split(",")
        variables["CUDA_VISIBLE_DEVICES"] = visible[device] if device < len(visible) and visible[0] else str(device)
    with tempfile.TemporaryFile() as said:
        try:
            child = subprocess.Popen(  # noqa: S603 - the engine's own interpreter with a fixed program
                [python, "-c", _PROGRAM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                env=variables,
                start_new_session=True,  # so that a compiler it started goes with it
            )
        except OSError as error:
            return _nothing(f"{python} can't be run: {error}")
        try:
            answer, _ = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return _nothing(f"no answer within {timeout:g} s")
        finally:
            _end(child)
        said.seek(max(0, said.seek(0, os.SEEK_END) - _STDERR_BYTES))
        last = said.read(_STDERR_BYTES).decode("utf-8", "replace").strip().splitlines()
    if child.returncode != 0 or len(answer) > _ANSWER_BYTES:
        return _nothing(last[-1] if last else f"the child ended with {child.returncode}")
    try:
        found = msgspec.json.decode(answer, type=Collected)
    except msgspec.MsgspecError as error:
        return _nothing(f"its answer does not parse: {error}")
    return Collected({**dict.fromkeys(METADATA_FIELDS, UNKNOWN), **found.metadata}, found.arch)


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _nothing(reason: str) -> Collected:
    return Collected(dict.fromkeys(METADATA_FIELDS, UNKNOWN), reason=printable(reason))


def _remembered(state: Path, name: str) -> Collected | None:
    try:
        data = read_file(state / "tables" / "environment" / name, _ANSWER_BYTES)
        found = None if data is None else msgspec.json.decode(data, type=Collected)
    except (OSError, ArtifactRefused, msgspec.MsgspecError):
        return None
    return found if found is not None and found.complete else None


def _name(python: str, device: int | None, variables: Mapping[str, str]) -> str:
    """A name that changes with everything the answer depends on: boot, interpreter, its packages, libraries, GPU."""
    parts: list[object] = [
        _text("/proc/sys/kernel/random/boot_id"),
        os.path.realpath(python),
        python,
        device,
        _text("/proc/driver/nvidia/version"),
        _stamp("/etc/ld.so.cache"),
    ]
    parts += [
        variables.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME")
    ]
    # A package that is installed or removed touches its folder: an upgrade within one boot is seen.
    folders = [*Path(python).parent.parent.glob("lib*/python3*/*-packages")]
    folders += [Path(entry) for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    parts += [(str(folder), _stamp(str(folder))) for folder in sorted(folders)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest() + ".json"


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")[:4096]
    except OSError:
        return ""


def _stamp(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
