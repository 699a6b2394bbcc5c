"""Tables made to hurt: they cost little time and memory, and nothing of them reaches FlashInfer's folder."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
from tests.support.tables import (
    H200,
    H200_V1,
    key_of,
    local_path,
    payload_of,
    put_local,
    table_manifest,
    table_site,
    table_text,
)

from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.autotune.layout import MANAGED_ROOT, environment_name
from warmseed.seeding.kinds.autotune.managed import decode_stores, manifest_of, parse_entry
from warmseed.seeding.kinds.autotune.table import parse_table

KIND = FlashInferAutotune()
_HEAD = b'{"_metadata": ' + json.dumps(H200).encode() + b", "
MiB = 1 << 20

HOSTILE: dict[str, bytes] = {
    "brackets": b"[" * (2 * MiB),
    "brackets after good metadata": _HEAD + b'"a": ' + b"[" * MiB,
    "empty lists": _HEAD + b'"a": [' + b"[]," * (MiB // 2) + b"[]]}",
    "empty objects": _HEAD + b'"_records": {"a": {"b": [' + b"{}," * 50_000 + b"{}]}}}",
    "objects of one": _HEAD + b'"_records": {"a": {"b": [' + b'{"a":1},' * 25_000 + b"1]}}, " + b'"x": 1}',
    "short strings": _HEAD + b'"_records": {"a": {"b": [' + b'"a",' * 50_000 + b'"a"]}}, "x": 1}',
    "long string": _HEAD + b'"x": "' + b"y" * (2 * MiB - 400) + b'"}',
    "escaped quotes": _HEAD + b'"x": "' + b'\\"' * (MiB - 400),
    "backslashes": b'"\\' * MiB,
    "quotes": b'"' * (2 * MiB),
    "digits": _HEAD + b'"x": ' + b"9" * (2 * MiB - 400) + b"}",
    "5,000 digits": _HEAD + b'"x": ' + b"9" * 5000 + b"}",
    "exponent": _HEAD + b'"x": 1e' + b"9" * 20 + b"}",
    "white space": b" " * (2 * MiB),
    "commas": b"," * (2 * MiB),
    "colons": b'{"a"' + b":" * MiB,
    "many keys": _HEAD + b",".join(b'"%d": 0' % n for n in range(50_000)) + b"}",
    "many bad entries at the end": table_text(3000)[:-2] + b', "zzz": []}',
    "one key again and again": _HEAD + b",".join([b'"k": 0'] * 50_000) + b"}",
    "endless key": _HEAD + b'"' + b"(" * MiB + b'": ["R", 0]}',
    "larger than any table": table_text(1) + b" " * (3 * MiB),
    "ten times larger": b"{" + b" " * (20 * MiB),
    "surrogates": _HEAD + b'"\\ud800\\udfff": ["R", 0]}',
    "nulls": b"\x00" * MiB,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_table_costs_under_a_second_and_16_mib(name: str) -> None:
    data = HOSTILE[name]
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        start = time.perf_counter()
        with pytest.raises(ArtifactRefused):
            parse_table(data)
        seconds = time.perf_counter() - start
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert seconds < 5  # a guard against worse than linear; the real figure is bench/tables.py's
    assert peak < 16 * MiB


def test_a_table_swapped_between_verification_and_install_is_refused(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    manifest = table_manifest(H200_V1, site)
    payload = payload_of(tmp_path, H200_V1)
    payload.write_bytes(H200_V1.replace(b'"CublasFp8GemmRunner",\n    0', b'"CublasFp8GemmRunner",\n    7'))
    with pytest.raises(ArtifactRefused) as caught:
        KIND.install(manifest, payload, None, site)
    assert caught.value.reason == "digest"
    assert not local_path(site).exists()


def test_what_is_installed_is_always_one_whole_table_however_the_payload_is_swapped(tmp_path: Path) -> None:
    """Another process keeps swapping the staging file; only the table that was signed ever appears."""
    other = table_text(3, tactic=5)
    manifest = table_manifest(H200_V1, table_site(tmp_path))
    payload = payload_of(tmp_path, H200_V1)
    stop = threading.Event()

    def swap() -> None:
        spare = tmp_path / "spare"
        while not stop.is_set():
            for data in (other, H200_V1):
                spare.write_bytes(data)
                os.replace(spare, payload)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(60):
            site = table_site(tmp_path / str(number))
            with contextlib.suppress(ArtifactRefused):
                KIND.install(manifest, payload, None, site)
            assert not local_path(site).exists() or local_path(site).read_bytes() == H200_V1
    finally:
        stop.set()
        thread.join()


def test_a_payload_that_is_a_link_or_a_device_is_not_read(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    manifest = table_manifest(H200_V1, site)
    good = payload_of(tmp_path, H200_V1)
    link = tmp_path / "link"
    link.symlink_to(good)
    for path in (link, Path("/dev/zero"), tmp_path):
        with pytest.raises(ArtifactRefused):
            KIND.install(manifest, path, None, site)


def test_a_folder_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    local_path(site).parent.parent.mkdir(parents=True)
    local_path(site).parent.symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        KIND.install(table_manifest(H200_V1, site), payload_of(tmp_path, H200_V1), None, site)
    assert list(elsewhere.iterdir()) == []


def test_metadata_of_another_gpu_under_the_same_configuration_does_not_get_in(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    b200 = table_text(3, metadata={**H200, "gpu": "NVIDIA B200"})
    for environment in (dict(H200), {**H200, "gpu": "NVIDIA B200"}):
        with pytest.raises(ArtifactRefused) as caught:
            KIND.install(table_manifest(b200, site, environment=environment), payload_of(tmp_path, b200), None, site)
        assert caught.value.fields == ("gpu",)
    put_local(site, H200_V1)
    assert KIND.heal(site) == ()
    assert local_path(site).read_bytes() == H200_V1


_STORE = {"manifest": manifest_of(H200), "entries": {key_of(1): {"runner": "CublasFp8GemmRunner", "tactic": 0}}}
_SCHEMA = "warmseed.flashinfer_autotune.managed/1"


def stores_payload(*stores: object, **more: object) -> bytes:
    return json.dumps({"schema": _SCHEMA, "stores": list(stores), **more}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"[]",
        stores_payload(),
        stores_payload(_STORE, extra=1),
        stores_payload(*[_STORE] * 2),
        stores_payload(*[_STORE] * 20),
        stores_payload({"manifest": manifest_of(H200)}),
        stores_payload({**_STORE, "entries": []}),
        stores_payload({**_STORE, "manifest": {**manifest_of(H200), "cache_schema": "v3"}}),
        stores_payload({**_STORE, "manifest": {"cache_schema": "v2"}}),
        stores_payload({**_STORE, "entries": {"x": {"runner": "x", "tactic": 0}}}),
        stores_payload({**_STORE, "entries": {key_of(1): {"runner": "CublasFp8GemmRunner"}}}),
        stores_payload({**_STORE, "entries": {key_of(1): {"runner": "CublasFp8GemmRunner", "tactic": [9, 9]}}}),
        stores_payload({**_STORE, "entries": {key_of(1): {"runner": "Other", "tactic": 0}}}),
        stores_payload(
            {**_STORE, "entries": {key_of(1): {"runner": "CublasFp8GemmRunner", "tactic": 0, "key": key_of(2)}}}
        ),
    ],
)
def test_a_hostile_payload_of_stores_is_refused_whole(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ArtifactRefused):
        decode_stores(data, "the payload")
    site = table_site(tmp_path, homes=(MANAGED_ROOT,))
    manifest = table_manifest(data, site, filename="autotune_managed_dp0_rank0.json")
    with pytest.raises(ArtifactRefused):
        KIND.install(manifest, payload_of(tmp_path, data), None, site)
    assert not list(site.roots[MANAGED_ROOT].rglob("*.json"))


def test_a_payload_for_another_environment_never_gets_a_folder(tmp_path: Path) -> None:
    site = table_site(tmp_path, homes=(MANAGED_ROOT,))
    data = stores_payload({**_STORE, "manifest": manifest_of({**H200, "gpu": "NVIDIA B200"})})
    manifest = table_manifest(data, site, filename="autotune_managed_dp0_rank0.json")
    with pytest.raises(ArtifactRefused):
        KIND.install(manifest, payload_of(tmp_path, data), None, site)
    assert not site.roots[MANAGED_ROOT].exists()


def test_a_managed_entry_whose_structure_contradicts_its_key_is_refused() -> None:
    entry = {"key": key_of(1), "runner": "CublasFp8GemmRunner", "tactic": 0, "key_fields": {"__tuple__": ["x"]}}
    with pytest.raises(ArtifactRefused, match="key_fields"):
        parse_entry(json.dumps(entry).encode(), "entry")


def test_a_folder_of_a_foreign_manifest_is_neither_published_nor_counted_as_present(tmp_path: Path) -> None:
    site = table_site(tmp_path, homes=(MANAGED_ROOT,))
    folder = site.roots[MANAGED_ROOT] / "v2" / environment_name(manifest_of(H200))
    (folder / "entries").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest_of({**H200, "gpu": "NVIDIA B200"})))
    assert KIND.capture(site) is None
    assert not KIND.present(site)
