"""The kind: captures, installs, converts, judges and takes back tables on a disk."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.support.tables import (
    CONFIG,
    H200,
    H200_V1,
    H200_V2,
    HOT,
    key_of,
    local_path,
    manifest_of_capture,
    payload_of,
    put_local,
    table_manifest,
    table_site,
    table_text,
    with_entry,
)

from warmseed.seeding.errors import ArtifactRefused, CannotJudge
from warmseed.seeding.kinds.autotune.convert import table_of_store
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.autotune.layout import MANAGED_ROOT, PER_RANK_ROOT, environment_name
from warmseed.seeding.kinds.autotune.local import examine_store
from warmseed.seeding.kinds.autotune.managed import decode_stores
from warmseed.seeding.kinds.autotune.table import parse_table
from warmseed.seeding.kinds.base import Evidence, Installation, Kind, Site
from warmseed.seeding.rejected import list_rejected

KIND = FlashInferAutotune()
ALONE = FlashInferAutotune(overlap="local")


def install(data: bytes, site: Site, *, kind: FlashInferAutotune = KIND) -> Installation:
    return kind.install(table_manifest(data, site), payload_of(site.state, data), None, site)


def entries_of(path: Path) -> dict[str, Any]:
    return {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("_")}


def real_store(site: Site) -> Path:
    """The store of the H200 in the site's managed home; its folder of entries."""
    folder = next(H200_V2.iterdir())
    target = site.roots[MANAGED_ROOT] / "v2" / folder.name
    shutil.copytree(folder, target)
    return target / "entries"


def test_it_is_a_kind() -> None:
    kind: Kind = KIND
    assert kind.name == "flashinfer_autotune"


def test_a_captured_table_is_the_file_byte_for_byte_under_both_keys(tmp_path: Path) -> None:
    site = table_site(tmp_path, world_rank=3)
    put_local(site, H200_V1)
    capture = KIND.capture(site)
    assert capture is not None
    assert capture.payload.read_bytes() == H200_V1
    assert capture.filename == "autotune_configs_dp0_rank3.json"
    assert capture.store_key == f"vllm-warmup-cache/object/{capture.sha256}"
    assert capture.also == (f"vllm-warmup-cache/flashinfer_autotune/{CONFIG}/autotune_configs_dp0_rank3.json",)
    assert dict(capture.environment) == H200
    assert capture.provenance["entries"] == "6"
    assert capture.provenance["operations"] == "bf16_gemm 3, fp8_gemm 3"


def test_a_mirror_installs_what_a_source_captured(tmp_path: Path) -> None:
    source, mirror = table_site(tmp_path / "a"), table_site(tmp_path / "b")
    put_local(source, H200_V1)
    capture = KIND.capture(source)
    assert capture is not None
    assert not KIND.present(mirror)
    done = KIND.install(manifest_of_capture(capture, source), capture.payload, None, mirror)
    assert local_path(mirror).read_bytes() == H200_V1
    assert stat.S_IMODE(local_path(mirror).stat().st_mode) == 0o600
    assert KIND.present(mirror)
    assert done.complete
    assert not done.left_out
    assert sorted(path.name for path in local_path(mirror).parent.iterdir()) == [local_path(mirror).name]


def test_nothing_tuned_is_nothing_to_publish(tmp_path: Path) -> None:
    assert KIND.capture(table_site(tmp_path, homes=(PER_RANK_ROOT, MANAGED_ROOT))) is None


@pytest.mark.parametrize("field", ["gpu", "cudnn_version"])
def test_a_node_that_does_not_know_itself_publishes_nothing(tmp_path: Path, field: str) -> None:
    site = table_site(tmp_path, metadata={**H200, field: "unknown"})
    put_local(site, H200_V1)
    with pytest.raises(CannotJudge, match=field):
        KIND.capture(site)


@pytest.mark.parametrize("value", ["unknown", "*", "other"])
def test_a_table_with_vague_or_foreign_fields_is_not_published(tmp_path: Path, value: str) -> None:
    site = table_site(tmp_path)
    put_local(site, table_text(2, metadata={**H200, "cudnn_version": value}))
    with pytest.raises(ArtifactRefused) as caught:
        KIND.capture(site)
    assert caught.value.reason == "environment"


def test_a_corrupt_local_table_is_not_published(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    put_local(site, H200_V1[:100])
    with pytest.raises(ArtifactRefused) as caught:
        KIND.capture(site)
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "compile_cache"}, "kind"),
        ({"config_hash": "d" * 64}, "key"),
        ({"world_rank": 1}, "rank"),
        ({"dp_rank": 1}, "rank"),
        ({"filename": "autotune_configs_dp0_rank1.json"}, "rank"),
        ({"filename": "../../autotune_configs_dp0_rank0.json"}, "rank"),
        ({"length": 5}, "length"),
        ({"sha256": "0" * 64}, "digest"),
        ({"environment": {**H200, "gpu": "NVIDIA B200"}}, "environment"),
    ],
)
def test_a_manifest_that_is_not_for_this_rank_installs_nothing(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    site = table_site(tmp_path)
    with pytest.raises(ArtifactRefused) as caught:
        KIND.install(table_manifest(H200_V1, site, **changes), payload_of(tmp_path, H200_V1), None, site)
    assert caught.value.reason == reason
    assert not local_path(site).exists()


def test_metadata_inside_the_table_counts_also_when_the_manifest_says_otherwise(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    other = table_text(3, metadata={**H200, "gpu": "NVIDIA B200"})
    with pytest.raises(ArtifactRefused, match="NVIDIA B200") as caught:
        install(other, site)
    assert caught.value.reason == "environment"
    assert caught.value.fields == ("gpu",)
    assert not local_path(site).exists()


def test_a_node_that_does_not_know_itself_installs_nothing_and_may_ask_again(tmp_path: Path) -> None:
    blind = table_site(tmp_path, metadata={**H200, "gpu": "unknown"})
    with pytest.raises(CannotJudge):
        install(H200_V1, blind)
    install(H200_V1, table_site(tmp_path))
    assert local_path(blind).read_bytes() == H200_V1


def test_a_good_local_table_keeps_its_winners_and_gains_the_others(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    path = put_local(site, table_text(2, tactic=7, first=1))
    install(table_text(2, tactic=1, first=2), site, kind=ALONE)
    tactics = {key: value[1] for key, value in entries_of(path).items()}
    assert tactics == {key_of(1): 7, key_of(2): 7, key_of(3): 1}
    parse_table(path.read_bytes())


def test_in_a_group_the_seeded_winners_hold(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    path = put_local(site, table_text(2, tactic=7, first=1))
    install(table_text(2, tactic=1, first=2), site)
    assert {key: value[1] for key, value in entries_of(path).items()} == {key_of(1): 7, key_of(2): 1, key_of(3): 1}


@pytest.mark.parametrize(
    "poison",
    [b"", b"[]", H200_V1[:-20], table_text(1, metadata=...), table_text(1, metadata={**H200, "gpu": "NVIDIA B200"})],
    ids=["empty", "list", "truncated", "no metadata", "another gpu"],
)
def test_a_local_file_that_poisons_every_start_gives_way_and_is_kept(tmp_path: Path, poison: bytes) -> None:
    site = table_site(tmp_path)
    path = put_local(site, poison)
    install(H200_V1, site)
    assert path.read_bytes() == H200_V1
    (rejected,) = list_rejected(site.state)
    assert rejected.original == str(path)
    assert rejected.detail
    assert Path(rejected.moved_to).read_bytes() == poison


def test_healing_happens_without_anything_to_install(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    path = put_local(site, b"[]")
    (line,) = KIND.heal(site)
    assert "moved aside" in line
    assert not path.exists()
    assert KIND.heal(site) == ()
    assert len(list_rejected(site.state)) == 1


def test_healing_leaves_good_vague_and_undecided_tables_alone(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    blind = table_site(tmp_path, metadata={**H200, "gpu": "unknown"})
    path = put_local(site, H200_V1)
    assert KIND.heal(site) == ()
    assert KIND.heal(blind) == ()
    put_local(site, table_text(1, metadata={**H200, "cudnn_version": "unknown"}))
    assert KIND.heal(site) == ()
    assert path.exists()


def test_two_gpu_models_that_share_a_folder_each_keep_their_table(tmp_path: Path) -> None:
    ours = table_site(tmp_path)
    theirs = table_site(tmp_path, metadata={**H200, "gpu": "NVIDIA B200"})
    path = put_local(ours, H200_V1)
    KIND.heal(theirs)
    assert not path.exists()
    b200 = table_text(2, metadata={**H200, "gpu": "NVIDIA B200"})
    put_local(theirs, b200)
    KIND.heal(ours)
    assert path.read_bytes() == H200_V1
    KIND.heal(theirs)
    assert path.read_bytes() == b200


def test_a_link_in_place_of_the_table_is_not_followed(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    victim = tmp_path / "victim"
    victim.write_bytes(H200_V1)
    path = local_path(site)
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    with pytest.raises(ArtifactRefused):
        KIND.capture(site)
    install(table_text(3), site)
    assert victim.read_bytes() == H200_V1
    assert not path.is_symlink()


def test_a_folder_or_a_pipe_in_place_of_the_table_does_not_hang_or_crash(tmp_path: Path) -> None:
    for make in ("mkdir", "mkfifo"):
        site = table_site(tmp_path / make)
        local_path(site).parent.mkdir(parents=True)
        getattr(os, make)(local_path(site))
        assert not KIND.present(site)
        install(H200_V1, site)
        assert local_path(site).read_bytes() == H200_V1


# The managed store --------------------------------------------------------------------------------------


def test_a_managed_store_is_captured_as_a_v1_table_that_every_reader_has(tmp_path: Path) -> None:
    site = table_site(tmp_path, homes=(MANAGED_ROOT,))
    real_store(site)
    capture = KIND.capture(site)
    assert capture is not None
    assert capture.filename == "autotune_configs_dp0_rank0.json"
    table = parse_table(capture.payload.read_bytes())
    assert table.metadata == H200
    real = [json.loads(path.read_text()) for path in (next(H200_V2.iterdir()) / "entries").iterdir()]
    assert {key: entry.as_value() for key, entry in table.entries.items()} == {
        entry["key"]: [entry["runner"], entry["tactic"], entry["profiling_policy"]] for entry in real
    }
    assert KIND.present(site)


def test_a_v1_table_becomes_a_managed_store_equal_to_flashinfers(tmp_path: Path) -> None:
    site = table_site(tmp_path, homes=(MANAGED_ROOT,))
    assert not KIND.present(site)
    real = next(H200_V2.iterdir())
    install(table_of_store(examine_store(real)).encode(), site)
    made = site.roots[MANAGED_ROOT] / "v2" / real.name
    assert {p.name: json.loads(p.read_text()) for p in (made / "entries").iterdir()} == {
        p.name: json.loads(p.read_text()) for p in (real / "entries").iterdir()
    }
    assert json.loads((made / "manifest.json").read_text()) == json.loads((real / "manifest.json").read_text())
    assert KIND.present(site)


def test_entries_that_are_there_stay_and_broken_ones_give_way(tmp_path: Path) -> None:
    site = table_site(tmp_path, homes=(MANAGED_ROOT,))
    entries = real_store(site)
    mine, broken, gone, swapped = sorted(entries.iterdir())[:4]
    own = json.loads(mine.read_text())
    mine.write_text(json.dumps({**own, "tactic": 5}))
    broken.write_text("")
    gone.unlink()
    swapped.write_bytes(mine.read_bytes())
    install(table_of_store(examine_store(next(H200_V2.iterdir()))).encode(), site, kind=ALONE)
    assert json.loads(mine.read_text())["tactic"] == 5
    for path in (broken, gone, swapped):
        assert json.loads(path.read_text()) == json.loads((next(H200_V2.iterdir()) / "entries" / path.name).read_text())
    assert {Path(r.original).name for r in list_rejected(site.state)} == {broken.name, swapped.name}


def test_a_foreign_manifest_in_our_folder_is_replaced_and_kept(tmp_path: Path) -> None:
    site = table_site(tmp_path, homes=(MANAGED_ROOT,))
    manifest = real_store(site).parent / "manifest.json"
    manifest.write_text(json.dumps({**H200, "gpu": "NVIDIA B200", "cache_schema": "v2"}))
    assert KIND.capture(site) is None
    install(H200_V1, site)
    assert json.loads(manifest.read_text())["gpu"] == "NVIDIA H200"
    assert [Path(r.original).name for r in list_rejected(site.state)] == ["manifest.json"]


def test_entries_of_another_policy_travel_in_a_form_of_their_own(tmp_path: Path) -> None:
    source = table_site(tmp_path / "a", homes=(MANAGED_ROOT,))
    entries = real_store(source)
    manifest = {**H200, "cache_schema": "v2", "measure_execution_mode": "eager"}
    shutil.copytree(entries.parent, entries.parent.parent / environment_name(manifest))
    (entries.parent.parent / environment_name(manifest) / "manifest.json").write_text(json.dumps(manifest))
    capture = KIND.capture(source)
    assert capture is not None
    assert capture.filename == "autotune_managed_dp0_rank0.json"
    assert capture.also == ()
    assert len(decode_stores(capture.payload.read_bytes(), "x")) == 2
    both = table_site(tmp_path / "b", homes=(PER_RANK_ROOT, MANAGED_ROOT))
    KIND.install(manifest_of_capture(capture, source), capture.payload, None, both)
    assert parse_table(local_path(both).read_bytes()) == table_of_store(examine_store(next(H200_V2.iterdir())))
    assert len(list((both.roots[MANAGED_ROOT] / "v2").iterdir())) == 2


def test_a_policy_that_a_v1_file_cannot_name_is_refused_there(tmp_path: Path) -> None:
    source = table_site(tmp_path / "a", homes=(MANAGED_ROOT,))
    manifest = {**H200, "cache_schema": "v2", "measure_execution_mode": "eager"}
    folder = source.roots[MANAGED_ROOT] / "v2" / environment_name(manifest)
    shutil.copytree(next(H200_V2.iterdir()), folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    capture = KIND.capture(source)
    assert capture is not None
    mirror = table_site(tmp_path / "b")
    with pytest.raises(ArtifactRefused, match="measure_execution_mode"):
        KIND.install(manifest_of_capture(capture, source), capture.payload, None, mirror)
    assert not local_path(mirror).exists()


def test_bare_cudnn_indices_stay_out_of_a_managed_store(tmp_path: Path) -> None:
    site = table_site(tmp_path, homes=(MANAGED_ROOT,))
    old = key_of(9, runner="CudnnFp8GemmRunner")
    done = install(with_entry(old, ["CudnnFp8GemmRunner", 3, HOT]), site)
    assert old in done.left_out
    assert len(list(site.roots[MANAGED_ROOT].rglob("entries/*.json"))) == 3


def test_an_engine_without_tables_takes_none(tmp_path: Path) -> None:
    with pytest.raises(ArtifactRefused) as caught:
        install(H200_V1, table_site(tmp_path, homes=()))
    assert caught.value.reason == "relocation"


# Use ------------------------------------------------------------------------------------------------------

HIT = "[Autotuner]: Config cache hit for fp8_gemm (runner=CublasFp8GemmRunner, source=config file)"


@pytest.mark.parametrize(
    ("counters", "lines", "used", "says"),
    [
        ({"flashinfer_autotune_hits": 2, "flashinfer_autotune_profiled": 0}, (), True, "nothing was profiled"),
        ({"flashinfer_autotune_hits": 2, "flashinfer_autotune_profiled": 4}, (), True, "4 configurations were tuned"),
        ({"flashinfer_autotune_hits": 0, "flashinfer_autotune_profiled": 4}, (), False, "no operation hit"),
        ({"flashinfer_autotune_hits": 0, "flashinfer_autotune_profiled": 0}, (), False, "asked for no operation"),
        ({}, (HIT, HIT), True, "1 operations were served"),
        ({}, ("[Autotuner]: Saved 9 configs to /x/y.json (6 new, 3 from previous config)",), False, "6 config"),
        ({}, (), False, "nothing shows"),
        (
            {},
            ("[Autotuner]: Cache file /x was created in a different environment (gpu: saved=a vs current=b). Etc.",),
            False,
            "gpu: saved=a vs current=b",
        ),
    ],
)
def test_use_is_what_flashinfer_itself_reports(
    tmp_path: Path, counters: dict[str, int], lines: tuple[str, ...], used: bool, says: str
) -> None:
    site = table_site(tmp_path)
    done = install(H200_V1, site)
    verdict = KIND.judge(done, Evidence(1.0, counters, lines), site)
    assert verdict.used is used
    assert says in verdict.reason
    assert verdict.per_cache == {"tables": used}


def test_a_table_that_did_not_hit_is_reported_with_what_was_tuned_instead(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    done = install(table_text(2), site)
    put_local(site, table_text(5))
    verdict = KIND.judge(done, Evidence(1.0), site)
    assert not verdict.used
    assert "3 configurations were tuned here" in verdict.reason
    assert key_of(3) in verdict.reason


def test_a_table_that_was_taken_back_is_kept_and_the_earlier_one_returns(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    before = table_text(2, tactic=7)
    path = put_local(site, before)
    done = install(table_text(4), site)
    assert path.read_bytes() != before
    KIND.retract(done, site)
    assert path.read_bytes() == before
    (rejected,) = list_rejected(site.state)
    assert rejected.reason == "probation"


def test_entries_that_were_taken_back_leave_a_store_as_it_was(tmp_path: Path) -> None:
    site = table_site(tmp_path, homes=(MANAGED_ROOT,))
    entries = real_store(site)
    before = {path.name: path.read_bytes() for path in entries.iterdir()}
    done = install(table_text(4, tactic=9), site)
    assert len(list(entries.glob("*.json"))) == 10
    KIND.retract(done, site)
    assert {path.name: path.read_bytes() for path in entries.glob("*.json")} == before
    assert not KIND.present(site)


def test_an_unsigned_table_of_stock_vllm_meets_the_same_rules(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    good = payload_of(tmp_path, H200_V1)
    KIND.install(KIND.reference_manifest(good, site, issued_at=1, publisher="stock vLLM"), good, None, site)
    assert local_path(site).read_bytes() == H200_V1
    other = payload_of(tmp_path, table_text(1, metadata={**H200, "gpu": "x"}))
    with pytest.raises(ArtifactRefused):
        KIND.install(KIND.reference_manifest(other, site, issued_at=1, publisher="stock vLLM"), other, None, site)
    with pytest.raises(ArtifactRefused):
        KIND.reference_manifest(payload_of(tmp_path, b"[]"), site, issued_at=1, publisher="stock vLLM")


def test_what_was_tuned_into_the_store_since_is_published_with_the_v1_table(tmp_path: Path) -> None:
    site = table_site(tmp_path, homes=(PER_RANK_ROOT, MANAGED_ROOT))
    real_store(site)
    put_local(site, table_text(2, tactic=7))
    capture = KIND.capture(site)
    assert capture is not None
    assert len(parse_table(capture.payload.read_bytes()).entries) == 8
