"""What there is to know of one published generation: who signed it, who believes it, what is in it, where it lies.

Looks only: stores are read past the disk's cache, so that nothing is filled, replaced or dropped, and of the objects
themselves only small ones are read, by the digests of a manifest whose signature holds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from warmseed.blocking import run_blocking
from warmseed.errors import printable
from warmseed.seeding.artifact import FACTORS_BYTES, ArtifactKey, denial_key, object_key
from warmseed.seeding.bundle.index import INDEX_BYTES, FileRecord, read_index
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused, CannotJudge
from warmseed.seeding.kinds.autotune.bounded import JsonLimits
from warmseed.seeding.kinds.autotune.keys import split_key
from warmseed.seeding.kinds.autotune.layout import KIND, managed_filename
from warmseed.seeding.kinds.autotune.managed import decode_stores
from warmseed.seeding.kinds.autotune.table import parse_table
from warmseed.seeding.published import Found
from warmseed.seeding.trust import canonical
from warmseed.seeding.trust.dsse import ENVELOPE_BYTES, open_envelope, read_unverified
from warmseed.seeding.trust.judge import Expected, Marks, Trust
from warmseed.seeding.trust.keys import Keyring
from warmseed.seeding.trust.manifest import MANIFEST_BYTES, Manifest, verify_manifest
from warmseed.seeding.trust.marks import read_marks
from warmseed.seeding.trust.probation import Probation
from warmseed.seeding.trust.statements import DENIAL_TYPE, PIN_TYPE, verify_denial, verify_pin
from warmseed.stores.base import Store
from warmseed.stores.chain import Chain
from warmseed.stores.errors import StoreError, StoreUnavailable
from warmseed.stores.wrappers.base import innermost
from warmseed.stores.wrappers.verifying import sha256_of

__all__ = [
    "RULES",
    "Cache",
    "Contents",
    "Denied",
    "Held",
    "Inspection",
    "Pinned",
    "Rule",
    "Signature",
    "Tier",
    "inspect_generation",
]

# In the order in which a node applies them -> the reason codes with which each refuses.
RULES: Mapping[str, tuple[str, ...]] = {
    "signature": ("signature", "malformed"),
    "identity": ("kind", "key", "rank"),
    "environment": ("environment", "cannot-judge"),
    "denied": ("denied",),
    "pinned": ("pinned",),
    "age": ("expired", "rollback"),
    "probation": ("probation",),
    "objects": ("missing",),
}


@dataclass(frozen=True, slots=True)
class Signature:
    """One key that a manifest names as its signer."""

    keyid: str
    name: str  # as the trusted keys call it; empty: not trusted here
    verified: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """What one of `RULES` says of the generation."""

    name: str
    outcome: Literal["holds", "refuses", "open", "skipped"]  # open: can't be told here; skipped: refused before
    reason: str = ""  # the code of a refusal, as in metrics and logs
    why: str = ""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What lies where the fleet's pin belongs; without `ignored` it counts."""

    generation: int = 0
    sha256: str = ""
    previous: int = 0  # what was pinned before; 0: nothing
    publisher: str = ""
    signers: tuple[str, ...] = ()
    issued_at: int = 0  # unix seconds, as below
    expires_at: int = 0
    ignored: str = ""  # why this node does not go by it, after the reason code


@dataclass(frozen=True, slots=True)
class Denied:
    """What lies where the fleet's denial of the payload belongs; without `ignored` it counts."""

    reason: str = ""
    publisher: str = ""
    signers: tuple[str, ...] = ()
    issued_at: int = 0  # unix seconds, as below
    expires_at: int = 0
    ignored: str = ""  # why this node does not go by it, after the reason code


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache of a bundle."""

    name: str
    root: str  # where it lay on the node that captured it
    count: int  # files
    nbytes: int
    files: tuple[FileRecord, ...]  # largest first


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in the payload, as far as that can be told without fetching a large one."""

    caches: tuple[Cache, ...] = ()
    operations: Mapping[str, int] = field(default_factory=dict)  # of a table: operation -> entries
    unread: str = ""  # why nothing is known


@dataclass(frozen=True, slots=True)
class Held:
    """One object of the generation in one store."""

    what: str  # manifest, payload, index or factors
    key: str
    state: Literal["here", "missing", "different", "failed"]
    size: int | None = None  # bytes that the store states
    expected: int | None = None  # bytes that the manifest states
    why: str = ""


@dataclass(frozen=True, slots=True)
class Tier:
    """One store, and what it has of the generation."""

    name: str
    objects: tuple[Held, ...]
    unlisted: str = ""  # why it did not say which generations it holds


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is known of one generation."""

    key: ArtifactKey
    generation: int
    generations: tuple[int, ...]  # all that stores list of this artifact
    manifest: Manifest | None  # `None`: no store gave one that can be read
    signatures: tuple[Signature, ...]
    rules: tuple[Rule, ...]
    pin: Pinned | None
    denial: Denied | None
    factors: Mapping[str, str] | None  # every input of the configuration, where a store has them
    contents: Contents
    tiers: tuple[Tier, ...]

    @property
    def refusal(self) -> Rule | None:
        """The first rule by which this node would not adopt the generation, or `None`."""
        return next((rule for rule in self.rules if rule.outcome == "refuses"), None)


async def inspect_generation(
    chain: Chain, keyring: Keyring, found: Found, *, state: Path, now: int, ours: Environment | None = None
) -> Inspection:
    """Look at `found` in every tier of `chain`, and judge it as this node would at `now` (unix seconds).

    `state` is warmseed's own folder on this node, of which only the records of `Trust` and `Probation` are read;
    `ours` this node's environment, where it is known. A tier that fails is reported as failed.

    Raises:
        OSError: when this node's own records can't be read.
    """
    name = found.key.manifest_key(found.generation)
    tiers = chain.all_tiers()
    answers = await asyncio.gather(*(_manifest(tier, name) for tier in tiers))
    envelopes = [answer for answer in answers if isinstance(answer, bytes)]
    envelope = next((item for item in envelopes if _verifies(item, keyring)), envelopes[0] if envelopes else b"")
    manifest, keyids = _look(envelope)
    verified = _verifies(envelope, keyring)
    pin = await _first(chain, found.key.pin_key)
    denial = None if manifest is None else await _first(chain, denial_key(manifest.sha256))
    judge = await _Judge.at(state, keyring, ours, now)
    # What a stranger signed is shown, but nothing is fetched or parsed on its word.
    factors, contents = None, Contents(unread="the manifest is not verified, so nothing is read on its word")
    if manifest is not None and verified:
        factors, contents = await _factors(chain, manifest), await _contents(chain, manifest)
    held = await asyncio.gather(
        *(_held(tier, name, envelope, manifest, answer) for tier, answer in zip(tiers, answers, strict=True))
    )
    reports = tuple(
        Tier(store, objects, found.unlisted.get(store, ""))
        for store, objects in zip((innermost(tier).name for tier in tiers), held, strict=True)
    )
    return Inspection(
        key=found.key,
        generation=found.generation,
        generations=found.generations,
        manifest=manifest,
        signatures=_signatures(keyids, keyring, verified=verified),
        rules=await judge.rules(envelope, found, pin, denial, reports),
        pin=None if pin is None else _pinned(pin, found.key, judge.trust, now),
        denial=None if denial is None or manifest is None else _denied(denial, manifest, judge.trust, now),
        factors=factors,
        contents=contents,
        tiers=reports,
    )


# The manifest ---------------------------------------------------------------------------------------------


async def _manifest(tier: Store, name: str) -> bytes | StoreError | None:
    try:
        return await tier.get(name, limit=MANIFEST_BYTES)
    except StoreError as error:
        return error


def _verifies(envelope: bytes, keyring: Keyring) -> bool:
    try:
        verify_manifest(envelope, keyring)
    except ArtifactRefused:
        return False
    return True


def _look(envelope: bytes) -> tuple[Manifest | None, tuple[str, ...]]:
    """What an envelope says and names as its signers, verified or not."""
    try:
        payload, keyids = read_unverified(envelope)
    except ArtifactRefused:
        return None, ()
    try:
        return canonical.decode(payload, Manifest, limit=MANIFEST_BYTES), keyids
    except ArtifactRefused:
        return None, keyids


def _signatures(keyids: Sequence[str], keyring: Keyring, *, verified: bool) -> tuple[Signature, ...]:
    # An envelope with one bad signature of a trusted key is refused whole, so the trusted ones share one fate.
    known = [(keyid, keyring.find(keyid)) for keyid in dict.fromkeys(keyids)]
    return tuple(Signature(keyid, key.name if key else "", verified and key is not None) for keyid, key in known)


# What the fleet has said of it ----------------------------------------------------------------------------


async def _first(chain: Chain, key: str) -> bytes | None:
    """The answer that a node goes by: shared stores before the disk, since statements change."""
    async for answer in chain.answers(key, limit=ENVELOPE_BYTES, fresh=True):
        return answer.data
    return None


def _pinned(envelope: bytes, key: ArtifactKey, trust: Trust, now: int) -> Pinned:
    try:
        pin = verify_pin(envelope, trust.keyring)
    except ArtifactRefused as error:
        return Pinned(ignored=_coded(error))
    ignored = _over(trust, "pin", pin.issued_at, pin.expires_at, now)
    if pin.key != key:
        ignored = "key: it names another artifact"
    return Pinned(
        generation=pin.generation,
        sha256=pin.sha256,
        previous=pin.previous,
        publisher=pin.publisher,
        signers=_signers(envelope, PIN_TYPE, trust.keyring),
        issued_at=pin.issued_at,
        expires_at=pin.expires_at,
        ignored=ignored,
    )


def _denied(envelope: bytes, manifest: Manifest, trust: Trust, now: int) -> Denied:
    try:
        denial = verify_denial(envelope, trust.keyring)
    except ArtifactRefused as error:
        return Denied(ignored=_coded(error))
    ignored = _over(trust, "denial", denial.issued_at, denial.expires_at, now)
    if denial.sha256 != manifest.sha256:
        ignored = "key: it names another payload"
    return Denied(
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


# Whether it would be adopted ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Judge:
    """This node's judgement, as an adoption would come to it; nothing is remembered."""

    trust: Trust
    probation: Probation
    ours: Environment | None
    now: int
    forgotten: str  # why this node's history of generations is not known

    @classmethod
    async def at(cls, state: Path, keyring: Keyring, ours: Environment | None, now: int) -> _Judge:
        marks, forgotten = Marks(), ""
        try:
            marks = await run_blocking(read_marks, state / "highest.json")
        except ArtifactRefused as error:
            forgotten = f"this node's history of generations can't be read: {error}"
        return cls(Trust(keyring, marks=marks), Probation(state), ours, now, forgotten)

    async def rules(
        self, envelope: bytes, found: Found, pin: bytes | None, denial: bytes | None, tiers: Sequence[Tier]
    ) -> tuple[Rule, ...]:
        """Each of `RULES`: those before the first that refuses hold, those after it were not asked."""
        refused = await self._refusal(envelope, found, pin, denial)
        reason = "" if refused is None else "cannot-judge" if isinstance(refused, CannotJudge) else refused.reason
        rules: list[Rule] = []
        for name, codes in RULES.items():
            if any(rule.outcome == "refuses" for rule in rules):
                rules.append(Rule(name, "skipped"))
            elif reason in codes:
                rules.append(Rule(name, "refuses", reason, str(refused)))
            elif name == "objects":
                rules.append(_fetchable(tiers))
            else:
                why = self._open(name)
                rules.append(Rule(name, "open" if why else "holds", why=why))
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
            manifest, _ = verify_manifest(envelope, self.trust.keyring)
            stated = Environment(manifest.environment)
            if (stated.digest, manifest.generation) != (key.environment_hash, found.generation):
                raise ArtifactRefused("key", "it describes another environment or generation than the one it lies at")
            if denial is not None and not _denied(denial, manifest, self.trust, self.now).ignored:
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


def _fetchable(tiers: Sequence[Tier]) -> Rule:
    """Whether what an installation needs is to be had somewhere."""
    for what in ("payload", "index"):
        held = [item for tier in tiers for item in tier.objects if item.what == what]
        if not held or any(item.state == "here" for item in held):
            continue
        if any(item.state == "failed" for item in held):
            return Rule("objects", "open", why=f"no store that could be asked has the {what}")
        return Rule("objects", "refuses", "missing", f"no store has the {what} in its signed size; a peer may have it")
    return Rule("objects", "holds")


# What is in it --------------------------------------------------------------------------------------------


async def _object(chain: Chain, key: str, *, sha256: str, limit: int) -> bytes | None:
    """The first answer of this digest; unlike `Chain.get_verified` it leaves every store as it is."""
    async for answer in chain.answers(key, limit=limit):
        if await sha256_of(answer.data) == sha256:
            return answer.data
    return None


async def _factors(chain: Chain, manifest: Manifest) -> Mapping[str, str] | None:
    digest = manifest.config_digest
    data = await _object(chain, object_key(digest), sha256=digest, limit=FACTORS_BYTES)
    try:
        return None if data is None else msgspec.json.decode(data, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


async def _contents(chain: Chain, manifest: Manifest) -> Contents:
    try:
        if manifest.index is not None:
            return await _of_bundle(chain, manifest)
        if manifest.kind == KIND and manifest.stored is None:
            return await _of_table(chain, manifest)
    except (ArtifactRefused, StoreError) as error:
        return Contents(unread=str(error))
    return Contents(unread=f"nothing is known of what the kind {printable(manifest.kind)} holds")


async def _of_bundle(chain: Chain, manifest: Manifest) -> Contents:
    """The files of a bundle, by its file index; the payload is not fetched.

    Raises:
        ArtifactRefused: ``length``, ``digest``, ``malformed`` or ``missing``.
    """
    stated = manifest.index
    if stated is None or stated.length > INDEX_BYTES:
        size = 0 if stated is None else stated.length
        raise ArtifactRefused("length", f"its file index has {size} bytes; {INDEX_BYTES} are read at most")
    data = await _object(chain, object_key(stated.sha256), sha256=stated.sha256, limit=stated.length)
    if data is None:
        raise ArtifactRefused("missing", "no store has its file index as it was signed")
    index = await run_blocking(read_index, data, stated)
    if (index.sha256, index.length) != (manifest.sha256, manifest.length):
        raise ArtifactRefused("malformed", "its file index describes another bundle")
    files: dict[str, list[FileRecord]] = {name: [] for name in index.caches}
    for file in sorted(index.files, key=lambda file: (-file.size, file.path)):
        files[file.cache].append(file)
    return Contents(
        tuple(
            Cache(name, index.caches[name].root, len(known), sum(file.size for file in known), tuple(known))
            for name, known in files.items()
        )
    )


async def _of_table(chain: Chain, manifest: Manifest) -> Contents:
    """The operations of a table.

    Raises:
        ArtifactRefused: ``length``, ``malformed`` or ``missing``.
        StoreError: ``InvalidKey``: the manifest names a store key that is none.
    """
    if manifest.length > JsonLimits().size:
        raise ArtifactRefused("length", f"the table has {manifest.length} bytes; {JsonLimits().size} are read at most")
    data = await _object(chain, manifest.store_key, sha256=manifest.sha256, limit=manifest.length)
    if data is None:
        raise ArtifactRefused("missing", "no store has the table as it was signed")
    managed = manifest.filename == managed_filename(manifest.dp_rank, manifest.world_rank)

    def count() -> dict[str, int]:
        if managed:
            keys = [key for store in decode_stores(data, "the table") for key in store.entries]
        else:
            keys = list(parse_table(data).entries)
        return dict(Counter(split_key(key)[0] for key in keys).most_common())

    return Contents(operations=await run_blocking(count))


# Where it lies --------------------------------------------------------------------------------------------


async def _held(
    tier: Store, name: str, envelope: bytes, manifest: Manifest | None, answer: bytes | StoreError | None
) -> tuple[Held, ...]:
    """What one store has, asked one object after the other: what is down is not asked again."""
    if isinstance(answer, StoreError):
        held = [Held("manifest", name, "failed", why=str(answer))]
    elif answer is None:
        held = [Held("manifest", name, "missing", expected=len(envelope))]
    elif answer != envelope:
        why = f"{innermost(tier).name}: another manifest of this number lies there"
        held = [Held("manifest", name, "different", len(answer), len(envelope), why)]
    else:
        held = [Held("manifest", name, "here", len(answer), len(envelope))]
    down = str(answer) if isinstance(answer, StoreUnavailable) else ""
    for what, key, expected in _objects(manifest):
        if down:
            held.append(Held(what, key, "failed", expected=expected, why=down))
            continue
        try:
            info = await tier.stat(key)
        except StoreError as error:
            held.append(Held(what, key, "failed", expected=expected, why=str(error)))
            down = str(error) if isinstance(error, StoreUnavailable) else ""
            continue
        if info is None:
            held.append(Held(what, key, "missing", expected=expected))
        elif expected not in (None, info.size):
            held.append(Held(what, key, "different", info.size, expected))
        else:
            held.append(Held(what, key, "here", info.size, expected))
    return tuple(held)


def _objects(manifest: Manifest | None) -> list[tuple[str, str, int | None]]:
    """What, its store key and its bytes, where those are known, of every object that a manifest names."""
    if manifest is None:
        return []
    found: list[tuple[str, str, int | None]] = [
        ("payload", manifest.store_key, (manifest.stored or manifest).length),
        ("factors", object_key(manifest.config_digest), None),
    ]
    if manifest.index is not None:
        found.insert(1, ("index", object_key(manifest.index.sha256), manifest.index.length))
    return found
