"""What is an orphan, what is done about it, and what is left alone: every row of the table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.ids import (
    BatchId,
    FileId,
    LedgerId,
    LotId,
    ProviderBatchId,
    batch_file_name,
    batch_id_time,
    new_batch_id,
    new_ledger_id,
    parse_batch_file_name,
    parse_batch_id,
)
from batchferry.domain.ledger import Lane, LedgerHeader, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.orphans import (
    FILE_AGE_S,
    HORIZON_S,
    HORIZON_SLACK_S,
    Act,
    Finding,
    Knowledge,
    Listing,
    Why,
    due,
    judge,
    remember,
)
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.provider import BatchSnapshot, ListedFile, ProviderStatus, RequestCounts

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
SEALED = NOW - timedelta(hours=5)
OURS = LedgerId("0123456789")
THEIRS = LedgerId("zyxwvtsrqp")
BATCH = new_batch_id(SEALED.timestamp())
OTHER = new_batch_id(SEALED.timestamp())
KEY = BatchKey("default", "/v1/chat/completions", "gpt-4o-mini", "24h")
INPUT, OUTPUT, ERROR = FileId("in"), FileId("out"), FileId("err")
METADATA = {"batch_id": BATCH, "ledger_id": OURS}


def lot(state: LotState, batch_id: BatchId = BATCH, **changes: Any) -> Lot:
    """A lot of the batch."""
    fields: dict[str, Any] = {
        "lot_id": LotId(batch_id), "lane": Lane.BATCH, "state": state, "key": KEY, "offsets": OffsetSet([1, 2]),
        "submission": 1, "partitions": (0,), "created_at": SEALED, "rows": 2, "own_rows": 2,
    }  # fmt: skip
    return Lot(**{**fields, **changes})


def known(*lots: Lot) -> Knowledge:
    """What a ledger of ours with these lots says, beside one without any."""
    ledgers = [PartitionLedger(0), PartitionLedger(1)]
    ledgers[0].apply(LedgerHeader(OURS))
    ledgers[1].apply(LedgerHeader(LedgerId("abcdefghjk")))
    for one in lots:
        ledgers[0].apply(one)
    return Knowledge.of(ledgers)


def shown(status: ProviderStatus = ProviderStatus.IN_PROGRESS, **changes: Any) -> BatchSnapshot:
    """A listed batch."""
    fields: dict[str, Any] = {
        "provider_batch_id": ProviderBatchId("pb"), "status": status, "raw_status": status.value,
        "input_file_id": INPUT, "created_at": SEALED, "metadata": METADATA,
    }  # fmt: skip
    return BatchSnapshot(**{**fields, **changes})


def file(file_id: str = INPUT, name: str = batch_file_name(OURS, BATCH), age_s: float = 3 * 3600.0) -> ListedFile:
    """A listed file."""
    return ListedFile(FileId(file_id), name, "batch", 100, NOW - timedelta(seconds=age_s))


def findings(
    batches: Sequence[BatchSnapshot] = (),
    inputs: Sequence[ListedFile] | None = (),
    outputs: Sequence[ListedFile] | None = (),
    lots: Sequence[Lot] = (),
    **listing: Any,
) -> list[Finding]:
    """The verdicts on one account."""
    return judge(Listing("default", batches, inputs, outputs, **listing), known(*lots), NOW)


def verdict(*arguments: Any, **named: Any) -> tuple[Why, Act]:
    """The only verdict."""
    (one,) = findings(*arguments, **named)
    return one.why, one.act


@pytest.mark.parametrize(
    ("batch", "files", "why"),
    [
        (shown(metadata={}), [], Why.FOREIGN),
        (shown(metadata={}), [file(name="theirs.jsonl")], Why.FOREIGN),
        (shown(metadata={"batch_id": "7", "ledger_id": OURS}), [], Why.FOREIGN),
        (shown(metadata={"batch_id": BATCH}), [], Why.FOREIGN),
        (shown(metadata={"ledger_id": OURS}), [], Why.FOREIGN),
        (shown(metadata={"batch_id": BATCH, "ledger_id": THEIRS}), [], Why.OTHER_LEDGER),
        (shown(metadata={}), [file(name=batch_file_name(THEIRS, BATCH))], Why.OTHER_LEDGER),
        (shown(), [file(name=batch_file_name(THEIRS, BATCH))], Why.OTHER_LEDGER),
        (shown(metadata={**METADATA, "ledger_id": THEIRS}), [file()], Why.OTHER_LEDGER),
        (shown(metadata={"ledger_id": THEIRS}), [file()], Why.OTHER_LEDGER),
        (shown(), [file(name=batch_file_name(OURS, OTHER))], Why.CONTRADICTORY),
        (shown(metadata={"batch_id": "7", "ledger_id": OURS}), [file()], Why.CONTRADICTORY),
    ],
)
def test_a_batch_that_is_not_surely_ours_is_left_alone(
    batch: BatchSnapshot, files: list[ListedFile], why: Why
) -> None:  # fmt: skip
    """Nothing ties it to us, or something ties it to somebody else, or its marks disagree."""
    one = findings([batch], files)[0]
    assert (one.why, one.act) == (why, Act.NONE)


@pytest.mark.parametrize(
    ("lots", "why"),
    [
        ([lot(LotState.SUBMITTED, provider_batch_ids=(ProviderBatchId("pb"),))], Why.KNOWN),
        ([lot(LotState.CLEAN, provider_batch_ids=(ProviderBatchId("pb"),))], Why.KNOWN),
        ([lot(LotState.SUBMITTING)], Why.RESOLVING),
        ([lot(LotState.WAITING)], Why.RESOLVING),
        ([lot(LotState.DONE)], Why.UNRECORDED),
        ([lot(LotState.CLEAN)], Why.UNRECORDED),
    ],
)
@pytest.mark.parametrize("status", list(ProviderStatus))
def test_a_batch_that_a_lot_speaks_for_is_left_alone(lots: list[Lot], why: Why, status: ProviderStatus) -> None:
    """Recorded, being looked up by its owner, or landed without a word which one it was: nothing is done."""
    assert verdict([shown(status, output_file_id=OUTPUT)], (), [file(OUTPUT, "o")], lots) == (why, Act.NONE)


def test_a_batch_recorded_under_another_id_of_ours_is_known() -> None:
    """What a lot records is ours by right, whatever its metadata says."""
    recorded = lot(LotState.SUBMITTED, OTHER, provider_batch_ids=(ProviderBatchId("pb"),))
    assert verdict([shown()], lots=[recorded]) == (Why.KNOWN, Act.NONE)


@pytest.mark.parametrize(
    ("age_s", "why"),
    [(HORIZON_S - HORIZON_SLACK_S - 1, Why.ORPHAN), (HORIZON_S - HORIZON_SLACK_S + 1, Why.TOO_OLD)],
)
def test_what_is_older_than_the_ledgers_memory_is_left_alone(age_s: float, why: Why) -> None:
    """Stubs are dropped a week after the sealing: from then on no lot proves nothing."""
    batch_id = new_batch_id((NOW - timedelta(seconds=age_s)).timestamp())
    one = verdict([shown(metadata={"batch_id": batch_id, "ledger_id": OURS})])
    assert one == (why, Act.CANCEL if why is Why.ORPHAN else Act.NONE)
    stray = verdict((), [file(name=batch_file_name(OURS, batch_id))])
    assert stray == (why, Act.DELETE if why is Why.ORPHAN else Act.NONE)


def test_a_batch_id_beyond_the_calendar_is_left_alone() -> None:
    """Anybody can write any id into metadata."""
    far = BatchId("7" + "Z" * 25)
    assert verdict([shown(metadata={"batch_id": far, "ledger_id": OURS})]) == (Why.TOO_OLD, Act.NONE)


@pytest.mark.parametrize(
    ("status", "act"),
    [
        (ProviderStatus.VALIDATING, Act.CANCEL),
        (ProviderStatus.IN_PROGRESS, Act.CANCEL),
        (ProviderStatus.FINALIZING, Act.CANCEL),
        (ProviderStatus.UNKNOWN, Act.CANCEL),
        (ProviderStatus.CANCELLING, Act.WAIT),
        (ProviderStatus.COMPLETED, Act.COLLECT),
        (ProviderStatus.FAILED, Act.COLLECT),
        (ProviderStatus.EXPIRED, Act.COLLECT),
        (ProviderStatus.CANCELLED, Act.COLLECT),
    ],
)
def test_an_orphan_is_cancelled_and_then_collected(status: ProviderStatus, act: Act) -> None:
    """Known by its metadata, or by its file's name alone."""
    for metadata in (METADATA, {}):
        one = findings([shown(status, metadata=metadata)], [file()])
        assert [(each.why, each.act, each.batch_id) for each in one] == [(Why.ORPHAN, act, BATCH)]


def test_a_collected_orphan_loses_its_files_and_its_rows_are_counted() -> None:
    """Result files first; what is not listed any more is gone already, and then there is nothing to count either."""
    ended = shown(
        ProviderStatus.CANCELLED, output_file_id=OUTPUT, error_file_id=ERROR, counts=RequestCounts(10, 3, 1)
    )  # fmt: skip
    (one,) = findings([ended], [file()], [file(OUTPUT, "o"), file(ERROR, "e"), file("elsewhere", "x")])
    assert (one.files, one.waste_rows) == ((OUTPUT, ERROR, INPUT), 4)
    (one,) = findings([ended], [file()], [])
    assert (one.act, one.files, one.waste_rows) == (Act.COLLECT, (INPUT,), 0)
    assert verdict([ended]) == (Why.ORPHAN, Act.NONE)


@pytest.mark.parametrize(
    ("status", "counts", "rows"),
    [
        (ProviderStatus.COMPLETED, RequestCounts(10, 9, 1), 10),
        (ProviderStatus.COMPLETED, RequestCounts(10, 0, 0), 10),
        (ProviderStatus.EXPIRED, RequestCounts(10, 7, 0), 7),
        (ProviderStatus.FAILED, RequestCounts(10, 0, 0), 0),
        (ProviderStatus.COMPLETED, RequestCounts(), 2),
    ],
)
def test_the_rows_of_a_twin_that_ran_are_waste(status: ProviderStatus, counts: RequestCounts, rows: int) -> None:
    """As the provider counted them; one that does not count is taken to have run all that the lot names."""
    live = lot(LotState.SUBMITTED, provider_batch_ids=(ProviderBatchId("first"),), input_file_id=INPUT)
    twin = shown(status, output_file_id=OUTPUT, counts=counts)
    (one,) = findings([twin], [file()], [file(OUTPUT, "o")], [live])
    assert (one.why, one.act, one.waste_rows) == (Why.TWIN, Act.COLLECT, rows)
    assert one.files == (OUTPUT,)  # the input file is the live batch's too
    told = lot(LotState.SUBMITTED, provider_batch_ids=(ProviderBatchId("first"), ProviderBatchId("pb")))
    (one,) = findings([twin], [file()], [file(OUTPUT, "o")], [told])
    assert (one.why, one.act, one.waste_rows) == (Why.TWIN, Act.COLLECT, 0)  # whoever found it has counted it


def test_a_twin_of_a_live_batch_is_cancelled() -> None:
    """A lot records another batch of the provider for this batch id; with one part unresolved nothing is done."""
    first = lot(LotState.SUBMITTED, provider_batch_ids=(ProviderBatchId("first"),))
    assert verdict([shown()], lots=[first]) == (Why.TWIN, Act.CANCEL)
    knowledge = Knowledge([OURS], {BATCH: [first, lot(LotState.SUBMITTING)]}, {ProviderBatchId("first")}, (), ())
    (one,) = judge(Listing("default", [shown()]), knowledge, NOW)
    assert (one.why, one.act) == (Why.RESOLVING, Act.NONE)


def test_no_file_of_another_batch_is_deleted_with_an_orphan() -> None:
    """Whatever ids a provider shows: a file that a batch which is no orphan has is not an orphan's."""
    foreign = shown(
        ProviderStatus.COMPLETED, provider_batch_id=ProviderBatchId("f"), metadata={}, output_file_id=OUTPUT,
        input_file_id=None,
    )  # fmt: skip
    orphan = shown(ProviderStatus.COMPLETED, output_file_id=OUTPUT, error_file_id=ERROR)
    _, one = findings([foreign, orphan], [file()], [file(OUTPUT, "o"), file(ERROR, "e")])
    assert one.files == (ERROR, INPUT)
    (one,) = findings([orphan], [file(name="somebody's.jsonl")], [])
    assert one.act is Act.NONE  # its metadata are ours, its input file is not


def test_where_files_are_kept_or_cannot_be_listed_none_is_deleted() -> None:
    """An orphan is cancelled all the same."""
    ended = shown(ProviderStatus.COMPLETED, output_file_id=OUTPUT)
    for listing in ({"keeps_files": True}, {"inputs": None}, {"outputs": None}):
        arguments = {"inputs": [file()], "outputs": [file(OUTPUT, "o")], **listing}
        assert {one.act for one in findings([ended], **arguments)} == {Act.NONE}
        assert findings([shown()], **arguments)[0].act is Act.CANCEL
    assert verdict((), [file()], keeps_files=True) == (Why.ORPHAN, Act.NONE)


@pytest.mark.parametrize(
    ("listed", "lots", "why", "act"),
    [
        (file(), [], Why.ORPHAN, Act.DELETE),
        (file(age_s=FILE_AGE_S - 1), [], Why.TOO_YOUNG, Act.NONE),
        (ListedFile(INPUT, batch_file_name(OURS, BATCH)), [], Why.TOO_YOUNG, Act.NONE),
        (file(name=batch_file_name(THEIRS, BATCH)), [], Why.OTHER_LEDGER, Act.NONE),
        (file(), [lot(LotState.SUBMITTING, input_file_id=INPUT)], Why.KNOWN, Act.NONE),
        (file(), [lot(LotState.CLEAN, input_file_id=INPUT)], Why.KNOWN, Act.NONE),
        (file(), [lot(LotState.WAITING, OTHER, input_file_id=INPUT)], Why.KNOWN, Act.NONE),
        (file(), [lot(LotState.SUBMITTING)], Why.RESOLVING, Act.NONE),
        (file(), [lot(LotState.SUBMITTED, input_file_id=FileId("the-other"))], Why.TWIN, Act.DELETE),
    ],
)
def test_a_file_without_lot_and_batch_is_deleted(listed: ListedFile, lots: list[Lot], why: Why, act: Act) -> None:
    """Left by a process that died before it recorded anything, or by an upload whose answer was lost."""
    assert verdict((), [listed], (), lots) == (why, act)


def test_files_that_are_not_named_as_ours_are_not_even_told() -> None:
    """An account is full of other people's files."""
    names = ("data.jsonl", f"{OURS}.jsonl", f"{OURS}-{BATCH}.json", f"x{OURS}-{BATCH}.jsonl", f"{OURS}-{BATCH}.jsonl\n")
    assert findings((), [file(name=name) for name in names]) == []


def test_the_file_of_a_running_orphan_waits_for_its_end() -> None:
    """It goes with the batch."""
    assert verdict([shown()], [file()]) == (Why.ORPHAN, Act.CANCEL)
    running = shown(ProviderStatus.COMPLETED, metadata={"batch_id": OTHER, "ledger_id": THEIRS})
    assert [one.act for one in findings([running], [file()])] == [Act.NONE, Act.NONE]


def test_sync_waves_are_no_batches() -> None:
    """A wave's lot has nothing to do with a provider batch of that id."""
    assert known(lot(LotState.SUBMITTING, lane=Lane.SYNC)).lots == {}


def test_nothing_is_done_at_first_sight() -> None:
    """Only what an earlier pass, long enough ago, suspected too; who is no suspect in between begins anew."""
    suspect, waits, fine = (
        Finding("a", Why.ORPHAN, Act.CANCEL, provider_batch_id=ProviderBatchId("1")),
        Finding("a", Why.ORPHAN, Act.WAIT, provider_batch_id=ProviderBatchId("2")),
        Finding("a", Why.KNOWN, provider_batch_id=ProviderBatchId("3")),
    )
    found = [suspect, waits, fine]
    assert due(found, {}, 100.0, 10.0) == []
    seen = remember(found, {}, 100.0)
    assert seen == {"a/1": 100.0, "a/2": 100.0}
    assert due(found, seen, 109.0, 10.0) == []
    assert due(found, seen, 110.0, 10.0) == [suspect]
    assert remember(found, seen, 110.0) == seen
    assert remember([waits], seen, 110.0) == {"a/2": 100.0}


def test_batch_ids_and_file_names_are_read_back() -> None:
    """The time of a batch id is that of its sealing; a file's name tells ledger and batch."""
    assert abs((batch_id_time(BATCH) - SEALED).total_seconds()) < 0.001
    ledger_id = new_ledger_id()
    assert parse_batch_file_name(batch_file_name(ledger_id, BATCH)) == (ledger_id, BATCH)
    assert parse_batch_id(BATCH) == BATCH
    for text in ("", BATCH.lower(), BATCH + "0", "8" + BATCH[1:], "I" * 26):
        assert parse_batch_id(text) is None
