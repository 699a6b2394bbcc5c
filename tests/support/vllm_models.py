"""Small checkpoints for what SmolLM2 is too large for, or not: many ranks, experts, a draft. All speak its language."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.vllm_nodes import smollm2

__all__ = ["eagle_draft", "small_llama", "small_mixtral"]


def small_llama(folder: Path) -> Path:
    """Two layers: divides by two, and compiles in seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_shape(heads=4, kv_heads=2), intermediate_size=512)
    return _written(LlamaForCausalLM, config, folder)


def small_mixtral(folder: Path) -> Path:
    """Two layers of four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    config = MixtralConfig(**_shape(heads=4, kv_heads=2), intermediate_size=256, **experts)
    return _written(MixtralForCausalLM, config, folder)


def eagle_draft(folder: Path) -> Path:
    """An EAGLE head for SmolLM2 that expects the same word again, which now and then is right."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = json.loads((smollm2() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    seeded = torch.Generator().manual_seed(0)

    def small(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=seeded) * 0.02

    weights = {
        "fc.weight": torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1),
        "layers.0.self_attn.q_proj.weight": small(hidden, hidden),
        "layers.0.self_attn.k_proj.weight": small(kv, hidden),
        "layers.0.self_attn.v_proj.weight": small(kv, hidden),
        "layers.0.self_attn.o_proj.weight": small(hidden, hidden) * 0.05,
        "layers.0.mlp.gate_proj.weight": small(inner, hidden),
        "layers.0.mlp.up_proj.weight": small(inner, hidden),
        "layers.0.mlp.down_proj.weight": small(hidden, inner) * 0.05,
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
    }
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def _shape(*, heads: int, kv_heads: int) -> dict[str, Any]:
    known = json.loads((smollm2() / "config.json").read_text())
    kept = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    return {
        **{name: known[name] for name in kept},
        "hidden_size": 64 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 2,
        "max_position_embeddings": 1024,
    }


def _written(kind: Any, config: Any, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    kind(config).to(torch.bfloat16).save_pretrained(folder)
    for path in smollm2().iterdir():
        if path.name.startswith(("token", "chat_template", "generation_config")):
            shutil.copy(path, folder)
    return folder
