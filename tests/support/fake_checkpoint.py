"""A folder that looks like a model without being one that can be loaded: enough for what is checked before."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["fake_checkpoint", "safetensors"]


def safetensors(elements: int = 8) -> bytes:
    """A file of one tensor of bytes (https://github.com/huggingface/safetensors, "Format")."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [elements], "data_offsets": [0, elements]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(elements)


def fake_checkpoint(folder: Path) -> Path:
    """Write one to `folder`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(safetensors())
    return folder
