"""Everything the service takes from chance or from threads, made to follow the seed while a life runs."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from anyio._backends._asyncio import AsyncIOBackend


class InlineCursor:
    """What the store uses of aiosqlite's cursor."""

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self._cursor = cursor

    @property
    def rowcount(self) -> int:
        return self._cursor.rowcount

    @property
    def lastrowid(self) -> int | None:
        return self._cursor.lastrowid

    async def fetchone(self) -> Any:
        return self._cursor.fetchone()

    async def close(self) -> None:
        self._cursor.close()


class InlineConnection:
    """What the store uses of aiosqlite's connection, without its thread."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path)

    async def execute(self, sql: str, values: Iterable[Any] = ()) -> InlineCursor:
        return InlineCursor(self._connection.execute(sql, tuple(values)))

    async def executemany(self, sql: str, values: Iterable[Iterable[Any]]) -> InlineCursor:
        return InlineCursor(self._connection.executemany(sql, values))

    async def executescript(self, sql: str) -> None:
        self._connection.executescript(sql)

    async def execute_fetchall(self, sql: str, values: Iterable[Any] = ()) -> list[Any]:
        return self._connection.execute(sql, tuple(values)).fetchall()

    async def commit(self) -> None:
        self._connection.commit()

    async def rollback(self) -> None:
        self._connection.rollback()

    async def close(self) -> None:
        self._connection.close()


async def _connect(path: Path) -> InlineConnection:
    return InlineConnection(path)


async def _inline(
    func: Callable[..., Any], args: tuple[Any, ...], abandon_on_cancel: bool = False, limiter: Any = None
) -> Any:
    del abandon_on_cancel, limiter
    return func(*args)


@contextmanager
def seeded(rng: random.Random) -> Iterator[None]:
    """Have ids, tokens and jitter come from ``rng``, and file and database work done on the spot."""
    with ExitStack() as stack:
        for target, name, value in (
            (os, "urandom", rng.randbytes),
            (random, "_urandom", rng.randbytes),
            (AsyncIOBackend, "run_sync_in_worker_thread", staticmethod(_inline)),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(
            patch("batchferry.store.database.aiosqlite", SimpleNamespace(connect=_connect, Connection=InlineConnection))
        )
        drawn = SimpleNamespace(Random=lambda seed=None: random.Random(rng.random() if seed is None else seed))
        stack.enter_context(patch("batchferry.engine.scheduler.random", drawn))
        yield
