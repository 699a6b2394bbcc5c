"""What must not be mapped is not mapped, and says why; engines without compilation, so that a start takes seconds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.vllm_nodes import SHAPE, Node, NodeFailed, smollm2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EAGER = {**SHAPE, "enforce_eager": True}
ONE = ("Please tell me the capital of France.",)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A daemon over a checkpoint of its own, which may be changed."""
    base = tmp_path_factory.mktemp("refusals")
    model = base / "model"
    shutil.copytree(smollm2(), model)
    running = Node("R", base / "r", model, ("--no-rehearsal",), shape=EAGER)
    running.start()
    try:
        yield running
    finally:
        running.stop()


def change_values(folder: Path) -> None:
    """A retrain: other numbers behind the same header."""
    (shard,) = folder.glob("*.safetensors")
    with shard.open("r+b") as file:
        header = int.from_bytes(file.read(8), "little")
        file.seek(header + 8 + (shard.stat().st_size - header) // 2)
        data = file.read(1 << 20)
        file.seek(-len(data), 1)
        file.write(bytes(b ^ (0x80 if i % 2 else 0) for i, b in enumerate(data)))  # flips signs


def test_an_engine_of_another_dtype_loads_from_disk_and_names_the_field(node: Node) -> None:
    answer = node.ask(prompts=ONE, **{**node.loader(), "dtype": "float32"})
    assert answer.fell_back
    assert "reason=mismatch fields=dtype" in answer.log
    assert "Paris" in answer.answers[0]["text"]


def test_without_a_daemon_an_engine_loads_from_disk_although_vllms_own_format_refuses_a_cpu(node: Node) -> None:
    alone = Node("alone", node.folder.parent / "alone", node.model, shape=EAGER)
    answer = alone.ask(prompts=ONE, **alone.loader())
    assert answer.fell_back
    assert "reason=absent" in answer.log
    assert "Paris" in answer.answers[0]["text"]


def test_a_misspelt_loader_key_stops_the_engine_and_names_the_right_one(node: Node) -> None:
    with pytest.raises(NodeFailed) as caught:
        node.ask(prompts=ONE, **node.loader(fallbak=False))
    assert "unknown key 'fallbak'; did you mean 'fallback'" in caught.value.log


def test_a_checkpoint_changed_in_place_is_noticed(node: Node) -> None:
    """vLLM's own weight cache compares headers and would serve the old values."""
    before = node.ask(prompts=ONE, **node.loader(fallback=False))
    assert before.mapped
    change_values(node.model)
    with pytest.raises(NodeFailed) as caught:
        node.ask(prompts=ONE, **node.loader(fallback=False))
    assert "FingerprintMismatch" in caught.value.log
    assert "checkpoint" in caught.value.log
    after = node.ask(prompts=ONE, **node.loader())
    assert after.fell_back
    assert "fields=checkpoint" in after.log
    assert after.tokens != before.tokens


def test_an_engine_that_copies_owns_its_weights_and_the_daemon_lets_go_of_them(tmp_path: Path) -> None:
    node = Node("copied", tmp_path / "node", smollm2(), ("--no-rehearsal",), shape=EAGER)
    node.start()
    try:
        copied = node.ask(prompts=ONE, **node.loader(mode="copy", fallback=False))
        assert copied.mapped
        assert "(copy mode)" in copied.log
        late = node.ask(prompts=ONE, **node.loader())
    finally:
        node.stop()
    assert late.fell_back
    assert "reason=released" in late.log
    assert copied.tokens == late.tokens
    assert copied.logprobs == late.logprobs
