"""With the real compiler: a bundle at another root, the old one gone, compiles nothing and answers the same."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.sites import make_manifest, make_site

from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.host import host_facts
from warmseed.seeding.kinds.base import Evidence, Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.inductor import InductorCache
from warmseed.seeding.kinds.compiled.triton import TritonCache

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "compile_small.py"
KIND = CompileCacheKind([InductorCache(), TritonCache()])


def real_site(base: Path) -> Site:
    facts = {**host_facts(), "device": "cpu", "cpu_threads": "2"}
    return replace(make_site(base, device_index=-1), environment=Environment(facts))


def compile_small(site: Site) -> tuple[float, Evidence]:
    """Run the model in a process of its own, as an engine on `site` would."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": site.roots["inductor"], "TRITON_CACHE_DIR": site.roots["triton"]}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    return said["total"], Evidence(seconds=said["seconds"], counters=said["counters"])


def test_a_moved_bundle_is_used_after_the_old_root_is_gone(tmp_path: Path) -> None:
    source, target = real_site(tmp_path / "source"), real_site(tmp_path / "target")
    total, cold = compile_small(source)
    assert cold.counters["inductor_fxgraph_cache_miss"] >= 1
    capture = KIND.capture(source)
    assert capture is not None
    assert capture.left_out == {}
    payload = shutil.copy(capture.payload, tmp_path / "payload")
    shutil.rmtree(tmp_path / "source")

    installation = KIND.install(make_manifest(capture, source), Path(payload), capture.index, target)
    again, warm = compile_small(target)
    verdict = KIND.judge(installation, warm, target)
    assert again == total
    assert verdict.used, verdict.reason
    assert "inductor_fxgraph_cache_miss" not in warm.counters

    recaptured = KIND.capture(target)
    assert recaptured is not None
    assert recaptured.sha256 == capture.sha256  # a warm start adds nothing: the next generation would be this one

    inert = replace(target, roots={name: tmp_path / "engine" / name for name in target.roots})
    fresh = real_site(tmp_path / "fresh")
    unread = KIND.install(make_manifest(capture, source), Path(payload), capture.index, fresh)
    _, elsewhere = compile_small(inert)  # an engine whose cache folder is another one
    verdict = KIND.judge(unread, elsewhere, fresh)
    assert not verdict.used
    assert "again" in verdict.reason

    older_cpu = replace(
        fresh, environment=Environment({**fresh.environment, "cpu_flags": hashlib.sha256(b"avx512").hexdigest()[:16]})
    )
    with pytest.raises(ArtifactRefused, match="cpu_flags"):
        KIND.install(make_manifest(capture, source), Path(payload), capture.index, older_cpu)
