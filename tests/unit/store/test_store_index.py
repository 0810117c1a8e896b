"""The index: rows by offset, and groups of one custom_id."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from batchferry.domain.errors import StoreUnavailable
from batchferry.domain.offsets import OffsetSet
from batchferry.ports import IndexRow
from batchferry.store import LocalState, index


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[LocalState]:
    """A local state of the test's own."""
    made = LocalState(tmp_path / "state")
    await made.start()
    yield made
    await made.close()


def _row(offset: int, custom_id: str | None = None, digest: str = "k1") -> IndexRow:
    return IndexRow(offset, custom_id or f"id-{offset}", None, (), offset * 10, offset * 10 + 5, digest)


async def test_a_row_comes_back_as_it_was(state: LocalState) -> None:
    """Any text, key and headers survive: NUL and emoji, empty and absent, repeated and null header values."""
    rows = [
        IndexRow(0, "a\x00b🚢", b"\x00\xff", (("h", b"1"), ("h", b""), ("ü", b"\x00")), -1, 2**62, "k1"),
        IndexRow(7, "", b"", (), 0, 0, "k2"),
        IndexRow(2**40, "x" * 5000, None, (("n", None),), 1, 1, "k1"),
    ]
    await state.put_rows(3, rows)
    assert await state.get_rows(3, [2**40, 0, 7, 5]) == {row.offset: row for row in rows}
    assert await state.get_rows(4, [0]) == {}
    assert await state.get_rows(3, []) == {}


@pytest.mark.parametrize("count", [1, 15, 16, 63, 64, 65, 1000])
async def test_every_size_of_chunk_goes_in_whole(state: LocalState, count: int) -> None:
    """Grouping rows into statements loses none and adds none."""
    rows = [_row(offset) for offset in range(count)]
    await state.put_rows(0, rows)
    assert len(await state.indexed(0, OffsetSet.span(0, 2000))) == count
    assert await state.get_rows(0, range(2000)) == {row.offset: row for row in rows}


async def test_the_later_row_of_an_offset_stays(state: LocalState) -> None:
    """A row put again, in the same call or a later one, replaces the first."""
    await state.put_rows(0, [_row(1, "a"), _row(1, "b")])
    assert (await state.get_rows(0, [1]))[1].custom_id == "b"
    await state.put_rows(0, [_row(1, "c", "k9")])
    assert (await state.get_rows(0, [1]))[1] == _row(1, "c", "k9")


async def test_known_and_dropped(state: LocalState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets with and without gaps, over several statements, find and drop exactly their own rows."""
    monkeypatch.setattr(index, "PIECE_ROWS", 50)
    await state.put_rows(0, [_row(offset) for offset in range(400)])
    await state.put_rows(1, [_row(offset) for offset in range(400)])
    even = OffsetSet(range(0, 600, 2))
    assert await state.indexed(0, even) == OffsetSet(range(0, 400, 2))
    await state.drop_rows(0, even)
    await state.drop_rows(0, OffsetSet.span(100, 260))
    rest = OffsetSet(offset for offset in range(1, 400, 2) if not 100 <= offset < 260)
    assert await state.indexed(0, OffsetSet.span(0, 1000)) == rest
    await state.drop_partition(0)
    assert not await state.indexed(0, OffsetSet.span(0, 1000))
    assert len(await state.indexed(1, OffsetSet.span(0, 1000))) == 400


async def test_groups_of_one_custom_id(state: LocalState) -> None:
    """Only wanted offsets count; groups come by first offset, each ascending; case and spaces matter."""
    ids = {5: "a", 6: "b", 7: "A", 9: "a", 10: "c", 11: "b", 12: "a ", 20: "a", 21: "c"}
    await state.put_rows(0, [_row(offset, custom_id) for offset, custom_id in ids.items()])
    await state.put_rows(1, [_row(1, "a")])
    assert await state.same_custom_ids(0, OffsetSet(range(21))) == [[5, 9, 20], [6, 11]]
    assert await state.same_custom_ids(0, OffsetSet([5, 7, 10, 21])) == [[10, 21]]
    assert await state.same_custom_ids(0, OffsetSet()) == []


async def test_groups_among_fifty_thousand(state: LocalState) -> None:
    """A whole batch with gaps is one question."""
    chosen = sorted(random.Random(7).sample(range(120_000), 50_000))
    rows = [_row(offset, f"id-{place // 2 if place < 100 else place}") for place, offset in enumerate(chosen)]
    for start in range(0, len(rows), 2000):
        await state.put_rows(0, rows[start : start + 2000])
    groups = await state.same_custom_ids(0, OffsetSet(chosen))
    # Places 0..99 pair up; places from 100 on have ids of their own, none of which is below 100.
    assert groups == [chosen[place : place + 2] for place in range(0, 100, 2)]


async def test_callers_do_not_mix(state: LocalState) -> None:
    """Many callers at once, some cancelled: every call that returned stands, and the store goes on."""
    tasks = [
        asyncio.create_task(state.put_rows(part, [_row(offset, digest=f"k{part}") for offset in range(300)]))
        for part in range(20)
    ]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    for part, end in enumerate(ends):
        known = await state.indexed(part, OffsetSet.span(0, 300))
        assert len(known) == 300 if end is None else len(known) in {0, 300}
    await state.put_rows(99, [_row(1, digest="k0")])
    assert (await state.get_rows(99, [1]))[1].key_digest == "k0"


async def test_a_full_index_is_said_and_survived(tmp_path: Path) -> None:
    """At its size limit a chunk is refused whole; after rows were dropped there is room again."""
    state = LocalState(tmp_path / "state", max_index_bytes=400_000)
    await state.start()
    accepted = OffsetSet()

    async def fill() -> None:
        for start in range(0, 100_000, 500):
            await state.put_rows(0, [_row(offset, "secret-id" + "x" * 100) for offset in range(start, start + 500)])
            accepted.update(range(start, start + 500))

    with pytest.raises(StoreUnavailable, match="SQLITE_FULL") as caught:
        await fill()
    assert "secret-id" not in str(caught.value)
    assert 1000 <= len(accepted) < 10_000
    assert await state.indexed(0, OffsetSet.span(0, 100_000)) == accepted
    await state.drop_rows(0, accepted)
    await state.put_rows(0, [_row(offset) for offset in range(500)])
    assert len(await state.indexed(0, OffsetSet.span(0, 100_000))) == 500
    await state.close()
