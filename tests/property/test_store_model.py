"""The store against dictionaries: any order of acts, the same answers."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import StoreUnavailable
from batchferry.domain.offsets import OffsetSet
from batchferry.ports import IndexRow, SpoolRef
from batchferry.store import LocalState, spool

KEYS = [BatchKey("a", "/v1/embeddings", model, "24h") for model in ("m1", "m2")]
PARTITIONS = (0, 1)
MAX_OFFSET = 60

_places = st.tuples(st.sampled_from(KEYS), st.sampled_from(PARTITIONS))
_offset_sets = st.sets(st.integers(0, MAX_OFFSET), max_size=30)
_bodies = st.binary(max_size=40).map(lambda body: body.replace(b"\n", b" ") + b"\n")

_spool_acts = st.one_of(
    st.tuples(st.just("append"), _places, st.dictionaries(st.integers(0, MAX_OFFSET), _bodies, max_size=12)),
    st.tuples(st.just("seal"), _places, st.none()),
    st.tuples(st.just("delete"), st.integers(0, 20), st.none()),
    st.tuples(st.just("drop"), st.sampled_from(PARTITIONS), st.none()),
    st.tuples(st.just("stream"), _offset_sets, _offset_sets),
    st.tuples(st.just("read"), st.sampled_from(PARTITIONS), _offset_sets),
)


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers and reads of a few lines, so that every boundary is met."""
    for name, size in {"SEGMENT_PENDING_BYTES": 64, "READ_BYTES": 100, "MIN_READ_BYTES": 40, "CHUNK_BYTES": 80}.items():
        monkeypatch.setattr(spool, name, size)
    monkeypatch.setattr(spool, "CHUNK_LINES", 4)


class _SpoolModel:
    """Segments as dictionaries: open ones by place, sealed ones by reference."""

    def __init__(self) -> None:
        self.open: dict[tuple[BatchKey, int], dict[int, bytes]] = {}
        self.sealed: dict[SpoolRef, dict[int, bytes]] = {}
        self.births: dict[tuple[BatchKey, int], int] = {}
        self.born = 0

    def newest_first(self, partition: int) -> list[dict[int, bytes]]:
        segments = [(self.births[place], rows) for place, rows in self.open.items() if place[1] == partition]
        segments += [(ref.number, rows) for ref, rows in self.sealed.items() if ref.partition == partition]
        return [rows for _, rows in sorted(segments, key=lambda each: -each[0])]

    @property
    def size(self) -> int:
        return sum(len(line) for rows in (*self.open.values(), *self.sealed.values()) for line in rows.values())


def _union(newest_first: list[dict[int, bytes]], offsets: set[int]) -> list[tuple[int, bytes]]:
    found: dict[int, bytes] = {}
    for rows in newest_first:
        found = {**{offset: line for offset, line in rows.items() if offset in offsets}, **found}
    return sorted(found.items())


async def _play_spool(acts: list[tuple[str, object, object]], folder: Path) -> None:
    state = LocalState(folder, max_pending_bytes=150, max_spool_bytes=2500)
    await state.start()
    model = _SpoolModel()
    try:
        for name, first, second in acts:
            match name, first, second:
                case "append", (BatchKey(), int()) as place, dict() as rows:
                    lines = sorted(rows.items())
                    last = max(model.open.get(place, {-1: b""}))
                    if lines and lines[0][0] <= last:
                        with pytest.raises(ValueError, match="cannot be spooled"):
                            state.append(*place, lines)
                    elif model.size + sum(len(line) for _, line in lines) > 2500:
                        with pytest.raises(StoreUnavailable):
                            state.append(*place, lines)
                    elif lines:
                        state.append(*place, lines)
                        if place not in model.open:
                            model.born += 1
                            model.births[place] = model.born
                        model.open.setdefault(place, {}).update(rows)
                case "seal", (BatchKey(), int()) as place, None:
                    ref = await state.close_segment(*place)
                    rows = model.open.pop(place, {})
                    assert (ref is None) == (not rows)
                    if ref is not None:
                        model.sealed[ref] = rows
                case "delete", int() as index, None:
                    gone = list(model.sealed)[index : index + 1]
                    state.delete_segments(gone)
                    for ref in gone:
                        del model.sealed[ref]
                case "drop", int() as partition, None:
                    await state.drop_partition(partition)
                    model.open = {place: rows for place, rows in model.open.items() if place[1] != partition}
                    model.sealed = {ref: rows for ref, rows in model.sealed.items() if ref.partition != partition}
                case "stream", set() as one, set() as other:
                    asked = {0: one, 1: other}
                    wanted = {partition: OffsetSet(offsets) for partition, offsets in asked.items()}
                    got: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
                    order = []
                    async for chunk in state.stream(list(model.sealed), wanted):
                        assert 1 <= len(chunk) <= 4
                        assert len(chunk) == 1 or sum(len(line) for _, _, line in chunk) <= 80
                        for partition, offset, line in chunk:
                            got[partition].append((offset, line))
                            order.append((partition, offset))
                    assert order == sorted(set(order))
                    for partition, offsets in asked.items():
                        newest_first = [
                            rows
                            for ref, rows in sorted(model.sealed.items(), key=lambda each: -each[0].number)
                            if ref.partition == partition
                        ]
                        assert got[partition] == _union(newest_first, offsets)
                    assert state.line_sizes(list(model.sealed), wanted) == {
                        partition: sum(len(line) for _, line in got[partition]) for partition in asked
                    }
                case "read", int() as partition, set() as offsets:
                    expected = _union(model.newest_first(partition), offsets)
                    assert list(state.spooled(partition, OffsetSet(offsets))) == [offset for offset, _ in expected]
                    rows_read = [
                        row async for chunk in state.read_spooled(partition, OffsetSet(offsets)) for row in chunk
                    ]
                    assert rows_read == expected
                case _:
                    raise AssertionError(name)
            assert state.spooled_bytes == model.size
        files = {path.name for path in (folder / "spool").iterdir()}
        assert len(files) <= len(model.open) + len(model.sealed)
    finally:
        await state.close()


@given(st.lists(_spool_acts, max_size=40))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_spool_is_a_dictionary(acts: list[tuple[str, object, object]]) -> None:
    """Appends, seals, deletions, drops and readings in any order agree with dictionaries of lines."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_play_spool(acts, Path(folder)))


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_rows = st.builds(
    IndexRow,
    offset=st.integers(0, MAX_OFFSET),
    custom_id=st.one_of(st.sampled_from(["a", "b", "A", "a\x00"]), _texts),
    key=st.none() | st.binary(max_size=8),
    headers=st.lists(st.tuples(_texts, st.binary(max_size=8)), max_size=3).map(tuple),
    t0_ms=st.integers(-(2**63), 2**63 - 1),
    deadline_ms=st.integers(-(2**63), 2**63 - 1),
    key_digest=st.sampled_from(["k1", "k2", "k3"]),
    masked=st.integers(0, 2**31),
)
_index_acts = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(PARTITIONS), st.lists(_rows, max_size=40)),
    st.tuples(st.just("drop"), st.sampled_from(PARTITIONS), _offset_sets),
    st.tuples(st.just("forget"), st.sampled_from(PARTITIONS), st.none()),
    st.tuples(st.just("ask"), st.sampled_from(PARTITIONS), _offset_sets),
)


async def _play_index(acts: list[tuple[str, int, object]], folder: Path) -> None:
    state = LocalState(folder)
    await state.start()
    model: dict[int, dict[int, IndexRow]] = {partition: {} for partition in PARTITIONS}
    try:
        for name, partition, what in acts:
            rows = model[partition]
            match name, what:
                case "put", list():
                    await state.put_rows(partition, what)
                    rows.update({row.offset: row for row in what})
                case "drop", set():
                    await state.drop_rows(partition, OffsetSet(what))
                    for offset in what:
                        rows.pop(offset, None)
                case "forget", None:
                    await state.drop_partition(partition)
                    rows.clear()
                case "ask", set():
                    there = {offset: row for offset, row in rows.items() if offset in what}
                    assert await state.get_rows(partition, sorted(what, reverse=True)) == there
                    assert await state.indexed(partition, OffsetSet(what)) == OffsetSet(there)
                    groups: dict[str, list[int]] = defaultdict(list)
                    for offset in sorted(there):
                        groups[there[offset].custom_id].append(offset)
                    assert await state.same_custom_ids(partition, OffsetSet(what)) == sorted(
                        group for group in groups.values() if len(group) > 1
                    )
                case _:
                    raise AssertionError(name)
        for partition, rows in model.items():
            assert await state.get_rows(partition, range(MAX_OFFSET + 1)) == rows
    finally:
        await state.close()


@given(st.lists(_index_acts, max_size=25))
@settings(max_examples=60, deadline=None)
def test_the_index_is_a_dictionary(acts: list[tuple[str, int, object]]) -> None:
    """Rows put, dropped, forgotten and asked for in any order agree with a dictionary of rows."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_play_index(acts, Path(folder)))
