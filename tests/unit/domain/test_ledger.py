"""The ledger's record formats: golden bytes that every later version must still read, sizes, and damage."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest

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
    block_key,
    block_number_of,
    block_of,
    decode,
    encode,
    lot_id_of,
    lot_key,
)
from batchferry.domain.offsets import BLOCK_SIZE, OffsetSet
from batchferry.domain.provider import Usage

GOLDEN = Path(__file__).parent / "golden" / "ledger-format-1.json"
AT = datetime(2026, 1, 31, 18, 0, 0, 250_000, tzinfo=UTC)
KEY = BatchKey("openai-main", "/v1/chat/completions", "gpt-4o-mini", "24h")


def lot(**changes: object) -> Lot:
    """A lot without any optional member, but for these."""
    plain = Lot(
        lot_id=LotId("01KG0000000000000000000001"),
        lane=Lane.BATCH,
        state=LotState.SUBMITTING,
        key=KEY,
        offsets=OffsetSet([7, 8, 9, 65_600]),
        submission=1,
        partitions=(0, 3),
        created_at=AT,
    )
    return replace(plain, **changes)


EXPECTED: dict[str, LedgerEntry] = {
    "header": LedgerHeader(LedgerId("0123456789"), 1, AT),
    "header without a time": LedgerHeader(LedgerId("abcdefghjk"), 1),
    "claim": Claim("7f9c2ba4e88f827d", "0.1.0", AT),
    "witness": Witness(7, 1_700_000_000_000, 312, 0xCAFE),
    "watermark at the log's start": Watermark(0, AT),
    "watermark far on": Watermark((1 << 40) + 5, AT),
    "block of runs": SettledBlock(2, OffsetSet.span(131_072, 131_172) | OffsetSet([196_607])),
    "block of scattered offsets": SettledBlock(0, OffsetSet([1, 5, 9, 65_535])),
    "block beyond 32 bits": SettledBlock(1 << 20, OffsetSet([(1 << 36) + 3])),
    "lot waiting": lot(
        state=LotState.WAITING,
        submission=3,
        partitions=(3,),
        rows=4,
        tokens=320,
        bytes=4_100,
        own_rows=4,
        own_tokens=320,
        own_bytes=4_100,
        attempts={"transient": {1: OffsetSet([7, 8]), 2: OffsetSet([65_600])}, "missing": {1: OffsetSet([9])}},
        due={1_966_000: 3, 1_966_001: 1},
        not_before=AT,
    ),
    "lot submitting": lot(
        key=KEY._replace(slice="customer-7"),
        rows=9,
        tokens=720,
        bytes=9_200,
        own_rows=4,
        own_tokens=320,
        own_bytes=4_100,
        line_base=5,
        seal_reason="time",
        due={1_966_000: 4},
        input_file_id=FileId("file-abc"),
        submit_ttl_s=90.5,
    ),
    "lot submitted": lot(
        state=LotState.SUBMITTED,
        rows=9,
        own_rows=4,
        input_file_id=FileId("file-abc"),
        provider_batch_ids=(ProviderBatchId("batch_1"), ProviderBatchId("batch_2")),
        submitted_at=AT,
        submit_ttl_s=90.0,
    ),
    "lot done": lot(
        state=LotState.DONE,
        rows=9,
        own_rows=4,
        provider_batch_ids=(ProviderBatchId("batch_1"),),
        submitted_at=AT,
        tally=LotTally({"succeeded": 3, "transient": 1}, Usage(900, 120, 64), 4_200, 8_400),
    ),
    "lot clean": lot(
        state=LotState.CLEAN, offsets=OffsetSet(), provider_batch_ids=(ProviderBatchId("batch_1"),), tally=LotTally()
    ),
    "wave": lot(lane=Lane.SYNC, offsets=OffsetSet([12]), partitions=(0,), rows=1, own_rows=1),
    "end of a lot": Tombstone(b"lot/01KG0000000000000000000001"),
    "end of a block": Tombstone(b"settled/2"),
}


def golden() -> dict[str, tuple[bytes, bytes | None]]:
    """The stored records: key and value by what they stand for."""
    stored: dict[str, tuple[bytes, bytes | None]] = {}
    for record in json.loads(GOLDEN.read_text()):
        value: bytes | None = None
        if "value" in record:
            value = record["value"].encode()
        elif "value_base64" in record:
            value = base64.b64decode(record["value_base64"])
        stored[record["what"]] = (record["key"].encode(), value)
    return stored


def test_every_kind_of_record_has_a_golden_one():
    """The stored records of format 1 and the entries they stand for are the same list."""
    assert golden().keys() == EXPECTED.keys()


@pytest.mark.parametrize("what", EXPECTED)
def test_old_records_are_still_read(what: str):
    """A record that format 1 wrote is read as what it meant, whatever this version writes itself."""
    assert decode(*golden()[what]) == EXPECTED[what]


@pytest.mark.parametrize("what", EXPECTED)
def test_the_format_has_not_changed_unnoticed(what: str):
    """This version writes format 1 to the byte: who changes that raises FORMAT and stores new golden records."""
    assert encode(EXPECTED[what]) == golden()[what]


def test_keys_name_their_facts():
    """Keys are read back, and other keys are not taken for them."""
    assert lot_id_of(lot_key(LotId("x"))) == "x"
    assert block_number_of(block_key(17)) == 17
    assert lot_id_of(b"wm") is None
    assert block_number_of(b"wm") is None
    assert [block_of(offset) for offset in (0, 65_535, 65_536)] == [0, 0, 1]


def test_a_full_block_of_the_worst_kind_stays_small():
    """The settled block that compresses worst (every other offset) takes at most 8,300 bytes with its key."""
    generator = random.Random(7)
    worst = [
        OffsetSet(range(0, BLOCK_SIZE, 2)),
        OffsetSet(generator.sample(range(BLOCK_SIZE), BLOCK_SIZE // 2)),
        OffsetSet(generator.sample(range(BLOCK_SIZE), 4_097)),
        OffsetSet(generator.sample(range(BLOCK_SIZE), BLOCK_SIZE - 1)),
        OffsetSet.span(0, BLOCK_SIZE),
    ]
    for offsets in worst:
        key, value = encode(SettledBlock(0, offsets))
        assert value is not None
        assert len(key) + len(value) <= 8_300
        assert decode(key, value) == SettledBlock(0, offsets)


@pytest.mark.parametrize(
    ("gap", "most_bytes"),
    [
        (1, 5_000),  # one batch key: the offsets follow each other
        (40, 300_000),  # forty batch keys share the partition, and every row has been tried before
        (1_000, 500_000),
    ],
)
def test_a_lot_of_fifty_thousand_rows_stays_far_below_a_message(gap: int, most_bytes: int):
    """A 50,000-row lot, all rows with an attempt behind them, is well below the 1 MB a message may have."""
    generator = random.Random(7)
    rows = 50_000
    offsets = OffsetSet(range(rows)) if gap == 1 else OffsetSet(generator.sample(range(rows * gap), rows))
    big = lot(
        offsets=offsets,
        rows=rows,
        own_rows=rows,
        partitions=tuple(range(64)),
        attempts={"transient": {1: offsets}},
        due={1_966_000 + quarter: rows // 96 for quarter in range(96)},
        provider_batch_ids=(ProviderBatchId("batch_" + "f" * 32),),
    )
    key, value = encode(big)
    assert value is not None
    assert len(value) <= most_bytes
    assert decode(key, value) == big


def test_members_of_a_newer_version_are_kept_and_written_back():
    """An older replica that moves a lot on loses nothing that a newer one has put in, at any depth it rewrites."""
    newer = {
        **orjson.loads(encode(EXPECTED["lot done"])[1] or b""),
        "v": 2,
        "carrier": {"name": "north", "legs": [1, 2.5, None, "x"]},
    }
    newer["tally"]["reasoning_tokens"] = 77
    held = decode(b"lot/x", orjson.dumps(newer))
    assert isinstance(held, Lot)
    moved = orjson.loads(encode(replace(held, state=LotState.CLEAN))[1] or b"")
    assert moved["carrier"] == newer["carrier"]
    assert moved["tally"]["reasoning_tokens"] == 77
    assert moved["state"] == "CLEAN"
    assert moved["v"] == 1


@pytest.mark.parametrize("what", ["header", "claim", "watermark far on"])
def test_small_records_keep_unknown_members_too(what: str):
    """Header, claim and watermark carry unknown members through as well."""
    key, value = encode(EXPECTED[what])
    held = decode(key, orjson.dumps({**orjson.loads(value or b""), "region": "eu"}))
    assert held is not None
    assert orjson.loads(encode(held)[1] or b"")["region"] == "eu"


@pytest.mark.parametrize("key", [b"fence/3", b"Lot/x", b"wm2", b"", b"\xff\xfe", b"settledx"])
def test_kinds_of_a_newer_version_are_left_alone(key: bytes):
    """A key this version does not know is no error: whatever its value is, it is ignored."""
    assert decode(key, b"\x00anything") is None
    assert decode(key, b"{}") is None


def _without(what: str, member: str) -> bytes:
    members = orjson.loads(encode(EXPECTED[what])[1] or b"")
    del members[member]
    return orjson.dumps(members)


def _with(what: str, **members: object) -> bytes:
    return orjson.dumps({**orjson.loads(encode(EXPECTED[what])[1] or b""), **members})


DAMAGED = [
    (b"ledger", b""),
    (b"ledger", b"[]"),
    (b"ledger", b"null"),
    (b"ledger", b'{"ledger_id":"x"}'),
    (b"ledger", b'{"ledger_id":"x","min_reader":"1"}'),
    (b"claim", b'{"incarnation":"x"}'),
    (b"claim", b'{"incarnation":"x","app_version":"1","at":"soon"}'),
    (b"claim", b'{"incarnation":"x","app_version":"1","at":1e400}'),
    (b"claim", b'{"incarnation":"x","app_version":"1","at":99999999999999999}'),
    (b"claim", b'{"incarnation":"x","app_version":"1","at":-99999999999999999}'),
    (b"wm", b"7"),
    (b"wm", b'{"wm":true,"at":0}'),
    (b"wm", b'{"wm":1.5,"at":0}'),
    (b"wm", b'{"wm":-1,"at":0}'),
    (b"wm", b'{"wm":9223372036854775808,"at":0}'),
    (b"wm", b'{"wm":5}'),
    (b"wm", b"\xff\xfe"),
    (b"settled/0", b""),
    (b"settled/0", b"\x01"),
    (b"settled/0", b"\x00" + (encode(EXPECTED["block of runs"])[1] or b"")[1:]),
    (b"settled/0", b"\x02" + (encode(EXPECTED["block of runs"])[1] or b"")[1:]),
    (b"settled/0", (encode(EXPECTED["block of runs"])[1] or b"")[:-1]),
    (b"settled/0", b"\x01" + b"\xff" * 40),
    (b"settled/x", encode(EXPECTED["block of runs"])[1]),
    (b"settled/", encode(EXPECTED["block of runs"])[1]),
    (b"settled/-1", encode(EXPECTED["block of runs"])[1]),
    (b"settled/1_0", encode(EXPECTED["block of runs"])[1]),
    (b"settled/99999999999999999999", encode(EXPECTED["block of runs"])[1]),
    (b"lot/\xff", encode(EXPECTED["lot waiting"])[1]),
    (b"lot/x", b"{"),
    (b"lot/x", _without("lot waiting", "lane")),
    (b"lot/x", _without("lot waiting", "state")),
    (b"lot/x", _without("lot waiting", "key")),
    (b"lot/x", _without("lot waiting", "submission")),
    (b"lot/x", _without("lot waiting", "partitions")),
    (b"lot/x", _without("lot waiting", "created_at")),
    (b"lot/x", _with("lot waiting", state="GONE")),
    (b"lot/x", _with("lot waiting", lane="air")),
    (b"lot/x", _with("lot waiting", key="abcd")),
    (b"lot/x", _with("lot waiting", key=["a", "b", "c"])),
    (b"lot/x", _with("lot waiting", key=["a", "b", "c", 1])),
    (b"lot/x", _with("lot waiting", offsets="AAAA")),
    (b"lot/x", _with("lot waiting", offsets=7)),
    (b"lot/x", _with("lot waiting", submission="1")),
    (b"lot/x", _with("lot waiting", submission=True)),
    (b"lot/x", _with("lot waiting", partitions="03")),
    (b"lot/x", _with("lot waiting", partitions=7)),
    (b"lot/x", _with("lot waiting", rows=1.5)),
    (b"lot/x", _with("lot waiting", attempts={"transient": []})),
    (b"lot/x", _with("lot waiting", attempts={"transient": {"once": "AAAA"}})),
    (b"lot/x", _with("lot waiting", due={"soon": 1})),
    (b"lot/x", _with("lot waiting", due=[1])),
    (b"lot/x", _with("lot waiting", not_before="later")),
    (b"lot/x", _with("lot waiting", submit_ttl_s="a while")),
    (b"lot/x", _with("lot done", tally=[])),
    (b"lot/x", _with("lot done", tally={"classes": {"succeeded": "3"}})),
    (b"lot/x", _with("lot done", tally={"input_tokens": 1.5})),
]


@pytest.mark.parametrize(("key", "value"), DAMAGED)
def test_a_damaged_record_is_a_value_error(key: bytes, value: bytes):
    """A record of a known kind that cannot be read is refused by name, and its content is not quoted."""
    with pytest.raises(ValueError, match=r"^ledger record .* cannot be read: \w+$"):
        decode(key, value)


def test_a_line_of_the_file_leads_to_its_offset():
    """Line n of the file maps to an offset from the ledger alone, and only inside this lot."""
    second = lot(offsets=OffsetSet([20, 25, 31]), line_base=5)
    assert [second.offset_of_line(line) for line in range(4, 11)] == [None, None, 20, 25, 31, None, None]


def test_attempts_are_told_by_row():
    """A row that never ended in a class has no attempts in it."""
    tried = lot(attempts={"transient": {1: OffsetSet([7]), 2: OffsetSet([8])}})
    assert [tried.attempts_of("transient", offset) for offset in (7, 8, 9)] == [1, 2, 0]
    assert tried.attempts_of("missing", 7) == 0


def test_the_leader_is_the_owner_of_the_lowest_partition():
    """A batch's leader is found from any of its lots alone."""
    assert lot(partitions=(4, 2, 9)).leader_partition == 2


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (LotState.WAITING, False),
        (LotState.SUBMITTING, True),
        (LotState.SUBMITTED, True),
        (LotState.DONE, False),
        (LotState.CLEAN, False),
    ],
)
def test_at_the_provider_means_that_a_batch_may_exist(state: LotState, expected: bool):
    """SUBMITTING counts as at the provider: the create may have been carried out."""
    assert lot(state=state).is_at_provider is expected
