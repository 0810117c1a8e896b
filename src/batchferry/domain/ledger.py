"""The ledger's record formats: what one compacted partition remembers of one input partition.

Keys are readable text, one record per fact:

==================  =======================================================================================
``ledger``          who this ledger is (its id, the oldest reader that may touch it); written once
``claim``           which process took the partition over last
``witness``         one input record that was read: how a topic made anew under the same name is told
``wm``              the settled watermark: every input offset below it has had its outcome
``settled/<n>``     the settled offsets in block n (offsets n * 65536 up to (n + 1) * 65536)
``lot/<id>``        one partition's part of a batch (or of a wave of the sync lane): rows, state, provider ids
==================  =======================================================================================

Values are JSON with a format number ``v``, so that an operator can read them with any Kafka tool; members
this version does not know are kept and written back. Settled blocks alone are binary (a format byte and a
portable roaring bitmap of at most 8 KB), because every settle transaction writes one.

A record is a state, never an act: applying it twice equals once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from zlib import crc32

import orjson
from pyroaring import BitMap

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.ids import FileId, LedgerId, LotId, ProviderBatchId
from batchferry.domain.offsets import BLOCK_SHIFT, BLOCK_SIZE, OffsetSet
from batchferry.domain.provider import Usage

FORMAT = 1
"""The format this version writes, and the newest it can read."""

QUARTER_HOUR_S = 900
UNCERTAIN = "uncertain"
"""Member of a lot: its provider batch was found by its time and number of rows alone, so it may be somebody else's."""
GONE = "gone"
"""Member of a lot: provider batches that were its own and that the provider does not know any more. Written, so that
whoever takes the lot over neither waits for them nor forgets that their rows may have run."""
UNPRICED = "unpriced_rows"
"""Member of a tally: rows that ran and whose price is not known."""
UNREAD = "unread_rows"
"""Member of a tally: rows that the provider ran, perhaps, and whose tokens nobody could read."""


class Lane(StrEnum):
    """How the rows of a lot reach the provider."""

    BATCH = "batch"
    SYNC = "sync"


class LotState(StrEnum):
    """Where a lot is. Only the state and the fields named with it change after the lot is first written."""

    WAITING = "WAITING"
    """The rows wait for their next submission; nothing is at a provider."""
    SUBMITTING = "SUBMITTING"
    """A provider batch for these rows may exist from now on; its id is not known."""
    SUBMITTED = "SUBMITTED"
    """The provider batch exists; its ids are recorded."""
    DONE = "DONE"
    """The lot holds no unsettled row and its result files have been read to the end."""
    CLEAN = "CLEAN"
    """The provider's files are gone (or kept on purpose); a stub that keeps ids and times for a while."""


@dataclass(frozen=True, slots=True)
class LedgerHeader:
    """Who this ledger is. ``min_reader`` is the lowest format an owner must be able to read."""

    ledger_id: LedgerId
    min_reader: int = FORMAT
    created_at: datetime | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """The process that took the partition over: a new incarnation id for every start."""

    incarnation: str
    app_version: str
    at: datetime
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Witness:
    """A record of the input partition as it was read: the topic is still the same while it is still there.

    A key of its own, and not a member of ``claim``: a takeover writes its claim before it has read the ledger, and
    compaction would take the only copy away between the two.

    ``checksum`` is the CRC-32 of key and value. It cannot be turned back into either, and together with offset, time
    and size no other topic shows it by chance.
    """

    offset: int
    timestamp_ms: int
    size_bytes: int
    checksum: int
    extra: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, offset: int, timestamp_ms: int, key: bytes | None, value: bytes | None) -> Witness:
        """What to remember of a record."""
        size_bytes = len(key or b"") + len(value or b"")
        return cls(offset, timestamp_ms, size_bytes, crc32(value or b"", crc32(key or b"")))

    def is_seen_in(self, timestamp_ms: int, key: bytes | None, value: bytes | None) -> bool:
        """Whether the record that stands at the offset now is the one that was read then."""
        other = Witness.of(self.offset, timestamp_ms, key, value)
        return (other.timestamp_ms, other.size_bytes, other.checksum) == (
            self.timestamp_ms,
            self.size_bytes,
            self.checksum,
        )


@dataclass(frozen=True, slots=True)
class Watermark:
    """Every offset below ``offset`` is settled."""

    offset: int
    at: datetime
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SettledBlock:
    """All settled offsets of one block that are not below the watermark."""

    block: int
    offsets: OffsetSet


@dataclass(frozen=True, slots=True)
class LotTally:
    """What the result files said about a lot's lines, whichever life of the service settled the rows."""

    classes: Mapping[str, int] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    cost_picodollars: int | None = None
    list_picodollars: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lot:
    """One input partition's part of a batch.

    ``rows``, ``tokens``, ``bytes`` are those of the whole batch, ``own_*`` those of this lot;
    ``line_base`` is the 0-based line of the batch file at which this lot's lines begin, so that "line n of the
    file" becomes an offset from the ledger alone. ``attempts`` says how often a row has already ended in a
    class that is retried: {class: {times: offsets}}. ``due`` counts rows by the quarter-hour of their deadline.
    """

    lot_id: LotId
    lane: Lane
    state: LotState
    key: BatchKey
    offsets: OffsetSet
    submission: int
    partitions: tuple[int, ...]
    created_at: datetime
    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    own_rows: int = 0
    own_tokens: int = 0
    own_bytes: int = 0
    line_base: int = 0
    seal_reason: str = ""
    attempts: Mapping[str, Mapping[int, OffsetSet]] = field(default_factory=dict)
    due: Mapping[int, int] = field(default_factory=dict)
    input_file_id: FileId | None = None
    provider_batch_ids: tuple[ProviderBatchId, ...] = ()
    submitted_at: datetime | None = None
    submit_ttl_s: float = 0.0
    not_before: datetime | None = None
    tally: LotTally | None = None
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_at_provider(self) -> bool:
        """Whether a provider batch for these rows exists or may exist."""
        return self.state in {LotState.SUBMITTING, LotState.SUBMITTED}

    @property
    def gone(self) -> tuple[ProviderBatchId, ...]:
        """Provider batches that were its own and are not there any more."""
        named = self.extra.get(GONE)
        return tuple(ProviderBatchId(str(one)) for one in named) if isinstance(named, list | tuple) else ()

    @property
    def leader_partition(self) -> int:
        """The batch's lowest partition: its owner does what is done once a batch."""
        return min(self.partitions)

    def attempts_of(self, row_class: str, offset: int) -> int:
        """How often this row has already ended in ``row_class``."""
        for times, offsets in self.attempts.get(row_class, {}).items():
            if offset in offsets:
                return times
        return 0

    def offset_of_line(self, line: int) -> int | None:
        """The offset behind the 1-based ``line`` of the batch file, None when it belongs to another lot."""
        index = line - 1 - self.line_base
        return self.offsets.nth(index) if 0 <= index < len(self.offsets) else None


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The end of the fact under ``key``."""

    key: bytes


LedgerEntry = LedgerHeader | Claim | Witness | Watermark | SettledBlock | Lot | Tombstone

_LEDGER_KEY = b"ledger"
_CLAIM_KEY = b"claim"
_WITNESS_KEY = b"witness"
_WATERMARK_KEY = b"wm"
_BLOCK_PREFIX = b"settled/"
_LOT_PREFIX = b"lot/"
_MAX_OFFSET = (1 << 63) - 1
"""Kafka's offsets are signed 64-bit integers."""


def lot_key(lot_id: LotId) -> bytes:
    """The ledger key of a lot."""
    return _LOT_PREFIX + lot_id.encode()


def block_key(block: int) -> bytes:
    """The ledger key of a settled block."""
    return _BLOCK_PREFIX + str(block).encode()


def block_of(offset: int) -> int:
    """The number of the settled block an offset belongs to."""
    return offset >> BLOCK_SHIFT


def lot_id_of(key: bytes) -> LotId | None:
    """The lot named by a ledger key, None for other keys."""
    return LotId(key[len(_LOT_PREFIX) :].decode()) if key.startswith(_LOT_PREFIX) else None


def block_number_of(key: bytes) -> int | None:
    """The settled block named by a ledger key, None for other keys.

    Raises:
        ValueError: the key is a block's, and what follows is no block number.
    """
    if not key.startswith(_BLOCK_PREFIX):
        return None
    digits = key[len(_BLOCK_PREFIX) :]
    if not digits.isdigit() or (block := int(digits)) > block_of(_MAX_OFFSET):
        raise ValueError(f"ledger key {key!r} names no block")
    return block


def encode(entry: LedgerEntry) -> tuple[bytes, bytes | None]:
    """The Kafka key and value of an entry; the value of a tombstone is None."""
    match entry:
        case Tombstone(key):
            return key, None
        case SettledBlock(block, offsets):
            base = block << BLOCK_SHIFT
            bits = BitMap(offset - base for offset in offsets)
            bits.run_optimize()
            return block_key(block), bytes([FORMAT]) + bits.serialize()
        case LedgerHeader():
            value = {"ledger_id": entry.ledger_id, "min_reader": entry.min_reader, "created_at": _ms(entry.created_at)}
            return _LEDGER_KEY, _dump(value, entry.extra)
        case Claim():
            value = {"incarnation": entry.incarnation, "app_version": entry.app_version, "at": _ms(entry.at)}
            return _CLAIM_KEY, _dump(value, entry.extra)
        case Witness():
            value = {
                "offset": entry.offset,
                "timestamp": entry.timestamp_ms,
                "bytes": entry.size_bytes,
                "crc": entry.checksum,
            }
            return _WITNESS_KEY, _dump(value, entry.extra)
        case Watermark():
            return _WATERMARK_KEY, _dump({"wm": entry.offset, "at": _ms(entry.at)}, entry.extra)
        case Lot():
            return lot_key(entry.lot_id), _encode_lot(entry)


def decode(key: bytes, value: bytes | None) -> LedgerEntry | None:
    """Read a ledger record; None for a kind this version does not know (a newer one wrote it: leave it alone).

    Raises:
        ValueError: the record is of a known kind and cannot be read.
    """
    if value is None:
        return Tombstone(key)
    try:
        if key == _LEDGER_KEY:
            return _decode_header(value)
        if key == _CLAIM_KEY:
            return _decode_claim(value)
        if key == _WITNESS_KEY:
            return _decode_witness(value)
        if key == _WATERMARK_KEY:
            return _decode_watermark(value)
        block = block_number_of(key)
        if block is not None:
            return _decode_block(block, value)
        if key.startswith(_LOT_PREFIX):
            return _decode_lot(LotId(key[len(_LOT_PREFIX) :].decode()), value)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        raise ValueError(f"ledger record {key!r} cannot be read: {type(error).__name__}") from error
    return None


# ------------------------------------------------------------------------------------------------- codec


def _ms(at: datetime | None) -> int | None:
    return None if at is None else round(at.timestamp() * 1000)


def _at(value: object) -> datetime:
    return datetime.fromtimestamp(_int(value) / 1000, UTC)


def _at_or_none(value: object) -> datetime | None:
    return None if value is None else _at(value)


def _dump(members: Mapping[str, object], extra: Mapping[str, object]) -> bytes:
    kept = {name: value for name, value in members.items() if value is not None}
    return orjson.dumps({"v": FORMAT, **extra, **kept}, option=orjson.OPT_NON_STR_KEYS)


def _load(value: bytes, known: frozenset[str]) -> tuple[dict[str, object], dict[str, object]]:
    members = orjson.loads(value)
    if not isinstance(members, dict):
        raise TypeError("not an object")
    extra = {name: held for name, held in members.items() if name not in known and name != "v"}
    return members, extra


def _decode_header(value: bytes) -> LedgerHeader:
    members, extra = _load(value, frozenset({"ledger_id", "min_reader", "created_at"}))
    return LedgerHeader(
        LedgerId(str(members["ledger_id"])),
        _int(members["min_reader"]),
        _at_or_none(members.get("created_at")),
        extra,
    )


def _decode_claim(value: bytes) -> Claim:
    members, extra = _load(value, frozenset({"incarnation", "app_version", "at"}))
    return Claim(str(members["incarnation"]), str(members["app_version"]), _at(members["at"]), extra)


def _decode_witness(value: bytes) -> Witness:
    members, extra = _load(value, frozenset({"offset", "timestamp", "bytes", "crc"}))
    offset = _int(members["offset"])
    if not 0 <= offset <= _MAX_OFFSET:
        raise ValueError("not an offset")
    return Witness(offset, _int(members["timestamp"]), _int(members["bytes"]), _int(members["crc"]), extra)


def _decode_watermark(value: bytes) -> Watermark:
    members, extra = _load(value, frozenset({"wm", "at"}))
    offset = _int(members["wm"])
    if not 0 <= offset <= _MAX_OFFSET:
        raise ValueError("not an offset")
    return Watermark(offset, _at(members["at"]), extra)


def _decode_block(block: int, value: bytes) -> SettledBlock:
    if not value or not 1 <= value[0] <= FORMAT:
        raise ValueError("unknown block format")
    bits = BitMap.deserialize(value[1:])
    if bits and bits.max() >= BLOCK_SIZE:
        raise ValueError("an offset outside its block")
    base = block << BLOCK_SHIFT
    return SettledBlock(block, OffsetSet(base + low for low in bits))


_LOT_MEMBERS = frozenset(
    {
        "lane", "state", "key", "offsets", "submission", "partitions", "created_at", "rows", "tokens", "bytes",
        "own_rows", "own_tokens", "own_bytes", "line_base", "seal_reason", "attempts", "due", "input_file_id",
        "provider_batch_ids", "submitted_at", "submit_ttl_s", "not_before", "tally",
    }
)  # fmt: skip
_TALLY_MEMBERS = frozenset(
    {"classes", "input_tokens", "output_tokens", "cached_tokens", "cost_picodollars", "list_picodollars"}
)


def _encode_lot(lot: Lot) -> bytes:
    return _dump(
        {
            "lane": lot.lane.value,
            "state": lot.state.value,
            "key": list(lot.key),
            "offsets": lot.offsets.dumps() if lot.offsets else None,
            "submission": lot.submission,
            "partitions": list(lot.partitions),
            "created_at": _ms(lot.created_at),
            "rows": lot.rows,
            "tokens": lot.tokens,
            "bytes": lot.bytes,
            "own_rows": lot.own_rows,
            "own_tokens": lot.own_tokens,
            "own_bytes": lot.own_bytes,
            "line_base": lot.line_base,
            "seal_reason": lot.seal_reason or None,
            "attempts": {
                row_class: {str(times): offsets.dumps() for times, offsets in by_times.items()}
                for row_class, by_times in lot.attempts.items()
            }
            or None,
            "due": {str(quarter): rows for quarter, rows in lot.due.items()} or None,
            "input_file_id": lot.input_file_id,
            "provider_batch_ids": list(lot.provider_batch_ids) or None,
            "submitted_at": _ms(lot.submitted_at),
            "submit_ttl_s": lot.submit_ttl_s or None,
            "not_before": _ms(lot.not_before),
            "tally": None if lot.tally is None else _encode_tally(lot.tally),
        },
        lot.extra,
    )


def _encode_tally(tally: LotTally) -> dict[str, object]:
    return {
        **tally.extra,
        "classes": dict(tally.classes),
        "input_tokens": tally.usage.input_tokens,
        "output_tokens": tally.usage.output_tokens,
        "cached_tokens": tally.usage.cached_tokens,
        "cost_picodollars": tally.cost_picodollars,
        "list_picodollars": tally.list_picodollars,
    }


def _decode_lot(lot_id: LotId, value: bytes) -> Lot:
    members, extra = _load(value, _LOT_MEMBERS)
    get = members.get
    key = members["key"]
    if not isinstance(key, list) or not all(isinstance(part, str) for part in key):
        raise TypeError("not a batch key")
    attempts: dict[str, dict[str, str]] = get("attempts") or {}  # type: ignore[assignment]
    due: dict[str, int] = get("due") or {}  # type: ignore[assignment]
    partitions: list[int] = members["partitions"]  # type: ignore[assignment]
    provider_ids: list[str] = get("provider_batch_ids") or []  # type: ignore[assignment]
    file_id = get("input_file_id")
    return Lot(
        lot_id=lot_id,
        lane=Lane(str(members["lane"])),
        state=LotState(str(members["state"])),
        key=BatchKey(*key),
        offsets=OffsetSet.loads(str(members["offsets"])) if get("offsets") else OffsetSet(),
        submission=_int(members["submission"]),
        partitions=tuple(_int(partition) for partition in partitions),
        created_at=_at(members["created_at"]),
        rows=_int(get("rows", 0)),
        tokens=_int(get("tokens", 0)),
        bytes=_int(get("bytes", 0)),
        own_rows=_int(get("own_rows", 0)),
        own_tokens=_int(get("own_tokens", 0)),
        own_bytes=_int(get("own_bytes", 0)),
        line_base=_int(get("line_base", 0)),
        seal_reason=str(get("seal_reason", "")),
        attempts={
            row_class: {int(times): OffsetSet.loads(offsets) for times, offsets in by_times.items()}
            for row_class, by_times in attempts.items()
        },
        due={int(quarter): _int(rows) for quarter, rows in due.items()},
        input_file_id=None if file_id is None else FileId(str(file_id)),
        provider_batch_ids=tuple(ProviderBatchId(str(one)) for one in provider_ids),
        submitted_at=_at_or_none(get("submitted_at")),
        submit_ttl_s=float(get("submit_ttl_s", 0.0)),  # type: ignore[arg-type]
        not_before=_at_or_none(get("not_before")),
        tally=None if get("tally") is None else _decode_tally(members["tally"]),
        extra=extra,
    )


def _decode_tally(value: object) -> LotTally:
    members: dict[str, object] = value  # type: ignore[assignment]
    extra = {name: held for name, held in members.items() if name not in _TALLY_MEMBERS}
    classes: dict[str, int] = members.get("classes") or {}  # type: ignore[assignment]
    cost, sync_cost = members.get("cost_picodollars"), members.get("list_picodollars")
    return LotTally(
        classes={str(name): _int(rows) for name, rows in classes.items()},
        usage=Usage(
            _int(members.get("input_tokens", 0)),
            _int(members.get("output_tokens", 0)),
            _int(members.get("cached_tokens", 0)),
        ),
        cost_picodollars=None if cost is None else _int(cost),
        list_picodollars=None if sync_cost is None else _int(sync_cost),
        extra=extra,
    )


def _int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("not an integer")
    return value
