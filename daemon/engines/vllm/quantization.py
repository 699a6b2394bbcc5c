"""Which quantization methods can take weights that are post-processed already, and what is left to do for them.

From 0.30 on, vLLM's methods declare it themselves (``supports_pre_processed_weights``). For the releases before, the
list below is explicit: each entry was read in those releases' sources and, on 0.26, its output compared bit for bit
with a disk load (``bench/gpu/vllm_fp8_parity.py``). Whatever is not in it is refused before the slow load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from warmseed.daemon.engines.vllm.releases import Release
from warmseed.daemon.weights.errors import UnsupportedQuantForIPCError
from warmseed.daemon.weights.export import check_exportable, require_shareable

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig

__all__ = ["check_quantization", "finish_processed", "post_process"]

_KV_PLACEHOLDERS: Final = ("k_scale", "v_scale", "q_scale", "prob_scale")
_CUTLASS: Final = "CutlassFP8ScaledMMLinearKernel"
_CUTLASS_BLOCKS: Final = "CutlassFp8BlockScaledMMKernel"


def check_quantization(model: torch.nn.Module, release: Release, *, on_gpu: bool) -> None:
    """Pass silently if every layer of `model`, which may be an empty shell, can be shared.

    Raises:
        UnsupportedQuantForIPCError: naming the first layer and every method that can't.
    """
    check_exportable(model)
    require_shareable(
        (name or "<root>", type(method).__name__, _able(method, layer, release, on_gpu=on_gpu))
        for name, layer, method in _methods(model)
    )


def post_process(model: torch.nn.Module, model_config: ModelConfig, device: torch.device) -> None:
    """What vLLM does to freshly loaded weights, including weights that were quantized while they were loaded."""
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    # Not part of the loader's interface in any release; without it online quantization never ends.
    online = getattr(base_loader, "_has_online_quant", None)
    if online is not None and online(model):
        base_loader.finalize_layerwise_processing(model, model_config)
    process_weights_after_loading(model, model_config, device)


def finish_processed(model: torch.nn.Module, model_config: ModelConfig, device: torch.device, release: Release) -> None:
    """Do for mapped, processed weights what is not in their tensors: scale copies, kernel objects, packed handles.

    Raises:
        UnsupportedQuantForIPCError: a method outside the list, which the daemon should have refused.
    """
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    with contextlib.ExitStack() as stack:
        if release.processed_weights:
            from vllm.model_executor.utils import weights_already_processed

            stack.enter_context(weights_already_processed())
        else:
            stack.enter_context(_substituted(model))
        process_weights_after_loading(model, model_config, device)


def _methods(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            yield name, layer, method


def _able(method: Any, layer: torch.nn.Module, release: Release, *, on_gpu: bool) -> bool:
    if not on_gpu:
        # Weights are shared as loaded and every engine processes them; only quantizing while loading is lost.
        return not getattr(method, "uses_meta_device", False)
    if release.processed_weights:
        return bool(method.supports_pre_processed_weights)
    entry = PROCESSED.get(type(method).__name__)
    return entry is not None and entry.accepts(method, layer)


class _Entry:
    """A method whose processing may be repeated on its own output: it finds nothing left to do."""

    def accepts(self, method: Any, layer: Any) -> bool:
        """Whether `layer` as it is set up can take processed weights."""
        return True

    def finish(self, method: Any, layer: torch.nn.Module, original: Callable[[Any], None]) -> None:
        """Build what the tensors don't carry."""
        original(layer)


class _KvCacheScales(_Entry):
    """Scales were folded into registered buffers; the placeholders they came in are used up."""

    def finish(self, method: Any, layer: Any, original: Callable[[Any], None]) -> None:
        for name in _KV_PLACEHOLDERS:
            if hasattr(layer, name):
                delattr(layer, name)
        if hasattr(layer, "_k_scale"):
            for scale in ("k", "v", "q"):
                setattr(layer, f"_{scale}_scale_float", getattr(layer, f"_{scale}_scale").item())
            for scale in ("k", "v"):
                if hasattr(layer, f"_{scale}_scale_cpu"):
                    setattr(layer, f"_{scale}_scale_cpu", getattr(layer, f"_{scale}_scale").detach().cpu())
        _restore_ranges(layer)


def _restore_ranges(layer: Any) -> None:
    """Up to 0.27, constants that are plain attributes: no tensor of the model, so neither mapped nor loaded."""
    import torch

    for name in ("q", "k", "v"):
        if hasattr(layer, f"{name}_range"):
            from vllm import envs

            constant = getattr(envs, f"{name.upper()}_SCALE_CONSTANT")
            device = getattr(layer, f"_{name}_scale").device
            setattr(layer, f"{name}_range", torch.tensor(constant, dtype=torch.float32, device=device))


class _Fp8Linear(_Entry):
    """FP8 on vLLM's own CUTLASS kernels, with a scale a tensor, a channel or a block; other kernels repack."""

    def accepts(self, method: Any, layer: Any) -> bool:
        if getattr(method, "use_marlin", False):
            return False
        if _kernel(method) == _CUTLASS_BLOCKS:
            return True
        # Padding changes what the kernel remembers as the layer's real width.
        return _kernel(method) == _CUTLASS and all(size % 16 == 0 for size in layer.weight.shape)

    def finish(self, method: Any, layer: Any, original: Callable[[Any], None]) -> None:
        if getattr(layer, "input_scale", None) is None:  # no tensor of the daemon's: scaled anew for each activation
            layer.input_scale = None
        if _kernel(method) == _CUTLASS:
            method.fp8_linear.process_weights_after_loading(layer)


def _kernel(method: Any) -> str:
    return type(getattr(method, "fp8_linear", None)).__name__


# For 0.20 to 0.29. MoE methods rearrange experts for whichever kernel is picked and are left out until proven.
PROCESSED: Final[Mapping[str, _Entry]] = {
    "UnquantizedLinearMethod": _Entry(),
    "UnquantizedEmbeddingMethod": _Entry(),
    "Fp8LinearMethod": _Fp8Linear(),
    "Fp8PerTensorOnlineLinearMethod": _Fp8Linear(),
    "Fp8PtpcOnlineLinearMethod": _Fp8Linear(),
    "Fp8PerBlockOnlineLinearMethod": _Fp8Linear(),
    "ModelOptFp8LinearMethod": _Fp8Linear(),
    "ModelOptFp8PcPtLinearMethod": _Fp8Linear(),
    "BaseKVCacheMethod": _KvCacheScales(),
    "Fp8KVCacheMethod": _KvCacheScales(),
    "ModelOptFp8KVCacheMethod": _KvCacheScales(),
    "ModelOptKVCacheMethod": _KvCacheScales(),
}


@contextlib.contextmanager
def _substituted(model: torch.nn.Module) -> Iterator[None]:
    """Inside, vLLM's own pass over the layers calls the list's entries in place of the methods' processing."""
    touched: list[Any] = []
    try:
        for name, _, method in _methods(model):
            entry = PROCESSED.get(type(method).__name__)
            if entry is None:
                raise UnsupportedQuantForIPCError(
                    f"{name}: {type(method).__name__} can't take weights that are processed already on this vLLM"
                )
            if "process_weights_after_loading" in vars(method):
                continue  # one method object may serve several layers
            original = method.process_weights_after_loading

            def finish(
                layer: Any, entry: _Entry = entry, method: Any = method, original: Callable[[Any], None] = original
            ) -> None:
                entry.finish(method, layer, original)

            method.process_weights_after_loading = finish
            touched.append(method)
        yield
    finally:
        for method in touched:
            del method.process_weights_after_loading
