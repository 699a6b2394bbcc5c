"""The ``ipc_cache`` load format inside a vLLM engine: an empty model on the meta device, filled with mapped weights.

Imported only once vLLM has imported its own loaders; `install` then registers it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from warmseed.daemon.engines.vllm import memory, observe
from warmseed.daemon.engines.vllm.arguments import LOAD_FORMAT, check_config
from warmseed.daemon.engines.vllm.draft import Role, draft_config
from warmseed.daemon.engines.vllm.fingerprint import RankPlace, checkpoint_folder, rank_fingerprint
from warmseed.daemon.engines.vllm.native import NativeLoader
from warmseed.daemon.engines.vllm.plugin import unsupported_ok
from warmseed.daemon.engines.vllm.releases import installed_release
from warmseed.daemon.engines.vllm.shell import build_shell, fill_shell, forget_layers
from warmseed.daemon.weights.checkpoint import digest_checkpoint, stat_checkpoint
from warmseed.daemon.weights.client import Attachment, attach, get_memory
from warmseed.daemon.weights.devices import device_uuid
from warmseed.daemon.weights.errors import (
    UnsupportedPlatformForIPCError,
    UnsupportedQuantForIPCError,
    WeightCacheUnavailable,
)
from warmseed.daemon.weights.loader_config import LoaderConfig
from warmseed.daemon.weights.socket import SocketAddress
from warmseed.errors import ConfigurationError, WarmseedError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.config.load import LoadConfig

__all__ = ["IpcCacheLoader", "install"]

logger = logging.getLogger("vllm.warmseed")  # below vLLM's own logger, so that its handlers print it

_RETRY_S: Final = 0.5
_MARK: Final = "_warmseed_installed"  # vLLM may load its plugins more than once
_held: list[Attachment] = []  # leases; they live as long as the process, like the model


def install(module: ModuleType) -> None:
    """Register the format with `module`, vLLM's package of loaders; an ``ipc_cache`` of its own stays behind ours."""
    if getattr(module, _MARK, False):
        return
    setattr(module, _MARK, True)
    NativeLoader.remember(module)
    if not NativeLoader.exists():
        module.register_model_loader(LOAD_FORMAT)(IpcCacheLoader)
        return
    quiet = logging.getLogger(module.__name__)
    before = quiet.level
    quiet.setLevel(logging.ERROR)  # it would warn that its own loader is overwritten; which one serves is said later
    try:
        module.register_model_loader(LOAD_FORMAT)(IpcCacheLoader)
    finally:
        quiet.setLevel(before)


class IpcCacheLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Maps weights from warmseed's daemon; loads from disk when it can't, unless told not to."""

    def __init__(self, load_config: LoadConfig) -> None:
        """Parse ``--model-loader-extra-config``.

        Raises:
            ConfigurationError: an unknown key, or keys that contradict each other.
        """
        super().__init__(load_config)
        self._release = installed_release(unsupported_ok=unsupported_ok())
        extra = dict(load_config.model_loader_extra_config or {})
        # Set by vLLM 0.31 and later for draft models; the role follows from the model's configuration anyway.
        extra.pop("is_draft", None)
        self._settings = LoaderConfig.parse(extra)

    # What vLLM asks of a loader -------------------------------------------------------------------

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        """Bytes of weights that the daemon will lend; they count towards this engine's share of the GPU."""
        if self._settings.mode != "zero_copy" or vllm_config.device_config.device_type != "cuda":
            return 0
        roles: list[Role] = ["target"]
        if draft_config(vllm_config) is not None:
            roles.append("draft")
        total = sum(self._daemon_memory(self._address(role, vllm_config.parallel_config)) for role in roles)
        if total == 0 and NativeLoader.answers(self._settings):
            return NativeLoader.external_memory(self.load_config, vllm_config)
        memory.charge.take(total)
        return total

    def download_model(self, model_config: ModelConfig) -> None:
        self._disk_loader().download_model(model_config)

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Refused: writing into mapped weights would change them for the daemon and every later engine.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "weights that are mapped from a daemon can't be reloaded in place; restart the engine, and the daemon "
            "first if the checkpoint is a new one"
        )

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        """The model with the daemon's weights in it, or, where that may be, from disk.

        Raises:
            ConfigurationError: sleep mode, EPLB or offloading, which can't work with shared weights.
            UnsupportedPlatformForIPCError: memory of this platform can't be shared; never falls back.
            UnsupportedQuantForIPCError: nor can weights of this quantization.
            WeightCacheUnavailable: the daemon can't be used and ``fallback`` is false.
        """
        check_config(vllm_config, daemon=False)
        role = self._role(vllm_config, model_config)
        if role is None:
            logger.info("ipc_cache: this kind of draft model has no daemon; it is loaded from disk")
            return self._from_disk(vllm_config, model_config, prefix)
        address = self._address(role, vllm_config.parallel_config)
        if self._settings.socket_path is None and not address.path.exists() and NativeLoader.answers(self._settings):
            logger.info(
                "ipc_cache: no daemon of warmseed's at %s; vLLM's own daemon answers and its loader is used", address
            )
            return NativeLoader.load(self.load_config, vllm_config, model_config, prefix)
        start = time.monotonic()
        try:
            return self._from_daemon(vllm_config, model_config, prefix, role, address)
        except (UnsupportedPlatformForIPCError, UnsupportedQuantForIPCError, ConfigurationError):
            raise
        except WeightCacheUnavailable as error:
            if not self._settings.fallback:
                raise
            logger.warning(
                "Weight cache unusable (reason=%s%s): %s; falling back to disk loading after %.0f ms",
                error.reason, f" fields={','.join(error.fields)}" if error.fields else "", error,
                (time.monotonic() - start) * 1e3,
            )  # fmt: skip
        except Exception as error:
            if not self._settings.fallback:
                raise
            logger.exception(
                "Weight cache IPC loading failed (reason=error): %s; falling back to disk loading after %.0f ms",
                printable(error), (time.monotonic() - start) * 1e3,
            )  # fmt: skip
        memory.charge.give_back()
        return self._from_disk(vllm_config, model_config, prefix)

    # The daemon's way -----------------------------------------------------------------------------

    def _from_daemon(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str, role: Role, address: SocketAddress
    ) -> torch.nn.Module:
        folder = checkpoint_folder(model_config.model, model_config.revision)
        device = _device(vllm_config.parallel_config)
        fingerprint = rank_fingerprint(
            vllm_config, self._release, _place(), stat_checkpoint(folder), device=str(device), role=role
        )
        attachment = attach(
            address,
            fingerprint,
            mode=self._settings.mode,
            connect_timeout_s=self._settings.connect_timeout_s,
            state_timeout_s=self._settings.state_timeout_s,
            fallback=self._settings.fallback,
            device=device,
            digest=lambda mode: digest_checkpoint(folder, mode=mode),
        )
        start = time.monotonic()
        with _undone_on_failure(vllm_config, attachment):
            model = build_shell(vllm_config, model_config, prefix, device=attachment.device)
            built = time.monotonic()
            fill_shell(model, attachment, vllm_config, model_config, self._release)
        _held.append(attachment)
        observe.begin(address)
        logger.info(
            "Mapped %d tensors (%.2f GiB) from warmseed's weight cache daemon, pid %d (%s mode): attach %.0f ms, "
            "empty model %.0f ms, map and post-process %.0f ms",
            len(attachment.tensors), attachment.nbytes / (1 << 30), attachment.state.pid, self._settings.mode,
            attachment.seconds * 1e3, (built - start) * 1e3, (time.monotonic() - built) * 1e3,
        )  # fmt: skip
        return model

    def _daemon_memory(self, address: SocketAddress) -> int:
        deadline = time.monotonic() + (0.0 if self._settings.fallback else self._settings.state_timeout_s)
        while True:
            try:
                return get_memory(address, timeout_s=self._settings.connect_timeout_s).nbytes
            except WeightCacheUnavailable as error:
                # Without fallback the load waits for the daemon, so its weights must be counted: wait here as well.
                if error.reason in ("absent", "refused") and time.monotonic() < deadline:
                    time.sleep(_RETRY_S)
                    continue
                logger.info("ipc_cache: the daemon's memory is not counted: %s", error)
                return 0

    def _address(self, role: Role, parallel: ParallelConfig) -> SocketAddress:
        if role == "draft" and self._settings.socket_path is not None:
            raise ConfigurationError(
                "socket_path names one daemon, but target and draft have one each: give socket_dir in its place"
            )
        return self._settings.address(device_uuid(_device(parallel)), draft=role == "draft")

    @staticmethod
    def _role(vllm_config: VllmConfig, model_config: ModelConfig) -> Role | None:
        """Which group's model this is; `None` is a draft that daemons do not keep."""
        spec = vllm_config.speculative_config
        if spec is None or model_config is not spec.draft_model_config or model_config is vllm_config.model_config:
            return "target"
        return "draft" if draft_config(vllm_config) is not None else None

    # The disk's way -------------------------------------------------------------------------------

    def _disk_loader(self) -> Any:
        from vllm.model_executor.model_loader import get_model_loader

        return get_model_loader(dataclasses.replace(self.load_config, load_format="auto", model_loader_extra_config={}))

    def _from_disk(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str) -> torch.nn.Module:
        model: torch.nn.Module = self._disk_loader().load_model(vllm_config, model_config, prefix)
        return model


def _place() -> RankPlace:
    from vllm.distributed import get_dp_group, get_pp_group, get_tensor_model_parallel_rank

    return RankPlace(
        tp_rank=get_tensor_model_parallel_rank(),
        pp_rank=get_pp_group().rank_in_group,
        dp_rank=get_dp_group().rank_in_group,
    )


def _device(parallel: ParallelConfig) -> torch.device:
    """This rank's device; CPU ranks are told apart by their place on the node, as their daemons are."""
    from vllm.distributed import get_world_group
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        before = (parallel.data_parallel_rank_local or 0) * parallel.world_size  # ranks of other copies on this node
        return torch.device("cpu", before + max(0, get_world_group().local_rank))
    if current_platform.is_cuda_alike():
        return torch.device("cuda", torch.cuda.current_device())
    raise UnsupportedPlatformForIPCError(
        f"{current_platform.device_name} devices can't share weights between processes: only CUDA, ROCm and Linux CPU "
        "memory can; use the default --load-format"
    )


@contextmanager
def _undone_on_failure(vllm_config: VllmConfig, attachment: Attachment) -> Iterator[None]:
    """A half-built model must leave no trace, or the disk load that follows meets its layers' names and its tensors."""
    with forget_layers(vllm_config):
        try:
            yield
        except BaseException as error:
            attachment.tensors.clear()
            attachment.close()
            if isinstance(error, WarmseedError) or not isinstance(error, Exception):
                raise
            raise WeightCacheUnavailable(
                "error",
                f"the daemon's weights do not fit this engine's model: {type(error).__name__}: {printable(error)}",
            ) from error
