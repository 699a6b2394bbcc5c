"""The verdict on an adopted artifact, from the first engine that warmed up on it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.support.artifacts import KIND, NOW, PlainKind
from tests.support.sites import make_site

from warmseed.daemon.protocol.status import Message, Used
from warmseed.daemon.rank.judge import WARMUP_SECONDS, Judge
from warmseed.daemon.weights.messages import Report
from warmseed.daemon.weights.server import Lease
from warmseed.seeding.adopt import Adoption
from warmseed.seeding.kinds.base import Capture, Evidence, Installation, Kind, Site, Verdict
from warmseed.seeding.trust.manifest import Manifest


class Notes:
    """Stands where seeds and status writer stand; keeps what it is told."""

    def __init__(self, *, standing: str = "trial") -> None:
        self.sent: list[Message] = []
        self.judgements: list[tuple[bool, float]] = []
        self.told: list[str] = []
        self.reasons: list[str] = []
        self.counted: list[str] = []
        self.standing = standing

    def send(self, message: Message) -> None:
        self.sent.append(message)

    async def judged(self, adoption: Adoption, site: Site, verdict: Verdict, saved: float) -> None:
        self.judgements.append((verdict.used, saved))

    def refused(self, reasons: Iterable[str]) -> None:
        self.counted.extend(reasons)

    async def proven(self, adoption: Adoption, site: Site) -> bool:
        return self.standing == "proven"

    async def pardon(self, adoption: Adoption, site: Site, reason: str) -> None:
        self.told.append("pardoned")
        self.reasons.append(reason)

    async def met(self, adoption: Adoption, site: Site) -> None:
        self.told.append("met")

    async def part(self, adoption: Adoption, site: Site) -> None:
        self.told.append("parted")

    async def quarantine(self, kind: Kind, adoption: Adoption, site: Site, reason: str) -> None:
        self.told.append("quarantined")
        self.reasons.append(reason)

    async def denounce(self, adoption: Adoption, site: Site, reason: str) -> None:
        self.told.append("denounced")

    async def forgive(self, adoption: Adoption) -> None:
        self.told.append("forgiven")


class CountingKind(PlainKind):
    def judge(self, installation: Installation, evidence: Evidence, site: Site) -> Verdict:
        return Verdict(used=evidence.counters["hit"] > 0, reason="as counted\n")


def manifest(provenance: Mapping[str, str]) -> Manifest:
    return Manifest(
        schema=1,
        kind=KIND,
        store_key="k",
        config_hash="a" * 64,
        config_digest="c" * 64,
        dp_rank=0,
        world_rank=0,
        device_index=-1,
        filename="f",
        sha256="d" * 64,
        length=1,
        environment={},
        generation=1,
        issued_at=NOW,
        expires_at=NOW + 1,
        publisher="test",
        provenance=dict(provenance),
    )


def judged(base: Path, *reports: Report, adoption: Adoption | None) -> tuple[Notes, Judge]:
    notes, kind = Notes(), CountingKind()
    adoptions = {} if adoption is None else {KIND: adoption}
    judge = Judge(notes, {KIND: make_site(base)}, [kind], adoptions, notes)  # type: ignore[arg-type]

    async def main() -> None:
        for report in reports:
            await judge.on_report(report)

    asyncio.run(main())
    return notes, judge


def installed(**provenance: str) -> Adoption:
    return Adoption(
        KIND,
        "installed",
        "store",
        manifest({WARMUP_SECONDS: provenance["cold"]} if provenance else {}),
        installation=Installation(KIND, 1, "d" * 64, {}),
    )


def report(seconds: float = 2.0, hit: float = 1.0) -> Report:
    return Report(seconds=seconds, counters={"hit": hit}, lines=(), new_files=())


def test_what_was_used_saved_what_its_maker_paid_less_what_it_still_took(tmp_path: Path) -> None:
    notes, _ = judged(tmp_path, report(), adoption=installed(cold="24.5"))
    assert notes.judgements == [(True, 22.5)]
    assert notes.sent == [Used(KIND, True, 22.5, "as counted\\n")]


def test_what_was_not_used_saved_nothing(tmp_path: Path) -> None:
    assert judged(tmp_path, report(hit=0), adoption=installed(cold="24.5"))[0].judgements == [(False, 0.0)]


@pytest.mark.parametrize("cold", ["", "soon", "nan", "inf", "-inf", "1e999", "1"])
def test_a_claim_that_is_no_sensible_number_is_no_saving_and_stays_printable(tmp_path: Path, cold: str) -> None:
    notes, _ = judged(tmp_path, report(), adoption=installed(cold=cold))
    assert notes.judgements == [(True, 0.0)]
    assert msgspec.json.decode(msgspec.json.encode(notes.sent[0]), type=Used) == notes.sent[0]


def test_only_the_first_engine_is_the_judge(tmp_path: Path) -> None:
    notes, _ = judged(tmp_path, report(hit=1), report(hit=0), adoption=installed())
    assert notes.judgements == [(True, 0.0)]


@pytest.mark.parametrize("adoption", [None, Adoption(KIND, "none"), Adoption(KIND, "present")])
def test_what_was_not_adopted_is_not_judged(tmp_path: Path, adoption: Adoption | None) -> None:
    assert judged(tmp_path, report(), adoption=adoption)[0].sent == []


def test_what_this_node_made_says_what_its_first_warmup_cost(tmp_path: Path) -> None:
    capture = Capture("f", tmp_path, "d" * 64, 1, make_site(tmp_path).environment, -1, "k", provenance={"by": "test"})
    _, judge = judged(tmp_path, report(31.02), report(4.1), adoption=None)
    assert judge.annotated(capture).provenance == {"by": "test", WARMUP_SECONDS: "31.02"}
    _, silent = judged(tmp_path, adoption=None)
    assert silent.annotated(capture) is capture


# How an engine ends, by the event's name; the last word of a process that waits to be told.
ENDINGS = {
    "crashes": "import os; os.abort()",
    "fails": "raise SystemExit(1)",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "is told to stop": "raise SystemExit(128 + 15)",
    "exits": "",
    "lets go": "",
}


@contextmanager
def engine(how: str) -> Iterator[Lease]:
    """The lease of an engine that then ended like that; its parent has not heard of it yet."""
    code = f"import sys; sys.stdin.read()\n{ENDINGS[how]}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        lease = Lease(process.pid)
        if how != "lets go":
            process.stdin.close()  # type: ignore[union-attr]
        yield lease
        lease.witness.close()


def heard(base: Path, *events: str, standing: str = "trial") -> Notes:
    """What a judge of one adopted artifact does as engines attach, report, end or just let go."""
    notes, kind = Notes(standing=standing), CountingKind()
    judge = Judge(notes, {KIND: make_site(base)}, [kind], {KIND: installed()}, notes)  # type: ignore[arg-type]

    async def main() -> None:
        for event in events:
            if event == "attaches":
                await judge.on_attached()
            elif event == "stop":
                await judge.on_stop()
            elif event == "reports":
                await judge.on_report(report())
            else:
                with engine(event) as lease:
                    await judge.on_detached(lease)

    asyncio.run(main())
    return notes


@pytest.mark.parametrize(
    ("how", "said"), [("crashes", "died of SIGABRT"), ("fails", "exited with 1")], ids=["a crash", "an exception"]
)
def test_what_an_engine_dies_on_is_taken_back_at_once_and_the_fleet_not_told_yet(
    tmp_path: Path, how: str, said: str
) -> None:
    notes = heard(tmp_path, "attaches", how)
    assert notes.told == ["met", "quarantined"]
    assert said in notes.reasons[0]
    assert notes.counted == ["quarantined"]


def test_the_fleet_is_told_once_an_engine_has_warmed_up_without_it(tmp_path: Path) -> None:
    assert heard(tmp_path, "crashes", "reports", "attaches").told == ["quarantined", "denounced"]


def test_an_artifact_is_cleared_when_engines_die_without_it_too(tmp_path: Path) -> None:
    assert heard(tmp_path, "crashes", "fails", "reports").told == ["quarantined", "forgiven"]


def test_a_kill_from_outside_clears_nothing(tmp_path: Path) -> None:
    assert heard(tmp_path, "crashes", "is killed", "reports").told == ["quarantined", "denounced"]


@pytest.mark.parametrize("how", ["is killed", "is told to stop"])
def test_one_kill_from_outside_says_nothing_and_two_in_a_row_do(tmp_path: Path, how: str) -> None:
    notes = heard(tmp_path, how, how)
    assert notes.told == ["pardoned", "quarantined"]
    assert notes.counted == ["quarantined"]


def test_a_warmup_between_two_kills_starts_the_count_anew(tmp_path: Path) -> None:
    notes = heard(tmp_path, "is killed", "reports", "is killed")
    assert notes.told == ["pardoned"]
    assert notes.judgements == [(True, 0.0)]


def test_what_engines_of_this_rank_have_proven_survives_one_crash_and_not_a_second(tmp_path: Path) -> None:
    assert heard(tmp_path, "crashes", standing="proven").told == ["pardoned"]
    assert heard(tmp_path, "crashes", "crashes", standing="proven").told == ["pardoned", "quarantined"]


def test_an_engine_that_ends_cleanly_without_a_warmup_accuses_nobody(tmp_path: Path) -> None:
    assert heard(tmp_path, "exits", "exits").told == []


def test_a_daemon_that_is_stopped_while_an_engine_warms_up_leaves_no_suspicion(tmp_path: Path) -> None:
    assert heard(tmp_path, "attaches", "stop").told == ["met", "parted"]
    assert heard(tmp_path, "attaches", "reports", "stop").told == ["met"]


def test_an_engine_that_has_warmed_up_may_die_as_it_likes(tmp_path: Path) -> None:
    notes, kind = Notes(), CountingKind()
    judge = Judge(notes, {KIND: make_site(tmp_path)}, [kind], {KIND: installed()}, notes)  # type: ignore[arg-type]

    async def main() -> None:
        with engine("crashes") as lease:
            await judge.on_report(report())
            await judge.on_detached(lease)

    asyncio.run(main())
    assert notes.told == []


def test_an_engine_in_copy_mode_lets_go_of_the_lease_and_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmseed.daemon.rank.judge.DEATH_SECONDS", 0.01)
    assert heard(tmp_path, "lets go").told == []
