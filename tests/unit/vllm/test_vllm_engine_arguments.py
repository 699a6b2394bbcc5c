"""`warmseed preload`'s configuration as the flags an engine would be started with."""

from __future__ import annotations

import itertools

import pytest

from warmseed.daemon.engines.vllm.adapter import engine_arguments
from warmseed.daemon.settings.config import PreloadConfig
from warmseed.errors import ConfigurationError


def test_a_plain_model_needs_no_more_than_its_name_and_type() -> None:
    arguments, usage, unsupported_ok = engine_arguments(PreloadConfig(model="/m"))
    assert arguments == ["--model", "/m", "--dtype", "auto"]
    assert (usage, unsupported_ok) == ("serve", False)


def test_layout_and_speculation_are_handed_over() -> None:
    config = PreloadConfig(
        model="/m",
        tensor_parallel_size=2,
        data_parallel_size=4,
        enable_expert_parallel=True,
        revision="abc",
        speculative_config='{"method": "eagle3"}',
        disable_flashinfer_autotune=True,
    )
    arguments = engine_arguments(config)[0]
    pairs = dict(itertools.pairwise(arguments))
    assert pairs["--tensor-parallel-size"] == "2"
    assert pairs["--data-parallel-size"] == "4"
    assert pairs["--revision"] == "abc"
    assert pairs["--speculative-config"] == '{"method": "eagle3"}'
    assert {"--enable-expert-parallel", "--no-enable-flashinfer-autotune"} <= set(arguments)
    assert "--pipeline-parallel-size" not in arguments


def test_flags_that_are_not_ours_pass_unchanged_and_in_order() -> None:
    words = ("--kernel-config", '{"linear_backend": "cutlass"}', "--max-model-len", "512")
    assert engine_arguments(PreloadConfig(model="/m", engine_args=words))[0][-4:] == list(words)


@pytest.mark.parametrize("words", [("--engine-usage", "llm"), ("--engine-usage=llm",)])
def test_our_own_flags_are_taken_out(words: tuple[str, ...]) -> None:
    config = PreloadConfig(model="/m", engine_args=("--engine-unsupported-ok", *words, "--seed", "1"))
    arguments, usage, unsupported_ok = engine_arguments(config)
    assert arguments[-2:] == ["--seed", "1"]
    assert (usage, unsupported_ok) == ("llm", True)


@pytest.mark.parametrize("words", [("--engine-usage", "batch"), ("--engine-usage",)])
def test_an_unknown_usage_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="serve"):
        engine_arguments(PreloadConfig(model="/m", engine_args=words))
