"""The one SQLite connection: opened for a cache, one writer at a time, errors translated."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiosqlite

from batchferry.domain.errors import StoreUnavailable

PAGE_BYTES = 4096
CACHE_KIB = 16 * 1024

_PRAGMAS = (
    f"PRAGMA page_size = {PAGE_BYTES}",
    # A rollback must work (a full disk is expected), a crash need not: the journal may live in memory, which
    # writes every page once where WAL writes it twice. Transactions are small, so the journal is too.
    "PRAGMA journal_mode = MEMORY",
    "PRAGMA synchronous = OFF",
    "PRAGMA locking_mode = EXCLUSIVE",  # nobody else reads the file; saves the lock calls of each statement
    "PRAGMA temp_store = MEMORY",  # there may be no other writable folder
    f"PRAGMA cache_size = -{CACHE_KIB}",
)

_DISK_TROUBLE = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    }
)


class Database:
    """Statements on the index file. One connection, so readers see what a writer has not committed yet."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._connection: aiosqlite.Connection | None = None
        self._write_lock = asyncio.Lock()

    @property
    def size_bytes(self) -> int:
        """Bytes of the file; 0 when there is none."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    async def open(self) -> None:
        """Open the (empty) file and make the tables.

        Raises:
            StoreUnavailable: the file cannot be written.
        """
        schema = files("batchferry.store").joinpath("schema.sql").read_text("utf-8")
        with _translated():
            connection = await aiosqlite.connect(self._path)
            try:
                for pragma in (*_PRAGMAS, f"PRAGMA max_page_count = {max(64, self._max_bytes // PAGE_BYTES)}"):
                    await connection.execute_fetchall(pragma)
                await connection.executescript(schema)
                await connection.commit()
            except BaseException:
                await connection.close()
                raise
        self._connection = connection

    async def close(self) -> None:
        """Close the file; safe to call twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            async with self._write_lock:
                await connection.close()

    async def fetch(self, sql: str, values: Iterable[object] = ()) -> Sequence[Any]:
        """All rows of a query, as tuples."""
        with _translated():
            return list(await self._live().execute_fetchall(sql, values))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[aiosqlite.Connection]:
        """One transaction, alone; committed at the end, rolled back by any exception.

        Raises:
            StoreUnavailable: the disk does not take it; nothing of it remains.
        """
        with _translated():
            async with self._write_lock:
                connection = self._live()
                try:
                    yield connection
                    await connection.commit()
                except BaseException:
                    # Queued behind whatever the connection's thread still does, also when we were cancelled.
                    await connection.rollback()
                    raise

    def _live(self) -> aiosqlite.Connection:
        if self._connection is None:
            raise StoreUnavailable("the local index is closed")
        return self._connection


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what SQLite says about the disk into StoreUnavailable; anything else is our bug and passes."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code is None or (code & 0xFF) not in _DISK_TROUBLE:
            raise
        raise StoreUnavailable(
            f"local index: {error.sqlite_errorname}; free disk space for the state folder, or raise the index's size"
            " limit"
        ) from error
