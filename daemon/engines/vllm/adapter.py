"""The daemon's view of vLLM: `Engine` as `warmseed.daemon.engines.base` defines it.

Nothing of vLLM is imported before `prepare` or `identity` is called, and by then the process's environment says where
the node's caches are, because vLLM reads that when it is imported.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from warmseed.daemon.engines.base import CacheLayout, EngineIdentity, LoadedModel
from warmseed.daemon.engines.bytecode import bytecode_variables
from warmseed.daemon.engines.vllm import model as loading
from warmseed.daemon.engines.vllm.arguments import LOAD_FORMAT, Usage, engine_config, parse_engine_arguments
from warmseed.daemon.engines.vllm.draft import config_of, model_config_of
from warmseed.daemon.engines.vllm.fingerprint import RankPlace, checkpoint_folder, rank_fingerprint
from warmseed.daemon.engines.vllm.identity import snapshot, table_hash
from warmseed.daemon.engines.vllm.layout import MODULES, layout_below
from warmseed.daemon.engines.vllm.plugin import UNSUPPORTED_OK
from warmseed.daemon.engines.vllm.releases import installed_release
from warmseed.daemon.protocol import rendezvous
from warmseed.daemon.protocol.spec import RankSpec
from warmseed.daemon.settings.paths import default_cache_root, state_folder
from warmseed.daemon.weights.checkpoint import CheckpointIdentity, check_unchanged, digest_checkpoint
from warmseed.daemon.weights.fingerprint import Fingerprint
from warmseed.errors import ConfigurationError
from warmseed.seeding.environment import Environment
from warmseed.seeding.kinds.autotune.collect import Collected, collect
from warmseed.seeding.kinds.autotune.layout import autotune_disabled
from warmseed.seeding.kinds.base import Kind
from warmseed.seeding.kinds.compiled.toolchain import toolchain_facts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from warmseed.daemon.settings.config import PreloadConfig

__all__ = ["VllmEngine", "engine_arguments"]

logger = logging.getLogger(__name__)

# Ours, among flags that are otherwise handed to vLLM as they are.
_UNSUPPORTED_OK_FLAG: Final = "--engine-unsupported-ok"
_USAGE_FLAG: Final = "--engine-usage"


class VllmEngine:
    """One rank of a vLLM model, as the daemon loads and describes it."""

    name = "vllm"
    modules: tuple[str, ...] = MODULES

    def __init__(self, spec: RankSpec) -> None:
        """Check what can be checked without importing vLLM.

        Raises:
            ConfigurationError: no vLLM here, one that is not supported, or flags that a daemon can't follow.
        """
        self._spec = spec
        self._arguments, self._usage, unsupported_ok = engine_arguments(spec.config)
        self._unsupported_ok = unsupported_ok or os.environ.get(UNSUPPORTED_OK) == "1"
        self._release = installed_release(unsupported_ok=self._unsupported_ok)
        if not self._release.supported:
            logger.warning(
                "vLLM %s is outside the supported releases and is treated like its nearest neighbour; compare its "
                "answers with those of a plain start before you trust it",
                self._release.name,
            )
        self._building = Lock()
        self._config: VllmConfig | None = None
        self._identity: EngineIdentity | None = None
        self._collected: Collected | None = None

    # Before anything heavy ------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """``cuda:N``, or the CPU; CPU ranks are told apart by their place on the node."""
        if _cpu_build():
            return "cpu" if self._spec.local_rank == 0 else f"cpu:{self._spec.local_rank}"
        return f"cuda:{self._spec.device}"

    def device_uuid(self) -> str:
        import torch

        from warmseed.daemon.weights.devices import device_uuid

        return device_uuid(torch.device(self.device))

    def device_index(self) -> int:
        return -1 if self.device.startswith("cpu") else self._spec.device

    def caches(self, cache_root: Path) -> CacheLayout:
        version = arch = ""
        if self._tunes():
            collected = self._flashinfer()
            version, arch = collected.metadata.get("flashinfer_version", ""), collected.arch
        layout = layout_below(cache_root, os.environ, flashinfer=version, arch=arch)
        bytecode = bytecode_variables(cache_root, self.modules, os.environ)
        return CacheLayout(layout.roots, {**layout.variables, **bytecode, **self._engine_variables()})

    def kinds(self) -> Sequence[Kind]:
        from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
        from warmseed.seeding.kinds.compiled.cute_dsl import CuteDslCache
        from warmseed.seeding.kinds.compiled.deepgemm import DeepGemmCache
        from warmseed.seeding.kinds.compiled.flashinfer import FlashInferCache
        from warmseed.seeding.kinds.compiled.inductor import InductorCache
        from warmseed.seeding.kinds.compiled.tilelang import TileLangCache
        from warmseed.seeding.kinds.compiled.triton import TritonCache
        from warmseed.seeding.kinds.compiled.vllm import VllmCache

        compiled = [VllmCache(), InductorCache(), TritonCache()]
        if not self.device.startswith("cpu"):
            compiled += [FlashInferCache(), DeepGemmCache(), TileLangCache(), CuteDslCache()]
        kinds: list[Kind] = [CompileCacheKind(compiled)]
        if self._tunes():
            from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune

            kinds.append(FlashInferAutotune())
        return kinds

    def environment(self) -> Environment:
        from warmseed.seeding.host import host_facts
        from warmseed.seeding.kinds.autotune.home import environment_fields

        facts = {**host_facts(), **toolchain_facts(), **_device_facts(self.device)}
        if self._tunes():
            facts.update(environment_fields(self._flashinfer().metadata))
        return Environment(facts)

    # With vLLM ------------------------------------------------------------------------------------

    def prepare(self) -> None:
        self._configured()
        import vllm.model_executor.model_loader  # noqa: F401

    def identity(self) -> EngineIdentity:
        self._configured()
        if self._identity is None:
            raise RuntimeError("the identity is snapshotted together with the configuration")
        return self._identity

    def load(self) -> LoadedModel:
        config = self._configured()
        spec = self._spec
        folder = self._checkpoint_folder(config)
        # Beside the load, so that the bytes are read from disk once and hashed from the page cache.
        with ThreadPoolExecutor(1, thread_name_prefix="warmseed-digest") as pool:
            digesting = pool.submit(digest_checkpoint, folder, mode=spec.config.checkpoint_digest)
            device = loading.join_groups(
                config,
                rank=spec.global_rank,
                world_size=spec.world_size,
                local_rank=spec.device if not self.device.startswith("cpu") else spec.local_rank,
                store=self._store(),
                name=f"warmseed-{spec.group}-{spec.rendezvous_port}",
            )
            module = loading.load_rank(config, self._release, device, role=spec.group)
            checkpoint = digesting.result()
        check_unchanged(folder, checkpoint)
        return LoadedModel(module, checkpoint)

    def fingerprint(self, checkpoint: CheckpointIdentity) -> Fingerprint:
        spec = self._spec
        place = RankPlace(spec.tp_rank, spec.pp_rank, 0 if self.copies_run_apart() else spec.dp_rank)
        config = config_of(self._configured(), spec.group)
        return rank_fingerprint(config, self._release, place, checkpoint, device=self.device, role=spec.group)

    def table_hash(self) -> str:
        """Where an engine looks for its FlashInfer tables; after `load` only, and maybe not the identity's hash."""
        return table_hash(self._configured())

    def copies_run_apart(self) -> bool:
        return not self._configured().model_config.is_moe

    def rehearsal(self, *, socket_dir: Path, cache_root: Path) -> list[str]:
        extra = {"socket_dir": str(socket_dir), "fallback": False}
        return [
            *(sys.executable, "-m", "warmseed.daemon.engines.vllm.rehearse", "--usage", self._usage, "--"),
            *self._arguments,
            *("--load-format", LOAD_FORMAT, "--model-loader-extra-config", json.dumps(extra)),
        ]

    def release(self) -> None:
        loading.leave_groups(self.device)

    # Details --------------------------------------------------------------------------------------

    def _configured(self) -> VllmConfig:
        """vLLM's configuration, made once and hashed at once: building the model changes it."""
        with self._building:
            if self._config is None:
                os.environ.update(self.caches(self._cache_root()).variables)
                config = engine_config(parse_engine_arguments(self._arguments), usage=self._usage)
                if config.parallel_config.data_parallel_size > 1:
                    self._place_copy(config)
                self._identity = snapshot(config)
                self._config = config
            return self._config

    def _place_copy(self, config: VllmConfig) -> None:
        """What an engine sets for the workers of one data-parallel copy, before it hashes anything.

        Copies of a dense model run apart: for vLLM each is an engine without data parallelism (v1/engine/core.py,
        ``run_engine_core``), with a hash and caches to match.
        """
        parallel, spec = config.parallel_config, self._spec
        parallel.data_parallel_rank_local = spec.local_rank // parallel.world_size
        parallel.data_parallel_index = spec.dp_rank
        if config.model_config.is_moe:
            parallel.data_parallel_rank = spec.dp_rank
        elif hasattr(parallel, "reconfigure_for_independent_dp_rank"):
            parallel.reconfigure_for_independent_dp_rank()
        else:
            parallel.data_parallel_size = parallel.data_parallel_size_local = 1
            parallel.data_parallel_rank = 0

    def _checkpoint_folder(self, config: VllmConfig) -> Path:
        chosen = model_config_of(config, self._spec.group)
        return checkpoint_folder(chosen.model, chosen.revision)

    def _store(self) -> Any:
        if self._spec.world_size == 1:
            from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in its __all__

            return HashStore()
        return rendezvous.connect(self._spec, loading.GROUP_SECONDS)

    def _tunes(self) -> bool:
        return (
            not self.device.startswith("cpu")
            and self._release.per_rank_tables
            and not autotune_disabled(tuple(self._arguments))
            and toolchain_facts()["flashinfer"] != "absent"
        )

    def _flashinfer(self) -> Collected:
        """FlashInfer's own description of this GPU and its libraries; asked of a child process once a boot."""
        if self._collected is None:
            self._collected = collect(state_folder(self._cache_root()), device=self._spec.device)
        return self._collected

    def _cache_root(self) -> Path:
        root = self._spec.config.cache_root
        return default_cache_root() if root is None else Path(root).absolute()

    def _engine_variables(self) -> dict[str, str]:
        return {UNSUPPORTED_OK: "1"} if self._unsupported_ok else {}


def engine_arguments(config: PreloadConfig) -> tuple[list[str], Usage, bool]:
    """vLLM's flags for `config`, how its engines are started, and whether any release may be tried.

    Raises:
        ConfigurationError: a flag of ours in vLLM's place, or one with a value it can't have.
    """
    arguments = ["--model", config.model, "--dtype", config.dtype]
    sizes = {
        "--tensor-parallel-size": config.tensor_parallel_size,
        "--pipeline-parallel-size": config.pipeline_parallel_size,
        "--data-parallel-size": config.data_parallel_size,
    }
    for flag, size in sizes.items():
        if size != 1:
            arguments += [flag, str(size)]
    if config.nnodes > 1:  # else vLLM expects all ranks on the GPUs of this node
        arguments += ["--nnodes", str(config.nnodes), "--node-rank", str(config.node_rank)]
        arguments += ["--master-addr", config.master_addr]
        if config.master_port is not None:
            arguments += ["--master-port", str(config.master_port)]
    if config.revision is not None:
        arguments += ["--revision", config.revision]
    if config.load_format is not None:
        arguments += ["--load-format", config.load_format]
    if config.enable_expert_parallel:
        arguments.append("--enable-expert-parallel")
    if config.speculative_config is not None:
        arguments += ["--speculative-config", config.speculative_config]
    if config.disable_flashinfer_autotune:
        arguments.append("--no-enable-flashinfer-autotune")
    usage: Usage = "serve"
    unsupported_ok = False
    rest = list(config.engine_args)
    while rest:
        word = rest.pop(0)
        flag, _, value = word.partition("=")
        if flag == _UNSUPPORTED_OK_FLAG:
            unsupported_ok = True
        elif flag == _USAGE_FLAG:
            value = value or (rest.pop(0) if rest else "")
            if value not in ("serve", "llm"):
                raise ConfigurationError(
                    f"{_USAGE_FLAG} must be serve (engines started by `vllm serve`) or llm (by the LLM class)"
                )
            usage = "llm" if value == "llm" else "serve"
        else:
            arguments.append(word)
    return arguments, usage, unsupported_ok


def _cpu_build() -> bool:
    """Whether this environment's vLLM runs on the CPU: its own build, or any build where torch has no GPU support."""
    import torch

    return torch.version.cuda is None and torch.version.hip is None


def _device_facts(device: str) -> dict[str, str]:
    """The device that code is compiled for."""
    if device.startswith("cpu"):
        return {"device": "cpu", "cpu_threads": str(len(os.sched_getaffinity(0)))}
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "compute_capability": f"{major}.{minor}",
        "cuda": str(torch.version.cuda or torch.version.hip),
    }
