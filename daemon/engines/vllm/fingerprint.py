"""A rank's weights as vLLM's configuration determines them, computed alike by the daemon and by the engine.

Taken before the model is built: post-processing may change the quantization settings inside the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmseed.daemon.engines.vllm.draft import Role, model_config_of
from warmseed.daemon.engines.vllm.releases import Release
from warmseed.daemon.weights.checkpoint import CheckpointIdentity
from warmseed.daemon.weights.fingerprint import Fingerprint, config_digest
from warmseed.errors import ConfigurationError, printable

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

__all__ = ["RankPlace", "checkpoint_folder", "rank_fingerprint"]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's coordinates; sizes come from the configuration."""

    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0


def checkpoint_folder(model: str, revision: str | None = None) -> Path:
    """The local folder of `model`: the folder itself, or a hub model's snapshot in the Hugging Face cache.

    Raises:
        ConfigurationError: it is not on this machine (yet).
    """
    folder = Path(model)
    if folder.exists():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:  # the hub's client has a dozen ways of saying that a model is not here
        raise ConfigurationError(
            f"the files of {printable(model)} are not on this machine: {printable(error)}"
        ) from error


def rank_fingerprint(
    config: VllmConfig,
    release: Release,
    place: RankPlace,
    checkpoint: CheckpointIdentity,
    *,
    device: str = "cpu",
    role: Role = "target",
) -> Fingerprint:
    """What the weights of the rank at `place` are, on `device` of this process.

    `config` is what the model in `role` is built with: for a draft, `draft.config_of` the engine's.
    """
    import torch
    import vllm

    model, parallel, cache = model_config_of(config, role), config.parallel_config, config.cache_config
    kernel = getattr(config, "kernel_config", None)
    on_gpu = device.startswith("cuda")
    return Fingerprint(
        checkpoint=checkpoint,
        revision=str(model.revision or ""),
        architecture=",".join(getattr(model.hf_config, "architectures", None) or ()),
        role=role,
        tp_size=parallel.tensor_parallel_size,
        tp_rank=place.tp_rank,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=place.pp_rank,
        dp_size=parallel.data_parallel_size,
        dp_rank=place.dp_rank,
        expert_parallel=bool(parallel.enable_expert_parallel),
        expert_placement=str(getattr(parallel, "expert_placement_strategy", "") or ""),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=str(model.quantization or ""),
        quantization_config=_quantization_digest(model),
        rope=_rope_digest(model),
        kv_cache_dtype=str(cache.cache_dtype),
        kv_cache_skip_layers=tuple(sorted(set(getattr(cache, "kv_cache_dtype_skip_layers", None) or ()))),
        attention_backend=_attention_backend(config),
        moe_backend=str(getattr(kernel, "moe_backend", "") or ""),
        linear_backend=str(getattr(kernel, "linear_backend", "") or ""),
        engine="vllm",
        engine_version=str(vllm.__version__),
        torch_version=str(torch.__version__),  # a subclass of str, which msgpack refuses
        cuda_version=str(torch.version.cuda or torch.version.hip or "") if on_gpu else "",
        gpu_model=torch.cuda.get_device_name(device) if on_gpu else "",
        extra={
            # On a CPU the packing that follows lives outside the tensors, so each engine does it for itself.
            "post_processed_by": "daemon" if on_gpu else "engine",
            "hf_overrides": config_digest(_plain({"hf_overrides": _overrides(model)})),
            "linear_backend_per_quant": config_digest(_plain(getattr(kernel, "linear_backend_per_quant", None) or {})),
            "release": release.name,
        },
    )


def _attention_backend(config: VllmConfig) -> str:
    """As asked for; MLA post-processing depends on it. ``auto`` resolves alike in daemon and engine."""
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    return str(getattr(backend, "name", backend) or "")


def _quantization_digest(model: ModelConfig) -> str:
    stored: Any = getattr(model.hf_config, "quantization_config", None)
    if hasattr(stored, "to_dict"):
        stored = stored.to_dict()
    runtime = getattr(model, "quantization_config", None)
    if not stored and runtime is None:
        return ""
    return config_digest(_plain({"checkpoint": stored, "runtime": runtime}))


def _rope_digest(model: ModelConfig) -> str:
    text = model.hf_text_config
    names = (
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "max_position_embeddings",
        "original_max_position_embeddings",
    )
    return config_digest(_plain({name: getattr(text, name, None) for name in names}))


def _overrides(model: ModelConfig) -> object:
    """``--hf-overrides``; a function can't be compared and stands for itself by name."""
    given = getattr(model, "hf_overrides", None) or {}
    return given if isinstance(given, Mapping) else getattr(given, "__qualname__", repr(type(given)))


def _plain(value: Any) -> Any:
    """`value` as JSON has it: whole floats as integers (10000 and 10000.0 are one RoPE base), the rest as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return str(value)
