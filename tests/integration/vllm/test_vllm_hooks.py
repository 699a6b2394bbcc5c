"""What vLLM's GPU worker is told, played on a worker of the same shape: no GPU is needed for arithmetic."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from warmseed.daemon.engines.vllm import hooks, memory, observe
from warmseed.daemon.engines.vllm.releases import RELEASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # of vLLM and its libraries, while they are imported
]

GIB = 1 << 30
TOTAL, HELD = 80 * GIB, 16 * GIB


def worker_module() -> ModuleType:
    """A module like vllm/v1/worker/gpu_worker.py of 0.26, whose worker sizes its memory the way vLLM's does."""
    module: Any = ModuleType("a_worker_module")

    def request_memory(snapshot: Any, cache_config: Any) -> int:
        requested = int(snapshot.total_memory * cache_config.gpu_memory_utilization)
        if snapshot.free_memory < requested:
            raise ValueError("Free memory on device is less than desired GPU memory utilization")
        return requested

    class Worker:
        def __init__(self, load_format: str) -> None:
            self.load_config = SimpleNamespace(load_format=load_format)
            self.vllm_config = SimpleNamespace(load_config=self.load_config)
            self.init_snapshot = SimpleNamespace(total_memory=TOTAL, free_memory=TOTAL - HELD)
            self.cache_config = SimpleNamespace(gpu_memory_utilization=0.9)

        def init_device(self) -> None:
            self.requested_memory = module.request_memory(self.init_snapshot, self.cache_config)

        def determine_available_memory(self) -> int:
            return int(self.requested_memory)

        def compile_or_warm_up_model(self) -> str:
            return "warm"

    Worker.__module__ = module.__name__
    module.Worker, module.request_memory = Worker, request_memory
    return module  # type: ignore[no-any-return]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(hooks, "installed_release", lambda **_: RELEASES["0.26"])
    memory.charge.take(0)
    made = worker_module()
    hooks.install(made)
    return made


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that holds 16 GiB, as the loader would count it."""
    import vllm.model_executor.model_loader as loaders

    def external(_: Any) -> int:
        memory.charge.take(HELD)
        return HELD

    monkeypatch.setattr(loaders, "get_model_loader", lambda _: SimpleNamespace(get_external_weight_memory=external))


def test_the_daemons_weights_count_towards_the_engines_share(module: Any, held: None) -> None:
    worker = module.Worker("ipc_cache")
    worker.init_device()
    assert worker.requested_memory == int(TOTAL * 0.9) - HELD


def test_an_engine_with_another_load_format_is_left_alone(module: Any, held: None) -> None:
    worker = module.Worker("auto")
    with pytest.raises(ValueError, match="Free memory on device"):  # vLLM's own check, unchanged
        worker.init_device()


def test_a_fallback_is_sized_with_its_whole_share_or_told_that_it_does_not_fit(module: Any, held: None) -> None:
    worker = module.Worker("ipc_cache")
    worker.cache_config.gpu_memory_utilization = 0.5
    worker.init_device()
    assert worker.determine_available_memory() == 40 * GIB - HELD
    memory.charge.give_back()
    assert worker.determine_available_memory() == 40 * GIB
    too_much = module.Worker("ipc_cache")
    too_much.init_device()
    memory.charge.give_back()
    with pytest.raises(ValueError, match="stop the daemon"):
        too_much.determine_available_memory()


def test_vllms_own_function_is_back_afterwards(module: Any, held: None) -> None:
    before = module.request_memory
    module.Worker("ipc_cache").init_device()
    assert module.request_memory is before


def test_the_end_of_warmup_is_reported_once_for_the_format(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[str] = []
    monkeypatch.setattr(observe, "finish", lambda: finished.append("reported"))
    assert module.Worker("auto").compile_or_warm_up_model() == "warm"
    assert finished == []
    assert module.Worker("ipc_cache").compile_or_warm_up_model() == "warm"
    assert finished == ["reported"]


def test_releases_that_ask_for_external_weights_themselves_are_not_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "installed_release", lambda **_: RELEASES["0.33"])
    made: Any = worker_module()
    original = made.Worker.init_device
    hooks.install(made)
    assert made.Worker.init_device is original
    hooks.install(made)  # a second time changes nothing
    assert made.Worker("auto").compile_or_warm_up_model() == "warm"
