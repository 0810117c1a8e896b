"""The books of one partition: who holds a row, what a transaction writes, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import InvariantBroken, LedgerTooNew
from batchferry.domain.ids import FileId, LedgerId, LotId, ProviderBatchId
from batchferry.domain.ledger import (
    FORMAT,
    UNCERTAIN,
    Claim,
    Lane,
    LedgerEntry,
    LedgerHeader,
    Lot,
    LotState,
    LotTally,
    SettledBlock,
    Tombstone,
    Watermark,
    decode,
    encode,
    lot_key,
)
from batchferry.domain.offsets import BLOCK_SIZE, OffsetSet
from batchferry.domain.partition import MAX_GONE, PartitionLedger, first_absent

AT = datetime(2026, 1, 31, 18, 0, tzinfo=UTC)
KEY = BatchKey("openai-main", "/v1/chat/completions", "gpt-4o-mini", "24h")
A, B, C, W = LotId("A"), LotId("B"), LotId("C"), LotId("W")


def lot(
    lot_id: LotId,
    rows: Iterable[int],
    submission: int = 1,
    state: LotState = LotState.SUBMITTING,
    lane: Lane = Lane.BATCH,
) -> Lot:
    """A lot that names these rows."""
    return Lot(lot_id, lane, state, KEY, OffsetSet(rows), submission, (0,), AT)


def waiting(lot_id: LotId, rows: Iterable[int], submission: int = 2) -> Lot:
    """A WAITING lot that names these rows."""
    return lot(lot_id, rows, submission, LotState.WAITING)


def ledger_with(*entries: LedgerEntry) -> PartitionLedger:
    """A ledger that was told these facts."""
    made = PartitionLedger(0)
    commit(made, entries)
    return made


def commit(ledger: PartitionLedger, plan: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Apply a plan, as after its transaction."""
    entries = list(plan)
    for entry in entries:
        ledger.apply(entry)
    return entries


def settle(ledger: PartitionLedger, rows: Iterable[int], **more: object) -> list[LedgerEntry]:
    """Plan and commit a settle transaction."""
    return commit(ledger, ledger.plan_settle(OffsetSet(rows), AT, **more))


# -- who holds a row


def test_the_lot_with_the_highest_submission_holds_the_row():
    """Of several lots that name a row, only the one with the highest submission holds it, in whatever order they came."""
    first, second, third = lot(A, [1, 2, 3]), lot(B, [2, 3], 2), waiting(W, [3], 3)
    for order in ([first, second, third], [third, second, first], [second, third, first]):
        ledger = ledger_with(*order)
        assert [ledger.holder_of(offset) for offset in (1, 2, 3)] == [first, second, third]
        assert [list(ledger.held_by(lot_id)) for lot_id in (A, B, W)] == [[1], [2], [3]]
        assert ledger.next_submission(OffsetSet([3])) == 4
        assert ledger.next_submission(OffsetSet([1])) == 2
        assert ledger.next_submission(OffsetSet([9])) == 1


def test_a_settled_row_has_no_holder():
    """A row that has had its outcome is held by nobody, whoever still names it."""
    ledger = ledger_with(lot(A, [1, 2]), lot(B, [2], 2))
    settle(ledger, [2])
    assert ledger.holder_of(2) is None
    assert list(ledger.held()) == [1]
    assert ledger.is_settled(2)


def test_a_row_nobody_names_is_open():
    """Reading starts at the first row that is neither settled nor named, not at the watermark."""
    ledger = ledger_with(lot(A, [0, 1]), SettledBlock(0, OffsetSet([2])), lot(B, [4]))
    assert ledger.watermark == 0
    assert ledger.first_open() == 3
    assert ledger.holder_of(3) is None


def test_the_end_of_the_holder_gives_the_row_back():
    """When the lot with the highest submission ends, the next lower one holds its unsettled rows again."""
    ledger = ledger_with(lot(A, [1, 2]), lot(B, [2], 2), Tombstone(lot_key(B)))
    assert ledger.holder_of(2) == ledger.lots[A]
    assert list(ledger.held_by(B)) == []


# -- settling


def test_one_transaction_writes_the_blocks_it_touched_and_the_watermark():
    """Blocks that the chunk did not touch are not written; the watermark always is, last."""
    ledger = PartitionLedger(0)
    settle(ledger, [5, BLOCK_SIZE + 5])
    plan = settle(ledger, [BLOCK_SIZE + 6])
    assert plan == [SettledBlock(1, OffsetSet([BLOCK_SIZE + 5, BLOCK_SIZE + 6])), Watermark(0, AT)]


def test_a_chunk_over_many_blocks_touches_all_of_them():
    """A run across several blocks writes each of them, also those it covers whole."""
    ledger = PartitionLedger(0)
    plan = settle(ledger, range(10, 3 * BLOCK_SIZE))
    assert [entry.block for entry in plan if isinstance(entry, SettledBlock)] == [0, 1, 2]
    assert ledger.watermark == 0
    plan = settle(ledger, range(10))
    assert plan == [*(Tombstone(f"settled/{block}".encode()) for block in range(3)), Watermark(3 * BLOCK_SIZE, AT)]
    assert not ledger.settled


def test_the_watermark_moves_over_gaps_that_are_settled_with_the_rows():
    """Offsets the log never delivers enter the same sets, and the watermark passes them like rows."""
    ledger = PartitionLedger(0)
    settle(ledger, [0, 1, 3])
    assert ledger.watermark == 2
    settle(ledger, [2])
    assert ledger.watermark == 4


def test_a_half_passed_block_is_not_written_again_for_the_watermark():
    """What the watermark says need not be said by the block as well."""
    ledger = PartitionLedger(0)
    settle(ledger, [1, 7])
    assert settle(ledger, [0]) == [SettledBlock(0, OffsetSet([7])), Watermark(2, AT)]


def test_a_row_is_never_settled_twice():
    """A second outcome for a row is refused, below the watermark and above it."""
    ledger = PartitionLedger(0)
    settle(ledger, [0, 5])
    for offset in (0, 5):
        with pytest.raises(InvariantBroken, match="settled twice"):
            ledger.plan_settle(OffsetSet([offset, 9]), AT)


def test_a_lot_that_was_read_to_the_end_is_done_with_its_last_row():
    """DONE comes in the transaction after which the lot holds no unsettled row, and carries the tally."""
    ledger = ledger_with(lot(A, [0, 1, 2], state=LotState.SUBMITTED))
    tally = LotTally({"succeeded": 2, "transient": 1})
    settle(ledger, [0], finished={A: tally})
    assert ledger.lots[A].state is LotState.SUBMITTED
    settle(ledger, [1], finished={A: tally}, waiting=[waiting(W, [2])])
    assert ledger.lots[A].state is LotState.DONE
    assert ledger.lots[A].tally == tally
    assert ledger.holder_of(2) == ledger.lots[W]


def test_a_lot_whose_files_were_not_read_is_not_done():
    """Emptied by somebody else's successes, a lot still waits for its own files to be read."""
    ledger = ledger_with(lot(A, [0], state=LotState.SUBMITTED))
    settle(ledger, [0])
    assert ledger.lots[A].state is LotState.SUBMITTED
    assert not ledger.held_by(A)
    settle(ledger, [], finished={A: LotTally()})
    assert ledger.lots[A].state is LotState.DONE


def test_emptied_waiting_lots_and_waves_end_at_once():
    """A late success empties a waiting lot, and a wave needs no files: both are tombstoned in that transaction."""
    ledger = ledger_with(
        lot(A, [0, 1], state=LotState.SUBMITTED),
        waiting(W, [1]),
        lot(B, [2], lane=Lane.SYNC),
        lot(C, [9], lane=Lane.SYNC),
    )
    plan = settle(ledger, [1, 2])
    assert {entry.key for entry in plan if isinstance(entry, Tombstone)} == {lot_key(W), lot_key(B)}
    assert set(ledger.lots) == {A, C}


# -- submitting


def test_waiting_lots_end_when_a_batch_has_taken_all_their_rows():
    """Taken in part, a waiting lot stays and holds the rest; taken whole, it ends in the same transaction."""
    ledger = ledger_with(lot(A, [0, 1, 2], state=LotState.DONE), waiting(W, [1, 2]))
    commit(ledger, ledger.plan_submitting(lot(B, [1, 5], 3)))
    assert list(ledger.held_by(W)) == [2]
    plan = commit(ledger, ledger.plan_submitting(lot(C, [2], 3)))
    assert Tombstone(lot_key(W)) in plan
    assert W not in ledger.lots
    assert ledger.holder_of(1) == ledger.lots[B]
    assert ledger.holder_of(2) == ledger.lots[C]


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (lot(C, [0, 9], 9), "settled"),
        (lot(C, [4, 9], 9), "settled"),
        (lot(C, [5, 9], 9), "at a provider"),
        (lot(C, [6, 9], 9), "at a provider"),
        (lot(C, [7, 9], 2), "later submission"),
        (lot(C, [7, 9], 1), "later submission"),
        (lot(A, [5], 9), "cannot be submitted"),
        (lot(A, [5, 9], 1), "cannot be submitted"),
        (lot(B, [6], 1), "cannot be submitted"),
        (lot(LotId("D"), [3], 1), "cannot be submitted"),
    ],
)
def test_what_may_not_be_submitted(wanted: Lot, why: str):
    """Settled rows, rows at a provider, a used submission, another content under a known id: all refused."""
    ledger = ledger_with(
        lot(A, [5]),
        lot(B, [6], state=LotState.SUBMITTED),
        waiting(W, [7]),
        lot(LotId("D"), [3], state=LotState.DONE),
        SettledBlock(0, OffsetSet([3, 4])),
        Watermark(1, AT),
    )
    with pytest.raises(InvariantBroken, match=why):
        ledger.plan_submitting(wanted)


def test_submitting_is_written_again_although_a_late_success_has_come():
    """SUBMITTING is a state: it is written again before another create, even if one of its rows was settled since."""
    ledger = ledger_with(lot(A, [0, 1], state=LotState.SUBMITTED), waiting(W, [1]))
    again = lot(B, [1, 2], 3)
    commit(ledger, ledger.plan_submitting(again))
    settle(ledger, [1])
    assert commit(ledger, ledger.plan_submitting(again)) == [again]
    assert list(ledger.held_by(B)) == [2]


def test_the_providers_ids_are_recorded_once_or_twice():
    """SUBMITTED twice is SUBMITTED once; news that comes after DONE or CLEAN writes nothing."""
    ledger = ledger_with(lot(A, [0]))
    ids = (ProviderBatchId("batch_1"),)
    for _ in range(2):
        commit(ledger, ledger.plan_submitted(A, provider_batch_ids=ids, submitted_at=AT))
        assert ledger.lots[A].state is LotState.SUBMITTED
        assert ledger.lots[A].provider_batch_ids == ids
    settle(ledger, [0], finished={A: LotTally()})
    assert ledger.plan_submitted(A, provider_batch_ids=ids) == []
    commit(ledger, ledger.plan_clean(A))
    assert ledger.plan_submitted(A, provider_batch_ids=ids) == []


def test_a_waiting_lot_cannot_be_submitted_by_its_id_alone():
    """No provider batch belongs to a lot that never was SUBMITTING, nor to a lot nobody knows."""
    ledger = ledger_with(waiting(W, [1]))
    for lot_id in (W, LotId("unknown")):
        with pytest.raises(InvariantBroken):
            ledger.plan_submitted(lot_id)


# -- handing on


def test_a_dissolved_lot_hands_all_its_unsettled_rows_on():
    """After dissolving, every row the lot held waits under a higher submission, and the lot is gone."""
    ledger = ledger_with(lot(A, [0, 1, 2]))
    settle(ledger, [1])
    plan = commit(ledger, ledger.plan_dissolve(A, [waiting(W, [0]), waiting(B, [2])]))
    assert plan[-1] == Tombstone(lot_key(A))
    assert [ledger.holder_of(offset) for offset in (0, 2)] == [ledger.lots[W], ledger.lots[B]]


def test_a_disowned_lot_is_as_it_was_before_its_batch_was_known():
    """No id, no instant, and nothing that says how it was found; only a lot that names a batch has one to forget."""
    named = replace(
        lot(A, [0, 1], state=LotState.SUBMITTED), provider_batch_ids=(ProviderBatchId("b"),), submitted_at=AT,
        input_file_id=FileId("f"), extra={UNCERTAIN: True, "other": 1},
    )  # fmt: skip
    ledger, batch = ledger_with(named), ProviderBatchId("b")
    assert ledger.plan_disown(A, ProviderBatchId("another"), is_gone=False) == []
    commit(ledger, ledger.plan_disown(A, batch, is_gone=False))
    expected = replace(
        named, state=LotState.SUBMITTING, provider_batch_ids=(), submitted_at=None, extra={"other": 1}
    )  # fmt: skip
    assert ledger.lots[A] == expected
    assert ledger.plan_disown(A, batch, is_gone=False) == []
    assert ledger.plan_disown(LotId("unknown"), batch, is_gone=False) == []
    landed = replace(lot(A, [], state=LotState.DONE), provider_batch_ids=(batch,))
    assert ledger_with(landed).plan_disown(A, batch, is_gone=False) == []


def test_a_lot_remembers_the_last_of_the_batches_it_has_lost():
    """Whoever takes it over must know that its rows may have run; also as it is read back, and never without a bound."""
    ledger = ledger_with(lot(A, [0]))
    for number in range(MAX_GONE + 2):
        named = ProviderBatchId(f"b-{number}")
        commit(ledger, [replace(ledger.lots[A], state=LotState.SUBMITTED, provider_batch_ids=(named,))])
        commit(ledger, ledger.plan_disown(A, named, is_gone=True))
    expected = tuple(ProviderBatchId(f"b-{number}") for number in range(2, MAX_GONE + 2))
    assert ledger.lots[A].gone == expected
    read = decode(*encode(ledger.lots[A]))
    assert isinstance(read, Lot)
    assert read.gone == expected


def test_a_lot_without_rows_dissolves_into_nothing():
    """A lot whose rows were all settled meanwhile needs no heirs."""
    ledger = ledger_with(lot(A, [0]))
    settle(ledger, [0])
    commit(ledger, ledger.plan_dissolve(A, []))
    assert not ledger.lots


@pytest.mark.parametrize(
    "heirs",
    [
        [],
        [waiting(W, [0])],
        [waiting(W, [0, 1, 2])],
        [waiting(W, [0, 1]), waiting(B, [1])],
        [waiting(W, [0]), waiting(W, [1])],  # the second record would replace the first
        [waiting(A, [0, 1])],  # the tombstone of A would end its own heir
        [lot(W, [0, 1], 2)],
        [waiting(W, [0, 1], 1)],
    ],
)
def test_heirs_must_name_exactly_the_rows(heirs: list[Lot]):
    """Rows left out, added, named twice, under a known id or a used submission: no heir, no dissolving."""
    ledger = ledger_with(lot(A, [0, 1]))
    with pytest.raises(InvariantBroken):
        ledger.plan_dissolve(A, heirs)
    assert list(ledger.held_by(A)) == [0, 1]


@pytest.mark.parametrize("state", [LotState.DONE, LotState.CLEAN])
def test_a_landed_lot_is_not_dissolved(state: LotState):
    """A lot that has landed keeps its record: its files are still to be cleaned up."""
    ledger = ledger_with(lot(A, [], state=state))
    with pytest.raises(InvariantBroken, match="landed"):
        ledger.plan_dissolve(A, [])
    with pytest.raises(InvariantBroken, match="knows no lot"):
        ledger.plan_dissolve(LotId("unknown"), [])


@pytest.mark.parametrize(
    "heirs",
    [
        [waiting(W, [1])],  # settled in this very transaction
        [waiting(W, [0])],  # settled long ago
        [waiting(W, [2]), waiting(B, [2])],
        [waiting(W, [2]), waiting(W, [3])],
        [waiting(A, [2])],
        [waiting(W, [2], 1)],
        [lot(W, [2], 2)],
    ],
)
def test_rows_that_go_again_need_fit_heirs_too(heirs: list[Lot]):
    """A settle transaction hands no settled row on, no row twice, and none under a known id or used submission."""
    ledger = ledger_with(lot(A, [0, 1, 2, 3], state=LotState.SUBMITTED))
    settle(ledger, [0])
    with pytest.raises(InvariantBroken):
        ledger.plan_settle(OffsetSet([1]), AT, heirs)


def test_a_waiting_lot_that_loses_all_rows_to_another_ends():
    """Rows may move from one waiting lot to another; the emptied one is tombstoned, the new one is not."""
    ledger = ledger_with(waiting(W, [1, 2]))
    plan = settle(ledger, [], waiting=[waiting(B, [1, 2], 3)])
    assert Tombstone(lot_key(W)) in plan
    assert set(ledger.lots) == {B}


# -- cleaning up


def test_a_clean_lot_is_a_stub():
    """CLEAN keeps ids and times and drops offsets, attempts and due counts; twice is once."""
    ledger = ledger_with(lot(A, [0, 1], state=LotState.SUBMITTED))
    settle(ledger, [0, 1], finished={A: LotTally({"succeeded": 2})})
    for _ in range(2):
        commit(ledger, ledger.plan_clean(A))
        stub = ledger.lots[A]
        assert (stub.state, len(stub.offsets), stub.created_at) == (LotState.CLEAN, 0, AT)
        assert stub.tally == LotTally({"succeeded": 2})


@pytest.mark.parametrize("state", [LotState.WAITING, LotState.SUBMITTING, LotState.SUBMITTED])
def test_only_a_landed_lot_is_cleaned(state: LotState):
    """Cleaning a lot that still holds rows would open them again, so that they were paid twice: refused."""
    ledger = ledger_with(lot(A, [0], state=state))
    with pytest.raises(InvariantBroken, match="cannot be cleaned"):
        ledger.plan_clean(A)
    with pytest.raises(InvariantBroken, match="knows no lot"):
        ledger.plan_clean(LotId("unknown"))


# -- reading the ledger


def test_a_ledger_for_newer_readers_is_refused():
    """A header that demands a newer reader stops the restore before anything is believed."""
    ledger = PartitionLedger(4)
    with pytest.raises(LedgerTooNew, match="partition 4 needs reader version 2, this is 1"):
        ledger.replay(*encode(LedgerHeader(LedgerId("0123456789"), FORMAT + 1)))
    assert ledger.header is None


def test_header_claim_and_watermark_are_remembered():
    """The newest header and claim are the ones that count; a watermark says that the ledger is not new."""
    ledger = PartitionLedger(0)
    assert not ledger.has_watermark
    for entry in (
        LedgerHeader(LedgerId("0123456789"), 1, AT),
        Claim("one", "0.1.0", AT),
        Claim("two", "0.1.0", AT),
        Watermark(7, AT),
    ):
        ledger.replay(*encode(entry))
    assert ledger.header == LedgerHeader(LedgerId("0123456789"), 1, AT)
    assert ledger.claim == Claim("two", "0.1.0", AT)
    assert ledger.has_watermark
    assert ledger.first_open() == 7


def test_records_of_unknown_kinds_change_nothing():
    """A newer version's facts, and their ends, pass by."""
    ledger = ledger_with(lot(A, [1]))
    ledger.replay(b"fence/0", b"{}")
    ledger.replay(b"fence/0", None)
    ledger.replay(b"lot/never-seen", None)
    assert list(ledger.held()) == [1]


def test_a_damaged_record_stops_the_restore():
    """A record of a known kind that cannot be read is not skipped: a forgotten lot would be paid twice."""
    with pytest.raises(ValueError, match="cannot be read"):
        PartitionLedger(0).replay(b"lot/A", b"{}")


def test_every_record_twice_is_once():
    """Records are states: reading each of them twice in a row restores the same."""
    entries = [lot(A, [0, 1, 5]), waiting(W, [5]), SettledBlock(0, OffsetSet([1])), Watermark(1, AT)]
    once, twice = ledger_with(*entries), ledger_with(*(entry for entry in entries for _ in range(2)))
    assert (once.settled, once.watermark, once.lots) == (twice.settled, twice.watermark, twice.lots)
    assert [once.held_by(lot_id) for lot_id in (A, W)] == [twice.held_by(lot_id) for lot_id in (A, W)]


def test_live_lots_are_those_with_work_left():
    """DONE and CLEAN lots are not live."""
    ledger = ledger_with(*(replace(lot(LotId(state.value), [], state=state)) for state in LotState))
    assert [one.state for one in ledger.live_lots()] == [LotState.WAITING, LotState.SUBMITTING, LotState.SUBMITTED]


@pytest.mark.parametrize(
    ("offsets", "start", "expected"),
    [
        ([], 0, 0),
        ([], 9, 9),
        ([0, 1, 2], 0, 3),
        ([0, 1, 3], 0, 2),
        ([1, 2], 0, 0),
        ([1, 2], 5, 5),
        ([5, 6, 8], 5, 7),
        ([(1 << 40) - 1, 1 << 40], (1 << 40) - 1, (1 << 40) + 1),
    ],
)
def test_the_first_absent_offset(offsets: list[int], start: int, expected: int):
    """The first offset at or above the start that is not in the set."""
    assert first_absent(OffsetSet(offsets), start) == expected
