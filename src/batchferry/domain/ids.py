"""Identifiers, and the one place where a wire id is built and read back.

A *wire id* is what the provider sees as ``custom_id``. It is ours, never the caller's: unique by
construction across restarts, retries and environments that share an account, and lawful at every provider
(at most 40 characters of ``[A-Za-z0-9-]``).
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from typing import NamedTuple, NewType

from ulid import ULID

BatchId = NewType("BatchId", str)
"""A ULID in Crockford base32 (26 characters); sorts by creation time."""
LotId = NewType("LotId", str)
"""The batch_id, or the wave's own ULID in the sync lane."""
LedgerId = NewType("LedgerId", str)
"""Ten base32 characters, drawn once per ledger partition."""
ProviderBatchId = NewType("ProviderBatchId", str)
FileId = NewType("FileId", str)

LEDGER_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
LEDGER_ID_LENGTH = 10
MAX_WIRE_ID_CHARS = 40

_BATCH_ID = r"[0-7][0-9A-HJKMNP-TV-Z]{25}"
_FILE_NAME = re.compile(rf"([0-9a-hjkmnp-tv-z]{{10}})-({_BATCH_ID})\.jsonl")
_WIRE_ID = re.compile(r"([0-9a-hjkmnp-tv-z]{10})-(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,18})-([1-9][0-9]{0,8})")


class WireId(NamedTuple):
    """The four parts of a wire id."""

    ledger_id: LedgerId
    partition: int
    offset: int
    submission: int

    def __str__(self) -> str:
        return f"{self.ledger_id}-{self.partition}-{self.offset}-{self.submission}"


def new_ledger_id() -> LedgerId:
    """Draw a ledger id: 50 random bits, so two environments on one provider account do not meet."""
    return LedgerId("".join(secrets.choice(LEDGER_ID_ALPHABET) for _ in range(LEDGER_ID_LENGTH)))


def new_batch_id(timestamp_s: float) -> BatchId:
    """Make a batch id that sorts by ``timestamp_s`` (seconds since the epoch)."""
    return BatchId(str(ULID.from_timestamp(float(timestamp_s))))  # an int would be taken for milliseconds


def parse_batch_id(text: str) -> BatchId | None:
    """The text as a batch id, or None when it cannot be one of ours."""
    return BatchId(text) if re.fullmatch(_BATCH_ID, text) else None


def batch_id_time(batch_id: BatchId) -> datetime:
    """When the batch was sealed, to the millisecond; aware UTC.

    Raises:
        ValueError: no batch id, or a time beyond the year 9999.
    """
    return ULID.from_str(batch_id).datetime.astimezone(UTC)


def batch_file_name(ledger_id: LedgerId, batch_id: BatchId) -> str:
    """The name under which a batch's file is uploaded; ``ledger_id`` is that of the batch's lowest partition."""
    return f"{ledger_id}-{batch_id}.jsonl"


def parse_batch_file_name(name: str) -> tuple[LedgerId, BatchId] | None:
    """Read a file name back, or None when it is not one of ours."""
    match = _FILE_NAME.fullmatch(name)
    return None if match is None else (LedgerId(match[1]), BatchId(match[2]))


def parse_wire_id(text: str) -> WireId | None:
    """Read a wire id back, or None when the text is not one of ours."""
    match = _WIRE_ID.fullmatch(text)
    if match is None:
        return None
    ledger_id, partition, offset, submission = match.groups()
    return WireId(LedgerId(ledger_id), int(partition), int(offset), int(submission))
