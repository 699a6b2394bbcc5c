"""The command line: the reference's flags under their own names, the engine's kept for the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from warmseed.daemon.settings.config import PreloadConfig, options
from warmseed.daemon.settings.flags import CONTEXT_SETTINGS, preload_command
from warmseed.seeding.channel.endpoint import Endpoint


class Command:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[PreloadConfig] = []
        self.code = 0
        self.app = typer.Typer(add_completion=True)
        self.app.command("preload", context_settings=CONTEXT_SETTINGS)(preload_command(self.take))
        self.app.command("other")(lambda: None)
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("NO_COLOR", "1")

    def take(self, config: PreloadConfig) -> int:
        self.seen.append(config)
        return self.code

    def invoke(self, *words: str) -> Result:
        return CliRunner().invoke(self.app, ["preload", *words])

    def config(self, *words: str) -> PreloadConfig:
        result = self.invoke("--model", "/m", *words)
        assert result.exit_code == 0, result.output
        return self.seen[-1]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(monkeypatch)


def test_help_names_every_flag_in_its_group(command: Command) -> None:
    text = command.invoke("--help").output
    for option in options().values():
        if option.name != "engine_args":
            assert option.flag in text
    for group in {option.group for option in options().values()}:
        assert group in text


@pytest.mark.parametrize(
    "flag",
    [
        "--weight-cache-socket-dir",
        "--weight-cache-master-port",
        "--weight-cache-draft-master-port",
        "--weight-cache-health-port",
        "--weight-cache-health-host",
        "--nnodes",
        "--node-rank",
        "--master-addr",
        "--data-parallel-size",
        "--data-parallel-size-local",
        "--data-parallel-start-rank",
        "--data-parallel-address",
        "--enable-expert-parallel",
        "--seed-listen-host",
        "--seed-listen-port",
        "--seed-source-host",
        "--seed-source-port",
        "--seed-token",
        "--warmup-cache-stores",
        "--disable-flashinfer-autotune",
    ],
)
def test_reference_flag_keeps_its_name(command: Command, flag: str) -> None:
    assert flag in command.invoke("--help").output


def test_engine_flags_pass_through_in_order(command: Command) -> None:
    found = command.config(
        "--max-model-len", "4096", "-cc.pass_config.enable_noop=true", "-tp", "2", "-O3", "--kernel-config", '{"a": 1}'
    )
    assert found.tensor_parallel_size == 2
    assert found.engine_args == (
        "--max-model-len",
        "4096",
        "-cc.pass_config.enable_noop=true",
        "-O3",
        "--kernel-config",
        '{"a": 1}',
    )


def test_short_and_underscored_spellings_are_understood(command: Command) -> None:
    found = command.config(
        "--tensor_parallel_size=4", "-dp", "2", "-n", "2", "-r=1", "--master-addr", "10.0.0.1",
        "--weight_cache_master_port", "29600",
    )  # fmt: skip
    assert (found.tensor_parallel_size, found.data_parallel_size, found.nnodes, found.node_rank) == (4, 2, 2, 1)


def test_speculative_settings_may_be_dotted(command: Command) -> None:
    found = command.config("--speculative-config.method", "eagle3", "--speculative-config.num_speculative_tokens=3")
    assert found.draft_method == "eagle3"
    assert found.speculative_config == '{"method": "eagle3", "num_speculative_tokens": 3}'
    mixed = command.invoke("--model", "/m", "--speculative-config", "{}", "--speculative-config.method", "mtp")
    assert mixed.exit_code == 2


def test_sources_pair_hosts_with_ports(command: Command, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdefghijklmnopqrstuvwxyz")
    token.chmod(0o600)
    both = ["--seed-token-file", str(token), "--seed-source-host", "a", "--seed-source-host", "fd00::1"]
    assert command.config(*both, "--seed-source-port", "29600").seed_sources == (
        Endpoint("a", 29600),
        Endpoint("fd00::1", 29600),
    )
    assert command.config(*both, "--seed-source-port", "1", "--seed-source-port", "2").seed_sources[1].port == 2
    assert "one --seed-source-port" in command.invoke("--model", "/m", *both).output
    assert "without --seed-source-host" in command.invoke("--model", "/m", "--seed-source-port", "1").output


def test_switches_and_lists(command: Command) -> None:
    found = command.config(
        "--no-rehearsal", "--no-enable-flashinfer-autotune", "--warmup-cache-stores", "a, b", "--allow-unsigned"
    )
    assert not found.rehearsal
    assert found.disable_flashinfer_autotune
    assert found.warmup_cache_stores == ("a", "b")


def test_mistakes_exit_with_2_and_one_line(command: Command) -> None:
    result = command.invoke("--model", "/m", "--nnodes", "3")
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert command.invoke().exit_code == 2
    assert command.invoke("--model", "/m", "--nnodes", "many").exit_code == 2
    assert not command.seen


def test_exit_code_of_the_launch_is_the_commands(command: Command) -> None:
    command.code = 143
    assert command.invoke("--model", "/m").exit_code == 143


def test_completion_knows_the_flags(command: Command) -> None:
    result = CliRunner().invoke(
        command.app,
        [],
        prog_name="warmseed",
        env={
            "_WARMSEED_COMPLETE": "complete_bash",
            "COMP_WORDS": "warmseed preload --weight-cache-h",
            "COMP_CWORD": "2",
        },
    )
    assert "--weight-cache-health-port" in result.output
