"""The explicit list for vLLM releases whose methods do not say whether they take processed weights."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from warmseed.daemon.engines.vllm.quantization import PROCESSED


def kernel(name: str) -> Any:
    """An object whose class has vLLM's name for a kernel, and which counts what is asked of it."""
    processed: list[Any] = []
    made = type(name, (), {"process_weights_after_loading": lambda self, layer: processed.append(layer)})()
    made.processed = processed
    return made


def fp8(name: str = "CutlassFP8ScaledMMLinearKernel", **flags: bool) -> Any:
    return SimpleNamespace(fp8_linear=kernel(name), **flags)


def layer(*shape: int) -> Any:
    return SimpleNamespace(weight=torch.empty(shape))


def test_methods_outside_the_list_have_no_entry() -> None:
    for name in (
        "AWQMarlinLinearMethod",
        "GPTQMarlinLinearMethod",
        "Fp8MoEMethod",
        "UnquantizedFusedMoEMethod",
        "Mxfp4MoEMethod",
    ):
        assert name not in PROCESSED


def test_fp8_on_the_cutlass_kernel_is_taken() -> None:
    assert PROCESSED["Fp8LinearMethod"].accepts(fp8(), layer(4096, 14336))


@pytest.mark.parametrize(
    ("method", "size"),
    [
        (fp8("MarlinFP8ScaledMMLinearKernel"), (64, 64)),
        (fp8("FlashInferFP8ScaledMMLinearKernel"), (64, 64)),
        (SimpleNamespace(), (64, 64)),
        (fp8(), (64, 100)),
        (fp8(), (17, 64)),
    ],
)
def test_other_kernels_and_padded_sizes_are_refused(method: Any, size: tuple[int, int]) -> None:
    assert not PROCESSED["Fp8LinearMethod"].accepts(method, layer(*size))


def test_fp8_that_marlin_repacks_is_refused() -> None:
    assert not PROCESSED["Fp8LinearMethod"].accepts(fp8(use_marlin=True), layer(64, 64))


def test_blocks_on_another_kernel_are_refused() -> None:
    """DeepGEMM lays scales out anew; the weights that an engine has of it are not what the list was proven with."""
    assert PROCESSED["Fp8PerBlockOnlineLinearMethod"].accepts(fp8("CutlassFp8BlockScaledMMKernel"), layer(64, 100))
    assert not PROCESSED["Fp8PerBlockOnlineLinearMethod"].accepts(fp8("DeepGemmFp8BlockScaledMMKernel"), layer(64, 64))


def test_constants_that_no_checkpoint_holds_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no parameters and no buffers, so an engine's shell has them without memory."""
    vllm, envs = ModuleType("vllm"), ModuleType("vllm.envs")
    vars(envs).update(Q_SCALE_CONSTANT=200, K_SCALE_CONSTANT=200, V_SCALE_CONSTANT=100)
    vars(vllm).update(envs=envs)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    attention = SimpleNamespace()
    for name in ("q", "k", "v"):
        setattr(attention, f"{name}_range", torch.tensor(1.0, device="meta"))
        setattr(attention, f"_{name}_scale", torch.tensor(0.5))
    PROCESSED["Fp8KVCacheMethod"].finish(None, attention, lambda layer: pytest.fail("placeholders are used up"))
    assert [float(getattr(attention, f"{name}_range")) for name in ("q", "k", "v")] == [200, 200, 100]
    assert attention._k_scale_float == 0.5


def test_processed_fp8_weights_are_not_processed_again() -> None:
    method, target = fp8(), layer(64, 64)
    PROCESSED["Fp8LinearMethod"].finish(method, target, lambda layer: pytest.fail("vLLM would transpose it again"))
    assert method.fp8_linear.processed == [target]  # only the kernel is told the layer's width
    assert target.input_scale is None


@pytest.mark.parametrize("name", ["Fp8LinearMethod", "ModelOptFp8LinearMethod"])
def test_a_static_activation_scale_stays_mapped(name: str) -> None:
    target = layer(64, 64)
    target.input_scale = torch.tensor(0.5)
    PROCESSED[name].finish(fp8(), target, lambda layer: None)
    assert float(target.input_scale) == 0.5


def test_blocks_are_left_as_they_are_mapped() -> None:
    """The kernel keeps nothing of them, and would write into memory that other engines read."""
    method, target = fp8("CutlassFp8BlockScaledMMKernel"), layer(64, 64)
    PROCESSED["Fp8PerBlockOnlineLinearMethod"].finish(method, target, lambda layer: pytest.fail("not again"))
    assert method.fp8_linear.processed == []
    assert target.input_scale is None


def test_kv_cache_scales_come_from_the_buffers_and_their_placeholders_go() -> None:
    target = SimpleNamespace(
        k_scale=1, v_scale=1, q_scale=1, prob_scale=1,
        _k_scale=torch.tensor(0.25), _v_scale=torch.tensor(0.5), _q_scale=torch.tensor(1.0),
        _k_scale_cpu=None, _v_scale_cpu=None,
    )  # fmt: skip
    PROCESSED["Fp8KVCacheMethod"].finish(None, target, lambda layer: pytest.fail("not again"))
    assert not {"k_scale", "v_scale", "q_scale", "prob_scale"} & set(vars(target))
    assert (target._k_scale_float, target._v_scale_float, target._q_scale_float) == (0.25, 0.5, 1.0)
    assert float(target._v_scale_cpu) == 0.5


def test_unquantized_layers_run_vllms_own_step() -> None:
    seen: list[Any] = []
    target = layer(8, 8)
    PROCESSED["UnquantizedLinearMethod"].finish(None, target, seen.append)
    assert seen == [target]
