"""Weights held by the daemon count towards an engine's share, once, and not when the engine loads its own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from warmseed.daemon.engines.vllm.memory import charge, reduced_request, refunded, request_memory

GIB = 1 << 30


@dataclass
class Snapshot:
    total_memory: int
    free_memory: int


@dataclass
class CacheSettings:
    gpu_memory_utilization: float


@pytest.fixture(autouse=True)
def _fresh_charge() -> None:
    charge.take(0)


def test_shared_weights_reduce_what_the_engine_takes_itself() -> None:
    own = reduced_request(72 * GIB, 16 * GIB, free=60 * GIB, total=80 * GIB, utilization=0.9)
    assert own == 56 * GIB


def test_weights_larger_than_the_share_are_an_error_that_says_what_to_raise() -> None:
    with pytest.raises(ValueError, match="--gpu-memory-utilization"):
        reduced_request(16 * GIB, 16 * GIB, free=60 * GIB, total=80 * GIB, utilization=0.2)


def test_a_share_that_is_not_free_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"20\.00 of 80\.00 GiB are free"):
        reduced_request(72 * GIB, 16 * GIB, free=20 * GIB, total=80 * GIB, utilization=0.9)


def test_without_a_daemon_vllms_own_request_is_made() -> None:
    asked = []

    def original(snapshot: Snapshot, settings: CacheSettings) -> int:
        asked.append((snapshot, settings))
        return 7

    snapshot, settings = Snapshot(80 * GIB, 80 * GIB), CacheSettings(0.9)
    assert request_memory(snapshot, settings, original, 0) == 7
    assert asked == [(snapshot, settings)]
    assert request_memory(snapshot, settings, original, 8 * GIB) == 72 * GIB - 8 * GIB
    assert len(asked) == 1


def test_a_fallback_gets_its_whole_share_back_once() -> None:
    charge.take(16 * GIB)
    charge.give_back()
    assert refunded(24 * GIB, free=64 * GIB) == 40 * GIB
    assert refunded(40 * GIB, free=64 * GIB) == 40 * GIB


def test_a_fallback_without_room_beside_the_daemon_is_an_error() -> None:
    charge.take(16 * GIB)
    charge.give_back()
    with pytest.raises(ValueError, match="stop the daemon"):
        refunded(56 * GIB, free=64 * GIB)


def test_nothing_is_refunded_while_the_weights_are_mapped() -> None:
    charge.take(16 * GIB)
    assert refunded(56 * GIB, free=60 * GIB) == 56 * GIB
