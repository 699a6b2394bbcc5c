"""``warmseed preload``'s command line, derived from `PreloadConfig`: one flag a field, grouped in ``--help``.

Flags that are not warmseed's are kept in order and handed to the engine. Engines accept underscores for dashes
and short spellings (``-tp``, ``-dp``); so does this.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Final, Literal, Union, get_args, get_origin

import typer

from warmseed.daemon.settings.config import Option, PreloadConfig, options
from warmseed.daemon.settings.merge import resolve
from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.channel.endpoint import Endpoint

__all__ = ["CONTEXT_SETTINGS", "preload_command"]

CONTEXT_SETTINGS: Final[dict[str, object]] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "token_normalize_func": lambda word: word.replace("_", "-"),
}
_SEED_GROUP: Final = options()["seed_sources"].group
# Click would search single-letter flags inside the engine's own one-dash flags (``-cc.mode``): read them here.
_SHORT: Final = {"-n": "nnodes", "-r": "node_rank"}


def preload_command(run: Callable[[PreloadConfig], int]) -> Callable[..., None]:
    """A typer command that reads all of `PreloadConfig` from flags, TOML and environment and calls `run` with it.

    Register it with `CONTEXT_SETTINGS`::

        app.command("preload", context_settings=CONTEXT_SETTINGS)(preload_command(run))

    The command exits with what `run` returns, or with 2 and one line on standard error for settings that
    can't work.
    """
    known = options()

    def command(ctx: typer.Context, **given: object) -> None:
        try:
            code = run(_configuration(ctx.args, given))
        except ConfigurationError as error:
            typer.echo(f"warmseed preload: {error}", err=True)
            code = 2
        raise typer.Exit(code)

    parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    parameters += [_parameter(option) for option in known.values() if option.name != "engine_args"]
    parameters += [
        _keyword(
            "seed_source_host",
            list[str] | None,
            typer.Option(
                "--seed-source-host",
                help="Host of a replica to fetch from; repeat for several, tried in order.",
                rich_help_panel=_SEED_GROUP,
                metavar="HOST",
                show_default=False,
            ),
        ),
        _keyword(
            "seed_source_port",
            list[int] | None,
            typer.Option(
                "--seed-source-port",
                metavar="N",
                help="First port of that replica; once for all hosts, or once for each.",
                rich_help_panel=_SEED_GROUP,
                show_default=False,
            ),
        ),
        _keyword(
            "config",
            Path | None,
            typer.Option("--config", help="TOML file with these settings.", show_default=False),
        ),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = (
        "Keep a model's weights in memory and its warmup caches hot, so that engines start in seconds.\n\n"
        "Starts one daemon for each local device, stays in the foreground, and prints READY when all of them serve. "
        "Flags that are not listed here go to the engine. Every flag is also an environment variable "
        "(--nnodes is WARMSEED_NNODES) and a key of the TOML file."
    )
    return command


def _keyword(name: str, kind: object, flag: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, flag])


def _parameter(option: Option) -> inspect.Parameter:
    kind, metavar = _flag_type(option.type)
    names = [option.flag, *option.extra_flags]
    if option.name == "disable_flashinfer_autotune":
        names.append("--no-enable-flashinfer-autotune")  # vLLM's spelling
    elif option.default is True:
        names[0] = f"{option.flag}/--no-{option.flag[2:]}"
    return _keyword(
        option.name,
        kind,
        typer.Option(*names, help=_help(option), metavar=metavar, rich_help_panel=option.group, show_default=False),
    )


def _help(option: Option) -> str:
    if option.default in (None, (), False) or "default" in option.help:
        return option.help
    shown = "on" if option.default is True else f"{option.default:g}" if isinstance(option.default, float) else ""
    return f"{option.help} Default: {shown or option.default}."


def _flag_type(annotation: object) -> tuple[object, str | None]:
    """The type that typer parses for a field, always with `None` for "not given", and how ``--help`` shows it."""
    parts = [part for part in get_args(annotation) if part is not NoneType] if _optional(annotation) else [annotation]
    kind = parts[0]
    if get_origin(kind) is tuple:
        return list[str] | None, "A,B"
    if get_origin(kind) is Literal:
        return _or_none(kind), "|".join(get_args(kind))
    if kind is bool:
        return bool | None, None
    if kind is int:
        return int | None, "N"
    if kind is float:
        return float | None, "SEC"
    return str | None, "TEXT"


def _or_none(kind: object) -> object:
    return Union[kind, None]  # noqa: UP007 (a value, not an annotation)


def _optional(annotation: object) -> bool:
    return NoneType in get_args(annotation)


def _configuration(extra: Sequence[str], given: dict[str, object]) -> PreloadConfig:
    file = given.pop("config", None)
    hosts, ports = given.pop("seed_source_host", None), given.pop("seed_source_port", None)
    flags: dict[str, object] = {}
    for name, value in given.items():
        if isinstance(value, list):
            value = [part.strip() for text in value for part in text.split(",") if part.strip()] or None
        flags[name] = value
    sources = _sources(hosts, ports)
    if sources:
        flags["seed_sources"] = [*(flags.get("seed_sources") or []), *sources]  # type: ignore[misc]
    passed_on = _take_ours(list(extra), flags)
    if passed_on:
        flags["engine_args"] = passed_on
    return resolve(flags, file=file if isinstance(file, Path) else None)


def _sources(hosts: object, ports: object) -> list[str]:
    if not isinstance(hosts, list) or not hosts:
        if isinstance(ports, list) and ports:
            raise ConfigurationError("--seed-source-port is given without --seed-source-host")
        return []
    if not isinstance(ports, list) or len(ports) not in (1, len(hosts)):
        raise ConfigurationError(f"{len(hosts)} --seed-source-host need one --seed-source-port for all, or one each")
    if len(ports) == 1:
        ports = ports * len(hosts)
    return [str(Endpoint(host.strip("[]"), port)) for host, port in zip(hosts, ports, strict=True)]


def _take_ours(extra: list[str], flags: dict[str, object]) -> list[str]:
    """`extra` without what is ours after all: ``-n 2``, ``-r 1`` and ``--speculative-config.KEY VALUE``."""
    rest: list[str] = []
    speculative: dict[str, object] = {}
    words = iter(extra)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--":
            rest.extend(words)
            break
        if name in _SHORT:
            flags[_SHORT[name]] = _number(name, value if equals else next(words, ""))
        elif name.startswith(("--speculative-config.", "--speculative_config.")):
            text = value if equals else next(words, "")
            speculative[name.partition(".")[2]] = _plain_value(text)
        else:
            rest.append(word)
    if speculative:
        if flags.get("speculative_config") is not None:
            raise ConfigurationError("give --speculative-config as JSON or with dots, not both")
        flags["speculative_config"] = json.dumps(speculative)
    return rest


def _number(flag: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigurationError(f"{flag} {printable(text)!r} is not a number")
    return int(text)


def _plain_value(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value
