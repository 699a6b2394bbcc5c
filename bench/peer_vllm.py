"""vLLM 0.33's own daemon-to-daemon seeding, to measure beside ours; fetched from PyPI, never kept in the tree."""

from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

VERSION = "0.33.0"
FOLDER = "vllm/model_executor/model_loader/weight_cache"
# Of protocol.py only what seed.py uses: the rest imports torch and half of vLLM.
NEEDED = {"_LEN_STRUCT", "MAX_JSON_MSG_SIZE", "send_json", "recv_json", "_recv_exact"}
KIND = "flashinfer_autotune"


def sources() -> Path:
    """A folder with vLLM's seed.py and the JSON half of its protocol.py; downloads the wheel once (336 MB)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "warmseed-bench" / f"vllm-{VERSION}"
    if not (cache / "protocol.py").exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir"]
            subprocess.run([*pip, "--only-binary=:all:", "-d", folder, f"vllm=={VERSION}"], check=True, timeout=1800)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                seed = archive.read(f"{FOLDER}/seed.py").decode()
                protocol = archive.read(f"{FOLDER}/protocol.py").decode()
        (cache / "seed.py").write_text(seed)
        (cache / "protocol.py").write_text(_json_half(protocol))
    return cache


def load() -> Any:
    """vLLM's seed module, running on stub modules."""
    folder = sources()
    package = "vllm.model_executor.model_loader.weight_cache"
    parts = package.split(".")
    for count in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
    log = types.ModuleType("vllm.logger")
    log.init_logger = logging.getLogger  # type: ignore[attr-defined]
    sys.modules["vllm.logger"] = log
    for name in ("protocol", "seed"):
        module = types.ModuleType(f"{package}.{name}")
        sys.modules[module.__name__] = module
        exec(compile((folder / f"{name}.py").read_text(), f"{name}.py", "exec"), module.__dict__)
    return sys.modules[f"{package}.seed"]


class Table:
    """vLLM's `Seedable` for one table on disk, as its warmup_cache.py answers: read, parse, send."""

    kind = KIND

    def __init__(self, path: Path) -> None:
        self.path = path

    def resolve(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"autotune_configs_dp0_rank0.json": json.loads(self.path.read_bytes())}


def _json_half(source: str) -> str:
    kept = ["import json, socket, struct, time", "from typing import Any"]
    for node in ast.parse(source).body:
        names = {node.name} if isinstance(node, ast.FunctionDef) else set()
        if isinstance(node, ast.Assign):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if names & NEEDED:
            kept.append(ast.get_source_segment(source, node) or "")
    return "\n\n".join(kept) + "\n"
