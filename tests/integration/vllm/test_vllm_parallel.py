"""One model split over three ranks: three daemons that met, three sockets, one engine that maps its three shards."""

from __future__ import annotations

import pytest
from tests.support.vllm_nodes import SHAPE, Node, smollm2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Nine attention heads divide by three; two cores are shared by the ranks, which costs time and nothing else.
SPLIT = {**SHAPE, "enforce_eager": True, "tensor_parallel_size": 3}
BOUND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1|1"}


def test_every_rank_maps_its_own_shard_and_the_tokens_are_those_of_a_plain_load(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = tmp_path_factory.mktemp("parallel")
    node = Node("P", base / "p", smollm2(), ("--no-rehearsal",), shape=SPLIT, variables=BOUND)
    try:
        node.start()
        ranks = node.status()["ranks"]
        assert len({rank["socket"] for rank in ranks}) == 3
        assert len({rank["weights_bytes"] for rank in ranks}) == 1
        mapped = node.ask(**node.loader(fallback=False))
        plain = node.ask()
    finally:
        node.stop()
    assert mapped.log.count("from warmseed's weight cache daemon") == 3
    assert not plain.mapped
    assert mapped.tokens == plain.tokens
