"""Which environments match, and what doubt leads to."""

from __future__ import annotations

import pytest
from tests.support.tables import H200

from warmseed.seeding.errors import ArtifactRefused, CannotJudge
from warmseed.seeding.kinds.autotune.compare import compare, require_publishable, require_same

UNKNOWN = dict.fromkeys(H200, "unknown")


def test_equal_environments_match() -> None:
    assert compare(H200, H200).same
    require_same(H200, H200, "the table")


@pytest.mark.parametrize("field", H200)
def test_every_field_that_differs_refuses_and_is_named(field: str) -> None:
    with pytest.raises(ArtifactRefused, match=field) as caught:
        require_same({**H200, field: "other"}, H200, "the table")
    assert (caught.value.reason, caught.value.fields) == ("environment", (field,))
    assert not isinstance(caught.value, CannotJudge)


@pytest.mark.parametrize("vague", ["unknown", "None", "*"])
def test_a_table_that_does_not_know_is_refused_even_where_we_do_not_know_either(vague: str) -> None:
    theirs = {**H200, "cudnn_version": vague}
    for ours in (H200, {**H200, "cudnn_version": "unknown"}):
        with pytest.raises(ArtifactRefused) as caught:
            require_same(theirs, ours, "the table")
        assert caught.value.reason == "environment"
        assert not isinstance(caught.value, CannotJudge)


def test_wildcards_pass_only_when_the_operator_says_so() -> None:
    require_same({**H200, "gpu": "*"}, H200, "the table", allow_wildcards=True)


def test_a_field_we_do_not_know_now_is_not_held_against_the_table() -> None:
    with pytest.raises(CannotJudge, match="gpu") as caught:
        require_same(H200, {**H200, "gpu": "unknown"}, "the table")
    assert caught.value.fields == ("gpu",)


def test_a_definite_difference_outranks_what_we_do_not_know() -> None:
    with pytest.raises(ArtifactRefused) as caught:
        require_same({**H200, "cuda_version": "12.8"}, {**H200, "gpu": "unknown"}, "the table")
    assert not isinstance(caught.value, CannotJudge)
    assert caught.value.fields == ("cuda_version",)


def test_fields_of_a_newer_flashinfer_count_too() -> None:
    assert [d.field for d in compare(H200, {**H200, "driver": "580"}).soft] == ["driver"]


def test_a_node_without_flashinfer_can_judge_nothing() -> None:
    with pytest.raises(CannotJudge):
        require_same(H200, UNKNOWN, "the table")


@pytest.mark.parametrize("vague", ["unknown", "None", "*", ""])
def test_tables_with_vague_fields_are_never_published(vague: str) -> None:
    with pytest.raises(ArtifactRefused, match="cudnn_version"):
        require_publishable({**H200, "cudnn_version": vague}, "the table")
    require_publishable(H200, "the table")
