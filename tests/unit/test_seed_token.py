"""Tokens: only good ones start, wherever they come from, and none is ever shown."""

from __future__ import annotations

import copy
import logging
import os
import pickle  # noqa: TID251 - to show that a secret can't be pickled
import traceback
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmseed.errors import ConfigurationError
from warmseed.seeding.trust.token import (
    KEY_ID_LABEL,
    MANIFEST_LABEL,
    TLS_CA_LABEL,
    TOKEN_VARIABLE,
    Secret,
    Token,
    new_token,
    parse_token,
    read_tokens,
)

FOREIGN = "correct-Horse-battery-Staple-0123456789"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(new_token().reveal() + "\n")
    path.chmod(0o600)
    return path


def test_a_new_token_has_256_random_bits_and_is_accepted() -> None:
    first, second = new_token().reveal(), new_token().reveal()
    assert first != second
    assert first.startswith("ws1_")
    assert len(first) == 64
    assert parse_token(first) == parse_token(first.upper())
    assert parse_token(first) != parse_token(second)


@settings(max_examples=200, deadline=None)
@given(st.integers(4, 63), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_one_mistyped_character_is_noticed(position: int, character: str) -> None:
    good = "ws1_kzyhe3tqmvzgs5dinfxgo43pnvsxa3tfonzs42lnobxxe5dbnz2ce7sl"  # any text of that shape
    token = new_token().reveal()
    typed = token[:position] + character + token[position + 1 :]
    if typed != token:
        with pytest.raises(ConfigurationError, match="checksum"):
            parse_token(typed)
    with pytest.raises(ConfigurationError, match="checksum"):
        parse_token(good)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "secret",
        "x" * 31,
        "a" * 64,
        "abcabcab" * 8,
        "correct-horse" * 4,
        "0101010101010101010101010101010101010101",
        FOREIGN * 40,
        "ws1_",
        "ws1_" + "a" * 60,
        new_token().reveal()[:-1],
        new_token().reveal() + "a",
        "é" * 40,
        "correct Horse battery Staple 0123456789",
        FOREIGN + "\n",
        FOREIGN + "\x1b[2J",
    ],
)
def test_a_weak_or_damaged_token_is_refused_with_the_command_that_makes_a_good_one(text: str) -> None:
    with pytest.raises(ConfigurationError, match="warmseed token new") as caught:
        parse_token(text)
    assert text not in str(caught.value) or len(text) < 5


def test_a_strong_foreign_string_is_accepted() -> None:
    assert parse_token(FOREIGN) == parse_token(FOREIGN)
    assert parse_token(os.urandom(16).hex()) != parse_token(FOREIGN)


def test_each_purpose_has_its_own_key_and_the_same_token_gives_the_same() -> None:
    text = new_token().reveal()
    one, other = parse_token(text), parse_token(text)
    labels = (TLS_CA_LABEL, MANIFEST_LABEL, KEY_ID_LABEL)
    assert len({one.derive(label) for label in labels}) == 3
    assert [one.derive(label) for label in labels] == [other.derive(label) for label in labels]
    assert one.key_id == other.key_id != parse_token(FOREIGN).key_id


def test_keys_stay_what_they_are_between_releases() -> None:
    """A fleet runs several versions at once while it is upgraded."""
    token = parse_token("ws1_" + "aaaa" * 13 + "e5lmtzrs")
    assert token.key_id == "2ec496199da7dec8"
    assert token.derive(TLS_CA_LABEL).hex()[:16] == "50fcded641c29c98"


def test_a_secret_shows_itself_nowhere() -> None:
    text = new_token().reveal()
    secret, token = Secret(text), parse_token(text)
    for shown in (repr(secret), str(secret), f"{secret}", f"{secret:>80}", f"{secret!r:.3}", f"{[secret]}"):
        assert text not in shown
    assert text not in repr(token) + str(token) + f"{token}"
    for thing in (secret, token):
        with pytest.raises(TypeError):
            pickle.dumps(thing)
        with pytest.raises(TypeError):
            copy.deepcopy(thing)
    assert secret == Secret(text) != Secret("é")
    assert len({secret, Secret(text)}) == 1


def test_a_traceback_does_not_show_the_token() -> None:
    text = "ws1_" + "q" * 59
    try:
        parse_token(text)
    except ConfigurationError as error:
        shown = "".join(traceback.format_exception(error))
    assert text not in shown


def test_the_file_is_read_with_comments_and_several_tokens(token_file: Path) -> None:
    old = new_token().reveal()
    token_file.write_text(f"# new first\n{token_file.read_text()}\n  {old}  \n")
    tokens = read_tokens(file=token_file, environ={})
    assert tokens == (parse_token(token_file.read_text().split()[3]), parse_token(old))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o601])
def test_a_file_that_others_can_read_or_write_stops_start_up(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_tokens(file=token_file, environ={})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_stops_start_up(token_file: Path) -> None:
    os.chown(token_file, 12345, -1)
    with pytest.raises(ConfigurationError, match="user 12345"):
        read_tokens(file=token_file, environ={})


@pytest.mark.parametrize("content", ["", "# nothing\n\n", "é" * 40, "x" * 9000])
def test_a_file_without_a_usable_token_stops_start_up(token_file: Path, content: str) -> None:
    token_file.write_text(content)
    with pytest.raises(ConfigurationError, match="start-up stops"):
        read_tokens(file=token_file, environ={})


def test_what_is_no_plain_file_stops_start_up(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path in (fifo, tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigurationError, match="start-up stops"):
            read_tokens(file=path, environ={})


def test_the_variable_is_removed_once_read() -> None:
    text = new_token().reveal()
    environ = {TOKEN_VARIABLE: text, "HOME": "/"}
    assert read_tokens(environ=environ) == (parse_token(text),)
    assert environ == {"HOME": "/"}


def test_a_token_on_the_command_line_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    text = new_token().reveal()
    with caplog.at_level(logging.WARNING):
        assert read_tokens(arguments=[text], environ={}) == (parse_token(text),)
    assert "--seed-token-file" in caplog.text
    assert text not in caplog.text


def test_no_token_at_all_is_no_error() -> None:
    assert read_tokens(environ={}) == ()


def test_two_places_or_twice_the_same_token_stop_start_up(token_file: Path) -> None:
    text = new_token().reveal()
    with pytest.raises(ConfigurationError, match="keep one"):
        read_tokens(file=token_file, environ={TOKEN_VARIABLE: text})
    with pytest.raises(ConfigurationError, match="twice"):
        read_tokens(arguments=[text, text.upper()], environ={})
    with pytest.raises(ConfigurationError, match="at most 4"):
        read_tokens(arguments=[new_token().reveal() for _ in range(5)], environ={})


def test_token_is_a_class_of_its_own_not_a_string() -> None:
    assert not isinstance(parse_token(FOREIGN), str)
    assert isinstance(parse_token(FOREIGN), Token)
