"""Which of an engine's models a daemon keeps, and under which configuration the engine builds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

from warmseed.daemon.settings.config import DRAFT_METHODS
from warmseed.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

__all__ = ["Role", "config_of", "draft_config", "model_config_of"]

Role = Literal["target", "draft"]


def draft_config(config: VllmConfig) -> ModelConfig | None:
    """The configuration of the draft model that has a daemon of its own, or `None`."""
    spec = config.speculative_config
    if spec is None or spec.method not in DRAFT_METHODS:
        return None
    return spec.draft_model_config


def model_config_of(config: VllmConfig, role: Role) -> ModelConfig:
    """The configuration of the model in `role`.

    Raises:
        ConfigurationError: there is no draft model to keep.
    """
    if role == "target":
        return config.model_config
    draft = draft_config(config)
    if draft is None:
        raise ConfigurationError("this configuration has no draft model that a daemon keeps (mtp, eagle, eagle3)")
    return draft


def config_of(config: VllmConfig, role: Role) -> VllmConfig:
    """What an engine started with `config` builds the model in `role` with.

    Backends and the KV cache's dtype can be a draft's own, and vLLM's two model runners differ in what a draft inherits
    from its target: with ``--attention-backend`` given, the first runner lets the draft choose for itself.
    """
    spec = config.speculative_config
    if role == "target" or spec is None:
        return config
    if not getattr(config, "use_v2_model_runner", False):
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

        # It asks the proposer for these two and for nothing else (0.20 to 0.33).
        asked = SimpleNamespace(speculative_config=spec, vllm_config=config)
        return SpecDecodeBaseProposer._create_draft_vllm_config(asked)  # noqa: SLF001 - there is no public way
    if hasattr(spec, "apply_draft_overrides"):  # 0.31 and later
        return spec.apply_draft_overrides(config)
    dtype = getattr(spec, "kv_cache_dtype", None)
    if dtype is None:
        return config
    from vllm.config import replace

    return replace(config, cache_config=replace(config.cache_config, cache_dtype=dtype))
