"""One model, real daemons, real vLLM engines: restarts on one node, a cold start on another, the same words everywhere.

The story is played once for all tests of this file, because every act of it is a real start.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.vllm_nodes import PROMPTS, Answer, Node, new_token, smollm2, wait_published

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@dataclass
class Story:
    """What happened, for the tests to judge."""

    plain: Answer | None = None
    served: str = ""
    serve_log: str = ""
    restarted: Answer | None = None
    seeded: Answer | None = None
    seeded_phases: dict[str, str] = field(default_factory=dict)
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    generations: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    base = tmp_path_factory.mktemp("fleet")
    model, token, store = smollm2(), new_token(base), base / "store"
    store.mkdir()
    shared = ("--warmup-cache-stores", f"file:{store}", "--seed-token-file", str(token))
    # B rehearses nothing: its first engine is the one to show what the store gave it.
    a, b = Node("A", base / "a", model, shared), Node("B", base / "b", model, (*shared, "--no-rehearsal"))
    told = Story()
    try:
        a.start()
        wait_published(store)
        with a.serving(**a.loader(fallback=False)) as server:
            told.served = server.ask(PROMPTS[0])
            server.kill()  # SIGKILL while it holds the daemon's weights
            told.serve_log = server.log
        told.restarted = a.ask(**a.loader(fallback=False))
        told.plain = a.ask()
        a.stop(signal.SIGTERM)
        told.left_behind = [path.name for path in a.sockets.rglob("*.sock")]
        shutil.rmtree(a.cache_root)  # node B is another machine: nothing of A's is there
        b.start()
        told.seeded_phases = {p["name"]: p["outcome"] for rank in b.status()["ranks"] for p in rank["phases"]}
        told.seeded = b.ask(**b.loader(fallback=False))
        told.verdicts = b.verdicts()
        b.stop(signal.SIGTERM)  # writes what it has to publish before it ends
        told.generations = [path.name for path in store.glob("**/manifest/compile_cache/**/*.json")]
        yield told
    finally:
        a.stop()
        b.stop()


def answer_of(answer: Answer | None) -> Answer:
    assert answer is not None
    return answer


def test_a_restarted_engine_maps_the_daemons_weights_after_sigkill(story: Story) -> None:
    restarted = answer_of(story.restarted)
    assert restarted.mapped
    assert not restarted.fell_back


def test_an_openai_client_is_answered_by_a_server_on_mapped_weights(story: Story) -> None:
    assert story.served == answer_of(story.plain).answers[0]["text"]
    assert "from warmseed's weight cache daemon" in story.serve_log


def test_every_engine_says_the_same_tokens_as_a_plain_load(story: Story) -> None:
    plain = answer_of(story.plain)
    assert not plain.mapped
    assert all(len(tokens) > 3 for tokens in plain.tokens)
    assert answer_of(story.restarted).tokens == plain.tokens
    assert answer_of(story.seeded).tokens == plain.tokens


def test_a_node_with_another_root_starts_from_the_store_alone(story: Story) -> None:
    assert story.seeded_phases["adopt-compile_cache"] == "hit"
    assert answer_of(story.seeded).mapped


def test_the_verdict_is_on_what_could_be_put_there_and_names_what_could_not(story: Story) -> None:
    """Before 0.33 an AOT artifact works only at its own root: vLLM makes it anew, and hits in the rest."""
    (verdict,) = [v for v in story.verdicts if v["kind"] == "compile_cache"]
    assert verdict["used"]
    assert "AOT files work only at" in verdict["reason"]
    assert "/a/cache/vllm" in verdict["reason"]


def test_a_node_that_could_use_only_part_of_a_bundle_does_not_publish_that_part_over_it(story: Story) -> None:
    assert "capture-compile_cache" not in story.seeded_phases
    assert len(story.generations) == 1


def test_a_stopped_node_leaves_no_socket(story: Story) -> None:
    assert story.left_behind == []


def test_the_seeded_engine_looked_for_its_caches_where_they_were_put(story: Story) -> None:
    log = answer_of(story.seeded).log
    assert "torch_aot_compile" in log
    assert "/b/cache/vllm/torch_compile_cache" in log
    assert "/a/cache" not in log


def test_the_weights_cost_the_engine_no_time(story: Story) -> None:
    """What is asserted is the order of magnitude: milliseconds to map, where a load takes a second."""
    line = next(line for line in answer_of(story.restarted).log.splitlines() if "Mapped " in line)
    milliseconds = int(line.partition("attach ")[2].partition(" ms")[0])
    assert milliseconds < 1000
