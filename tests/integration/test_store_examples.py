"""The examples of configs/stores run as they are, and `warmseed doctor` tells the truth about them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
import typer
from tests.support.services import free_port, listening, program, redis_server, running, s3_server, wait_until
from typer.testing import CliRunner

from warmseed.daemon.cli.doctor import doctor
from warmseed.errors import ConfigurationError

EXAMPLES = Path(__file__).parents[2] / "configs" / "stores"


def run_doctor(*arguments: object) -> tuple[int, dict[str, dict[str, object]]]:
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, [str(a) for a in arguments] + ["--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    stores = json.loads(result.stdout.splitlines()[-1])["stores"]
    return result.exit_code, {store["store"]: store for store in stores}


def adapted(name: str, folder: Path, **replacements: str) -> Path:
    """The example with the addresses of this test's services."""
    text = (EXAMPLES / name).read_text()
    for old, new in replacements.items():
        found = {"endpoint": "http://127.0.0.1:9000", "port": "127.0.0.1:6379", "mount": "/mnt/warmseed"}.get(old, old)
        assert found in text
        text = text.replace(found, new)
    path = folder / name
    path.write_text(text)
    return path


def test_the_shared_folder_example(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    config = adapted("shared-folder.toml", tmp_path, mount=str(tmp_path / "mount"))
    code, stores = run_doctor("--config", config, "--cache-root", tmp_path / "root")
    assert code == 0
    assert list(stores) == ["disk", "file"]
    assert all(store["ok"] and store["writes"] and not store["left_behind"] for store in stores.values())
    assert [p for p in (tmp_path / "mount").rglob("*") if p.is_file()] == []


def test_the_redis_example(tmp_path: Path) -> None:
    with redis_server(tmp_path) as port:
        config = adapted("redis.toml", tmp_path, port=f"127.0.0.1:{port}")
        code, stores = run_doctor("--config", config, "--cache-root", tmp_path / "root")
        assert code == 0
        assert stores["fleet"]["writes"]
    code, stores = run_doctor("--config", config, "--cache-root", tmp_path / "root")
    assert code == 1
    assert stores["disk"]["ok"]
    assert not stores["fleet"]["ok"]
    assert str(port) in str(stores["fleet"]["problem"])


def test_the_s3_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with s3_server(tmp_path) as endpoint:
        raw = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        raw.create_bucket(Bucket="warmseed")
        config = adapted("s3.toml", tmp_path, endpoint=endpoint)
        code, stores = run_doctor("--config", config, "--cache-root", tmp_path / "root")
        assert code == 0
        assert stores["bucket"]["writes"]
        assert raw.list_objects_v2(Bucket="warmseed").get("Contents", []) == []
        raw.close()


@contextmanager
def mooncake_example(folder: Path, rpc: int) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        "RPC_PORT": str(rpc),
        "METRICS_PORT": str(free_port()),
        "NODE_PORT": str(free_port()),
        "MEMORY": "512MB",
        "PYTHON": sys.executable,
        "PATH": f"{Path(program('mooncake_master')).parent}{os.pathsep}{os.environ['PATH']}",
    }
    log = folder / "script.log"
    with running(["sh", str(EXAMPLES / "mooncake-standalone.sh")], log, **environment) as script:
        try:
            wait_until(lambda: b"Mooncake is up" in log.read_bytes(), "the Mooncake example")
            yield script
        finally:
            script.send_signal(signal.SIGTERM)
            script.wait(20)


def test_the_mooncake_example_starts_works_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rpc = free_port()
    monkeypatch.chdir(tmp_path)
    with mooncake_example(tmp_path, rpc):
        adapted("mooncake.json", tmp_path, **{"127.0.0.1:50051": f"127.0.0.1:{rpc}"})
        config = adapted("mooncake.toml", tmp_path)
        code, stores = run_doctor("--config", config, "--cache-root", tmp_path / "root")
        assert code == 0, stores
        assert stores["mooncake"]["writes"]
        assert not stores["mooncake"]["left_behind"]
    wait_until(lambda: not listening(rpc), "the end of the example's master")


def test_doctor_refuses_what_cannot_be_configured(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'rediss'"):
        run_doctor("--warmup-cache-stores", "rediss-typo", "--cache-root", tmp_path)
    (tmp_path / "bad.toml").write_text("[stores")
    with pytest.raises(ConfigurationError, match=r"bad\.toml"):
        run_doctor("--config", tmp_path / "bad.toml", "--cache-root", tmp_path)


def test_doctor_is_readable(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(doctor)
    (tmp_path / "mount").mkdir()
    arguments = ["--warmup-cache-stores", f"file:{tmp_path}/mount", "--cache-root", str(tmp_path / "root")]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "chain: disk -> file" in result.stdout
    assert "4 KiB put" in result.stdout
