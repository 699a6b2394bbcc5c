"""``warmseed token new`` makes what ``--seed-token-file`` accepts."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from typer.testing import CliRunner

from warmseed.daemon.cli.token import app
from warmseed.errors import ConfigurationError
from warmseed.seeding.trust.token import parse_token, read_tokens


def test_the_printed_token_is_accepted_and_alone_on_standard_output() -> None:
    result = CliRunner().invoke(app, ["new"])
    assert result.exit_code == 0
    token = parse_token(result.stdout.strip())
    assert token.key_id in result.stderr
    assert result.stdout.count("\n") == 1


def test_json_names_the_key() -> None:
    shown = json.loads(CliRunner().invoke(app, ["new", "--json"]).stdout)
    assert parse_token(shown["token"]).key_id == shown["key_id"]


def test_a_written_token_is_private_shown_nowhere_and_never_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    result = CliRunner().invoke(app, ["new", "--out", str(path)])
    assert result.exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (token,) = read_tokens(file=path, environ={})
    assert token.key_id in result.stdout
    assert path.read_text().strip() not in result.output
    before = path.read_text()
    again = CliRunner().invoke(app, ["new", "--out", str(path)])
    assert isinstance(again.exception, ConfigurationError)
    assert path.read_text() == before
