"""Keys, environments and host facts: what names an artifact, from hostile values too."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmseed.seeding import host
from warmseed.seeding.artifact import ArtifactKey, bundle_key, check_digest, denial_key, object_key, parse_manifest_key
from warmseed.seeding.environment import UNKNOWN, Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.stores.base import check_key

HASH = "0123456789abcdef" * 4
KEY = ArtifactKey(kind="compile_cache", config_hash=HASH, environment_hash=HASH, dp_rank=2, world_rank=11)
texts = st.text(max_size=80) | st.sampled_from(
    ["", "..", "../x", "a/b", "A" * 64, HASH[:-1], HASH + "\n", HASH.upper(), "\0", "compile_cache\n", "é" * 64]
)


def test_the_keys_are_those_of_the_reference() -> None:
    assert bundle_key(HASH) == f"vllm-warmup-cache/compile_cache/{HASH}/bundle.tar"
    assert KEY.reference_key("t.json") == f"vllm-warmup-cache/compile_cache/{HASH}/t.json"
    assert KEY.manifest_key(7) == f"vllm-warmup-cache/manifest/compile_cache/{HASH}/{HASH}/dp2_rank11/7.json"


@pytest.mark.parametrize("generation", [1, 7, 10**12])
def test_a_manifests_key_says_whose_it_is(generation: int) -> None:
    assert parse_manifest_key(KEY.manifest_key(generation)) == (KEY, generation)


@pytest.mark.parametrize(
    "name",
    [
        *(KEY.head_key, KEY.pin_key, bundle_key(HASH), object_key(HASH), f"{KEY.manifest_folder}/sub/1.json"),
        *(
            f"{KEY.manifest_folder}/{last}"
            for last in ("0.json", "01.json", "-1.json", "²", "².json", "٣.json", "1.json\n")
        ),
        *(
            KEY.manifest_key(7).replace(*swap)
            for swap in (("dp2", "dp02"), ("rank11", f"rank{1 << 20}"), (HASH, "0" * 63))
        ),
    ],
)
def test_no_other_name_is_taken_for_a_manifests(name: str) -> None:
    assert parse_manifest_key(name) is None


@given(kind=texts, config=texts, environment=texts)
def test_a_key_is_refused_or_every_store_accepts_what_follows_from_it(kind: str, config: str, environment: str) -> None:
    try:
        key = ArtifactKey(kind=kind, config_hash=config, environment_hash=environment)
    except ArtifactRefused:
        return
    for store_key in (key.manifest_key(1 << 40), key.head_key, key.pin_key):
        assert check_key(store_key) == store_key


@given(texts)
def test_a_digest_is_64_lower_case_hexadecimal_digits_and_nothing_else(text: str) -> None:
    hexadecimal = len(text) == 64 and set(text) <= set("0123456789abcdef")
    for named in (check_digest, bundle_key, object_key, denial_key):
        if hexadecimal:
            named(text)
        else:
            with pytest.raises(ArtifactRefused):
                named(text)


@pytest.mark.parametrize("rank", [-1, 1 << 20, True, 1.0, "0", None])
def test_a_rank_is_a_small_whole_number(rank: object) -> None:
    with pytest.raises(ArtifactRefused, match="not a rank"):
        ArtifactKey(kind="k", config_hash=HASH, environment_hash=HASH, world_rank=rank)  # type: ignore[arg-type]


def test_a_key_from_json_has_no_fields_of_a_strangers_own() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(
            b'{"kind":"k","config_hash":"%s","environment_hash":"%s","more":1}' % (HASH.encode(), HASH.encode()),
            type=ArtifactKey,
        )


fields = st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=6)


@given(fields, fields)
def test_two_environments_have_one_digest_exactly_when_nothing_differs(
    ours: dict[str, str], theirs: dict[str, str]
) -> None:
    a, b = Environment(ours), Environment(dict(reversed(list(theirs.items()))))
    differences = a.differences(b)
    assert (a.digest == b.digest) == (differences == ())
    assert {d.field for d in differences} == {n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)}


def test_what_is_absent_and_what_is_unknown_are_two_things() -> None:
    environment = Environment({"torch": "2.13.0", "cxx": UNKNOWN})
    assert environment.unknown == ("cxx",)
    assert dict(environment.only(("torch", "cuda"))) == {"torch": "2.13.0", "cuda": UNKNOWN}
    (difference,) = environment.differences({"torch": "2.13.0", "cxx": UNKNOWN, "cuda": "13"})
    assert str(difference) == "cuda: theirs '13', ours None"


def test_this_host_knows_itself() -> None:
    facts = host.host_facts()
    assert set(facts) == {"machine", "cpu_flags", "glibc", "python_abi", "cxx", "torch", "triton"}
    assert UNKNOWN not in facts.values()
    assert facts == host.host_facts()


def test_cpu_flags_are_the_same_in_any_order_and_unknown_without_a_list(tmp_path: Path) -> None:
    def flags(text: str) -> str:
        path = tmp_path / "cpuinfo"
        path.write_text(text)
        return host._cpu_flags(path)

    assert flags("model name\t: x\nflags\t\t: avx2 amx\n") == flags("flags : amx avx2\n") != flags("flags : avx2\n")
    assert flags("Features\t: sve\n") != UNKNOWN
    assert flags("nothing\n") == host._cpu_flags(tmp_path / "none") == UNKNOWN


def test_a_compiler_that_breaks_is_unknown_and_none_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert host._compiler() == UNKNOWN
    broken.write_text("#!/bin/sh\necho g++ 99\necho more\n")
    assert host._compiler() == "g++ 99"
    monkeypatch.setenv("CXX", "nowhere")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert host._compiler() == "absent"
