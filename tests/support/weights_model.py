"""A small model with everything that makes sharing hard: ties, shared buffers, strides, views, odd dtypes."""

from __future__ import annotations

import hashlib

import torch

from warmseed.daemon.weights.checkpoint import CheckpointFile, CheckpointIdentity
from warmseed.daemon.weights.digest_cache import FileStat
from warmseed.daemon.weights.fingerprint import Fingerprint


class Marked(torch.nn.Parameter):
    """A parameter class of an engine's own."""


class Layer(torch.nn.Module):
    def __init__(self, rotary: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(16, 8, dtype=torch.bfloat16))
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.scale.loader = "kept"  # type: ignore[attr-defined]
        self.marked = torch.nn.Parameter(torch.empty(3, 5))
        self.register_buffer("rotary", rotary, persistent=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 8, dtype=torch.bfloat16)
        rotary = torch.empty(7, 4)
        self.layers = torch.nn.ModuleList(Layer(rotary) for _ in range(3))
        self.head = torch.nn.Linear(8, 32, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.empty((), dtype=torch.int64))
        self.register_buffer("nothing", torch.empty(0, 4))
        for layer in self.layers:
            layer.marked = Marked(layer.marked.data)
            layer.marked.note = "kept"


def shell() -> Model:
    """The model without memory."""
    with torch.device("meta"):
        return Model()


def loaded(seed: int = 0) -> Model:
    """The model with its values, some of them in strided and overlapping memory, as post-processing leaves them."""
    model = Model()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
            else:
                tensor.fill_(seed + 5)
        first, second, third = model.layers
        first.weight.data = first.weight.data.t().contiguous().t()  # column-major
        fused = torch.randn(40, generator=generator)
        second.marked.data = fused[0:15].view(3, 5)
        third.marked.data = fused[10:25].view(3, 5)  # overlaps the one before
        first.extra = torch.nn.Parameter(torch.arange(9, dtype=torch.int8), requires_grad=False)  # not in the shell
    return model


def digests(model: torch.nn.Module) -> dict[str, str]:
    """Every tensor's bytes, dtype, shape and stride as one digest, by name."""
    found = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        flat = tensor.detach().contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0)
        text = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {flat.tolist()}"
        found[name] = hashlib.sha256(text.encode()).hexdigest()
    return found


def fingerprint(**changes: object) -> Fingerprint:
    """A fingerprint that fits the model."""
    file = CheckpointFile("model.safetensors", FileStat(1, 2, 3, 4, 5), "a" * 64, settled=True)
    fields: dict[str, object] = {
        "checkpoint": CheckpointIdentity("full", (file,), "b" * 64),
        "architecture": "Model",
        "dtype": "bfloat16",
        "engine": "torch",
        "engine_version": "1",
    }
    return Fingerprint(**{**fields, **changes})  # type: ignore[arg-type]
