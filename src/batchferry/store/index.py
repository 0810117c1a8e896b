"""The index of accepted rows: by partition and offset, what the caller said besides the body."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import msgspec

from batchferry.domain.offsets import OffsetSet
from batchferry.ports import Headers, IndexRow
from batchferry.store.database import Database

INSERT_GROUP_ROWS = 64
"""Rows of one INSERT: each statement gives up and takes back the interpreter's lock, and costs the most of a row."""
LOOKUP_ROWS = 1_000
"""Offsets of one look-up."""
PIECE_ROWS = 20_000
"""Offsets of one statement over a set: bounds its text and what a rollback must remember."""

_PLACE = "(?, ?, ?, ?)"
_INSERT = "INSERT OR REPLACE INTO rows (partition, offset, custom_id, packed) VALUES "
_INSERT_ONE = _INSERT + _PLACE
_INSERT_GROUP = _INSERT + ", ".join([_PLACE] * INSERT_GROUP_ROWS)
_SELECT = """
SELECT offset, custom_id, packed FROM rows
WHERE partition = ? AND offset IN (SELECT value FROM json_each(?))
"""

# One value of many parts goes in and comes out a quarter faster than as many columns. A Kafka header's value may
# be null; what went in comes out.
_Packed = tuple[bytes | None, Headers, int, int, str, int]
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Packed).decode
_encode_json = msgspec.json.Encoder().encode


class RowIndex:
    """Rows put, found and dropped by offset."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, partition: int, rows: Sequence[IndexRow]) -> None:
        """Insert or replace; of two rows with one offset the later stays."""
        if not rows:
            return
        values = [
            (partition, offset, custom_id, _pack((key, headers, t0_ms, deadline_ms, digest, masked)))
            for offset, custom_id, key, headers, t0_ms, deadline_ms, digest, masked in rows
        ]
        if len(values) < INSERT_GROUP_ROWS // 4:
            statement = _INSERT_ONE
            groups: list[tuple[object, ...]] = list(values)
        else:
            # Replacing a row by itself changes nothing, so the last one may fill up its group.
            values += [values[-1]] * (-len(values) % INSERT_GROUP_ROWS)
            flat, size = chain.from_iterable, INSERT_GROUP_ROWS
            statement = _INSERT_GROUP
            groups = [tuple(flat(values[at : at + size])) for at in range(0, len(values), size)]
        async with self._database.transaction() as connection:
            await connection.executemany(statement, groups)

    async def get(self, partition: int, offsets: Iterable[int]) -> dict[int, IndexRow]:
        """The rows that are there, in no order."""
        found: dict[int, IndexRow] = {}
        for piece in _pieces(offsets, LOOKUP_ROWS):
            for offset, custom_id, packed in await self._database.fetch(_SELECT, (partition, _as_json(piece))):
                found[offset] = IndexRow(offset, custom_id, *_unpack(packed))
        return found

    async def known(self, partition: int, offsets: OffsetSet) -> OffsetSet:
        """Which of these offsets have a row."""
        found = OffsetSet()
        for piece in _pieces(offsets, PIECE_ROWS):
            clause, values = _among(piece)
            # One row of one text: a row each would cost more to hand over than to find.
            ((text,),) = await self._database.fetch(
                f"SELECT json_group_array(offset) FROM rows WHERE partition = ? AND {clause}",  # noqa: S608
                (partition, *values),
            )
            found.update(msgspec.json.decode(text, type=list[int]))
        return found

    async def drop(self, partition: int, offsets: OffsetSet) -> int:
        """Forget these rows; absent ones are no matter. Returns how many there were."""
        dropped = 0
        for piece in _pieces(offsets, PIECE_ROWS):
            clause, values = _among(piece)
            async with self._database.transaction() as connection:
                cursor = await connection.execute(
                    f"DELETE FROM rows WHERE partition = ? AND {clause}",  # noqa: S608
                    (partition, *values),
                )
                dropped += max(0, cursor.rowcount)
        return dropped

    async def drop_partition(self, partition: int) -> None:
        """Forget the partition, piece by piece so that others get their turn and the journal stays small."""
        while True:
            async with self._database.transaction() as connection:
                cursor = await connection.execute(
                    "DELETE FROM rows WHERE partition = ?1 AND offset IN"
                    " (SELECT offset FROM rows WHERE partition = ?1 ORDER BY offset LIMIT ?2)",
                    (partition, PIECE_ROWS),
                )
                if cursor.rowcount < PIECE_ROWS:
                    return

    async def same_custom_ids(self, partition: int, offsets: OffsetSet) -> list[list[int]]:
        """Groups of two or more of these offsets with one custom_id; groups by first offset, each ascending."""
        wanted = list(offsets)
        if not wanted:
            return []
        clause, values = _among(wanted)
        rows = await self._database.fetch(
            f"SELECT json_group_array(offset) FROM rows WHERE partition = ? AND {clause}"  # noqa: S608
            " GROUP BY custom_id HAVING count(*) > 1",
            (partition, *values),
        )
        return sorted(sorted(msgspec.json.decode(text, type=list[int])) for (text,) in rows)


def _pieces(offsets: Iterable[int], size: int) -> Iterator[list[int]]:
    rest = iter(offsets)
    while piece := list(islice(rest, size)):
        yield piece


def _among(ascending: list[int]) -> tuple[str, tuple[object, ...]]:
    """The condition "one of these offsets"; a run without gaps needs no list."""
    first, last = ascending[0], ascending[-1]
    if last - first + 1 == len(ascending):
        return "offset BETWEEN ? AND ?", (first, last)
    return "offset IN (SELECT value FROM json_each(?))", (_as_json(ascending),)


def _as_json(offsets: list[int]) -> str:
    return _encode_json(offsets).decode()
