"""``warmseed token``: makes the secret that the daemons of a fleet share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from warmseed.seeding.trust.token import new_token, parse_token, write_token

__all__ = ["app"]

app = typer.Typer(name="token", help="Make the secret that the daemons of a fleet share.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make the secret that the daemons of a fleet share."""


@app.command()
def new(
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write it to this new file, readable by you alone, and print only its key id."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """Print a new token of 256 random bits. Give the same one to every daemon, with --seed-token-file."""
    secret = new_token()
    key_id = parse_token(secret.reveal()).key_id
    if out is not None:
        write_token(out, secret)
        shown = {"file": str(out), "key_id": key_id}
    else:
        shown = {"token": secret.reveal(), "key_id": key_id}
    if as_json:
        print(json.dumps(shown))
    elif out is not None:
        print(f"wrote {out} (key id {key_id}); copy it to every node and pass --seed-token-file {out}")
    else:
        print(secret.reveal())
        # On the other stream, so that `warmseed token new > file` holds the token alone.
        print(f"key id {key_id}; store it in a file of mode 0600 and pass --seed-token-file", file=sys.stderr)
