"""Everything that shapes the weights in a rank's memory, compared before a byte of them is mapped.

What does not shape them has no field here and so can't matter: hosts, ports, folders, process ids, GPU indices.
(The GPU's identity is no matter of the weights either; server and client compare UUIDs on their own.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from warmseed.daemon.weights.checkpoint import CheckpointIdentity
from warmseed.seeding.environment import Difference

__all__ = ["Fingerprint", "config_digest"]

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 20)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Two ranks with equal fingerprints hold the same tensors, bit for bit."""

    # what was loaded
    checkpoint: CheckpointIdentity  # by value
    revision: Text = ""  # of a model hub; empty for a local folder
    architecture: Text  # class of the model, such as ``LlamaForCausalLM``
    role: Literal["target", "draft"] = "target"
    # where it was cut
    tp_size: Count = 1
    tp_rank: Rank = 0
    pp_size: Count = 1
    pp_rank: Rank = 0
    dp_size: Count = 1
    dp_rank: Rank = 0
    expert_parallel: bool = False
    expert_placement: Text = ""  # strategy by which experts go to ranks
    # how it was processed
    dtype: Text
    quantization: Text = ""  # method
    quantization_config: Text = ""  # `config_digest` of its settings
    rope: Text = ""  # `config_digest` of the text model's RoPE parameters
    kv_cache_dtype: Text = ""
    kv_cache_skip_layers: Annotated[tuple[Text, ...], msgspec.Meta(max_length=65536)] = ()
    attention_backend: Text = ""
    moe_backend: Text = ""
    linear_backend: Text = ""
    # by what
    engine: Text  # ``vllm``, ``torch``…
    engine_version: Text
    torch_version: Text = ""
    cuda_version: Text = ""  # or ROCm's
    gpu_model: Text = ""
    extra: Annotated[dict[Text, Text], msgspec.Meta(max_length=1024)] = {}  # what an adapter knows beyond these

    def mismatched_fields(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the fields in which the two differ, in the order above; ``extra.NAME`` for an adapter's own."""
        return tuple(difference.field for difference in self.differences(other))

    def differences(self, other: Fingerprint) -> tuple[Difference, ...]:
        """The fields in which `other` differs, with both values."""
        found: list[Difference] = []
        for name in self.__struct_fields__:
            if name == "checkpoint":
                if not self.checkpoint.matches(other.checkpoint):
                    found.append(Difference(name, str(other.checkpoint), str(self.checkpoint)))
            elif name == "extra":
                keys = sorted(self.extra.keys() | other.extra.keys())
                found.extend(
                    Difference(f"extra.{key}", other.extra.get(key), self.extra.get(key))
                    for key in keys
                    if other.extra.get(key) != self.extra.get(key)
                )
            elif getattr(self, name) != getattr(other, name):
                found.append(Difference(name, str(getattr(other, name)), str(getattr(self, name))))
        return tuple(found)


def config_digest(settings: Mapping[str, object] | None, *, leave_out: tuple[str, ...] = ()) -> str:
    """SHA-256 of `settings` as canonical JSON, without the top-level keys in `leave_out`; empty for `None`.

    One algorithm everywhere: a process under FIPS and one without must come to the same digest.

    Raises:
        TypeError: for a value that JSON doesn't have; such a value has no stable text to hash.
    """
    if settings is None:
        return ""
    kept = {key: value for key, value in settings.items() if key not in leave_out}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
