"""Conformance tests run under blockbuster: a blocking call on the event loop fails the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

pytest.register_assert_rewrite("warmseed.testing.store_contract")


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    with blockbuster_ctx("warmseed") as watch:
        yield watch
