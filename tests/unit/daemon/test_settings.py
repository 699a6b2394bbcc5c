"""Flags, environment and TOML merge in that order; what is unknown or contradictory stops a start by name."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from warmseed.daemon.settings.config import PreloadConfig, options
from warmseed.daemon.settings.merge import CONFIG_BYTES, resolve
from warmseed.errors import ConfigurationError
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.trust.token import Secret

TOKEN = "0123456789abcdefghijklmnopqrstuvwxyz"


def merged(
    flags: dict[str, object] | None = None, env: dict[str, str] | None = None, file: Path | None = None
) -> PreloadConfig:
    return resolve({"model": "/m"} | (flags or {}), environ={} if env is None else env, file=file)


def toml(folder: Path, text: str) -> Path:
    path = folder / "warmseed.toml"
    path.write_text(text)
    return path


def refusal(**arguments: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        merged(**arguments)  # type: ignore[arg-type]
    return str(caught.value)


def secret_file(folder: Path, text: str = TOKEN, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = toml(tmp_path, "[preload]\ntensor-parallel-size = 2\npipeline_parallel_size = 2\ndtype = 'half'\n")
    found = merged({"tensor_parallel_size": 8}, {"WARMSEED_TENSOR_PARALLEL_SIZE": "4", "WARMSEED_DTYPE": "bf16"}, file)
    assert (found.tensor_parallel_size, found.pipeline_parallel_size, found.dtype) == (8, 2, "bf16")


def test_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    file = toml(tmp_path, '[preload]\nmodel = "/elsewhere"\nnnodes = 1\n')
    assert resolve({}, environ={"WARMSEED_CONFIG": str(file)}).model == "/elsewhere"


def test_each_field_has_one_flag_one_key_and_one_variable() -> None:
    found = list(options().values())
    for names in ([o.flag for o in found], [o.key for o in found], [o.env for o in found]):
        assert len(set(names)) == len(found)
    assert all(option.help and option.group for option in found)


def test_environment_words_become_the_fields_type() -> None:
    found = merged(
        env={
            "WARMSEED_WARMUP_CACHE_STORES": "mooncake, file:/mnt/x",
            "WARMSEED_ENABLE_EXPERT_PARALLEL": "yes",
            "WARMSEED_REHEARSAL": "0",
            "WARMSEED_START_DEADLINE": "12.5",
            "WARMSEED_ENGINE_ARGS": "--max-model-len 4096 --name 'a b'",
            "WARMSEED_SEED_SOURCES": "a:1,[fd00::1]:2",
            "WARMSEED_SEED_TOKEN": TOKEN,
        }
    )
    assert found.warmup_cache_stores == ("mooncake", "file:/mnt/x")
    assert found.enable_expert_parallel
    assert not found.rehearsal
    assert found.start_deadline == 12.5
    assert found.engine_args == ("--max-model-len", "4096", "--name", "a b")
    assert found.seed_sources == (Endpoint("a", 1), Endpoint("fd00::1", 2))


def test_token_is_taken_out_of_the_environment() -> None:
    env = {"WARMSEED_SEED_TOKEN": TOKEN, "WARMSEED_WARMUP_CACHE_STORES": "mooncake"}
    found = resolve({"model": "/m"}, environ=env)
    assert found.seed_token == Secret(TOKEN)
    assert "WARMSEED_SEED_TOKEN" not in env
    assert TOKEN not in repr(found)
    assert TOKEN not in str(found.seed_token)


def test_token_on_the_command_line_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    merged({"seed_token": TOKEN, "seed_listen_port": 29600})
    assert "--seed-token-file" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[preload]\ntensor-paralel-size = 2",
            "unknown key 'tensor-paralel-size'; did you mean 'tensor-parallel-size'?",
        ),
        ("[prelaod]\nnnodes = 2", "unknown table [prelaod]; did you mean 'preload'?"),
        ("nnodes = 2", "unknown table [nnodes]"),
        ("[preload]\nseed-token = 'x'", "must not stand in a configuration file"),
        ("[preload]\nnnodes = 'two'", "--nnodes 'two': Expected `int`"),
        ("[preload]\nnnodes = 0", "--nnodes 0"),
        ("[preload]\nweight-cache-health-port = 70000", "--weight-cache-health-port 70000"),
        ("[preload]\nnode-rank = 1\nnode_rank = 2", "given twice"),
        ("[preload]\nstore-writes = 'some'", "--store-writes 'some'"),
        ("[preload", "is not valid TOML"),
        ("preload = 3", "must be a table"),
        ("[preload]\nseed-sources = ['nowhere']", "'nowhere' is not host:port"),
        ("[preload]\nseed-sources = ['h:0']", "port from 1 to 65535"),
    ],
)
def test_file_mistake_is_named(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(file=toml(tmp_path, text))


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(file=tmp_path / "absent.toml")
    big = toml(tmp_path, "#" * (CONFIG_BYTES + 1))
    assert "is it the right one" in refusal(file=big)
    big.write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in refusal(file=big)


def test_tables_of_the_stores_are_passed_on_and_not_shown(tmp_path: Path) -> None:
    file = toml(tmp_path, "[preload]\nnnodes = 1\n[stores.bucket]\nurl = 's3://b'\nsecret_access_key = 'hidden'\n")
    found = merged(file=file)
    assert found.stores == {"bucket": {"url": "s3://b", "secret_access_key": "hidden"}}
    assert "hidden" not in repr(found)
    assert "bucket" in repr(found)
    assert "[stores] of the configuration file" in refusal(file=toml(tmp_path, "[stores.x]\ny = [1]"))


def test_unknown_variable_is_warned_about_but_kubernetes_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        merged(
            env={"WARMSEED_WARMUP_CACHE_STORE": "x", "WARMSEED_SERVICE_HOST": "10.1.1.1", "WARMSEED_PORT": "tcp://x"}
        )
    assert "did you mean WARMSEED_WARMUP_CACHE_STORES?" in caplog.text
    assert caplog.text.count("is not known") == 1


def test_unknown_setting_from_code_is_named() -> None:
    assert "did you mean 'nnodes'?" in refusal(flags={"nnode": 2})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model": ""}, "no model is given"),
        ({"load_format": "ipc_cache"}, "is for engines"),
        ({"seed_listen_port": 29600}, "--seed-listen-port needs the fleet's token"),
        ({"seed_sources": ["h:29600"]}, "--seed-source-host needs the fleet's token"),
        ({"seed_token": TOKEN}, "nothing to use it for"),
        ({"seed_token": "short", "seed_listen_port": 29600}, "at least 32 needed"),
        ({"seed_token": 31337, "seed_listen_port": 29600}, "--seed-token: Expected `str`, got `int`"),
        ({"seed_token": TOKEN, "seed_token_file": "/x", "seed_listen_port": 1}, "keep the file"),
        (
            {"seed_sources": ["10.0.0.2:29600", "10.0.0.2:29600"], "seed_token": TOKEN},
            "named twice",
        ),
        (
            {"seed_token": TOKEN, "seed_listen_port": 29600, "seed_sources": ["127.0.0.1:29600"]},
            "is this replica itself",
        ),
        ({"warmup_cache_stores": ["mooncake", "mooncake"]}, "names mooncake twice"),
        ({"rehearsal_deadline": 0.0}, "--no-rehearsal"),
        ({"engine": "torch", "engine_args": ["--nnode", "2"]}, "did you mean --nnodes?"),
        ({"seed_signing_key": "/nowhere/key"}, "--seed-signing-key /nowhere/key can't be read"),
    ],
)
def test_contradiction_between_settings_is_named(flags: dict[str, object], words: str) -> None:
    assert words in refusal(flags=flags)


@pytest.mark.parametrize(("mode", "words"), [(0o644, "others can read"), (0o660, "chmod 600")])
def test_token_file_that_others_can_read_is_refused(tmp_path: Path, mode: int, words: str) -> None:
    path = secret_file(tmp_path, mode=mode)
    text = refusal(flags={"seed_token_file": str(path), "seed_listen_port": 29600})
    assert words in text
    assert TOKEN not in text


def test_token_file_must_be_a_file_of_ours(tmp_path: Path) -> None:
    assert "is not a regular file" in refusal(flags={"seed_token_file": "/dev/null", "seed_listen_port": 29600})
    path = secret_file(tmp_path)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        assert "belongs to user 12345" in refusal(flags={"seed_token_file": str(path), "seed_listen_port": 29600})
        os.chown(path, 0, -1)
    assert merged({"seed_token_file": str(path), "seed_listen_port": 29600}).seed_token_file == str(path)


def test_stores_without_trust_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    merged({"warmup_cache_stores": ["mooncake"]})
    assert "will not be used" in caplog.text
    caplog.clear()
    merged({"warmup_cache_stores": ["mooncake"], "allow_unsigned": True})
    assert "will not be used" not in caplog.text
    assert "whoever can write there" in caplog.text


def test_toml_table_may_hold_speculative_settings(tmp_path: Path) -> None:
    file = toml(tmp_path, '[preload]\nspeculative-config = {method = "eagle3", model = "/draft"}\n')
    assert merged(file=file).draft_method == "eagle3"
