"""``warmseed``: the command line's entry point."""

from __future__ import annotations

import sys

import typer

from warmseed.daemon.cli.doctor import doctor
from warmseed.daemon.cli.env import env, execute
from warmseed.daemon.cli.explain import explain
from warmseed.daemon.cli.gc import gc
from warmseed.daemon.cli.inspect import inspect
from warmseed.daemon.cli.keys import app as keys_app
from warmseed.daemon.cli.ls import ls
from warmseed.daemon.cli.pin import pin
from warmseed.daemon.cli.preload import preload
from warmseed.daemon.cli.replicate import export, import_, pull, push
from warmseed.daemon.cli.report import report
from warmseed.daemon.cli.run import run
from warmseed.daemon.cli.token import app as token_app
from warmseed.daemon.cli.verify import verify
from warmseed.daemon.settings.flags import CONTEXT_SETTINGS
from warmseed.errors import ConfigurationError, WarmseedError

__all__ = ["app", "main"]

app = typer.Typer(
    name="warmseed",
    help="Keeps an LLM server's weights and warmup caches hot, across engine restarts and across a fleet.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("preload", context_settings=CONTEXT_SETTINGS)(preload)
app.command("run")(run)
app.command("env")(env)
app.command("exec")(execute)
app.command("report")(report)
app.command("ls")(ls)
app.command("inspect")(inspect)
app.command("explain")(explain)
app.command("pin")(pin)
app.command("gc")(gc)
app.command("pull")(pull)
app.command("push")(push)
app.command("export")(export)
app.command("import")(import_)
app.command("verify")(verify)
app.command("doctor")(doctor)
app.add_typer(token_app)
app.add_typer(keys_app)


def main() -> None:
    """Run one command; 0 done, 1 failed, 2 the request itself can't work."""
    try:
        app()
    except ConfigurationError as error:
        print(f"warmseed: {error}", file=sys.stderr)
        sys.exit(2)
    except WarmseedError as error:
        print(f"warmseed: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
