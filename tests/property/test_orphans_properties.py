"""Whatever an account shows and whatever our ledgers say: only what is surely ours and given up is touched."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.ids import BatchId, FileId, LedgerId, LotId, ProviderBatchId, batch_file_name, new_batch_id
from batchferry.domain.ledger import Lane, LedgerHeader, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.orphans import Act, Knowledge, Listing, due, judge, remember
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.provider import BatchSnapshot, ListedFile, ProviderStatus, RequestCounts

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
KEY = BatchKey("default", "/v1/chat/completions", "gpt-4o-mini", "24h")
OURS = [LedgerId("0123456789"), LedgerId("abcdefghjk")]
THEIRS = [LedgerId("zzzzzzzzzz"), LedgerId("yyyyyyyyyy")]
BATCHES = [BatchId(new_batch_id((NOW - timedelta(hours=hours)).timestamp())) for hours in (1, 5, 24 * 6, 24 * 9)]

file_ids = st.sampled_from([FileId(f"file-{number}") for number in range(6)])
provider_ids = st.sampled_from([ProviderBatchId(f"pb-{number}") for number in range(5)])
batch_ids = st.sampled_from(BATCHES)
marks = st.sampled_from([*OURS, *THEIRS])
texts = st.sampled_from(["", "7", "batch", *BATCHES, *OURS, *THEIRS])
names = st.one_of(
    st.builds(batch_file_name, marks, batch_ids), st.sampled_from(["", "data.jsonl", f"x-{BATCHES[0]}.jsonl"])
)
times = st.none() | st.integers(0, 10 * 24).map(lambda hours: NOW - timedelta(hours=hours))
listed_files = st.lists(
    st.builds(ListedFile, file_ids, names, st.just("batch"), st.just(1), times), unique_by=lambda one: one.file_id
)
snapshots = st.lists(
    st.builds(
        BatchSnapshot,
        provider_ids,
        st.sampled_from(list(ProviderStatus)),
        st.just("status"),
        st.none() | file_ids,
        st.none() | file_ids,
        st.none() | file_ids,
        st.just(RequestCounts(3, 2, 1)),
        created_at=times,
        metadata=st.dictionaries(st.sampled_from(["batch_id", "ledger_id", "note"]), texts),
    ),
    unique_by=lambda one: one.provider_batch_id,
)
lots = st.lists(
    st.builds(
        lambda batch_id, state, ids, file_id: Lot(
            LotId(batch_id), Lane.BATCH, state, KEY, OffsetSet([1]), 1, (0,), NOW, input_file_id=file_id,
            provider_batch_ids=tuple(ids),
        ),
        batch_ids,
        st.sampled_from(list(LotState)),
        st.lists(provider_ids, max_size=2, unique=True),
        st.none() | file_ids,
    ),
    max_size=4,
    unique_by=lambda one: one.lot_id,
)  # fmt: skip


def speaks_of_ours(batch: BatchSnapshot, files: dict[FileId, str], known: set[str]) -> bool:
    """Whether at least one mark names a ledger or a lot of ours, and none names another's ledger."""
    name = files.get(batch.input_file_id, "") if batch.input_file_id is not None else ""
    ledger_marks = {batch.metadata.get("ledger_id"), *(one for one in [*OURS, *THEIRS] if name.startswith(one))}
    tied = bool(ledger_marks & set(OURS)) or batch.metadata.get("batch_id") in known
    return tied and ledger_marks <= {*OURS, None}


@settings(deadline=None, max_examples=200)
@given(snapshots, listed_files, listed_files, lots, st.booleans())
def test_nothing_is_touched_that_is_not_ours(
    batches: list[BatchSnapshot],
    inputs: list[ListedFile],
    outputs: list[ListedFile],
    recorded: list[Lot],
    keeps_files: bool,
) -> None:
    """A batch acted upon names a ledger of ours and no other, no lot records it, and no lot of it is unresolved; a
    file deleted belongs to such a batch or bears our name, and nobody else has it.
    """
    ledger = PartitionLedger(0)
    for ledger_id in OURS:
        ledger.apply(LedgerHeader(ledger_id))  # the last one stays
    other = PartitionLedger(1)
    other.apply(LedgerHeader(OURS[0]))
    for lot in recorded:
        ledger.apply(lot)
    listing = Listing("default", batches, inputs, outputs, keeps_files)
    found = judge(listing, Knowledge.of([ledger, other]), NOW)
    input_names = {one.file_id: one.name for one in inputs}
    by_id = {batch.provider_batch_id: batch for batch in batches}
    suspects = {one.provider_batch_id for one in found if one.provider_batch_id and one.act is not Act.NONE}
    for one in found:
        if one.act is Act.NONE:
            continue
        if one.provider_batch_id is not None:
            assert speaks_of_ours(by_id[one.provider_batch_id], input_names, {lot.lot_id for lot in recorded})
            assert all(one.provider_batch_id not in lot.provider_batch_ids[:1] for lot in recorded)
            assert all(
                lot.state not in {LotState.SUBMITTING, LotState.WAITING}
                for lot in recorded
                if lot.lot_id == one.batch_id
            )
            assert one.batch_id != BATCHES[-1]
        deleted = {*one.files, *([one.file_id] if one.file_id is not None else [])}
        assert not (deleted and keeps_files)
        assert deleted.isdisjoint(lot.input_file_id for lot in recorded)
        for batch in batches:
            if not speaks_of_ours(batch, input_names, {lot.lot_id for lot in recorded}):
                assert deleted.isdisjoint({batch.input_file_id, batch.output_file_id, batch.error_file_id})
        if one.file_id is not None:
            assert input_names[one.file_id].startswith(tuple(OURS))
    assert due(found, {}, 0.0, 0.0) == []
    seen = remember(found, {}, 0.0)
    assert {one.provider_batch_id for one in due(found, seen, 5.0, 5.0) if one.provider_batch_id} <= suspects
    assert due(found, seen, 4.9, 5.0) == []
