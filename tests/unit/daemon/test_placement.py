"""Every rank has exactly one place, as the engine lays it out, and ports never meet."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from warmseed.daemon.placement import LAST_PORT, groups_of, layout_of, places_of, seed_endpoint, seed_ports
from warmseed.daemon.protocol.spec import decode_spec, encode_spec, rank_spec
from warmseed.daemon.settings.config import PreloadConfig
from warmseed.errors import ConfigurationError
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.trust.token import Secret

FAR = "10.0.0.1"


def config(**settings: object) -> PreloadConfig:
    return PreloadConfig(model="/m", **settings)  # type: ignore[arg-type]


def fleet(**settings: object) -> PreloadConfig:
    return config(**({"master_addr": FAR, "weight_cache_master_port": 29600} | settings))


# (settings, [(local, global, dp, pp, tp), ...]) as the reference page and vLLM's planner lay them out
LAYOUTS = {
    "one rank": (config(), [(0, 0, 0, 0, 0)]),
    "TP4 on one node": (
        config(tensor_parallel_size=4),
        [(0, 0, 0, 0, 0), (1, 1, 0, 0, 1), (2, 2, 0, 0, 2), (3, 3, 0, 0, 3)],
    ),
    "TP16 on two nodes, second": (
        fleet(tensor_parallel_size=16, nnodes=2, node_rank=1),
        [(i, 8 + i, 0, 0, 8 + i) for i in range(8)],
    ),
    "PP2 x TP2 on one node": (
        config(tensor_parallel_size=2, pipeline_parallel_size=2),
        [(0, 0, 0, 0, 0), (1, 1, 0, 0, 1), (2, 2, 0, 1, 0), (3, 3, 0, 1, 1)],
    ),
    "PP2 x TP2 on two nodes, second": (
        fleet(tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2, node_rank=1),
        [(0, 2, 0, 1, 0), (1, 3, 0, 1, 1)],
    ),
    "TP1 x DP16, four a node, third node": (
        config(
            data_parallel_size=16,
            data_parallel_size_local=4,
            data_parallel_start_rank=8,
            data_parallel_address=FAR,
            weight_cache_master_port=29600,
            enable_expert_parallel=True,
        ),
        [(i, 8 + i, 8 + i, 0, 0) for i in range(4)],
    ),
    "TP2 x DP4, two copies a node, second node": (
        config(
            tensor_parallel_size=2,
            data_parallel_size=4,
            data_parallel_size_local=2,
            data_parallel_start_rank=2,
            data_parallel_address=FAR,
            weight_cache_master_port=29600,
        ),
        [(0, 4, 2, 0, 0), (1, 5, 2, 0, 1), (2, 6, 3, 0, 0), (3, 7, 3, 0, 1)],
    ),
    "DP2 whole on one node": (
        config(tensor_parallel_size=2, data_parallel_size=2),
        [(0, 0, 0, 0, 0), (1, 1, 0, 0, 1), (2, 2, 1, 0, 0), (3, 3, 1, 0, 1)],
    ),
    "one copy by --data-parallel-rank": (
        config(data_parallel_size=4, data_parallel_rank=3, data_parallel_address=FAR, weight_cache_master_port=29600),
        [(0, 3, 3, 0, 0)],
    ),
    "TP8 x DP2 on four nodes, third": (
        fleet(tensor_parallel_size=8, data_parallel_size=2, nnodes=4, node_rank=2, data_parallel_address=FAR),
        [(i, 8 + i, 1, 0, i) for i in range(4)],
    ),
    "DP2 x PP2 x TP2 on two nodes, second": (
        fleet(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2, nnodes=2, node_rank=1),
        [(0, 4, 1, 0, 0), (1, 5, 1, 0, 1), (2, 6, 1, 1, 0), (3, 7, 1, 1, 1)],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_matches_the_reference(name: str) -> None:
    settings, expected = LAYOUTS[name]
    places = places_of(layout_of(settings))
    assert [(p.local_rank, p.global_rank, p.dp_rank, p.pp_rank, p.tp_rank) for p in places] == expected


REFUSED = {
    "world size not divisible by nodes": (fleet(tensor_parallel_size=3, nnodes=2), "--nnodes 2 does not divide"),
    "node rank past the nodes": (fleet(tensor_parallel_size=2, nnodes=2, node_rank=2), "--node-rank 2 is not below"),
    "node rank without nodes": (config(node_rank=1), "--node-rank 1 needs --nnodes"),
    "several nodes on loopback": (
        config(tensor_parallel_size=2, nnodes=2, weight_cache_master_port=29600),
        "--master-addr is 127.0.0.1",
    ),
    "copies past the fleet": (
        config(data_parallel_size=4, data_parallel_start_rank=3, data_parallel_size_local=2),
        "is 5, past --data-parallel-size 4",
    ),
    "start rank past the fleet": (config(data_parallel_size=2, data_parallel_start_rank=2), "is not below"),
    "more local copies than copies": (config(data_parallel_size=2, data_parallel_size_local=3), "exceeds"),
    "rank and start rank differ": (
        config(data_parallel_size=4, data_parallel_rank=1, data_parallel_start_rank=2),
        "contradict each other",
    ),
    "rank with several local copies": (
        config(data_parallel_size=4, data_parallel_rank=1, data_parallel_size_local=2),
        "means one copy on this node",
    ),
    "copies spread, address loopback": (
        config(data_parallel_size=4, data_parallel_size_local=2, weight_cache_master_port=29600),
        "--data-parallel-address is 127.0.0.1",
    ),
    "start rank against node rank": (
        fleet(data_parallel_size=4, nnodes=2, node_rank=1, data_parallel_start_rank=1),
        "contradicts --node-rank 1",
    ),
    "local copies against nodes": (
        fleet(data_parallel_size=4, nnodes=2, data_parallel_size_local=1),
        "contradicts --nnodes 2",
    ),
    "no agreed port across nodes": (
        config(tensor_parallel_size=2, nnodes=2, master_addr=FAR),
        "--weight-cache-master-port is required",
    ),
    "draft port without a draft": (config(weight_cache_draft_master_port=29700), "no method with a cached draft"),
    "draft port is the target's": (
        config(
            speculative_config='{"method":"eagle3"}',
            weight_cache_master_port=29600,
            weight_cache_draft_master_port=29600,
        ),
        "is also --weight-cache-master-port",
    ),
    "draft port past the last": (
        config(speculative_config='{"method":"mtp"}', weight_cache_master_port=LAST_PORT),
        "would be 65536",
    ),
    "the engine's own port": (config(master_port=29501, weight_cache_master_port=29501), "is also --master-port"),
    "health port is the rendezvous": (
        config(weight_cache_health_port=29600, weight_cache_master_port=29600),
        "is also --weight-cache-health-port",
    ),
    "seed ports past the last": (
        config(tensor_parallel_size=4, seed_listen_port=65533),
        "end at 65536",
    ),
    "source ports past the last": (
        config(tensor_parallel_size=4, seed_sources=(Endpoint("h", 65534),)),
        "end at 65537",
    ),
    "rendezvous inside the seed ports": (
        config(tensor_parallel_size=4, seed_listen_port=29600, weight_cache_master_port=29603),
        "lies in the seed ports 29600-29603",
    ),
    "speculative settings that are no JSON": (config(speculative_config="eagle"), "is not a JSON object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradiction_is_refused_by_name(name: str) -> None:
    settings, words = REFUSED[name]
    with pytest.raises(ConfigurationError) as refusal:
        groups_of(settings, layout_of(settings))
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("method", "groups"),
    [
        ("mtp", 2),
        ("eagle", 2),
        ("eagle3", 2),
        ("deepseek_mtp", 2),
        ("ngram", 1),
        ("draft_model", 1),
        ("medusa", 1),
    ],
)
def test_only_cached_drafts_get_a_group(method: str, groups: int) -> None:
    settings = config(speculative_config=json.dumps({"method": method}))
    assert len(groups_of(settings, layout_of(settings))) == groups


def test_draft_group_meets_one_port_above_the_target() -> None:
    settings = config(speculative_config='{"method":"mtp"}', weight_cache_master_port=29600)
    assert [group.port for group in groups_of(settings, layout_of(settings))] == [29600, 29601]


def test_single_node_leaves_the_ports_free() -> None:
    settings = config(tensor_parallel_size=2, speculative_config='{"method":"mtp"}')
    assert [group.port for group in groups_of(settings, layout_of(settings))] == [None, None]


def test_data_parallel_master_is_its_own_address() -> None:
    apart = fleet(tensor_parallel_size=4, data_parallel_size=2, nnodes=2, data_parallel_address="10.9.9.9")
    assert layout_of(apart).master_host == "10.9.9.9"
    assert layout_of(fleet(tensor_parallel_size=2, nnodes=2)).master_host == FAR


sizes = st.integers(1, 6)


@given(tp=sizes, pp=st.integers(1, 3), dp=sizes, nodes=st.integers(2, 8))
def test_nodes_cover_every_rank_exactly_once(tp: int, pp: int, dp: int, nodes: int) -> None:
    assume((tp * pp * dp) % nodes == 0)
    settings = fleet(tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=dp, nnodes=nodes)
    places = [place for node in range(nodes) for place in places_of(layout_of(config_with(settings, node_rank=node)))]
    assert [place.global_rank for place in places] == list(range(tp * pp * dp))
    assert all(p.global_rank == (p.dp_rank * pp + p.pp_rank) * tp + p.tp_rank for p in places)
    assert len({(p.dp_rank, p.pp_rank, p.tp_rank) for p in places}) == len(places)


@given(tp=sizes, pp=st.integers(1, 3), cut=st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_uneven_copies_cover_every_rank_exactly_once(tp: int, pp: int, cut: list[int]) -> None:
    total = sum(cut)
    ranks = []
    for number, local in enumerate(cut):
        settings = config(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            data_parallel_size=total,
            data_parallel_size_local=local,
            data_parallel_start_rank=sum(cut[:number]),
            data_parallel_address=FAR,
            weight_cache_master_port=29600,
        )
        ranks += [place.global_rank for place in places_of(layout_of(settings))]
    assert ranks == list(range(total * tp * pp))


@given(
    tp=sizes,
    dp=sizes,
    draft=st.booleans(),
    master=st.integers(1024, LAST_PORT),
    seed=st.integers(1024, LAST_PORT),
    health=st.integers(1024, LAST_PORT),
)
def test_ports_of_a_fleet_never_meet(tp: int, dp: int, draft: bool, master: int, seed: int, health: int) -> None:
    settings = config(
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        weight_cache_master_port=master,
        weight_cache_health_port=health,
        seed_listen_port=seed,
        speculative_config='{"method":"eagle"}' if draft else None,
    )
    layout = layout_of(settings)
    try:
        groups = groups_of(settings, layout)
    except ConfigurationError:
        return  # what can't be told apart is refused, which is the point
    base = Endpoint("h", seed)
    listening = [seed_endpoint(base, layout, group, place).port for group in groups for place in places_of(layout)]
    every = [*listening, health, *(group.port or 0 for group in groups)]
    assert len(set(every)) == len(every)
    assert max(every) <= LAST_PORT
    assert set(listening) == set(seed_ports(seed, layout, groups))


def test_ranks_dial_their_match_in_every_source() -> None:
    settings = config(
        tensor_parallel_size=2,
        seed_listen_port=29600,
        seed_sources=(Endpoint("a", 29600), Endpoint("fd00::1", 30000)),
        speculative_config='{"method":"mtp"}',
    )
    layout = layout_of(settings)
    target, draft = groups_of(settings, layout)
    second = places_of(layout)[1]
    assert [str(e) for e in rank_spec(settings, layout, target, second, port=1).seed_sources] == [
        "a:29601",
        "[fd00::1]:30001",
    ]
    spec = rank_spec(settings, layout, draft, second, port=1)
    assert [str(e) for e in spec.seed_sources] == ["a:29603", "[fd00::1]:30003"]
    assert spec.seed_listen == Endpoint("0.0.0.0", 29603)
    assert spec.name == "draft-1"


def test_spec_survives_the_pipe_and_hides_its_secret() -> None:
    settings = config(seed_token=Secret("s" * 40), warmup_cache_stores=("mooncake",), engine_args=("--x", "1"))
    layout = layout_of(settings)
    spec = rank_spec(settings, layout, groups_of(settings, layout)[0], places_of(layout)[0], port=29600, listener=7)
    assert decode_spec(encode_spec(spec)) == spec
    assert "ssss" not in repr(spec)
    with pytest.raises(ConfigurationError, match="same warmseed"):
        decode_spec(b'{"group":"target"}')
    with pytest.raises(ConfigurationError, match="same warmseed"):
        decode_spec(b'{"config":{"seed_token":31337}}')


def config_with(settings: PreloadConfig, **changes: object) -> PreloadConfig:
    import msgspec

    return msgspec.structs.replace(settings, **changes)


def test_layout_knows_where_the_master_is() -> None:
    layout = layout_of(fleet(tensor_parallel_size=4, nnodes=2))
    assert layout.is_master
    assert layout.spans_nodes
    assert not replace(layout, first_rank=2).is_master
