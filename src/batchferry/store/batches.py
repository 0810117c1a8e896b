"""The batch machine's read model: one row a batch, and its history. Both bounded, oldest out first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from batchferry.store.database import Database

MAX_FINISHED_BATCHES = 500
"""Batches with ``finalized_at`` that are kept to be looked at."""
MAX_BATCHES = 10_000
"""Batches kept whatever their state: a second fence, far above what one process runs."""
MAX_EVENTS_PER_BATCH = 200
MAX_EVENTS = 100_000
"""Events kept of all batches together."""

BATCH_COLUMNS = (
    "batch_id",
    "platform_batch_id",
    "state",
    "provider_status",
    "account",
    "endpoint",
    "model",
    "completion_window",
    "slice",
    "partitions",
    "rows",
    "bytes",
    "tokens",
    "seal_reason",
    "input_file_id",
    "output_file_id",
    "error_file_id",
    "created_at",
    "sealed_at",
    "submitted_at",
    "finalized_at",
    "next_poll_at",
    "total_requests",
    "succeeded",
    "failed",
    "missing",
    "duplicate",
    "waiting_s",
    "detail",
)
EVENT_COLUMNS = ("batch_id", "at", "event", "from_state", "to_state", "detail")
EVENT_REQUIRED = ("batch_id", "at", "event")

_JSON_COLUMNS = frozenset({"partitions", "detail"})
_INSTANT_COLUMNS = frozenset(name for name in (*BATCH_COLUMNS, *EVENT_COLUMNS) if name == "at" or name.endswith("_at"))


class BatchView:
    """Writes and reads ``batch_jobs`` and ``batch_events``.

    Columns that end in ``_at`` (and ``at``) take and give aware datetimes, ``partitions`` and ``detail`` any
    JSON value; the others text and numbers. Absent is None.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.rows = 0
        """Batches kept, as of the last one saved."""

    async def save(self, row: Mapping[str, object]) -> None:
        """Insert the batch, or change the columns that ``row`` names.

        Raises:
            ValueError: ``batch_id`` is missing, a column is unknown, or an instant is not aware.
        """
        values = _encoded("batch_jobs", row, BATCH_COLUMNS, ("batch_id",))
        changed = [name for name in values if name != "batch_id"]
        action = f"UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in changed)}" if changed else "NOTHING"
        async with self._database.transaction() as connection:
            await connection.execute(
                f"{_insert('batch_jobs', values)} ON CONFLICT (batch_id) DO {action}", tuple(values.values())
            )
            if values.get("finalized_at") is not None:
                await connection.execute(
                    "DELETE FROM batch_jobs WHERE batch_id IN (SELECT batch_id FROM batch_jobs"
                    " WHERE finalized_at IS NOT NULL ORDER BY finalized_at DESC, batch_id DESC LIMIT -1 OFFSET ?)",
                    (MAX_FINISHED_BATCHES,),
                )
            # Batch ids are ULIDs: the smallest is the oldest.
            await connection.execute(
                "DELETE FROM batch_jobs WHERE batch_id IN"
                " (SELECT batch_id FROM batch_jobs ORDER BY batch_id DESC LIMIT -1 OFFSET ?)",
                (MAX_BATCHES,),
            )
            found = await connection.execute_fetchall("SELECT count(*) FROM batch_jobs")
            self.rows = next(iter(found))[0]

    async def add_event(self, row: Mapping[str, object]) -> None:
        """Write one event down; the batch need not be saved yet.

        Raises:
            ValueError: ``batch_id``, ``at`` or ``event`` is missing, a column is unknown, or ``at`` is not aware.
        """
        values = _encoded("batch_events", row, EVENT_COLUMNS, EVENT_REQUIRED)
        async with self._database.transaction() as connection:
            cursor = await connection.execute(_insert("batch_events", values), tuple(values.values()))
            await connection.execute(
                "DELETE FROM batch_events WHERE batch_id = ?1 AND seq <= (SELECT seq FROM batch_events"
                " WHERE batch_id = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
                (values["batch_id"], MAX_EVENTS_PER_BATCH),
            )
            newest = cursor.lastrowid or 0
            await connection.execute("DELETE FROM batch_events WHERE seq <= ?", (newest - MAX_EVENTS,))

    async def batches(self) -> list[dict[str, object]]:
        """Every batch kept, newest first, with all columns."""
        return await self._read("batch_jobs", BATCH_COLUMNS, "ORDER BY batch_id DESC", ())

    async def events(self, batch_id: str) -> list[dict[str, object]]:
        """The batch's events, oldest first, with their ``seq``."""
        return await self._read("batch_events", ("seq", *EVENT_COLUMNS), "WHERE batch_id = ? ORDER BY seq", (batch_id,))

    async def _read(
        self, table: str, columns: Sequence[str], tail: str, values: tuple[object, ...]
    ) -> list[dict[str, object]]:
        rows = await self._database.fetch(
            f"SELECT {', '.join(columns)} FROM {table} {tail}",  # noqa: S608 (names of this module)
            values,
        )
        return [{name: _decoded(name, value) for name, value in zip(columns, row, strict=True)} for row in rows]


def _insert(table: str, values: Mapping[str, object]) -> str:
    return f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"  # noqa: S608 (checked)


def _encoded(
    table: str, row: Mapping[str, object], columns: Sequence[str], required: Sequence[str]
) -> dict[str, object]:
    if unknown := sorted(row.keys() - set(columns)):
        raise ValueError(f"{table} has no column {', '.join(unknown)}; it has {', '.join(columns)}")
    if missing := [name for name in required if row.get(name) is None]:
        raise ValueError(f"{table} needs {', '.join(missing)}")
    # In the table's order, so that equal sets of columns make one statement for SQLite's cache.
    return {name: _encode(table, name, row[name]) for name in columns if name in row}


def _encode(table: str, name: str, value: object) -> object:
    if value is None:
        return None
    if name in _JSON_COLUMNS:
        return msgspec.json.encode(value).decode()
    if name in _INSTANT_COLUMNS:
        if not isinstance(value, datetime) or value.tzinfo is None:
            raise ValueError(f"{table}.{name} takes an aware datetime, not {type(value).__name__}")
        return value.astimezone(UTC).isoformat(timespec="microseconds")
    return value


def _decoded(name: str, value: object) -> object:
    if isinstance(value, str):
        if name in _JSON_COLUMNS:
            return msgspec.json.decode(value)
        if name in _INSTANT_COLUMNS:
            return datetime.fromisoformat(value)
    return value
