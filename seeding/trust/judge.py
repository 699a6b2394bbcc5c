"""Whether a signed manifest is to be believed here and now.

Pure: bytes in, a `Manifest` or an exception out; the clock is an argument, and what must be remembered is a
value (`Marks`) that `warmseed.seeding.trust.marks` keeps on disk. What a store or a peer may still do is to
withhold, or to serve the newest manifest but one within its life.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from warmseed.errors import printable
from warmseed.seeding.artifact import ArtifactKey, bundle_key, object_key
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused, CannotJudge
from warmseed.seeding.trust.keys import Keyring
from warmseed.seeding.trust.manifest import Manifest, UnixSeconds, verify_manifest
from warmseed.seeding.trust.statements import Denial, Pin, verify_denial, verify_pin

__all__ = ["DAY", "PAST", "Expected", "Mark", "Marks", "Policy", "Trust"]

DAY = 86_400  # seconds
PAST = 3600  # seconds: what ended this long ago is over on every clock of the fleet
RELEASED = 1_793_491_200  # 2026-11-01, before the first release: no honest clock shows less
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What this node's operator decided about manifests."""

    skew: int = 600  # seconds a publisher's clock may be ahead of ours
    longest_life: int = 30 * DAY  # seconds after which a manifest is stale, whatever it says itself
    min_generation: int = 1  # emergency brake: nothing older than this
    denied_digests: frozenset[str] = frozenset()  # emergency brake: never these payloads


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What this rank asked for; a manifest that describes anything else is refused."""

    key: ArtifactKey
    config_digest: str  # SHA-256 of every factor of our configuration, see `Site.config_digest`
    environment: Environment  # the part the kind depends on
    device_index: int  # ours; a manifest with -1 fits any


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest manifest this node has believed for one artifact."""

    generation: int
    issued_at: UnixSeconds
    sha256: str
    before: tuple[int, UnixSeconds] = (0, 0)  # the age of the mark that this one took the place of

    @property
    def age(self) -> tuple[int, int]:
        """What must never go down."""
        return self.generation, self.issued_at


class Marks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest mark of every artifact, by its manifest folder; what `highest.json` holds."""

    schema: Literal[1] = 1
    marks: dict[str, Mark] = {}


class Trust:
    """The judge of one node's manifests: keyring, policy, and what it has seen before."""

    def __init__(self, keyring: Keyring, policy: Policy | None = None, *, marks: Marks | None = None) -> None:
        self.keyring = keyring
        self.policy = policy if policy is not None else Policy()
        self._marks: dict[str, Mark] = dict(marks.marks) if marks is not None else {}
        self._denials: dict[str, Denial] = {}
        self._warned = False

    @property
    def marks(self) -> Marks:
        """What must be on disk before anything believed is installed."""
        return Marks(marks=dict(sorted(self._marks.items())))

    def believe(self, envelope: bytes, expected: Expected, *, now: int, pin: bytes | None = None) -> Manifest:
        """The manifest in `envelope`, if it describes what `expected` asks for and is fit to be installed.

        `now` is unix seconds; `pin` the signed pin found in the store, if any. Nothing is remembered: call
        `remember` once the artifact is to be installed.

        Raises:
            CannotJudge: when our own environment is partly unknown.
            ArtifactRefused: with reason ``signature``, ``malformed``, ``kind``, ``key``, ``rank``,
                ``environment``, ``denied``, ``rollback``, ``expired`` or ``pinned``.
        """
        manifest, _ = verify_manifest(envelope, self.keyring)
        self._check_identity(manifest, expected)
        self._check_environment(manifest, expected)
        self._check_denied(manifest, now)
        pinned = self._check_pin(manifest, expected, pin, now)
        self._check_age(manifest, expected, now, pinned=pinned)
        return manifest

    def remember(self, manifest: Manifest, expected: Expected) -> bool:
        """Raise the mark of `expected.key` to `manifest`; whether `marks` changed and must be saved."""
        folder = expected.key.manifest_folder
        known = self._marks.get(folder)
        before = known.age if known is not None else (0, 0)
        mark = Mark(manifest.generation, manifest.issued_at, manifest.sha256, before)
        if known is not None and known.age >= mark.age:
            return False
        self._marks[folder] = mark
        return True

    def mark(self, key: ArtifactKey) -> Mark | None:
        """The newest manifest that was remembered for `key`."""
        return self._marks.get(key.manifest_folder)

    def restore(self, key: ArtifactKey, mark: Mark | None) -> None:
        """Go back to `mark`, because what was remembered since could not be installed."""
        if mark is None:
            self._marks.pop(key.manifest_folder, None)
        else:
            self._marks[key.manifest_folder] = mark

    def lower(self, key: ArtifactKey) -> None:
        """Go back to what the mark of `key` took the place of, because its payload turned out to be bad.

        What this node believed before is then no rollback; anything older still is.
        """
        mark = self._marks.get(key.manifest_folder)
        if mark is not None:
            self._marks[key.manifest_folder] = Mark(*mark.before, sha256="")

    def pinned(self, pin: bytes, key: ArtifactKey, *, now: int) -> int | None:
        """The generation that the valid pin in the envelope `pin` names for `key`, or `None`."""
        stated = self._valid_pin(pin, key, now)
        return None if stated is None else stated.generation

    def pinned_payload(self, pin: bytes, key: ArtifactKey, *, now: int) -> str | None:
        """The digest of the payload that the valid pin in the envelope `pin` names for `key`, or `None`."""
        stated = self._valid_pin(pin, key, now)
        return None if stated is None else stated.sha256

    def deny(self, envelope: bytes, *, now: int) -> Denial:
        """Learn a denial that the fleet published.

        Raises:
            ArtifactRefused: when it is not signed by a trusted key, or no longer valid.
        """
        denial = verify_denial(envelope, self.keyring)
        self.check_dates("denial", denial.issued_at, denial.expires_at, now)
        self._denials[denial.sha256] = denial
        return denial

    def denied(self, sha256: str, *, now: int) -> str | None:
        """Why the payload `sha256` must not be used, or `None`."""
        if sha256 in self.policy.denied_digests:
            return "denied by this node's configuration"
        denial = self._denials.get(sha256)
        if denial is None or (now > denial.expires_at + self.policy.skew and now >= RELEASED):
            return None
        return f"denied by {printable(denial.publisher)}: {printable(denial.reason)}"

    def _check_identity(self, manifest: Manifest, expected: Expected) -> None:
        key = expected.key
        if manifest.kind != key.kind:
            raise ArtifactRefused("kind", f"asked for {key.kind}, got a manifest of {printable(manifest.kind)}")
        pairs: tuple[tuple[str, str, object, object], ...] = (
            ("key", "config_hash", manifest.config_hash, key.config_hash),
            ("key", "config_digest", manifest.config_digest, expected.config_digest),
            ("rank", "dp_rank", manifest.dp_rank, key.dp_rank),
            ("rank", "world_rank", manifest.world_rank, key.world_rank),
        )
        for reason, name, theirs, ours in pairs:
            if theirs != ours:
                raise ArtifactRefused(reason, f"{name}: theirs {printable(theirs)}, ours {ours}", fields=(name,))
        if manifest.device_index not in (-1, expected.device_index):
            raise ArtifactRefused(
                "rank",
                f"compiled for device index {manifest.device_index}, this rank runs on {expected.device_index}: "
                "its code names the device",
                fields=("device_index",),
            )
        lawful = {bundle_key(manifest.sha256), object_key(manifest.sha256)}
        if manifest.store_key not in lawful and not manifest.store_key == _reference_key(manifest, key):
            raise ArtifactRefused(
                "key", f"store key {printable(manifest.store_key)!r} is not one this artifact may lie at"
            )

    def _check_environment(self, manifest: Manifest, expected: Expected) -> None:
        if unknown := expected.environment.unknown:
            raise CannotJudge("environment", f"this node can't tell its own {', '.join(unknown)}", fields=unknown)
        theirs: Mapping[str, str] = manifest.environment
        if differences := expected.environment.differences(theirs):
            shown = "; ".join(printable(str(difference)) for difference in differences[:4])
            raise ArtifactRefused(
                "environment", f"made for another environment: {shown}", fields=tuple(d.field for d in differences)
            )
        if expected.environment.digest != expected.key.environment_hash:
            raise ValueError("the expected key was not made from the expected environment")

    def _check_denied(self, manifest: Manifest, now: int) -> None:
        if manifest.generation < self.policy.min_generation:
            raise ArtifactRefused(
                "denied", f"generation {manifest.generation} is below this node's minimum {self.policy.min_generation}"
            )
        if reason := self.denied(manifest.sha256, now=now):
            raise ArtifactRefused("denied", f"payload {manifest.sha256[:12]} is {reason}")

    def _check_pin(self, manifest: Manifest, expected: Expected, pin: bytes | None, now: int) -> Pin | None:
        """The valid pin for `expected.key`, after checking that `manifest` is what it names."""
        if pin is None:
            return None
        stated = self._valid_pin(pin, expected.key, now)
        if stated is None:
            return None
        if (stated.generation, stated.sha256) != (manifest.generation, manifest.sha256):
            raise ArtifactRefused(
                "pinned", f"generation {manifest.generation} is not the pinned generation {stated.generation}"
            )
        return stated

    def _valid_pin(self, pin: bytes, key: ArtifactKey, now: int) -> Pin | None:
        try:
            stated = verify_pin(pin, self.keyring)
            self.check_dates("pin", stated.issued_at, stated.expires_at, now)
        except ArtifactRefused as error:
            _log.warning("the pin of %s is ignored: %s", key.manifest_folder, error)
            return None
        if stated.key != key:
            _log.warning("the pin of %s is ignored: it names another artifact", key.manifest_folder)
            return None
        return stated

    def _check_age(self, manifest: Manifest, expected: Expected, now: int, *, pinned: Pin | None) -> None:
        self.check_dates("manifest", manifest.issued_at, manifest.expires_at, now)
        mark = self._marks.get(expected.key.manifest_folder)
        if mark is None or (manifest.generation, manifest.issued_at) >= mark.age:
            return
        if pinned is not None and pinned.issued_at >= mark.issued_at:
            return  # a signed decision to go back, taken after the newer generation was made
        raise ArtifactRefused(
            "rollback",
            f"generation {manifest.generation} of {manifest.issued_at} is older than generation {mark.generation} of "
            f"{mark.issued_at}, which this node has already seen",
        )

    def check_dates(self, what: str, issued_at: int, expires_at: int, now: int) -> None:
        """Pass if `now` lies within the life of a signed `what`, as far as this node's clock can tell.

        Raises:
            ArtifactRefused: ``expired``, also when it comes from the future.
        """
        if now < RELEASED:
            if not self._warned:
                self._warned = True
                _log.warning("this node's clock shows a time before warmseed was released: expiry is not checked")
            return
        if issued_at > now + self.policy.skew:
            raise ArtifactRefused("expired", f"{what} was issued {issued_at - now} s in the future; is a clock wrong?")
        end = min(expires_at, issued_at + self.policy.longest_life)
        if now > end + self.policy.skew:
            raise ArtifactRefused("expired", f"{what} expired {now - end} s ago")

    def over(self, issued_at: int, expires_at: int, *, now: int) -> bool:
        """Whether what was signed with these dates is over on every clock of the fleet, for good.

        Never where `check_dates` would still pass; nor for what comes from the future: that will be valid.
        """
        end = min(expires_at, issued_at + self.policy.longest_life)
        return now >= RELEASED and now > end + max(self.policy.skew, PAST)


def _reference_key(manifest: Manifest, key: ArtifactKey) -> str | None:
    filename = manifest.filename
    if not filename or "/" in filename or filename.startswith("."):
        return None
    return key.reference_key(filename)
