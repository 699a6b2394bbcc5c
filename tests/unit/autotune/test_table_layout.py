"""Folders, file names and switches, exactly as vLLM and FlashInfer spell them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.tables import H200, H200_V2

from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune import layout
from warmseed.seeding.kinds.autotune.managed import manifest_of


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/h"}, "/h/.cache/vllm/flashinfer_autotune_cache/0.7.2.post1/90a"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/vllm/flashinfer_autotune_cache/0.7.2.post1/90a"),
        ({"HOME": "/h", "VLLM_CACHE_ROOT": "/v"}, "/v/flashinfer_autotune_cache/0.7.2.post1/90a"),
        ({"VLLM_CACHE_ROOT": "/v", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "/o"}, "/o"),
    ],
)
def test_the_v1_root_follows_vllms_variables(environ: dict[str, str], expected: str) -> None:
    assert layout.per_rank_root(environ, flashinfer_version="0.7.2.post1", arch="90a") == Path(expected)


def test_a_version_that_is_no_folder_name_is_refused() -> None:
    with pytest.raises(ArtifactRefused):
        layout.per_rank_root({"HOME": "/h"}, flashinfer_version="../..", arch="90a")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/h"}, "/h/.cache/flashinfer/autotune"),
        ({"HOME": "/h", "FLASHINFER_WORKSPACE_BASE": "/w"}, "/w/.cache/flashinfer/autotune"),
        ({"FLASHINFER_WORKSPACE_BASE": "/w", "FLASHINFER_AUTOTUNE_CACHE_DIR": "/a"}, "/a"),
    ],
)
def test_the_v2_root_follows_flashinfers_variables(environ: dict[str, str], expected: str) -> None:
    assert layout.managed_root(environ) == Path(expected)


def test_the_names_of_a_real_store_are_recomputed_exactly() -> None:
    folder = next(H200_V2.iterdir())
    assert layout.environment_name(manifest_of(H200)) == folder.name
    for entry in (folder / "entries").iterdir():
        assert layout.operation_name(json.loads(entry.read_text())["key"]) == entry.name


def test_a_rank_has_vllms_file_name() -> None:
    assert layout.per_rank_filename(2, 11) == "autotune_configs_dp2_rank11.json"


@pytest.mark.parametrize(
    ("arguments", "disabled"),
    [
        ((), False),
        (("--disable-flashinfer-autotune",), True),
        (("--no-enable-flashinfer-autotune",), True),
        (("--no_enable_flashinfer_autotune",), True),
        (("--no-enable-flashinfer-autotune", "--enable-flashinfer-autotune"), False),
        (("--", "--disable-flashinfer-autotune"), False),
    ],
)
def test_both_names_of_the_switch_switch_it_off(arguments: tuple[str, ...], disabled: bool) -> None:
    assert layout.autotune_disabled(arguments) is disabled
