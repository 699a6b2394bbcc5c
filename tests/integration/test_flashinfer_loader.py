"""FlashInfer's own tuner and loaders, on a CPU: they accept what is installed and never see what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.flashinfer_child import ask_flashinfer
from tests.support.tables import (
    H200,
    H200_V1,
    local_path,
    manifest_of_capture,
    put_local,
    table_manifest,
    table_site,
    table_text,
)
from tests.unit.autotune.test_table_text import REFUSED

from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.compare import compare
from warmseed.seeding.kinds.autotune.keys import encode_key
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.autotune.layout import MANAGED_ROOT, PER_RANK_ROOT
from warmseed.seeding.kinds.autotune.table import parse_table
from warmseed.seeding.kinds.base import Evidence, Site

# FlashInfer tunes on CUDA only; two shims let its own code profile and save on a CPU.
TUNER = """
import time
from flashinfer.autotuner import DynamicTensorSpec, TunableRunner, TuningConfig
from warmseed.seeding.kinds.autotune.usage import read_counters
torch.cuda.is_current_stream_capturing = lambda: False
def on_cpu(self, runner, inputs, tactic, tuning_config, input_tensor_batches=None, **kw):
    begun = time.perf_counter()
    for _ in range(3):
        runner(inputs, tactic=tactic, **kw)
    return (time.perf_counter() - begun) * 1e3
AutoTuner._profile_single_kernel = on_cpu
class FakeGemmRunner(TunableRunner):
    def get_valid_tactics(self, inputs, profile):
        return [(128, 0), (128, 1), (64, 2)]
    def get_cache_key_extras(self, inputs):
        return (inputs[0].dtype, True, None, 128)
    def forward(self, inputs, tactic=-1, do_preparation=False, **kw):
        for _ in range({-1: 4, (128, 0): 8, (128, 1): 1, (64, 2): 4}[tactic]):
            result = inputs[0] @ inputs[1]
        return result
sizes = (16, 32, 64)
config = TuningConfig(dynamic_tensor_specs=(
    DynamicTensorSpec((0,), (0,), sizes, lambda x: max(b for b in sizes if b <= max(x, 16))),))
def tune():
    runner = FakeGemmRunner()
    chosen, tactic = tuner.choose_one("fake::gemm", [runner], config, [torch.randn(48, 64), torch.randn(64, 64)])
    return list(tactic) if isinstance(tactic, tuple) else tactic
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A v1 table and a managed store that FlashInfer wrote, as if on an H200."""
    base = tmp_path_factory.mktemp("tuned")
    answer = ask_flashinfer(
        TUNER
        + """
with autotune(True, cache=question["v1"]):
    tune()
tuner.clear_cache()
with autotune_v2(cache_root=question["v2"]):
    tune()
answer = read_counters(tuner)
""",
        base / "workspace",
        metadata=H200,
        v1=str(base / "v1.json"),
        v2=str(base / "v2root"),
    )
    assert answer["flashinfer_autotune_profiled"] == 6
    return base


def seeded(tuned: Path, base: Path, source_home: str, mirror_home: str) -> Site:
    """A mirror that adopted what a source with FlashInfer's own files captured."""
    source = table_site(base / "source", homes=(source_home,))
    if source_home == PER_RANK_ROOT:
        put_local(source, (tuned / "v1.json").read_bytes())
    else:
        source.roots[MANAGED_ROOT].parent.mkdir(parents=True)
        source.roots[MANAGED_ROOT].symlink_to(tuned / "v2root")
    kind = FlashInferAutotune()
    capture = kind.capture(source)
    assert capture is not None
    mirror = table_site(base / "mirror", homes=(mirror_home,))
    kind.install(manifest_of_capture(capture, source), capture.payload, None, mirror)
    return mirror


@pytest.mark.parametrize("source", [PER_RANK_ROOT, MANAGED_ROOT])
def test_a_mirror_profiles_nothing_with_a_v1_table(tuned: Path, tmp_path: Path, source: str) -> None:
    mirror = seeded(tuned, tmp_path, source, PER_RANK_ROOT)
    before = local_path(mirror).read_bytes()
    answer = ask_flashinfer(
        TUNER
        + """
answer["loads"] = tuner.load_configs(question["path"])
with autotune(True, cache=question["path"]):
    answer["tactic"] = tune()
answer["counters"] = read_counters(tuner)
""",
        tmp_path / "workspace",
        metadata=H200,
        path=str(local_path(mirror)),
    )
    assert answer["loads"] is True
    assert answer["tactic"] == [128, 1]
    assert answer["counters"] == {"flashinfer_autotune_profiled": 0, "flashinfer_autotune_hits": 1}
    assert local_path(mirror).read_bytes() == before
    kind = FlashInferAutotune()
    done = kind.install(table_manifest(before, mirror), local_path(mirror), None, mirror)
    assert kind.judge(done, Evidence(1.0, answer["counters"]), mirror).used


@pytest.mark.parametrize("source", [PER_RANK_ROOT, MANAGED_ROOT])
def test_a_mirror_profiles_nothing_with_a_managed_store(tuned: Path, tmp_path: Path, source: str) -> None:
    mirror = seeded(tuned, tmp_path, source, MANAGED_ROOT)
    answer = ask_flashinfer(
        TUNER
        + """
with autotune_v2(mode="replay", cache_root=question["root"]):
    answer["replayed"] = tune()
with autotune_v2(cache_root=question["root"]):
    answer["tuned"] = tune()
answer["counters"] = read_counters(tuner)
answer["preloaded"] = tuner._managed_cache.preload()[1:]
""",
        tmp_path / "workspace",
        metadata=H200,
        root=str(mirror.roots[MANAGED_ROOT]),
    )
    assert answer["replayed"] == answer["tuned"] == [128, 1]
    assert answer["counters"] == {"flashinfer_autotune_profiled": 0, "flashinfer_autotune_hits": 1}
    assert answer["preloaded"] == [3, 0]


def test_tables_of_a_real_gpu_load_whole(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    put_local(site, b"[]")
    payload = tmp_path / "payload"
    payload.write_bytes(H200_V1)
    FlashInferAutotune().install(table_manifest(H200_V1, site), payload, None, site)
    answer = ask_flashinfer(
        'answer = [tuner.load_configs(question["path"]), len(tuner._file_configs)]',
        tmp_path / "workspace",
        metadata=H200,
        path=str(local_path(site)),
    )
    assert answer == [True, 6]


def test_flashinfer_starts_whatever_lay_in_its_folder(tmp_path: Path) -> None:
    """Left alone, these files crash a start or are believed; after healing, none is in FlashInfer's way."""
    kind = FlashInferAutotune()
    paths: dict[str, str] = {}
    for number, data in enumerate(REFUSED.values()):
        site = table_site(tmp_path / str(number))
        paths[str(number)] = str(put_local(site, data))
        kind.heal(site)
    answer = ask_flashinfer(
        """
for number, path in question["paths"].items():
    tuner.clear_cache()
    with autotune(True, cache=path):
        pass
    answer[number] = len(tuner._file_configs)
""",
        tmp_path / "workspace",
        metadata=H200,
        paths=paths,
    )
    assert answer == dict.fromkeys(paths, 0)


def test_flashinfer_crashes_on_files_that_are_refused_here(tmp_path: Path) -> None:
    """Why all this is checked: each of these, left where it is, ends the engine's start or is believed blindly."""
    crashing = ["empty", "truncated", "byte order mark", "a list", "a number", "null", "100,000 deep", "entry a number"]
    crashing += ["entry empty", "entry of one", "runner a number", "policy a number", "records a list", "5,000 digits"]
    believed = ["no metadata", "tactic an object", "tactic a string", "duplicate entry"]
    paths: dict[str, str] = {}
    for name in (*crashing, *believed):
        paths[name] = str(tmp_path / f"{len(paths)}.json")
        Path(paths[name]).write_bytes(REFUSED[name])
    answer = ask_flashinfer(
        """
for name, path in question["paths"].items():
    tuner.clear_cache()
    try:
        answer[name] = tuner.load_configs(path)
    except BaseException as error:
        answer[name] = type(error).__name__
""",
        tmp_path / "workspace",
        metadata=H200,
        paths=paths,
    )
    assert all(isinstance(answer[name], str) for name in crashing), answer
    assert all(answer[name] is True for name in believed), answer


def test_environments_are_compared_as_flashinfer_does_but_for_its_blind_spots(tmp_path: Path) -> None:
    values = ["13.0", "12.8", "unknown", "None", "*"]
    pairs = [(saved, current) for saved in [*values, None] for current in values[:3]]
    answer = ask_flashinfer(
        """
answer = []
for saved, current in question["pairs"]:
    meta = {} if saved is None else {"cuda_version": saved}
    hard, soft = autotuner._classify_metadata_mismatches(meta, {"cuda_version": current})
    answer.append([bool(hard), bool(soft)])
""",
        tmp_path / "workspace",
        pairs=pairs,
    )
    for (saved, current), (hard, soft) in zip(pairs, answer, strict=True):
        theirs = {k: v for k, v in H200.items() if k != "cuda_version"}
        ours = compare(
            theirs if saved is None else {**theirs, "cuda_version": saved}, {**H200, "cuda_version": current}
        )
        if current == "unknown" and saved in ("13.0", "12.8"):
            assert hard  # FlashInfer takes a moment of blindness for a definite difference
            assert ours.undecided == ("cuda_version",)
        elif saved == current == "unknown":
            assert (hard, soft) == (False, False)  # and two blind nodes for equal ones
            assert ours.soft
        elif saved == "*":
            assert (hard, soft) == (False, False)
            assert ours.wildcard == ("cuda_version",)
        else:
            assert (bool(ours.hard), bool(ours.soft)) == (hard, soft)


def test_keys_are_encoded_as_flashinfer_encodes_them(tmp_path: Path) -> None:
    keys = [*parse_table(H200_V1).entries, *parse_table(table_text(2)).entries]
    more = [
        "('a', 'R', ((1, 2), (-1,), ()), (torch.bfloat16, None, True, False, 'x y', -3, 0.5, [1, (2,)]))",
        "('a::b', '_R', (), ())",
    ]
    answer = ask_flashinfer(
        """
from flashinfer.autotune_cache import _decode_key_fields, _encode_key_fields
answer = []
for key, fields in question["keys"]:
    decoded = _decode_key_fields(fields)
    answer.append([str(decoded) == key, _encode_key_fields(decoded) == fields])
""",
        tmp_path / "workspace",
        keys=[(key, encode_key(key)) for key in [*keys, *more]],
    )
    assert answer == [[True, True]] * len([*keys, *more])


def test_what_is_refused_here_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    site = table_site(tmp_path)
    for name, data in REFUSED.items():
        payload = tmp_path / "payload"
        payload.write_bytes(data)
        with pytest.raises(ArtifactRefused):
            FlashInferAutotune().install(table_manifest(data, site), payload, None, site)
        assert not local_path(site).exists(), name


def test_a_merged_table_is_one_that_flashinfer_loads(tuned: Path, tmp_path: Path) -> None:
    site = table_site(tmp_path)
    put_local(site, (tuned / "v1.json").read_bytes())
    payload = tmp_path / "payload"
    payload.write_bytes(H200_V1)
    FlashInferAutotune().install(table_manifest(H200_V1, site), payload, None, site)
    answer: Any = ask_flashinfer(
        'answer = [tuner.load_configs(question["path"]), len(tuner._file_configs)]',
        tmp_path / "workspace",
        metadata=H200,
        path=str(local_path(site)),
    )
    assert answer == [True, 9]
    assert json.loads(local_path(site).read_bytes())["_metadata"] == H200
