"""Whether this node would adopt one generation, rule by rule, and what the fleet has said of it.

The rules are those of an adoption (`Trust.believe`, `Probation.check`), asked here without remembering anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warmseed.blocking import run_blocking
from warmseed.seeding.artifact import ArtifactKey
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused, CannotJudge
from warmseed.seeding.operator.published import Found
from warmseed.seeding.trust.dsse import open_envelope
from warmseed.seeding.trust.judge import Expected, Marks, Trust
from warmseed.seeding.trust.keys import Keyring
from warmseed.seeding.trust.manifest import Manifest, verify_manifest
from warmseed.seeding.trust.marks import read_marks
from warmseed.seeding.trust.probation import Probation
from warmseed.seeding.trust.statements import DENIAL_TYPE, PIN_TYPE, verify_denial, verify_pin

__all__ = ["RULES", "Examiner", "Rule", "StatedDenial", "StatedPin", "Statement", "read_denial", "read_pin"]

# In the order in which a node applies them -> the reason codes with which each refuses.
RULES: Mapping[str, tuple[str, ...]] = {
    "signature": ("missing", "signature", "malformed"),
    "identity": ("kind", "key", "rank"),
    "environment": ("environment", "cannot-judge"),
    "denied": ("denied",),
    "pinned": ("pinned",),
    "age": ("expired", "rollback"),
    "probation": ("probation",),
    "objects": ("missing",),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """What one of `RULES` says of the generation."""

    name: str
    outcome: Literal["holds", "refuses", "open", "skipped"]  # open: can't be told here; skipped: refused before
    reason: str = ""  # the code of a refusal, as in metrics and logs
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What lies where a signed statement of the fleet belongs; without `ignored` it counts."""

    publisher: str = ""
    signers: tuple[str, ...] = ()
    issued_at: int = 0  # unix seconds, as below
    expires_at: int = 0
    ignored: str = ""  # why this node does not go by it, after the reason code


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedPin(Statement):
    """Which generation the fleet is to use."""

    generation: int = 0
    sha256: str = ""
    previous: int = 0  # what was pinned before; 0: nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedDenial(Statement):
    """That a payload must not be used."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Examiner:
    """This node's judgement, as an adoption would come to it; nothing is remembered."""

    trust: Trust
    probation: Probation
    ours: Environment | None
    now: int
    forgotten: str  # why this node's history of generations is not known

    @classmethod
    async def at(cls, state: Path, keyring: Keyring, ours: Environment | None, now: int) -> Examiner:
        """The examiner of the node with the folder `state`; `ours` is its environment, where that is known.

        Raises:
            OSError: when the node's records can't be read.
        """
        marks, forgotten = Marks(), ""
        try:
            marks = await run_blocking(read_marks, state / "highest.json")
        except ArtifactRefused as error:
            forgotten = f"this node's history of generations can't be read: {error}"
        return cls(Trust(keyring, marks=marks), Probation(state), ours, now, forgotten)

    async def rules(
        self, envelope: bytes, found: Found, pin: bytes | None, denial: bytes | None, objects: Rule
    ) -> tuple[Rule, ...]:
        """Each of `RULES`: those before the first that refuses hold, those after it were not asked.

        `pin` and `denial` are the envelopes that a node would find, `objects` is what the last rule says.

        Raises:
            OSError: when the node's records can't be read.
        """
        refused = await self._refusal(envelope, found, pin, denial)
        reason = "" if refused is None else "cannot-judge" if isinstance(refused, CannotJudge) else refused.reason
        rules: list[Rule] = []
        for name, codes in RULES.items():
            if any(rule.outcome == "refuses" for rule in rules):
                rules.append(Rule(name, "skipped"))
            elif reason in codes:
                rules.append(Rule(name, "refuses", reason, str(refused)))
            elif name == "objects":
                rules.append(objects)
            else:
                why = self._open(name)
                rules.append(Rule(name, "open" if why else "holds", why=why))
        if refused is not None and not any(rule.outcome == "refuses" for rule in rules):
            rules.append(Rule("other", "refuses", reason, str(refused)))  # a code that is not in `RULES` yet
        return tuple(rules)

    def _open(self, rule: str) -> str:
        if rule == "environment" and self.ours is None:
            return "not compared: only a rank of an engine knows all of its own; --here asks FlashInfer for a table's"
        return self.forgotten if rule == "age" else ""

    async def _refusal(
        self, envelope: bytes, found: Found, pin: bytes | None, denial: bytes | None
    ) -> ArtifactRefused | None:
        key = found.key
        try:
            if not envelope:
                raise ArtifactRefused("missing", "no store gave a manifest that can be read")
            manifest, _ = verify_manifest(envelope, self.trust.keyring)
            stated = Environment(manifest.environment)
            if (stated.digest, manifest.generation) != (key.environment_hash, found.generation):
                raise ArtifactRefused("key", "it describes another environment or generation than the one it lies at")
            if denial is not None and not read_denial(denial, manifest, self.trust, self.now).ignored:
                self.trust.deny(denial, now=self.now)
            expected = Expected(
                key=key,
                config_digest=manifest.config_digest,
                environment=stated if self.ours is None else self.ours,
                device_index=manifest.device_index,
            )
            self.trust.believe(envelope, expected, now=self.now, pin=pin)
            await run_blocking(self.probation.check, manifest.sha256)
        except CannotJudge as error:
            if self.ours is None:
                vague = ", ".join(error.fields)
                return ArtifactRefused("environment", f"its publisher could not tell its own {vague}: it fits no node")
            return error
        except ArtifactRefused as error:
            return error
        return None


def read_pin(envelope: bytes, key: ArtifactKey, trust: Trust, now: int) -> StatedPin:
    """The pin in `envelope`, and whether it counts for `key`."""
    try:
        pin = verify_pin(envelope, trust.keyring)
    except ArtifactRefused as error:
        return StatedPin(ignored=_coded(error))
    ignored = _over(trust, "pin", pin.issued_at, pin.expires_at, now)
    if pin.key != key:
        ignored = "key: it names another artifact"
    return StatedPin(
        generation=pin.generation,
        sha256=pin.sha256,
        previous=pin.previous,
        publisher=pin.publisher,
        signers=_signers(envelope, PIN_TYPE, trust.keyring),
        issued_at=pin.issued_at,
        expires_at=pin.expires_at,
        ignored=ignored,
    )


def read_denial(envelope: bytes, manifest: Manifest, trust: Trust, now: int) -> StatedDenial:
    """The denial in `envelope`, and whether it counts for the payload of `manifest`."""
    try:
        denial = verify_denial(envelope, trust.keyring)
    except ArtifactRefused as error:
        return StatedDenial(ignored=_coded(error))
    ignored = _over(trust, "denial", denial.issued_at, denial.expires_at, now)
    if denial.sha256 != manifest.sha256:
        ignored = "key: it names another payload"
    return StatedDenial(
        reason=denial.reason,
        publisher=denial.publisher,
        signers=_signers(envelope, DENIAL_TYPE, trust.keyring),
        issued_at=denial.issued_at,
        expires_at=denial.expires_at,
        ignored=ignored,
    )


def _signers(envelope: bytes, kind: str, keyring: Keyring) -> tuple[str, ...]:
    return tuple(signer.name for signer in open_envelope(envelope, kind, keyring).signers)


def _over(trust: Trust, what: str, issued_at: int, expires_at: int, now: int) -> str:
    try:
        trust.check_dates(what, issued_at, expires_at, now)
    except ArtifactRefused as error:
        return _coded(error)
    return ""


def _coded(error: ArtifactRefused) -> str:
    return f"{error.reason}: {error}"
