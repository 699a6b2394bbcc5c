"""The load format inside vLLM, asked in this process: who serves, and what happens when nobody does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.vllm_nodes import smollm2

from warmseed.daemon.engines.vllm import memory
from warmseed.daemon.engines.vllm.arguments import engine_config, parse_engine_arguments, usage_context
from warmseed.daemon.weights.errors import WeightCacheUnavailable
from warmseed.errors import ConfigurationError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of vLLM and its libraries, while they are imported
]


@pytest.fixture(scope="module")
def config() -> Any:
    flags = ["--model", str(smollm2()), "--dtype", "bfloat16", "--max-model-len", "512", "--load-format", "ipc_cache"]
    return parse_engine_arguments(flags).create_engine_config(usage_context=usage_context("serve"))


@pytest.fixture(scope="module", autouse=True)
def _groups(config: Any) -> Iterator[None]:
    from warmseed.daemon.engines.vllm.model import join_groups, leave_groups

    join_groups(config, rank=0, world_size=1, local_rank=0, store=torch.distributed.HashStore())
    yield
    leave_groups()


def loader(config: Any, **extra: Any) -> Any:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    return get_model_loader(LoadConfig(load_format="ipc_cache", model_loader_extra_config=extra))


def test_the_plugin_takes_the_place_of_vllms_own_format(config: Any, tmp_path: Path) -> None:
    assert type(loader(config, socket_dir=str(tmp_path))).__module__ == "warmseed.daemon.engines.vllm.loader"


def test_a_daemon_that_vanished_after_it_was_counted_costs_no_memory(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Gone between the question for its memory and the one for its weights: from disk, and the charge is taken back."""
    ours = loader(config, socket_dir=str(tmp_path / "none"))
    monkeypatch.setattr(type(ours), "_from_disk", lambda self, *rest: "from disk")
    memory.charge.take(123)
    with caplog.at_level(logging.WARNING, logger="vllm.warmseed"):
        logging.getLogger("vllm").propagate = True
        assert ours.load_model(config, config.model_config) == "from disk"
    assert memory.charge.refund == 123
    assert "reason=absent" in caplog.text
    assert "falling back to disk loading" in caplog.text


def test_without_fallback_an_absent_daemon_ends_the_engine_after_its_time(config: Any, tmp_path: Path) -> None:
    ours = loader(config, socket_dir=str(tmp_path / "none"), fallback=False, state_timeout_s=0.3)
    with pytest.raises(WeightCacheUnavailable) as caught:
        ours.load_model(config, config.model_config)
    assert caught.value.reason == "absent"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"mod": "copy"}, "did you mean 'mode'"),
        ({"mode": "share"}, "mode"),
        ({"socket_path": "/a", "socket_dir": "/b"}, "not both"),
        ({"connect_timeout_s": 0}, "connect_timeout_s"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: Any, extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        loader(config, **extra)


def test_the_draft_role_that_vllm_sets_is_understood(config: Any, tmp_path: Path) -> None:
    assert loader(config, socket_dir=str(tmp_path), is_draft=True) is not None


def test_mapped_weights_are_never_overwritten(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="can't be reloaded in place"):
        loader(config, socket_dir=str(tmp_path)).load_weights(torch.nn.Linear(1, 1), config.model_config)


def test_a_shell_has_every_tensor_and_no_memory(config: Any) -> None:
    from warmseed.daemon.engines.vllm.shell import build_shell, forget_layers

    class Undo(Exception):
        pass

    def half_build() -> None:
        with forget_layers(config):
            shell = build_shell(config, config.model_config, device=torch.device("cpu"))
            assert all(tensor.is_meta for tensor in (*shell.parameters(), *shell.buffers()))
            assert sum(p.numel() for p in shell.parameters()) > 100_000_000
            raise Undo

    before = dict(config.compilation_config.static_forward_context)
    for _ in range(2):  # nothing of the first may be left: vLLM refuses two layers of one name
        with pytest.raises(Undo):
            half_build()
        assert dict(config.compilation_config.static_forward_context) == before


def test_expert_maps_have_values_while_the_rest_of_a_model_is_built_without_memory(config: Any) -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    from warmseed.daemon.engines.vllm.experts import real_expert_maps

    spread = FusedMoEParallelConfig(
        **dict.fromkeys(("tp_size", "pcp_size", "dp_size", "sp_size"), 1),
        **dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank"), 0),
        ep_size=2,
        ep_rank=1,
        use_ep=True,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    made = ExpertMapManager.__init__
    with torch.device("meta"), real_expert_maps(SimpleNamespace(is_moe=True), torch.device("cpu")):
        weights = torch.empty(4)
        manager = ExpertMapManager(512, 2, 4, 0, None, spread, "linear", False)
    assert weights.is_meta
    assert manager.expert_map.tolist() == [-1, -1, 0, 1]
    assert ExpertMapManager.__init__ is made


def test_a_daemon_refuses_the_format_that_would_ask_itself() -> None:
    with pytest.raises(ConfigurationError, match="leave it out"):
        engine_config(parse_engine_arguments(["--model", str(smollm2()), "--load-format", "ipc_cache"]))
