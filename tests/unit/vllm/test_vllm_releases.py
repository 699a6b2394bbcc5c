"""Which vLLM is taken for which, and which is refused."""

from __future__ import annotations

import pytest

from warmseed.daemon.engines.vllm.releases import RELEASES, release_of
from warmseed.errors import ConfigurationError


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.26.0", "0.26"), ("0.32.0+cpu", "0.32"), ("0.33.1.post2", "0.33"), ("0.20", "0.20"), (" 0.29.3rc1", "0.29")],
)
def test_patches_and_builds_of_a_release_are_that_release(version: str, name: str) -> None:
    assert release_of(version).name == name
    assert release_of(version).supported


@pytest.mark.parametrize("version", ["0.19.1", "0.34.0", "1.0.0", "dev", "", "0", "\x1b[31m0.32.0"])
def test_other_releases_are_refused_with_the_way_to_try_them(version: str) -> None:
    with pytest.raises(ConfigurationError, match=r"0\.20 to 0\.33.*--engine-unsupported-ok") as caught:
        release_of(version)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("version", "like"), [("0.19.0", "0.20"), ("0.40.2", "0.33"), ("1.2.0", "0.33"), ("dev", "0.33")]
)
def test_an_unsupported_release_that_is_tried_is_like_its_nearest_neighbour(version: str, like: str) -> None:
    tried = release_of(version, unsupported_ok=True)
    assert not tried.supported
    known = RELEASES[like]
    for fact in ("own_ipc_cache", "processed_weights", "external_weights", "aot_at_any_root", "per_rank_tables"):
        assert getattr(tried, fact) == getattr(known, fact)


def test_no_release_loses_what_an_earlier_one_had() -> None:
    previous = None
    for release in RELEASES.values():
        if previous is not None:
            for fact in (
                "own_ipc_cache",
                "processed_weights",
                "external_weights",
                "aot_at_any_root",
                "per_rank_tables",
            ):
                assert getattr(release, fact) >= getattr(previous, fact), (release.name, fact)
        previous = release
    assert list(RELEASES) == [f"0.{minor}" for minor in range(20, 34)]
