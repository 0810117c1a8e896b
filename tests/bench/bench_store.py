"""Rates of the local store, per CPU second: ``python tests/bench/bench_store.py [FOLDER]``."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.offsets import OffsetSet
from batchferry.ports import IndexRow
from batchferry.store import LocalState

ROWS = 200_000
CHUNK = 1000
KEY = BatchKey("acct", "/v1/chat/completions", "small", "24h")


@contextmanager
def _rate(what: str, count: int, unit: str = "rows") -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        f"{what:<34}{count / cpu:>12,.0f} {unit}/CPU-s {count / wall:>12,.0f} {unit}/s {cpu / count * 1e6:>7.2f} us each"
    )


async def _index(state: LocalState) -> None:
    headers = (("sla", b"PT30H"), ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
    chunks = {
        partition: [
            [
                IndexRow(offset, f"order-{offset}", b"key-%d" % offset, kept, 1_700_000_000_000 + offset, 1, KEY.digest)
                for offset in range(start, start + CHUNK)
            ]
            for start in range(0, ROWS, CHUNK)
        ]
        for partition, kept in enumerate([(), headers])
    }
    for partition, what in enumerate(["put_rows, no headers", "put_rows, two headers"]):
        with _rate(f"{what}, {CHUNK} a call", ROWS):
            for rows in chunks[partition]:
                await state.put_rows(partition, rows)
    wanted = random.Random(1).sample(range(ROWS), 50_000)
    with _rate("get_rows, 1000 random a call", len(wanted)):
        for start in range(0, len(wanted), 1000):
            await state.get_rows(0, wanted[start : start + 1000])
    some, run = OffsetSet(wanted), OffsetSet.span(0, 50_000)
    for label, offsets in (("scattered", some), ("contiguous", run)):
        with _rate(f"indexed, 50k {label}", 50_000):
            await state.indexed(0, offsets)
        with _rate(f"same_custom_ids, 50k {label}", 50_000):
            await state.same_custom_ids(0, offsets)
        with _rate(f"drop_rows, 50k {label}", 50_000):
            await state.drop_rows(0, offsets)
    with _rate("drop_partition", ROWS):
        await state.drop_partition(1)


async def _spool(state: LocalState, line_bytes: int, rows: int) -> None:
    lines = [(offset, b"x" * (line_bytes - 1) + b"\n") for offset in range(rows)]
    with _rate(f"append, {line_bytes} B a line, 500 a call", rows, "lines"):
        for start in range(0, rows, 500):
            state.append(KEY, 0, lines[start : start + 500])
    ref = await state.close_segment(KEY, 0)
    assert ref is not None
    for label, wanted in (("all", OffsetSet.span(0, rows)), ("every third", OffsetSet(range(0, rows, 3)))):
        with _rate(f"stream, {line_bytes} B a line, {label}", len(wanted), "lines"):
            async for _ in state.stream([ref], {0: wanted}):
                pass
        with _rate(f"line_sizes, {label}", len(wanted), "lines"):
            state.line_sizes([ref], {0: wanted})
    state.delete_segments([ref])


async def _main(folder: Path) -> None:
    state = LocalState(folder)
    await state.start()
    try:
        await _index(state)
        for line_bytes, rows in ((200, 200_000), (4096, 30_000)):
            await _spool(state, line_bytes, rows)
    finally:
        await state.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as root:
        asyncio.run(_main(Path(root) / "state"))
