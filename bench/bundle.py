"""Bundles against plain tar and zstd, and against b10-transfer, on one set of files in one run.

Medians of several rounds, interleaved and in alternating order so that a busy moment hits all alike, and the
spread of each ratio. Everything is durable when a clock stops: ours syncs the tree it wrote, the others run
``sync``. Each round leaves about four times the size of the files on the disk until the end. With ``--json``
the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from warmseed.seeding.bundle import tar
from warmseed.seeding.bundle.delta import Base, plan
from warmseed.seeding.bundle.index import BundleIndex, read_index
from warmseed.seeding.bundle.install import check_files
from warmseed.seeding.environment import Environment
from warmseed.seeding.host import host_facts
from warmseed.seeding.kinds.base import Capture, Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.inductor import InductorCache
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.manifest import Index, Manifest, sign_manifest, verify_manifest

B10 = "b10-transfer==0.4.1"
KEY = PublisherKey("bench", b"k" * 32)
KIND = CompileCacheKind([InductorCache()], quiet=Quiet(settle=0.0))


def make_site(base: Path) -> Site:
    """A rank that keeps its cache below `base`."""
    return Site(
        config_hash="a" * 64,
        config_factors={},
        environment=Environment({**host_facts(), "device": "cpu"}),
        dp_rank=0,
        world_rank=0,
        device_index=-1,
        cache_root=base / "cache",
        roots={"inductor": base / "cache" / "inductor"},
        state=base / "state",
    )


def write_corpus(folder: Path, *, files: int, total: int, seed: int = 0) -> None:
    """`files` files of `total` bytes together, about half of them compressible, as compiled caches are."""
    rng = random.Random(seed)
    weights = [rng.lognormvariate(0, 1.0) for _ in range(files)]
    words = [rng.randbytes(6).hex() for _ in range(400)]
    for number, weight in enumerate(weights):
        size = max(64, int(total * weight / sum(weights)))
        if number % 2:
            data = rng.randbytes(size)
        else:
            text = " ".join(rng.choices(words, k=size // 13 + 1)).encode()
            data = text[:size]
        name = hashlib.sha256(str(number).encode()).hexdigest()[:24]
        path = folder / name[:2] / f"{name}.{('so', 'py')[number % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def change(folder: Path, fraction: float) -> None:
    """Rewrite that fraction of the files, same names, other bytes."""
    rng = random.Random(1)
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    for path in rng.sample(paths, max(1, int(len(paths) * fraction))):
        path.write_bytes(rng.randbytes(path.stat().st_size))


def sign(capture: Capture, site: Site) -> bytes:
    """The capture's signed manifest."""
    if capture.index is None:
        raise ValueError("a bundle without an index")
    now = int(time.time())
    manifest = Manifest(
        schema=1,
        kind=KIND.name,
        store_key=capture.store_key,
        config_hash=site.config_hash,
        config_digest=site.config_digest,
        dp_rank=0,
        world_rank=0,
        device_index=capture.device_index,
        filename=capture.filename,
        sha256=capture.sha256,
        length=capture.length,
        stored=capture.stored,
        index=Index(sha256=hashlib.sha256(capture.index).hexdigest(), length=len(capture.index)),
        environment=dict(capture.environment),
        generation=1,
        issued_at=now,
        expires_at=now + 3600,
        publisher="bench",
    )
    return sign_manifest(manifest, [KEY])


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def shell(*commands: list[str], out: Path | None = None, source: Path | None = None) -> None:
    """Run a pipeline, then sync."""
    first = subprocess.Popen(commands[0], stdout=subprocess.PIPE, stdin=source.open("rb") if source else None)
    with out.open("wb") if out else open(os.devnull, "wb") as sink:
        subprocess.run(commands[1], stdin=first.stdout, stdout=sink, check=True)
    if first.wait():
        raise subprocess.CalledProcessError(first.returncode, commands[0])
    os.sync()


def our_install(envelope: bytes, capture: Capture, payload: Path, site: Site) -> None:
    """Verify and install as a start does."""
    manifest, _ = verify_manifest(envelope, Keyring([KEY.public]))
    KIND.install(manifest, payload, capture.index, site)


def verification(envelope: bytes, capture: Capture, plain: Path) -> float:
    """Seconds for the signature and every digest of an installation run alone, on two threads as there.

    The whole tar and each of its files are hashed, so every byte twice; nothing is read, parsed or written.
    """
    data = memoryview(plain.read_bytes())
    manifest, _ = verify_manifest(envelope, Keyring([KEY.public]))
    if manifest.index is None or capture.index is None:
        raise ValueError("a bundle without an index")
    files = read_index(capture.index, manifest.index).files
    listed = list(zip(tar.members(data), files, strict=True))

    def work() -> None:
        verify_manifest(envelope, Keyring([KEY.public]))
        right = hashlib.sha256(capture.index or b"").hexdigest() == getattr(manifest.index, "sha256", "")
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(lambda: hashlib.sha256(data).hexdigest())
            pool.submit(check_files, data, listed).result()
            if not right or whole.result() != manifest.sha256:
                raise ValueError("another digest than the manifest's")

    return timed(work)


def b10_script(wheel: Path, folder: Path) -> dict[str, Callable[[Path], float]]:
    """b10-transfer's own create and extract, each in a process of its own, its clock around its call only."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py"):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
    where = Path("/cache") / f"b10-bench-{os.getpid()}"  # b10-transfer takes archives below /cache only
    code = (
        "import sys, time, os, pathlib; from b10_transfer.archive import create_archive, extract_archive\n"
        "a, b = map(pathlib.Path, sys.argv[2:4]); s = time.perf_counter()\n"
        "(create_archive if sys.argv[1] == 'create' else extract_archive)(a, b); os.sync()\n"
        "print(time.perf_counter() - s)"
    )

    def call(*arguments: str) -> float:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=True
        )
        return float(done.stdout.split()[-1])

    return {
        "create": lambda source: call("create", str(source), str(where / "x.tar.gz")),
        "extract": lambda target: call("extract", str(where / "x.tar.gz"), str(target)),
        "clean": lambda _: shutil.rmtree(where, ignore_errors=True) or 0.0,
    }


def torch_first_call(base: Path) -> dict[str, float]:
    """Seconds of a model's first call: nothing cached, the folder as it was left, an installed bundle."""
    script = Path(__file__).with_name("first_call.py")

    def call(root: Path) -> float:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(root)}
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
        )
        return float(json.loads(done.stdout.splitlines()[-1])["seconds"])

    source, target = make_site(base / "source"), make_site(base / "target")
    source.roots["inductor"].parent.mkdir(parents=True)
    cold = call(source.roots["inductor"])
    warm = statistics.median(call(source.roots["inductor"]) for _ in range(3))
    capture = KIND.capture(source)
    if capture is None:
        raise RuntimeError("torch left no cache")
    payload = base / "payload"
    shutil.copy(capture.payload, payload)
    shutil.rmtree(base / "source")  # so that nothing can be found through its old place
    our_install(sign(capture, source), capture, payload, target)
    bundle = statistics.median(call(target.roots["inductor"]) for _ in range(3))
    return {"torch_cold_s": cold, "torch_warm_folder_s": warm, "torch_bundle_s": bundle}


def compare(base: Path, *, files: int, mib: int, rounds: int, b10: Path | None) -> dict[str, float]:
    """Every figure of packing, unpacking, verifying and deltas.

    Nothing is deleted before the end: for minutes after a deletion ext4 passes over the freed inodes one by one
    for each new file, which made whoever came upon them two to three times slower.
    """
    source = make_site(base / "source")
    write_corpus(source.roots["inductor"], files=files, total=mib << 20)
    peer = b10_script(b10, base / "b10") if b10 else None
    times: dict[str, list[float]] = {}
    made = [_round(base / str(number), source, peer, number % 2 == 1, times) for number in range(rounds)]
    if peer:
        peer["clean"](base)
    capture, archive = made[-1]
    result = {f"{name}_s": statistics.median(values) for name, values in times.items()}
    result["stored_mib"] = (capture.stored.length if capture.stored else capture.length) / 2**20
    result["tar_zstd_mib"] = archive.stat().st_size / 2**20
    result["load_average"] = os.getloadavg()[0]
    result["verify_fraction"] = result["verify_s"] / result["unpack_s"]
    result.update(_ratio("pack_ratio_tar_zstd", times["pack"], times["tar_pack"]))
    result.update(_ratio("unpack_ratio_tar_zstd", times["unpack"], times["tar_unpack"]))
    if peer:
        result.update(_ratio("b10_pack_speedup", times["b10_pack"], times["pack"]))
        result.update(_ratio("b10_unpack_speedup", times["b10_unpack"], times["unpack"]))
    result["delta_2pct_fraction"] = delta(capture, source)
    return result


def _ratio(name: str, over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """The ratio of two medians, and the smallest and the largest ratio of any one round."""
    each = [one / other for one, other in zip(over, under, strict=True)]
    middle = statistics.median(over) / statistics.median(under)
    return {name: middle, f"{name}_min": min(each), f"{name}_max": max(each)}


def _round(
    base: Path,
    source: Site,
    peer: dict[str, Callable[[Path], float]] | None,
    backwards: bool,
    times: dict[str, list[float]],
) -> tuple[Capture, Path]:
    """One measurement of everything, added to `times`; our capture and tar's archive.

    Each clock starts with nothing left to write, and who goes first changes with `backwards`.
    """
    corpus, archive, payload, out = source.roots["inductor"], base / "tar.zst", base / "payload", base / "tar"
    out.mkdir(parents=True)
    captured: list[Capture] = []

    def pack() -> None:
        if (capture := KIND.capture(source)) is None:
            raise RuntimeError("nothing was captured")
        captured.append(capture)

    def measure(works: dict[str, Callable[[], float]]) -> None:
        for name in reversed(works) if backwards else works:
            os.sync()
            times.setdefault(name, []).append(works[name]())

    packing: dict[str, Callable[[], float]] = {
        "tar_pack": lambda: timed(
            lambda: shell(["tar", "-cf", "-", "-C", str(corpus), "."], ["zstd", "-1", "-q"], out=archive)
        ),
        "pack": lambda: timed(pack),
    }
    if peer:
        packing["b10_pack"] = lambda: peer["create"](corpus)
    measure(packing)
    capture = captured[0]
    capture.payload.rename(payload)  # the next capture makes a file of its own
    envelope = sign(capture, source)
    unpacking: dict[str, Callable[[], float]] = {
        "tar_unpack": lambda: timed(
            lambda: shell(["zstd", "-dcq"], ["tar", "-xf", "-", "-C", str(out)], source=archive)
        ),
        "unpack": lambda: timed(lambda: our_install(envelope, capture, payload, make_site(base / "ours"))),
    }
    if peer:
        unpacking["b10_unpack"] = lambda: peer["extract"](base / "b10")
    measure(unpacking)
    plain = base / "plain.tar"
    with plain.open("wb") as sink:
        subprocess.run(["zstd", "-dcq", str(payload)], stdout=sink, check=True)
    times.setdefault("verify", []).append(verification(envelope, capture, plain))
    return capture, archive


def delta(capture: Capture, source: Site) -> float:
    """The part of a bundle, index included, that moves when 2 % of its files changed."""
    old = _index(capture)
    change(source.roots["inductor"], 0.02)
    changed = KIND.capture(source)
    if changed is None or changed.index is None:
        raise RuntimeError("nothing was captured")
    made = plan(_index(changed), [Base(old, old.stored)])
    if made is None:
        raise RuntimeError("no plan")
    return (made.moved + len(changed.index)) / (made.total + len(changed.index))


def _index(capture: Capture) -> BundleIndex:
    raw = capture.index or b""
    return read_index(raw, Index(sha256=hashlib.sha256(raw).hexdigest(), length=len(raw)))


def fetch_b10(folder: Path) -> Path | None:
    """b10-transfer's wheel, or `None` where there is no network."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), B10]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    return next(folder.glob("*.whl"), None) if done.returncode == 0 else None


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--mib", type=int, default=180)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-b10", action="store_true")
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warmseed-bench-") as folder:
        base = Path(folder)
        wheel = None if options.no_b10 else fetch_b10(base)
        result = compare(base, files=options.files, mib=options.mib, rounds=options.rounds, b10=wheel)
        if not options.no_torch:
            result.update(torch_first_call(base / "torch"))
            result["torch_first_call_ratio"] = result["torch_bundle_s"] / result["torch_warm_folder_s"]
    for name, value in sorted(result.items()):
        print(f"{name:28} {value:10.3f}")
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
