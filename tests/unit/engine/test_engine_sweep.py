"""The sweep: when it runs, in which order it reads, and that nothing is done without proof and fence."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_kit import ACCOUNT, NOW, PLATFORM, Harbour, lot

from batchferry.domain.control import ControlState, SweepWish
from batchferry.domain.errors import KafkaUnavailable
from batchferry.domain.ids import BatchId, FileId, LedgerId, LotId, ProviderBatchId, batch_file_name, new_batch_id
from batchferry.domain.ledger import LedgerHeader, LotState
from batchferry.domain.orphans import HORIZON_S
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    CallFailed,
    CallFailure,
    FilePage,
    FileRole,
    ListedFile,
    ProviderStatus,
    RequestCounts,
)
from batchferry.engine import sweep as room
from batchferry.engine.partition import ORPHAN_HORIZON_S
from batchferry.engine.sweep import Sweeper, read_listing

OURS = LedgerId("0123456789")
SEALED = NOW - timedelta(hours=5)
BATCH = new_batch_id(SEALED.timestamp())
INPUT, OUTPUT, ERROR = FileId("in"), FileId("out"), FileId("err")
UNAVAILABLE = CallFailure.UNAVAILABLE


class Account:
    """A provider account with batches and files; keeps what was asked of it in ``log``."""

    name = ACCOUNT

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.batches: dict[str, BatchSnapshot] = {}
        self.files: dict[FileRole, dict[str, ListedFile]] = {FileRole.INPUT: {}, FileRole.OUTPUT: {}}
        self.failing: set[str] = set()

    def put(self, batch: BatchSnapshot) -> None:
        """Add a batch with its files."""
        self.batches[batch.provider_batch_id] = batch
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                self.files[FileRole.OUTPUT][file_id] = ListedFile(file_id, "result", created_at=SEALED)

    def leave(self, file_id: FileId, batch_id: BatchId = BATCH, ledger_id: LedgerId = OURS) -> None:
        """Add an input file."""
        name = batch_file_name(ledger_id, batch_id)
        self.files[FileRole.INPUT][file_id] = ListedFile(file_id, name, "batch", 10, SEALED)

    def _failure(self, call: str) -> CallFailed | None:
        self.log.append(call)
        name = call.partition(" ")[0]
        return CallFailed(name, UNAVAILABLE) if name in self.failing else None

    async def list_batches(self, _cursor: str | None = None) -> BatchPage | CallFailed:
        return self._failure("list") or BatchPage(tuple(self.batches.values()))

    async def list_files(self, role: FileRole, _cursor: str | None = None) -> FilePage | CallFailed:
        return self._failure(f"list_files {role}") or FilePage(tuple(self.files[role].values()))

    async def cancel(self, provider_batch_id: str) -> Any:
        failure = self._failure(f"cancel {provider_batch_id}")
        if failure is None:
            before = self.batches[provider_batch_id]
            self.put(snapshot(ProviderStatus.CANCELLING, before.provider_batch_id))
        return failure or self.batches[provider_batch_id]

    async def delete_file(self, file_id: str) -> CallFailed | None:
        failure = self._failure(f"delete {file_id}")
        if failure is None:
            for files in self.files.values():
                files.pop(file_id, None)
        return failure


class Fleet:
    """The ledgers as the whole fleet wrote them."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.control = ControlState()
        self.unreadable: set[int] = set()
        self.ledger = PartitionLedger(0)
        self.ledger.apply(LedgerHeader(OURS))
        self.is_away = False

    async def ready(self) -> None:
        return

    async def catch_up(self) -> None:
        self.log.append("catch up")
        if self.is_away:
            raise KafkaUnavailable("away")

    def ledgers(self) -> dict[int, PartitionLedger]:
        return {0: self.ledger}


class Bay:
    """A sweeper with everything around it."""

    def __init__(self, harbour: Harbour) -> None:
        self.harbour = harbour
        self.log: list[str] = []
        self.account = Account(self.log)
        self.fleet = Fleet(self.log)
        provider: Any = self.account
        fleet: Any = self.fleet
        self.sweeper = Sweeper(
            harbour.settings, {ACCOUNT: provider}, harbour.tasks, harbour.clock, harbour.telemetry, fleet
        )
        self.sweeper.quiet_s = 0.0

    def acts(self) -> list[str]:
        """What was changed at the provider."""
        return [one for one in self.log if one.startswith(("cancel", "delete"))]

    async def ask(self, scope: str = "all") -> None:
        """An operator wants a sweep, which is then looked for."""
        self.fleet.control.apply(SweepWish(scope, self.harbour.clock.now()))
        self.harbour.clock.at += timedelta(seconds=1)
        await self.sweeper.look()

    def told(self, name: str) -> list[dict[str, object]]:
        """Events of this name."""
        return self.harbour.telemetry.named(name)


def snapshot(
    status: ProviderStatus, provider_batch_id: str = PLATFORM, ledger_id: str = OURS, **changes: Any
) -> BatchSnapshot:
    """A batch of ours, of which no ledger says anything."""
    fields: dict[str, Any] = {
        "input_file_id": INPUT, "created_at": SEALED, "metadata": {"batch_id": BATCH, "ledger_id": ledger_id}
    }  # fmt: skip
    return BatchSnapshot(ProviderBatchId(provider_batch_id), status, status.value, **{**fields, **changes})


@pytest.fixture(name="bay")
async def make_bay(tmp_path: Path) -> Any:
    """A sweeper whose replica owns partition 0."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        yield Bay(harbour)


async def test_an_orphan_is_cancelled_at_the_second_pass_and_collected_when_it_has_ended(bay: Bay) -> None:
    """First it is only told; then cancelled; at its end its files go and its rows are counted, once."""
    bay.account.put(snapshot(ProviderStatus.IN_PROGRESS))
    bay.account.leave(INPUT)
    await bay.ask()
    assert bay.log == ["list", "list_files input", "list_files output", "catch up"]
    assert [one["kind"] for one in bay.told("orphan_found")] == ["batch"]
    assert bay.harbour.telemetry.gauges[("orphan_suspects", ())] == 1
    await bay.sweeper.look()  # by itself: there is a suspect
    assert bay.acts() == [f"cancel {PLATFORM}"]
    await bay.sweeper.look()
    assert bay.acts() == [f"cancel {PLATFORM}"]  # it is being cancelled
    ended = snapshot(
        ProviderStatus.CANCELLED, output_file_id=OUTPUT, error_file_id=ERROR, counts=RequestCounts(9, 4, 1)
    )  # fmt: skip
    bay.account.put(ended)
    await bay.sweeper.look()
    assert bay.acts()[1:] == ["delete out", "delete err", "delete in"]
    await bay.sweeper.look()
    await bay.ask()
    assert len(bay.acts()) == 4
    telemetry = bay.harbour.telemetry
    assert telemetry.total("orphan_waste_rows") == 5
    assert telemetry.total("possibly_paid_twice_rows") == 5
    assert telemetry.total("orphans_found", kind="batch") == 1
    assert [telemetry.total("orphans_cleared", act=act) for act in ("cancelled", "collected")] == [1, 1]
    assert telemetry.gauges[("orphan_suspects", ())] == 0
    assert [one["reason"] for one in bay.told("sweep_done")] == ["asked", *["confirm"] * 4, "asked"]


async def test_a_foreign_batch_is_never_touched(bay: Bay) -> None:
    """Another environment on the same account: its batches and files stay, however often they are seen."""
    bay.account.put(snapshot(ProviderStatus.IN_PROGRESS, "theirs", "zzzzzzzzzz"))
    bay.account.put(snapshot(ProviderStatus.COMPLETED, "nobody's", metadata={}, output_file_id=OUTPUT))
    bay.account.leave(INPUT, ledger_id=LedgerId("zzzzzzzzzz"))
    for _ in range(3):
        await bay.ask()
    assert bay.acts() == []
    assert bay.told("sweep_done")[-1]["not_ours"] == 3
    assert bay.told("orphan_found") == []


async def test_a_stray_file_is_deleted_and_a_recorded_one_stays(bay: Bay) -> None:
    """Left by a process that died between the upload and the first record."""
    bay.account.leave(INPUT)
    bay.account.leave(FileId("lives"), other := new_batch_id(SEALED.timestamp()))
    bay.fleet.ledger.apply(lot(LotState.SUBMITTING, [1], lot_id=LotId(other), input_file_id=FileId("lives")))
    await bay.ask()
    await bay.sweeper.look()
    assert bay.acts() == ["delete in"]
    assert bay.told("orphan_file_deleted") == [{"account": ACCOUNT, "batch_id": BATCH, "file_id": INPUT}]


async def test_a_suspect_that_turns_out_to_be_known_is_let_go(bay: Bay) -> None:
    """The second pass reads everything anew."""
    bay.account.put(snapshot(ProviderStatus.IN_PROGRESS))
    await bay.ask()
    bay.fleet.ledger.apply(lot(LotState.SUBMITTED, [1], lot_id=LotId(BATCH), provider_batch_ids=(PLATFORM,)))
    await bay.sweeper.look()
    assert bay.acts() == []
    assert bay.harbour.telemetry.gauges[("orphan_suspects", ())] == 0


async def test_nothing_is_done_before_a_create_under_way_must_have_ended(bay: Bay) -> None:
    """Two passes in a row prove no more than one: real time must pass between them."""
    bay.sweeper.quiet_s = 1e9
    bay.account.put(snapshot(ProviderStatus.IN_PROGRESS))
    await bay.ask()
    await bay.ask()
    await bay.sweeper.look()
    assert bay.acts() == []
    assert len(bay.told("sweep_done")) == 2


async def test_no_act_without_the_fence(bay: Bay) -> None:
    """A newer owner of partition 0 is there: the check before the act fails, and nothing is done."""
    bay.account.put(snapshot(ProviderStatus.IN_PROGRESS))
    await bay.ask()
    producer = bay.harbour.log.producers[0]
    producer.is_fenced = True
    producer.last_transaction_at = -room.FENCE_AGE_S
    await bay.sweeper.look()
    assert bay.acts() == []
    assert [one["reason"] for one in bay.told("sweep_unfinished")] == ["partition_lost"]
    await bay.ask()
    assert bay.log.count("list") == 2  # and it does not sweep any more


async def test_only_the_owner_of_partition_0_sweeps(tmp_path: Path) -> None:
    """Another partition gives no right to it, and what an earlier owner suspected is suspected anew."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task(1)
        bay = Bay(harbour)
        bay.account.put(snapshot(ProviderStatus.IN_PROGRESS))
        await bay.ask()
        assert bay.log == []
        await harbour.task(0)
        await bay.sweeper.look()
        assert bay.log.count("list") == 1
        harbour.tasks[0].lose("moved")
        await bay.sweeper.look()
        await harbour.task(0)
        await bay.ask()
        assert bay.acts() == []
        await bay.sweeper.look()
        assert bay.acts() == [f"cancel {PLATFORM}"]


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("list", "list_unavailable"),
        ("kafka", "ledgers_unavailable"),
        ("damaged", "ledger_unreadable"),
    ],
)
async def test_what_was_not_read_whole_proves_nothing(bay: Bay, trouble: str, reason: str) -> None:
    """No list, no ledgers, or a ledger with a record of a newer version: nothing is judged, and it is tried again."""
    bay.account.put(snapshot(ProviderStatus.IN_PROGRESS))
    if trouble == "list":
        bay.account.failing = {"list"}
    bay.fleet.is_away = trouble == "kafka"
    bay.fleet.unreadable = {2} if trouble == "damaged" else set()
    await bay.ask()
    await bay.sweeper.look()
    assert bay.acts() == []
    assert {one["reason"] for one in bay.told("sweep_unfinished")} == {reason}
    assert bay.told("orphan_found") == []
    assert len(bay.told("sweep_unfinished")) == 2
    bay.account.failing, bay.fleet.is_away, bay.fleet.unreadable = set(), False, set()
    await bay.sweeper.look()
    assert len(bay.told("orphan_found")) == 1


async def test_without_a_file_list_orphans_are_cancelled_and_no_file_is_deleted(bay: Bay) -> None:
    """Some servers have no such list: the metadata are enough for a cancel."""
    bay.account.put(snapshot(ProviderStatus.IN_PROGRESS))
    bay.account.put(snapshot(ProviderStatus.COMPLETED, "ended", output_file_id=OUTPUT))
    bay.account.leave(FileId("stray"), new_batch_id(SEALED.timestamp()))
    bay.account.failing = {"list_files"}
    await bay.ask()
    await bay.sweeper.look()
    assert bay.acts() == [f"cancel {PLATFORM}"]
    assert {one["reason"] for one in bay.told("sweep_unfinished")} == {"file_list_unavailable"}


async def test_acts_that_fail_are_repeated_a_bounded_number_of_times(bay: Bay) -> None:
    """A file that resists costs one look each pass, its rows are counted once, and in the end the timetable rules."""
    bay.account.put(snapshot(ProviderStatus.COMPLETED, output_file_id=OUTPUT, counts=RequestCounts(3, 3, 0)))
    bay.account.failing = {"delete"}
    await bay.ask()
    for _ in range(room.MAX_FOLLOW_UPS + 5):
        await bay.sweeper.look()
    assert bay.acts() == ["delete out"] * room.MAX_FOLLOW_UPS
    assert bay.harbour.telemetry.total("possibly_paid_twice_rows") == 3
    assert bay.told("orphan_collected") == []
    bay.account.failing = set()
    await bay.ask()
    assert bay.told("orphan_collected")[0]["rows"] == 3
    assert bay.harbour.telemetry.total("possibly_paid_twice_rows") == 3


async def test_one_pass_does_a_bounded_number_of_acts(bay: Bay, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is taken by the passes that follow."""
    monkeypatch.setattr(room, "MAX_ACTS", 2)
    for number in range(5):
        bay.account.put(snapshot(ProviderStatus.IN_PROGRESS, f"pb-{number}"))
    await bay.ask()
    counts = []
    for _ in range(4):
        await bay.sweeper.look()
        counts.append(len(bay.acts()))
    assert counts == [2, 4, 5, 5]


async def test_a_cancel_that_comes_too_late_is_no_failure(bay: Bay) -> None:
    """409: it has ended meanwhile and is collected by the next pass."""
    bay.account.put(snapshot(ProviderStatus.FINALIZING))

    async def too_late(_provider_batch_id: str) -> CallFailed:
        bay.account.put(snapshot(ProviderStatus.COMPLETED, output_file_id=OUTPUT))
        return CallFailed("cancel", CallFailure.CONFLICT)

    bay.account.cancel = too_late  # type: ignore[method-assign]
    await bay.ask()
    await bay.sweeper.look()
    await bay.sweeper.look()
    assert bay.acts() == ["delete out"]
    assert [one["failed"] for one in bay.told("sweep_done")] == [0, 0, 0]


async def test_the_timetable_is_the_services_hour_but_no_less_than_a_real_minute(
    bay: Bay, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Nothing is swept when the partition comes; an hour later it is; a rehearsal's hours do not pile up."""
    await bay.sweeper.look()
    bay.harbour.clock.at += timedelta(hours=2)
    await bay.sweeper.look()
    assert bay.log == []  # no minute has passed
    monkeypatch.setattr(room, "MIN_PAUSE_S", 0.0)
    bay.harbour.tasks[0].lose("moved")
    await bay.harbour.task(0)
    await bay.sweeper.look()
    bay.harbour.clock.at += timedelta(seconds=3_599)
    await bay.sweeper.look()
    assert bay.log == []
    bay.harbour.clock.at += timedelta(seconds=2)
    await bay.sweeper.look()
    await bay.sweeper.look()
    assert [one["reason"] for one in bay.told("sweep_done")] == ["interval"]


async def test_a_wish_is_answered_once_each_time_its_instant_moves(bay: Bay) -> None:
    """It is a state: read again it asks for nothing; one of another account asks nothing of ours."""
    await bay.ask(ACCOUNT)
    await bay.sweeper.look()
    assert len(bay.told("sweep_done")) == 1
    await bay.ask("another")
    assert len(bay.told("sweep_done")) == 1
    await bay.ask(ACCOUNT)
    await bay.ask()
    assert len(bay.told("sweep_done")) == 3


async def test_run_waits_for_the_fleet_view_and_ends_with_its_task(
    bay: Bay, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Before all ledgers have been read once nothing is looked at."""
    ready, looked = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(room, "LOOK_S", 0.0)

    async def look() -> None:
        assert ready.is_set()
        looked.set()

    bay.fleet.ready = ready.wait  # type: ignore[assignment, method-assign]
    monkeypatch.setattr(bay.sweeper, "look", look)
    task = asyncio.create_task(bay.sweeper.run())
    await asyncio.sleep(0)
    assert not looked.is_set()
    ready.set()
    async with asyncio.timeout(5):
        await looked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_nothing_is_judged_whose_stub_may_be_gone() -> None:
    """The horizon of the sweep is the age at which the partitions drop the stubs of their clean lots."""
    assert HORIZON_S == ORPHAN_HORIZON_S


async def test_lists_are_read_back_to_the_horizon_and_no_further() -> None:
    """Page after page until one lies wholly beyond it; a cursor that stands still ends it too; bounded at any rate."""
    old = NOW - timedelta(seconds=HORIZON_S + 60)
    asked: list[str | None] = []
    pages = {
        None: [SEALED, old],
        "1": [None, old],
        "2": [old, old],
        "3": [SEALED],
    }

    async def list_batches(cursor: str | None = None) -> BatchPage:
        asked.append(cursor)
        shown = [
            snapshot(ProviderStatus.COMPLETED, f"{cursor}-{number}", created_at=at)
            for number, at in enumerate(pages[cursor])
        ]
        return BatchPage(tuple(shown), str(len(asked)))

    async def list_files(role: FileRole, cursor: str | None = None) -> FilePage:
        asked.append(f"{role} {cursor}")
        if role is FileRole.OUTPUT:
            return FilePage((), str(len(asked)))
        return FilePage((ListedFile(INPUT),), "same")

    provider: Any = SimpleNamespace(list_batches=list_batches, list_files=list_files)
    listing, failures = await read_listing(ACCOUNT, provider, NOW, keeps_files=False)
    assert asked[:3] == [None, "1", "2"]
    assert asked[3:5] == ["input None", "input same"]
    assert len(asked) == 5 + room.MAX_LIST_PAGES
    assert failures == []
    assert len(listing.batches) == 6
    assert [len(listing.input_files or ()), len(listing.output_files or ())] == [1, 0]
