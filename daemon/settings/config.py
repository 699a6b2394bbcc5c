"""What `warmseed preload` can be told: one frozen type that flags, TOML and environment all fill.

The fields of `PreloadConfig` are the schema. Their names are the flags' names (``nnodes`` is
``--nnodes``, ``seed_token_file`` is ``--seed-token-file``), their annotations carry the help text, the
group and the limits. Flags (`warmseed.daemon.settings.flags`), TOML keys and environment variables
(`warmseed.daemon.settings.merge`) are all derived from them, so none can fall behind another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_type_hints

import msgspec
from msgspec import Meta

from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.trust.token import Secret

__all__ = [
    "DRAFT_METHODS",
    "ENV_PREFIX",
    "Option",
    "PreloadConfig",
    "Secret",
    "decode_secret",
    "options",
]

ENV_PREFIX: Final = "WARMSEED_"
# Methods whose draft model gets a daemon group of its own; other drafts load from disk in the engine.
# vLLM also spells MTP per architecture ("deepseek_mtp", "qwen3_next_mtp").
DRAFT_METHODS: Final = ("mtp", "eagle", "eagle3")


_MODEL: Final = "Model and engine"
_LAYOUT: Final = "Parallel layout (the engine's own flags)"
_CACHE: Final = "Weight cache"
_STORES: Final = "Warmup cache stores"
_SEED: Final = "Seeding between daemons"
_START: Final = "Start-up"

Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=1, le=65536)]
Index = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0, le=7 * 86400)]
Bucket = Annotated[int, Meta(ge=1, le=1 << 20)]


def _says(text: str, group: str, *, flags: tuple[str, ...] = ()) -> Meta:
    return Meta(description=text, extra={"group": group, "flags": flags})


class PreloadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything that one launcher needs to know, already merged and checked.

    Build it with `warmseed.daemon.settings.merge.resolve`, which also applies the rules between fields.
    """

    # Model and engine
    engine: Annotated[Literal["torch", "vllm"], _says("Which engine loads the model.", _MODEL)] = "vllm"
    model: Annotated[str, _says("Folder (or, for vLLM, name) of the model to keep in memory.", _MODEL)]
    dtype: Annotated[str, _says("Number format of the weights, as the engine names it.", _MODEL)] = "auto"
    revision: Annotated[str | None, _says("Revision of a model that is named and not a folder.", _MODEL)] = None
    load_format: Annotated[
        str | None, _says("How the daemon itself loads; ipc_cache is refused, it is for the engine.", _MODEL)
    ] = None
    speculative_config: Annotated[
        str | None,
        _says("The engine's speculative decoding settings, as JSON; mtp, eagle and eagle3 get a draft group.", _MODEL),
    ] = None
    disable_flashinfer_autotune: Annotated[bool, _says("Leave FlashInfer's tuning to the first engine.", _MODEL)] = (
        False
    )
    shape_buckets: Annotated[
        tuple[Bucket, ...],
        _says("Sequence lengths that the torch engine compiles and pads to (default: 16 to 128 in steps).", _MODEL),
    ] = ()
    engine_args: Annotated[
        tuple[str, ...], _says("Flags that are not warmseed's, handed to the engine as they are.", _MODEL)
    ] = ()

    # Parallel layout
    tensor_parallel_size: Annotated[Count, _says("Ranks that split each layer.", _LAYOUT, flags=("-tp",))] = 1
    pipeline_parallel_size: Annotated[Count, _says("Stages that split the layers.", _LAYOUT, flags=("-pp",))] = 1
    data_parallel_size: Annotated[Count, _says("Full copies side by side, fleet-wide.", _LAYOUT, flags=("-dp",))] = 1
    data_parallel_size_local: Annotated[
        Count | None, _says("Copies on this node (default: all of them).", _LAYOUT, flags=("-dpl",))
    ] = None
    data_parallel_start_rank: Annotated[
        Index | None, _says("Data-parallel rank of this node's first copy.", _LAYOUT, flags=("-dpr",))
    ] = None
    data_parallel_rank: Annotated[
        Index | None, _says("The one data-parallel rank of this node.", _LAYOUT, flags=("-dpn",))
    ] = None
    data_parallel_address: Annotated[
        str | None, _says("Address of data-parallel rank 0's node.", _LAYOUT, flags=("-dpa",))
    ] = None
    enable_expert_parallel: Annotated[bool, _says("Spread a mixture of experts over the ranks.", _LAYOUT)] = False
    nnodes: Annotated[Count, _says("Nodes that one engine spans.", _LAYOUT)] = 1
    node_rank: Annotated[Index, _says("This node's number, from 0.", _LAYOUT)] = 0
    master_addr: Annotated[str, _says("Address of node 0.", _LAYOUT)] = "127.0.0.1"
    master_port: Annotated[Port | None, _says("The engine's own rendezvous port, to keep clear of it.", _LAYOUT)] = None

    # Weight cache
    weight_cache_socket_dir: Annotated[
        str | None, _says("Folder of the daemons' sockets (default: a private one per user).", _CACHE)
    ] = None
    weight_cache_master_port: Annotated[
        Port | None, _says("Rendezvous port of the daemons; needed when they span nodes (default: a free one).", _CACHE)
    ] = None
    weight_cache_draft_master_port: Annotated[
        Port | None, _says("Rendezvous port of the draft group (default: one above the target's).", _CACHE)
    ] = None
    weight_cache_health_host: Annotated[str, _says("Address of /health, /metrics and /status.", _CACHE)] = "127.0.0.1"
    weight_cache_health_port: Annotated[
        Port | None, _says("Port of /health, /metrics and /status (default: off).", _CACHE)
    ] = None
    checkpoint_digest: Annotated[
        Literal["full", "sampled", "metadata"],
        _says("How much of the checkpoint's bytes the fingerprint covers.", _CACHE),
    ] = "full"

    # Warmup caches
    cache_root: Annotated[
        str | None, _says("Root of every warmup cache; the same path on all nodes (default: one per user).", _STORES)
    ] = None
    warmup_cache_stores: Annotated[
        tuple[str, ...],
        _says("Shared stores after the local disk, in order, comma-separated: mooncake, s3://…, file:/…", _STORES),
    ] = ()
    store_writes: Annotated[
        Literal["all", "first", "none"], _says("Which of the stores get what this node produces.", _STORES)
    ] = "all"
    allow_unsigned: Annotated[
        bool, _says("Also take unsigned tables (never bundles) from stores shared with stock vLLM.", _STORES)
    ] = False

    # Seeding
    seed_listen_host: Annotated[str, _says("Address on which ranks serve peers.", _SEED)] = "0.0.0.0"  # noqa: S104
    seed_listen_port: Annotated[
        Port | None, _says("First port on which ranks serve peers; each rank adds its own offset.", _SEED)
    ] = None
    seed_sources: Annotated[
        tuple[Endpoint, ...], _says("Replicas to fetch from, host:port of each one's first rank.", _SEED)
    ] = ()
    seed_token: Annotated[
        Secret | None, _says("The fleet's shared secret. Visible to every user of the machine: use the file.", _SEED)
    ] = None
    seed_token_file: Annotated[
        str | None, _says("File with the fleet's shared secret, mode 0600 (new tokens first, old ones after).", _SEED)
    ] = None
    seed_signing_key: Annotated[str | None, _says("File with the key that signs what this node publishes.", _SEED)] = (
        None
    )
    seed_trusted_keys: Annotated[
        tuple[str, ...], _says("Public keys, or files of them, whose manifests this node believes.", _SEED)
    ] = ()
    seed_wait: Annotated[Seconds, _says("Seconds to wait for a source that is itself still warming up.", _SEED)] = 600.0
    seed_budget: Annotated[
        Seconds, _says("Seconds that fetching may cost before this node does the work itself.", _SEED)
    ] = 120.0

    # Start-up
    rehearsal: Annotated[bool, _says("Run a throwaway engine once when a warmup cache is missing.", _START)] = True
    rehearsal_deadline: Annotated[
        Seconds, _says("Seconds after which a rehearsal is killed; the weights are served without it.", _START)
    ] = 1800.0
    start_deadline: Annotated[
        Seconds,
        _says("Seconds in which every rank must be serving, else the group is stopped; 0 waits for ever.", _START),
    ] = 7200.0

    # The configuration file's [stores.NAME] tables, as the stores read them; neither flag nor variable.
    stores: dict[str, dict[str, str | int | float | bool]] = {}

    def __repr__(self) -> str:
        # What was set, and of the stores only their names: their options may hold credentials.
        fields = [f.name for f in msgspec.structs.fields(type(self)) if f.name != "stores"]
        shown = [f"{name}={getattr(self, name)!r}" for name in fields if getattr(self, name) != _default(name)]
        if self.stores:
            shown.append(f"stores={sorted(self.stores)!r}")
        return f"PreloadConfig({', '.join(shown)})"

    @property
    def draft_method(self) -> str | None:
        """The speculative method that gets a draft group (``mtp``, ``eagle``, ``eagle3``), or `None`.

        Raises:
            ConfigurationError: if `speculative_config` is not a JSON object.
        """
        if self.speculative_config is None:
            return None
        try:
            settings = msgspec.json.decode(self.speculative_config, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigurationError(
                f"--speculative-config is not a JSON object ({printable(error)}); "
                """write it like {"method": "eagle3", "model": "…"}"""
            ) from error
        method = settings.get("method")
        if not isinstance(method, str):
            return None
        if method.endswith("_mtp"):
            return "mtp"
        return method if method in DRAFT_METHODS else None


def _default(name: str) -> object:
    return next(f.default for f in msgspec.structs.fields(PreloadConfig) if f.name == name)


@dataclass(frozen=True, slots=True)
class Option:
    """One field of `PreloadConfig`, as flags, TOML and environment see it."""

    name: str  # the field's name
    help: str
    group: str
    extra_flags: tuple[str, ...]  # the engine's short spellings
    type: object  # the annotation without its notes
    default: object  # `None` also where there is none

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def key(self) -> str:
        """The TOML key."""
        return self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()


def options() -> dict[str, Option]:
    """Every field of `PreloadConfig` that flags and variables can set, in order, by name."""
    bare = get_type_hints(PreloadConfig)
    noted = get_type_hints(PreloadConfig, include_extras=True)
    found: dict[str, Option] = {}
    for field in msgspec.structs.fields(PreloadConfig):
        annotated = getattr(noted[field.name], "__metadata__", ())
        notes = [m for m in annotated if isinstance(m, Meta) and m.extra]
        if not notes:
            continue
        extra = notes[-1].extra or {}
        found[field.name] = Option(
            name=field.name,
            help=notes[-1].description or "",
            group=extra["group"],
            extra_flags=extra["flags"],
            type=bare[field.name],
            default=None if field.default is msgspec.NODEFAULT else field.default,
        )
    return found


def decode_secret(kind: type, value: object) -> object:
    """msgspec's ``dec_hook`` for a `PreloadConfig`: a `Secret` out of a string, whose text no error repeats.

    Raises:
        TypeError: for a secret that is no string; msgspec turns it into its `ValidationError`, with the place.
        NotImplementedError: for any other type, as msgspec asks of a hook: a field that has no decoding is a bug.
    """
    if kind is not Secret:
        raise NotImplementedError(f"{kind.__name__} has no decoding in a configuration")
    if not isinstance(value, str):
        raise TypeError(f"Expected `str`, got `{type(value).__name__}`")
    return Secret(value)
