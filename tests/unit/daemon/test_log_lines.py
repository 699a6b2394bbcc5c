"""Log lines: fields in a fixed form, one line each, and no error when nobody can read them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from warmseed.daemon import logs


@pytest.fixture(autouse=True)
def _no_handlers_left() -> Iterator[None]:
    yield
    root = logging.getLogger("warmseed")
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.setLevel(logging.NOTSET)


def log() -> logging.Logger:
    return logging.getLogger("warmseed.daemon.test")


def test_text_line_holds_event_and_fields() -> None:
    out = io.StringIO()
    logs.install(stream=out)
    logs.event(log(), logging.INFO, "phase", rank="target-0", seconds=1.23456, reason='a "b"', none=None)
    line = out.getvalue()
    assert line.endswith('phase rank=target-0 seconds=1.235 reason="a \\"b\\""\n')
    assert "none" not in line


def test_json_line_holds_the_same_as_values() -> None:
    out = io.StringIO()
    logs.install("json", stream=out)
    logs.event(log(), logging.WARNING, "phase", rank="target-0", seconds=1.5)
    try:
        raise ValueError("x\ny")
    except ValueError:
        log().exception("broke")
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["event"], first["rank"], first["seconds"], first["level"]) == ("phase", "target-0", 1.5, "warning")
    assert "ValueError" in second["exception"]


def test_installing_twice_logs_once() -> None:
    out = io.StringIO()
    logs.install(stream=out)
    logs.install(stream=out)
    log().warning("once")
    assert out.getvalue().count("once") == 1


def test_closed_stream_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    logs.install(stream=out)
    out.close()
    log().warning("lost")
    assert capsys.readouterr().err == ""


def test_rank_logs_in_its_launchers_form_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.RANK_VARIABLE, "draft-3")
    text, lines = io.StringIO(), io.StringIO()
    logs.install(stream=text)
    log().warning("hello")
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "json")
    logs.install(stream=lines)
    log().warning("hello")
    assert "WARNING [draft-3] warmseed.daemon.test: hello" in text.getvalue()
    assert json.loads(lines.getvalue())["rank"] == "draft-3"
