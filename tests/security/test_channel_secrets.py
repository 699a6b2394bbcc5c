"""The token and the keys made from it show up nowhere: not in logs, texts, traces, argv, files or on the wire."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from tests.security.test_channel_messages import _raw, spelled
from tests.support.channel import a_client, a_request, a_source, run, serving, until
from tests.support.chaos import Faults, chaos

from warmseed.blocking import run_blocking
from warmseed.seeding.channel.errors import ChannelError
from warmseed.seeding.channel.frames import REQUEST_BYTES, frame
from warmseed.seeding.channel.logs import Throttled
from warmseed.seeding.channel.tls import server_context
from warmseed.seeding.trust.token import TLS_CA_LABEL, TOKEN_VARIABLE, Token, new_token, parse_token


def traces(text: str, token: Token) -> list[bytes]:
    """What must not be found anywhere: the token, what it spells, and the CA key, in the usual spellings."""
    raw = [token._material, token._root, token.derive(TLS_CA_LABEL)]
    spellings = [text.encode(), text[4:].encode(), text[10:40].encode()]
    for secret in raw:
        spellings += [secret, secret.hex().encode(), base64.b64encode(secret)[:40], repr(secret).encode()]
    return spellings


def test_nothing_of_the_token_is_logged_or_sent_whatever_goes_wrong(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    text = new_token().reveal()
    token = parse_token(text)
    said: list[str] = []
    wire: list[bytes] = []

    async def main() -> None:
        client = await a_client(token)
        other = await a_client(parse_token(new_token().reveal()))
        source = a_source()
        async with serving(source, [token]) as (server, peer), chaos(peer) as proxy:
            said.extend([repr(server), repr(client), repr(server.stats), str(vars(server)), str(vars(client))])
            for asking, faults in ((client, Faults()), (other, Faults()), (client, Faults(cut_after=900))):
                proxy.to_mirror = faults
                try:
                    await asking.describe(proxy.endpoint, a_request(asking))
                except ChannelError as error:
                    said.append("".join(traceback.format_exception(error)))

            async def bug() -> None:
                raise ValueError("a bug of ours")

            source.before = bug
            proxy.to_mirror = Faults()
            with pytest.raises(ChannelError):
                await client.describe(proxy.endpoint, a_request(client))
            await until(lambda: server.stats.failed >= 1)
            wire.extend(bytes(sent) for sent in proxy.sent_to_source + proxy.sent_to_mirror)

    with caplog.at_level(logging.DEBUG):
        run(main())
    captured = capfd.readouterr()
    haystack = "\n".join([caplog.text, captured.out, captured.err, *said]).encode() + b"".join(wire)
    assert b"a bug of ours" in haystack
    assert token.key_id.encode() in haystack
    for trace in traces(text, token):
        assert trace not in haystack


def test_keys_never_touch_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    monkeypatch.chdir(tmp_path)
    token = parse_token(new_token().reveal())
    opened.clear()
    server_context([token])
    assert all(name.isdigit() or name.startswith("/proc/self/fd/") for name in opened), opened
    assert list(tmp_path.iterdir()) == []


def test_a_child_does_not_inherit_the_token() -> None:
    text = new_token().reveal()
    program = (
        "import os, subprocess, sys\n"
        "from warmseed.seeding.trust.token import read_tokens\n"
        "assert len(read_tokens()) == 1\n"
        "child = subprocess.run(['env'], capture_output=True, text=True, check=True).stdout\n"
        "print(child, sys.argv, open('/proc/self/cmdline').read())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {TOKEN_VARIABLE: text},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "PATH=" in done.stdout
    assert text not in done.stdout + done.stderr


def test_a_hostile_text_reaches_the_log_escaped_and_cut(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:

        token = await run_blocking(lambda: parse_token(new_token().reveal()))
        async with serving(a_source(), [token]) as (server, peer):
            for hostile in ("\x1b[2J\nfake log line" * 50, "\u202eevil"):
                _, writer = await _raw(peer, token)
                writer.write(frame(spelled(**{hostile: 1}), limit=REQUEST_BYTES))
                await until(lambda: server.stats.malformed >= 1)
                await asyncio.sleep(0)
                writer.transport.abort()

    with caplog.at_level(logging.DEBUG):
        run(main())
    assert "broke the protocol" in caplog.text
    for record in caplog.records:
        if record.name.startswith("warmseed"):
            assert record.getMessage().isprintable()
            assert len(record.getMessage()) < 600


def test_strangers_can_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        token = await run_blocking(lambda: parse_token(new_token().reveal()))
        other = await a_client(parse_token(new_token().reveal()))
        async with serving(a_source(), [token]) as (server, peer):
            for _ in range(30):
                with pytest.raises(ChannelError):
                    await other.describe(peer, a_request(other))
            await until(lambda: server.stats.rejected == 30)

    with caplog.at_level(logging.WARNING):
        run(main())
    lines = [record.getMessage() for record in caplog.records if "did not prove" in record.getMessage()]
    assert len(lines) == 1


def test_a_held_back_log_line_is_counted_in_the_next(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    log = Throttled(logging.getLogger("warmseed.test"), seconds=10, clock=lambda: now)
    for _ in range(5):
        log.warning("full", "turned away %s", "10.0.0.1")
    log.warning("rejected", "another subject")
    now = 111.0
    log.warning("full", "turned away %s", "10.0.0.2")
    assert [record.getMessage() for record in caplog.records] == [
        "turned away 10.0.0.1",
        "another subject",
        "turned away 10.0.0.2 (and 4 more since the last such line)",
    ]
