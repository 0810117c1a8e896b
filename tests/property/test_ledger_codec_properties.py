"""Every ledger entry survives being written and read, and no damage gets past the reader as anything but ValueError."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.ids import FileId, LedgerId, LotId, ProviderBatchId
from batchferry.domain.ledger import (
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
    Witness,
    decode,
    encode,
)
from batchferry.domain.offsets import BLOCK_SIZE, OffsetSet
from batchferry.domain.provider import Usage

QUICK = settings(max_examples=60, deadline=None)

LOT_MEMBERS = set(orjson.loads(encode(
    Lot(
        LotId("x"), Lane.BATCH, LotState.DONE, BatchKey("a", "b", "c", "d"), OffsetSet([1]), 1, (0,),
        datetime(2026, 1, 1, tzinfo=UTC), seal_reason="time", attempts={"missing": {1: OffsetSet([1])}}, due={1: 1},
        input_file_id=FileId("f"), provider_batch_ids=(ProviderBatchId("p"),),
        submitted_at=datetime(2026, 1, 1, tzinfo=UTC), submit_ttl_s=1.0, not_before=datetime(2026, 1, 1, tzinfo=UTC),
        tally=LotTally(),
    )
)[1] or b""))  # fmt: skip
ALL_MEMBERS = LOT_MEMBERS | {"ledger_id", "min_reader", "created_at", "incarnation", "app_version", "at", "wm"}
TALLY_MEMBERS = {
    "classes", "input_tokens", "output_tokens", "cached_tokens", "cost_microdollars", "sync_cost_microdollars",
}  # fmt: skip

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
offsets = st.one_of(st.integers(0, 200), st.integers(65_500, 65_600), st.integers(0, (1 << 63) - 1))
offset_sets = st.sets(offsets, max_size=25).map(OffsetSet)
counts = st.integers(0, 1 << 53)
instants = st.integers(0, 4_000_000_000_000).map(
    lambda milliseconds: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


def extras(known: set[str]) -> st.SearchStrategy[dict[str, object]]:
    """Members of a version to come."""
    return st.dictionaries(text.filter(lambda name: name not in known and name != "v"), json_values, max_size=3)


tallies = st.builds(
    LotTally,
    st.dictionaries(st.sampled_from(["succeeded", "transient", "missing"]), counts),
    st.builds(Usage, counts, counts, counts),
    st.none() | counts,
    st.none() | counts,
    extras(TALLY_MEMBERS),
)
lots = st.builds(
    Lot,
    lot_id=st.text("0123456789ABCDEFGHJKMNPQRSTVWXYZ", min_size=26, max_size=26).map(LotId),
    lane=st.sampled_from(Lane),
    state=st.sampled_from(LotState),
    key=st.builds(BatchKey, text, text, text, text, text),
    offsets=offset_sets,
    submission=st.integers(1, 10**6),
    partitions=st.lists(st.integers(0, 1000), min_size=1, max_size=4).map(tuple),
    created_at=instants,
    rows=counts,
    tokens=counts,
    bytes=counts,
    own_rows=counts,
    own_tokens=counts,
    own_bytes=counts,
    line_base=counts,
    seal_reason=text,
    attempts=st.dictionaries(text, st.dictionaries(st.integers(0, 9), offset_sets, max_size=2), max_size=2),
    due=st.dictionaries(counts, counts, max_size=3),
    input_file_id=st.none() | text.map(FileId),
    provider_batch_ids=st.lists(text.map(ProviderBatchId), max_size=3).map(tuple),
    submitted_at=st.none() | instants,
    submit_ttl_s=st.floats(0, 1e6),
    not_before=st.none() | instants,
    tally=st.none() | tallies,
    extra=extras(ALL_MEMBERS),
)


@st.composite
def blocks(draw: st.DrawFn) -> SettledBlock:
    """A block with a handful of offsets, or nearly full."""
    block = draw(st.integers(0, (1 << 47) - 1))
    low = draw(st.sets(st.integers(0, BLOCK_SIZE - 1), max_size=20))
    offsets = OffsetSet(block * BLOCK_SIZE + one for one in low)
    if draw(st.integers(0, 9)) == 0:
        offsets |= OffsetSet.span(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE - draw(st.integers(1, 40)))
    return SettledBlock(block, offsets)


entries: st.SearchStrategy[LedgerEntry] = st.one_of(
    st.builds(LedgerHeader, text.map(LedgerId), st.integers(0, 99), st.none() | instants, extras(ALL_MEMBERS)),
    st.builds(Claim, text, text, instants, extras(ALL_MEMBERS)),
    st.builds(Watermark, st.integers(0, (1 << 63) - 1), instants, extras(ALL_MEMBERS)),
    st.builds(
        Witness,
        st.integers(0, (1 << 63) - 1),
        st.integers(-1, 1 << 45),
        st.integers(0, 1 << 30),
        st.integers(0, (1 << 32) - 1),
        extras(ALL_MEMBERS),
    ),
    st.builds(Tombstone, st.sampled_from([b"lot/x", b"settled/3", b"wm", b"newer/kind"])),
    blocks(),
    lots,
)


@settings(QUICK, max_examples=150)
@given(entries)
def test_what_is_written_is_read(entry: LedgerEntry):
    """Every entry of every kind comes back equal, and is written the same way again."""
    key, value = encode(entry)
    read = decode(key, value)
    assert read == entry
    assert read is not None
    assert encode(read) == (key, value)


@QUICK
@given(lots, st.sampled_from(LotState))
def test_moving_a_lot_on_changes_its_state_and_nothing_else(lot: Lot, state: LotState):
    """A lot that was read and written with another state differs from the first record in its state only."""
    key, value = encode(lot)
    read = decode(key, value)
    assert isinstance(read, Lot)
    before, after = orjson.loads(value or b""), orjson.loads(encode(replace(read, state=state))[1] or b"")
    assert after.pop("state") == state.value
    del before["state"]
    assert after == before


@QUICK
@given(lots, st.sampled_from(sorted(LOT_MEMBERS - {"v"})), json_values)
def test_a_member_of_the_wrong_kind_is_a_value_error(lot: Lot, member: str, instead: object):
    """Whatever stands in a member of a lot, the record is read as a lot or refused with ValueError."""
    key, value = encode(lot)
    changed = {**orjson.loads(value or b""), member: instead}
    try:
        read = decode(key, orjson.dumps(changed))
    except ValueError:
        return
    assert isinstance(read, Lot)


@settings(QUICK, max_examples=150)
@given(entries, st.data())
def test_damaged_bytes_are_a_value_error(entry: LedgerEntry, data: st.DataObject):
    """A cut or changed record is refused with ValueError or read as an entry of the same kind, never worse."""
    key, value = encode(entry)
    if not value:
        return
    at = data.draw(st.integers(0, min(len(value) - 1, 60)))
    damaged = (
        value[:at] if data.draw(st.booleans()) else value[:at] + data.draw(st.binary(max_size=3)) + value[at + 1 :]
    )
    try:
        read = decode(key, damaged)
    except ValueError:
        return
    assert type(read) is type(entry)


@QUICK
@given(
    st.sampled_from([b"ledger", b"claim", b"wm", b"lot/x", b"settled/0"]),
    st.binary(max_size=40) | json_values.map(orjson.dumps),
)
def test_any_value_at_all_is_read_or_refused(key: bytes, value: bytes):
    """Bytes that no version ever wrote are refused with ValueError unless they happen to be a record."""
    try:
        decode(key, value)
    except ValueError:
        return
    assert key in {b"wm", b"settled/0"} or orjson.loads(value)


@QUICK
@given(st.binary(max_size=20), st.binary(max_size=20))
def test_unknown_kinds_are_ignored(kind: bytes, value: bytes):
    """A key of a kind that a newer version invented is ignored, not refused."""
    assert decode(b"x/" + kind, value) is None


@QUICK
@given(st.integers(0, 5).map(lambda number: f"lot/{number}".encode()) | st.binary(max_size=8))
def test_a_null_value_is_always_a_tombstone(key: bytes):
    """A record without a value ends the fact under its key, also for a kind nobody knows."""
    assert decode(key, None) == Tombstone(key)


def test_a_block_keeps_to_its_own_offsets():
    """A block record whose bitmap reaches beyond the block is damage, not a smaller block."""
    key, value = encode(SettledBlock(0, OffsetSet([BLOCK_SIZE])))
    with pytest.raises(ValueError, match="cannot be read"):
        decode(key, value)
