"""Checkpoints of Llama's shape with random values, in bf16 or FP8: real sizes, real kernels, meaningless words.

The names of an FP8 checkpoint's scales and of its configuration are those that vLLM's ``fp8`` and ``modelopt`` read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

__all__ = ["FORMATS", "write_llama"]

_HIDDEN, _INNER, _HEADS, _GROUPS, _VOCABULARY = 4096, 14336, 32, 8, 128256  # of Llama 3 8B, which has 32 layers
_FP8_MAX: Final = 448.0  # of float8_e4m3fn
_BLOCK: Final = 128
_SHARDS: Final = 4


def write_llama(folder: Path, tokenizer: Path, *, layers: int = 32, form: str = "bf16", seed: int = 0) -> None:
    """A checkpoint in `folder`, with the tokenizer of the folder `tokenizer`.

    Raises:
        KeyError: `form` is neither ``bf16`` nor one of `FORMATS`.
    """
    import torch
    from safetensors.torch import save_file

    quantize, described = FORMATS[form] if form != "bf16" else (_as_it_is, None)
    folder.mkdir(parents=True, exist_ok=True)
    for path in tokenizer.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copy(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(_config(layers, described)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        scale = 0.5 / columns**0.5
        values = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32)
        return values.mul_(scale).bfloat16()

    index: dict[str, str] = {}
    for shard in range(_SHARDS):
        tensors: dict[str, torch.Tensor] = {}
        if shard == 0:
            tensors["model.embed_tokens.weight"] = matrix(_VOCABULARY, _HIDDEN)
        if shard == _SHARDS - 1:
            tensors["lm_head.weight"] = matrix(_VOCABULARY, _HIDDEN)
            tensors["model.norm.weight"] = torch.ones(_HIDDEN, dtype=torch.bfloat16)
        for layer in range(shard * layers // _SHARDS, (shard + 1) * layers // _SHARDS):
            start = f"model.layers.{layer}."
            for name, size in _SIZES.items():
                tensors.update(quantize(start + name, matrix(*size)))
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{start}{norm}.weight"] = torch.ones(_HIDDEN, dtype=torch.bfloat16)
        name = f"model-{shard + 1:05d}-of-{_SHARDS:05d}.safetensors"
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


_SIZES: Final = {
    "self_attn.q_proj": (_HIDDEN, _HIDDEN), "self_attn.k_proj": (_HIDDEN // _HEADS * _GROUPS, _HIDDEN),
    "self_attn.v_proj": (_HIDDEN // _HEADS * _GROUPS, _HIDDEN), "self_attn.o_proj": (_HIDDEN, _HIDDEN),
    "mlp.gate_proj": (_INNER, _HIDDEN), "mlp.up_proj": (_INNER, _HIDDEN), "mlp.down_proj": (_HIDDEN, _INNER),
}  # fmt: skip


def _config(layers: int, quantization: dict[str, Any] | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": _HIDDEN,
        "intermediate_size": _INNER, "num_hidden_layers": layers, "num_attention_heads": _HEADS,
        "num_key_value_heads": _GROUPS, "vocab_size": _VOCABULARY, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return config | ({"quantization_config": quantization} if quantization else {})


# What a matrix becomes in a checkpoint ------------------------------------------------------------

Tensors = Iterator[tuple[str, "torch.Tensor"]]


def _as_it_is(name: str, matrix: torch.Tensor) -> Tensors:
    yield f"{name}.weight", matrix


def _by_tensor(name: str, matrix: torch.Tensor) -> Tensors:
    """One scale a matrix, one for its activations, and one for what attention keeps of it."""
    import torch

    scale = matrix.abs().max().float() / _FP8_MAX
    yield f"{name}.weight", _fp8(matrix.float() / scale)
    yield f"{name}.weight_scale", scale
    yield f"{name}.input_scale", torch.tensor(0.03125)
    if name.endswith(("k_proj", "v_proj")):
        yield f"{name}.{name[-6]}_scale", torch.tensor(0.0625 if name.endswith("k_proj") else 0.125)


def _by_channel(name: str, matrix: torch.Tensor) -> Tensors:
    scale = matrix.abs().amax(dim=1).float() / _FP8_MAX
    yield f"{name}.weight", _fp8(matrix.float() / scale[:, None])
    yield f"{name}.weight_scale", scale


def _by_block(name: str, matrix: torch.Tensor) -> Tensors:
    rows, columns = matrix.shape
    blocks = matrix.float().reshape(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / _FP8_MAX
    yield f"{name}.weight", _fp8((blocks / scale[:, None, :, None]).reshape(rows, columns))
    yield f"{name}.weight_scale_inv", scale


def _fp8(matrix: torch.Tensor) -> torch.Tensor:
    import torch

    return matrix.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


FORMATS: Final[dict[str, tuple[Callable[[str, torch.Tensor], Tensors], dict[str, Any]]]] = {
    "fp8_tensor": (_by_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8_block": (
        _by_block,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]},
    ),
    "modelopt_tensor": (_by_tensor, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "modelopt_channel": (
        _by_channel,
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]},
    ),
}
