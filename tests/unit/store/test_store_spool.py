"""Spool segments: appended, sealed, streamed, deleted, and what a full disk does to them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import PartitionLost, StoreUnavailable
from batchferry.domain.offsets import OffsetSet
from batchferry.ports import SpoolRef
from batchferry.store import LocalState, spool

KEY = BatchKey("acct", "/v1/chat/completions", "small", "24h")
OTHER = BatchKey("acct", "/v1/chat/completions", "large", "24h")
ALL = OffsetSet.span(0, 10_000_000)


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[LocalState]:
    """A local state of the test's own."""
    made = LocalState(tmp_path / "state")
    await made.start()
    yield made
    await made.close()


def _line(offset: int, size: int = 20) -> bytes:
    return (b'"%d' % offset).ljust(size - 2, b".") + b'"\n'


def _lines(*offsets: int, size: int = 20) -> list[tuple[int, bytes]]:
    return [(offset, _line(offset, size)) for offset in offsets]


async def _sealed(state: LocalState, partition: int, *offsets: int, size: int = 20) -> SpoolRef:
    state.append(KEY, partition, _lines(*offsets, size=size))
    ref = await state.close_segment(KEY, partition)
    assert ref is not None
    return ref


async def _read(
    state: LocalState, refs: Sequence[SpoolRef], wanted: Mapping[int, OffsetSet]
) -> list[tuple[int, int, bytes]]:
    return [line async for chunk in state.stream(refs, wanted) for line in chunk]


async def test_lines_come_back_in_order(state: LocalState) -> None:
    """By partition, then offset, each byte as given; a second reading is the same."""
    refs = [await _sealed(state, 1, 4, 9), await _sealed(state, 0, 7), await _sealed(state, 1, 20)]
    expected = [(0, *line) for line in _lines(7)] + [(1, *line) for line in _lines(4, 9, 20)]
    for _ in range(2):
        assert await _read(state, refs, {0: ALL, 1: ALL}) == expected


async def test_any_bytes_are_a_line(state: LocalState) -> None:
    """NUL, carriage return, U+2028, broken UTF-8 and an empty line: only the line feed ends a line."""
    lines = [(1, b"\x00\n"), (2, b"\r\n"), (3, "\u2028\n".encode()), (4, b"\xff\xfe\n"), (5, b"\n")]
    state.append(KEY, 0, lines)
    ref = await state.close_segment(KEY, 0)
    assert ref is not None
    assert await _read(state, [ref], {0: ALL}) == [(0, *line) for line in lines]


async def test_segments_of_one_partition_merge_by_offset(state: LocalState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retried rows that stand in another segment take their place in the file, over many reads."""
    monkeypatch.setattr(spool, "READ_BYTES", 100)
    monkeypatch.setattr(spool, "MIN_READ_BYTES", 50)
    refs = [
        await _sealed(state, 0, *range(100, 200, 2)),
        await _sealed(state, 0, 1, 2, 3, 121, 123, 400),
        await _sealed(state, 0, *range(300, 320)),
    ]
    expected = sorted([*range(100, 200, 2), 1, 2, 3, 121, 123, 400, *range(300, 320)])
    assert await _read(state, refs[::-1], {0: ALL}) == [(0, offset, _line(offset)) for offset in expected]


async def test_an_offset_in_two_segments_comes_once(state: LocalState) -> None:
    """The newest line of an offset stands, in the stream and in the sizes."""
    old = await _sealed(state, 0, 1, 2, 3, size=30)
    new = await _sealed(state, 0, 2, size=50)
    assert await _read(state, [new, old, old], {0: ALL}) == [
        (0, 1, _line(1, 30)),
        (0, 2, _line(2, 50)),
        (0, 3, _line(3, 30)),
    ]
    assert state.line_sizes([old, new, new], {0: ALL}) == {0: 110}
    assert await _read(state, [old], {0: OffsetSet([2])}) == [(0, 2, _line(2, 30))]


async def test_only_wanted_lines_come(state: LocalState) -> None:
    """Unwanted offsets are skipped, unwanted partitions passed over, and the sizes agree with the stream."""
    refs = [await _sealed(state, 0, *range(3000)), await _sealed(state, 1, 5), await _sealed(state, 2, 6)]
    wanted = {0: OffsetSet([0, 7, 2999, 5000]), 2: OffsetSet([6]), 8: OffsetSet([1])}
    got = await _read(state, refs, wanted)
    assert [(partition, offset) for partition, offset, _ in got] == [(0, 0), (0, 7), (0, 2999), (2, 6)]
    assert state.line_sizes(refs, wanted) == {0: 60, 2: 20, 8: 0}
    most = {0: OffsetSet(range(1, 3000))}
    assert state.line_sizes(refs, most) == {0: 2999 * 20}


async def test_chunks_are_bounded(state: LocalState) -> None:
    """No chunk has more than 500 lines or 256 KiB, unless one line alone is longer."""
    state.append(KEY, 0, _lines(*range(1200)))
    state.append(KEY, 0, _lines(*range(2000, 2010), size=100_000))
    state.append(KEY, 0, _lines(3000, size=3_000_000))
    state.append(KEY, 0, _lines(3001))
    ref = await state.close_segment(KEY, 0)
    assert ref is not None
    chunks = [chunk async for chunk in state.stream([ref], {0: ALL})]
    for chunk in chunks:
        assert len(chunk) <= 500
        assert sum(len(line) for _, _, line in chunk) <= 256 * 1024 or len(chunk) == 1
    assert sum(len(chunk) for chunk in chunks) == 1200 + 10 + 2


async def test_a_reading_may_be_left(state: LocalState) -> None:
    """A stream that is given up half way harms neither the next one nor the segment."""
    ref = await _sealed(state, 0, *range(2000))
    stream = state.stream([ref], {0: ALL})
    assert len(await anext(stream)) == 500
    await stream.aclose()  # type: ignore[attr-defined]
    assert len(await _read(state, [ref], {0: ALL})) == 2000


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (_lines(5), "offset 5 cannot be spooled behind offset 5"),
        (_lines(6, 8, 7), "offset 7 cannot be spooled behind offset 8"),
        ([*_lines(6), (7, b"no end")], "offset 7 is not one line"),
        ([*_lines(6), (7, b"two\nlines\n")], "offset 7 is not one line"),
        ([(7, b"")], "offset 7 is not one line"),
    ],
)
async def test_a_wrong_append_adds_nothing(state: LocalState, lines: list[tuple[int, bytes]], complaint: str) -> None:
    """Offsets that do not ascend and lines that are not one line are our bug: none of the call is taken."""
    state.append(KEY, 0, _lines(5))
    with pytest.raises(ValueError, match=complaint) as caught:
        state.append(KEY, 0, lines)
    assert "two" not in str(caught.value)
    assert state.spooled_bytes == 20
    state.append(KEY, 0, _lines(6))
    ref = await state.close_segment(KEY, 0)
    assert ref is not None
    assert [offset for _, offset, _ in await _read(state, [ref], {0: ALL})] == [5, 6]


async def test_nothing_makes_no_segment(state: LocalState) -> None:
    """An empty append opens nothing, and closing what is not open gives None."""
    state.append(KEY, 0, [])
    assert await state.close_segment(KEY, 0) is None
    await _sealed(state, 0, 1)
    assert await state.close_segment(KEY, 0) is None


async def test_keys_and_partitions_have_their_own_segments(state: LocalState, tmp_path: Path) -> None:
    """One open segment for each key and partition; a new one after sealing; numbers never repeat."""
    state.append(KEY, 0, _lines(1))
    state.append(OTHER, 0, _lines(2))
    state.append(KEY, 1, _lines(3))
    refs = [await state.close_segment(*place) for place in ((KEY, 0), (OTHER, 0), (KEY, 1))]
    state.append(KEY, 0, _lines(1))
    refs.append(await state.close_segment(KEY, 0))
    assert [(ref.key_digest, ref.partition) for ref in refs if ref] == [
        (KEY.digest, 0),
        (OTHER.digest, 0),
        (KEY.digest, 1),
        (KEY.digest, 0),
    ]
    assert len({ref.number for ref in refs if ref}) == 4
    assert len(list((tmp_path / "state" / "spool").iterdir())) == 4


async def test_deleted_is_gone(state: LocalState, tmp_path: Path) -> None:
    """Deletion frees bytes and disk, twice is once; whoever still wants the segment hears that it is gone."""
    ref, kept = await _sealed(state, 0, 1, 2), await _sealed(state, 1, 3)
    state.delete_segments([ref, ref])
    state.delete_segments([ref])
    assert state.spooled_bytes == 20
    assert len(list((tmp_path / "state" / "spool").iterdir())) == 1
    with pytest.raises(PartitionLost):
        await _read(state, [ref, kept], {0: ALL, 1: ALL})
    with pytest.raises(PartitionLost):
        state.line_sizes([ref], {0: ALL})
    assert len(await _read(state, [ref, kept], {1: ALL})) == 1


async def test_deleted_while_read(state: LocalState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch file whose partition goes half way does not end as if it were whole."""
    monkeypatch.setattr(spool, "READ_BYTES", 20_000)
    monkeypatch.setattr(spool, "MIN_READ_BYTES", 20_000)
    ref = await _sealed(state, 0, *range(5000))
    stream = state.stream([ref], {0: ALL})
    await anext(stream)
    await state.drop_partition(0)
    with pytest.raises(PartitionLost, match="went while it was read"):
        async for _ in stream:
            pass


async def test_dropped_partition(state: LocalState) -> None:
    """Open and sealed segments of the partition go, with their bytes; the others stay, and it may come back."""
    ref, kept = await _sealed(state, 0, 1, 2), await _sealed(state, 1, 3)
    state.append(KEY, 0, _lines(9))
    state.append(KEY, 1, _lines(9))
    await state.drop_partition(0)
    assert state.spooled_bytes == 40
    assert await state.close_segment(KEY, 0) is None
    state.append(KEY, 0, _lines(1))
    again = await state.close_segment(KEY, 0)
    assert again is not None
    assert again != ref
    assert len(await _read(state, [again, kept], {0: ALL, 1: ALL})) == 2


async def test_rows_by_offset(state: LocalState) -> None:
    """Rows are read from any segment, open ones too; what no segment has is absent."""
    await _sealed(state, 0, 1, 5, 9)
    state.append(OTHER, 0, _lines(2, 6))
    await _sealed(state, 1, 3)
    asked = OffsetSet([1, 2, 3, 6, 9, 10])
    assert state.spooled(0, asked) == OffsetSet([1, 2, 6, 9])
    got = [line async for chunk in state.read_spooled(0, asked) for line in chunk]
    assert got == _lines(1, 2, 6, 9)
    state.append(OTHER, 0, _lines(7))
    assert state.spooled(0, OffsetSet([7])) == OffsetSet([7])
    assert [chunk async for chunk in state.read_spooled(5, asked)] == []


async def test_rows_by_offset_while_deleted(state: LocalState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading rows by offset ends quietly when their segment goes: the input topic has them."""
    monkeypatch.setattr(spool, "READ_BYTES", 20_000)
    monkeypatch.setattr(spool, "MIN_READ_BYTES", 20_000)
    ref = await _sealed(state, 0, *range(3000))
    kept = await _sealed(state, 0, 5000)
    rows = state.read_spooled(0, ALL)
    first = [offset for offset, _ in await anext(rows)]
    state.delete_segments([ref])
    later = [offset async for chunk in rows for offset, _ in chunk]
    assert [*first, *later] == [*range(len(first) + len(later) - 1), 5000]
    assert kept.number != ref.number


async def test_buffers_are_bounded(tmp_path: Path) -> None:
    """However many segments are open, no more than the allowance and one call's lines wait in memory."""
    state = LocalState(tmp_path / "state", max_pending_bytes=50_000)
    await state.start()
    on_disk = tmp_path / "state" / "spool"
    for offset in range(20):
        for partition in range(20):
            state.append(KEY, partition, _lines(offset, size=1000))
            written = sum(path.stat().st_size for path in on_disk.iterdir())
            assert state.spooled_bytes - written <= 50_000 + 1000
    assert state.spooled_bytes == 400_000
    refs = [ref for partition in range(20) if (ref := await state.close_segment(KEY, partition))]
    assert len(await _read(state, refs, dict.fromkeys(range(20), ALL))) == 400
    await state.close()


async def test_a_write_cut_short_goes_on(state: LocalState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that takes only a part of the lines, as after a signal, is followed by the rest."""
    whole = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, position: whole(fd, [b"".join(parts)[:1001]], position))
    state.append(KEY, 0, _lines(*range(3000), size=200))
    ref = await state.close_segment(KEY, 0)
    assert ref is not None
    assert await _read(state, [ref], {0: ALL}) == [(0, *line) for line in _lines(*range(3000), size=200)]


async def test_a_limit_refuses_whole_calls(tmp_path: Path) -> None:
    """At the spool's limit an append is refused and adds nothing; once segments have gone it is taken."""
    state = LocalState(tmp_path / "state", max_spool_bytes=100)
    await state.start()
    assert state.spool_limit_bytes == 100
    ref = await _sealed(state, 0, 1, 2, 3, 4)
    state.append(KEY, 0, _lines(5))
    with pytest.raises(StoreUnavailable, match="at most 100 bytes"):
        state.append(KEY, 0, _lines(6))
    state.delete_segments([ref])
    state.append(KEY, 0, _lines(6))
    assert state.spooled_bytes == 40
    await state.close()


class _NearlyFull:
    """A disk that takes so many more bytes."""

    def __init__(self, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = room
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "pwritev", self.pwritev)

    def pwritev(self, fd: int, parts: Sequence[bytes], position: int) -> int:
        return self.pwrite(fd, b"".join(parts), position)

    def pwrite(self, fd: int, data: bytes | memoryview, position: int) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._pwrite(fd, bytes(data)[: self.room], position)
        self.room -= written
        return written


@pytest.mark.parametrize("can_truncate", [True, False])
async def test_a_full_disk_leaves_no_half_line(
    state: LocalState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_truncate: bool
) -> None:
    """A write cut short adds nothing; the same call succeeds when there is room; the file is right."""
    state.append(KEY, 0, _lines(*range(3), size=100_000))
    (path,) = (tmp_path / "state" / "spool").iterdir()
    before = path.stat().st_size
    disk = _NearlyFull(150_001, monkeypatch)
    if not can_truncate:

        def refuse(fd: int, length: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "ftruncate", refuse)
    more = _lines(*range(3, 6), size=100_000)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="free disk space"):
            state.append(KEY, 0, more)
    assert state.spooled_bytes == 300_000
    if can_truncate:
        assert path.stat().st_size == before
    with_room = _lines(3)
    state.append(KEY, 0, with_room)  # below the size at which a buffer is written
    with pytest.raises(StoreUnavailable):
        await state.close_segment(KEY, 0)
    disk.room = 10**9
    state.append(KEY, 0, _lines(*range(4, 7), size=100_000))
    ref = await state.close_segment(KEY, 0)
    assert ref is not None
    assert await _read(state, [ref], {0: ALL}) == [
        (0, *line) for line in [*_lines(0, 1, 2, size=100_000), *with_room, *_lines(4, 5, 6, size=100_000)]
    ]
    assert state.line_sizes([ref], {0: ALL}) == {0: state.spooled_bytes} == {0: 600_020}


async def test_a_segment_that_never_began(state: LocalState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first write of a new segment fails, neither the books nor the disk know of it."""
    _NearlyFull(10, monkeypatch)
    with pytest.raises(StoreUnavailable):
        state.append(KEY, 0, _lines(1, size=300_000))
    assert state.spooled_bytes == 0
    assert list((tmp_path / "state" / "spool").iterdir()) == []
    assert await state.close_segment(KEY, 0) is None


async def test_trouble_of_other_segments_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When room must be made by writing other segments and that fails, the call may be made again."""
    state = LocalState(tmp_path / "state", max_pending_bytes=1000)
    await state.start()
    state.append(KEY, 0, _lines(1, size=900))
    disk = _NearlyFull(10, monkeypatch)
    with pytest.raises(StoreUnavailable):
        state.append(KEY, 1, _lines(1, size=900))
    assert state.spooled_bytes == 900
    disk.room = 10_000
    state.append(KEY, 1, _lines(1, size=900))
    assert state.spooled_bytes == 1800
    await state.close()


async def test_a_file_cut_by_somebody_is_noticed(state: LocalState, tmp_path: Path) -> None:
    """A segment file shorter than its books is trouble, never a short batch file."""
    ref = await _sealed(state, 0, 1, 2)
    (path,) = (tmp_path / "state" / "spool").iterdir()
    os.truncate(path, 30)
    with pytest.raises(StoreUnavailable, match="shorter"):
        await _read(state, [ref], {0: ALL})


def test_the_kernel_refuses_more(tmp_path: Path) -> None:
    """Against a real limit on file sizes: the refused call adds nothing and the segment reads whole."""
    program = textwrap.dedent(
        """
        import asyncio, resource, sys
        from pathlib import Path
        from batchferry.domain.batchkey import BatchKey
        from batchferry.domain.errors import StoreUnavailable
        from batchferry.domain.offsets import OffsetSet
        from batchferry.store import LocalState

        async def main():
            state = LocalState(Path(sys.argv[1]))
            await state.start()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
            key = BatchKey("a", "/v1/embeddings", "m", "24h")
            taken, refused = 0, 0
            for offset in range(0, 40, 4):
                try:
                    state.append(key, 0, [(each, b"x" * 70_000 + b"\\n") for each in range(offset, offset + 4)])
                    taken += 4
                except StoreUnavailable:
                    refused += 1
            ref = await state.close_segment(key, 0)
            lines = [line async for chunk in state.stream([ref], {0: OffsetSet.span(0, 100)}) for line in chunk]
            assert len(lines) == taken and all(len(line) == 70_001 for _, _, line in lines), lines
            assert state.spooled_bytes == taken * 70_001
            print(taken, refused)
            await state.close()

        asyncio.run(main())
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["12", "7"]


async def test_a_million_rows_are_cheap(tmp_path: Path) -> None:
    """A million waiting rows cost less than 20 MB of memory: 20 bytes a row, what is asked about them included."""
    state = LocalState(tmp_path / "state")
    await state.start()
    tracemalloc.start()
    try:
        for start in range(0, 100_000, 5000):
            state.append(KEY, 0, [(offset, b"{}\n") for offset in range(start, start + 5000)])
        ref = await state.close_segment(KEY, 0)
        assert ref is not None
        assert len(state.spooled(0, ALL)) == 100_000
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()
    await state.close()


async def test_an_append_is_quick(state: LocalState) -> None:
    """An append costs microseconds a line; the bound is loose, as other work shares the machine."""
    lines = _lines(*range(20_000), size=1000)
    before = time.process_time()
    for start in range(0, 20_000, 500):
        state.append(KEY, 0, lines[start : start + 500])
    assert (time.process_time() - before) / 20_000 < 20e-6
